"""Johnson–Lindenstrauss projections: choose the dimension, draw a map, and measure its distortion.

`min_dim` tells how many dimensions preserve the distances between n points. The functions
``*_projection``, `count_sketch` and `rotation` draw a map f, which applies along any axis by
``f(x, axis=-1)``, and has ``f.adjoint(y, axis=-1)`` and ``f.matrix()``. `distortion` measures how well
the map preserved the distances.

>>> import numpy as np
>>> from isentropic import jl
>>> x = np.random.default_rng(0).normal(size=(20, 10_000))
>>> f = jl.hadamard_projection(10_000, jl.min_dim(20, eps=0.2), rng=0)
>>> bool(np.all(np.abs(jl.distortion(x, f(x)).distance) < 0.2))
True
"""

from isentropic.jl._dimensions import eps, failure_probability, lower_bound, min_dim
from isentropic.jl._distortion import distortion
from isentropic.jl._hadamard import hadamard_transform
from isentropic.jl._projections import (
    count_sketch,
    gaussian_projection,
    hadamard_projection,
    orthogonal_projection,
    rotation,
    sparse_projection,
)
from isentropic.jl._quantizers import QuantizedVectors, quantizer

__all__ = [
    "QuantizedVectors",
    "count_sketch",
    "distortion",
    "eps",
    "failure_probability",
    "gaussian_projection",
    "hadamard_projection",
    "hadamard_transform",
    "lower_bound",
    "min_dim",
    "orthogonal_projection",
    "quantizer",
    "rotation",
    "sparse_projection",
]
