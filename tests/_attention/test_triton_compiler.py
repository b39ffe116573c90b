"""The Triton kernels compile to machine code for GPUs that need not be there.

The interpreter of Triton, in which the other tests run, has none of the rules of the compiler.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# `nox -s kernels` compiles everything, which takes some minutes. A few kernels take seconds.
FEW = [
    "attention_kernel-bfloat16-64-sm_80",
    "queries_kernel-bfloat16-64-sm_80",
    "keys_kernel-float32-64-sm_80",
    "attention_kernel-float16-128-sm_90",
    "keys_kernel-float16-128-gfx942",
    "attention_kernel-bfloat16-64-sm_90-value+mask+repair",
    "attention_kernel-bfloat16-64-sm_80-moment+mask+square",
]
PRODUCTS_KERNELS = ("attention_kernel", "queries_kernel", "keys_kernel")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
ALL = [
    f"{kernel}-{dtype}-{width}-{architecture}"
    for kernel in PRODUCTS_KERNELS
    for dtype in ("bfloat16", "float16", "float32")
    for width in ((64, 128) if dtype == "float32" else (64, 128, 256))
    for architecture in ARCHITECTURES
]
# All that a call may have and not have.
PARTS = ("value", "moment", "value+moment", "value+moment+bias+softcap", "value+moment+rest")
ALL += [
    f"{kernel}-{configuration}-{architecture}-{parts}{mask}"
    for kernel in (*PRODUCTS_KERNELS, "largest_kernel")
    for parts in PARTS
    for mask in ("", "+mask")
    for configuration in ("bfloat16-64", "float32-128")
    for architecture in ARCHITECTURES
    if kernel != "largest_kernel" or "rest" in parts
]
ALL += [f"attention_kernel-float16-128-{x}-value+mask+repair" for x in ARCHITECTURES]
ALL += [f"attention_kernel-bfloat16-128-{x}-moment+mask+square" for x in ARCHITECTURES]
NAMES = sorted({*FEW, *ALL}) if os.environ.get("ISENTROPIC_ALL_KERNELS") else FEW
# Launches by CuPy, of kernels with products and without.
CUPY = ["keys_kernel-float16-64-sm_80", "attention_kernel-float32-64-sm_90-value"]
CUPY += ["reach_kernel-float32-64-sm_90", "largest_kernel-float16-64-sm_80-value+moment+rest"]

# The instructions of the tensor cores, by architecture.
PRODUCTS = {
    "sm_80": {"mma.sync"},
    "sm_90": {"wgmma", "mma.sync"},
    "sm_100": {"tcgen05.mma", "mma.sync"},
    "gfx942": {"v_mfma"},
}
# Bytes that a block of threads can have: what GPUs have at least from sm_80 on, and those of others.
SHARED = {"gfx942": 64 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
LEAST_SHARED = 99 * 1024
# Bytes that a thread may keep elsewhere than in registers: at most a few, but more for what few calls
# have, and where that was the fastest on a GPU of sm_90.
SPILLED = 192
FEW_SPILLED = 40


@pytest.fixture(scope="module")
def compiled(request):
    """What came out of each of `NAMES`, from a process that does not interpret kernels."""
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")
    pytest.importorskip("triton", reason="triton is not installed")
    program = Path(__file__).parents[1] / "ahead_of_time.py"
    result = subprocess.run(
        [sys.executable, program, *NAMES, *(f"cupy-{name}" for name in CUPY)],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = map(json.loads, result.stdout.splitlines())
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", NAMES)
def test_kernel(compiled, name):
    result = compiled[name]
    _, dtype, width, architecture, *_ = name.split("-")
    assert "error" not in result, result["error"]
    assert set(result["products"]) & PRODUCTS[architecture]
    assert result["shared"] <= SHARED.get(architecture, LEAST_SHARED)
    is_rare = any(part in name for part in ("repair", "bias", "rest"))
    may_spill = is_rare or (architecture == "sm_90" and dtype != "float32" and int(width) <= 128)
    assert result["spilled"] <= (SPILLED if may_spill else FEW_SPILLED), result


def test_hopper_has_its_own_products(compiled):
    assert "wgmma" in compiled["attention_kernel-float16-128-sm_90"]["products"]


@pytest.mark.parametrize("name", CUPY)
def test_launches_by_cupy(compiled, name):
    """The arguments have the number, order and types of the parameters of the machine code."""
    result = compiled[f"cupy-{name}"]
    assert "error" not in result, result["error"]
    assert result["launches"] == [[name.partition("-")[0], True]]


def test_launches_by_jax(request):
    """JAX lowers attention and its gradient for a GPU, with all kernels compiled."""
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    pytest.importorskip("jax_cuda12_plugin", reason="the plugin of JAX for CUDA is not installed")
    program = Path(__file__).parents[1] / "lowered_for_cuda.py"
    result = subprocess.run(
        [sys.executable, program],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for calls in map(json.loads, result.stdout.splitlines()):
        # The pass for the state, the largest logits, the reach of blocks under a mask, two gradients.
        assert len(calls) in (4, 5)
        assert set(calls) == {"triton_kernel_call"}
