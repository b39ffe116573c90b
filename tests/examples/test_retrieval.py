"""The experiment with codes in long documents, on a tiny model with random weights."""

import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import experiment  # noqa: E402
import pretrained  # noqa: E402
import retrieval  # noqa: E402
import smollm2  # noqa: E402
import smollm2_results  # noqa: E402
import tiny_models  # noqa: E402
from transformers import DynamicCache  # noqa: E402

TRAINED, LENGTH = 256, 512


class Characters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(c) % 128 for c in text]}

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    for module in (pretrained, retrieval):
        monkeypatch.setattr(module, "TRAINED", TRAINED)
        monkeypatch.setattr(module, "CHUNK", 64)
    monkeypatch.setattr(retrieval, "THINGS", retrieval.THINGS[:4])


@pytest.fixture(scope="module")
def model():
    theta = {"rope_type": "default", "rope_theta": pretrained.THETA}
    sizes = {"vocab_size": 128, "max_position_embeddings": TRAINED, "rope_parameters": theta}
    return tiny_models.decoder("Llama", **sizes).requires_grad_(False)


@pytest.fixture
def task():
    return retrieval.task("source argparse", 3, Characters(), LENGTH)


class TestTask:
    def test_places(self, task):
        text = Characters().decode(task.ids.tolist())
        late = [Characters().decode(x.ids) for x in task.late]
        assert len(text) + sum(map(len, late)) == LENGTH + 1
        assert sorted(late, key=text.index) != late
        for sentence, x in zip(late, task.late, strict=True):
            assert text.count(sentence) == 1
            digits = [c for c, is_digit in zip(sentence, x.is_digit, strict=True) if is_digit]
            assert "".join(digits) + "." in sentence
        # The sentences of the first half, and no others, are asked for within the trained length.
        early = {x for x in task.late if text.index(Characters().decode(x.ids)) < task.start}
        assert set(task.early) == early
        assert len(early) == 2
        assert task.start + sum(len(x.ids) for x in task.early) <= TRAINED

    def test_texts_are_those_of_the_document(self, task):
        text = Characters().decode(task.ids.tolist())
        for x in task.late:
            text = text.replace(Characters().decode(x.ids), "")
        assert pretrained.source_of("argparse").startswith(text)

    def test_codes_are_drawn_for_each_document(self, task):
        other = retrieval.task("source argparse", 4, Characters(), LENGTH)
        assert not {*other.late} & {*task.late}

    def test_digits_must_be_tokens(self):
        class Words(Characters):
            def decode(self, ids):
                return "word"

        with pytest.raises(ValueError, match="a token for each digit"):
            retrieval.question("The code is 12345.", Words())


def test_ask(task):
    """One code is known, of another all digits but one, and the rest is guessed."""
    flat = [i for x in task.late for i in x.ids]
    digits = [i for i, is_digit in enumerate(b for x in task.late for b in x.is_digit) if is_digit]
    logits = torch.zeros(1, len(flat), 128)
    for i in digits[:5] + digits[6:10]:
        logits[0, i, flat[i]] = 200.0

    class Model:
        def __call__(self, ids, **options):
            assert ids.tolist()[0] == [7, *flat[:-1]]
            return type("Output", (), {"logits": logits})

    found = retrieval.ask(Model(), torch.tensor(7), task.late, None)
    assert found["right"] == 1 / 4
    assert found["loss"] == pytest.approx(11 / 20 * math.log(128))


SLOPES = [torch.linspace(-0.5, 2, 4), torch.linspace(1, -0.5, 4)]
NUMBERS = {
    retrieval.PRIMARY: pretrained.Numbers(SLOPES),
    retrieval.CONSTANTS: pretrained.Numbers(constants=[x + 1 for x in SLOPES]),
}


class TestMeasure:
    @pytest.mark.parametrize("arm", retrieval.ARMS)
    def test_is_a_full_pass(self, model, task, arm):
        arm = smollm2.ARMS[arm]
        numbers = NUMBERS.get(arm.law, pretrained.Numbers())
        before = retrieval.first_half(model, task, arm.constant, numbers.constants)
        for _ in range(2):  # the first time leaves the cache as it was
            found = retrieval.measure(model, task, before, arm, numbers)
        assert before.get_seq_length() == task.start - 1

        def expected(ids, questions):
            with torch.no_grad(), pretrained.using(model, arm, numbers):
                cache = DynamicCache(config=model.config)
                model(ids[None, :-1], cache=cache)
                return retrieval.ask(model, ids[-1], questions, cache)

        for when, n, questions in (
            ("early", task.start, task.early), ("late", len(task.ids), task.late)
        ):  # fmt: skip
            want = expected(task.ids[:n], questions)
            np.testing.assert_allclose(found[when]["loss"], want["loss"], rtol=1e-4)
            assert found[when]["right"] == want["right"]

    def test_laws_are_1_within_the_trained_length(self, model, task):
        before = retrieval.first_half(model, task, 1.0)
        plain = retrieval.measure(model, task, before, pretrained.Arm(), pretrained.Numbers())
        arm = smollm2.ARMS[retrieval.PRIMARY]
        law = retrieval.measure(model, task, before, arm, NUMBERS[retrieval.PRIMARY])
        # On some processors the two calls round sums differently.
        np.testing.assert_allclose(law["early"]["loss"], plain["early"]["loss"], rtol=1e-6)
        assert law["early"]["right"] == plain["early"]["right"]
        assert abs(law["late"]["loss"] - plain["late"]["loss"]) > 1e-3


@pytest.mark.nightly
def test_run_goes_on_where_it_was(model, monkeypatch, tmp_path, capsys):
    computed = []

    def counted(*args):
        computed.append(args)
        if len(computed) == 6:
            raise KeyboardInterrupt
        return measure(*args)

    measure = retrieval.measure
    monkeypatch.setattr(retrieval, "measure", counted)
    monkeypatch.setattr(pretrained, "load", lambda folder: (model, Characters()))
    monkeypatch.setattr(retrieval, "QUICK", retrieval.Size(LENGTH, ("source pickletools", "topics 3")))
    numbers = [x.tolist() for x in SLOPES]
    fits = {retrieval.PRIMARY: {"slopes": numbers}, retrieval.CONSTANTS: {"constants": numbers}}
    monkeypatch.setattr(experiment, "load", lambda name: {"fits": fits})
    arguments = ["--quick", "--output", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        retrieval.main(arguments)
    retrieval.main(arguments)
    assert len(computed) == 2 * len(retrieval.ARMS) + 1
    results = json.loads((tmp_path / "retrieval_quick.json").read_text())
    assert list(results["documents"]) == ["source pickletools", "topics 3"]
    retrieval.main(arguments)
    assert len(computed) == 2 * len(retrieval.ARMS) + 1
    assert json.loads((tmp_path / "retrieval_quick.json").read_text()) == results


class TestCommittedResults:
    @pytest.fixture
    def results(self):
        return experiment.load(retrieval.NAME)

    def test_are_of_the_registered_size(self, results):
        assert tuple(results["documents"]) == retrieval.FULL.test
        assert results["length"] == retrieval.FULL.length
        assert tuple(results["arms"]) == retrieval.ARMS
        for found in results["arms"].values():
            assert tuple(found) == retrieval.FULL.test

    def test_what_the_documentation_says(self, results):
        """README.md, choose-a-law.md and save-and-train-laws.md."""
        for arm in ("Su", retrieval.PRIMARY):
            gains = retrieval.gains(results, arm, retrieval.CONSTANT, "loss")
            assert experiment.decide(gains, retrieval.SMALLEST["loss"]).verdict == "harms"
        gains = retrieval.gains(results, retrieval.ON_TOP, retrieval.CONSTANT, "loss")
        assert experiment.decide(gains, retrieval.SMALLEST["loss"]).verdict == "no effect"
        # "At least as well": better, or worse by less than what matters.
        for quantity, smallest in retrieval.SMALLEST.items():
            gains = retrieval.gains(results, retrieval.CONSTANTS, retrieval.CONSTANT, quantity)
            assert experiment.decide(gains, smallest).low > -smallest
        read = experiment.load(smollm2.NAME)
        for gains in (smollm2_results.gains, smollm2_results.copied):
            found = experiment.decide(
                gains(read, retrieval.ON_TOP, retrieval.CONSTANT), smollm2.SMALLEST
            )
            assert found.verdict == "helps"
        gains = retrieval.gains(results, retrieval.CONSTANT, retrieval.NO_LAW, "loss")
        assert experiment.decide(gains, retrieval.SMALLEST["loss"]).verdict == "helps"

    def test_report_and_picture(self, results):
        text = retrieval.report(results)
        assert "nan" not in text
        assert [claim.verdict for claim in retrieval.claims(results)] == ["not decided"]
        verdicts = {(x.arm, x.other): x.found.verdict for x in retrieval.effects(results) if not x.why}
        assert verdicts == {
            (retrieval.PRIMARY, retrieval.NO_LAW): "not decided",
            (retrieval.PRIMARY, retrieval.CONSTANT): "harms",
        }
        figure = retrieval.picture(results)
        dots = [x.lines[0].get_xdata() for x in figure.axes[0].containers]
        assert [len(x) for x in dots] == [len(retrieval.ARMS)] * 2
        experiment.plt.close(figure)


def test_gains_are_positive_where_an_arm_is_better():
    better, worse = ({"late": {"loss": x, "right": y}} for x, y in ((1.0, 0.75), (1.5, 0.5)))
    results = {"arms": {"new": {"a": better}, "old": {"a": worse}}}
    assert retrieval.gains(results, "new", "old", "loss") == [0.5]
    assert retrieval.gains(results, "new", "old", "right") == [0.25]
