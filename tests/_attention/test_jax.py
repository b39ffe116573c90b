"""The kernels for JAX, that of JAX and that for one head at a time, agree with the generic pass."""

import numpy as np
import pytest

import isentropic as it
from isentropic import laws, masks
from isentropic._attention import jax as _jax

jax = pytest.importorskip("jax")
jnp = jax.numpy


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "jax"):
        pytest.skip("belongs to the backend jax")
    with jax.numpy_rank_promotion("raise"):  # as in JAX's own tests
        yield


class TestNativeKernel:
    """`jax.nn.dot_product_attention`, by itself used where it is cuDNN's."""

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("batch", [(), (2, 4)])
    def test_values_and_gradients(self, rng, is_causal, batch):
        q, k, v = (jnp.asarray(rng.normal(size=(*batch, 6, 8)), "float32") for _ in range(3))

        def loss(q, k, v, implementation):
            out = it.attention(q, k, v, is_causal=is_causal, implementation=implementation)
            return jnp.sin(out).sum(), out

        both = [
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True), static_argnums=3)(
                q, k, v, i
            )
            for i in ("jax_nn", "generic")
        ]
        for a, b in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_grouped_heads_and_what_is_not_finite(self, rng):
        q = rng.normal(size=(4, 6, 8)).astype("float32")
        k, v = rng.normal(size=(2, 2, 6, 8)).astype("float32")
        k[0, 4] = np.nan

        def call(q, k, v, implementation):
            return it.attention(q, k, v, is_causal=True, enable_gqa=True, implementation=implementation)

        got, expected = (jax.jit(call, static_argnums=3)(q, k, v, i) for i in ("jax_nn", "generic"))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        assert np.isnan(got[0, 4:]).all()
        assert np.isfinite(got[0, :4]).all()

    def test_is_chosen_on_a_gpu_alone_and_for_half_precision(self, monkeypatch, set_blocks):
        x = {
            dtype: jax.ShapeDtypeStruct((2, 64, 16), dtype)
            for dtype in ("float32", "float16", "bfloat16")
        }

        def used(dtype, **options):
            # As for cuDNN, but computed by what there is on every machine.
            calls = []
            original = jax.nn.dot_product_attention
            with monkeypatch.context() as patch:
                patch.setattr(
                    jax.nn,
                    "dot_product_attention",
                    lambda *a, implementation, **k: (
                        calls.append(implementation) or original(*a, implementation="xla", **k)
                    ),
                )
                jax.eval_shape(lambda q: it.attention(q, q, q, **options), x[dtype])
            return calls

        assert used("bfloat16") == []
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        set_blocks()  # which forgets the choices for the CPU
        assert used("bfloat16") == used("float16", is_causal=True) == ["cudnn"]
        assert used("float32") == []
        assert used("bfloat16", softcap=3.0) == []
        assert used("bfloat16", mask=masks.window(3)) == []
        assert used("bfloat16", implementation="generic") == []


# Each call has the order of another entropy: each pass of each of them is a program to compile.
_HEAD_CALLS = {
    "plain": (None, {}),
    "causal": (np.inf, {"is_causal": True, "law": laws.AffineLog(jnp.asarray([[0.2], [0.4]]))}),
    "grouped": (1, {"enable_gqa": True, "mask": masks.window(3) & masks.padding(jnp.asarray([[5], [7]]))}),
    "bias": (2, {"softcap": 2.0, "bias": jnp.linspace(-1, 1, 2 * 63).reshape(2, 1, 9, 7)}),
}  # fmt: skip


class TestOneHeadAtATime:
    """The pass for CPUs, with several tiles and ragged ends, against the generic pass."""

    @pytest.fixture(autouse=True)
    def _small_tiles(self, set_blocks):
        set_blocks(jax_rows=4, jax_columns=3, jax_min_length=0)

    @staticmethod
    def _arrays(rng, dtype="float64", heads=2):
        q = jnp.asarray(rng.normal(size=(2, 2, 9, 5)), dtype)
        return q, *jnp.asarray(rng.normal(size=(2, 2, heads, 7, 5)), dtype)

    @staticmethod
    def _results(q, k, v, order, **options):
        """The state and the output, or the entropy of another order than 1."""
        state = it.attention_state(q, k, v, **options)
        parts = [*state[:4], state.output()]
        if order is None:
            parts.append(it.attention(q, k, v, **options))
        elif order != 1:
            parts.append(it.attention_entropy(q, k, order=order, **options))
        return [jnp.where(jnp.isfinite(x), x, 0.0) for x in parts]

    @pytest.mark.parametrize("call", sorted(_HEAD_CALLS))
    def test_values_and_gradients(self, rng, x64, call):
        order, options = _HEAD_CALLS[call]
        arrays = self._arrays(rng, heads=1 if "enable_gqa" in options else 2)

        def loss(arrays, bias, implementation):
            given = options if bias is None else options | {"bias": bias}
            results = self._results(*arrays, order, **given, implementation=implementation)
            return sum(jnp.sin(x * (i + 1)).sum() for i, x in enumerate(results)), results

        of = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
        both = [of(arrays, options.get("bias"), i) for i in ("jax_tiles", "generic")]
        for got, expected in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)

    def test_second_and_forward_derivatives_and_maps(self, rng, x64):
        q, k, v = (x[0, 0] for x in self._arrays(rng))

        def loss(q, implementation):
            state = it.attention_state(q, k, v, is_causal=True, implementation=implementation)
            return (state.output() ** 2).sum() + jnp.sin(state.maximum + state.entropy()).sum()

        hessian = jax.jit(jax.hessian(loss), static_argnums=1)  # forward over reverse
        expected = hessian(q[2:], "generic")
        twice_reverse = jax.jit(jax.jacrev(jax.jacrev(loss)), static_argnums=1)
        for transformed in (hessian, twice_reverse):
            np.testing.assert_allclose(transformed(q[2:], "jax_tiles"), expected, rtol=1e-8, atol=1e-10)

    def test_hidden_keys_and_empty_rows(self, rng, x64):
        q, k, v = self._arrays(rng)
        visible = jnp.ones((9, 7), bool).at[:, 2].set(False).at[4].set(False)

        def loss(q, k, v, implementation):
            results = self._results(q, k, v, None, mask=visible, implementation=implementation)
            return sum(jnp.sum(x) for x in results)

        of = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
        clean = of(q, k, v, "generic")
        poisoned = (
            q.at[..., 4, :].set(jnp.nan),
            k.at[..., 2, :].set(jnp.inf),
            v.at[..., 2, :].set(jnp.nan),
        )
        for got, expected in zip(of(*poisoned, "jax_tiles"), clean, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)

    def test_is_chosen_for_long_calls_on_a_cpu(self, set_blocks, monkeypatch):
        set_blocks(jax_min_length=8)
        calls = []
        original = _jax._state
        monkeypatch.setattr(_jax, "_state", lambda *a, **k: calls.append(1) or original(*a, **k))
        for n, expected in ((7, 0), (8, 1)):
            jax.eval_shape(lambda q: it.attention(q, q, q), jax.ShapeDtypeStruct((2, n, 4), "float32"))
            assert len(calls) == expected
