"""Rules read from configurations are those that models of transformers apply to their attention."""

import copy
import re
from pathlib import Path

import pytest

from isentropic import laws

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LENGTH = 12
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 4,
}  # fmt: skip
DEEPSEEK = LATENT | {"head_dim": 4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4,
    "original_max_position_embeddings": 6,
}  # fmt: skip
LLAMA_4 = {"floor_scale": 4, "attn_scale": 0.3, "no_rope_layers": [1, 0, 1, 0], "use_qk_norm": False}
LLAMA_4 |= {"num_local_experts": 2, "moe_layers": [], "intermediate_size_mlp": 16}
MINISTRAL = YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
INKLING = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4,
    "rel_extent": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "log_scaling_n_floor": 4, "log_scaling_alpha": 0.3,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"],
}  # fmt: skip
LOOPED = INKLING | {
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
}
BEAM = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1,
    "mlp_layer_types": ["dense"] * 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
LLAMA_4_TEXT = {"model_type": "llama4_text", "num_hidden_layers": 4}
INKLING_TEXT = {"model_type": "inkling_text", "num_hidden_layers": 4, "log_scaling_n_floor": 100}
FULL = {"layer_types": ["full_attention"] * 4}
MIXED = {"layer_types": BEAM["layer_types"], "sliding_window": 5}


def config_of(name, **changes):
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"this version of transformers has no {name}")
    return config(**copy.deepcopy({**SIZES, **changes}))  # as configurations change their parameters


def unpadded():
    return torch.arange(LENGTH).expand(2, -1)


def left_padded():
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    return (mask.cumsum(-1) - 1).clamp(min=0)


def packed():
    return torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)


INPUTS = pytest.mark.parametrize("positions", [unpadded, left_padded, packed])


def n_of(rule, positions):
    """What the n of a rule counts, (batch or 1, queries)."""
    if rule.counts == "positions":
        return positions + 1
    if rule.counts == "length":
        return positions.max() + torch.ones(1, LENGTH, dtype=torch.int64)
    return torch.arange(1, LENGTH + 1)[None]


@torch.no_grad()
def seen(config, monkeypatch, calls=None, **inputs):
    """What each layer hands to its attention, whose outputs are replaced by zeros.

    So the layers before do not change the inputs of a layer, whatever their attention scales by.
    """
    found = {}

    def spy(module, query, key, value, mask, **options):
        if not hasattr(module, "layer_idx"):  # attention over the residuals of blocks of layers
            y = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, scale=options["scaling"]
            )
            return y.transpose(1, 2), None
        found[module.layer_idx] = options | {"query": query, "key": key, "module": module}
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    for interface, x in (
        (transformers.AttentionInterface, spy),
        (transformers.AttentionMaskInterface, transformers.masking_utils.sdpa_mask),
    ):
        monkeypatch.setitem(interface._global_mapping, "spy", x)
    config._attn_implementation = "spy"
    torch.manual_seed(7)
    model = transformers.AutoModel.from_config(config, attn_implementation="spy").eval()
    for call in calls or [{"use_cache": False}]:
        ids = torch.randint(3, 32, (2, LENGTH), generator=torch.Generator().manual_seed(3))
        model(**{"input_ids": ids} | inputs | call)
    assert set(found) == set(range(config.num_hidden_layers))
    return found


def switched_off(config, rule):
    """The configuration without a rule, by what the rule itself says."""
    config = type(config)(**config.to_dict())
    assert rule.off
    for assignment in rule.off:
        exec(f"config.{assignment}", {"config": config})
    assert rule.name not in [other.name for other in laws.from_config(config)]
    return config


def only(config, name):
    (rule,) = (rule for rule in laws.from_config(config) if rule.name == name)
    assert from_dict(config) == laws.from_config(config)
    return rule


def from_dict(config):
    return laws.from_config(config.to_dict())


def assert_scaled(on, off, rule, n, key="query"):
    """The layers of a rule have the factors of its law, and the others are as without it."""
    factor = rule.law(n.double())[:, None, :, None]
    # The models compute in float32.
    for layer, expected in off.items():
        has_rule = rule.layers is None or layer in rule.layers
        x = expected[key].double()
        assert x.any()
        torch.testing.assert_close(on[layer][key].double(), x * factor if has_rule else x, **CLOSE)
    assert factor.max() > 1.02


LENGTH_RULES = [
    ("Llama4Text", LLAMA_4, "llama-4", "slots", (1, 3)),
    ("Ministral3", {"rope_parameters": MINISTRAL}, "ministral-3", "positions", None),
    ("Mistral4", LATENT | {"rope_parameters": MINISTRAL}, "ministral-3", "positions", None),
    ("InklingText", INKLING, "inkling", "slots", (0, 3)),
    ("Inkling2Text", INKLING, "inkling", "positions", (0, 3)),
    ("Inkling2LoopText", LOOPED, "inkling", "positions", (0, 3)),
]


class TestRulesOfTheLength:
    @INPUTS
    @pytest.mark.parametrize(("name", "changes", "rule_name", "counts", "layers"), LENGTH_RULES)
    def test_queries(self, monkeypatch, positions, name, changes, rule_name, counts, layers):
        config, positions = config_of(name, **changes), positions()
        rule = only(config, rule_name)
        assert (rule.counts, rule.layers) == (counts, layers)
        with_biases = rule_name == "inkling"
        assert rule.scales == ("products and biases" if with_biases else "products")
        on = seen(config, monkeypatch, position_ids=positions)
        off = seen(switched_off(config, rule), monkeypatch, position_ids=positions)
        n = n_of(rule, positions)
        assert_scaled(on, off, rule, n)
        for layer in on:
            torch.testing.assert_close(on[layer]["key"], off[layer]["key"])
        if with_biases:
            assert_scaled(on, off, rule, n, "position_bias")

    @pytest.mark.parametrize(
        ("name", "changes", "rule_name"),
        [case[:3] for case in LENGTH_RULES if case[0] in ("Llama4Text", "Ministral3", "InklingText")],
    )
    def test_decoding(self, monkeypatch, name, changes, rule_name):
        config = config_of(name, **changes)
        rule = only(config, rule_name)

        def last_tokens(config):
            calls = [
                {"input_ids": torch.full((2, 9), 5), "past_key_values": cache}
                for cache in [transformers.DynamicCache(config=config)]
            ]
            calls.append(calls[0] | {"input_ids": torch.full((2, 3), 6)})
            return seen(config, monkeypatch, calls)

        on, off = last_tokens(config), last_tokens(switched_off(config, rule))
        assert_scaled(on, off, rule, torch.arange(10, 13)[None])

    @INPUTS
    def test_beam(self, monkeypatch, positions):
        config, positions = config_of("Beam", **BEAM), positions()
        rule = only(config, "beam")
        assert (rule.counts, rule.layers, rule.off) == ("positions", (1, 3), ())
        # The differences are too small to be seen at these positions, so they are multiplied.
        positions = positions * 1009
        on = seen(config, monkeypatch, position_ids=positions)
        code = transformers.models.beam.modeling_beam
        monkeypatch.setattr(code, "compute_attention_scaling", lambda p: torch.ones(1, 1, 1, 1))
        assert_scaled(on, seen(config, monkeypatch, position_ids=positions), rule, positions + 1)

    @INPUTS
    def test_mistral_large_4(self, monkeypatch, positions):
        large = LATENT | {"head_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 16}
        config, positions = config_of("MistralLarge4Text", **large), positions()
        rule = only(config, "mistral-large-4")
        assert rule == ("mistral-large-4", None, "positions", None, "products", ())
        scaling = (
            transformers.models.mistral_large4.modeling_mistral_large4.MistralLarge4TextSoftmaxScaling
        )

        def fill(self, slope, intercept):
            torch.nn.init.constant_(self.scale, slope)
            torch.nn.init.constant_(self.bias, intercept)

        def with_weights(slope, intercept):
            forward = scaling.forward

            def filled(self, *args, **kwargs):
                fill(self, slope, intercept)
                return forward(self, *args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(scaling, "forward", filled)
                return seen(config, monkeypatch, position_ids=positions)

        on, off = with_weights(0.4, 0.7), with_weights(0.0, 1.0)
        law = laws.preset(rule.name, slope=0.4, intercept=0.7)
        n = n_of(rule, positions)
        for layer in on:
            factor = law(n.double())[:, None, :, None]
            torch.testing.assert_close(
                on[layer]["query"].double(), off[layer]["query"] * factor, **CLOSE
            )

    def test_qwen_and_grok(self):
        # Their code is elsewhere: huggingface.co/Qwen/Qwen-7B, and SGLang for Grok. The rules of both
        # are compared with it among those of the presets.
        qwen = {"model_type": "qwen", "seq_length": 8192, "use_logn_attn": True}
        law = laws.preset("qwen", length=8192)
        off = ("use_logn_attn = False",)
        assert laws.from_config(qwen) == (("qwen", law, "slots", None, "products", off),)
        assert laws.from_config(qwen | {"use_logn_attn": False}) == ()
        grok = {"model_type": "git", "attn_temperature_len": 1024}
        law = laws.preset("grok-2", length=1024)
        off = ("attn_temperature_len = -1",)
        assert laws.from_config(grok) == (("grok-2", law, "positions", None, "capped logits", off),)
        assert laws.from_config(grok | {"attn_temperature_len": -1}) == ()

    def test_llama_4_scaling_of_engines(self):
        # vLLM: `MistralAttention` in vllm/model_executor/models/mistral.py, and
        # `_get_llama_4_scaling` in deepseek_v2.py. The numbers are those of Mistral Large 3.
        yarn = {
            "rope_type": "yarn", "factor": 36, "beta_fast": 32, "beta_slow": 1, "mscale_all_dim": 1,
            "original_max_position_embeddings": 8192, "apply_yarn_scaling": False,
        }  # fmt: skip
        config = {
            "model_type": "transformer", "rope_parameters": yarn,
            "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192},
        }  # fmt: skip
        (rule,) = laws.from_config(config)
        assert (rule.counts, rule.scales, rule.off) == (
            "positions",
            "products",
            ("llama_4_scaling = None",),
        )
        positions = torch.tensor([0, 8191, 8192, 100_000])
        expected = 1 + 0.1 * torch.log(1 + torch.floor(positions.double() / 8192))
        torch.testing.assert_close(rule.law(positions.double() + 1), expected)
        assert laws.from_config(config | {"llama_4_scaling": None}) == ()
        on = laws.from_config(config | {"rope_parameters": yarn | {"apply_yarn_scaling": True}})
        assert [rule.name for rule in on] == ["ministral-3", "yarn"]


GLM = {"partial_rotary_factor": 0.5}
ROTATIONS = [
    # model, changes of its configuration, rule, layers, features of a head that are rotated
    ("Llama", {"rope_parameters": YARN}, "yarn", None, slice(None)),
    ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.7}}, "yarn", None, slice(None)),
    ("Llama", {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}}, "yarn", None, slice(None)),
    ("Llama", {"rope_parameters": YARN | {"mscale": 2.0}}, "yarn", None, slice(None)),
    ("Llama", {"rope_parameters": YARN | {"factor": None}}, "yarn", None, slice(None)),
    ("Llama", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "yarn", None, slice(None)),
    ("Llama", {"rope_parameters": LONGROPE}, "longrope", None, slice(None)),
    ("Llama", {"rope_parameters": LONGROPE | {"factor": 3.0}}, "longrope", None, slice(None)),
    ("Llama", {"rope_parameters": LONGROPE | {"attention_factor": 1.3}}, "longrope", None, slice(None)),
    ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}, "longrope", None, slice(None)),
    ("Glm", {"rope_parameters": YARN | GLM}, "yarn", None, slice(4)),
    ("DeepseekV3", DEEPSEEK | {"rope_parameters": YARN}, "yarn", None, slice(6, None)),
    ("GptOss", MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1}, "yarn", None, slice(None)),
    ("Olmo3", MIXED | {"rope_scaling": YARN}, "yarn", (1, 3), slice(None)),
    ("SmolLM3", {"rope_parameters": YARN, "no_rope_layer_interval": 2}, "yarn", (0, 2), slice(None)),
    ("Cohere2", MIXED | {"rope_parameters": YARN}, "yarn", (0, 2), slice(None)),
    ("Exaone4", MIXED | {"rope_parameters": YARN}, "yarn", (0, 2), slice(None)),
    ("Exaone4", MIXED | {"rope_parameters": YARN, "sliding_window": None} | FULL, "yarn", None, slice(None)),
    ("Llama4Text", LLAMA_4 | {"rope_parameters": YARN}, "yarn", (0, 2), slice(None)),
]  # fmt: skip


def assert_rotated_scaled(on, off, rule, rotated, n=None):
    n = torch.ones(1, LENGTH) if n is None else n
    # Of the products of queries and keys.
    factor = rule.law(n.double()).sqrt()[:, None, :, None]
    for layer, expected in off.items():
        has_rule = rule.layers is None or layer in rule.layers
        for name in ("query", "key"):
            x = expected[name].double()
            if has_rule:
                x[..., rotated] *= factor
            torch.testing.assert_close(on[layer][name].double(), x, **CLOSE)
    assert factor.max() > 1.02


class TestFactorsOfTheRotation:
    @pytest.mark.parametrize(("name", "changes", "rule_name", "layers", "rotated"), ROTATIONS)
    def test_queries_and_keys(self, monkeypatch, name, changes, rule_name, layers, rotated):
        config = config_of(name, **changes)
        rule = only(config, rule_name)
        assert (rule.counts, rule.layers, rule.scales) == (None, layers, "rotated products")
        on, off = seen(config, monkeypatch), seen(switched_off(config, rule), monkeypatch)
        assert_rotated_scaled(on, off, rule, rotated)

    @pytest.mark.parametrize("end", [5, 6, 7, LENGTH])
    @pytest.mark.parametrize(("short", "long"), [(1.1, 1.6), (1.25, 1.25)])
    def test_phimoe_depends_on_the_length(self, monkeypatch, short, long, end):
        rope = LONGROPE | {"short_mscale": short, "long_mscale": long}
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
        config = config_of("Phimoe", **experts, rope_parameters=rope)
        rule = only(config, "longrope")
        assert rule.counts == ("length" if short != long else None)
        # The positions end at that of one sequence of the batch, and hold for the other too.
        positions = torch.arange(LENGTH).clamp(max=end - 1)
        positions = torch.stack([positions, positions // 2])
        on = seen(config, monkeypatch, position_ids=positions)
        off = seen(switched_off(config, rule), monkeypatch, position_ids=positions)
        n = positions.max() + torch.ones(1, LENGTH, dtype=torch.int64)
        assert_rotated_scaled(on, off, rule, slice(None), n)

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("Llama4Text", LLAMA_4 | {"use_qk_norm": True, "attn_temperature_tuning": False}),
            ("HunYuanDenseV1", {}),
            ("NanoChat", {}),
        ],
    )
    def test_a_normalization_after_the_rotation_cancels_it(self, monkeypatch, name, changes):
        config, plain = (
            config_of(name, **changes, rope_parameters=YARN | {"attention_factor": x})
            for x in (1.7, 1.0)
        )
        assert laws.from_config(config) == from_dict(config) == ()
        on, off = seen(config, monkeypatch), seen(plain, monkeypatch)
        for layer, expected in off.items():
            for key in ("query", "key"):
                torch.testing.assert_close(on[layer][key], expected[key], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("coefficient", [1.0, 0.5])
    @pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "Mistral4"])
    def test_mscale(self, monkeypatch, name, coefficient):
        beta = {"llama_4_scaling_beta": 0.0} if name == "Mistral4" else {}
        rope = YARN | beta | {"mscale": 1.0, "mscale_all_dim": coefficient}
        sizes = DEEPSEEK if name == "DeepseekV3" else LATENT
        config = config_of(name, **sizes, rope_parameters=rope)
        rule = only(config, "mscale")
        assert (rule.counts, rule.layers, rule.scales) == (None, None, "products")
        on, off = seen(config, monkeypatch), seen(switched_off(config, rule), monkeypatch)
        for layer, expected in off.items():
            assert on[layer]["scaling"] == pytest.approx(expected["scaling"] * rule.law(1))
            for key in ("query", "key"):  # the factor on cosine and sine is the same
                torch.testing.assert_close(on[layer][key], expected[key])
        rotations = [x for x in laws.from_config(config) if x.name == "yarn"]
        assert len(rotations) == (coefficient != 1)

    def test_types_of_layers_with_rotations_of_their_own(self):
        rope = {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        config = config_of("Gemma3Text", **MIXED, rope_parameters=rope, query_pre_attn_scalar=8)
        rule = only(config, "yarn")
        assert rule.layers == (1, 3)
        assert rule.off == ('rope_parameters["full_attention"]["attention_factor"] = 1.0',)
        # DeepSeek-V4 names its rotations otherwise, and has no factor unless it is given.
        config = {"model_type": "deepseek_v4", "rope_scaling": YARN}
        assert laws.from_config(config) == ()
        types = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
        config = {
            "model_type": "deepseek_v4", "layer_types": types,
            "rope_parameters": {"main": {"rope_type": "default"}, "compress": YARN},
        }  # fmt: skip
        (rule,) = laws.from_config(config)
        assert rule.layers == (1, 2)


def _within_itself():
    config = {"model_type": "a"}
    config["text_config"] = config
    return config


class TestConfigurations:
    @pytest.mark.parametrize(
        "name",
        [
            "Beam", "Bert", "DeepseekV3", "DeepseekV4", "Gemma3Text", "GptOss", "Inkling2Text", "Inkling2LoopText", "InklingText", "Llama",
            "Llama4Text", "Ministral3", "Mistral4", "MistralLarge4Text", "OpenAIPrivacyFilter", "Phi3", "SmolLM3",
        ],
    )  # fmt: skip
    def test_fields_that_are_not_given_have_the_defaults_of_transformers(self, name):
        if not hasattr(transformers, f"{name}Config"):
            pytest.skip(f"this version of transformers has no {name}")
        config = getattr(transformers, f"{name}Config")()
        least = ("model_type", "num_hidden_layers", "max_position_embeddings")
        given = {key: x for key, x in config.to_dict().items() if key in least}
        assert laws.from_config(given) == laws.from_config(config) == from_dict(config)

    @pytest.mark.parametrize("name", ["Llama4", "Inkling2", "Inkling2Loop", "MistralLarge4"])
    def test_parts(self, name):
        if not hasattr(transformers, f"{name}Config"):
            pytest.skip(f"this version of transformers has no {name}")
        config = getattr(transformers, f"{name}Config")()
        (whole,), (text,) = laws.from_config(config), laws.from_config(config.text_config)
        assert whole == text._replace(off=tuple(f"text_config.{x}" for x in text.off))
        assert from_dict(config) == (whole,)
        # Old files do not name the type of a part.
        part = config.text_config.to_dict()
        del part["model_type"]
        assert laws.from_config({"model_type": config.model_type, "text_config": part}) == (whole,)

    def test_several_rules_of_one_model(self):
        rules = laws.from_config({"model_type": "mistral4"})
        assert [rule.name for rule in rules] == ["ministral-3", "mscale"]
        # DeepSeek-V3: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
        rope = {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        }  # fmt: skip
        (rule,) = laws.from_config({"model_type": "deepseek_v3", "rope_scaling": rope})
        assert rule.law == laws.preset("yarn", scale=40)

    @pytest.mark.parametrize(
        "config",
        [
            {"model_type": "llama"},
            {"model_type": "llama", "rope_parameters": None},
            {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {
                "model_type": "llama",
                "rope_scaling": YARN | {"factor": 0.5},
            },  # the logarithm is negative
            {"model_type": "smollm3", "rope_parameters": {"rope_type": "default"}},
            {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}},
            {"model_type": "granite", "attention_multiplier": 0.01},
            {"model_type": "llama4_text", "num_hidden_layers": 3},  # all rotate
            {"model_type": "llama4_text", "num_hidden_layers": 8, "attn_scale": 0.0},
            {"model_type": "inkling_text", "num_hidden_layers": 8, "log_scaling_n_floor": None},
            {"model_type": "inkling2_text", "num_hidden_layers": 5},  # all have windows
            {
                "model_type": "inkling_text",
                "num_hidden_layers": 8,
                "log_scaling_n_floor": 4,
                "log_scaling_alpha": 0.0,
            },
            {"model_type": "a_model_of_another_library"},
            {"model_type": "other", "attn_temperature_tuning": False, "use_logn_attn": None},
            {"model_type": "qwen", "use_logn_attn": None},
            {"model_type": "mistral", "llama_4_scaling": None},
            # transformers takes the ratio of two lengths, which are equal here.
            {
                "model_type": "llama",
                "rope_scaling": {"type": "yarn", "factor": None},
                "max_position_embeddings": 8192,
            },
        ],
    )
    def test_no_rule(self, config):
        assert laws.from_config(config) == ()

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "`model_type` must be the type of a model, got None"),
            ({"model_type": "llama4"}, "`config` must have the `text_config` of a 'llama4', got none"),
            ({"model_type": "a", "text_config": {}}, "`text_config.model_type` must be the type"),
            ({"model_type": "llama4_text"}, "`num_hidden_layers` must be an integer, got NoneType"),
            (
                {"model_type": "llama4_text", "num_hidden_layers": 4, "floor_scale": 0},
                "`floor_scale` must be above 0",
            ),
            (
                {"model_type": "other", "attn_temperature_tuning": True},
                "`attn_temperature_tuning` must be absent: .* got True for a 'other'",
            ),
            ({"model_type": "qwen", "use_logn_attn": "no"}, "`use_logn_attn` must be true or false, got str"),
            (LLAMA_4_TEXT | {"attn_temperature_tuning": "no"}, "`attn_temperature_tuning` must be true or false"),
            (LLAMA_4_TEXT | {"rope_scaling": YARN, "use_qk_norm": []}, "`use_qk_norm` must be true or false, got list"),
            (
                {"model_type": "mistral", "llama_4_scaling": {"beta": 0.1}},
                r"`llama_4_scaling\[\"original_max_position_embeddings\"\]` must be a real number, got NoneType",
            ),
            ({"model_type": "mistral", "llama_4_scaling": 0.1}, "`llama_4_scaling` must be a configuration or a dict"),
            ({"model_type": "ministral3", "llama_4_scaling": {"beta": 1}}, "`llama_4_scaling` must be absent"),
            ({"model_type": "llama", "attention_temperature_scale": 0.1}, "`attention_temperature_scale` must be absent"),
            ({"model_type": "llama", "use_log_n": True}, "`use_log_n` must be absent: it may set a rule"),
            (
                {"model_type": "llama", "rope_scaling": YARN | {"attn_factor": 1.5}},
                r"`rope_scaling\[\"attn_factor\"\]` must be absent: it may set a rule",
            ),
            (
                {"model_type": "llama", "rope_scaling": YARN | {"full_attention": {"rope_type": "default"}}},
                "`rope_scaling` must be the parameters of one rotation, or .* of a rotation and of 'full_attention'",
            ),
            (
                {"model_type": "mistral", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
                r"`rope_parameters\[\"llama_4_scaling_beta\"\]` must be absent",
            ),
            (
                {"model_type": "ministral3", "rope_parameters": YARN},
                r"`rope_parameters\[\"llama_4_scaling_beta\"\]` must be a real number, got NoneType",
            ),
            ({"model_type": "other", "use_logn_attn": True}, "`use_logn_attn` must be absent"),
            ({"model_type": "qwen"}, "`seq_length` must be a real number, got NoneType"),
            (
                {"model_type": "llama", "rope_scaling": {"type": "su", "factor": 2.0}},
                r"`rope_scaling\[\"rope_type\"\]` must be a kind of rotation .* got 'su'",
            ),
            (
                {"model_type": "llama", "rope_scaling": {"type": "yarn"}, "max_position_embeddings": 8192},
                r"`rope_scaling\[\"factor\"\]` must be the factor by which the context was extended, got none",
            ),
            (
                {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": None}},
                "`max_position_embeddings` must",
            ),
            ({"model_type": "llama", "rope_parameters": "yarn"}, "`rope_parameters` must be a dictionary"),
            (
                {"model_type": "olmo3", "rope_scaling": YARN},
                "`layer_types` must say which layers the rotation is for, got none",
            ),
            (
                {"model_type": "a", "rope_parameters": {"new": YARN}, "layer_types": ["full_attention"]},
                "`layer_types` must have layers of the type 'new', .* got full_attention",
            ),
            (
                {"model_type": "phimoe", "rope_scaling": LONGROPE | {"short_mscale": 1.0}},
                r"`rope_scaling\[\"long_mscale\"\]` must be a real number",
            ),
            ([], "`config` must be a configuration or a dictionary, got list"),
            (transformers.LlamaConfig, "`config` must be a configuration .* got the class LlamaConfig"),
            ({"model_type": ["llama"]}, r"`model_type` must be the type of a model, got \['llama'\]"),
            (LLAMA_4_TEXT | {"num_hidden_layers": 10**9}, "`num_hidden_layers` must be at most 10000, got"),
            (LLAMA_4_TEXT | {"no_rope_layers": 5}, "`no_rope_layers` must be a list of integers, got int"),
            (LLAMA_4_TEXT | {"no_rope_layers": "0111"}, "`no_rope_layers` must be a list of integers, got str"),
            (LLAMA_4_TEXT | {"no_rope_layers": [1, [0]]}, "`no_rope_layers` must .* got list of int, list"),
            (INKLING_TEXT | {"local_layer_ids": 3}, "`local_layer_ids` must be a list of integers, got int"),
            (INKLING_TEXT | {"layer_types": ["a", 3]}, "`layer_types` must be a list of strings, got list of int"),
            ({"model_type": "beam", "layer_types": [["a"]]}, "`layer_types` must be a list of strings"),
            (
                {"model_type": "llama", "rope_scaling": {"type": "yarn", "attention_factor": 1e200}},
                r"`rope_scaling\[\"attention_factor\"\]` must be at most 1e\+15 in size, got 1e\+200",
            ),
            (
                {"model_type": "llama", "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": -1.0}},
                r"`rope_scaling\[\"mscale_all_dim\"\]` must be at least 0",
            ),
            ({"model_type": "git", "attn_temperature_len": 0.5}, "`attn_temperature_len` must be above 1"),
            (_within_itself(), "`config` must have at most 8 parts within each other"),
            ({"model_type": "a", "text_config": 1}, "`text_config` must be a configuration or a dictionary"),
        ],
    )  # fmt: skip
    def test_errors(self, config, message):
        with pytest.raises((TypeError, ValueError), match=message):
            laws.from_config(config)


def _sources():
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        yield path, path.read_text(encoding="utf-8")


def _kinds(path):
    """The types of models that a file of transformers is for."""
    folder = path.parent
    text = (folder / path.name.replace("modeling_", "configuration_")).read_text(encoding="utf-8")
    return set(re.findall(r'^    model_type = "(\w+)"', text, re.M))


@pytest.mark.nightly
class TestListsAreComplete:
    """What is known of models, against the sources of all models of the installed transformers."""

    def test_rules_of_the_length(self):
        # A logarithm, and positions in its line or in the next one.
        position = r"(?:\bpositions?(?:_ids)?\b|positions_ids|effective_n)"
        log = re.compile(
            rf"\blog(?:1p|2)?\((?=[^\n]*\n?[^\n]*(?<!relative ){position})|{position}[^\n]*\.log(?:1p|2)?\("
        )
        names = {path.parent.name for path, text in _sources() if log.search(text)}
        assert {"llama4", "ministral3"} <= names
        rules = {
            "beam",
            "inkling",
            "inkling2",
            "inkling2_loop",
            "llama4",
            "ministral3",
            "mistral4",
            "mistral_large4",
        }
        # Frequencies of positions that are added to the inputs.
        rules |= {"patchtsmixer", "patchtst", "speecht5", "zoedepth"}
        assert names <= rules

    def test_mscale(self):
        from isentropic.laws._configurations import _READ_MSCALE

        found = [path for path, text in _sources() if "= yarn_apply_mscale(" in text]
        assert len(found) >= 2
        for path in found:
            assert _kinds(path) & set(_READ_MSCALE), path.name

    def test_fields(self):
        from isentropic.laws._configurations import _LENGTH_RULES, _READERS, _ROPE_READERS

        for fields in (_READERS, _ROPE_READERS):
            for field, kinds in fields.items():
                for path, text in _sources() if kinds else ():
                    if f"config.{field}" in text or f'"{field}"' in text:
                        assert _kinds(path) & set(kinds), (field, path.name)
        engines = {*_READERS["llama_4_scaling"]}
        assert {kind for kinds in _READERS.values() for kind in kinds or ()} - engines <= set(
            _LENGTH_RULES
        )

    def test_every_configuration_can_be_read(self):
        # A field of another meaning would be refused if its name looked like that of a rule.
        kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        read = 0
        for kind in kinds:
            try:
                config = kinds[kind]()
            except Exception:  # it needs arguments, or its defaults contradict each other
                continue
            laws.from_config(config)
            read += 1
        assert read > 0.9 * len(kinds)

    def test_normalizations_after_the_rotation(self):
        from isentropic.laws._configurations import _NORMALIZE_LAST

        # A call of a rotation, and a normalization of queries in the lines before the attention.
        after = re.compile(
            r"= apply_rot\w+\([^\n]*\n(?:(?!def |interface\()[^\n]*\n){0,8}?[^\n]*= self\.q\w*_?(?:layer)?norm\("
        )
        found = [path for path, text in _sources() if after.search(text)]
        assert found
        other = {"idefics", "timesfm2_5"}  # rotate without these factors
        for path in found:
            if path.parent.name not in other | {"llama4"}:
                assert _kinds(path) & set(_NORMALIZE_LAST), path.name
