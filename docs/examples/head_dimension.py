"""How many dimensions per head does the attention of a language model need, and is it 8.33 log n?

    python head_dimension.py            # ten minutes on one core
    python head_dimension.py --quick    # a minute, and no verdict

SmolLM2-135M-Instruct has 30 layers with 9 heads of 64 dimensions. The queries and keys of all heads are
projected to k dimensions, after the rotary positions and without any training. How much does the loss
rise, and does the k that suffices depend on the number n of keys?

What follows was written before the run.

Quantity. The rise of the mean negative log-likelihood per token, in nats, over that of the model itself
on the same tokens. A pass over 512 tokens has all lengths: the band 128 has the tokens whose queries
see 65 to 128 keys, and the bands 256 and 512 have those up to twice and four times as many. So n is the
geometric mean of a band's numbers of keys.

Arms. The logits of a head are q·M k, and M has rank k. With k = 64 both arms are the model itself.

- Fast JL: M = PᵀP of `jl.hadamard_projection`. For 64 dimensions this is a rotation of which k
  coordinates are kept, times √(64/k), so that logits are right on average over the draws. Each head of
  each layer has a map of its own, and each text has other draws. k = 32, 48, 56, 60.
- fitted: the M with the least mean squared error of the logits, for independent queries and keys with
  the second moments of four other texts. It is the principal components of queries and keys together.
  The mean of a text's keys is subtracted, as it moves all logits of a query alike. k = 16, 32, 40, 48,
  56, 60.

Texts. Eight, of 513 tokens each: Python's language reference, docstrings and sources. The model may
have seen them in training, which is the same for both arms.

Sufficient dimension. For each text, arm and band: the least k from which on the rise is at most 0.05
nats, by linear interpolation between the k that were measured, and 64. The text of the claim (the
derivation of 9588, §8.2) calls a rise of 0.04 nats "basically enough" (perplexity 15.0 to 15.6 at n =
512) and one of 0.11 a notable decline. 0.05 nats are 5 % of perplexity. If the rise at the least k is
no more, the dimension is that k.

Decision. Two questions to each arm, by `experiment.decide` over the eight texts:

- Is it 8.33 log n? The differences between the sufficient dimension and 8.33 log n, mean over the three
  bands. The smallest relevant difference is 8 dimensions, an eighth of the head. "Yes" if the interval
  lies within ±8, "no" if it lies outside, otherwise not decided.
- Does it grow with log n? The slope of the sufficient dimension against log n, over the three bands.
  The claim is 8.33, and half of it is the smallest relevant slope. "Yes" if the interval lies above
  4.17, "no" if it lies below, otherwise not decided.

The intervals are not widened for the number of questions. The rises are reported without a verdict. The
logarithm is the natural one: then 8.33 log n is 38, 43 and 49 for the three bands, below 64. (The
claim's table of words uses it. Where the claim speaks of heads, log 512 is 9, to the base 2.)

What was known: on two other texts 48 dimensions of Fast JL raised the
loss by 2 nats, and 48 fitted ones by 0.05 to 0.09. The k near 64 were chosen for this.

Each pass is kept in a cache folder as soon as it is there, so that a run that was stopped goes on where
it was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import experiment
import matplotlib.pyplot as plt
import pretrained
import torch
from experiment import Claim, Decision, Verdict, decide, plot_intervals, table
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import isentropic as it

NAME = "head_dimension"
EDGES = (0, 64, 128, 256, 512)  # of the bands of n; the first is not used
BANDS = EDGES[2:]
CONSTANT = 8.33
# What decides
SMALLEST = 0.05  # nats per token
NEAR, GROWS = 8.0, CONSTANT / 2  # dimensions, and dimensions per unit of log n

ARMS = ("Fast JL", "fitted")


class Size(NamedTuple):
    sizes: dict[str, tuple[int, ...]]  # k of each arm
    test: tuple[str, ...]
    fit: tuple[str, ...]


FULL = Size(
    {"Fast JL": (32, 48, 56, 60), "fitted": (16, 32, 40, 48, 56, 60)},
    (
        "topics 0", "topics 10", "topics 20",
        "docstrings networkx", "docstrings matplotlib",
        "source argparse", "source tarfile", "source typing",
    ),
    ("topics 40", "docstrings sympy", "source _pydecimal", "source inspect"),
)  # fmt: skip
# Without the texts that decide.
QUICK = Size(dict.fromkeys(ARMS, (16, 48)), ("topics 41", "source pickletools"), FULL.fit[:2])


# ------------------------------------------------------------------------------------------ maps


def random_maps(layers: int, heads: int, size: int, k: int, draw: int) -> Tensor:
    """PᵀP of Fast JL for each layer and head, (layers, heads, size, size)."""
    like = torch.empty(0)

    def one(seed: int) -> Tensor:
        f = it.jl.hadamard_projection(size, k, rng=seed, like=like)
        return f.adjoint(f(torch.eye(size)))

    count = layers * heads
    return torch.stack([one(draw * count + i) for i in range(count)]).unflatten(0, (layers, heads))


def fitted_maps(query: Tensor, key: Tensor, k: int) -> Tensor:
    """M of rank k with the least E(qᵀ(M − 1)k)², from the second moments (..., size, size) of both.

    With roots A and B of the moments, this is |A(M − 1)B|², so AMB is AB cut to its k largest singular
    values.
    """
    a, b = root(query), root(key)
    u, s, v = torch.linalg.svd(a @ b)
    cut = (u[..., :k] * s[..., None, :k]) @ v[..., :k, :]
    return torch.linalg.solve(a, torch.linalg.solve(b, cut, left=False)).float()


def root(moment: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(moment.double())
    # Directions without any variance get a little, so that the root has an inverse.
    values = values.clamp(min=1e-6 * values.amax(-1, keepdim=True).max())
    return (vectors * values.sqrt()[..., None, :]) @ vectors.mT


def projected(maps: Tensor, layer: int, query: Tensor, key: Tensor) -> Tensor:
    """Queries (B, H, n, size) whose products with the keys are those of q M and k."""
    return query @ maps[layer]


@torch.no_grad()
def moments(model: Any, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Second moments of queries, and covariances of keys, (layers, heads, size, size)."""
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    size = model.config.head_dim
    found = torch.zeros(2, layers, heads, size, size)

    def keep(layer: int, query: Tensor, key: Tensor) -> Tensor:
        centered = key - key.mean(-2, keepdim=True)
        centered = centered.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        for total, x in zip(found, (query, centered), strict=True):
            total[layer] += (x.mT @ x)[0] / (x.shape[-2] * len(texts))
        return query

    with pretrained.changed_queries(model, keep):
        for ids in tqdm(texts, desc="moments"):
            model(ids[None, :-1])
    return found[0], found[1]


# ------------------------------------------------------------------------------------------ runs


@torch.no_grad()
def band_losses(model: Any, ids: Tensor, maps: Tensor | None) -> list[float]:
    """The mean loss of the tokens of each band."""
    inner = (lambda layer, query, key: query) if maps is None else partial(projected, maps)
    with pretrained.changed_queries(model, inner):
        logits = model(ids[None, :-1]).logits[0]
    losses = nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    return pretrained.means(losses, EDGES[1:])


def run(size: Size, folder: Path) -> dict[str, Any]:
    """All results. Those that the folder has are not computed again."""
    model, tokenizer = pretrained.load(folder / "model")
    pretrained.set_positions(model, "as trained")
    test, fit = (
        [pretrained.read(name, tokenizer, EDGES[-1]) for name in names]
        for names in (size.test, size.fit)
    )
    second = moments(model, [x.ids for x in fit])
    config = model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.head_dim)

    def losses(i: int, arm: str = "", k: int = 0) -> list[float]:
        """Those of the test text i, which also has the draws of this number."""

        def compute() -> list[float]:
            if not arm:
                return band_losses(model, test[i].ids, None)
            maps = random_maps(*shape, k, i) if arm == "Fast JL" else fitted_maps(*second, k)
            return band_losses(model, test[i].ids, maps)

        of = [x.digest for x in (test[i], *(fit if arm == "fitted" else ()))]
        what = {"edges": EDGES, "arm": arm, "k": k, "draw": i, "texts": of}
        return experiment.kept(folder / NAME, f"{test[i].name} {arm} {k}", what, compute)

    arms = [(arm, k) for arm in ARMS for k in size.sizes[arm]]
    found: dict[str, Any] = {"model": [], **{arm: {k: [] for k in size.sizes[arm]} for arm in ARMS}}
    with tqdm(total=len(test) * (1 + len(arms)), unit=" passes") as bar:
        for i in range(len(test)):
            found["model"].append(losses(i))
            bar.update()
            for arm, k in arms:
                found[arm][k].append(losses(i, arm, k))
                bar.update()
    return {
        "bands": BANDS,
        "size": config.head_dim,
        "texts": {x.name: x.digest for x in (*test, *fit)},
        "losses": {
            "model": found["model"],
            **{arm: [{"k": k, "losses": x} for k, x in found[arm].items()] for arm in ARMS},
        },
    }


# --------------------------------------------------------------------------------------- results


def lengths(results: dict) -> list[float]:
    """The geometric mean of the numbers of keys in each band."""
    return [
        math.exp(statistics.fmean(math.log(m) for m in range(n // 2 + 1, n + 1)))
        for n in results["bands"]
    ]


def curves(results: dict, arm: str) -> dict[int, list[list[float]]]:
    """The rise of the loss for each k, text and band."""
    base = results["losses"]["model"]
    return {
        row["k"]: [
            [x - y for x, y in zip(*pair, strict=True)]
            for pair in zip(row["losses"], base, strict=True)
        ]
        for row in results["losses"][arm]
    }


def sufficient(sizes: Sequence[int], found: Sequence[float], limit: float = SMALLEST) -> float:
    """The least size from which on the rises are at most the limit, with linear interpolation."""
    above = [i for i, x in enumerate(found) if x > limit]
    if not above:
        return sizes[0]
    i = above[-1]  # The last size is that of the model, whose rise is 0.
    return sizes[i] + (sizes[i + 1] - sizes[i]) * (found[i] - limit) / (found[i] - found[i + 1])


def sufficient_sizes(results: dict, arm: str) -> list[list[float]]:
    """The sufficient dimension for each text and band."""
    found = curves(results, arm)
    sizes = [*found, results["size"]]
    return [
        [sufficient(sizes, [*rises, 0.0]) for rises in zip(*of_text, strict=True)]
        for of_text in zip(*found.values(), strict=True)
    ]


def offsets(results: dict, arm: str) -> list[float]:
    """Sufficient dimension less 8.33 log n, mean over the bands, for each text."""
    claimed = [CONSTANT * math.log(n) for n in lengths(results)]
    return [
        statistics.fmean(x - y for x, y in zip(found, claimed, strict=True))
        for found in sufficient_sizes(results, arm)
    ]


def slopes(results: dict, arm: str) -> list[float]:
    return [experiment.slope(lengths(results), x) for x in sufficient_sizes(results, arm)]


def near(results: dict, arm: str) -> tuple[str, Decision]:
    """Whether the sufficient dimension is 8.33 log n."""
    found = decide(offsets(results, arm), NEAR)
    return {"no effect": "yes", "not decided": "not decided"}.get(found.verdict, "no"), found


def grows(results: dict, arm: str) -> tuple[str, Decision]:
    """Whether the sufficient dimension grows with log n, by half of the claimed slope or more."""
    found = decide([x - GROWS for x in slopes(results, arm)], 0)
    said = {"helps": "yes", "harms": "no"}.get(found.verdict, "not decided")
    return said, decide(slopes(results, arm), 0)  # the interval of the slope itself


def show(said: str, found: Decision) -> str:
    return f"{said}: {found.interval('+.2f')}"


def report(results: dict[str, Any]) -> str:
    bands, exact = results["bands"], [f"{CONSTANT * math.log(n):.0f}" for n in lengths(results)]
    rise_rows = []
    for arm in ARMS:
        for k, of_texts in curves(results, arm).items():
            found = [decide(x, SMALLEST) for x in zip(*of_texts, strict=True)]
            rise_rows.append([f"{arm}, k = {k}", *(x.interval("+.3f") for x in found)])
    dimension_rows = [["8.33 log n", *exact]]
    for arm in ARMS:
        columns = zip(*sufficient_sizes(results, arm), strict=True)
        dimension_rows.append([arm, *(experiment.spread(x, ".0f") for x in columns)])
    decision_rows = [[arm, show(*near(results, arm)), show(*grows(results, arm))] for arm in ARMS]
    keys = [f"{n // 2 + 1} to {n} keys" for n in bands]
    return f"""\
The rise of the loss in nats per token, mean over {len(results["losses"]["model"])} texts:

{table(["", *keys], rise_rows)}

The least dimension from which on the rise is at most {SMALLEST} nats (± standard deviation over texts):

{table(["", *keys], dimension_rows)}

The decisions, with the sufficient dimension less 8.33 log n, and the slope against log n:

{table(["", "is it 8.33 log n?", "does it grow with log n?"], decision_rows)}

"Is it" allows ±{NEAR:g} dimensions, and 8.33 log n only goes from {exact[0]} to {exact[-1]} here. So a
dimension that does not depend on n can pass too. No map has more than {results["size"]} dimensions:
where a map needs nearly all of them at every n, its slope says little.
"""


def claims(results: dict[str, Any]) -> list[Claim]:
    def claim(says: str, what: str, found: dict[str, tuple[str, Decision]]) -> Claim:
        text = "; ".join(f"{arm}: {show(*x)}" for arm, x in found.items())
        return Claim(
            "derivation of 9588, §8.2 and §10.1",
            says,
            f"SmolLM2-135M, {what}. {text}.",
            together(found),
        )

    return [
        claim(
            "Attention needs 8.33 log n dimensions per head.",
            "k for a rise of 0.05 nats, less 8.33 log n",
            {arm: near(results, arm) for arm in ARMS},
        ),
        claim(
            "The dimension that a head needs grows with log n.",
            "slope of this k against log n, claimed 8.33",
            {arm: grows(results, arm) for arm in ARMS},
        ),
    ]


def together(found: dict[str, tuple[str, Decision]]) -> Verdict:
    """One verdict for all arms."""
    said = {x for x, _ in found.values()}
    single: dict[str, Verdict] = {"yes": "reproduced", "no": "not reproduced"}
    if len(said) == 1:
        return single.get(said.pop(), "not decided")
    return "in part" if "yes" in said else "not decided"


def picture(results: dict[str, Any]) -> Figure:
    """Plot the rise against k for each band, and the sufficient dimension against n."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for ax, arm in zip(axes[:2], ARMS, strict=True):
        found = curves(results, arm)
        for i, n in enumerate(results["bands"]):
            means = [statistics.fmean(x[i] for x in of_texts) for of_texts in found.values()]
            ax.plot(list(found), means, "o-", markersize=4, label=f"{n // 2 + 1} to {n} keys")
        ax.axhline(SMALLEST, color="gray", linestyle=":")
        ax.set_yscale("symlog", linthresh=SMALLEST)
        ax.set_title(arm, fontsize=10)
        ax.set_xlabel("dimensions k of queries and keys")
        ax.set_ylabel("rise of the loss, nats per token")
        ax.legend(fontsize=8)
    n = lengths(results)
    for arm in ARMS:
        means = [decide(x, 0) for x in zip(*sufficient_sizes(results, arm), strict=True)]
        plot_intervals(axes[2], n, means, fmt="o-", capsize=3, label=arm)
    axes[2].plot(n, [CONSTANT * math.log(x) for x in n], "k--", label="8.33 log n")
    axes[2].set_xscale("log", base=2)
    axes[2].set_ylim(0, results["size"])
    axes[2].set_xlabel("keys n")
    axes[2].set_ylabel(f"dimensions for a rise of {SMALLEST} nats")
    axes[2].legend(fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> None:
    cached = "the model and for results that are not computed again"
    parser = pretrained.model_parser(NAME, __doc__, quick="a minute, and no verdict", cached=cached)
    options = parser.parse_args(arguments)
    size, name = (QUICK, f"{NAME}_quick") if options.quick else (FULL, NAME)
    experiment.finish(name, run(size, options.cache), report, picture, options.output)


if __name__ == "__main__":
    main()
