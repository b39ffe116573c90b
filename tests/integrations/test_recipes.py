"""The recipes of the page "Other libraries": its code, run with each library, against the definition.

`nox -s recipes` installs the libraries.
"""

import copy
import os
import re
from pathlib import Path

import numpy as np
import oracles
import pytest

from isentropic import laws

PAGE = Path(__file__).parents[2] / "docs/how-to/other-libraries.md"
LAW = laws.LogLength(8)
L, WIDTH, HEADS = 20, 32, 4

pytestmark = [
    pytest.mark.host,
    # Those of the libraries about each other.
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}Warning")
        for kind in ("Deprecation", "Future", "User")
    ),
]


def recipe(heading):
    """The names that the first example under a heading of the page defines."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    names = {"__name__": "recipe"}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names)
    return names


def heads(x, kernel, bias=0.0):
    """Projected heads, (..., heads, positions, features)."""
    y = x @ kernel + bias
    return y.reshape(*y.shape[:-1], HEADS, -1).swapaxes(-2, -3)


def joined(x):
    return x.swapaxes(-2, -3).reshape(*x.shape[:-3], x.shape[-2], -1)


def by_definition(q, k, v, visible):
    """Attention with `LAW`, from weights that are formed."""
    factor = oracles.log_length(visible.sum(-1), 8)
    return oracles.attention(q, k, v, visible=visible, factor=factor).output


@pytest.fixture
def x(rng):
    return rng.normal(size=(2, L, WIDTH)).astype("float32")


class TestEquinox:
    @pytest.fixture
    def layer(self):
        equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
        import jax

        return equinox.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))

    def test_causal(self, layer, x):
        import jax.numpy as jnp

        from isentropic import masks

        with_law, visible = recipe("Equinox")["with_law"], np.tri(L, dtype=bool)
        x = jnp.asarray(x[0])
        got = layer(x, x, x, mask=jnp.asarray(visible), process_heads=with_law(LAW, masks.causal()))
        kernels = [np.asarray(p.weight).T for p in (layer.query_proj, layer.key_proj, layer.value_proj)]
        out = by_definition(*(heads(np.asarray(x), kernel) for kernel in kernels), visible)
        expected = joined(out) @ np.asarray(layer.output_proj.weight).T
        np.testing.assert_allclose(got, expected, atol=1e-5)

    def test_law_for_each_head_learns(self, layer, x):
        import equinox
        import jax.numpy as jnp

        with_law, x = recipe("Equinox")["with_law"], jnp.asarray(x[0])

        @equinox.filter_jit
        @equinox.filter_grad
        def gradient(law):
            return layer(x, x, x, process_heads=with_law(law)).var()

        slope = gradient(laws.AffineLog(jnp.full(HEADS, 0.2))).slope
        assert slope.shape == (HEADS,)
        assert jnp.all(slope != 0)


class TestKeras:
    """With the backend that KERAS_BACKEND names; JAX by default."""

    @pytest.fixture
    def keras(self):
        os.environ.setdefault("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras", reason="Keras is not installed")

    @pytest.mark.parametrize("kind", ["all", "causal", "padding"])
    def test_layer(self, keras, x, kind):
        layer = recipe("Keras")["LawAttention"](HEADS, WIDTH // HEADS, law=LAW)
        visible = np.ones((2, 1, L, L), bool)
        options = {}
        if kind == "causal":
            visible, options = visible & np.tri(L, dtype=bool), {"use_causal_mask": True}
        if kind == "padding":
            kept = np.arange(L) < np.array([[12], [L]])
            visible = visible & kept[:, None, None]
            options = {"value_mask": keras.ops.convert_to_tensor(kept)}
        got = layer(x, x, **options)
        weighted, out_kernel, out_bias = [], *map(np.asarray, layer.get_weights()[-2:])
        for kernel, bias in zip(layer.get_weights()[:6:2], layer.get_weights()[1:6:2], strict=True):
            weighted.append(heads(x, kernel.reshape(WIDTH, -1), bias.reshape(-1)))
        out = joined(by_definition(*weighted, visible)) @ out_kernel.reshape(-1, WIDTH) + out_bias
        np.testing.assert_allclose(keras.ops.convert_to_numpy(got), out, atol=1e-5)
        also, weights = layer(x, x, return_attention_scores=True, **options)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(also), out, atol=1e-5)
        assert not keras.ops.convert_to_numpy(weights)[~np.broadcast_to(visible, weights.shape)].any()

    def test_trains_and_is_restored(self, keras, x):
        kind = recipe("Keras")["LawAttention"]
        start = keras.Input((L, WIDTH))
        model = keras.Model(start, kind(HEADS, 8, law=LAW)(start, start, use_causal_mask=True))
        model.compile(loss="mse", optimizer="adam")
        model.fit(x, x, verbose=0)
        again = keras.Model.from_config(model.get_config())
        again.set_weights(model.get_weights())
        np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
        restored = next(layer for layer in again.layers if type(layer).__name__ == "LawAttention")
        assert restored.law == LAW


CLASSES = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def decoder(name):
    """A tiny decoder of random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config, model = CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    sizes = {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "max_position_embeddings": 128, "initializer_range": 0.3,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "architectures": [model],
    }  # fmt: skip
    if name != "GPT2":
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, config)(**sizes)
    return getattr(transformers, model)(config).eval()


def tokens():
    import torch

    return torch.arange(2 * L).reshape(2, L) * 7 % 61 + 3


class TestTransformerLens:
    """Against the same model with the attention of this package."""

    @pytest.fixture
    def boot(self, tmp_path):
        lens = pytest.importorskip("transformer_lens", reason="TransformerLens is not installed")
        import tokenizers
        import transformers

        words = tokenizers.models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0")
        special = {f"{kind}_token": "t0" for kind in ("bos", "eos", "pad", "unk")}
        whole = tokenizers.Tokenizer(words)
        transformers.PreTrainedTokenizerFast(tokenizer_object=whole, **special).save_pretrained(
            tmp_path
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        return lambda model: lens.TransformerBridge.boot_transformers(
            "tiny", hf_model=model, tokenizer=tokenizer
        )

    @pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3", "GPT2"])
    def test_hooks(self, boot, name):
        import torch

        from isentropic.integrations import huggingface

        plain = decoder(name)
        model, ids = boot(copy.deepcopy(plain)), tokens()
        with torch.no_grad():
            standard = plain(ids).logits
            with huggingface.use(plain, LAW):
                expected = plain(ids).logits
            got = model.run_with_hooks(
                ids, fwd_hooks=recipe("TransformerLens")["law_hooks"](model, LAW)
            )
            torch.testing.assert_close(model(ids), standard, atol=2e-5, rtol=0)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
        assert (expected - standard).abs().max() > 0.1

    @pytest.mark.parametrize(
        ("name", "place", "factor"),
        [
            ("Qwen3", "attn.hook_q", 2.0),
            ("Gemma3", "attn.hook_q", 2.0),
            ("Llama", "attn.hook_attn_scores", 0.0),
        ],
    )
    def test_places_that_are_wrong(self, boot, name, place, factor):
        """As the page says: a norm takes the factor away, and a factor of 0 shows hidden keys."""
        import torch

        model, ids = boot(decoder(name)), tokens()
        hooks = [(lambda name: name.endswith(place), lambda x, hook: x * factor)]
        with torch.no_grad():
            standard, got = model(ids), model.run_with_hooks(ids, fwd_hooks=hooks)
            changed = ids.clone()
            changed[:, -1] = 5
            later = model.run_with_hooks(changed, fwd_hooks=hooks)
        if factor:
            torch.testing.assert_close(got, standard, atol=2e-5, rtol=0)
        else:
            assert (got - later)[:, 0].abs().max() > 1e-3

    def test_generation(self, boot):
        import torch

        from isentropic.integrations import huggingface

        plain = decoder("Llama")
        model, ids = boot(copy.deepcopy(plain)), tokens()
        with huggingface.use(plain, LAW):
            expected = plain.generate(ids, max_new_tokens=4, do_sample=False)
        with model.hooks(recipe("TransformerLens")["law_hooks"](model, LAW)):
            got = model.generate(
                ids, max_new_tokens=4, do_sample=False, use_past_kv_cache=False, stop_at_eos=False,
                verbose=False,
            )  # fmt: skip
        assert torch.equal(got, expected)


class TestKVPress:
    @pytest.fixture
    def press(self):
        pytest.importorskip("kvpress", reason="kvpress is not installed")
        return recipe("kvpress")["ReceivedAttentionPress"]

    @pytest.mark.parametrize("name", ["Llama", "Qwen3"])
    def test_scores_are_what_keys_received(self, press, name):
        """The attention that transformers itself reports."""
        import torch
        import transformers

        model = decoder(name)
        model.set_attn_implementation("eager")
        scores = []

        class Recorded(press):
            def score(self, module, hidden_states, keys, values, attentions, kwargs):
                score = super().score(module, hidden_states, keys, values, attentions, kwargs)
                groups = attentions.sum(-2).unflatten(1, (keys.shape[1], -1))
                scores.append((score, groups.mean(2)))
                return score

        cache = transformers.DynamicCache()
        with torch.no_grad(), Recorded(compression_ratio=0.5)(model):
            model(tokens(), past_key_values=cache)
        assert len(scores) == 2
        for got, expected in scores:
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        assert cache.layers[0].keys.shape == (2, 2, L // 2, 8)

    def test_law(self, press):
        import torch

        model, keys = decoder("Llama"), torch.randn(2, 2, L, 8)
        module, hidden = model.model.layers[0].self_attn, torch.randn(2, L, WIDTH)
        rotation = torch.ones(2, L, 8), torch.zeros(2, L, 8)  # cosines and sines of none
        got = press(law=LAW).score(module, hidden, keys, keys, None, {"position_embeddings": rotation})
        query = module.q_proj(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2).detach()
        visible = np.tri(L, dtype=bool)
        factor = oracles.log_length(visible.sum(-1), 8)
        weights = oracles.attention(query, keys, visible=visible, factor=factor).weights
        expected = weights.sum(-2).reshape(2, 2, 2, L).mean(2)
        np.testing.assert_allclose(got.detach(), expected, atol=1e-5)


class TestMLX:
    @pytest.mark.parametrize("n_queries", [L, 5])
    def test_kernel(self, rng, n_queries):
        mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
        q = rng.normal(size=(2, HEADS, n_queries, 8)).astype("float32")
        k, v = rng.normal(size=(2, 2, HEADS, L, 8)).astype("float32")
        attention = recipe("MLX, TensorFlow and others")["causal_attention"]
        got = np.asarray(attention(*map(mx.array, (q, k, v)), law=LAW))
        np.testing.assert_allclose(got, by_definition(q, k, v, oracles.causal(n_queries, L)), atol=1e-5)
