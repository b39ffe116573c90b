"""The kernels of Triton agree with the generic pass and an oracle.

Without a GPU they run in the interpreter of Triton, which shows that the values are right. That they
compile is tested in `test_triton_compiler`.
"""

import importlib.util
import math
import subprocess
import sys

import array_api_compat.numpy as xp_of_numpy
import interpreted
import numpy as np
import oracles
import pytest

import isentropic as it
from isentropic import _triton_launch, laws, masks

# The interpreter of Triton computes a maximum by a function of NumPy that warns of rows of NaN.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")


@pytest.fixture
def kernel(backend, monkeypatch):
    """The name of the kernel's backend for the arrays of `backend`."""
    name = "triton"
    if backend.library not in ("torch", "jax"):
        pytest.skip("has no kernels")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if backend.library == "jax" and not backend.is_gpu:
        monkeypatch.setattr(_triton_launch, "launch_on_jax", interpreted.on_jax)
        monkeypatch.setattr("isentropic._attention.triton.is_installed", lambda module: True)
    x = backend.array(np.zeros((2, 2)), "float32")
    why = it.AttentionDistribution(x, x, implementation=name).backends(x)[name]
    if why == "the arrays are not on a GPU of NVIDIA or AMD":
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
    "soft cap": lambda a: {"is_causal": True, "softcap": 2.0},
    "bias": lambda a: {"bias": a(np.sin(np.arange(44 * 40)).reshape(44, 40), "float32")},
    "bias of a head": lambda a: {
        "mask": masks.window(20), "bias": a(np.cos(np.arange(80)).reshape(2, 1, 40), "float32"),
    },
}  # fmt: skip


def draw(rng, heads=2, key_heads=2, n_queries=44, n_keys=40, width=20, n_values=12):
    """Queries, keys and values that need several blocks, with ragged ends."""
    shapes = (heads, n_queries, width), (key_heads, n_keys, width), (key_heads, n_keys, n_values)
    return [rng.normal(size=(2, *shape)) for shape in shapes]


def outcomes(backend, implementation, arrays, slope, orders=(), **options):
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
            **{f"entropy {x}": it.attention_entropy(q, k, order=x, **given) for x in orders},
        }
        finite = [xp.where(xp.isfinite(x), x, 0.0) for x in results.values()]
        return sum(xp.sum(xp.sin(xp.astype(x, slope.dtype) * 3)) for x in finite), results

    if backend.library == "jax":
        import jax

        function = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
        grads, results = function(*map(backend.array, (*arrays, slope)))
    else:
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
        if name in ("left padding", "soft cap"):
            options["orders"] = (0.5, 2.0, math.inf)
        if "bias" in options and backend.library == "jax":
            pytest.skip("JAX may ask for the gradient of a bias")
        expected = exact(backend, arrays, slope, **options)
        assert_same(outcomes(backend, kernel, arrays, slope, **options), expected, 1e-5)

    @pytest.mark.parametrize("seed", range(4))
    def test_drawn_calls(self, backend, kernel, seed):
        rng = np.random.default_rng(seed)
        groups, heads_of_group = rng.integers(1, 4, 2)
        n_queries, n_keys = rng.integers(1, 90, 2)
        width, n_values = rng.integers(1, 40, 2)
        shapes = ((groups * heads_of_group, n_queries, width), (groups, n_keys, width))
        arrays = [rng.normal(size=s).astype("float32") for s in (*shapes, (groups, n_keys, n_values))]
        mask = [None, masks.causal(), masks.window(int(rng.integers(30)), int(rng.integers(30)))][
            seed % 3
        ]
        if rng.random() < 0.5:
            lengths = rng.integers(0, n_keys + 1, groups * heads_of_group)
            padding = masks.padding(backend.array(lengths), side="left" if seed % 2 else "right")
            mask = padding if mask is None else mask & padding
        options = {"mask": mask, "enable_gqa": True, "softcap": [None, 3.0][seed % 2]}
        slope = rng.normal(size=groups * heads_of_group).astype("float32")
        expected = exact(backend, arrays, slope, **options)
        assert_same(outcomes(backend, kernel, arrays, slope, **options), expected, 1e-5)

    def test_half_precision(self, backend, kernel, rng):
        if not backend.float64:
            pytest.skip("the reference is computed in float64")
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
        if backend.library != "torch":
            pytest.skip("its arrays are contiguous")
        q, k, v = (backend.array(x.swapaxes(1, 2).copy(), "float32").swapaxes(1, 2) for x in draw(rng))
        expected = it.attention(q, k, v, implementation="generic")
        backend.assert_close(it.attention(q, k, v, implementation=kernel), expected, atol=1e-5)
        q, k = (x.swapaxes(-1, -2).contiguous().swapaxes(-1, -2) for x in (q, k))
        backend.assert_close(it.attention(q, k, v, implementation=kernel), expected, atol=1e-5)

    def test_rows_far_apart(self, backend, kernel, rng):
        # Whose places in a block would not fit in 32 bits. Others are not copied.
        from isentropic._attention.triton import _in_rows

        if backend.library != "torch":
            pytest.skip("its arrays are contiguous")
        store = backend.array(np.zeros(2**25 + 64), "float16")
        near, far = (store.as_strided((1, 1, 2, 16), (0, 0, step, 1)) for step in (2**24, 2**25))
        assert _in_rows(backend.xp, near) is near
        assert _in_rows(backend.xp, far).stride() == (32, 32, 16, 1)
        offset = store[1:].as_strided((1, 1, 2, 16), (32, 32, 16, 1), 1)
        assert _in_rows(backend.xp, offset).storage_offset() == 0

    @pytest.mark.parametrize("is_padded", [False, True])
    def test_derivatives_of_gradients(self, backend, kernel, rng, is_padded):
        draws = [x[:, :, :9].astype("float32") for x in draw(rng)]
        mask = masks.causal()
        if is_padded:
            mask &= masks.padding(backend.array(np.asarray([[9], [5]])))
        found = []
        for implementation in ("generic", kernel):

            def loss(q, k, v, implementation=implementation):
                state = it.attention_state(q, k, v, mask=mask, implementation=implementation)
                return backend.xp.sum(backend.xp.sin(state.output())) + backend.xp.sum(state.entropy())

            arrays = list(map(backend.array, draws))
            if backend.library == "jax":
                import jax

                def slope(q, k, v, loss=loss):
                    return sum((x**2).sum() for x in jax.grad(loss, argnums=(0, 1, 2))(q, k, v))

                found.append(jax.grad(slope, argnums=(0, 1, 2))(*arrays))
                continue
            arrays = [x.requires_grad_() for x in arrays]
            first = backend.xp.autograd.grad(loss(*arrays), arrays, create_graph=True)
            found.append(backend.xp.autograd.grad(sum((x**2).sum() for x in first), arrays))
        for expected, got in zip(*found, strict=True):
            np.testing.assert_allclose(backend.numpy(got), backend.numpy(expected), atol=1e-4)

    @pytest.mark.parametrize("name", ["causal", "left padding", "soft cap", "bias"])
    def test_statistics(self, backend, kernel, rng, monkeypatch, name):
        from isentropic._attention import triton

        if backend.library != "torch":
            pytest.skip("JAX may ask for a gradient")
        q, k, _ = (backend.array(x, "float32") for x in draw(rng))
        sinks = backend.array(np.asarray([0.5, -math.inf]), "float32")
        options = MASKS[name](backend.array) | {"sinks": sinks}
        expected = it.AttentionDistribution(3 * q, k, **options).statistics()
        monkeypatch.setattr(triton, "takes", lambda plan, order: True)
        got = it.AttentionDistribution(3 * q, k, **options).statistics()
        for field, x, y in zip(got._fields, got, expected, strict=True):
            x, y = backend.numpy(x), backend.numpy(y)
            np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5, err_msg=field)

    def test_inside_torch_compile(self, backend, kernel, monkeypatch):
        if backend.library != "torch":
            pytest.skip("JAX traces the kernels themselves")
        import torch

        from isentropic._attention import torch_operator

        calls = []
        monkeypatch.setattr(
            torch_operator.Call, "uses_triton", lambda self, plan: calls.append(self.order) or True
        )
        draws = draw(np.random.default_rng(0), n_queries=9, n_keys=9)
        slope = torch.tensor([0.4, 0.9])
        options = {"mask": masks.window(3) & masks.padding(7), "softcap": 4.0}

        def results(q, k, v, slope, implementation=None):
            given = options | {"law": laws.AffineLog(slope, 0.5), "implementation": implementation}
            state = it.attention_state(q, k, v, **given)
            out = it.attention(q, k, v, **given)
            return (out, state.output(), state.entropy(), state.maximum.clamp(-9)), sum(
                x.sin().sum() for x in (out, state.output(), state.entropy(), state.maximum.clamp(-9))
            )

        found = []
        for function in (
            lambda *arrays: results(*arrays, implementation="generic"),
            torch.compile(results, backend="aot_eager", fullgraph=True),
        ):
            arrays = [backend.array(x, "float32").requires_grad_() for x in draws]
            arrays.append(slope.clone().requires_grad_())
            values, loss = function(*arrays)
            found.append([*values, *torch.autograd.grad(loss, arrays)])
        assert {1.0, None} <= set(calls)
        for expected, got in zip(*found, strict=True):
            np.testing.assert_allclose(backend.numpy(got), backend.numpy(expected), atol=2e-5)

    def test_gradients_that_are_not_finite(self, backend, kernel, rng):
        """They reach the values that the query sees, as scalers of a loss need it, and no others."""
        if backend.library != "torch":
            pytest.skip("belongs to autograd")
        q, k, v = (backend.array(x, "float32") for x in draw(rng))
        mask = masks.window(9)
        out = it.attention(q, k, v.requires_grad_(), mask=mask, implementation=kernel)
        upstream = backend.xp.ones_like(out)
        upstream[0, 0, 30] = math.inf
        (gradient,) = backend.xp.autograd.grad(out, v, upstream)
        is_seen = np.zeros((2, 2, 40), bool)
        is_seen[0, 0] = backend.numpy(it.AttentionDistribution(q, k, mask=mask).weights())[0, 0, 30] > 0
        is_finite = np.isfinite(backend.numpy(gradient))
        np.testing.assert_array_equal(is_finite, np.broadcast_to(~is_seen[..., None], v.shape))

    def test_a_law_and_a_nan_that_sees_no_key(self, backend, kernel, rng):
        if backend.library != "torch":
            pytest.skip("belongs to autograd")
        arrays = [x.astype("float32") for x in draw(rng)]
        arrays[0][0, :, 7] = np.nan
        mask = masks.padding(backend.array(np.asarray([[0], [35]])))
        found = []
        for implementation in ("generic", kernel):
            slope = backend.array(np.asarray([0.4, 0.9]), "float32").requires_grad_()
            options = {"law": laws.AffineLog(slope, 0.5), "implementation": implementation}
            out = it.attention(*map(backend.array, arrays), mask=mask, **options)
            found.append(backend.numpy(backend.xp.autograd.grad(out.sin().sum(), slope)[0]))
        np.testing.assert_allclose(found[1], found[0], rtol=1e-4)

    def test_frozen_keys_and_values(self, backend, kernel, rng, monkeypatch):
        from isentropic._attention import triton

        if backend.library != "torch":
            pytest.skip("belongs to autograd")
        q, k, v = (backend.array(x, "float32") for x in draw(rng))
        q.requires_grad_()
        launched, launch = [], triton.launch
        monkeypatch.setattr(
            triton, "launch", lambda xp, call: launched.append(call.kernel.__name__) or launch(xp, call)
        )
        out = it.attention(q, k, v, is_causal=True, implementation=kernel)
        out.sin().sum().backward()
        assert launched == ["attention_kernel", "queries_kernel"]

    def test_soft_caps_that_change_little(self, backend, kernel, rng):
        q, k, _ = (backend.array(x, "float32") for x in draw(rng))
        for softcap in (1e3, 1e5):
            got, expected = (
                backend.numpy(it.attention_entropy(q, k, softcap=softcap, implementation=x))
                for x in (kernel, "generic")
            )
            np.testing.assert_allclose(got, expected, atol=2e-6)

    def test_batched_gradients(self, backend, kernel, rng):
        if backend.library != "torch":
            pytest.skip("belongs to autograd")
        q, k, v = (backend.array(x[0, :, :9]).float().requires_grad_() for x in draw(rng))
        upstream = backend.array(rng.normal(size=(3, 2, 9, 12)), "float32")
        found = []
        for implementation in ("generic", kernel):
            out = it.attention(q, k, v, is_causal=True, implementation=implementation)
            found.append(backend.xp.autograd.grad(out, (q, k, v), upstream, is_grads_batched=True))
        for expected, got in zip(*found, strict=True):
            np.testing.assert_allclose(backend.numpy(got), backend.numpy(expected), atol=1e-5)

    @pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0)])
    def test_vmap(self, backend, kernel, rng, axes):
        if backend.library != "jax":
            pytest.skip("torch.func takes another backend")
        import jax

        arrays = [backend.array(x[:, :, :30], "float32") for x in draw(rng)]
        arrays = [
            x if axis is None else jax.numpy.stack([x, x / 2, x - 1])
            for x, axis in zip(arrays, axes, strict=True)
        ]
        found = []
        for implementation in ("generic", kernel):

            def loss(q, k, v, implementation=implementation):
                state = it.attention_state(q, k, v, is_causal=True, implementation=implementation)
                return jax.numpy.sin(state.output()).sum() + (state.entropy() * state.maximum).sum()

            function = jax.value_and_grad(loss, argnums=(0, 1, 2))
            found.append(jax.tree.leaves(jax.vmap(function, in_axes=axes)(*arrays)))
        for expected, got in zip(*found, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-5)

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
        why = it.AttentionDistribution(q, k).backends(v)[kernel]
        assert why == f"the interpreter of Triton runs only if `implementation` is {kernel!r}"

    @pytest.mark.parametrize(
        ("mask", "order", "why"),
        [
            (masks.window(2) | masks.padding(3), None, "gaps"),
            (None, 0.0, "no entropies of order 0 or near 1"),
            (None, 1.001, "no entropies of order 0 or near 1"),
        ],
    )
    def test_what_has_no_kernel(self, backend, kernel, rng, mask, order, why):
        q, k, v = (backend.array(x, "float32") for x in draw(rng))
        assert (
            why
            in it.AttentionDistribution(q, k, implementation=kernel, mask=mask).backends(
                v, order=order
            )[kernel]
        )

    def test_the_gradient_of_a_bias(self, backend, kernel, rng):
        q, k, v = (backend.array(x, "float32") for x in draw(rng))
        bias = backend.array(np.zeros((44, 40)), "float32")
        if backend.library == "torch":
            bias.requires_grad_()
        why = it.AttentionDistribution(q, k, bias=bias, implementation=kernel).backends(v)[kernel]
        assert "does not compute the gradient of a bias" in why

    def test_float64(self, backend, kernel, rng):
        if not backend.float64:
            pytest.skip("there is no float64")
        q, k, v = map(backend.array, draw(rng))
        with pytest.raises(ValueError, match=f"{kernel}: it has no float64"):
            it.attention(q, k, v, implementation=kernel)

    def test_wide_heads(self, backend, kernel, rng):
        for dtype, width, why in (("float16", 257, "1 to 256"), ("float32", 129, "more than 128")):
            q, k, v = (backend.array(x, dtype) for x in draw(rng, width=width))
            with pytest.raises(ValueError, match=f"{why} features"):
                it.attention(q, k, v, implementation=kernel)

    def test_without_triton(self, backend, monkeypatch):
        if backend.library not in ("torch", "jax"):
            pytest.skip("the kernels are for other libraries")
        from isentropic._attention import triton

        monkeypatch.setattr(triton, "is_installed", lambda name: False)
        x = backend.array(np.zeros((3, 7)), "float32")
        with pytest.raises(ValueError, match="Triton is not installed: pip install triton"):
            it.attention(x, x, x, implementation="triton")

    def test_calls_that_do_not_name_them_import_nothing(self, backend):
        if backend.library != "torch":
            pytest.skip("the kernels are for other libraries")
        program = (
            "import sys, torch as xp, isentropic as it; before = set(sys.modules)\n"
            "x = xp.zeros((3, 2)); it.attention(x, x, x); it.AttentionDistribution(x, x).backends()\n"
            "found = {m for m in set(sys.modules) - before if 'triton' in m}\n"
            "found = {m for m in found if not m.startswith('isentropic.')}\n"
            "assert not found, found\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


class TestDefault:
    @pytest.fixture
    def is_on_gpu(self, backend, kernel, monkeypatch, set_blocks):
        """Pretend that the arrays are on a GPU, where the self-test passes."""
        from isentropic._attention import triton

        if backend.library != "torch":
            pytest.skip("belongs to the tensors of the test")
        monkeypatch.setattr(triton, "is_interpreted", lambda: False)
        monkeypatch.setattr(triton, "_is_on_gpu", lambda plan: True)
        monkeypatch.setattr(triton, "gpu_kind", lambda xp, device: "nvidia")
        monkeypatch.setattr(triton, "self_test_failure", lambda *facts: None)
        set_blocks()  # forgets the backends chosen so far

    def test_all_but_what_has_no_kernel(self, backend, is_on_gpu, rng):
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        class Subclass(torch.Tensor):
            pass

        half, double = (backend.array(rng.normal(size=(2, 70, 16)), t) for t in ("float16", "float64"))

        def can_run(q, k, v=None, order=1.0, **options):
            why = it.AttentionDistribution(q, k, **options).backends(v, order=order)["triton"]
            # On a CPU the NumPy pass comes first.
            return why in ("runs", "another backend comes first")

        assert can_run(half, half)
        assert can_run(half, half, half, is_causal=True)
        assert can_run(half.float(), half.float(), softcap=9.0, order=2.0)
        assert can_run(half.clone().requires_grad_(), half)
        assert (
            it.AttentionDistribution(half.clone().requires_grad_(), half).backends()["triton"] == "runs"
        )
        assert not can_run(double, double)
        assert not can_run(half.as_subclass(Subclass), half)
        with FlopCounterMode(display=False):
            assert not can_run(half, half)

    def test_masks_of_intervals(self, backend, is_on_gpu, rng):
        """PyTorch's own kernel would materialize them. It keeps causal outputs, and other masks."""
        x = backend.array(rng.normal(size=(2, 70, 16)), "float32").requires_grad_()
        ends = backend.array([70, 30], "int64")
        dense = masks.window(3) | masks.segments(backend.array(np.arange(70) % 3, "int64"))
        cases = {
            "triton": (
                masks.window(3),
                masks.packed([0, 20, 70]) & masks.causal(),
                masks.padding(ends),
            ),
            "sdpa": (masks.causal(), None, dense),
        }
        for expected, mask in [(name, mask) for name, given in cases.items() for mask in given]:
            found = it.AttentionDistribution(x, x, mask=mask).backends(x)
            assert found[expected] == "runs", (mask, found)

    def test_masks_under_torch_compile(self, backend, is_on_gpu, rng, monkeypatch):
        """They go to the operator, which runs the kernels."""
        from isentropic._attention import plan, torch, torch_operator

        x = backend.array(rng.normal(size=(2, 70, 16)), "float32")
        device, made = backend.xp.asarray(0.0, device="meta").device, []
        monkeypatch.setattr(torch_operator, "has_kernels", lambda device: True)
        for mask in (masks.window(3), masks.causal(), masks.window(3) | masks.window(0)):
            one, _ = plan.prepare(plan.Arguments(x, x, x, mask))
            traced = one.replaced(frame=one.frame.replaced(is_compiling=True, device=device))
            made.append(torch.sdpa_unsupported_reason(traced, None, False))
        assert made == ["it would materialize the L×S mask", None, None]

    def test_not_where_the_self_test_fails(self, backend, is_on_gpu, rng, monkeypatch, set_blocks):
        from isentropic._attention import triton

        monkeypatch.setattr(triton, "self_test_failure", lambda *facts: "a self-test failed")
        set_blocks()
        x = backend.array(rng.normal(size=(2, 70, 16)), "float16")
        assert it.AttentionDistribution(x, x).backends()["triton"] == "a self-test failed"


class TestSelfTest:
    @pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-6), ("float16", 1e-3)])
    def test_passes(self, backend, kernel, dtype, error):
        from isentropic._attention import triton

        x = backend.array(np.zeros(1), dtype)
        assert triton._self_test_error(backend.xp, backend.device, x.dtype) < error
        _triton_launch._failures.clear()
        assert triton.self_test_failure(backend.xp, backend.device, x.dtype) is None
        if backend.library == "jax":
            import jax

            def traced(x):
                _triton_launch._failures.clear()
                assert triton.self_test_failure(backend.xp, None, x.dtype) is None
                return x

            jax.jit(jax.vmap(traced))(x)

    @pytest.mark.parametrize(
        ("change", "why"), [(lambda x: x + 1, "off by"), (lambda x: x.missing, "AttributeError")]
    )
    def test_warns(self, backend, kernel, monkeypatch, change, why):
        from isentropic._attention import triton

        right = triton.forward

        def wrong(setting, blocks):
            results = right(setting, blocks)
            return results._replace(moment=change(results.moment))

        monkeypatch.setattr(triton, "forward", wrong)
        _triton_launch._failures.clear()
        with pytest.warns(UserWarning, match=f"The Triton kernels are not used, .*{why}"):
            assert why in triton.self_test_failure(backend.xp, backend.device, backend.xp.float32)
        _triton_launch._failures.clear()

    def test_takes_place_once_for_a_device_without_a_hash(self, backend, kernel, monkeypatch):
        from isentropic._attention import triton

        class Device:  # as CuPy's
            __hash__ = None

            def __str__(self):
                return "<CUDA Device 0>"

        errors = iter([1e-7])
        monkeypatch.setattr(triton, "_self_test_error", lambda *facts: next(errors))
        _triton_launch._failures.clear()
        for _ in range(2):
            assert triton.self_test_failure(backend.xp, Device(), backend.xp.float32) is None
        _triton_launch._failures.clear()

    def test_of_arrays_in_the_way_of_cupy(self, backend, monkeypatch):
        """CuPy's arrays are those of NumPy but for the launcher, which `test_triton_compiler` tests."""
        from isentropic._attention import triton

        if backend.name != "torch" or importlib.util.find_spec("triton") is None:
            pytest.skip("belongs to one session, which has Triton")
        monkeypatch.setattr(_triton_launch, "_launcher", lambda xp: interpreted.on_numpy)
        for dtype, error in ((np.float32, 2e-6), (np.float16, 1e-3)):
            assert triton._self_test_error(xp_of_numpy, "cpu", np.dtype(dtype)) < error


class TestOutputsOfOtherKernels:
    """Outputs of PyTorch's own kernel, in which a NaN reaches queries that do not see it."""

    @pytest.fixture
    def poisoned(self, backend, kernel, rng):
        if backend.library != "torch":
            pytest.skip("belongs to PyTorch's own kernel")
        q, k, v = (backend.array(rng.normal(size=(2, 2, 150, 32)), "float32") for _ in range(3))
        k[0, 0, 70], v[1, 1, 100, 3], q[0, 1, 5] = math.nan, math.inf, math.nan
        return q, k, v

    @pytest.mark.parametrize("is_transposed", [False, True])
    def test_are_repaired(self, backend, poisoned, is_transposed):
        from isentropic._attention import triton
        from isentropic._attention.plan import Arguments, prepare

        out = backend.xp.nn.functional.scaled_dot_product_attention(*poisoned, is_causal=True)
        if is_transposed:
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        plan, operands = prepare(Arguments(*poisoned, is_causal=True))
        names = ("query", "key", "value")
        operands = operands._replace(**dict(zip(names, poisoned, strict=True)), is_raw=True)
        expected = it.attention(*poisoned, is_causal=True, law=None, implementation="generic")
        expected = backend.numpy(expected)
        assert not np.array_equal(np.isnan(backend.numpy(out)), np.isnan(expected))
        triton.repair(plan, operands, out)
        np.testing.assert_allclose(backend.numpy(out), expected, atol=1e-5)

    def test_copies_are_finite(self, backend, poisoned):
        from isentropic._attention import triton

        views = (poisoned[2].swapaxes(1, 2)[..., :5], poisoned[0][0, 1])
        empty = [poisoned[0][:, :, :0], poisoned[0][:0], poisoned[0][..., :0]]
        for x in (*poisoned, *views, *empty):
            x = x.detach().requires_grad_()
            copy, is_finite = triton.finite_rows(x)
            given = backend.numpy(x)
            expected = np.where(np.isfinite(given), given, 0)
            np.testing.assert_array_equal(backend.numpy(copy), expected)
            np.testing.assert_array_equal(backend.numpy(is_finite), np.isfinite(given).all(-1))
            copy.sum().backward()
            assert x.numel() == 0 or (x.grad == 1).all()
