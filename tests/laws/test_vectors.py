"""The published factors are those of the laws. `test_pages` holds them to those of their script."""

import json
from pathlib import Path

import numpy as np
import pytest

from isentropic import laws
from isentropic.laws._presets import RULES

pytestmark = pytest.mark.host

PATH = Path(__file__).parents[2] / "docs" / "reference" / "law-vectors.json"


@pytest.fixture(scope="module")
def published():
    return json.loads(PATH.read_text(encoding="utf-8"))


def test_all_presets_are_there(published):
    assert [rule["rule"] for rule in published["rules"]] == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_laws_agree(published, name):
    (rule,) = (rule for rule in published["rules"] if rule["rule"] == name)
    law, n = laws.preset(name, **rule["parameters"]), published["n"]
    assert len(rule["factors"]) == len(n) > 40
    # Libraries round logarithms differently, by one unit in the last place.
    np.testing.assert_allclose([law(i) for i in n], rule["factors"], rtol=1e-15, atol=1e-15)
    np.testing.assert_allclose(law(np.asarray(n, np.float32)), rule["factors"], rtol=1e-6, atol=1e-6)
    # Rules of a length act within the numbers that are given.
    assert (len(set(rule["factors"])) > 1) == (rule["n_counts"] is not None)


def test_what_n_counts_is_that_of_the_table(published):
    table = {line.split()[0]: line for line in laws.preset.__doc__.splitlines() if "  " in line.strip()}
    for rule in published["rules"]:
        assert f"  {rule['n_counts'] or '–'}  " in table[rule["rule"]]
