"""States: sums of attention over some keys, from which output and entropy follow, and their merge."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import reduce
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._attention.tile import Sums, log_normalizer, merge_columns, sees_nothing
from isentropic._checks import (
    check_axis,
    check_floating,
    check_ndim,
    check_real,
    common_shape,
    type_error,
    value_error,
)
from isentropic._entropy import entropy_of_moments
from isentropic._loops import is_known_true
from isentropic._namespace import (
    A_co,
    Array,
    ArrayT,
    Generic,
    Sliced,
    accumulator,
    common_device,
    equal_by_value,
    namespace,
    present,
    promoted,
)
from isentropic._numerics import align, divide_or_zero, lift, quietly
from isentropic._ops import Ops


@equal_by_value
class AttentionState(NamedTuple, Generic[A_co]):
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

    maximum: A_co
    normalizer: A_co
    weighted_value: A_co | None
    weighted_score: A_co | None
    n_seen: A_co | None = None
    n_keys: A_co | None = None

    @classmethod
    @quietly
    def from_output(
        cls,
        output: Sliced[ArrayT],
        log_normalizer: Array,
        *,
        entropy: Array | None = None,
        base: float = math.e,
    ) -> AttentionState[ArrayT]:
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
        # With z = 1 the entropy, log z − w/z, is −w.
        score = None if entropy is None else -xp.astype(entropy, dtype)
        return _with_empty_zeroed(cls(maximum, xp.ones_like(maximum), value, score))

    def __add__(self, other: AttentionState) -> AttentionState[A_co]:  # type: ignore[override]
        """The merged state, not a longer tuple."""
        return merge_states(self, other)

    @quietly
    def output(self) -> A_co:
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
        if is_known_true(xp, xp.all(xp.logical_not(sees_nothing(self)))):
            return self.weighted_value / self.normalizer[..., None]
        state = _with_empty_zeroed(self)
        return divide_or_zero(xp, state.weighted_value, state.normalizer[..., None])

    @quietly
    def log_normalizer(self, *, base: float = math.e) -> A_co:
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
        unit = _log_of_base(base)
        return log_normalizer(namespace(state=self.normalizer), self) / unit

    @quietly
    def entropy(self) -> A_co:
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
        # Clearing the values would take a pass over them for nothing.
        state = _with_empty_zeroed(self._replace(weighted_value=None))
        return entropy_of_moments(xp, state.normalizer, state.weighted_score, 1.0, "renyi")


def merge_states(
    *states: AttentionState[ArrayT] | Sequence[AttentionState[ArrayT]], axis: int | None = None
) -> AttentionState[ArrayT]:
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
    # A last axis of length 1 would broadcast, although it means another number of queries.
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
    # With the axis of length 1 that columns have at the end.
    ndim = max(state.normalizer.ndim for state in states) + 1
    if any(state.weighted_score is None for state in states):  # the entropy of the union is unknown
        states = tuple(state._replace(weighted_score=None) for state in states)
    # The batch axes of states may differ, and users may set JAX to refuse arrays of different ranks.
    columns = [as_columns(_with_empty_zeroed(x)).map(lambda y: lift(y, ndim)) for x in states]
    ops = Ops(xp)
    return as_rows(reduce(lambda a, b: merge_columns(ops, a, b, 1.0), columns))


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
        # Counted from the front, because the values have one more axis at the end.
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


def _with_empty_zeroed(state: AttentionState) -> AttentionState:
    """The state with zeros where it has no weight."""
    if 0 in state.normalizer.shape:  # JAX's `where` drops the varying mesh axes of empty arrays
        return state
    xp, empty = namespace(state=state.normalizer), sees_nothing(state)

    def cleared(x: Any, empty: Any) -> Any:
        return x if x is None else xp.where(empty, 0.0, x)

    return state._replace(
        normalizer=cleared(state.normalizer, empty),
        weighted_value=cleared(state.weighted_value, empty[..., None]),
        weighted_score=cleared(state.weighted_score, empty),
    )


def _merged_counts(xp: ModuleType, states: tuple[AttentionState, ...]) -> tuple[Any, Any]:
    """The key counts of the union. Warns if the counts of the states contradict each other."""
    # One unknown count makes the sum unknown.
    if any(state.n_seen is None or state.n_keys is None for state in states):
        return None, None
    n_seen: Any = reduce(lambda a, b: sum(align(a, b)), (state.n_seen for state in states))
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


def as_columns(state: AttentionState) -> Sums:
    score = state.weighted_score
    return Sums(
        state.maximum[..., None],
        state.normalizer[..., None],
        state.weighted_value,
        None if score is None else score[..., None],
    )


def as_rows(sums: Sums) -> AttentionState:
    score = sums.weighted_score
    return AttentionState(
        sums.maximum[..., 0],
        sums.normalizer[..., 0],
        sums.weighted_value,
        None if score is None else score[..., 0],
    )
