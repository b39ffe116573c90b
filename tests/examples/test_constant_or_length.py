"""Constant or length: the three tasks, the arms, the choice of a constant, and interrupted runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import constant_or_length as col  # noqa: E402
import dilution_tasks  # noqa: E402
import experiment  # noqa: E402
import max_retrieval  # noqa: E402
import recall_causal  # noqa: E402
import two_questions  # noqa: E402
from recall_causal import HEADS, LAYERS  # noqa: E402

import isentropic as it  # noqa: E402
from isentropic import laws  # noqa: E402

SETTINGS = col.Settings((2, 2), 128, 8, 1024)
LEARNED = [arm for arm in col.TRAINED if arm not in ("O", "log")]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def new(task, arm):
    """A new model for a task, with its queries, keys and values of some data."""
    torch.manual_seed(3)
    if task == "max":
        return max_retrieval.Retriever(arm)
    if task == "recall":
        return recall_causal.Reader(arm, 64)
    return two_questions.Reader(arm, col.TASKS[task].heads)


def logits(task, model, sample):
    return model(sample).flatten(0, -2), sample.answer.flatten()


def sample_of(task, n=12):
    return col.TASKS[task].sample(n, SETTINGS, generator())


class TestTasks:
    def test_max(self):
        sample = max_retrieval.draw(20, 7, generator())
        assert sample.kind.shape == (20, 7)
        for i in range(20):
            items = zip(sample.priority[i].tolist(), sample.kind[i].tolist(), strict=True)
            assert sample.answer[i] == max(items)[1]

    def test_recall(self):
        sample = recall_causal.draw(5, 20, generator())
        key, value, question = sample.tokens.split((12, 8, 12), dim=-1)
        for i in range(5):
            values = {}
            for t in range(20):
                assert tuple(key[i, t].tolist()) not in values
                values[tuple(key[i, t].tolist())] = value[i, t].argmax()
                assert values[tuple(question[i, t].tolist())] == sample.answer[i, t]
        assert key.abs().unique().tolist() == [1]

    def test_recall_is_causal(self):
        model, sample = new("recall", "O"), recall_causal.draw(2, 20, generator())
        short = sample._replace(tokens=sample.tokens[:, :12])
        torch.testing.assert_close(model(sample)[:, :12], model(short))

    def test_largest_of_a_color(self):
        sample = two_questions.draw(40, 9, generator())
        for i in range(0, 40, 2):
            is_average, color = sample.question[i, :2].argmax(), sample.question[i, 2:4].argmax()
            assert is_average == 0
            assert sample.question[i, 4:].abs().max() == 0
            of_color = sample.items[i][sample.items[i][:, 11 + color] == 1]
            largest = of_color[of_color[:, 0].argmax()]
            assert sample.answer[i] == largest[1:11].argmax()

    def test_average_of_a_kind(self, monkeypatch):
        monkeypatch.setattr(two_questions, "NOISE", 0.0)  # so that the tags tell the kinds
        sample = two_questions.draw(40, 9, generator())
        for i in range(1, 40, 2):
            assert sample.question[i, :2].argmax() == 1
            of_kind = sample.items[i][:, 13 + sample.question[i, 4:].argmax()] == 1
            total = sample.items[i][of_kind, -1].sum()
            assert sample.answer[i] == 10 + (total > 0)

    @pytest.mark.parametrize("task", ["max", "one head", "two heads"])
    def test_the_order_of_a_set_does_not_matter(self, task):
        model, sample, order = new(task, "O"), sample_of(task), torch.randperm(12)
        names = ("priority", "kind") if task == "max" else ("items",)
        mixed = sample._replace(**{name: getattr(sample, name)[:, order] for name in names})
        torch.testing.assert_close(model(mixed), model(sample))

    @pytest.mark.parametrize("task", col.TASKS)
    def test_data_of_a_seed(self, task):
        """All arms of a seed have the same data. Other seeds, lengths and purposes have others."""
        first, *others = (
            col.TASKS[task].sample(16, SETTINGS, col.generator_of(*of))[0]
            for of in ((1, 16, 0), (1, 16, 0), (2, 16, 0), (1, 17, 0), (1, 16, 1))
        )
        assert [bool((first == x).all()) for x in others] == [True, False, False, False]


class TestLaws:
    @pytest.mark.parametrize("task", col.TASKS)
    def test_all_arms_start_alike(self, task):
        plain = new(task, "O").state_dict()
        for arm in col.TRAINED:
            found = new(task, arm).state_dict()
            assert all((found[name] == x).all() for name, x in plain.items())

    @pytest.mark.parametrize("arm", [arm for arm in col.TRAINED if arm != "O"])
    def test_start(self, arm):
        """The factor is 1 at n0, and laws of the length have the slope of log n there."""
        hidden, law = torch.randn(5, 1, 1, max_retrieval.WIDTH), new("max", arm).law

        def factors(n):
            return np.broadcast_to(np.asarray(law(hidden, None, None)(n).detach()), (5, 1, 1))

        np.testing.assert_allclose(factors(torch.tensor(16)), 1, rtol=1e-5)
        rise = (factors(torch.tensor(17)) - factors(torch.tensor(15))) / math.log(17 / 15)
        expected = 0 if arm in ("constant", "query alone") else 1 / math.log(16)
        np.testing.assert_allclose(rise, expected, rtol=0.1, atol=1e-6)

    def test_learned_numbers(self):
        model = new("max", "query")
        model.law.maps.bias.data = torch.tensor([0.3, -0.4])
        model.law.numbers["offset"].data = torch.tensor([0.2])
        found = model.law(torch.randn(1, 1, 1, max_retrieval.WIDTH), None, None)(100)
        expected = 0.2 + math.log1p(math.exp(0.3)) * math.log(101) ** (2 * math.tanh(-0.4))
        assert found.item() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("task", col.TASKS)
    @pytest.mark.parametrize("arm", LEARNED)
    def test_is_trained(self, task, arm):
        """Each layer and head has numbers of its own, and all of them have gradients."""
        model = new(task, arm)
        for block in model.encoder.blocks if task == "recall" else ():
            block.split.weight.data.mul_(4)  # so that the attention is not nearly even
        torch.nn.functional.cross_entropy(*logits(task, model, sample_of(task))).backward()
        if task == "recall":
            assert len(model.laws) == LAYERS
        for name, x in model.named_parameters():
            if name.startswith("law"):
                assert x.shape[0] % (HEADS if task == "recall" else 1) == 0
                assert (x.grad.reshape(len(x), -1) != 0).any(-1).all()

    def test_query_of_its_own_head(self):
        """The maps of a head change the factors of that head only, and know the query."""
        model = new("recall", "query alone").requires_grad_(False)
        query = torch.randn(2, HEADS, 5, recall_causal.WIDTH // HEADS)
        before = model.rule(0, query, None)(torch.arange(1, 6))
        model.laws[0].maps.weight[1] = 1.0
        after = model.rule(0, query, None)(torch.arange(1, 6))
        assert (after[:, 0] == before[:, 0]).all()
        expected = torch.nn.functional.softplus(
            query.transpose(1, 2).flatten(-2).sum(-1) + math.log(math.e - 1)
        )
        torch.testing.assert_close(after[:, 1], expected)


class TestArms:
    @pytest.mark.parametrize("task", col.TASKS)
    def test_constants_multiply_the_logits(self, task, monkeypatch):
        """C with the rule of the arm, of O and of a law: as laws of c times the factor."""
        one, model = col.TASKS[task], new(task, "O").requires_grad_(False)
        sample, given = sample_of(task, 32), []
        attend = it.attention

        def noted(q, k, v, **options):
            given.append(q)
            return attend(q, k, v, **options)

        monkeypatch.setattr(it, "attention", noted)
        for rule in (None, [laws.LogLength(8)] * one.layers):
            assert one.right(model, sample, 1.0, rule).dtype == torch.bool
            one.right(model, sample, 3.0, rule)
            plain, scaled = given[-2 * one.layers], given[-one.layers]
            torch.testing.assert_close(scaled, 3 * plain)

    def test_the_rule_is_used(self):
        one, model = col.TASKS["max"], new("max", "O").requires_grad_(False)
        sample = col.TASKS["max"].sample(64, SETTINGS._replace(sets=500), generator())
        law = [laws.LogLength(16)]
        assert (one.right(model, sample, 1.0, law) == one.right(model, sample, 1.5, None)).all()

    @pytest.mark.parametrize("task", ["max", "two heads"])
    def test_held_in_sets(self, task):
        """With the factors of a length, the mean entropy of each head is that at n0."""
        one, model = col.TASKS[task], new(task, "O").requires_grad_(False)
        model.query.weight.mul_(20)  # so that entropies are far below log n
        settings = SETTINGS._replace(sets=300)
        rules = one.held(model, [16, 64], settings, 5)

        def entropy(n, law):
            heads = model.heads(
                one.sample(n, settings, col.generator_of(5, n, dilution_tasks.CALIBRATION))
            )
            return it.attention_entropy(heads.query, heads.key, law=law).mean((0, -1))

        target = entropy(16, None)
        for n, (law,) in rules.items():
            torch.testing.assert_close(entropy(n, law), target, atol=5e-3, rtol=0)

    def test_held_in_sequences(self, monkeypatch):
        """The same in the causal model, for each layer and head."""
        monkeypatch.setattr(recall_causal, "ROWS", 2)
        model, sample = (
            new("recall", "O").requires_grad_(False),
            recall_causal.draw(8, 128, generator()),
        )
        for block in model.encoder.blocks:
            block.split.weight.mul_(4)
        held = recall_causal.table_rule(recall_causal.held_mean(model, 8, sample))
        at = (slice(6, 8), slice(62, 64), slice(126, 128))

        def entropies(rule):
            """Of each layer, where n is 8, 64 and 128 or one less."""
            found = []

            def attend(layer, q, k, v):
                state = it.attention_state(q, k, v, is_causal=True, law=rule(layer, q, k))
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
            assert (plain[layer][2] > target + 0.5).all()

    def test_interpolation(self):
        factors = recall_causal.interpolated(torch.tensor([[1.0, 2.0, 8.0]]), [4, 8, 16])[0]
        assert (factors[:4] == 1).all()
        np.testing.assert_allclose(factors[[5, 7, 11, 15]], [1.5, 2, 8 * 0.75**2, 8], rtol=1e-5)

    def test_best_constant(self, monkeypatch):
        """The one with the highest mean accuracy at n0 and 2 n0, on data of its own."""
        seen = []

        class Task:
            trained = 16

            def sample(self, n, settings, generator):
                assert settings.sets == 4 * SETTINGS.sets
                seen.append(generator.initial_seed())
                return n

            def right(self, model, n, c, rule):
                return torch.tensor([{16: 4 - abs(c - 2), 32: 8 - 3 * abs(c - 4)}[n]])

        assert col.best_constant(Task(), None, None, 7, SETTINGS) == 4
        assert seen == [col.generator_of(7, n, col.HELD_OUT).initial_seed() for n in (16, 32)]


@pytest.fixture
def tiny(monkeypatch, started):
    """Small sizes, and runs in this process. Returns the jobs that were run."""
    for module, names in {
        col: {"QUICK": SETTINGS, "CONSTANTS": (1.0, 3.0)},
        max_retrieval: {"BATCH": 4},
        recall_causal: {"TOKENS": 128},
    }.items():
        for name, size in names.items():
            monkeypatch.setattr(module, name, size)
    return started


class TestRun:
    def command(self, folder, *options):
        col.main(["--quick", "--output", str(folder), *options])
        return json.loads((folder / "constant_or_length_quick.json").read_text())

    @pytest.mark.nightly
    def test_command(self, tiny, forget, tmp_path, capsys):
        """Finished runs are not repeated. A lost one is, and gives the same."""
        written = self.command(tmp_path)
        assert list(written["tasks"]) == list(col.TASKS)
        for task, arms in written["tasks"].items():
            assert list(arms) == list(col.ARMS)
            for arm, found in arms.items():
                lengths = written["lengths"][task]
                assert np.asarray([x["accuracy"] for x in found]).shape == (2, len(lengths))
                is_chosen = col.TIMES in arm or arm == col.HINDSIGHT
                assert {x["constant"] for x in found} <= ({1.0, 3.0} if is_chosen else {1.0})
            best, plain = ([x["accuracy"][-1] for x in arms[arm]] for arm in (col.HINDSIGHT, "O"))
            assert all(a >= b for a, b in zip(best, plain, strict=True))
        for found in written["tasks"]["one head"]["O"]:
            both = np.mean([found["largest"], found["average"]], 0)
            np.testing.assert_allclose(both, found["accuracy"], rtol=1e-4)
        assert "over 2 seeds" in capsys.readouterr().out
        assert (tmp_path / "constant_or_length_quick.png").read_bytes().startswith(b"\x89PNG")

        count = 2 * len(col.TASKS) * (len(col.TRAINED) + 1)
        assert len(tiny) == count
        forget(tmp_path / "constant_or_length_quick_runs.jsonl", "max, query alone, 1001")
        assert self.command(tmp_path) == written
        assert [job.name() for job in tiny[count:]] == ["max, query alone, 1001"]

    def test_other_settings_are_another_experiment(self, tmp_path):
        job = col.Job("max", "log", 0, SETTINGS, tmp_path / "runs")
        assert job.result() is None
        job.write({"log": {"accuracy": [1.0]}})
        assert job.result() == {"log": {"accuracy": [1.0]}}
        assert replace(job, settings=SETTINGS._replace(sets=9)).result() is None
        assert [path.name for path in tmp_path.iterdir()] == ["runs.jsonl"]

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("task", "steps", "least"), [("max", 150, 30), ("recall", 150, 18), ("one head", 300, 40)]
    )
    def test_training_learns(self, monkeypatch, task, steps, least):
        settings = SETTINGS._replace(steps=(steps, steps), sets=400, tokens=2**13)
        one = col.TASKS[task]
        model = one.train("log", 0, settings)
        sample = one.sample(one.trained, settings, generator(1))
        with torch.no_grad():
            right = one.right(model, sample, 1.0, None)
        assert 100 * right.float().mean() > least

    def test_needs_two_seeds(self, tmp_path, capsys):
        with pytest.raises(SystemExit):
            self.command(tmp_path, "--seeds", "1")
        assert "fewer than 2" in capsys.readouterr().err


class TestDecisions:
    @pytest.fixture
    def results(self):
        """50 % with a noise of 1 point; "log × c" has 20 points more at the greatest length."""
        rng = np.random.default_rng(0)

        def of(arm):
            gain = 20.0 * (arm == "log × c")
            return [
                {
                    "constant": 2.0,
                    "accuracy": [50.0 + rng.normal(), 50.0 + rng.normal(), 50.0 + gain + rng.normal()],
                }
                for _ in range(24)
            ]

        tasks = {task: {arm: of(arm) for arm in col.ARMS} for task in col.TASKS}
        lengths = {task: [16, 32, 64] for task in col.TASKS}
        return {"lengths": lengths, "seeds": 24, "tasks": tasks}

    def test_decisions(self, results):
        for task, arm, other in col.REGISTERED:
            found = col.decision(results, task, arm, other, col.CONFIDENCE)
            assert found.verdict == ("helps" if arm == "log × c" else "no effect")
            assert col.decision(results, task, arm, other, at=0).verdict == "no effect"
        narrow = col.decision(results, "max", "log", "O × c")
        wide = col.decision(results, "max", "log", "O × c", col.CONFIDENCE)
        assert wide.high - wide.low > 1.2 * (narrow.high - narrow.low)

    def test_pairs_are_of_a_seed(self, results):
        """A change of all arms of one seed changes no difference."""
        before = col.decision(results, "max", "log", "O × c")
        for arm in col.ARMS:
            results["tasks"]["max"][arm][3]["accuracy"][-1] += 30
        after = col.decision(results, "max", "log", "O × c")
        assert before[1:] == pytest.approx(after[1:])

    def test_report(self, results):
        text = col.report(results)
        for task, arm, other in col.REGISTERED:
            assert f"| {task} | {arm} against {other} |" in text
        assert "99.5 % interval" in text
        effects = col.effects(results)
        assert sorted(x.found.verdict for x in effects) == ["helps"] * 4 + ["no effect"] * 6
        assert {x.arm for x in effects if x.found.verdict == "helps"} == {"log × c"}
        assert not any(x.why for x in effects)
        figure = col.picture(results)
        assert len(figure.axes) == len(col.TASKS)
        experiment.plt.close(figure)

    def test_the_plan(self):
        """What the section "What decides" says."""
        assert len(col.REGISTERED) == len(set(col.REGISTERED)) == 10
        assert pytest.approx(0.995) == col.CONFIDENCE
        assert (col.SEEDS, col.SMALLEST) == (24, 3)
        assert col.REGISTERED[0][0] == "one head"
        ends = {name: task.lengths(col.FULL)[-1] for name, task in col.TASKS.items()}
        assert ends == {"one head": 256, "two heads": 256, "max": 1024, "recall": 1024}


class TestCommittedResults:
    @pytest.fixture
    def results(self):
        return experiment.load(col.NAME)

    def test_are_of_the_plan(self, results):
        assert results["seeds"] == col.SEEDS
        assert results["lengths"] == {name: x.lengths(col.FULL) for name, x in col.TASKS.items()}
        for arms in results["tasks"].values():
            assert list(arms) == list(col.ARMS)
            assert {len(found) for found in arms.values()} == {col.SEEDS}

    def test_what_the_documentation_says(self, results):
        """README.md, experiments.md, experiments-small-models.md and choose-a-law.md."""
        verdicts = {
            (task, arm, other): col.decision(results, task, arm, other, col.CONFIDENCE).verdict
            for task, arm, other in col.REGISTERED
        }
        helping = [key for key, verdict in verdicts.items() if verdict == "helps"]
        assert helping == [("max", "log × c", "O × c")]
        assert "harms" not in verdicts.values()

        def gain(task, arm, other):
            return col.decision(results, task, arm, other)

        # A constant that is chosen with long contexts does as well as the law with its own.
        best = gain("max", col.HINDSIGHT, "log × c")
        assert best.low > -col.SMALLEST
        # At n0 and 2 n0 the accuracy hardly depends on the constant.
        for at in (0, 1):
            assert abs(col.decision(results, "max", "O × c", "O", at=at).mean) < 1
        # A learned slope; a learned exponent.
        assert gain("recall", "slope", "log").low > 0
        assert all(gain(task, "slope", "log").low > -col.SMALLEST for task in col.TASKS)
        assert all(gain(task, "power", "log").high < 0 for task in col.TASKS)
        # To know the question.
        means = {arm: np.mean(col.values(results, "one head", arm)) for arm in col.ARMS}
        assert max(means, key=means.get) == "query alone × c"
        assert gain("one head", "query alone × c", "O × c").low > col.SMALLEST
        assert gain("one head", "query × c", "query alone × c").high < 0
        # To hold the mean entropy.
        assert all(gain(task, "held", "O × c").low > 0 for task in ("max", "recall"))
        assert all(gain(task, "held", "O × c").high < 0 for task in ("one head", "two heads"))
        # What sharper attention gains and loses.
        for task in ("one head", "two heads"):
            largest, average = (
                np.mean(col.values(results, task, "log", what))
                - np.mean(col.values(results, task, "O", what))
                for what in ("largest", "average")
            )
            assert largest > 5
            assert average < -5

    def test_are_reported(self, results):
        text = col.report(results)
        assert "nan" not in text
        assert len(col.claims(results)) == 2 * len(col.TASKS)
        experiment.plt.close(col.picture(results))
