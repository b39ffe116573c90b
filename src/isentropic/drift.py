"""How attention entropies change with the number of keys, and the laws that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isentropic._attention.functions import attention_state
from isentropic._checks import (
    check_flag,
    check_ndim,
    check_real,
    is_array,
    is_integer,
    type_error,
    value_error,
)
from isentropic._namespace import Array, accumulator, from_numpy, namespace, to_numpy
from isentropic.laws._formulas import AffineLog, Constant, Law, check_law, scaled
from isentropic.masks import Mask, as_mask, causal

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DriftReport", "calibrate", "entropy_drift"]

# Factors on the scale at which `calibrate` measures entropies; between them it interpolates.
FACTORS = tuple(2.0 ** (i / 4) for i in range(-6, 9))
# Lengths that may be groups by themselves.
_MOST_LENGTHS = 16
# Nats that a doubling of a factor must be worth, about: heads whose entropy hardly moves stay at 1.
_INDIFFERENCE = 0.02
# Lengths in a table, which is to fit into a terminal; the report has them all.
_MOST_COLUMNS = 8
# Nats by which a length may miss the target and still tell something of the law.
_MISS = 0.05


@dataclass(frozen=True, eq=False, repr=False)
class DriftReport:
    """Attention entropies against the number of keys, from `entropy_drift`; its `repr` is a table.

    Attributes
    ----------
    lengths : NumPy array (lengths,)
        How many keys the queries of a group see, rising: one number n, or the geometric mean in a half
        octave.
    counts : NumPy array (lengths,)
        How many queries there were, in the layer that has most.
    entropy : NumPy array (lengths, layers, heads)
        Their mean entropy in nats; NaN where a layer has no query of a group, as behind a window.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import entropy_drift
    >>> entropy_drift(np.zeros((2, 4, n, 8)) for n in (16, 64, 256))  # uniform attention
    Attention entropy in nats, mean over 4 heads a layer
    n               16      64     256   dH/dlog n: mean, lowest, highest
    all layers   2.773   4.159   5.545      1.000   1.000   1.000
    log n        2.773   4.159   5.545
    """

    lengths: np.ndarray
    counts: np.ndarray
    entropy: np.ndarray

    @property
    def slope(self) -> np.ndarray:
        """The drift dH/d log n of each head, (layers, heads): 0 if the entropy is held, 1 if uniform.

        By least squares over the lengths of the layer; NaN where there is only one.
        """
        import numpy as np

        _, layers, heads = self.entropy.shape
        slope = np.full((layers, heads), np.nan)
        for layer in range(layers):
            known = np.isfinite(self.entropy[:, layer, 0])
            if known.sum() > 1:
                x = np.log(self.lengths[known])
                x -= x.mean()
                slope[layer] = x @ self.entropy[known, layer] / (x @ x)
        return slope

    def at(self, length: float) -> np.ndarray:
        """The mean entropy (layers, heads) at a length between the others, by interpolation in log n.

        Parameters
        ----------
        length : float

        Returns
        -------
        NumPy array
            NaN for layers of whose lengths it is not in the range.
        """
        import numpy as np

        check_real("length", length, above=0)
        result = np.full(self.entropy.shape[1:], np.nan)
        for layer, head in np.ndindex(result.shape):
            h = self.entropy[:, layer, head]
            known = h == h
            n = np.log(self.lengths[known])
            result[layer, head] = np.interp(np.log(length), n, h[known], np.nan, np.nan)
        return result

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, for JSON.

        Returns
        -------
        dict
            ``lengths``, ``counts``, ``entropy`` and ``slope``; None where they have NaN.
        """
        import numpy as np

        names = ("lengths", "counts", "entropy", "slope")
        fields = {name: np.asarray(getattr(self, name)).astype(object) for name in names}
        for x in fields.values():
            x[x != x] = None
        return {name: x.tolist() for name, x in fields.items()}

    def __repr__(self) -> str:
        import numpy as np

        groups, layers, heads = self.entropy.shape
        shown = np.linspace(0, groups - 1, min(groups, _MOST_COLUMNS)).round().astype(int)
        lengths, entropies, slope = self.lengths[shown], self.entropy[shown], self.slope
        of = f", {len(shown)} of {groups} lengths" if len(shown) < groups else ""
        lines = [
            f"Attention entropy in nats, mean over {heads} heads a layer{of}",
            "n".ljust(10)
            + "".join(format(n, ".0f" if n >= 100 else ".3g").rjust(8) for n in lengths)
            + "   dH/dlog n: mean, lowest, highest",
        ]
        rows = [("all layers", entropies.reshape(len(shown), -1), slope)]
        if layers > 1:
            rows += [(f"layer {i}", entropies[:, i], slope[i]) for i in range(layers)]
        for name, entropy, slope in rows:
            known = slope[slope == slope]
            drift = (known.mean(), known.min(), known.max()) if known.size else (math.nan,) * 3
            means = [_mean(h) for h in entropy]
            lines.append(name.ljust(10) + _cells(means) + "   " + _cells(drift))
        lines.append("log n".ljust(10) + _cells(math.log(n) for n in lengths))
        return "\n".join(lines)


def _cells(values: Iterable[float]) -> str:
    return "".join(("–" if x != x else format(x, "z.3f")).rjust(8) for x in values)


def _mean(x: np.ndarray) -> float:
    """Of the numbers that are known; NaN where none is."""
    known = x[x == x]
    return float(known.mean()) if known.size else math.nan


def _half_octave(n: Any) -> Any:
    """The group −i of n > 4 keys around 2^{i/2}; fewer are a group by themselves."""
    import numpy as np

    n = np.maximum(n, 1)
    return np.where(n > 4, -np.rint(2 * np.log2(n)), n).astype(np.int64)


class Recorder:
    """Sums of entropies by number of keys, layer and head, at several factors on the scale."""

    def __init__(self, argument: str, factors: Sequence[float] = (1.0,)) -> None:
        self.argument = argument  # which one to blame if the entropies cannot be used
        self.factors = tuple(factors)
        # By group and layer: how many queries, the sum of log n, and those of the entropies. A group is
        # an n, or −i for the half octave around 2^{i/2}.
        self._sums: dict[tuple[int, int], tuple[int, float, Any]] = {}

    def add(
        self, layer: int, n: int | Array, entropies: Sequence[Array], counted: Array | None = None
    ) -> None:
        """Entropies (..., heads, L) of queries that see n keys (broadcastable to (..., L)).

        One array for each factor. Only those that are `counted` (broadcastable to (..., L)) and see
        two keys or more take part.
        """
        import numpy as np

        h = np.stack([to_numpy(x).astype(np.float64) for x in entropies])
        h = np.moveaxis(h, -2, 0)  # (heads, factors, ..., L)
        heads = next(iter(self._sums.values()))[2].shape[-1] if self._sums else h.shape[0]
        if h.shape[0] != heads:
            raise value_error(self.argument, f"have as many heads all of them, {heads}", h.shape[0])
        shape = h.shape[2:]
        n = np.asarray(n if isinstance(n, int) else to_numpy(n), dtype=np.int64)
        n = np.broadcast_to(n, shape)
        taken = n >= 2
        if counted is not None:
            taken = taken & np.broadcast_to(to_numpy(counted), shape)
        if not taken.any():
            return
        fewest = np.min(n, axis=-1, keepdims=True, where=taken, initial=np.iinfo(np.int64).max)
        is_alike = np.max(n, axis=-1, keepdims=True, where=taken, initial=0) == fewest
        groups = np.where(is_alike, n, _half_octave(n))[taken]
        n, h = n[taken].astype(np.float64), h[:, :, taken]
        if not np.isfinite(h).all():
            raise value_error(self.argument, "have finite entropies", f"NaN in layer {layer}")
        for group in np.unique(groups):
            own = groups == group
            count, log_n, total = self._sums.get((int(group), layer), (0, 0.0, 0.0))
            self._sums[int(group), layer] = (
                count + int(own.sum()),
                log_n + np.log(n[own]).sum(),
                total + h[:, :, own].sum(axis=-1).T,
            )

    def means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lengths (G,), numbers of queries (G,), and mean entropies (factors, G, layers, heads)."""
        import numpy as np

        if not self._sums:
            raise value_error(self.argument, "have queries that see two keys or more", "none")
        if len({group for group, _ in self._sums if group > 0}) > _MOST_LENGTHS:
            self._join()
        layers = sorted({layer for _, layer in self._sums})
        heads = next(iter(self._sums.values()))[2].shape[-1]
        found = []
        for group in {group for group, _ in self._sums}:
            sums = {layer: self._sums[group, layer] for layer in layers if (group, layer) in self._sums}
            unknown = np.full((len(self.factors), heads), np.nan)
            parts = [sums[i][2] / sums[i][0] if i in sums else unknown for i in layers]
            counts = [count for count, _, _ in sums.values()]
            log_n = sum(total for _, total, _ in sums.values()) / sum(counts)
            length = math.exp(log_n) if group < 0 else group
            found.append((length, max(counts), np.stack(parts, axis=-2)))
        found.sort(key=lambda group: group[0])
        lengths, counts, entropy = zip(*found, strict=True)
        return np.asarray(lengths, dtype=np.float64), np.asarray(counts), np.stack(entropy, axis=1)

    def _join(self) -> None:
        """Make half octaves of lengths that are groups by themselves."""
        sums, self._sums = self._sums, {}
        for (group, layer), own in sums.items():
            joined = int(_half_octave(group)) if group > 0 else group, layer
            others = self._sums.get(joined, (0, 0.0, 0.0))
            self._sums[joined] = tuple(a + b for a, b in zip(own, others, strict=True))

    def report(self) -> DriftReport:
        """The entropies at the factor 1."""
        lengths, counts, entropy = self.means()
        return DriftReport(lengths, counts, entropy[self.factors.index(1.0)])

    def target(self, reference_length: float) -> np.ndarray:
        """The mean entropies at the reference length, (layers, heads)."""
        report = self.report()
        first, last = report.lengths[[0, -1]].tolist()
        if first == last:
            must = "have queries that see several numbers of keys"
            raise value_error(self.argument, must, f"{first:.5g} alone")
        if not first <= reference_length <= last:
            must = f"lie within the lengths of `{self.argument}`, {first} to {last}"
            raise value_error("reference_length", must, reference_length)
        return report.at(reference_length)

    def laws(
        self,
        reference_length: float,
        target: np.ndarray,
        current: Sequence[AffineLog] | None = None,
    ) -> list[AffineLog]:
        """For each layer the law whose heads have the target entropies, with parameters (heads,).

        If the entropies are of a model with `current` laws, their factors are on top of those.
        """
        import numpy as np

        lengths, counts, entropy = self.means()
        layers, heads = entropy.shape[2:]
        found = []
        for layer in range(layers):
            known = np.isfinite(entropy[0, :, layer, 0])
            if not np.isfinite(target[layer]).all():
                found.append(AffineLog(np.zeros(heads), np.ones(heads)))  # behind a window, say
                continue
            n = lengths[known]
            start = None if current is None else to_numpy(current[layer](n)).T
            factor, is_met = _holding_factors(
                self.factors, entropy[:, known, layer], target[layer], start
            )
            found.append(_fitted(n, factor, is_met * (counts[known] * n)[:, None], reference_length))
        return found


def _holding_factors(
    factors: Sequence[float], entropy: np.ndarray, target: np.ndarray, current: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The factors (G, heads) at which entropies (factors, G, heads) meet their target (heads,).

    And whether they do meet it. Where the entropy hardly depends on the factor, it stays near 1.
    """
    import numpy as np

    u, h = _interpolated(np.log(factors), entropy)
    total = u[:, None, None] if current is None else u[:, None, None] + np.log(current)
    miss = h - target
    cost = miss**2 + (_INDIFFERENCE / math.log(2) * total) ** 2
    best = np.argmin(cost, axis=0)[None, ...]
    factor = np.exp(np.take_along_axis(np.broadcast_to(total, cost.shape), best, axis=0)[0])
    is_met = np.abs(np.take_along_axis(miss, best, axis=0)[0]) < _MISS
    return factor, is_met


def _interpolated(u: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values between those y (N, ...) at equidistant u (N,): cubic Hermite, with central slopes."""
    import numpy as np

    slope = np.gradient(y, axis=0)
    t = np.linspace(0, 1, 50, endpoint=False).reshape(-1, *(1,) * y.ndim)
    start, end, rise, fall = y[:-1], y[1:], slope[:-1], slope[1:]
    bend, curve = 3 * (end - start) - 2 * rise - fall, 2 * (start - end) + rise + fall
    between = start + t * (rise + t * (bend + t * curve))
    fine = np.moveaxis(between, 0, 1).reshape(-1, *y.shape[1:])
    steps = np.arange(fine.shape[0]) / 50 * (u[1] - u[0])
    return u[0] + steps, fine


def _fitted(
    n: np.ndarray, factor: np.ndarray, weight: np.ndarray, reference_length: float
) -> AffineLog:
    """``1 + slope · log(n/reference)`` through factors (G, heads), by weighted least squares."""
    import numpy as np

    x = np.log(n / reference_length)[:, None]
    moment = (weight * x * x).sum(axis=0)
    # At the reference alone, which the rounding of its logarithm can miss, there is no slope.
    slope = (weight * x * (factor - 1)).sum(axis=0) / np.where(moment > 1e-9, moment, np.inf)
    # Never below what the lengths themselves have asked for, however short or long a text is.
    minimum = (1 + slope * np.where(weight > 0, x, 0)).min(axis=0)
    minimum = np.maximum(minimum, factor.min(axis=0, where=weight > 0, initial=1.0))
    return AffineLog(slope, 1 - slope * math.log(reference_length), minimum)


def entropy_drift(
    samples: Iterable[Array | tuple[Any, ...]],
    *,
    law: Law | None = None,
    head_axis: int = -3,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
) -> DriftReport:
    """How the attention entropy of each head changes with the number of keys.

    Parameters
    ----------
    samples : iterable
        Of tuples ``(query, key)`` or ``(query, key, mask)``: query (..., H, L, E), key (..., H, S, E),
        and a mask as in `attention`, the same for all heads; or of arrays (2, ..., H, L, E) of both. Of
        several lengths, several of each length.
    law : Law or None
        The law whose drift is wanted; None for the standard attention.
    head_axis : int
        Which axis of queries and keys are the heads, −3 or −2; the other of the two is that of the
        rows. Arrays (L, E) are one head.
    is_causal, scale, softcap, enable_gqa
        As in `attention`.

    Returns
    -------
    DriftReport
        With one layer. Queries are grouped by the number n of keys that they see: by n itself where
        all queries of a sequence see as many and there are at most 16 such n, else by half octaves.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; also for samples that are not such tuples, or if no query sees two keys.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import entropy_drift
    >>> rng = np.random.default_rng(0)
    >>> report = entropy_drift(rng.normal(size=(2, 4, n, 32)) for n in (64, 256, 1024))
    >>> np.round(report.slope, 1)  # random scores: the entropy grows like log n
    array([[1., 1., 1., 1.]])
    """
    check_law(law, optional=True)
    options = {"is_causal": is_causal, "scale": scale, "softcap": softcap, "enable_gqa": enable_gqa}
    return _recorded(samples, (1.0,), law, head_axis, options)[0].report()


def calibrate(
    samples: Iterable[Array | tuple[Any, ...]],
    *,
    reference_length: float,
    head_axis: int = -3,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
) -> AffineLog:
    """The law of each head that holds its mean entropy, from samples of several lengths.

    Parameters
    ----------
    samples : iterable
        As in `entropy_drift`; taken once, one at a time.
    reference_length : float
        The number of keys at which the law is 1, and whose entropy is held; between the shortest and
        the longest of the samples.
    head_axis, is_causal, scale, softcap, enable_gqa
        As in `entropy_drift`.

    Returns
    -------
    AffineLog
        With slopes and intercepts (H,), in the library and on the device of the samples, in float32
        or float64.

    Raises
    ------
    TypeError, ValueError
        As in `entropy_drift`; also for a reference length outside of the samples.

    Notes
    -----
    At each length the factor is found with which the head's mean entropy is that at the reference
    length; ``1 + slope · log(n/reference)`` is fitted to these factors, a length counting by its number
    of logits: what is to be extrapolated to is longer. A head whose entropy hardly answers to the
    factor keeps the factor 1, and lengths at which no factor from 0.35 to 4 reaches the entropy (2
    nats, among 5 keys) take no part. The law is never below the smallest factor that was asked for.
    Each sample costs fifteen entropies.

    Other layers feel the laws of those before them. `integrations.huggingface.calibrate` takes that
    into account, which samples of queries and keys cannot.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import calibrate, entropy_drift
    >>> rng = np.random.default_rng(0)
    >>> scores = {n: 3 * rng.normal(size=(2, 4, n, 32)) for n in (64, 128, 256)}
    >>> law = calibrate(scores.values(), reference_length=128)
    >>> drift = entropy_drift(scores.values(), law=law).slope
    >>> bool(abs(drift).max() < 0.05)
    True
    """
    check_real("reference_length", reference_length, least=2)
    options = {"is_causal": is_causal, "scale": scale, "softcap": softcap, "enable_gqa": enable_gqa}
    recorder, like = _recorded(samples, FACTORS, None, head_axis, options)

    (law,) = recorder.laws(reference_length, recorder.target(reference_length))
    dtype = accumulator(namespace(samples=like), like.dtype)
    return AffineLog(*(from_numpy(x, like, dtype) for x in law.arrays))


def _recorded(
    samples: Iterable[Array | tuple[Any, ...]],
    factors: Sequence[float],
    law: Law | None,
    head_axis: int,
    options: dict[str, Any],
) -> tuple[Recorder, Array]:
    """The entropies of all samples at all factors, and an array of the samples' kind."""
    if not is_integer(head_axis) or head_axis not in (-3, -2):
        raise value_error("head_axis", "be -3 or -2", head_axis)
    check_flag(is_causal=options["is_causal"])
    if not isinstance(samples, Iterable):
        raise type_error("samples", "be an iterable of tuples (query, key)", type(samples).__name__)
    if _is_pair(samples):
        raise type_error("samples", "be an iterable of tuples (query, key)", "one such tuple")
    recorder = Recorder("samples", factors)
    like = None
    for i, sample in enumerate(samples):
        query, key, mask = _parts(f"samples[{i}]", sample)
        namespace(**{"samples[0][0]": query if like is None else like, f"samples[{i}][0]": query})
        query, key = (_with_heads(x, head_axis) for x in (query, key))
        visible = None if mask is None else as_mask(mask)
        if options["is_causal"]:
            visible = causal() if visible is None else visible & causal()
        entropies = [
            attention_state(
                query, key, mask=mask, law=scaled(law or Constant(1.0), f), **options
            ).entropy()
            for f in factors
        ]
        recorder.add(0, _visible(f"samples[{i}]", visible, query, key), entropies)
        like = query
    if like is None:
        raise value_error("samples", "have one or more tuples (query, key)", "none")
    return recorder, like


def _is_pair(samples: Any) -> bool:
    """Whether a tuple is a query and a key, and not two samples, which would be of two lengths."""
    if not (isinstance(samples, tuple) and len(samples) == 2 and all(is_array(x) for x in samples)):
        return False
    return bool(samples[0].shape == samples[1].shape)


def _parts(name: str, sample: Any) -> tuple[Array, Array, Array | Mask | None]:
    """Query, key, and mask or None."""
    must = "be a tuple (query, key) or (query, key, mask), or an array of both"
    if not isinstance(sample, tuple | list) and getattr(sample, "shape", ())[:1] != (2,):
        raise type_error(name, must, type(sample).__name__)
    if not 2 <= len(sample) <= 3:
        raise value_error(name, must, f"{len(sample)} parts")
    query, key, *mask = sample
    namespace(**{f"{name}[0]": query, f"{name}[1]": key})
    check_ndim(2, **{f"{name}[0]": query, f"{name}[1]": key})
    return query, key, mask[0] if mask else None


def _visible(name: str, mask: Mask | None, query: Array, key: Array) -> int | Array:
    """How many keys the queries (..., L) of all heads see."""
    if mask is None:
        return key.shape[-2]
    n = mask.visible_count(query.shape[-2], key.shape[-2], like=query)
    if n.ndim > 1 and n.shape[-2] > 1:
        raise value_error(f"{name}[2]", "hide the same keys from all heads", f"{n.shape[-2]} heads")
    return n[..., 0, :] if n.ndim > 1 else n


def _with_heads(x: Array, head_axis: int) -> Array:
    """`x` as (..., H, rows, E)."""
    if x.ndim == 2:
        return x[None, ...]
    return x if head_axis == -3 else namespace(x=x).moveaxis(x, -2, -3)
