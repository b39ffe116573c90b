"""Compile the Triton kernels to machine code for GPUs that need not be there, and print what came out.

A script and not a part of the tests, whose process interprets kernels. Its arguments are names like
``keys_kernel-bfloat16-128-sm_90``; it prints a line of JSON for each of them. A name may end with what
the call has, as in ``keys_kernel-bfloat16-128-sm_90-value+mask``; without that the call has values, a
mask, a moment and a law.

The signatures are those of launches that the package makes, which are recorded and not carried out.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import array_api_compat.torch as torch
import gpu_stub
import numpy as np
import triton
from triton.backends.compiler import GPUTarget

from isentropic import _triton_launch
from isentropic._attention import triton as backend
from isentropic._triton_launch import compiled, signature_of

USUAL = "value+mask+moment+factor"
# Numbers of a multiprocessor: registers, threads, bytes of shared memory, and blocks of threads.
MULTIPROCESSORS = {
    "sm_80": (65536, 2048, 164 * 1024, 32),
    "sm_90": (65536, 2048, 228 * 1024, 32),
    "sm_100": (65536, 2048, 228 * 1024, 32),
    "gfx942": (4 * 512 * 64, 2048, 64 * 1024, 32),
}


@functools.cache
def launches(dtype, width, kind, parts):
    """The kernels of a call and of its gradient, by their names, and their signatures."""
    found = {}

    def note(xp, call):
        first = next(x for x in call.inputs if x is not None)
        arrays = [(first if x is None else x).dtype for x in call.inputs] + [
            x.dtype for x in call.outputs
        ]
        signature = signature_of(call, [(x, True) for x in arrays])
        found[call.kernel.__name__] = (
            call._replace(inputs=[first if x is None else x for x in call.inputs]),
            signature,
        )
        return tuple(torch.zeros(tuple(x.shape), dtype=x.dtype) for x in call.outputs)

    backend.launch = note
    n, dtype = 256, getattr(torch, dtype)
    x, column = torch.zeros((2, 4, n, width), dtype=dtype), torch.zeros((2, 4, n, 1))
    interval = torch.zeros((1, 1, n, 1), dtype=torch.int32) if "mask" in parts else None
    blocks = backend.Blocks(
        x, x[:, :2].contiguous(), x[:, :2].contiguous() if "value" in parts else None,
        torch.zeros((1, 4, n, n)) if "bias" in parts else None, column if "factor" in parts else None,
        interval, interval,
    )  # fmt: skip
    order = 1.0 if "moment" in parts else None
    setting = backend.Setting(
        torch, kind, 0.125, 30.0 if "softcap" in parts else 0.0, order,
        dtype if order is None else torch.float32, "rest" in parts,
    )  # fmt: skip
    if "repair" in parts:
        backend._forward(setting, blocks, repaired=torch.zeros_like(x))
        backend.finite_rows(x)
        return found
    if "square" in parts:
        backend._forward(setting, blocks, has_square=True)
        return found
    results = backend.forward(setting, blocks)
    columns = [column] * 3 if order is not None else [None] * 3
    backend.backward(setting, blocks, results, backend.Results(results.out, *columns))
    return found


def resources_on_nvidia(code):
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code.asm["cubin"])
        listing = subprocess.run([program, "-res-usage", path], capture_output=True, text=True).stdout
    found = {name: int(x) for name, x in re.findall(r"(REG|STACK|SHARED):(\d+)", listing)}
    instructions = re.findall(r"\b(wgmma|tcgen05\.mma|mma\.sync)\b", code.asm["ptx"])
    # The stack holds what does not fit in the registers.
    return {
        "registers": found["REG"], "spilled": found["STACK"],
        "shared": code.metadata.shared + found["SHARED"], "products": sorted(set(instructions)),
    }  # fmt: skip


def resources_on_amd(code):
    text = code.asm["amdgcn"]

    def number(name):
        return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])

    return {
        "registers": number("vgpr_count"), "spilled": number("vgpr_spill_count"),
        "shared": code.metadata.shared, "products": sorted(set(re.findall(r"v_mfma", text))),
    }  # fmt: skip


def occupancy(architecture, resources, threads):
    """The part of the threads of a multiprocessor that can run at once."""
    registers, most, shared, blocks = MULTIPROCESSORS[architecture]
    limits = [blocks, most // threads, registers // (max(resources["registers"], 1) * threads)]
    limits += [shared // resources["shared"]] if resources["shared"] else []
    return round(min(limits) * threads / most, 3)


def target_of(architecture):
    if architecture == "gfx942":
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def measured(signature, architecture):
    """What came out of the compiler for a signature."""
    target = target_of(architecture)
    code = compiled(signature, target)
    found = (resources_on_amd if target.backend == "hip" else resources_on_nvidia)(code)
    threads = signature.warps * target.warp_size
    return found | {"occupancy": occupancy(architecture, found, threads), "threads": threads}


def compile_one(name):
    kernel, dtype, width, architecture, *parts = name.split("-")
    kind = {"gfx942": "amd", "sm_90": "hopper"}.get(architecture, "nvidia")
    parts = frozenset((parts[0] if parts else USUAL).split("+"))
    return measured(launches(dtype, int(width), kind, parts)[kernel][1], architecture)


def launched_on_cupy(name):
    """How often a launch by CuPy calls the kernel: once, after `gpu_stub` has checked its arguments."""
    kernel, dtype, width, architecture, *parts = name.split("-")
    gpu_stub.install()
    gpu_stub.Device.compute_capability = architecture.removeprefix("sm_")
    gpu_stub.LAUNCHES.clear()
    parts = frozenset((parts[0] if parts else USUAL).split("+"))
    call, _ = launches(dtype, int(width), "nvidia", parts)[kernel]
    inputs, outputs = (
        [np.zeros(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in arrays]
        for arrays in (call.inputs, call.outputs)
    )
    outputs = [_triton_launch.Output(x.shape, x.dtype) for x in outputs]
    _triton_launch.launch_on_cupy(
        call._replace(inputs=list(map(gpu_stub.array, inputs)), outputs=outputs)
    )
    return {"launches": [[name, grid == call.grid] for name, grid, _ in gpu_stub.LAUNCHES]}


# The kernels of the table in docs/performance.md.
TABLE = [
    f"{kernel}-bfloat16-{width}-{architecture}"
    for architecture in MULTIPROCESSORS
    for kernel in ("attention_kernel", "queries_kernel", "keys_kernel")
    for width in (64, 128)
]


def result_of(name):
    try:
        found = launched_on_cupy(name[5:]) if name.startswith("cupy-") else compile_one(name)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {"name": name} | found


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print(json.dumps(list(map(result_of, TABLE)), indent=1))
    else:
        for name in sys.argv[1:]:
            print(json.dumps(result_of(name)), flush=True)
