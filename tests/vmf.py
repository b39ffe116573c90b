"""The special functions of the von Mises–Fisher distribution, for numbers and NumPy arrays."""

from typing import Any, NamedTuple

import numpy as np

from isentropic import _special


class VonMisesFisher(NamedTuple):
    log_mgf: Any  # log E exp(κ cos θ)
    mean_cosine: Any
    divergence: Any  # from the uniform distribution


def von_mises_fisher(d: Any, kappa: Any) -> VonMisesFisher:
    arrays = np.broadcast_arrays(np.asarray(d, float), np.asarray(kappa, float))
    found = _special.von_mises_fisher(np, *map(np.atleast_1d, arrays))[:3]
    return VonMisesFisher(*(x.reshape(arrays[0].shape)[()] for x in found))
