"""Operators for torch.compile: a state is one node of the graph, and so are its gradients.

torch.compile would unroll a loop over tiles for one length. So under torch.compile the generic pass has
a single tile, which takes L×S memory. These operators run the pass over tiles (`torch_gradients`) when
the graph runs.

This module imports PyTorch, and registers the operators when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from isentropic._attention import numpy, triton
from isentropic._attention.generic import Tiles
from isentropic._attention.plan import Arguments, Operands, Plan, finite, prepare
from isentropic._attention.tile import Sums
from isentropic._attention.torch_gradients import INPUTS, backward, forward
from isentropic._loops import is_installed
from isentropic._numerics import lift
from isentropic._triton_launch import gpu_kind
from isentropic.masks import Description, describe, from_description


class Call(NamedTuple):
    """The arguments of the operators. Masks and options have the types that operators accept."""

    query: Tensor  # with all batch axes
    key: Tensor
    value: Tensor | None
    bias: Tensor | None
    factor: Tensor | None  # on the queries, (..., L, 1); None if it is the scale alone
    mask: str
    mask_numbers: Sequence[int]
    mask_arrays: Sequence[Tensor]
    scale: float
    order: float | None
    softcap: float | None
    may_be_differentiated: bool

    def operands(self) -> tuple[Plan, Operands]:
        mask = from_description(Description(self.mask, list(self.mask_numbers), list(self.mask_arrays)))
        heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (self.query, self.key)]
        arguments = Arguments(
            self.query,
            self.key,
            self.value,
            mask,
            self.bias,
            scale=self.scale,
            law=None,
            softcap=self.softcap,
            enable_gqa=heads[0] > heads[1] > 1,
        )
        plan, operands = prepare(arguments)
        return plan, operands if self.factor is None else operands._replace(multiplier=self.factor)

    def uses_triton(self, plan: Plan) -> bool:
        return triton.takes(plan, self.order)

    def state(self, fields: Sequence[Any]) -> Sums:
        """The state of the fields that are not None."""
        rest, has_field = iter(fields), (True, True, self.value is not None, self.order is not None)
        return Sums(*(next(rest) if has else None for has in has_field))


@torch.compiler.assume_constant_result
def transformations() -> tuple[str, ...]:
    """The transformations of torch.func around a call in a graph: Vmap, Grad, Jvp.

    torch.compile traces a new graph if they change.
    """
    levels = torch._C._functorch.get_interpreter_stack() or []
    return tuple(level.key().name for level in levels)


@torch.compiler.assume_constant_result
def has_kernels(device: str) -> bool:
    """Whether a device is a GPU for which Triton compiles the kernels."""
    is_able = torch.device(device).type == "cuda" and is_installed("triton")
    return is_able and gpu_kind(torch, torch.device(device)) != "old"


def state(plan: Plan, operands: Operands, order: float | None) -> Sums:
    """The state in columns, as one node of the graph that is compiled."""
    call = call_of(plan, operands, order)
    return call.state(torch.ops.isentropic.attention_state(*call))


def call_of(plan: Plan, operands: Operands, order: float | None) -> Call:
    """The arguments of the operator for a call."""
    query: Any = operands.query
    query = query.expand(*plan.batch, *query.shape[-2:])
    scale, factor = operands.multiplier, None
    if not isinstance(scale, float):
        scale, factor = 1.0, lift(scale, plan.ndim)
    # Arrays inside of `vmap` do not know it.
    may_be_differentiated = plan.is_differentiated or bool(transformations())
    options = (scale, order, plan.softcap, may_be_differentiated)
    inputs = (query, *operands[1:4], factor)
    return Call._make((*inputs, *describe(operands.mask), *options))


_TENSORS = (*INPUTS, "factor")
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor? value, Tensor? bias, Tensor? factor, "
    "str mask, SymInt[] mask_numbers, Tensor[] mask_arrays, "
    "float scale, float? order, float? softcap, bool may_be_differentiated"
)


@torch.library.custom_op(
    "isentropic::attention_state", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]"
)
def _state(*arguments: Any) -> list[Tensor]:
    # Contiguous, like the tensors with which PyTorch traces the operator.
    return [x.contiguous() for x in _forward(Call(*arguments)) if x is not None]


def _forward(call: Call) -> Sums:
    """The state in columns, relative to the maximum."""
    (plan, operands), order = call.operands(), call.order
    if call.uses_triton(plan):
        return triton.sums(plan, operands, order)
    # The backward pass needs the weights of PyTorch's forward pass, with the same rounding errors.
    if call.may_be_differentiated or numpy.unsupported_reason(plan, order, False) is not None:
        return forward(Tiles.of(plan, operands), order)
    state = numpy.state(plan, finite(plan, operands), 1.0 if order is None else order, True)
    return state._replace(weighted_score=None) if order is None else state


@_state.register_fake
def _(*arguments: Any) -> list[Tensor]:
    call = Call(*arguments)
    column = (*call.query.shape[:-1], 1)
    shapes = [column, column]
    if call.value is not None:
        shapes.append((*column[:-1], call.value.shape[-1]))
    if call.order is not None:
        shapes.append(column)
    inputs = (call.query, call.key, call.value)
    is_double = any(x is not None and x.dtype == torch.float64 for x in inputs)
    dtype = torch.float64 if is_double else torch.float32
    return [call.query.new_empty(shape, dtype=dtype) for shape in shapes]


@_state.register_vmap
def _(info: Any, axes: Any, *arguments: Any) -> tuple[list[Tensor], list[int]]:
    """The results for a batch of `torch.vmap`, and their batch axes.

    The batch is one more batch axis of attention. With arrays in the mask the elements are computed one
    by one, since such arrays have their batch axes at different places.
    """
    size, operator = info.batch_size, torch.ops.isentropic.attention_state

    def element(x: Any, axis: int | None, i: int) -> Any:
        return x if axis is None else x.select(axis, i)

    def with_batch(x: Any, axis: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)

    if Call(*arguments).mask_arrays:
        each = [operator(*tree_map(partial(element, i=i), arguments, axes)) for i in range(size)]
        results = [torch.stack(parts) for parts in zip(*each, strict=True)]
    else:
        results = operator(*tree_map(with_batch, arguments, axes))
    return results, [0] * len(results)


@torch.library.custom_op(
    "isentropic::attention_gradients",
    mutates_args=(),
    schema=f"(Tensor[] fields, Tensor?[] upstream, bool[] wanted, {_ARGUMENTS}) -> Tensor[]",
)
def _gradients(
    fields: list[Tensor], upstream: list[Tensor | None], wanted: list[bool], *arguments: Any
) -> list[Tensor]:
    call, names = Call(*arguments), _names(wanted)
    (plan, operands), state = call.operands(), call.state(fields)
    # The kernels have no gradient of a bias.
    if "bias" not in names and call.uses_triton(plan):
        gradients = triton.gradients_of_sums(plan, operands, call.order, state, call.state(upstream))
        return [gradients[name].contiguous() for name in names]
    tiles = Tiles.of(plan, operands)
    # The gradient of the factor follows from that of the scaled queries.
    of_tiles = {"query" if name == "factor" else name for name in names}
    gradients = backward(tiles, call.order, state, call.state(upstream), of_tiles)
    if "query" in of_tiles:  # of the scaled queries
        scaled, factor = gradients["query"], operands.multiplier / (call.softcap or 1.0)
        gradients["query"] = (scaled * factor).to(call.query.dtype)
        if call.factor is not None:
            products = (scaled * tiles.operands.query).sum(-1, keepdim=True) / (call.softcap or 1.0)
            gradients["factor"] = products.sum_to_size(call.factor.shape).to(call.factor.dtype)
    if tiles.operands.nonfinite is not None:
        # The gradient of a number that was replaced is 0.
        for name in {"query", "key", "value"} & set(names):
            gradients[name] = gradients[name].where(getattr(call, name).isfinite(), 0.0)
    return [gradients[name].contiguous() for name in names]


@_gradients.register_fake
def _(fields: Any, upstream: Any, wanted: list[bool], *arguments: Any) -> list[Tensor]:
    # PyTorch traces with the shapes alone.
    inputs = Call(*arguments)._asdict()
    return [inputs[name].new_empty(inputs[name].shape) for name in _names(wanted)]


def _names(wanted: Sequence[bool]) -> list[str]:
    return [name for name, is_wanted in zip(_TENSORS, wanted, strict=True) if is_wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    call = Call(*inputs)
    ctx.set_materialize_grads(False)
    # PyTorch must save the tensors. The call keeps the rest.
    lists = (call[:5], call.mask_arrays, output)
    ctx.save_for_backward(*(x for tensors in lists for x in tensors))
    ctx.lengths = [len(tensors) for tensors in lists]
    nothing: dict[str, Any] = dict.fromkeys(_TENSORS)
    ctx.call = call._replace(mask_arrays=())._replace(**nothing)


def _differentiate(ctx: Any, upstream: list[Tensor | None]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    tensors, mask_arrays, fields = ([next(saved) for _ in range(n)] for n in ctx.lengths)
    call = ctx.call._replace(mask_arrays=mask_arrays)
    call = call._replace(**dict(zip(_TENSORS, tensors, strict=True)))
    wanted = list(ctx.needs_input_grad[: len(_TENSORS)])
    found = iter(torch.ops.isentropic.attention_gradients(fields, upstream, wanted, *call))
    gradients = [next(found) if is_wanted else None for is_wanted in wanted]
    # PyTorch treats an empty list as a list of tensors, and expects a list of gradients for it.
    number_gradients: list[None] | None = None if call.mask_numbers else []
    mask_gradients = None, number_gradients, [None] * len(mask_arrays)
    options = Call._fields[Call._fields.index("scale") :]
    return *gradients, *mask_gradients, *[None] * len(options)


_state.register_autograd(_differentiate, setup_context=_save)
