"""No number is forgotten, and every row of the ledger is complete."""

from types import CodeType

import pytest

from ledger import Claim, claim, load, resolve
from ledger.documents import DOCUMENTS

pytestmark = pytest.mark.host

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


def test_a_number_is_claimed_once():
    with pytest.raises(ValueError, match="9588-1 is claimed twice"):
        claim("9588-1", says="again", verdict="holds")(test_no_claim_is_of_an_unknown_document)


def test_what_holds_instead_must_be_said():
    with pytest.raises(ValueError, match="what holds is not said"):
        claim("9588-1", says="wrong", verdict="does not hold")
    with pytest.raises(ValueError, match="no verdict"):
        claim("9588-1", says="wrong", verdict="maybe")
