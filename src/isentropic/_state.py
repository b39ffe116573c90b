"""The state of attention over a set of keys, and how states of disjoint sets merge."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import reduce
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._checks import check_axis, common_shape, type_error, value_error
from isentropic._entropy import entropy_of_moments, partition, shift_moment
from isentropic._loops import is_seen
from isentropic._namespace import Array, device, equal_by_value, namespace, present
from isentropic._numerics import align, divide_or_zero, lift, log_or, quietly, replace_infinite_minimum


@equal_by_value
class AttentionState(NamedTuple):
    """What attention over some keys needs to remember of them: enough for output and entropy.

    With logits s, m = max s and x = s − m, for each query:

    Attributes
    ----------
    maximum : array (..., L)
        m; −∞ for a query that sees no key.
    normalizer : array (..., L)
        z = Σ eˣ, at least 1; 0 for a query that sees no key.
    weighted_value : array (..., L, Ev) or None
        Σ eˣ v.
    weighted_score : array (..., L) or None
        Σ eˣ x, at most 0.
    n_seen : array (..., L) or None
        How many keys the query sees among those of the state.
    n_keys : array (..., L) or None
        The n that the law was given. Like `n_seen`, None where there is no law that depends on it, or
        where the state was made by hand: then `merge_states` cannot tell whether they agree.

    Notes
    -----
    Being a NamedTuple it is a pytree in JAX and PyTorch. Half-precision inputs give float32 states.
    `merge_states` combines states of disjoint sets of keys, and so does ``+``. See `attention_state`.

    A state weighs nothing where its maximum is −∞ or its normalizer 0, whatever its other fields hold:
    some kernels report a log-sum-exp of −∞, and no zeros, for keys that are all hidden.

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

    def __add__(self, other: AttentionState) -> AttentionState:  # type: ignore[override]
        """The merged state, not a longer tuple."""
        return merge_states(self, other)

    def output(self) -> Any:
        """The attention output Σ p v, (..., L, Ev); 0 where no key is seen.

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
        xp, state = namespace(state=self.normalizer), _without_hidden(self)
        return divide_or_zero(xp, state.weighted_value, state.normalizer[..., None])

    def log_normalizer(self) -> Any:
        """Log Σ eˢ, (..., L), also called log-sum-exp; −∞ where no key is seen.

        Returns
        -------
        array
        """
        xp = namespace(state=self.normalizer)
        finite = replace_infinite_minimum(xp, self.maximum) + log_or(xp, self.normalizer, 0.0)
        return xp.where(_sees_nothing(self), -math.inf, finite)

    def entropy(self) -> Any:
        """The Shannon entropy of the attention weights in nats, (..., L); 0 where no key is seen.

        Returns
        -------
        array
        """
        if self.weighted_score is None:
            raise value_error("weighted_score", "be an array for an entropy", None)
        xp, state = namespace(state=self.normalizer), _without_hidden(self)
        return entropy_of_moments(xp, state.normalizer, state.weighted_score, 1.0, "renyi")


def merge_states(
    *states: AttentionState | Sequence[AttentionState], axis: int | None = None
) -> AttentionState:
    """The state of the union of disjoint sets of keys.

    Associative and commutative; a state of no keys, (−∞, 0, 0, 0), is its identity. So keys may be
    split over loop steps, cache pages, threads, devices or hosts.

    Parameters
    ----------
    *states : AttentionState
        Two or more, or one list of them; of the same queries, with broadcastable shapes.
    axis : int, optional
        For one state whose fields are those of several, stacked: the axis of `maximum` along which
        they are, not the last, which is that of the queries.

    Returns
    -------
    AttentionState

    Raises
    ------
    TypeError
        Without states, for a single state without `axis`, for other things than states, or for arrays
        of several libraries.
    ValueError
        If some states have values and others have none, or for arrays of several devices.

    Warns
    -----
    UserWarning
        Where the laws of the states were given different numbers of keys, or fewer than the states
        hold together: then some state lacks ``n_keys``, or its mask shows keys that it should hide.
        Nothing is checked where the numbers cannot be read: inside a trace, on a GPU.

    Notes
    -----
    The law counts keys: give the number that the query sees in all as ``n_keys`` to each
    `attention_state` whose result is to be merged. A causal mask counts positions from the first key
    of the block: for a block that begins at the key b it is ``masks.causal(offset - b)``.

    An attention sink, a logit σ that takes weight and has no value, is one more state:
    ``AttentionState(σ, 1, 0, 0)`` in arrays of the shapes of the others.

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
    states = _members(states, axis)
    for state in states:
        if not isinstance(state, AttentionState):
            raise type_error("states", "be one or more AttentionState", type(state).__name__)
    for field in ("weighted_value", "weighted_score"):
        given = [getattr(state, field) is not None for state in states]
        if any(given) and not all(given):
            raise value_error("states", f"all have a {field} or all have none", given)
    arrays = present(
        **{f"states[{i}].{name}": x for i, s in enumerate(states) for name, x in s._asdict().items()}
    )
    xp = namespace(**arrays)
    device(**arrays)
    for i, state in enumerate(states):
        for name, x, ours in (
            ("normalizer", state.normalizer, states[0].normalizer),
            ("weighted_value", state.weighted_value, states[0].weighted_value),
        ):
            if x is not None and ours is not None and x.shape[-1] != ours.shape[-1]:
                must = f"have the last dimension of the others, {ours.shape[-1]}"
                raise value_error(f"states[{i}].{name}", must, x.shape[-1])
    common_shape(**{f"states[{i}].normalizer": s.normalizer.shape[:-1] for i, s in enumerate(states)})

    n_seen, n_keys = _merged_counts(xp, states)
    return _merged(xp, states)._replace(n_seen=n_seen, n_keys=n_keys)


@quietly
def _merged(xp: ModuleType, states: tuple[AttentionState, ...]) -> AttentionState:
    ndim = max(state.normalizer.ndim for state in states) + 1
    columns = [
        AttentionState(*(x if x is None else lift(x, ndim) for x in as_columns(_without_hidden(state))))
        for state in states
    ]
    return as_rows(reduce(lambda a, b: merge_columns(xp, a, b, 1.0), columns))


def _members(states: tuple[Any, ...], axis: int | None) -> tuple[AttentionState, ...]:
    """The states to merge, however they were given."""
    if len(states) == 1 and isinstance(states[0], AttentionState):
        if axis is None:
            must = "be two or more AttentionState, a list of them, or one with the `axis` of several"
            raise type_error("states", must, "a single one")
        (stacked,) = states
        ndim = stacked.maximum.ndim
        check_axis(axis, ndim)
        if axis % ndim == ndim - 1:
            raise value_error("axis", "not be that of the queries, the last", axis)
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


def _sees_nothing(state: AttentionState) -> Any:
    return (state.normalizer == 0) | (state.maximum == -math.inf)


def _without_hidden(state: AttentionState) -> AttentionState:
    """The state with zeros where it weighs nothing."""
    if 0 in state.normalizer.shape:  # of which `where` in JAX forgets over which mesh axes it varies
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
    """The counts of keys of the union; warns where they contradict one another."""
    if any(state.n_seen is None or state.n_keys is None for state in states):
        return None, None
    n_seen = reduce(lambda a, b: sum(align(a, b)), (state.n_seen for state in states))
    n_keys = reduce(lambda a, b: xp.maximum(*align(a, b)), (state.n_keys for state in states))
    for state in states:
        # A state of no keys has no weight that the law could have changed.
        own, seen, n = align(state.n_keys, state.n_seen, n_keys)
        if is_seen(xp, xp.any((own != n) & (seen > 0))):
            _warn_of_counts("The laws of the states were given different numbers of keys")
            break
    else:
        if is_seen(xp, xp.any(n_seen > n_keys)):
            _warn_of_counts("The states hold more keys than their laws were given")
    return n_seen, n_keys


def _warn_of_counts(what: str) -> None:
    warnings.warn(
        f"{what}: give each attention_state the number of keys that a query sees in all as `n_keys`, "
        "and a causal mask the offset of the queries less the position of the first key of the block.",
        stacklevel=4,  # the caller of `merge_states`
    )


# Inside a tile pass the fields of a state keep their last axis, (..., L, 1), and `weighted_score`
# is the moment of any order (or None).


def tile_state(
    xp: ModuleType, logits: Array, value: Any, order: float | None, maximum: Array | None = None
) -> AttentionState:
    """The state of the keys of one tile: logits (..., L, S), and `value` a function of the weights."""
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
    """The attention output, 0 where no key is seen."""
    assert state.weighted_value is not None
    return divide_or_zero(xp, state.weighted_value, state.normalizer)


def merge_columns(
    xp: ModuleType, a: AttentionState, b: AttentionState, order: float | None
) -> AttentionState:
    maximum = xp.maximum(a.maximum, b.maximum)
    reference = replace_infinite_minimum(xp, maximum)
    normalizer, value, moment = 0.0, 0.0, 0.0
    for state in (a, b):
        # A state of no keys has nothing to shift; its maximum is −∞.
        shift = xp.where(state.maximum == -math.inf, 0.0, state.maximum - reference)
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
