"""The law of an attention module, as a module in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Real
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from isentropic._checks import check_choice, is_array, value_error
from isentropic._namespace import to_numpy
from isentropic.integrations.huggingface._modules import layer_device, n_heads
from isentropic.integrations.torch import LawModule
from isentropic.laws._law import Law, check_law

COUNTS = ("keys", "positions")
# Fields that are never trained. They say where a law acts, not how strongly, and most have a range that
# training could leave.
_FIXED = frozenset({"base", "head_dim", "lengths", "minimum", "period", "shift"})


class LayerLaw(LawModule):
    """A law, what its n counts, and the values that its tensors start from.

    Tensors that require gradients belong to the caller, unless the law is `trainable`.
    """

    count: str
    trainable: bool
    initial: Law  # with NumPy arrays, except for the tensors of the caller

    def __init__(self, law: Law, count: str, trainable: bool, like: torch.Tensor) -> None:
        super().__init__(_with_tensors(law, trainable, like), borrow=not trainable)
        # Not setattr: a field of the law may have the same name.
        self.__dict__.update(count=count, trainable=trainable, initial=law)
        # Transformers may initialize a model again, but only modules without this flag.
        self._is_hf_initialized = like.device.type != "meta"

    def values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors of the module, with their initial values."""
        for name, x in (*self.named_parameters(), *self.named_buffers()):
            yield x, torch.from_numpy(attrgetter(name)(self.initial))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = [(x, x.is_meta) for x, _ in self.values()]
        super()._apply(fn, recurse)
        with torch.no_grad():
            for (old, was_meta), (x, value) in zip(before, self.values(), strict=True):
                # `to_empty` loses values. Those of buffers never change, and are in no state dict.
                is_new = was_meta or (x is not old and not isinstance(x, torch.nn.Parameter))
                if is_new and not x.is_meta:
                    x.copy_(value)
        return self

    def reset_parameters(self) -> None:
        """Set all tensors to their initial values."""
        with torch.no_grad():
            for x, value in self.values():
                x.copy_(value)

    def to_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The law with its present values, for JSON.

        `state` has tensors by name, instead of parameters of which this process has only a part.
        """
        law = self._present({**dict(self.named_parameters()), **state}).to_dict()
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
            return _with_values(self.initial, values)
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
        initial = _with_arrays_to_train(law, heads if trainable == "head" else None)
        if not _is_trainable(initial):
            must = "have a parameter that can be trained (`laws.scaled(law, 1.0)` has one)"
            raise value_error(name, must, repr(law))
    else:
        initial = law
    for _, shape, _ in initial._named_shapes():
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
    return LayerLaw(initial._with_arrays(checked_parameter), count, bool(trainable), like)


def _with_arrays_to_train(law: Law, heads: int | None) -> Law:
    """The law with NumPy arrays as the parameters to train: of each head, if `heads` are given."""
    changes: dict[str, Any] = {}
    for name, x in vars(law).items():
        if isinstance(x, Law):
            changes[name] = _with_arrays_to_train(x, heads)
        elif name not in _FIXED and (is_array(x) or isinstance(x, (Real, tuple))):
            value = to_numpy(x) if is_array(x) else np.asarray(x, dtype=np.float64)
            knots = value.shape[-1:] if name == "factors" else ()
            shape = value.shape[: value.ndim - len(knots)]
            # Fully sharded data parallelism refuses parameters without axes.
            shape = np.broadcast_shapes(shape, (1,) if heads is None else (heads,))
            changes[name] = np.broadcast_to(value, (*shape, *knots)).copy()
    return replace(law, **changes)


def _with_values(law: Law, values: Mapping[str, Any], prefix: str = "") -> Law:
    changes: dict[str, Any] = {}
    for name, x in vars(law).items():
        if isinstance(x, Law):
            changes[name] = _with_values(x, values, f"{prefix}{name}.")
        else:
            changes[name] = values.get(prefix + name, x)
    return replace(law, **changes)


def _is_trainable(law: Law) -> bool:
    return any(
        _is_trainable(x) if isinstance(x, Law) else name not in _FIXED and is_array(x)
        for name, x in vars(law).items()
    )


def _with_tensors(law: Law, trainable: bool, like: torch.Tensor) -> Law:
    """The law with parameters or tensors in place of NumPy arrays."""
    changes: dict[str, Any] = {}
    for name, x in vars(law).items():
        if isinstance(x, Law):
            changes[name] = _with_tensors(x, trainable, like)
        elif is_array(x) and not isinstance(x, torch.Tensor):
            is_parameter = trainable and name not in _FIXED
            # No state dict would give a buffer on the meta device its values.
            device = like.device if is_parameter or not like.is_meta else "cpu"
            x = torch.tensor(x, device=device, dtype=like.dtype)
            changes[name] = torch.nn.Parameter(x) if is_parameter else x
    return replace(law, **changes)
