"""The fitted laws of the documentation: that the script runs, and what its committed results show."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("tqdm")
pytest.importorskip("transformers")

import calibration
import experiment
import numpy as np


def test_a_curved_law_goes_further_where_keys_are_in_few_dimensions():
    """A line in log n through the same factors leaves more than 0.5 nats."""
    assert np.abs(calibration.synthetic("sphere", 4, seed=2, far=4096)).max() < 0.5


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
    assert max(errors[calibration.FITTED].values()) < 0.115
    assert max(errors[calibration.TO_USE].values()) < 0.0706
    means = {
        name: [abs(np.mean(fits)) for fits in found.values()]
        for name, found in results["synthetic"].items()
    }
    assert max(map(max, means.values())) < 0.3
    text = calibration.report(results)
    assert text.count("\n| ") == 2 + len(errors) + 2 + 2 * len(calibration.DIMENSIONS)
    figure = calibration.picture(results)
    assert [len(ax.lines) for ax in figure.axes] == [0, 3]
    experiment.plt.close(figure)
