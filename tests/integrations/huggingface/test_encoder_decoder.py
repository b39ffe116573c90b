"""Entropies of encoder–decoders, and of layers that differ, have the right values and names."""

import math

import numpy as np
import pytest

from isentropic import laws, plots

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")

import torch  # noqa: E402
from tiny_models import batch, decoder, encoder_decoder  # noqa: E402

from isentropic.integrations import huggingface  # noqa: E402
from isentropic.integrations.huggingface import _measure  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Collector:
    def __init__(self, argument, factors=(0.5, 1.0, 2.0)):
        self.factors, self.rows = factors, {}

    def add(self, layer, *row, weight=1.0):
        self.rows[layer] = row

    def report(self):
        return self


def inputs(length=7, padded=True):
    """Two texts, of the second of which 8 tokens and 4 of the decoder remain."""
    ids = batch(length=length)["input_ids"]
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 4:] = 0
    return batch("right") | {"decoder_input_ids": ids * mask, "decoder_attention_mask": mask}


def model_of(name):
    if name in ("T5", "Bart"):
        return encoder_decoder(name)
    torch.manual_seed(7)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32,
             "vocab_size": 64, "init_std": 0.3, "pad_token_id": 0, "decoder_start_token_id": 1}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}Model")(config).eval()


class TestRows:
    # Mvp computes its attention itself. With as many tokens in both, only names tell the kinds apart.
    @pytest.mark.parametrize("length", [7, 12])
    @pytest.mark.parametrize("name", ["T5", "Bart", "Marian", "Mvp"])
    def test_counts_and_entropies(self, monkeypatch, name, length):
        monkeypatch.setattr(_measure, "Recorder", Collector)
        model = model_of(name)
        batch_ = inputs(length)
        got = huggingface.profile(model, [batch_]).rows
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(**batch_, output_attentions=True, use_cache=False)
        weights = {"cross": list(out.cross_attentions), "decoder": list(out.decoder_attentions),
                   "encoder": list(out.encoder_attentions)}  # fmt: skip
        names = list(huggingface.laws_of(model))
        assert len(names) == 6
        for layer, name_ in enumerate(names):
            n, entropies, counted = got[layer]
            is_cross = "encoder_attn" in name_ or "EncDec" in name_
            kind = "cross" if is_cross else "encoder" if "encoder." in name_ else "decoder"
            p = weights[kind].pop(0)
            torch.testing.assert_close(
                entropies[1].mT[counted], -torch.xlogy(p, p).sum(-1).mT[counted], rtol=0, atol=1e-4
            )
            mask = batch_["attention_mask" if kind == "encoder" else "decoder_attention_mask"]
            assert torch.equal(counted, mask.bool())
            expected = torch.arange(1, length + 1) if kind == "decoder" else torch.tensor([[12], [8]])
            n, expected = (x.expand(counted.shape)[counted] for x in (n, expected))
            assert torch.equal(n, expected)

    def test_the_decoder_need_not_have_a_mask(self):
        model = encoder_decoder("Bart")
        without = {name: x for name, x in inputs(padded=False).items() if "mask" not in name}
        report = huggingface.profile(model, [without])
        assert report.lengths.max() == 12
        labels = {"input_ids": without["input_ids"], "labels": without["decoder_input_ids"]}
        assert huggingface.profile(model, [labels]).entropy.shape[1:] == (6, 4)

    def test_whisper(self):
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
                 "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32,
                 "vocab_size": 64, "max_source_positions": 16, "num_mel_bins": 8, "pad_token_id": 0,
                 "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
        model = transformers.WhisperModel(transformers.WhisperConfig(**sizes)).eval()
        sound = {
            "input_features": torch.randn(2, 8, 32),
            "decoder_input_ids": torch.ones(2, 6, dtype=int),
        }
        report = huggingface.profile(model, [sound], laws=laws.Constant(0.0))
        by_name = dict(zip(report.names, report.entropy.swapaxes(0, 1), strict=True))
        for name in ("encoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"):
            assert np.nanmax(by_name[name]) == pytest.approx(math.log(16), abs=1e-5)
        assert np.nanmax(by_name["decoder.layers.0.self_attn"]) < math.log(6) + 1e-5


class TestReports:
    def test_names(self):
        model = encoder_decoder("Bart")
        report = huggingface.profile(model, [inputs()], laws=laws.Constant(0.0))
        assert report.names == tuple(huggingface.laws_of(model))
        assert report.to_dict()["names"] == list(report.names)
        lines = repr(report).splitlines()
        assert [line.split()[0] for line in lines[3:-1]] == list(report.names)
        assert len({line.index("   dH") if "dH" in line else len(line) for line in lines[2:-1]}) == 1

    def test_a_single_stack_has_numbers(self):
        report = huggingface.profile(decoder("Llama"), [batch()])
        assert report.names is None
        assert "names" not in report.to_dict()
        assert "layer 1 " in repr(report)

    def test_plot(self):
        pytest.importorskip("matplotlib")
        ax = plots.drift(huggingface.profile(encoder_decoder("Bart"), [inputs()]))
        assert ax.get_yticklabels()[1].get_text() == "model.encoder.layers.1.self_attn"

    def test_calibrate(self):
        model = encoder_decoder("T5")
        draws = torch.Generator().manual_seed(1)
        batches = [
            {
                name: torch.randint(3, 64, (8, n), generator=draws)
                for name in ("input_ids", "decoder_input_ids")
            }
            for n in (8, 16, 32)
        ]
        fitted = huggingface.calibrate(model, batches, reference_length=16).laws
        assert len(fitted) == 6
        before = huggingface.profile(model, batches)
        after = huggingface.profile(model, batches, laws=fitted)
        assert abs(after.slope).mean() < 0.6 * abs(before.slope).mean()

    def test_different_numbers_of_heads(self):
        parts = (
            {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, **own}
            for own in (
                {"vocab_size": 64, "num_attention_heads": 4, "eos_token_id": 2},
                {"image_size": 8, "patch_size": 4, "num_attention_heads": 2},
            )
        )
        names = ("text_config", "vision_config")
        model = transformers.CLIPModel(transformers.CLIPConfig(**dict(zip(names, parts, strict=True))))
        batches = [
            {"input_ids": torch.arange(3, 3 + n)[None], "pixel_values": torch.randn(1, 3, 8, 8)}
            for n in (6, 9)
        ]
        report = huggingface.profile(model, batches)
        text, vision = report.entropy.swapaxes(0, 1)
        assert report.entropy.shape[1:] == (2, 4)
        assert np.isfinite(text).any(0).all()
        assert np.isfinite(vision).any(0).tolist() == [True, True, False, False]
        assert "nan" not in repr(report)
        fitted = huggingface.calibrate(model, batches, reference_length=5).laws
        assert [law(5).shape for law in fitted] == [(4,), (2,)]
        with huggingface.use(model, fitted), torch.no_grad():
            model(**batches[0])
