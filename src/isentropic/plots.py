"""Plots with matplotlib (the extra ``plots``). Each function returns its Axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from isentropic._checks import requires_extra, type_error, value_error
from isentropic._entropy import entropy as entropy_of
from isentropic._namespace import Array, namespace, to_numpy
from isentropic.drift import DriftReport
from isentropic.jl import _dimensions
from isentropic.jl._distortion import DistortionReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["attention", "distortion", "drift", "entropy"]


def entropy(
    reports: DriftReport | Mapping[str, DriftReport],
    *,
    curves: Mapping[str, Callable[[Any], Any]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Mean entropy against the number of keys, with the middle half of the heads as a band.

    Parameters
    ----------
    reports : DriftReport, or mapping of names to them
        From `drift.entropy_drift` or `integrations.huggingface.profile`.
    curves : mapping of names to functions, optional
        Theoretical curves, as functions of an array of lengths, such as those of `isentropic.theory`
        with the other parameters fixed. The curve log n, the entropy of uniform attention, is always
        drawn.
    ax : matplotlib.axes.Axes, optional
        The axes to draw in; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    TypeError
        For `reports` that are neither a `DriftReport` nor a mapping of names to them.
    ValueError
        For an empty mapping.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import plots, theory
    >>> from isentropic.drift import entropy_drift
    >>> rng = np.random.default_rng(0)
    >>> report = entropy_drift(rng.normal(size=(2, 4, n, 32)) for n in (64, 256, 1024))
    >>> gaussian = {"Gaussian scores": lambda n: theory.gaussian_entropy(n, 1.0)}
    >>> ax = plots.entropy({"1/√d": report}, curves=gaussian)
    >>> ax.get_xlabel()
    'number of keys n'
    """
    ax = _axes(ax)
    named = {"mean over heads": reports} if isinstance(reports, DriftReport) else reports
    if not isinstance(named, Mapping):
        raise type_error("reports", "be a DriftReport or a mapping to them", type(reports).__name__)
    if not named:
        raise value_error("reports", "have one report or more", "none")
    for name, report in named.items():
        if not isinstance(report, DriftReport):
            raise type_error(f"reports[{name!r}]", "be a DriftReport", type(report).__name__)
        heads = report.entropy.reshape(len(report.lengths), -1)
        # Heads that a layer does not have are NaN.
        (line,) = ax.plot(report.lengths, np.nanmean(heads, axis=1), "o-", ms=4, label=name)
        low, high = np.nanquantile(heads, (0.25, 0.75), axis=1)
        ax.fill_between(report.lengths, low, high, color=line.get_color(), alpha=0.15, lw=0)
    lengths = np.concatenate([report.lengths for report in named.values()])
    # Curves have some width even if there is a single length.
    n = np.geomspace(lengths.min(), max(lengths.max(), lengths.min() * 1.01), 100)
    for style, (name, curve) in enumerate((curves or {}).items()):
        ax.plot(n, curve(n), color="black", ls=("--", "-.", (0, (1, 1)))[style % 3], lw=1.2, label=name)
    ax.plot(n, np.log(n), color="0.6", ls=":", label="log n (uniform attention)")
    ax.set_xscale("log", base=2)  # with ticks at powers of two
    ax.xaxis.set_major_formatter(lambda n, _: f"{n:g}")
    ax.set_xlabel("number of keys n")
    ax.set_ylabel("attention entropy in nats")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return ax


def drift(report: DriftReport, *, ax: Axes | None = None) -> Axes:
    """Heat map of the drift dH/d log n of every head, white where the entropy is constant.

    Colors are from −1 to 1, the drift of uniform attention. An arrow at an end of the color bar says
    that some head is beyond it.

    Parameters
    ----------
    report : DriftReport
    ax : matplotlib.axes.Axes, optional
        As in `entropy`.

    Returns
    -------
    matplotlib.axes.Axes

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import plots
    >>> from isentropic.drift import entropy_drift
    >>> rng = np.random.default_rng(0)
    >>> report = entropy_drift(rng.normal(size=(2, 4, n, 32)) for n in (64, 256))
    >>> plots.drift(report).get_xlabel()
    'head'
    """
    if not isinstance(report, DriftReport):
        raise type_error("report", "be a DriftReport", type(report).__name__)
    layers, heads = report.slope.shape
    ax = _axes(ax, height=max(1.6, 1.2 + 0.3 * layers))
    # Uniform attention has the drift 1. A fixed color scale makes reports comparable.
    image = ax.imshow(report.slope, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    # An arrow at the end of the color bar says that a head is beyond it.
    ends = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    is_beyond = bool((report.slope < -1).any()), bool((report.slope > 1).any())
    ax.figure.colorbar(image, ax=ax, label="dH/d log n", extend=ends[is_beyond])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    _set_integer_ticks(ax.xaxis, heads)
    if report.names is None:
        _set_integer_ticks(ax.yaxis, layers)
    else:
        ax.set_yticks(range(layers), report.names)
    return ax


def attention(weights: Array, *, ax: Axes | None = None) -> Axes:
    """Heat map of attention weights, and beside it the entropy of each row.

    Parameters
    ----------
    weights : array (L, S)
        Attention weights of one head, as from `isentropic.AttentionDistribution.weights`, in any
        array library.
    ax : matplotlib.axes.Axes, optional
        As in `entropy`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the heat map. The entropies are in its first child axes.

    Raises
    ------
    TypeError
        For weights that are not an array.
    ValueError
        For weights that do not have 2 dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import AttentionDistribution, plots
    >>> q, k = np.random.default_rng(0).normal(size=(2, 20, 8))
    >>> plots.attention(AttentionDistribution(q, k, is_causal=True).weights()).get_ylabel()
    'query'
    """
    namespace(weights=weights)  # raises for anything that is not an array
    p = to_numpy(weights).astype(np.float64)
    if p.ndim != 2:
        raise value_error("weights", "have 2 dimensions, those of one head", p.ndim)
    ax = _axes(ax, height=4.8)
    from matplotlib.colors import PowerNorm

    # The color shows the square root of a weight. So the many small weights, which contribute much of
    # the entropy, are visible.
    square_root = PowerNorm(0.5, vmin=0)
    image = ax.imshow(p, cmap="viridis", norm=square_root, aspect="auto", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="weight", location="left", pad=0.02)
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    side = ax.inset_axes((1.03, 0, 0.25, 1), sharey=ax)
    entropies: Any = entropy_of(p)
    side.plot(entropies, np.arange(len(p)), color="black", lw=1)
    n_keys = np.maximum((p > 0).sum(axis=1), 1)
    side.plot(np.log(n_keys), np.arange(len(p)), color="0.6", lw=1, ls=":")
    side.set_xlim(left=0)
    side.set_xlabel("entropy in nats\n(dotted: log n)")
    side.tick_params(labelleft=False)
    return ax


def distortion(report: DistortionReport, *, ax: Axes | None = None, bins: int = 100) -> Axes:
    """Histogram of the errors of squared distances, with the density for a Gaussian map.

    Parameters
    ----------
    report : DistortionReport
        From `isentropic.jl.distortion`. Errors that are not finite are omitted.
    ax : matplotlib.axes.Axes, optional
        As in `entropy`.
    bins : int
        The number of bins of the histogram.

    Returns
    -------
    matplotlib.axes.Axes

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.jl import distortion, hadamard_projection
    >>> from isentropic import plots
    >>> x = np.random.default_rng(0).normal(size=(100, 1000))
    >>> ax = plots.distortion(distortion(x, hadamard_projection(1000, 200, rng=1)(x)))
    >>> ax.get_xlabel()
    'relative error of squared distances'
    """
    if not isinstance(report, DistortionReport):
        raise type_error("report", "be a DistortionReport", type(report).__name__)
    ax = _axes(ax)
    errors = to_numpy(report.distance)
    errors = errors[np.isfinite(errors)]
    ax.hist(errors, bins=bins, density=True, color="tab:blue", alpha=0.6, label="measured")

    k = report.n_components
    left, right = ax.get_xlim()
    # The relative error of a square is above −1, where the logarithm of the density is infinite.
    e = np.linspace(max(float(left), -1 + 1e-9), float(right), 500)
    # The density of χ²_k/k − 1.
    log_density = (k / 2 - 1) * np.log1p(e) - k / 2 * e
    log_norm = math.lgamma(k / 2) - k / 2 * math.log(k / 2) + k / 2
    ax.plot(e, np.exp(log_density - log_norm), color="black", lw=1.2, label=f"Gaussian map, χ²/{k}")
    eps = _dimensions.eps(report.n_points, k, delta=0.01)
    if eps < 1:
        for side in (-eps, eps):
            label = "_" if side < 0 else f"all within {eps:.2f} (99 %)"
            ax.axvline(side, color="tab:red", ls="--", lw=1.2, label=label)
    ax.set_xlabel("relative error of squared distances")
    ax.set_ylabel("density")
    ax.set_title(f"{report.n_points} points, {report.n_features} → {k} dimensions")
    ax.set_ylim(top=1.35 * ax.get_ylim()[1])  # room for the legend
    ax.legend(frameon=False, loc="upper center")
    return ax


def _axes(ax: Axes | None, height: float = 4) -> Axes:
    if ax is not None:
        return ax
    with requires_extra(__name__):
        import matplotlib.pyplot as plt

    return plt.figure(figsize=(6.4, height), layout="constrained").subplots()


def _set_integer_ticks(axis: Any, count: int) -> None:
    axis.set_ticks(range(0, count, max(1, count // 12)))
