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

from isentropic._attention import numpy
from isentropic._attention.generic import Tiles
from isentropic._attention.plan import Arguments, Operands, Plan, prepare
from isentropic._attention.tile import Sums
from isentropic._attention.torch_gradients import INPUTS, backward, forward, state_of_fields
from isentropic._numerics import lift
from isentropic.masks import Description, describe, from_description


class Call(NamedTuple):
    """The arguments of the operators. Masks and options have the types that operators accept."""

    query: Tensor  # finite and scaled, with all batch axes
    key: Tensor
    value: Tensor | None
    bias: Tensor | None
    query_nan: Tensor | None  # NaN for the queries that were not finite; None without a mask
    mask: str
    mask_numbers: Sequence[int]
    mask_arrays: Sequence[Tensor]
    order: float | None
    softcap: float | None
    block_size: int | None
    may_be_differentiated: bool

    def tiles(self) -> Tiles:
        mask = from_description(Description(self.mask, list(self.mask_numbers), list(self.mask_arrays)))
        heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (self.query, self.key)]
        arguments = Arguments(
            self.query,
            self.key,
            self.value,
            mask,
            self.bias,
            scale=1.0,
            law=None,
            softcap=self.softcap,
            enable_gqa=heads[0] > heads[1] > 1,
            block_size=self.block_size,
        )
        plan, operands = prepare(arguments)  # replaces nonfinite keys and values, if there are any
        return Tiles(plan, self._with_query_nan(plan, operands), operands.query)

    def _with_query_nan(self, plan: Plan, operands: Operands) -> Operands:
        if self.query_nan is None or (plan.is_readable and not self.query_nan.isnan().any()):
            return operands
        if operands.nonfinite is None:
            key_nan = lift(self.query.new_zeros(plan.n_keys), plan.ndim)
            return operands._replace(nonfinite=(self.query_nan, key_nan))
        query_nan, key_nan = operands.nonfinite
        return operands._replace(nonfinite=(self.query_nan + query_nan, key_nan))

    def state(self, fields: Sequence[Any]) -> Sums:
        return state_of_fields(fields, self.value is not None, self.order)


@torch.compiler.assume_constant_result
def transformations() -> tuple[str, ...]:
    """The transformations of torch.func around a call in a graph: Vmap, Grad, Jvp.

    torch.compile traces a new graph if they change.
    """
    levels = torch._C._functorch.get_interpreter_stack() or []
    return tuple(level.key().name for level in levels)


def state(plan: Plan, operands: Operands, order: float | None) -> Sums:
    """The state in columns, as one node of the graph that is compiled."""
    call = call_of(plan, operands, order)
    return call.state(torch.ops.isentropic.attention_state(*call))


def call_of(plan: Plan, operands: Operands, order: float | None) -> Call:
    """The arguments of the operator for a call."""
    query: Any = Tiles.of(plan, operands).query  # so that autograd differentiates law and scale
    query = query.expand(*plan.batch, *query.shape[-2:])
    key, value, query_nan = operands.key, operands.value, None
    if operands.raw_key_value is not None and operands.nonfinite is not None:
        # The operator can read their values. So copies are made only of those that are not finite.
        (key, value), (query_nan, _) = operands.raw_key_value, operands.nonfinite
    inputs = (query, key, value, operands.bias, query_nan)
    # Arrays inside of `vmap` do not know it.
    may_be_differentiated = plan.is_differentiated or bool(transformations())
    options = (order, plan.softcap, plan.block_size, may_be_differentiated)
    return Call._make((*inputs, *describe(operands.mask), *options))


_TENSORS = (*INPUTS, "query_nan")
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor? value, Tensor? bias, Tensor? query_nan, "
    "str mask, SymInt[] mask_numbers, Tensor[] mask_arrays, "
    "float? order, float? softcap, SymInt? block_size, bool may_be_differentiated"
)


@torch.library.custom_op(
    "isentropic::attention_state", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]"
)
def _state(*arguments: Any) -> list[Tensor]:
    call = Call(*arguments)
    return [x.contiguous() for x in _forward(call, call.tiles()) if x is not None]


def _forward(call: Call, tiles: Tiles) -> Sums:
    """The state in columns, relative to the maximum."""
    plan, order = tiles.plan, call.order
    # The backward pass needs the weights of PyTorch's forward pass, with the same rounding errors.
    if call.may_be_differentiated or numpy.unsupported_reason(plan, order, False) is not None:
        return forward(tiles, order)
    # The queries are divided by the soft cap already.
    operands = tiles.operands._replace(multiplier=1.0 if plan.softcap is None else plan.softcap)
    state = numpy.state(plan, operands, 1.0 if order is None else order, True)
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
    return [call.query.new_empty(shape) for shape in shapes]


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
    call = Call(*arguments)
    names, tiles = _names(wanted), call.tiles()
    gradients = backward(tiles, call.order, call.state(fields), call.state(upstream), names)
    if tiles.operands.nonfinite is not None:
        # The gradient of a number that was replaced is 0.
        inputs = {"key": call.key, "value": call.value}
        for name in inputs.keys() & names:
            gradients[name] = gradients[name].where(inputs[name].isfinite(), 0.0)
    return [gradients[name].contiguous() for name in names]


@_gradients.register_fake
def _(fields: Any, upstream: Any, wanted: list[bool], *arguments: Any) -> list[Tensor]:
    # PyTorch traces with the shapes alone.
    inputs = Call(*arguments)._asdict()
    return [inputs[name].new_empty(inputs[name].shape) for name in _names(wanted)]


def _names(wanted: Sequence[bool]) -> list[str]:
    return [name for name, is_wanted in zip(INPUTS, wanted, strict=True) if is_wanted]


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
    wanted = list(ctx.needs_input_grad[: len(INPUTS)])
    found = iter(torch.ops.isentropic.attention_gradients(fields, upstream, wanted, *call))
    gradients = [next(found) if is_wanted else None for is_wanted in wanted]
    # PyTorch treats an empty list as a list of tensors, and expects a list of gradients for it.
    number_gradients: list[None] | None = None if call.mask_numbers else []
    mask_gradients = None, number_gradients, [None] * len(mask_arrays)
    return *gradients, None, *mask_gradients, None, None, None, None


_state.register_autograd(_differentiate, setup_context=_save)
