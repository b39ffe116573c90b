"""Does SmolLM2 lose beyond its trained length by dilution or by positions?

    python law_or_position.py    # an hour of one core

SmolLM2-135M was trained with contexts of 8192 tokens, and reads 12288 here, with its own rotary
positions: parts of the documents of `smollm2.py`. It is a measurement, without a
verdict. The result of each document is kept beside the others as soon as it is there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import experiment
import held_positions
import matplotlib.pyplot as plt
import numpy as np
import pretrained
import smollm2
import torch
from causes import Causes
from matplotlib.figure import Figure

from isentropic import laws
from isentropic.integrations import huggingface

NAME = "law_or_position"
LENGTH = 12288
DOCUMENTS = ("topics 0", "docstrings networkx", "source argparse")


def run(names: tuple[str, ...], length: int, converted: Path, folder: Path) -> dict[str, Any]:
    model, tokenizer = pretrained.load(converted)
    pretrained.set_positions(model, "as trained")
    octaves = np.arange(2 * length // pretrained.TRAINED) / 2
    edges = pretrained.TRAINED * np.array([0, 0.5, *2**octaves])
    edges = np.unique(np.minimum(np.floor(edges), length).astype(int))
    found = []
    for name in names:
        document = pretrained.read(name, tokenizer, length)

        def measure(ids: Any = document.ids) -> list[Any]:
            return [
                [pretrained.means(losses(model, ids, law, clamps), edges.tolist()) for clamps in (0, 1)]
                for law in (None, laws.LogLength(pretrained.TRAINED, minimum=1))
            ]

        what = {"trained": pretrained.TRAINED, "document": document.digest}
        found.append(experiment.kept(folder, name, what, measure))
    return {
        "documents": list(names),
        "bands": np.stack([edges[:-1] + 1, edges[1:]], axis=1).tolist(),
        "window": held_positions.WINDOW,
        "trained_length": pretrained.TRAINED,
        "sequence_counts": [np.diff(edges).tolist()] * len(names),
        "sequence_losses": found,
    }


@torch.no_grad()
def losses(model: Any, ids: Any, law: laws.Law | None, clamps: bool) -> Any:
    """−log p of all tokens but the first. Clamped, no key is farther than the window."""
    factor = torch.ones(1) if law is None else law(torch.arange(1, len(ids)))
    with contextlib.ExitStack() as stack:
        if clamps:
            factor = factor.expand(len(ids) - 1)
            stack.enter_context(held_positions.clamping(model, lambda layer, pairs: factor))
        else:
            stack.enter_context(huggingface.use(model, law))
        states = model.model(ids[None, :-1], use_cache=False).last_hidden_state[0]
        return pretrained.losses_of(model, states, ids[1:])


def causes_of(results: dict[str, Any]) -> Causes:
    arrays = (np.asarray(results[name]) for name in ("bands", "sequence_counts", "sequence_losses"))
    return Causes(results["trained_length"], results["window"], *arrays)


def beside_yarn(results: dict[str, Any], extended: dict[str, Any]) -> list[list[str]]:
    """The loss beyond the trained length with clamped positions and with those of YaRN, by document.

    `extended` are the results of `smollm2`, whose documents have the same tokens up to `LENGTH`.
    """
    counts, losses = (np.asarray(results[f"sequence_{x}"]) for x in ("counts", "losses"))
    is_beyond = np.asarray(results["bands"])[:, 0] > results["trained_length"]
    beyond = (losses * counts[:, None, None] * is_beyond).sum(-1) / (counts * is_beyond).sum(-1)[
        :, None, None
    ]
    rows = {
        "as trained": beyond[:, 0, 0],
        "clamped": beyond[:, 0, 1],
        "clamped, Su's law": beyond[:, 1, 1],
    }
    edges = np.asarray(extended["edges"])
    bands = np.flatnonzero((edges[:-1] >= results["trained_length"]) & (edges[1:] <= LENGTH))
    for arm in (smollm2.NO_LAW, smollm2.CONSTANT, "Su", smollm2.PRIMARY, smollm2.ON_TOP):
        of_arm = [extended["arms"][arm][name]["bands"] for name in results["documents"]]
        rows[f"YaRN × 2, {arm}"] = np.asarray(of_arm)[:, bands].mean(-1)
    return [[name, *(f"{x:.3f}" for x in row), f"{row.mean():.3f}"] for name, row in rows.items()]


def report(results: dict[str, Any]) -> str:
    rows = beside_yarn(results, experiment.load(smollm2.NAME))
    head = [f"positions, n = {pretrained.TRAINED + 1} to {LENGTH}", *results["documents"], "mean"]
    return f"""\
The first {LENGTH + 1} tokens of {len(results["documents"])} documents. The errors are over documents:

```text
{causes_of(results)}
```

The loss of the same tokens beyond the trained length, beside that with positions that are extended by
YaRN, without and with the laws of that experiment:

{experiment.table(head, rows)}
"""


def picture(results: dict[str, Any]) -> Figure:
    """Plot the loss by bands, for each treatment."""
    found = causes_of(results)
    means = (found.losses * found.counts[:, None, None]).sum(0) / found.counts.sum(0)
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    titles = (("as it is", "clamped"), ("law", "law, clamped"))
    for i, j in np.ndindex(2, 2):
        style = ("-", "--")[j]
        width = (4, 1.5)[i]  # the lines of a law may lie on the others
        axis.plot(means[i, j], style, color=f"C{i}", linewidth=width, label=titles[i][j])
    axis.set_xticks(range(len(found.bands)), [f"{a}–{b}" for a, b in found.bands])
    axis.set(xlabel="keys", ylabel="loss per token in nats")
    axis.legend()
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = pretrained.model_parser(NAME, __doc__).parse_args(arguments)
    results = run(DOCUMENTS, LENGTH, options.cache / "model", options.output / NAME)
    experiment.finish(NAME, results, report, picture, options.output)


if __name__ == "__main__":
    main()
