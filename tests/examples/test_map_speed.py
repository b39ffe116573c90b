"""The speed of maps by size: that the example runs, and its committed results."""

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import experiment
import map_speed


def test_measures():
    found = map_speed.measure(64, numbers=2**10, rounds=1)
    assert len(found) == 5
    assert all(x > 0 for x in found.values())
    assert map_speed.table({"ratios": {"64": found}}).count("\n") == 2


def test_committed_results():
    """On small vectors a dense product is quick, and on large ones the fast maps are."""
    ratios = experiment.load("map_speed")["ratios"]
    assert list(ratios) == [str(d) for d in map_speed.SIZES]
    assert min(ratios["64"]["rotation"], ratios["64"]["Fast JL"]) > 1
    assert all(x < 0.2 for x in ratios["11008"].values())
