"""All functions with arrays of MLX, a library outside of the array API standard that needed one table."""

import cases
import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws, masks

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
pytestmark = pytest.mark.host


def draw(rng, *shape):
    return mx.array(rng.normal(size=shape).astype("float32"))


@pytest.mark.parametrize("name", cases.CASES)
def test_values(name):
    arrays = cases.inputs()
    got = cases.leaves(cases.CASES[name]({key: mx.array(x) for key, x in arrays.items()}))
    for x, expected in zip(got, cases.leaves(cases.CASES[name](arrays)), strict=True):
        assert isinstance(x, mx.array) == isinstance(expected, np.ndarray)
        np.testing.assert_allclose(np.array(x), expected, rtol=1e-4, atol=3e-5)


def test_tiles(rng, set_blocks):
    q, k, v = (draw(rng, 2, 50, 8) for _ in range(3))
    set_blocks(columns=16)
    got = it.attention_state(q, k, v, is_causal=True, law=None)
    expected = oracles.attention(*map(np.array, (q, k, v)), visible=oracles.causal(50, 50))
    np.testing.assert_allclose(np.array(got.output()), expected.output, atol=1e-5)
    np.testing.assert_allclose(np.array(got.entropy()), expected.entropy(), atol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: it.attention(q, k, v, mask=masks.window(5), law=laws.LogLength(8)),
        lambda q, k, v: it.attention(q, k, v, is_causal=True, softcap=2.0),
        lambda q, k, v: it.attention_entropy(q, k, order=2, is_causal=True),
    ],
)
def test_transformations(rng, call):
    """The gradient is that of finite differences, and compiled and batched calls equal the others."""
    arrays, steps = ([draw(rng, 2, 20, 8) for _ in range(3)] for _ in range(2))

    def along(t):
        return call(*(x + t * step for x, step in zip(arrays, steps, strict=True))).sum()

    expected = (along(1e-2) - along(-1e-2)) / 2e-2
    assert mx.grad(along)(mx.array(0.0)).item() == pytest.approx(expected.item(), rel=2e-2, abs=2e-2)
    out = np.array(call(*arrays))
    for transformed in (mx.compile(call), mx.vmap(call)):
        np.testing.assert_allclose(np.array(transformed(*arrays)), out, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(rng, dtype):
    q, k, v = (draw(rng, 2, 20, 8).astype(getattr(mx, dtype)) for _ in range(3))
    assert it.attention(q, k, v).dtype == q.dtype
    h = it.attention_entropy(q, k)
    assert h.dtype == mx.float32
    exact = it.attention_entropy(*(np.array(x.astype(mx.float32)) for x in (q, k)))
    np.testing.assert_allclose(np.array(h), exact, atol=1e-5)
    report = it.drift.entropy_drift([(q, k), (q[:, :9], k[:, :9])])
    assert np.isfinite(report.slope).all()


@pytest.mark.parametrize("kind", ["mse", "unbiased", "sign"])
def test_codes_are_those_of_numpy(rng, kind):
    x, bits = draw(rng, 20, 48), 1 if kind == "sign" else 4
    quantizers = [it.jl.quantizer(48, bits, kind=kind, rng=0, like=like) for like in (x, None)]
    got, expected = (f.encode(y) for f, y in zip(quantizers, (x, np.array(x)), strict=True))
    np.testing.assert_array_equal(np.array(got.codes), expected.codes)
    np.testing.assert_array_equal(np.array(got.scales), expected.scales)


def test_errors(rng):
    x = draw(rng, 3, 4)
    with pytest.raises(
        TypeError, match=r"`key` must be an array of the library of `query` \(mlx\), got numpy"
    ):
        it.attention(x, np.ones((3, 4)), x)
    with pytest.raises(TypeError, match=r"`query` must have a real floating-point dtype, got .*int32"):
        it.attention(x.astype(mx.int32), x, x)
    with pytest.raises(ValueError, match="`mask`"):
        it.attention(x, x, x, mask=mx.ones((5, 5)) > 0)
