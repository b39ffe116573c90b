"""`attention_fn` computes the attention in the modules of Flax, nnx and linen."""

import inspect
from functools import partial

import numpy as np
import pytest

import isentropic as it
from isentropic import laws, masks

pytest.importorskip("flax")
import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax_x64 import enable_x64

from isentropic.integrations.jax import attention_fn

N, L, S, H, E = 2, 5, 7, 4, 8
standard = partial(attention_fn, law=None)
# With a rate, though there is no dropout, nnx forms the weights, in the dtype of the arrays; without
# it takes a kernel that computes in float32.
theirs = partial(nnx.dot_product_attention, dropout_rate=0.5, deterministic=True)


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "jax"):
        pytest.skip("belongs to the backend jax")


@pytest.fixture
def dtype():
    with enable_x64(True):
        yield "float64"


def assert_close(got, want, **tolerance):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    exact = got.dtype == np.float64
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if exact else {"rtol": 2e-5, "atol": 2e-5} | tolerance
    np.testing.assert_allclose(got, want, **tolerance)


def arrays(rng, dtype="float32", *, batch=(N,), kv_heads=H, n_queries=L, n_keys=S, value_dim=E):
    shapes = ((n_queries, H, E), (n_keys, kv_heads, E), (n_keys, kv_heads, value_dim))
    return [jnp.asarray(rng.normal(size=(*batch, *shape)), dtype) for shape in shapes]


def make(fn, *, decode=False, **options):
    return nnx.MultiHeadAttention(
        num_heads=H, in_features=12, qkv_features=32, decode=decode, attention_fn=fn, rngs=nnx.Rngs(0),
        bias_init=nnx.initializers.normal(1.0), **options,
    )  # fmt: skip


class TestAgainstFlax:
    """``law=None`` is the attention of nnx and of linen."""

    @pytest.mark.parametrize("batch", [(), (N,), (2, 3)])
    def test_batches(self, rng, dtype, batch):
        q, k, v = arrays(rng, dtype, batch=batch)
        assert_close(standard(q, k, v), theirs(q, k, v))
        assert_close(standard(q, k, v), linen.dot_product_attention(q, k, v))

    @pytest.mark.parametrize("kv_heads", [1, 2])
    def test_grouped_heads(self, rng, dtype, kv_heads):
        q, k, v = arrays(rng, dtype, kv_heads=kv_heads)
        assert_close(standard(q, k, v), theirs(q, k, v))

    def test_masks_and_biases(self, rng, dtype):
        q, k, v = arrays(rng, dtype, value_dim=3)
        bias = jnp.asarray(rng.normal(size=(H, L, S)), dtype)
        mask = rng.random((N, 1, L, S)) < 0.6
        mask[..., 0] = True
        for options in ({"mask": mask}, {"bias": bias}, {"mask": mask * 1.0, "bias": bias}):
            options = {name: jnp.asarray(x) for name, x in options.items()}
            assert_close(standard(q, k, v, **options), theirs(q, k, v, **options))
            want = linen.dot_product_attention(q, k, v, **options)
            assert_close(standard(q, k, v, **options), want)
        positional = (bias, jnp.asarray(mask), True, None, 0.5, True)
        want = nnx.dot_product_attention(q, k, v, *positional)
        assert_close(standard(q, k, v, *positional), want)

    def test_causality(self, rng, dtype):
        q, k, v = arrays(rng, dtype, n_keys=L)
        assert_close(standard(q, k, v, is_causal=True), theirs(q, k, v, is_causal=True))
        # Where lengths differ: theirs is aligned at the first key, ours at the last.
        q, k, v = arrays(rng, dtype)
        want = theirs(q, k, v, mask=jnp.tril(jnp.ones((1, 1, L, S)), S - L))
        assert_close(standard(q, k, v, is_causal=True), want)

    def test_gradients(self, rng, dtype):
        leaves, mask = arrays(rng, dtype, n_keys=L), nnx.make_causal_mask(jnp.ones((N, L)))

        def gradient(fn):
            loss = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(fn(*a, mask=mask)))))
            return loss(leaves)

        for got, want in zip(gradient(standard), gradient(theirs), strict=True):
            assert_close(got, want)

    def test_dtype(self, rng):
        q, k, v = arrays(rng)
        got = standard(q, k, v, dtype=jnp.bfloat16)
        assert got.dtype == jnp.bfloat16
        want = theirs(q, k, v, dtype=jnp.bfloat16)
        np.testing.assert_allclose(got.astype("f4"), want.astype("f4"), atol=0.03)
        assert (
            standard(q.astype(jnp.bfloat16), k, v).dtype == theirs(q.astype(jnp.bfloat16), k, v).dtype
        )

    @pytest.mark.parametrize(
        ("precision", "expected"),
        [
            (None, "precision=(Precision.HIGHEST, Precision.HIGHEST)"),
            ("highest", "precision=(Precision.HIGHEST, Precision.HIGHEST)"),
            (jax.lax.Precision.HIGH, "precision=(Precision.HIGH, Precision.HIGH)"),
            (("high", "high"), "precision=(Precision.HIGH, Precision.HIGH)"),
            (jax.lax.DotAlgorithmPreset.F32_F32_F32, "precision=F32_F32_F32"),
        ],
    )
    def test_precision(self, rng, precision, expected):
        program = str(jax.make_jaxpr(partial(standard, precision=precision))(*arrays(rng)))
        assert program.count("dot_general[") == 2
        assert program.count("precision=") == program.count(expected) == 2

    def test_two_precisions(self, rng):
        with pytest.raises(ValueError, match="`precision` must be the same for both factors"):
            standard(*arrays(rng), precision=("high", "default"))

    def test_a_traced_rate_of_dropout(self, rng):
        q, k, v = arrays(rng)
        got = jax.jit(lambda rate: standard(q, k, v, dropout_rate=rate, deterministic=True))(0.1)
        assert_close(got, standard(q, k, v))

    def test_precision_of_jax(self, rng):
        with jax.default_matmul_precision("high"):
            program = str(jax.make_jaxpr(standard)(*arrays(rng)))
        assert program.count("precision=(Precision.HIGH, Precision.HIGH)") == 2


class TestNNX:
    def test_the_module_of_flax(self, rng, dtype):
        x = jnp.asarray(rng.normal(size=(N, L, 12)), dtype)
        mask = nnx.make_causal_mask(jnp.ones((N, L)))
        call = nnx.jit(lambda layer, x, **options: layer(x, **options), static_argnames="is_causal")
        for options in ({}, {"num_kv_heads": 2, "normalize_qk": True}):
            options |= {"param_dtype": x.dtype, "dropout_rate": 0.5, "deterministic": True}
            ours, other = make(standard, **options), make(nnx.dot_product_attention, **options)
            want = call(other, x, mask=mask)
            assert_close(call(ours, x, mask=mask), want)
            assert_close(call(ours, x, is_causal=True), want)

    def test_law(self, rng):
        # The law by hand: queries scaled by it, row by row.
        q, k, v = arrays(rng, n_keys=L)
        factor = np.log(np.arange(1, L + 1)) / np.log(512)
        want = theirs(q * factor[:, None, None], k, v, is_causal=True)
        assert_close(attention_fn(q, k, v, is_causal=True), want)

    def test_law_per_head_and_masks_of_the_library(self, rng):
        q, k, v = arrays(rng)
        slope = jnp.arange(1.0, H + 1)
        got = attention_fn(q, k, v, mask=masks.window(2), law=laws.AffineLog(slope))
        n = masks.window(2).visible_count(L, S)
        seen = (np.arange(S) <= np.arange(L)[:, None] + S - L) & (
            np.arange(S) >= np.arange(L)[:, None] + S - L - 2
        )
        np.testing.assert_array_equal(seen.sum(-1), n)
        scaled = q * (np.log(n)[:, None] * slope)[..., None]
        assert_close(got, theirs(scaled, k, v, mask=jnp.asarray(seen)[None, None]))

    def test_numbers_of_keys(self, rng, dtype):
        # The positions of the last L of S tokens.
        q, k, v = arrays(rng, dtype)
        n = jnp.asarray([[S - L + 1 + i for i in range(L)], [i + 1 for i in range(L)]])
        mask = jnp.asarray(rng.random((N, 1, L, S)) < 0.6).at[..., 0].set(True)
        got = attention_fn(q, k, v, mask=mask, n_keys=n[:, None])
        factor = np.log(n) / np.log(512)
        assert_close(got, theirs(q * factor[..., None, None], k, v, mask=mask))

    def test_a_query_without_keys(self, rng):
        q, k, v = arrays(rng)
        mask = jnp.ones((1, 1, L, S), bool).at[:, :, 1].set(False)
        out = attention_fn(q, k, v, mask=mask)
        assert not out[:, 1].any()
        np.testing.assert_allclose(
            theirs(q, k, v, mask=mask)[:, 1], jnp.broadcast_to(v.mean(1), (N, H, E)), atol=1e-6
        )
        gradient = jax.grad(lambda q: attention_fn(q, k, v, mask=mask).sum())(q)
        assert jnp.isfinite(gradient).all()

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_decoding_equals_prefill(self, rng, is_causal):
        # In a cache with room for more.
        layer, x = make(attention_fn, num_kv_heads=2), jnp.asarray(rng.normal(size=(N, L, 12)), "f4")
        padding = jnp.asarray([0, 2])[:, None]  # keys to the left that nobody sees
        positions = jnp.arange(2 * L)
        seen = (positions >= padding)[:, None, None, :]
        causal = nnx.make_causal_mask(jnp.ones((N, L)))
        want = layer(x, mask=nnx.combine_masks(causal, seen[..., :L]))

        layer.init_cache((N, 2 * L, 12))
        step = nnx.jit(lambda layer, x: layer(x, mask=seen, decode=True, is_causal=is_causal))
        got = [step(layer, x[:, i : i + 1]) for i in range(L)]
        assert_close(jnp.concatenate(got, axis=1), want)
        standard_layer = make(standard, num_kv_heads=2)
        assert not np.allclose(want, standard_layer(x, mask=nnx.combine_masks(causal, seen[..., :L])))

    def test_weights_are_sown(self, rng):
        x = jnp.asarray(rng.normal(size=(N, L, 12)), "f4")
        mask = nnx.make_causal_mask(jnp.ones((N, L)))

        def weights(layer):
            out, sown = nnx.capture(layer, nnx.Intermediate)(x, mask=mask, sow_weights=True)
            (array,) = jax.tree.leaves(sown)
            assert_close(out, layer(x, mask=mask))
            return array

        got = weights(make(standard))
        assert got.shape == (N, H, L, L)
        assert_close(got, weights(make(nnx.dot_product_attention)))
        n = jnp.arange(1, L + 1)
        h = it.entropy(weights(make(attention_fn)))
        assert bool((h <= jnp.log(n) + 1e-6).all())

    def test_entropies_are_sown(self, rng):
        x = jnp.asarray(rng.normal(size=(N, L, 12)), "f4")
        mask = nnx.make_causal_mask(jnp.ones((N, L)))

        def sown(layer):
            capture = nnx.jit(
                lambda layer, x: nnx.capture(layer, nnx.Intermediate)(x, mask=mask, sow_weights=True)
            )
            out, sown = capture(layer, x)
            (array,) = jax.tree.leaves(sown)
            assert_close(out, layer(x, mask=mask))
            return array

        got = sown(make(partial(attention_fn, sow="entropy")))
        assert got.shape == (N, H, L)
        assert_close(got, it.entropy(sown(make(attention_fn))))

    def test_a_law_that_learns(self, rng):
        class Attend(nnx.Module):
            def __init__(self):
                self.slope = nnx.Param(jnp.full(H, 0.2))

            def __call__(self, *args, **kwargs):
                return attention_fn(*args, law=laws.AffineLog(self.slope[...]), **kwargs)

        layer, x = make(Attend()), jnp.asarray(rng.normal(size=(N, L, 12)), "f4")
        fixed = make(partial(attention_fn, law=laws.AffineLog(0.2)))
        assert_close(layer(x), fixed(x))
        gradient = nnx.jit(nnx.grad(lambda layer: (layer(x) ** 2).sum()))(layer)["attention_fn"][
            "slope"
        ]
        step = 1e-2
        for h in range(H):
            values = []
            for sign in (1, -1):
                slope = jnp.full(H, 0.2).at[h].add(sign * step)
                other = make(partial(attention_fn, law=laws.AffineLog(slope)))
                values.append(float((other(x) ** 2).sum()))
            np.testing.assert_allclose(
                gradient[...][h], np.diff(values[::-1])[0] / (2 * step), rtol=0.02
            )

    def test_dropout(self, rng):
        q, k, v = arrays(rng)
        attention_fn(q, k, v, dropout_rate=0.1, deterministic=True)
        with pytest.raises(
            ValueError, match=r"`dropout_rate` must be 0, or `deterministic` true.*got 0\.1"
        ):
            attention_fn(q, k, v, dropout_rate=0.1)
        layer = make(attention_fn, dropout_rate=0.1)
        x = jnp.ones((N, L, 12))
        layer(x, deterministic=True)
        with pytest.raises(ValueError, match="`dropout_rate` must be 0"):
            layer(x, deterministic=False)

    def test_errors(self, rng):
        q, k, v = arrays(rng)
        with pytest.raises(TypeError, match="`law` must be a law"):
            attention_fn(q, k, v, law=2.0)
        with pytest.raises(ValueError, match="`sow` must be"):
            attention_fn(q, k, v, sow="logits")
        with pytest.raises(ValueError, match="`key` must have at least 3 dimensions, got 2"):
            attention_fn(q, k[0, 0], v)
        with pytest.raises(ValueError, match="`value` must have as many rows as `key`"):
            attention_fn(q, k, v[:, :2])


class TestLinen:
    def test_no_argument_of_flax_is_dropped(self):
        """A module of linen drops those that its `attention_fn` does not name."""
        theirs = inspect.signature(linen.dot_product_attention).parameters
        assert theirs.keys() <= inspect.signature(attention_fn).parameters.keys()

    @pytest.mark.parametrize("is_forced", [True, False])
    def test_softmax_in_float32(self, rng, is_forced):
        x = jnp.asarray(rng.normal(size=(N, L, 12)), "float16")
        layer = linen.MultiHeadDotProductAttention(
            num_heads=H, qkv_features=32, attention_fn=standard, dtype="float16",
            force_fp32_for_softmax=is_forced,
        )  # fmt: skip
        assert layer.init_with_output(jax.random.key(0), x)[0].dtype == "float16"

        q, k, v = arrays(rng, "float16", n_keys=2000)
        exact = standard(*(y.astype("float32") for y in (q, k, v)))
        got = standard(q, k, v, force_fp32_for_softmax=is_forced)
        assert got.dtype == "float16"
        np.testing.assert_allclose(got, exact, rtol=2**-10, atol=2**-24)

    def test_other_products_are_refused(self, rng):
        q, k, v = arrays(rng)
        for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
            with pytest.raises(
                ValueError, match=f"`{name}` must be None: weights are never materialized"
            ):
                attention_fn(q, k, v, **{name: jnp.einsum})

    def test_the_module_of_flax(self, rng, dtype):
        x = jnp.asarray(rng.normal(size=(N, L, 12)), dtype)
        mask = linen.make_causal_mask(jnp.ones((N, L)))
        ours, other = (
            linen.MultiHeadDotProductAttention(
                num_heads=H, qkv_features=32, attention_fn=fn, param_dtype=x.dtype
            )
            for fn in (standard, linen.dot_product_attention)
        )
        variables = other.init(jax.random.key(0), x)
        want, sown = other.apply(variables, x, mask=mask, sow_weights=True, mutable=["intermediates"])
        got, own = jax.jit(partial(ours.apply, mask=mask, sow_weights=True, mutable=["intermediates"]))(
            variables, x
        )
        assert_close(got, want)
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(sown), strict=True):
            assert_close(a, b)

    def test_entropies_are_sown(self, rng):
        x = jnp.asarray(rng.normal(size=(N, L, 12)), "f4")
        sown = []
        for sow in ("entropy", "weights"):
            layer = linen.MultiHeadDotProductAttention(
                num_heads=H, attention_fn=partial(attention_fn, sow=sow)
            )
            variables = layer.init(jax.random.key(0), x)
            _, state = layer.apply(variables, x, sow_weights=True, mutable=["intermediates"])
            sown.append(state["intermediates"][f"attention_{sow}"][0])
        assert_close(sown[0], it.entropy(sown[1]))

    def test_sown_entropies_leave_gradients_alone(self, rng):
        x = jnp.asarray(rng.normal(size=(N, L, 12)), "f4")
        layer = linen.MultiHeadDotProductAttention(
            num_heads=H, attention_fn=partial(attention_fn, sow="entropy")
        )
        params = layer.init(jax.random.key(0), x)["params"]

        def loss(params, is_sown):
            options = {"sow_weights": is_sown, "mutable": ["intermediates"]}
            out, state = layer.apply({"params": params}, x, **options)
            entropies = sum(y.sum() for y in jax.tree.leaves(state))
            return (out**2).sum() + entropies, len(jax.tree.leaves(state))

        got, want = (jax.grad(loss, has_aux=True)(params, is_sown) for is_sown in (True, False))
        assert (got[1], want[1]) == (1, 0)
        for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
            assert bool((a == b).all())

    def test_decoding_equals_prefill(self, rng):
        x = jnp.asarray(rng.normal(size=(N, L, 12)), "f4")
        options = {"num_heads": H, "qkv_features": 32, "attention_fn": attention_fn}
        layer = linen.MultiHeadDotProductAttention(**options)
        variables = layer.init(jax.random.key(0), x)
        want = layer.apply(variables, x, mask=linen.make_causal_mask(jnp.ones((N, L))))
        decoder = linen.MultiHeadDotProductAttention(**options, decode=True)
        cache = decoder.init(jax.random.key(0), jnp.ones((N, 2 * L, 12)))["cache"]
        step = jax.jit(partial(decoder.apply, mutable=["cache"]))
        for i in range(L):
            got, state = step({**variables, "cache": cache}, x[:, i : i + 1])
            cache = state["cache"]
            assert_close(got[:, 0], want[:, i])

    def test_a_law_that_learns(self, rng):
        class Layer(linen.Module):
            @linen.compact
            def __call__(self, x):
                slope = self.param("slope", linen.initializers.constant(0.2), (H,))
                fn = partial(attention_fn, law=laws.AffineLog(slope))
                return linen.MultiHeadDotProductAttention(num_heads=H, attention_fn=fn)(x)

        x = jnp.asarray(rng.normal(size=(N, L, 12)), "f4")
        variables = Layer().init(jax.random.key(0), x)
        gradient = jax.jit(jax.grad(lambda p: (Layer().apply(p, x) ** 2).sum()))(variables)
        assert bool((gradient["params"]["slope"] != 0).all())
