"""Laws that experiments train with a model.

A module is called with what the query is made from, the query and the key, and returns the law of the
attention between that query and key. Most of them need none of the three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from isentropic import laws


class Learned(nn.Module):
    """A law with learned numbers, one of each kind for each head."""

    def __init__(self, form: Callable[..., laws.Law], heads: int, **start: float) -> None:
        super().__init__()
        self.form = form
        self.numbers = nn.ParameterDict({name: torch.full((heads,), x) for name, x in start.items()})

    def forward(self, hidden: Tensor, query: Tensor, key: Tensor) -> laws.Law:
        return self.form(**self.numbers)


class Fixed(nn.Module):
    """A law without learned numbers, or none."""

    def __init__(self, law: laws.Law | None) -> None:
        super().__init__()
        self.law = law

    def forward(self, hidden: Tensor, query: Tensor, key: Tensor) -> laws.Law | None:
        return self.law


class OfQuery(nn.Module):
    """A law with numbers that are maps of what the query is made from, and others that are learned.

    What the queries of all heads are made from is `hidden` (count, 1, L, width).
    """

    def __init__(
        self, form: Callable[..., laws.Law], width: int, heads: int, *start: float, **others: float
    ) -> None:
        super().__init__()
        self.form, self.shape = form, (len(start), heads)
        self.maps = nn.Linear(width, len(start) * heads)
        nn.init.zeros_(self.maps.weight)
        self.maps.bias.data.copy_(torch.tensor(start).repeat_interleave(heads))
        self.numbers = nn.ParameterDict({name: torch.full((heads,), x) for name, x in others.items()})

    def forward(self, hidden: Tensor, query: Tensor, key: Tensor) -> laws.Law:
        by_head = (
            self.maps(hidden).unflatten(-1, self.shape).transpose(-4, -1)
        )  # (count, heads, L, ·, 1)
        return self.form(*by_head.squeeze(-1).unbind(-1), **self.numbers)


def of_query_alone(h: Tensor) -> laws.Law:
    return laws.Constant(laws.per_query(nn.functional.softplus(h)))


def of_query_and_length(h1: Tensor, h2: Tensor, offset: Tensor) -> laws.Law:
    coefficient, exponent = nn.functional.softplus(h1), 2 * h2.tanh()
    law = laws.PowerLog(offset, laws.per_query(coefficient), laws.per_query(exponent))
    return laws.shifted(law, 1)


def inverse_softplus(x: float) -> float:
    return math.log(math.expm1(x))


def modules(base: int, width: int, heads: int = 1) -> dict[str, Callable[[], nn.Module]]:
    """A new law of each arm, for queries of all heads that are made from `width` numbers.

    The laws of the length start with the factor 1 at `base`, and with the slope of log there (query:
    nearly). The two controls start with the factor 1.
    """
    slope = 1 / math.log(base)
    return {
        "O": lambda: Fixed(None),
        "constant": lambda: Learned(laws.Constant, heads, value=1.0),
        "log": lambda: Fixed(laws.LogLength(base)),
        "slope": lambda: Learned(laws.AffineLog, heads, slope=slope),
        "power": lambda: Learned(partial(laws.Power, base=base), heads, exponent=slope),
        "query alone": lambda: OfQuery(of_query_alone, width, heads, inverse_softplus(1)),
        # It starts with δ = 0, γ = 1.
        "query": lambda: OfQuery(
            of_query_and_length, width, heads,
            inverse_softplus(1 / math.log(base + 1)), math.atanh(0.5), offset=0.0,
        ),
    }  # fmt: skip
