"""Laws that experiments train with a model, and the best constant of several at test time.

A module is called with what the query is made from, the query and the key, and returns the law of the
attention between that query and key. Most of them need none of the three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import isentropic as it
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


class Held(nn.Module):
    """The factor of each query at which its entropy is a learned part of log n, of at most log base.

    So the entropy is a constant from n = base on. Every head has a part of its own, from 0 to 1.
    """

    def __init__(self, base: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.base, self.is_causal = base, is_causal
        self.numbers = nn.ParameterDict({"logit": torch.zeros(heads)})

    def forward(self, hidden: Tensor, query: Tensor, key: Tensor) -> laws.Law:
        n = key.shape[-2]
        seen = torch.arange(1, n + 1) if self.is_causal else torch.tensor([n])
        target = self.numbers["logit"].sigmoid()[:, None] * seen.clamp(max=self.base).log()
        return held(query, key, target, self.is_causal)


def held(query: Tensor, key: Tensor, target: Tensor | float, is_causal: bool) -> laws.Law:
    """The law whose factor for each query gives it the entropy `target`."""
    factor = it.AttentionDistribution(query, key, is_causal=is_causal, law=None).factor_for_entropy(
        target
    )
    return laws.Constant(laws.per_query(factor))


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


def modules(
    base: int, width: int, heads: int = 1, *, is_causal: bool = False
) -> dict[str, Callable[[], nn.Module]]:
    """A new law of each arm, for queries of all heads that are made from `width` numbers.

    The laws of the length start with the factor 1 at `base`, and with the slope of log there (query:
    nearly). The two controls start with the factor 1, and "held" with half of the greatest entropy.
    """
    slope = 1 / math.log(base)
    return {
        "O": lambda: Fixed(None),
        "constant": lambda: Learned(laws.Constant, heads, value=1.0),
        "log": lambda: Fixed(laws.LogLength(base)),
        "slope": lambda: Learned(laws.AffineLog, heads, slope=slope),
        "affine": lambda: Learned(laws.AffineLog, heads, slope=slope, intercept=0.0),
        "power": lambda: Learned(partial(laws.Power, base=base), heads, exponent=slope),
        "query alone": lambda: OfQuery(of_query_alone, width, heads, inverse_softplus(1)),
        # It starts with δ = 0, γ = 1.
        "query": lambda: OfQuery(
            of_query_and_length, width, heads,
            inverse_softplus(1 / math.log(base + 1)), math.atanh(0.5), offset=0.0,
        ),
        "held": lambda: Held(base, heads, is_causal),
    }  # fmt: skip


def constant_name(x: float) -> str:
    return f"O + constant {x:.3g}"


def with_best_constant(arms: dict[str, dict], constants: Sequence[float]) -> dict[str, dict]:
    """The results with those of the best constant at each length in place of those of all constants."""
    others = dict(arms)
    found = [others.pop(constant_name(x)) for x in constants]
    accuracies = list(zip(*(one["accuracy"] for one in found), strict=True))
    best = [column.index(max(column)) for column in accuracies]
    others["O + best constant"] = {
        what: [found[i][what][at] for at, i in enumerate(best)] for what in found[0]
    }
    return others
