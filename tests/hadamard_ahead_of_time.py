"""Compile the kernel of Hadamard matrices as `ahead_of_time` does, and launch it on CuPy's stand-in.

The arguments are names like ``projection-768-float32-sm_90``, of a map, a dimension, a dtype, and a GPU
or "cupy". A map may be followed by "+adjoint", and by "+trail" for an axis that is not the last.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import ahead_of_time
import gpu_stub
import numpy as np

import isentropic as it
from isentropic import _row_maps, _triton_launch
from isentropic.jl import _hadamard, _maps, _rounds

TRAIL = 48


def linear_map(name, n, like, trail):
    """The map of rows, whose arrays are those of the library of `like`."""
    kind, *parts = name.split("+")
    if kind == "transform":
        linear = _hadamard._sylvester_map(n, n**-0.5, trail)
    elif kind == "projection":
        f = it.jl.hadamard_projection(n, n // 4, rng=0)
        linear = type(f)((like(f.signs[0]),), like(f.rows))._linear_map(trail)
    else:
        f = it.jl.rotation(n, rng=0)
        f = type(f)((like(f.signs[0]),), tuple([like(x) for x in f.factors]))
        linear = f._linear_map(trail)
    return linear.adjoint() if "adjoint" in parts else linear


def launched_on_cupy(linear, dtype):
    """How many launches the stand-in for CuPy has checked."""
    cupy = gpu_stub.install()
    gpu_stub.LAUNCHES.clear()
    x = np.zeros((64, linear.adjoint().widths[0]), dtype)
    wide = gpu_stub.array(np.zeros((64, 2 * x.shape[1]), dtype))
    # The second one is not aligned, and the third one not contiguous.
    for y in (gpu_stub.array(x), gpu_stub.array(x, aligned=False), wide[:, ::2]):
        out = _row_maps.apply_to_rows(cupy, linear, y)
        assert out.shape == (64, linear.widths[0])
        assert out.dtype == np.dtype(dtype)
    return [{"launches": len(gpu_stub.LAUNCHES)}]


def measured(linear, dtype, target):
    """What came out of the compiler for each pass."""
    found = []

    def measure(xp, call):
        first = call.inputs[0]
        arrays = [first if x is None else x for x in (*call.inputs, *call.outputs)]
        facts = [(np.dtype(x.dtype), True) for x in arrays]
        found.append(ahead_of_time.measured(_triton_launch.signature_of(call, facts), target))
        return tuple(np.zeros(out.shape, out.dtype) for out in call.outputs)

    precision = "ieee" if target == "gfx942" else "tf32x3"
    with (
        mock.patch.object(_rounds, "launch", measure),
        mock.patch.object(_rounds, "_precision", return_value=precision),
        mock.patch.object(_row_maps, "runs_kernels", return_value=True),
    ):
        _rounds._calls.cache_clear()
        _row_maps.apply_to_rows(np, linear, np.zeros((64, linear.adjoint().widths[0]), dtype))
    return found


def run(name, n, dtype, target):
    trail = TRAIL if "+trail" in name else 1
    with (
        mock.patch.object(_hadamard, "has_kernel", return_value=True),
        mock.patch.object(_maps, "has_kernel", return_value=True),
    ):
        if target == "cupy":
            return launched_on_cupy(linear_map(name, n, gpu_stub.array, trail), dtype)
        return measured(linear_map(name, n, np.asarray, trail), dtype, target)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        kind, n, dtype, target = name.split("-")
        try:
            passes = run(kind, int(n), dtype, target)
        except Exception as error:
            passes = [{"error": f"{type(error).__name__}: {error}"}]
        print(json.dumps({"name": name, "passes": passes}), flush=True)
