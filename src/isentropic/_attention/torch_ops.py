"""The operations of a tile in PyTorch, in place."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from isentropic._ops import Ops

_LOG2_E = 1 / math.log(2)


class TorchOps(Ops):
    """The operations in place, for contiguous logits in memory that the next tile overwrites.

    Query heads with the same keys and values are a group. Keys and values have the axes
    (groups, S, width).
    """

    def __init__(self, xp: ModuleType, size: int, *, are_ordinary: bool) -> None:
        super().__init__(xp)
        # Memory for arrays of the size of a tile. The system clears the pages of new arrays, which is
        # slow.
        self._size, self._arrays = size, dict[str, Any]()
        # Whether weights of 10^−37 make no difference.
        self._are_ordinary = are_ordinary
        self._hides = False  # whether the tile hides keys

    def _memory(self, name: str, like: Any, shape: Any) -> Any:
        if name not in self._arrays:
            self._arrays[name] = like.new_empty(self._size)
        return self._arrays[name][: math.prod(shape)].view(shape)

    def products(self, query: Any, key: Any) -> Any:
        self._hides = False
        s = self._memory("logits", query, (*query.shape[:-1], key.shape[-2]))
        self.xp.bmm(_grouped(query, key), key.mT, out=_grouped(s, key))
        return s

    def add_products(self, s: Any, query: Any, key: Any) -> Any:
        _grouped(s, key).baddbmm_(_grouped(query, key), key.mT)
        return s

    def fill(self, s: Any, x: Any) -> Any:
        return s.copy_(x)

    def add(self, s: Any, x: Any) -> Any:
        return s.add_(x)

    def multiply(self, s: Any, x: Any) -> Any:
        return s.mul_(x)

    def cap(self, s: Any, softcap: float) -> tuple[Any, Any]:
        tanh = self.xp.tanh(s, out=self._memory("tanh", s, s.shape))
        return self.xp.mul(tanh, softcap, out=s), tanh

    def cap_gradient(self, ds: Any, tanh: Any, softcap: float) -> Any:
        self.xp.ops.aten.tanh_backward.grad_input(ds, tanh, grad_input=ds)
        return ds.mul_(softcap)

    def hide(self, s: Any, visible: Any) -> Any:
        # PyTorch vectorizes operations on bits, but not `masked_fill_`, which takes up to 20 times as
        # long.
        self._hides = True
        # As an integer, −∞ has all bits from the exponent upwards: it is −2²³ in float32.
        bits, minus_infinity = _bits(s), -(2**52) if s.element_size() == 8 else -(2**23)
        hidden = (~visible).to(bits.dtype)
        # Minus 1, a visible key has all bits, and a hidden one has none.
        bits.bitwise_and_(hidden - 1).bitwise_or_(hidden * minus_infinity)
        return s

    def row_max(self, s: Any) -> Any:
        return s.amax(-1, keepdim=True)

    def row_sum(self, p: Any) -> Any:
        return p.sum(-1, keepdim=True)

    def row_dot(self, p: Any, x: Any) -> Any:
        # The moment is the last that a forward pass needs of the logits. So their memory is free.
        return self.xp.mul(p, x, out=self._memory("logits", p, p.shape)).sum(-1, keepdim=True)

    def exp(self, s: Any, m: Any, order: float | None) -> tuple[Any, Any]:
        """As in the standard, but exponents above 0 become 0, and very low ones may be raised.

        There are some above 0 if another pass has computed the maximum, with other rounding errors.
        Those that are raised make no difference, except to rows whose logits are all −∞.
        """
        info = self.xp.finfo(s.dtype)
        x = s if m is None else s.sub_(m.clamp(info.min))
        p = self._memory("weights", s, s.shape)
        # Raised exponents would change the weight of hidden keys, which is 0. They would also change
        # moments of orders below 1, which contain small powers of the weights.
        if self._are_ordinary and not self._hides and (order is None or order >= 1):
            # A number from which on `exp` does not underflow, with a weight below 10^−37 in float32.
            # The other branch takes longer.
            lowest = math.log(2 * info.tiny)
            return x, self.xp.exp(x.clamp_(lowest, 0.0), out=p)
        # An exponent so low that it adds nothing to the sums or to the moment of order 1. Products with
        # exponents that are clipped there do not overflow.
        lowest = math.log(info.tiny * info.eps) - 1
        x.clamp_(lowest if order == 1 else None, 0.0)
        # Where it underflows, PyTorch's `exp` takes up to 70 times as long, and `exp2` up to 8.
        p = self.xp.mul(x, _LOG2_E, out=p).exp2_()
        # Some processors take 100 times as long for products with numbers that are not normal.
        return x, self.xp.nn.functional.threshold_(p, info.tiny / info.eps, 0.0)

    def power(self, x: Any, order: float) -> Any:
        return x.mul_(order).exp_()

    def weighted(self, p: Any, value: Any) -> Any:
        out = self.xp.bmm(_grouped(p, value), value)
        return out.view(*p.shape[:-1], value.shape[-1])

    def add_weighted(self, total: Any, p: Any, value: Any) -> Any:
        _grouped(total, value).baddbmm_(_grouped(p, value), value)
        return total

    def add_weighted_rows(self, total: Any, p: Any, x: Any) -> None:
        """Add ``Σ p x`` over the queries of each group to a total (groups, S, width)."""
        total.baddbmm_(_grouped(p, total).mT, _grouped(x, total))

    def zero_hidden(self, x: Any, visible: Any) -> None:
        """Set a contiguous array to 0 in place where a key is not visible, even where it is NaN."""
        bits = _bits(x)
        bits.bitwise_and_(-visible.to(bits.dtype))


def _grouped(x: Any, keys: Any) -> Any:
    """`x` (..., rows, width) as (groups, heads of a group · rows, width), for the groups of `keys`."""
    groups = keys.shape[0]
    return x.reshape(groups, math.prod(x.shape[:-1]) // groups, x.shape[-1])


def _bits(x: Any) -> Any:
    """Contiguous floats as integers with the same bits, in the same memory."""
    import torch

    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
