"""How the attention entropy of a pretrained model grows with the length, and what the log n law does.

    python entropy_growth.py            # NumPy
    python entropy_growth.py torch      # PyTorch

The script runs MiniLM-L6 on the sources of the standard library, truncated to 32 … 512 tokens, with the
standard scale 1/√d and with the scale of the law, log n/(log 128 · √d). It prints the mean entropy of
the attention weights, and plots it against the length.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import matplotlib
import numpy as np
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import minilm

import isentropic as it
from isentropic import laws, plots

NAMESPACES = {
    "numpy": "array_api_compat.numpy",
    "torch": "array_api_compat.torch",
    "jax": "jax.numpy",
    "cupy": "array_api_compat.cupy",
    "strict": "array_api_strict",
}
LENGTHS = (32, 64, 128, 256, 512)
LAWS = {
    "standard attention, scale 1/√d": None,
    "with a law, scale log n/(log 128 · √d)": laws.LogLength(128),
}


def measure(
    backend: str, lengths: tuple[int, ...], count: int, scales: dict[str, it.laws.Law | None] = LAWS
) -> dict[str, it.drift.DriftReport]:
    """The mean entropy of each head at every length, for each law."""
    xp = importlib.import_module(NAMESPACES[backend])
    model, tokens = minilm.load(xp), minilm.tokenizer()
    # Every length has the same texts, truncated.
    longest = np.asarray(list(minilm.texts(max(lengths), count, tokens)))
    steps = tqdm(total=len(scales) * sum(lengths) * count, unit=" tokens", desc=backend)
    reports = {}
    for name, law in scales.items():
        result = np.zeros((len(lengths), model.layers, model.heads))
        for entropy, n in zip(result, lengths, strict=True):
            for piece in longest:
                ids = np.concatenate((piece[: n - 1], piece[-1:]))
                encoding = minilm.encode(model, xp.asarray(ids[None, :]), law=law)
                layers = [to_numpy(xp.mean(h, axis=(0, -1))) for h in encoding.entropy]
                entropy += np.asarray(layers) / count
                steps.update(n)
        reports[name] = it.drift.DriftReport(np.asarray(lengths), np.asarray(lengths) * count, result)
    steps.close()
    return reports


def to_numpy(x) -> np.ndarray:
    return x.get() if hasattr(x, "get") else np.asarray(x)


def picture(reports: dict[str, it.drift.DriftReport], path: Path) -> None:
    figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    plots.entropy(reports, ax=ax)
    ax.set_title(
        "Attention spreads out as the context grows\n"
        "(MiniLM-L6 on source code: mean of 72 heads, band: the middle half of them)",
        fontsize=10,
    )
    ax.set_xlabel("context: number of keys n")
    keys = ax.secondary_yaxis("right", functions=(np.exp, lambda x: np.log(np.maximum(x, 1e-9))))
    keys.set_ylabel("keys that share the attention, e^entropy")
    keys.set_yticks([8, 16, 32, 64, 128, 256, 512], minor=False)
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
