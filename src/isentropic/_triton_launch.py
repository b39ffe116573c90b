"""Launch Triton kernels on arrays of PyTorch, CuPy and JAX, which share one source of the kernels.

The parameters of a kernel are in the order in which `Call` has them: inputs, outputs, numbers,
constants. A kernel writes to its outputs alone, so that the launch is a function, as JAX needs it. Only
with PyTorch an output may be a tensor that there is already.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isentropic._loops import outside_of_traces
from isentropic._namespace import Array, is_jax, is_torch
from isentropic._numerics import quietly

# Triton's name of each type of numbers.
_TYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "int8": "i8", "int32": "i32", "int64": "i64",
}  # fmt: skip
# The alignment in bytes, and the divisor of strides, that let Triton copy several numbers at once.
_ALIGNMENT = 16
# The bytes of shared memory that a block of threads has unless its function asks for more.
_SHARED_BY_DEFAULT = 48 * 1024
_NUMBERS: dict[str, Any] = {"fp32": np.float32, "i32": np.int32, "i64": np.int64}
# The first GPUs of NVIDIA that have the instructions of the kernels.
_LEAST_CAPABILITY = 80


class Output(NamedTuple):
    """An array that a kernel writes."""

    shape: tuple[int, ...]
    dtype: Any


class Call(NamedTuple):
    """One launch of a kernel.

    An input that the kernel does not read is None. Another array takes its place, so that the kernel
    has the same parameters in every call.
    """

    kernel: Any  # a function that is decorated by `triton.jit`
    grid: int  # the number of its programs
    inputs: Sequence[Array | None]
    outputs: Sequence[Output | Array]  # a tensor of PyTorch is written in place
    numbers: Mapping[str, int | float]
    constants: Mapping[str, Any]
    warps: int
    stages: int


def launch(xp: Any, call: Call) -> tuple[Any, ...]:
    """Run a kernel, and return its outputs."""
    first = next(x for x in call.inputs if x is not None)
    call = call._replace(inputs=[first if x is None else x for x in call.inputs])
    run = _launcher(xp)
    return quietly(run)(call) if is_interpreted() else run(call)


def contiguous(xp: Any, x: Any) -> Any:
    """The array itself or a copy, as kernels read it without strides. Those of JAX are contiguous."""
    if is_torch(xp):
        return x.contiguous()
    return x if is_jax(xp) else xp.ascontiguousarray(x)


def is_interpreted() -> bool:
    """Whether Triton interprets kernels, by operations of NumPy, which may warn."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gpu_kind(xp: Any, device: Any) -> str:
    """Which GPU a device is: "nvidia", "hopper", "amd" or "old"."""
    if is_interpreted():
        return "nvidia"
    if is_torch(xp):
        return _kind_on_torch(xp, device)
    if is_jax(xp):
        import jax

        device = jax.devices()[0]
        if "rocm" in device.client.platform_version.lower():
            return "amd"
    return _kind_of_capability(int(str(device.compute_capability).replace(".", "")))


@functools.cache  # PyTorch takes microseconds to ask for the capability
def _kind_on_torch(xp: Any, device: Any) -> str:
    if xp.version.hip is not None:
        return "amd"
    major, minor = xp.cuda.get_device_capability(device)
    return _kind_of_capability(10 * major + minor)


def _kind_of_capability(capability: int) -> str:
    if capability == 90:
        return "hopper"
    return "nvidia" if capability >= _LEAST_CAPABILITY else "old"


# What `self_test_failure` has found. The device is a string here: devices of CuPy have no hash.
_failures: dict[tuple[str, ...], str | None] = {}


def self_test_failure(
    kernels: str, xp: Any, device: Any, dtype: Any, error: Callable[[], float], bound: float
) -> str | None:
    """The reason why kernels cannot be trusted on a device, or None. A warning tells it, too.

    `error` computes a small input with them, and tells by how much the results are off. This takes
    place once in a process.
    """
    facts = (kernels, xp.__name__, str(device), str(dtype))
    if facts in _failures:
        return _failures[facts]
    if is_torch(xp) and xp.cuda.is_available() and xp.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "The first call on a GPU tests the kernels, which is not possible while a CUDA graph is "
            "captured: make the same call once before the capture."
        )
    why = None
    try:
        with outside_of_traces(xp):
            found = error()
        if not found < bound:
            why = f"their results are off by {found:.1e}"
    except Exception as problem:  # Triton needs a compiler for C, and may not know the GPU
        if "OutOfMemory" in type(problem).__name__:  # which passes, so it is not remembered
            raise
        why = f"Triton cannot run them: {type(problem).__name__}: {problem}"
    if why is not None:
        why = f"a self-test of the kernels failed on this device: {why}"
        warnings.warn(f"The {kernels} are not used, as {why}", stacklevel=2)
    _failures[facts] = why
    return why


def _launcher(xp: Any) -> Callable[[Call], tuple[Any, ...]]:
    if is_torch(xp):
        return launch_on_torch
    return launch_on_jax if is_jax(xp) else launch_on_cupy


def launch_on_torch(call: Call) -> tuple[Any, ...]:
    import torch

    first: Any = call.inputs[0]
    outputs = [
        torch.empty(x.shape, dtype=x.dtype, device=first.device) if isinstance(x, Output) else x
        for x in call.outputs
    ]
    # Triton launches on the current device, which may be another one than that of the arrays.
    with torch.cuda.device_of(first):
        call.kernel[(call.grid,)](
            *call.inputs, *outputs, **call.numbers, **call.constants,
            num_warps=call.warps, num_stages=call.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return tuple(outputs)


def launch_on_jax(call: Call) -> tuple[Any, ...]:
    import jax
    import jax_triton

    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.outputs]
    # Sizes are constants of a trace in any case, and as constants of the kernel they take no registers.
    return tuple(
        jax_triton.triton_call(
            *call.inputs, kernel=call.kernel, out_shape=outputs, grid=call.grid,
            num_warps=call.warps, num_stages=call.stages, enable_fp_fusion=True,
            **call.numbers, **call.constants,
        )
    )  # fmt: skip


def launch_on_cupy(call: Call) -> tuple[Any, ...]:
    import cupy

    first: Any = call.inputs[0]
    with first.device:
        outputs = [cupy.empty(x.shape, x.dtype) for x in call.outputs]
        arrays = [*call.inputs, *outputs]
        facts = [(x.dtype, x.data.ptr % _ALIGNMENT == 0) for x in arrays]
        function, shared = _function_on_cupy(signature_of(call, facts), first.device.id)
        numbers = [
            _NUMBERS[_kind_of_number(x)[0]](x) for x in call.numbers.values() if not _is_fixed(x)
        ]
        # Triton adds two pointers: memory for a profiler, and for kernels that need some. Ours do not.
        scratch = (np.uintp(0), np.uintp(0))
        # On the current stream of CuPy.
        function((call.grid,), (32 * call.warps,), (*arrays, *numbers, *scratch), shared_mem=shared)
    return tuple(outputs)


class Signature(NamedTuple):
    """All that the machine code of a kernel depends on, beside the GPU."""

    kernel: Any
    arrays: tuple[tuple[str, bool], ...]  # the dtype of each, and whether it is aligned
    numbers: tuple[tuple[str, str, Any], ...]  # name, type, and the value or whether 16 divides it
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int


def signature_of(call: Call, arrays: Sequence[tuple[Any, bool]]) -> Signature:
    """The signature of a call, for the dtypes of inputs and outputs, and whether they are aligned."""
    dtypes = [(str(dtype).rpartition(".")[2], is_aligned) for dtype, is_aligned in arrays]
    return Signature(
        call.kernel,
        tuple([(_TYPES[dtype], is_aligned) for dtype, is_aligned in dtypes]),
        tuple([(name, *_kind_of_number(x)) for name, x in call.numbers.items()]),
        tuple(call.constants.items()),
        call.warps,
        call.stages,
    )


def _is_fixed(x: int | float) -> bool:
    """Whether a number is a constant of the machine code. A stride of 1 saves instructions."""
    return isinstance(x, int) and x == 1


def _kind_of_number(x: int | float) -> tuple[str, Any]:
    if isinstance(x, float):
        return "fp32", False
    kind = "i32" if -(2**31) <= x < 2**31 else "i64"
    return ("constexpr", x) if _is_fixed(x) else (kind, x % _ALIGNMENT == 0)


def compiled(signature: Signature, target: Any) -> Any:
    """The machine code of a kernel for a GPU, which need not be there, and what Triton tells about it.

    `target` is a `triton.backends.compiler.GPUTarget`. This needs neither PyTorch nor JAX.
    """
    import triton

    names, types, constants = signature.kernel.arg_names, {}, dict(signature.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    parameters = [
        *((f"*{dtype}", is_aligned) for dtype, is_aligned in signature.arrays),
        *((kind, fact) for _, kind, fact in signature.numbers),
    ]
    for i, (name, (kind, fact)) in enumerate(zip(names, parameters, strict=False)):
        types[name] = kind
        if kind == "constexpr":
            constants[name] = fact
        elif fact:
            attributes[(i,)] = [["tt.divisibility", 16]]
    types |= dict.fromkeys(names[len(parameters) :], "constexpr")
    source = triton.compiler.ASTSource(signature.kernel, types, constants, attributes)
    options = {
        "num_warps": signature.warps, "num_stages": signature.stages, "enable_fp_fusion": True,
    }  # fmt: skip
    return triton.compile(source, target=target, options=options)


@functools.lru_cache(maxsize=256)
def _function_on_cupy(signature: Signature, device: int) -> tuple[Any, int]:
    """The loaded function of a kernel on a device, and its bytes of shared memory."""
    import cupy
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", int(cupy.cuda.Device(device).compute_capability), 32)
    code = compiled(signature, target)
    # CuPy reads machine code from a file, and again for each device.
    path = Path(_folder().name) / f"{code.hash}.cubin"
    draft = path.with_suffix(f".{threading.get_ident()}")
    draft.write_bytes(code.asm["cubin"])
    draft.replace(path)  # another thread may be reading it
    function = cupy.RawModule(path=str(path)).get_function(code.metadata.name)
    if code.metadata.shared > _SHARED_BY_DEFAULT:
        function.max_dynamic_shared_size_bytes = code.metadata.shared
    return function, code.metadata.shared


@functools.cache
def _folder() -> Any:
    import tempfile

    return tempfile.TemporaryDirectory(prefix="isentropic-")
