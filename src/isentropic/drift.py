"""How attention entropies change with the number of keys, and laws that keep them constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isentropic._attention.functions import attention_state
from isentropic._checks import check_flag, check_ndim, check_real, type_error, value_error
from isentropic._namespace import Array, accumulator, from_numpy, namespace, to_numpy
from isentropic.laws._formulas import Knots, scaled
from isentropic.laws._law import Constant, Law, check_law
from isentropic.masks import Mask, as_mask, causal

__all__ = ["calibrate", "entropy_drift"]

# The factors on the scale at which `calibrate` measures entropies. It interpolates between them.
FACTORS = tuple(2.0 ** (i / 2) for i in range(-3, 5))
# `huggingface.calibrate` measures at most so many queries of each group in a sequence, evenly spread.
_MOST_QUERIES = 64
# With more different lengths than this, lengths are grouped by half octaves.
_MOST_LENGTHS = 16
# The columns of the table, which has to fit into a terminal. The report itself has all lengths.
_MOST_COLUMNS = 8
# The penalty, in nats, on doubling a factor. It keeps the factor near 1 for heads whose entropy hardly
# depends on it.
_PENALTY = 0.02
# The tolerance, in nats: a length whose entropy misses the target by more is not used in the fit.
_TOLERANCE = 0.05
_STEPS = 100  # of the interpolation between two factors
# The shapes p among which `_Held.shape` chooses: 0 is a power of n, 1 is affine in log n, 2 its root.
_SHAPES = (0, 1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2)
# The misfit of log factors that counts as much as a shape that differs from 1 by 1.
_MISFIT = 0.01
# Lengths nearer to the reference than this, in log n, do not tell the slope: it would be the error of a
# factor, divided by a small number.
_NEAR = 0.05
# The law is curved up to the longest length of the fit, times 2 to this power.
_OCTAVES = 6


@dataclass(frozen=True, eq=False, repr=False)
class DriftReport:
    """Attention entropies by number of keys. `entropy_drift` returns it, and its `repr` is a table.

    Attributes
    ----------
    lengths : NumPy array (lengths,)
        The number of keys that the queries of each group see, in ascending order: either one number n,
        or the geometric mean over a half octave.
    counts : NumPy array (lengths,)
        The number of queries in each group, in the layer that has most of them.
    entropy : NumPy array, ``(lengths, layers, heads)``
        Their mean entropy in nats. It is NaN where a layer has no query in a group, for example because
        of a window, and for heads that only other layers have.
    names : tuple of str, or None
        The names of the layers. None if the layers have only numbers.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import drift
    >>> drift.entropy_drift(np.zeros((2, 4, n, 8)) for n in (16, 64, 256))  # uniform attention
    Attention entropy in nats, mean over 4 heads a layer
    n               16      64     256   dH/dlog n: mean, lowest, highest
    all layers   2.773   4.159   5.545      1.000   1.000   1.000
    log n        2.773   4.159   5.545
    """

    lengths: np.ndarray
    counts: np.ndarray
    entropy: np.ndarray
    names: tuple[str, ...] | None = None

    @property
    def slope(self) -> np.ndarray:
        """The drift dH/d log n of each head, (layers, heads).

        It is 0 if the entropy is constant, and 1 for uniform attention. It is a least-squares fit over
        the lengths of the layer, and NaN for layers with a single length.
        """
        _, layers, heads = self.entropy.shape
        slope = np.full((layers, heads), np.nan)
        for layer in range(layers):
            # The heads of a layer have the same queries, so the first one tells for all.
            known = np.isfinite(self.entropy[:, layer, 0])
            if known.sum() > 1:
                x = np.log(self.lengths[known])
                x -= x.mean()
                slope[layer] = x @ self.entropy[known, layer] / (x @ x)
        return slope

    def at(self, length: float) -> np.ndarray:
        """The mean entropy (layers, heads) at any length in nats, by linear interpolation in log n.

        It is NaN for layers whose range of lengths does not contain `length`. A `length` that is not a
        positive number raises a TypeError or a ValueError.
        """
        check_real("length", length, above=0)
        result = np.full(self.entropy.shape[1:], np.nan)
        for layer, head in np.ndindex(result.shape):
            h = self.entropy[:, layer, head]
            if (known := h == h).any():
                n = np.log(self.lengths[known])
                result[layer, head] = np.interp(np.log(float(length)), n, h[known], np.nan, np.nan)
        return result

    def to_dict(self) -> dict[str, Any]:
        """``lengths``, ``counts``, ``entropy``, ``slope`` and any ``names`` as lists, for JSON.

        NaN becomes None.
        """
        lists: dict[str, Any] = {}
        for name in ("lengths", "counts", "entropy", "slope"):
            x = getattr(self, name).astype(object)
            # JSON has no NaN.
            x[x != x] = None
            lists[name] = x.tolist()
        return lists if self.names is None else lists | {"names": list(self.names)}

    def __repr__(self) -> str:
        groups, layers, heads = self.entropy.shape
        selection = f", {_MOST_COLUMNS} of {groups} lengths" if groups > _MOST_COLUMNS else ""
        slope, rows = self.slope, []
        for name, part in _rows(self.names, layers):
            drift = (_of_known(f, slope[part]) for f in (np.mean, np.min, np.max))
            tail = "none: a single length" if groups == 1 else _format_row(drift)
            rows.append((name, [_of_known(np.mean, h) for h in self.entropy[:, part]], "   " + tail))
        rows.append(("log n", np.log(self.lengths), ""))
        title = f"Attention entropy in nats, mean over {heads} heads a layer{selection}"
        return _table(title, self.lengths, "   dH/dlog n: mean, lowest, highest", rows)


@dataclass(frozen=True, eq=False, repr=False)
class CalibrationReport:
    """The laws that `calibrate` fits, and the factors behind them. Its `repr` is a table.

    Attributes
    ----------
    laws : tuple of Law
        A law for each layer, with parameters (heads, knots).
    lengths, counts, names
        The numbers of keys, the numbers of queries, and the names of the layers, as in `DriftReport`.
    factors : NumPy array, ``(lengths, layers, heads)``
        The factors on the scale with which the mean entropies are those at the reference length. They
        are NaN where no factor does that.
    reference_length : float
        The number of keys at which the factors are 1.
    entropies : NumPy array, ``(layers, heads)``
        The mean entropies that the factors hold, in nats.
    """

    laws: tuple[Law, ...]
    lengths: np.ndarray
    counts: np.ndarray
    factors: np.ndarray
    reference_length: float
    entropies: np.ndarray
    names: tuple[str, ...] | None = None

    @property
    def law(self) -> Law:
        """The law of the only layer."""
        (law,) = self.laws
        return law

    def at(self, length: float) -> np.ndarray:
        """The lowest, the expected and the highest factor at a length beyond those of the fit.

        The array is (3, layers, heads). The expected factor is that of the law. The others are the
        extremes of it and of three curves through the same factors: a power of n, a function affine in
        log n, and the root of such a function. So the interval is about the shape of the law, and not
        about the samples. In the model MiniLM-L6, fitted up to 256 tokens, it contains the factor for
        512 tokens in two thirds of the heads. A `length` that is no number ≥ 1 raises a TypeError or a
        ValueError.
        """
        check_real("length", length, least=1)
        # Here the heads of all layers count as those of one.
        groups, layers, heads = self.factors.shape
        factors, weight = self.factors.reshape(groups, -1), self.counts * self.lengths
        held = _Held(self.lengths, factors, weight, self.reference_length)
        n = np.asarray([float(length)])
        curves = np.stack([held.at(n, shape)[0] for shape in (0, 1, 2)]).reshape(3, layers, heads)
        expected = np.full((layers, heads), np.nan)
        for layer, law in enumerate(self.laws):
            own: Any = law._with_arrays(to_numpy).evaluate_unchecked(np, n)
            expected[layer, : len(own)] = own[:, 0]
        expected[np.isnan(self.factors).all(axis=0)] = np.nan
        low, high = np.minimum(expected, curves.min(axis=0)), np.maximum(expected, curves.max(axis=0))
        return np.stack((low, expected, high))

    def __repr__(self) -> str:
        _, layers, heads = self.factors.shape
        twice = 2 * float(self.lengths[-1])
        bounds, rows = self.at(twice), []
        for name, part in _rows(self.names, layers):
            low, middle, high = (_format_row([_of_known(np.mean, x)]).strip() for x in bounds[:, part])
            means = [_of_known(np.mean, x) for x in self.factors[:, part]]
            rows.append((name, means, f"{middle} [{low}, {high}]".rjust(25)))
        title = (
            f"Factors that hold the entropy at n = {self.reference_length:.5g}, mean over {heads} "
            "heads a layer; beyond the last length with the lowest and the highest"
        )
        return _table(title, self.lengths, _format_length(twice).rjust(25), rows)


def _rows(names: tuple[str, ...] | None, layers: int) -> list[tuple[str, slice]]:
    """The names of the rows of a table, and the layers over which each of them has the mean."""
    names = names or tuple(f"layer {i}" for i in range(layers))
    parts = [(name, slice(i, i + 1)) for i, name in enumerate(names)] if layers > 1 else []
    return [("all layers", slice(None)), *parts]


def _table(
    title: str, lengths: np.ndarray, tail: str, rows: Sequence[tuple[str, Sequence[float], str]]
) -> str:
    """A table with a column for each length, or for some of many.

    Each row has a name, the values at all lengths, and a tail.
    """
    shown = np.linspace(0, len(lengths) - 1, min(len(lengths), _MOST_COLUMNS)).round().astype(int)
    width = max(len(name) for name, *_ in rows)
    header = "n".ljust(width) + "".join(_format_length(n).rjust(8) for n in lengths[shown]) + tail
    body = [name.ljust(width) + _format_row(x[i] for i in shown) + end for name, x, end in rows]
    return "\n".join([title, header, *body])


def _format_length(n: float) -> str:
    return format(n, ".0f" if n >= 100 else ".3g")


def _format_row(values: Iterable[float]) -> str:
    # With `z` a small negative number is 0.000, without a sign.
    return "".join(("–" if x != x else format(x, "z.3f")).rjust(8) for x in values)


def _of_known(function: Callable[[np.ndarray], Any], x: np.ndarray) -> float:
    """A function of the entries that are not NaN; NaN if there are none."""
    known = x[x == x]
    return float(function(known)) if known.size else math.nan


def _half_octave(n: Any) -> Any:
    """The group of n keys: −i for the half octave around 2^{i/2}, and n itself for n ≤ 4."""
    n = np.maximum(n, 1)
    return np.where(n > 4, -np.rint(2 * np.log2(n)), n).astype(np.int64)


class Recorder:
    """Sums of entropies by number of keys, layer and head, at several factors on the scale."""

    def __init__(self, argument: str, factors: Sequence[float] = (1.0,)) -> None:
        self.argument = argument  # the name in messages about samples that cannot be used
        self.factors = tuple(factors)
        self.names: tuple[str, ...] | None = None  # of the layers
        self._heads: dict[int, int] = {}  # the number of heads of each layer
        # By (group, layer): the number of queries, the sum of log n, and the sums of the entropies of
        # all heads and factors. A group is n, or −i for the half octave around 2^{i/2}.
        self._sums: dict[tuple[int, int], Any] = {}

    def add(
        self,
        layer: int,
        n: int | Array,
        entropies: Sequence[Array],
        counted: Array | None = None,
        weight: np.ndarray | float = 1.0,
    ) -> None:
        """Add entropies (..., heads, L), one array per factor, of queries that see n keys.

        `n` and `counted` broadcast to (..., L), and so does `weight`, the number of queries that each
        query stands for. Queries that are not `counted`, or that see fewer than two keys, are ignored.
        """
        h = np.stack([to_numpy(x).astype(np.float64) for x in entropies])
        h = np.moveaxis(h, -2, 0)  # (heads, factors, ..., L)
        heads = self._heads.setdefault(layer, h.shape[0])
        if h.shape[0] != heads:
            raise value_error(self.argument, f"all have the same number of heads, {heads}", h.shape[0])
        shape = h.shape[2:]
        n = np.asarray(n if isinstance(n, int) else to_numpy(n), dtype=np.int64)
        n = np.broadcast_to(n, shape)
        used = n >= 2
        if counted is not None:
            used = used & np.broadcast_to(to_numpy(counted), shape)
        if not used.any():
            return
        fewest = np.min(n, axis=-1, keepdims=True, where=used, initial=np.iinfo(np.int64).max)
        is_constant = np.max(n, axis=-1, keepdims=True, where=used, initial=0) == fewest
        groups = np.where(is_constant, n, _half_octave(n))[used]
        n, h = n[used].astype(np.float64), h[:, :, used]
        weight = np.broadcast_to(weight, shape)[used]
        if not np.isfinite(h).all():
            raise value_error(self.argument, "have finite entropies", f"NaN in layer {layer}")
        summed = np.concatenate((np.ones((1, n.size)), np.log(n)[None], h.reshape(-1, n.size)))
        for group in np.unique(groups).tolist():
            inside = groups == group
            sums = self._sums.get((group, layer), 0.0)
            self._sums[group, layer] = sums + summed[:, inside] @ weight[inside]

    def means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lengths (G,), numbers of queries (G,), and mean entropies (factors, G, layers, heads)."""
        if not self._sums:
            raise value_error(self.argument, "have queries that see two keys or more", "none")
        found = {group for group, _ in self._sums}
        # A single length and a half octave beside it would be two lengths that hardly differ.
        is_merged = min(found) < 0 or len(found) > _MOST_LENGTHS
        groups: dict[int, dict[int, Any]] = {}
        for (group, layer), sums in self._sums.items():
            merged = int(_half_octave(group)) if is_merged and group > 0 else group
            layers = groups.setdefault(merged, {})
            layers[layer] = layers.get(layer, 0.0) + sums
        means = []
        for layers in groups.values():
            mean = np.full((len(self.factors), len(self._heads), max(self._heads.values())), np.nan)
            for layer, sums in layers.items():
                heads = self._heads[layer]
                mean[:, layer, :heads] = (sums[2:] / sums[0]).reshape(heads, -1).T
            counts, log_n = np.stack([sums[:2] for sums in layers.values()], axis=1)
            # The logarithm of 62 keys leads back to 62.00000000000001.
            mean_length = float(f"{math.exp(log_n.sum() / counts.sum()):.13g}")
            means.append((mean_length, counts.max(), mean))
        means.sort(key=lambda mean: mean[0])
        lengths, counts, entropy = zip(*means, strict=True)
        return np.asarray(lengths), np.rint(counts).astype(int), np.stack(entropy, axis=1)

    def report(self) -> DriftReport:
        """The entropies at the factor 1."""
        lengths, counts, entropy = self.means()
        return DriftReport(lengths, counts, entropy[self.factors.index(1.0)], self.names)

    def target(self, reference_length: float) -> np.ndarray:
        """The mean entropies at the reference length, (layers, heads)."""
        report = self.report()
        first, last = report.lengths[[0, -1]].tolist()
        if first == last:
            must = "have queries that see several numbers of keys"
            raise value_error(self.argument, must, f"{first:.5g} alone")
        if not first <= reference_length <= last:
            must = (
                f"lie within the lengths of `{self.argument}`, {first:.5g} to {last:.5g} (means over "
                "groups of queries; a causal query sees only the keys up to its own)"
            )
            raise value_error("reference_length", must, reference_length)
        return report.at(reference_length)

    def calibration(
        self, reference_length: float, target: np.ndarray, current: Sequence[Law] | None = None
    ) -> CalibrationReport:
        """The factors with which the heads have the target entropies (layers, heads), and their laws.

        If the entropies were measured with `current` laws, the factors multiply those of these laws.
        """
        lengths, counts, entropy = self.means()
        factors, laws = np.full(entropy.shape[1:], np.nan), []
        for layer, heads in sorted(self._heads.items()):
            known = np.isfinite(entropy[0, :, layer, 0])
            aim = target[layer, :heads]
            # The reference length may not be within the range of this layer, perhaps for a window.
            if np.isfinite(aim).all():
                start = 1.0 if current is None else to_numpy(current[layer](lengths[known])).T
                measured = entropy[:, known, layer, :heads]
                factors[known, layer, :heads] = _holding_factors(self.factors, measured, aim, start)
            weight = counts * lengths  # the number of logits
            laws.append(_Held(lengths, factors[:, layer, :heads], weight, reference_length).law())
        return CalibrationReport(
            tuple(laws), lengths, counts, factors, reference_length, target, self.names
        )


def _holding_factors(
    factors: Sequence[float], entropy: np.ndarray, target: np.ndarray, current: np.ndarray | float = 1.0
) -> np.ndarray:
    """The factors (G, heads) at which entropies (factors, G, heads) reach their target (heads,).

    They are NaN where no factor reaches it. If an entropy hardly depends on the factor, the factor
    stays near 1. The `factors` are equidistant in their logarithms, and multiply the `current` ones.
    """
    log_factor, h = _interpolated(np.log(factors), entropy)
    log_factor = log_factor[:, None, None] + np.log(current)
    error = h - target
    cost = error**2 + (_PENALTY / math.log(2) * log_factor) ** 2
    best = np.argmin(cost, axis=0)[None, ...]
    factor = np.exp(np.take_along_axis(np.broadcast_to(log_factor, cost.shape), best, axis=0)[0])
    is_met = np.abs(np.take_along_axis(error, best, axis=0)[0]) < _TOLERANCE
    return np.where(is_met, factor, np.nan)


def _interpolated(u: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate y (N, ...) at N ≥ 4 equidistant u, by cubic splines without a knot near the ends."""
    slope = _spline_slopes(y)
    t = np.linspace(0, 1, _STEPS, endpoint=False).reshape(-1, *(1,) * y.ndim)
    start, end, rise, fall = y[:-1], y[1:], slope[:-1], slope[1:]
    bend, curve = 3 * (end - start) - 2 * rise - fall, 2 * (start - end) + rise + fall
    between = start + t * (rise + t * (bend + t * curve))
    fine = np.concatenate((np.moveaxis(between, 0, 1).reshape(-1, *y.shape[1:]), y[-1:]))
    steps = np.arange(fine.shape[0]) / _STEPS * (u[1] - u[0])
    return u[0] + steps, fine


def _spline_slopes(y: np.ndarray) -> np.ndarray:
    """The slopes of a cubic spline at its knots 0, 1, …, N − 1, from its values (N, ...)."""
    matrix = 4 * np.eye(len(y)) + np.eye(len(y), k=1) + np.eye(len(y), k=-1)
    right = np.empty_like(y)
    right[1:-1] = 3 * (y[2:] - y[:-2])
    # The third derivative has no jump at the second knot, nor at the last but one.
    matrix[0, :3] = matrix[-1, :-4:-1] = 1, 0, -1
    right[0], right[-1] = 2 * (2 * y[1] - y[0] - y[2]), 2 * (y[-1] + y[-3] - 2 * y[-2])
    slope = np.linalg.solve(matrix, right.reshape(len(y), -1))
    return np.asarray(slope.reshape(y.shape))


class _Held:
    """The factors that hold the entropies of the heads of one layer, and the curves through them.

    `lengths` and `weight` are (G,). `factor` (G, heads) is NaN where no factor holds the entropy.
    """

    def __init__(
        self, lengths: np.ndarray, factor: np.ndarray, weight: np.ndarray, reference: float
    ) -> None:
        self.lengths, self.factor, self.reference = lengths, factor, reference
        self.smallest = np.fmin.reduce(factor, axis=0, initial=1.0)
        self.x = np.log(lengths / reference)[:, None]
        # Curves follow the factors from the reference on: short lengths tell little about long ones, as
        # the entropy is near log n there. A head that has none above it uses all its lengths.
        weights = np.where(np.isnan(factor), 0.0, weight[:, None])
        above, is_far = np.where(self.x > -1e-6, weights, 0.0), np.abs(self.x) > _NEAR
        self.weights = np.where((is_far & (above > 0)).any(axis=0), above, weights)
        self.slope_weights = np.where(is_far, self.weights, 0.0)
        self.fitted = np.where(self.weights > 0, factor, 1.0)

    def slope(self, shape: Any) -> np.ndarray:
        """The slopes (heads,) of curves through 1 at the reference, by weighted least squares."""
        is_power = shape == 0
        p = np.where(is_power, 1.0, shape)
        y = np.where(is_power, np.log(self.fitted), (self.fitted**p - 1) / p)
        moment = (self.slope_weights * self.x**2).sum(axis=0)
        # If no length determines the slope, it is 0.
        return (self.slope_weights * self.x * y).sum(axis=0) / np.where(moment > 0, moment, np.inf)

    def shape(self) -> np.ndarray:
        """The shape (heads,) that fits best; 1 unless the factors say otherwise."""
        cost = []
        for shape in _SHAPES:
            error = np.log(_curve(self.x, self.slope(shape), shape) / self.fitted)
            misfit = (self.weights * error**2).sum(axis=0) / np.maximum(self.weights.sum(axis=0), 1e-9)
            cost.append(misfit / _MISFIT**2 + (shape - 1) ** 2)
        return np.asarray(_SHAPES)[np.argmin(cost, axis=0)]

    def at(self, lengths: Any, shape: Any = None) -> np.ndarray:
        """The factors (lengths, heads) of the curves of a shape, never below the smallest of the fit.

        By default the shape is that of each head.
        """
        shape = self.shape() if shape is None else shape
        x = np.log(np.asarray(lengths) / self.reference)[:, None]
        return np.maximum(_curve(x, self.slope(shape), shape), self.smallest)

    def law(self) -> Knots:
        """The law through the factors. It is 1 at the reference, and curved beyond the last length."""
        beyond = self.lengths[-1] * 2.0 ** np.arange(1, _OCTAVES + 1)
        lengths = np.union1d(self.lengths, (self.reference, *beyond))
        factors = np.full((len(lengths), self.factor.shape[1]), np.nan)
        factors[np.isin(lengths, self.lengths)] = self.factor
        factors[lengths == self.reference] = 1.0
        # Below the reference, lengths without a factor are short: the entropy is out of reach there.
        x, known = np.log(lengths), ~np.isnan(factors)
        below = [np.interp(x, x[some], f[some]) for f, some in zip(factors.T, known.T, strict=True)]
        is_below = (lengths < self.reference)[:, None]
        guess = np.where(is_below, np.stack(below, axis=1), self.at(lengths))
        factors = np.where(known, factors, guess)
        factors = np.concatenate((factors[:1], factors))  # constant below the first length
        minimum = float(self.smallest.min())  # for the line beyond the last knot
        return Knots((1.0, *lengths.tolist()), np.ascontiguousarray(factors.T), minimum)


def _curve(x: Any, slope: Any, shape: Any) -> np.ndarray:
    """``(1 + p · slope · x)^(1/p)`` of the shape p, which is ``exp(slope · x)`` at p = 0.

    It is the inverse of the transformation of Box and Cox; see `calibrate`.
    """
    is_power = shape == 0
    p = np.where(is_power, 1.0, shape)
    return np.where(is_power, np.exp(slope * x), np.maximum(1 + p * slope * x, 1e-9) ** (1 / p))


def some_queries(n: Any) -> tuple[np.ndarray, np.ndarray]:
    """Choose the rows of queries to measure: of each group of `Recorder.add` at most 64, evenly spaced.

    The queries see n (..., L) keys. Return the rows (K,), and how many queries each of them stands for.
    """
    # All sequences get the same rows, although padding may make their numbers of keys differ.
    n = np.reshape(n, (-1, np.shape(n)[-1])).max(axis=0)
    groups = np.zeros_like(n) if n.min() == n.max() else _half_octave(n)
    weight = np.zeros(n.shape)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        count = min(len(rows), _MOST_QUERIES)
        # The rows in the middle of equal parts of the group.
        weight[rows[((np.arange(count) + 0.5) * len(rows) / count).astype(int)]] = len(rows) / count
    chosen = np.flatnonzero(weight)
    return chosen, weight[chosen]


def entropy_drift(
    samples: Iterable[Array | tuple[Any, ...]],
    *,
    law: Law | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
) -> DriftReport:
    """How the attention entropy of each head changes with the number of keys.

    Parameters
    ----------
    samples : iterable
        Tuples ``(query, key)`` or ``(query, key, mask)``, with query (..., H, L, E) and key
        (..., H, S, E), or (L, E) and (S, E) for one head. The mask is one of those of `attention`, the
        same for all heads. A sample may also be an array (2, ..., H, L, E) of query and key. Samples
        should have several lengths, and there should be several samples of each length.
    law : Law or None
        The law to measure; None for standard attention.
    is_causal, scale, softcap, enable_gqa
        As in `attention`.

    Returns
    -------
    DriftReport
        A report with one layer. Queries are grouped by the number n of keys that they see. The groups
        are single values of n if all queries of a sequence see the same number of keys, and there are
        at most 16 such numbers. Otherwise the groups are half octaves.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; also if a sample is not such a tuple, or if no query sees two keys.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import drift
    >>> rng = np.random.default_rng(0)
    >>> report = drift.entropy_drift(rng.normal(size=(2, 4, n, 32)) for n in (64, 256, 1024))
    >>> np.round(report.slope, 1)  # random scores: the entropy grows like log n
    array([[1., 1., 1., 1.]])
    """
    check_law(law, optional=True)
    options = {"scale": scale, "softcap": softcap, "enable_gqa": enable_gqa}
    return _record(samples, (1.0,), law, is_causal, **options)[0].report()


def calibrate(
    samples: Iterable[Array | tuple[Any, ...]],
    *,
    reference_length: float,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
) -> CalibrationReport:
    """Fit a law to each head that keeps its mean entropy constant, from samples of several lengths.

    Parameters
    ----------
    samples : iterable
        As in `entropy_drift`. It is iterated over once, one sample at a time.
    reference_length : float
        The number of keys at which the law is 1. The entropy at this length is the target at the other
        lengths. It must lie between the shortest and the longest length of the samples.
    is_causal, scale, softcap, enable_gqa
        As in `attention`.

    Returns
    -------
    CalibrationReport
        Its `law` is a `laws.Knots` with factors (H, knots), in the library and on the device of the
        samples, in float32 or float64.

    Raises
    ------
    TypeError, ValueError
        As in `entropy_drift`; also for a reference length outside of the samples.

    Notes
    -----
    For each head and length, `calibrate` finds the factor at which the mean entropy is that at the
    reference length, from the entropies at eight factors. The law goes through these factors. The
    factor stays near 1 for a head whose entropy hardly depends on it. A length is not used if no factor
    from 0.35 to 4 reaches the entropy; 2 nats, for example, are out of reach for 5 keys.

    Beyond the longest length the law follows the curve ``(1 + p · slope · log(n/reference))^(1/p)``, up
    to 64 times that length. It is fitted to the factors from the reference on, and each length counts
    by its number of logits. The shape p is one of 8 numbers from 0, a power of n, to 2, the root of
    log n: the one that fits best, unless p = 1, a line in log n, fits nearly as well. So it takes two
    lengths above the reference to tell the shape. The law is never below its smallest factor.

    In a model, the law of a layer changes the inputs of the layers after it. Samples of queries and
    keys cannot show this; `integrations.huggingface.calibrate` takes it into account.

    References
    ----------
    Box & Cox 1964, Journal of the Royal Statistical Society B 26, 211–252, for the shapes.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import drift
    >>> rng = np.random.default_rng(0)
    >>> scores = {n: 3 * rng.normal(size=(2, 4, n, 32)) for n in (64, 128, 256)}
    >>> report = drift.calibrate(scores.values(), reference_length=128)
    >>> slope = drift.entropy_drift(scores.values(), law=report.law).slope
    >>> bool(abs(slope).max() < 0.05)
    True
    >>> lowest, expected, highest = report.at(1024)
    >>> expected.shape, bool((lowest <= expected).all() and (expected <= highest).all())
    ((1, 4), True)
    """
    check_real("reference_length", reference_length, least=2)
    options = {"scale": scale, "softcap": softcap, "enable_gqa": enable_gqa}
    recorder, like = _record(samples, FACTORS, None, is_causal, **options)
    found = recorder.calibration(reference_length, recorder.target(reference_length))
    dtype = accumulator(namespace(samples=like), like.dtype)
    law = found.law._with_arrays(lambda x: from_numpy(x, like, dtype))
    return replace(found, laws=(law,))


def _record(
    samples: Iterable[Any], factors: Sequence[float], law: Law | None, is_causal: bool, **options: Any
) -> tuple[Recorder, Array]:
    """The entropies of all samples at all factors, and a query as a model for arrays of the result."""
    check_flag(is_causal=is_causal)
    must = "be an iterable of tuples (query, key)"
    if not isinstance(samples, Iterable) or getattr(samples, "ndim", 1) == 0:
        raise type_error("samples", must, type(samples).__name__)
    shapes = [getattr(x, "shape", None) for x in samples] if isinstance(samples, tuple) else []
    if len(shapes) == 2 and shapes[0] and shapes[0] == shapes[1]:  # two samples would differ in length
        raise type_error("samples", must, "one such tuple")
    recorder = Recorder("samples", factors)
    laws = [scaled(law or Constant(1.0), f) for f in factors]
    like = None
    for i, sample in enumerate(samples):
        query, key, mask = _query_key_mask(f"samples[{i}]", sample)
        namespace(**{"samples[0][0]": query if like is None else like, f"samples[{i}][0]": query})
        query, key = (x[None, ...] if x.ndim == 2 else x for x in (query, key))
        if query.shape[-3] == 0:
            raise value_error(f"samples[{i}]", "have one head or more", 0)
        visible = None if mask is None else as_mask(mask)
        if is_causal:
            visible = causal() if visible is None else visible & causal()
        n = _visible_count(f"samples[{i}]", visible, query, key)
        states = [attention_state(query, key, mask=visible, law=x, **options) for x in laws]
        recorder.add(0, n, [state.entropy() for state in states])
        like = query
    if like is None:
        raise value_error("samples", "have one or more tuples (query, key)", "none")
    return recorder, like


def _query_key_mask(name: str, sample: Any) -> tuple[Array, Array, Array | Mask | None]:
    """The query, the key, and the mask or None, of one sample."""
    must = "be a tuple (query, key) or (query, key, mask), or an array of both"
    if not isinstance(sample, tuple | list) and getattr(sample, "shape", ())[:1] != (2,):
        raise type_error(name, must, type(sample).__name__)
    if not 2 <= len(sample) <= 3:
        raise value_error(name, must, f"{len(sample)} parts")
    query, key, *mask = sample
    namespace(**{f"{name}[0]": query, f"{name}[1]": key})
    check_ndim(2, **{f"{name}[0]": query, f"{name}[1]": key})
    return query, key, mask[0] if mask else None


def _visible_count(name: str, mask: Mask | None, query: Array, key: Array) -> np.ndarray:
    """The number of keys that each query sees, (..., L), the same for all heads."""
    if mask is None:
        return np.full(query.shape[-2], key.shape[-2])
    n = to_numpy(mask.visible_count(query.shape[-2], key.shape[-2], like=query))
    if n.ndim > 1 and n.shape[-2] > 1:
        raise value_error(f"{name}[2]", "hide the same keys from all heads", f"{n.shape[-2]} heads")
    n = n[..., 0, :] if n.ndim > 1 else n
    return np.broadcast_to(n, (*n.shape[:-1], query.shape[-2]))
