"""The backends of attention, in the order in which they are tried.

The generic pass is the last one. Every other backend computes the same values and gradients faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from isentropic._attention.generic import Tiles, with_sinks
from isentropic._attention.plan import Operands, Plan, finite
from isentropic._attention.state import as_rows
from isentropic._attention.statistics import spread_with_sinks
from isentropic._attention.tile import Sums, output_of_columns
from isentropic._checks import value_error
from isentropic._entropy import entropy_of_moments
from isentropic._loops import is_readable
from isentropic._namespace import Array


class Backend(NamedTuple):
    """An implementation of attention.

    ``unsupported_reason(plan, order, is_named)`` returns the reason why the backend does not compute a
    call, or None if it does. `order` is the entropy order, or None if only the output is needed. A
    backend that the caller names (`is_named`) also accepts calls that another one computes faster, or
    that it computes only if it is named.
    """

    name: str
    unsupported_reason: Callable[[Plan, float | None, bool], str | None]
    output: Callable[[Plan, Operands], Array]
    # The state in columns. If the flag is true, its sums must be relative to the maximum, and otherwise
    # they may be relative to any number.
    state: Callable[[Plan, Operands, float, bool], Sums] | None = None
    # A faster way to the Rényi entropies. Without it, they are computed from the state.
    entropy: Callable[[Plan, Operands, float], Array] | None = None
    # Whether it takes numbers that are not finite where a mask may hide them; see `Operands.is_raw`.
    selects_hidden: bool = False


def _generic_output(plan: Plan, operands: Operands) -> Array:
    return output_of_columns(plan.xp, Tiles.of(plan, operands).state(None))


def _generic_state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    return Tiles.of(plan, operands).state(order)


def backends() -> tuple[Backend, ...]:
    """All backends, in the order in which they are tried."""
    # Imported here, because they would make `import isentropic` slower.
    from isentropic._attention import jax, numpy, torch, torch_varlen, triton

    return (
        Backend(
            "varlen", torch_varlen.unsupported_reason, torch_varlen.output, selects_hidden=True
        ),
        Backend("sdpa", torch.sdpa_unsupported_reason, torch.sdpa_output, selects_hidden=True),
        Backend("numpy_tiles", numpy.unsupported_reason, numpy.output, numpy.state, numpy.entropy),
        Backend("jax_nn", jax.unsupported_reason, jax.output),
        Backend("triton", triton.unsupported_reason, triton.output, triton.state, selects_hidden=True),
        Backend(
            "torch_tiles", torch.tiles_unsupported_reason, torch.tiles_output, torch.tiles_state,
            selects_hidden=True,
        ),
        Backend("jax_tiles", jax.heads_unsupported_reason, jax.heads_output, jax.heads_state),
        Backend("generic", lambda plan, order, is_named: None, _generic_output, _generic_state),
    )  # fmt: skip


def output_of(plan: Plan, operands: Operands, implementation: str | None) -> Array:
    """The attention output (..., L, Ev), computed by the first suitable backend."""
    if operands.sinks is not None:  # they join a state, which outputs of kernels are not
        return output_of_columns(plan.xp, state_of(plan, operands, implementation))
    backend, operands = _chosen(plan, operands, implementation, None)
    return backend.output(plan, operands)


def state_of(
    plan: Plan,
    operands: Operands,
    implementation: str | None,
    order: float = 1.0,
    *,
    relative_to_maximum: bool = False,
) -> Sums:
    """The state in columns, with the moment of an order, computed by the first suitable backend.

    The sums are relative to the maximum if `relative_to_maximum`, and otherwise to any reference.
    """
    backend, operands = _chosen(plan, operands, implementation, order)
    assert backend.state is not None
    state = backend.state(plan, operands, order, relative_to_maximum)
    return with_sinks(plan, operands, state, order)


def entropy_of(plan: Plan, operands: Operands, implementation: str | None, order: float) -> Array:
    """Rényi's entropies (..., L), computed by the first suitable backend."""
    backend, operands = _chosen(plan, operands, implementation, order)
    if backend.entropy is not None and operands.sinks is None:
        return backend.entropy(plan, operands, order)
    state = as_rows(state_of(plan, operands, implementation, order))
    return entropy_of_moments(plan.xp, state.normalizer, state.weighted_score, order, "renyi")


def spread_of(plan: Plan, operands: Operands) -> Sums:
    """The state in columns with the sinks and the value of `spread_of_logits`."""
    from isentropic._attention import triton

    # The kernels have no derivative of it, for which JAX may ask.
    is_able = plan.library != "jax" and not plan.is_differentiated and plan.n_keys > 0
    is_able = is_able and not plan.has_rows
    if is_able and triton.takes(plan, 1.0):
        return spread_with_sinks(plan.xp, triton.spread(plan, operands), operands.sinks)
    return Tiles.of(plan, operands).spread()


def map_logits(
    plan: Plan, operands: Operands, function: Callable[..., tuple[Array, Array]], column: Array
) -> tuple[Array, Array]:
    """As `Tiles.map_logits`, by NumPy if that is faster."""
    from isentropic._attention import numpy

    if not plan.has_rows and numpy.takes_tiles(plan) and is_readable(plan.xp, column):
        return numpy.map_logits(plan, finite(plan, operands), function, column)
    return Tiles.of(plan, operands).map_logits(function, column)


def reasons(plan: Plan, implementation: str | None, order: float | None) -> dict[str, str | None]:
    """The reason why each backend does not compute the call, in their order; None if it can."""
    return {
        backend.name: _reason(backend, plan, order, implementation is not None)
        if implementation in (None, backend.name)
        else "`implementation` excludes it"
        for backend in backends()
    }


def _chosen(
    plan: Plan, operands: Operands, implementation: str | None, order: float | None
) -> tuple[Backend, Operands]:
    """The first suitable backend, and the operands as it takes them."""
    # torch.compile does not trace through lru_cache, and its plans are not used again.
    if plan.frame.is_compiling:
        backend = choose_backend.__wrapped__(plan, implementation, order)
    else:
        settings = None if plan.facts is None else plan.facts.settings()
        backend = choose_backend(plan, implementation, order, settings)
    if operands.is_raw and not backend.selects_hidden:
        operands = finite(plan, operands)
    return backend, operands


@functools.lru_cache(maxsize=1024)
def choose_backend(
    plan: Plan, implementation: str | None, order: float | None, settings: Any = None
) -> Backend:
    """The first backend that can compute the call.

    `settings` are those of the library on which the choice also depends. The function does not read
    them: they are an argument so that they are part of the key of the cache.
    """
    why = []
    for backend in backends():
        if implementation in (None, backend.name):
            reason = _reason(backend, plan, order, implementation is not None)
            if reason is None:
                return backend
            why.append(f"{backend.name}: {reason}")
    # The caller can choose among those that compute the call, whatever is faster.
    able = ["None", *(repr(x.name) for x in backends() if _reason(x, plan, order, True) is None)]
    must = f"be {', '.join(able[:-1])} or {able[-1]} for this call ({'; '.join(why)})"
    raise value_error("implementation", must, repr(implementation))


def _reason(backend: Backend, plan: Plan, order: float | None, is_named: bool) -> str | None:
    if plan.n_keys == 0 and backend.name != "generic":
        return "there are no keys"
    if plan.has_rows and backend.name != "generic":
        return "keys or values are quantized"
    return backend.unsupported_reason(plan, order, is_named)
