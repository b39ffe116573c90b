"""The figures of a GPU, as Markdown tables: python asv_benchmarks/gpu_report.py

They were measured by hand, as asv does not run on that machine. `gpu.json` has what came out.
"""

import json
from pathlib import Path

DATA = Path(__file__).parent / "gpu.json"


def gpu_report() -> str:
    data = json.loads(DATA.read_text())
    libraries = ", ".join(f"{name} {version}" for name, version in data["libraries"].items())
    calls, kernels, errors = data["calls"], data["kernels"], data["errors"]
    times = [
        [name, f"{width}{', causal' if is_causal else ''}", f"{ours:.2f}", f"{ours / cudnn:.2f}"]
        for name, rows in kernels.items()
        if name != "columns"
        for width, is_causal, ours, cudnn in rows
    ]
    found = [[name, *(f"{x:.1e}" for x in row)] for name, row in errors.items() if name != "columns"]
    ratios = [[call, peer, f"{ratio:.2f}"] for call, peer, ratio in calls["ratios"]]
    parts = [
        f"{data['hardware']}; {libraries}.",
        "### The Triton kernels\n\n"
        "Times of the kernels alone: the median of repeated calls with 128 heads, n = 4096, in "
        "bfloat16. The ratio is to cuDNN's kernel in PyTorch, which computes the output, or its "
        "gradients.",
        table(["kernel", "features of a head", "ms", "relative to cuDNN"], times),
        "Errors against float64, n = 1111, 3 heads of 128 features: of the output and the gradients "
        "relative to their norm, of the entropy the largest.",
        table(["dtype", *errors["columns"]], found),
        "### Calls\n\n"
        f"Commit {calls['commit']}. n = 4096; 128 heads of 128 features in bfloat16, unless it says "
        "otherwise. The Hadamard transform has 256 MB of float32.",
        table(["call", "relative to", "time"], ratios),
        "¹ This commit checked all values for NaN in ten passes. A call without gradients now takes "
        "three, which have not been timed.",
        "² In TF32. Such a call now has the full precision of float32, which has not been timed.",
    ]
    return "\n\n".join(parts) + "\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(gpu_report())
