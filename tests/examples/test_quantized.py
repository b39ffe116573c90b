"""The experiments with quantizers: what they compare with, and their kept results."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import experiment
import quantized_model
import quantized_search
import torch


@pytest.mark.host
class TestModel:
    @pytest.mark.parametrize("bits", quantized_model.BITS)
    def test_integers(self, bits):
        x = torch.randn(2, 3, 130, 16)
        for got in (quantized_model.integers(x, bits), quantized_model.per_channel(x, bits)):
            assert got.shape == x.shape
            assert ((got - x).norm() < x.norm()).all()
        step = x.abs().amax(-1, keepdim=True) / max(2 ** (bits - 1) - 1, 1)
        levels = (quantized_model.integers(x, bits) / step).round()
        assert len(levels.unique()) <= 2**bits

    def test_results(self):
        results = experiment.load("quantized_model")
        assert quantized_model.report(results).count("\n") == 1 + 3 * 5 + 3 * 2
        for text in results["texts"].values():
            for kind in quantized_model.KINDS:
                losses = [text[f"{kind} {bits}"]["loss"] for bits in quantized_model.BITS]
                assert np.all(np.diff(losses) < 0)
            assert all(text[f"cache, mse {bits}"]["share"] < 0.34 for bits in quantized_model.BITS)
        quantized_model.plt.close(quantized_model.picture(results))


@pytest.mark.host
class TestSearch:
    def test_scores_of_ours(self, rng):
        x = rng.normal(size=(300, 64)).astype(np.float32) + 1
        for centered in (False, True):
            scores, search, size = quantized_search.ours("unbiased", 8, centered)(x, 0)
            assert size == 64 + (8 if centered else 4)
            np.testing.assert_allclose(scores(x[:9]), x[:9] @ x.T, atol=1.5)
            assert search(x[:9]).shape == (9, 10)

    def test_results(self):
        results = experiment.load("quantized_search")
        ratios = quantized_search.ratios(results)
        assert len(ratios) == 10
        text = quantized_search.report(results)
        assert text.count("as good") == sum(x <= quantized_search.LIMIT for x in ratios.values())
        assert all(0 < x["recall"][0] <= 1 and math.isfinite(x["error"][0]) for x in results["rows"])
        quantized_search.plt.close(quantized_search.picture(results))
