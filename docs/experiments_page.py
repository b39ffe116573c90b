"""The generated parts of the page "Experiments", from the committed results."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import experiment
import matplotlib.pyplot as plt
from effects import Effect, effects_table, forest
from matplotlib.figure import Figure

# Does a law help?
EFFECTS = (
    "constant_or_length", "first_constant", "first", "masked_language", "from_scratch", "smollm2",
    "constant_per_head", "laws_and_positions", "retrieval", "recall",
)  # fmt: skip
EXPERIMENTS = (*EFFECTS, "entropies", "dimension", "head_dimension", "key_dimension")
MEASUREMENTS = (  # no verdict
    "calibration", "law_or_position", "four_times", "held_positions", "quantized_model",
    "quantized_search",
)  # fmt: skip


def texts() -> dict[str, str]:
    """Markdown by file name: a report per experiment, the effects, and the table of verdicts."""
    reports = {f"{name}.md": report(name) for name in (*EXPERIMENTS, *MEASUREMENTS)}
    leads = effects_table(x for x in effects() if x.leads)
    return {**reports, "leads.md": leads, "verdicts.md": verdicts()}


def module_of(name: str) -> ModuleType:
    """The module that reports an experiment. Long ones have it beside the one that runs."""
    results = f"{name}_results"
    return import_module(results if find_spec(results) else name)


def report(name: str) -> str:
    return module_of(name).report(experiment.load(name))


def effects() -> list[Effect]:
    """The effects of all experiments that ask whether a law helps."""
    return [x for name in EFFECTS for x in module_of(name).effects(experiment.load(name))]


def verdicts() -> str:
    """What the documents claim about experiments, row by row, with the rows of a claim together."""
    claims = [x for name in EXPERIMENTS for x in module_of(name).claims(experiment.load(name))]
    order = list(dict.fromkeys(claim.says for claim in claims))
    rows = [
        [f"**{claim.verdict}**" if claim.verdict == "not reproduced" else claim.verdict]
        + [f"{claim.says} *({claim.source})*", claim.found]
        for claim in sorted(claims, key=lambda claim: order.index(claim.says))
    ]
    lines = ["```{list-table}", ":header-rows: 1", ":widths: 14 40 46", ""]
    for cells in [["", "claim", "found"], *rows]:
        first, *others = cells
        lines += [f"* - {first}", *(f"  - {cell}" for cell in others)]
    return "\n".join([*lines, "```", ""])


def save_pictures(folder: Path) -> None:
    for name in (*EXPERIMENTS, *MEASUREMENTS):
        save(module_of(name).picture(experiment.load(name)), folder / f"{name}.svg")
    save(forest(effects()), folder / "effects.svg")


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path)
    plt.close(figure)
