"""How the attention entropy of a pretrained model grows with the length, and what laws do.

    python entropy_growth.py            # NumPy
    python entropy_growth.py torch      # PyTorch

The script runs MiniLM-L6 on the sources of the standard library, truncated to 32 … 512 tokens: with the
standard scale 1/√d; with the law max(1, log n/log 128), which leaves the attention to up to 128 keys as
it is; and with a law for each head, fitted on other texts of up to 256 tokens such that its entropy
stays what it is at 128. It prints the mean entropy of the attention weights, and plots it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import minilm

import isentropic as it
from isentropic import laws

NAMESPACES = {
    "numpy": "array_api_compat.numpy",
    "torch": "array_api_compat.torch",
    "jax": "jax.numpy",
    "cupy": "array_api_compat.cupy",
    "strict": "array_api_strict",
}
LENGTHS = (32, 64, 128, 256, 512)
REFERENCE, FIT_LENGTHS, FIT_TEXTS = 128, (64, 128, 256), 4
STANDARD, WITH_LAW, FITTED = "standard attention", "with log n", "with a law fitted to each head"
# A law for all layers, or one for each layer.
Scale = it.laws.Law | Sequence[it.laws.Law] | None


def measure(
    backend: str, lengths: tuple[int, ...], count: int, scales: dict[str, Scale] | None = None
) -> dict[str, it.drift.DriftReport]:
    """The mean entropy of each head at every length, for each law, or for those of the picture."""
    xp = importlib.import_module(NAMESPACES[backend])
    model, tokens = minilm.load(xp), minilm.tokenizer()
    # Every length has the same texts, truncated. The fit has others.
    pieces = list(minilm.texts(max(lengths), count + FIT_TEXTS, tokens))
    if scales is None:
        fitted = fit(xp, model, pieces[count:])
        scales = {STANDARD: None, WITH_LAW: laws.LogLength(REFERENCE, minimum=1), FITTED: fitted}
    steps = tqdm(total=len(scales) * sum(lengths) * count, unit=" tokens", desc=backend)
    reports = {}
    for name, scale in scales.items():
        result = np.zeros((len(lengths), model.layers, model.heads))
        for entropy, n in zip(result, lengths, strict=True):
            for piece in pieces[:count]:
                layers = [
                    to_numpy(xp.mean(h, axis=(0, -1)))
                    for h in encode(xp, model, piece, n, scale).entropy
                ]
                entropy += np.asarray(layers) / count
                steps.update(n)
        reports[name] = it.drift.DriftReport(np.asarray(lengths), np.asarray(lengths) * count, result)
    steps.close()
    return reports


def encode(
    xp, model: minilm.Model, piece: list[int], n: int, scale: Scale, see=None
) -> minilm.Encoding:
    """A text of n tokens, of which the last one is that of the piece. `see` gets queries and keys."""
    ids = np.asarray([*piece[: n - 1], piece[-1]])
    of_layers = iter(scale if isinstance(scale, Sequence) else [scale] * model.layers)

    def attend(q, k, v, *, law):
        if see is not None:
            see(q, k)
        return it.attention_state(q, k, v, law=next(of_layers))

    return minilm.encode(model, xp.asarray(ids[None, :]), attend=attend)


def fit(xp, model: minilm.Model, pieces: list[list[int]]) -> list[it.laws.Law]:
    """A law for each layer, which is fitted while those of the layers before it are in use."""
    fitted: list[it.laws.Law] = []
    for layer in tqdm(range(model.layers), desc="fit", unit=" layers"):
        samples: list = []
        for piece in pieces:
            for n in FIT_LENGTHS:
                seen: list = []
                others = [None] * (model.layers - layer)
                encode(xp, model, piece, n, [*fitted, *others], lambda *x, seen=seen: seen.append(x))
                samples.append(tuple(map(to_numpy, seen[layer])))
        law = it.drift.calibrate(samples, reference_length=REFERENCE).law
        like = samples[0][0]
        factors = xp.asarray(law.factors.astype(like.dtype))
        fitted.append(laws.Knots(law.lengths, factors, minimum=law.minimum))
    return fitted


def to_numpy(x) -> np.ndarray:
    return x.get() if hasattr(x, "get") else np.asarray(x)


def picture(reports: dict[str, it.drift.DriftReport], path: Path) -> None:
    """Plot the mean over all heads for each law, with the name of the law at the end of its line."""
    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, report in reports.items():
        means = report.entropy.mean(axis=(1, 2))
        (line,) = ax.plot(report.lengths, means, "o-", markersize=4)
        ax.annotate(
            name, (report.lengths[-1], means[-1]), (-2, -16 if name == FITTED else 8),
            textcoords="offset points", ha="right", color=line.get_color(),
        )  # fmt: skip
    ax.set_title("MiniLM-L6 on source code, mean of 72 heads", fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    ax.set_xlabel("context: number of keys n")
    ax.set_ylabel("attention entropy in nats")
    ax.margins(y=0.12)
    keys = ax.secondary_yaxis("right", functions=(np.exp, lambda x: np.log(np.maximum(x, 1e-9))))
    keys.set_ylabel("keys that share the attention, e^entropy")
    keys.set_yticks([8, 16, 32, 64, 128], minor=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Attention entropy of MiniLM-L6 against the length.")
    parser.add_argument("backend", nargs="?", default="numpy", choices=NAMESPACES)
    parser.add_argument("--texts", type=int, default=16, metavar="COUNT", help="how many (16)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the picture goes")
    options = parser.parse_args(arguments)
    if options.texts < 1:
        parser.error(f"--texts must be at least 1, got {options.texts}")
    path = options.output or Path(f"entropy-growth-{options.backend}.png")
    reports = measure(options.backend, LENGTHS, options.texts)
    for name, report in reports.items():
        print(name, report, sep="\n", end="\n\n")
    picture(reports, path)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
