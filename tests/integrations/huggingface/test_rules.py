"""Laws on a model that has a rule of its own give a warning."""

import warnings
from types import SimpleNamespace

import pytest

from isentropic import laws

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from isentropic.integrations.huggingface._laws import warn_of_rules  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = {
    "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
LAW = laws.LogLength(512, minimum=1)


def attention_modules(name, **changes):
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    model = transformers.AutoModel.from_config(config)
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def warned(modules, applied):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_rules([module for module, law in zip(modules, applied, strict=True) if law is not None])
    assert {warning.category for warning in caught} <= {UserWarning}
    assert {warning.filename for warning in caught} <= {__file__}  # that of the caller
    return [str(warning.message) for warning in caught]


def llama_4(**changes):
    experts = {"num_local_experts": 2, "moe_layers": [], "intermediate_size_mlp": 8}
    return attention_modules("Llama4Text", **experts, **changes)


class TestWarnings:
    def test_rules_of_the_length_are_named_once(self):
        modules = llama_4(no_rope_layers=[1, 0, 1, 0])
        (message,) = warned(modules, [LAW] * 4)
        assert (
            "by the rule 'llama-4': StepLog(coefficient=0.1, period=8192.0), where n counts slots"
            in message
        )
        assert "`attn_temperature_tuning = False`" in message
        assert warned(llama_4(attn_temperature_tuning=False), [LAW] * 4) == []

    def test_layers_without_a_law_and_layers_without_the_rule_do_not_matter(self):
        modules = llama_4(no_rope_layers=[1, 0, 1, 0])
        assert warned(modules, [LAW, None, LAW, None]) == []
        assert len(warned(modules, [None, LAW, None, None])) == 1

    def test_constants(self):
        (message,) = warned(attention_modules("Llama", rope_parameters=YARN), [LAW] * 4)
        factor = laws.preset("yarn", scale=8)(1)
        assert f"its rotated products by the rule 'yarn': Constant(value={factor!r})." in message
        assert '`rope_parameters["attention_factor"] = 1.0`' in message
        assert warned(attention_modules("Llama"), [LAW] * 4) == []

    def test_rules_that_the_configuration_cannot_switch_off(self):
        module = SimpleNamespace(config={"model_type": "mistral_large4_text"})
        (message,) = warned([module], [LAW])
        assert "a law whose numbers are weights, where n counts positions" in message
        assert message.endswith("cannot switch the rule off.")

    def test_a_rule_that_transformers_does_not_apply(self):
        scaling = {"beta": 0.1, "original_max_position_embeddings": 8192}
        modules = attention_modules("Mistral", llama_4_scaling=scaling)
        assert len(laws.from_config(modules[0].config)) == 1
        assert warned(modules, [LAW] * 4) == []

    def test_what_cannot_be_read_is_no_error(self):
        module = SimpleNamespace(config={"model_type": "other", "attn_temperature_tuning": True})
        (message,) = warned([module, module], [LAW, LAW])
        assert "may scale its attention logits" in message
        assert "`attn_temperature_tuning` must be absent" in message
        assert warned([object()], [LAW]) == []
