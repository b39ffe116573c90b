"""The Pallas kernels of attention. Only `isentropic._attention.pallas` imports this module.

They compute what the kernels of `triton_kernels` do. All lengths are multiples of the block sizes.
Queries and keys that only fill a block have no effect. Numbers per query are columns (rows, 1).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

# Used in place of −∞: it is below every score of positive weight, and its product with the weight 0 is
# 0, not NaN.
_LOWEST_SCORE = -1e30


class Sizes(NamedTuple):
    """The blocks of the kernels, and the number of keys that are not padding."""

    rows: int
    columns: int
    n_keys: int


def _product(a: Any, b: Any, contracted: tuple[int, int]) -> Any:
    """The product over one axis of each matrix, accumulated in float32."""
    numbers = (((contracted[0],), (contracted[1],)), ((), ()))
    precision = "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _seen(interval: Any, column: Any, sizes: Sizes) -> Any:
    """Whether the queries of an interval (first, end) see the keys of the indices `column`."""
    is_key = column < sizes.n_keys
    if interval is None:
        return is_key
    first, end = interval
    return is_key & (column >= first) & (column < end)


def state_kernel(inputs: Any, outputs: Any, *, sizes: Sizes, has_moment: bool) -> None:
    """Output, maximum, normalizer and moment of a block of queries, in one pass over the keys."""
    q, factor = inputs["query"][...], inputs["factor"][...]
    rows, columns = q.shape[0], sizes.columns
    value_ref = inputs.get("value")
    low, high, interval = jnp.int32(0), jnp.int32(-(-sizes.n_keys // columns)), None
    if "first" in inputs:
        first, end = interval = inputs["first"][...], inputs["end"][...]
        # Not `//`, which TPUs compile only for numbers whose sign they can tell.
        low = jax.lax.div(jnp.maximum(jnp.min(first), 0), columns)
        high = jax.lax.div(jnp.clip(jnp.max(end), 0, sizes.n_keys) + (columns - 1), columns)

    def tile(i: Any, carry: Any) -> Any:
        maximum, normalizer, moment, argmax, total = carry
        start = i * columns
        k = inputs["key"][pl.ds(start, columns), :]
        column = start + jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
        s = _product(q, k, (1, 1)) * factor
        s = jnp.where(_seen(interval, column, sizes), s, -math.inf)

        highest = jnp.max(s, axis=1, keepdims=True)
        if has_moment:
            here = jnp.min(jnp.where(s == highest, column, sizes.n_keys), axis=1, keepdims=True)
            argmax = jnp.where(highest > maximum, here, argmax)
        highest = jnp.maximum(highest, maximum)
        # Where no key was seen so far, there is nothing to shift, and −∞ − (−∞) is NaN.
        shift = jnp.where(normalizer > 0, maximum - highest, 0.0)
        shrink = jnp.exp(shift)
        x = s - jnp.where(highest == -math.inf, 0.0, highest)
        p = jnp.exp(x)
        if has_moment:
            scores = jnp.sum(p * jnp.maximum(x, _LOWEST_SCORE), axis=1, keepdims=True)
            moment = shrink * (moment + shift * normalizer) + scores
        normalizer = shrink * normalizer + jnp.sum(p, axis=1, keepdims=True)
        if value_ref is not None:
            v = value_ref[pl.ds(start, columns), :]
            total = total * shrink + _product(p.astype(v.dtype), v, (1, 0))
        return highest, normalizer, moment, argmax, total

    zero = jnp.zeros((rows, 1), jnp.float32)
    start = (
        zero - math.inf,
        zero,
        zero if has_moment else None,
        jnp.zeros((rows, 1), jnp.int32) if has_moment else None,
        None if value_ref is None else jnp.zeros((rows, value_ref.shape[-1]), jnp.float32),
    )
    maximum, normalizer, moment, argmax, total = jax.lax.fori_loop(low, high, tile, start)
    # A GPU's maximum may ignore NaN, and the normalizer does not.
    outputs["maximum"][...] = jnp.where(normalizer == normalizer, maximum, normalizer)
    outputs["normalizer"][...] = normalizer
    if has_moment:
        outputs["moment"][...] = moment
        outputs["argmax"][...] = argmax
    if value_ref is not None:
        is_empty = normalizer == 0
        out = jnp.where(is_empty, 0.0, total / jnp.where(is_empty, 1.0, normalizer))
        outputs["out"][...] = out.astype(outputs["out"].dtype)


def gradient_kernel(
    inputs: Any, outputs: Any, *, sizes: Sizes, has_moment: bool, is_parallel: bool
) -> None:
    """The gradients of a block of keys and values, and its share of the gradients of scaled queries.

    The gradient of a logit is p · (g·v + constant + slope · x), for its weight p and centered score x,
    plus `rest` for the key that has the maximum. If the programs of a sequence run in parallel, they
    add to the gradient of the queries atomically.
    """
    k = inputs["key"][...]
    v = inputs["value"][...] if "value" in inputs else None
    rows, columns = sizes.rows, k.shape[0]
    group, n_queries, width = inputs["query"].shape
    start = pl.program_id(1) * columns
    column = start + jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    if not is_parallel:

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            outputs["query"][...] = jnp.zeros((group, n_queries, width), jnp.float32)

    def rows_of(i: Any) -> Any:
        member, block = jax.lax.div(i, n_queries // rows), jax.lax.rem(i, n_queries // rows)
        return member, pl.ds(block * rows, rows), slice(None)

    def tile(i: Any, interval: Any, carry: Any) -> Any:
        dk, dv = carry
        at_rows = rows_of(i)
        q, factor = inputs["query"][at_rows], inputs["factor"][at_rows]
        s = _product(q, k, (1, 1)) * factor
        x = s - inputs["maximum"][at_rows]
        x = jnp.where(_seen(interval, column, sizes), x, _LOWEST_SCORE)
        p = jnp.exp(x) * inputs["inverse"][at_rows]
        slope = inputs["constant"][at_rows]
        if has_moment:
            slope = slope + inputs["slope"][at_rows] * jnp.maximum(x, _LOWEST_SCORE)
        if v is not None:
            g = inputs["grad"][at_rows]
            dv = dv + _product(p.astype(g.dtype), g, (0, 0))
            slope = slope + _product(g, v, (1, 1))
        ds = p * slope
        if has_moment:
            ds = ds + jnp.where(inputs["argmax"][at_rows] == column, inputs["rest"][at_rows], 0.0)
        dq = _product(ds.astype(k.dtype), k, (1, 0))
        if is_parallel:
            gpu.atomic_add(outputs["query"], at_rows, dq)
        else:
            outputs["query"][at_rows] += dq
        return dk + _product((ds * factor).astype(q.dtype), q, (0, 0)), dv

    def tile_if_seen(i: Any, carry: Any) -> Any:
        if "first" not in inputs:
            return tile(i, None, carry)
        first, end = interval = tuple(inputs[name][rows_of(i)] for name in ("first", "end"))
        is_seen = (jnp.max(end) > start) & (jnp.min(first) < start + columns)
        return jax.lax.cond(is_seen, lambda: tile(i, interval, carry), lambda: carry)

    zeros = (
        jnp.zeros((columns, width), jnp.float32),
        None if v is None else jnp.zeros(v.shape, jnp.float32),
    )
    n_tiles = group * (n_queries // rows)
    dk, dv = jax.lax.fori_loop(jnp.int32(0), jnp.int32(n_tiles), tile_if_seen, zeros)
    outputs["key"][...] = dk.astype(outputs["key"].dtype)
    if dv is not None:
        outputs["value"][...] = dv.astype(outputs["value"].dtype)


def _specs(arrays: Any, block_rows: int, is_blocked: Any) -> dict[str, Any]:
    """The specifications of arrays: `block_rows` rows if ``is_blocked(name)``, and otherwise all."""
    specs = {}
    for name, x in arrays.items():
        size, fixed = (block_rows, 0) if is_blocked(name) else (x.shape[-2], 1)
        inner = (0,) * (x.ndim - 3)

        def index(sequence: Any, block: Any, *, inner: Any = inner, fixed: int = fixed) -> Any:
            return sequence, *inner, 0 if fixed else block, 0

        specs[name] = pl.BlockSpec((None, *x.shape[1:-2], size, x.shape[-1]), index)
    return specs


def _call(
    kernel: Any, grid: tuple[int, int], inputs: Any, in_specs: Any, outputs: Any, out_specs: Any,
    **options: Any,
) -> Any:  # fmt: skip
    call = pl.pallas_call(
        kernel, grid=grid, in_specs=(in_specs,), out_specs=out_specs, out_shape=outputs, **options
    )
    return call(inputs)


def run_state(inputs: Any, sizes: Sizes, has_moment: bool, platform: str) -> Any:
    """Run `state_kernel` for arrays (sequences, rows, width) in a dictionary."""
    query, key = inputs["query"], inputs["key"]
    group = query.shape[0] // key.shape[0]
    column = jax.ShapeDtypeStruct((*query.shape[:-1], 1), jnp.float32)
    outputs = {"maximum": column, "normalizer": column}
    if has_moment:
        outputs |= {"moment": column, "argmax": jax.ShapeDtypeStruct(column.shape, jnp.int32)}
    if "value" in inputs:
        dtype = jnp.float32 if has_moment else query.dtype
        shape = (*query.shape[:-1], inputs["value"].shape[-1])
        outputs["out"] = jax.ShapeDtypeStruct(shape, dtype)
    in_specs = _specs(inputs, sizes.rows, lambda name: name not in ("key", "value"))
    for name in ("key", "value"):
        if name in inputs:
            shape = (None, *inputs[name].shape[1:])
            in_specs[name] = pl.BlockSpec(shape, lambda i, _: (jax.lax.div(i, group), 0, 0))
    return _call(
        functools.partial(state_kernel, sizes=sizes, has_moment=has_moment),
        (query.shape[0], query.shape[1] // sizes.rows),
        inputs, in_specs, outputs, _specs(outputs, sizes.rows, lambda name: True), **_options(platform),
    )  # fmt: skip


def run_gradient(inputs: Any, sizes: Sizes, has_moment: bool, platform: str) -> Any:
    """Run `gradient_kernel`. Arrays of the queries have one more axis, for the heads of a group."""
    key, is_parallel = inputs["key"], platform == "gpu"
    outputs = {
        "query": jax.ShapeDtypeStruct(inputs["query"].shape, jnp.float32),
        **{
            name: jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype)
            for name in ("key", "value")
            if name in inputs
        },
    }

    def is_blocked(name: str) -> bool:
        return name in ("key", "value")

    in_specs, out_specs = (_specs(x, sizes.columns, is_blocked) for x in (inputs, outputs))
    options = _options(platform)
    if is_parallel:  # the programs add to an array of zeros
        inputs = inputs | {"zeros": jnp.zeros(inputs["query"].shape, jnp.float32)}
        in_specs["zeros"] = out_specs["query"]
        position = sorted(inputs).index("zeros")
        options["input_output_aliases"] = {position: sorted(outputs).index("query")}
    return _call(
        functools.partial(
            gradient_kernel, sizes=sizes, has_moment=has_moment, is_parallel=is_parallel
        ),
        (key.shape[0], key.shape[1] // sizes.columns),
        inputs, in_specs, outputs, out_specs, **options,
    )  # fmt: skip


def _options(platform: str) -> dict[str, Any]:
    if platform == "gpu":
        return {"compiler_params": gpu.CompilerParams(num_warps=8, num_stages=1)}
    return {"interpret": platform == "cpu"}
