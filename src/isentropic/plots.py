"""Pictures, with matplotlib (the extra ``plots``); each function returns its Axes. Layer 5."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isentropic._bounds import jl_distortion
from isentropic._distortion import DistortionReport
from isentropic._namespace import to_numpy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["distortion"]


def distortion(report: DistortionReport, *, ax: Axes | None = None, bins: int = 100) -> Axes:
    """Histogram of the errors of squared distances, with what a Gaussian map would give.

    Parameters
    ----------
    report : DistortionReport
        From `isentropic.distortion`. Errors that are not finite are left out.
    ax : matplotlib.axes.Axes, optional
        Where to draw; new by default.
    bins : int
        Of the histogram.

    Returns
    -------
    matplotlib.axes.Axes

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import distortion, hadamard_projection, plots
    >>> x = np.random.default_rng(0).normal(size=(100, 1000))
    >>> ax = plots.distortion(distortion(x, hadamard_projection(1000, 200, rng=1)(x)))
    >>> ax.get_xlabel()
    'relative error of squared distances'
    """
    import matplotlib.pyplot as plt
    import numpy as np

    ax = plt.figure(figsize=(6.4, 4), layout="constrained").subplots() if ax is None else ax
    errors = to_numpy(report.distance)
    errors = errors[np.isfinite(errors)]
    ax.hist(errors, bins=bins, density=True, color="tab:blue", alpha=0.6, label="measured")

    k = report.n_components
    left, right = ax.get_xlim()
    e = np.linspace(max(float(left), -1 + 1e-9), float(right), 500)
    # The density of χ²_k/k − 1.
    log_density = (k / 2 - 1) * np.log1p(e) - k / 2 * e
    log_norm = math.lgamma(k / 2) - k / 2 * math.log(k / 2) + k / 2
    ax.plot(e, np.exp(log_density - log_norm), color="black", lw=1.2, label=f"Gaussian map, χ²/{k}")
    eps = jl_distortion(report.n_points, k, delta=0.01)
    if eps < 1:
        for side in (-eps, eps):
            ax.axvline(
                side,
                color="tab:red",
                ls="--",
                lw=1.2,
                label="_" if side < 0 else f"all within {eps:.2f} (99 %)",
            )
    ax.set_xlabel("relative error of squared distances")
    ax.set_ylabel("density")
    ax.set_title(f"{report.n_points} points, {report.n_features} → {k} dimensions")
    ax.set_ylim(top=1.35 * ax.get_ylim()[1])  # room for the legend
    ax.legend(frameon=False, loc="upper center")
    return ax
