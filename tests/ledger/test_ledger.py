"""No number is forgotten, and every row of the ledger is complete."""

import re
from types import CodeType

import pytest

from ledger import PLACE, Claim, claim, load, printed, resolve
from ledger.documents import DOCUMENTS

# What is wrong with a row shows when it is written. Its claim is tested every day.
pytestmark = [pytest.mark.host, pytest.mark.nightly]

CLAIMS = load()


def _names(code: CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


@pytest.mark.parametrize("key", DOCUMENTS)
def test_every_number_is_claimed_or_has_a_reason_not_to_be(key):
    document = DOCUMENTS[key]
    claimed = {row.number for row in CLAIMS.values() if row.document == key}
    excused = set(document.not_computed)
    assert claimed.isdisjoint(excused)
    assert claimed | excused == set(document.numbers)
    assert len(document.numbers) == len(set(document.numbers))
    assert list(document.not_computed) == [n for n in document.numbers if n in excused]


@pytest.mark.parametrize("key", DOCUMENTS)
def test_equations_are_numbered_through(key):
    document = DOCUMENTS[key]
    equations = [int(n) for n in document.numbers if n.isdigit()]
    assert equations == list(range(1, document.equations + 1))


def test_no_claim_is_of_an_unknown_document():
    assert {row.document for row in CLAIMS.values()} == set(DOCUMENTS)


@pytest.mark.parametrize("row", CLAIMS.values(), ids=lambda row: row.id)
def test_row(row: Claim):
    assert row.says
    assert row.says.count("$") % 2 == row.correct.count("$") % 2 == 0
    assert row.test.__name__.startswith("test_")
    if row.function:
        assert callable(resolve(row.function))
        # The test is about the function that the row names.
        assert row.function.rpartition(".")[2] in _names(row.test.__code__)


# Decimals that are neither ours nor of a statement, by row.
QUOTED = {
    "9588-79": {"0.5001"},  # an exponent in the theorem of Larsen and Nelson
    # The numbers of other statements.
    "8823-4.4": {"7.2"},
    "8823-10.1.4": {"10.2"},
    "8823-11.3": {"9.1"},
}


@pytest.mark.parametrize("row", CLAIMS.values(), ids=lambda row: row.id)
def test_numbers_of_a_row_are_computed(row: Claim):
    stated = {number for other in CLAIMS.values() for number in _decimals(other.says)}
    assert _decimals(PLACE.sub("", row.template)) <= stated | QUOTED.get(row.id, set())
    if places := {place[1] for place in PLACE.finditer(row.template)}:
        assert places <= set(row.numbers())
        # The test is about the numbers that the row prints.
        assert row.numbers.__name__ in _names(row.test.__code__)


def _decimals(text: str) -> set[str]:
    return set(re.findall(r"\d+\.\d+", text))


def test_printed():
    assert printed(0.25, ".1f") == "0.2"
    assert printed(-1.5, ".2f") == "−1.50"
    assert printed(44850, "_d") == "44 850"
    assert printed(2.8e-5, ".1e") == r"$2.8\cdot10^{-5}$"
    assert printed([1, 2, 3.14159], ".2f") == "1.00, 2.00 and 3.14"


def test_a_number_is_claimed_once():
    with pytest.raises(ValueError, match="9588-1 is claimed twice"):
        claim("9588-1", says="again", verdict="holds")(test_no_claim_is_of_an_unknown_document)


def test_what_holds_instead_must_be_said():
    with pytest.raises(ValueError, match="what holds is not said"):
        claim("9588-1", says="wrong", verdict="does not hold")
    with pytest.raises(ValueError, match="no verdict"):
        claim("9588-1", says="wrong", verdict="maybe")
