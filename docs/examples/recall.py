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
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import experiment
import matplotlib.pyplot as plt
import torch
from effects import NOTHING, Effect
from experiment import Claim, Decision, decide, plot_means, slope, spread, table, verdict
from matplotlib.figure import Figure
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


# --------------------------------------------------------------------------------------- results


def values(results: dict, task: str, arm: str, what: str, at: int = -1) -> list[float]:
    """The values of all seeds at one of the lengths."""
    return [found[what][at] for found in results["tasks"][task][arm]]


def means(results: dict, task: str, arm: str, what: str) -> list[float]:
    """The means over the seeds at each length."""
    lengths = range(len(results["lengths"]))
    return [statistics.fmean(values(results, task, arm, what, i)) for i in lengths]


def beats(results: dict, task: str, arm: str, other: str = "O") -> int:
    """The number of seeds in which an arm has less loss than another at the largest n."""
    pairs = zip(*(values(results, task, name, "loss") for name in (arm, other)), strict=True)
    return sum(a < b for a, b in pairs)


def decision(results: dict, task: str, arm: str) -> Decision:
    """Whether an arm has less loss than O at the largest n, in its logarithm."""
    pairs = zip(*(values(results, task, name, "loss") for name in ("O", arm)), strict=True)
    return decide([math.log(a / b) for a, b in pairs], math.log(SMALLEST))


def times(found: Decision) -> str:
    """The factor on the loss, with its interval."""
    mean, low, high = (math.exp(-x) for x in (found.mean, found.high, found.low))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def decisions_table(results: dict) -> str:
    arms = ("O + law", "O + calibrated", "O + held")
    found = {task: [decision(results, task, arm) for arm in arms] for task in results["tasks"]}
    return table(
        [f"loss at n = {results['lengths'][-1]}, times that of O", *arms],
        [[task, *map(times, row)] for task, row in found.items()],
    )


def changes(results: dict, task: str, what: str) -> list[float]:
    """The changes that the law makes to the means over the seeds, at each length."""
    pairs = zip(*(means(results, task, arm, what) for arm in ("O + law", "O")), strict=True)
    return [a - b for a, b in pairs]


def arms_table(results: dict, task: str) -> str:
    """Losses at all lengths, with their spread at the last; entropies and accuracies at both ends."""
    *lengths, last = results["lengths"]
    is_recall = "accuracy" in results["tasks"][task]["O"][0]
    ends = [("entropy", ".2f", "nats")] + [("accuracy", ".1f", "%")] * is_recall
    form = ".3f" if is_recall else ".4f"
    head = [f"{task}, n =", *lengths, last, "seeds below O"]
    head += [f"{unit} at {n}" for _, _, unit in ends for n in (lengths[0], last)]
    rows = []
    for arm in ARMS:
        row = [arm, *(f"{x:{form}}" for x in means(results, task, arm, "loss")[:-1])]
        row += [spread(values(results, task, arm, "loss"), form), beats(results, task, arm)]
        for what, digits, _ in ends:
            row += [f"{means(results, task, arm, what)[at]:{digits}}" for at in (0, -1)]
        rows.append(row)
    return table(head, rows)


def factors_table(results: dict) -> str:
    tasks, lengths = results["tasks"], results["lengths"]
    rows = []
    for task in tasks:
        best = [values(results, task, "O + best", "factor", at) for at in range(len(lengths))]
        rows.append([f"{task}: best", *(spread(x, ".2f") for x in best)])
    laws = [(f"{task}: calibrated", task, "O + calibrated") for task in tasks]
    for name, *arm in [*laws, ("law", next(iter(tasks)), "O + law")]:
        rows.append([name, *(f"{x:.2f}" for x in means(results, *arm, "factor"))])
    return table(["factor, n =", *lengths], rows)


def theory_table(results: dict) -> str:
    lengths = results["lengths"]
    rows = []
    for noise, scales in results["theory"]:
        rows.append([noise, *(f"{x:.2f}" for x in scales), f"{slope(lengths, scales):.2f}"])
    return table(["noise of the keys, n =", *lengths, "per log n"], rows)


def report(results: dict[str, Any]) -> str:
    first, last, seeds = results["lengths"][0], results["lengths"][-1], results["seeds"]
    trained, ideal = (values(results, "recall", arm, "loss", 0) for arm in ("O", "ideal"))
    excess = [100 * (a / b - 1) for a, b in zip(trained, ideal, strict=True)]
    best = [x for found in results["tasks"]["recall"]["O + best"] for x in found["factor"]]
    bayes = means(results, "recall", "ideal", "entropy")
    early = means(results, EARLY_TASK, "O + best", "factor")
    gains = [-x for x in changes(results, EARLY_TASK, "loss")]
    points = [changes(results, task, "accuracy") for task in ("recall", EARLY_TASK)]
    factors = [means(results, task, "O + best", "factor")[-1] for task in KEY_NOISE]
    with_law, held = ([beats(results, x, arm) for x in KEY_NOISE] for arm in ("O + law", "O + held"))
    tables = "\n\n".join(arms_table(results, task) for task in results["tasks"])
    return f"""\
The loss is the log loss in `recall` and the squared error in `average`. Losses are means of
{seeds} seeds. The columns in nats are the mean entropy:

{tables}

The ratios are paired over the seeds, with 95 % intervals. An effect matters from a factor of
{SMALLEST:g}. They have no verdicts, because this was fixed after the run:

{decisions_table(results)}

{factors_table(results)}

**Recall.** At n = {first} the loss differs from that of Bayes' rule by at most
{max(map(abs, excess)):.1f} %, so the layer is fully trained. The best factor is {min(best):.2f} to
{max(best):.2f} over all seeds and lengths. The entropy of Bayes' rule rises from {bayes[0]:.2f} to
{bayes[-1]:.2f} nats. At n = {last} the law is better than O in
{beats(results, "recall", "O + law")} of {seeds} seeds. It changes the mean accuracy at a length by
{min(points[0]):+.1f} to {max(points[0]):+.1f} points. A factor hardly changes which label gets the most
weight; it changes how sure the layer is of it.

If training stops after {EARLY} of {STEPS} steps, the logits are too small at every length: the best
factor is {early[0]:.2f} already at n = {first}, and {early[-1]:.2f} at n = {last}. There the law is
better in {beats(results, EARLY_TASK, "O + law")} seeds. Its mean gain at a length is up to
{max(gains):.2f} nats and {max(points[1]):.1f} points. It makes up for missing training, not for length.

**Average.** At n = {last} the best factor is {factors[0]:.2f} for clear groups and {factors[1]:.2f} for
blurred groups. The law is better than O in {with_law[0]} of {seeds} seeds for clear groups, and in
{with_law[1]} for blurred groups. Holding the entropy is better than O in {held[0]} and {held[1]} seeds:
it gives up the benefit of more keys.

The scale λ with the least error in `average`, predicted by a formula for many keys with weight:

{theory_table(results)}

Without noise of the keys this scale is log n plus a constant. That is a law like Su's, but for another
reason: the weight of the other groups, e^−λ, has to fall like the variance, 1/n. The entropy still
rises like log n. With noise λ grows more slowly. For blurred groups the formula is not valid
yet at these n. Its variance comes from rare keys very near to the direction of their group, and so few
keys do not include such keys.
"""


def effects(results: dict[str, Any]) -> list[Effect]:
    last = results["lengths"][-1]
    return [
        Effect(
            NOTHING, f"{task}, trained with {TRAINED}, n = {last}",
            arm.removeprefix("O + ").replace("law", "log n at test"), "none",
            decision(results, task, arm), math.log(SMALLEST), "in the log of the loss",
            "the criterion was fixed after the run", "+.2f",
        )
        for task, arm in (
            ("recall", "O + law"), ("average, clear", "O + law"), ("average, clear", "O + held"),
        )
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    lengths = results["lengths"]
    tasks = [task for task in results["tasks"] if task != EARLY_TASK]
    last = lengths[-1]

    def losses(task: str, *arms: str) -> str:
        return ", ".join(f"{means(results, task, arm, 'loss')[-1]:.3g} with {arm}" for arm in arms)

    def rises(task: str, arm: str) -> float:
        return slope(lengths, means(results, task, arm, "entropy"))

    def rise(task: str, *arms: str) -> str:
        return ", ".join(f"{rises(task, arm):.2f} with {arm}" for arm in arms)

    def each(say: Callable[[str], str], of: list[str] = tasks) -> str:
        return "; ".join(f"{task}: {say(task)}" for task in of) + "."

    held, groups = ("O + calibrated", "O + held"), list(KEY_NOISE)
    law = means(results, tasks[0], "O + law", "factor")[-1]
    return [
        Claim(
            "post 9588, a comment",
            "Where new keys are like the old ones (on a graph), the law makes results worse.",
            f"No graph. Loss at n = {last}: {each(lambda x: losses(x, 'O', 'O + law'))}",
            "exploratory",
        ),
        Claim(
            "post 9588, the reply to it",
            "With keys that are alike, of which many are averaged, no scaling by log n may be better.",
            f"Best factor at n = {last}, where the law has {law:.2f}: "
            + each(lambda x: f"{means(results, x, 'O + best', 'factor')[-1]:.2f}", groups),
            "exploratory",
        ),
        Claim(
            "post 8823",
            "For lengths beyond those of training the entropy should not depend on n.",
            f"Loss at n = {last}: {each(lambda x: losses(x, 'O', *held))}",
            "exploratory",
        ),
        Claim(
            "post 9588",
            "Whatever n is, attention should be on the few keys that matter.",
            f"dH/d log n: {each(lambda x: rise(x, 'ideal'))}",
            verdict(all(rises(task, "ideal") < 0.1 for task in tasks)),
        ),
        Claim(
            "post 9588",
            "With more keys the attention spreads, and a factor that grows with n gathers it again.",
            f"dH/d log n: {each(lambda x: rise(x, 'O', 'O + law'))}",
            verdict(all(rises(task, "O") > rises(task, "O + law") > 0 for task in tasks)),
        ),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot losses against n (top), and the factors of laws and the best factors (bottom).

    Bands are 95 % intervals of the means over seeds.
    """
    lengths, tasks = results["lengths"], results["tasks"]
    figure, axes = plt.subplots(2, len(tasks), figsize=(10, 6.4), sharex=True, layout="constrained")
    for (above, below), task in zip(axes.T, tasks, strict=True):
        for i, arm in enumerate(ARMS):
            style: dict[str, Any] = {"color": f"C{i}", "label": arm}
            if arm == "ideal":
                style |= {"color": "k", "linestyle": "--", "marker": ""}
            for ax, what in ((above, "loss"), (below, "factor")):
                if what in tasks[task][arm][0]:
                    samples = [values(results, task, arm, what, j) for j in range(len(lengths))]
                    plot_means(ax, lengths, samples, **style)
        for found in tasks[task]["O + best"]:
            below.plot(lengths, found["factor"], "C4.", alpha=0.4)
        above.set_title(task, fontsize=10)
        above.set_yscale("linear" if "accuracy" in tasks[task]["O"][0] else "log")
        experiment.length_axis(below, lengths[::2], "keys")
        below.set_yscale("log", base=2)
        below.set_yticks((ticks := (1, 1.5, 2, 3, 4, 6, 8)), [f"{x:g}" for x in ticks])
        below.set_ylim(0.8, 9)
    axes[0, 0].set_ylabel("loss (band: 95 % interval)")
    axes[1, 0].set_ylabel("factor on the scale")
    axes[0, 0].legend(fontsize=8, loc="upper left")
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = experiment.parser(NAME, __doc__, seeds=SEEDS).parse_args(arguments)
    experiment.finish(NAME, run(options.seeds), report, picture, options.output)


if __name__ == "__main__":
    main()
