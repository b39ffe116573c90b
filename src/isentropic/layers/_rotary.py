"""Rotary position embedding."""

from __future__ import annotations

import math

from isentropic._checks import (
    check_broadcastable,
    check_flag,
    check_floating,
    check_ndim,
    check_numeric,
    check_real,
    value_error,
)
from isentropic._namespace import Array, ArrayT, accumulator, common_device, namespace, present
from isentropic._numerics import align, quietly


@quietly
def rotary(
    x: ArrayT, positions: Array | None = None, *, base: float = 10000.0, interleaved: bool = False
) -> ArrayT:
    """Rotate pairs of features by an angle that grows with the position.

    After rotation, the product of a query at position i and a key at position j depends on the
    positions only through i − j.

    Parameters
    ----------
    x : array (..., L, E)
        Queries or keys. E must be even.
    positions : array broadcastable to (..., L), optional
        Integers or floats; 0, …, L − 1 by default.
    base : float > 1
        The slowest pair turns about 1/base radian per position.
    interleaved : bool
        The features that form pair i, of E/2 pairs. False: features i and i + E/2 (Llama, GPT-NeoX).
        True: features 2i and 2i + 1 (RoFormer, GPT-J).

    Returns
    -------
    array (..., L, E)
        The rotated vectors, in the dtype of `x`. They are computed in float32 or better.

    Raises
    ------
    TypeError
        If `x` is not a floating-point array, or if `positions` belongs to another library.
    ValueError
        If E is odd, if `positions` does not broadcast, or if `base` is not above 1.

    Notes
    -----
    At position m, pair i is rotated by the angle ``m · base^(−2i/E)`` in radians. In float32, an angle
    near m has a rounding error of about 6e-8 · m radians.

    References
    ----------
    Su et al. 2021, arXiv 2104.09864.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.layers import rotary
    >>> bool(np.allclose(rotary(np.ones((3, 2)))[:, 0], np.sqrt(2) * np.cos(np.arange(3) + np.pi / 4)))
    True
    """
    arrays = {"x": x} | present(positions=positions)
    xp = namespace(**arrays)
    device = common_device(**arrays)
    check_floating(xp, x=x)
    check_ndim(2, x=x)
    check_real("base", base, above=1)
    check_flag(interleaved=interleaved)
    length, size = x.shape[-2:]
    if size % 2:
        raise value_error("x", "have an even last dimension", size)
    if positions is not None:
        check_numeric(xp, positions=positions)
        check_broadcastable("positions", positions.shape, x.shape[:-1])

    # Half precision does not have all integers above 2048, so positions would coincide.
    dtype = accumulator(xp, x.dtype)
    half = size // 2
    pair = xp.arange(half, dtype=dtype, device=device)
    frequency = xp.exp(pair * (-2.0 * math.log(base) / max(size, 1)))
    if positions is None:
        positions = xp.arange(length, dtype=dtype, device=device)
    # Positions and frequencies get the axes of `x`, which JAX may be set to require.
    _, frequency, positions = align(x, frequency, xp.astype(positions, dtype)[..., None])
    angle = positions * frequency
    cos, sin = xp.cos(angle), xp.sin(angle)

    y = xp.astype(x, dtype)
    if interleaved:
        first, second = y[..., 0::2], y[..., 1::2]
        turned = xp.stack((first * cos - second * sin, second * cos + first * sin), axis=-1)
        return xp.astype(xp.reshape(turned, x.shape), x.dtype)
    first, second = y[..., :half], y[..., half:]
    turned = xp.concat((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return xp.astype(turned, x.dtype)
