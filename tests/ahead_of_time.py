"""Compile the Triton kernels to machine code for GPUs that need not be there, and print what came out.

A script and not a part of the tests, whose process interprets kernels. Its arguments are names like
``state_kernel-bfloat16-128-sm_90``; it prints a line of JSON for each of them. A name may end with what
the call has, as in ``state_kernel-bfloat16-128-sm_90-value+mask``; without that the call has everything.
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
# What a call may have, and the arrays that it then has.
ARRAYS = {
    "value": {"V", "OUT", "G", "DV"},
    "mask": {"FIRST", "END", "LOW", "HIGH"},
    "moment": {"MOMENT", "SLOPE", "REST"},
    "argmax": {"ARGMAX"},
}


def source(kernel, dtype, width, precision, sizes, parts):
    """A kernel with the types of its arguments, for a call that has the `parts`."""
    constants = {
        "WIDTH": width,
        "VALUE_WIDTH": width,
        **{f"HAS_{part.upper()}": part in parts for part in ARRAYS},
        "PRECISION": precision,
        "ROWS": sizes.rows,
        "COLUMNS": sizes.columns,
        **{array: None for part in ARRAYS.keys() - parts for array in ARRAYS[part]},
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
            signature[name] = "*fp32" if name == "OUT" and "moment" in parts else f"*{dtype}"
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
    kernel_name, dtype, width, architecture, *parts = name.split("-")
    kernel, (short, itemsize) = getattr(triton_kernels, kernel_name), TYPES[dtype]
    gpu = {"gfx942": "amd", "sm_90": "hopper"}.get(architecture, "nvidia")
    if gpu == "amd":
        target = GPUTarget("hip", architecture, 64)
    else:
        target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    present = set(parts[0].split("+")) if parts else set(ARRAYS)
    sizes = triton_kernels.configuration(kernel, int(width), itemsize, gpu)
    precision = triton_kernels.precision(gpu)
    text = source(kernel, short, int(width), precision, sizes, present)
    compiled = triton.compile(
        text,
        target=target,
        options={
            "num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": True,
        },
    )  # fmt: skip
    return (resources_on_amd if gpu == "amd" else resources_on_nvidia)(compiled)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            result = compile_one(name)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name} | result), flush=True)
