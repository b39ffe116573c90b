"""The Triton kernels of attention. Only `isentropic._attention.triton` imports this module.

A program of the forward kernel holds a block of queries and passes over the keys. A program of the
backward kernel holds a block of keys and passes over the queries. So each tile takes five products
there: q·k, g·v and one for each gradient (Dao 2023, arXiv 2307.08691). Logits are in units of log 2,
as GPUs have an instruction for 2ˣ.
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


class Configuration(NamedTuple):
    """The sizes of a kernel's tile, and how the GPU runs it."""

    rows: int
    columns: int
    warps: int
    stages: int


# Configurations by kernel, GPU, bytes per number and largest width of heads. Those of "nvidia" and
# "amd" spill no registers, and fit in the 99 KiB of shared memory that GPUs of NVIDIA have since sm_80,
# or in the 64 KiB of AMD's. "hopper" (sm_90) differs for half precision and heads of up to 128 numbers,
# by what was the fastest on an H200.
_SIZES = {
    "state_kernel": {
        "nvidia": {
            2: {64: (64, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
            4: {64: (32, 32, 4, 2), 128: (32, 16, 8, 2)},
        },
        "hopper": {
            2: {128: (64, 64, 4, 3), 256: (64, 32, 8, 2)},
            4: {64: (32, 32, 4, 2), 128: (32, 16, 8, 2)},
        },
        "amd": {
            2: {64: (128, 64, 4, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
            4: {64: (64, 32, 8, 2), 128: (64, 16, 8, 1)},
        },
    },
    "gradient_kernel": {
        "nvidia": {
            2: {64: (64, 32, 8, 2), 128: (32, 64, 8, 1), 256: (32, 32, 8, 1)},
            4: {64: (16, 32, 8, 1), 128: (16, 16, 8, 1)},
        },
        "hopper": {
            2: {128: (64, 64, 8, 1), 256: (32, 32, 8, 1)},
            4: {64: (16, 32, 8, 1), 128: (16, 16, 8, 1)},
        },
        "amd": {
            2: {64: (64, 32, 4, 1), 128: (32, 32, 4, 1), 256: (32, 32, 4, 1)},
            4: {64: (32, 32, 4, 1), 128: (16, 32, 4, 1)},
        },
    },
}


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
    pointers = X + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    if ALL_INSIDE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=start + row[:, None] < n, other=0.0)


@triton.jit
def store_rows(X, x, start, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write rows of a contiguous matrix (n, WIDTH)."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + tl.cast(start, tl.int64) * WIDTH + row[:, None] * WIDTH + column[None, :]
    is_inside = start + row[:, None] < n
    tl.store(pointers, x.to(X.dtype.element_ty), mask=is_inside)


@triton.jit
def add_rows(X, x, start, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Add to rows of a contiguous matrix (n, WIDTH), to which other programs add at the same time."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = X + tl.cast(start, tl.int64) * WIDTH + row[:, None] * WIDTH + column[None, :]
    is_inside = start + row[:, None] < n
    tl.atomic_add(pointers, x, mask=is_inside, sem="relaxed")


@triton.jit
def pass_over_keys(
    q, factor, first, end, K, V, k_row, v_row, S, low, skipped, resumed, high,
    maximum, normalizer, moment, argmax, total,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_MOMENT: tl.constexpr,
    HAS_ARGMAX: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    ALL_SEEN: tl.constexpr,
):  # fmt: skip
    """The sums, and those of the tiles from `low` to `skipped` and from `resumed` to `high`.

    ALL_SEEN if all queries see all keys of these tiles.
    """
    for position in range(low, high - resumed + skipped, COLUMNS):
        block = tl.where(position < skipped, position, position - skipped + resumed)
        column = block + tl.arange(0, COLUMNS)
        k = load_rows(K, block, k_row, S, COLUMNS, WIDTH, ALL_SEEN)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor[:, None]
        if not ALL_SEEN:
            if HAS_MASK:
                is_seen = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
            else:
                is_seen = column[None, :] < S
            s = tl.where(is_seen, s, -float("inf"))

        highest = tl.max(s, 1)
        if HAS_ARGMAX:
            here = tl.min(tl.where(s == highest[:, None], column[None, :], S), 1)
            argmax = tl.where(highest > maximum, here, argmax)
        highest = tl.maximum(highest, maximum)
        # Where no key was seen so far, there is nothing to shift, and −∞ − (−∞) is NaN.
        shift = tl.where(normalizer > 0, maximum - highest, 0.0)
        shrink = tl.exp2(shift)
        x = s - tl.where(highest == -float("inf"), 0.0, highest)[:, None]
        p = tl.exp2(x)
        if HAS_MOMENT:
            moment = shrink * (moment + shift * normalizer)
            moment += tl.sum(p * tl.maximum(x, LOWEST_SCORE), 1)
        normalizer = shrink * normalizer + tl.sum(p, 1)
        maximum = highest
        if HAS_VALUE:
            v = load_rows(V, block, v_row, S, COLUMNS, VALUE_WIDTH, ALL_SEEN)
            total *= shrink[:, None]
            total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)
    return maximum, normalizer, moment, argmax, total


@triton.jit
def state_kernel(
    Q, K, V, FACTOR, FIRST, END, OUT, MAXIMUM, NORMALIZER, MOMENT, ARGMAX,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, group, L, S,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_MOMENT: tl.constexpr,
    HAS_ARGMAX: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Output, maximum, normalizer and moment of a block of queries, in one pass over the keys."""
    n_blocks = tl.cdiv(L, ROWS)
    sequence = (tl.program_id(0) // n_blocks).to(tl.int64)
    start = tl.program_id(0) % n_blocks * ROWS
    batch, head = sequence // heads, sequence % heads
    row = start + tl.arange(0, ROWS)
    at_row = sequence * L + row
    is_row = row < L
    K += batch * k_batch + head // group * k_head
    q = load_rows(Q + batch * q_batch + head * q_head, start, q_row, L, ROWS, WIDTH)
    factor = tl.load(FACTOR + at_row, mask=is_row, other=0.0) * LOG2_E

    # All queries of the block see all keys from `all_low` to `all_high`. The other tiles come first.
    low, high, all_low, all_high = 0, S, 0, S // COLUMNS * COLUMNS
    first, end = 0, S
    if HAS_MASK:
        first = tl.load(FIRST + at_row, mask=is_row, other=S)
        end = tl.minimum(tl.load(END + at_row, mask=is_row, other=0), S)
        low = tl.maximum(tl.min(first, 0), 0) // COLUMNS * COLUMNS
        high = tl.maximum(tl.max(end, 0), low)
        all_low = tl.cdiv(tl.max(tl.where(is_row, first, 0), 0), COLUMNS) * COLUMNS
        all_high = tl.min(tl.where(is_row, end, S), 0) // COLUMNS * COLUMNS
        all_low = tl.minimum(tl.maximum(all_low, low), tl.cdiv(high, COLUMNS) * COLUMNS)
        all_high = tl.maximum(all_high, all_low)
    if HAS_VALUE:
        V += batch * v_batch + head // group * v_head
    maximum = tl.full((ROWS,), -float("inf"), tl.float32)
    normalizer = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    argmax = tl.zeros((ROWS,), tl.int32)
    total = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)

    maximum, normalizer, moment, argmax, total = pass_over_keys(
        q, factor, first, end, K, V, k_row, v_row, S, low, all_low, all_high, high,
        maximum, normalizer, moment, argmax, total, WIDTH, VALUE_WIDTH, HAS_VALUE, HAS_MASK,
        HAS_MOMENT, HAS_ARGMAX, PRECISION, COLUMNS, False,
    )  # fmt: skip
    maximum, normalizer, moment, argmax, total = pass_over_keys(
        q, factor, first, end, K, V, k_row, v_row, S, all_low, all_low, all_low, all_high,
        maximum, normalizer, moment, argmax, total, WIDTH, VALUE_WIDTH, HAS_VALUE, HAS_MASK,
        HAS_MOMENT, HAS_ARGMAX, PRECISION, COLUMNS, True,
    )  # fmt: skip

    # The running maximum ignores NaN, and the normalizer does not.
    maximum = tl.where(normalizer == normalizer, maximum * LOG_2, normalizer)
    tl.store(MAXIMUM + at_row, maximum, mask=is_row)
    tl.store(NORMALIZER + at_row, normalizer, mask=is_row)
    if HAS_MOMENT:
        tl.store(MOMENT + at_row, moment * LOG_2, mask=is_row)
    if HAS_ARGMAX:
        tl.store(ARGMAX + at_row, argmax, mask=is_row)
    if HAS_VALUE:
        is_empty = normalizer == 0
        out = tl.where(is_empty[:, None], 0.0, total / tl.where(is_empty, 1.0, normalizer)[:, None])
        store_rows(OUT + sequence * L * VALUE_WIDTH, out, start, L, ROWS, VALUE_WIDTH)


@triton.jit
def gradient_kernel(
    Q, K, V, G, FACTOR, FIRST, END, LOW, HIGH, MAXIMUM, INVERSE, CONSTANT, SLOPE, REST, ARGMAX,
    DQ, DK, DV,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, group, L, S,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    HAS_VALUE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_MOMENT: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, and its share of the gradients of scaled queries.

    The gradient of a logit is p · (g·v + CONSTANT + SLOPE · x), for its weight p and centered score x,
    plus REST for the key that has the maximum.
    """
    n_blocks = tl.cdiv(S, COLUMNS)
    sequence = (tl.program_id(0) // n_blocks).to(tl.int64)  # of keys
    start = tl.program_id(0) % n_blocks * COLUMNS
    groups = heads // group
    batch, key_head = sequence // groups, sequence % groups
    column = start + tl.arange(0, COLUMNS)
    k = load_rows(K + batch * k_batch + key_head * k_head, start, k_row, S, COLUMNS, WIDTH)
    dk = tl.zeros((COLUMNS, WIDTH), tl.float32)
    dv = tl.zeros((COLUMNS, VALUE_WIDTH), tl.float32)
    if HAS_VALUE:
        V += batch * v_batch + key_head * v_head
        v = load_rows(V, start, v_row, S, COLUMNS, VALUE_WIDTH)

    for member in range(0, group):
        head = key_head * group + member
        query_sequence = batch * heads + head
        low, high = 0, L
        if HAS_MASK:
            at_block = query_sequence * n_blocks + start // COLUMNS
            low = tl.load(LOW + at_block) // ROWS * ROWS
            high = tl.load(HIGH + at_block)
        for block in range(low, high, ROWS):
            row = block + tl.arange(0, ROWS)
            at_row = query_sequence * L + row
            is_row = row < L
            q = load_rows(Q + batch * q_batch + head * q_head, block, q_row, L, ROWS, WIDTH)
            factor = tl.load(FACTOR + at_row, mask=is_row, other=0.0)
            maximum = tl.load(MAXIMUM + at_row, mask=is_row, other=0.0) * LOG2_E
            inverse = tl.load(INVERSE + at_row, mask=is_row, other=0.0)
            constant = tl.load(CONSTANT + at_row, mask=is_row, other=0.0)
            if HAS_MASK:
                first = tl.load(FIRST + at_row, mask=is_row, other=S)
                end = tl.minimum(tl.load(END + at_row, mask=is_row, other=0), S)
                is_seen = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
            else:
                end = tl.where(is_row, S, 0)  # takes fewer registers than two conditions
                is_seen = column[None, :] < end[:, None]

            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (factor * LOG2_E)[:, None]
            x = tl.where(is_seen, s - maximum[:, None], LOWEST_SCORE)
            p = tl.exp2(x) * inverse[:, None]
            slope = constant[:, None]
            if HAS_MOMENT:
                slope_of_row = tl.load(SLOPE + at_row, mask=is_row, other=0.0) * LOG_2
                slope += slope_of_row[:, None] * tl.maximum(x, LOWEST_SCORE)
            if HAS_VALUE:
                g_rows = G + query_sequence * L * VALUE_WIDTH
                g = load_rows(g_rows, block, VALUE_WIDTH, L, ROWS, VALUE_WIDTH)
                dv = tl.dot(tl.trans(p.to(g.dtype)), g, dv, input_precision=PRECISION)
                slope += tl.dot(g, tl.trans(v), input_precision=PRECISION)
            ds = p * slope
            if HAS_MOMENT:
                argmax = tl.load(ARGMAX + at_row, mask=is_row, other=-1)
                rest = tl.load(REST + at_row, mask=is_row, other=0.0)
                ds += tl.where(argmax[:, None] == column[None, :], rest[:, None], 0.0)

            dq = tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
            add_rows(DQ + query_sequence * L * WIDTH, dq, block, L, ROWS, WIDTH)
            scaled = (ds * factor[:, None]).to(q.dtype)
            dk = tl.dot(tl.trans(scaled), q, dk, input_precision=PRECISION)

    store_rows(DK + sequence * S * WIDTH, dk, start, S, COLUMNS, WIDTH)
    if HAS_VALUE:
        store_rows(DV + sequence * S * VALUE_WIDTH, dv, start, S, COLUMNS, VALUE_WIDTH)
