"""FIRST with constants: the choice of a constant, the runs, and what decides."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import experiment  # noqa: E402
import first  # noqa: E402
import first_constant as fc  # noqa: E402

from isentropic import laws  # noqa: E402

SETTINGS = fc.Settings(2, 160, 8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return first.Reader().requires_grad_(False)


def test_constants_are_factors(model):
    scaled, answers = fc.logits_of(model, 8, 100, 1, None, 3.0)
    law, _ = fc.logits_of(model, 8, 100, 1, laws.Constant(3.0), 1.0)
    torch.testing.assert_close(scaled, law)
    plain, same = fc.logits_of(model, 8, 100, 1, None, 1.0)
    assert (answers == same).all()
    assert (plain - scaled).abs().max() > 1e-4
    assert (fc.logits_of(model, 8, 100, 2, None, 1.0)[1] != answers).any()


def test_best_constant(model, monkeypatch, tmp_path):
    """The one with the least sum of the losses at 64 and 128 tokens, on strings of its own."""
    seen = []

    def logits(model, count, n, seed, law, c):
        seen.append((count, n, seed))
        right = {64: 3 - abs(c - 2), 128: 3 - abs(c - 4)}[n]
        return torch.tensor([[right, 0.0]]), torch.tensor([0])

    monkeypatch.setattr(fc, "logits_of", logits)
    assert 2 <= fc.best_constant(fc.Job(5, SETTINGS, tmp_path), model, None) <= 4
    assert set(seen) == {(16, 64, 100_005), (16, 128, 100_005)}


@pytest.mark.nightly
def test_command(started, monkeypatch, forget, tmp_path):
    """Finished runs are not repeated. A lost one is, and gives the same."""
    monkeypatch.setattr(fc, "QUICK", SETTINGS)
    monkeypatch.setattr(first, "STEPS", 2)

    def command():
        fc.main(["--quick", "--output", str(tmp_path)])
        return json.loads((tmp_path / "first_constant_quick.json").read_text())

    written = command()
    assert list(written["arms"]) == list(fc.ARMS)
    assert {len(x) for x in written["arms"].values()} == {2}
    assert (tmp_path / "first_constant_quick.png").read_bytes().startswith(b"\x89PNG")
    forget(tmp_path / "first_constant_quick_runs.jsonl", "20001")
    assert command() == written
    assert [job.seed for job in started] == [20_000, 20_001, 20_001]


def test_decisions():
    rng = np.random.default_rng(0)

    def of(arm):
        right = np.where(rng.random(200) < (0.2 if arm == "O" else 0.02), 50.0, 99.0)
        return [{"accuracy": x, "constant": 2.0} for x in right]

    results = {"length": 2048, "seeds": 200, "arms": {arm: of(arm) for arm in fc.ARMS}}
    assert [x.found.verdict for x in fc.effects(results)] == ["no effect"] * 2
    assert fc.decision(results, "O × c", "O").verdict == "helps"
    assert 20 < fc.guesses(results, "O") < 60
    assert "97.5 % interval" in fc.report(results)
    experiment.plt.close(fc.picture(results))


def test_committed_results():
    """What README.md, experiments.md, experiments-small-models.md and choose-a-law.md say."""
    results = experiment.load(fc.NAME)
    assert results["seeds"] == fc.SEEDS
    assert [x.found.verdict for x in fc.effects(results)] == ["helps", "helps"]
    assert fc.guesses(results, "O × c") > 30
    assert fc.guesses(results, "O + log × c") < 5
    assert not any(found.verdict == "helps" for found in [fc.decision(results, "O × c", "O")])
    assert "nan" not in fc.report(results)
    assert len(fc.claims(results)) == 1
