"""The examples that rotate a language model, on a tiny model with random weights."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import experiment  # noqa: E402
import quantize_cache  # noqa: E402
import rotate_residual  # noqa: E402
import smollm2_fits  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import isentropic as it  # noqa: E402


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    result = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in result.parameters():
        parameter.normal_(mean=float(parameter.ndim == 1), std=0.3)
    return result


IDS = torch.arange(33) * 7 % 64


class TestRotateResidual:
    def test_keeps_the_logits(self, model):
        model.model.embed_tokens.weight.data[:, 5] += 10  # a large channel, which stays
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data *= 0.1
            layer.mlp.down_proj.weight.data *= 0.1
        found = rotate_residual.measure(model, IDS)
        assert found["change"] < 1e-4 * found["logits"]
        assert found["largest after"] < 0.6 * found["largest before"]

    def test_the_stream_is_rotated(self, model):
        f = it.jl.rotation(48, rng=3, like=torch.empty(0))
        other = rotate_residual.rotated(model, f)
        before, after = (x(IDS[None], output_hidden_states=True).hidden_states for x in (model, other))
        for x, y in list(zip(before, after, strict=True))[:-1]:  # the last is behind a norm
            torch.testing.assert_close(y, f(x), atol=1e-4, rtol=1e-4)
        assert model.config.tie_word_embeddings  # the original is unchanged

    def test_committed_result(self):
        found = experiment.load("rotate_residual")
        assert found["change"] < 1e-3 * found["logits"]
        assert found["largest after"] < found["largest before"]


class TestQuantizeCache:
    def test_errors(self):
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 1, 2, 128, 64)
        key[..., 5] += 30
        found = quantize_cache.errors(query[:, :, -64:], key, value)
        plain, rotated, channel = (
            found[x]["keys"] for x in ("per token", "rotated, per token", "keys per channel")
        )
        assert channel < rotated < plain / 2
        # Values without large channels gain nothing.
        assert found["rotated, per token"]["values"] == pytest.approx(
            found["per token"]["values"], rel=0.1
        )

    def test_sixteen_levels(self):
        x = torch.randn(100, 8)
        assert all(len(row.unique()) <= 15 for row in quantize_cache.per_token(x))
        groups = quantize_cache.per_channel(x).split(quantize_cache.GROUP)
        assert all(len(column.unique()) <= 15 for part in groups for column in part.T)
        torch.testing.assert_close(quantize_cache.per_token(x), x, atol=0.5, rtol=0)

    def test_measures_a_model(self, model, monkeypatch):
        monkeypatch.setattr(smollm2_fits, "QUERIES", 8)
        found = quantize_cache.measure(model, [IDS])
        assert all(0 < x < 0.5 for of in found.values() for x in of.values())
        assert list(found) == list(quantize_cache.schemes(12))

    def test_committed_results(self):
        results = experiment.load("quantize_cache")
        plain, rotated, channel, both = results["errors"].values()
        assert channel["keys"] < rotated["keys"] < plain["keys"]
        assert rotated["values"] < plain["values"]
        # Fewer errors of keys are not fewer of the output.
        assert max(rotated["output"], both["output"]) < channel["output"] < plain["output"]
        assert quantize_cache.report(results).count("\n") == 1 + len(results["errors"])
