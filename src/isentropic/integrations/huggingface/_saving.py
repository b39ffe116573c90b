"""Laws in the configuration of a model, so that `save_pretrained` and `from_pretrained` keep them.

The configuration says which laws a model has, and the values that they have when it is written. The
trained ones are in the state dict too, under the names of the modules. `extend_transformers` is the one
place that changes transformers.
"""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, initialization
from transformers.utils import CONFIG_NAME

from isentropic import laws as laws_module
from isentropic._checks import check_flag, type_error, value_error
from isentropic.integrations.huggingface._hooks import hooks
from isentropic.integrations.huggingface._interface import LAW, NAME, set_law
from isentropic.integrations.huggingface._layer_law import LayerLaw, layer_law
from isentropic.integrations.torch import LawModule

ENTRY, _VERSION = "isentropic_laws", 1
_VALUES = "_isentropic_values"  # an attribute of LawModules in models: their tensors as they were made
_KEYS = ("law", "count", "trainable")  # what describes the law of a layer
# transformers reads this field, but never writes it. With it a model with laws does not load without
# this package, rather than silently lose its laws.
_IMPLEMENTATION = "attn_implementation"


def extend_transformers() -> None:
    """Let the models of transformers keep their laws.

    Four methods of PreTrainedModel, and one of Trainer, get a step before or after. It does nothing for
    models without laws. Calling this again has no effect.
    """
    for (owner, name), extend in _EXTENSIONS.items():
        original = getattr(owner, name)
        if not hasattr(original, "keeps_laws"):
            method = functools.wraps(original)(extend(original))
            method.keeps_laws = True  # type: ignore[attr-defined]
            setattr(owner, name, method)


def _check_implementation(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_implementation(self: Any, name: str | None, *args: Any, **kwargs: Any) -> Any:
        entry = vars(self.config).get(ENTRY)
        if name == NAME and kwargs.get("is_init_check") and isinstance(entry, dict):
            name = _base(entry)  # before the model makes its layers for it
        return original(self, name, *args, **kwargs)

    return check_implementation


def _post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_init(self: Any) -> None:
        made = make_laws(self)  # before the weights are initialized or loaded
        for module in _own_laws(self):
            # Loading replaces the tensors that are not loaded by uninitialized ones.
            values = {name: x.detach().clone() for name, x in _tensors(module)}
            vars(module).setdefault(_VALUES, values)
        original(self)
        if made:
            # Loading in half precision would round the laws.
            self._keep_in_fp32_modules_strict.add(LAW)

    return post_init


def _initialize_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(module, LayerLaw):
            if not getattr(module, "_is_hf_initialized", False):
                _restore_values(self, module)
            return original(self, module, *args, **kwargs)
        if not module._is_hf_initialized:
            for x, value in module.values():
                initialization.copy_(x, value)  # unless it has been loaded
            module._is_hf_initialized = True
        return None

    return initialize


def _own_laws(model: Any) -> list[Any]:
    """The LawModules in a model, except the laws that `use` applied."""
    applied = {
        x for module in model.modules() if isinstance(module, LayerLaw) for x in module.modules()
    }
    return [x for x in model.modules() if isinstance(x, LawModule) and x not in applied]


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _restore_values(model: Any, module: Any) -> None:
    """Set those tensors of a LawModule that have not been loaded to the values they were made with."""
    values = vars(module).get(_VALUES, {})
    for name, x in _tensors(module) if values else ():
        if values[name].is_meta and not getattr(x, "_is_hf_initialized", False):
            owner = next(name for name, x in model.named_modules() if x is module)
            must = (
                "have values that `from_pretrained` can know: they are not in the checkpoint, and the "
                "tensor is made on the meta device (make it with `device='cpu'`)"
            )
            raise value_error(f"{owner}.{name}", must, "none")
        initialization.copy_(x, values[name])


def _save_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        for name, kind in write_entry(self, given.get("state_dict")).items():
            warnings.warn(
                f"The law of {name} cannot be saved: only those of isentropic.laws can, got {kind}.",
                stacklevel=2,
            )
        return original(self, *args, **kwargs)

    return save_pretrained


def _load_from_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_from_checkpoint(self: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        _check_checkpoint(self.model, Path(resume_from_checkpoint))
        return original(self, resume_from_checkpoint, *args, **kwargs)

    return load_from_checkpoint


_EXTENSIONS = {
    (PreTrainedModel, "_check_and_adjust_attn_implementation"): _check_implementation,
    (PreTrainedModel, "post_init"): _post_init,
    (PreTrainedModel, "_initialize_weights"): _initialize_weights,
    (PreTrainedModel, "save_pretrained"): _save_pretrained,
    (Trainer, "_load_from_checkpoint"): _load_from_checkpoint,
}


@dataclass(frozen=True)
class _Held:
    """A law, or None for standard attention, and the models around it by name, outer first."""

    name: str
    law: LayerLaw | None
    models: tuple[tuple[str, Any], ...]

    @property
    def implementation(self) -> str | None:
        return self.models[-1][1].config._attn_implementation

    def config_and_name(self) -> tuple[Any, str]:
        """The configuration that is saved with the law, and the name of the module there.

        It is that of the innermost model of those whose configuration is saved. The name is the one
        within the base model, which is the same with every head on top.
        """
        saved = {id(config) for config in _configs(self.models[0][1].config)}
        config = next(m.config for _, m in reversed(self.models) if id(m.config) in saved)
        prefix, model = next((p, m) for p, m in self.models if m.config is config)
        name = self.name.removeprefix(f"{prefix}.")
        is_base = model.base_model is model
        return config, name if is_base else name.removeprefix(f"{model.base_model_prefix}.")


def _held_laws(module: Any, name: str = "", models: tuple[Any, ...] = ()) -> Iterator[_Held]:
    if isinstance(module, PreTrainedModel):
        models = (*models, (name, module))
    if hasattr(module, LAW) and models:
        yield _Held(name, getattr(module, LAW), models)
    for key, child in module.named_children():
        yield from _held_laws(child, f"{name}.{key}" if name else key, models)


def write_entry(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor] | None = None
) -> dict[str, str]:
    """Write the present laws of a model into its configurations.

    Parameters
    ----------
    model : torch.nn.Module
    state : mapping, optional
        A state dict of the model, which is saved in place of its own.

    Returns
    -------
    dict
        The names of attention modules whose law cannot be described, and the classes of these laws.
    """
    unsaved: dict[str, str] = {}
    for root in _outermost_models(model):
        for config in _configs(root.config):
            vars(config).pop(ENTRY, None)
            if NAME in str(vars(config).get(_IMPLEMENTATION)):  # it may be of someone else
                vars(config).pop(_IMPLEMENTATION)
        for held in _held_laws(root):
            config, name = held.config_and_name()
            empty = {"version": _VERSION, "base": NAME, "layers": {}}
            entry = vars(config).setdefault(ENTRY, empty)
            prefix = f"{held.name}.{LAW}."
            own = {k.removeprefix(prefix): x for k, x in (state or {}).items() if k.startswith(prefix)}
            entry["layers"][name] = description = _description(held.law, own)
            if description is not None:
                entry["base"] = held.implementation
                if "unsaved" in description:
                    unsaved[name] = description["unsaved"]
        for config in _configs(root.config):
            if not any(vars(config).get(ENTRY, {"layers": {}})["layers"].values()):
                vars(config).pop(ENTRY, None)
        _require_implementation(root.config)
    return unsaved


def _require_implementation(config: Any) -> Any:
    """Let transformers ask for this package's attention in each configuration that has laws.

    Returns
    -------
    str, dict or None
        What to ask for in `config`: a dictionary with one value per configuration within it, and its
        own under "". Some outer configurations overwrite what the inner ones ask for, others do not.
    """
    outer = NAME if ENTRY in vars(config) else None
    inner = {key: getattr(config, key, None) for key in config.sub_configs}
    wanted = {key: _require_implementation(x) for key, x in inner.items() if x is not None}
    wanted = {key: x for key, x in {"": outer, **wanted}.items() if x is not None}
    asked = outer if wanted.keys() <= {""} else wanted
    if asked is not None:
        setattr(config, _IMPLEMENTATION, asked)
    return asked


def _description(law: Any, state: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
    if law is None:
        return None
    try:
        return law.to_dict(state)
    except TypeError:
        return {"unsaved": law._kind.__name__}


def _outermost_models(module: torch.nn.Module) -> list[Any]:
    if isinstance(module, PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in _outermost_models(child)]


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for key in config.sub_configs:
        if (inner := getattr(config, key, None)) is not None:
            yield from _configs(inner)


def _check_checkpoint(model: Any, folder: Path) -> None:
    """Refuse to train on from a checkpoint with trained laws without them."""
    path, config = folder / CONFIG_NAME, getattr(model, "config", None)
    if config is None or not path.is_file():
        return
    own = _layers(config.to_dict())
    saved = _layers(json.loads(path.read_text(encoding="utf-8")))
    lost = [name for name, is_trained in saved.items() if is_trained and not own.get(name)]
    if lost:
        must = (
            f"have the trained laws of the checkpoint {folder}: make it by `from_pretrained`, or apply "
            "them by `huggingface.use` before the training"
        )
        raise value_error("model", must, f"no trained law in {', '.join(lost)}")
    if saved and not own:
        warnings.warn(
            f"The checkpoint {folder} has laws, and the model that is trained on has none. Apply them "
            "by `huggingface.use`.",
            stacklevel=4,
        )


def _layers(config: dict[str, Any], prefix: str = "") -> dict[str, bool]:
    """The layers with laws in a configuration and those within it, and whether these are trained."""
    entry = config.get(ENTRY, {"layers": {}})
    layers = {
        f"{prefix}{name}": "trainable" in x for name, x in entry["layers"].items() if x is not None
    }
    for key, inner in config.items():
        if isinstance(inner, dict) and key != ENTRY:
            layers |= _layers(inner, f"{prefix}{key}.")
    return layers


def make_laws(model: Any) -> bool:
    """Give a new model the laws that its configuration describes. Say whether there were any."""
    entry = vars(model.config).get(ENTRY)
    if entry is None:
        return False
    _check(entry)
    made = []
    for name, description in entry["layers"].items():
        module = _find(model, name)
        # An inner model may have made the law already.
        if module is not None and not hasattr(module, LAW):
            set_law(module, _from_description(description, module, model, name))
            made.append(module)
    if made:
        hooks(made)
        setattr(model.config, _IMPLEMENTATION, NAME)  # transformers has removed it
    return bool(made)


def _check(entry: Any) -> None:
    layers = entry.get("layers") if isinstance(entry, dict) else None
    if not isinstance(layers, dict) or not all(isinstance(x, dict | None) for x in layers.values()):
        must = "be a dictionary whose 'layers' are dictionaries or None"
        raise type_error(f"config.{ENTRY}", must, repr(layers))
    if type(entry.get("version")) is not int or entry["version"] != _VERSION:
        must = f"have the version {_VERSION}; a newer isentropic may read it"
        raise value_error(f"config.{ENTRY}", must, repr(entry.get("version")))
    _base(entry)


def _base(entry: dict[str, Any]) -> str | None:
    base = entry.get("base", NAME)
    if not isinstance(base, str | None):
        must = "have the name of an attention implementation as its 'base'"
        raise type_error(f"config.{ENTRY}", must, type(base).__name__)
    return base


def _find(model: Any, name: str) -> Any:
    for owner in (model.base_model, model):
        try:
            return owner.get_submodule(name)
        except AttributeError:
            continue
    return None


def _from_description(description: Any, module: Any, model: Any, name: str) -> LayerLaw | None:
    if description is None:
        return None
    if "unsaved" in description:
        warnings.warn(
            f"The law {description['unsaved']} of {name} was not saved, and so {name} has standard "
            "attention. Apply the law by `huggingface.use`.",
            stacklevel=4,
        )
        return None
    if not description.keys() <= set(_KEYS):
        raise value_error(
            f"config.{ENTRY}", f"have {', '.join(_KEYS)} of {name!r}", ", ".join(description)
        )
    law = laws_module.from_dict(description.get("law"))
    trainable = description.get("trainable", False)
    check_flag(trainable=trainable)
    return layer_law(law, description.get("count"), module, model, name, trainable)
