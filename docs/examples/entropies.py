"""Entropy of attention at initialization and in trained models, compared with published claims.

    python entropies.py

At initialization: queries and keys with independent standard normal features (d = 64), and those of a
new `torch.nn.MultiheadAttention`, for n = 64 … 8192 keys. Trained: MiniLM-L6 on the sources of Python's
standard library, and the models of `first.py` and `masked_language.py`, from the results of these
scripts. Run the two before this one. O is the standard scale, and E the law with the given base at test
time.
"""

from __future__ import annotations

import math
from typing import Any

import entropy_growth
import experiment
import matplotlib.pyplot as plt
import numpy as np
import torch
from experiment import Claim, slope, table, verdict
from matplotlib.figure import Figure
from tqdm import tqdm

import isentropic as it
from isentropic import theory

NAME = "entropies"
D = 64
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUERIES, DRAWS = 256, 8
WIDTH, HEADS = 768, 12  # of the new layer
MODEL_LENGTHS = (32, 64, 128, 256, 512)
LAWS = {"O": None, "E, base 512": it.laws.LogLength(512), "E, base 64": it.laws.LogLength(64)}
# Derivation of 8823, §7.2: log n − 1.92 for O by eq. 60, and the entropy at n = 64 for E.
CLAIMED_AT_START = {64: 2.24, 128: 2.93, 256: 3.63, 512: 4.32, 1024: 5.01}
# Derivation of 9588, §8.3: a model trained at n = 512.
CLAIMED_TRAINED = {
    "base": 512,
    "lengths": [512, 1024, 2048, 4096],
    "O": [2.34, 3.05, 3.76, 4.47],
    "E": [2.34, 2.41, 2.48, 2.55],
}


def at_start(seed: int, steps: tqdm) -> dict[str, dict[str, list[float]]]:
    """Mean entropies of normal queries and keys, and of a new layer, per law and length."""
    torch.manual_seed(seed)
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    found: dict[str, dict[str, list[float]]] = {"normal": {}, "new layer": {}}
    for n in LENGTHS:
        sums: dict[tuple[str, str], float] = {}
        for _ in range(DRAWS):
            pairs = {
                "normal": (torch.randn(QUERIES, D).double(), torch.randn(n, D).double()),
                "new layer": projected(layer, torch.randn(n, WIDTH).double()),
            }
            for model, (q, k) in pairs.items():
                for name, law in LAWS.items():
                    entropy = it.attention_entropy(q, k, law=law).mean().item() / DRAWS
                    sums[model, name] = sums.get((model, name), 0) + entropy
            steps.update(n)
        for (model, name), entropy in sums.items():
            found[model].setdefault(name, []).append(entropy)
    return found


def projected(layer: torch.nn.MultiheadAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (heads, n, d) of a layer. Only the first few tokens are queries."""
    with torch.no_grad():
        q, k, _ = torch.nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    split = (HEADS, WIDTH // HEADS)
    rows = QUERIES // HEADS
    return q[:rows].unflatten(-1, split).transpose(0, 1), k.unflatten(-1, split).transpose(0, 1)


def predicted(name: str, deviation: float = 1.0) -> list[float]:
    """The entropy of Gaussian scores with this standard deviation."""
    law = LAWS[name]
    return [theory.gaussian_entropy(n, deviation * (law(n) if law else 1.0)) for n in LENGTHS]


def needles() -> dict[str, Any]:
    """The needle model that is nearest to the claimed entropies of O, and its entropies with E."""
    base, lengths, claimed = (CLAIMED_TRAINED[key] for key in ("base", "lengths", "O"))
    law = it.laws.LogLength(base)
    best: dict[str, Any] = {"error": math.inf}
    for relevant in range(1, math.floor(math.exp(claimed[0])) + 1):
        gap = theory.invariant_factor(base, claimed[0], model="needle", n_relevant=relevant, gap=1.0)
        entropy = [theory.needle_entropy(n, relevant, gap) for n in lengths]
        error = max(abs(a - b) for a, b in zip(entropy, claimed, strict=True))
        if error < best["error"]:
            scaled = [theory.needle_entropy(n, relevant, gap * law(n)) for n in lengths]
            best = {"error": error, "relevant": relevant, "gap": gap}
            best |= {"base": base, "lengths": lengths, "O": entropy, "E": scaled}
    return best


def trained(texts: int) -> dict[str, dict[str, Any]]:
    """Mean entropies per length of trained models: MiniLM, and those of the other experiments."""
    scales = {"O": None, "E": it.laws.LogLength(128)}
    reports = entropy_growth.measure("torch", MODEL_LENGTHS, texts, scales)
    found = {
        "MiniLM-L6, 72 heads": {
            "base": 128,
            "lengths": list(MODEL_LENGTHS),
            **{name: report.entropy.mean(axis=(1, 2)).tolist() for name, report in reports.items()},
        }
    }
    others = {"FIRST, trained at 64": "first", "masked bytes, trained at 64": "masked_language"}
    for title, name in others.items():
        results = experiment.load(name)
        arms = {"O": results["arms"]["O"], "E": results["arms"]["O + law"]}
        found[title] = {
            "base": 64,
            "lengths": results["lengths"],
            **{
                arm: np.mean([seed["entropy"] for seed in seeds], axis=(0, 2)).tolist()
                for arm, seeds in arms.items()
            },
        }
    return found


def run(seed: int, texts: int) -> dict[str, Any]:
    with tqdm(total=DRAWS * sum(LENGTHS), unit=" keys") as steps:
        start = at_start(seed, steps)
    return {
        "seed": seed,
        "lengths": list(LENGTHS),
        "start": start,
        "gaussian": {name: predicted(name) for name in LAWS},
        "sphere": [theory.sphere_entropy(n, D, math.sqrt(D)) for n in LENGTHS],
        "new layer, gaussian": predicted("O", 0.5),
        "trained": trained(texts),
        "needles": needles(),
    }


def growth(model: dict[str, Any], arm: str) -> float:
    """The slope dH/d log n."""
    return slope(model["lengths"], model[arm])


def report(results: dict[str, Any]) -> str:
    lengths, start = results["lengths"], results["start"]
    claimed = {"O": CLAIMED_AT_START, "E, base 64": dict.fromkeys(CLAIMED_AT_START, 2.24)}

    def row(title: str, values: Any) -> list[str]:
        return [title, *(f"{value:.2f}" for value in values)]

    rows = []
    for name in LAWS:
        rows += [
            row(f"{name}: measured", start["normal"][name]),
            row(f"{name}: `theory.gaussian_entropy`", results["gaussian"][name]),
        ]
        if name in claimed:
            rows.append(
                [f"*{name}: derivation of 8823, §7.2*", *(claimed[name].get(n, "") for n in lengths)]
            )
    rows += [
        row("O: `theory.sphere_entropy`", results["sphere"]),
        row("O: new `MultiheadAttention`, measured", start["new layer"]["O"]),
        row("O: `theory.gaussian_entropy`, β = ½", results["new layer, gaussian"]),
    ]
    needle = results["needles"]
    models = {
        **results["trained"],
        "*derivation of 9588, §8.3*": CLAIMED_TRAINED,
        f"needles: {needle['relevant']} relevant keys at a gap of {needle['gap']:.2f}": needle,
    }
    growing = [
        [
            title,
            f"{model['lengths'][0]} … {model['lengths'][-1]}",
            *(f"{model[arm][0]:.2f} → {model[arm][-1]:.2f}" for arm in "OE"),
            *(f"{growth(model, arm):.2f}" for arm in "OE"),
            model["base"],
        ]
        for title, model in models.items()
    ]
    return f"""\
Mean entropy in nats at initialization:

{table(["n", *lengths], rows)}

The entropies are those of Gaussian scores, about log n − β²/2 for the factor β. A factor that grows
like log n does not hold any of them: at these n, β²/2 grows more slowly than log n.

Trained models:

{table(["", "n", "O", "with the law", "dH/d log n: O", "with the law", "base"], growing)}

The law removes a part of the growth. It removes all of it only in the needle model, and in none of the
trained models.
"""


def claims(results: dict[str, Any]) -> list[Claim]:
    measured = results["start"]["normal"]
    of = results["lengths"].index
    apart = {n: measured["O"][of(n)] - h for n, h in CLAIMED_AT_START.items()}
    held, wide = ([measured[f"E, base {base}"][of(n)] for n in CLAIMED_AT_START] for base in (64, 512))
    models = results["trained"].values()
    grows = {arm: [growth(model, arm) for model in models] for arm in "OE"}
    claimed = {arm: growth(CLAIMED_TRAINED, arm) for arm in "OE"}
    needle = results["needles"]
    return [
        Claim(
            "derivation of 8823, §7.2, eq. 60",
            "At initialization the entropy of O is log n − 1.92 (d = 64).",
            f"Too low by {min(apart.values()):.2f} to {max(apart.values()):.2f} nats: it is "
            f"{measured['O'][0]:.2f} at n = {results['lengths'][0]}.",
            verdict(max(apart.values()) < 0.1),
        ),
        Claim(
            "derivation of 8823, §7.2",
            "At initialization E keeps the entropy at 2.24 from n = 64 to 1024.",
            f"{held[0]:.2f} to {held[-1]:.2f} with base 64, "
            f"{wide[0]:.2f} to {wide[-1]:.2f} with base 512.",
            verdict(max(held) - min(held) < 0.1),
        ),
        Claim(
            "derivation of 9588, §8.3",
            f"In a trained model O's entropy grows like log n, by {claimed['O']:.2f} per unit of it.",
            f"{min(grows['O']):.2f} to {max(grows['O']):.2f} in three models, at shorter lengths.",
            verdict(all(abs(x - claimed["O"]) < 0.3 for x in grows["O"])),
        ),
        Claim(
            "derivation of 9588, §8.3",
            f"With the law it grows by {claimed['E']:.2f}: it is nearly constant.",
            f"{min(grows['E']):.2f} to {max(grows['E']):.2f} in three models that run with it. A "
            f"needle model that has O's numbers within {needle['error']:.2f} nats has "
            f"{growth(needle, 'E'):.2f}.",
            verdict(min(grows["E"]) < 0.15),
        ),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot entropies at initialization, with theory and claims, and in trained models."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained", sharey=True)
    lengths = results["lengths"]
    for i, name in enumerate(LAWS):
        scale = name.replace("O", "standard").replace("E", "log n")
        values = results["start"]["normal"][name]
        left.plot(lengths, values, "o", color=f"C{i}", label=f"{scale}, measured")
        left.plot(lengths, results["gaussian"][name], color=f"C{i}", label=f"{scale}, theory")
    left.plot(*zip(*CLAIMED_AT_START.items(), strict=True), "x:", color="C0", label="standard, claimed")
    left.plot([64, 1024], [2.24, 2.24], "x:", color="C2", label="log n, claimed")
    left.set_title("at initialization", fontsize=10)
    models = {**results["trained"], "claimed": CLAIMED_TRAINED}
    for i, (title, model) in enumerate(models.items()):
        style = ":" if model is CLAIMED_TRAINED else "-"
        right.plot(model["lengths"], model["O"], "o" + style, color=f"C{i}", label=f"{title}: standard")
        right.plot(
            model["lengths"],
            model["E"],
            "s" + style,
            color=f"C{i}",
            mfc="white",
            label="trained with log n",
        )
    right.set_title("trained", fontsize=10)
    for ax in (left, right):
        shown = np.geomspace(32, 8192, 50)
        ax.plot(shown, np.log(shown), color="gray", linewidth=0.8, label="uniform attention")
        ax.set_xscale("log", base=2)
        ax.set_xlabel("keys n")
        ax.legend(fontsize=8, loc="upper left")
    left.set_ylabel("mean attention entropy in nats")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = experiment.parser(NAME, __doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=experiment.positive, default=16, help="for MiniLM (16)")
    options = parser.parse_args(arguments)
    experiment.finish(NAME, run(options.seed, options.texts), report, picture, options.output)


if __name__ == "__main__":
    main()
