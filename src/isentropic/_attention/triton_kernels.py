"""The Triton kernels of attention. Only `isentropic._attention.triton` imports this module.

They restate the formulas of `isentropic._attention.tile`, in units of log 2, as GPUs have an
instruction for 2ˣ. A program of `attention_kernel` holds a block of queries and passes over their keys.
The gradients take two kernels and no atomic additions: a program of `queries_kernel` holds a block of
queries, one of `keys_kernel` a block of keys. Both compute the weights again, so a tile takes seven
products in all (Dao 2023, arXiv 2307.08691, has five, and atomic additions).

A query sees the keys of an interval, from FIRST to END. Tiles in which some key is hidden come first.
Hidden keys and values are selected away there, so that NaN in them has no effect, and rows that are
not finite make NaN of the logits of those that see them. In the other tiles products pass NaN on. Only
an infinite key may have the logit −∞ there, and so the weight 0.

The parameters are inputs, outputs, numbers and constants, as `isentropic._triton_launch` has them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
# Used in place of −∞: it is below every score of positive weight, and its product with the weight 0 is
# 0, not NaN.
LOWEST_SCORE = tl.constexpr(-1e30)
# The same for squares of scores.
LOWEST_ROOT = tl.constexpr(-1e15)


class Configuration(NamedTuple):
    """The sizes of a kernel's tile, and how the GPU runs it."""

    rows: int
    columns: int
    warps: int
    stages: int


# Configurations by kernel, GPU, bytes per number and largest width of heads. Those of "nvidia" and
# "amd" fit in the 99 KiB of shared memory that GPUs of NVIDIA have since sm_80, or in the 64 KiB of
# AMD's; "hopper" (sm_90) has more. On Hopper (64, 64, 4, 3) was the fastest for outputs in half
# precision, on an H200. The others hold as many rows as they can with hardly any register spilled.
_SIZES = {
    "attention_kernel": {
        "nvidia": {
            2: {64: (128, 64, 8, 3), 128: (64, 64, 8, 3), 256: (32, 32, 8, 3)},
            4: {64: (64, 16, 8, 3), 128: (16, 32, 8, 2)},
        },
        "hopper": {
            2: {128: (64, 64, 4, 3), 256: (64, 32, 8, 3)},
            4: {64: (64, 32, 8, 2), 128: (16, 32, 8, 3)},
        },
        "amd": {
            2: {64: (128, 64, 4, 3), 128: (64, 32, 8, 2), 256: (64, 16, 8, 2)},
            4: {64: (64, 32, 8, 2), 128: (64, 16, 8, 1)},
        },
    },
    "queries_kernel": {
        "nvidia": {
            2: {64: (128, 64, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2)},
            4: {64: (32, 32, 8, 2), 128: (16, 32, 8, 2)},
        },
        "hopper": {
            2: {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (32, 32, 8, 2)},
            4: {64: (64, 32, 8, 2), 128: (16, 32, 8, 2)},
        },
        "amd": {
            2: {64: (64, 32, 4, 1), 128: (32, 32, 4, 1), 256: (32, 32, 4, 1)},
            4: {64: (32, 32, 4, 1), 128: (16, 32, 4, 1)},
        },
    },
    "keys_kernel": {
        "nvidia": {
            2: {64: (64, 32, 8, 2), 128: (32, 64, 8, 1), 256: (32, 32, 8, 1)},
            4: {64: (32, 32, 8, 2), 128: (16, 16, 8, 2)},
        },
        "hopper": {
            2: {64: (32, 128, 8, 1), 128: (64, 32, 8, 1), 256: (32, 32, 8, 1)},
            4: {64: (32, 32, 8, 2), 128: (32, 16, 8, 2)},
        },
        "amd": {
            2: {64: (64, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1)},
            4: {64: (32, 32, 4, 1), 128: (16, 32, 4, 1)},
        },
    },
}
# This kernel holds the same tiles and no values, so it fits where the other one does.
_SIZES["largest_kernel"] = _SIZES["attention_kernel"]


def configuration(kernel: Any, width: int, itemsize: int, gpu: str) -> Configuration:
    """The configuration of a kernel for heads of `width` numbers of `itemsize` bytes each, 2 or 4.

    `gpu` is "nvidia", "hopper" or "amd".
    """
    for size, numbers in _SIZES[kernel.__name__][gpu][itemsize].items():
        if width <= size:
            return Configuration(*numbers)
    raise AssertionError(f"no configuration for heads of {width} numbers")


def precision(gpu: str) -> str:
    """The `input_precision` that is accurate to float32: three TF32 products on NVIDIA, IEEE on AMD."""
    return "ieee" if gpu == "amd" else "tf32x3"


def block_width(width: int) -> int:
    """The width of the rows that hold heads: a power of 2, and at least what tensor cores take."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def load_rows(
    X, start, stride, n, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALL_INSIDE: tl.constexpr = False
):
    """Rows of a matrix (n, WIDTH), with zeros beyond its end; ALL_INSIDE if it has all the rows."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    # The start takes 64 bits. Places within a block fit in 32, as `triton._in_rows` bounds the strides.
    pointers = X + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if ALL_INSIDE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=start + row[:, None] < n, other=0.0)


@triton.jit
def store_rows(X, x, start, stride, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write rows of a matrix (n, WIDTH)."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    is_inside = start + row[:, None] < n
    tl.store(pointers, x.to(X.dtype.element_ty), mask=is_inside)


@triton.jit
def nan_of_rows(x):
    """NaN for rows with a number that is not finite, else 0, as float32."""
    # x · 0 is NaN exactly where x is not finite, and a sum keeps it.
    return tl.sum(x.to(tl.float32) * 0.0, 1)


@triton.jit
def without_nan(x):
    """`x` with 0 in place of numbers that are not finite."""
    return tl.where(x * 0.0 == 0.0, x, 0.0)


@triton.jit
def load_factor(FACTOR, at, row, stride, n, scale, HAS_FACTOR: tl.constexpr, ROWS: tl.constexpr):
    """The factors on the products of a block of queries, in nats: scale times law."""
    factor = tl.full((ROWS,), 1.0, tl.float32) * scale
    if HAS_FACTOR:
        factor *= tl.load(FACTOR + at + row * stride, mask=row < n, other=0.0)
    return factor


@triton.jit
def load_interval(FIRST, END, at, row, L, S, HAS_MASK: tl.constexpr, ROWS: tl.constexpr):
    """The first key that each query of a block sees, and the end of its keys; none beyond L."""
    first = tl.zeros((ROWS,), tl.int32)
    end = tl.where(row < L, S, 0)
    if HAS_MASK:
        # The intervals of masks may begin before the first key, and end after the last one.
        first = tl.maximum(tl.load(FIRST + at + row, mask=row < L, other=S), 0)
        end = tl.minimum(tl.load(END + at + row, mask=row < L, other=0), S)
    return first, end


@triton.jit
def logits_of(products, factor, bias, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The logits of products of queries and keys in units of log 2, and their tanh if they are capped.

    tanh(y) is 1 − 2 / (e²ʸ + 1), or y − y³/3 + 2y⁵/15 for small y, where that loses no digits. `factor`
    and `bias` broadcast to the products.
    """
    tanh = products
    if SOFTCAP > 0.0:
        # Constants multiply the factors of rows first, so that a tile takes one multiplication.
        y = products * (factor * (1.0 / SOFTCAP))
        # An overflow of exp2 is ∞, whose reciprocal 0 leaves the right limit, 1.
        tanh = 1.0 - 2.0 / (tl.exp2(y * (2.0 * LOG2_E)) + 1.0)
        # At 0.1 the next term, 17y⁷/315, is 5e-8 of y, which is below the rounding of float32.
        series = y * (1.0 + y * y * (y * y * (2.0 / 15.0) - 1.0 / 3.0))
        tanh = tl.where(tl.abs(y) < 0.1, series, tanh)
        s = tanh * (SOFTCAP * LOG2_E)
    else:
        s = products * (factor * LOG2_E)
    if HAS_BIAS:
        s += bias * LOG2_E
    return s, tanh


@triton.jit
def load_bias(BIAS, row, column, b_row, b_column, L, S, HAS_BIAS: tl.constexpr):
    """The bias of a tile in float32, for indices that broadcast to its shape; 0 without a bias."""
    bias = 0.0
    if HAS_BIAS:
        # A bias may have L·S numbers for each head, more than 32 bits count.
        at = row.to(tl.int64) * b_row + column.to(tl.int64) * b_column
        bias = tl.load(BIAS + at, mask=(row < L) & (column < S), other=0.0).to(tl.float32)
    return bias


@triton.jit
def bounds_of_loop(low, all_low, all_high, high, ALL_SEEN: tl.constexpr):
    """low, skipped, resumed, high: a loop from `low` to `high` jumps from `skipped` to `resumed`.

    It covers the tiles from `all_low` to `all_high` if ALL_SEEN, and otherwise those on both sides of
    them. So its body, which is long, is compiled once for both sides.
    """
    if ALL_SEEN:
        return all_low, all_low, all_low, all_high
    else:
        return low, all_low, all_high, high


@triton.jit
def add_keys(
    q, factor, row, first, end, K, V, BIAS, k_row, v_row, b_row, b_column, L, S,
    low, all_low, all_high, high, maximum, normalizer, moment, square, total,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, ORDER: tl.constexpr, HAS_SQUARE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, ALL_SEEN: tl.constexpr,
):  # fmt: skip
    """The sums, and those of the tiles that all queries see in full (ALL_SEEN), or of the others."""
    low, skipped, resumed, high = bounds_of_loop(low, all_low, all_high, high, ALL_SEEN)
    for position in range(low, high - resumed + skipped, COLUMNS):
        block = tl.where(position < skipped, position, position - skipped + resumed)
        column = block + tl.arange(0, COLUMNS)
        k = load_rows(K, block, k_row, S, COLUMNS, WIDTH, ALL_SEEN)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        bias = load_bias(BIAS, row[:, None], column[None, :], b_row, b_column, L, S, HAS_BIAS)
        s, _tanh = logits_of(products, factor[:, None], bias, SOFTCAP, HAS_BIAS)
        if HAS_VALUE:
            v = load_rows(V, block, v_row, S, COLUMNS, VALUE_WIDTH, ALL_SEEN)
        if not ALL_SEEN:
            if HAS_MASK:
                s += nan_of_rows(k)[None, :]
                if HAS_VALUE:
                    s += nan_of_rows(v)[None, :]
                    v = without_nan(v)
            is_seen = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
            s = tl.where(is_seen, s, -float("inf"))

        highest = tl.maximum(tl.max(s, 1), maximum)
        # Where no key was seen so far, there is nothing to shift, and −∞ − (−∞) is NaN.
        shift = tl.where(normalizer > 0, maximum - highest, 0.0)
        shrink = tl.exp2(shift)
        x = s - tl.where(highest == -float("inf"), 0.0, highest)[:, None]
        p = tl.exp2(x)
        if HAS_SQUARE:
            # Σ eˣ (x + d)² is Σ eˣ x² + d (2 Σ eˣ x + d Σ eˣ). So this comes before the moment moves to
            # the new maximum, and the moment before the normalizer.
            square = shrink * (square + shift * (2.0 * moment + shift * normalizer))
            root = tl.maximum(x, LOWEST_ROOT)
            square += tl.sum(p * root * root, 1)
        if ORDER == 1.0:
            moment = shrink * (moment + shift * normalizer)
            moment += tl.sum(p * tl.maximum(x, LOWEST_SCORE), 1)
        elif ORDER > 0.0:
            # Not powers of p: below order 1 terms count whose p has underflowed to 0.
            moment = tl.exp2(shift * ORDER) * moment + tl.sum(tl.exp2(x * ORDER), 1)
        normalizer = shrink * normalizer + tl.sum(p, 1)
        maximum = highest
        if HAS_VALUE:
            total *= shrink[:, None]
            # Half precision holds the weights, which are at most 1. The sum itself stays in float32.
            total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)
    return maximum, normalizer, moment, square, total


@triton.jit
def ranges_of_keys(first, end, row, L, S, HAS_MASK: tl.constexpr, COLUMNS: tl.constexpr):
    """low, skipped, resumed, high: the keys that a block of queries sees, and those that all see."""
    # Without a mask only the last tile may be incomplete.
    low, high, all_low, all_high = 0, S, 0, S // COLUMNS * COLUMNS
    if HAS_MASK:
        # Rows beyond L see no key. They must neither widen the range nor narrow that of the full tiles.
        low = tl.min(tl.where(row < L, first, S), 0) // COLUMNS * COLUMNS
        high = tl.maximum(tl.max(end, 0), low)
        all_low = tl.cdiv(tl.max(tl.where(row < L, first, 0), 0), COLUMNS) * COLUMNS
        all_high = tl.min(tl.where(row < L, end, S), 0) // COLUMNS * COLUMNS
        # A block may have no full tile. Its bounds then meet, and the first loop takes all tiles.
        all_low = tl.minimum(tl.maximum(all_low, low), tl.cdiv(high, COLUMNS) * COLUMNS)
        all_high = tl.maximum(all_high, all_low)
    return low, all_low, all_high, high


@triton.jit
def attention_kernel(
    Q, K, V, BIAS, FACTOR, FIRST, END,
    OUT, MAXIMUM, NORMALIZER, MOMENT, SQUARE,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    b_batch, b_head, b_row, b_column, f_batch, f_head, f_row, i_batch, i_head,
    o_batch, o_head, o_row,
    heads, group, L, S, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_MASK: tl.constexpr, ORDER: tl.constexpr, HAS_SQUARE: tl.constexpr,
    SOFTCAP: tl.constexpr, IS_REPAIR: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Output, maximum, normalizer and moment of a block of queries, in one pass over the keys.

    ORDER is that of the moment, far from 1 or 1 itself; 0 if there is none. HAS_SQUARE if SQUARE gets
    Σ eˣ x², for which ORDER is 1. IS_REPAIR if OUT is an output of another kernel, of which only blocks
    that are not finite are computed again.
    """
    n_blocks = tl.cdiv(L, ROWS)
    # In 64 bits, because its products with strides and with L may exceed 32.
    sequence = (tl.program_id(0) // n_blocks).to(tl.int64)
    # Under a causal mask the last blocks take longest. So they come first.
    start = (n_blocks - 1 - tl.program_id(0) % n_blocks) * ROWS
    batch, head = sequence // heads, sequence % heads
    row = start + tl.arange(0, ROWS)
    OUT += batch * o_batch + head * o_head
    if IS_REPAIR:  # noqa: SIM102  # known when it is compiled, and the other is not
        if tl.sum(nan_of_rows(load_rows(OUT, start, o_row, L, ROWS, VALUE_WIDTH)), 0) == 0:
            return
    # The heads of a group read the same keys, so grouped keys are never repeated in memory.
    K += batch * k_batch + head // group * k_head
    if HAS_BIAS:
        BIAS += batch * b_batch + head * b_head
    q = load_rows(Q + batch * q_batch + head * q_head, start, q_row, L, ROWS, WIDTH)
    at = batch * f_batch + head * f_head
    factor = load_factor(FACTOR, at, row, f_row, L, scale, HAS_FACTOR, ROWS)
    at = batch * i_batch + head * i_head
    first, end = load_interval(FIRST, END, at, row, L, S, HAS_MASK, ROWS)
    low, all_low, all_high, high = ranges_of_keys(first, end, row, L, S, HAS_MASK, COLUMNS)
    if HAS_VALUE:
        V += batch * v_batch + head // group * v_head
    maximum = tl.full((ROWS,), -float("inf"), tl.float32)
    normalizer = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)

    for ALL_SEEN in tl.static_range(2):
        maximum, normalizer, moment, square, total = add_keys(
            q, factor, row, first, end, K, V, BIAS, k_row, v_row, b_row, b_column, L, S,
            low, all_low, all_high, high, maximum, normalizer, moment, square, total,
            WIDTH, VALUE_WIDTH, HAS_VALUE, HAS_BIAS, HAS_MASK, ORDER, HAS_SQUARE, SOFTCAP, PRECISION,
            COLUMNS, ALL_SEEN,
        )  # fmt: skip

    is_empty = normalizer == 0
    out = total / tl.where(is_empty, 1.0, normalizer)[:, None]
    if HAS_MASK:
        # A query or a value that is not finite makes all results of the query NaN, unless it sees none.
        nan = nan_of_rows(q)
        if HAS_VALUE:
            nan += nan_of_rows(out)
        normalizer += tl.where(is_empty, 0.0, nan)
    # The running maximum ignores NaN, and the normalizer does not.
    nan = normalizer * 0.0
    at_row = sequence * L + row
    if not IS_REPAIR:
        tl.store(MAXIMUM + at_row, maximum * LOG_2 + nan, mask=row < L)
        tl.store(NORMALIZER + at_row, normalizer, mask=row < L)
    if ORDER == 1.0:
        # Only this moment is linear in x. Those of other orders are sums of powers, without a unit.
        moment *= LOG_2
    if ORDER > 0.0:
        tl.store(MOMENT + at_row, moment + nan, mask=row < L)
    if HAS_SQUARE:
        tl.store(SQUARE + at_row, square * (LOG_2 * LOG_2) + nan, mask=row < L)
    if HAS_VALUE:
        out = tl.where(is_empty[:, None], 0.0, out + nan[:, None])
        store_rows(OUT, out, start, o_row, L, ROWS, VALUE_WIDTH)


@triton.jit
def gradient_of_logits(
    x, p, slope, constant, moment_slope, rest, is_largest,
    ORDER: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits, for scores `x`, their normalized weights `p` and ``slope = g · v``.

    It is p (g·v + constant + moment_slope · x) at order 1, and at others p (g·v + constant) +
    moment_slope · 2^(order · x); see `triton.gradient_terms`. The largest logit gets `rest` besides.
    """
    slope += constant
    if ORDER == 1.0:
        slope += moment_slope * (tl.maximum(x, LOWEST_SCORE) * LOG_2)
    ds = p * slope
    if ORDER > 0.0 and ORDER != 1.0:
        ds += moment_slope * tl.exp2(x * ORDER)
    if HAS_REST:
        ds += tl.where(is_largest, rest, 0.0)
    return ds


@triton.jit
def add_keys_to_gradient(
    q, g, factor, row, first, end, reference, inverse, constant, moment_slope, rest, largest,
    K, V, BIAS, k_row, v_row, b_row, b_column, L, S, low, all_low, all_high, high, dq,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, ORDER: tl.constexpr, SOFTCAP: tl.constexpr, HAS_REST: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, ALL_SEEN: tl.constexpr,
):  # fmt: skip
    """The gradient of scaled queries, and the share of tiles of keys; see `add_keys`."""
    low, skipped, resumed, high = bounds_of_loop(low, all_low, all_high, high, ALL_SEEN)
    for position in range(low, high - resumed + skipped, COLUMNS):
        block = tl.where(position < skipped, position, position - skipped + resumed)
        column = block + tl.arange(0, COLUMNS)
        k = load_rows(K, block, k_row, S, COLUMNS, WIDTH, ALL_SEEN)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        bias = load_bias(BIAS, row[:, None], column[None, :], b_row, b_column, L, S, HAS_BIAS)
        s, tanh = logits_of(products, factor[:, None], bias, SOFTCAP, HAS_BIAS)
        # The final maximum is known here, so no sum moves from tile to tile as in `add_keys`.
        x = s - reference[:, None]
        if not ALL_SEEN:
            is_seen = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
            x = tl.where(is_seen, x, -float("inf"))
            if HAS_MASK:
                k = without_nan(k)
        p = tl.exp2(x) * inverse[:, None]
        slope = tl.zeros_like(x)
        if HAS_VALUE:
            v = load_rows(V, block, v_row, S, COLUMNS, VALUE_WIDTH, ALL_SEEN)
            slope = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        is_largest = column[None, :] == largest[:, None]
        ds = gradient_of_logits(
            x, p, slope, constant[:, None], moment_slope[:, None], rest[:, None], is_largest, ORDER,
            HAS_REST,
        )  # fmt: skip
        if SOFTCAP > 0.0:
            ds *= 1.0 - tanh * tanh
        if not ALL_SEEN:  # 0 · NaN of a hidden value is NaN
            ds = tl.where(is_seen, ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def load_columns(
    MAXIMUM, NORMALIZER, CONSTANT, SLOPE, at_row, is_row, HAS_CONSTANT: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):  # fmt: skip
    """What belongs to a query: the reference in units of log 2, 1/z, and the terms of its gradient."""
    reference = tl.load(MAXIMUM + at_row, mask=is_row, other=0.0)
    # A query that sees no key has only logits of −∞: relative to 0 their weights are 0, not NaN.
    reference = tl.where(reference == -float("inf"), 0.0, reference * LOG2_E)
    normalizer = tl.load(NORMALIZER + at_row, mask=is_row, other=0.0)
    inverse = tl.where(normalizer == 0, 0.0, 1.0 / tl.where(normalizer == 0, 1.0, normalizer))
    constant = tl.zeros_like(inverse)
    moment_slope = tl.zeros_like(inverse)
    if HAS_CONSTANT:
        constant = tl.load(CONSTANT + at_row, mask=is_row, other=0.0)
    if HAS_SLOPE:
        moment_slope = tl.load(SLOPE + at_row, mask=is_row, other=0.0)
    return reference, inverse, constant, moment_slope


@triton.jit
def queries_kernel(
    Q, K, V, BIAS, FACTOR, FIRST, END, G, OUT, MAXIMUM, NORMALIZER, CONSTANT, SLOPE, REST, LARGEST,
    DQ, DFACTOR, DELTA,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    b_batch, b_head, b_row, b_column, f_batch, f_head, f_row, i_batch, i_head,
    heads, group, L, S, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_MASK: tl.constexpr, ORDER: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_REST: tl.constexpr, HAS_CONSTANT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of queries and of their factors.

    DELTA gets the constant of the gradient of the logits, which `keys_kernel` reads.
    """
    n_blocks = tl.cdiv(L, ROWS)
    sequence = (tl.program_id(0) // n_blocks).to(tl.int64)
    start = (n_blocks - 1 - tl.program_id(0) % n_blocks) * ROWS
    batch, head = sequence // heads, sequence % heads
    row = start + tl.arange(0, ROWS)
    at_row, is_row = sequence * L + row, row < L
    K += batch * k_batch + head // group * k_head
    if HAS_BIAS:
        BIAS += batch * b_batch + head * b_head
    q = load_rows(Q + batch * q_batch + head * q_head, start, q_row, L, ROWS, WIDTH)
    at = batch * f_batch + head * f_head
    factor = load_factor(FACTOR, at, row, f_row, L, scale, HAS_FACTOR, ROWS)
    at = batch * i_batch + head * i_head
    first, end = load_interval(FIRST, END, at, row, L, S, HAS_MASK, ROWS)
    low, all_low, all_high, high = ranges_of_keys(first, end, row, L, S, HAS_MASK, COLUMNS)
    reference, inverse, constant, moment_slope = load_columns(
        MAXIMUM, NORMALIZER, CONSTANT, SLOPE, at_row, is_row, HAS_CONSTANT, ORDER > 0.0
    )
    rest = tl.zeros((ROWS,), tl.float32)
    # No key has the index −1, so no logit gets `rest`.
    largest = tl.full((ROWS,), -1, tl.int32)
    if HAS_REST:
        rest = tl.load(REST + at_row, mask=is_row, other=0.0)
        largest = tl.load(LARGEST + at_row, mask=is_row, other=-1)
    # Without values the argument is not read, but it has to be some tile.
    g = q
    if HAS_VALUE:
        V += batch * v_batch + head // group * v_head
        g = load_rows(G + sequence * L * VALUE_WIDTH, start, VALUE_WIDTH, L, ROWS, VALUE_WIDTH)
        out = load_rows(OUT + sequence * L * VALUE_WIDTH, start, VALUE_WIDTH, L, ROWS, VALUE_WIDTH)
        # Σ p (g · v) over the keys is g · out, so the gradient takes a single pass over them (Dao et
        # al. 2022, arXiv 2205.14135).
        constant -= tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(DELTA + at_row, constant, mask=is_row)

    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    for ALL_SEEN in tl.static_range(2):
        dq = add_keys_to_gradient(
            q, g, factor, row, first, end, reference, inverse, constant, moment_slope, rest, largest,
            K, V, BIAS, k_row, v_row, b_row, b_column, L, S, low, all_low, all_high, high, dq,
            WIDTH, VALUE_WIDTH, HAS_VALUE, HAS_BIAS, HAS_MASK, ORDER, SOFTCAP, HAS_REST, PRECISION,
            COLUMNS, ALL_SEEN,
        )  # fmt: skip
    if HAS_FACTOR:
        if HAS_MASK:  # a query that is not finite may see no key
            q = without_nan(q)
        # So far `dq` is the gradient of the scaled queries. The factor reaches it in `store_rows`.
        of_factor = tl.sum(dq * q.to(tl.float32), 1) * scale
        tl.store(DFACTOR + at_row, of_factor, mask=is_row)
    store_rows(DQ + sequence * L * WIDTH, dq * factor[:, None], start, WIDTH, L, ROWS, WIDTH)


@triton.jit
def add_queries(
    k, v, column, Q, G, BIAS, FACTOR, FIRST, END, MAXIMUM, NORMALIZER, DELTA, SLOPE, REST, LARGEST,
    q_row, b_row, b_column, f_row, L, S, scale, low, all_low, all_high, high, dk, dv,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_MASK: tl.constexpr, ORDER: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_REST: tl.constexpr, HAS_CONSTANT: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    ALL_SEEN: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, and the share of tiles of queries.

    The tiles are transposed, (keys, queries), so that weights and gradients are first factors of
    products, which tensor cores can read from registers.
    """
    low, skipped, resumed, high = bounds_of_loop(low, all_low, all_high, high, ALL_SEEN)
    for position in range(low, high - resumed + skipped, ROWS):
        block = tl.where(position < skipped, position, position - skipped + resumed)
        row = block + tl.arange(0, ROWS)
        is_row = row < L
        q = load_rows(Q, block, q_row, L, ROWS, WIDTH, ALL_SEEN)
        factor = load_factor(FACTOR, 0, row, f_row, L, scale, HAS_FACTOR, ROWS)
        reference, inverse, constant, moment_slope = load_columns(
            MAXIMUM, NORMALIZER, DELTA, SLOPE, row, is_row, HAS_CONSTANT, ORDER > 0.0
        )
        rest = tl.zeros((ROWS,), tl.float32)
        largest = tl.full((ROWS,), -1, tl.int32)
        if HAS_REST:
            rest = tl.load(REST + row, mask=is_row, other=0.0)
            largest = tl.load(LARGEST + row, mask=is_row, other=-1)

        products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        bias = load_bias(BIAS, row[None, :], column[:, None], b_row, b_column, L, S, HAS_BIAS)
        s, tanh = logits_of(products, factor[None, :], bias, SOFTCAP, HAS_BIAS)
        x = s - reference[None, :]
        if not ALL_SEEN:
            first, end = load_interval(FIRST, END, 0, row, L, S, HAS_MASK, ROWS)
            is_seen = (column[:, None] >= first[None, :]) & (column[:, None] < end[None, :])
            x = tl.where(is_seen, x, -float("inf"))
            if HAS_MASK:
                q = without_nan(q)
        p = tl.exp2(x) * inverse[None, :]
        slope = tl.zeros_like(x)
        if HAS_VALUE:
            g = load_rows(G, block, VALUE_WIDTH, L, ROWS, VALUE_WIDTH, ALL_SEEN)
            slope = tl.dot(v, tl.trans(g), input_precision=PRECISION)
            if not ALL_SEEN:
                if HAS_MASK:
                    p += nan_of_rows(g)[None, :]
                    g = without_nan(g)
                p = tl.where(is_seen, p, 0.0)
            dv = tl.dot(p.to(g.dtype), g, dv, input_precision=PRECISION)
        is_largest = column[:, None] == largest[None, :]
        ds = gradient_of_logits(
            x, p, slope, constant[None, :], moment_slope[None, :], rest[None, :], is_largest, ORDER,
            HAS_REST,
        )  # fmt: skip
        if SOFTCAP > 0.0:
            ds *= 1.0 - tanh * tanh
        # The queries of a tile differ in their factors, which therefore cannot wait for the whole sum.
        ds *= factor[None, :]
        if not ALL_SEEN:
            ds = tl.where(is_seen, ds, 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def keys_kernel(
    Q, K, V, BIAS, FACTOR, FIRST, END, G, MAXIMUM, NORMALIZER, DELTA, SLOPE, REST, LARGEST,
    LOW, ALL_LOW, ALL_HIGH, HIGH,
    DK, DV,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    b_batch, b_head, b_row, b_column, f_batch, f_head, f_row, i_batch, i_head, r_batch, r_head,
    heads, group, L, S, scale,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_VALUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_MASK: tl.constexpr, ORDER: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_REST: tl.constexpr, HAS_CONSTANT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, over all heads of their group."""
    n_blocks = tl.cdiv(S, COLUMNS)
    sequence = (tl.program_id(0) // n_blocks).to(tl.int64)  # of keys
    block = tl.program_id(0) % n_blocks
    start = block * COLUMNS
    groups = heads // group
    batch, key_head = sequence // groups, sequence % groups
    column = start + tl.arange(0, COLUMNS)
    k = load_rows(K + batch * k_batch + key_head * k_head, start, k_row, S, COLUMNS, WIDTH)
    v = k
    dk = tl.zeros((COLUMNS, WIDTH), tl.float32)
    dv = tl.zeros((COLUMNS, VALUE_WIDTH), tl.float32)
    if HAS_VALUE:
        v = load_rows(V + batch * v_batch + key_head * v_head, start, v_row, S, COLUMNS, VALUE_WIDTH)

    # A program sums over the heads of its group, so no two programs write to the same keys.
    for member in range(0, group):
        head = key_head * group + member
        at_row = (batch * heads + head) * L
        # The queries that see one of the keys, and those that see all of them.
        # Without a mask a block may end beyond S: what its last rows sum up is not stored.
        low, all_low, all_high, high = 0, 0, L // ROWS * ROWS, L
        if HAS_MASK:
            at_block = batch * r_batch + head * r_head + block
            low = tl.load(LOW + at_block) // ROWS * ROWS
            high = tl.maximum(tl.load(HIGH + at_block), low)
            all_low = tl.cdiv(tl.load(ALL_LOW + at_block), ROWS) * ROWS
            all_high = tl.load(ALL_HIGH + at_block) // ROWS * ROWS
            all_low = tl.minimum(tl.maximum(all_low, low), tl.cdiv(high, ROWS) * ROWS)
            all_high = tl.maximum(all_high, all_low)
        q_rows = Q + batch * q_batch + head * q_head
        biases, g_rows = BIAS, G
        if HAS_BIAS:
            biases += batch * b_batch + head * b_head
        if HAS_VALUE:
            g_rows += at_row * VALUE_WIDTH
        factors = FACTOR + batch * f_batch + head * f_head
        firsts, ends = FIRST, END
        if HAS_MASK:
            firsts += batch * i_batch + head * i_head
            ends += batch * i_batch + head * i_head
        for ALL_SEEN in tl.static_range(2):
            dk, dv = add_queries(
                k, v, column, q_rows, g_rows, biases, factors, firsts, ends, MAXIMUM + at_row,
                NORMALIZER + at_row, DELTA + at_row, SLOPE + at_row, REST + at_row, LARGEST + at_row,
                q_row, b_row, b_column, f_row, L, S, scale, low, all_low, all_high, high, dk, dv,
                WIDTH, VALUE_WIDTH, HAS_VALUE, HAS_BIAS, HAS_FACTOR, HAS_MASK, ORDER, SOFTCAP, HAS_REST,
                HAS_CONSTANT, PRECISION, ROWS, ALL_SEEN,
            )  # fmt: skip

    store_rows(DK + sequence * S * WIDTH, dk, start, WIDTH, S, COLUMNS, WIDTH)
    if HAS_VALUE:
        dv_rows = DV + sequence * S * VALUE_WIDTH
        store_rows(dv_rows, dv, start, VALUE_WIDTH, S, COLUMNS, VALUE_WIDTH)


@triton.jit
def count_below(X, bound, n):
    """How many of the first numbers of a nondecreasing array of length n are below a bound."""
    low, high = 0, n
    while low < high:
        # By bisection: a count would read all queries again for each block of keys.
        middle = (low + high) // 2
        is_below = tl.load(X + middle) < bound
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def reach_kernel(
    FIRST, END,
    LOW, ALL_LOW, ALL_HIGH, HIGH,
    L, S,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """For a block of keys, the range of the queries that see one of them, and of those that see all.

    The ends of the intervals do not decrease from query to query.
    """
    n_blocks = tl.cdiv(S, COLUMNS)
    at_row = (tl.program_id(0) // n_blocks).to(tl.int64) * L
    start = tl.program_id(0) % n_blocks * COLUMNS
    end = tl.minimum(start + COLUMNS, S)
    at = tl.program_id(0)
    tl.store(LOW + at, count_below(END + at_row, start + 1, L))
    tl.store(HIGH + at, count_below(FIRST + at_row, end, L))
    # The tiles of these queries are computed without any check, so a block that ends beyond S has none.
    seeing_all = count_below(END + at_row, start + COLUMNS, L)
    tl.store(ALL_LOW + at, tl.where(start + COLUMNS > S, L, seeing_all))
    tl.store(ALL_HIGH + at, count_below(FIRST + at_row, start + 1, L))


@triton.jit
def largest_kernel(
    Q, K, BIAS, FACTOR, FIRST, END, REST,
    LARGEST,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    b_batch, b_head, b_row, b_column, f_batch, f_head, f_row, i_batch, i_head,
    heads, group, L, S, scale,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The key of the largest logit of each query; −1 for blocks in which all of REST is 0."""
    n_blocks = tl.cdiv(L, ROWS)
    sequence = (tl.program_id(0) // n_blocks).to(tl.int64)
    start = tl.program_id(0) % n_blocks * ROWS
    batch, head = sequence // heads, sequence % heads
    row = start + tl.arange(0, ROWS)
    at_row, is_row = sequence * L + row, row < L
    largest = tl.full((ROWS,), -1, tl.int32)
    rest = tl.load(REST + at_row, mask=is_row, other=0.0)
    # A NaN is not 0 either, so it is passed on to the gradient.
    if tl.max(tl.where(rest == 0, 0, 1), 0) > 0:
        K += batch * k_batch + head // group * k_head
        if HAS_BIAS:
            BIAS += batch * b_batch + head * b_head
        q = load_rows(Q + batch * q_batch + head * q_head, start, q_row, L, ROWS, WIDTH)
        at = batch * f_batch + head * f_head
        factor = load_factor(FACTOR, at, row, f_row, L, scale, HAS_FACTOR, ROWS)
        at = batch * i_batch + head * i_head
        first, end = load_interval(FIRST, END, at, row, L, S, HAS_MASK, ROWS)
        low, _all_low, _all_high, high = ranges_of_keys(first, end, row, L, S, HAS_MASK, COLUMNS)
        maximum = tl.full((ROWS,), -float("inf"), tl.float32)
        # Full tiles are not apart here: only losses that depend on the maximum run this loop.
        for block in range(low, high, COLUMNS):
            column = block + tl.arange(0, COLUMNS)
            k = load_rows(K, block, k_row, S, COLUMNS, WIDTH)
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            bias = load_bias(BIAS, row[:, None], column[None, :], b_row, b_column, L, S, HAS_BIAS)
            s, _tanh = logits_of(products, factor[:, None], bias, SOFTCAP, HAS_BIAS)
            is_seen = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
            s = tl.where(is_seen, s, -float("inf"))
            highest = tl.max(s, 1)
            # Of equal logits the first one alone gets `rest`, within a tile and between tiles.
            here = tl.min(tl.where(s == highest[:, None], column[None, :], S), 1)
            largest = tl.where(highest > maximum, here, largest)
            maximum = tl.maximum(highest, maximum)
    tl.store(LARGEST + at_row, largest, mask=is_row)


@triton.jit
def finite_kernel(
    X,
    Y, IS_FINITE,
    x_batch, x_head, x_row,
    heads, L, n_features,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A copy with 0 in place of numbers that are not finite, and which rows had none of them."""
    n_blocks = tl.cdiv(L, ROWS)
    sequence = (tl.program_id(0) // n_blocks).to(tl.int64)
    row = tl.program_id(0) % n_blocks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    is_inside = (row[:, None] < L) & (column[None, :] < n_features)
    X += sequence // heads * x_batch + sequence % heads * x_head
    x = tl.load(X + row[:, None].to(tl.int64) * x_row + column[None, :], mask=is_inside, other=0.0)
    at_row = sequence * L + row
    tl.store(IS_FINITE + at_row, (nan_of_rows(x) == 0).to(tl.int8), mask=row < L)
    tl.store(Y + at_row[:, None] * n_features + column[None, :], without_nan(x), mask=is_inside)
