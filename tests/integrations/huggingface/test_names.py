"""Attention layers have names, and laws can be given by them."""

import pytest

from isentropic import laws

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")

import torch  # noqa: E402
from tiny_models import batch, decoder, encoder_decoder, outputs  # noqa: E402

from isentropic.integrations import huggingface  # noqa: E402
from isentropic.integrations.huggingface._layer_law import law_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ONE, TWO, THREE = (laws.Constant(x) for x in (1.5, 2.0, 3.0))


def used(model, own):
    """The laws of the layers, by name."""
    with huggingface.use(model, own):
        return {name: law_of(model.get_submodule(name))[0] for name in list(huggingface.laws_of(model))}


@pytest.fixture(scope="module")
def bart():
    return encoder_decoder("Bart")


def clip():
    text, image = (
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **own,
        }
        for own in ({"vocab_size": 64, "eos_token_id": 2}, {"image_size": 8, "patch_size": 4})
    )
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image)).eval()


class TestNames:
    def test_order(self, bart):
        assert list(huggingface.laws_of(decoder("Llama"))) == [
            "model.layers.0.self_attn", "model.layers.1.self_attn",
        ]  # fmt: skip
        names = list(huggingface.laws_of(bart))
        assert names[:3] == [
            "model.encoder.layers.0.self_attn", "model.encoder.layers.1.self_attn",
            "model.decoder.layers.0.self_attn",
        ]  # fmt: skip
        assert names[3] == "model.decoder.layers.0.encoder_attn"
        assert len(names) == 6

    def test_of_other_things(self):
        with pytest.raises(TypeError, match="`model` must be a model of transformers, got Linear"):
            huggingface.laws_of(torch.nn.Linear(2, 2))


class TestLaws:
    def test_a_name_is_its_number(self):
        model, name = decoder("Llama"), "model.layers.1.self_attn"
        with huggingface.use(model, {1: TWO}):
            expected = outputs(model, batch())
        with huggingface.use(model, {name: TWO}):
            assert torch.equal(outputs(model, batch()), expected)

    def test_patterns(self, bart):
        found = used(bart, {"*.encoder.*": ONE, "*.encoder_attn": TWO})
        for name, law in found.items():
            expected = TWO if name.endswith("encoder_attn") else ONE if ".encoder." in name else None
            assert law == expected

    def test_the_last_key_counts(self, bart):
        name = "model.decoder.layers.0.self_attn"
        own = {"*": ONE, "*.decoder.*": TWO, name: THREE}
        assert used(bart, own)[name] == THREE
        assert used(bart, own)["model.decoder.layers.1.self_attn"] == TWO
        assert used(bart, own)["model.encoder.layers.1.self_attn"] == ONE
        backwards = used(bart, dict(reversed(own.items())))
        assert set(backwards.values()) == {ONE}
        assert used(bart, {"*": ONE, 0: None})["model.encoder.layers.0.self_attn"] is None

    def test_a_part_of_a_multimodal_model(self):
        model = clip()
        ids = torch.arange(3, 9)[None]
        image = torch.randn(1, 3, 8, 8)
        with torch.no_grad():
            before = model(input_ids=ids, pixel_values=image)
            with huggingface.use(model, {"text_model.*": laws.LogLength(2)}):
                after = model(input_ids=ids, pixel_values=image)
        torch.testing.assert_close(after.image_embeds, before.image_embeds, rtol=0, atol=1e-5)
        assert (after.text_embeds - before.text_embeds).abs().max() > 1e-3

    @pytest.mark.parametrize(
        ("own", "error", "message"),
        [
            (
                {"model.layers.0.self_atn": ONE}, ValueError,
                r"`laws` must have names or patterns .* as keys, such as 'model.layers.0.self_attn', 'model"
                r".* got 'model.layers.0.self_atn'",
            ),
            ({"decoder.*": ONE}, ValueError, r"`laws` must have names or patterns .* got 'decoder.\*'"),
            ({2: ONE}, ValueError, r"`laws` must name attention layers of the model, 0 to 1, got 2"),
            ({1.5: ONE}, TypeError, r"`laws` must have the numbers or names of layers as keys, got 1.5"),
        ],
    )  # fmt: skip
    def test_other_keys(self, own, error, message):
        with pytest.raises(error, match=message):
            huggingface.use(decoder("Llama"), own)
