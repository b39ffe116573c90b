"""Dtypes for storage: bfloat16 in NumPy, which ml_dtypes adds, is computed with; narrower floats are not."""

import cases
import numpy as np
import pytest
from test_contract import IN_FLOAT32

import isentropic as it
from isentropic import masks


def of_dtype(dtype):
    return {
        name: x.astype(dtype) if x.dtype.kind == "f" else x
        for name, x in cases.inputs("float32").items()
    }


@pytest.mark.host
@pytest.mark.parametrize("name", sorted(cases.CASES))
def test_bfloat16_in_numpy(name):
    """The results are those of float32 for the same numbers, up to rounding."""
    if name == "PowerLog":
        pytest.skip("laws compute in float32")
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    arrays, case = of_dtype(bfloat16), cases.CASES[name]
    same = {key: x.astype("float32") if x.dtype == bfloat16 else x for key, x in arrays.items()}
    # Some cases multiply or add their arguments, and NumPy then promotes them to float32.
    for got, expected in zip(cases.leaves(case(arrays)), cases.leaves(case(same)), strict=True):
        if got.dtype.kind == "V" or expected.dtype.kind == "f":
            wanted = np.float32 if name in IN_FLOAT32 else bfloat16
            assert got.dtype in (wanted, np.float32)
        got, expected = got.astype("float64"), expected.astype("float64")
        largest = np.abs(np.where(np.isfinite(expected), expected, 0)).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.02 * max(largest, 1))


@pytest.mark.host
def test_bfloat16_is_the_dtype_of_results(rng):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (x.astype(bfloat16) for x in rng.normal(size=(3, 2, 8, 16)))
    assert it.attention(q, k, v, is_causal=True).dtype == bfloat16
    assert it.attention(q, k, v, mask=masks.window(3), softcap=2.0).dtype == bfloat16
    assert it.attention(q, k.astype("float16"), v).dtype == np.float32  # as in PyTorch and JAX
    assert it.attention_entropy(q, k).dtype == np.float32
    assert it.jl.hadamard_transform(q).dtype == it.jl.rotation(16, rng=1)(q).dtype == bfloat16
    assert it.jl.hadamard_projection(16, 4, rng=1, like=q)(q).dtype == bfloat16


NARROW = {
    "numpy": ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4"],
    "torch": ["float8_e4m3fn", "float8_e5m2"],
    "jax": ["float8_e4m3fn", "float8_e5m2"],
}


@pytest.mark.every_mode
@pytest.mark.parametrize(
    "function", ["attention", "entropy", "matched", "map", "transform", "rotary", "mask"]
)
@pytest.mark.parametrize("index", range(4))
def test_narrower_numbers_are_refused(backend, function, index):
    names = NARROW.get(backend.library, [])[index:]
    if not names or (backend.library == "numpy" and backend.name != "numpy"):
        pytest.skip("no such dtype here")
    if backend.library == "numpy":
        x = np.ones((2, 8)).astype(getattr(pytest.importorskip("ml_dtypes"), names[0]))
    else:
        x = backend.xp.astype(backend.array(np.ones((2, 8))), getattr(backend.xp, names[0]))
    y = backend.array(np.ones((2, 8)), "float32")
    calls = {
        "attention": ("query", lambda: it.attention(x, x, x)),
        "entropy": ("p", lambda: it.entropy(x)),
        "matched": ("logits", lambda: it.factor_for_entropy(x, 1.0)),
        "map": ("x", lambda: it.jl.gaussian_projection(8, 4, rng=0, like=y)(x)),
        "transform": ("x", lambda: it.jl.hadamard_transform(x)),
        "rotary": ("x", lambda: it.layers.rotary(x)),
        "mask": ("bias", lambda: it.attention(y, y, y, bias=x[:, :2])),
    }
    name, call = calls[function]
    must = r"of at least 16 bits \(convert it\)" if "float" in names[0] else "floating-point dtype"
    with pytest.raises(
        TypeError, match=f"`{name}` must have a real floating-point dtype.*{names[0][:6]}"
    ) as error:
        call()
    assert error.match(must)
