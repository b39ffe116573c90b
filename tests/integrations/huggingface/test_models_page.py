"""The stored survey of the models of transformers is up to date, and the page shows all of it."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLE = ["bert", "bloom", "falcon", "led", "llama", "longformer", "mamba", "mpnet", "t5"]
AGAIN = "run `nox -s models`"


@pytest.fixture(scope="module")
def models_page():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3] / "docs")
        yield importlib.import_module("models_page")


@pytest.fixture(scope="module")
def stored(models_page):
    return models_page.load()


class TestStored:
    def test_names_all_model_types(self, models_page, stored):
        if stored["transformers"] != transformers.__version__:
            pytest.skip(f"the survey is of transformers {stored['transformers']}: {AGAIN}")
        assert list(stored["models"]) == models_page.model_types(), AGAIN

    @pytest.mark.parametrize("model_type", SAMPLE)
    def test_is_up_to_date(self, models_page, stored, model_type):
        if stored["transformers"] != transformers.__version__:
            pytest.skip(f"the survey is of transformers {stored['transformers']}: {AGAIN}")
        expected = stored["models"][model_type]
        got = models_page.survey(model_type)
        # Rounding differs between machines.
        assert got.pop("difference", 0) == pytest.approx(expected.pop("difference", 0), abs=5e-6), AGAIN
        assert got == expected, AGAIN

    def test_all_models_agree_without_laws(self, stored):
        differences = [x["difference"] for x in stored["models"].values() if "difference" in x]
        assert len(differences) > 250
        # "sdpa" of transformers differs from "eager" by as much, 1.5e-5, in EmbeddingGemma 2.
        assert max(differences) < 2e-5


class TestPage:
    def test_is_written(self, models_page):
        """A reader of the repository sees the tables of the survey."""
        text = models_page.PAGE.read_text(encoding="utf-8")
        assert models_page.written(text) == text
        assert f"transformers {models_page.load()['transformers']}" in text

    def test_has_every_model_type_once(self, models_page, stored):
        text = models_page.page()
        for model_type in ("mpnet", "bert", "longformer", "mamba"):
            assert model_type in text
        rows = [
            line.split(" | ")[0].removeprefix("| ")
            for line in text.splitlines()
            if line.startswith("| ")
        ]
        without = text.strip().splitlines()[-1].rstrip(".").split(", ")
        names = [name for name in rows if name != "model type"] + without
        assert sorted(names) == sorted(stored["models"])
