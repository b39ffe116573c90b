"""The fitted laws of the documentation: that the script runs, and what its committed results show."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("tqdm")
pytest.importorskip("transformers")

import calibration
import experiment
import numpy as np


def test_a_curved_law_goes_further_where_keys_are_in_few_dimensions():
    found = calibration.synthetic("sphere", 4, seed=2, far=4096)
    affine, auto = (np.abs(found[family]) for family in ("affine", "auto"))
    assert affine.min() > 0.5
    assert auto.max() < 0.5


def test_texts():
    for kind in calibration.KINDS:
        found = calibration.texts(kind, 3)
        assert [len(ids) for ids in found] == [calibration.TRIED] * 3
    few, more = (next(iter(calibration.batches(found, (n,)))) for n in (5, 7))
    assert few.shape == (3, 5)
    assert (more[:, :5] == few).all()


def test_committed_results():
    results = experiment.load(calibration.NAME)
    errors = results["minilm"]["errors"]
    assert max(errors["fitted, auto"].values()) < min(errors["fitted, affine"].values())
    means = {
        name: [abs(np.mean(fits["auto"])) for fits in found.values()]
        for name, found in results["synthetic"].items()
    }
    assert max(map(max, means.values())) < 0.2
    text = calibration.report(results)
    assert text.count("\n| ") == 2 + len(errors) + 2 + 2 * len(calibration.DIMENSIONS)
    figure = calibration.picture(results)
    assert [len(ax.lines) for ax in figure.axes] == [0, 5]
    experiment.plt.close(figure)
