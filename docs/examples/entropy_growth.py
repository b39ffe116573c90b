"""How the attention entropy of a pretrained model grows with the length, and what the log n law does.

    python entropy_growth.py            # NumPy
    python entropy_growth.py torch      # one word more

Runs MiniLM-L6 on the sources of the standard library, cut at 32 … 512 tokens, with the standard scale
(O, 1/√d) and with the scale of the law (E, log_128 n · 1/√d), prints the mean entropy of the attention
weights, and draws it over the length.
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

from isentropic import laws

NAMESPACES = {
    "numpy": "array_api_compat.numpy",
    "torch": "array_api_compat.torch",
    "jax": "jax.numpy",
    "cupy": "array_api_compat.cupy",
    "strict": "array_api_strict",
}
LENGTHS = (32, 64, 128, 256, 512)
LAWS = {"O: 1/√d": None, "E: log n/(log 128 · √d)": laws.LogLength(128)}


def measure(backend: str, lengths: tuple[int, ...], count: int) -> np.ndarray:
    """Mean entropy in nats, of shape (laws, lengths, layers, heads)."""
    xp = importlib.import_module(NAMESPACES[backend])
    model, tokens = minilm.load(xp), minilm.tokenizer()
    # The same texts at every length, from their beginning on.
    longest = np.asarray(list(minilm.texts(max(lengths), count, tokens)))
    result = np.zeros((len(LAWS), len(lengths), model.layers, model.heads))
    steps = tqdm(total=len(LAWS) * sum(lengths) * count, unit=" tokens", desc=backend)
    for i, law in enumerate(LAWS.values()):
        for j, n in enumerate(lengths):
            for piece in longest:
                ids = np.concatenate((piece[: n - 1], piece[-1:]))
                encoding = minilm.encode(model, xp.asarray(ids[None, :]), law=law)
                layers = [to_numpy(xp.mean(h, axis=(0, -1))) for h in encoding.entropy]
                result[i, j] += np.asarray(layers) / count
                steps.update(n)
    steps.close()
    return result


def to_numpy(x) -> np.ndarray:
    return x.get() if hasattr(x, "get") else np.asarray(x)


def table(entropy: np.ndarray, lengths: tuple[int, ...]) -> str:
    """Mean entropy per length and law, and its slope per layer."""
    lines = ["mean attention entropy in nats", "n".rjust(28) + "".join(f"{n:>8}" for n in lengths)]
    for name, rows in zip(LAWS, entropy, strict=True):
        lines.append(name.rjust(28) + "".join(f"{h:8.2f}" for h in rows.mean(axis=(1, 2))))
    lines.append("log n: no attention at all".rjust(28) + "".join(f"{np.log(n):8.2f}" for n in lengths))
    layers = range(entropy.shape[2])
    lines += [
        "",
        "drift dH/dlog n",
        "layer".rjust(28) + "".join(f"{i:>8}" for i in layers) + "    mean",
    ]
    for name, rows in zip(LAWS, entropy, strict=True):
        slopes = np.polyfit(np.log(lengths), rows.mean(axis=-1), 1)[0]
        values = "".join(f"{s:8.2f}" for s in slopes)
        lines.append(name.rjust(28) + values + f"{slopes.mean():8.2f}")
    return "\n".join(lines)


def picture(entropy: np.ndarray, lengths: tuple[int, ...], path: Path) -> None:
    """Mean over heads, and the middle half of the heads, per law."""
    figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    ax.plot(lengths, np.log(lengths), color="0.6", linestyle=":", label="log n (uniform attention)")
    for (name, rows), color in zip(
        zip(LAWS, entropy, strict=True), ("tab:red", "tab:blue"), strict=True
    ):
        heads = rows.reshape(len(lengths), -1)
        low, high = np.quantile(heads, (0.25, 0.75), axis=1)
        ax.fill_between(lengths, low, high, color=color, alpha=0.15, linewidth=0)
        ax.plot(lengths, heads.mean(axis=1), "o-", color=color, label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.set_xlabel("length n in tokens")
    ax.set_ylabel("attention entropy in nats")
    ax.set_title("MiniLM-L6 on source code: mean of 72 heads, band: middle half of them", fontsize=10)
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
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
    entropy = measure(options.backend, LENGTHS, options.texts)
    print(table(entropy, LENGTHS))
    picture(entropy, LENGTHS, path)
    print(f"\npicture: {path}")


if __name__ == "__main__":
    main()
