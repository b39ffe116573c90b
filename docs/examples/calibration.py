"""How well fitted laws hold the entropy of attention at lengths beyond those of the fit.

    python calibration.py            # four minutes
    python calibration.py --quick    # some seconds: only shows that everything runs

MiniLM-L6. Laws are fitted on modules of Python's standard library and on texts of its manual, of at
most 256 tokens, and tried on others of each kind at 512. The error of a head is the difference between
its mean entropy at 512 with the laws, and that at 128 without. The error of a law is the mean of
|error| over the 72 heads. "To the length of use" is a fit that has texts of 512 tokens too.

Random queries and keys. Keys are points on a sphere or standard normal, in d dimensions. Queries are
like keys, with a length for which the mean entropy among 128 keys is 35, 50 or 70 % of log 128. Laws
are fitted with 64 to 1024 keys, and tried with 16384. The error is the mean of the difference over
draws and targets, with its sign. The largest |error| of a single fit is reported too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import experiment
import matplotlib.pyplot as plt
import minilm
import numpy as np
import torch
from experiment import table
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import AutoModel

import isentropic as it
from isentropic import laws
from isentropic.integrations import huggingface

NAME = "calibration"
REFERENCE = 128
FIT, USED = (64, 128, 192, 256), (128, 256, 512)  # tokens: of the fit, and with the length of use
TRIED = 512
FITTED_TEXTS, TRIED_TEXTS = 10, 12  # of each kind
KINDS = ("code", "prose")
# The rows of the table, with the lengths of the fit.
FITTED, TO_USE = "fitted", "fitted to the length of use"
FITS = {FITTED: FIT, TO_USE: USED}

DIMENSIONS = (4, 6, 8, 16, 32, 64)
KEYS, FAR = (64, 128, 256, 512, 1024), 16384
TARGETS = (0.35, 0.5, 0.7)  # of log 128
DRAWS, SEQUENCES, QUERIES = 8, 8, 64


# --------------------------------------------------------------------------------------- MiniLM


def texts(kind: str, count: int) -> list[list[int]]:
    """The first `TRIED` tokens of each of `count` texts."""
    tokens = minilm.tokenizer()
    if kind == "code":
        return list(minilm.texts(TRIED, count, tokens))
    encoded = (tokens.encode(topics[name]).ids for name in sorted(topics))
    return [ids[:TRIED] for ids in encoded if len(ids) >= TRIED][:count]


def batches(ids: list[list[int]], lengths: tuple[int, ...]) -> Iterator[torch.Tensor]:
    for n in lengths:
        yield torch.tensor(ids)[:, :n]


def of_minilm(fitted: int, tried: int) -> dict[str, Any]:
    """The mean |error| over heads per law and kind of text, and how far factors can be trusted."""
    model = AutoModel.from_pretrained(minilm.model_folder())
    both = {kind: texts(kind, fitted + tried) for kind in KINDS}
    fit_on = {kind: ids[:fitted] for kind, ids in both.items()}
    try_on = {kind: ids[fitted:] for kind, ids in both.items()}
    mixed = [ids for kind in KINDS for ids in fit_on[kind]]

    def fit(ids: list[list[int]], lengths: tuple[int, ...]) -> Any:
        return huggingface.calibrate(model, batches(ids, lengths), reference_length=REFERENCE)

    found = {name: fit(mixed, lengths) for name, lengths in FITS.items()}
    arms: dict[str, Any] = {"standard scale": None, "Su's law, base 128": laws.LogLength(REFERENCE)}
    arms |= {name: report.laws for name, report in found.items()}
    errors = {
        name: {kind: error(model, law, try_on[kind]) for kind in KINDS} for name, law in arms.items()
    }
    lowest, _, highest = found[FITTED].at(TRIED)
    factor = factors(found[TO_USE].laws)
    of_code, of_prose = (factors(fit(fit_on[kind], USED).laws) for kind in KINDS)
    return {
        "errors": errors,
        "covered": float(np.mean((lowest <= factor) & (factor <= highest))),
        "kinds_differ": float(np.mean(np.abs(np.log(of_code / of_prose)))),
        "fitted": fitted,
        "tried": tried,
    }


def error(model: Any, law: Any, ids: list[list[int]]) -> float:
    standard = huggingface.profile(model, batches(ids, (REFERENCE, TRIED)))
    if law is None:
        return float(np.abs(standard.at(TRIED) - standard.at(REFERENCE)).mean())
    with huggingface.use(model, law):
        report = huggingface.profile(model, batches(ids, (REFERENCE, TRIED)))
    return float(np.abs(report.at(TRIED) - standard.at(REFERENCE)).mean())


def factors(fitted: list[laws.Law]) -> np.ndarray:
    """The factors at `TRIED` (layers, heads)."""
    return np.stack([np.asarray(law(TRIED)) for law in fitted])


# -------------------------------------------------------------------------------------- synthetic


def sphere(rng: np.random.Generator, *shape: int) -> np.ndarray:
    x = rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def gaussian(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape)


MODELS: dict[str, Callable[..., np.ndarray]] = {"sphere": sphere, "gaussian": gaussian}


def synthetic(model: str, d: int, seed: int, far: int) -> list[float]:
    """The error per target, with `far` keys."""
    draw = MODELS[model]
    rng = np.random.default_rng(seed)
    query = draw(rng, SEQUENCES, 1, QUERIES, d)
    keys = {n: draw(rng, SEQUENCES, 1, n, d) for n in (*KEYS, far)}

    def entropy(lengths: np.ndarray, n: int, law: laws.Law | None = None) -> np.ndarray:
        """The mean entropy for each length of the queries."""
        scaled = query * lengths[:, None, None]
        key = np.broadcast_to(keys[n], (SEQUENCES, len(lengths), n, d))
        return it.attention_entropy(scaled, key, law=law).mean(axis=(0, -1))

    targets = np.asarray(TARGETS) * math.log(REFERENCE)
    low, high = np.full(len(targets), 1e-3), np.full(len(targets), 1e4)
    for _ in range(40):  # bisection: the longer the queries, the smaller the entropy
        middle = np.sqrt(low * high)
        is_above = entropy(middle, REFERENCE) > targets
        low, high = np.where(is_above, middle, low), np.where(is_above, high, middle)
    samples = [
        (query * high[:, None, None], np.broadcast_to(keys[n], (SEQUENCES, len(high), n, d)))
        for n in KEYS
    ]
    law = it.drift.calibrate(samples, reference_length=REFERENCE).law
    return (entropy(high, far, law) - entropy(high, REFERENCE)).tolist()


def run(quick: bool) -> dict[str, Any]:
    fitted, tried = (2, 2) if quick else (FITTED_TEXTS, TRIED_TEXTS)
    dimensions, draws = (DIMENSIONS[:1], 1) if quick else (DIMENSIONS, DRAWS)
    far = 2048 if quick else FAR
    jobs = [(model, d) for model in MODELS for d in dimensions]
    found: dict[str, Any] = {model: {} for model in MODELS}
    for model, d in tqdm(jobs, unit="dimension"):
        fits = [synthetic(model, d, seed, far) for seed in range(draws)]
        found[model][str(d)] = [x for fit in fits for x in fit]
    return {"minilm": of_minilm(fitted, tried), "synthetic": found, "far": far}


# --------------------------------------------------------------------------------------- results


def report(results: dict[str, Any]) -> str:
    of_model, synthetic = results["minilm"], results["synthetic"]
    rows = [
        [name, *(f"{found[kind]:.2f}" for kind in KINDS)] for name, found in of_model["errors"].items()
    ]
    return f"""On MiniLM-L6, fitted on {of_model["fitted"]} modules of Python's standard library and
{of_model["fitted"]} texts of its manual, with 64 to 256 tokens, and tried on {of_model["tried"]} others
of each kind with {TRIED}: how far the mean entropy of a head is from its value at {REFERENCE}, in nats,
as the mean over heads.

{table(["", *KINDS], rows)}

The last fit has texts of {TRIED} tokens too. What remains in the others is the shape of the law, which
differs between heads and shows little below 256 tokens. The kind of text matters less: the factors for
{TRIED} tokens that are fitted on code and on prose differ by {100 * of_model["kinds_differ"]:.0f} %.
In {100 * of_model["covered"]:.0f} % of the heads, the factor for {TRIED} tokens lies in the interval of
the report.

Random queries and keys, fitted with {KEYS[0]} to {KEYS[-1]} keys and the reference {REFERENCE}, and
tried with {results["far"]}: the mean difference in nats over draws and over target entropies of 35, 50
and 70 % of log {REFERENCE}, and the largest difference of a single fit.

{table(["keys", "mean", "largest"], synthetic_rows(synthetic))}
"""


def synthetic_rows(synthetic: dict[str, Any]) -> list[list[str]]:
    titles = {"sphere": "on a sphere", "gaussian": "Gaussian"}
    return [
        [f"{titles[model]}, d = {d}", f"{np.mean(fits):+.2f}", f"{max(map(abs, fits)):.2f}"]
        for model, found in synthetic.items()
        for d, fits in found.items()
    ]


def picture(results: dict[str, Any]) -> Figure:
    """The error of each law on MiniLM, and the error at 16 times the length against d."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    errors = results["minilm"]["errors"]
    places = np.arange(len(errors))
    for i, kind in enumerate(KINDS):
        left.barh(places + 0.4 * i, [x[kind] for x in errors.values()], 0.4, label=kind)
    left.set_yticks(places + 0.2, list(errors))
    left.invert_yaxis()
    left.set(xlabel=f"mean |error| of a head at {TRIED} tokens, in nats", title="MiniLM-L6")
    left.legend()
    for model, found in results["synthetic"].items():
        mean = [np.mean(fits) for fits in found.values()]
        right.plot([int(d) for d in found], mean, marker="o", label=model)
    right.axhline(0, color="gray", lw=0.8)
    right.set_xscale("log", base=2)
    right.set_xticks(DIMENSIONS, map(str, DIMENSIONS), minor=False)
    right.set(
        xlabel="dimension d of the keys",
        ylabel="error, in nats",
        title=f"random keys, n = {results['far']}",
    )
    right.legend()
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = experiment.parser(NAME, __doc__)
    parser.add_argument("--quick", action="store_true", help="a small run, kept under another name")
    options = parser.parse_args(arguments)
    name = f"{NAME}_quick" if options.quick else NAME
    experiment.finish(name, run(options.quick), report, picture, Path(options.output))


if __name__ == "__main__":
    main()
