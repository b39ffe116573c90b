"""How much of the rise of a loss beyond the trained length a law removes, and how much clamping.

A law counters dilution: more keys share the weight of each query. Clamped positions avoid distances
that the training did not have. The losses of the same tokens with either, both and none tell the two
apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# The treatments, in the order of the axes of the losses: the law first, then the clamped positions.
ARMS = {"as it is": (0, 0), "law": (1, 0), "clamped": (0, 1), "law, clamped": (1, 1)}
TITLES = {
    "rise": "rise of the loss",
    "law_alone": "the law alone removes",
    "clamping_alone": "clamping alone removes",
    "both": "both remove",
    "law": "of which the law",
    "clamping": "of which clamping",
}


class Effect(NamedTuple):
    """A difference of mean losses, its standard error over sequences, and its part of the rise."""

    nats: float
    error: float
    share: float


@dataclass(frozen=True, eq=False)
class Causes:
    """Losses of a model with and without a law, and clamped positions. As text it is a table."""

    trained_length: int
    window: int
    bands: np.ndarray  # (bands, 2): the smallest and the largest number of keys
    counts: np.ndarray  # (sequences, bands): the numbers of tokens
    losses: np.ndarray  # (sequences, 2, 2, bands): without and with the law, as it is and clamped

    @property
    def effects(self) -> dict[str, Effect]:
        """Differences beyond the trained length. The shares of the law and of clamping add up.

        They are the means over both orders of the treatments, their Shapley values.
        """
        sums, n = self.losses * self.counts[:, None, None], len(self.counts)
        effects, error = self._effects(self.counts.sum(0), sums.sum(0)), np.full(len(TITLES), np.nan)
        if n > 1:  # jackknife
            rest = zip(self.counts.sum(0) - self.counts, sums.sum(0) - sums, strict=True)
            error = math.sqrt(n - 1) * np.stack([self._effects(*x) for x in rest]).std(axis=0)
        share = effects / effects[0] if effects[0] > 0 else np.full(len(TITLES), np.nan)
        rows = np.stack([effects, error, share], axis=1).tolist()
        return {name: Effect(*row) for name, row in zip(TITLES, rows, strict=True)}

    def _effects(self, counts: np.ndarray, sums: np.ndarray) -> np.ndarray:
        first, last = self.bands.T
        beyond, before = first > self.trained_length, last == self.trained_length
        level = sums[0, 0, before].sum() / counts[before].sum()
        (plain, clamped), (law, both) = sums[..., beyond].sum(axis=-1) / counts[beyond].sum()
        shares = (plain - law + clamped - both) / 2, (plain - clamped + law - both) / 2
        return np.array([plain - level, plain - law, plain - clamped, plain - both, *shares])

    def __str__(self) -> str:
        counts = self.counts.sum(0)
        losses = (self.losses * self.counts[:, None, None]).sum(0) / counts
        ranges = [f"{first}–{last}" for first, last in self.bands]
        width = max(8, *(len(x) + 2 for x in [*ranges, *map(str, counts)]))
        lines = [
            "Loss per token in nats, by number of keys; "
            f"trained length {self.trained_length}, window {self.window}",
            row("keys", ranges, width),
            row("tokens", map(str, counts), width),
            *(row(name, (f"{x:z.3f}" for x in losses[arm]), width) for name, arm in ARMS.items()),
            f"Beyond {self.trained_length} keys".ljust(24) + "    nats       ±   of the rise",
        ]
        for name, (nats, error, share) in self.effects.items():
            part = "–" if share != share else f"{100 * share:z.0f} %"
            numbers = (f"{nats:z.3f}", "–" if error != error else f"{error:.3f}")
            lines.append(TITLES[name].ljust(24) + "".join(x.rjust(8) for x in numbers) + part.rjust(14))
        return "\n".join(lines)


def row(name: str, cells: Iterable[str], width: int) -> str:
    return name.ljust(12) + "".join(x.rjust(width) for x in cells)
