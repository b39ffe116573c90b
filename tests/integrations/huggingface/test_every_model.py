"""Laws in the model types of transformers of which there is a tiny model: applied once, and causal.

The law by hand multiplies the query before the "eager" attention of the model's own file, which no law of
the package reaches without `use`. Models that compute their attention themselves are compared with their
own code in `test_families`.
"""

import contextlib
import importlib
import inspect
import tomllib
import warnings
from pathlib import Path

import pytest

from isentropic import laws

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch  # noqa: E402

from isentropic.integrations import huggingface  # noqa: E402
from isentropic.integrations.huggingface import _modules  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[3] / "docs")
    models_page = importlib.import_module("models_page")

LAW = laws.LogLength(4.5)  # no number of keys has the factor 1, which would show nothing
SURVEYED = {name: x for name, x in models_page.load()["models"].items() if "difference" in x}
DAILY = {"bert", "gpt_neo", "llama", "mpnet", "t5"}  # all of them take many minutes
TYPES = [name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in SURVEYED]
MOST_PARAMETERS = models_page.MOST_PARAMETERS


@pytest.fixture(autouse=True)
def _float64(monkeypatch):
    """In double precision, also where models ask for a softmax in float32. Some amplify its rounding."""

    def softmax(x, dim=None, dtype=None, _stacklevel=3):
        return x.softmax(dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def tiny(model_type):
    """A model with attention that is far from uniform, and inputs that it takes."""
    for names in models_page.NAMES:
        with contextlib.suppress(Exception):
            model = models_page.made(model_type, names, MOST_PARAMETERS)
            for module in _modules.attention_modules(model).values():
                for p in module.parameters():
                    if not p.any():  # where attention adds nothing at first
                        torch.nn.init.normal_(p, std=0.02)
                    p.data *= 8 if p.ndim == 2 else 1
            return model, models_page.first_that_runs(model)[0]
    return pytest.skip("there is no tiny model of it")


def by_hand(eager):
    """Eager attention of queries that are multiplied by the law, for the keys that each one sees."""

    def attend(module, query, key, value, mask, *args, **kwargs):
        n = torch.tensor(key.shape[2])
        if mask is not None:
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            n = visible.sum(-1, keepdim=True).clamp(min=1)
        return eager(module, query * LAW(n.double()), key, value, mask, *args, **kwargs)

    return attend


@contextlib.contextmanager
def eager_by_hand(modules):
    with pytest.MonkeyPatch.context() as patch:
        for file in {inspect.getmodule(inspect.unwrap(type(x).forward)) for x in modules}:
            for name in [name for name in vars(file) if name.endswith("eager_attention_forward")]:
                patch.setattr(file, name, by_hand(getattr(file, name)))
        yield


def apart(got, expected):
    """The largest difference, relative to the mean size of what is expected."""
    return float((got - expected).abs().max() / expected.abs().mean())


def with_prefix(model, inputs):
    """The outputs for a prefix, alone and as a part of the whole."""
    ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    unmasked = {name: x for name, x in inputs.items() if name != "attention_mask"}
    length = unmasked[ids].shape[1] * 2 // 3
    whole = models_page.output_of(model, unmasked)
    return models_page.output_of(model, unmasked | {ids: unmasked[ids][:, :length]}), whole[:, :length]


def is_causal_with_sdpa(model, inputs):
    """Without a law. PaliGemma gets no mask there, and forgets that its text is causal."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # it has no such attention
        return True
    found = apart(*with_prefix(model, inputs)) < 1e-9
    model.set_attn_implementation("eager")
    return found


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_a_law_acts_once_and_keeps_causality(model_type):
    model, inputs = tiny(model_type)
    modules = _modules.attention_modules(model)
    looked_up = [x for x in modules.values() if _modules.uses_interface(x)]
    if len(looked_up) == len(modules):
        standard = models_page.output_of(model, inputs)
        with eager_by_hand(looked_up):
            expected = models_page.output_of(model, inputs)
        effect = apart(expected, standard)
        assert effect > 1e-7
        with huggingface.use(model, LAW):
            assert apart(models_page.output_of(model, inputs), expected) < effect / 100
    try:
        is_causal = apart(*with_prefix(model, inputs)) < 1e-9
    except Exception:  # it does not take such inputs
        return
    if is_causal and is_causal_with_sdpa(model, inputs):
        with huggingface.use(model, LAW):
            assert apart(*with_prefix(model, inputs)) < 1e-9


def test_a_version_that_is_newer_than_tested_warns_once(monkeypatch):
    model = models_page.made("bert", models_page.NAMES[0])
    tested = ".".join(map(str, _modules.TESTED))
    pins = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert f"transformers=={tested}.0" in pins["dependency-groups"]["transformers"]
    _modules.warn_of_newer_version.cache_clear()
    monkeypatch.setattr(_modules.transformers, "__version__", f"{tested}.3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        huggingface.use(model, LAW)
    _modules.warn_of_newer_version.cache_clear()
    monkeypatch.setattr(_modules.transformers, "__version__", "6.0.0.dev0")
    try:
        with pytest.warns(
            UserWarning, match=rf"transformers 6\.0\.0\.dev0 is newer than {tested}"
        ) as found:
            huggingface.use(model, LAW)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            huggingface.use(model, None)
        assert len([x for x in found if "newer than" in str(x.message)]) == 1
    finally:
        _modules.warn_of_newer_version.cache_clear()
