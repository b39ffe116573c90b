"""When entropy should not be kept constant: tasks whose new keys are like the old ones.

    python recall.py

How should the scale depend on n if all keys have the same distribution? A reader of post 9588 asked
this for graphs. One layer of attention with trained maps of queries and keys is trained with 64 keys,
and tested with up to 2048. The tasks:

- recall: the query is one of the keys plus noise, and the answer is the label of that key. Bayes' rule
  is softmax attention with a temperature that does not depend on n, and the layer can represent it. The
  layer is trained completely, or stopped early.
- average: keys belong to groups, and the query names a group. The answer is the mean of the group, and
  the values of its keys are noisy observations of it. Their number grows with n. The noise of the keys
  makes groups clear or blurred.

All arms use the same weights:

- O: the standard scale.
- O + law: the factor log n/log 64 at test time.
- O + calibrated: the affine law through the factors of `drift.calibrate`, fitted without answers.
- O + held: for each query, the factor at which its entropy is O's mean entropy at 64 keys. This also
  makes the entropies of all queries equal.
- O + best: the constant factor that is best on the test data, at each n.
- ideal: Bayes' rule, which knows the groups in `average`.

There is no separate arm E. Training has a single length, at which the law is a constant that the
trained maps absorb. So O + law is E with any base, if the training is complete.

What decides
------------
This section was written after the run. The quantity is the logarithm of the loss at n = 2048, in which
arms are compared with O. The differences are paired over the 8 seeds. The smallest effect that matters
is a factor of 1.05 on the loss, and their 95 % t interval decides (`experiment.decide`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import experiment
import torch
from torch import Tensor, nn
from transformer import affine

import isentropic as it

NAME = "recall"
SEEDS = 8
TRAINED = 64
LENGTHS = (64, 128, 256, 512, 1024, 2048)
CALIBRATED = (64, 128, 256)
WIDTH, CLASSES, GROUPS = 16, 8, 8
# Standard deviations of the noise.
QUERY_NOISE = 1.0  # per coordinate; keys have the length √WIDTH
KEY_NOISE = {"average, clear": 0.1, "average, blurred": 0.4}  # per coordinate, of keys of length 1
VALUE_NOISE = 0.5  # the means of the groups have the standard deviation 1
QUERIES = 16  # in each sequence of `recall`
EARLY_TASK = "recall, stopped early"
STEPS, EARLY, BATCH, RATE = 1000, 10, 32, 2e-2
TESTS = 128  # sequences per length
SMALLEST = 1.05  # the factor on the loss at the greatest length that decides
FACTORS = (0.5, 4.0)  # the range of the search for the best factor
ARMS = ("O", "O + law", "O + calibrated", "O + held", "O + best", "ideal")


class Sample(NamedTuple):
    """Queries (count, 1, L, ·), keys and values (count, 1, n, ·), answers (count, 1, L, ·).

    `kind` (count, 1, n) has the labels or the groups of the keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    answer: Tensor
    kind: Tensor


class Task(NamedTuple):
    draw: Callable[[int, int, torch.Generator], Sample]
    measure: Callable[[Tensor, Tensor, Sample], dict[str, Tensor]]  # of mapped queries and keys
    ideal: Callable[[Sample], dict[str, Tensor]]
    steps: Callable[[], int]


# ---------------------------------------------------------------------------------------- recall


def draw_recall(count: int, n: int, generator: torch.Generator) -> Sample:
    key = torch.randn(count, 1, n, WIDTH, generator=generator)
    key = math.sqrt(WIDTH) * nn.functional.normalize(key, dim=-1)
    label = torch.randint(CLASSES, (count, 1, n), generator=generator)
    value = nn.functional.one_hot(label, CLASSES).float()
    asked = key[:, :, :QUERIES]  # any keys would do, because all have the same distribution
    query = asked + QUERY_NOISE * torch.randn(asked.shape, generator=generator)
    return Sample(query, key, value, value[:, :, :QUERIES], label)


def measure_recall(query: Tensor, key: Tensor, sample: Sample) -> dict[str, Tensor]:
    """The loss −log p(label), the entropy, and the accuracy in %."""
    state = it.attention_state(query, key, sample.value, law=None)
    output = state.output()
    weight = (output * sample.answer).sum(-1).clamp(min=1e-30)  # the weight can round to 0
    accuracy = 100 * (output.argmax(-1) == sample.answer.argmax(-1)).float().mean()
    return {"loss": -weight.log().mean(), "entropy": state.entropy().mean(), "accuracy": accuracy}


def ideal_recall(sample: Sample) -> dict[str, Tensor]:
    """Bayes' rule: softmax of −|q − k|²/2σ², which is that of ⟨q, k⟩/σ² for keys of equal length."""
    return measure_recall(sample.query * math.sqrt(WIDTH) / QUERY_NOISE**2, sample.key, sample)


# --------------------------------------------------------------------------------------- average


def draw_average(count: int, n: int, generator: torch.Generator, key_noise: float) -> Sample:
    group = torch.randint(GROUPS, (count, 1, n), generator=generator)
    key = torch.eye(GROUPS, WIDTH)[group]
    key = key + key_noise * torch.randn(key.shape, generator=generator)
    mean = torch.randn(count, 1, GROUPS, 1, generator=generator)
    value = mean.gather(2, group[..., None])
    value = value + VALUE_NOISE * torch.randn(value.shape, generator=generator)
    return Sample(torch.eye(GROUPS, WIDTH).expand(count, 1, -1, -1), key, value, mean, group)


def measure_average(query: Tensor, key: Tensor, sample: Sample) -> dict[str, Tensor]:
    """The mean squared error and the entropy."""
    state = it.attention_state(query, key, sample.value, law=None)
    loss = nn.functional.mse_loss(state.output(), sample.answer)
    return {"loss": loss, "entropy": state.entropy().mean()}


def ideal_average(sample: Sample) -> dict[str, Tensor]:
    """Bayes' rule for known groups: the mean of the members' values, shrunk towards 0."""
    member = nn.functional.one_hot(sample.kind, GROUPS).float().mT
    count = member.sum(-1)
    output = member @ sample.value / (count + VALUE_NOISE**2)[..., None]
    loss = nn.functional.mse_loss(output, sample.answer)
    return {"loss": loss, "entropy": count.clamp(min=1).log().mean()}


def best_scale(n: int, key_noise: float) -> float:
    """The scale λ with the least squared error in `average`, in the limit of many keys with weight.

    The queries are the directions of the groups minus their mean. Then the logit of a member is higher
    by λ. The noise gives logits the variance v = λ² key_noise² (1 − 1/G), so that n keys count as
    n exp(−v). The members have the total weight p, and the other groups have the rest. A low scale
    leaves too much weight to the other groups; a high scale averages less of the noise of the values.
    """
    scale = torch.linspace(0.1, 20, 20_000, dtype=torch.float64)
    p = scale.exp() / (scale.exp() + GROUPS - 1)
    others = (1 - p).square() / (GROUPS - 1)
    v = scale.square() * key_noise**2 * (1 - 1 / GROUPS)
    error = (1 - p).square() + others + VALUE_NOISE**2 * GROUPS / n * v.exp() * (p.square() + others)
    return scale[error.argmin()].item()


TASKS = {
    "recall": Task(draw_recall, measure_recall, ideal_recall, lambda: STEPS),
    EARLY_TASK: Task(draw_recall, measure_recall, ideal_recall, lambda: EARLY),
} | {
    name: Task(partial(draw_average, key_noise=x), measure_average, ideal_average, lambda: STEPS)
    for name, x in KEY_NOISE.items()
}

# ------------------------------------------------------------------------------------------ runs


class Reader(nn.Module):
    """The trained maps of queries and keys of an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        return self.query(sample.query), self.key(sample.key)


def train(task: Task, seed: int) -> Reader:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    reader = Reader()
    optimizer = torch.optim.Adam(reader.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(task.steps()):
        sample = task.draw(BATCH, TRAINED, generator)
        optimizer.zero_grad()
        task.measure(*reader(sample), sample)["loss"].backward()
        optimizer.step()
        schedule.step()
        experiment.advance()
    return reader


def best_factor(loss: Callable[[float], float]) -> float:
    """The factor with the least loss, by golden-section search over its logarithm."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = map(math.log, FACTORS)
    points = [high - ratio * (high - low), low + ratio * (high - low)]
    values = [loss(math.exp(u)) for u in points]
    while high - low > 0.01:
        if values[0] < values[1]:
            high = points[1]
            points = [high - ratio * (high - low), points[0]]
            values = [loss(math.exp(points[0])), values[0]]
        else:
            low = points[0]
            points = [points[1], low + ratio * (high - low)]
            values = [values[1], loss(math.exp(points[1]))]
    return math.exp(min(zip(values, points, strict=True))[1])


@torch.no_grad()
def test(task: Task, reader: Reader, seed: int) -> dict[str, dict[str, list[float]]]:
    """The loss, entropy, accuracy and factor of each arm at each length."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    samples = [reader(task.draw(BATCH, n, generator)) for n in CALIBRATED]
    calibrated = affine(it.drift.calibrate(samples, reference_length=TRAINED), samples[0][0])
    result: dict[str, dict[str, list[float]]] = {arm: {} for arm in ARMS}
    for n in LENGTHS:
        sample = task.draw(TESTS, n, generator)
        query, key = reader(sample)
        if n == TRAINED:
            target = it.attention_entropy(query, key, law=None).mean().item()
        measure = partial(task.measure, key=key, sample=sample)
        factors: dict[str, Any] = {
            "O": 1.0,
            "O + law": it.laws.LogLength(TRAINED)(n),
            "O + calibrated": calibrated(n).item(),
            "O + held": it.AttentionDistribution(query, key, law=None).factor_for_entropy(target)[
                ..., None
            ],
            "O + best": best_factor(lambda x: measure(query * x)["loss"].item()),  # noqa: B023
        }
        for arm in ARMS:
            found = measure(query * factors[arm]) if arm in factors else task.ideal(sample)
            if arm in factors and arm != "O + held":
                found["factor"] = factors[arm]
            for name, x in found.items():
                result[arm].setdefault(name, []).append(float(x))
        experiment.advance(n // 8)
    return result


def work(job: tuple[str, int]) -> dict[str, dict]:
    """The results of all arms for one task and one seed."""
    name, seed = job
    return test(TASKS[name], train(TASKS[name], seed), seed)


def run(seeds: int) -> dict[str, Any]:
    jobs = [(name, seed) for seed in range(seeds) for name in TASKS]
    steps = sum(TASKS[name].steps() + sum(n // 8 for n in LENGTHS) for name, _ in jobs)
    tasks: dict[str, dict] = {name: {arm: [] for arm in ARMS} for name in TASKS}
    for (name, _), arms in zip(jobs, experiment.run(work, jobs, steps), strict=True):
        for arm, found in arms.items():
            tasks[name][arm].append(found)
    noises = (0.0, *KEY_NOISE.values())
    theory = [[x, [best_scale(n, x) for n in LENGTHS]] for x in noises]
    return {"lengths": list(LENGTHS), "seeds": seeds, "tasks": tasks, "theory": theory}


def main(arguments: list[str] | None = None) -> None:
    import recall_results

    options = experiment.parser(NAME, __doc__, seeds=SEEDS).parse_args(arguments)
    experiment.finish(
        NAME, run(options.seeds), recall_results.report, recall_results.picture, options.output
    )


if __name__ == "__main__":
    main()
