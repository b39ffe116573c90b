"""The figures of GPUs, as Markdown tables: python asv_benchmarks/gpu_report.py

`device.py` measures them, and `gpu.json` has what came out. `kernels.json` is what
`python tests/ahead_of_time.py --table` prints.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
DATA = FOLDER / "gpu.json"
NAMES = {"torch": "PyTorch", "jax": "JAX", "cupy": "CuPy"}
RESULTS = {
    "output": "output", "entropy": "entropy", "state": "output and entropy",
    "divergence": "divergence from other keys",
}  # fmt: skip
PEERS = {
    "torch": "SDPA's output",
    "jax": "cuDNN's output",
    "cupy": "the plain expression of the output",
}
# What cards of an architecture can do at most: 10^12 operations a second in bfloat16, and 10^12 bytes.
CARDS = {
    "sm_80": ("A100", 312, 2.0),
    "sm_90": ("H200", 989, 4.8),
    "sm_100": ("B200", 2250, 8.0),
    "gfx942": ("MI300X", 1307, 5.3),
}
PRODUCTS = {"attention_kernel": 2, "queries_kernel": 3, "keys_kernel": 4}
MAPS = {"hadamard": "Hadamard transform", "rotation": "rotation", "fast_jl": "Fast JL to a quarter"}


def gpu_report() -> str:
    records = json.loads(DATA.read_text())
    runs = [ran(record) for record in records]
    compiled = {line["name"].split("-")[3] for line in kernels()}
    cards = [record["gpu"] for record in records]
    for architecture in sorted(compiled):
        name = CARDS[architecture][0]
        if not any(name in card for card in cards):
            runs.append([f"{name} ({architecture})", "–", "the kernels are compiled for it", *"–––"])
    notes = {}
    figures = [
        [*described(name), *(cell(record, name, notes) for record in records)]
        for name in in_order(records, "figures")
    ]
    errors = [
        [
            ", ".join(arguments(name)),
            *(f"{x:.1e}" if x else "–" for x in values(records, "errors", name)),
        ]
        for name in in_order(records, "errors")
    ]
    commits = [record["commit"] for record in records]
    parts = [
        table(["card", "commit", "with", "figures", "errors", "tests passed, failed"], runs),
        "Times relative to the library's own kernel, and in brackets both times in milliseconds. There "
        "are 128 heads of 128 features in bfloat16, n = 4096, and for CuPy 8 heads in float32. "
        "Gradients are forward and backward pass together. The maps take 256 MB of float32.",
        table(["call", "relative to", *commits], figures),
        "\n".join(f"{sign} {text}" for text, sign in notes.items()),
        "Errors against float64, n = 1111, 3 heads of 128 features, causal: of outputs and gradients "
        "relative to their norm, of entropies the largest in nats.",
        table(["error", *commits], errors),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def ran(record: dict) -> list[str]:
    """What has run on a card at a commit."""
    versions = ", ".join(f"{name} {version}" for name, version in record["libraries"].items())
    counts = [str(len(record.get(part, {}))) for part in ("figures", "errors")]
    tests = list(record.get("tests", {}).values())
    passed, failed = sum(x["passed"] for x in tests), sum(len(x["failed"]) for x in tests)
    outcome = f"{passed}, {failed}" if tests else "–"
    return [record["gpu"], record["commit"], versions, *counts, outcome]


def in_order(records: list[dict], part: str) -> list[str]:
    """The names of all records, those of the newest first."""
    return list(dict.fromkeys(name for record in records[::-1] for name in record.get(part, {})))


def values(records: list[dict], part: str, name: str) -> list:
    return [record.get(part, {}).get(name) for record in records]


def arguments(name: str) -> list[str]:
    return re.fullmatch(r"[\w.]+\((.*)\)", name)[1].split(", ")


def described(name: str) -> tuple[str, str]:
    """What a figure is of, and what it is relative to."""
    kind, track = name.partition("(")[0].split(".")
    library, *others = arguments(name)
    if kind == "Copies":
        return f"{NAMES[library]}, {MAPS[others[0]]} of {others[1]}", "a copy"
    parts = [NAMES[library], RESULTS[others[0]]]
    parts += ["Triton kernel"] if kind == "Kernels" else []
    parts += ["generic pass"] if kind == "Generic" else []
    parts += ["causal"] if others[1] == "True" else []
    parts += ["with gradients"] if track == "gradient" else []
    parts += [f"{others[2]} features"] if kind == "Kernels" else []
    return ", ".join(parts), PEERS[library]


def cell(record: dict, name: str, notes: dict[str, str]) -> str:
    """A figure with its times, and a sign for its note."""
    if name not in record.get("figures", {}):
        return "–"
    ratio, *times = record["figures"][name]
    text = f"{ratio:.2f}" + (f" ({times[0]:.2f} / {times[1]:.2f})" if None not in times else "")
    if note := record.get("notes", {}).get(name):
        text += " " + notes.setdefault(note, "¹²³⁴⁵⁶⁷⁸⁹"[len(notes)])
    return text


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kernels() -> list[dict]:
    return json.loads((FOLDER / "kernels.json").read_text())


def kernels_report() -> str:
    """What the compiler made of each kernel, and the least time that it can take, as a table."""
    rows = []
    for line in kernels():
        kernel, _, width, architecture = line["name"].split("-")
        card, operations, rate = CARDS[architecture]
        numbers = 4096 * 128 * int(width)  # of an array: 128 heads of n = 4096
        seconds = (
            2 * PRODUCTS[kernel] * 4096 * numbers / (operations * 1e12),
            2 * (PRODUCTS[kernel] + 2) * numbers / (rate * 1e12),
        )
        facts = [line[name] for name in ("registers", "spilled", "shared")]
        rows.append(
            [f"`{kernel}`", width, architecture, *map(str, facts), f"{line['occupancy']:.0%}"]
            + [f"{1e3 * max(seconds):.2f} on {card}"]
        )
    header = ["kernel", "features", "architecture", "registers", "spilled bytes", "shared bytes"]
    header += ["occupancy", "least time in ms"]
    note = (
        "Occupancy is the part of the threads of a multiprocessor that run at once. The least time is "
        "that of the matrix products, or of one read and one write of each array if that is longer, at "
        "the rates that the maker of the card states, for 128 heads of n = 4096 without a mask."
    )
    return table(header, rows) + "\n\n" + note + "\n"


if __name__ == "__main__":
    print(gpu_report(), kernels_report(), sep="\n")
