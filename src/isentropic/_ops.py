"""Tables of operations: how an array library computes a tile."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from isentropic._loops import largest
from isentropic._namespace import is_cupy, is_jax, is_numpy
from isentropic._numerics import clip
from isentropic._products import grouped_matmul

# Scores are clipped here if they are multiplied. Their weight is 0, and the products do not overflow.
LOWEST_SCORE = -1e30


class Ops:
    """The operations of a tile in the array API standard, with derivatives.

    An operation may overwrite its first argument. Those of the standard do not. A table in which they
    do saves memory traffic, in a pass that no library differentiates. So the program of a tile uses no
    array again that was a first argument.

    Logits and weights have the shape (..., L, S), and what belongs to a query (..., L, 1).
    """

    def __init__(self, xp: ModuleType) -> None:
        self.xp, self.may_lose_nan = xp, is_jax(xp)

    def products(self, query: Any, key: Any) -> Any:
        """The inner products of queries and keys, whose heads may be grouped."""
        return grouped_matmul(self.xp, query, self.xp.matrix_transpose(key))

    def add_products(self, s: Any, query: Any, key: Any) -> Any:
        return s + self.products(query, key)

    def fill(self, s: Any, x: Any) -> Any:
        """`x` in the shape of `s`."""
        return self.xp.zeros_like(s) + x

    def add(self, s: Any, x: Any) -> Any:
        return s + x

    def multiply(self, s: Any, x: Any) -> Any:
        return s * x

    def cap(self, s: Any, softcap: float) -> tuple[Any, Any]:
        """``softcap · tanh(s)``, and the tanh."""
        tanh = self.xp.tanh(s)
        return tanh * softcap, tanh

    def cap_gradient(self, ds: Any, tanh: Any, softcap: float) -> Any:
        """`ds` times the derivative of `cap`, given its tanh."""
        return ds * ((1 - tanh * tanh) * softcap)

    def hide(self, s: Any, visible: Any) -> Any:
        """The logits, −∞ where a key is not visible, even where they are NaN."""
        return self.xp.where(visible, s, -math.inf)

    def row_max(self, s: Any) -> Any:
        return largest(self.xp, s)

    def row_sum(self, p: Any) -> Any:
        return self.xp.sum(p, axis=-1, keepdims=True)

    def row_dot(self, p: Any, x: Any) -> Any:
        return self.xp.sum(p * x, axis=-1, keepdims=True)

    def exp(self, s: Any, m: Any, order: float | None) -> tuple[Any, Any]:
        """``x = s − m`` and ``eˣ``, for a reference that may be −∞, or None for 0.

        `order` is that of the moment. If it is 1, x is finite, so that x eˣ is 0 for hidden keys.
        """
        # Hidden keys need no guard: x is −∞, its derivative is finite, and e^{−∞} is 0.
        # Not `maximum`: that of array_api_compat makes a tensor of the number, which fails in graphs.
        x = s if m is None else s - clip(self.xp, m, min=float(self.xp.finfo(s.dtype).min))
        return x if order != 1 else clip(self.xp, x, min=LOWEST_SCORE), self.xp.exp(x)

    def power(self, x: Any, order: float) -> Any:
        """``e^{order · x}``, for a positive order."""
        return self.xp.exp(x * order)

    def weighted(self, p: Any, value: Any) -> Any:
        """``Σ p v`` over the keys."""
        return grouped_matmul(self.xp, p, value)

    def add_weighted(self, total: Any, p: Any, value: Any) -> Any:
        return total + self.weighted(p, value)


class InPlaceOps(Ops):
    """The operations of NumPy and CuPy, in the memory of the logits."""

    def add(self, s: Any, x: Any) -> Any:
        return self.xp.add(s, x, out=s) if _fits(x, s) else s + x

    def multiply(self, s: Any, x: Any) -> Any:
        return self.xp.multiply(s, x, out=s) if _fits(x, s) else s * x

    def cap(self, s: Any, softcap: float) -> tuple[Any, Any]:
        # No derivative is taken here, so the tanh may be overwritten.
        return self.xp.multiply(self.xp.tanh(s, out=s), softcap, out=s), None

    def hide(self, s: Any, visible: Any) -> Any:
        if not _fits(visible, s):
            return super().hide(s, visible)
        self.xp.copyto(s, s.dtype.type(-math.inf), where=self.xp.logical_not(visible))
        return s

    def row_max(self, s: Any) -> Any:
        return self.xp.max(s, axis=-1, keepdims=True)

    def exp(self, s: Any, m: Any, order: float | None) -> tuple[Any, Any]:
        xp = self.xp
        if m is not None:
            m = xp.maximum(m, xp.finfo(s.dtype).min)
            s = xp.subtract(s, m, out=s) if _fits(m, s) else s - m
        if order == 1:
            xp.maximum(s, LOWEST_SCORE, out=s)
        # A moment needs the scores beside their exponentials.
        return s, xp.exp(s, out=s if order is None else None)

    def power(self, x: Any, order: float) -> Any:
        return self.xp.exp(self.xp.multiply(x, order, out=x), out=x)


def _fits(x: Any, s: Any) -> bool:
    """Whether `x` broadcasts to the shape of `s`."""
    shape, missing = s.shape, s.ndim - x.ndim
    if x.shape == shape:
        return True
    return missing >= 0 and all(
        n in (1, size) for n, size in zip(x.shape, shape[missing:], strict=True)
    )


def ops_of(xp: ModuleType) -> Ops:
    """The table of a library for logits that nothing else reads."""
    return InPlaceOps(xp) if is_numpy(xp) or is_cupy(xp) else Ops(xp)
