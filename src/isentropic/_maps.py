"""Linear maps that keep distances, applied along any axis: dense, Hadamard, count sketch. Layer 2.

A map is an immutable tuple of arrays, so a pytree in JAX and PyTorch. How maps are drawn is in
`_projections`.

In `_rows` and `_adjoint_rows` the array is a matrix (lead, size · trail): `lead` rows for the axes
before the one that is mapped, `trail` columns for those after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from isentropic._checks import check_axis, check_floating, value_error
from isentropic._hadamard import apply_kronecker, hadamard_factors, hadamard_order
from isentropic._loops import map_chunks, map_rows
from isentropic._namespace import Array, ArrayT, accumulator, device, is_dask, namespace
from isentropic._numerics import product


class DenseProjection(NamedTuple):
    """A linear map as a matrix: ``f(x) = scale · weights x``.

    Made by `gaussian_projection`, `rademacher_projection`, `sparse_projection` and
    `orthogonal_projection`.

    Attributes
    ----------
    weights : array (n_components, n_features)
    scale : array ()
        In float32 or better, so that ±1 in half precision keep their length.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import gaussian_projection
    >>> f = gaussian_projection(1000, 64, rng=0)
    >>> f(np.ones((5, 7, 1000))).shape, f(np.ones((1000, 3)), axis=0).shape
    ((5, 7, 64), (64, 3))
    """

    weights: Array
    scale: Array

    @property
    def n_features(self) -> int:
        """The dimension d that the map takes."""
        return self.weights.shape[1]

    @property
    def n_components(self) -> int:
        """The dimension k that the map gives."""
        return self.weights.shape[0]

    def __call__(self, x: ArrayT, axis: int = -1) -> ArrayT:
        """Apply the map along an axis of n_features entries, which becomes one of n_components.

        The image has the dtype of `x`. A Dask array stays lazy.
        """
        return _along("x", x, axis, self, self.n_features, self.n_components, self._rows)

    def adjoint(self, y: ArrayT, axis: int = -1) -> ArrayT:
        """Apply the transposed matrix along an axis: ⟨f(x), y⟩ = ⟨x, f.adjoint(y)⟩."""
        return _along("y", y, axis, self, self.n_components, self.n_features, self._adjoint_rows)

    def matrix(self) -> Array:
        """The matrix (n_components, n_features) of the map."""
        xp = namespace(weights=self.weights)
        weights = xp.astype(self.weights, accumulator(xp, self.weights.dtype), copy=False)
        scale = xp.astype(self.scale, weights.dtype, copy=False)
        return xp.astype(weights * scale, self.weights.dtype, copy=False)

    def _rows(self, xp: ModuleType, rows: Array, trail: int) -> Array:
        return self._multiply(xp, self.weights, rows, trail)

    def _adjoint_rows(self, xp: ModuleType, rows: Array, trail: int) -> Array:
        return self._multiply(xp, xp.permute_dims(self.weights, (1, 0)), rows, trail)

    def _multiply(self, xp: ModuleType, weights: Array, rows: Array, trail: int) -> Array:
        weights = xp.astype(weights, rows.dtype, copy=False)
        if trail == 1:
            y = product(xp, rows, xp.permute_dims(weights, (1, 0)))
        else:
            out, size = weights.shape
            lead = rows.shape[0]
            y = product(xp, weights, xp.reshape(rows, (lead, size, trail)))
            y = xp.reshape(y, (lead, out * trail))
        return y * xp.astype(self.scale, rows.dtype, copy=False)


class HadamardProjection(NamedTuple):
    """Fast Johnson–Lindenstrauss: random signs, a Hadamard transform, a sample of its coordinates.

    Made by `hadamard_projection`, which says what it computes and what is known of it.

    Attributes
    ----------
    signs : tuple of arrays of ±1
        One per round: (n_features,) for the first, (D,) for the others, with D ≥ n_features the order
        of the Hadamard matrix.
    rows : integer array (n_components,)
        The coordinates that are kept, in rising order.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import hadamard_projection
    >>> f = hadamard_projection(65536, 512, rng=0)
    >>> f(np.ones((3, 65536))).shape, sum(part.size for part in f.signs)
    ((3, 512), 65536)
    """

    signs: tuple[Array, ...]
    rows: Array

    @property
    def n_features(self) -> int:
        """The dimension d that the map takes."""
        return self.signs[0].shape[0]

    @property
    def n_components(self) -> int:
        """The dimension k that the map gives."""
        return self.rows.shape[0]

    def __call__(self, x: ArrayT, axis: int = -1) -> ArrayT:
        """Apply the map along an axis of n_features entries, which becomes one of n_components.

        The image has the dtype of `x`. A Dask array stays lazy.
        """
        return _along("x", x, axis, self, self.n_features, self.n_components, self._rows)

    def adjoint(self, y: ArrayT, axis: int = -1) -> ArrayT:
        """Apply the transposed matrix along an axis: ⟨f(x), y⟩ = ⟨x, f.adjoint(y)⟩."""
        return _along("y", y, axis, self, self.n_components, self.n_features, self._adjoint_rows)

    def matrix(self) -> Array:
        """The matrix (n_components, n_features) of the map."""
        signs = self.signs[0]
        xp = namespace(signs=signs)
        return self.adjoint(xp.eye(self.n_components, dtype=signs.dtype, device=device(signs=signs)))

    @property
    def has_orthogonal_rows(self) -> bool:
        """Whether the vectors are not padded: then the adjoint, times k/d, is the pseudo-inverse."""
        base, doublings = hadamard_order(max(self.n_features, self.n_components))
        return base << doublings == self.n_features

    def _mixing(self, xp: ModuleType, like: Array) -> tuple[int, list[Array]]:
        """The order D, and the factors of the mixing matrix of one round."""
        order = hadamard_order(max(self.n_features, self.n_components))
        size = order[0] << order[1]
        # All rounds use the same factors, so each takes its share of √D/√k.
        scale = size**-0.5 * (size / self.n_components) ** (0.5 / len(self.signs))
        place = device(signs=self.signs[0])
        return size, hadamard_factors(xp, order, scale=scale, dtype=like.dtype, place=place)

    def _rows(self, xp: ModuleType, rows: Array, trail: int) -> Array:
        size, factors = self._mixing(xp, rows)
        d, k = self.n_features, self.n_components

        def mix(block: Array) -> Array:
            lead = block.shape[0]
            for i, signs in enumerate(self.signs):
                z = xp.reshape(block, (lead, size if i else d, trail))
                z = z * xp.astype(signs, z.dtype, copy=False)[:, None]
                z = z if i else _pad(xp, z, size)
                block = apply_kronecker(xp, factors, xp.reshape(z, (lead, size * trail)), trail)
            z = xp.take(xp.reshape(block, (lead, size, trail)), self.rows, axis=1)
            return xp.reshape(z, (lead, k * trail))

        return map_rows(xp, mix, rows, size * trail)

    def _adjoint_rows(self, xp: ModuleType, rows: Array, trail: int) -> Array:
        size, factors = self._mixing(xp, rows)
        factors = [xp.permute_dims(factor, (1, 0)) for factor in factors]
        d, k = self.n_features, self.n_components
        # Where each of the D coordinates comes from, by bisection of the sorted rows.
        every = xp.arange(size, dtype=self.rows.dtype, device=device(rows=self.rows))
        source = xp.searchsorted(self.rows, every)
        source = xp.where(source < k, source, k - 1)
        kept = (xp.take(self.rows, source) == every)[:, None]

        def mix(block: Array) -> Array:
            lead = block.shape[0]
            z = xp.take(xp.reshape(block, (lead, k, trail)), source, axis=1)
            z = xp.where(kept, z, xp.zeros((), dtype=z.dtype, device=device(z=z)))
            for i, signs in reversed(list(enumerate(self.signs))):
                z = apply_kronecker(xp, factors, xp.reshape(z, (lead, size * trail)), trail)
                z = xp.reshape(z, (lead, size, trail))
                z = z if i else z[:, :d, :]
                z = z * xp.astype(signs, z.dtype, copy=False)[:, None]
            return xp.reshape(z, (lead, d * trail))

        return map_rows(xp, mix, rows, size * trail)


class CountSketch(NamedTuple):
    """A sparse map: each feature goes, with a random sign, to few of the components.

    Made by `count_sketch`.

    Attributes
    ----------
    signs : array (s, n_features) of ±1
    components : integer array (s, n_features)
        Where each feature goes.
    features : integer array (n_components, m)
        The same the other way round: which features each component sums, as indices into the
        flattened `signs`; one past its end where there are fewer than m.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import count_sketch
    >>> count_sketch(1000, 64, rng=0)(np.ones((5, 1000))).shape
    (5, 64)
    """

    signs: Array
    components: Array
    features: Array

    @property
    def n_features(self) -> int:
        """The dimension d that the map takes."""
        return self.signs.shape[1]

    @property
    def n_components(self) -> int:
        """The dimension k that the map gives."""
        return self.features.shape[0]

    def __call__(self, x: ArrayT, axis: int = -1) -> ArrayT:
        """Apply the map along an axis of n_features entries, which becomes one of n_components.

        The image has the dtype of `x`. A Dask array stays lazy.
        """
        return _along("x", x, axis, self, self.n_features, self.n_components, self._rows)

    def adjoint(self, y: ArrayT, axis: int = -1) -> ArrayT:
        """Apply the transposed matrix along an axis: ⟨f(x), y⟩ = ⟨x, f.adjoint(y)⟩."""
        return _along("y", y, axis, self, self.n_components, self.n_features, self._adjoint_rows)

    def matrix(self) -> Array:
        """The matrix (n_components, n_features) of the map."""
        xp = namespace(signs=self.signs)
        place = device(signs=self.signs)
        return self.adjoint(xp.eye(self.n_components, dtype=self.signs.dtype, device=place))

    def _rows(self, xp: ModuleType, rows: Array, trail: int) -> Array:
        (s, d), (k, m) = self.signs.shape, self.features.shape
        signs = xp.astype(self.signs, rows.dtype, copy=False) * s**-0.5
        sources = xp.reshape(self.features, (k * m,))

        def sketch(block: Array) -> Array:
            lead = block.shape[0]
            z = xp.reshape(block, (lead, 1, d, trail)) * signs[:, :, None]
            z = _pad(xp, xp.reshape(z, (lead, s * d, trail)), s * d + 1)
            z = xp.reshape(xp.take(z, sources, axis=1), (lead, k, m, trail))
            return xp.reshape(xp.sum(z, axis=2), (lead, k * trail))

        return map_rows(xp, sketch, rows, s * d * trail)

    def _adjoint_rows(self, xp: ModuleType, rows: Array, trail: int) -> Array:
        (s, d), k = self.signs.shape, self.n_components
        signs = xp.astype(self.signs, rows.dtype, copy=False) * s**-0.5
        sources = xp.reshape(self.components, (s * d,))

        def spread(block: Array) -> Array:
            lead = block.shape[0]
            z = xp.take(xp.reshape(block, (lead, k, trail)), sources, axis=1)
            z = xp.reshape(z, (lead, s, d, trail)) * signs[:, :, None]
            return xp.reshape(xp.sum(z, axis=1), (lead, d * trail))

        return map_rows(xp, spread, rows, s * d * trail)


Projection = DenseProjection | HadamardProjection | CountSketch


def _along(
    name: str,
    x: Array,
    axis: int,
    projection: Projection,
    size: int,
    out: int,
    function: Callable[[ModuleType, Array, int], Array],
) -> Any:
    """A projection's `function` of rows, along an axis of `size` entries that becomes one of `out`."""
    lazy = is_dask(x)
    arrays = ("projection", tuple(_leaves(projection)))
    sample = x._meta if lazy else x  # type: ignore[attr-defined]
    xp = namespace(arrays, **{name: sample})
    device(arrays, **{name: sample})
    check_floating(xp, **{name: sample})
    check_axis(axis, x.ndim)
    axis = int(axis) % x.ndim
    if x.shape[axis] != size:
        raise value_error(name, f"have {size} entries along axis {axis}", tuple(x.shape))
    if lazy:
        return map_chunks(
            x, lambda part: _along(name, part, axis, projection, size, out, function), axis, out
        )

    lead, trail = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    rows = xp.astype(xp.reshape(x, (lead, size * trail)), accumulator(xp, x.dtype), copy=False)
    y = function(xp, rows, trail)
    y = xp.reshape(y, (*x.shape[:axis], out, *x.shape[axis + 1 :]))
    return xp.astype(y, x.dtype, copy=False)


def _leaves(projection: Any) -> Iterator[Array]:
    for part in projection:
        if isinstance(part, tuple):
            yield from part
        else:
            yield part


def _pad(xp: ModuleType, z: Array, size: int) -> Array:
    """Zeros after the second axis of three, up to `size`."""
    lead, have, trail = z.shape
    if have == size:
        return z
    zeros = xp.zeros((lead, size - have, trail), dtype=z.dtype, device=device(z=z))
    return xp.concat((z, zeros), axis=1)
