"""The kernels of Triton agree with the generic pass and an oracle.

Without a GPU they run in the interpreter of Triton, which shows that the values are right. That they
compile is tested in `test_triton_compiler`.
"""

import importlib.util
import math
import subprocess
import sys

import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import laws, masks


@pytest.fixture
def kernel(backend):
    """The name of the kernel's backend for the arrays of `backend`."""
    name = "triton"
    if backend.library != "torch":
        pytest.skip("has no kernels")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    x = backend.array(np.zeros((2, 2)), "float32")
    why = it.attention_backends(x, x, x, implementation=name)[name]
    if why == "the tensors are not on a GPU":
        pytest.skip("on a machine with a GPU only tensors on it are tested")
    assert why == "runs"
    return name


MASKS = {
    "left padding": lambda a: {"mask": masks.causal() & masks.padding(a(np.asarray([[20], [40]])), side="left")},
    "none": lambda a: {},
    "causal": lambda a: {"is_causal": True},
    "window": lambda a: {"mask": masks.window(20, 3)},
    "offset": lambda a: {"mask": masks.causal(a(np.asarray([[-5], [30]])))},
    "padding": lambda a: {"mask": masks.padding(a(np.asarray([[0], [35]])))},
    "number": lambda a: {"mask": masks.causal() & masks.padding(33)},
}  # fmt: skip


def draw(rng, heads=2, key_heads=2, n_queries=44, n_keys=40, width=20, n_values=12):
    """Queries, keys and values that need several blocks, with ragged ends."""
    shapes = (heads, n_queries, width), (key_heads, n_keys, width), (key_heads, n_keys, n_values)
    return [rng.normal(size=(2, *shape)) for shape in shapes]


def outcomes(backend, implementation, arrays, slope, **options):
    """Results of the three functions, and the gradients of a loss of all of them."""
    xp, names = backend.xp, ("q", "k", "v", "slope")

    def loss(q, k, v, slope):
        given = options | {"law": laws.AffineLog(slope, 0.5), "implementation": implementation}
        state = it.attention_state(q, k, v, **given)
        results = {
            "output": it.attention(q, k, v, **given),
            "state output": state.output(),
            "state entropy": state.entropy(),
            "log normalizer": state.log_normalizer(),
            "maximum": state.maximum,
            "entropy": it.attention_entropy(q, k, **given),
        }
        finite = [xp.where(xp.isfinite(x), x, 0.0) for x in results.values()]
        return sum(xp.sum(xp.sin(xp.astype(x, slope.dtype) * 3)) for x in finite), results

    parts = [backend.array(x).requires_grad_() for x in (*arrays, slope)]
    total, results = loss(*parts)
    grads = xp.autograd.grad(total, parts)
    results |= {f"gradient of {x}": g for x, g in zip(names, grads, strict=True)}
    return {name: backend.numpy(x) for name, x in results.items()}


def exact(backend, arrays, slope, **options):
    """`outcomes` of the generic pass in float64: in float32 it errs as much as the kernels do."""
    arrays = [x.astype("float64") for x in arrays]
    return outcomes(backend, "generic", arrays, slope.astype("float64"), **options)


def assert_same(got, expected, tolerance):
    assert got.keys() == expected.keys()
    for name, x in got.items():
        size = max(np.abs(np.where(np.isfinite(expected[name]), expected[name], 0)).max(), 1)
        if name == "gradient of slope":
            size *= 3  # its terms, one for each query, cancel to less than a tenth of their sizes
        np.testing.assert_allclose(x, expected[name], atol=tolerance * size, rtol=0, err_msg=name)


class TestAgainstGeneric:
    @pytest.mark.parametrize("name", MASKS)
    def test_values_and_gradients(self, backend, kernel, rng, name):
        key_heads = 1 if name in ("left padding", "window", "offset") else 2
        arrays = [x.astype("float32") for x in draw(rng, key_heads=key_heads)]
        slope = np.asarray([0.4, 0.9], "float32")
        options = MASKS[name](backend.array) | {"enable_gqa": True}
        expected = exact(backend, arrays, slope, **options)
        assert_same(outcomes(backend, kernel, arrays, slope, **options), expected, 1e-5)

    def test_half_precision(self, backend, kernel, rng):
        halves = [x.astype("float16") for x in draw(rng, n_queries=140)]
        slope = np.asarray([0.4, 0.9], "float32")
        expected = exact(backend, halves, slope, is_causal=True)
        got = outcomes(backend, kernel, halves, slope, is_causal=True)
        assert got["output"].dtype == np.float16
        assert got["state output"].dtype == np.float32
        # The products round weights and gradients of logits to 11 bits.
        assert_same(got, expected, 3e-3)

    @pytest.mark.parametrize(
        ("batch", "width", "n_values"), [((), 1, 17), ((3,), 64, 33), ((2, 1, 2), 5, 1)]
    )
    def test_shapes(self, backend, kernel, rng, batch, width, n_values):
        q = backend.array(rng.normal(size=(*batch, 9, width)), "float32")
        k, v = (
            backend.array(rng.normal(size=(*batch[1:], 13, e)), "float32") for e in (width, n_values)
        )
        options = {"is_causal": True, "n_keys": backend.array(np.arange(9) + 2)}
        expected = it.attention(q, k, v, implementation="generic", **options)
        backend.assert_close(
            it.attention(q, k, v, implementation=kernel, **options), expected, atol=1e-5
        )

    def test_sinks(self, backend, kernel, rng):
        arrays = [x.astype("float32") for x in draw(rng)]
        slope = np.asarray([0.4, 0.9], "float32")
        options = {"is_causal": True, "sinks": backend.array(np.asarray([0.5, -math.inf], "float32"))}
        expected = exact(backend, arrays, slope, **options)
        assert_same(outcomes(backend, kernel, arrays, slope, **options), expected, 1e-5)

    def test_memory_order(self, backend, kernel, rng):
        q, k, v = (backend.array(x.swapaxes(1, 2).copy(), "float32").swapaxes(1, 2) for x in draw(rng))
        expected = it.attention(q, k, v, implementation="generic")
        backend.assert_close(it.attention(q, k, v, implementation=kernel), expected, atol=1e-5)
        q, k = (x.swapaxes(-1, -2).contiguous().swapaxes(-1, -2) for x in (q, k))
        backend.assert_close(it.attention(q, k, v, implementation=kernel), expected, atol=1e-5)

    def test_rows_far_apart(self, backend, kernel, rng):
        # Whose places in a block would not fit in 32 bits. Others are not copied.
        from isentropic._attention.triton import _in_blocks

        store = backend.array(np.zeros(2**25 + 64), "float16")
        near, far = (store.as_strided((1, 1, 2, 16), (0, 0, step, 1)) for step in (2**24, 2**25))
        assert _in_blocks(near) is near
        assert _in_blocks(far).stride() == (32, 32, 16, 1)
        offset = store[1:].as_strided((1, 1, 2, 16), (32, 32, 16, 1), 1)
        assert _in_blocks(offset).storage_offset() == 0

    def test_state_with_a_sink(self, backend, kernel, rng):
        q, k, v = (backend.array(x, "float32") for x in draw(rng))
        merged = []
        for implementation in ("generic", kernel):
            state = it.attention_state(q, k, v, law=None, implementation=implementation)
            zero = state.normalizer * 0
            sink = it.AttentionState(zero + 1.5, zero + 1, state.weighted_value * 0, zero)
            merged.append(it.merge_states(state, sink))
        backend.assert_close(merged[1].output(), merged[0].output(), atol=1e-5)
        backend.assert_close(merged[1].entropy(), merged[0].entropy(), atol=1e-5)

    @pytest.mark.parametrize(
        ("name", "poisoned", "poison"),
        [
            ("window", 1, np.nan),
            ("none", 2, np.nan),
            ("causal", 0, np.inf),
            ("left padding", 2, np.inf),
        ],
    )
    def test_what_is_seen_and_not_finite(self, backend, kernel, rng, name, poisoned, poison):
        arrays = draw(rng)
        arrays[poisoned][..., 25, 3] = poison
        q, k, v = (backend.array(x, "float32") for x in arrays)
        results = []
        for implementation in ("generic", kernel):
            options = MASKS[name](backend.array) | {"implementation": implementation}
            state = it.attention_state(q, k, v, **options)
            entropy = it.attention_entropy(q, k, **options)
            output = it.attention(q, k, v, **options)
            results.append((output, entropy, state.output(), state.entropy(), state.log_normalizer()))
        for expected, got in zip(*results, strict=True):
            np.testing.assert_allclose(backend.numpy(got), backend.numpy(expected), atol=1e-5)

    @pytest.mark.parametrize("poisoned", [1, 2])
    def test_what_is_hidden_and_not_finite(self, backend, kernel, rng, poisoned):
        arrays = [x.astype("float32") for x in draw(rng)]
        slope = np.asarray([0.4, 0.9], "float32")
        options = {"mask": masks.padding(37) & masks.window(20)}
        expected = exact(backend, arrays, slope, **options)
        arrays[poisoned][..., 38:, :] = np.nan
        got = outcomes(backend, kernel, arrays, slope, **options)
        assert_same(got, expected, 1e-5)

    def test_logits_of_a_large_offset(self, backend, kernel, rng):
        # The moment and the entropy are centered, so that an offset of the logits costs no digits
        # beyond those of the logits themselves.
        q, k, _ = (x.astype("float32") for x in draw(rng))
        q[..., 0], k[..., 0] = 16.0, 256.0
        options = {"law": None, "scale": 1.0}
        p = oracles.attention(q, k, scale=1.0).weights
        h = it.attention_entropy(*map(backend.array, (q, k)), implementation=kernel, **options)
        np.testing.assert_allclose(backend.numpy(h), oracles.entropy(p), atol=2e-2)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_query_that_is_not_finite_and_sees_no_key(backend, kernel, rng, poison):
    """Its results are those of every query without keys; where it sees keys, they are NaN."""
    arrays = draw(rng)
    arrays[0][..., 25, 3] = poison
    q, k, v = (backend.array(x, "float32") for x in arrays)
    mask = masks.padding(backend.array(np.asarray([[0], [35]])))
    for implementation in ("generic", kernel):
        options = {"mask": mask, "implementation": implementation}
        state = it.attention_state(q, k, v, **options)
        entropies = it.attention_entropy(q, k, **options), state.entropy()
        for x in (it.attention(q, k, v, **options), state.output(), *entropies):
            x = backend.numpy(x)
            np.testing.assert_array_equal(x[0], 0)
            rows = np.isnan(x[1]).reshape(2, 44, -1).all(-1)
            np.testing.assert_array_equal(rows, np.broadcast_to(np.arange(44) == 25, (2, 44)))
        normalizer = backend.numpy(state.log_normalizer())
        assert (normalizer[0] == -np.inf).all()


class TestRefused:
    def test_by_default(self, backend, kernel, rng):
        q, k, v = (backend.array(x, "float32") for x in draw(rng))
        why = it.attention_backends(q, k, v)[kernel]
        assert why == f"it runs only if `implementation` is {kernel!r}"

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"softcap": 3.0}, "no soft cap"),
            ({"mask": masks.window(2) | masks.padding(3)}, "gaps"),
            ({"order": 2.0}, "Shannon's entropy"),
        ],
    )
    def test_what_has_no_kernel(self, backend, kernel, rng, options, why):
        q, k, v = (backend.array(x, "float32") for x in draw(rng))
        assert why in it.attention_backends(q, k, v, implementation=kernel, **options)[kernel]

    def test_float64(self, backend, kernel, rng):
        q, k, v = map(backend.array, draw(rng))
        with pytest.raises(ValueError, match=f"{kernel}: it has no float64"):
            it.attention(q, k, v, implementation=kernel)

    def test_wide_heads(self, backend, kernel, rng):
        for dtype, width, why in (("float16", 257, "1 to 256"), ("float32", 129, "more than 128")):
            q, k, v = (backend.array(x, dtype) for x in draw(rng, width=width))
            with pytest.raises(ValueError, match=f"{why} features"):
                it.attention(q, k, v, implementation=kernel)

    def test_without_triton(self, backend, monkeypatch):
        if backend.library != "torch":
            pytest.skip("needs no other package")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        x = backend.array(np.zeros((3, 7)), "float32")
        with pytest.raises(ValueError, match="Triton is not installed: pip install triton"):
            it.attention(x, x, x, implementation="triton")

    def test_calls_that_do_not_name_them_import_nothing(self, backend):
        if backend.library != "torch":
            pytest.skip("the kernels are for other libraries")
        program = (
            "import sys, torch as xp, isentropic as it; before = set(sys.modules)\n"
            "x = xp.zeros((3, 2)); it.attention(x, x, x); it.attention_backends(x, x)\n"
            "found = {m for m in set(sys.modules) - before if 'triton' in m}\n"
            "found = {m for m in found if not m.startswith('isentropic.')}\n"
            "assert not found, found\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


def test_triton_runs_unnamed_where_it_was_timed(backend, kernel, rng, monkeypatch, set_blocks):
    from isentropic._attention import triton

    monkeypatch.setattr(triton, "_kind", lambda device: "hopper")
    set_blocks()  # forgets the backends chosen so far
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    class Subclass(torch.Tensor):
        pass

    half, single = (backend.array(rng.normal(size=(2, 70, 16)), t) for t in ("float16", "float32"))

    def can_run(q, k, v=None):
        why = it.attention_backends(q, k, v, order=1.0)["triton"]
        # On a CPU the NumPy pass comes first.
        return why in ("runs", "another backend comes first")

    assert can_run(half, half)
    assert not can_run(half, half, half)
    assert not can_run(single, single)
    assert not can_run(half.clone().requires_grad_(), half)
    assert not can_run(half[:, :63], half)  # few queries
    assert not can_run(half.as_subclass(Subclass), half)
    with FlopCounterMode(display=False):
        assert not can_run(half, half)
    monkeypatch.setattr(triton, "_kind", lambda device: "nvidia")
    set_blocks()
    assert not can_run(half, half)
