"""Recall in a causal model: does a law of the length help beyond the trained lengths, in each layer?

    python recall_causal.py            # one hour on two free cores
    python recall_causal.py --quick    # a minute: only shows that everything runs

The task is associative recall with a question at each token. A token holds a new key, its value, and
the key that is asked for, which is one of those so far. The answer is the value of that key. The keys
of a sequence are different words of 12 bits, and there are 8 values. So a query at the n-th token sees
n keys, exactly one of which has the answer.

The model is a Transformer with two layers of two heads. It has no positions: only the causal mask gives
an order. Pair and question are one token, so no head has to find the previous token. One layer would
do. It is narrow (8 numbers for each head), because a wider one makes hardly any error at the tested
lengths, and then nothing can help. Models are trained with sequences of n0 = 32, 64 or 128 tokens, with
the same number of questions in each step, and tested with 16 · n0.

It is the causal companion of `max_retrieval.py`. There a query sees one length in a pass. Here a pass
has all lengths: in training from 1 to n0, whatever the arm. Every run of an arm, a seed and an n0 is
kept when it is finished. Start the command again to go on where it was interrupted.

Arms that are trained. Every layer and head has its own learned numbers.

- O: the standard scale.
- constant: a learned constant factor. A control: whatever it gains is not due to the length.
- log: log n/log n0.
- slope: a · log n with learned a (SSMax, Nakanishi 2025, arXiv 2501.19399).
- affine: a · log n + b with learned a and b (SSMax with its intercept).
- power: (n/n0)^a with learned a.
- query alone: a learned function of the query, and not of the length. A control for the next arm.
- query: δ + β · log(n + 1)^γ with learned δ, and with β and γ that depend on the query (the form of
  ASEntmax, Vasylenko et al. 2025, arXiv 2506.16640, but with a softmax).
- held: for each query the factor at which its entropy is p · log n, with a learned p from 0 to 1, and
  p · log n0 beyond n0.

The laws of the length start with the factor 1 at n = n0, and with the slope of log there (query:
nearly). The two controls start with the factor 1, and "held" with p = 1/2. Below n0 the factors of the
laws are smaller: early tokens attend nearly evenly at first. In training no law has the minimum 1,
because the weights then learn with the law. The log law with the minimum 1 is not an arm of its own:
it is 1 in all of training, so a model trained with it is "O + log" below. All arms of a seed and n0
start with the same weights, and see the same sequences in training and in the test. The query knows the
word that is asked for, so a function of it may be more than a temperature.

Arms at test time, on the weights of O. Their factors are 1 up to n0, where O was trained with that:

- O + log: the factor log n/log n0 from n0 on.
- O + affine, O + power: the laws that these arms have learned with the same seed and n0, divided by
  their factors at n0, for each layer and head. Heads of two models correspond only as far as they do
  the same from the same start. (For slope, this is O + log.)
- O + held mean: for each layer, head and n one factor, with which the mean entropy of other sequences
  is that at n0. Layer 2 is fitted after layer 1, with the factors of layer 1 in use. They are fitted at
  n0 and its multiples by 2, 4, 8 and 16, and interpolated between.
- O + held: for each query beyond n0 the factor with which its own entropy is the mean entropy of its
  head at n0.
- O + best constant: the factor, of 7 from 1 to 8 for all heads, layers and tokens, that is best on the
  test data themselves at each n. So it is an upper bound for what one constant can do there, and no
  method.

What decides
------------
This section was written before the experiment was run. Only O had been trained, with seeds that are not
used here, to see that it learns, how long that takes, and that it makes errors at 16 · n0. Nine models
had this size: 0.2 to 1.6 % of their answers were wrong at n0, and 21 to 33 % at 16 · n0. Others had
other widths, steps or rates. Of laws, only the results of `--quick` had been seen, with 100 steps and
two seeds. After that only one thing was added to the plan: an n0 at which O has not learned stays in
the mean.

The quantity is the accuracy in percent at n = 16 · n0: of the tokens in the last quarter of a sequence,
as that of every n is the accuracy at the tokens from 3n/4 to n. The primary quantity is its mean over
the three n0. That of each n0 is decided too, and reported as secondary. The smallest effect that
matters is 3 points. There are 10 seeds. The differences between two arms are paired: one difference per
seed. Their 95 % t interval decides (`experiment.decide`). Above 3 points, the arm helps. Within ±3
points, it has no effect of that size. Below −3 points, it harms. Otherwise it is not decided, and the
number of seeds that would decide is stated. The questions are in `QUESTIONS`, and each pair in them is
decided alone: the intervals are not widened for their number. Nothing else is concluded. In particular,
the accuracies at other n, entropies and factors are reported without a verdict. An n0 at which O has a
mean accuracy below 98 % at n = n0 says nothing about longer contexts. It stays in the mean, and the
report says so.

The second run
--------------
Ten seeds had left three differences undecided, with 17 to 19 seeds that would decide. So there are 24
seeds now, the first ten among them. That there are more depends on what the first ten had shown. For
this second look at them, all intervals have a confidence of 97.5 %, not 95 %. There is no third look.
The arms "held" and "O + held" were added, with their questions. This paragraph was written before any
of that was run. Only two models of "held" had been trained, with a seed that is not used here, to see
how long that takes, and their accuracies at n0 had been seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import compared_arms
import experiment
import matplotlib.pyplot as plt
import torch
from compared_arms import ARMS, AT_TEST, TRAINED, finish_all, plot_arms, questions
from experiment import Claim, Decision, Verdict, answered, decide
from matplotlib.figure import Figure
from torch import Tensor, nn
from trained_laws import constant_name, modules, with_best_constant
from transformer import Attend, Encoder

import isentropic as it
from isentropic import laws

NAME = "recall_causal"
BITS, VALUES = 12, 8
WIDTH, LAYERS, HEADS = 16, 2, 2
TOKENS, RATE = 1024, 2e-2  # tokens of all sequences in a step of training
MULTIPLES = (1, 2, 4, 8, 16)  # of n0: the lengths of the report
CONSTANTS = tuple(2 ** (i / 2) for i in range(7))  # 1 to 8, for O + best constant
FACTORS = (0.1, 100.0)  # the range of the search for the factors of O + held mean
ROWS = 8  # queries of each sequence with which a factor is fitted, of which the last one sees n keys
TEST = 100  # The test of an arm takes about as long as so many steps of training.

# What decides
SMALLEST = 3.0  # points of accuracy
SEEDS = 24
CONFIDENCE = 0.975  # of each of two looks
LEARNED = 98.0  # the least accuracy of O in % at n0
_first, *_others = compared_arms.QUESTIONS.items()
QUESTIONS = dict(
    [_first, ("Does the log law at test time beat the standard scale?", [("O + log", "O")]), *_others]
)


class Settings(NamedTuple):
    """The size of an experiment."""

    steps: int
    trained: tuple[int, ...]  # the lengths n0
    tokens: int  # of all sequences in a test, and in the fit of the held entropies


FULL = Settings(600, (32, 64, 128), 2**15)
QUICK = Settings(100, (16, 32), 2**12)


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


def draw_longest(trained: int, seed: int, settings: Settings) -> Sample:
    n = longest(trained)
    return draw(max(1, settings.tokens // n), n, torch.Generator().manual_seed(seed))


def test_sample(trained: int, seed: int, settings: Settings) -> Sample:
    """The sequences that all arms of a seed are tested with."""
    return draw_longest(trained, 10**6 * (seed + 1) + trained, settings)


def calibration_sample(trained: int, seed: int, settings: Settings) -> Sample:
    """Sequences that are not in the test."""
    return draw_longest(trained, 10**9 + 10**6 * seed + trained, settings)


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
        law = modules(trained, WIDTH, HEADS, is_causal=True)[arm]
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


# ----------------------------------------------------------------------------------------- test

Found = dict[str, list]


@torch.no_grad()
def test(model: Reader, rule: Rule, trained: int, sample: Sample) -> Found:
    """The accuracy in %, and the mean entropy and factor of all layers and heads, at each n."""
    entropies, factors = [], []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        law = rule(layer, q, k)
        state = it.attention_state(q, k, v, is_causal=True, law=law)
        entropies.append(state.entropy())
        factors.append(factors_of(law, q.shape[-2]).expand(q.shape[:-1]))
        return state.output()

    right = model.run(sample, attend).argmax(-1) == sample.answer
    of_queries = {
        "accuracy": 100 * right,
        "entropy": torch.stack(entropies),
        "factor": torch.stack(factors),
    }
    return {
        what: [x[..., band(multiple * trained)].double().mean().item() for multiple in MULTIPLES]
        for what, x in of_queries.items()
    }


def factors_of(law: laws.Law | None, n: int) -> Tensor:
    """The factors of queries that see 1 to n keys (…, n)."""
    lengths = torch.arange(1, n + 1)
    return torch.ones(n) if law is None else law(lengths)


def rules_at_test(
    model: Reader, trained: int, seed: int, settings: Settings, learned: dict[str, Found]
) -> dict[str, Rule]:
    """The rules that are tested on the weights of O. `learned` has the results of other arms."""
    rules: dict[str, Rule] = {"O": lambda layer, query, key: None}
    rules["O + log"] = lambda layer, query, key: laws.LogLength(trained, minimum=1)
    for arm, found in learned.items():
        rules[f"O + {arm}"] = table_rule([beyond(x, trained) for x in law_factors(arm, trained, found)])
    sample = calibration_sample(trained, seed, settings)
    rules["O + held"] = partial(held_beyond, trained, entropies_at(model, trained, sample))
    rules["O + held mean"] = table_rule(held_mean(model, trained, sample))
    for x in CONSTANTS:
        rules[constant_name(x)] = partial(lambda x, layer, query, key: laws.Constant(x), x)
    return rules


def table_rule(factors: list[Tensor]) -> Rule:
    """Factors of each layer that are given for each head and n: (heads, n)."""
    return lambda layer, query, key: laws.Constant(laws.per_query(factors[layer]))


def beyond(factors: Tensor, trained: int) -> Tensor:
    """The factors from n0 on, divided by those at n0, and 1 up to there."""
    relative = factors / factors[:, trained - 1 : trained]
    relative[:, :trained] = 1
    return relative


def law_factors(arm: str, trained: int, found: Found) -> list[Tensor]:
    """The factors of the law that an arm has learned, for each layer: (heads, longest n)."""
    result = []
    for numbers in found["numbers"]:
        law = modules(trained, WIDTH, HEADS)[arm]().requires_grad_(False)
        for name, x in numbers.items():
            law.numbers[name].copy_(torch.tensor(x))
        result.append(factors_of(law(None, None, None), longest(trained)))
    return result


def learned_numbers(model: Reader) -> list[dict[str, list[float]]]:
    """The learned numbers of the law of each layer, one for each head. Maps are not among them."""
    return [{name: x.tolist() for name, x in getattr(law, "numbers", {}).items()} for law in model.laws]


@torch.no_grad()
def entropies_at(model: Reader, n: int, sample: Sample) -> list[Tensor]:
    """The mean entropy of each head where it sees n keys or a few less, for each layer."""
    found: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found.append(mean_entropy(q, k, n))
        return it.attention(q, k, v, is_causal=True, law=None)

    model.run(Sample(sample.tokens[:, :n], sample.answer[:, :n]), attend)
    return found


def held_beyond(
    trained: int, targets: list[Tensor], layer: int, query: Tensor, key: Tensor
) -> laws.Law:
    """Factors that give every query beyond n0 the entropy of its head in `targets`, and 1 up to n0."""
    factor = torch.ones(query.shape[:-1])
    factor[..., trained:] = it.AttentionDistribution(
        query[..., trained:, :], key, is_causal=True, law=None
    ).factor_for_entropy(targets[layer][:, None])
    return laws.Constant(laws.per_query(factor))


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


# ----------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Job(compared_arms.Job):
    """An arm to be trained with a length and a seed. That of O has the arms at test time too."""

    arm: str
    trained: int
    seed: int
    settings: Settings
    path: Path

    def name(self) -> str:
        return f"{self.arm} {self.trained} {self.seed}"

    def identity(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "trained": self.trained,
            "seed": self.seed,
            "steps": self.settings.steps,
            "tokens": self.settings.tokens,
            "model": [BITS, VALUES, WIDTH, LAYERS, HEADS, TOKENS, RATE],
            "test": [*MULTIPLES, *CONSTANTS, *FACTORS, ROWS],
        }


def work(job: Job) -> None:
    """Train and test, and write the results."""
    model = train(job.arm, job.trained, job.seed, job.settings.steps)
    sample = test_sample(job.trained, job.seed, job.settings)
    if job.arm == "O":
        rules = rules_at_test(model, job.trained, job.seed, job.settings, job.learned())
        found = {arm: test(model, rule, job.trained, sample) for arm, rule in rules.items()}
        job.write(with_best_constant(found, CONSTANTS))
    else:
        found = test(model, model.rule, job.trained, sample)
        job.write({job.arm: {**found, "numbers": learned_numbers(model)}})
    experiment.advance(TEST)


def run(seeds: int, settings: Settings, path: Path) -> dict[str, Any]:
    jobs = [
        Job(arm, trained, seed, settings, path)
        for seed in range(seeds)
        for trained in settings.trained
        for arm in TRAINED
    ]
    finish_all(work, jobs, settings.steps + TEST)
    arms: dict[str, list[list]] = {arm: [[] for _ in settings.trained] for arm in ARMS}
    for job in jobs:
        for arm, found in (job.result() or {}).items():
            arms[arm][settings.trained.index(job.trained)].append(found)
    return {
        "trained": list(settings.trained),
        "multiples": list(MULTIPLES),
        "seeds": seeds,
        "arms": arms,
    }


# -------------------------------------------------------------------------------------- results


def values(
    results: dict[str, Any], arm: str, multiple: int, trained: int | None = None, what: str = "accuracy"
) -> list[float]:
    """The values of all seeds at a multiple of n0: for one n0, or their mean over all n0."""
    if trained is None:
        columns = [values(results, arm, multiple, x, what) for x in results["trained"]]
        return [statistics.fmean(of_seed) for of_seed in zip(*columns, strict=True)]
    at = results["multiples"].index(multiple)
    return [found[what][at] for found in results["arms"][arm][results["trained"].index(trained)]]


def decision(results: dict[str, Any], arm: str, other: str, trained: int | None = None) -> Decision:
    """Whether an arm has a higher accuracy than another at the longest test, in the mean of all n0."""
    last = results["multiples"][-1]
    pairs = zip(*(values(results, x, last, trained) for x in (arm, other)), strict=True)
    return decide([a - b for a, b in pairs], SMALLEST, CONFIDENCE)


def means_table(
    results: dict[str, Any], what: str, form: str, title: str, trained: int | None = None
) -> str:
    def of_seeds(arm: str, multiple: int) -> list[float]:
        return values(results, arm, multiple, trained, what)

    return compared_arms.means_table(f"{title}, n/n₀ =", results["multiples"], of_seeds, form)


def not_learned(results: dict[str, Any]) -> str:
    """A sentence for each n0 at which O has not learned the task."""
    means = {x: statistics.fmean(values(results, "O", 1, x)) for x in results["trained"]}
    return "".join(
        f"O has not learned the task with n₀ = {n0}: its accuracy there is {mean:.1f} %. "
        for n0, mean in means.items()
        if mean < LEARNED
    )


def report(results: dict[str, Any]) -> str:
    accuracies = "\n\n".join(
        means_table(results, "accuracy", ".1f", f"n₀ = {n0}, accuracy in %", n0)
        for n0 in results["trained"]
    )
    factor = means_table(results, "factor", ".2f", "mean factor")
    entropy = means_table(results, "entropy", ".2f", "entropy in nats")
    last = results["multiples"][-1]
    head = f"arm against other, points [{100 * CONFIDENCE:g} % interval]"
    decisions = {f"mean, n = {last} n₀": partial(decision, results)} | {
        f"n₀ = {n0}, n = {last * n0}": partial(decision, results, trained=n0)
        for n0 in results["trained"]
    }
    return f"""\
{accuracies}

The differences are paired over {results["seeds"]} seeds. An effect matters from {SMALLEST:g} points.
The mean over n₀ decides. Each row is decided alone. {not_learned(results)}

{questions(QUESTIONS, head, decisions)}

"O + best constant" was chosen by the accuracy on the test data themselves.

The next tables have means over layers, heads and n₀.

{factor}

{entropy}
"""


def answer(results: dict[str, Any]) -> str:
    def against(arm: str, other: str) -> str:
        found = decision(results, arm, other)
        return f"{found.interval()} points of accuracy ({found})"

    return (
        f"Recall pairs of key and value in a causal model without positions, at "
        f"{results['multiples'][-1]} times the trained length, with {100 * CONFIDENCE:g} % intervals: "
        f"the law log n in training brings {against('log', 'constant')} more than a learned constant. "
        f"On the weights of standard attention it brings {against('O + log', 'O')}, and a held mean "
        f"entropy {against('O + held mean', 'O + log')} more than the law. The constant that is best "
        f"on the test data at each length brings {against('O + best constant', 'log')} more than the "
        f"law in training (a comparison made later). So it is open here too whether the length matters."
    )


def claims(results: dict[str, Any]) -> list[Claim]:
    def found(arm: str, other: str) -> tuple[str, Verdict]:
        x = decision(results, arm, other)
        lengths = ", ".join(map(str, results["trained"]))
        where = f"Causal recall, mean over n₀ = {lengths}, n = {results['multiples'][-1]} n₀"
        return f"{where}, {arm} against {other}, points of accuracy: {x.interval()}.", answered(x)

    return compared_arms.claims(found)


def picture(results: dict[str, Any]) -> Figure:
    """Plot the mean accuracies of trained arms (top) and of those at test time, for each n0."""
    trained, multiples = results["trained"], results["multiples"]
    panels = (TRAINED, ("O", *AT_TEST))
    size = (10, 6.8)
    figure, axes = plt.subplots(
        len(panels), len(trained), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for row, arms in zip(axes, panels, strict=True):
        for ax, n0 in zip(row, trained, strict=True):

            def samples(arm: str, n0: int = n0) -> list[list[float]]:
                return [values(results, arm, x, n0) for x in multiples]

            plot_arms(ax, arms, [x * n0 for x in multiples], samples, "keys")
            ax.set_title(f"n₀ = {n0}", fontsize=10)
        row[0].legend(fontsize=7)
    for ax, title in zip(axes[:, 0], ("trained", "O, at test time"), strict=True):
        ax.set_ylabel(f"accuracy in % ({title}; band: 95 % interval)")
    return figure


def main(arguments: list[str] | None = None) -> None:
    experiment.main_of_arms(NAME, __doc__, SEEDS, (FULL, QUICK), run, report, picture, arguments)


if __name__ == "__main__":
    main()
