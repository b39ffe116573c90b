"""Laws that are trained alone lower the loss, and leave the model as it was."""

import math
import warnings

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch  # noqa: E402
from tiny_models import close, decoder, encoder_decoder  # noqa: E402

from isentropic import laws  # noqa: E402
from isentropic.integrations import huggingface  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LENGTH = 16


def texts(count=2, length=33):
    return torch.randint(3, 64, (count, 2, length), generator=torch.Generator().manual_seed(5))


def tune(model, batches=None, **options):
    batches = list(texts()) if batches is None else batches
    return huggingface.tune(
        model, batches, **{"reference_length": LENGTH, "chunk_size": 8, "learning_rate": 0.1} | options
    )


@torch.no_grad()
def loss_beyond(model, batches):
    """From the whole text at once, without a cache."""
    found = []
    for ids in batches:
        logits = model(ids).logits[:, LENGTH:-1]
        found.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, LENGTH + 1 :]))
    return sum(found) / len(found)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss"])
def test_lowers_the_loss_beyond_the_length_alone(name):
    model, data = decoder(name), list(texts())
    with torch.no_grad():
        within, before = model(data[0][:, :LENGTH]).logits, loss_beyond(model, data)
    found = tune(model, data * 8)
    assert [law.factors.shape for law in found] == [(4, 3)] * 2
    assert all((law.factors[:, :2] == 1).all() for law in found)
    with huggingface.use(model, found), torch.no_grad():
        close(model(data[0][:, :LENGTH]).logits, within)
        assert loss_beyond(model, data) < before - 1e-3


def test_the_cache_has_its_present_name():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        tune(decoder("Llama"))


def test_constants_act_at_all_lengths():
    model, data = decoder("Llama"), list(texts())
    start = laws.Constant(1.1)
    with huggingface.use(model, start), torch.no_grad():
        within, before = model(data[0][:, :LENGTH]).logits, loss_beyond(model, data)
    found = tune(model, data * 8, constant=1.1)
    for law in found:
        constants = law.factors[:, 0]
        assert (law.factors[:, 1] == constants).all()
        assert (constants != 1.1).all()
    with huggingface.use(model, found), torch.no_grad():
        assert (model(data[0][:, :LENGTH]).logits - within).abs().max() > 1e-4
        assert loss_beyond(model, data) < before - 1e-3


def test_first_step_against_numbers_without_a_cache():
    """The sign of the gradient is the first step of Adam, whose size is the learning rate."""
    model, (data, _) = decoder("Llama", num_hidden_layers=1), texts()
    data = data[:, : LENGTH + 9]
    found = tune(model, [data], learning_rate=1e-3)

    def loss(slopes):
        factors = torch.ones(4, 3, dtype=torch.float64)
        factors[:, 2] += slopes
        law = laws.Knots((LENGTH / 2, LENGTH, 2 * LENGTH), factors.numpy())
        with huggingface.use(model, law):
            return loss_beyond(model, [data])

    model = model.double()
    step = 1e-4 * torch.eye(4, dtype=torch.float64)
    gradient = torch.stack([loss(x) - loss(-x) for x in step])
    assert found[0].lengths == (LENGTH / 2, LENGTH, LENGTH + 8)  # the most keys that a query sees
    moved = torch.as_tensor(found[0].factors[:, 2] - 1) / math.log((LENGTH + 8) / LENGTH)
    torch.testing.assert_close(moved, -1e-3 * gradient.sign(), rtol=1e-4, atol=0)


def test_a_text_that_ends_within_a_chunk_and_a_mapping():
    model, data = decoder("Llama"), texts(1, 30)[0]
    inputs = {"input_ids": data, "attention_mask": torch.ones_like(data)}
    for a, b in zip(tune(model, [data]), tune(model, iter([inputs])), strict=True):
        assert (a.factors == b.factors).all()


def test_the_shortest_text():
    law = tune(decoder("Llama"), [texts()[0][:, : LENGTH + 2]])[0]
    assert (law.factors[:, 2] != 1).all()


def test_no_dropout():
    expected = tune(decoder("Llama"))
    found = tune(decoder("Llama", attention_dropout=0.5).train())
    for a, b in zip(found, expected, strict=True):
        assert (a.factors == b.factors).all()


def test_leaves_the_model_as_it_was():
    model = decoder("Llama").train()
    law = laws.LogLength(8)
    huggingface.use(model, law)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    next(model.parameters()).requires_grad_(False)
    model.model.layers[0].eval()
    flags = [x.requires_grad for x in model.parameters()]
    modes = [x.training for x in model.modules()]
    tune(model)
    assert [x.requires_grad for x in model.parameters()] == flags
    assert [x.training for x in model.modules()] == modes
    assert all(x.grad is None for x in model.parameters())
    assert set(huggingface.laws_of(model).values()) == {(law, "keys")}
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())


def test_progress(capsys):
    tune(decoder("Llama"), progress="slopes")
    assert "slopes: 100%" in capsys.readouterr().err
    tune(decoder("Llama"))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reference_length": 1}, ValueError, "`reference_length` must be at least 2, got 1"),
        ({"reference_length": 16.0}, TypeError, "`reference_length` must be an integer, got float"),
        ({"reference_length": 32}, ValueError, r"`batches` must .*at least .* = 34 tokens, got 33"),
        ({"constant": 0.0}, ValueError, "`constant` must be above 0"),
        ({"learning_rate": 0.0}, ValueError, "`learning_rate` must be above 0"),
        ({"chunk_size": 0}, ValueError, "`chunk_size` must be at least 1, got 0"),
        ({"batches": []}, ValueError, "`batches` must have at least one text, got none"),
        ({"batches": texts()[0]}, TypeError, "`batches` must be an iterable of batches, got Tensor"),
        ({"batches": [[1, 2]]}, TypeError, "`batches` must give mappings or tensors, got list"),
        ({"batches": [{}]}, TypeError, "`input_ids` as a tensor .* got NoneType"),
        ({"batches": [torch.ones(1, 33)]}, TypeError, "of integers, got torch.float32"),
        (
            {"batches": [{"input_ids": texts()[0], "attention_mask": torch.zeros(2, 33)}]},
            ValueError,
            "`batches` must have no padding: .* got zeros",
        ),
        (
            {"batches": [{"input_ids": texts()[0], "attention_mask": torch.ones(2, 3)}]},
            ValueError,
            r"with the shape of the ids, got \(2, 3\)",
        ),
        (
            {"batches": [{"input_ids": texts()[0], "attention_mask": [[1] * 33] * 2}]},
            TypeError,
            "`batches` must have a tensor as its `attention_mask`, or none, got list",
        ),
        (
            {"batches": [{"input_ids": texts()[0], "labels": texts()[0]}]},
            ValueError,
            "`batches` must have `input_ids` and `attention_mask` alone, got `labels`",
        ),
        ({"base": "nothing"}, ValueError, "`base` must be"),
    ],
)
def test_refused(options, error, message):
    with pytest.raises(error, match=message):
        tune(decoder("Llama"), **options)


def hybrid():
    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    kinds = ["linear_attention", "full_attention"]
    return decoder("Qwen3Next", **sizes, linear_value_head_dim=8, layer_types=kinds, num_experts=0)


def encoder():
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    return transformers.BertLMHeadModel(config).eval()


def without_cache():
    config = transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    return transformers.OpenAIGPTLMHeadModel(config).eval()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: decoder("Llama").model, "be a causal decoder that generates text, got LlamaModel"),
        (lambda: encoder_decoder("T5"), "be a causal decoder that generates text, got T5For"),
        (encoder, "be a causal decoder that generates text, got BertLMHeadModel"),
        (
            hybrid,
            "keep the keys and values of all tokens in its cache, and no other states, got Linear",
        ),
        (without_cache, "keep the keys and values of all tokens in its cache, .* got OpenAIGPTLMHead"),
    ],
)
def test_refused_models(model, message):
    with pytest.raises(ValueError, match=f"`model` must {message}"):
        tune(model())


def test_a_model_that_gives_nan_is_refused_and_keeps_its_laws():
    model = decoder("Llama")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(ValueError, match="`model` must give a finite loss, got nan"):
        tune(model)
    assert not any(law for law, _ in huggingface.laws_of(model).values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_switched_off(mode):
    data = [x[:1] for x in texts()]
    expected = tune(decoder("Llama"), data)
    model = decoder("Llama")
    with mode():
        found = tune(model, data)
        made_here = tune(model, [x + 0 for x in data], chunk_size=np.int64(8))
    for a, b, c in zip(found, made_here, expected, strict=True):
        assert (a.factors == c.factors).all()
        assert (b.factors == c.factors).all()


def test_weights_that_can_have_no_gradient_are_refused():
    with torch.inference_mode():
        model = decoder("Llama")
    with pytest.raises(ValueError, match=r"`model` must be made outside of `torch.inference_mode`"):
        tune(model)


def test_half_precision():
    """The slopes stay in float32, whatever the default dtype."""
    model = decoder("Llama").to(torch.bfloat16)
    expected = tune(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = tune(model)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(found, expected, strict=True):
        assert (a.factors == b.factors).all()
        assert (a.factors[:, 2] != 1).all()


def test_names_the_rule_that_a_model_has_already():
    rule = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
    model = decoder("Ministral3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rule})
    with pytest.warns(UserWarning, match="ministral-3"):
        tune(model)
