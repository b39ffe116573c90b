"""Recall in a causal model: the task, a model for it, and the factors that hold its mean entropies.

The task is associative recall with a question at each token. A token holds a new key, its value, and
the key that is asked for, which is one of those so far. The answer is the value of that key. The keys
of a sequence are different words of 12 bits, and there are 8 values. So a query at the n-th token sees
n keys, exactly one of which has the answer.

The model is a Transformer with two layers of two heads. It has no positions: only the causal mask gives
an order. Pair and question are one token, so no head has to find the previous token. One layer would
do. It is narrow (8 numbers for each head), because a wider one makes hardly any error at the tested
lengths, and then nothing can help. Models are trained with sequences of n0 tokens, so a pass has all
lengths from 1 to n0. All arms of a seed and n0 start with the same weights, and see the same sequences
in training. The query knows the word that is asked for, so a function of it may be more than a
temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import experiment
import torch
from torch import Tensor, nn
from trained_laws import modules
from transformer import Attend, Encoder

import isentropic as it
from isentropic import laws

BITS, VALUES = 12, 8
WIDTH, LAYERS, HEADS = 16, 2, 2
TOKENS, RATE = 1024, 2e-2  # tokens of all sequences in a step of training
MULTIPLES = (1, 2, 4, 8, 16)  # of n0: the lengths at which mean entropies are held
FACTORS = (0.1, 100.0)  # the range of the search for the factors that hold them
ROWS = 8  # queries of each sequence with which a factor is fitted, of which the last one sees n keys


# ----------------------------------------------------------------------------------------- task


class Sample(NamedTuple):
    """Sequences of n tokens (count, n, 2 · BITS + VALUES), and the answers (count, n)."""

    tokens: Tensor
    answer: Tensor


def draw(count: int, n: int, generator: torch.Generator) -> Sample:
    word = torch.rand(count, 2**BITS, generator=generator).topk(n).indices  # all different
    key = 2.0 * (word[..., None] >> torch.arange(BITS) & 1) - 1
    value = torch.randint(VALUES, (count, n), generator=generator)
    # The key that a token asks for is one of the earlier keys or its own.
    asked = (torch.rand(count, n, generator=generator) * torch.arange(1, n + 1)).long()
    question = key.gather(1, asked[..., None].expand_as(key))
    tokens = torch.cat((key, nn.functional.one_hot(value, VALUES), question), dim=-1)
    return Sample(tokens, value.gather(1, asked))


def longest(trained: int) -> int:
    return MULTIPLES[-1] * trained


def band(n: int) -> slice:
    """The tokens whose accuracy is that of n: they see from 3n/4 to n keys."""
    return slice(3 * n // 4, n)


# ---------------------------------------------------------------------------------------- model

# The law of a layer for its queries and keys
Rule = Callable[[int, Tensor, Tensor], laws.Law | None]


class Reader(nn.Module):
    """A causal model without positions, and a law for each layer."""

    def __init__(self, arm: str, trained: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(2 * BITS + VALUES, WIDTH)
        self.encoder = Encoder(WIDTH, LAYERS, HEADS)
        self.answer = nn.Linear(WIDTH, VALUES)
        # They come last, so that the other weights of all arms start alike.
        law = modules(trained, WIDTH, HEADS)[arm]
        self.laws = nn.ModuleList(law() for _ in range(LAYERS))

    def rule(self, layer: int, query: Tensor, key: Tensor) -> laws.Law | None:
        """The law of the arm. A law of the query knows the queries of all heads of the layer."""
        return self.laws[layer](query.transpose(1, 2).flatten(-2)[:, None], query, key)

    def run(self, sample: Sample, attend: Attend) -> Tensor:
        """The logits of the values (count, n, VALUES)."""
        return self.answer(self.encoder(self.tokens(sample.tokens), attend))

    def forward(self, sample: Sample) -> Tensor:
        return self.run(sample, attend_with(self.rule))


def attend_with(rule: Rule) -> Attend:
    return lambda i, q, k, v: it.attention(q, k, v, is_causal=True, law=rule(i, q, k))


def train(arm: str, trained: int, seed: int, steps: int) -> Reader:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(10**4 * trained + seed)
    model = Reader(arm, trained)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(steps):
        sample = draw(TOKENS // trained, trained, generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(sample).flatten(0, 1), sample.answer.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        experiment.advance()
    return model


# ------------------------------------------------------------------------------ held entropies


def table_rule(factors: list[Tensor]) -> Rule:
    """Factors of each layer that are given for each head and n: (heads, n)."""
    return lambda layer, query, key: laws.Constant(laws.per_query(factors[layer]))


@torch.no_grad()
def held_mean(model: Reader, trained: int, sample: Sample) -> list[Tensor]:
    """For each layer: the factors of heads and n with which the mean entropy is that at n0."""
    lengths = [multiple * trained for multiple in MULTIPLES]
    held: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        target = mean_entropy(q, k, trained)
        knots = [factor_of_mean(partial(mean_entropy, q, k, n), target) for n in lengths]
        held.append(interpolated(torch.stack(knots, dim=-1), lengths))
        return attend_with(table_rule(held))(layer, q, k, v)

    model.run(sample, attend)
    return held


def mean_entropy(q: Tensor, k: Tensor, n: int, factor: Tensor | float = 1.0) -> Tensor:
    """The mean entropy of each head for queries that see n keys or a few less."""
    law = laws.Constant(factor)
    rows = slice(n - ROWS, n)
    entropy = it.attention_entropy(q[..., rows, :], k[..., :n, :], is_causal=True, law=law)
    return entropy.mean((0, -1))


def factor_of_mean(entropy: Callable[..., Tensor], target: Tensor) -> Tensor:
    """The factor of each head at which its mean entropy is `target`, by bisection of its logarithm."""
    low, high = (torch.full_like(target, math.log(x)) for x in FACTORS)
    for _ in range(14):  # to 0.04 %
        middle = (low + high) / 2
        is_low = entropy(factor=middle.exp()) > target
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return ((low + high) / 2).exp()


def interpolated(knots: Tensor, lengths: list[int]) -> Tensor:
    """Factors (heads, longest n) that are 1 up to n0, through those at `lengths` (heads, ·)."""
    at = torch.tensor(lengths).log()
    x = torch.arange(1, lengths[-1] + 1).log().clamp(min=at[0])
    i = (torch.searchsorted(at, x) - 1).clamp(0, len(lengths) - 2)
    part = (x - at[i]) / (at[i + 1] - at[i])
    logs = knots.log()
    logs[:, 0] = 0
    return (logs[:, i] + part * (logs[:, i + 1] - logs[:, i])).exp()
