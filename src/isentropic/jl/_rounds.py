"""Maps in rounds of signs and Kronecker products, which a Triton kernel computes on GPUs.

The kernel reads each number once and writes it once, if a vector fits in the registers of a block of
threads: up to 16384 coordinates with Sylvester's matrices, and 2048 to 8192 with other factors. Longer
vectors take a pass for some of the factors, and one for the others. The memory sets the least time of a
pass: 8 bytes for each coordinate of float32, over the bandwidth. At the 4.8 TB/s of an H200 that is 1.8
ms for 2³⁰ coordinates. No GPU has timed this kernel yet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._namespace import Array, imported_torch, is_jax, is_torch
from isentropic._triton_launch import Call, Output, contiguous, gpu_kind, launch

INPUT, OUTPUT = 1, 2
# A dense factor of a higher order does not fit in the shared memory of all GPUs.
_MAX_DENSE_ORDER = 128
# The most numbers of a vector in registers, by the largest order of a dense factor. Vectors that do not
# fit are split into parts of half as many, of which more run at once.
_MAX_SIZES = {0: 2**14, 64: 2**13, _MAX_DENSE_ORDER: 2**11}
# Where the coordinates of a vector are not contiguous, so many vectors side by side are.
_MIN_COLUMNS = 16
_MAX_FACTORS = 3  # in one pass
_SLOTS_BLOCK = 256
_MAX_INDEX = 2**30  # the kernel counts vectors, and the numbers of a row, in int32

# The order of a factor, and the index of its matrix in the arrays, which is None for Sylvester's.
Factor = tuple[int, int | None]


class Round(NamedTuple):
    """Signs at the input or the output, a Kronecker product, and a choice of coordinates.

    `signs`, `slots` and factors are indices of arrays; see `kronecker_kernel`. A row of the input has
    `entries[0]` coordinates, or slots if they are at the input. Coordinates from `widths[0]` on are 0.
    The second ones are those of the output.
    """

    factors: tuple[Factor, ...]
    scale: float
    widths: tuple[int, int]
    entries: tuple[int, int]
    signs: int | None = None
    signs_at: int = 0
    slots: int | None = None
    slots_at: int = 0
    is_transposed: bool = False

    @property
    def adjoint(self) -> Round:
        other = {0: 0, INPUT: OUTPUT, OUTPUT: INPUT}
        return self._replace(
            widths=self.widths[::-1],
            entries=self.entries[::-1],
            signs_at=other[self.signs_at],
            slots_at=other[self.slots_at],
            is_transposed=not self.is_transposed,
        )

    @property
    def size(self) -> int:
        return math.prod([order for order, _ in self.factors])


class Program(NamedTuple):
    """A linear map of the rows of a matrix, which have the axes (blocks, coordinates, trail).

    It has no arrays, and is hashable. Its arrays are arguments: float32, and int32 for slots.
    """

    rounds: tuple[Round, ...]
    blocks: int
    trail: int

    @property
    def adjoint(self) -> Program:
        return self._replace(rounds=tuple([part.adjoint for part in reversed(self.rounds)]))

    @property
    def width(self) -> int:
        """The size of a row of the result."""
        return self.blocks * self.rounds[-1].entries[1] * self.trail

    def supports(self, n_rows: int) -> bool:
        """Whether the kernel has these factors, and can count the numbers of so many rows."""
        orders = [order for part in self.rounds for order, matrix in part.factors if matrix is not None]
        sizes = [max(part.size, *part.entries) * self.trail for part in self.rounds]
        vectors = [n_rows * self.blocks * size for size in sizes]
        return (
            max(orders, default=0) <= _MAX_DENSE_ORDER
            and all(part.factors for part in self.rounds)
            and max(sizes) <= _MAX_INDEX
            and max(vectors) <= 2 * _MAX_INDEX  # a vector has two coordinates or more
        )

    def run(self, xp: ModuleType, x: Array, arrays: Sequence[Array]) -> Array:
        """The map of each row of a matrix, by the kernel, in the dtype of `x`."""
        shape, dtype = (x.shape[0], self.width), x.dtype
        x, *arrays = (contiguous(xp, part) for part in (x, *arrays))
        for call, used in _calls(xp, self, x.shape[0], dtype):
            inputs = [x, *(None if n is None else arrays[n] for n in used)]
            (x,) = launch(xp, call._replace(inputs=inputs))
        return xp.reshape(x, shape)


@functools.lru_cache(maxsize=256)
def _calls(
    xp: ModuleType, program: Program, n_rows: int, dtype: Any
) -> list[tuple[Any, tuple[int | None, ...]]]:
    """The launches without their inputs, and the indices of arrays that follow `x` in the inputs."""
    found = [
        _call(xp, program, part, i, n_rows)
        for part in program.rounds
        for i in range(len(passes_of(part.factors, is_contiguous=program.trail == 1)))
    ]
    last, used = found[-1]
    # Only the last pass rounds to the dtype of the result.
    found[-1] = last._replace(outputs=[last.outputs[0]._replace(dtype=dtype)]), used
    return found


def _call(xp: Any, program: Program, part: Round, i: int, n_rows: int) -> Any:
    """The launch for pass i of a round. The last factors come first, as they are contiguous."""
    from isentropic.jl._triton_hadamard import kronecker_kernel

    trail = program.trail
    passes = passes_of(part.factors, is_contiguous=trail == 1)
    sizes = [math.prod([order for order, _ in factors]) for factors in passes]
    step, chunks = math.prod(sizes[:i]), math.prod(sizes[i + 1 :])
    sides = {INPUT: i == 0, OUTPUT: i == len(passes) - 1}  # which of them this pass has
    widths, entries = (
        [n if is_here else part.size for n, is_here in zip(pair, sides.values(), strict=True)]
        for pair in (part.widths, part.entries)
    )
    signs_at, slots_at = (at if sides.get(at) else 0 for at in (part.signs_at, part.slots_at))
    rows = n_rows * program.blocks
    count = rows * chunks * step * trail
    # The kernel always has three factors. One of order 1 does nothing.
    factors = ((1, None),) * (_MAX_FACTORS - len(passes[i])) + passes[i]
    batch, warps = configuration(passes[i], is_contiguous=step * trail == 1)
    constants: dict[str, Any] = {}
    for k, (order, matrix) in enumerate(factors, 1):
        is_dense = matrix is not None
        constants |= {f"N{k}": order, f"P{k}": _block(order, matrix), f"DENSE{k}": is_dense}
    call = Call(
        kronecker_kernel,
        grid=-(-count // batch),
        inputs=(),
        outputs=[Output((rows, entries[1] * trail), xp.float32)],
        numbers={
            "count": count, "chunks": chunks, "step": step, "trail": trail,
            "sign_rows": program.blocks, "in_row": entries[0] * trail,
            "out_row": entries[1] * trail, "scale": part.scale if i == 0 else 1.0,
        },
        constants=constants | {
            "IS_TRANSPOSED": part.is_transposed, "IN_WIDTH": widths[0], "OUT_WIDTH": widths[1],
            "SIGNS_AT": signs_at, "SLOTS_AT": slots_at, "BATCH": batch, "PRECISION": _precision(xp),
        },
        warps=warps,
        stages=1,
    )  # fmt: skip
    matrices = [matrix for _, matrix in factors]
    return call, (part.signs if signs_at else None, part.slots if slots_at else None, *matrices)


def slots_of(xp: ModuleType, rows: Array, size: int) -> Array:
    """The places of `size` coordinates in `rows`, which are in ascending order; −1 for the others."""
    from isentropic.jl._triton_hadamard import slots_kernel

    constants = {"STEPS": rows.shape[0].bit_length(), "BLOCK": _SLOTS_BLOCK}
    call = Call(
        slots_kernel,
        grid=-(-size // _SLOTS_BLOCK),
        inputs=[contiguous(xp, rows)],
        outputs=[Output((size,), xp.int32)],
        numbers={"count": rows.shape[0], "size": size},
        constants=constants,
        warps=4,
        stages=1,
    )
    return launch(xp, call)[0]


@functools.lru_cache(maxsize=256)
def passes_of(factors: tuple[Factor, ...], *, is_contiguous: bool) -> list[tuple[Factor, ...]]:
    """Split a product into parts that fit in registers, the last factors first.

    A matrix of Sylvester may be split into two. `is_contiguous` tells whether the coordinates are.
    """
    columns = 1 if is_contiguous else _MIN_COLUMNS
    if len(factors) <= _MAX_FACTORS and _room(factors, columns) >= 1:
        return [factors]
    rest, passes = list(factors), list[tuple[Factor, ...]]()
    while rest:
        part: tuple[Factor, ...] = ()
        while rest and len(part) < _MAX_FACTORS:
            order, matrix = rest.pop()
            is_alone = not part and matrix is not None  # it cannot be split
            if is_alone or _room(((order, matrix), *part), 2 * columns) >= 1:
                part = ((order, matrix), *part)
                continue
            room = _room(part, 2 * columns)
            if matrix is None and room > 1:
                part = ((room, None), *part)
                # Sylvester's matrix of order ab is the Kronecker product of those of orders a and b.
                order //= room
            rest.append((order, matrix))
            break
        passes.append(part)
        columns = _MIN_COLUMNS
    return passes


def _room(factors: tuple[Factor, ...], columns: int) -> int:
    """How many times as many coordinates as those of the factors fit in registers."""
    largest = _largest_dense(factors)
    limit = next(size for most, size in _MAX_SIZES.items() if largest <= most)
    return limit // (columns * _padded(factors))


def _largest_dense(factors: tuple[Factor, ...]) -> int:
    return max([order for order, matrix in factors if matrix is not None], default=0)


def configuration(factors: tuple[Factor, ...], *, is_contiguous: bool) -> tuple[int, int]:
    """How many vectors a program of the kernel has, and how many warps.

    Where there are registers for it, two programs or more run on a multiprocessor at once, so that one
    computes while another one waits for the memory.
    """
    size, dense = _padded(factors), _largest_dense(factors)
    least = 1024 if dense == 0 else 4096 if dense <= 64 else 2048
    numbers = max(size * (1 if is_contiguous else _MIN_COLUMNS), least)
    return numbers // size, min(numbers // 512, 16) if dense == 0 else 4 if numbers <= 4096 else 8


def _padded(factors: tuple[Factor, ...]) -> int:
    return math.prod([_block(*factor) for factor in factors])


def _block(order: int, matrix: int | None) -> int:
    """The length of a factor's axis in registers: a power of 2, and at least what tensor cores take."""
    return order if matrix is None else max(16, 1 << (order - 1).bit_length())


def _precision(xp: ModuleType) -> str:
    """The `input_precision` that is accurate to float32: three TF32 products on NVIDIA, IEEE on AMD."""
    # CuPy's launcher is for NVIDIA.
    is_amd = (is_torch(xp) and imported_torch().version.hip is not None) or (
        is_jax(xp) and gpu_kind(xp, None) == "amd"
    )
    return "ieee" if is_amd else "tf32x3"
