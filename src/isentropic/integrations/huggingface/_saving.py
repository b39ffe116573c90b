"""Laws in the configuration of a model, so that `save_pretrained` and `from_pretrained` keep them.

The configuration says which laws a model has, and the values that they have when it is written. The
trained ones are in the state dict too, under the names of the modules.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, initialization

from isentropic import laws as laws_module
from isentropic._checks import check_flag, type_error, value_error
from isentropic.integrations.huggingface._calls import NAME
from isentropic.integrations.huggingface._hooks import hooks
from isentropic.integrations.huggingface._layer_law import LAW, LayerLaw, layer_law, set_law
from isentropic.integrations.huggingface._modules import configs_in
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
    for name, extension in _EXTENSIONS.items():
        original = getattr(PreTrainedModel, name)
        if not hasattr(original, "keeps_laws"):
            setattr(PreTrainedModel, name, _extended(original, extension))


def _extended(original: Callable[..., Any], extension: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return extension(original, self, *args, **kwargs)

    method.keeps_laws = True  # type: ignore[attr-defined]
    return method


def _check_implementation(original: Any, model: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
    entry = vars(model.config).get(ENTRY)
    if name == NAME and isinstance(entry, dict):
        given = inspect.signature(original).bind(model, name, *args, **kwargs).arguments
        if given.get("is_init_check"):
            name = _base(entry)  # before the model makes its layers for it
    return original(model, name, *args, **kwargs)


def _post_init(original: Any, model: Any) -> None:
    has_laws = _make_laws(model)  # before the weights are initialized or loaded
    for module in model.modules():
        if isinstance(module, LawModule) and not hasattr(module, _VALUES):
            # Loading replaces the tensors that are not loaded by uninitialized ones.
            tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            values = {name: module._values.get(name, x).detach().clone() for name, x in tensors}
            setattr(module, _VALUES, values)
    original(model)
    if has_laws:
        # Loading in half precision would round the laws.
        model._keep_in_fp32_modules_strict.add(LAW)


def _initialize_weights(original: Any, model: Any) -> None:
    for name, module in model.named_modules():
        if isinstance(module, LawModule) and not getattr(module, "_is_hf_initialized", False):
            for key, value in getattr(module, _VALUES, {}).items():
                _restore(f"{name}.{key}", module._tensor(key), value)
            module.__dict__.update(_is_hf_initialized=True)  # not by the rules of the model
    original(model)


def _restore(name: str, x: torch.Tensor, value: torch.Tensor) -> None:
    """Set a tensor of a LawModule to the value that it was made with, unless it has been loaded."""
    if value.is_meta and not getattr(x, "_is_hf_initialized", False):
        must = (
            "have values that `from_pretrained` can know: they are not in the checkpoint, and the "
            "tensor is made on the meta device (make it with `device='cpu'`)"
        )
        raise value_error(name, must, "none")
    initialization.copy_(x, value)


def _save_pretrained(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    for name, kind in write_entry(model, given.get("state_dict") or {}).items():
        warnings.warn(
            f"The law of {name} cannot be saved: only those of isentropic.laws can, got {kind}.",
            stacklevel=3,
        )
    return original(model, *args, **kwargs)


_EXTENSIONS: dict[str, Callable[..., Any]] = {
    "_check_and_adjust_attn_implementation": _check_implementation,
    "post_init": _post_init,
    "initialize_weights": _initialize_weights,
    "save_pretrained": _save_pretrained,
}


# -------------------------------------------------------------------------- into the configuration


def write_entry(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Write the present laws of a model into its configurations.

    `state` has tensors of the model by name that are saved in place of its own. Returns the names of
    attention modules whose law cannot be described, with the classes of these laws.
    """
    unsaved: dict[str, str] = {}
    for root in _outermost_models(model):
        configs = list(configs_in(root.config))
        for config in configs:
            vars(config).pop(ENTRY, None)
            if NAME in str(vars(config).get(_IMPLEMENTATION)):  # it may be of someone else
                vars(config).pop(_IMPLEMENTATION)
        paths = {module: path for path, module in root.named_modules()}
        written = set()
        for part in _parts(root, configs):
            layers: dict[str, Any] = {}
            for name, module in part.named_modules():
                if not hasattr(module, LAW) or module in written:
                    continue
                written.add(module)
                # The name within the base model is the same with every head on top.
                is_base = part.base_model is part
                name = name if is_base else name.removeprefix(f"{part.base_model_prefix}.")
                prefix = f"{paths[module]}.{LAW}."
                own = {
                    key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)
                }
                law = getattr(module, LAW)
                layers[name] = None if law is None else law.to_dict(own)
            if any(layers.values()):
                base = part.config._attn_implementation
                entry = {"version": _VERSION, "base": base, "layers": layers}
                setattr(part.config, ENTRY, entry)
            unsaved |= {name: x["unsaved"] for name, x in layers.items() if x and "unsaved" in x}
        _require_implementation(root.config)
    return unsaved


def _parts(root: Any, configs: list[Any]) -> list[Any]:
    """The models in a model whose configurations are saved with it, inner ones before outer ones.

    Of models with the same configuration, such as one with a head and its base model, the outermost.
    """
    parts: dict[int, Any] = {}
    for module in root.modules():
        if isinstance(module, PreTrainedModel) and any(module.config is x for x in configs):
            parts.setdefault(id(module.config), module)
    return list(parts.values())[::-1]


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


# -------------------------------------------------------------------------- from the configuration


def _make_laws(model: Any) -> bool:
    """Give a new model the laws that its configuration describes. Say whether there were any."""
    entry = vars(model.config).get(ENTRY)
    if entry is None:
        return False
    made = []
    modules = dict(model.named_modules()) | dict(model.base_model.named_modules())
    for name, description in _layers(entry).items():
        module = modules.get(name)
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


def _from_description(description: Any, module: Any, model: Any, name: str) -> LayerLaw | None:
    if description is None:
        return None
    if "unsaved" in description:
        warnings.warn(
            f"The law {description['unsaved']} of {name} was not saved, and so {name} has standard "
            "attention. Apply the law by `huggingface.use`.",
            stacklevel=5,
        )
        return None
    if not description.keys() <= set(_KEYS):
        must = f"have {', '.join(_KEYS)} of {name!r}"
        raise value_error(f"config.{ENTRY}", must, ", ".join(description))
    law = laws_module.from_dict(description.get("law"))
    trainable = description.get("trainable", False)
    check_flag(trainable=trainable)
    return layer_law(law, description.get("count"), module, model, name, trainable)
