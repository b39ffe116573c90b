"""Calibration from some of the queries of a model measures what they have among all queries."""

import numpy as np
import pytest

from isentropic import drift, laws

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")

import torch
from tiny_models import batch, decoder, encoder_decoder

from isentropic.integrations import huggingface
from isentropic.integrations.huggingface import _measure

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Collector:
    factors = (1.0, 3.0)

    def __init__(self):
        self.rows = []

    def add(self, *row, weight=1.0):
        self.rows.append((*row, weight))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Gemma3", {}),
        ("T5", {}),
        ("Mistral", {"laws": laws.LogLength(4), "count": "positions"}),
    ],
)
def test_some_queries_are_those_of_all(name, options, monkeypatch):
    """With causal masks, windows, padding, the biases of T5, and laws of positions."""
    inputs = batch("left", length=24)
    model = decoder(name) if name != "T5" else encoder_decoder("T5")
    if name == "T5":
        inputs["decoder_input_ids"] = batch(length=24)["input_ids"]

    def measured(most):
        monkeypatch.setattr(drift, "_MOST_QUERIES", most)
        given = {"laws": {}, "label": False} | options
        return _measure._measure(model, [inputs], Collector(), **given).rows

    for (_, n, entropies, counted, _), some in zip(measured(24), measured(3), strict=True):
        rows, weight = drift.some_queries((n * counted.any(0)).numpy())
        assert 3 <= len(rows) < 24
        assert weight.sum() == pytest.approx(24)
        assert torch.equal(some[1], n[:, rows])
        assert torch.equal(some[3], counted[:, rows])
        for got, expected in zip(some[2], entropies, strict=True):
            shown = counted[:, None, rows].expand_as(got)
            torch.testing.assert_close(got[shown], expected[:, :, rows][shown], atol=2e-5, rtol=0)


def test_laws_and_report():
    model = decoder("Llama")
    batches = [torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(1))]
    report = huggingface.calibrate(model, batches, reference_length=9)
    assert [type(law) for law in report.laws] == [laws.Knots] * 2
    for layer, law in enumerate(report.laws):
        np.testing.assert_allclose(law(9), np.ones(4), rtol=1e-9)
        far = 8 * report.lengths[-1]
        np.testing.assert_allclose(law(far), report.at(far)[1, layer], rtol=1e-9)
