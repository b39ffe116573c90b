"""How many dimensions do word vectors and attention heads need, and is it 8.33 log n?

    python dimension.py

Word vectors: Fast JL and PCA map the trained token embeddings of MiniLM, and random subsets of N of
them, to k dimensions. How do distances, cosines and nearest neighbors change?

Attention: queries and keys of d dimensions are mapped to k. The attention keeps the scale 1/√d.

- initial: queries and keys are independent standard normal, d = 512. The logits have variance 1.
- focused: the keys are the same, and each query is a multiple of the sum of eight of them. The logits
  of these eight are about 7.5 above the others.
- MiniLM: the heads of a trained encoder, d = 32, on sources of the standard library.

Lookup: keys have k dimensions from the start. Each query is one of them plus noise, and the weights
follow Bayes' rule.

The first three use three maps: Gaussian maps and Fast JL, drawn anew for each sample, and "least
squares". The last is, by singular values, the map to the k dimensions with the smallest error of the
logits for the given queries and keys. It need not move the least weight, because it shrinks the logits.
No model is trained here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import experiment
import minilm
import numpy as np
import torch
from torch import Tensor

import isentropic as it
from isentropic import theory

NAME = "dimension"
EPS = (0.1, 0.3, 0.5)
SUBSETS = (1000, 3000, 10_000)  # in addition to all words
SIZES = (16, 32, 48, 64, 86, 96, 128, 192, 256, 320)
WORD_MAPS = 2  # draws of Fast JL
QUERIES = 1000
PAIRS = 2**16  # random pairs of all words
POINTS = 700  # words whose pairs are all compared
LENGTHS = {"initial": (128, 256, 512, 1024, 2048), "MiniLM": (64, 128, 256, 512)}
LENGTHS["focused"] = LENGTHS["initial"]
HEAD_SIZES = {"initial": (32, 64, 128, 256, 512), "MiniLM": (8, 16, 24, 32)}
HEAD_SIZES["focused"] = HEAD_SIZES["initial"]
KINDS = ("initial", "focused", "MiniLM")
WIDTH, VALUE_WIDTH = 512, 64
NEEDLES, GAP = 8, 7.5
ROWS = 2048  # queries per length, unless two draws have more
TEXTS, LAYERS = 2, 6
LOOKUP_SIZES = tuple(range(4, 101, 4))
NOISES = (1.0, 2.0)  # standard deviation per coordinate of a query; that of a key is 1
# The levels that define a sufficient k: it keeps 90 % of the neighbors, moves half of the weight, or
# puts half of the weight on the right key.
KEPT, MOVED, FOUND = 90, 0.5, 0.5


# ---------------------------------------------------------------------------------- word vectors


def word_vectors() -> Tensor:
    """The trained token embeddings, (N, 384)."""
    vocabulary = minilm.tokenizer().get_vocab()
    trained = sorted(i for token, i in vocabulary.items() if not token.startswith("[unused"))
    weights = minilm.load().weights["embeddings.word_embeddings.weight"]
    return torch.asarray(weights[trained])


def nearest(x: Tensor, queries: Tensor, count: int = 10) -> Tensor:
    """The `count` nearest other points of each query, (queries, count)."""
    distances = torch.cdist(x[queries], x)
    distances[torch.arange(len(queries)), queries] = math.inf
    return distances.topk(count, largest=False).indices


def principal(x: Tensor, size: int) -> Tensor:
    """The coordinates on the first `size` principal axes."""
    u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    return (u * s)[:, :size]


def retention(x: Tensor) -> list[dict]:
    """The share of nearest neighbors that is kept, in %, per map, draw and size."""
    queries = torch.asarray(np.random.default_rng(1).permutation(len(x))[:QUERIES])
    true = nearest(x, queries)
    axes = principal(x, max(SIZES))
    rows = []
    for size in SIZES:
        images = {("PCA", 0): axes[:, :size]}
        for draw in range(WORD_MAPS):
            f = it.jl.hadamard_projection(x.shape[1], size, rng=draw, like=x)
            images["Fast JL", draw] = f(x)
        for (name, draw), y in images.items():
            found = nearest(y, queries)
            same = (found[:, 0] == true[:, 0]).double().mean().item()
            kept = (found[:, :, None] == true[:, None]).any(-1).double().mean().item()
            row = {"n": len(x), "map": name, "draw": draw, "k": size}
            rows.append({**row, "nearest": 100 * same, "ten": 100 * kept})
            experiment.advance(len(x) // 1000)
    return rows


def cosines(x: Tensor) -> Tensor:
    """The cosines of `PAIRS` random pairs of different points."""
    rng = np.random.default_rng(2)
    first = rng.integers(len(x), size=PAIRS)
    second = (first + rng.integers(1, len(x), size=first.size)) % len(x)
    return torch.cosine_similarity(x[first], x[second])


def distances(x: Tensor) -> list[dict]:
    """Distortion and variance of the cosines under Fast JL, per size."""
    some = torch.asarray(np.random.default_rng(3).permutation(len(x))[:POINTS])
    rows = []
    for size in SIZES:
        y = it.jl.hadamard_projection(x.shape[1], size, rng=0, like=x)(x)
        every = it.jl.distortion(x[some], y[some], pairs=POINTS * (POINTS - 1) // 2)
        sampled = it.jl.distortion(x, y, pairs=PAIRS, rng=0)
        promised = it.jl.eps([len(some), len(x)], size)
        rows.append(
            {
                "k": size,
                "worst": sampled.worst,
                "worst of some": every.worst,
                "promised": [eps if eps < 1 else None for eps in promised.tolist()],
                "cosine variance": cosines(y).var().item(),
            }
        )
        experiment.advance(len(x) // 1000)
    return rows


# ------------------------------------------------------------------------------------- attention


def draws(kind: str, n: int) -> int:
    return TEXTS * LAYERS if kind == "MiniLM" else max(2, ROWS // n)


def heads(kind: str, n: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values (..., n, d) of several draws, or of all layers for several texts."""
    if kind == "MiniLM":
        model = minilm.load(torch)
        for ids in minilm.texts(n, TEXTS, minilm.tokenizer()):
            layers: list[tuple[Tensor, Tensor, Tensor]] = []

            def attend(q: Tensor, k: Tensor, v: Tensor, *, law: Any) -> it.AttentionState:
                layers.append((q, k, v))  # noqa: B023
                return it.attention_state(q, k, v, law=law)

            minilm.encode(model, torch.asarray([ids]), attend=attend)
            yield from layers
        return
    generator = torch.Generator().manual_seed(n)
    for _ in range(draws(kind, n)):
        q, k = torch.randn(2, n, WIDTH, generator=generator)
        v = torch.randn(n, VALUE_WIDTH, generator=generator)
        if kind == "focused":
            needles = torch.rand(n, n, generator=generator).topk(NEEDLES).indices
            q = GAP / math.sqrt(WIDTH) * k[needles].sum(1)
        yield q, k, v


def best_rank(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with the same attention, whose first k dimensions approximate the logits best.

    The mean key is subtracted. It adds the same number to all logits of a query, so the weights do not
    change.
    """
    base_q, part_q = torch.linalg.qr(q)
    base_k, part_k = torch.linalg.qr(k - k.mean(-2, keepdim=True))
    u, s, vt = torch.linalg.svd(part_q @ part_k.mT, full_matrices=False)
    return base_q @ (u * s[..., None, :]), base_k @ vt.mT


def mapped(q: Tensor, k: Tensor, sizes: tuple[int, ...], seed: int) -> Iterator[tuple]:
    """The name, the size, the mapped queries and keys, and the random map or None."""
    best_q, best_k = best_rank(q, k)
    for size in sizes:
        f = it.jl.gaussian_projection(q.shape[-1], size, rng=seed, like=q)
        yield "Gaussian", size, f(q), f(k), f
        f = it.jl.hadamard_projection(q.shape[-1], size, rng=seed, like=q)
        yield "Fast JL", size, f(q), f(k), f
        yield "least squares", size, best_q[..., :size], best_k[..., :size], None


def expected_error(name: str, q: Tensor, k: Tensor, size: int) -> float:
    """The standard deviation of the errors of the logits within a row, predicted for inner products.

    Fast JL has no error at k = d, and its variance is proportional to 1/k − 1/d.
    """
    d = q.shape[-1]
    k = k - k.mean(-2, keepdim=True)
    lengths = (q**2).sum(-1).mean(-1) * (k**2).sum(-1).mean(-1)
    variance = (lengths + ((q @ k.mT) ** 2).mean((-2, -1))) / d
    return math.sqrt(variance.mean().item() * (1 / size - (name == "Fast JL") / d))


def compare(q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...], seed: int, normal: bool) -> dict:
    """How the maps change attention, per map and size, with the predicted entropy for `normal` keys."""
    scale = q.shape[-1] ** -0.5
    exact = it.AttentionDistribution(q, k, law=None, scale=scale).weights()
    result = {}
    for name, size, fq, fk, f in mapped(q, k, sizes, seed):
        weights = it.AttentionDistribution(fq, fk, law=None, scale=scale).weights()
        change = (weights - exact) @ v
        error = scale * (fq @ fk.mT - q @ k.mT)
        result[name, size] = {
            "entropy": it.entropy(weights).mean().item(),
            "exact entropy": it.entropy(exact).mean().item(),
            "moved": (weights - exact).abs().sum(-1).mean().item() / 2,
            "output": math.sqrt(((change**2).sum() / ((exact @ v) ** 2).sum()).item()),
            "error": error.var(-1).mean().sqrt().item(),
        }
        if f is not None:
            result[name, size]["expected error"] = expected_error(name, q, k, size)
            if normal:
                deviations = scale * f.adjoint(fq).norm(dim=-1)  # of the logits ⟨fᵀf q, k⟩
                predicted = theory.gaussian_entropy(len(k), deviations).mean().item()
                result[name, size]["predicted"] = predicted
    return result


def attention(kind: str, n: int) -> list[dict]:
    """One row per map and size: means over the draws."""
    found = []
    for seed, (q, k, v) in enumerate(heads(kind, n)):
        found.append(compare(q, k, v, HEAD_SIZES[kind], seed, kind == "initial"))
        experiment.advance(n // 16)
    return [
        {"kind": kind, "n": n, "map": name, "k": size}
        | {key: fmean(part[name, size][key] for part in found) for key in row}
        for (name, size), row in found[0].items()
    ]


def lookup(n: int) -> list[dict]:
    """The mean weight of the right key, per noise and size."""
    generator = torch.Generator().manual_seed(n)
    rows = []
    for size in LOOKUP_SIZES:
        k = torch.randn(n, size, generator=generator)
        noise = torch.randn(k.shape, generator=generator)
        for deviation in NOISES:
            q = (k + deviation * noise) / deviation**2
            bias = -(k**2).sum(-1) / (2 * deviation**2)
            weights = it.AttentionDistribution(q, k, bias=bias, law=None, scale=1.0).weights()
            rows.append(
                {"n": n, "noise": deviation, "k": size, "weight": weights.diagonal().mean().item()}
            )
    experiment.advance(n // 16)
    return rows


def capacity(n: int, noise: float) -> float:
    """The k for which k coordinates of ½ log(1 + 1/σ²) nats each suffice to identify one of n keys.

    This is the capacity of a channel with Gaussian noise (Shannon 1949).
    """
    return 2 * math.log(n) / math.log1p(noise**-2)


# ------------------------------------------------------------------------------------------- run


def work(job: tuple[str, int]) -> Any:
    kind, n = job
    if kind in KINDS:
        return attention(kind, n)
    if kind == "lookup":
        return lookup(n)
    x = word_vectors()
    if kind == "distances":
        return distances(x)
    return retention(x[np.random.default_rng(0).permutation(len(x))[:n]])


def run() -> dict[str, Any]:
    x = word_vectors()
    words = [("words", n) for n in (len(x), *SUBSETS[::-1])]
    attended = [(kind, n) for kind in KINDS for n in LENGTHS[kind][::-1]]
    looked = [("lookup", n) for n in LENGTHS["initial"]]
    jobs = [*words, ("distances", len(x)), *attended, *looked]
    steps = sum(n // 1000 * len(SIZES) * (1 + WORD_MAPS) for _, n in words)
    steps += len(x) // 1000 * len(SIZES) + sum(draws(*job) * (job[1] // 16) for job in attended)
    steps += sum(n // 16 for _, n in looked)
    found = dict(zip(jobs, experiment.run(work, jobs, steps), strict=True))
    return {
        "words": len(x),
        "width": x.shape[1],
        "cosine variance": cosines(x).var().item(),
        "distances": found["distances", len(x)],
        "retention": [row for job in reversed(words) for row in found[job]],
        "lookup": [row for job in looked for row in found[job]],
        "attention": [row for job in sorted(attended, key=attended.index) for row in found[job]],
    }


def main(argv: list[str] | None = None) -> None:
    import dimension_results

    options = experiment.parser(NAME, __doc__).parse_args(argv)
    experiment.finish(NAME, run(), dimension_results.report, dimension_results.picture, options.output)


if __name__ == "__main__":
    main()
