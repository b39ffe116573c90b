"""Language models from scratch: the texts, the arms, and that an interrupted experiment goes on."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import experiment  # noqa: E402
import from_scratch as fs  # noqa: E402
import package_texts  # noqa: E402

import isentropic as it  # noqa: E402
from isentropic import laws  # noqa: E402

SETTINGS = fs.Settings(16, 2, 4, 1e-3, (128, 256), 4)


@pytest.fixture(autouse=True)
def pool(random_packages):
    """The texts are of packages of random bytes."""
    return random_packages


def new(arm, seed=3):
    torch.manual_seed(seed)
    model = fs.Model(arm, SETTINGS).requires_grad_(False)
    for block in model.encoder.blocks:
        block.split.weight.mul_(4)  # so that the attention is not nearly even
    return model


def tokens(n, count=3):
    return torch.randint(256, (count, n), generator=torch.Generator().manual_seed(0))


class TestTexts:
    def test_packages_of_a_seed(self, pool):
        """No package is in two parts, and seeds have other parts."""
        for seed in (1, 2):
            parts = fs.split(seed)
            assert list(map(len, parts)) == [4, fs.IN_CHOICES, fs.IN_TESTS]
            assert sorted(name for part in parts for name in part) == sorted(pool)
        assert fs.split(1) == fs.split(1) != fs.split(2)

    def test_texts(self, pool):
        found = fs.texts(["p01", "p02"], 4, 100, 7)
        assert found.shape == (8, 101)
        for i, text in enumerate(found):
            source = pool[("p01", "p02")[i % 2]][fs.KINDS[i // 4]].tobytes()
            assert text.numpy().astype(np.uint8).tobytes() in source

    def test_batches(self, pool):
        """Half of the texts are code, and all of training packages."""
        batch = next(fs.batches(["p03", "p05"], 4, 128, torch.Generator().manual_seed(0)))
        assert batch.shape == (4, fs.TRAINED + 1)
        for text, kind in zip(batch, ("code", "code", "prose", "prose"), strict=True):
            source = b"".join(pool[x][kind].tobytes() for x in ("p03", "p05"))
            assert text.numpy().astype(np.uint8).tobytes() in source

    def test_docstrings(self):
        long = "word" * 100
        source = f'"""{long}"""\ndef f():\n    """short"""\nclass A:\n    """{long}2"""\n'
        assert list(package_texts.docstrings(source.encode())) == [long, f"{long}2"]
        assert list(package_texts.docstrings(b"def (:")) == []


class TestModel:
    @pytest.mark.parametrize("positions", fs.POSITIONS)
    @pytest.mark.parametrize("arm", fs.ARMS)
    def test_is_causal(self, positions, arm):
        model, x = new(arm), tokens(100)
        torch.testing.assert_close(model(x, positions)[:, :60], model(x[:, :60], positions))

    @pytest.mark.parametrize("arm", fs.ARMS)
    def test_all_arms_start_alike(self, arm):
        plain, found = new("O").state_dict(), new(arm).state_dict()
        assert all((found[name] == x).all() for name, x in plain.items())

    def test_interpolated_positions(self):
        """Up to n0 they are those of the training, and of twice as many bytes they are half as far."""
        model, x = new("O"), tokens(256)
        seen, rotary = [], it.layers.rotary

        def noted(x, at):
            seen.append(at)
            return rotary(x, at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(it.layers, "rotary", noted)
            model(x, "PI")
            model(x[:, :100], "PI")
        assert seen[0].tolist() == [i / 2 for i in range(256)]
        assert seen[-1].tolist() == list(range(100))

    def test_invariant_attention(self):
        """As a formula for each key."""
        q, k, v = torch.randn(3, 2, 4, 30, 8, generator=torch.Generator().manual_seed(0))
        got = fs.invariant_attention(q, k, v)
        i = 23
        t = i - torch.arange(i + 1)
        a = torch.sqrt(1 + 2 * torch.log(t / 10 + 1))
        logits = a * torch.einsum("bhe,bhse->bhs", q[..., i, :], k[..., : i + 1, :]) / 8**0.5
        weights = torch.softmax(logits + 1 - a**2, -1)
        expected = torch.einsum("bhs,bhse->bhe", weights, v[..., : i + 1, :])
        torch.testing.assert_close(got[..., i, :], expected)

    def test_invariant_means(self):
        """The two means over normal logits fall as 1/(t/τ + 1)."""
        t = np.array([0.0, 3.0, 100.0, 1e4])
        a2 = 1 + 2 * np.log(t / fs.TAU + 1)
        of_exp = np.exp(1 - a2 + a2 / 2)
        of_product = (1 - a2 + a2) * of_exp
        for mean in (of_exp, of_product):
            np.testing.assert_allclose(mean * (t / fs.TAU + 1), mean[0])

    def test_constants_and_rules(self):
        model, x = new("O"), tokens(256)
        plain, twice = model(x, "NoPE"), model(x, "NoPE", c=2.0)
        law = model(x, "NoPE", laws.Constant(2.0))
        torch.testing.assert_close(twice, law)
        assert (plain - twice).abs().max() > 1e-3
        late = model(x, "NoPE", laws.LogLength(fs.TRAINED, minimum=1))
        torch.testing.assert_close(late[:, : fs.TRAINED], plain[:, : fs.TRAINED])
        assert (late - plain).abs().max() > 1e-4

    def test_loss(self):
        """That of the last bytes, which see the n bytes before the last one, for each kind."""
        model, x = new("log"), tokens(257, 4)
        got = fs.losses(model, "NoPE", x, 128, None, 1.0)
        part = x[:, -129:]
        logits = model(part[:, :-1], "NoPE")[:, -fs.PREDICTED :]
        each = torch.nn.functional.cross_entropy(logits.mT, part[:, -fs.PREDICTED :], reduction="none")
        assert got["code"] == pytest.approx(each[:2].mean().item(), rel=1e-5)
        assert got["prose"] == pytest.approx(each[2:].mean().item(), rel=1e-5)


class TestRun:
    @pytest.fixture
    def tiny(self, monkeypatch):
        monkeypatch.setattr(fs, "QUICK", SETTINGS)
        monkeypatch.setattr(fs, "CONSTANTS", (1.0, 2.0))

    @pytest.mark.nightly
    def test_command(self, tiny, started, forget, tmp_path, capsys):
        """Finished runs are not repeated. A lost one is, and gives the same."""

        def command():
            fs.main(["--quick", "--output", str(tmp_path)])
            return json.loads((tmp_path / "from_scratch_quick.json").read_text())

        written = command()
        added = fs.ADDED, fs.ADDED + fs.TIMES
        for positions, more in zip(fs.POSITIONS, (added, ()), strict=True):
            assert list(written["positions"][positions]) == [*fs.ALL, *more]
            for found in written["positions"][positions].values():
                assert np.asarray([x["code"] for x in found]).shape == (2, 2)
        assert (tmp_path / "from_scratch_quick.png").read_bytes().startswith(b"\x89PNG")
        assert "98.75 % interval" in capsys.readouterr().out
        # The same weights, and the same factors up to n0.
        of = written["positions"]["NoPE"]
        for found, log in zip(of[fs.ADDED], of["log"], strict=True):
            for kind in fs.KINDS:
                assert found[kind][0] == pytest.approx(log[kind][0], abs=1e-6)
        count = len(started)
        assert count == 2 * 2 * len(fs.ARMS) + 2
        forget(tmp_path / "from_scratch_quick_runs.jsonl", "PI, slope, 101")
        assert command() == written
        assert [job.name() for job in started[count:]] == ["PI, slope, 101"]

    @pytest.mark.nightly
    def test_training_learns(self, pool):
        for part in pool.values():
            for kind in fs.KINDS:
                part[kind][:] = np.resize(np.arange(10, 90, dtype=np.uint8), 2000)
        settings = SETTINGS._replace(steps=150, batch=8, rate=1e-2)
        model = fs.train("NoPE", "slope", 0, settings)
        got = fs.losses(model, "NoPE", fs.texts(["p00"], 2, 128, 0), 128, None, 1.0)
        assert max(got.values()) < 0.5 < np.log(80)


def test_loss_of_frequencies(pool):
    """Bytes that are equally frequent have log 256, and a byte that is always there has 0."""
    for part in pool.values():
        for kind in fs.KINDS:
            part[kind][:] = np.resize(np.arange(256, dtype=np.uint8), len(part[kind]))
    assert fs.of_frequencies(3, SETTINGS) == pytest.approx(np.log(256), rel=0.01)
    for part in pool.values():
        for kind in fs.KINDS:
            part[kind][:] = 7
    assert abs(fs.of_frequencies(3, SETTINGS)) < 1e-3


def test_decisions():
    """Gains are positive where a loss is less, and pairs are of a seed."""
    rng = np.random.default_rng(0)
    hard = rng.normal(size=8)

    def of(arm):
        gain = 0.1 * (arm == "log")
        losses = [[2.0, 2.0 - gain + x + 0.003 * rng.normal()] for x in hard]
        return [{"constant": 1.0, **dict.fromkeys(fs.KINDS, x)} for x in losses]

    results = {
        "lengths": [128, 1024],
        "seeds": 8,
        "frequencies": [3.0] * 8,
        "positions": {x: {arm: of(arm) for arm in fs.ALL} for x in fs.POSITIONS},
    }
    added = {arm: of("log")[:4] for arm in (fs.ADDED, fs.ADDED + fs.TIMES)}
    results["positions"]["NoPE"] |= added
    verdicts = [
        fs.decision(results, positions, arm, other, fs.CONFIDENCE).verdict
        for positions, arm, other in fs.REGISTERED
    ]
    assert verdicts == ["helps", "no effect"] * 2
    assert pytest.approx(0.9875) == fs.CONFIDENCE
    assert fs.REGISTERED[0] == ("NoPE", "log", "constant")
    assert [x.found.verdict for x in fs.effects(results) if not x.why] == verdicts
    assert [x.verdict for x in fs.claims(results)] == ["reproduced"] * 2
    assert "**" not in fs.report(results)
    experiment.plt.close(fs.picture(results))


def test_committed_results():
    """What experiments-small-models.md says."""
    results = experiment.load(fs.NAME)
    assert results["seeds"] == fs.SEEDS
    verdicts = [
        fs.decision(results, positions, arm, other, fs.CONFIDENCE).verdict
        for positions, arm, other in fs.REGISTERED
    ]
    assert verdicts == ["harms"] * 2 + ["not decided"] * 2
    gain = fs.decision(results, "NoPE", "log", "constant", at=0)
    assert f"{gain.mean:.2f}" == "0.16"
    assert gain.low > 0.15
    frequencies = np.mean(results["frequencies"])
    means = {x: {arm: np.mean(fs.values(results, x, arm)) for arm in fs.ALL} for x in fs.POSITIONS}
    assert abs(means["NoPE"]["log"] - frequencies) < 0.01
    assert min(means["PI"].values()) > frequencies + 0.1
    # "Log up to n0" has the weights of "log", and fails as well.
    nope = results["positions"]["NoPE"]
    assert len(nope[fs.ADDED]) == fs.ADDED_SEEDS
    for found, log in zip(nope[fs.ADDED], nope["log"], strict=False):
        assert all(
            found[kind][0] == log[kind][0] and found[kind][1] != log[kind][1] for kind in fs.KINDS
        )
    assert fs.added(results).low < 0 < fs.added(results).high
    assert np.mean(fs.values(results, "NoPE", fs.ADDED)) > frequencies - 0.05
    assert [round(fs.regained(results, "NoPE", x)) for x in ("O × c", fs.AT_TEST)] == [6, 5]
    law = fs.decision(results, "NoPE", fs.AT_TEST, "O")
    assert law.low < 0 < law.high
    assert fs.decision(results, "NoPE", "O × c", "O").low > 0
    flat = [np.mean(fs.values(results, "NoPE", "scale-invariant", at)) for at in range(4)]
    assert np.ptp(flat) < 0.02
    assert max(flat) < np.mean(fs.values(results, "NoPE", "O", 0)) - 0.4
    assert means["PI"]["scale-invariant"] > frequencies
    assert "nan" not in fs.report(results)
