"""Laws in the configuration of a model, so that `save_pretrained` and `from_pretrained` keep them.

The configuration says which laws a model has, and the values that they have when it is written. The
trained ones are in the state dict too, under the names of the modules.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, initialization

from isentropic import laws as laws_module
from isentropic._checks import check_flag, type_error, value_error
from isentropic.integrations.huggingface._hooks import hooks
from isentropic.integrations.huggingface._interface import NAME
from isentropic.integrations.huggingface._layer_law import LAW, LayerLaw, layer_law, set_law
from isentropic.integrations.torch import LawModule

ENTRY, _VERSION = "isentropic_laws", 1
_VALUES = "_isentropic_values"  # an attribute of LawModules in models: their tensors as they were made
_KEYS = ("law", "count", "trainable")  # what describes the law of a layer
# transformers reads this field, but never writes it. With it a model with laws does not load without
# this package, rather than silently lose its laws.
_IMPLEMENTATION = "attn_implementation"

# ------------------------------------------------------------------------- the steps in transformers


def extend_transformers() -> None:
    """Let the models of transformers keep their laws. Calling this again has no effect."""
    for name, extend in _EXTENSIONS.items():
        original = getattr(PreTrainedModel, name)
        if not hasattr(original, "keeps_laws"):
            method = functools.wraps(original)(extend(original))
            method.keeps_laws = True  # type: ignore[attr-defined]
            setattr(PreTrainedModel, name, method)


def _check_implementation(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_implementation(self: Any, name: str | None, *args: Any, **kwargs: Any) -> Any:
        entry = vars(self.config).get(ENTRY)
        if name == NAME and kwargs.get("is_init_check") and isinstance(entry, dict):
            name = _base(entry)  # before the model makes its layers for it
        return original(self, name, *args, **kwargs)

    return check_implementation


def _post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_init(self: Any) -> None:
        has_laws = _make_laws(self)  # before the weights are initialized or loaded
        for module in _own_laws(self):
            # Loading replaces the tensors that are not loaded by uninitialized ones.
            values = {name: x.detach().clone() for name, x in _tensors(module)}
            vars(module).setdefault(_VALUES, values)
        original(self)
        if has_laws:
            # Loading in half precision would round the laws.
            self._keep_in_fp32_modules_strict.add(LAW)

    return post_init


def _initialize_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_weights(self: Any) -> None:
        for name, module in self.named_modules():
            if isinstance(module, LawModule) and not getattr(module, "_is_hf_initialized", False):
                _restore_values(name, module)
        original(self)

    return initialize_weights


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


_EXTENSIONS = {
    "_check_and_adjust_attn_implementation": _check_implementation,
    "post_init": _post_init,
    "initialize_weights": _initialize_weights,
    "save_pretrained": _save_pretrained,
}


def _own_laws(module: torch.nn.Module) -> Iterator[LawModule]:
    """The LawModules in a module, except the laws that `use` applied."""
    for child in module.children():
        if isinstance(child, LawModule) and not isinstance(child, LayerLaw):
            yield child
        if not isinstance(child, LayerLaw):
            yield from _own_laws(child)


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _restore_values(name: str, module: Any) -> None:
    """Set those tensors of a LawModule that have not been loaded to the values they were made with."""
    if isinstance(module, LayerLaw):
        for x, value in module.values():
            initialization.copy_(x, value)
        module._is_hf_initialized = True
        return
    values = vars(module).get(_VALUES, {})
    for key, x in _tensors(module) if values else ():
        if values[key].is_meta and not getattr(x, "_is_hf_initialized", False):
            must = (
                "have values that `from_pretrained` can know: they are not in the checkpoint, and the "
                "tensor is made on the meta device (make it with `device='cpu'`)"
            )
            raise value_error(f"{name}.{key}", must, "none")
        initialization.copy_(x, values[key])


# -------------------------------------------------------------------------- into the configuration


class _Held(NamedTuple):
    """A law, or None for standard attention, and the models around it by name, outer first."""

    name: str
    law: LayerLaw | None
    models: tuple[tuple[str, Any], ...]

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

    `state` is a state dict of the model that is saved in place of its own. Returns the names of
    attention modules whose law cannot be described, with the classes of these laws.
    """
    unsaved: dict[str, str] = {}
    for root in _outermost_models(model):
        configs = list(_configs(root.config))
        for config in configs:
            vars(config).pop(ENTRY, None)
            if NAME in str(vars(config).get(_IMPLEMENTATION)):  # it may be of someone else
                vars(config).pop(_IMPLEMENTATION)
        for held in _held_laws(root):
            config, name = held.config_and_name()
            empty = {"version": _VERSION, "base": NAME, "layers": {}}
            entry = vars(config).setdefault(ENTRY, empty)
            prefix = f"{held.name}.{LAW}."
            own = {k.removeprefix(prefix): x for k, x in (state or {}).items() if k.startswith(prefix)}
            entry["layers"][name] = None
            if held.law is not None:
                entry["base"] = held.models[-1][1].config._attn_implementation
                try:
                    entry["layers"][name] = held.law.to_dict(own)
                except TypeError:
                    unsaved[name] = held.law._kind.__name__
                    entry["layers"][name] = {"unsaved": unsaved[name]}
        for config in configs:
            if not any(vars(config).get(ENTRY, {"layers": {}})["layers"].values()):
                vars(config).pop(ENTRY, None)
        _require_implementation(root.config)
    return unsaved


def _require_implementation(config: Any) -> Any:
    """Let transformers ask for this package's attention in each configuration that has laws.

    Returns what to ask for in `config`: a name, None, or a dictionary with one value per configuration
    within it, and its own under "". Some outer configurations overwrite what the inner ones ask for,
    others do not.
    """
    outer = NAME if ENTRY in vars(config) else None
    inner = {key: getattr(config, key, None) for key in config.sub_configs}
    wanted = {key: _require_implementation(x) for key, x in inner.items() if x is not None}
    wanted = {key: x for key, x in {"": outer, **wanted}.items() if x is not None}
    asked = outer if wanted.keys() <= {""} else wanted
    if asked is not None:
        setattr(config, _IMPLEMENTATION, asked)
    return asked


def _outermost_models(module: torch.nn.Module) -> list[Any]:
    if isinstance(module, PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in _outermost_models(child)]


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for key in config.sub_configs:
        if (inner := getattr(config, key, None)) is not None:
            yield from _configs(inner)


# -------------------------------------------------------------------------- from the configuration


def _make_laws(model: Any) -> bool:
    """Give a new model the laws that its configuration describes. Say whether there were any."""
    entry = vars(model.config).get(ENTRY)
    if entry is None:
        return False
    made = []
    for name, description in _layers(entry).items():
        module = _find(model, name)
        # An inner model may have made the law already.
        if module is not None and not hasattr(module, LAW):
            set_law(module, _from_description(description, module, model, name))
            made.append(module)
    if made:
        hooks(made)
        setattr(model.config, _IMPLEMENTATION, NAME)  # transformers has removed it
    return bool(made)


def _layers(entry: Any) -> dict[str, Any]:
    """The descriptions of laws in an entry, which is checked."""
    layers = entry.get("layers") if isinstance(entry, dict) else None
    if not isinstance(layers, dict) or not all(isinstance(x, dict | None) for x in layers.values()):
        must = "be a dictionary whose 'layers' are dictionaries or None"
        raise type_error(f"config.{ENTRY}", must, repr(layers))
    if type(entry.get("version")) is not int or entry["version"] != _VERSION:
        must = f"have the version {_VERSION}; a newer isentropic may read it"
        raise value_error(f"config.{ENTRY}", must, repr(entry.get("version")))
    _base(entry)
    return layers


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
        must = f"have {', '.join(_KEYS)} of {name!r}"
        raise value_error(f"config.{ENTRY}", must, ", ".join(description))
    law = laws_module.from_dict(description.get("law"))
    trainable = description.get("trainable", False)
    check_flag(trainable=trainable)
    return layer_law(law, description.get("count"), module, model, name, trainable)
