"""Causal recall: the task, the factors of the arms, and that an interrupted experiment goes on."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import experiment  # noqa: E402
import recall_causal  # noqa: E402
from recall_causal import ARMS, AT_TEST, HEADS, LAYERS, TRAINED  # noqa: E402

SETTINGS = recall_causal.Settings(2, (8, 4), 256)


@pytest.fixture
def tiny(monkeypatch):
    """Small sizes, and runs in this process. Returns the jobs that were run."""
    sizes = {"QUICK": SETTINGS, "TOKENS": 16, "BITS": 7, "ROWS": 2, "CONSTANTS": (1.0, 3.0)}
    for name, size in sizes.items():
        monkeypatch.setattr(recall_causal, name, size)
    started = []

    def run(work, jobs, steps):
        started.extend(jobs)
        return [work(job) for job in jobs]

    monkeypatch.setattr(experiment, "run", run)
    return started


def draw(count, n):
    return recall_causal.draw(count, n, torch.Generator().manual_seed(0))


def reader(arm, trained=16):
    """A model whose attention is not nearly even."""
    torch.manual_seed(0)
    model = recall_causal.Reader(arm, trained).requires_grad_(False)
    for block in model.encoder.blocks:
        block.split.weight.mul_(4)
    return model


class TestTask:
    def test_answers(self):
        sample = draw(5, 20)
        key, value, question = sample.tokens.split((12, 8, 12), dim=-1)
        for i in range(5):
            values = {}
            for t in range(20):
                assert tuple(key[i, t].tolist()) not in values
                values[tuple(key[i, t].tolist())] = value[i, t].argmax()
                assert values[tuple(question[i, t].tolist())] == sample.answer[i, t]
        assert key.abs().unique().tolist() == [1]

    def test_samples_of_a_seed(self):
        """All arms of a seed have the same test, and other seeds and the calibration have others."""
        one, same, other = (recall_causal.test_sample(4, seed, SETTINGS) for seed in (1, 1, 2))
        assert one.tokens.shape[:2] == (4, 64)
        assert (one.tokens == same.tokens).all()
        assert (one.tokens != other.tokens).any()
        assert (one.tokens != recall_causal.calibration_sample(4, 1, SETTINGS).tokens).any()

    def test_is_causal(self):
        model, sample = reader("O"), draw(2, 20)
        short = sample._replace(tokens=sample.tokens[:, :12])
        torch.testing.assert_close(model(sample)[:, :12], model(short))


class TestLaws:
    def test_all_arms_start_alike(self):
        def weights(arm):
            torch.manual_seed(3)
            found = recall_causal.Reader(arm, 16).state_dict()
            return {name: x for name, x in found.items() if not name.startswith("laws")}

        plain = weights("O")
        for arm in TRAINED:
            assert all((weights(arm)[name] == x).all() for name, x in plain.items())

    @pytest.mark.parametrize("arm", [arm for arm in TRAINED if arm not in ("O", "held")])
    def test_start(self, arm):
        law = reader(arm).rule(1, torch.randn(3, HEADS, 17, recall_causal.WIDTH // HEADS), None)
        factors = recall_causal.factors_of(law, 17).expand(3, HEADS, 17)
        np.testing.assert_allclose(factors[..., 15], 1, rtol=1e-5)
        rise = (factors[..., 16] - factors[..., 14]) / math.log(17 / 15)
        expected = 0 if arm in ("constant", "query alone") else 1 / math.log(16)
        np.testing.assert_allclose(rise, expected, rtol=0.1, atol=1e-6)

    @pytest.mark.parametrize("arm", [arm for arm in TRAINED if arm not in ("O", "log")])
    def test_is_trained(self, arm):
        """Each layer and head has numbers of its own, and all of them have gradients."""
        model, sample = reader(arm).requires_grad_(True), draw(3, 12)
        loss = torch.nn.functional.cross_entropy(model(sample).flatten(0, 1), sample.answer.flatten())
        loss.backward()
        assert len(model.laws) == LAYERS
        for x in model.laws.parameters():
            assert x.shape[0] % HEADS == 0
            assert (x.grad.reshape(len(x), -1) != 0).any(-1).all()

    def test_held_in_training(self):
        """The entropies are the part p of log n up to n0, and constant beyond it."""
        model = reader("held", 8)
        q, k = torch.randn(2, 3, HEADS, 20, recall_causal.WIDTH // HEADS)
        model.laws[1].numbers["logit"].copy_(torch.tensor([0.0, 1.0]))
        law = model.rule(1, q, k)
        entropy = recall_causal.it.attention_entropy(q, k, is_causal=True, law=law)
        part = torch.tensor([0.0, 1.0]).sigmoid()[:, None]
        expected = part * torch.arange(1, 21).clamp(max=8).log()
        torch.testing.assert_close(entropy, expected.expand(3, HEADS, 20), atol=1e-4, rtol=0)

    def test_query_of_its_own_head(self):
        """The maps of a head change the factors of that head only, and know the query."""
        model, query = reader("query alone"), torch.randn(2, HEADS, 5, recall_causal.WIDTH // HEADS)
        before = recall_causal.factors_of(model.rule(0, query, None), 5)
        model.laws[0].maps.weight[1] = 1.0
        after = recall_causal.factors_of(model.rule(0, query, None), 5)
        assert (after[:, 0] == before[:, 0]).all()
        expected = torch.nn.functional.softplus(
            query.transpose(1, 2).flatten(-2).sum(-1) + math.log(math.e - 1)
        )
        torch.testing.assert_close(after[:, 1], expected)


class TestArmsAtTest:
    def test_beyond_the_trained_length(self, tiny):
        """All rules but the constants are O itself up to n0, and have their law's ratio beyond it."""
        numbers = {
            "affine": {"slope": [0.5, 0.0], "intercept": [0.0, 3.0]},
            "power": {"exponent": [0, 1]},
        }
        learned = {arm: {"numbers": [x] * LAYERS} for arm, x in numbers.items()}
        rules = recall_causal.rules_at_test(reader("O", 8), 8, 0, SETTINGS, learned)
        factors = {
            arm: recall_causal.factors_of(rule(1, None, None), 128).expand(HEADS, 128)
            for arm, rule in rules.items()
            if arm != "O + held"  # It needs queries and keys.
        }
        for arm in ("O", "O + log", "O + affine", "O + power", "O + held mean"):
            assert (factors[arm][:, :8] == 1).all()
        np.testing.assert_allclose(factors["O + log"][:, 63], 2)
        np.testing.assert_allclose(factors["O + affine"][:, 63], [2, 1])
        np.testing.assert_allclose(factors["O + power"][:, 63], [1, 8])
        assert (factors["O + constant 3"] == 3).all()

    def test_held(self):
        """Beyond n0 the entropy of each query is that of its head there, and nothing changes up to n0."""
        model, sample = reader("O", 8), draw(8, 128)
        targets = recall_causal.entropies_at(model, 8, sample)
        q, k = torch.randn(2, 3, HEADS, 40, recall_causal.WIDTH // HEADS)
        law = recall_causal.held_beyond(8, targets, 1, q, k)
        factors = recall_causal.factors_of(law, 40)
        assert (factors[..., :8] == 1).all()
        entropy = recall_causal.it.attention_entropy(q, k, is_causal=True, law=law)[..., 8:]
        torch.testing.assert_close(entropy, targets[1][:, None].expand_as(entropy), atol=1e-4, rtol=0)

    def test_held_mean(self):
        """With the factors in use the mean entropy of each layer and head is that at n0."""
        model, sample = reader("O", 8), draw(8, 128)
        held = recall_causal.table_rule(recall_causal.held_mean(model, 8, sample))
        at = (slice(0, 8), slice(56, 64), slice(120, 128))

        def entropies(rule):
            """Of each layer, where n is 8, 64 and 128 or a few less."""
            found = []

            def attend(layer, q, k, v):
                law = rule(layer, q, k)
                state = recall_causal.it.attention_state(q, k, v, is_causal=True, law=law)
                found.append([state.entropy()[..., rows].mean((0, 2)) for rows in at])
                return state.output()

            model.run(sample, attend)
            return found

        plain, with_factors = entropies(lambda layer, q, k: None), entropies(held)
        for layer in range(LAYERS):
            target, middle, last = with_factors[layer]
            torch.testing.assert_close(plain[layer][0], target)
            torch.testing.assert_close(middle, target, atol=0.02, rtol=0)
            torch.testing.assert_close(last, target, atol=0.02, rtol=0)
            assert (plain[layer][2] > target + 1).all()

    def test_interpolation(self):
        factors = recall_causal.interpolated(torch.tensor([[1.0, 2.0, 8.0]]), [4, 8, 16])[0]
        assert (factors[:4] == 1).all()
        np.testing.assert_allclose(factors[[5, 7, 11, 15]], [1.5, 2, 8 * 0.75**2, 8], rtol=1e-5)


@pytest.mark.nightly
class TestRun:
    def command(self, folder, *options):
        recall_causal.main(["--quick", "--output", str(folder), *options])
        return json.loads((folder / "recall_causal_quick.json").read_text())

    def test_command(self, tiny, forget, tmp_path, capsys):
        """Finished runs are not repeated. A lost one is, and gives the same."""
        written = self.command(tmp_path)
        assert list(written["arms"]) == list(ARMS)
        for found in written["arms"].values():
            assert np.asarray([[x["accuracy"] for x in of_n0] for of_n0 in found]).shape == (2, 2, 5)
        text = capsys.readouterr().out
        assert all(question in text for question in recall_causal.QUESTIONS)
        assert "over 2 seeds" in text
        assert "O has not learned the task with n₀ = 8" in text
        assert (tmp_path / "recall_causal_quick.png").read_bytes().startswith(b"\x89PNG")

        count = 2 * 2 * len(TRAINED)
        assert len(tiny) == count
        forget(tmp_path / "recall_causal_quick_runs.jsonl", "query alone 8 1")
        assert self.command(tmp_path) == written
        assert [(job.arm, job.trained, job.seed) for job in tiny[count:]] == [("query alone", 8, 1)]

    def test_other_settings_are_another_experiment(self, tmp_path):
        job = recall_causal.Job("log", 8, 0, SETTINGS, tmp_path / "runs")
        job.write({"log": {"accuracy": [1.0]}})
        assert job.result() == {"log": {"accuracy": [1.0]}}
        assert replace(job, settings=SETTINGS._replace(steps=3)).result() is None
        assert replace(job, settings=SETTINGS._replace(trained=(8,))).result() == job.result()

    def test_training_learns(self, monkeypatch):
        monkeypatch.setattr(recall_causal, "TOKENS", 256)
        model = recall_causal.train("O", 8, 0, 150)
        found = recall_causal.test(model, model.rule, 8, draw(50, 128))
        assert found["accuracy"][0] > 40  # a guess is right in 1/8

    def test_needs_two_seeds(self, tmp_path, capsys):
        with pytest.raises(SystemExit):
            self.command(tmp_path, "--seeds", "1")
        assert "fewer than 2" in capsys.readouterr().err


class TestDecisions:
    @pytest.fixture
    def results(self):
        """All arms have 99 % with a noise of 1 point, but 50 % at the longest test, and "log" 70 %.

        With n0 = 64, "log" has 50 % there too.
        """
        generator = np.random.default_rng(0)

        def seed(arm, trained):
            accuracy = 99 + 0.3 * generator.standard_normal(5)
            accuracy[-1] += -49 + 20 * (arm == "log" and trained == 32)
            return {"accuracy": accuracy.tolist(), "factor": [1.0] * 5, "entropy": [2.0] * 5}

        arms = {arm: [[seed(arm, n0) for _ in range(10)] for n0 in (32, 64)] for arm in ARMS}
        return {"trained": [32, 64], "multiples": [1, 2, 4, 8, 16], "seeds": 10, "arms": arms}

    def test_pairs(self, results):
        pairs = [pair for question in recall_causal.QUESTIONS.values() for pair in question]
        assert {arm for pair in pairs for arm in pair} <= set(ARMS)
        for arm, other in pairs:
            expected = "helps" if arm == "log" else "harms" if other == "log" else "no effect"
            for trained in (None, 32):
                assert recall_causal.decision(results, arm, other, trained).verdict == expected
            assert recall_causal.decision(results, arm, other, 64).verdict == "no effect"
        assert recall_causal.decision(results, "log", "O").mean == pytest.approx(10, abs=1)

    def test_is_paired(self, results):
        """What the arms of a seed have in common is in no difference."""
        before = recall_causal.decision(results, "log", "O")
        for arm in results["arms"].values():
            for of_n0 in arm:
                for i, found in enumerate(of_n0):
                    found["accuracy"][-1] += 3.0 * i
        after = recall_causal.decision(results, "log", "O")
        assert after.interval("+.6f") == before.interval("+.6f")

    def test_claims_report_and_picture(self, results):
        log, held = recall_causal.claims(results)
        assert (log.verdict, held.verdict) == ("reproduced", "not reproduced")
        assert "n = 16 n₀, log against constant, points of accuracy: +" in log.found
        assert recall_causal.decision(results, "O + log", "O").interval() in recall_causal.answer(
            results
        )
        text = recall_causal.report(results)
        assert "| log against constant | +" in text
        assert "not learned" not in text
        figure = recall_causal.picture(results)
        assert [len(ax.lines) for ax in figure.axes] == [len(TRAINED)] * 2 + [1 + len(AT_TEST)] * 2
        experiment.plt.close(figure)

    def test_sizes(self):
        assert recall_causal.FULL.trained == (32, 64, 128)
        assert recall_causal.MULTIPLES[-1] == 16
        assert recall_causal.longest(128) <= 2**recall_causal.BITS
        assert recall_causal.SEEDS >= 10
