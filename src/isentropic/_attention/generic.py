"""The generic pass: tile, logits, weights, state, merge. Every backend must give the same results."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from types import ModuleType
from typing import Any, NamedTuple, cast

from isentropic._attention.plan import Operands, Plan
from isentropic._checks import (
    check_axis,
    check_floating,
    check_ndim,
    check_real,
    common_shape,
    plain_integer,
    type_error,
    value_error,
)
from isentropic._entropy import entropy_of_moments, partition, shift_moment
from isentropic._loops import (
    BLOCKS,
    Block,
    clip_reach,
    compiled,
    fold,
    is_gpu,
    is_known_true,
    map_blocks,
    take,
)
from isentropic._namespace import (
    Array,
    accumulator,
    common_device,
    equal_by_value,
    is_symbolic,
    namespace,
    present,
    promoted,
)
from isentropic._numerics import (
    align,
    clip,
    divide_or_zero,
    grouped_matmul,
    lift,
    log_or,
    quietly,
    replace_infinite_minimum,
    sum_of_rows,
)
from isentropic._records import Record
from isentropic.masks import Mask

# Deviations from a mean are clipped here. Logits that are this far apart do not both have weight, and
# the square of this number does not overflow in float32.
_MAX_DEVIATION = 1e15


@equal_by_value
class AttentionState(NamedTuple):
    """Sums of attention over a set of keys, from which output and entropy follow.

    For each query, with logits s, m = max s and x = s − m:

    Attributes
    ----------
    maximum : array (..., L)
        m; −∞ for a query that sees no key.
    normalizer : array (..., L)
        z = Σ eˣ, at least 1; 0 for a query that sees no key.
    weighted_value : array (..., L, Ev) or None
        Σ eˣ v.
    weighted_score : array (..., L) or None
        Σ eˣ x, at most 0. None if the entropy is unknown: see `from_output`.
    n_seen : array (..., L) or None
        The number of keys of the state that the query sees.
    n_keys : array (..., L) or None
        The n of the law. Both `n_keys` and `n_seen` are None if no law depends on n, or if the state
        was made by hand. `merge_states` then cannot check that they agree.

    Notes
    -----
    A state is a NamedTuple, hence a pytree in JAX and PyTorch. Half-precision inputs give float32
    states. `merge_states` and ``+`` combine states of disjoint sets of keys. See `attention_state`.

    A query has no weight in a state if its maximum is −∞ or its normalizer 0, whatever the other
    fields hold. Some kernels return a log-sum-exp of −∞, but no zeros, if all keys are hidden.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_state
    >>> state = attention_state(np.zeros((1, 2)), np.zeros((4, 2)), np.eye(4))
    >>> state.normalizer, state.output()
    (array([4.]), array([[0.25, 0.25, 0.25, 0.25]]))
    >>> np.allclose(state.entropy(), np.log(4))
    True
    """

    maximum: Any
    normalizer: Any
    weighted_value: Any
    weighted_score: Any
    n_seen: Any = None
    n_keys: Any = None

    @classmethod
    @quietly
    def from_output(
        cls,
        output: Array,
        log_normalizer: Array,
        *,
        entropy: Array | None = None,
        base: float = math.e,
    ) -> AttentionState:
        """The state of a call that a kernel of another library has computed.

        Parameters
        ----------
        output : array (..., L, Ev)
            The attention output Σ p v.
        log_normalizer : array (..., L)
            The log-sum-exp of the logits, as FlashAttention, FlashInfer, cuDNN and PyTorch's
            `flex_attention` return it.
        entropy : array (..., L), optional
            The Shannon entropy of the weights in nats. Without it, neither the state nor a state that
            is merged from it has an entropy.
        base : float > 1
            The base of the logarithm: e, or 2 for FlashInfer.

        Returns
        -------
        AttentionState
            In float32, or float64 if one of the arrays is. Its `maximum` is the log-normalizer and its
            `normalizer` 1: sums may be relative to any number.

        Raises
        ------
        TypeError
            If the arrays are not of floats or belong to different libraries, or if `base` is not a
            number.
        ValueError
            If the shapes do not fit, if the arrays are on different devices, or if `base` is at most 1.

        Notes
        -----
        A query whose log-normalizer is −∞ sees no key, whatever its output is. For such a query
        FlashAttention 2 returns +∞ and an output of 0, which together count as −∞. A log-normalizer
        of +∞ with any other output makes a merged state NaN.

        FlashAttention has outputs (B, L, H, D) and log-sum-exps (B, H, L). Move the heads:
        ``from_output(output.transpose(1, 2), log_normalizer)``. The state then has the axes (B, H, L).

        Examples
        --------
        >>> import numpy as np
        >>> from isentropic import AttentionState, attention_state
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 6, 4))
        >>> near, far = (attention_state(q, k[x], v[x], n_keys=6) for x in (slice(3), slice(3, 6)))
        >>> in_base_2 = near.log_normalizer(base=2)
        >>> same = AttentionState.from_output(near.output(), in_base_2, entropy=near.entropy(), base=2)
        >>> np.allclose((same + far).output(), (near + far).output())
        True
        >>> np.allclose((same + far).entropy(), (near + far).entropy())
        True
        """
        arrays = {"output": output, "log_normalizer": log_normalizer} | present(entropy=entropy)
        xp = namespace(**arrays)
        common_device(**arrays)
        check_floating(xp, **arrays)
        check_ndim(2, output=output)
        for name, x in arrays.items():
            if name != "output" and tuple(x.shape) != tuple(output.shape[:-1]):
                must = f"have the shape of `output` without its last axis, {tuple(output.shape[:-1])}"
                raise value_error(name, must, x.shape)
        unit = _log_of_base(base)

        dtype = accumulator(xp, promoted(xp, *arrays.values()))
        value, maximum = (xp.astype(x, dtype) for x in (output, log_normalizer))
        is_zero = xp.all(value == 0, axis=-1)
        is_empty = (maximum == -math.inf) | ((maximum == math.inf) & is_zero)
        maximum = xp.where(is_empty, -math.inf, maximum) * unit
        score = None if entropy is None else -xp.astype(entropy, dtype)
        return _with_empty_zeroed(cls(maximum, xp.ones_like(maximum), value, score))

    def __add__(self, other: AttentionState) -> AttentionState:  # type: ignore[override]
        """The merged state, not a longer tuple."""
        return merge_states(self, other)

    @quietly
    def output(self) -> Any:
        """The attention output Σ p v, (..., L, Ev); 0 for a query that sees no key.

        Returns
        -------
        array

        Raises
        ------
        ValueError
            If the state was made without values.
        """
        if self.weighted_value is None:
            raise value_error("value", "be given to `attention_state` for an output", None)
        xp = namespace(state=self.normalizer)
        # This saves three passes over the values.
        if is_known_true(xp, xp.all(xp.logical_not(_sees_nothing(self)))):
            return self.weighted_value / self.normalizer[..., None]
        state = _with_empty_zeroed(self)
        return divide_or_zero(xp, state.weighted_value, state.normalizer[..., None])

    @quietly
    def log_normalizer(self, *, base: float = math.e) -> Any:
        """Log Σ eˢ, (..., L), also called log-sum-exp; −∞ for a query that sees no key.

        Parameters
        ----------
        base : float > 1
            The base of the logarithm.

        Returns
        -------
        array

        Raises
        ------
        TypeError, ValueError
            If `base` is not a number above 1.
        """
        xp, unit = namespace(state=self.normalizer), _log_of_base(base)
        finite = replace_infinite_minimum(xp, self.maximum) + log_or(xp, self.normalizer, 0.0)
        return xp.where(_sees_nothing(self), -math.inf, finite / unit)

    @quietly
    def entropy(self) -> Any:
        """The Shannon entropy of the attention weights in nats, (..., L); 0 if a query sees no key.

        Returns
        -------
        array

        Raises
        ------
        ValueError
            If the state, or one from which it was merged, was made without an entropy.
        """
        if self.weighted_score is None:
            raise value_error(
                "entropy", "be given to `AttentionState.from_output` for an entropy", None
            )
        xp = namespace(state=self.normalizer)
        state = _with_empty_zeroed(self._replace(weighted_value=None))
        return entropy_of_moments(xp, state.normalizer, state.weighted_score, 1.0, "renyi")


def merge_states(
    *states: AttentionState | Sequence[AttentionState], axis: int | None = None
) -> AttentionState:
    """The state of the union of disjoint sets of keys.

    The merge is associative and commutative. Its identity is the state of no keys, (−∞, 0, 0, 0). So
    keys can be split over loop steps, cache pages, threads, devices or hosts.

    Parameters
    ----------
    *states : AttentionState
        Two or more states, or one list of them, for the same queries and with broadcastable shapes.
    axis : int, optional
        For one state whose fields are stacked fields of several states: the axis of `maximum` along
        which they are stacked. It cannot be the last axis, which is that of the queries.

    Returns
    -------
    AttentionState

    Raises
    ------
    TypeError
        If there are no states, if there is a single state and no `axis`, if an argument is not a state,
        or if the arrays belong to several libraries.
    ValueError
        If some states have values and others have none, or if the arrays are on several devices.

    Warns
    -----
    UserWarning
        If the laws of the states were given different numbers of keys, or fewer keys than the states
        hold together. Then ``n_keys`` is missing in a call of `attention_state`, or a mask shows keys
        that it should hide. The check is skipped where the numbers cannot be read: inside a trace or on
        a GPU.

    Notes
    -----
    The law counts the keys of one call. So give the total number of keys that a query sees as
    ``n_keys`` to each `attention_state` whose result is to be merged. A causal mask counts positions
    from the first key of the block. For a block that begins at key b it is
    ``masks.causal(offset - b)``.

    If the entropy of one state is unknown, that of the union is unknown too. See
    `AttentionState.from_output`.

    An attention sink is a logit σ that takes weight and has no value. It is one more state,
    ``AttentionState(σ, 1, 0, 0)``, in arrays of the shapes of the other states. If `attention_state` is
    given sinks, it merges them; give them to one of the states only.

    References
    ----------
    Milakov & Gimelshein 2018 (arXiv 1805.02867) for the normalizer and the output.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention_state, merge_states
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 6, 4))
    >>> halves = [attention_state(q, k[i : i + 3], v[i : i + 3], n_keys=6) for i in (0, 3)]
    >>> bool(np.allclose(merge_states(*halves).output(), attention_state(q, k, v).output()))
    True
    """
    states = _states_to_merge(states, axis)
    for state in states:
        if not isinstance(state, AttentionState):
            raise type_error("states", "be one or more AttentionState", type(state).__name__)
    has_value = [state.weighted_value is not None for state in states]
    if any(has_value) and not all(has_value):
        must = "all come from calls with `value`, or all from calls without it"
        raise value_error("states", must, has_value)
    arrays = present(
        **{f"states[{i}].{name}": x for i, s in enumerate(states) for name, x in s._asdict().items()}
    )
    xp = namespace(**arrays)
    common_device(**arrays)
    for i, state in enumerate(states):
        for name, x, expected in (
            ("normalizer", state.normalizer, states[0].normalizer),
            ("weighted_value", state.weighted_value, states[0].weighted_value),
        ):
            if x is not None and expected is not None and x.shape[-1] != expected.shape[-1]:
                must = f"have the last dimension of the others, {expected.shape[-1]}"
                raise value_error(f"states[{i}].{name}", must, x.shape[-1])
    shapes = {f"states[{i}].normalizer": s.normalizer.shape[:-1] for i, s in enumerate(states)}
    common_shape(" in its batch axes", **shapes)

    n_seen, n_keys = _merged_counts(xp, states)
    return _merged(xp, states)._replace(n_seen=n_seen, n_keys=n_keys)


@quietly
def _merged(xp: ModuleType, states: tuple[AttentionState, ...]) -> AttentionState:
    ndim = max(state.normalizer.ndim for state in states) + 1
    if any(state.weighted_score is None for state in states):  # the entropy of the union is unknown
        states = tuple(state._replace(weighted_score=None) for state in states)
    columns = [
        AttentionState(
            *(x if x is None else lift(x, ndim) for x in as_columns(_with_empty_zeroed(state)))
        )
        for state in states
    ]
    return as_rows(reduce(lambda a, b: merge_columns(xp, a, b, 1.0), columns))


def _states_to_merge(states: tuple[Any, ...], axis: int | None) -> tuple[AttentionState, ...]:
    """The states to merge: the arguments, the members of one list, or the parts of a stacked state."""
    if len(states) == 1 and isinstance(states[0], AttentionState):
        if axis is None:
            must = "be two or more AttentionState, a list of them, or one with the `axis` of several"
            raise type_error("states", must, "a single one")
        (stacked,) = states
        ndim = stacked.maximum.ndim
        check_axis(axis, ndim)
        if axis % ndim == ndim - 1:
            raise value_error("axis", "not be the last axis, which is that of the queries", axis)
        before = (slice(None),) * (axis % ndim)
        states = tuple(
            AttentionState(*(x if x is None else x[(*before, i, ...)] for x in stacked))
            for i in range(stacked.maximum.shape[axis])
        )
    elif axis is not None:
        raise type_error("axis", "be None unless one state is given", axis)
    elif len(states) == 1 and isinstance(states[0], (list, tuple)):
        states = tuple(states[0])
    if not states:
        raise type_error("states", "be one or more AttentionState", "none")
    return states


def _log_of_base(base: float) -> float:
    check_real("base", base, above=1)
    return math.log(base)


def _sees_nothing(state: AttentionState) -> Any:
    return (state.normalizer == 0) | (state.maximum == -math.inf)


def _with_empty_zeroed(state: AttentionState) -> AttentionState:
    """The state with zeros where it has no weight."""
    if 0 in state.normalizer.shape:  # JAX's `where` drops the varying mesh axes of empty arrays
        return state
    xp, empty = namespace(state=state.normalizer), _sees_nothing(state)

    def cleared(x: Any, empty: Any) -> Any:
        return x if x is None else xp.where(empty, 0.0, x)

    return state._replace(
        normalizer=cleared(state.normalizer, empty),
        weighted_value=cleared(state.weighted_value, empty[..., None]),
        weighted_score=cleared(state.weighted_score, empty),
    )


def _merged_counts(xp: ModuleType, states: tuple[AttentionState, ...]) -> tuple[Any, Any]:
    """The key counts of the union. Warns if the counts of the states contradict each other."""
    if any(state.n_seen is None or state.n_keys is None for state in states):
        return None, None
    n_seen = reduce(lambda a, b: sum(align(a, b)), (state.n_seen for state in states))
    n_keys = reduce(lambda a, b: xp.maximum(*align(a, b)), (state.n_keys for state in states))
    for state in states:
        # The law has no effect on a state of no keys.
        state_n, seen, n = align(state.n_keys, state.n_seen, n_keys)
        if is_known_true(xp, xp.any((state_n != n) & (seen > 0))):
            _warn_of_counts("The laws of the states were given different numbers of keys")
            break
    else:
        if is_known_true(xp, xp.any(n_seen > n_keys)):
            _warn_of_counts("The states hold more keys than their laws were given")
    return n_seen, n_keys


def _warn_of_counts(what: str) -> None:
    warnings.warn(
        f"{what}: pass each attention_state the total number of keys that a query sees as `n_keys`. "
        "For a block of keys that begins at key b, use masks.causal(offset - b).",
        stacklevel=4,  # the caller of `merge_states`
    )


# The states of public functions are *in rows*: their numbers per query have the shape (..., L). Inside
# the pass states are *in columns*: these numbers have the shape (..., L, 1), and `weighted_score` is
# the moment of any order, or None.


def tile_state(
    xp: ModuleType, logits: Array, value: Any, order: float | None, maximum: Array | None = None
) -> AttentionState:
    """The state of a tile with logits (..., L, S), relative to their maximum or to a given one.

    `value` is a function of the weights, or None.
    """
    maximum, weight, normalizer, moment = partition(xp, logits, order, maximum)
    weighted_value = None if value is None else value(weight)
    return AttentionState(maximum, normalizer, weighted_value, moment)


def empty_state(
    xp: ModuleType, shape: tuple[int, ...], n_values: int | None, order: float | None, **kind: Any
) -> AttentionState:
    """The identity of `merge_states`, for queries of the given shape (..., L)."""
    zero = xp.zeros((*shape, 1), **kind)
    value = None if n_values is None else xp.zeros((*shape, n_values), **kind)
    return AttentionState(zero - math.inf, zero, value, None if order is None else zero)


def output_of_columns(xp: ModuleType, state: AttentionState) -> Array:
    """The attention output; 0 for a query that sees no key."""
    assert state.weighted_value is not None
    return divide_or_zero(xp, state.weighted_value, state.normalizer)


def merge_columns(
    xp: ModuleType, a: AttentionState, b: AttentionState, order: float | None
) -> AttentionState:
    maximum = xp.maximum(a.maximum, b.maximum)
    normalizer, value, moment = 0.0, 0.0, 0.0
    for state in (a, b):
        shift = _shift(xp, state.maximum, maximum)
        weight = xp.exp(shift)
        normalizer = normalizer + weight * state.normalizer
        if state.weighted_value is not None:
            value = value + weight * state.weighted_value
        if state.weighted_score is not None:
            assert order is not None
            moment = moment + shift_moment(xp, state.weighted_score, state.normalizer, shift, order)
    return AttentionState(
        maximum,
        normalizer,
        None if a.weighted_value is None else value,
        None if a.weighted_score is None else moment,
    )


def _shift(xp: ModuleType, old: Array, new: Array) -> Any:
    """The difference of two maxima. A state of no keys has the maximum −∞ and needs no shift."""
    return xp.where(old == -math.inf, 0.0, old - replace_infinite_minimum(xp, new))


def with_sinks(
    plan: Plan, operands: Operands, state: AttentionState, order: float | None
) -> AttentionState:
    """The state in columns with the sinks, each a key whose value is 0."""
    if operands.sinks is None:
        return state
    sink = tile_state(plan.xp, operands.sinks, None, order)
    if state.weighted_value is not None:
        sink = sink._replace(weighted_value=plan.xp.zeros_like(sink.normalizer))
    return merge_columns(plan.xp, state, sink, order)


def weights_of_logits(xp: ModuleType, s: Array, maximum: Array, normalizer: Array) -> Any:
    """The weights of keys with logits `s`, given the maximum and normalizer of all keys, in columns."""
    inverse = divide_or_zero(xp, xp.ones_like(normalizer), normalizer)
    weight = xp.exp(s - replace_infinite_minimum(xp, maximum)) * inverse
    return xp.where(s == -math.inf, 0.0, weight)  # also where the query is NaN


# For `attention_statistics` the `weighted_value` of a state is Σ eˣ (x − mean)². If two means agree,
# these sums are simply added.


def spread_of_logits(xp: ModuleType, s: Array) -> AttentionState:
    """The state of logits (..., L, S), with their squared deviations from the mean as the value."""
    maximum, weight, normalizer, score = partition(xp, s, 1.0)
    assert score is not None
    x = xp.where(s == -math.inf, 0.0, s - replace_infinite_minimum(xp, maximum))
    deviation = clip(xp, x - divide_or_zero(xp, score, normalizer), min=-_MAX_DEVIATION)
    squares = xp.sum(weight * deviation * deviation, axis=-1, keepdims=True)
    return AttentionState(maximum, normalizer, squares, score)


def merge_spreads(xp: ModuleType, a: AttentionState, b: AttentionState) -> AttentionState:
    """The merged state.

    The sum of squares of the union is that of both states plus a term for the distance of their means.
    """
    merged = merge_columns(xp, a, b, 1.0)
    means, masses = [], []  # relative to the maximum of the union
    for state in (a, b):
        shift = _shift(xp, state.maximum, merged.maximum)
        means.append(shift + divide_or_zero(xp, state.weighted_score, state.normalizer))
        masses.append(xp.exp(shift) * state.normalizer)
    gap = clip(xp, means[0] - means[1], min=-_MAX_DEVIATION, max=_MAX_DEVIATION)
    between = divide_or_zero(xp, masses[0] * masses[1], merged.normalizer) * gap * gap
    return merged._replace(weighted_value=merged.weighted_value + between)


@equal_by_value
class AttentionStatistics(NamedTuple):
    """Statistics of the attention of each query, (..., L). See `attention_statistics`."""

    entropy: Any
    maximum: Any
    log_normalizer: Any
    mean: Any
    variance: Any


def statistics_of_spread(xp: ModuleType, state: AttentionState) -> AttentionStatistics:
    """The statistics from a state in columns whose value is that of `spread_of_logits`."""
    rows = as_rows(state)
    mean = divide_or_zero(xp, rows.weighted_score, rows.normalizer)
    return AttentionStatistics(
        rows.entropy(),
        rows.maximum,
        rows.log_normalizer(),
        replace_infinite_minimum(xp, rows.maximum) + mean,
        output_of_columns(xp, state)[..., 0],
    )


def as_columns(state: AttentionState) -> AttentionState:
    score = state.weighted_score
    return AttentionState(
        state.maximum[..., None],
        state.normalizer[..., None],
        state.weighted_value,
        None if score is None else score[..., None],
    )


def as_rows(state: AttentionState) -> AttentionState:
    score = state.weighted_score
    return AttentionState(
        state.maximum[..., 0],
        state.normalizer[..., 0],
        state.weighted_value,
        None if score is None else score[..., 0],
    )


class Tiles(Record):
    """The pass over the tiles of a call, the same for all libraries."""

    plan: Plan
    operands: Operands
    query: Array  # scaled by the law and the scale, in the dtype of the computation

    @classmethod
    def of(cls, plan: Plan, operands: Operands) -> Tiles:
        query = plan.xp.astype(operands.query, plan.compute, copy=False)
        return cls(plan, operands, query * operands.multiplier)

    def state(
        self,
        order: float | None,
        logits: Callable[[Block, Block], Array] | None = None,
        numbers_per_logit: int = 1,
    ) -> AttentionState:
        """The state over all keys, with its fields as columns (..., L, 1).

        `logits` computes the logits of a tile in place of the method; one logit then takes
        `numbers_per_logit` numbers in memory.
        """
        plan, tile_logits = self.plan, self.logits if logits is None else logits
        if plan.n_keys == 0:
            return self._empty(plan.n_values, order)

        def tile(rows: Block, columns: Block) -> AttentionState:
            return self.tile_state(tile_logits(rows, columns), columns, order)

        def merge(a: AttentionState, b: AttentionState) -> AttentionState:
            return merge_columns(plan.xp, a, b, order)

        return self._over_tiles(tile, merge, numbers_per_logit)

    def spread(self) -> AttentionState:
        """The state over all keys and the sinks in columns, with the value of `spread_of_logits`."""
        xp, plan, sinks = self.plan.xp, self.plan, self.operands.sinks

        def tile(rows: Block, columns: Block) -> AttentionState:
            return spread_of_logits(xp, self.logits(rows, columns))

        def merge(a: AttentionState, b: AttentionState) -> AttentionState:
            return merge_spreads(xp, a, b)

        state = self._empty(1, 1.0) if plan.n_keys == 0 else self._over_tiles(tile, merge)
        return state if sinks is None else merge(state, spread_of_logits(xp, sinks))

    def map_logits(
        self, function: Callable[..., tuple[Array, Array]], column: Array
    ) -> tuple[Array, Array]:
        """The two results (..., L, 1) of a function of all logits of each query and of a column.

        ``function(xp, logits, column)`` returns both for some rows at a time. The column broadcasts to
        (..., L, 1).
        """
        xp, plan = self.plan.xp, self.plan
        row_size, column_size = tile_shape(plan)
        rows_at_once = max(1, row_size * min(column_size, plan.n_keys) // plan.n_keys)

        def over_rows(rows: Block) -> tuple[Array, Array]:
            logits = self.logits(rows, reach(plan, self.operands.mask, rows))
            return compiled(xp, function, logits, take(column, rows, -2))

        first, second = map_blocks(xp, over_rows, plan.n_queries, rows_at_once, in_threads=True)
        return first, second

    def _over_tiles(
        self,
        tile: Callable[[Block, Block], AttentionState],
        merge: Callable[[AttentionState, AttentionState], AttentionState],
        numbers_per_logit: int = 1,
    ) -> AttentionState:
        """``merge`` of ``tile(rows, columns)`` over the keys, for all queries."""
        plan, shape = self.plan, (*self.plan.batch, self.plan.n_queries)
        row_size, column_size = tile_shape(plan, numbers_per_logit)

        def over_keys(rows: Block) -> AttentionState:
            return fold(
                plan.xp,
                lambda columns: tile(rows, columns),
                merge,
                plan.n_keys,
                column_size,
                self._reach(rows),
            )

        fields = map_blocks(plan.xp, over_keys, plan.n_queries, row_size, in_threads=True)
        return AttentionState(*[with_batch_axes(plan.xp, x, shape) for x in fields])

    def _empty(self, n_values: int | None, order: float | None) -> AttentionState:
        """The state of no keys."""
        plan = self.plan
        kind = {"dtype": plan.compute, "device": plan.device}
        return empty_state(plan.xp, (*plan.batch, plan.n_queries), n_values, order, **kind)

    def logits(self, rows: Block, columns: Block) -> Array:
        """The logits of one tile, −∞ where a key is hidden."""
        xp, softcap = self.plan.xp, self.plan.softcap
        s = self.products(rows, columns)
        if softcap is not None:
            s = xp.tanh(s / softcap) * softcap
        return add_bias_and_mask(self.plan, self.operands, s, rows, columns)

    def products(self, rows: Block, columns: Block) -> Any:
        """The inner products of the scaled queries and the keys of one tile."""
        xp = self.plan.xp
        keys = xp.astype(take(self.operands.key, columns, -2), self.plan.compute, copy=False)
        return grouped_matmul(xp, take(self.query, rows, -2), xp.matrix_transpose(keys))

    def tile_state(
        self, logits: Array, columns: Block, order: float | None, maximum: Array | None = None
    ) -> AttentionState:
        """The state of the keys of a tile, relative to their own maximum or to a given one."""

        def weigh(weight: Array) -> Array:
            return self.weighted_value(weight, columns)

        value = None if self.operands.value is None else weigh
        return tile_state(self.plan.xp, logits, value, order, maximum)

    def weighted_value(self, weight: Array, columns: Block) -> Any:
        """The sum of the values of a tile, each times its weight."""
        xp = self.plan.xp
        values = xp.astype(take(self.operands.values, columns, -2), self.plan.compute, copy=False)
        return grouped_matmul(xp, weight, values)

    def column_sums(self, state: AttentionState) -> Array:
        """The sum of the attention weights over the queries, (..., S), for the state in columns."""
        xp, plan = self.plan.xp, self.plan
        row_size, column_size = tile_shape(plan)

        def over_queries(columns: Block) -> tuple[Array]:
            def tile(rows: Block) -> Array:
                if self._is_hidden(rows, columns):
                    return plan.zeros((columns[1], 1), plan.compute)
                sums = (take(x, rows, -2) for x in (state.maximum, state.normalizer))
                weight = weights_of_logits(xp, self.logits(rows, columns), *sums)
                return sum_of_rows(xp, weight)[..., None]

            return (fold(xp, tile, lambda a, b: a + b, plan.n_queries, row_size),)

        (sums,) = map_blocks(xp, over_queries, plan.n_keys, column_size, in_threads=True)
        return sums[..., 0]

    def _is_hidden(self, rows: Block, columns: Block) -> bool:
        """Whether it is known that no query of a tile sees a key of it."""
        plan, mask = self.plan, self.operands.mask
        # The tiles of a loop in JAX and of a compiled graph are not known.
        if mask is None or plan.library == "jax" or plan.frame.is_compiling:
            return False
        first, size = reach(plan, mask, rows)
        return bool(first + size <= columns[0] or sum(columns) <= first)

    def _reach(self, rows: Block) -> Any:
        mask, frame = self.operands.mask, self.plan.frame
        return None if mask is None or frame.is_compiling else mask.reach(frame, rows)


def tile_shape(plan: Plan, numbers_per_logit: int = 1) -> tuple[int, int]:
    """The numbers of queries and of keys of a tile."""
    if plan.frame.is_compiling and (plan.block_size is None or plan.library == "jax"):
        return plan.n_queries, plan.n_keys
    width, size = max(numbers_per_logit, 1), BLOCKS.tile
    if plan.library == "numpy":  # each thread holds several arrays of the size of a tile
        size = BLOCKS.tile // 4
    elif is_gpu(plan.xp, plan.device):  # small tiles leave a GPU idle
        size = BLOCKS.tile * 32
    elif plan.library == "torch":  # a tile and what is computed from it then stay in the cache
        size = BLOCKS.tile // 2
    columns = plain_integer(plan.block_size or max(BLOCKS.columns // width, 1))
    known = math.prod([n for n in plan.batch if not is_symbolic(n)])
    rows = size // max(known * min(columns, plan.n_keys) * width, 1)
    return max(rows, BLOCKS.rows), columns


def reach(plan: Plan, mask: Mask | None, rows: Block) -> Block:
    """A block of keys that covers all keys that any query of a block of rows sees.

    It has at least one key. It covers all keys if the rows are traced.
    """
    if mask is None or plan.frame.is_compiling or not isinstance(rows[0], int):
        return 0, plan.n_keys
    first, end = clip_reach(mask.reach(plan.frame, rows), plan.n_keys)
    return first, end - first


def add_bias_and_mask(plan: Plan, operands: Operands, s: Any, rows: Block, columns: Block) -> Array:
    """`s` plus the bias of a tile; NaN for nonfinite rows of queries and keys; −∞ for hidden keys."""
    added = added_logits(plan, operands, rows, columns)
    s = s if added is None else s + added
    if operands.mask is None:
        return s
    visible = lift(operands.mask.block(plan.frame, rows, columns), plan.ndim)
    return plan.xp.where(visible, s, -math.inf)


def added_logits(plan: Plan, operands: Operands, rows: Block, columns: Block) -> Any:
    """The bias of a tile, and NaN for nonfinite rows of queries and keys; None if there is neither."""
    added: Any = None
    if operands.bias is not None:
        added = plan.xp.astype(take(take(operands.bias, rows, -2), columns, -1), plan.compute)
    if operands.nonfinite is not None:
        query_nan, key_nan = operands.nonfinite
        nan = take(query_nan, rows, -2) + take(key_nan, columns, -1)
        added = nan if added is None else added + nan
    return added


def causal_nan(plan: Plan, operands: Operands) -> Array:
    """NaN for queries that see a nonfinite row under a plain causal mask, else 0; (..., L, 1)."""
    assert operands.nonfinite is not None
    query_nan, key_nan = operands.nonfinite
    # Not `cumulative_sum` of array_api_compat, for which torch.compile warns.
    return query_nan + plan.xp.cumsum(key_nan[..., 0, :], -1)[..., None]


def interval_nan(plan: Plan, operands: Operands) -> Array:
    """NaN for queries that see a nonfinite row under a mask without gaps, else 0; (..., L, 1)."""
    assert operands.nonfinite is not None
    assert operands.mask is not None
    xp, query_nan, key_nan = plan.xp, *operands.nonfinite
    first, end = (
        xp.broadcast_to(clip(xp, x, min=0, max=plan.n_keys), (*plan.batch, plan.n_queries))
        for x in cast(Any, operands.mask.interval(plan.frame, (0, plan.n_queries)))
    )
    # counts[j] is the number of nonfinite keys before key j, for j from 0 to S.
    is_nan = xp.astype(xp.isnan(key_nan[..., 0, :]), first.dtype)
    counts = xp.concat((is_nan[..., :1] * 0, xp.cumsum(is_nan, -1)), axis=-1)
    counts = xp.broadcast_to(counts, (*plan.batch, plan.n_keys + 1))
    before_end, before_first = (xp.take_along_axis(counts, x, axis=-1) for x in (end, first))
    is_seen = (before_end > before_first) | xp.isnan(query_nan[..., 0])
    zero = xp.zeros_like(query_nan[..., 0])
    return xp.where(is_seen & (end > first), math.nan, zero)[..., None]


def with_batch_axes(xp: ModuleType, x: Any, shape: tuple[int, ...]) -> Any:
    """`x` broadcast to the batch axes of all arguments, or `x` itself, as views are read-only."""
    if x is None or x.shape[:-1] == shape:
        return x
    return xp.broadcast_to(x, (*shape, x.shape[-1]))
