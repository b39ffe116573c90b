"""Does a law help a real language model to find something in a context beyond its trained length?

    python retrieval.py            # an hour and a half on one core
    python retrieval.py --quick    # five minutes, and no verdict

The model, its documents and the laws are those of `smollm2`: SmolLM2-135M-Instruct, trained with 8192
tokens, at positions of YaRN × 2. Here sixteen sentences such as "The code of the apple is 31415." are
spread over each document. At the end, after 16384 tokens, the sentences come again in another order.
Does the model know the digits? A head that looks for one of 16384 keys is where diluted attention
should matter most.

What follows was written before the run.

Quantities. The mean negative log-likelihood per digit of the codes, in nats. Guessing costs ln 10. And
the share of codes of which all digits are the most probable ones, given those before them. Both also
for the eight codes of the first half, which are asked for within the trained length.

Documents. The twelve on which `smollm2` tests. The codes are drawn anew for each. The laws were not
fitted on these documents, nor for this task.

Arms, all with the same weights:

- no law.
- YaRN's constant: all logits times 1.143.
- Su: LogLength(8192, minimum=1).
- slope per head: the 270 slopes that `smollm2` has trained on the loss of four other documents. This is
  the primary arm.
- constant and slope per head: YaRN's constant times a law with 270 slopes, which `smollm2` has trained
  together with it on the same documents. This arm was added when the results of the others were known,
  and before its slopes were trained. Against YaRN's constant, do slopes trained with it lose nothing
  that it gains?
- constant per head: a constant at all lengths for each head, 270 numbers, which `smollm2` has trained
  from YaRN's constant on, on the loss beyond the trained length. This arm was added when all results of
  `smollm2` and of the other arms here were known, and before its run. In `smollm2` it gained most,
  also on copied text (by 0.098 nats over YaRN's constant). Against YaRN's constant, does it find codes
  as well? And what does it change within the trained length, for which it was not trained?

Decision. Paired differences over the documents, each arm against no law and against YaRN's constant, by
`experiment.decide`. The smallest relevant effects are 0.05 nats per digit, and 0.05 for the share of
codes. Intervals are not corrected for the number of arms.

What was known. On one of the documents of the fit, no law had 0.68 nats per digit at 4096 tokens, 1.11
at 8192 and 1.34 at 16000, with 5, 3 and 1 of 16 codes right. While this program was tried on two
of these documents with 2048 tokens, as if 1024 were the trained length, all laws gained about 0.1 nats.

Each result is kept in `results/retrieval.jsonl` as soon as it is there, so that a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import random
import statistics
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import experiment
import matplotlib.pyplot as plt
import pretrained
import smollm2
import torch
from effects import BOTH, Effect
from experiment import Claim, Decision, answered, decide, table
from matplotlib.figure import Figure
from pretrained import CHUNK, TRAINED, Arm, Numbers
from smollm2 import CONSTANT, CONSTANTS, NO_LAW, ON_TOP, PRIMARY
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache

from isentropic.integrations import huggingface

NAME = "retrieval"
ARMS = (NO_LAW, CONSTANT, "Su", PRIMARY, ON_TOP, CONSTANTS)
SENTENCE = "\n\nThe code of the {} is {}.\n\n"
THINGS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer",
    "island", "jacket", "kitchen", "ladder", "mirror", "needle", "orange", "piano",
)  # fmt: skip
DIGITS = 5
SMALLEST = {"loss": 0.05, "right": 0.05}  # nats per digit, and share of codes


class Size(NamedTuple):
    length: int
    test: tuple[str, ...]


FULL = Size(2 * TRAINED, smollm2.FULL.test)
# Without the documents that decide.
QUICK = Size(TRAINED + 1024, ("topics 3", "source pickletools"))


# -------------------------------------------------------------------------------------- documents


class Question(NamedTuple):
    """A sentence as tokens, and which of them are digits."""

    ids: tuple[int, ...]
    is_digit: tuple[bool, ...]


class Task(NamedTuple):
    """A document with sentences in it, and the questions at its end and at the trained length."""

    name: str
    ids: Tensor
    digest: str
    late: tuple[Question, ...]
    early: tuple[Question, ...]  # for the sentences in the tokens of `start`
    start: int  # where the first half ends: so many tokens and their questions have the trained length


def task(name: str, index: int, tokenizer: Any, length: int) -> Task:
    draws = random.Random(index)
    codes = {x: "".join(draws.choices("0123456789", k=DIGITS)) for x in THINGS}
    sentences = [question(SENTENCE.format(x, codes[x]), tokenizer) for x in THINGS]
    late = draws.sample(sentences, len(sentences))
    room = sum(len(x.ids) for x in sentences)
    text = pretrained.read(name, tokenizer, length - 2 * room)
    # Each sentence is in the middle of its share of the text.
    count, n = len(sentences), len(text.ids)
    cuts = [0, *(round((i + 0.5) / count * n) for i in range(count)), n]
    parts = [text.ids[a:b].tolist() for a, b in pairwise(cuts)]
    ids, ends = [], []
    for part, sentence in zip(parts[:-1], sentences, strict=True):
        ids += [*part, *sentence.ids]
        ends.append(len(ids))
    ids += parts[-1]
    start = TRAINED - room // 2
    early = [x for x in late if ends[sentences.index(x)] <= start][: count // 2]
    return Task(name, torch.tensor(ids), text.digest, tuple(late), tuple(early), start)


def question(sentence: str, tokenizer: Any) -> Question:
    ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
    is_digit = tuple(tokenizer.decode([x]).strip().isdigit() for x in ids)
    if sum(is_digit) != DIGITS:
        raise ValueError(f"the tokenizer must have a token for each digit of {sentence!r}")
    return Question(tuple(ids), is_digit)


# ------------------------------------------------------------------------------------------ runs


def ask(
    model: Any, last: Tensor, questions: Sequence[Question], cache: DynamicCache
) -> dict[str, float]:
    """The loss per digit, and the share of codes that are right. The cache grows."""
    ids = torch.tensor([last.item(), *(i for x in questions for i in x.ids)])
    logits = model(ids[None, :-1], cache=cache, use_cache=True).logits[0]
    is_digit = torch.tensor([digit for x in questions for digit in x.is_digit])
    logits, answers = logits[is_digit], ids[1:][is_digit]
    right = (logits.argmax(-1) == answers).reshape(-1, DIGITS).all(-1)
    loss = nn.functional.cross_entropy(logits, answers)
    return {"loss": loss.item(), "right": right.float().mean().item()}


def read(model: Any, ids: Tensor, cache: DynamicCache) -> None:
    """Let the model read, so that the cache grows."""
    for part in ids.split(CHUNK):
        model(part[None], cache=cache, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def first_half(model: Any, one: Task, constant: float, constants: Any = None) -> DynamicCache:
    """The cache after the tokens before `start`. All laws with the same constants have it in common."""
    pretrained.set_positions(model, Arm().positions)
    cache = DynamicCache(config=model.config)
    with huggingface.use(model, pretrained.laws_of(Arm(constant=constant), constants=constants)):
        read(model, one.ids[: one.start - 1], cache)
    return cache


@torch.no_grad()
def measure(model: Any, one: Task, before: DynamicCache, arm: Arm, numbers: Numbers) -> dict[str, Any]:
    """The answers within the trained length, and those at the end."""
    pretrained.set_positions(model, arm.positions)
    ids, cache = one.ids, pretrained.branch(before)
    with pretrained.using(model, arm, numbers):
        early = ask(model, ids[one.start - 1], one.early, pretrained.branch(cache))
        read(model, ids[one.start - 1 : -1], cache)
        return {"early": early, "late": ask(model, ids[-1], one.late, cache)}


def run(size: Size, converted: Path, path: Path) -> dict[str, Any]:
    """All results. Those that are kept are not computed again."""
    model, tokenizer = pretrained.load(converted)
    fits = experiment.load(smollm2.NAME)["fits"]
    tasks = [task(name, i, tokenizer, size.length) for i, name in enumerate(FULL.test + QUICK.test)]
    tasks = [x for x in tasks if x.name in size.test]
    arms: dict[str, dict] = {arm: {} for arm in ARMS}
    for one in tqdm(tasks, desc="documents", unit=" documents"):
        for arm, found in measured(model, one, fits, path).items():
            arms[arm][one.name] = found
    return {"documents": {x.name: x.digest for x in tasks}, "length": size.length, "arms": arms}


def measured(model: Any, one: Task, fits: dict[str, dict], path: Path) -> dict[str, Any]:
    """The results of all arms for a document. A prefix is computed if an arm needs it."""
    before = lru_cache(1)(lambda *constants: first_half(model, one, *constants))
    what = {"ids": one.ids.tolist(), "late": one.late, "early": one.early, "start": one.start}
    result = {}
    # Arms with the same prefix follow one another, so that one is in memory at a time.
    for name in tqdm(sorted(ARMS, key=lambda x: smollm2.ARMS[x][:2]), desc=one.name, leave=False):
        arm = smollm2.ARMS[name]
        fit = fits.get(arm.law, {})
        own = Numbers(fit.get("slopes"), fit.get("constants"))

        def compute(arm: Arm = arm, own: Numbers = own) -> dict[str, Any]:
            constants = None if own.constants is None else tuple(map(tuple, own.constants))
            return measure(model, one, before(arm.constant, constants), arm, own)

        of = what | {"arm": arm, "slopes": own.slopes}
        of |= {"constants": own.constants} if own.constants is not None else {}
        result[name] = experiment.kept(path, f"{one.name} {name}", of, compute)
    return result


# --------------------------------------------------------------------------------------- results


def gains(results: dict, arm: str, other: str, quantity: str, when: str = "late") -> list[float]:
    """How much better an arm is than another, for each document."""
    sign = -1 if quantity == "loss" else 1
    found, base = results["arms"][arm], results["arms"][other]
    return [sign * (found[x][when][quantity] - base[x][when][quantity]) for x in found]


def show(arm: str, found: Decision) -> str:
    return found.interval("+.3f") + (f": **{found.verdict}**" if arm == PRIMARY else "")


def report(results: dict[str, Any]) -> str:
    means, decisions = [], []
    for arm, found in results["arms"].items():
        cells = [
            statistics.fmean(x[when][quantity] for x in found.values())
            for when in ("early", "late")
            for quantity in ("loss", "right")
        ]
        means.append([arm, *(f"{x:.3f}" for x in cells)])
        for other in (CONSTANT, NO_LAW):
            if other != arm and (arm, other) != (NO_LAW, CONSTANT):
                of = [decide(gains(results, arm, other, x), SMALLEST[x]) for x in SMALLEST]
                decisions.append([f"{arm}, against {other}", *(show(arm, x) for x in of)])
    n = results["length"]
    head = ["", f"loss, n ≤ {TRAINED}", "right", f"loss, n = {n}", "right"]
    return f"""\
Nats per digit, and the share of codes that are right, mean over {len(results["documents"])} documents:

{table(head, means)}

Paired differences over the documents at n = {n}, with 95 % intervals. More is better. The smallest
relevant effects are {SMALLEST["loss"]} nats per digit and {SMALLEST["right"]} of the codes:

{table(["", "gain in nats per digit", "gain in codes that are right"], decisions)}

The primary arm is {PRIMARY}. All other rows are exploratory.
"""


def effects(results: dict[str, Any]) -> list[Effect]:
    arms = (
        (PRIMARY, NO_LAW, ""),
        (PRIMARY, CONSTANT, ""),
        (CONSTANT, NO_LAW, "not the primary arm"),
        (ON_TOP, CONSTANT, "added when results were known"),
        (CONSTANTS, CONSTANT, "added when results were known"),
    )
    return [
        Effect(
            BOTH, f"SmolLM2 with YaRN × 2, find codes, n = {results['length']}", arm, other,
            decide(gains(results, arm, other, "loss"), SMALLEST["loss"]), SMALLEST["loss"],
            "nats per digit", why, "+.2f",
        )
        for arm, other, why in arms
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    found = decide(gains(results, "Su", NO_LAW, "loss"), SMALLEST["loss"])
    return [
        Claim(
            "post 9588",
            "A factor log n keeps attention on the tokens that matter in longer contexts.",
            f"Codes in {results['length']} tokens of SmolLM2, gain in nats per digit: "
            f"{found.interval('+.3f')}.",
            answered(found),
        )
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot the loss per digit of each arm, within the trained length and at the end."""
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    places = range(len(results["arms"]))
    for shift, when, label in (
        (-0.1, "early", f"8 codes, n ≤ {TRAINED}"),
        (0.1, "late", f"16 codes, n = {results['length']}"),
    ):
        means = [
            decide([x[when]["loss"] for x in found.values()], 0) for found in results["arms"].values()
        ]
        experiment.plot_intervals(axis, [x + shift for x in places], means, capsize=3, label=label)
    axis.set_xticks(list(places), [textwrap.fill(arm, 12) for arm in results["arms"]])
    axis.set_ylabel("nats per digit")
    axis.margins(y=0.2)
    axis.legend(fontsize=8, loc="upper center", ncols=2)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = pretrained.model_parser(NAME, __doc__, quick="five minutes, and no verdict")
    options = parser.parse_args(arguments)
    size, name = (QUICK, f"{NAME}_quick") if options.quick else (FULL, NAME)
    results = run(size, options.cache / "model", options.output / name)
    experiment.finish(name, results, report, picture, options.output)


if __name__ == "__main__":
    main()
