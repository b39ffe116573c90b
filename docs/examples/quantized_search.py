"""How well do quantized embeddings find neighbors, beside the quantizers of faiss at equal bits?

    pip install faiss-cpu
    python quantized_search.py            # a quarter of an hour; the embeddings are kept
    python quantized_search.py --quick    # half a minute: only shows that everything runs

The vectors are embeddings of MiniLM-L6 (384 dimensions, of unit length) of passages of 64 tokens from
the docstrings of installed packages and from the manual of Python. Some passages are the queries. Their
neighbors are those with the largest inner products in float32.

Quantities: recall at 10, the share of the ten neighbors among the ten that are found; and the error of
inner products, the root of the mean square over all pairs, times √d. So an error of 1 is that of
inner products with a random direction. Each quantizer with a rotation is drawn `SEEDS` times.

A million drawn vectors of 384 dimensions show the memory: they are drawn and encoded in parts, and
searched in parts.

Decided before it ran: "unbiased" is as good as faiss' RaBitQ at a number of bits if its error is at
most 1.02 times that of RaBitQ, both with and both without the mean of the vectors subtracted.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import minilm
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from isentropic import jl

NAME = "quantized_search"
PACKAGES = (
    "numpy", "scipy", "sklearn", "matplotlib", "torch", "transformers", "jax", "pandas", "dask", "flax",
)  # fmt: skip
TOKENS = 64
BITS = (1, 2, 3, 4, 8)
SEEDS = 3
NEIGHBORS = 10
LIMIT = 1.02
OURS, RABITQ = "isentropic, unbiased", "faiss, RaBitQ"

Scores = Callable[[np.ndarray], np.ndarray]  # of queries (L, d), (L, S)
Search = Callable[[np.ndarray], Any]  # for the nearest of each query


def passages(count: int) -> Iterator[list[int]]:
    """Token ids of `TOKENS` tokens, no two of the same text."""
    from pretrained import docstrings, topics

    tokens, found = minilm.tokenizer(), set()
    first, last = tokens.token_to_id("[CLS]"), tokens.token_to_id("[SEP]")
    texts = [topics(""), *(docstrings(name, least=300, enough=2_000_000) for name in PACKAGES)]
    for text in texts:
        for part in range(0, len(text), 100_000):
            ids = tokens.encode(text[part : part + 100_000], add_special_tokens=False).ids
            for start in range(0, len(ids) - TOKENS, TOKENS):
                passage = tuple(ids[start : start + TOKENS - 2])
                if passage not in found:
                    found.add(passage)
                    yield [first, *passage, last]
                if len(found) == count:
                    return


def embeddings(count: int, folder: Path) -> np.ndarray:
    """The embeddings (count, 384) of passages, kept in a file of the folder."""
    path = folder / f"minilm_{count}.npy"
    if not path.exists():
        import torch
        from transformers import AutoModel

        model = AutoModel.from_pretrained(minilm.model_folder()).eval()
        ids = list(passages(count))
        parts = []
        for start in tqdm(range(0, len(ids), 64), unit=" batches"):
            with torch.no_grad():
                hidden = model(torch.tensor(ids[start : start + 64])).last_hidden_state
            parts.append(torch.nn.functional.normalize(hidden.mean(1), dim=-1).numpy())
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, np.random.default_rng(0).permutation(np.concatenate(parts)))
    return np.load(path)


# -------------------------------------------------------------------------------- quantizers


def ours(kind: str, bits: int, centered: bool, n_components: int | None = None) -> Callable:
    def build(x: np.ndarray, seed: int) -> tuple[Scores, Search, int]:
        mean = x.mean(0) if centered else np.zeros(x.shape[1], np.float32)
        f = jl.quantizer(x.shape[1], bits, kind=kind, n_components=n_components, rng=seed)
        vectors = f.encode(x - mean)
        # The products with the mean are exact. A number of each vector is kept for them, as in RaBitQ.
        of_mean = (x - mean) @ mean

        def scores(q: np.ndarray) -> np.ndarray:
            if not centered:
                return f.inner(q, vectors)
            return f.inner(q - mean, vectors) + (q @ mean)[:, None] + of_mean

        def search(q: np.ndarray) -> Any:
            return np.argpartition(-scores(q), NEIGHBORS, axis=1)[:, :NEIGHBORS]

        return scores, search, vectors.codes.shape[1] + (8 if centered else 4)

    return build


def of_faiss(make: Callable[[Any, int], Any], rotated: bool = True, centered: bool = True) -> Callable:
    """The scores of an index of faiss. Its search for all vectors gives all scores.

    RaBitQ and EDEN subtract the mean of the vectors that they are trained with. That of x and −x is 0.
    """

    def build(x: np.ndarray, seed: int) -> tuple[Scores, Search, int]:
        import faiss

        d = x.shape[1]
        index = make(faiss, d)
        size = index.sa_code_size()
        if rotated:
            rotation = faiss.RandomRotationMatrix(d, d)
            rotation.init(seed)
            index = faiss.IndexPreTransform(rotation, index)
        index.train(x if centered else np.concatenate((x, -x)))
        index.add(x)

        def scores(q: np.ndarray) -> np.ndarray:
            found, which = index.search(q, len(x))
            result = np.full((len(q), len(x)), -np.inf, np.float32)
            np.put_along_axis(result, which, found, axis=1)
            return result

        return scores, lambda q: index.search(q, NEIGHBORS), size

    return build


def quantizers() -> dict[tuple[str, int], Callable]:
    """By name and bits of a coordinate."""

    def scalar(name: str) -> Callable:
        return lambda faiss, d: faiss.IndexScalarQuantizer(
            d, getattr(faiss.ScalarQuantizer, name), faiss.METRIC_INNER_PRODUCT
        )

    found: dict[tuple[str, int], Callable] = {}
    for bits in BITS:
        found["isentropic, mse", bits] = ours("mse", bits, False)
        found[OURS, bits] = ours("unbiased", bits, False)
        found[f"{OURS}, centered", bits] = ours("unbiased", bits, True)

        def rabitq(faiss: Any, d: int, bits: int = bits) -> Any:
            return faiss.IndexRaBitQ(d, faiss.METRIC_INNER_PRODUCT, bits)

        def eden(faiss: Any, d: int, bits: int = bits) -> Any:
            return faiss.IndexEDEN(d, faiss.METRIC_INNER_PRODUCT, bits)

        for name, make in ((RABITQ, rabitq), ("faiss, EDEN", eden)):
            found[name, bits] = of_faiss(make, centered=False)
            found[f"{name}, centered", bits] = of_faiss(make)
        found["faiss, TurboQuant mse", bits] = of_faiss(scalar(f"QT_{bits}bit_tqmse"))
    found["isentropic, sign", 1] = ours("sign", 1, False)
    for bits in (1, 2, 4):  # whose numbers of bytes divide the dimensions
        found["faiss, product quantizer", bits] = of_faiss(
            lambda faiss, d, b=bits: faiss.IndexPQ(d, d * b // 8, 8, faiss.METRIC_INNER_PRODUCT),
            rotated=False,
        )
    for bits in (4, 8):
        found["faiss, scalar quantizer", bits] = of_faiss(scalar(f"QT_{bits}bit"), rotated=False)
    return found


# -------------------------------------------------------------------------------- measurements


def run(x: np.ndarray, q: np.ndarray, seeds: int) -> dict[str, Any]:
    exact = q @ x.T
    true = np.argsort(-exact, axis=1)[:, :NEIGHBORS]
    rows = []
    for (name, bits), build in tqdm(quantizers().items(), unit=" quantizers"):
        kept, errors, seconds, size = [], [], [], 0
        for seed in range(1 if name.endswith(("product quantizer", "scalar quantizer")) else seeds):
            start = time.perf_counter()
            scores, search, size = build(x, seed)
            middle = time.perf_counter()
            search(q)
            seconds.append((middle - start, time.perf_counter() - middle))
            found = scores(q)
            best = np.argsort(-found, axis=1)[:, :NEIGHBORS]
            same = [len(set(a) & set(b)) for a, b in zip(best, true, strict=True)]
            kept.append(float(np.mean(same)) / NEIGHBORS)
            errors.append(float(np.sqrt(np.mean((found - exact) ** 2) * x.shape[1])))
        rows.append({
            "name": name, "bits": bits, "bytes": size, "recall": kept, "error": errors,
            "seconds": [min(x) for x in zip(*seconds, strict=True)],
        })  # fmt: skip
    return {"rows": rows, "vectors": len(x), "queries": len(q), "dimensions": x.shape[1]}


def million(count: int) -> dict[str, float]:
    """Bytes and seconds of drawn vectors at 4 bits; to be called in a process of its own."""
    rng, part = np.random.default_rng(0), 2**15
    f = jl.quantizer(384, 4, kind="unbiased", rng=0)
    codes, scales = np.empty((count, 192), np.uint8), np.empty(count, np.float32)
    before, seconds = peak(), 0.0
    for start in range(0, count, part):
        x = rng.standard_normal((min(part, count - start), 384), np.float32)
        begun = time.perf_counter()
        encoded = f.encode(x)
        codes[start : start + part], scales[start : start + part] = encoded.codes, encoded.scales
        seconds += time.perf_counter() - begun
    q = rng.standard_normal((100, 384), np.float32)
    begun = time.perf_counter()
    best = np.full((len(q), NEIGHBORS), -np.inf, np.float32)
    vectors = jl.QuantizedVectors(codes, scales, f)
    for start in range(0, count, part):
        scores = f.inner(q, vectors[start : start + part])
        best = np.sort(np.concatenate((best, scores), axis=1))[:, -NEIGHBORS:]
    return {
        "vectors": count, "bytes": codes.nbytes + scales.nbytes, "floats": 4 * 384 * count,
        "peak": peak() - before, "encode": seconds, "search": time.perf_counter() - begun,
    }  # fmt: skip


def peak() -> int:
    """The largest memory that this process has had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def ratios(results: dict[str, Any]) -> dict[tuple[str, int], float]:
    """The error of ours over that of RaBitQ, by centering and bits."""
    means = {(x["name"], x["bits"]): np.mean(x["error"]) for x in results["rows"]}
    return {
        (how, bits): means[OURS + how, bits] / means[RABITQ + how, bits]
        for how in ("", ", centered")
        for bits in BITS
    }


def report(results: dict[str, Any]) -> str:
    """Tables in Markdown."""
    rows = [
        [
            x["name"], str(x["bits"]), str(x["bytes"]), f"{100 * np.mean(x['recall']):.1f} %",
            f"{np.mean(x['error']):.4f}", *(f"{s:.2f}" for s in x["seconds"]),
        ]
        for x in sorted(results["rows"], key=lambda x: (x["bits"], -np.mean(x["recall"])))
    ]  # fmt: skip
    head = ["quantizer", "bits", "bytes", "recall at 10", "error · √d", "encode, s", "search, s"]
    found = ratios(results)
    verdicts = [
        f"{bits} bits{how}: {x:.3f}, {'as good' if x <= LIMIT else 'worse'}"
        for (how, bits), x in found.items()
    ]
    many, mega = results["million"], 1e6
    return f"""\
{results["vectors"]} vectors of {results["dimensions"]} dimensions, {results["queries"]} queries:

{experiment.table(head, rows)}

Error of "{OURS}" over that of "{RABITQ}": {"; ".join(verdicts)}.

{many["vectors"]} drawn vectors of 384 dimensions: {many["floats"] / mega:.0f} MB of float32, \
{many["bytes"] / mega:.0f} MB at 4 bits; at most {many["peak"] / mega:.0f} MB in use. \
Encoding {many["encode"]:.0f} s, {many["floats"] / many["encode"] / mega:.0f} MB/s; \
100 queries {many["search"]:.1f} s.
"""


PLOTTED = {  # names of rows, and labels
    f"{OURS}, centered": 'isentropic, "unbiased"',
    f"{RABITQ}, centered": "faiss, RaBitQ",
    "faiss, EDEN, centered": "faiss, EDEN",
    "faiss, product quantizer": "faiss, product quantizer",
    "faiss, scalar quantizer": "faiss, scalar quantizer",
    "isentropic, sign": 'isentropic, "sign"',
}


def picture(results: dict[str, Any]) -> Figure:
    """Plot the share of neighbors that are missed against the bytes of a vector."""
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, label in PLOTTED.items():
        rows = sorted((x for x in results["rows"] if x["name"] == name), key=lambda x: x["bytes"])
        missed = [100 * (1 - np.mean(x["recall"])) for x in rows]
        style = {"marker": "o", "ms": 5, "lw": 2 if label.startswith("isentropic") else 1}
        axis.plot([x["bytes"] for x in rows], missed, label=label, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks := [50, 100, 200, 400], [str(x) for x in ticks])
    axis.set_yticks(ticks := [0.3, 1, 3, 10, 30], [str(x) for x in ticks])
    axis.minorticks_off()
    axis.set_xlabel(f"bytes of a vector (float32: {4 * results['dimensions']})")
    axis.set_ylabel(f"of the {NEIGHBORS} nearest, not found, %")
    axis.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = experiment.parser(NAME, __doc__)
    parser.add_argument("--quick", action="store_true", help="few vectors")
    parser.add_argument("--cache", type=Path, default=Path("quantized_search"), help="for embeddings")
    options = parser.parse_args(arguments)
    count, n_queries = (600, 50) if options.quick else (10_500, 500)
    x = embeddings(count, options.cache)
    results = run(x[n_queries:], x[:n_queries], 1 if options.quick else SEEDS)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        results["million"] = pool.apply(million, [10**4 if options.quick else 10**6])
    name = f"{NAME}_quick" if options.quick else NAME
    experiment.finish(name, results, report, picture, options.output)


if __name__ == "__main__":
    main()
