"""Programs for other runtimes: exported at one length, they give the values of others."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import isentropic as it  # noqa: E402
from isentropic import laws, masks  # noqa: E402

LAW = laws.LogLength(16)
SLIDING = masks.causal() & masks.window(5)
CALLS = {
    "attention": lambda q, k, v: it.attention(q, k, v, law=LAW),
    "causal": lambda q, k, v: it.attention(q, k, v, is_causal=True, law=LAW),
    "window": lambda q, k, v: it.attention(q, k, v, mask=SLIDING, law=LAW),
    "padding": lambda q, k, v: it.attention(q, k, v, mask=masks.padding(4), law=LAW),
    "entropy": lambda q, k, v: it.attention_entropy(q, k, is_causal=True, law=LAW),
    "state": lambda q, k, v: it.attention_state(q, k, v, mask=SLIDING, law=LAW).output(),
    "divergence": lambda q, k, v: it.AttentionDistribution(q, k, is_causal=True).kl_divergence(
        it.AttentionDistribution(q, v, is_causal=True)
    ),
}


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k, v):
        return self.call(q, k, v)


def exported(call):
    """A program of three tensors (2, 4, n, 8), for n from 2 to 4096."""
    arrays = tuple(torch.randn(2, 4, 12, 8) for _ in range(3))
    n = torch.export.Dim("n", min=2, max=4096)
    return torch.export.export(Module(call), arrays, dynamic_shapes={name: {2: n} for name in "qkv"})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("causal", "entropy") else pytest.mark.nightly)
        for name in CALLS
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime(name):
    runtime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(exported(CALLS[name]), dynamo=True, verbose=False, optimize=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    names = [x.name for x in session.get_inputs()]
    for n in (12, 5, 37, 200):
        arrays = [torch.randn(2, 4, n, 8) for _ in range(3)]
        feed = {name: x.numpy() for name, x in zip("qkv", arrays, strict=True) if name in names}
        (got,) = session.run(None, feed)
        np.testing.assert_allclose(got, CALLS[name](*arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly  # half a minute in a compiler of C++
@pytest.mark.filterwarnings("ignore")
def test_ahead_of_time_compiler_of_pytorch(tmp_path):
    def call(q, k, v):
        return CALLS["causal"](q, k, v), CALLS["entropy"](q, k, v), CALLS["state"](q, k, v)

    path = torch._inductor.aoti_compile_and_package(
        exported(call), package_path=str(tmp_path / "model.pt2")
    )
    loaded = torch._inductor.aoti_load_package(path)
    for n in (12, 5, 300):
        arrays = [torch.randn(2, 4, n, 8) for _ in range(3)]
        for got, expected in zip(loaded(*arrays), call(*arrays), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
