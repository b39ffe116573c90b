"""Presets agree with the code of the models and papers that they describe."""

import inspect
import math
import re

import numpy as np
import pytest

import isentropic as it
from isentropic import laws
from isentropic.laws import _presets

POSITION = np.arange(0, 40000, 7)


def _logn(length, base=math.e):
    """As lists of logarithms are written, with those up to a length as 1."""
    return lambda ps, shift=1: np.array(
        [math.log(p + shift, base) / math.log(length, base) if p + shift > length else 1 for p in ps]
    )


# Each rule as a function of the position (from 0), as its source writes it.
RULES = [
    # bert4keras, backend.py, attention_normalize: softmax(a · log(max(l, 16)) / log 512)
    ("su", {}, lambda p: np.log(np.maximum(p + 1, 16)) / np.log(512)),
    # bojone/rerope, rerope_patch.py: (log(position_ids + 1) / log(training_length)).clip(1)
    ("su-decoder", {}, lambda p: (np.log(p + 1) / np.log(512)).clip(1)),
    ("su-decoder", {"length": 4096}, lambda p: (np.log(p + 1) / np.log(4096)).clip(1)),
    # Qwen-7B, modeling_qwen.py: log_L(i) if i > L else 1, for i from 1
    ("qwen", {"length": 2048}, _logn(2048)),
    # Entropy-ABF, patch/EABF.py: log(position_ids + 1) / log 4096, where that is below 1, 1
    ("entropy-abf", {}, _logn(4096)),
    # lmdeploy, rotary_embedding.h, LogNScaling: log2(t) / log2(L) where the time step t > L, else 1
    ("lmdeploy", {"length": 2048}, lambda p: _logn(2048, 2)(p, shift=0)),
    # sglang, triton_ops/extend_attention.py: log2(i) / log2(L) where the index i > L, else 1
    ("grok-2", {"length": 8192}, lambda p: _logn(8192, 2)(p, shift=0)),
    # arXiv 2501.19399: softmax(s log n · z), and with a bias (s log n + b)
    ("ssmax", {"slope": 0.43}, lambda p: 0.43 * np.log(p + 1)),
    ("ssmax", {"slope": 0.43, "intercept": 0.2}, lambda p: 0.43 * np.log(p + 1) + 0.2),
    # transformers, models/mistral_large4: scale · log(position_ids + 1) + bias
    ("mistral-large-4", {"slope": 0.1, "intercept": 0.9}, lambda p: 0.1 * np.log(p + 1) + 0.9),
    # transformers, models/llama4: log1p(floor((positions + 1) / floor_scale)) · attn_scale + 1
    ("llama-4", {}, lambda p: np.log1p(np.floor((p + 1) / 8192)) * 0.1 + 1),
    # transformers, models/ministral3: 1 + beta · log(1 + floor(position_ids / L))
    ("ministral-3", {}, lambda p: 1 + 0.1 * np.log(1 + np.floor(p / 16384))),
    # transformers, models/inkling: 1 + alpha · log((effective_n / n_floor).clamp(min=1))
    ("inkling", {}, lambda p: 1 + 0.1 * np.log(((p + 1) / 128_000).clip(1))),
    ("inkling", {"length": 9000, "coefficient": 0.3}, lambda p: 1 + 0.3 * np.log(((p + 1) / 9000).clip(1))),
    # transformers, models/beam: exp(0.1 · log1p((position_ids + 1) / 2048))
    ("beam", {}, lambda p: np.exp(0.1 * np.log1p((p + 1) / 2048))),
    # arXiv 2309.00071: √(1/t) = 0.1 ln s + 1, on queries and keys
    ("yarn", {"scale": 4}, lambda p: np.full(p.shape, (0.1 * np.log(4) + 1) ** 2)),
    ("yarn", {"scale": 0.5}, lambda p: np.ones(p.shape)),
    # arXiv 2402.13753: √(1 + ln s / ln L), on queries and keys
    ("longrope", {"scale": 32, "length": 4096}, lambda p: np.full(p.shape, np.log(32 * 4096) / np.log(4096))),
    # Lumina-T2X, nextdit.py: √(log(seqlen, base_seqlen) / head_dim)
    ("lumina", {"length": 1024}, lambda p: np.array([math.sqrt(math.log(i + 1, 1024)) for i in p])),
    # Information-Entropy-Invariance, layer.py: (1 − l^(−2/d))^0.5 / (1 − L^(−2/d))^0.5
    (
        "infoscale", {"length": 1024, "head_dim": 64},
        lambda p: (1 - (p + 1.0) ** (-2 / 64)) ** 0.5 / (1 - 1024 ** (-2 / 64)) ** 0.5,
    ),
    # asentmax, sparse_gemma.py: delta + beta · log_position^gamma, log_position = log(arange(2, ...))
    (
        "asentmax-constant", {"coefficient": 0.2, "exponent": 1.5},
        lambda p: 1 + 0.2 * np.log(np.arange(2, p[-1] + 3))[p] ** 1.5,
    ),
    (
        "asentmax-constant", {"offset": 0.3, "coefficient": 0.2, "exponent": -1.5},
        lambda p: 0.3 + 0.2 * np.log(np.arange(2, p[-1] + 3))[p] ** -1.5,
    ),
    # parity, encoder.py, ScaledTransformerEncoderLayer: queries of src · log(len(src))
    ("chiang-cholak", {}, lambda p: np.array([math.log(i + 1) for i in p])),
]  # fmt: skip


class TestPresets:
    @pytest.mark.parametrize(("name", "parameters", "rule"), RULES)
    def test_rule(self, name, parameters, rule):
        got = laws.preset(name, **parameters)(POSITION + 1)
        np.testing.assert_allclose(got, rule(POSITION), rtol=1e-12, atol=1e-15)

    def test_names(self):
        names = list(_presets.RULES)
        assert names == sorted(names)
        assert {name for name, _, _ in RULES} == set(names)
        doc = inspect.getdoc(laws.preset)
        # A row of the table, and a source, for each.
        assert (
            re.findall(r"^([a-z0-9-]+)  +\S+ .* (?:keys|positions|slots|length|–)  ", doc, re.M)
            == names
        )
        assert re.findall(r"^- ([a-z0-9-]+): \S", doc, re.M) == names

    def test_exponents_below_0(self, backend):
        exponent = backend.array([-0.5, 0.0, 2.0], "float32")
        law = laws.preset("asentmax-constant", coefficient=0.5, exponent=exponent)
        n = np.arange(4)
        expected = 1 + 0.5 * np.log(np.maximum(n + 1, 2)) ** backend.numpy(exponent)[:, None]
        backend.assert_close(law(backend.array(n)), expected, rtol=1e-6)


class TestAgainstTransformers:
    """The rules as transformers computes them."""

    @pytest.fixture(autouse=True)
    def _needs(self):
        self.torch = pytest.importorskip("torch")
        pytest.importorskip("transformers")

    @property
    def positions(self):
        return self.torch.arange(0, 100_000, 1009)

    def test_ministral_3(self):
        from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

        expected = get_llama_4_attn_scale(self.positions[None], 0.1, 16384)[0, 0, :, 0]
        got = laws.preset("ministral-3")(self.positions + 1)
        self.torch.testing.assert_close(got, expected)

    def test_mistral_4(self):
        from transformers.models.mistral4.modeling_mistral4 import get_llama_4_attn_scale

        expected = get_llama_4_attn_scale(self.positions[None], 0.2, 8192)[0, 0, :, 0]
        got = laws.preset("ministral-3", coefficient=0.2, length=8192)(self.positions + 1)
        self.torch.testing.assert_close(got, expected)

    def test_beam(self):
        beam = pytest.importorskip("transformers.models.beam.modeling_beam")  # not in the oldest

        expected = beam.compute_attention_scaling(self.positions[None])[0, 0, :, 0]
        self.torch.testing.assert_close(laws.preset("beam")(self.positions + 1), expected)

    def test_mistral_large_4(self):
        large = pytest.importorskip("transformers.models.mistral_large4.modeling_mistral_large4")

        scaling = large.MistralLarge4TextSoftmaxScaling(3)
        for parameter in scaling.parameters():
            self.torch.nn.init.normal_(parameter)
        law = laws.preset("mistral-large-4", slope=scaling.scale, intercept=scaling.bias)
        query = self.torch.randn(1, 3, len(self.positions), 8)
        expected = scaling(query, self.positions[None], head_dim_first=True)
        got = it.scale_queries(query, self.positions + 1, law=law)
        self.torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("window", [False, True])
    def test_inkling(self, window):
        inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
        from transformers import InklingTextConfig

        def seen(**options):
            config = InklingTextConfig(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                head_dim=8, swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_head_dim=8, d_rel=4,
                rel_extent=8, layer_types=["hybrid_sliding" if window else "hybrid"], **options,
            )  # fmt: skip
            self.torch.manual_seed(0)
            layer = inkling.InklingAttention(config, layer_idx=0)
            for parameter in layer.parameters():
                self.torch.nn.init.normal_(parameter)
            return self._seen(config, layer, self.torch.randn(1, 30, 16), attention_mask=None)

        plain, scaled = seen(), seen(log_scaling_n_floor=4, log_scaling_alpha=0.3)
        law = None if window else laws.preset("inkling", length=4, coefficient=0.3)
        n = self.torch.arange(30) + 1
        for name in ("query", "position_bias"):
            got = plain[name] if law is None else it.scale_queries(plain[name], n, law=law)
            self.torch.testing.assert_close(got, scaled[name])

    def _seen(self, config, layer, x, **options):
        """What a layer hands to its attention."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        seen = {}

        def spy(module, query, key, value, mask, **kwargs):
            seen.update(kwargs, query=query)
            return self.torch.zeros_like(query.transpose(1, 2)), None

        ALL_ATTENTION_FUNCTIONS.register("spy", spy)
        config._attn_implementation = "spy"
        with self.torch.no_grad():
            layer(x, **options)
        return seen

    def test_llama_4(self):
        from transformers import Llama4TextConfig
        from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

        config = Llama4TextConfig(
            hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            floor_scale=4, attn_scale=0.1, attn_temperature_tuning=True, no_rope_layers=[0],
            use_qk_norm=False, num_hidden_layers=1,
        )  # fmt: skip
        layer = Llama4TextAttention(config, layer_idx=0)
        assert not layer.use_rope
        x = self.torch.randn(1, 30, 16)
        seen = self._seen(config, layer, x, position_embeddings=None, attention_mask=None)
        plain = layer.q_proj(x).view(1, 30, 2, 8).transpose(1, 2).detach()
        n = self.torch.arange(30) + 1
        law = laws.preset("llama-4", coefficient=0.1, period=4)
        self.torch.testing.assert_close(it.scale_queries(plain, n, law=law), seen["query"])

    @pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
    def test_yarn(self, factor):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=int(2048 * factor),
            rope_parameters={
                "rope_type": "yarn", "factor": factor, "rope_theta": 10000.0,
                "original_max_position_embeddings": 2048,
            },
        )  # fmt: skip
        _, on_cos_and_sin = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        assert laws.preset("yarn", scale=factor)(1) == pytest.approx(on_cos_and_sin**2)

    @pytest.mark.parametrize("factor", [1.0, 32.0])
    def test_longrope(self, factor):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=int(4096 * factor),
            rope_parameters={
                "rope_type": "longrope", "factor": factor, "rope_theta": 10000.0,
                "long_factor": [1.0] * 8, "short_factor": [1.0] * 8,
                "original_max_position_embeddings": 4096,
            },
        )  # fmt: skip
        _, on_cos_and_sin = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
        law = laws.preset("longrope", scale=factor, length=4096)
        assert law(1) == pytest.approx(on_cos_and_sin**2)
