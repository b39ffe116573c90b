"""Does SmolLM2 lose beyond its trained length by dilution or by positions?

    python law_or_position.py    # an hour of one core

`huggingface.diagnose` on parts of the documents of `smollm2.py`. SmolLM2-135M was trained with contexts
of 8192 tokens, and reads 12288 here, with its own rotary positions. It is a measurement, without a
verdict. The result of each document is kept beside the others as soon as it is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np
import pretrained
import smollm2
from matplotlib.figure import Figure

from isentropic.integrations import huggingface
from isentropic.integrations.huggingface import Diagnosis

NAME = "law_or_position"
LENGTH = 12288
DOCUMENTS = ("topics 0", "docstrings networkx", "source argparse")


def run(names: tuple[str, ...], length: int, converted: Path, folder: Path) -> dict[str, Any]:
    model, tokenizer = pretrained.load(converted)
    pretrained.set_positions(model, "as trained")
    found = []
    for name in names:
        document = pretrained.read(name, tokenizer, length)

        def measure(ids: Any = document.ids, name: str = name) -> dict[str, Any]:
            batches = [{"input_ids": ids[None]}]
            return huggingface.diagnose(
                model, batches, trained_length=pretrained.TRAINED, progress=name
            ).to_dict()

        what = {"trained": pretrained.TRAINED, "document": document.digest}
        found.append(smollm2.kept(folder, name, what, measure))
    kept = ("bands", "window", "trained_length")
    lists = ("sequence_counts", "sequence_losses")
    return {
        "documents": list(names),
        **{name: found[0][name] for name in kept},
        **{name: [row for one in found for row in one[name]] for name in lists},
    }


def diagnosis(results: dict[str, Any]) -> Diagnosis:
    arrays = (np.asarray(results[name]) for name in ("bands", "sequence_counts", "sequence_losses"))
    return Diagnosis(results["trained_length"], results["window"], *arrays)


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
{diagnosis(results)}
```

The loss of the same tokens beyond the trained length, beside that with positions that are extended by
YaRN, without and with the laws of that experiment:

{experiment.table(head, rows)}
"""


def picture(results: dict[str, Any]) -> Figure:
    """Plot the loss by bands, for each treatment."""
    found = diagnosis(results)
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    titles = (("as it is", "clamped"), ("law", "law, clamped"))
    for i, j in np.ndindex(2, 2):
        style = ("-", "--")[j]
        width = (4, 1.5)[i]  # the lines of a law may lie on the others
        axis.plot(found.losses[i, j], style, color=f"C{i}", linewidth=width, label=titles[i][j])
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
