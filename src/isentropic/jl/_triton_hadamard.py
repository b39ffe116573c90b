"""The Triton kernel of Kronecker products. Only `isentropic.jl._rounds` imports this module.

A program holds whole vectors in registers and applies the factors one after another, so that it reads
each number once and writes it once. Sylvester's matrices are sums and differences of pairs, in float32.
Other factors are products on tensor cores (Agarwal et al. 2024, arXiv 2412.08832).
"""

from __future__ import annotations

import triton
import triton.language as tl

INPUT, OUTPUT = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_factor(
    F, FIRST: tl.constexpr, EVERY: tl.constexpr, N: tl.constexpr, ORDER: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A matrix F (N, N), padded with zeros: for every so many of its inputs, all of its outputs."""
    source, target = FIRST + EVERY * tl.arange(0, ORDER // EVERY)[:, None], tl.arange(0, ORDER)[None, :]
    at = source * N + target if IS_TRANSPOSED else target * N + source
    return tl.load(F + at, mask=(source < N) & (target < N), other=0.0)


@triton.jit
def apply_factor(
    z, F, N: tl.constexpr, ORDER: tl.constexpr, IS_DENSE: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Apply a factor along the last axis, of length ORDER, and move this axis to the front.

    The numbers of `z` are in one axis.
    """
    SIZE: tl.constexpr = z.numel
    if IS_DENSE:
        if ORDER > 32:  # in two parts, whose operands fit in the registers
            a, b = tl.split(tl.reshape(z, (SIZE // ORDER, ORDER // 2, 2)))
            f = load_factor(F, 0, 2, N, ORDER, IS_TRANSPOSED)
            z = tl.dot(a, f, input_precision=PRECISION)
            f = load_factor(F, 1, 2, N, ORDER, IS_TRANSPOSED)
            z = tl.dot(b, f, z, input_precision=PRECISION)
        else:
            f = load_factor(F, 0, 1, N, ORDER, IS_TRANSPOSED)
            z = tl.dot(tl.reshape(z, (SIZE // ORDER, ORDER)), f, input_precision=PRECISION)
        z = tl.reshape(tl.trans(z), (SIZE,))
    else:
        BITS: tl.constexpr = tl.constexpr(ORDER.bit_length() - 1)
        for _ in tl.static_range(BITS):
            a, b = tl.split(tl.reshape(z, (SIZE // 2, 2)))
            # Sums and differences move to the front, so the next bit of the index is the last one.
            z = tl.reshape(tl.trans(tl.join(a + b, a - b)), (SIZE,))
    return z


@triton.jit
def kronecker_kernel(
    X, SIGNS, SLOTS, F1, F2, F3, OUT,
    count, chunks, step, trail, sign_rows, in_row, out_row, scale,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    DENSE1: tl.constexpr, DENSE2: tl.constexpr, DENSE3: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    IN_WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, SIGNS_AT: tl.constexpr, SLOTS_AT: tl.constexpr,
    BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Apply ``scale · F1 ⊗ F2 ⊗ F3`` to `count` vectors, BATCH of them in a program.

    A row has an axis of coordinates, and an axis of length `trail`. The coordinates of a vector are
    `step` apart, and a row has `chunks` ranges of N1 · N2 · N3 · `step` coordinates. Those beyond the
    width do not exist: they are 0. Factors have the orders N, in blocks of P numbers, powers of 2.
    SIGNS multiplies coordinates at the INPUT or the OUTPUT. SLOTS has the places of coordinates in a
    row of X or OUT, or −1 for those that are not there.
    """
    N: tl.constexpr = N1 * N2 * N3
    SIZE: tl.constexpr = P1 * P2 * P3
    vector = tl.program_id(0) * BATCH + tl.arange(0, BATCH)
    outer, inner = vector // (step * trail), vector % (step * trail)
    row, place = outer // chunks, inner % trail
    is_inside = (vector < count)[:, None]
    i = tl.arange(0, SIZE)
    if N != SIZE:
        i1, i2, i3 = i // (P2 * P3), i // P3 % P2, i % P3
        is_inside &= ((i1 < N1) & (i2 < N2) & (i3 < N3))[None, :]
        # Blocks are powers of 2. The places in a row leave out what they have beyond the factors.
        i = (i1 * N2 + i2) * N3 + i3
    i = (outer % chunks * (N * step) + inner // trail)[:, None] + i[None, :] * step
    # A row may begin beyond 32 bits, and its numbers are counted within them.
    X += row.to(tl.int64)[:, None] * in_row + place[:, None]
    OUT += row.to(tl.int64)[:, None] * out_row + place[:, None]
    is_in, is_out, source, target = is_inside & (i < IN_WIDTH), is_inside & (i < OUT_WIDTH), i, i
    if SLOTS_AT == INPUT:
        source = tl.load(SLOTS + i, mask=is_in, other=-1)
        is_in = source >= 0
    if SLOTS_AT == OUTPUT:
        target = tl.load(SLOTS + i, mask=is_out, other=-1)
        is_out = target >= 0

    z = tl.load(X + source * trail, mask=is_in, other=0.0).to(tl.float32) * scale
    if SIGNS_AT == INPUT:
        z *= tl.load(SIGNS + (row % sign_rows)[:, None] * IN_WIDTH + i, mask=is_in, other=0.0)
    z = tl.reshape(z, (BATCH * SIZE,))
    z = apply_factor(z, F3, N3, P3, DENSE3, IS_TRANSPOSED, PRECISION)
    z = apply_factor(z, F2, N2, P2, DENSE2, IS_TRANSPOSED, PRECISION)
    z = apply_factor(z, F1, N1, P1, DENSE1, IS_TRANSPOSED, PRECISION)
    z = tl.trans(tl.reshape(z, (SIZE, BATCH)))  # the factors have moved their axes to the front
    if SIGNS_AT == OUTPUT:
        z *= tl.load(SIGNS + (row % sign_rows)[:, None] * OUT_WIDTH + i, mask=is_out, other=0.0)
    tl.store(OUT + target * trail, z.to(OUT.dtype.element_ty), mask=is_out)


@triton.jit
def slots_kernel(ROWS, SLOTS, count, size, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The index of each coordinate in ROWS, which ascends, or −1, by bisection."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32) + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        # Behind the last row stands a coordinate that none exceeds.
        is_below = tl.load(ROWS + middle, mask=middle < count, other=size) < i
        low, high = tl.where(is_below, middle + 1, low), tl.where(is_below, high, middle)
    is_there = tl.load(ROWS + low, mask=low < count, other=-1) == i
    tl.store(SLOTS + i, tl.where(is_there, low, -1), mask=i < size)
