"""The latest recorded results: as Markdown tables, or as a plot of the speeds.

python asv_benchmarks/report.py             # the tables of the performance page of the docs
python asv_benchmarks/report.py speed.png
"""

import itertools
import json
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

# Versions of benchmarks in which the peer of a masked call had no mask. Their results are not shown.
UNMASKED = {
    "attention.AgainstTorch.track_ratio": "7c27326acb4d",
    "attention.Gradients.track_ratio": "0a7fe6b633f6",
    "attention.SmallCalls.track_ratio": "239bd96a0412",
}
MASKED = {"causal", "window"}

# Title, text, benchmark. The asv site shows the other benchmarks.
TABLES = [
    (
        "Attention against PyTorch's kernel",
        "Time relative to `torch.nn.functional.scaled_dot_product_attention` of the same arrays with "
        "the same mask. 8 heads of 64 features, n = 4096, float32; the window has 512 keys. PyTorch's "
        "kernel computes only the output, whatever the call. A factor for 5 nats is that of "
        "`AttentionDistribution.factor_for_entropy`.",
        "attention.AgainstTorch.track_ratio",
    ),
    (
        "Bias, soft cap, scale and other orders against PyTorch's kernel",
        "As above, but PyTorch's kernel has no mask, no bias, no soft cap, and the usual scale of 1/8. "
        "With a scale of 2 the logits of a row are up to 150 nats apart.",
        "attention.FurtherAgainstTorch.track_ratio",
    ),
    (
        "Half precision on a CPU",
        "PyTorch in bfloat16. Time relative to PyTorch's kernel in bfloat16, which computes only the "
        "output, with the same mask. 8 heads of 64 features, 4096 keys.",
        "attention.HalfPrecision.track_ratio",
    ),
    (
        "Few queries and many keys",
        "64 queries, a million keys, one head of 64 features. Time relative to PyTorch's kernel, which "
        "computes only the output.",
        "attention.ManyKeys.track_ratio",
    ),
    (
        "Callers in threads of their own",
        "16 threads compute entropies in NumPy, while the BLAS may use all cores. Time relative to the "
        "same with one thread of the BLAS. In columns: n.",
        "attention.Callers.track_ratio",
    ),
    (
        "Attention against the plain expression in NumPy",
        "n = 4096.",
        "attention.AgainstOwnLibrary.track_numpy_naive",
    ),
    (
        "Entropy against the entropy of stored weights in PyTorch",
        "n = 4096.",
        "attention.AgainstOwnLibrary.track_torch_entropy_of_weights",
    ),
    (
        "Attention against `jax.nn.dot_product_attention`",
        "n = 4096.",
        "attention.AgainstOwnLibrary.track_jax",
    ),
    (
        "Forward and backward",
        "Time relative to the forward and backward pass of PyTorch's kernel, or of "
        "`jax.nn.dot_product_attention`, with the same mask; n = 4096.",
        "attention.Gradients.track_ratio",
    ),
    (
        "Forward and backward with a window, a bias, a soft cap or a large scale",
        "As above, but the peer has no mask, no bias and no soft cap, and the usual scale.",
        "attention.FurtherGradients.track_ratio",
    ),
    (
        "Small calls",
        "4 heads, n = 16. Time relative to the plain expression in NumPy, or to PyTorch's kernel, with "
        "the same mask.",
        "attention.SmallCalls.track_ratio",
    ),
    (
        "The operations alone",
        "Time of the matrix products, exponentials, sums and maxima of a call by themselves, and time "
        "of the whole call, relative to the same peers as elsewhere on this page. n = 4096. The "
        "operations are in tiles, on all cores. Better code could gain at most the difference.",
        "limits.Limits.track_ratio",
    ),
    (
        "Memory",
        "Peak memory of the whole process, including its libraries. The L×S logits alone would take "
        f"{8 * 4096**2 * 4 / 1e6:.0f} MB at n = 4096 and {8 * 16384**2 * 4 / 1e9:.1f} GB at 16 384.",
        "attention.Memory.peakmem_call",
    ),
    (
        "Memory under `torch.compile`",
        "Growth of the peak memory by output, entropy and their gradient. 2 heads, n = 8192, whose "
        f"logits take {2 * 8192**2 * 4 / 1e6:.0f} MB.",
        "attention.CompiledMemory.track_growth",
    ),
    (
        "Error of the entropy",
        "Largest error against float64, n = 1024. `None` is the default implementation.",
        "attention.Error.track_entropy_error",
    ),
    ("Error of the output", "As above.", "attention.Error.track_output_error"),
    (
        "Graphs",
        "Number of graphs that `torch.compile` makes for ten lengths, by its option `dynamic`. By "
        "default, None, the first graph is for the first length alone.",
        "attention.Graphs.track_graphs",
    ),
    (
        "Tracing by `torch.compile`",
        "Time to make the graph of twelve calls, without generating code.",
        "attention.Compilation.time_tracing",
    ),
    (
        "Small calls under `torch.compile`",
        "Twelve calls in one function, 4 heads at n = 16. Time relative to PyTorch's kernel for the "
        "output, with the same mask, compiled in the same way.",
        "attention.Compilation.track_call",
    ),
    (
        "Import",
        "Time of `import isentropic`, without that of `array_api_compat`.",
        "attention.Imports.track_import",
    ),
    (
        "Linear attention",
        "256 random features, n = 4096. Time relative to `attention` with the same arguments. Linear "
        "attention is an estimate. It is useless where queries and keys have large norms "
        "([why](explanation/johnson-lindenstrauss.md#random-features)).",
        "attention.LinearAttention.track_ratio",
    ),
    (
        "Hadamard transform",
        "64 MB of rows. Time relative to a copy by NumPy. (A copy by PyTorch, or `x + 1` in JAX, takes "
        "longer than NumPy's copy, mostly because it allocates new memory.)",
        "projections.HadamardAgainstPeers.track_copies",
    ),
    (
        "Hadamard transform against a cosine transform",
        "Time relative to `scipy.fft.dct` on all cores.",
        "projections.HadamardAgainstPeers.track_dct",
    ),
    (
        "Rotations",
        "16 MB of rows of d features. Time relative to a product with a dense matrix by NumPy.",
        "projections.Rotations.track_dense",
    ),
    (
        "Projections, applied",
        "64 points, from 65 536 features to 512 components. Time relative to scikit-learn's Gaussian "
        "map. `hadamard` is Fast JL, and `hadamard-2` is Fast JL with two rounds.",
        "projections.ProjectionsAgainstPeers.track_apply_sklearn_gaussian",
    ),
    (
        "Projections, drawn and applied",
        "As above, with the time to draw the map.",
        "projections.ProjectionsAgainstPeers.track_draw_and_apply_sklearn_gaussian",
    ),
]

# Label (timed function / peer), benchmark, parameters.
BARS = [
    *(
        (
            f"{call}: {library} / PyTorch's kernel",
            "attention.AgainstTorch.track_ratio",
            (library, call, "4096"),
        )
        for call in ("attention", "causal", "output and entropy", "entropy")
        for library in ("numpy", "torch", "jax")
    ),
    ("attention: jax / jax.nn", "attention.AgainstOwnLibrary.track_jax", ()),
    *(
        (
            f"output and entropy, with gradients: {library} / {peer}",
            "attention.Gradients.track_ratio",
            (library, "output and entropy"),
        )
        for library, peer in (("torch", "PyTorch's kernel"), ("jax", "jax.nn"))
    ),
    *(
        (
            f"causal, 16 queries: {library} / {peer}",
            "attention.SmallCalls.track_ratio",
            (library, "causal"),
        )
        for library, peer in (("numpy", "plain NumPy"), ("torch", "PyTorch's kernel"))
    ),
    *(
        (
            f"Hadamard transform: {library} / scipy.fft.dct",
            "projections.HadamardAgainstPeers.track_dct",
            (library, "4096"),
        )
        for library in ("numpy", "torch", "jax")
    ),
    *(
        (
            f"Fast JL: {library} / scikit-learn's Gaussian",
            "projections.ProjectionsAgainstPeers.track_draw_and_apply_sklearn_gaussian",
            (library, "hadamard"),
        )
        for library in ("numpy", "torch", "jax")
    ),
]


def report() -> str:
    """The report in Markdown, with one section per table. Cells hold the figures of all machines."""
    benchmarks = json.loads((RESULTS / "benchmarks.json").read_text())
    machines, lines = one_of_each_family(), []
    used: list[dict] = [{} for _ in machines]  # by commit, the versions of the libraries
    for title, text, name in TABLES:
        runs = [newest(name, runs) for runs in machines]
        if any(runs) and name in benchmarks:
            for run, commits in zip(runs, used, strict=True):
                if run is not None:
                    commits[run["commit_hash"][:8]] = run["params"]
            lines += [f"### {title}", "", text, "", *table(name, benchmarks[name], runs), ""]
    header = [
        f"- {hardware(runs, 'cpu', 'ram', 'os')}; {versions(commits)}; commits {', '.join(commits)}."
        for runs, commits in zip(machines, used, strict=True)
    ]
    if len(machines) > 1:
        header = ["The figures of the machines stand side by side, in this order:", "", *header]
    return "\n".join([*header, "", *lines])


def versions(commits: dict) -> str:
    params = {key: value for run in commits.values() for key, value in run.items()}
    return ", ".join(f"{name} {params[name]}" for name in ("numpy", "torch", "jax", "scipy"))


def hardware(runs: list[tuple[Path, dict]], *keys: str) -> str:
    """What is known of the machine with these runs."""
    machine = json.loads((runs[0][0].parent / "machine.json").read_text())
    return ", ".join(machine[key] for key in keys if machine.get(key))


def figure(name: str, *choices: str, commit: str | None = None) -> float | None:
    """The result of a benchmark for given parameters, or None: the latest, or that of a commit."""
    if commit is None:
        run = newest(name, newest_first())
    else:
        run = json.loads(next(RESULTS.glob(f"*/{commit}-*.json")).read_text())
    return None if run is None else by_choices(name, run)[1].get(choices)


def figures(name: str, *choices: str) -> list[float]:
    """The latest results of a benchmark for given parameters, one for each family of processors."""
    runs = (newest(name, runs) for runs in one_of_each_family())
    found = (None if run is None else by_choices(name, run)[1].get(choices) for run in runs)
    return [x for x in found if x is not None]


def newest(name: str, runs: list[tuple[Path, dict]]) -> dict | None:
    """The newest of the runs that contains a benchmark."""
    return next((run for _, run in runs if name in run["results"]), None)


def newest_first() -> list[tuple[Path, dict]]:
    """The recorded runs of the machine with the newest run, the newest first."""
    runs = all_runs()
    return [run for run in runs if run[0].parent == runs[0][0].parent]


def one_of_each_family() -> list[list[tuple[Path, dict]]]:
    """For each family of processors the runs of the machine with the newest run, the newest first.

    Machines without a number of the family are left out if their vendor has some with one.
    """
    machines: dict[tuple[str, str], list[tuple[Path, dict]]] = {}
    for path, run in all_runs():
        # architecture-vendor-name-family.model-cores
        family = re.search(r"-(\d+)\.\d+-", path.parent.name)
        vendor = path.parent.name.split("-")[1]
        others = machines.setdefault((vendor, family[1] if family else ""), [])
        if not others or others[0][0].parent == path.parent:
            others.append((path, run))
    keys = sorted(machines)
    numbered = {vendor for vendor, family in keys if family}
    return [machines[key] for key in keys if key[1] or key[0] not in numbered]


def all_runs() -> list[tuple[Path, dict]]:
    runs = [(path, json.loads(path.read_text())) for path in RESULTS.glob("*/*-*.json")]
    return sorted(runs, key=lambda run: run[1]["date"], reverse=True)


def table(name: str, benchmark: dict, runs: list[dict | None]) -> list[str]:
    """The lines of a Markdown table: the first parameter in columns, the others in rows.

    A cell has the figures of all runs. None is a machine without a run.
    """
    unit = benchmark["unit"]
    found = [([], {}) if run is None else by_choices(name, run) for run in runs]
    names, _ = max(found, key=lambda choices_and_cells: len(choices_and_cells[1]))

    def cell(*key: str) -> str:
        texts = [shown(cells.get(key), unit) for _, cells in found]
        return " / ".join(text or "–" for text in texts) if any(texts) else ""

    if not names:
        return [f"**{cell()}**"]
    across, *down = names
    varying = [i for i, choices in enumerate(down) if len(choices) > 1]
    header = [benchmark["param_names"][i + 1] for i in varying] or [""]
    rows, missing = [], []
    for key in itertools.product(*down):
        row = [cell(a, *key) for a in across]
        if any(row):
            rows.append([*([key[i] for i in varying] or [""]), *row])
        elif MASKED.intersection(key):
            missing += key[:1]
    n_names = len(header)
    kept = [i for i in range(n_names + len(across)) if i < n_names or any(row[i] for row in rows)]
    lines = [[*header, *across], ["---"] * (len(header) + len(across)), *rows]
    note = [f"Not recorded yet: {', '.join(missing)}.", ""] if missing else []
    return [*note, *("| " + " | ".join(line[i] for i in kept) + " |" for line in lines)]


def by_choices(name: str, run: dict) -> tuple[list[list[str]], dict[tuple[str, ...], float | None]]:
    """The choices of each parameter, and the results by choices."""
    values, params, version = run["results"][name][:3]
    names = [[text.strip("'") for text in choices] for choices in params]
    cells = dict(zip(itertools.product(*names), values, strict=True))
    if version.startswith(UNMASKED.get(name, "none")):
        cells = {key: value for key, value in cells.items() if MASKED.isdisjoint(key)}
    return names, cells


def picture(path: str) -> None:
    """Draw times relative to other libraries as dots, with a panel for each of these libraries."""
    import matplotlib.pyplot as plt

    # By the other library and the call: the value of each library.
    found: dict[str, dict[str, dict[str, float]]] = {}
    for label, *which in BARS:
        if value := figure(which[0], *which[1]):
            call, _, rest = label.partition(": ")
            library, _, peer = rest.partition(" / ")
            found.setdefault(peer, {}).setdefault(call, {})[library] = value
    fig, axes = plt.subplots(
        len(found), 1, figsize=(7.5, 1.2 + 0.3 * sum(len(x) + 1.6 for x in found.values())),
        height_ratios=[len(x) + 0.4 for x in found.values()], sharex=True, layout="constrained",
    )  # fmt: skip
    colors = {"numpy": "C0", "torch": "C1", "jax": "C2"}
    for ax, (peer, calls) in zip(axes, found.items(), strict=True):
        for at, values in enumerate(calls.values()):
            for library, value in values.items():
                ax.plot(value, at, "o", color=colors[library], alpha=0.8)
        ax.set_yticks(range(len(calls)), list(calls), fontsize=8)
        ax.set_ylim(len(calls) - 0.5, -0.5)
        ax.set_title(f"beside {peer}", fontsize=9, loc="left")
        ax.axvline(1, color="gray", linewidth=0.8)
        ax.set_xscale("log")
        ax.grid(axis="x", alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4)
    axes[-1].set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes[-1].minorticks_off()
    axes[-1].set_xlabel("time / time of the other in the same process; left of 1 is faster", fontsize=9)
    for library, color in colors.items():
        axes[0].plot([], [], "o", color=color, label=library)
    fig.legend(loc="outside upper right", ncols=3, fontsize=8)
    fig.suptitle(f"{hardware(newest_first(), 'cpu')}; n = 4096 unless stated", fontsize=9, x=0.3)
    fig.savefig(path, dpi=150)


def shown(value: float | None, unit: str) -> str:
    if value is None or value != value:
        return ""
    if unit == "bytes":
        return f"{value / 1e6:.0f} MB"
    if unit in ("ratio", "graphs"):
        return f"{value:.2g}" if value < 10 else f"{value:.0f}"
    return f"{value:.2g} {unit}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        picture(sys.argv[1])
    else:
        print(report())
