"""The diagnosis finds whether a model loses by dilution or by positions it has not seen."""

import json
import math
import re

import numpy as np
import pytest
from packaging.version import Version

from isentropic import laws

pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch  # noqa: E402
from tiny_models import SIZES, decoder, encoder_decoder  # noqa: E402

from isentropic.integrations import huggingface  # noqa: E402
from isentropic.integrations.huggingface import _clamp  # noqa: E402
from isentropic.integrations.huggingface._modules import attention_modules  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
T = 64  # the trained length of planted models
N = 4 * T


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")


class Planted:
    """Attention that finds the first token, by hand: its logit is `height` · cos(`frequency` · distance).

    The other keys have the logit 0. Every token predicts the first one.
    """

    tokens, gain = 4, 3.0

    def __init__(self, height, frequency):
        self.height, self.frequency = height, frequency

    def model(self):
        config = transformers.LlamaConfig(
            vocab_size=2 * self.tokens, hidden_size=12, intermediate_size=1, num_hidden_layers=1,
            num_attention_heads=1, head_dim=4, tie_word_embeddings=False, rms_norm_eps=0.0,
            rope_parameters={"rope_type": "default", "rope_theta": self.frequency**-2.0},
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
        for weight in model.parameters():
            weight.data.fill_(1.0 if weight.ndim == 1 else 0.0)
        # Features: 0 in all tokens, 1 in needles, 2 to 5 which needle, 6 in others, 8 to 11 the output.
        embedding, one = model.model.embed_tokens.weight.data, torch.eye(self.tokens)
        embedding[:, 0] = embedding[: self.tokens, 1] = 1
        embedding[: self.tokens, 2:6], embedding[self.tokens :, 6] = one, math.sqrt(2)
        attention = model.model.layers[0].self_attn
        # All tokens have the norm √3, which normalization doubles. The scale is 1/2.
        attention.q_proj.weight.data[1, 0] = attention.k_proj.weight.data[1, 1] = math.sqrt(
            self.height / 2
        )
        attention.v_proj.weight.data[:, 2:6] = attention.o_proj.weight.data[8:] = one
        model.lm_head.weight.data[: self.tokens, 8:] = self.gain * one
        return model

    def batch(self, sequences=3):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.tokens, 2 * self.tokens, (sequences, N + 1), generator=generator)
        ids[:, 0] = torch.arange(sequences) % self.tokens
        return {"input_ids": ids, "labels": ids[:, :1].expand(-1, N + 1)}

    def loss(self, n, factor, window):
        logit = factor * self.height * np.cos(self.frequency * np.minimum(n - 1, window))
        p = 1 / (1 + (n - 1) * np.exp(-logit))
        found = 2 * p * np.sqrt(12 / (3 + 4 * p**2))
        return np.log1p((2 * self.tokens - 1) * np.exp(-self.gain * found))

    def losses(self, bands, window):
        """The mean losses, (2, 2, bands)."""
        n = np.arange(1, N + 1)
        law = np.maximum(np.log(n) / np.log(T), 1)
        arms = [[self.loss(n, f, w) for w in (N, window)] for f in (np.ones(N), law)]
        return np.stack([np.mean(np.array(arms)[..., a - 1 : b], -1) for a, b in bands], -1)


DILUTION, POSITIONS = Planted(math.log(T), 1e-9), Planted(60.0, 1 / T)


class TestPlanted:
    @pytest.mark.parametrize("planted", [DILUTION, POSITIONS], ids=["dilution", "positions"])
    def test_losses(self, planted):
        diagnosis = huggingface.diagnose(planted.model(), [planted.batch()], trained_length=T)
        bands = [[1, 32], [33, 64], [65, 90], [91, 128], [129, 181], [182, 256]]
        assert diagnosis.bands.tolist() == bands
        assert diagnosis.counts.tolist() == [3 * (b - a + 1) for a, b in bands]
        np.testing.assert_allclose(diagnosis.losses, planted.losses(bands, T // 2), atol=2e-5)

    def test_dilution(self):
        effects = huggingface.diagnose(DILUTION.model(), [DILUTION.batch()], trained_length=T).effects
        assert effects["rise"].nats > 0.1
        for name in ("law", "law_alone", "both"):
            assert 0.8 < effects[name].share < 1
        assert abs(effects["clamping"].share) < 1e-3
        assert abs(effects["clamping_alone"].share) < 1e-3

    def test_positions(self):
        effects = huggingface.diagnose(POSITIONS.model(), [POSITIONS.batch()], trained_length=T).effects
        assert effects["rise"].nats > 1
        for name in ("clamping", "clamping_alone", "both"):
            assert 0.99 < effects[name].share < 1.01
        assert abs(effects["law"].share) < 0.01
        assert abs(effects["law_alone"].share) < 0.01


def rotary(name, **changes):
    """A model of one layer in float64."""
    if name == "ModernBert":
        torch.manual_seed(7)
        sizes = {**SIZES, "intermediate_size": 32, "num_hidden_layers": 1, "local_attention": 8}
        del sizes["head_dim"], sizes["num_key_value_heads"]
        config = transformers.ModernBertConfig(**sizes, **changes)
        return transformers.ModernBertForMaskedLM(config).eval().double()
    model = decoder(name, num_hidden_layers=1, **changes).double()
    model.config._experts_implementation = "eager"  # the others have no float64
    return model


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "Llama": {},
    "Llama, YaRN": {"rope_parameters": YARN},  # cosines and sines times 1.14
    "Cohere": {},  # interleaved pairs
    "GPTNeoX": {},  # a part of the features
    "GPTJ": {"rotary_dim": 4},  # a part, in interleaved pairs
    "Glm": {"partial_rotary_factor": 0.5},
    "SmolLM3": {"no_rope_layers": [0]},  # no positions
    "Gemma2": {"layer_types": ["sliding_attention"], "sliding_window": 9},  # with a soft cap
    "GptOss": {"layer_types": ["full_attention"]},  # with sinks
    "ModernBert": {},  # both directions
}


@pytest.mark.filterwarnings("ignore:The model already multiplies")
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_families(name):
    """In one layer, each query may have a forward pass with positions of its own."""
    if name == "GPTJ" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("its attention takes no `position_embeddings`")
    model, window, length = rotary(name.partition(",")[0], **FAMILIES[name]), 4, 14
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    with huggingface.use(model, laws.LogLength(5)):
        with _clamp.clamping(attention_modules(model).values(), window):
            got = model(**inputs).logits
        distance = torch.arange(length) - torch.arange(length)[:, None]
        positions = distance.clamp(-window, window) + window
        expected = torch.stack(
            [
                model(**inputs, position_ids=row.expand(2, -1)).logits[:, i]
                for i, row in enumerate(positions)
            ],
            1,
        )
        plain = model(**inputs).logits
    is_token = mask.bool()
    # The angles are in float32, in which 8 − 4 is not quite the same as 4 − 0.
    torch.testing.assert_close(got[is_token], expected[is_token], rtol=0, atol=1e-5)
    is_moved = name != "SmolLM3"
    assert bool((got - plain)[is_token].abs().max() > 1e-3) == is_moved


def oracle(model, ids, window, law):
    """The losses of a Llama with clamped positions, from its weights, with L×S arrays in float64."""

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.config.rms_norm_eps) * weight

    length, size = len(ids), model.config.head_dim
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    index = torch.arange(length)
    angle = (index[:, None] - index).clamp(max=window)[..., None] * (
        model.config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size).double()
    )
    factor = torch.ones(length) if law is None else (torch.log(index + 1.0) / math.log(law.base))
    factor = factor.clamp(min=1).double()
    x = model.model.embed_tokens.weight[ids]
    for layer in model.model.layers:
        attention, y = layer.self_attn, norm(x, layer.input_layernorm.weight)
        q, k, v = (
            (y @ p.weight.T).reshape(length, -1, size).movedim(1, 0)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        k, v = (z.repeat_interleave(groups, 0) for z in (k, v))
        q, k = (torch.complex(z[..., : size // 2], z[..., size // 2 :]) for z in (q, k))
        turned = torch.polar(torch.ones_like(angle), angle)
        logits = torch.einsum("hie,hje,ije->hij", q, k.conj(), turned).real * size**-0.5
        logits = logits * factor[:, None]
        logits = logits.masked_fill(index[:, None] < index, -math.inf)
        out = (torch.softmax(logits, -1) @ v).movedim(0, 1).reshape(length, -1)
        x = x + out @ attention.o_proj.weight.T
        y, mlp = norm(x, layer.post_attention_layernorm.weight), layer.mlp
        gate = torch.nn.functional.silu(y @ mlp.gate_proj.weight.T)
        x = x + (gate * (y @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    logits = norm(x, model.model.norm.weight) @ model.lm_head.weight.T
    return -torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]


@torch.no_grad()
def test_oracle(set_blocks):
    set_blocks(vocabulary_logits=2 * 64 * 7)  # logits of seven tokens at a time
    model = decoder("Llama").double()
    ids = torch.randint(64, (2, 25), generator=torch.Generator().manual_seed(3))
    law = laws.LogLength(6, minimum=1)
    diagnosis = huggingface.diagnose(model, [ids], trained_length=12, window=5, law=law)
    for i, f in enumerate((None, law)):
        for j, window in enumerate((100, 5)):
            loss = torch.stack([oracle(model, x, window, f) for x in ids])
            for band, (first, last) in enumerate(diagnosis.bands):
                expected = loss[:, first - 1 : last].mean(1)
                got = diagnosis.sequence_losses[:, i, j, band]
                np.testing.assert_allclose(got, expected, rtol=1e-6)


class TestWithinWindow:
    def test_equal(self):
        model = decoder("Llama")
        ids = torch.randint(64, (2, 16))
        with torch.no_grad(), huggingface.use(model, None, base="isentropic"):
            plain = model(ids).logits
            for length in (15, 16, 17):
                with _clamp.clamping(attention_modules(model).values(), length):
                    got = model(ids).logits
                if length == 15:
                    torch.testing.assert_close(got, plain, rtol=0, atol=1e-5)
                else:
                    assert torch.equal(got, plain)

    def test_default_law(self):
        ids = torch.randint(64, (2, 40))
        diagnosis = huggingface.diagnose(decoder("Llama"), [ids], trained_length=16)
        (plain, clamped), (law, both) = diagnosis.losses
        assert diagnosis.window == 8
        assert diagnosis.bands[0].tolist() == [1, 8]
        np.testing.assert_allclose(clamped[0], plain[0], rtol=1e-5)
        np.testing.assert_allclose(law[:2], plain[:2], rtol=1e-6)
        np.testing.assert_allclose(both[:2], clamped[:2], rtol=1e-6)
        assert (abs(np.diff([plain, law, clamped, both], axis=0))[:, 2:] > 1e-5).all()


class TestDiagnosis:
    def diagnosis(self):
        rng = np.random.default_rng(0)
        counts = np.array([[8, 8, 6, 0], [8, 8, 6, 10], [8, 5, 6, 3]])
        losses = np.where(counts[:, None, None] > 0, rng.uniform(1, 3, (3, 2, 2, 4)), np.nan)
        losses[:, 0, 0, 2:] += 2
        return huggingface.Diagnosis(
            16, 8, np.array([[1, 8], [9, 16], [17, 22], [23, 32]]), counts, losses
        )

    def test_effects(self):
        diagnosis = self.diagnosis()
        tokens = [
            np.repeat(np.nan_to_num(x), n, axis=-1)
            for x, n in zip(diagnosis.sequence_losses, diagnosis.sequence_counts, strict=True)
        ]
        is_last = [np.repeat([0, 1, 0, 0], n) > 0 for n in diagnosis.sequence_counts]
        is_beyond = [np.repeat([0, 0, 1, 1], n) > 0 for n in diagnosis.sequence_counts]

        def effects(chosen):
            level = np.mean(np.concatenate([tokens[i][0, 0, is_last[i]] for i in chosen]))
            after = np.concatenate([tokens[i][..., is_beyond[i]] for i in chosen], -1).mean(-1)
            (a, c), (b, d) = after
            return np.array([a - level, a - b, a - c, a - d, (a - b + c - d) / 2, (a - c + b - d) / 2])

        got, expected = diagnosis.effects, effects(range(3))
        assert list(got) == ["rise", "law_alone", "clamping_alone", "both", "law", "clamping"]
        np.testing.assert_allclose([x.nats for x in got.values()], expected)
        np.testing.assert_allclose([x.share for x in got.values()], expected / expected[0])
        without = np.stack([effects([j for j in range(3) if j != i]) for i in range(3)])
        error = np.sqrt(2 / 3 * ((without - without.mean(0)) ** 2).sum(0))
        np.testing.assert_allclose([x.error for x in got.values()], error)

    def test_json(self):
        x = json.loads(json.dumps(self.diagnosis().to_dict()))
        assert x["counts"] == [24, 21, 18, 13]
        assert x["sequence_losses"][0][0][0][3] is None
        assert x["effects"]["rise"]["share"] == 1

    def test_no_rise(self):
        diagnosis = self.diagnosis()
        diagnosis.sequence_losses[:, :, :, 2:] = 0.5
        assert diagnosis.effects["rise"].nats < 0
        assert all(math.isnan(x.share) for x in diagnosis.effects.values())
        assert "%" not in repr(diagnosis)


def test_model_is_as_before():
    model = decoder("Llama").train()
    with huggingface.use(model, laws.LogLength(3), base="sdpa"):
        huggingface.diagnose(model, [torch.randint(64, (1, 9))], trained_length=4)
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        assert huggingface.laws_of(model)["model.layers.0.self_attn"][0] == laws.LogLength(3)
        assert "forward" not in vars(model.model)
        assert not model.model.layers[0].self_attn._forward_pre_hooks
    assert _clamp._active == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    """Padding is no token: what it predicts before the first token does not count."""
    model, ids = decoder("Llama"), torch.randint(3, 64, (2, 12))
    added, one = torch.zeros(2, 5, dtype=torch.long), torch.ones_like(ids)
    order = (added, ids) if side == "left" else (ids, added)
    mask = torch.cat((added, one) if side == "left" else (one, added), 1)
    batch = {"input_ids": torch.cat(order, 1), "attention_mask": mask}
    plain, padded = (huggingface.diagnose(model, [x], trained_length=6) for x in (ids.int(), batch))
    assert padded.bands.tolist() == plain.bands.tolist()
    assert padded.counts.tolist() == plain.counts.tolist()
    np.testing.assert_allclose(padded.losses, plain.losses, rtol=1e-5)


def test_masked():
    """Losses where there are labels. The keys of a query are all tokens of its text."""
    model, rows = rotary("ModernBert"), []
    for length in (12, 30):
        ids = torch.randint(3, 64, (2, length))
        labels = torch.where(torch.arange(length) % 3 == 1, ids, -100)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    rows[1]["attention_mask"][0, 20:] = 0
    diagnosis = huggingface.diagnose(model, rows, trained_length=12)
    assert diagnosis.bands.tolist() == [[7, 12], [17, 24], [25, 30]]
    assert diagnosis.sequence_counts.tolist() == [[4, 0, 0], [4, 0, 0], [0, 7, 0], [0, 0, 10]]
    with torch.no_grad():
        expected = model(**rows[0]).loss.item()
    np.testing.assert_allclose(diagnosis.losses[0, 0, 0], expected, rtol=1e-5)


def refused(match):
    return pytest.raises(ValueError, match=match)


class TestErrors:
    ids = torch.randint(3, 64, (1, 12))

    def diagnose(self, model=None, batches=None, **options):
        model = decoder("Llama") if model is None else model
        batches = [self.ids] if batches is None else batches
        return huggingface.diagnose(model, batches, **{"trained_length": 6, **options})

    @pytest.mark.parametrize("name", ["OPT", "Bloom"])
    def test_other_positions(self, name):
        with refused("`model` must have rotary positions"):
            self.diagnose(decoder(name))

    def test_encoder_decoder(self):
        with refused("`model` must have rotary positions"):
            self.diagnose(encoder_decoder("T5"))

    def test_position_elsewhere(self, monkeypatch):
        """A module that finds positions in another way is not clamped in silence."""
        llama = transformers.models.llama.modeling_llama
        rotate = llama.apply_rotary_pos_emb
        monkeypatch.setattr(
            llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, cos.flip(1), sin.flip(1))
        )
        with refused("position_embeddings"):
            self.diagnose()

    def test_no_head(self):
        with refused("language model"):
            self.diagnose(decoder("Llama").model)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"trained_length": 1}, "trained_length"),
            ({"window": 6}, "be less than the trained length"),
            ({"window": 0}, "window"),
            ({"trained_length": 12}, "12 keys, got 11"),
            ({"batches": []}, "batches"),
            ({"batches": [{"input_ids": ids, "position_ids": ids}]}, "position_ids"),
            ({"batches": [{"input_ids": ids, "past_key_values": ids}]}, "leave `past_key_values`"),
            ({"batches": [{"input_ids": ids, "cache": ids}]}, "leave `cache` to the model"),
            ({"batches": [{"inputs_embeds": torch.zeros(1, 12, 32)}]}, "labels"),
            (
                {"batches": [ids[0]]},
                "`input_ids` as a tensor (sequences, tokens) of integers, got (12,)",
            ),
            ({"batches": [ids[:0]]}, "of integers, got (0, 12)"),
            ({"batches": [ids[:, :0]]}, "of integers, got (1, 0)"),
            (
                {"batches": [{"input_ids": ids, "labels": ids[:, 1:]}]},
                "shape of the labels, (1, 11), got (1, 12)",
            ),
            (
                {"batches": [{"input_ids": ids, "attention_mask": ids[0]}]},
                "shape of the labels, (1, 12), got (12,)",
            ),
        ],
    )
    def test_values(self, options, match):
        with refused(re.escape(match)):
            self.diagnose(**options)

    @pytest.mark.parametrize(
        ("options"),
        [
            {"law": 1.5},
            {"batches": ids},
            {"batches": [3]},
            {"batches": 3},
            {"batches": [ids.float()]},
            {"batches": [{"input_ids": ids, "labels": ids.tolist()}]},
        ],
    )
    def test_types(self, options):
        with pytest.raises(TypeError, match=next(iter(options))):
            self.diagnose(**options)
