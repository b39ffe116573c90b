"""Which map is quicker than a dense product, by the number of features?

    python map_speed.py    # minutes

2²⁰ numbers, as vectors of d features in float32, and NumPy on one thread. Every time is divided by that
of a product with a dense matrix to as many components, by NumPy. Both run alternately in this process,
and the ratio is that of the medians of 9 rounds. Times are those of the processor, which other programs
on the machine change less.
"""

from __future__ import annotations

import os

# Before NumPy: products and maps have one thread, as the cosine transform has.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import experiment
import numpy as np
from scipy.fft import dct
from sklearn.random_projection import SparseRandomProjection
from tqdm import tqdm

import isentropic as it

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "asv_benchmarks")]

NAME = "map_speed"
ROUNDS = 9
NUMBERS = 2**20
SIZES = (64, 128, 256, 576, 1536, 4096, 11_008)
Maps = dict[str, Callable[[], Any]]


def to_all(x: np.ndarray) -> Maps:
    """Maps to d components."""
    f = it.jl.rotation(x.shape[1], rng=0, like=x)
    return {"rotation": lambda: f(x), "`scipy.fft.dct`": lambda: dct(x, norm="ortho")}


def to_few(x: np.ndarray, k: int) -> Maps:
    """Maps to k components."""
    d = x.shape[1]
    fast = it.jl.hadamard_projection(d, k, rng=0, like=x)
    sketch = it.jl.count_sketch(d, k, rng=0, like=x)
    sparse = SparseRandomProjection(k, random_state=0).fit(x)
    return {
        "Fast JL": lambda: fast(x),
        "count sketch": lambda: sketch(x),
        "scikit-learn's sparse map": lambda: sparse.transform(x),
    }


def measure(d: int, numbers: int = NUMBERS, rounds: int = ROUNDS) -> dict[str, float]:
    """The times of all maps relative to that of a dense product of the same size."""
    from benchmarks.backends import ratio

    rng = np.random.default_rng(0)
    x = rng.normal(size=(numbers // d, d)).astype("float32")
    found = {}
    for k, maps in ((d, to_all(x)), (d // 4, to_few(x, d // 4))):
        dense = rng.normal(size=(d, k)).astype("float32")
        for name, apply in maps.items():
            found[name] = ratio(
                apply, lambda dense=dense: x @ dense, rounds, pause=0, clock=process_time
            )
    return found


def table(results: dict[str, Any]) -> str:
    rows = [
        [d, *(f"{x:.2g}" if x < 10 else f"{x:.0f}" for x in found.values())]
        for d, found in results["ratios"].items()
    ]
    return experiment.table(["d", *next(iter(results["ratios"].values()))], rows)


def main(arguments: list[str] | None = None) -> None:
    from noxfile import processor

    options = experiment.parser(NAME, __doc__).parse_args(arguments)
    ratios = {str(d): measure(d) for d in tqdm(SIZES, unit=" sizes")}
    results = {"processor": processor(), "rounds": ROUNDS, "numpy": np.__version__, "ratios": ratios}
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{NAME}.json"
    path.write_text(json.dumps(experiment.rounded(results, 3), indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
