"""The experiment on the dimensions of the heads of a language model, on a tiny one, and its results."""

import json
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import experiment  # noqa: E402
import head_dimension  # noqa: E402
import pretrained  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

HEAD = 8


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=4 * HEAD,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": pretrained.THETA},
    )
    result = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in result.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.3)
    return result


def tokenizer(text, add_special_tokens):
    return {"input_ids": [ord(c) % 64 for c in text]}


class TestMaps:
    def test_random_maps_are_right_on_average(self):
        maps = head_dimension.random_maps(20, 50, HEAD, 4, draw=1)
        assert maps.shape == (20, 50, HEAD, HEAD)
        assert (torch.linalg.matrix_rank(maps) == 4).all()
        torch.testing.assert_close(maps.mean((0, 1)), torch.eye(HEAD), atol=0.1, rtol=0)
        assert not torch.equal(maps, head_dimension.random_maps(20, 50, HEAD, 4, draw=2))

    def test_fitted_maps_are_best(self):
        """No other map of the rank has a smaller error: neither components of keys nor of queries."""
        torch.manual_seed(0)
        scales = torch.logspace(0, -2, HEAD)
        q = torch.randn(1000, HEAD) @ (torch.randn(HEAD, HEAD) * scales)
        k = torch.randn(1000, HEAD) @ (torch.randn(HEAD, HEAD) * scales.flip(0))
        moments = q.T @ q / len(q), k.T @ k / len(k)
        found = head_dimension.fitted_maps(*moments, 4)
        assert torch.linalg.matrix_rank(found, rtol=1e-4) == 4

        def error(m):
            return (q @ (m - torch.eye(HEAD)) @ k.T).square().mean().item()

        for moment in moments:
            axes = torch.linalg.eigh(moment)[1][:, -4:]
            assert error(found) < error(axes @ axes.T)
        for _ in range(5):
            assert error(found) < error(found @ (torch.eye(HEAD) + 1e-2 * torch.randn(HEAD, HEAD)))
        torch.testing.assert_close(
            head_dimension.fitted_maps(*moments, HEAD), torch.eye(HEAD), atol=1e-3, rtol=0
        )


@pytest.mark.nightly
def test_runs_and_goes_on_where_it_was(model, monkeypatch, tmp_path):
    for name, value in {"EDGES": (0, 8, 16, 32, 64), "BANDS": (16, 32, 64)}.items():
        monkeypatch.setattr(head_dimension, name, value)
    quick = head_dimension.QUICK._replace(
        sizes=dict.fromkeys(head_dimension.ARMS, (4, HEAD)), fit=("source pickletools",)
    )
    monkeypatch.setattr(head_dimension, "QUICK", quick)
    monkeypatch.setattr(pretrained, "load", lambda folder: (model, tokenizer))
    arguments = ["--quick", "--output", str(tmp_path), "--cache", str(tmp_path / "cache")]
    head_dimension.main(arguments)
    results = json.loads((tmp_path / "head_dimension_quick.json").read_text())
    for arm in head_dimension.ARMS:
        found = head_dimension.curves(results, arm)
        # With all dimensions the model is the same, and with half of them it is not.
        assert max(abs(x) for of_text in found[HEAD] for x in of_text) < 1e-3
        assert min(abs(x) for of_text in found[4] for x in of_text) > 1e-3

    def refuse(*args):
        raise AssertionError

    monkeypatch.setattr(head_dimension, "band_losses", refuse)
    head_dimension.main(arguments)
    assert json.loads((tmp_path / "head_dimension_quick.json").read_text()) == results


class TestVerdicts:
    def test_sufficient(self):
        sizes = (16, 32, 48, 64)
        assert head_dimension.sufficient(sizes, (0.2, 0.1, 0.01, 0), 0.055) == pytest.approx(40)
        assert head_dimension.sufficient(sizes, (0.01, 0.1, 0.01, 0), 0.055) == pytest.approx(40)
        assert head_dimension.sufficient(sizes, (0.2, 0.1, 0.1, 0), 0.05) == pytest.approx(56)
        assert head_dimension.sufficient(sizes, (0.01, 0.0, -0.1, 0), 0.05) == 16

    @pytest.mark.parametrize(
        ("slope", "offset", "grows", "near"), [(8.33, 0, "yes", "yes"), (0, 30, "no", "no")]
    )
    def test_answers(self, slope, offset, grows, near):
        """Of made-up texts whose rise falls by 1 per dimension, to 0.05 at slope · log n + offset."""
        results = {"bands": [128, 256, 512], "size": 1000, "losses": {"model": [[0, 0, 0]] * 8}}
        needed = [slope * math.log(n) + offset for n in head_dimension.lengths(results)]
        rows = [
            {"k": k, "losses": [[0.05 + x + 0.1 * i - k for x in needed] for i in range(8)]}
            for k in range(0, 200, 2)
        ]
        results["losses"] |= {"Fast JL": rows, "fitted": rows}
        said, found = head_dimension.grows(results, "fitted")
        assert (said, found.mean) == (grows, pytest.approx(slope, abs=1e-6))
        assert head_dimension.near(results, "fitted")[0] == near


class TestCommittedResults:
    @pytest.fixture
    def results(self):
        return experiment.load("head_dimension")

    def test_are_those_registered(self, results):
        full = head_dimension.FULL
        assert list(results["texts"]) == [*full.test, *full.fit]
        for arm in head_dimension.ARMS:
            found = head_dimension.curves(results, arm)
            assert tuple(found) == full.sizes[arm]
            assert {len(x) for x in found.values()} == {len(full.test)}

    def test_what_holds_for_every_text(self, results):
        """A fitted map is better than a random one of as many dimensions."""
        random, fitted = (head_dimension.curves(results, x) for x in ("Fast JL", "fitted"))
        for k in set(random) & set(fitted):
            for a, b in zip(random[k], fitted[k], strict=True):
                assert sum(a) > sum(b)

    def test_are_reported(self, results):
        text = head_dimension.report(results)
        assert "nan" not in text
        found = head_dimension.claims(results)
        assert len(found) == 2
        figure = head_dimension.picture(results)
        assert all(ax.lines for ax in figure.axes)
        experiment.plt.close(figure)
