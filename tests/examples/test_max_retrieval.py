"""Max Retrieval: the task, the laws of the arms, and that an interrupted experiment goes on."""

import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import compared_arms  # noqa: E402
import experiment  # noqa: E402
import max_retrieval  # noqa: E402
from max_retrieval import ARMS, AT_TEST, TRAINED  # noqa: E402

import isentropic as it  # noqa: E402
from isentropic import laws  # noqa: E402

SETTINGS = max_retrieval.Settings(2, (16, 40), (40, 16), 6, 160)


@pytest.fixture
def tiny(monkeypatch):
    """Small sizes, and runs in this process. Returns the jobs that were run."""
    for name, size in {"QUICK": SETTINGS, "CALIBRATION": 160, "BATCH": 4, "TOGETHER": 100}.items():
        monkeypatch.setattr(max_retrieval, name, size)
    started = []

    def run(work, jobs, steps):
        started.extend(jobs)
        return [work(job) for job in jobs]

    monkeypatch.setattr(experiment, "run", run)
    return started


@pytest.fixture
def sample():
    return max_retrieval.draw(3, 12, torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return max_retrieval.Retriever("O").requires_grad_(False)


def factors(arm, n):
    """The factors of a new law for queries made from several numbers."""
    torch.manual_seed(0)
    model = max_retrieval.Retriever(arm).requires_grad_(False)
    hidden = torch.randn(5, 1, 1, max_retrieval.WIDTH)
    return np.broadcast_to(np.asarray(model.law(hidden, None, None)(n)), (5, 1, 1))


class TestTask:
    def test_answers(self):
        sample = max_retrieval.draw(20, 7, torch.Generator().manual_seed(0))
        assert sample.kind.shape == (20, 7)
        for i in range(20):
            items = zip(sample.priority[i].tolist(), sample.kind[i].tolist(), strict=True)
            assert sample.answer[i] == max(items)[1]

    def test_parts(self, monkeypatch):
        monkeypatch.setattr(max_retrieval, "TOGETHER", 100)
        settings = SETTINGS._replace(sets=50, items=1000)
        assert max_retrieval.parts(30, settings) == [3] * 11
        assert max_retrieval.parts(16, settings) == [6] * 8 + [2]
        assert max_retrieval.parts(5000, settings) == [1]

    def test_sets_of_a_seed(self):
        """All arms of a seed are tested with the same sets, and other seeds with others."""
        one, same, other = (next(max_retrieval.test_sets(i, 16, SETTINGS)) for i in (1, 1, 2))
        assert all((a == b).all() for a, b in zip(one, same, strict=True))
        assert (one.priority != other.priority).all()

    def test_order_does_not_matter(self, model, sample):
        order = torch.randperm(12)
        mixed = sample._replace(priority=sample.priority[:, order], kind=sample.kind[:, order])
        torch.testing.assert_close(model(mixed), model(sample))


class TestLaws:
    def test_all_arms_start_alike(self):
        def weights(arm):
            torch.manual_seed(3)
            found = max_retrieval.Retriever(arm).state_dict()
            return {name: x for name, x in found.items() if not name.startswith("law")}

        plain = weights("O")
        for arm in TRAINED:
            assert all((weights(arm)[name] == x).all() for name, x in plain.items())

    @pytest.mark.parametrize("arm", [arm for arm in TRAINED if arm not in ("O", "held")])
    def test_start(self, arm):
        np.testing.assert_allclose(factors(arm, 16), 1, rtol=1e-5)
        rise = (factors(arm, 17) - factors(arm, 15)) / math.log(17 / 15)
        expected = 0 if arm in ("constant", "query alone") else 1 / math.log(16)
        np.testing.assert_allclose(rise, expected, rtol=0.1, atol=1e-6)

    def test_held_in_training(self, model):
        """The entropies are half of log n at first, and constant beyond 16 items."""
        law = max_retrieval.TRAINED["held"]()
        for n in (7, 16, 100):
            heads = model.heads(max_retrieval.draw(3, n, torch.Generator().manual_seed(0)))
            rule = law(heads.hidden, heads.query, heads.key)
            entropy = it.attention_entropy(heads.query, heads.key, law=rule)
            np.testing.assert_allclose(entropy.detach(), math.log(min(n, 16)) / 2, atol=1e-4)

    def test_learned_numbers(self):
        model = max_retrieval.Retriever("query")
        model.law.maps.bias.data = torch.tensor([0.3, -0.4])
        model.law.numbers["offset"].data = torch.tensor([0.2])
        found = model.law(torch.randn(1, 1, 1, max_retrieval.WIDTH), None, None)(100)
        expected = 0.2 + math.log1p(math.exp(0.3)) * math.log(101) ** (2 * math.tanh(-0.4))
        assert found.item() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("arm", [arm for arm in TRAINED if arm not in ("O", "log")])
    def test_is_trained(self, arm, sample):
        model = max_retrieval.Retriever(arm)
        torch.nn.functional.cross_entropy(model(sample), sample.answer).backward()
        assert all(x.grad.abs().max() > 0 for x in model.law.parameters())

    def test_is_in_the_forward_pass(self, model):
        """With the same weights "log" is "O" at n = 16, and has 1.5 times its queries at n = 64."""
        other = max_retrieval.Retriever("log").requires_grad_(False)
        other.load_state_dict(model.state_dict())
        generator = torch.Generator().manual_seed(0)
        short, long = (max_retrieval.draw(3, n, generator) for n in (16, 64))
        assert (other(short) == model(short)).all()
        assert (other(long) != model(long)).any()
        model.query.weight.mul_(1.5)
        torch.testing.assert_close(other(long), model(long))


class TestArmsAtTest:
    @pytest.fixture
    def rules(self, tiny, model):
        model.query.weight.mul_(30)
        learned = {arm: {"factor": [2.0, 5.0]} for arm in compared_arms.TRANSFERRED}
        return max_retrieval.rules_at_test(model, 0, SETTINGS, learned)

    def test_factors(self, model, rules):
        heads = max_retrieval.calibration_heads(model, 1, 40)
        assert rules["O"](heads, 40) is None
        assert rules["O + log"](heads, 40)(40) == laws.LogLength(16)(40)
        assert rules["O + affine"](heads, 40)(40) == 2.5
        assert rules["O + constant 5.66"](heads, 40)(40) == pytest.approx(4 * math.sqrt(2))

    def test_held_entropies(self, model, rules):
        target = max_retrieval.mean_entropy(max_retrieval.calibration_heads(model, 0, 16))
        heads = max_retrieval.calibration_heads(model, 0, 40)
        entropy = {
            arm: max_retrieval.measure(model, heads, rules[arm](heads, 40), torch.zeros(4))["entropy"]
            for arm in ("O", "O + held", "O + held mean")
        }
        assert entropy["O"].mean() > target + 0.2
        np.testing.assert_allclose(entropy["O + held"], target, rtol=1e-4)
        assert entropy["O + held mean"].mean() == pytest.approx(target, rel=0.01)
        assert entropy["O + held mean"].std() > 1e-3

    def test_best_constant(self):
        names = [max_retrieval.constant_name(x) for x in max_retrieval.CONSTANTS]
        arms = {
            name: {"accuracy": [float(i == 0), float(i == 3)], "factor": [i, i]}
            for i, name in enumerate(names)
        }
        # O is the same as the constant 1, and must stay.
        found = max_retrieval.with_best_constant({"O": arms[names[0]], **arms}, max_retrieval.CONSTANTS)
        assert list(found) == ["O", "O + best constant"]
        assert found["O + best constant"] == {"accuracy": [1.0, 1.0], "factor": [0, 3]}


@pytest.mark.nightly
class TestRun:
    def command(self, folder, *options):
        max_retrieval.main(["--quick", "--output", str(folder), *options])
        return json.loads((folder / "max_retrieval_quick.json").read_text())

    def test_command(self, tiny, tmp_path, capsys):
        written = self.command(tmp_path)
        assert list(written["arms"]) == list(ARMS)
        for found in written["arms"].values():
            assert np.asarray([x["accuracy"] for x in found]).shape == (2, 2)
            assert all(0 <= x <= 100 for one in found for x in one["accuracy"])
        best, plain = (
            np.asarray([x["accuracy"] for x in written["arms"][arm]])
            for arm in ("O + best constant", "O")
        )
        assert (best >= plain).all()
        assert (tmp_path / "max_retrieval_quick.png").read_bytes().startswith(b"\x89PNG")
        text = capsys.readouterr().out
        assert all(question in text for question in max_retrieval.QUESTIONS)
        assert "over 2 seeds" in text

    def test_goes_on(self, tiny, forget, tmp_path, capsys):
        """Finished runs are not repeated. A lost one is, and gives the same."""
        first = self.command(tmp_path)
        assert len(tiny) == 2 * len(TRAINED)
        assert self.command(tmp_path) == first
        assert len(tiny) == 2 * len(TRAINED)
        forget(tmp_path / "max_retrieval_quick_runs.jsonl", "query alone 1")
        assert self.command(tmp_path) == first
        assert [(job.arm, job.seed) for job in tiny[2 * len(TRAINED) :]] == [("query alone", 1)]

    def test_other_settings_are_another_experiment(self, tiny, tmp_path):
        job = max_retrieval.Job("log", 0, SETTINGS, tmp_path / "runs")
        assert job.result() is None
        job.write({"log": {"accuracy": [1.0]}})
        assert job.result() == {"log": {"accuracy": [1.0]}}
        assert replace(job, settings=SETTINGS._replace(steps=3)).result() is None
        assert [path.name for path in tmp_path.iterdir()] == ["runs.jsonl"]

    def test_training_learns(self):
        model = max_retrieval.train("log", 0, 150)
        rules = {"log": lambda heads, n: model.rule(heads)}
        found = max_retrieval.test(model, rules, 0, SETTINGS._replace(sets=200, items=3200))
        assert found["log"]["accuracy"][0] > 30  # a guess is right in 10 %

    def test_needs_two_seeds(self, tmp_path, capsys):
        with pytest.raises(SystemExit):
            self.command(tmp_path, "--seeds", "1")
        assert "fewer than 2" in capsys.readouterr().err


class TestDecisions:
    @pytest.fixture
    def results(self):
        """All arms have 50 % with a noise of 1 point, except for "log" with 20 points more at n = 40."""
        generator = np.random.default_rng(0)

        def seed(arm):
            accuracy = 50 + generator.standard_normal(2) + [0, 20 * (arm == "log")]
            return {"accuracy": accuracy.tolist(), "factor": [1.0, 1.5], "entropy": [1.0, 2.0]}

        arms = {arm: [seed(arm) for _ in range(10)] for arm in ARMS}
        return {"lengths": [16, 40], "decided": [40, 16], "seeds": 10, "arms": arms}

    def test_pairs(self, results):
        pairs = [pair for question in max_retrieval.QUESTIONS.values() for pair in question]
        assert {arm for pair in pairs for arm in pair} <= set(ARMS)
        for arm, other in pairs:
            found = max_retrieval.decision(results, arm, other, 40)
            expected = "helps" if arm == "log" else "harms" if other == "log" else "no effect"
            assert found.verdict == expected
            assert max_retrieval.decision(results, arm, other, 16).verdict == "no effect"

    def test_is_paired(self, results):
        """What the arms of a seed have in common is in no difference."""
        before = max_retrieval.decision(results, "log", "O", 40)
        for arm in results["arms"].values():
            for i, found in enumerate(arm):
                found["accuracy"][1] += 10.0 * i
        after = max_retrieval.decision(results, "log", "O", 40)
        assert after.interval("+.6f") == before.interval("+.6f")
        assert before.mean == pytest.approx(20, abs=1.5)

    def test_claims(self, results):
        log, held = max_retrieval.claims(results)
        assert (log.verdict, held.verdict) == ("reproduced", "not reproduced")
        assert "n = 40, log against constant, points of accuracy: +" in log.found

    def test_report_and_picture(self, results):
        text = max_retrieval.report(results)
        assert "| log against constant | +" in text
        assert text.count("| helps |") == 2
        accuracy = [x["accuracy"][1] for x in results["arms"]["log"]]
        assert f"{statistics.fmean(accuracy):.1f} ± {statistics.stdev(accuracy):.1f}" in text
        figure = max_retrieval.picture(results)
        assert [len(ax.lines) for ax in figure.axes] == [len(TRAINED), 1 + len(AT_TEST), len(ARMS)]
        experiment.plt.close(figure)

    def test_sizes(self):
        for size in (max_retrieval.FULL, max_retrieval.QUICK):
            assert set(size.decided) <= set(size.lengths)
            assert max_retrieval.LONGEST in size.lengths
        assert max_retrieval.FULL.decided[0] == 1024
        assert max_retrieval.SEEDS >= 10
