"""Tables of operations: how an array library computes a tile."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from isentropic._loops import largest
from isentropic._numerics import grouped_matmul


class Ops:
    """The operations of a tile in the array API standard, with derivatives.

    An operation may overwrite its first argument. Those of the standard do not. A table in which they
    do saves memory traffic, in a pass that no library differentiates. So the program of a tile uses no
    array again that was a first argument.

    Logits and weights have the shape (..., L, S), and what belongs to a query (..., L, 1).
    """

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp

    def products(self, query: Any, key: Any) -> Any:
        """The inner products of queries and keys, whose heads may be grouped."""
        return grouped_matmul(self.xp, query, self.xp.matrix_transpose(key))

    def add(self, s: Any, x: Any) -> Any:
        return s + x

    def multiply(self, s: Any, x: Any) -> Any:
        return s * x

    def cap(self, s: Any, softcap: float) -> tuple[Any, Any]:
        """``softcap · tanh(s)``, and the tanh."""
        tanh = self.xp.tanh(s)
        return tanh * softcap, tanh

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
        """``x = s − m`` and ``eˣ``, for a reference that may be −∞. `order` is that of the moment."""
        # Hidden keys need no guard: x is −∞, its derivative is finite, and e^{−∞} is 0.
        x = s - self.xp.maximum(m, self.xp.finfo(s.dtype).min)
        return x, self.xp.exp(x)

    def weighted(self, p: Any, value: Any) -> Any:
        """``Σ p v`` over the keys."""
        return grouped_matmul(self.xp, p, value)

    def add_weighted(self, total: Any, p: Any, value: Any) -> Any:
        return total + self.weighted(p, value)
