"""Max Retrieval, the task of Veličković et al. (2024, arXiv 2410.01104), and a model for it.

The input is a set of items. Each has a priority and one of 10 classes. The answer is the class of the
item with the highest priority. There are no positions. One head of attention, whose query is made from
a random number, reads the set. Models are trained with 5 to 16 items.

All arms of a seed start with the same weights, and see the same sets in training. The query contains
nothing of the items, so a function of it is a learned temperature with more numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import experiment
import torch
from torch import Tensor, nn
from trained_laws import modules

import isentropic as it
from isentropic import laws

SHORTEST, LONGEST = 5, 16  # numbers of items in training
WIDTH, CLASSES = 32, 10
BATCH, RATE = 128, 3e-3


class Sample(NamedTuple):
    """Sets of n items: priorities and classes (count, n), answers (count,), and numbers (count, 1)."""

    priority: Tensor
    kind: Tensor
    answer: Tensor
    number: Tensor


def draw(count: int, n: int, generator: torch.Generator) -> Sample:
    priority = torch.rand(count, n, generator=generator)
    kind = torch.randint(CLASSES, (count, n), generator=generator)
    answer = kind.gather(1, priority.argmax(dim=1, keepdim=True))[:, 0]
    return Sample(priority, kind, answer, torch.rand(count, 1, generator=generator))


class Heads(NamedTuple):
    """What attention reads: (count, 1, 1 or n, WIDTH). `hidden` is what the query is made from."""

    hidden: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


class Retriever(nn.Module):
    """A model that reads a set with one head of attention."""

    def __init__(self, arm: str) -> None:
        super().__init__()
        self.items = perceptron(1 + CLASSES)
        self.number = perceptron(1)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.answer = nn.Sequential(perceptron(WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
        # It comes last, so that the other weights of all arms start alike.
        self.law = modules(LONGEST, WIDTH)[arm]()

    def heads(self, sample: Sample) -> Heads:
        one_hot = nn.functional.one_hot(sample.kind, CLASSES)
        items = self.items(torch.cat((sample.priority[..., None], one_hot), dim=-1))
        key, value = self.key_value(items)[:, None].chunk(2, dim=-1)
        hidden = self.number(sample.number)[:, None, None]
        return Heads(hidden, self.query(hidden), key, value)

    def rule(self, heads: Heads) -> laws.Law | None:
        return self.law(heads.hidden, heads.query, heads.key)

    def forward(self, sample: Sample) -> Tensor:
        """The logits of the classes (count, CLASSES), with the law of the arm."""
        heads = self.heads(sample)
        return self.logits(heads, self.rule(heads))

    def logits(self, heads: Heads, law: laws.Law | None) -> Tensor:
        return self.answer(it.attention(heads.query, heads.key, heads.value, law=law)[:, 0, 0])


def perceptron(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def train(arm: str, seed: int, steps: int) -> Retriever:
    return trained(lambda: Retriever(arm), draw, seed, steps)


def trained(new: Callable[[], Any], draw: Callable[..., Any], seed: int, steps: int) -> Any:
    """A new model, trained on sets that `draw` draws."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = new()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        n = torch.randint(SHORTEST, LONGEST + 1, (), generator=generator)
        sample = draw(BATCH, int(n), generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(sample), sample.answer).backward()
        optimizer.step()
        schedule.step()
        experiment.advance()
    return model
