"""The law of an attention module, as a module in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import torch

from isentropic._checks import check_choice, is_array, value_error
from isentropic._namespace import to_numpy
from isentropic.integrations.huggingface._modules import layer_device, n_heads
from isentropic.integrations.torch import LawModule
from isentropic.laws._law import Law, check_law

LawAndCount: TypeAlias = tuple[Law | None, str]  # a law, and what its n counts

LAW = "isentropic_law"  # the attribute of an attention module that holds a LayerLaw, or None
COUNTS = ("keys", "positions")
# Fields that are never trained. They say where a law acts, not how strongly, and most have a range that
# training could leave.
_FIXED = frozenset({"base", "head_dim", "lengths", "minimum", "period", "shift"})


def law_of(module: torch.nn.Module) -> LawAndCount:
    """The law of an attention module, with the present values of its parameters."""
    held = getattr(module, LAW, None)
    return (None, "keys") if held is None else (held(), held.count)


def set_law(module: torch.nn.Module, law: torch.nn.Module | None) -> None:
    """Give an attention module a LayerLaw, or None for standard attention."""
    # Where a module had this name before, None would stay among its modules: loading a state dict would
    # then ignore the tensors of a law.
    module._modules.pop(LAW, None)
    setattr(module, LAW, law)


class LayerLaw(LawModule):
    """A law, what its n counts, and the values that its tensors start from.

    Tensors that require gradients belong to the caller, unless the law is `trainable`.
    """

    count: str
    trainable: bool
    initial: Law  # with NumPy arrays, except for the tensors of the caller

    def __init__(self, law: Law, count: str, trainable: bool, like: torch.Tensor) -> None:
        def tensor(name: str, x: Any) -> Any:
            if not is_array(x) or isinstance(x, torch.Tensor):
                return x
            x = torch.tensor(x, device="cpu", dtype=like.dtype)
            return torch.nn.Parameter(x) if trainable and not _is_fixed(name) else x

        super().__init__(_changed(law, tensor), borrow=not trainable)
        # The module keeps the values of what it moves to the meta device, for `to_empty`. But buffers
        # stay on the CPU then: they are in no state dict that could fill them.
        self._apply(
            lambda x: x if like.is_meta and not isinstance(x, torch.nn.Parameter) else x.to(like.device)
        )
        # Not setattr: a field of the law may have the same name.
        self.__dict__.update(count=count, trainable=trainable, initial=law)
        # Transformers may initialize a model again, but only modules without this flag.
        self._is_hf_initialized = like.device.type != "meta"

    def to_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The law with its present values, for JSON; or its class, if it is none of `isentropic.laws`.

        `state` has tensors by name, instead of parameters of which this process has only a part.
        """
        try:
            law = self._present({**dict(self.named_parameters()), **state}).to_dict()
        except TypeError:
            return {"unsaved": self._kind.__name__}
        return {"law": law, "count": self.count} | ({"trainable": True} if self.trainable else {})

    def _present(self, tensors: Mapping[str, torch.Tensor]) -> Law:
        """The law with the values of tensors: the initial ones where those are unknown or invalid."""
        values = {}
        for name, x in tensors.items():
            initial = torch.from_numpy(attrgetter(name)(self.initial))
            is_part = x.shape != initial.shape or hasattr(x, "full_tensor")  # by sharding
            if not (is_part or x.is_meta or torch.equal(x.detach().cpu(), initial.to(x.dtype))):
                values[name] = x.detach().double().cpu().numpy()
        try:
            return _changed(self.initial, values.get)
        except ValueError:  # the state dict is saved nevertheless
            return self.initial


def layer_law(
    law: Law, count: str, module: Any, model: Any, name: str, trainable: bool | str = False
) -> LayerLaw:
    """The law of an attention module, in the precision of the model but not below float32."""
    check_law(law)
    check_choice("count", count, COUNTS)
    heads = n_heads(module)
    if trainable:
        if trainable == "head" and heads is None:
            must = "be True for attention layers that do not say how many heads they have"
            raise value_error("trainable", must, f"'head' with {type(module).__name__}")
        law = _with_arrays_to_train(name, law, heads if trainable == "head" else None)
    for _, shape, has_query_axis in law._named_shapes():
        if has_query_axis:
            raise value_error(name, "have no parameter with one number for each query", shape)
        if heads is not None and shape not in ((), (1,), (heads,)):
            must = f"have numbers as parameters, or one per head, ({heads},)"
            raise value_error(name, must, shape)
    device = layer_device(model, module)
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32

    def checked_parameter(x: Any) -> Any:
        if trainable or not getattr(x, "requires_grad", False):
            return to_numpy(x)
        # A copy on another device would not be trained.
        if x.device != device:
            raise value_error(name, f"be on the device of the layer ({device})", x.device)
        return x

    like = torch.empty(0, device=device, dtype=dtype)
    return LayerLaw(law._with_arrays(checked_parameter), count, bool(trainable), like)


def _with_arrays_to_train(argument: str, law: Law, heads: int | None) -> Law:
    """The law with NumPy arrays as the parameters to train: of each head, if `heads` are given."""
    to_train = []

    def array(name: str, x: Any) -> Any:
        is_numbers = is_array(x) or (isinstance(x, (Real, tuple)) and not isinstance(x, bool))
        if _is_fixed(name) or not is_numbers:
            return x
        to_train.append(name)
        value = to_numpy(x) if is_array(x) else np.asarray(x, dtype=np.float64)
        knots = value.shape[-1:] if name.endswith("factors") else ()
        shape = value.shape[: value.ndim - len(knots)]
        # Fully sharded data parallelism refuses parameters without axes.
        shape = np.broadcast_shapes(shape, (1,) if heads is None else (heads,))
        return np.broadcast_to(value, (*shape, *knots)).copy()

    changed = _changed(law, array)
    if not to_train:
        must = "have a parameter that can be trained (`laws.scaled(law, 1.0)` has one)"
        raise value_error(argument, must, repr(law))
    return changed


def _is_fixed(name: str) -> bool:
    return name.rpartition(".")[2] in _FIXED


def _changed(law: Law, change: Callable[[str, Any], Any], prefix: str = "") -> Law:
    """The law with other fields, which ``change(name, x)`` gives. Inner laws have names with dots."""
    changes = {
        name: change(prefix + name, x)
        if not isinstance(x, Law)
        else _changed(x, change, f"{prefix}{name}.")
        for name, x in law._named_values().items()
    }
    return replace(law, **changes)
