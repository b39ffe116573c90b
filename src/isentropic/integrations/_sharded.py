"""Attention over a sequence that is sharded over devices, in JAX and in PyTorch.

Each device holds a shard: L queries, S keys and their values. Shards are contiguous, in the order of
the devices, and have equal shapes. In a ring of P devices, every block of keys meets every block of
queries after P − 1 hops to the next neighbor, and the attention states of the blocks are merged. In
JAX keys and values travel; in PyTorch queries and states do.

In the backward pass everything travels once more, and each block of logits is computed again. Relative
to the final maximum m, the sums Σ e^{s−m}, Σ e^{s−m} v and Σ e^{s−m}(s − m) of a state are plain sums
over keys. So the contribution of each block to the gradient is independent of the other blocks, and a
device stores only its shard and m. Gradients are rounded to half precision only when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Any

from isentropic._attention.functions import attention_state, scale_queries
from isentropic._attention.state import AttentionState, merge_states
from isentropic._checks import (
    check_broadcastable,
    check_flag,
    check_floating,
    check_ndim,
    type_error,
    value_error,
)
from isentropic._entropy import shift_moment
from isentropic._loops import Block
from isentropic._namespace import (
    Array,
    ArrayT,
    Sliced,
    accumulator,
    is_jax,
    is_torch,
    namespace,
    present,
)
from isentropic._numerics import replace_infinite_minimum
from isentropic.laws._law import DEFAULT_LAW, Constant, Law
from isentropic.masks import Frame, Mask, as_mask, causal


def ring_attention_state(
    query: Sliced[ArrayT],
    key: Array,
    value: Array | None = None,
    *,
    axis_name: Hashable,
    mask: Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    enable_gqa: bool = False,
) -> AttentionState[ArrayT]:
    """Attention inside `jax.shard_map`, where each device holds a shard of the sequence.

    It is equivalent to `isentropic.attention_state` on the whole sequence. Keys and values travel
    around the ring of devices.

    Parameters
    ----------
    query : array (..., L, E)
    key : array (..., S, E)
    value : array (..., S, Ev), optional
        The shards of this device. The axes ``...`` broadcast. Without values the state has no output,
        and only keys travel.
    axis_name : str
        The mesh axis over which queries, keys and values are sharded, contiguously.
    mask : Mask, optional
        A mask of the whole sequence, such as ``masks.packed(cu_seqlens)``. All devices have the arrays
        in it, which are of the whole sequence too.
    is_causal : bool
        Whether a query sees only the keys up to its own position in the whole sequence, aligned
        bottom-right as in `isentropic.attention`: the last query of the last device sees every key.
    scale, law, n_keys, softcap, sinks, enable_gqa
        As in `isentropic.attention`. `n_keys` counts keys of the whole sequence.

    Returns
    -------
    AttentionState
        The state of the queries of this device over all keys, in float32, or in float64 for float64
        inputs. ``state.output()`` is the shard of the output, (..., L, Ev).

    Raises
    ------
    TypeError
        For arrays that are not JAX arrays, or are not floating-point.
    ValueError
        For shapes that do not fit, values out of range, or an axis that the surrounding
        `jax.shard_map` does not have.

    Notes
    -----
    P devices take P hops to the next neighbor, each with one shard of keys and values. The size of the
    compiled program does not depend on P. Memory is O(L + S) per device, in the backward pass too.
    Blocks of which a device sees no key are skipped where numbers in the mask tell that. But under a
    causal mask the call takes as long as on the last device, which sees all blocks.

    Only reverse-mode differentiation is supported. It treats ``maximum`` as a constant. This is exact
    for the output, the entropy and the log-normalizer, because they do not depend on the number that is
    subtracted from the logits.

    References
    ----------
    Liu, Zaharia & Abbeel 2023 (arXiv 2310.01889).

    Examples
    --------
    >>> import jax, numpy as np
    >>> from isentropic.integrations.jax import ring_attention_state
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("sequence",))
    >>> spec = jax.P(None, "sequence")  # (heads, positions, features)
    >>> @jax.jit
    ... @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    ... def attend(q, k, v):
    ...     state = ring_attention_state(q, k, v, axis_name="sequence", is_causal=True)
    ...     return state.output(), state.entropy()
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 8, 128, 64)).astype("float32")
    >>> [x.shape for x in attend(q, k, v)]
    [(8, 128, 64), (8, 128)]
    """
    block = _checked_block("JAX", is_jax, query=query, key=key, value=value)
    rank, size = _axis(axis_name)

    shards = _Shards(
        size, query.shape[-2], key.shape[-2], _whole_mask(mask, is_causal), scale, softcap, enable_gqa
    )
    scaled = shards.scale_queries(rank, query, block, law, n_keys)
    return _with_sinks(_ring_of_keys(shards, axis_name, scaled, block), sinks, scaled)


def distributed_attention_state(
    query: Sliced[ArrayT],
    key: Array,
    value: Array | None = None,
    *,
    group: Any = None,
    mask: Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    enable_gqa: bool = False,
) -> AttentionState[ArrayT]:
    """Attention over `torch.distributed`, where each process holds a shard of the sequence.

    It is equivalent to `isentropic.attention_state` on the whole sequence. Keys and values stay on
    their process. Queries travel around the ring with their states, and return.

    Parameters
    ----------
    query : tensor (..., L, E)
    key : tensor (..., S, E)
    value : tensor (..., S, Ev), optional
        The shards of this process, of the same shapes in all processes. The axes ``...`` broadcast.
        Without values the state has no output.
    group : torch.distributed.ProcessGroup, optional
        The processes that hold the shards, in the order of their ranks; by default all processes.
    mask, is_causal, scale, law, n_keys, softcap, sinks, enable_gqa
        As in `isentropic.integrations.jax.ring_attention_state`.

    Returns
    -------
    AttentionState
        The state of the queries of this process over all keys, in float32, or in float64 for float64
        inputs. ``state.output()`` is the shard of the output, (..., L, Ev). Its ``maximum`` has no
        gradient: the output, the entropy and the log-normalizer do not depend on it.

    Raises
    ------
    TypeError
        For arrays that are not PyTorch tensors, or are not floating-point, and for a group that this
        process does not belong to.
    ValueError
        For shapes that do not fit, values out of range, or a call before ``init_process_group``.

    Notes
    -----
    All processes of the group must call this function, and all must run its backward pass, because each
    waits for its neighbors. The gradient with respect to shared tensors, such as the parameters of a
    law, is the sum of the gradients of the processes.

    On P processes the queries take P − 1 hops and the states take P. Transfers overlap with the
    computation on the block that has arrived. Memory is O(L + S) per process, in the backward pass too.
    Only first derivatives are supported.

    References
    ----------
    Liu, Zaharia & Abbeel 2023 (arXiv 2310.01889), where keys and values travel.

    Examples
    --------
    This example has a single process. ``torchrun`` starts several, and gives each its rank.

    >>> import torch, torch.distributed as dist
    >>> from isentropic.integrations.torch import distributed_attention_state
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k, v = torch.randn(3, 8, 128, 64)
    >>> state = distributed_attention_state(q, k, v, is_causal=True)
    >>> state.output().shape, state.entropy().shape
    (torch.Size([8, 128, 64]), torch.Size([8, 128]))
    >>> dist.destroy_process_group()
    """
    block = _checked_block("PyTorch", is_torch, query=query, key=key, value=value)
    rank, size = _rank_and_size(group)

    shards = _Shards(
        size, query.shape[-2], key.shape[-2], _whole_mask(mask, is_causal), scale, softcap, enable_gqa
    )
    scaled = shards.scale_queries(rank, query, block, law, n_keys)
    state = AttentionState(*_ring_of_queries().apply(shards, group, scaled, *block))
    return _with_sinks(state, sinks, scaled)


def _whole_mask(mask: Any, is_causal: bool) -> Mask | None:
    check_flag(is_causal=is_causal)
    if mask is None:
        return causal() if is_causal else None
    mask = as_mask(mask)
    return mask & causal() if is_causal else mask


def _with_sinks(state: AttentionState, sinks: Array | None, query: Array) -> AttentionState:
    """The state with the sinks, each a key whose value is 0."""
    if sinks is None:
        return state
    xp = namespace(query=query, sinks=sinks)
    check_floating(xp, sinks=sinks)
    shape = state.normalizer.shape
    check_broadcastable("sinks", sinks.shape, shape[:-1])
    logits = xp.broadcast_to(xp.astype(sinks, state.normalizer.dtype)[..., None], shape)
    value = state.weighted_value
    zeros = None if value is None else xp.zeros_like(value)
    score = xp.zeros_like(state.normalizer)
    return merge_states(state, AttentionState(logits, xp.ones_like(score), zeros, score))


class _Part(Mask):
    """The mask of a block of queries and a block of keys of a whole sequence."""

    mask: Mask
    first_query: Any
    first_key: Any
    n_queries: int
    n_keys: int

    def check(self, batch: tuple[int, ...] | None, n_queries: int, n_keys: int) -> None:
        self.mask.check(batch, self.n_queries, self.n_keys)

    def _shifted(self, frame: Frame, rows: Block) -> tuple[Frame, Block]:
        whole = frame.replaced(n_queries=self.n_queries, n_keys=self.n_keys)
        return whole, (rows[0] + self.first_query, rows[1])

    def block(self, frame: Frame, rows: Block, columns: Block) -> Array:
        return self.mask.block(*self._shifted(frame, rows), (columns[0] + self.first_key, columns[1]))

    @property
    def is_contiguous(self) -> bool:
        return self.mask.is_contiguous

    def interval(self, frame: Frame, rows: Block) -> Any:
        ends = self.mask.interval(*self._shifted(frame, rows))
        return ends and tuple(x - self.first_key for x in ends)

    def reach(self, frame: Frame, rows: Block) -> Any:
        return self._relative(self.mask.reach, frame, rows, super().reach(frame, rows))

    def fully_visible(self, frame: Frame, rows: Block) -> Any:
        return self._relative(self.mask.fully_visible, frame, rows, super().fully_visible(frame, rows))

    def _relative(self, of_mask: Callable[..., Any], frame: Frame, rows: Block, unknown: Any) -> Any:
        if not isinstance(self.first_query, int):  # a number of a device of JAX
            return unknown
        return tuple(x - self.first_key for x in of_mask(*self._shifted(frame, rows)))


@dataclass(frozen=True)
class _Shards:
    """The sizes of the shards of a sequence, and attention of one block of queries to one of keys.

    The queries are multiplied by the law beforehand.
    """

    size: int
    n_queries: int  # in one shard
    n_keys: int  # in one shard
    mask: Mask | None  # of the whole sequence
    scale: float | None
    softcap: float | None
    enable_gqa: bool

    def part(self, query_shard: Any, key_shard: Any) -> Mask | None:
        """The mask of a block of queries and a block of keys."""
        if self.mask is None:
            return None
        first = query_shard * self.n_queries, key_shard * self.n_keys
        return _Part(self.mask, *first, self.n_queries * self.size, self.n_keys * self.size)

    def scale_queries(
        self, rank: Any, query: Array, block: tuple[Array, ...], law: Law | None, n_keys: Any
    ) -> Array:
        """The queries times the law of the number of keys that they see, in the dtype to compute in."""
        xp = namespace(query=query)
        total = self.n_keys * self.size
        if n_keys is None and self.mask is not None:
            # The law counts keys of the whole sequence, of which a block of keys knows only its own.
            part = self.part(rank, 0)
            assert part is not None
            n_keys = part.visible_count(self.n_queries, total, like=query)
        # Before the law multiplies, as its factor times a query would be rounded to half precision.
        query = xp.astype(query, accumulator(xp, xp.result_type(query, *block)))
        # `scale_queries` takes no None.
        law = Constant(1.0) if law is None else law
        return scale_queries(query, total if n_keys is None else n_keys, law=law)

    def any_visible(self, xp: ModuleType, query_shard: Any, key_shard: Any) -> Any:
        """Whether some query of a shard may see a key of another, by numbers in the mask."""
        if self.mask is None:
            return True
        whole = Frame(xp, None, self.n_queries * self.size, self.n_keys * self.size)
        first, end = self.mask.reach(whole, (query_shard * self.n_queries, self.n_queries))
        start = key_shard * self.n_keys
        return (first < start + self.n_keys) & (end > start)

    def state(
        self, query: Array, key: Array, value: Array | None = None, *, shards: tuple[Any, Any] | None
    ) -> AttentionState:
        """The state of a block of queries over a block of keys, by the numbers of both shards."""
        return attention_state(
            query, key, value, mask=None if shards is None else self.part(*shards), scale=self.scale,
            law=None, softcap=self.softcap, enable_gqa=self.enable_gqa,
        )  # fmt: skip

    def empty_state(self, query: Array, *block: Array) -> AttentionState:
        """The state of queries over no keys."""
        # By the same function, so that it has the shapes and dtypes of the other states.
        return self.state(query, *(x[..., :0, :] for x in block), shards=None)

    def sums(self, query: Array, *block: Array, shards: Any, maximum: Array) -> tuple[Array, ...]:
        """The other fields of the state relative to a given `maximum`. They are sums over keys."""
        state = self.state(query, *block, shards=shards)
        xp = namespace(query=query)
        # Where a query sees no key of the block, the shift is −∞ and the weight 0.
        shift = state.maximum - replace_infinite_minimum(xp, maximum)
        weight = xp.exp(shift)
        assert state.weighted_score is not None
        score = shift_moment(xp, state.weighted_score, state.normalizer, shift, 1.0)
        if state.weighted_value is None:
            return weight * state.normalizer, score
        return weight * state.normalizer, weight[..., None] * state.weighted_value, score


def _ring_of_keys(
    shards: _Shards, axis_name: Hashable, query: Array, block: tuple[Array, ...]
) -> AttentionState:
    """The state of the queries of this device. Keys and values travel around the ring."""
    import jax

    # The arrays of the mask are arguments, because a rule of differentiation keeps no outer tracers.
    leaves, structure = jax.tree.flatten(shards.mask)

    def with_mask(leaves: Any) -> tuple[_Shards, Callable[..., Any]]:
        whole = replace(shards, mask=jax.tree.unflatten(structure, leaves))
        return whole, partial(_circulate_blocks, whole, axis_name)

    @jax.custom_vjp
    def ring(query: Any, block: Any, leaves: Any) -> AttentionState:
        return forward(query, block, leaves)[0]

    def forward(query: Any, block: Any, leaves: Any) -> tuple[AttentionState, Any]:
        shards, circulate = with_mask(leaves)

        def visit(state: Any, block: Any, pair: Any) -> Any:
            return merge_states(state, shards.state(query, *block, shards=pair)), block

        empty = _vary_over_same_axes(shards.empty_state(query, *block), query)
        state, _ = circulate(visit, empty, block)
        return state, (query, block, leaves, state.maximum)

    def backward(residuals: Any, cotangent: AttentionState) -> tuple[Any, Any, None]:
        query, block, leaves, maximum = residuals
        shards, circulate = with_mask(leaves)
        # Without that of the maximum, which counts as a constant, and of the counts, which are None.
        grad_sums = tuple(x for x in cotangent[1:] if x is not None)

        def visit(grad_query: Any, carried: Any, pair: Any) -> Any:
            block, grad_block = carried
            upcast = [x.astype(query.dtype) for x in block]
            sums = partial(shards.sums, shards=pair, maximum=maximum)
            parts = jax.vjp(sums, query, *upcast)[1](grad_sums)
            # The gradient of a block travels with it, and is at home after the last hop.
            return grad_query + parts[0], (block, tuple(map(jax.numpy.add, grad_block, parts[1:])))

        zeros = tuple(jax.numpy.zeros_like(x, query.dtype) for x in (query, *block))
        zeros = _vary_over_same_axes(zeros, query)
        grad_query, (_, grad_block) = circulate(visit, zeros[0], (block, zeros[1:]))
        grads = tuple(x.astype(y.dtype) for x, y in zip(grad_block, block, strict=True))
        return grad_query, grads, None

    ring.defvjp(forward, backward)
    return ring(*_vary_over_same_axes((query, block)), leaves)


def _circulate_blocks(
    shards: _Shards,
    axis_name: Hashable,
    visit: Callable[[Any, Any, Any], tuple[Any, Any]],
    gathered: Any,
    block: Any,
) -> tuple[Any, Any]:
    """Call ``gathered, block = visit(gathered, block, shards)`` on every device that a block reaches.

    After the last hop each block is back on its device, with the changes of all visits.
    """
    import jax

    lax: Any = jax.lax
    rank = lax.axis_index(axis_name)
    ring = [(i, (i + 1) % shards.size) for i in range(shards.size)]

    def skip(gathered: Any, block: Any, pair: Any) -> Any:
        return gathered, block

    def step(carry: Any, i: Any) -> tuple[Any, None]:
        gathered, block = carry
        pair = rank, (rank - i) % shards.size
        visible = shards.any_visible(jax.numpy, *pair)
        if visible is True:
            gathered, block = visit(gathered, block, pair)
        else:
            gathered, block = lax.cond(visible, visit, skip, gathered, block, pair)
        # Outside of the branch, because every device has to take part in a hop.
        return (gathered, lax.ppermute(block, axis_name, ring)), None

    return lax.scan(step, (gathered, block), jax.numpy.arange(shards.size))[0]


def _vary_over_same_axes(arrays: Any, *others: Any) -> Any:
    """`arrays` with types that vary over every mesh axis over which any of the arguments varies.

    JAX requires that a loop preserves the types of its carry. `select` gives the joint type of its
    operands, and the compiler removes it because its condition is constant.
    """
    import jax

    xp: Any = jax.numpy
    # Not a product with 0, which would be NaN for arrays with NaN.
    joint: Any = sum(xp.where(True, 0.0, xp.sum(x)) for x in jax.tree.leaves((arrays, others)))

    def with_joint_type(x: Any) -> Any:
        return jax.lax.select(xp.asarray(True), x, xp.broadcast_to(joint.astype(x.dtype), x.shape))

    return jax.tree.map(with_joint_type, arrays)


@cache
def _ring_of_queries() -> Any:
    """The autograd function for the states of queries that travel around the ring of a group."""
    import torch

    class RingOfQueries(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, shards: _Shards, group: Any, query: Any, *block: Any) -> tuple[Any, ...]:
            rank, _ = _rank_and_size(group)

            def visit(owner: int, query: Any) -> AttentionState:
                if not shards.any_visible(namespace(query=query), owner, rank):
                    # Each visit gives a state, with which the one that arrives is merged.
                    return shards.empty_state(query, *block)
                return shards.state(query, *block, shards=(owner, rank))

            def merge(a: Any, b: Any) -> AttentionState:
                # A state arrives as the list of its tensors.
                return merge_states(AttentionState(*a), b)

            state = AttentionState(*_circulate_queries(group, visit, merge, (query,)))
            ctx.shards, ctx.group = shards, group
            ctx.save_for_backward(query, state.maximum, *block)
            ctx.mark_non_differentiable(state.maximum)
            return tuple(state)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, _: Any, *cotangent: Any) -> tuple[Any, ...]:
            query, maximum, *block = ctx.saved_tensors
            shards = ctx.shards
            rank, _ = _rank_and_size(ctx.group)
            grad_block = [torch.zeros_like(x, dtype=query.dtype) for x in block]

            def visit(owner: int, query: Any, maximum: Any, *grad_sums: Any) -> tuple[Any]:
                if not shards.any_visible(namespace(query=query), owner, rank):
                    return (torch.zeros_like(query),)
                upcast = [x.to(query.dtype) for x in block]
                sums = partial(shards.sums, shards=(owner, rank), maximum=maximum)
                grad_query, *parts = _pull_back(sums, (query, *upcast), grad_sums)
                for total, part in zip(grad_block, parts, strict=True):
                    # In place, because the block stays on this process while queries visit it.
                    total += part
                return (grad_query,)

            grad_sums = tuple(x for x in cotangent if x is not None)
            (grad_query,) = _circulate_queries(
                ctx.group, visit, lambda a, b: (a[0] + b[0],), (query, maximum, *grad_sums)
            )
            return None, None, grad_query, *grad_block

    return RingOfQueries


def _circulate_queries(
    group: Any,
    visit: Callable[..., Sequence[Any]],
    merge: Callable[[Any, Any], Sequence[Any]],
    visitors: Sequence[Any],
) -> Sequence[Any]:
    """Merge the results of ``visit(owner, *visitors)`` over processes, for the visitors of this one.

    While a process computes, it receives the next visitors, and the merged results that belong to the
    present ones.
    """
    rank, size = _rank_and_size(group)
    gathered: Any = None
    for step in range(size):
        # After the last visit only the results travel on, to the process that they belong to.
        ahead = _hop(visitors, group) if step < size - 1 else None
        behind = _hop(gathered, group) if step > 0 else None
        # After so many hops the visitors are those of the process that is so many ranks before.
        here = visit((rank - step) % size, *visitors)
        gathered = here if behind is None else merge(behind(), here)
        visitors = visitors if ahead is None else ahead()
    return gathered if size == 1 else _hop(gathered, group)()


def _hop(tensors: Sequence[Any], group: Any) -> Callable[[], Sequence[Any]]:
    """Send `tensors` to the next process; the result waits for those of the previous process."""
    import torch
    import torch.distributed as dist

    rank, size = _rank_and_size(group)
    after, before = (rank + 1) % size, (rank - 1) % size
    # The backends of `torch.distributed` transfer only tensors without gaps.
    sent = [None if x is None else x.contiguous() for x in tensors]
    received = [None if x is None else torch.empty_like(x) for x in sent]
    # All transfers start at once. If each process first waited for its send, none would receive.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(operation, x, group=group, group_peer=peer)
            for operation, arrays, peer in ((dist.isend, sent, after), (dist.irecv, received, before))
            for x in arrays
            if x is not None
        ]
    )

    def arrive() -> Sequence[Any]:
        for work in works:
            work.wait()
        sent.clear()  # the tensors had to stay alive until the transfer ended
        return received

    return arrive


def _pull_back(
    function: Callable[..., Sequence[Any]], arrays: Sequence[Any], cotangent: Sequence[Any]
) -> Sequence[Any]:
    """The vector–Jacobian product of `cotangent` and `function` at `arrays`, one tensor per array."""
    import torch

    leaves = [x.detach().requires_grad_() for x in arrays]
    # Inside the backward pass of a function PyTorch records nothing by itself.
    with torch.enable_grad():
        results = function(*leaves)
    return torch.autograd.grad(results, leaves, cotangent)


def _checked_block(
    name: str, is_library: Callable[[ModuleType], bool], *, value: Any, **arrays: Any
) -> tuple[Array, ...]:
    """Check the arrays of a call. Return those that belong to the keys: keys, and values if given."""
    arrays |= present(value=value)
    xp = namespace(**arrays)
    if not is_library(xp):
        raise type_error("query", f"be an array of {name}", type(arrays["query"]).__name__)
    check_ndim(2, **arrays)
    check_floating(xp, **arrays)
    _, *block = arrays.values()
    return tuple(block)


def _axis(axis_name: Hashable) -> tuple[Any, int]:
    """The index of this device along a mesh axis, and the number of devices along it."""
    import jax

    lax: Any = jax.lax
    try:
        # The sum of a Python number over an axis is a Python number, which sizes of shapes can be.
        rank, size = lax.axis_index(axis_name), lax.psum(1, axis_name)
    except NameError:
        # JAX raises a NameError for an axis that it does not know.
        must = "be an axis of the `jax.shard_map` around the call"
        raise value_error("axis_name", must, repr(axis_name)) from None
    return rank, size


def _rank_and_size(group: Any) -> tuple[int, int]:
    """The rank of this process in a group, and the size of the group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        must = "be initialized by `torch.distributed.init_process_group` before the call"
        raise value_error("group", must, group)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        must = "be a process group to which this process belongs, or None"
        raise type_error("group", must, type(group).__name__)
    return dist.get_rank(group), dist.get_world_size(group)
