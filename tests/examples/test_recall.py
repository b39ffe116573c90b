"""Whether the entropy should be held where new keys are like the old ones: a run, and the results."""

import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import experiment  # noqa: E402
import recall  # noqa: E402
import recall_results  # noqa: E402

LAST = -1


@pytest.fixture
def tiny(monkeypatch, started):
    """Small sizes, and runs in this process."""
    sizes = {"LENGTHS": (64, 128), "CALIBRATED": (64, 128), "TESTS": 2, "BATCH": 4}
    for name, size in (sizes | {"STEPS": 10, "EARLY": 2}).items():
        monkeypatch.setattr(recall, name, size)


@pytest.fixture(scope="module")
def results():
    return experiment.load(recall.NAME)


def of_seeds(results, task, arm, what):
    """(seeds, lengths)"""
    return np.asarray([found[what] for found in results["tasks"][task][arm]])


@pytest.mark.nightly
class TestRun:
    def test_command(self, tiny, tmp_path, capsys):
        recall.main(["--seeds", "2", "--output", str(tmp_path)])
        written = json.loads((tmp_path / "recall.json").read_text())
        assert list(written["tasks"]) == list(recall.TASKS)
        assert written["lengths"] == [64, 128]
        for task, arms in written["tasks"].items():
            assert list(arms) == list(recall.ARMS)
            plain, law, best, held = (
                of_seeds(written, task, arm, "loss") for arm in ("O", "O + law", "O + best", "O + held")
            )
            assert plain.shape == (2, 2)
            assert (plain[:, 0] == law[:, 0]).all()  # at 64 keys the law is 1
            assert (plain[:, 1] != law[:, 1]).all()
            assert (best <= np.minimum(plain, law) + 1e-3).all()
            assert (held != plain).all()
            entropy = of_seeds(written, task, "O + held", "entropy")
            plain = of_seeds(written, task, "O", "entropy")
            np.testing.assert_allclose(entropy, np.broadcast_to(plain[:, :1], (2, 2)), rtol=1e-3)
        assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
        assert "of 2 seeds" in capsys.readouterr().out

    def test_a_seed_decides_all(self, tiny):
        first, again, other = (recall.work(("recall", seed)) for seed in (3, 3, 4))
        assert first == again
        assert first != other

    def test_training_comes_near_bayes(self, monkeypatch):
        monkeypatch.setattr(recall, "STEPS", 150)
        task = recall.TASKS["recall"]
        reader = recall.train(task, 0)
        sample = task.draw(64, 64, torch.Generator().manual_seed(1))
        with torch.no_grad():
            loss = task.measure(*reader(sample), sample)["loss"].item()
        ideal = task.ideal(sample)["loss"].item()
        assert loss == pytest.approx(ideal, rel=0.1)
        assert ideal < math.log(recall.CLASSES) / 4

    def test_bayes_is_the_softmax_of_distances(self):
        sample = recall.draw_recall(4, 100, torch.Generator().manual_seed(0))
        distance = (sample.query[..., None, :] - sample.key[:, :, None]).square().sum(-1)
        weight = torch.softmax(-distance / (2 * recall.QUERY_NOISE**2), -1)
        found = recall.ideal_recall(sample)
        loss = -((weight @ sample.value) * sample.answer).sum(-1).log().mean()
        assert found["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
        assert found["entropy"].item() == pytest.approx(
            torch.special.entr(weight).sum(-1).mean().item(), rel=1e-5
        )

    def test_whoever_knows_the_groups_averages_them(self):
        sample = recall.draw_average(4, 100, torch.Generator().manual_seed(0), key_noise=0.1)
        error = []
        for i in range(4):
            for group in range(recall.GROUPS):
                own = sample.value[i, 0, sample.kind[i, 0] == group, 0]
                mean = own.sum() / (len(own) + recall.VALUE_NOISE**2)
                error.append((mean - sample.answer[i, 0, group, 0]).item() ** 2)
        assert recall.ideal_average(sample)["loss"].item() == pytest.approx(np.mean(error), rel=1e-4)

    @pytest.mark.parametrize("best", [0.6, 1.0, 3.5])
    def test_best_factor(self, best):
        assert recall.best_factor(lambda x: math.log(x / best) ** 2) == pytest.approx(best, rel=0.01)

    def test_best_scale_is_that_of_many_keys(self):
        """The minimum of the error that exact maps have, where many keys have weight."""
        n, noise = 1024, 0.1
        sample = recall.draw_average(64, n, torch.Generator().manual_seed(0), noise)
        query = 4 * (sample.query - sample.query.mean(dim=2, keepdim=True))  # 4 = √d undoes the scale
        scale = recall.best_scale(n, noise)
        at = [
            recall.measure_average(query * scale * x, sample.key, sample)["loss"]
            for x in (0.8, 1, 1.25)
        ]
        assert at[1] < min(at[0], at[2])


class TestCommittedResults:
    """What holds for each seed."""

    def test_sizes(self, results):
        assert results["lengths"] == list(recall.LENGTHS)
        assert results["seeds"] == recall.SEEDS
        assert of_seeds(results, "recall", "O", "loss").shape == (recall.SEEDS, len(recall.LENGTHS))

    def test_recall_is_trained_and_wants_no_law(self, results):
        plain, law, ideal = (
            of_seeds(results, "recall", arm, "loss") for arm in ("O", "O + law", "ideal")
        )
        np.testing.assert_allclose(plain, ideal, rtol=0.02)
        assert (law[:, 1:] > plain[:, 1:]).all()
        np.testing.assert_allclose(of_seeds(results, "recall", "O + best", "factor"), 1, atol=0.1)
        entropy = of_seeds(results, "recall", "ideal", "entropy")
        assert (np.diff(entropy) > 0).all()
        rate = [of_seeds(results, "recall", arm, "accuracy") for arm in ("O", "O + law")]
        np.testing.assert_allclose(*rate, atol=1.5)  # points

    def test_the_law_helps_where_training_stopped_early(self, results):
        plain, law = (of_seeds(results, recall.EARLY_TASK, arm, "loss") for arm in ("O", "O + law"))
        assert (law[:, 1:] < plain[:, 1:]).all()
        factor = of_seeds(results, recall.EARLY_TASK, "O + best", "factor")
        assert factor.min() > 1.5
        assert (factor[:, LAST] < factor[:, 0]).all()  # and not because there are more keys

    def test_clear_groups_want_a_slow_law(self, results):
        factor = of_seeds(results, "average, clear", "O + best", "factor")
        assert (factor[:, LAST] > 1.2).all()
        assert (factor[:, LAST] < 1.5).all()
        plain, law = (of_seeds(results, "average, clear", arm, "loss") for arm in ("O", "O + law"))
        assert (law[:, LAST] < plain[:, LAST]).all()

    def test_blurred_groups_want_none(self, results):
        factor = of_seeds(results, "average, blurred", "O + best", "factor")
        np.testing.assert_allclose(factor, 1, atol=0.1)
        plain, law = (of_seeds(results, "average, blurred", arm, "loss") for arm in ("O", "O + law"))
        assert (law[:, LAST] > 2 * plain[:, LAST]).all()

    @pytest.mark.parametrize("arm", ["O + calibrated", "O + held"])
    def test_holding_the_entropy_loses(self, results, arm):
        for task in recall.TASKS:
            plain, held = (of_seeds(results, task, name, "loss") for name in ("O", arm))
            assert (held[:, LAST] > plain[:, LAST]).all(), task

    def test_no_constant_is_better_than_the_best(self, results):
        for task in recall.TASKS:
            best = of_seeds(results, task, "O + best", "loss")
            for arm in ("O", "O + law", "O + calibrated"):
                assert (best <= of_seeds(results, task, arm, "loss") * 1.001).all(), (task, arm)

    def test_theory(self, results):
        growth = []
        for noise, scales in results["theory"]:
            np.testing.assert_allclose(
                scales, [recall.best_scale(n, noise) for n in recall.LENGTHS], rtol=1e-4
            )
            growth.append(experiment.slope(results["lengths"], scales))
        assert growth[0] == pytest.approx(1, abs=0.01)  # log n, and slower where there is noise
        assert growth[0] > growth[1] > growth[2] > 0.2

    def test_report_picture_and_claims(self, results):
        report = recall_results.report(results)
        assert report.count("\n| O + held |") == len(recall.TASKS)
        assert "The best factor is 0.9" in report
        figure = recall_results.picture(results)
        assert [ax.get_title() for ax in figure.axes[: len(recall.TASKS)]] == list(recall.TASKS)
        experiment.plt.close(figure)
        verdicts = [claim.verdict for claim in recall_results.claims(results)]
        assert verdicts == [*["exploratory"] * 3, "not reproduced", "reproduced"]
