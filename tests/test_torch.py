"""PyTorch transformations: autograd, compile, vmap; fake CUDA tensors and tensors without data."""

import math
import pickle
import shutil
import subprocess
import sys

import capabilities
import cases
import numpy as np
import pytest

import isentropic as it
from isentropic import laws, masks

torch = pytest.importorskip("torch")

from isentropic.integrations.torch import LawModule, MultiheadAttention  # noqa: E402
from isentropic.laws._formulas import StepLog  # noqa: E402

ARRAYS = cases.inputs()


def _every(column):
    """Every call that `capabilities` says to run so."""
    return pytest.mark.parametrize("name", capabilities.that_run(column, cases.CASES))


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


@pytest.fixture
def compile_():
    """torch.compile of everything into one graph, which counts the graphs it makes."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def make(function, backend="aot_eager", **options):
        torch.compiler.reset()
        counter = CompileCounterWithBackend(backend)
        return torch.compile(function, fullgraph=True, backend=counter, **options), counter

    yield make
    torch.compiler.reset()


def _tensors(dtype="float32", device="cpu"):
    return {name: torch.asarray(x, device=device) for name, x in cases.inputs(dtype).items()}


class _IndexByOperators(torch.overrides.TorchFunctionMode):
    """Brackets on a fake CUDA tensor ask for the driver, which a CPU build lacks; operators do not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.__getitem__:
            return function(*args, **(kwargs or {}))
        x, keys = args
        keys = keys if isinstance(keys, tuple) else (keys,)
        axis = 0
        for i, key in enumerate(keys):
            if key is Ellipsis:
                axis = x.ndim - sum(k is not None for k in keys[i + 1 :])
            elif key is None:
                x = torch.unsqueeze(x, axis)
            elif isinstance(key, int):
                x = torch.select(x, axis, key)
                continue
            else:
                stop = x.shape[axis] if key.stop is None else key.stop
                x = torch.ops.aten.slice(x, axis, key.start or 0, stop, key.step or 1)
            axis += key is not Ellipsis
        return x


class TestEveryFunction:
    @_every("compile")
    def test_compile(self, name, compile_):
        case, arrays = cases.CASES[name], _tensors()
        # Their 28 steps are one long graph, which aot_eager takes 20 s to trace once more.
        is_long = name.startswith("factor_for")
        compiled, _ = compile_(case, backend="eager" if is_long else "aot_eager")
        result, expected = compiled(arrays), case(arrays)
        assert type(result) is type(expected)
        for got, want in zip(cases.leaves(result), cases.leaves(expected), strict=True):
            torch.testing.assert_close(got, want)

    @_every("gradient")
    def test_gradient(self, name, tiny_tiles):
        case, arrays = cases.CASES[name], _tensors("float64")
        if "p" in arrays:  # the entropy of p has a one-sided derivative at p = 0
            arrays["p"] = arrays["p"] * 0.9 + 0.01
        names = sorted(cases.names_read(case) - cases.DISCRETE)

        def function(*values):
            result = cases.leaves(case(arrays | dict(zip(names, values, strict=True))))
            return tuple(torch.where(torch.isfinite(x), x, 0.0) for x in result)

        leaves = [arrays[name].requires_grad_() for name in names]
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)

    @_every("gpu")
    def test_fake_cuda(self, name):
        # Runs without a GPU: finds devices that are mixed, and values that are asked for.
        if torch.version.cuda and not torch.cuda.is_available():
            pytest.skip("this build asks a driver, which is missing")
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(), _IndexByOperators():
            arrays = {
                name: torch.empty(x.shape, dtype=torch.asarray(x).dtype, device="cuda")
                for name, x in ARRAYS.items()
            }
            for x in cases.leaves(cases.CASES[name](arrays)):
                assert x.device.type == "cuda"

    @_every("libraries")
    def test_meta(self, name):
        arrays = _tensors(device="meta")
        expected = cases.leaves(cases.CASES[name](_tensors()))
        for x, want in zip(cases.leaves(cases.CASES[name](arrays)), expected, strict=True):
            assert x.device.type == "meta"
            assert (x.shape, x.dtype) == (want.shape, want.dtype)


# A call of each function that computes products.
WITH_PRODUCTS = [
    "attention-all", "attention_state-sinks", "attention_entropy", "AttentionDistribution.weights-sinks",
    "AttentionDistribution.statistics-all", "AttentionDistribution.received", "AttentionDistribution.information", "multi_head_attention",
    "additive_attention", "DenseProjection-axis", "HadamardProjection", "Rotation-fold_into",
    "hadamard_transform", "linear_attention-features", "linear_attention-causal", "linear_attention_error",
    "AttentionDistribution.factor_for_entropy",
]  # fmt: skip


class TestAutocast:
    """It rounds the operands of PyTorch's products to half precision, but not those of this package."""

    @staticmethod
    def _arrays(is_recorded):
        arrays = _tensors()
        arrays["p"] = arrays["p"] * 0.9 + 0.01  # the derivative at p = 0 is one-sided
        for name in arrays.keys() - cases.DISCRETE:
            arrays[name].requires_grad_(is_recorded)
        return arrays

    @staticmethod
    def _tensors_in(result):
        if isinstance(result, dict):
            result = tuple(result.values())
        if isinstance(result, (list, tuple)):
            return [x for part in result for x in TestAutocast._tensors_in(part)]
        return [result] if isinstance(result, torch.Tensor) else []

    @classmethod
    def _gradients(cls, found, arrays):
        loss = sum(
            (torch.where(x.isfinite(), x, 0.0).double().sin().sum() for x in found if x.requires_grad),
            torch.zeros((), requires_grad=True),
        )
        leaves = [x for x in arrays.values() if x.requires_grad]
        found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        return [x for x in found if x is not None]

    @pytest.mark.filterwarnings("ignore:A query sees more keys than the last of the `lengths`")
    @pytest.mark.parametrize("is_recorded", [False, True])
    @pytest.mark.parametrize("name", capabilities.that_run("libraries", cases.CASES | cases.TRIED))
    def test_results(self, name, is_recorded):
        if is_recorded and capabilities.row_of(name).gradient.runs is False:
            pytest.skip("reads the numbers on the host")
        call, arrays = (cases.CASES | cases.TRIED)[name], self._arrays(is_recorded)
        expected = self._tensors_in(call(arrays))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = self._tensors_in(call(arrays))
            gradients = self._gradients(found, arrays) if is_recorded else []
        torch.testing.assert_close(found, expected, equal_nan=True)
        if is_recorded:
            want = self._gradients(expected, arrays)
            # The engine itself may cast what it adds up, if a backward pass runs under autocast.
            for some in (gradients, self._gradients(found, arrays)):
                torch.testing.assert_close(some, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", WITH_PRODUCTS)
    @pytest.mark.parametrize("is_inside", [False, True])
    def test_compiled(self, name, is_inside, compile_):
        """PyTorch compiles the backward pass with the autocast of the forward pass."""
        call, arrays = cases.CASES[name], self._arrays(True)

        def under_autocast(arrays):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(arrays)

        expected = self._tensors_in(call(arrays))
        backend = "eager" if name.startswith("factor_for") else "aot_eager"
        if is_inside:
            found = self._tensors_in(compile_(under_autocast, backend)[0](arrays))
        else:
            compiled = compile_(call, backend)[0]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = self._tensors_in(compiled(arrays))
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
        got, want = self._gradients(found, arrays), self._gradients(expected, arrays)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("is_compiled", [False, True])
    @pytest.mark.parametrize("transform", ["jvp", "grad", "jacfwd", "vmap of grad", "second"])
    def test_transformations(self, transform, is_compiled, compile_):
        x, w = torch.randn(2, 5, 8), torch.randn(4, 8, 8)

        def call(x):
            return it.layers.multi_head_attention(x, x, x, *w, num_heads=2, law=None)

        def loss(x):
            return call(x).sin().sum()

        func = torch.func
        of = {
            "jvp": lambda: func.jvp(call, (x,), (x,))[1],
            "grad": lambda: func.grad(loss)(x),
            "jacfwd": lambda: func.jacfwd(call)(x),
            "vmap of grad": lambda: func.vmap(func.grad(loss))(x),
            "second": lambda: func.grad(lambda x: func.grad(loss)(x).sin().sum())(x),
        }[transform]
        want = of()
        function = compile_(of)[0] if is_compiled else of
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(function(), want, rtol=1e-4, atol=1e-4)


VMAPPED = {
    "plain": lambda q, k, v, b, n: _state_and_entropy(q, k, v),
    "window, law of the query": lambda q, k, v, b, n: _state_and_entropy(
        q, k, v, mask=masks.window(3), law=laws.LogLength(4)
    ),
    "bias, soft cap": lambda q, k, v, b, n: _state_and_entropy(q, k, v, bias=b, softcap=2.0),
    "causal": lambda q, k, v, b, n: _state_and_entropy(q, k, v, bias=b, is_causal=True),
    "padding of elements": lambda q, k, v, b, n: _state_and_entropy(
        q, k, v, mask=masks.padding(n[:, 0]) & masks.causal()
    ),
    "array of elements": lambda q, k, v, b, n: _state_and_entropy(
        q, k, v, mask=torch.arange(9) < n[:, None]
    ),
    "array for all": lambda q, k, v, b, n: _state_and_entropy(q, k, v, mask=torch.eye(9) == 0),
}


def _state_and_entropy(q, k, v, **options):
    options = {"enable_gqa": True} | options
    entropies = it.attention_entropy(q, k, order=2.0, **options)
    return it.attention_state(q, k, v, **options), entropies


def _inductor(test):
    """A test of PyTorch's own compiler, which needs a C++ compiler and uses what PyTorch deprecates."""
    warning = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    has_compiler = shutil.which("c++") is not None
    test = pytest.mark.filterwarnings(warning)(test)
    return pytest.mark.skipif(not has_compiler, reason="inductor needs a C++ compiler")(test)


EXPORTED = {
    "window": lambda q, k, v: it.attention(q, k, v, mask=masks.window(3) | masks.padding(2)),
    "hidden rows": lambda q, k, v: it.attention(q[:, -4:], k, v, mask=masks.causal(-2)),
    "entropy": lambda q, k, v: it.attention_entropy(q, k, is_causal=True, normalized=True),
    "soft cap": lambda q, k, v: it.attention(q, k, v, softcap=3.0, is_causal=True),
    "state": lambda q, k, v: it.attention_state(q, k, v, is_causal=True).output(),
    "information": lambda q, k, v: it.AttentionDistribution(q, k).information(),
    "sinks": lambda q, k, v: it.attention(q, k, v, sinks=torch.zeros(2)),
}


class _Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k, v):
        return self.call(q, k, v)


LENGTHS = (2, 7, 16, 33, 64, 100, 300, 777, 1500, 2100)


class TestGraphs:
    @pytest.mark.parametrize("name", ["attention", "causal", "entropy", "output of a state", "sinks"])
    def test_modes_that_see_all_operations(self, name):
        """Tracing records operations, not numbers, and counters count them."""
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.utils.flop_counter import FlopCounterMode

        call = {
            "attention": lambda q, k: it.attention(q, k, q),
            "causal": lambda q, k: it.attention(q, k, q, is_causal=True),
            "entropy": lambda q, k: it.attention_entropy(q, k),
            "output of a state": lambda q, k: it.attention_state(q, k, q).output(),
            "sinks": lambda q, k: it.attention(q, k, q, sinks=torch.zeros(())),
        }[name]
        q, k, other, key = torch.randn(4, 40, 8, generator=torch.Generator().manual_seed(0))
        expected = call(other, key)  # a plan is kept
        traced = make_fx(call)(q, k)
        torch.testing.assert_close(traced(other, key), expected)
        with FlopCounterMode(display=False) as counter:
            torch.testing.assert_close(call(other, key), expected)
        if name not in ("attention", "causal"):  # PyTorch does not count its own kernel on the CPU
            assert counter.get_total_flops() >= 2 * 40 * 40 * 8

    @pytest.mark.parametrize(
        "call",
        [
            lambda q, k, v: it.attention(q, k, v),
            lambda q, k, v: it.attention(q, k, v, is_causal=True),
            lambda q, k, v: it.attention_entropy(q, k, mask=masks.window(9) | masks.padding(2)),
            lambda q, k, v: it.attention_state(q, k, v, is_causal=True, law=StepLog(0.1, 50)),
            lambda q, k, v: it.AttentionDistribution(q, k).information(),
        ],
    )
    def test_few_graphs_for_ten_lengths(self, call, compile_):
        compiled, counter = compile_(call)
        for n in LENGTHS:
            q, k, v = torch.randn(3, 2, n, 8)
            for got, want in zip(
                cases.leaves(compiled(q, k, v)), cases.leaves(call(q, k, v)), strict=True
            ):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert counter.frame_count <= 2

    @_inductor
    @pytest.mark.parametrize("bias", [None, torch.zeros(1, 1)])
    def test_one_graph_of_inductor_for_all_lengths(self, bias, compile_):
        # Inductor makes other code for sums of more than 4096 numbers.
        compiled, counter = compile_(
            lambda q, k, v: it.attention(q, k, v, bias=bias), "inductor", dynamic=True
        )
        for n in (9, 300, 1100):
            q, k, v = torch.randn(3, 2, n, 8)
            torch.testing.assert_close(compiled(q, k, v), it.attention(q, k, v), rtol=1e-4, atol=1e-5)
        assert counter.frame_count == 1

    @pytest.mark.parametrize("dynamic", [True, None, False])
    def test_entropies_and_states_with_symbolic_lengths(self, dynamic, compile_):
        def call(q, k, v):
            state = it.attention_state(q, k, v, mask=masks.causal() & masks.window(5))
            orders = (0.0, 0.9, math.inf) if dynamic else (0.9,)
            return (
                *state,
                state.entropy(),
                *(it.attention_entropy(q, k, is_causal=True, order=order) for order in orders),
                it.attention_entropy(q, k, order=2, family="tsallis", normalized=True),
                state.output(),
            )

        compiled, counter = compile_(call, dynamic=dynamic)
        for n in (7, 9):
            q, k, v = torch.randn(3, 2, n, 8)
            for got, want in zip(compiled(q, k, v), call(q, k, v), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert counter.frame_count <= 2

    def test_matched_factors_with_symbolic_lengths(self):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda q, k: it.AttentionDistribution(q, k, law=None).factor_for_entropy(1.0),
            fullgraph=True,
            dynamic=True,
            backend="eager",
        )
        for n in (7, 9):
            q, k = torch.randn(2, 2, n, 8)
            torch.testing.assert_close(
                compiled(q, k),
                it.AttentionDistribution(q, k, law=None).factor_for_entropy(1.0),
                rtol=1e-4,
                atol=1e-5,
            )
        torch.compiler.reset()

    @pytest.mark.parametrize("strict", [True, False])
    def test_export_with_symbolic_lengths(self, strict):
        class Module(torch.nn.Module):
            def forward(self, q, k, v):
                q = it.scale_queries(q, k.shape[-2])
                out = it.attention(q, k, v, is_causal=True, law=None)
                return out, it.attention_entropy(q, k), it.attention_state(q, k, v).output()

        lengths = ({1: torch.export.Dim("n", min=2, max=4096)},) * 3
        exported = torch.export.export(
            Module(), tuple(torch.randn(3, 2, 9, 8)), dynamic_shapes=lengths, strict=strict
        )
        arrays = torch.randn(3, 2, 13, 8)
        for got, want in zip(exported.module()(*arrays), Module()(*arrays), strict=True):
            torch.testing.assert_close(got, want)

    @pytest.mark.parametrize("name", list(EXPORTED))
    def test_exported_programs_have_operators_of_pytorch_alone(self, name, tmp_path):
        """So a program that does not import this package runs them."""
        q, k, v = torch.randn(3, 2, 9, 8)
        longer = torch.randn(3, 2, 13, 8)
        module = _Module(EXPORTED[name])
        n = torch.export.Dim("n", min=5, max=4096)
        exported = torch.export.export(module, (q, k, v), dynamic_shapes=({1: n},) * 3)
        torch.export.save(exported, tmp_path / "call.pt2")
        torch.save((longer, module(*longer)), tmp_path / "arrays.pt")
        code = (
            "import sys, torch\n"
            f"program = torch.export.load({str(tmp_path / 'call.pt2')!r})\n"
            f"arrays, expected = torch.load({str(tmp_path / 'arrays.pt')!r})\n"
            "torch.testing.assert_close(program.module()(*arrays), expected)\n"
            "assert 'isentropic' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.parametrize("name", list(EXPORTED))
    def test_onnx(self, name):
        pytest.importorskip("onnxscript")
        reference = pytest.importorskip("onnx.reference")
        module, longer = _Module(EXPORTED[name]), torch.randn(3, 2, 13, 8)
        program = torch.onnx.export(
            module.eval(), tuple(torch.randn(3, 2, 9, 8)), dynamo=True, verbose=False,
            dynamic_shapes=({1: torch.export.Dim.DYNAMIC},) * 3,
        )  # fmt: skip
        evaluator = reference.ReferenceEvaluator(program.model_proto)
        inputs = dict(zip(evaluator.input_names, longer.numpy(), strict=True))
        (got,) = evaluator.run(None, inputs)
        torch.testing.assert_close(torch.asarray(got), module(*longer), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", [*EXPORTED, "output"])
    def test_traced_with_symbolic_lengths(self, name):
        from torch.fx.experimental.proxy_tensor import make_fx

        call = EXPORTED.get(name, lambda q, k, v: it.attention(q, k, v))
        traced = make_fx(call, tracing_mode="symbolic")(*torch.randn(3, 2, 9, 8))
        longer = torch.randn(3, 2, 13, 8)
        torch.testing.assert_close(traced(*longer), call(*longer))

    def test_symbolic_trace(self):
        """The calls are nodes, and `MultiheadAttention` is a leaf, as PyTorch's module is."""

        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = MultiheadAttention(8, 2, batch_first=True)
                self.law = LawModule(laws.AffineLog(torch.nn.Parameter(torch.ones(2)), 0.5))
                self.mask = masks.window(2) & masks.padding(torch.tensor([[3], [5]]))
                self.projection = it.jl.gaussian_projection(8, 3, rng=0, like=torch.empty(0))

            def forward(self, x):
                state = it.attention_state(x, x, value=x, law=self.law(), mask=self.mask)
                y, _ = self.layer(x[:, 0], x[:, 0], x[:, 0], need_weights=False)
                return state.output(), it.attention_entropy(x, key=x), self.projection(x), y

        module, x = Module(), torch.randn(2, 2, 5, 8)
        traced = torch.fx.symbolic_trace(module)
        for a, b in zip(traced(x), module(x), strict=True):
            torch.testing.assert_close(a, b)
        targets = [node.target for node in traced.graph.nodes]
        assert {it.attention_state, it.attention_entropy, "layer", laws.AffineLog} <= {*targets}
        assert "law.slope" in targets
        assert len(targets) < 30  # nothing is left of what the calls ask their arguments
        with torch.no_grad():
            module.law.slope += 1.0
        torch.testing.assert_close(traced(x)[0], module(x)[0])
        with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):  # as PyTorch's alone
            torch.fx.symbolic_trace(MultiheadAttention(8, 2))
        with pytest.raises(TypeError, match=r"`like` must be .*, got a proxy of `torch\.fx`"):
            torch.fx.symbolic_trace(lambda x: it.jl.gaussian_projection(8, 3, rng=0, like=x))

    @_inductor
    def test_inductor(self):
        def call(q, k, v):
            state = it.attention_state(q, k, v, is_causal=True)
            return state.output(), it.attention_entropy(q, k, is_causal=True, order=0.5)

        def outcome(function, *arrays):
            results = function(*arrays)
            return *results, *torch.autograd.grad(sum(x.sin().sum() for x in results), arrays)

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True)
        for n in (7, 9, 11):  # the second length makes them symbolic
            arrays = [x.requires_grad_() for x in torch.randn(3, 2, n, 8)]
            found = zip(outcome(compiled, *arrays), outcome(call, *arrays), strict=True)
            for got, want in found:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.compiler.reset()

    def test_visible_nan_in_a_graph(self, compile_):
        # PyTorch's kernel takes a row of NaN logits for one that sees no key.
        q, k, v = (torch.randn(heads, 9, 8) for heads in (4, 2, 2))
        compiled, _ = compile_(lambda q, k, v: it.attention(q, k, v, enable_gqa=True))
        of_query, of_key = q.clone(), k.clone()
        of_query[2, 5, 0] = of_key[1, :, 0] = torch.nan
        for arrays in ((of_query, k, v), (q, of_key, v)):
            expected = it.attention(*arrays, enable_gqa=True, implementation="generic")
            assert expected.isnan().any()
            torch.testing.assert_close(
                compiled(*arrays), expected, equal_nan=True, rtol=1e-4, atol=1e-5
            )

    @pytest.mark.parametrize("by_numpy", [False, True])
    def test_nonfinite_numbers_under_a_mask_in_a_graph(self, compile_, set_blocks, by_numpy):
        if by_numpy:  # the forward pass in the operator, as of large calls
            set_blocks(numpy_min_head_logits=0, numpy_min_logits=0)
        slope = torch.tensor(0.5, requires_grad=True)

        def call(q, k, v):
            law = laws.AffineLog(slope, 0.1)
            state = it.attention_state(q, k, v, is_causal=True, law=law, enable_gqa=True)
            return state.output(), state.entropy()

        def outcome(function, arrays):
            results = function(*arrays)
            loss = sum(x.nan_to_num().sin().sum() for x in results)
            return *results, *torch.autograd.grad(loss, (*arrays, slope))

        compiled, counter = compile_(call)
        finite = [torch.randn(heads, 9, 8) for heads in (4, 2, 2)]
        for which in ((), (0,), (1,), (2,), (0, 1), (0, 1, 2)):
            arrays = [x.clone() for x in finite]
            for i in which:
                arrays[i][0, 5 + i, 3] = (torch.nan, -torch.inf, torch.inf)[i]
            arrays = [x.requires_grad_() for x in arrays]
            got, want = outcome(compiled, arrays), outcome(call, arrays)
            assert want[0].isnan().any() == bool(which)
            # In tiles the gradient of a query that is NaN also reaches keys that it does not see.
            n_compared = 2 if which == (0,) else len(want)
            for a, b in zip(got[:n_compared], want[:n_compared], strict=True):
                torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-5)
        assert counter.frame_count == 1

    @pytest.mark.parametrize(
        ("query", "keys"),
        [
            ([1e-37] * 16, [[3e38, -3e38] * 8, [0.0] * 16]),  # sums of the keys overflow
            ([-1.0, 1.0], [[math.inf, -math.inf], [1.0, 1.0]]),  # the logits are −∞ and 0
            ([0.0, 0.0], [[math.inf, 1.0], [math.inf, 1.0]]),  # the logits are NaN
        ],
    )
    def test_large_and_infinite_keys(self, query, keys, compile_):
        arrays = torch.asarray([query]), torch.asarray(keys), torch.asarray([[5.0], [6.0]])

        def call(q, k, v):
            return it.attention(q, k, v, law=None)

        expected = it.AttentionDistribution(*arrays[:2], law=None).weights() @ arrays[2]
        torch.testing.assert_close(call(*arrays), expected, equal_nan=True)
        torch.testing.assert_close(compile_(call)[0](*arrays), expected, equal_nan=True)

    def test_gradients_of_ten_lengths(self, compile_):
        compiled, counter = compile_(lambda *a: it.attention(*a, is_causal=True).sin().sum())
        for n in LENGTHS:
            q, k, v = (torch.randn(2, n, 4, requires_grad=True) for _ in range(3))
            got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
            want = torch.autograd.grad(it.attention(q, k, v, is_causal=True).sin().sum(), (q, k, v))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        assert counter.frame_count <= 2

    def test_decoding_with_a_cache_of_fixed_size_compiles_once(self, compile_):
        k, v = torch.randn(2, 4, 64, 8)

        def step(q, length):
            return it.attention(q, k, v, mask=masks.padding(length), n_keys=length[..., None])

        compiled, counter = compile_(step)
        for n in (1, 5, 17, 40, 64):
            q = torch.randn(4, 1, 8)
            expected = it.attention(q, k[:, :n], v[:, :n])
            torch.testing.assert_close(compiled(q, torch.asarray(n)), expected)
        assert counter.frame_count == 1

    def test_parameters_and_buffers_of_modules_compile(self, compile_):
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.slope = torch.nn.Parameter(torch.full((4,), 0.3))
                self.w = torch.nn.ParameterList(list(torch.randn(4, 32, 32) / 6))
                self.register_buffer("visible", torch.ones(6, 6, dtype=torch.bool).tril())
                self.register_buffer("bias", torch.zeros(4, 1, 1))

            def forward(self, x):
                return it.layers.multi_head_attention(
                    x, x, x, *self.w, num_heads=4, law=laws.AffineLog(self.slope),
                    mask=self.visible, bias=self.bias,
                )  # fmt: skip

        layer, x = Layer(), torch.randn(2, 6, 32)
        for dynamic in (None, True):
            compiled, _ = compile_(layer, dynamic=dynamic)
            torch.testing.assert_close(compiled(x), layer(x))

    def test_laws_of_different_numbers_compile(self, compile_):
        q, h = torch.randn(2, 4, 6, 8), torch.rand(5)

        def call(q, h, number):
            law = laws.scaled(laws.AffineLog(number), number)
            out = it.attention(q, q, q, law=law, n_keys=q.shape[-2])
            return (
                out,
                it.entropy_penalty(h, number),
                it.attention(q, q, q, law=laws.LogLength(2 + number)),
            )

        for dynamic in (None, True):
            compiled, _ = compile_(call, dynamic=dynamic)
            for number in (0.1, 0.2, 0.3):
                for a, b in zip(compiled(q, h, number), call(q, h, number), strict=True):
                    torch.testing.assert_close(a, b)

    def test_maps_of_several_sizes_compile(self, compile_):
        def call(f, y):
            return f.adjoint(y), f(f.adjoint(y)), f.matrix()

        for dynamic in (None, True):
            compiled, _ = compile_(call, dynamic=dynamic)
            for d, k in ((24, 8), (48, 16)):
                f = it.jl.hadamard_projection(d, k, rng=0, like=torch.zeros(1))
                y = torch.randn(3, k)
                for got, want in zip(compiled(f, y), call(f, y), strict=True):
                    torch.testing.assert_close(got, want)


class TestTransformations:
    def test_vmap_of_multi_head_attention(self):
        x, w = torch.randn(3, 5, 8), torch.randn(4, 8, 8)

        def call(x):
            return it.layers.multi_head_attention(x, x, x, *w, num_heads=2, is_causal=True)

        torch.testing.assert_close(torch.func.vmap(call)(x), call(x))

    def test_vmap(self, tiny_tiles):
        q, k, v = torch.randn(3, 5, 4, 7, 8)
        lengths = torch.asarray([0, 2, 4, 6, 7])

        def call(q, k, v, length):
            mask = masks.causal() & masks.padding(length)
            state = it.attention_state(q, k, v, mask=mask)
            return state.output(), it.attention_entropy(q, k, mask=mask, order=0.8)

        got = torch.func.vmap(call)(q, k, v, lengths)
        for i in range(5):
            for a, b in zip(got, call(q[i], k[i], v[i], lengths[i]), strict=True):
                torch.testing.assert_close(a[i], b)

    @pytest.mark.parametrize("name", list(VMAPPED))
    def test_vmap_in_a_graph(self, compile_, name):
        """Values and gradients, where arguments have the axis of vmap at either end or not at all."""
        shapes = {"q": (4, 9, 8), "k": (2, 9, 8), "v": (2, 9, 6), "b": (4, 1, 9)}
        a = {x: torch.randn(3, *of, dtype=torch.float64) for x, of in shapes.items()}
        q, k, v, b = a["q"], a["k"].movedim(0, -1), a["v"][0], a["b"]
        axes = (0, -1, None, 0, 0)
        if name == "causal":
            q, b, axes = q[0], b[0], (None, -1, None, None, 0)
        n = torch.tensor([[4], [9], [7], [5]]) - torch.arange(3)[:, None, None]

        def call(q, k, v, b, n):
            state, entropies = VMAPPED[name](q, k, v, b, n)
            return state.output(), state.log_normalizer(), entropies

        def loss(*inputs):
            found = torch.func.vmap(call, axes)(*inputs)
            return sum((i + 1) * x.sin().sum() for i, x in enumerate(found)), found

        compiled, _ = compile_(loss)
        inputs = [x.requires_grad_() for x in (q.detach(), k.detach(), v.detach(), b)]
        (got, _), (want, _) = compiled(*inputs, n), loss(*inputs, n)
        pairs = zip(
            *(torch.autograd.grad(x, inputs, allow_unused=True) for x in (got, want)), strict=True
        )
        for got, want in pairs:
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want)

        k = k.clone()
        k[0, 3, 5, 1] = math.nan  # some queries see it, and others do not
        for got, want in zip(compiled(q, k, v, b, n)[1], loss(q, k, v, b, n)[1], strict=True):
            assert want.isnan().any()
            torch.testing.assert_close(got, want, equal_nan=True)

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's own kernel
    @pytest.mark.parametrize("name", ["output", "entropy", "window"])
    @pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jvp", "jacrev", "hessian"])
    def test_transformations_in_a_graph(self, compile_, transform, name):
        q, k, v = torch.randn(3, 2, 5, 4, dtype=torch.float64)
        masked = masks.window(2)
        call = {
            "output": lambda q: it.attention(q, k[0], v[0], is_causal=True),
            "entropy": lambda q: it.attention_entropy(q, k[0], is_causal=True),
            "window": lambda q: it.attention_state(q, k[0], v[0], mask=masked).output(),
        }[name]

        def loss(q):
            return call(q).sin().sum()

        func = torch.func
        of = {
            "grad": lambda q: func.grad(loss)(q[0]),
            "vmap of grad": lambda q: func.vmap(func.grad(loss))(q),
            "jvp": lambda q: func.jvp(call, (q[0],), (q[1],))[1],
            "jacrev": lambda q: func.jacrev(call)(q[0]),
            "hessian": lambda q: func.jvp(func.grad(loss), (q[0],), (q[1],))[1],
        }[transform]
        want = of(q)  # first, as PyTorch loads what jvp needs in its first call outside graphs
        torch.testing.assert_close(compile_(of)[0](q), want)

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
    def test_forward_mode_around_a_graph_that_was_made_without(self, compile_):
        q, k, v = torch.randn(3, 2, 5, 4)
        calls = {
            "state": lambda q: it.attention_state(q, k, v, is_causal=True).output(),
            "output": lambda q: it.attention(q, k, v, is_causal=True),
        }
        forward = torch.autograd.forward_ad
        for call in calls.values():
            _, want = torch.func.jvp(call, (q,), (k,))
            compiled, _ = compile_(call)
            torch.testing.assert_close(compiled(q), call(q))
            with forward.dual_level():
                got = forward.unpack_dual(compiled(forward.make_dual(q, k))).tangent
                torch.testing.assert_close(got, want)

    def test_entropy_on_a_sphere_where_the_panels_reach_their_floor(self):
        """Of the rule of integration, whose ends depend on κ, with a kink at 1/2."""
        kappa = torch.tensor([0.5 - 1e-4, 0.5, 0.5 + 1e-4], dtype=torch.float64, requires_grad=True)
        for d in (2.0, 8.0, 64.0):
            (slope,) = torch.autograd.grad(it.theory.sphere_entropy(100.0, d, kappa).sum(), kappa)
            torch.testing.assert_close(slope[1], (slope[0] + slope[2]) / 2, rtol=1e-6, atol=0.0)

    def test_func_grad(self):
        q, k, v = torch.randn(3, 6, 4, dtype=torch.float64)

        def loss(q):
            return it.attention_state(q, k, v, is_causal=True).entropy().sum()

        by_func = torch.func.grad(loss)(q)
        q.requires_grad_()
        torch.testing.assert_close(by_func, torch.autograd.grad(loss(q), q)[0])

    def test_second_derivative(self, set_blocks):
        set_blocks(columns=2)
        q, k, v = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

        def loss(q, k, v):
            state = it.attention_state(q, k, v, is_causal=True)
            return state.output().sum() + state.entropy().sum()

        assert torch.autograd.gradgradcheck(loss, (q, k, v))

    def test_gradients_at_singular_rows(self):
        q = torch.tensor([[300.0, 0.0], [1.0, 1.0], [0.0, 0.0]], requires_grad=True)
        k = torch.tensor([[300.0, 0.0], [0.0, 1.0], [-300.0, 0.0]], requires_grad=True)
        mask = torch.tensor([[True, True, True], [False, False, False], [True, True, False]])
        p = torch.tensor([[1.0, 0.0], [0.0, 0.0]], requires_grad=True)
        bias = torch.where(mask, 0.0, -torch.inf).requires_grad_()
        for order in (0, 0.5, 0.9, 1, 1.1, 2, np.inf):
            hs = (
                (it.attention_entropy(q, k, mask=mask, order=order), (q, k)),
                (it.attention_entropy(q, k, bias=bias, order=order), (q, k, bias)),
                (it.entropy(p, order=order), (p,)),
            )
            for h, leaves in hs:
                for g in torch.autograd.grad(h.sum(), leaves):
                    assert bool(torch.isfinite(g).all())
        state = it.attention_state(q, k, k, mask=mask)
        for g in torch.autograd.grad(state.output().sum() + state.entropy().sum(), (q, k)):
            assert bool(torch.isfinite(g).all())
        state = it.attention_state(q, k, k, mask=mask)
        finite = torch.where(state.normalizer > 0, state.log_normalizer(), 0.0)
        assert bool(torch.isfinite(torch.autograd.grad(finite.sum(), q)[0]).all())

    def test_hidden_poison_does_not_leak_into_gradients(self, tiny_tiles):
        visible = torch.ones(6, 6, dtype=torch.bool)
        visible[:, 2] = visible[4, :] = False

        def gradients(q, k, v):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            state = it.attention_state(*leaves, mask=visible)
            return torch.autograd.grad((state.output() ** 2).sum() + state.entropy().sum(), leaves)

        q, k, v = torch.randn(3, 6, 4)
        clean = gradients(q, k, v)
        q[4], k[2], v[2] = torch.nan, torch.inf, torch.nan
        for a, b in zip(gradients(q, k, v), clean, strict=True):
            torch.testing.assert_close(a, b)

    def test_hidden_poison_does_not_leak_into_gradients_of_projections(self):
        x = torch.randn(5, 8)
        x[3:] = torch.nan
        w = torch.randn(4, 8, 8, requires_grad=True)
        query = torch.randn(4, 8)

        def gradient(x, mask):
            out = it.layers.multi_head_attention(query, x, x, *w, num_heads=2, mask=mask)
            return torch.autograd.grad(out.sum(), w)[0]

        torch.testing.assert_close(gradient(x, masks.padding(3)), gradient(x[:3], None))

    def test_gradients_of_the_lowest_bias(self, tiny_tiles):
        q = torch.randn(9, 4, requires_grad=True)
        bias = torch.where(torch.ones(9, 9, dtype=torch.bool).tril(), 0.0, torch.finfo().min)
        for order in (0.8, 1, 2):
            h = it.attention_entropy(q, q, bias=bias, law=None, order=order)
            want = it.attention_entropy(q, q, is_causal=True, law=None, order=order)
            got, want = (torch.autograd.grad(100 * x.sum(), q)[0] for x in (h, want))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)

    def test_learnable_law(self):
        slope = torch.full((4,), 0.3, requires_grad=True)
        q, k = torch.randn(2, 4, 9, 8)
        h = it.attention_entropy(q, k, law=laws.AffineLog(slope), is_causal=True)
        (g,) = torch.autograd.grad(h.sum(), slope)
        assert bool((g < 0).all())  # dH/dlog λ = −Var(λs)

    def test_heat_capacity(self):
        # dH/dlog λ = −Var_p(λs), exactly.
        s = torch.randn(3, 20, dtype=torch.float64)
        log_factor = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
        h = it.entropy_from_logits(s * log_factor.exp())
        (g,) = torch.autograd.grad(h.sum(), log_factor)
        p = torch.softmax(s, -1)
        variance = (p * s**2).sum(-1) - (p * s).sum(-1) ** 2
        torch.testing.assert_close(g[:, 0], -variance)

    def test_modules_keep_a_state_as_pytree(self):
        import torch.utils._pytree as pytree

        state = it.attention_state(*torch.randn(3, 5, 4))
        leaves, structure = pytree.tree_flatten(state)
        assert len(leaves) == len(state)
        assert isinstance(pytree.tree_unflatten(leaves, structure), it.AttentionState)


class TestLaws:
    def test_ranges_are_not_checked_where_values_cannot_be_read(self, compile_):
        from torch._subclasses.fake_tensor import FakeTensorMode

        n, base = torch.tensor([4.0, 16.0]), torch.tensor([[4.0, 2.0], [0.5, 2.0]])

        def call(base):
            return laws.LogLength(base)(n)

        with pytest.raises(ValueError, match=r"`base` must be above 1, got 0.5 at \(1, 0\)"):
            call(base)
        assert torch.func.vmap(call)(base)[1].isfinite().all()
        assert torch.func.jacrev(call)(base).shape == (2, 2, 2, 2, 2)
        assert compile_(call)[0](base).shape == (2, 2, 2)
        n = n.to("meta")
        assert call(base.to("meta")).shape == (2, 2, 2)
        with FakeTensorMode():
            n = torch.empty(2)
            assert call(torch.empty(2, 2)).shape == (2, 2, 2)

    def test_modules_say_which_number_left_its_range(self):
        law = LawModule(laws.scaled(laws.LogLength(torch.nn.Parameter(torch.tensor([2.0, 4.0]))), 2.0))
        optimizer = torch.optim.SGD(law.parameters(), lr=1.0)
        law()(torch.tensor([8.0]))[1].sum().neg().backward()
        optimizer.step()
        law()
        with torch.no_grad():
            law.law.base[1] = 1.0
        with pytest.raises(ValueError, match=r"`base` must be above 1, got 1.0 at \(1,\)"):
            law()
        law.to("meta")()

    def test_arguments_of_compiled_functions(self, compile_):
        q = torch.randn(2, 4, 9, 8)

        def call(law, q):
            return it.attention(q, q, q, law=law, is_causal=True)

        compiled, counter = compile_(call)
        for slope in (torch.randn(4), torch.randn(4), torch.randn(4).requires_grad_()):
            law = laws.scaled(laws.shifted(laws.AffineLog(slope, 0.5), 1), 2.0)
            torch.testing.assert_close(compiled(law, q), call(law, q))
        assert counter.frame_count == 2  # one of them is differentiated
        compiled(law, q).sum().backward()
        (expected,) = torch.autograd.grad(call(law, q).sum(), slope)
        torch.testing.assert_close(slope.grad, expected)

    def test_gradients_are_laws(self):
        q, k = torch.randn(2, 4, 9, 8)

        def entropy(law):
            return it.attention_entropy(q, k, law=law, is_causal=True).sum()

        slope, factor = torch.rand(4) + 0.5, torch.tensor(2.0)
        law = laws.scaled(laws.AffineLog(slope, 0.5), factor)
        gradient, value = torch.func.grad_and_value(entropy)(law)
        torch.testing.assert_close(value, entropy(law))
        assert gradient.law.intercept == 0.5
        slope.requires_grad_()
        (expected,) = torch.autograd.grad(entropy(law), slope)
        torch.testing.assert_close(gradient.law.slope, expected)

    def test_maps_over_laws(self):
        n = torch.tensor([2.0, 64.0])
        stacked = laws.scaled(
            laws.LogLength(torch.tensor([[2.0, 4.0], [8.0, 16.0], [32.0, 64.0]])), 2.0
        )
        got = torch.func.vmap(lambda law: law(n))(stacked)
        torch.testing.assert_close(got, stacked(n))
        axes = torch.utils._pytree.tree_map(lambda _: 1, stacked)
        got = torch.func.vmap(lambda law: law(n), in_dims=(axes,))(stacked)
        torch.testing.assert_close(got, stacked(n).transpose(0, 1))

    def test_functional_calls(self):
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.law = LawModule(laws.AffineLog(torch.nn.Parameter(torch.rand(4))))

            def forward(self, q, law):
                return it.attention_entropy(q, q, law=self.law()) + it.attention_entropy(q, q, law=law)

        layer, q, law = Layer(), torch.randn(4, 9, 8), laws.LogLength(torch.rand(4) + 2)
        parameters = {name: torch.rand_like(x) for name, x in layer.named_parameters()}

        def call(parameters, law):
            return torch.func.functional_call(layer, parameters, (q, law)).sum()

        gradients = torch.func.grad(call, argnums=(0, 1))(parameters, law)
        assert gradients[0].keys() == parameters.keys() == {"law.slope"}
        leaves = [x.requires_grad_() for x in (parameters["law.slope"], law.base)]
        expected = torch.autograd.grad(call(parameters, law), leaves)
        torch.testing.assert_close((gradients[0]["law.slope"], gradients[1].base), expected)


def _distribution(q, k):
    return it.AttentionDistribution(q, k, is_causal=True, law=laws.LogLength(8))


class TestDistribution:
    """The object is a pytree, made inside a graph or outside."""

    def test_compiled(self, rng):
        q, k, v = torch.randn(3, 2, 4, 7, 8)
        expected = cases.results_of_methods(_distribution(q, k), v)
        compiled = torch.compile(
            lambda q, k, v: cases.results_of_methods(_distribution(q, k), v),
            fullgraph=True,
            backend="aot_eager",
        )
        made = torch.compile(_distribution, fullgraph=True, backend="eager")
        assert made(q, k) == _distribution(q, k)
        outside = torch.compile(lambda p, v: p.output(v), fullgraph=True, backend="eager")
        torch.testing.assert_close(outside(_distribution(q, k), v), expected[0])
        for x, y in zip(expected, compiled(q, k, v), strict=True):
            torch.testing.assert_close(y, x, rtol=2e-3, atol=1e-5)

    def test_func(self, rng):
        q, k, v = torch.randn(3, 2, 4, 7, 8)
        p = _distribution(q, k)
        mapped = torch.func.vmap(lambda p, v: p.output(v))(p, v)
        torch.testing.assert_close(mapped, p.output(v))
        by_object = torch.func.grad(lambda p: p.entropy().sum())(p).query
        by_array = torch.func.grad(lambda q: _distribution(q, k).entropy().sum())(q)
        torch.testing.assert_close(by_object, by_array)

    def test_exported(self, rng):
        q, k, v = torch.randn(3, 2, 4, 7, 8)

        class Inside(torch.nn.Module):
            def forward(self, q, k, v):
                return _distribution(q, k).output(v)

        class Argument(torch.nn.Module):
            def forward(self, p, v):
                return p.output(v)

        expected, p = _distribution(q, k).output(v), _distribution(q, k)
        for module, arguments in ((Inside(), (q, k, v)), (Argument(), (p, v))):
            program = torch.export.export(module, arguments)
            torch.testing.assert_close(program.module()(*arguments), expected)

    def test_symbolic_trace(self, rng):
        q, k, v = torch.randn(3, 2, 4, 7, 8)
        traced = torch.fx.symbolic_trace(lambda q, k, v: _distribution(q, k).output(v))
        torch.testing.assert_close(traced(q, k, v), _distribution(q, k).output(v))
        assert pickle.loads(pickle.dumps(traced))(q, k, v).shape == q.shape
