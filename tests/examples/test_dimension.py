"""The experiment on the dimensions of word vectors and attention heads, and its committed results."""

import json
import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")
import dimension
import dimension_results
import experiment
import minilm
import torch

import isentropic as it
from isentropic import theory


@pytest.fixture(scope="module")
def results():
    return experiment.load("dimension")


@pytest.fixture
def tiny(monkeypatch, started):
    """Few words and short attention, in this process."""
    try:
        minilm.model_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    words = dimension.word_vectors()[::40]
    lengths = {"initial": (16, 32), "focused": (16, 32), "MiniLM": (16, 32)}
    sizes = {"initial": (32, 64), "focused": (32, 64), "MiniLM": (8, 32)}
    small = {
        "word_vectors": lambda: words,
        "SUBSETS": (300,),
        "SIZES": (16, it.theory.entropy_criterion_dim(len(words)), 192),
        "QUERIES": 50,
        "PAIRS": 1000,
        "POINTS": 60,
        "LENGTHS": lengths,
        "HEAD_SIZES": sizes,
        "WIDTH": 64,
        "ROWS": 32,
        "LOOKUP_SIZES": (4, 64),
        "WORD_MAPS": 1,
        "TEXTS": 1,
    }
    for name, value in small.items():
        monkeypatch.setattr(dimension, name, value)
        if hasattr(dimension_results, name):
            monkeypatch.setattr(dimension_results, name, value)


@pytest.mark.nightly
def test_command(tiny, tmp_path, capsys):
    dimension.main(["--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert "Weight in % moved to other keys" in out
    results = json.loads((tmp_path / "dimension.json").read_text())
    assert (tmp_path / "dimension.png").stat().st_size > 10_000
    assert len(results["retention"]) == 2 * 3 * (1 + dimension.WORD_MAPS)
    weights = {(row["n"], row["k"]): row["weight"] for row in results["lookup"] if row["noise"] == 1}
    assert weights[16, 4] < 0.7 < 0.99 < weights[32, 64]
    assert len(results["attention"]) == 3 * 2 * 2 * 3
    # As many dimensions as before, in which Fast JL and the best map lose nothing.
    for kind, size in (("initial", 64), ("focused", 64), ("MiniLM", 32)):
        for name in ("Fast JL", "least squares"):
            assert dimension_results.moved(results, kind, name, 32, size) < 1e-3
        assert dimension_results.moved(results, kind, "Gaussian", 32, size) > 0.1


def test_best_rank_has_the_nearest_logits():
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 10, 6, dtype=torch.float64)
    centered = q @ (k - k.mean(-2, keepdim=True)).mT
    best_q, best_k = dimension.best_rank(q, k)
    torch.testing.assert_close(best_q @ best_k.mT, centered)
    error = centered - best_q[..., :2] @ best_k[..., :2].mT
    left_out = torch.linalg.svdvals(centered)[..., 2:]
    torch.testing.assert_close(error.square().sum((-2, -1)), left_out.square().sum(-1))


def test_neighbors():
    x = torch.asarray([[0.0], [1.0], [3.0], [7.0]])
    assert dimension.nearest(x, torch.asarray([1, 3]), 2).tolist() == [[0, 2], [2, 1]]


def test_size_for():
    assert dimension_results.size_for(60, (10, 20, 40), [0, 50, 70]) == pytest.approx(30)
    assert dimension_results.size_for(80, (10, 20, 40), [0, 50, 70]) is None
    assert dimension_results.growth({10: None, 100: 5.0, 1000: 5 + 2 * math.log(10)}) == pytest.approx(
        2
    )


class TestCommitted:
    def test_distances_keep_the_promise(self, results):
        sizes = [row["k"] for row in results["distances"]]
        bounds = it.jl.eps([[dimension.POINTS], [results["words"]]], sizes).T
        promises = 0
        for row, exact in zip(results["distances"], bounds.tolist(), strict=True):
            found = (row["worst of some"], row["worst"])
            for worst, eps, bound in zip(found, row["promised"], exact, strict=True):
                assert bound >= 1 if eps is None else bound == pytest.approx(eps, rel=1e-3)
                promises += eps is not None
                assert worst <= bound
        assert promises >= 6

    def test_errors_of_logits_are_those_of_inner_products(self, results):
        for row in results["attention"]:
            if row.get("expected error", 0) > 1e-3:
                # In MiniLM all heads of a layer share a map, and there are few maps.
                off = 0.1 if row["kind"] == "MiniLM" else 0.04
                assert row["error"] == pytest.approx(row["expected error"], rel=off)

    def test_entropy_is_that_of_noisier_logits(self, results):
        rows = dimension_results.initial(results)
        assert len(rows) == 50
        for row in rows:
            assert row["entropy"] == pytest.approx(row["predicted"], abs=0.06)
        # Fast JL of all dimensions changes nothing, and the logits have the variance 1.
        for n in dimension.LENGTHS["initial"]:
            (found,) = dimension_results.pick(rows, "entropy", map="Fast JL", n=n, k=dimension.WIDTH)
            assert found == pytest.approx(theory.gaussian_entropy(n, 1.0), abs=0.03)

    def test_lookups_need_the_capacity_of_a_channel(self, results):
        for noise in dimension.NOISES:
            for n, k in dimension_results.sizes_of_lookup(results, noise).items():
                assert 0.8 < k / dimension.capacity(n, noise) < 1
        assert dimension.capacity(1024, 1.0) == pytest.approx(20)

    def test_no_threshold_at_the_criterion(self, results):
        # Half of the weight, at a k that is far above 8.33 log n and hardly grows with n.
        sizes = dimension_results.sizes_of_heads(results, "initial", "Fast JL")
        assert all(k > 2 * it.theory.entropy_criterion_dim(n) for n, k in sizes.items())
        assert max(sizes.values()) < 1.1 * min(sizes.values())

    def test_more_dimensions_keep_more_neighbors(self, results):
        n = results["words"]
        for key in ("nearest", "ten"):
            for name in ("Fast JL", "PCA"):
                values = [dimension_results.kept(results, key, name, n, k) for k in dimension.SIZES]
                assert values == sorted(values)
                assert values[0] < 50 < values[-1] < 100

    def test_report_and_claims(self, results):
        text = dimension_results.report(results)
        assert f"{results['words']} word vectors" in text
        assert "nan" not in text
        verdicts = {(c.source, c.says): c.verdict for c in dimension_results.claims(results)}
        assert verdicts["derivation of 9588, §5.1, eq. 52", "8.33 log 512 ≈ 75."] == "not reproduced"
        assert list(verdicts.values()).count("not tested") == 4
        assert len(verdicts) == 8

    def test_picture(self, results, tmp_path):
        dimension_results.picture(results).savefig(tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000
