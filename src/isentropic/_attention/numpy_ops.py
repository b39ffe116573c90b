"""The table of operations of NumPy's pass, in place, without slow passes over subnormal numbers."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import numpy as np

from isentropic._attention.schedule import Hidden
from isentropic._loops import BLOCKS
from isentropic._ops import LOWEST_SCORE, InPlaceOps

# If the first tile, or a bias, has exponents below −20 nats, others may be so low that eˣ underflows.
_WIDE_EXPONENT = 20.0
# Calls with fewer logits do not look for low exponents. The search takes longer than slow products.
_MIN_CHECKED = 2**13


class TileOps(InPlaceOps):
    """The table of one block of rows, whose tiles have two axes. It holds memory for them.

    Logits relative to a constant have no maximum to subtract, and their exponents are in units in which
    the power is faster to compute. Their keys are hidden after the exponential: −∞ would be slower.
    """

    def __init__(self, *, is_moving: bool, are_wide: bool | None, has_peaks: bool) -> None:
        super().__init__(np)
        self.is_moving = is_moving  # whether sums are relative to the largest logit so far
        # The power of exponents, and the unit of these in nats.
        is_binary = not is_moving and has_fast_exponential()
        self.power_of: Any = np.exp2 if is_binary else np.exp
        self.unit = math.log(2) if is_binary else 1.0
        self.are_wide = are_wide  # whether exponents are far apart; None before the first tile
        self.peaks: Any = None  # the largest weight of each row of the last tile
        self._has_peaks, self._hidden = has_peaks, cast(Hidden, ())
        self._memory: dict[str, Any] = {}

    def _view(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array in the memory of this name, which the next tile overwrites."""
        size, memory = math.prod(shape), self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, dtype)
        return memory[:size].reshape(shape)

    def products(self, query: Any, key: Any) -> Any:
        self._hidden = ()
        shape = (query.shape[0], key.shape[0])
        return np.matmul(query, key.T, out=self._view("logits", shape, query.dtype))

    def hide(self, s: Any, visible: Hidden) -> Any:
        if self.is_moving:
            return hide(s, visible)
        self._hidden = visible
        return s

    def row_max(self, s: Any) -> Any:
        if self._hidden:
            # Of a copy, since this table hides keys only after the exponential.
            s = hide(s.copy(), self._hidden)
        # `argmax` takes half the time of `max`, and finds NaN too.
        return s[np.arange(s.shape[0]), np.argmax(s, axis=-1), None]

    def row_sum(self, p: Any) -> Any:
        ones = self._memory.get("ones")
        if ones is None or ones.size < p.shape[-1]:
            ones = self._memory["ones"] = np.ones(p.shape[-1], p.dtype)
        return (p @ ones[: p.shape[-1]])[:, None]  # half the time of `np.sum`

    def row_dot(self, p: Any, x: Any) -> Any:
        return np.vecdot(p, x)[:, None]

    def exp(self, s: Any, m: Any, order: float | None) -> tuple[Any, Any]:
        if m is not None:
            info = np.finfo(s.dtype)
            # The keys of a row that has seen none yet are hidden. Their weight is 0 in any case.
            m = np.maximum(m, info.min) if self.is_moving else np.where(m == -math.inf, info.max, m)
            np.subtract(s, m, out=s)
        if self.are_wide is None:
            self.are_wide = are_wide(s, self.unit)
        p = s if order is None else self._view("weights", s.shape, s.dtype)
        if self.are_wide:
            # With raised exponents the products of order 1 are 0 where the weight is.
            large_weights(s, self.power_of, s if order == 1 else p, p)
        else:
            self.power_of(s, out=p)
        if order == 1 and self.is_moving:
            np.maximum(s, LOWEST_SCORE, out=s)
        for part, visible in self._hidden:
            np.multiply(p[part], visible, out=p[part])
        if self._has_peaks:
            self.peaks = maxima_of_weights(p)
        return s, p

    def add_weighted(self, total: Any, p: Any, value: Any) -> Any:
        return np.add(
            total, np.matmul(p, value, out=self._view("values", total.shape, p.dtype)), out=total
        )


class WholeOps(InPlaceOps):
    """The table for all logits of a small call at once, (..., L, S)."""

    def __init__(self) -> None:
        super().__init__(np)

    def products(self, query: Any, key: Any) -> Any:
        if query.shape[:-2] == key.shape[:-2]:
            return query @ key.swapaxes(-1, -2)
        return super().products(query, key)

    def hide(self, s: Any, visible: Any) -> Any:
        if visible.shape != s.shape[-2:]:
            return super().hide(s, visible)
        np.copyto(s, -math.inf, where=~visible)
        return s

    def row_max(self, s: Any) -> Any:
        return np.maximum.reduce(s, axis=-1, keepdims=True)

    def row_sum(self, p: Any) -> Any:
        return np.add.reduce(p, axis=-1, keepdims=True)

    def row_dot(self, p: Any, x: Any) -> Any:
        # `vecdot` adds one by one, which is too inexact for long rows. `reduce` adds pairs of sums.
        if p.shape[-1] > BLOCKS.numpy_columns:
            return np.add.reduce(p * x, axis=-1, keepdims=True)
        return np.vecdot(p, x)[..., None]

    def exp(self, s: Any, m: Any, order: float | None) -> tuple[Any, Any]:
        if m is not None:
            np.subtract(s, np.maximum(m, np.finfo(s.dtype).min), out=s)
        if order == 1:
            np.maximum(s, LOWEST_SCORE, out=s)
        out = s if order is None else None
        if s.size >= _MIN_CHECKED and are_wide(s):
            return s, large_weights(s, np.exp, s if order in (None, 1) else None, out)
        return s, np.exp(s, out=out)

    def weighted(self, p: Any, value: Any) -> Any:
        """``p @ value``; over many keys it is a sum of sums over blocks of keys.

        The BLAS adds the products one by one. In a single sum of 200 000 equal products in float32 the
        rounding errors are 1e-3.
        """
        *axes, n_keys = p.shape
        size = BLOCKS.numpy_columns
        n_blocks = n_keys // size
        if n_blocks < 2:
            return p @ value if p.shape[:-2] == value.shape[:-2] else super().weighted(p, value)
        end, ndim = n_blocks * size, p.ndim
        # The axis of the blocks comes first, before those of the batch.
        w = p[..., :end].reshape(*axes, n_blocks, size).transpose(ndim - 1, *range(ndim - 1), ndim)
        v = value[..., :end, :].reshape(*value.shape[:-2], n_blocks, size, value.shape[-1])
        v = v.transpose(ndim - 2, *range(ndim - 2), ndim - 1, ndim)
        total = np.add.reduce(super().weighted(w, v), axis=0)
        if end < n_keys:
            total += super().weighted(p[..., end:], value[..., end:, :])
        return total


@functools.cache
def has_fast_exponential() -> bool:
    """Whether NumPy has SIMD code for 2ˣ, which is faster than that for eˣ. It has with AVX-512."""
    from numpy.lib.introspect import opt_func_info

    targets = opt_func_info("^exp2$").get("exp2", {}).get("ff", {"current": "baseline"})
    return "baseline" not in targets["current"]


def are_wide(x: Any, unit: float = 1.0) -> bool:
    """Whether some exponents are so low that others may have weights too small to be normal numbers."""
    return bool(np.minimum.reduce(x, axis=None, initial=0.0) < -_WIDE_EXPONENT / unit)


def large_weights(x: Any, exp: Any, memory: Any = None, out: Any = None) -> Any:
    """``eˣ`` minus a number, 1e-31 in float32, and 0 where ``eˣ`` is below that.

    Products with subnormal numbers (below 1e-38) take 100 times as long on some processors, and so does
    `exp` where it returns them. The raised exponents are written into `memory`, if given.
    """
    exponent, least = _least_weight(exp, x.dtype)
    weight = exp(np.maximum(x, exponent, out=memory), out=out)
    return np.subtract(weight, least, out=weight)


@functools.cache
def _least_weight(exp: Any, dtype: Any) -> tuple[Any, Any]:
    """An exponent and its weight, whose differences with larger weights are normal numbers."""
    info, log = np.finfo(dtype), np.log if exp is np.exp else np.log2
    exponent = np.ceil(log(info.tiny / info.eps)).astype(dtype)
    return exponent, exp(np.full(1, exponent))[0]


def hide(s: Any, hidden: Hidden, lowest: float = -math.inf) -> Any:
    """Set logits to the lowest one where keys are hidden, and return them."""
    # `fmin` of a number and NaN is the number. For irregular masks `copyto` takes four times as long.
    ceilings = np.asarray([lowest, math.nan], s.dtype)
    for part, visible in hidden:
        np.fmin(s[part], np.take(ceilings, visible.view(np.uint8), mode="clip"), out=s[part])
    return s


def maxima_of_weights(p: Any) -> Any:
    """The row maxima, as a column, of numbers that are at least 0 and not NaN."""
    # Such numbers have the order of their bits. In the pass, `max` of 32-bit integers takes a third
    # less time than `argmax`.
    bits = p.view(f"i{p.itemsize}")
    return np.maximum.reduce(bits, axis=-1, keepdims=True).view(p.dtype)
