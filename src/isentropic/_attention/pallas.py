"""The backend of Pallas kernels for JAX, which runs only if the caller names it."""

from __future__ import annotations

import functools
from typing import Any

from isentropic._attention import kernels
from isentropic._attention.plan import Operands, Plan
from isentropic._attention.tile import Sums
from isentropic._namespace import Array

_FIELDS = ("out", "maximum", "normalizer", "moment")
# The number of queries, and of keys, of a tile, for heads up to a width. The keys and values of a tile
# should fit into the memory on the chip.
_BLOCKS = {64: 64, 128: 32, 256: 16}


def why_not(plan: Plan, order: float | None, is_named: bool) -> str | None:
    """The reason why the Pallas kernels do not compute a call, or None."""
    if plan.library != "jax":
        return "the arrays are not JAX's"
    return kernels.why_not(plan, order)


def why_not_unnamed(plan: Plan, order: float | None) -> str | None:
    """The reason why the Pallas kernels do not compute a call that does not name them."""
    return "it runs only if `implementation` is 'pallas'"


def output(plan: Plan, operands: Operands) -> Array:
    """The attention output (..., L, Ev)."""
    return kernels.finished_output(plan, operands, _results(plan, operands, False)["out"])


def state(plan: Plan, operands: Operands, order: float, relative_to_maximum: bool) -> Sums:
    """The state in columns."""
    results = _results(plan, operands, True)
    fields: Any = [results.get(name) for name in _FIELDS]
    return kernels.finished_state(plan, operands, *fields)


def _results(plan: Plan, operands: Operands, has_moment: bool) -> dict[str, Any]:
    """The fields by name: no output without values, and the moment only if `has_moment`."""
    inputs = {
        "query": kernels.with_four_axes(plan, operands.query),
        "key": kernels.with_four_axes(plan, operands.key),
        "value": kernels.with_four_axes(plan, operands.value),
        "factor": kernels.factor(plan, operands),
    }
    inputs = {name: x for name, x in inputs.items() if x is not None}
    return _attend()(has_moment, inputs, kernels.interval(plan, operands))


@functools.cache
def _attend() -> Any:
    import jax

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attend(has_moment: bool, inputs: Any, interval: Any) -> Any:
        return _fields(_forward(has_moment, inputs, interval))

    def forward(has_moment: bool, inputs: Any, interval: Any) -> Any:
        results = _forward(has_moment, inputs, interval)
        return _fields(results), (inputs, interval, results)

    def backward(has_moment: bool, residuals: Any, upstream: Any) -> Any:
        inputs, interval, results = residuals
        return _backward(has_moment, inputs, interval, results, upstream), None

    attend.defvjp(forward, backward)
    return attend


def _fields(results: Any) -> Any:
    return {name: results[name] for name in _FIELDS if name in results}


def _forward(has_moment: bool, inputs: Any, interval: Any) -> Any:
    from isentropic._attention.pallas_kernels import run_state

    sizes, padded = _padded(inputs, interval)
    batch, heads, n_queries, _ = inputs["query"].shape
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in padded.items()}
    results = _by_platform(functools.partial(run_state, sizes=sizes, has_moment=has_moment), flat)
    results = {
        name: x.reshape(batch, heads, *x.shape[1:])[..., :n_queries, :] for name, x in results.items()
    }
    if "out" in results:
        results["out"] = results["out"][..., : inputs["value"].shape[-1]]
    return results


def _backward(has_moment: bool, inputs: Any, interval: Any, results: Any, upstream: Any) -> Any:
    """The gradients of the inputs from those of the fields."""
    import jax.numpy as jnp

    from isentropic._attention.pallas_kernels import run_gradient

    out, maximum, normalizer, moment = (results.get(name) for name in _FIELDS)
    terms = kernels.gradient_terms(
        jnp, out, normalizer, moment, [upstream.get(name) for name in _FIELDS]
    )
    is_empty = normalizer == 0
    given = inputs | dict(zip(("constant", "slope", "rest"), terms, strict=True))
    given |= {
        "maximum": jnp.where(maximum == -jnp.inf, 0.0, maximum),
        "inverse": jnp.where(is_empty, 0.0, 1 / jnp.where(is_empty, 1.0, normalizer)),
        "argmax": results.get("argmax"),
        "grad": None if out is None else upstream["out"].astype(inputs["query"].dtype),
    }
    sizes, padded = _padded({name: x for name, x in given.items() if x is not None}, interval)
    batch, key_heads = inputs["key"].shape[:2]
    group = inputs["query"].shape[1] // key_heads
    flat = {
        name: x.reshape(
            batch * key_heads, *((group,) if name not in ("key", "value") else ()), *x.shape[2:]
        )
        for name, x in padded.items()
    }
    run = functools.partial(run_gradient, sizes=sizes, has_moment=has_moment)
    grads = _by_platform(run, flat)
    grads = {
        name: grads[name].reshape(*x.shape[:2], *grads[name].shape[-2:])[
            ..., : x.shape[2], : x.shape[3]
        ]
        for name, x in inputs.items()
        if name != "factor"
    }
    query, factor = (inputs[name].astype(jnp.float32) for name in ("query", "factor"))
    scaled = grads["query"]
    grads["query"] = (scaled * factor).astype(inputs["query"].dtype)
    return grads | {"factor": jnp.sum(scaled * query, axis=-1, keepdims=True)}


def _padded(inputs: Any, interval: Any) -> tuple[Any, dict[str, Any]]:
    """The sizes of the blocks, and the arrays, filled by zeros to full blocks."""
    import jax.numpy as jnp

    from isentropic._attention.pallas_kernels import Sizes

    wide = [inputs[name] for name in ("query", "value") if name in inputs]
    width = max(x.shape[-1] for x in wide)
    size = _BLOCKS[next(limit for limit in _BLOCKS if width <= limit)]
    arrays = dict(inputs)
    if interval is not None:
        arrays |= dict(zip(("first", "end"), interval, strict=True))

    def pad(name: str, x: Any) -> Any:
        columns = x.shape[-1]
        if name in ("query", "key", "value", "grad"):  # what is multiplied has a power of 2 columns
            columns = max(16, 1 << (columns - 1).bit_length())
        filling = (-x.shape[-2] % size, columns - x.shape[-1])
        return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), *((0, n) for n in filling)))

    n_keys = inputs["key"].shape[-2]
    return Sizes(size, size, n_keys), {name: pad(name, x) for name, x in arrays.items()}


def _by_platform(run: Any, arrays: Any) -> Any:
    """Run a kernel where the program will run: by the interpreter on a CPU."""
    import jax

    kinds = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu", "rocm": "gpu"}
    return jax.lax.platform_dependent(
        arrays, **{name: functools.partial(run, platform=kind) for name, kind in kinds.items()}
    )
