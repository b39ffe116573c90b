"""The experiment with a language model, on a tiny model with random weights."""

import copy
import functools
import json
import math
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import constant_per_head  # noqa: E402
import experiment  # noqa: E402
import four_times  # noqa: E402
import held_positions  # noqa: E402
import law_or_position  # noqa: E402
import laws_and_positions  # noqa: E402
import laws_and_positions_results  # noqa: E402
import pretrained  # noqa: E402
import smollm2  # noqa: E402
import smollm2_fits  # noqa: E402
import smollm2_results  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

import isentropic as it  # noqa: E402
from isentropic import laws  # noqa: E402
from isentropic.integrations import huggingface  # noqa: E402

TRAINED, LENGTH, LAYERS, HEADS = 32, 64, 2, 4


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    sizes = {
        "TRAINED": TRAINED,
        "CHUNK": 8,
        "QUERIES": 4,
        "SPANS": 2,
        "SPAN": 4,
        "CUE": 1,
        "CHECKED": 16,
    }
    for module in (pretrained, smollm2, smollm2_fits, smollm2_results):
        for name in sizes.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, sizes[name])


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": "default", "rope_theta": pretrained.THETA},
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.3)
    return model


@pytest.fixture
def model(weights):
    pretrained.set_positions(weights, "YaRN × 2")
    return weights


def tokenizer(text, add_special_tokens):
    assert not add_special_tokens
    return {"input_ids": [ord(c) % 64 for c in text]}


@pytest.fixture
def document():
    return pretrained.read("source argparse", tokenizer, LENGTH)


SIZE = smollm2.Size(
    LENGTH, ("topics 0", "source argparse"), smollm2.FULL.fit, tuple(smollm2.ARMS), orientation=1
)


def full_pass(model, document, law):
    """The losses of a document in one pass."""
    with huggingface.use(model, law):
        return losses_of(model, document)


@torch.no_grad()
def losses_of(model, document):
    logits = model(document.ids[None, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits, document.ids[1:], reduction="none")


def full_pass_held(model, document):
    """The losses of a document in one pass, with the entropies held beyond the trained length."""

    def multiplied(layer, query, key):
        targets, options = ENTROPIES[layer][:, None], {"enable_gqa": True}
        mask = it.masks.causal()
        found = it.AttentionDistribution(query, key, mask=mask, **options, law=None).factor_for_entropy(
            targets
        )
        is_beyond = torch.arange(query.shape[-2]) >= TRAINED
        return query * torch.where(is_beyond, found, 1.0)[..., None]

    with pretrained.changed_queries(model, multiplied):
        return losses_of(model, document)


def clamped_pass(model, document, factor_of):
    """The same with positions clamped to half of that length, and with all logits formed."""

    def attend(module, query, key, value, *_, **__):
        n, window = query.shape[-2], TRAINED // 2
        key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
        places = torch.arange(n)[None]
        cos, sin = model.model.rotary_emb(value, places)
        query, key = smollm2_fits.apply_rotary_pos_emb(query, key, cos, -sin)  # without any rotation
        s = torch.full((1, HEADS, n, n), -math.inf)
        for distance in range(n):
            cos, sin = model.model.rotary_emb(value, torch.tensor([[min(distance, window)]]))
            turned = smollm2_fits.apply_rotary_pos_emb(query, query, cos, sin)[0]
            i = torch.arange(distance, n)
            s[..., i, i - distance] = (turned[..., i, :] * key[..., i - distance, :]).sum(-1)
        s *= module.head_dim**-0.5
        return (torch.softmax(factor_of(module.layer_idx, s)[..., None] * s, -1) @ value).transpose(
            1, 2
        ), None

    with pretrained.attention(model, attend):
        return losses_of(model, document)


def clamped_pass_held(model, document):
    def factor_of(layer, s):
        factor = it.factor_for_entropy(s, ENTROPIES[layer][:, None])
        factor[..., :TRAINED] = 1.0
        return factor

    return clamped_pass(model, document, factor_of)


def clamped_pass_with(model, document, law):
    """`law` is None, one law, or one for each layer."""
    of_layers = law if isinstance(law, list) else [law] * LAYERS

    def factor_of(layer, s):
        n, law = torch.arange(1.0, s.shape[-1] + 1), of_layers[layer]
        return torch.ones(s.shape[-1]) if law is None else torch.as_tensor(law(n))

    return clamped_pass(model, document, factor_of)


SLOPES = [torch.linspace(-0.5, 2, HEADS), torch.linspace(1, -0.5, HEADS)]


class TestLaw:
    def test_is_1_up_to_the_trained_length(self):
        law = pretrained.BeyondLog(torch.tensor([-0.5, 0.5]), TRAINED)
        n = torch.arange(1.0, 2 * TRAINED + 1)
        found = law(n)
        assert (found[:, :TRAINED] == 1).all()
        growth = torch.tensor([[-0.5], [0.5]]) * torch.log(n[TRAINED:] / TRAINED)
        torch.testing.assert_close(found[:, TRAINED:], 1 + growth)

    def test_su_is_a_slope(self):
        n = np.arange(1.0, 2 * TRAINED + 1)
        slope = np.asarray([1 / math.log(TRAINED)])
        found = pretrained.BeyondLog(slope, TRAINED)(n)[0]
        np.testing.assert_allclose(found, laws.LogLength(TRAINED, minimum=1)(n))

    @pytest.mark.parametrize(
        "arm", [x for x, arm in smollm2.ARMS.items() if arm.constant == 1 and x != smollm2.HELD]
    )
    def test_nothing_changes_within_the_trained_length(self, model, document, arm):
        slopes = SLOPES if smollm2.ARMS[arm].law not in ("", "Su") else None
        found = full_pass(model, document, pretrained.laws_of(smollm2.ARMS[arm], slopes))
        plain = full_pass(model, document, None)
        torch.testing.assert_close(found[:TRAINED], plain[:TRAINED])
        changes = (found - plain)[TRAINED:].abs().max() > 1e-3
        assert changes == bool(smollm2.ARMS[arm].law)

    def test_the_constant_is_that_of_yarn(self, model, document):
        found = full_pass(model, document, laws.Constant(smollm2.TEMPERATURE))
        plain = full_pass(model, document, None)
        del model.config.rope_parameters["attention_factor"]
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        expected = full_pass(model, document, None)
        torch.testing.assert_close(found, expected)
        assert (plain - expected).abs().max() > 1e-2


ENTROPIES = [torch.linspace(0.5, 2, HEADS), torch.linspace(2.5, 1, HEADS)]
HELD = pretrained.Numbers(entropies=ENTROPIES)


class TestHeld:
    def test_all_queries_have_the_entropy_of_their_head(self, model, document, monkeypatch):
        from transformers import AttentionInterface

        found, attention = [], AttentionInterface()["sdpa"]

        def observed(module, query, key, *others, scaling, **kwargs):
            options = {"mask": it.masks.causal(), "scale": scaling, "enable_gqa": True}
            found.append(it.attention_entropy(query, key, law=None, **options))
            return attention(module, query, key, *others, scaling=scaling, **kwargs)

        start = pretrained.prefix(model, document, pretrained.Arm())
        monkeypatch.setitem(AttentionInterface()._global_mapping, "sdpa", observed)
        with torch.no_grad(), pretrained.using(model, smollm2.ARMS["held"], HELD):
            pretrained.losses(model, document.ids[TRAINED:], pretrained.branch(start.cache))
        assert len(found) == LAYERS * (LENGTH - TRAINED) // 8
        for i, entropy in enumerate(found):
            expected = ENTROPIES[i % LAYERS][:, None].expand(1, HEADS, 8)
            torch.testing.assert_close(entropy, expected, atol=1e-4, rtol=0)
        assert model.config._attn_implementation == "sdpa"

    def test_targets_are_those_of_the_weights_of_transformers(self, model):
        documents = [pretrained.read(name, tokenizer, LENGTH) for name in ("source turtle", "topics 0")]
        found = smollm2_fits.held_entropies(model, documents)["entropies"]
        model.set_attn_implementation("eager")
        try:
            ids = torch.stack([x.ids[:TRAINED] for x in documents])
            with torch.no_grad():
                weights = model(ids, output_attentions=True).attentions
        finally:
            model.set_attn_implementation("sdpa")
        last = torch.stack(weights)[..., -smollm2_fits.QUERIES :, :]
        expected = torch.special.entr(last).sum(-1).mean((1, 3))
        torch.testing.assert_close(torch.tensor(found), expected)


class TestMeasure:
    @pytest.mark.parametrize("constant", [1.0, smollm2.TEMPERATURE])
    @pytest.mark.parametrize(("slopes", "constants"), [(None, None), (SLOPES, None), (SLOPES, SLOPES)])
    def test_a_common_prefix_equals_a_full_pass(self, model, document, constant, slopes, constants):
        arm = pretrained.Arm(constant=constant)
        numbers = pretrained.Numbers(slopes, constants)
        start = pretrained.prefix(model, document, arm, constants)
        losses = full_pass(model, document, pretrained.laws_of(arm, slopes, constants))
        edges = SIZE.edges
        expected = [losses[a:b].mean().item() for a, b in pairwise(edges)]
        for _ in range(2):  # the first time leaves the prefix as it was
            found = pretrained.measure(model, document, start, arm, numbers, edges)
            np.testing.assert_allclose(found["bands"], expected, rtol=1e-5)
        assert start.cache.get_seq_length() == TRAINED

    def test_bands(self):
        assert SIZE.edges == [0, 16, 32, 40, 48, 56, 64]
        means = [1.0, 2.0, 3.0, 4.0, 5.0, 8.0]
        results = {"edges": SIZE.edges, "arms": {"a": {"text": {"bands": means}}}}
        assert smollm2_results.loss(results, "a", "text", beyond=False) == 1.5
        assert smollm2_results.loss(results, "a", "text", beyond=True) == 5

    def test_copies(self, monkeypatch, document):
        fed = []

        def losses(model, ids, cache):
            fed.append(ids)
            return torch.arange(len(ids) - 1.0)

        monkeypatch.setattr(pretrained, "losses", losses)
        found = pretrained.copying(None, document.ids[:56], None)
        step = (56 - 4) // 2
        expected = [document.ids[55:56], document.ids[:4], document.ids[step : step + 4]]
        assert (fed[0] == torch.cat(expected)).all()
        assert found == np.mean([1, 2, 3, 5, 6, 7])

    @pytest.mark.parametrize("size", [smollm2.FULL, smollm2.QUICK])
    def test_documents_are_apart(self, size):
        names = (*size.test, *size.fit)
        assert len(set(names)) == len(names)
        found = [pretrained.read(name, tokenizer, LENGTH) for name in names if "docstrings" not in name]
        assert len({x.digest for x in found}) == len(found)
        assert {len(x.ids) for x in found} == {LENGTH + 1}


class TestFit:
    @pytest.mark.parametrize("per", ["model", "layer", "head"])
    def test_lowers_the_loss(self, model, monkeypatch, per):
        monkeypatch.setattr(smollm2_fits, "RATE", 0.1)
        documents = [pretrained.read(name, tokenizer, LENGTH) for name in ("source turtle", "topics 0")]
        found = smollm2_fits.fit(model, documents * 4, smollm2_fits.Fit(per, 8))
        slopes = [torch.tensor(x) for x in found["slopes"]]
        assert len(found["losses"]) == 8 * (LENGTH - TRAINED) // 8
        assert [x.shape for x in slopes] == [(HEADS if per == "head" else 1,)] * LAYERS
        assert (len({float(x[0]) for x in slopes}) == 1) == (per == "model")

        def mean(law):
            return sum(full_pass(model, x, law)[TRAINED:].mean() for x in documents)

        assert mean(pretrained.laws_of(pretrained.Arm(), slopes)) < mean(None) - 1e-3

    @pytest.mark.parametrize(
        ("per", "name"),
        [
            ("layer", "two numbers per layer"),
            ("head", "two numbers per head"),
            ("head", "constant per head"),
        ],
    )
    def test_of_constants_lowers_the_loss(self, model, monkeypatch, per, name):
        monkeypatch.setattr(smollm2_fits, "RATE", 0.1)
        documents = [pretrained.read(name, tokenizer, LENGTH) for name in ("source turtle", "topics 0")]
        job, start = smollm2_fits.Fit(per, 8, smollm2.TEMPERATURE), laws.Constant(smollm2.TEMPERATURE)
        found = smollm2_fits.fit(model, documents * 4, job, trained=smollm2.TRAINED_NUMBERS[name])
        assert ("slopes" in found) == (name != "constant per head")
        constants = torch.tensor(found["constants"])
        assert constants.shape == (LAYERS, HEADS if per == "head" else 1)
        assert (constants != smollm2.TEMPERATURE).all()

        def mean(law):
            return sum(full_pass(model, x, law)[TRAINED:].mean() for x in documents)

        law = pretrained.laws_of(pretrained.Arm(), found.get("slopes"), found["constants"])
        assert mean(law) < mean(start) - 1e-3

    @pytest.mark.parametrize("constant", [None, smollm2.TEMPERATURE])
    def test_is_what_the_library_has(self, model, constant):
        """`huggingface.tune` makes the laws of "slope per head" and "two numbers per head"."""
        documents = [pretrained.read(name, tokenizer, LENGTH) for name in ("source turtle", "topics 0")]
        job = smollm2_fits.Fit("head", 2, constant or 1.0)
        trained = ("slopes", "constants") if constant else ("slopes",)
        fitted = smollm2_fits.fit(model, documents, job, trained=trained)
        constants = fitted.get("constants", [[1.0] * HEADS] * LAYERS)
        found = huggingface.tune(
            model,
            [document.ids[None] for document in documents],
            reference_length=TRAINED,
            constant=constant,
            learning_rate=smollm2_fits.RATE,
            chunk_size=pretrained.CHUNK,
            base="sdpa",
        )
        for law, *expected in zip(found, fitted["slopes"], constants, strict=True):
            _, at_reference, at_end = torch.as_tensor(law.factors).T
            got = (at_end / at_reference - 1) / math.log(2), at_reference
            for x, y in zip(got, expected, strict=True):
                torch.testing.assert_close(x.float(), torch.tensor(y), rtol=1e-4, atol=1e-6)

    def test_calibrated_queries_are_those_of_the_model(self, model, document):
        seen = []

        def keep(module, query, key, *others, **options):
            seen.append(query[:, :, -4:])
            return attend(module, query, key, *others, **options)

        from transformers import AttentionInterface, AttentionMaskInterface

        attend = AttentionInterface()["sdpa"]
        AttentionInterface.register("smollm2-test", keep)
        AttentionMaskInterface.register("smollm2-test", AttentionMaskInterface()["sdpa"])
        before = model.config._attn_implementation
        model.set_attn_implementation("smollm2-test")
        try:
            with torch.no_grad(), smollm2_fits.queries(model) as found:
                pretrained.losses(model, document.ids[:8], DynamicCache(config=model.config))
        finally:
            model.set_attn_implementation(before)
        torch.testing.assert_close(found, seen)


@pytest.mark.nightly
class TestRun:
    @pytest.fixture
    def computed(self, monkeypatch, model, started):
        """The documents and laws that a run computes."""
        found = []

        def counted(function):
            def count(*args, **options):
                found.append(function.__name__)
                return function(*args, **options)

            return count

        # The docstrings of packages are those of this test, which is quicker.
        monkeypatch.setattr(pretrained, "docstrings", lambda package: __doc__ * 20 + package)
        monkeypatch.setattr(pretrained, "load", lambda folder: (model, tokenizer))
        for module in (smollm2, smollm2_results):
            monkeypatch.setattr(module, "FULL", SIZE)
        monkeypatch.setattr(smollm2, "SANE", (0, math.inf))
        for name in ("measure", "fit", "calibrated", "prefix"):
            module = smollm2 if hasattr(smollm2, name) else pretrained
            monkeypatch.setattr(module, name, counted(getattr(module, name)))
        return found

    def test_goes_on_where_it_was(self, computed, monkeypatch, tmp_path, capsys):
        arguments = ["--output", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
        measure = pretrained.measure

        def stop(*args):
            if computed.count("measure") == 3:
                raise KeyboardInterrupt
            return measure(*args)

        monkeypatch.setattr(pretrained, "measure", stop)
        with pytest.raises(KeyboardInterrupt):
            smollm2.main(arguments)
        assert computed.count("fit") == len(smollm2.FITS)
        monkeypatch.setattr(pretrained, "measure", measure)
        smollm2.main(arguments)
        others = 5  # other positions and held entropies, on the first document only
        assert computed.count("measure") == 2 * len(smollm2.ARMS) - others
        assert computed.count("fit") == len(smollm2.FITS)
        assert computed.count("calibrated") == 1

        text = (tmp_path / "out" / "smollm2.json").read_text()
        computed.clear()
        smollm2.main(arguments)
        assert computed == []
        assert (tmp_path / "out" / "smollm2.json").read_text() == text

        results = json.loads(text)
        assert set(results["documents"]) == {*SIZE.test, *SIZE.fit}
        plain, su = (results["arms"][arm]["topics 0"]["bands"] for arm in (smollm2.NO_LAW, "Su"))
        assert plain[:2] == su[:2]
        assert plain[2:] != su[2:]
        assert len(smollm2_results.claims(results)) == 2
        assert "nan" not in smollm2_results.report(results)

    def test_refuses_a_model_that_reads_nothing(self, computed, monkeypatch, tmp_path):
        monkeypatch.setattr(smollm2, "SANE", (0, 0.1))
        with pytest.raises(ValueError, match="must have a loss"):
            smollm2.run(SIZE, tmp_path / "model", tmp_path)
        assert computed == []


class TestAnswers:
    @pytest.mark.parametrize(
        ("within", "beyond", "expected"),
        [
            (2.0, 2.5, "yes"),
            (2.1, 2.5, "yes, but YaRN's constant is better by 0.100 within"),
            (2.2, 2.5, "helps beyond, but loses 0.100 within"),
            (2.0, 2.995, "no effect"),
            (2.0, 3.5, "harms"),
        ],
    )
    def test_answers(self, monkeypatch, within, beyond, expected):
        monkeypatch.setattr(smollm2_results, "FULL", SIZE)

        def arm(within, beyond):
            shift = enumerate(SIZE.test)  # what documents differ by cancels
            return {x: {"bands": [i + within] * 2 + [i + beyond] * 4} for i, x in shift}

        arms = {
            smollm2.CONSTANT: arm(2.0, 3.0),
            smollm2.NO_LAW: arm(2.1, 3.0),
            "new": arm(within, beyond),
        }
        results = {"edges": SIZE.edges, "arms": arms}
        assert smollm2_results.answers(results, "new") == expected
        arms["new"].popitem()
        assert smollm2_results.answers(results, "new") == "not run on all documents"


def test_law_or_position(model, monkeypatch, tmp_path):
    """Each cell is that of a full pass, and is kept."""
    monkeypatch.setattr(pretrained, "load", lambda folder: (model, tokenizer))
    monkeypatch.setattr(held_positions, "WINDOW", TRAINED // 2)
    names = ("source argparse", "source typing")
    results = law_or_position.run(names, LENGTH, tmp_path, tmp_path)
    assert results["bands"] == [[1, 16], [17, 32], [33, 45], [46, 64]]
    pretrained.set_positions(model, "as trained")
    for name, of_one in zip(names, results["sequence_losses"], strict=True):
        document = pretrained.read(name, tokenizer, LENGTH)
        for i, law in enumerate((None, laws.LogLength(TRAINED, minimum=1))):
            for j, by_hand in enumerate((full_pass, clamped_pass_with)):
                expected = by_hand(model, document, law)
                means = [expected[a - 1 : b].mean().item() for a, b in results["bands"]]
                np.testing.assert_allclose(of_one[i][j], means, rtol=1e-5)
    found = law_or_position.causes_of(json.loads(json.dumps(results)))
    assert str(found) in law_or_position.report(results)
    law_or_position.plt.close(law_or_position.picture(results))

    # Of 64 keys, those above 32 are beyond the trained length; all bands of YaRN above 32 are.
    bands = {name: {"bands": [9.0, 9.0, 1.0, 2.0, 3.0, 4.0 + i]} for i, name in enumerate(names)}
    arms = dict.fromkeys(smollm2.ARMS, bands)
    monkeypatch.setattr(law_or_position, "LENGTH", LENGTH)
    rows = law_or_position.beside_yarn(results, {"edges": SIZE.edges, "arms": arms})
    assert {tuple(row[1:]) for row in rows[3:]} == {("2.500", "2.750", "2.625")}
    of_each = [full_pass(model, pretrained.read(x, tokenizer, LENGTH), None)[TRAINED:] for x in names]
    assert rows[0][:3] == ["as trained", *(f"{x.mean():.3f}" for x in of_each)]
    columns = {"clamped": (0, 1), "clamped, Su's law": (1, 1)}
    for row, treatment in zip(rows[1:3], columns.values(), strict=True):
        parts = [
            np.average(of_one[*treatment][2:], weights=counts[2:])
            for of_one, counts in zip(
                np.asarray(results["sequence_losses"]), results["sequence_counts"], strict=True
            )
        ]
        assert row[1:3] == [f"{x:.3f}" for x in parts]
    assert [row[0] for row in rows[1:3]] == list(columns)
    assert len({tuple(row) for row in rows[:3]}) == 3

    monkeypatch.setattr(law_or_position, "losses", None)
    assert law_or_position.run(names, LENGTH, tmp_path, tmp_path) == results


def test_positions_are_what_fails():
    """What the README and docs/how-to/law-or-position.md say of SmolLM2."""
    found = law_or_position.causes_of(experiment.load(law_or_position.NAME)).effects
    assert found["rise"].nats > 4 * found["rise"].error
    assert found["clamping_alone"].share > 1
    assert abs(found["law_alone"].share) < 0.02


def test_four_times(model, monkeypatch, tmp_path):
    """Each arm is that of a full pass at the positions of YaRN × 4, and is kept."""
    monkeypatch.setattr(pretrained, "load", lambda folder: (model, tokenizer))
    slopes = [x.tolist() for x in SLOPES]
    constants = [[1 + x / 4 for x in layer] for layer in slopes]
    two = smollm2.TWO_NUMBERS[1]
    fits = {
        smollm2.ON_TOP: {"slopes": slopes},
        smollm2.CONSTANTS: {"constants": constants},
        two: {"slopes": slopes, "constants": constants},
    }
    monkeypatch.setattr(experiment, "load", lambda name: {"fits": fits})
    monkeypatch.setattr(four_times, "TRAINED", TRAINED)
    names = ("source argparse", "source typing")
    results = four_times.run(names, 4 * TRAINED, tmp_path, tmp_path)
    assert results["edges"] == [0, 16, 32, 56, 80, 104, 128]
    document = pretrained.read(names[1], tokenizer, 4 * TRAINED)
    pretrained.set_positions(model, "YaRN × 4")
    constant = (1 + 0.1 * math.log(4)) ** 2
    relative = constant / (1 + 0.1 * math.log(2)) ** 2
    factors = [relative * torch.tensor(x) for x in constants]
    beyond = [pretrained.BeyondLog(x, TRAINED) for x in SLOPES]
    found = {
        smollm2.NO_LAW: None,
        "Su": laws.LogLength(TRAINED, minimum=1),
        smollm2.CONSTANT: laws.Constant(constant),
        smollm2.ON_TOP: [laws.scaled(x, constant) for x in beyond],
        smollm2.CONSTANTS: [laws.Constant(x) for x in factors],
        two: [laws.scaled(x, factor) for x, factor in zip(beyond, factors, strict=True)],
    }
    assert list(found) == list(results["arms"])
    for arm, law in found.items():
        losses = full_pass(model, document, law)
        expected = [losses[a:b].mean().item() for a, b in pairwise(results["edges"])]
        np.testing.assert_allclose(results["arms"][arm][names[1]]["bands"], expected, rtol=1e-5)
    assert "nan" not in four_times.report(results)
    four_times.plt.close(four_times.picture(results))

    monkeypatch.setattr(pretrained, "measure", None)
    assert four_times.run(names, 4 * TRAINED, tmp_path, tmp_path) == results


def test_what_the_documentation_says_of_four_times_the_length():
    """Constants per head gain most, slopes add nothing to them, and both lose on copied text."""
    results = experiment.load(four_times.NAME)
    assert tuple(results["documents"]) == four_times.DOCUMENTS
    assert list(results["arms"]) == list(four_times.ARMS)
    others = {*four_times.ARMS} - {smollm2.CONSTANTS}
    beyond = results["edges"].index(four_times.LENGTH // 4)
    for name in four_times.DOCUMENTS:
        found = {arm: of[name] for arm, of in results["arms"].items()}
        for used in (slice(beyond), slice(beyond, None)):
            losses = {arm: np.mean(x["bands"][used]) for arm, x in found.items()}
            assert losses[smollm2.CONSTANTS] < min(losses[arm] for arm in others)
        copied = {arm: np.mean(x["copied"]) for arm, x in found.items()}
        for arm in (smollm2.CONSTANTS, smollm2.TWO_NUMBERS[1]):
            assert copied[smollm2.ON_TOP] < copied[arm] < copied[smollm2.CONSTANT]


class TestLawsAndPositions:
    """The experiment with all laws at all positions."""

    @pytest.fixture(autouse=True)
    def _of_the_same_size(self, monkeypatch):
        for name, value in {"TRAINED": TRAINED, "WINDOW": TRAINED // 2}.items():
            monkeypatch.setattr(laws_and_positions, name, value)
        monkeypatch.setattr(laws_and_positions, "PRODUCTS", torch.float32)

    @pytest.fixture
    def slopes(self, monkeypatch):
        fitted = [x for x in laws_and_positions.LAWS if smollm2.ARMS[x].law not in ("", "Su")]
        found = {law: [x / (i + 1) for x in SLOPES] for i, law in enumerate(fitted)}
        fits = {law: {"slopes": [x.tolist() for x in of_law]} for law, of_law in found.items()}
        monkeypatch.setattr(experiment, "load", lambda name: {"fits": fits})
        return found

    @pytest.fixture
    def serial(self, model, monkeypatch):
        monkeypatch.setattr(laws_and_positions, "loaded", lambda folder: (model, tokenizer))
        monkeypatch.setattr(experiment, "run", lambda work, jobs, *_: [work(job) for job in jobs])

    def test_each_cell_is_that_of_a_full_pass(self, model, slopes, serial, monkeypatch, tmp_path):
        """Clamped ones are those of formed logits. The results are kept."""
        size = laws_and_positions.Size(LENGTH, SIZE.test, SIZE.test[:1])
        results = laws_and_positions.run(size, tmp_path, tmp_path)
        assert results["edges"] == SIZE.edges
        assert list(results["documents"]) == list(SIZE.test)
        assert list(results["positions"]) == list(laws_and_positions.COLUMNS)
        constants = dict.fromkeys(laws_and_positions.COLUMNS, smollm2.TEMPERATURE)
        constants["YaRN × 4"] = (1 + 0.1 * math.log(4)) ** 2
        for positions, of_laws in results["positions"].items():
            is_checked = positions == laws_and_positions.EXTENDED
            assert list(of_laws) == list(laws_and_positions.LAWS)
            for law, of_law in of_laws.items():
                assert list(of_law) == list(size.some if is_checked else size.test)
                document = pretrained.read(size.test[not is_checked], tokenizer, LENGTH)
                applied = self.applied(law, constants[positions], slopes)
                if positions == laws_and_positions.CLAMPED:
                    pretrained.set_positions(model, "as trained")
                    expected = clamped_pass_with(model, document, applied)[TRAINED:].mean().item()
                else:
                    pretrained.set_positions(model, positions)
                    expected = full_pass(model, document, applied)[TRAINED:].mean().item()
                own = of_law[document.name]["bands"][2:]
                np.testing.assert_allclose(np.mean(own), expected, rtol=1e-5)

        monkeypatch.setattr(laws_and_positions, "using", None)
        assert laws_and_positions.run(size, tmp_path, tmp_path) == results

    @staticmethod
    def applied(law, constant, slopes):
        if law in slopes:
            factor = 1 if smollm2.ARMS[law].constant == 1 else constant
            return [laws.scaled(pretrained.BeyondLog(x, TRAINED), factor) for x in slopes[law]]
        plain = {smollm2.NO_LAW: None, smollm2.CONSTANT: laws.Constant(constant)}
        return plain.get(law, laws.LogLength(TRAINED, minimum=1))

    @pytest.mark.parametrize("positions", ["clamped", "NTK"])
    def test_mixed_precision(self, model, slopes, monkeypatch, positions):
        """Its losses are near, and the weights stay as they are."""
        document = pretrained.read(SIZE.test[1], tokenizer, LENGTH)
        found = []
        for products in (torch.float32, torch.bfloat16):
            monkeypatch.setattr(laws_and_positions, "PRODUCTS", products)
            cache = DynamicCache(config=model.config)
            arm = laws_and_positions.arm_at(positions, smollm2.ON_TOP)
            numbers = pretrained.Numbers([x.tolist() for x in slopes[smollm2.ON_TOP]])
            with laws_and_positions.using(model, arm, numbers), torch.no_grad():
                found.append(laws_and_positions.losses(model, document.ids, cache))
        assert 0 < (found[1] - found[0]).abs().mean() < 0.05
        assert next(model.parameters()).dtype == torch.float32

    def test_model_is_as_it_was(self, model, slopes):
        rotary, implementation = model.model.rotary_emb, model.config._attn_implementation
        with laws_and_positions.using(
            model, laws_and_positions.arm_at("NTK", "Su"), pretrained.Numbers()
        ):
            assert model.model.rotary_emb is not rotary
        assert isinstance(model.model.rotary_emb, type(rotary))
        assert model.config._attn_implementation == implementation


def made_up_pairs(gain_of):
    """Results of all pairs, where ``gain_of(positions, law)`` is what a pair gains beyond the length."""

    def documents(positions, law):
        # What documents differ by cancels in differences, but for a little of each pair.
        noise = (0.001 * ((7 * i + len(positions + law)) % 3 - 1) for i in range(len(SIZE.test)))
        shift = (i - gain_of(positions, law) + x for i, x in enumerate(noise))
        return {
            name: {"bands": [2.0] * 2 + [3.0 + x] * 4} for name, x in zip(SIZE.test, shift, strict=True)
        }

    at = {
        positions: {law: documents(positions, law) for law in laws_and_positions.LAWS}
        for positions in laws_and_positions.COLUMNS
    }
    extended = {"edges": SIZE.edges, "arms": copy.deepcopy(at[laws_and_positions.EXTENDED])}
    return {"edges": SIZE.edges, "documents": dict.fromkeys(SIZE.test), "positions": at}, extended


class TestReportOfLawsAndPositions:
    @staticmethod
    def gain(positions, law):
        """The primary arm gains at all positions; clamped positions gain, and so do two laws there."""
        is_clamped = positions == laws_and_positions.CLAMPED
        of_law = {smollm2.PRIMARY: 0.2, smollm2.ON_TOP: 0.2 if is_clamped else 0.1}
        return of_law.get(law, 0.0) + (0.5 if is_clamped else 0.0)

    @pytest.fixture
    def made_up(self, monkeypatch):
        monkeypatch.setattr(smollm2_results, "TRAINED", TRAINED)
        results, extended = made_up_pairs(self.gain)
        monkeypatch.setattr(experiment, "load", lambda name: extended)
        return results, extended

    def test_the_lowest_and_those_that_are_equal(self, made_up):
        of_pairs = laws_and_positions_results.pairs(*made_up)
        assert laws_and_positions_results.lowest(of_pairs)[0] == "clamped"
        decided = laws_and_positions_results.decision(
            of_pairs, ("NTK", smollm2.PRIMARY), ("NTK", smollm2.NO_LAW)
        )
        assert decided.mean == pytest.approx(0.2, abs=0.003)
        text = laws_and_positions_results.about_the_lowest(of_pairs)
        pairs = len(laws_and_positions.COLUMNS) * len(laws_and_positions.LAWS)
        assert f"{pairs - 2} of the {pairs - 1} other pairs" in text

    def test_precision(self, made_up):
        results, extended = made_up
        assert "at most 0.0000 nats, on the 2 documents" in laws_and_positions_results.precision(
            results, extended
        )
        again = results["positions"][laws_and_positions.EXTENDED]
        for document in again[smollm2.PRIMARY].values():
            document["bands"] = [x - 0.005 for x in document["bands"]]
        assert "have an error of about 0.005" in laws_and_positions_results.precision(results, extended)

    def test_page(self, made_up):
        results, _ = made_up
        text = laws_and_positions_results.report(results)
        assert "nan" not in text
        for position in laws_and_positions.COLUMNS:
            assert position in text
        assert len(laws_and_positions_results.effects(results)) == 2 * len(laws_and_positions.POSITIONS)
        assert len(laws_and_positions_results.claims(results)) == 5
        experiment.plt.close(laws_and_positions_results.picture(results))


def test_held_positions(model, monkeypatch, tmp_path):
    """Each cell is that of a full pass at its positions, and is kept."""
    monkeypatch.setattr(pretrained, "load", lambda folder: (model, tokenizer))
    fits = {"fits": {smollm2.HELD: {"entropies": [x.tolist() for x in ENTROPIES]}}}
    monkeypatch.setattr(experiment, "load", lambda name: fits)
    monkeypatch.setattr(held_positions, "TRAINED", TRAINED)
    monkeypatch.setattr(held_positions, "WINDOW", TRAINED // 2)
    length, name = TRAINED + TRAINED // 2, SIZE.test[1]
    results = held_positions.run(name, length, tmp_path, tmp_path)
    document = pretrained.read(name, tokenizer, length)
    for positions, found in results["losses"].items():
        is_clamped = positions == laws_and_positions.CLAMPED
        pretrained.set_positions(model, "as trained" if is_clamped else positions)
        full = clamped_pass_with if is_clamped else full_pass
        expected = full(model, document, None)[TRAINED:].mean().item()
        held_pass = clamped_pass_held if is_clamped else full_pass_held
        held = held_pass(model, document)[TRAINED:].mean().item()
        for law, of_law in ((smollm2.NO_LAW, expected), (smollm2.HELD, held)):
            own = held_positions.beyond(found, results["edges"], law)
            np.testing.assert_allclose(own, of_law, rtol=1e-5)
    assert "nan" not in held_positions.report(results)
    experiment.plt.close(held_positions.picture(results))

    monkeypatch.setattr(pretrained, "measure", None)
    monkeypatch.setattr(held_positions, "clamped", None)
    assert held_positions.run(name, length, tmp_path, tmp_path) == results


def test_a_held_entropy_loses_at_all_positions():
    """What docs/explanation/experiments.md says."""
    results = experiment.load(held_positions.NAME)
    for found in results["losses"].values():
        held, without = (
            held_positions.beyond(found, results["edges"], x) for x in (smollm2.HELD, smollm2.NO_LAW)
        )
        assert held > without


def test_laws_help_where_positions_are_stretched(monkeypatch):
    """What docs/explanation/experiments.md says of all laws at all positions."""
    monkeypatch.setattr(
        smollm2_results, "TRAINED", laws_and_positions.TRAINED
    )  # of the committed results
    of_pairs = laws_and_positions_results.pairs(
        experiment.load(laws_and_positions.NAME), experiment.load(smollm2.NAME)
    )

    def gain(positions, law, beyond=True):
        pair, without = (positions, law), (positions, smollm2.NO_LAW)
        if beyond:
            return laws_and_positions_results.decision(of_pairs, pair, without)
        return np.mean(smollm2_results.gains(of_pairs, pair, without, beyond=False))

    constant, weak = smollm2.CONSTANT, smollm2.CALIBRATED  # not decided, and hardly any gain
    for law in laws_and_positions.LAWS[1:]:
        assert gain("as trained", law).verdict == "harms"
        for positions in ("YaRN × 2", "YaRN × 4", "NTK"):
            assert law in (constant, weak) or gain(positions, law).verdict == "helps"
        assert gain("YaRN × 2", law).low > 0
        assert gain("YaRN × 4", law).low > gain("YaRN × 2", law).high
    for positions in ("YaRN × 2", "NTK"):
        assert gain(positions, constant).verdict == "not decided"
        assert gain(positions, weak).verdict == "no effect"
    kept = gain("clamped", smollm2.PRIMARY).mean / gain("YaRN × 2", smollm2.PRIMARY).mean
    assert 0 < kept < 0.5
    assert gain("clamped", "Su").verdict == "no effect"
    assert gain("clamped", smollm2.CONSTANT).verdict == "harms"
    within = [gain(x, smollm2.CONSTANT, beyond=False) for x in ("clamped", "YaRN × 2", "YaRN × 4")]
    assert within[0] < 0 < within[1] < within[2]
    assert gain("as trained", smollm2.CONSTANT, beyond=False) < 0
    assert laws_and_positions_results.lowest(of_pairs) == ("clamped", smollm2.PRIMARY)


def test_kinds_of_documents_as_the_unit():
    """README.md and experiments.md: the registered arm is not decided by kind, constants are."""
    results = experiment.load(smollm2.NAME)
    primary, constants = (
        experiment.decide(
            smollm2_results.gains_by_kind(results, arm, smollm2.CONSTANT), smollm2.SMALLEST
        )
        for arm in (smollm2.PRIMARY, smollm2.CONSTANTS)
    )
    assert len(smollm2_results.gains_by_kind(results, smollm2.PRIMARY, smollm2.CONSTANT)) == 3
    assert primary.verdict == "not decided"
    assert constants.verdict == "helps"
    of_kind = [x for x in results["arms"][smollm2.PRIMARY] if x.startswith("source")]
    expected = np.mean(
        [
            smollm2_results.loss(results, smollm2.CONSTANT, x, True)
            - smollm2_results.loss(results, smollm2.PRIMARY, x, True)
            for x in of_kind
        ]
    )
    assert smollm2_results.gains_by_kind(results, smollm2.PRIMARY, smollm2.CONSTANT)[
        2
    ] == pytest.approx(expected)
    for arm in (primary, constants):
        assert arm.interval("+.3f") in smollm2_results.report(results)
        assert arm in [x.found for x in smollm2_results.effects(results)]


class TestConstantPerHead:
    SIZE = constant_per_head.Size(LENGTH, ("code a", "readme 0"), 2, ("code b", "docstrings a"), 2)

    @pytest.fixture(autouse=True)
    def _texts(self, monkeypatch):
        rng = np.random.default_rng(0)
        texts = {name: rng.integers(32, 127, 1000).astype(np.uint8) for name in "abcd"}
        pool = {x: {"code": texts[x], "prose": texts[y]} for x, y in ("ac", "bd")}
        monkeypatch.setattr(constant_per_head, "pool", lambda: pool)
        monkeypatch.setattr(constant_per_head, "readmes", lambda: [f"text {i} " * 40 for i in range(8)])
        for name, size in {"TRAINED": TRAINED, "CHUNK": 8}.items():
            monkeypatch.setattr(constant_per_head, name, size)
        constant_per_head.text_of.cache_clear()

    def test_documents(self):
        """Parts follow one another, and the descriptions are dealt to four sources."""
        first, second = constant_per_head.documents("code a", 2, tokenizer, 30)
        text = constant_per_head.pool()["a"]["code"].tobytes().decode()
        assert first.ids.tolist() == [ord(c) % 64 for c in text[:31]]
        assert second.ids.tolist() == [ord(c) % 64 for c in text[31:62]]
        assert "text 5" in constant_per_head.text_of("readme 1")
        assert "text 2" not in constant_per_head.text_of("readme 1")
        with pytest.raises(ValueError, match="code a has only 1000 tokens"):
            constant_per_head.documents("code a", 40, tokenizer, 30)

    @pytest.mark.nightly
    def test_run(self, model, started, monkeypatch, tmp_path):
        """Losses are those of full passes, and finished parts are not computed again."""
        monkeypatch.setattr(pretrained, "load", lambda folder: (model, tokenizer))
        results = constant_per_head.run(self.SIZE, tmp_path, tmp_path / "runs", 1)
        assert len(results["losses"]) == 4
        one = results["constants"][constant_per_head.ONE]
        assert len({x for layer in one for x in layer}) == 1
        heads = {x for layer in results["constants"][constant_per_head.HEAD] for x in layer}
        assert len(heads) == LAYERS * HEADS
        document = constant_per_head.documents("code a", 2, tokenizer, LENGTH)[0]
        found = results["losses"][document.name]
        for arm, constant in ((constant_per_head.NO, 1.0), (constant_per_head.ONE, one[0][0])):
            pretrained.set_positions(model, "YaRN × 2")
            full = full_pass(model, document, laws.Constant(constant))
            assert found[arm]["within"] == pytest.approx(full[:TRAINED].mean().item(), rel=1e-4)
            assert found[arm]["beyond"] == pytest.approx(full[TRAINED:].mean().item(), rel=1e-4)
            pretrained.set_positions(model, "as trained")
            full = full_pass(model, document, laws.Constant(constant))[:TRAINED]
            assert found[arm]["as trained"] == pytest.approx(full.mean().item(), rel=1e-4)
        assert "nan" not in constant_per_head.report(results)
        experiment.plt.close(constant_per_head.picture(results))
        monkeypatch.setattr(pretrained, "measure", None)
        monkeypatch.setattr(constant_per_head, "fit", lambda *a, **k: pytest.fail("computed again"))
        assert constant_per_head.run(self.SIZE, tmp_path, tmp_path / "runs", 1) == results

    def test_decisions(self):
        """The unit is a source."""
        rng = np.random.default_rng(0)
        losses = {}
        for source in constant_per_head.FULL.sources:
            better = 0.05 + 0.002 * rng.normal()
            for part in range(3):
                hard = rng.normal()
                losses[f"{source}, part {part}"] = {
                    arm: {
                        "within": 2.0,
                        "beyond": 2 + hard - better * (arm == constant_per_head.HEAD),
                        "as trained": 2.0,
                    }
                    for arm in constant_per_head.ARMS
                }
        constants = {name: [[1.0, 1.2]] for name in constant_per_head.FITS}
        results = {"length": 12288, "losses": losses, "constants": constants}
        effects = constant_per_head.effects(results)
        assert [x.found.verdict for x in effects] == ["helps", "helps", "no effect"]
        gains = constant_per_head.gains(results, constant_per_head.HEAD, constant_per_head.ONE)
        assert len(gains) == 24
        assert len(constant_per_head.by_source(gains)) == 8
        assert "98.33 % interval, sources" in constant_per_head.report(results)

    def test_what_the_page_says(self):
        """Of the committed results."""
        results = experiment.load(constant_per_head.NAME)
        no, yarn, one, layer, head = constant_per_head.ARMS
        effects = constant_per_head.effects(results)
        assert {x.found.verdict for x in effects} == {"not decided"}
        assert all(x.found.low > 0 for x in effects)
        gains = functools.partial(constant_per_head.gains, results)

        def mean(*arms, where="beyond"):
            return np.mean(list(gains(*arms, where).values()))

        assert 0.4 < mean(one, yarn) / mean(head, yarn) < 0.5  # nearly half
        assert abs(mean(head, yarn) - 0.028) < 0.005  # that of `smollm2`
        assert results["constants"][one][0][0] == pytest.approx(1.087, abs=5e-4)
        sources = list(dict.fromkeys(name.partition(",")[0] for name in results["losses"]))
        by_source = dict(zip(sources, constant_per_head.by_source(gains(head, one)), strict=True))
        large = {name for name, x in by_source.items() if x > 0.019}
        assert large == {"code pandas", "code sqlalchemy", "code sklearn", "docstrings scipy"}
        others = [round(x, 3) for name, x in by_source.items() if name not in large]
        assert (min(others), max(others)) == (-0.002, 0.010)
        assert constant_per_head.decision(results, yarn, no).low < 0
        assert mean(yarn, no, where="within") < 0
        assert all(mean(x, no, where="as trained") < 0 for x in (yarn, one, layer, head))
        assert mean(head, one, where="as trained") < 0
        # What YaRN's positions cost within the trained length, and what is left of it.
        own = [x for x in results["losses"].values() if "as trained" in x[no]]
        cost, left = (
            np.mean([x[arm]["within"] - x[no]["as trained"] for x in own]) for arm in (no, head)
        )
        assert 0.6 < 1 - left / cost < 0.7  # two thirds
