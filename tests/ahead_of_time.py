"""Compile the Triton kernels to machine code for GPUs that need not be there, and print what came out.

A script and not a part of the tests, whose process interprets kernels. Its arguments are names like
``state_kernel-bfloat16-128-sm_90``; it prints a line of JSON for each of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isentropic._attention import triton_kernels

TYPES = {"float16": ("fp16", 2), "bfloat16": ("bf16", 2), "float32": ("fp32", 4)}
FLOATS = {"FACTOR", "MAXIMUM", "NORMALIZER", "MOMENT", "INVERSE", "CONSTANT", "SLOPE", "REST", "DQ"}
INTEGERS = {"FIRST", "END", "LOW", "HIGH", "ARGMAX"}


def source(kernel, dtype, itemsize, width, precision, sizes, *, everything):
    """A kernel with the types of its arguments: with a mask and for a state, or for an output alone."""
    constants = {
        "WIDTH": width,
        "N_VALUES": width,
        "BLOCK": triton_kernels.block_width(width),
        "VALUE_BLOCK": triton_kernels.block_width(width),
        "HAS_VALUE": True,
        "HAS_MASK": everything,
        "HAS_MOMENT": everything,
        "HAS_ARGMAX": everything,
        "PRECISION": precision,
        "ROWS": sizes.rows,
        "COLUMNS": sizes.columns,
    }
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        is_aligned = True
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in FLOATS | INTEGERS:
            signature[name] = "*fp32" if name in FLOATS else "*i32"
        elif name in ("heads", "group", "L", "S"):
            signature[name], is_aligned = "i32", False
        elif name.endswith(("_batch", "_head", "_row")):
            signature[name] = "i32"
        else:
            signature[name] = "*fp32" if name == "OUT" and everything else f"*{dtype}"
        if is_aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
    return ASTSource(kernel, signature, constants, attributes)


def resources_on_nvidia(compiled):
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        listing = subprocess.run([program, "-res-usage", path], capture_output=True, text=True).stdout
    found = {name: int(x) for name, x in re.findall(r"(REG|STACK|SHARED):(\d+)", listing)}
    instructions = re.findall(r"\b(wgmma|tcgen05\.mma|mma\.sync)\b", compiled.asm["ptx"])
    # The stack holds what does not fit in the registers.
    return {
        "registers": found["REG"], "spilled": found["STACK"],
        "shared": compiled.metadata.shared + found["SHARED"], "products": sorted(set(instructions)),
    }  # fmt: skip


def resources_on_amd(compiled):
    text = compiled.asm["amdgcn"]

    def number(name):
        return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])

    return {
        "registers": number("vgpr_count"), "spilled": number("vgpr_spill_count"),
        "shared": compiled.metadata.shared, "products": sorted(set(re.findall(r"v_mfma", text))),
    }  # fmt: skip


def compile_one(name):
    kernel_name, dtype, width, architecture, *options = name.split("-")
    kernel, (short, itemsize) = getattr(triton_kernels, kernel_name), TYPES[dtype]
    is_amd = architecture.startswith("gfx")
    if is_amd:
        target = GPUTarget("hip", architecture, 64)
    else:
        target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    sizes = triton_kernels.configuration(kernel, int(width), itemsize, is_amd)
    precision = triton_kernels.precision(is_amd)
    text = source(
        kernel, short, itemsize, int(width), precision, sizes, everything="output" not in options
    )
    compiled = triton.compile(
        text,
        target=target,
        options={
            "num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": True,
        },
    )  # fmt: skip
    return (resources_on_amd if is_amd else resources_on_nvidia)(compiled)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            result = compile_one(name)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name} | result), flush=True)
