"""Nearest neighbors among the sources of the standard library, before and after Fast JL.

    python source_search.py

Each source file of the Python that runs this script is a point: its TF-IDF vector over all identifiers,
in about a hundred thousand dimensions. The points are mapped to the k dimensions that the lemma
requires for several distortions eps. Then the nearest neighbors of each file are compared with the true
ones.

The lemma implies a bound for neighbors. If all squared distances are preserved within (1 ± eps), then
the neighbor that is found is at most √((1 + eps)/(1 − eps)) times as far away as the nearest one.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import matplotlib
import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import pairwise_distances
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import isentropic as it
from isentropic.integrations.sklearn import JLTransformer

EPS = (0.1, 0.2, 0.5, 0.8)
PAIRS = 20_000  # pairs in the report; the table has the worst of all pairs
MAPS = ("hadamard", "gaussian", "count_sketch")
IDENTIFIER = r"[A-Za-z_][A-Za-z_0-9]+"


def sources(limit: int | None = None) -> list[Path]:
    """The modules of the standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    return [p for p in found if p.stat().st_size > 500][:limit]


def vectors(paths: list[Path]) -> sparse.csr_array:
    """TF-IDF vectors of identifiers, with unit norm, (files, identifiers)."""
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in paths]
    vectorizer = TfidfVectorizer(token_pattern=IDENTIFIER, lowercase=False, dtype=np.float32)
    return sparse.csr_array(vectorizer.fit_transform(texts))


def neighbors(distances: np.ndarray, count: int) -> np.ndarray:
    """The `count` nearest other files of each file, (files, count)."""
    return np.argsort(distances + np.diag(np.full(len(distances), np.inf)), axis=1)[:, :count]


def compare(x: sparse.csr_array, kinds: tuple[str, ...], seed: int = 0) -> list[dict]:
    """One row per map and eps: the dimension, the distortion and the agreement of neighbors."""
    exact = pairwise_distances(x)
    dense = x.toarray()
    true = neighbors(exact, 10)
    nearest = exact[np.arange(len(exact)), true[:, 0]]
    rows = []
    for kind, eps in tqdm([(kind, eps) for kind in kinds for eps in EPS], unit=" maps"):
        start = time.perf_counter()
        transformer = JLTransformer(kind=kind, eps=eps, dense_output=True, random_state=seed)
        y = transformer.fit_transform(x)
        seconds = time.perf_counter() - start
        report = it.jl.distortion(dense, y, pairs=PAIRS, rng=seed)
        mapped = pairwise_distances(y)
        apart = exact > 1e-3  # smaller distances are rounding errors of the inner products
        found = neighbors(mapped, 10)
        first = exact[np.arange(len(exact)), found[:, 0]]
        kept = [len(set(a) & set(b)) / 10 for a, b in zip(true, found, strict=True)]
        rows.append(
            {
                "map": kind,
                "eps": eps,
                "k": transformer.n_components_,
                "seconds": seconds,
                "report": report,
                "worst": float(np.abs((mapped[apart] / exact[apart]) ** 2 - 1).max()),
                "same": float((found[:, 0] == true[:, 0]).mean()),
                "kept": float(np.mean(kept)),
                "ratio": float((first[nearest > 1e-3] / nearest[nearest > 1e-3]).max()),
                "promise": ((1 + eps) / (1 - eps)) ** 0.5,
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    lines = [
        "map           eps     k  seconds |  worst error | nearest is  10 nearest |  found / nearest",
        "                                 | of distance² |   the same        kept |  worst  promised",
    ]
    lines += [
        f"{r['map']:<12}{r['eps']:>5}{r['k']:>6}{r['seconds']:>9.2f} |{r['worst']:>13.3f} |"
        f"{100 * r['same']:>9.1f} %{100 * r['kept']:>10.1f} % |{r['ratio']:>7.3f}{r['promise']:>10.3f}"
        for r in rows
    ]
    return "\n".join(lines)


def picture(rows: list[dict], path: Path) -> None:
    """Plot the worst error of each map against its dimension, and what the lemma promises there."""
    figure, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for name in dict.fromkeys(row["map"] for row in rows):
        shown = [row for row in rows if row["map"] == name]
        ax.plot([r["k"] for r in shown], [r["worst"] for r in shown], "o", label=name, alpha=0.8)
    promised = sorted({(row["k"], row["eps"]) for row in rows})
    ax.plot(*zip(*promised, strict=True), "k_--", markersize=14, label="promised: ε")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ks = sorted({row["k"] for row in rows})
    ax.set_xticks(ks, [str(k) for k in ks])
    ax.set_yticks((ticks := (0.05, 0.1, 0.2, 0.5)), [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    ax.set_xlabel("dimension k")
    ax.set_ylabel("worst error of a squared distance")
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Nearest neighbors of source files after Fast JL.")
    parser.add_argument("--files", type=int, metavar="COUNT", help="how many files (all)")
    parser.add_argument("--output", type=Path, default=Path("source-search.png"), metavar="FILE")
    options = parser.parse_args(arguments)
    if options.files is not None and options.files < 20:
        parser.error(f"--files must be at least 20, got {options.files}")
    paths = sources(options.files)
    x = vectors(paths)
    print(f"{x.shape[0]} files, {x.shape[1]} identifiers, {x.nnz / x.shape[0]:.0f} in a file")
    rows = compare(x, MAPS)
    print(table(rows))
    print(f"\n{rows[1]['map']}, eps = {rows[1]['eps']}:\n{rows[1]['report']}")
    picture(rows, options.output)
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
