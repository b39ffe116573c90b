"""The encoder of the examples against Hugging Face's, and the demo."""

import math

import numpy as np
import pytest

minilm = pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")

from isentropic import laws  # noqa: E402

try:
    minilm.model_folder()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def ids():
    pieces = list(minilm.texts(40, 2, minilm.tokenizer()))
    return np.asarray(pieces)


@pytest.fixture(scope="module")
def reference():
    """Hugging Face's model, which forms the weights ("eager")."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = str(minilm.model_folder())
    model = transformers.BertModel.from_pretrained(
        folder, attn_implementation="eager", local_files_only=True
    ).eval()

    def run(ids):
        with torch.no_grad():
            out = model(torch.asarray(ids), output_attentions=True)
        return out.last_hidden_state.numpy(), [p.numpy().astype(float) for p in out.attentions]

    return run


class TestEncoder:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    @pytest.mark.parametrize("library", ["numpy", "torch"])
    def test_against_hugging_face(self, reference, ids, library):
        hidden, attentions = reference(ids)
        if library == "torch":
            import array_api_compat.torch as xp
        else:
            import array_api_compat.numpy as xp
        ours = minilm.encode(minilm.load(xp), xp.asarray(ids))
        np.testing.assert_allclose(np.asarray(ours.hidden), hidden, atol=1e-4)
        for h, p in zip(ours.entropy, attentions, strict=True):
            expected = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
            np.testing.assert_allclose(np.asarray(h), expected, atol=1e-4)

    @pytest.mark.parametrize("law", [None, laws.LogLength(128)], ids=["O", "E"])
    def test_the_same_on_every_backend(self, backend, ids, law):
        expected = minilm.encode(minilm.load(), ids, law=law)
        model = minilm.load(backend.xp, backend.device)
        got = minilm.encode(model, backend.array(ids), law=law)
        backend.assert_close(got.hidden, expected.hidden, atol=2e-5)
        for a, b in zip(got.entropy, expected.entropy, strict=True):
            backend.assert_close(a, b, atol=2e-5)

    def test_gelu(self, backend):
        x = np.linspace(-6, 6, 101)
        exact = [x_i * 0.5 * (1 + math.erf(x_i / math.sqrt(2))) for x_i in x]
        got = minilm.gelu(backend.xp, backend.array(x))
        backend.assert_close(got, np.asarray(exact), atol=2e-6)

    @pytest.mark.nightly
    def test_texts_have_the_length(self, ids):
        assert ids.shape == (2, 40)
        with pytest.raises(ValueError, match="too few modules of 99999999 tokens"):
            next(minilm.texts(99999999, 1, minilm.tokenizer()))


class TestDemo:
    @pytest.fixture
    def demo(self):
        import entropy_growth

        return entropy_growth

    def test_the_law_holds_the_entropy_back(self, demo):
        reports = demo.measure("numpy", (32, 128, 256), 2)
        assert list(reports) == [demo.STANDARD, demo.WITH_LAW, demo.FITTED]
        assert all(report.entropy.shape == (3, 6, 12) for report in reports.values())
        standard, law, fitted = (report.entropy.mean(axis=(1, 2)) for report in reports.values())
        np.testing.assert_allclose(law[:2], standard[:2], atol=1e-5)  # up to 128 keys the law is 1
        growth = standard[2] - standard[1], law[2] - law[1]
        assert growth[0] > growth[1] > 0
        assert abs(fitted[2] - fitted[1]) < 0.15 * growth[0]
        # What this model gave when the demo was written: 2.1 nats at n = 32, 3.0 at 128.
        np.testing.assert_allclose(standard[:2], [2.1, 3.0], atol=0.25)

    @pytest.mark.nightly
    def test_command(self, demo, tmp_path, monkeypatch, capsys):
        for name, small in {"LENGTHS": (8, 16, 32), "FIT_LENGTHS": (16, 32), "FIT_TEXTS": 1}.items():
            monkeypatch.setattr(demo, name, small)
        monkeypatch.setattr(demo, "REFERENCE", 16)
        demo.main(["--texts", "1", "--output", str(tmp_path / "picture.png")])
        assert "Attention entropy in nats, mean over 12 heads a layer" in capsys.readouterr().out
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(SystemExit):
            demo.main(["--texts", "0"])
        with pytest.raises(SystemExit):
            demo.main(["numpi"])
        assert "invalid choice: 'numpi'" in capsys.readouterr().err
