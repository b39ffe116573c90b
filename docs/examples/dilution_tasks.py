"""Tasks in which more keys dilute attention: sets and sequences, for models trained with a law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import max_retrieval
import recall_causal
import torch
import two_questions
from torch import Tensor

import isentropic as it
from isentropic import laws


class Settings(NamedTuple):
    """The size of an experiment."""

    steps: tuple[int, int]  # of training with sets, and with sequences
    longest: int  # the greatest n in a test
    sets: int  # in the test of each length; 4 times as many choose the constant
    tokens: int  # the same for sequences


# The law of each layer. None is the law that the arm was trained with.
Rule = Sequence[laws.Law] | None


def lengths_to(longest: int, n0: int) -> list[int]:
    """n0, 2 n0, 4 n0, 16 n0 and 64 n0 as far as they are at most `longest`."""
    return [x * n0 for x in (1, 2, 4, 16, 64) if x * n0 <= longest]


class Sets:
    """A model with one layer of attention reads sets. `heads` is None in Max Retrieval."""

    trained, layers = max_retrieval.LONGEST, 1

    def __init__(self, heads: int | None, longest: int) -> None:
        self.heads, self.longest = heads, longest
        self.draw = max_retrieval.draw if heads is None else two_questions.draw

    def steps(self, settings: Settings) -> int:
        return settings.steps[0]

    def train(self, arm: str, seed: int, settings: Settings) -> Any:
        if self.heads is None:
            return max_retrieval.train(arm, seed, self.steps(settings))
        return two_questions.train(arm, self.heads, seed, self.steps(settings))

    def lengths(self, settings: Settings) -> list[int]:
        return lengths_to(min(self.longest, settings.longest), self.trained)

    def sample(self, n: int, settings: Settings, generator: torch.Generator) -> Any:
        return self.draw(settings.sets, n, generator)

    def right(self, model: Any, sample: Any, c: float, rule: Rule) -> Tensor:
        """For each set whether the answer is right, where c multiplies the logits."""
        heads = model.heads(sample)
        law = model.rule(heads) if rule is None else rule[0]
        heads = heads._replace(query=c * heads.query)
        return model.logits(heads, law).argmax(-1) == sample.answer

    def held(
        self, model: Any, lengths: Sequence[int], settings: Settings, seed: int
    ) -> dict[int, Rule]:
        """By length: the factor of each head with which its mean entropy is that at n0."""

        def entropies(n: int) -> Any:
            heads = model.heads(self.sample(n, settings, generator_of(seed, n, CALIBRATION)))
            return lambda factor: it.attention_entropy(
                heads.query, heads.key, law=laws.Constant(factor)
            ).mean((0, -1))

        target = entropies(self.trained)(1.0)
        factors = {n: recall_causal.factor_of_mean(entropies(n), target) for n in lengths}
        return {n: [laws.Constant(factor)] for n, factor in factors.items()}


class Sequences:
    """A causal model with two layers of attention reads sequences."""

    trained, layers = 64, recall_causal.LAYERS

    def steps(self, settings: Settings) -> int:
        return settings.steps[1]

    def train(self, arm: str, seed: int, settings: Settings) -> Any:
        return recall_causal.train(arm, self.trained, seed, self.steps(settings))

    def lengths(self, settings: Settings) -> list[int]:
        return lengths_to(settings.longest, self.trained)

    def sample(self, n: int, settings: Settings, generator: torch.Generator) -> Any:
        return recall_causal.draw(settings.tokens // n, n, generator)

    def right(self, model: Any, sample: Any, c: float, rule: Rule) -> Tensor:
        """The same for the tokens from 3n/4 to n."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            law = model.rule(layer, q, k) if rule is None else rule[layer]
            return it.attention(c * q, k, v, is_causal=True, law=law)

        n = sample.answer.shape[-1]
        answers = model.run(sample, attend).argmax(-1) == sample.answer
        return answers[:, recall_causal.band(n)]

    def held(
        self, model: Any, lengths: Sequence[int], settings: Settings, seed: int
    ) -> dict[int, Rule]:
        """The same for each token, between the lengths as `recall_causal.interpolated` has it."""
        n = recall_causal.longest(self.trained)
        sample = self.sample(n, settings, generator_of(seed, n, CALIBRATION))
        factors = recall_causal.held_mean(model, self.trained, sample)
        return {
            n: [laws.Constant(laws.per_query(of_heads[:, :n])) for of_heads in factors] for n in lengths
        }


TASKS = {
    "one head": Sets(1, 256),
    "two heads": Sets(2, 256),
    "max": Sets(None, 1024),
    "recall": Sequences(),
}
TEST_DATA, HELD_OUT, CALIBRATION = range(3)


def generator_of(seed: int, n: int, purpose: int) -> torch.Generator:
    """Of data that only a seed has, for one length and purpose."""
    return torch.Generator().manual_seed(10**7 * seed + 10 * n + purpose)
