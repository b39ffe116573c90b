"""Queries and keys of few dimensions: the model, the runs, and what decides."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import experiment  # noqa: E402
import key_dimension as kd  # noqa: E402

SETTINGS = kd.Settings(16, 2, 512, 1e-3, (128, 256), 4)


@pytest.fixture(autouse=True)
def _texts(random_packages):
    """The texts are of packages of random bytes."""


def test_model():
    """It is causal, and has queries and keys of the dimension, and values of 32."""
    model = kd.Model(16, 8).requires_grad_(False)
    x = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x)[:, :30], model(x[:, :30]))
    seen, attend = [], kd.it.attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kd.it, "attention", lambda *a, **k: seen.append(a) or attend(*a, **k))
        model(x)
    assert len(seen) == kd.LAYERS
    q, k, v = seen[0]
    assert q.shape == k.shape == (2, kd.HEADS, 40, 8)
    assert v.shape == (2, kd.HEADS, 40, 32)


@pytest.mark.nightly
def test_command(started, monkeypatch, forget, tmp_path):
    """Finished runs are not repeated. A lost one is, and gives the same."""
    monkeypatch.setattr(kd, "QUICK", SETTINGS)

    def command():
        kd.main(["--quick", "--output", str(tmp_path)])
        return json.loads((tmp_path / "key_dimension_quick.json").read_text())

    written = command()
    assert {len(x) for of_n in written["losses"].values() for x in of_n.values()} == {2}
    assert (tmp_path / "key_dimension_quick.png").read_bytes().startswith(b"\x89PNG")
    count = len(started)
    assert count == 2 * 2 * len(kd.DIMENSIONS) + 2 * len(kd.LONGER_SIZES)
    assert [len(x) for x in written["longer"].values()] == [2, 2]
    forget(tmp_path / "key_dimension_quick_runs.jsonl", "256, 16, 201")
    assert command() == written
    assert [job.name() for job in started[count:]] == ["256, 16, 201"]


def results(gain):
    """Losses with a noise of seeds that all dimensions share, and an excess of 16 dimensions."""
    rng = np.random.default_rng(0)
    hard = rng.normal(size=5)

    def losses(n, size):
        more = gain * (size == 16) * (n == 1024)
        return [dict.fromkeys(kd.KINDS, 2 + x + more + 0.002 * rng.normal()) for x in hard]

    lengths = [128, 256, 512, 1024]
    of_n = {str(n): {str(size): losses(n, size) for size in kd.DIMENSIONS} for n in lengths}
    more = {"32": [dict.fromkeys(kd.KINDS, 1.75)] * 2, "64": [dict.fromkeys(kd.KINDS, 1.5)] * 2}
    return {"lengths": lengths, "seeds": 5, "losses": of_n, "longer": more}


def test_decisions():
    found = results(0.1)
    assert kd.is_too_little(found)[0] == "enough"
    assert [kd.grows(found, size)[0] for size in kd.GROWS] == ["it grows", "it does not grow"]
    assert [claim.verdict for claim in kd.claims(found)] == ["not reproduced", "in part"]
    assert kd.grows(results(-0.1), 16)[0] == "it falls"
    assert kd.claims(results(0.0))[1].verdict == "not reproduced"
    for more, verdict in ((1.75, "reproduced"), (1.51, "in part")):
        few = results(0.0)
        for x in few["losses"]["1024"]["32"]:
            x |= {kind: x[kind] + 0.1 for kind in kd.KINDS}
        few["longer"]["32"] = [dict.fromkeys(kd.KINDS, more)] * 2
        assert kd.claims(few)[0].verdict == verdict
    text = kd.report(found)
    assert "98.33 % interval" in text
    assert "and +0.250; " in text
    assert "nan" not in text
    figure = kd.picture(found)
    assert len(figure.axes[0].containers) == len(kd.DIMENSIONS) - 1
    experiment.plt.close(figure)


def test_committed_results():
    """What experiments-dimension.md says."""
    results = experiment.load(kd.NAME)
    assert results["seeds"] == kd.SEEDS
    assert kd.is_too_little(results)[0] == "too little"
    assert [claim.verdict for claim in kd.claims(results)] == ["in part", "reproduced"]
    assert all(0 < b < a / 4 for a, b in zip(*kd.longer(results), strict=True))
    means = {
        n: [np.mean(kd.excess(results, n, size)) for size in kd.DIMENSIONS] for n in results["lengths"]
    }
    assert all(sorted(x, reverse=True) == x for x in means.values())
    assert means[128][2] < kd.SMALLEST
    assert "nan" not in kd.report(results)
