"""One constant at all lengths in Max Retrieval: the runs, and what the documentation says of them."""

import json
from statistics import fmean

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import experiment  # noqa: E402
import max_retrieval  # noqa: E402
import one_constant  # noqa: E402
import recall_causal  # noqa: E402

SETTINGS = max_retrieval.Settings(2, (16, 40), (40, 16), 6, 160)


def test_rules():
    """Each arm multiplies the queries of every length by its constant."""
    torch.manual_seed(0)
    model = max_retrieval.Retriever("O").requires_grad_(False)
    rules = one_constant.rules()
    assert tuple(rules) == one_constant.ARMS
    for n in (16, 40):
        sample = max_retrieval.draw(50, n, torch.Generator().manual_seed(0))
        heads = model.heads(sample)
        for x in one_constant.CONSTANTS:
            rule = rules[f"O + constant {x:.3g}"](heads, n)
            found = max_retrieval.measure(model, heads, rule, sample.answer)
            scaled = heads._replace(query=x * heads.query)
            expected = max_retrieval.measure(model, scaled, None, sample.answer)
            torch.testing.assert_close(found["entropy"], expected["entropy"])
            assert (found["accuracy"] == expected["accuracy"]).all()
            assert (found["factor"] == x).all()


@pytest.mark.nightly
def test_command(monkeypatch, tmp_path, capsys):
    """Weights of O, tested with each constant on the sets of `max_retrieval`; finished runs are kept."""
    for name, size in {"BATCH": 4, "TOGETHER": 100}.items():
        monkeypatch.setattr(max_retrieval, name, size)
    monkeypatch.setattr(one_constant, "QUICK", SETTINGS)
    full = experiment.load(max_retrieval.NAME)
    monkeypatch.setattr(experiment, "load", lambda name: full | {"lengths": [16, 40, 64, 256, 4096]})
    started = []

    def run(work, jobs, steps):
        started.extend(jobs)
        return [work(job) for job in jobs]

    monkeypatch.setattr(experiment, "run", run)

    def command():
        one_constant.main(["--quick", "--output", str(tmp_path)])
        return json.loads((tmp_path / "one_constant_quick.json").read_text())

    written = command()
    assert list(written["arms"]) == list(one_constant.ARMS)
    model = max_retrieval.train("O", 1, SETTINGS.steps)
    plain = max_retrieval.test(model, {"O": lambda heads, n: None}, 1, SETTINGS)["O"]
    one = written["arms"]["O + constant 1"][1]
    assert one == experiment.rounded(plain)
    assert written["arms"]["O + constant 16"][1]["entropy"] != one["entropy"]
    assert (tmp_path / "one_constant_quick.png").read_bytes().startswith(b"\x89PNG")
    assert "exploratory" in capsys.readouterr().out
    assert command() == written
    assert [job.seed for job in started] == [0, 1]


class TestWhatTheDocumentationSays:
    @pytest.fixture
    def results(self):
        return experiment.load(one_constant.NAME)

    def test_is_of_the_same_experiment(self, results):
        """The weights of O and the test sets are those of `max_retrieval`, but for digits."""
        full = experiment.load(max_retrieval.NAME)
        assert results["lengths"] == full["lengths"]
        assert results["decided"] == full["decided"] == list(max_retrieval.FULL.decided)
        assert results["seeds"] == full["seeds"]
        for arm, other in (("O + constant 1", "O"), ("O + log", "O + log")):
            for n in results["lengths"]:
                a, b = (
                    fmean(max_retrieval.values(x, y, "accuracy", n))
                    for x, y in ((results, arm), (full, other))
                )
                assert abs(a - b) < 1

    def test_constants_do_what_training_with_the_law_does(self, results):
        """README.md, experiments.md, choose-a-law.md, and the answer of Max Retrieval."""
        for x in (4, 8, 16):
            assert one_constant.against(results, x, "log").low > 0
            assert one_constant.against(results, x, "slope").low > -1
            assert one_constant.against(results, x, "query").high < 0
            at_16 = (
                fmean(max_retrieval.values(results, f"O + constant {y}", "accuracy", 16))
                for y in (x, 1)
            )
            assert next(at_16) >= next(at_16)
        full = experiment.load(max_retrieval.NAME)
        held = fmean(max_retrieval.values(full, "O + held mean", "accuracy", 1024))
        assert abs(fmean(max_retrieval.values(results, "O + constant 8", "accuracy", 1024)) - held) < 1
        text = max_retrieval.answer(full)
        assert "None of this shows that the length matters" in text
        assert "exploratory" in text

    def test_recall_in_a_causal_model(self):
        results = experiment.load(recall_causal.NAME)
        best = recall_causal.decision(results, "O + best constant", "log")
        assert best.low > 0
        assert best.interval() in recall_causal.answer(results)
        assert recall_causal.decision(results, "O + best constant", "slope").verdict == "no effect"

    def test_report_and_picture(self, results):
        text = one_constant.report(results)
        assert text.count("\n| ") > 10
        assert "nan" not in text
        figure = one_constant.picture(results)
        assert len(figure.axes[0].lines) == len(one_constant.ARMS) + 1
        experiment.plt.close(figure)
