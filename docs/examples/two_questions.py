"""A task that no single constant can win: the largest of a set, or the average over a part of it.

Each item of a set has a priority, one of 10 classes, one of 2 colors, a noisy tag and a number. Every
second question asks for the class of the item of a color that has the highest priority. The sharper the
attention, the better. The other questions ask for the sign of the average number of the items of one of
4 kinds. An item tells its kind only by its tag, which is noisy. So sharper attention reads few of the
items, and answers worse: the best weights are spread over all items that may be of the kind.

One or two heads of attention read the set. Their queries are made from the question. So a law of the
query can make the two questions differ, and a law of the length alone cannot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from max_retrieval import CLASSES, LONGEST, WIDTH, Heads, perceptron, trained
from torch import Tensor, nn
from trained_laws import modules

import isentropic as it
from isentropic import laws

COLORS, KINDS = 2, 4
NOISE = 0.7  # the standard deviation of each coordinate of a tag; the tags of kinds are √2 apart
ITEM, QUESTION = 1 + CLASSES + COLORS + KINDS + 1, 2 + COLORS + KINDS


class Sample(NamedTuple):
    """Sets of n items (count, n, ITEM), questions (count, QUESTION) and answers (count,).

    Questions with an even index ask for the largest, and their answers are below CLASSES.
    """

    items: Tensor
    question: Tensor
    answer: Tensor


def draw(count: int, n: int, generator: torch.Generator) -> Sample:
    def integers(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator)

    priority = torch.rand(count, n, generator=generator)
    number = torch.randn(count, n, generator=generator)
    classes, color, kind = (integers(most, count, n) for most in (CLASSES, COLORS, KINDS))
    asked_color, asked_kind = integers(COLORS, count), integers(KINDS, count)
    color[:, 0], kind[:, 0] = asked_color, asked_kind  # there is one at least
    tag = one_hot(kind, KINDS) + NOISE * torch.randn(count, n, KINDS, generator=generator)
    items = (priority[..., None], one_hot(classes, CLASSES), one_hot(color, COLORS), tag)

    largest = torch.where(color == asked_color[:, None], priority, -1.0).argmax(1, keepdim=True)
    is_positive = (number * (kind == asked_kind[:, None])).sum(1) > 0
    is_average = torch.arange(count) % 2
    answer = torch.where(
        is_average == 1, CLASSES + is_positive.long(), classes.gather(1, largest)[:, 0]
    )
    question = (
        one_hot(is_average, 2),
        one_hot(asked_color, COLORS) * (1 - is_average[:, None]),
        one_hot(asked_kind, KINDS) * is_average[:, None],
    )
    return Sample(torch.cat((*items, number[..., None]), -1), torch.cat(question, -1), answer)


def one_hot(x: Tensor, most: int) -> Tensor:
    return nn.functional.one_hot(x, most).float()


class Reader(nn.Module):
    """A model that reads a set with one or two heads of attention, as the question asks."""

    def __init__(self, arm: str, heads: int) -> None:
        super().__init__()
        self.count = heads
        self.items, self.question = perceptron(ITEM), perceptron(QUESTION)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.answer = nn.Sequential(perceptron(2 * WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES + 2))
        # It comes last, so that the other weights of all arms start alike.
        self.law = modules(LONGEST, WIDTH, heads)[arm]()

    def heads(self, sample: Sample) -> Heads:
        by_head = self.key_value(self.items(sample.items)).unflatten(-1, (2 * self.count, -1))
        key, value = by_head.transpose(1, 2).chunk(2, dim=1)
        hidden = self.question(sample.question)[:, None, None]
        query = self.query(hidden).unflatten(-1, (self.count, -1))[:, 0].transpose(1, 2)
        return Heads(hidden, query, key, value)

    def rule(self, heads: Heads) -> laws.Law | None:
        return self.law(heads.hidden, heads.query, heads.key)

    def logits(self, heads: Heads, law: laws.Law | None) -> Tensor:
        """The logits of the answers (count, CLASSES + 2)."""
        read = it.attention(heads.query, heads.key, heads.value, law=law).flatten(1)
        return self.answer(torch.cat((read, heads.hidden[:, 0, 0]), -1))

    def forward(self, sample: Sample) -> Tensor:
        heads = self.heads(sample)
        return self.logits(heads, self.rule(heads))


def train(arm: str, heads: int, seed: int, steps: int) -> Reader:
    return trained(lambda: Reader(arm, heads), draw, seed, steps)
