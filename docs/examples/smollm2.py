"""Does a law help a real language model beyond its trained length?

    python smollm2.py            # about four hours on two cores
    python smollm2.py --quick    # ten minutes, and no verdict

SmolLM2-135M-Instruct was trained with contexts of 8192 tokens, and reads documents of 16384 here. Its
positions are those of YaRN × 2. YaRN comes with one constant for all logits at all lengths. A law can
be 1 where the model was trained and grow beyond it, for each head by itself. Is there a law that is
better than YaRN's constant beyond the trained length, and loses nothing within it?

What follows was written before the first run.

Quantity. The mean negative log-likelihood per token, in nats, where queries see n keys: beyond the
trained length, 8192 < n ≤ 16384, and within it. Tables also have it by bands of n. Second quantity: the
same for text that is given again, of which the beginning is the cue (`copying`).

Documents. Twelve, of 16385 tokens each: three parts of Python's language reference, docstrings of three
packages, and six modules of the standard library. Laws are fitted on four others. The model may have
seen all of them in training, which is the same for all arms.

Arms, all with the same weights:

- no law.
- YaRN's constant: all logits times (1 + 0.1 ln 2)² = 1.143.
- Su: LogLength(8192, minimum=1).
- one slope: 1 + slope · ln(n/8192) beyond 8192, and 1 up to there. The slope is fitted by gradients.
- slope per layer, slope per head: the same with 30 and 270 slopes.
- calibrated: the same, where the slopes are those of `drift.calibrate` on queries and keys of the
  documents of the fit, without their loss. It does not know how the law of a layer changes later ones.
- constant and one slope: YaRN's constant times the law of "one slope", fitted with it. It equals YaRN's
  constant within the trained length.
- constant and slope per head: YaRN's constant times a law with 270 slopes, fitted with it (added later,
  see below).
- two numbers per layer, two numbers per head: a constant and a slope, with 60 and 540 numbers. Both are
  trained, from YaRN's constant and the slope 0 on (added last, see below).
- constant per head: a constant at all lengths for each head, and no slope: 270 numbers, trained from
  YaRN's constant on (the control of "two numbers per head", added after it, see below).
- as trained, YaRN × 4, NTK: other positions without a law, on two documents only, for orientation.
- two numbers per head, as trained: the numbers of "two numbers per head" at the positions of the
  training, also on two documents.
- held: each query beyond the trained length has its own factor, at which its entropy is the mean
  entropy of its head at the trained length (of 64 queries in each document of the fit). Also on two
  documents, as each took half an hour.

A fit has all weights frozen. It starts from "no law", and makes one step of Adam for each 1024 tokens.
Gradients do not reach the keys of earlier tokens.

Decision. Paired differences over the documents, each arm against YaRN's constant and against no law,
by `experiment.decide` with a smallest relevant effect of 0.01 nats per token. The answer of an arm is
yes if it helps beyond the trained length against YaRN's constant, and if its mean loss within that
length is at most 0.002 nats above that of no law. All laws that are 1 there keep this limit by
construction. YaRN's constant may itself gain within the trained length. So the answer also says whether
the arm keeps the same limit against YaRN's constant. Intervals are not corrected for the number of
arms. So "slope per head" is the primary arm, and others that pass are candidates for other documents.

What was known. On two texts, which may overlap with the documents, YaRN's constant gained 0.001 to
0.036 nats in bands within the trained length. Beyond it, the loss of Su in bands was between 0.022
below and 0.053 above that of YaRN's constant, and worst just beyond.

Added later. "constant and slope per head" was written down when the results of "no law", the constant,
"Su", "one slope", "slope per head" and "calibrated" on these documents were known, and before its own
fit. Slopes per head had a lower loss than the constant beyond the trained length (by 0.021 nats), and
the constant found more codes there (`retrieval`, by 0.087 nats per digit). So: is there something to
gain in both when the slopes are trained on top of the constant? The decision is as above: yes if the
arm helps against YaRN's constant. Within the trained length it equals the constant by construction.

"held" was written down when all results but those of "slope per layer" and "constant and one slope"
were known. Clamped positions (ReRoPE) are in `law_or_position`.

"two numbers per layer" and "two numbers per head" were written down when all other results were known.
Is a constant of each layer or head better than the same constant for all? The constants hold at all
lengths. They are trained on the loss beyond the trained length alone. So they may lose within it, which
the decision has to show. It is as above, and these arms are candidates too. They are also compared with
"constant and slope per head", by the same rule.

"two numbers per head, as trained" was written down when eight documents of "two numbers per head" were
known. There the loss fell within the trained length too, by 0.037 nats. Do the constants repair what
YaRN's positions do to the logits, or do they adapt the model to this kind of text? In the second case
they lower the loss within the trained length at the positions of the training as well.

"constant per head" was written down when the results of all other arms were known. "Two numbers per
head" gains 0.028 nats over YaRN's constant beyond the trained length, and 0.032 within it, where its
slopes do nothing. So constants gain something, and what do the slopes add to them? The arm is trained
like "two numbers per head", on the same documents, with slopes that stay 0. "Two numbers per head" is
compared with it beyond the trained length, by the same rule and the same smallest effect. If it helps,
the dependence on the length matters also where each head has a constant of its own. If there is no
effect, trained constants do what the trained laws do.

Time. Measured in two processes of one thread each, on two cores of an AMD EPYC (family 25, model 17).
In seconds: 75 for the tokens up to the trained length, 14 to 22 for each 1024 tokens beyond it, 110
with "held", and 46 for a step of a fit. So a document takes 75 once for each constant, and 150 for each
law. From these figures all arms and fits take four hours on two cores. The two that were added later
take 0.9 of them. `--quick` took 8 minutes. Most of the time goes into the products of attention, in
single precision. A step with 512 tokens had a peak of 4.7 GB, so one with 1024 may need 8 GB in each
process. Each result is kept in `results/smollm2.jsonl` as soon as it is there, so that a
run that was stopped goes on where it was; only a fit starts again. `--arms` runs some of the arms.
`--processes` sets how many documents or fits are computed at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import experiment
import matplotlib.pyplot as plt
import pretrained
import torch
from effects import BOTH, Effect
from experiment import Claim, Decision, answered, decide, kept, plot_means, table
from matplotlib.figure import Figure
from pretrained import CHUNK, CUE, SPAN, SPANS, TRAINED, Arm, Document, Numbers, Prefix, temperature
from torch import Tensor
from transformer import affine
from transformers import (
    DynamicCache,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import isentropic as it
from isentropic import laws

NAME = "smollm2"
CHECKED, SANE = 1024, (1.0, 4.0)  # tokens of a known text, and the range of their mean loss in nats
RATE = 0.02
QUERIES = 64  # of each length, in `calibrated`
# What decides, in nats per token.
SMALLEST, LIMIT_WITHIN = 0.01, 0.002
PRIMARY, NO_LAW, CONSTANT = "slope per head", "no law", "YaRN's constant"
ON_TOP, CALIBRATED, HELD = "constant and slope per head", "calibrated", "held"
TWO_NUMBERS = ("two numbers per layer", "two numbers per head")
CONSTANTS = "constant per head"
TEMPERATURE = temperature(2)

ARMS = {
    NO_LAW: Arm(),
    CONSTANT: Arm(constant=TEMPERATURE),
    "Su": Arm(law="Su"),
    "one slope": Arm(law="one slope"),
    "slope per layer": Arm(law="slope per layer"),
    "slope per head": Arm(law="slope per head"),
    CALIBRATED: Arm(law=CALIBRATED),
    "constant and one slope": Arm(constant=TEMPERATURE, law="constant and one slope"),
    ON_TOP: Arm(constant=TEMPERATURE, law=ON_TOP),
    **{name: Arm(constant=TEMPERATURE, law=name) for name in (*TWO_NUMBERS, CONSTANTS)},
    "as trained": Arm("as trained"),
    f"{TWO_NUMBERS[1]}, as trained": Arm("as trained", TEMPERATURE, TWO_NUMBERS[1]),
    "YaRN × 4": Arm("YaRN × 4"),
    "NTK": Arm("NTK"),
    HELD: Arm(law=HELD),
}


class Fit(NamedTuple):
    per: str
    documents: int
    constant: float = 1.0


FITS = {
    "one slope": Fit("model", 2),
    "slope per layer": Fit("layer", 4),
    "slope per head": Fit("head", 4),
    "constant and one slope": Fit("model", 2, TEMPERATURE),
    ON_TOP: Fit("head", 4, TEMPERATURE),
    **{name: Fit(name.split()[-1], 4, TEMPERATURE) for name in (*TWO_NUMBERS, CONSTANTS)},
}
# What the fits train that do not train slopes alone.
TRAINED_NUMBERS = dict.fromkeys(TWO_NUMBERS, ("slopes", "constants")) | {CONSTANTS: ("constants",)}


class Size(NamedTuple):
    length: int
    test: tuple[str, ...]
    fit: tuple[str, ...]
    arms: tuple[str, ...]
    orientation: int  # how many documents for "held" and for other positions

    @property
    def edges(self) -> list[int]:
        """The limits of the bands: two within the trained length, and four beyond it."""
        step = (self.length - TRAINED) // 4
        return [0, TRAINED // 2, *range(TRAINED, self.length + 1, step)]


FULL = Size(
    2 * TRAINED,
    (
        "topics 0", "topics 1", "topics 2",
        "docstrings networkx", "docstrings matplotlib", "docstrings torch",
        "source argparse", "source doctest", "source inspect",
        "source tarfile", "source turtle", "source typing",
    ),
    ("topics 3", "source _pydecimal", "docstrings sympy", "source pickletools"),
    tuple(ARMS),
    2,
)  # fmt: skip
QUICK = Size(
    TRAINED + 2048,
    ("topics 0", "source argparse"),
    ("source _pydecimal",),
    (NO_LAW, CONSTANT, "Su", "one slope"),
    0,
)


# ------------------------------------------------------------------------------------------- fits


def in_two_parts(model: Any, of_layers: Sequence[laws.Law]) -> contextlib.AbstractContextManager:
    """Compute attention to the keys in the cache by itself, and merge it with that to the new keys.

    Gradients do not reach the keys in the cache. This saves two of the seven products of matrices.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        cached = key.shape[-2] - query.shape[-2]
        state = partial(
            it.attention_state, query, law=of_layers[module.layer_idx], scale=options["scaling"],
            n_keys=torch.arange(cached, key.shape[-2]) + 1, enable_gqa=True,
        )  # fmt: skip
        before = state(key[..., :cached, :].detach(), value[..., :cached, :].detach())
        among = state(key[..., cached:, :], value[..., cached:, :], is_causal=True)
        return it.merge_states(before, among).output().transpose(1, 2), None

    return pretrained.attention(model, attend)


def fit(
    model: Any, documents: Sequence[Document], job: Fit, *, trained: Sequence[str] = ("slopes",)
) -> dict[str, Any]:
    """Numbers that lower the loss beyond the trained length, and the loss before each step.

    `trained` has "slopes", "constants" or both. Constants change for the tokens up to the trained
    length when the next document begins.
    """
    config = model.config
    width = config.num_attention_heads if job.per == "head" else 1
    count = 1 if job.per == "model" else config.num_hidden_layers
    starts = {"slopes": 0.0, "constants": job.constant}
    numbers = {
        name: [torch.full((width,), starts[name], requires_grad=True) for _ in range(count)]
        for name in trained
    }
    arm, repeats = Arm(constant=job.constant), config.num_hidden_layers // count
    of_layers = Numbers(**{name: x * repeats for name, x in numbers.items()})
    steps = len(documents) * (len(documents[0].ids) - 1 - TRAINED) // CHUNK
    optimizer = torch.optim.Adam([{"params": x} for x in numbers.values()], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    history = []
    for document in documents:
        cache = pretrained.prefix(model, document, arm, of_layers.constants).cache
        with in_two_parts(model, pretrained.laws_of(arm, of_layers.slopes, of_layers.constants)):
            for a in range(TRAINED, len(document.ids) - 1, CHUNK):
                loss = pretrained.losses(model, document.ids[a : a + CHUNK + 1], cache).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                history.append(loss.item())
                experiment.advance()
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
    found = {name: x for name, x in of_layers._asdict().items() if x is not None}
    return {name: [part.tolist() for part in x] for name, x in found.items()} | {"losses": history}


@torch.no_grad()
def calibrated(model: Any, documents: Sequence[Document]) -> dict[str, Any]:
    """Slopes through the factors of `drift.calibrate`, from queries of three lengths in each layer."""
    samples: list[list] = [[] for _ in model.model.layers]
    for document in documents:
        cache, _ = pretrained.prefix(model, document, Arm())
        length = len(document.ids) - 1
        middle = (TRAINED + length) // 2
        for n, before in ((TRAINED, 0), (middle, TRAINED), (length, middle)):
            if before:
                pretrained.losses(model, document.ids[before : n - QUERIES + 1], cache)
            else:
                cache.crop(-QUERIES)
            with queries(model) as found:
                pretrained.losses(model, document.ids[n - QUERIES : n + 1], cache)
            for sample, query, layer in zip(samples, found, cache.layers, strict=True):
                sample.append((query, layer.keys, it.masks.causal()))
        experiment.advance()
    reports = [it.drift.calibrate(x, reference_length=TRAINED, enable_gqa=True) for x in samples]
    slopes = [affine(report, x[0][0]).slope for report, x in zip(reports, samples, strict=True)]
    return {"slopes": [x.tolist() for x in slopes], "losses": []}


@torch.no_grad()
def held_entropies(model: Any, documents: Sequence[Document]) -> dict[str, Any]:
    """The mean entropies of the heads of each layer, (H,), at the trained length."""
    sums: list[Any] = [0.0 for _ in model.model.layers]
    for document in documents:
        cache, _ = pretrained.prefix(model, document, Arm())
        cache.crop(-QUERIES)
        with queries(model) as found:
            pretrained.losses(model, document.ids[TRAINED - QUERIES : TRAINED + 1], cache)
        for i, (query, layer) in enumerate(zip(found, cache.layers, strict=True)):
            options = {"mask": it.masks.causal(), "enable_gqa": True}
            entropy = it.attention_entropy(query, layer.keys, law=None, **options)
            sums[i] = sums[i] + entropy.mean(dim=(0, -1))
        experiment.advance()
    return {"entropies": [(x / len(documents)).tolist() for x in sums]}


@contextlib.contextmanager
def queries(model: Any) -> Iterator[list[Tensor]]:
    """The last rotated queries of each layer, (1, H, QUERIES, E), while the model runs."""
    found: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        query = module.q_proj(kwargs["hidden_states"][:, -QUERIES:])
        query = query.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        angles = (x[:, -QUERIES:] for x in kwargs["position_embeddings"])
        found.append(apply_rotary_pos_emb(query, query, *angles)[0])

    with contextlib.ExitStack() as stack:
        for layer in model.model.layers:
            handle = layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
            stack.callback(handle.remove)
        yield found


def run(size: Size, converted: Path, path: Path, processes: int = 1) -> dict[str, Any]:
    """All results. Those that are kept are not computed again. Each process has one thread."""
    model, tokenizer = pretrained.load(converted)
    test, fitting = (
        [pretrained.read(x, tokenizer, size.length) for x in names] for names in (size.test, size.fit)
    )
    checked = kept(converted, "check", {"tokens": CHECKED}, lambda: check(model, tokenizer))
    if not SANE[0] < checked < SANE[1]:
        raise ValueError(f"the converted model must have a loss in {SANE}, got {checked:.3f}")

    steps = fits_of(size)
    by_length = sorted(steps, key=lambda name: -steps[name])  # so that the last ones are short
    work = partial(fitted, documents=fitting, size=size, converted=converted, path=path)
    numbers = experiment.run(work, by_length, sum(steps.values()), processes)
    fits = dict(zip(by_length, numbers, strict=True))

    work = partial(measured, size=size, fits=fits, converted=converted, path=path)
    count = sum(documents_of(ARMS[arm], size) for arm in size.arms)
    found = experiment.run(work, list(enumerate(test)), count, processes)
    return {
        "edges": size.edges,
        "documents": {x.name: x.digest for x in (*test, *fitting)},
        "check": checked,
        "fits": {name: fits[name] for name in steps},
        "arms": {
            arm: {x.name: y[arm] for x, y in zip(test, found, strict=True) if arm in y}
            for arm in size.arms
        },
    }


@torch.no_grad()
def check(model: Any, tokenizer: Any) -> float:
    pretrained.set_positions(model, "as trained")
    ids = pretrained.read("topics 0", tokenizer, CHECKED).ids
    return pretrained.losses(model, ids, DynamicCache(config=model.config)).mean().item()


def fits_of(size: Size) -> dict[str, int]:
    """The laws with numbers that are found on the documents, each with the steps of its progress."""
    fitting, steps = len(size.fit), (size.length - TRAINED) // CHUNK
    counts = {name: min(job.documents, fitting) * steps for name, job in FITS.items()}
    counts |= {CALIBRATED: fitting, HELD: fitting}
    names = dict.fromkeys(ARMS[arm].law for arm in size.arms)
    return {name: counts[name] for name in names if name in counts}


def fitted(
    name: str, documents: Sequence[Document], size: Size, converted: Path, path: Path
) -> dict[str, Any]:
    """The numbers of a law: slopes, constants, or entropies."""
    model, _ = pretrained.load(converted)
    settings: dict[str, Any] = {
        "trained": TRAINED,
        "length": size.length,
        "chunk": CHUNK,
        "rate": RATE,
    }
    if name in FITS:
        documents = documents[: FITS[name].documents]
        settings["job"] = FITS[name]
        compute = partial(
            fit, model, documents, FITS[name], trained=TRAINED_NUMBERS.get(name, ("slopes",))
        )
    else:
        settings["queries"] = QUERIES
        compute = partial(calibrated if name == CALIBRATED else held_entropies, model, documents)
    settings["documents"] = [x.digest for x in documents]
    return kept(path, name, settings, compute, fits_of(size)[name])


def documents_of(arm: Arm, size: Size) -> int:
    """On how many documents the arm is run: on all, or on some for orientation."""
    is_for_orientation = arm.law == HELD or arm.positions != Arm().positions
    return size.orientation if is_for_orientation else len(size.test)


def numbers_of(arm: Arm, fits: dict[str, dict]) -> Numbers:
    """The numbers of an arm; none if it has no fit."""
    found = fits.get(arm.law, {})
    return Numbers(*map(found.get, Numbers._fields))


def measured(
    job: tuple[int, Document], size: Size, fits: dict[str, dict], converted: Path, path: Path
) -> dict[str, Any]:
    """The results of all arms for a document and its index. A prefix is computed if an arm needs it."""
    index, document = job
    model, _ = pretrained.load(converted)

    # Arms with the same prefix follow one another, so that one is in memory at a time. `own` is an arm
    # with constants of its own.
    @lru_cache(1)
    def start(positions: str, constant: float, own: str = "") -> Prefix:
        constants = numbers_of(ARMS[own], fits).constants if own else None
        return pretrained.prefix(model, document, Arm(positions, constant), constants)

    settings = {
        "trained": TRAINED,
        "edges": size.edges,
        "chunk": CHUNK,
        "document": document.digest,
    }
    names = [x for x in size.arms if index < documents_of(ARMS[x], size)]
    result = {}
    for name in sorted(names, key=lambda x: ARMS[x][:2]):
        arm = ARMS[name]
        numbers = numbers_of(arm, fits)

        key = (*arm[:2], name if numbers.constants else "")

        def compute(arm: Arm = arm, numbers: Numbers = numbers, key: Any = key) -> dict[str, Any]:
            return pretrained.measure(model, document, start(*key), arm, numbers, size.edges)

        what = settings | {"arm": arm, "slopes": numbers.entropies or numbers.slopes}
        what |= {"copies": (SPANS, SPAN, CUE)} | (
            {"constants": numbers.constants} if numbers.constants else {}
        )
        result[name] = kept(path, f"{document.name} {name}", what, compute)
        experiment.advance()
    return result


# --------------------------------------------------------------------------------------- results


def loss(results: dict, arm: str, document: str, beyond: bool) -> float:
    """The mean loss beyond the trained length, or within it."""
    edges, bands = results["edges"], results["arms"][arm][document]["bands"]
    widths = [b - a for a, b in pairwise(edges)]
    chosen = [(w, x) for w, x, a in zip(widths, bands, edges, strict=False) if (a >= TRAINED) == beyond]
    return sum(w * x for w, x in chosen) / sum(w for w, _ in chosen)


def gains(results: dict, arm: str, other: str, beyond: bool = True) -> list[float]:
    """How much less loss an arm has than another, for each document that both have."""
    documents = [x for x in results["arms"][arm] if x in results["arms"][other]]
    return [loss(results, other, x, beyond) - loss(results, arm, x, beyond) for x in documents]


def gains_by_kind(results: dict, arm: str, other: str) -> list[float]:
    """The mean gains of each kind of documents: the first word of their names."""
    both = [x for x in results["arms"][arm] if x in results["arms"][other]]
    found: dict[str, list[float]] = {}
    for name, gain in zip(both, gains(results, arm, other), strict=True):
        found.setdefault(name.partition(" ")[0], []).append(gain)
    return [statistics.fmean(x) for x in found.values()]


def copied(results: dict, arm: str, other: str) -> list[float]:
    found, base = results["arms"][arm], results["arms"][other]
    return [base[x]["copied"] - found[x]["copied"] for x in found if x in base]


def answers(results: dict, arm: str) -> str:
    """What an arm says to the question."""
    if len(results["arms"][arm]) < len(FULL.test):
        return "not run on all documents"
    beyond = decide(gains(results, arm, CONSTANT), SMALLEST)
    if beyond.verdict != "helps":
        return beyond.verdict
    lost = {x: -statistics.fmean(gains(results, arm, x, beyond=False)) for x in (NO_LAW, CONSTANT)}
    if lost[NO_LAW] > LIMIT_WITHIN:
        return f"helps beyond, but loses {lost[NO_LAW]:.3f} within"
    if lost[CONSTANT] > LIMIT_WITHIN:
        return f"yes, but YaRN's constant is better by {lost[CONSTANT]:.3f} within"
    return "yes"


def show(found: Decision) -> str:
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def laws_in(results: dict) -> list[str]:
    """The arms that were run on all documents."""
    full = len(results["arms"][NO_LAW])
    return [arm for arm, found in results["arms"].items() if len(found) == full]


def bands_table(results: dict, arms: Sequence[str]) -> str:
    """The means over the documents that the last of the arms has."""
    edges, documents = results["edges"], list(results["arms"][arms[-1]])
    some = f"{len(documents)} documents" if len(documents) > 1 else documents[0]
    head = [f"loss on {some}, n =", *(f"to {b}" for b in edges[1:]), "copied"]
    rows = []
    for arm in arms:
        found = [results["arms"][arm][x] for x in documents]
        columns = [*zip(*(x["bands"] for x in found), strict=True), [x["copied"] for x in found]]
        rows.append([arm, *(f"{statistics.fmean(x):.3f}" for x in columns)])
    return table(head, rows)


def decisions_table(results: dict) -> str:
    rows = []
    for arm in laws_in(results):
        others = (CONSTANT, NO_LAW, *([ON_TOP] if arm in TWO_NUMBERS else []))
        others += (CONSTANTS,) if arm == TWO_NUMBERS[1] and CONSTANTS in laws_in(results) else ()
        against = [other for other in others if other != arm]
        for other in against:
            within = statistics.fmean(gains(results, arm, other, beyond=False))
            beyond, again = (decide(x(results, arm, other), SMALLEST) for x in (gains, copied))
            rows.append([f"{arm}, against {other}", show(beyond), f"{within:+.4f}", show(again)])
    return table(["gain in nats per token", "beyond", "within", "copied"], rows)


def by_kind(results: dict) -> str:
    """The same differences with a kind of documents as the unit, of the arms that the text names."""
    pairs = ((PRIMARY, CONSTANT), ("calibrated", NO_LAW), (CONSTANTS, CONSTANT))
    found = {
        f"{arm} against {other}": gains_by_kind(results, arm, other)
        for arm, other in pairs
        if arm in laws_in(results)
    }
    decisions = {pair: decide(of, SMALLEST) for pair, of in found.items() if len(of) > 1}
    if not decisions:
        return ""
    shown = "; ".join(f"{pair} {x.interval('+.3f')}" for pair, x in decisions.items())
    return f"""
Documents of a kind are alike. With the means of each kind in place of the documents (computed later):
{shown}.
"""


def numbers_table(results: dict) -> str:
    rows = []
    for kind, title in (("slopes", "slope per ln n"), ("constants", "constant")):
        for name, found in results["fits"].items():
            if values := sorted(x for layer in found.get(kind) or () for x in layer):
                cuts = (values[0], statistics.median(values), values[-1])
                rows.append([name, title, *(f"{x:+.3f}" for x in cuts)])
    return table(["numbers", "", "least", "median", "greatest"], rows)


def price_of_positions(results: dict) -> str:
    """What the positions of YaRN cost within the trained length, and what trained constants repair."""
    trained, own = "as trained", TWO_NUMBERS[1]
    if not all(results["arms"].get(arm) for arm in (trained, own, f"{own}, {trained}")):
        return ""
    count = len(results["arms"][trained])
    price, left, adapted = (
        statistics.fmean(gains(results, trained, arm, beyond=False))
        for arm in (NO_LAW, own, f"{own}, {trained}")
    )
    text = (
        f" Within the trained length the model has {price:.3f} nats less with its own positions than "
        f"with those of YaRN × 2, both without a law (mean of {count} documents). That is the price of "
        f'the positions. Of this, "{own}" leaves {left:+.3f} nats. At the model\'s own positions its '
        f"numbers change the loss within the trained length by {adapted:+.3f} nats."
    )
    if -adapted >= price / 4:
        return text
    return (
        f"{text} So the numbers hardly adapt the model to these texts: they repair what the stretched "
        "positions do to the logits."
    )


def report(results: dict[str, Any]) -> str:
    decided = answers(results, PRIMARY) if PRIMARY in laws_in(results) else "not run"
    missing = [arm for arm in ARMS if arm not in results["arms"]]
    not_run = f" Not run, of the arms in the script: {', '.join(missing)}." if missing else ""
    bands = bands_table(results, laws_in(results))
    orientation: dict[tuple[str, ...], list[str]] = {}  # by the documents of the arms
    for arm, of_arm in results["arms"].items():
        if arm not in laws_in(results):
            orientation.setdefault(tuple(of_arm), [NO_LAW]).append(arm)
    bands = "\n\n".join([bands, *(bands_table(results, x) for x in orientation.values())])
    return f"""\
The mean negative log-likelihood per token, in nats, by the number n of keys:

{bands}

Paired differences over {len(results["arms"][NO_LAW])} documents, with 95 % intervals. The smallest
relevant effect is {SMALLEST} nats:

{decisions_table(results)}
{by_kind(results)}
"Copied" is the loss of parts of the text that are given again, of which the beginning is the cue.

Is there a law that is better than YaRN's constant beyond the trained length, and whose loss within it
is at most {LIMIT_WITHIN} nats above that of no law? The arm that decides is {PRIMARY}: {decided}. All
other rows are exploratory.{not_run}{price_of_positions(results)}

{numbers_table(results)}
"""


def effects(results: dict[str, Any]) -> list[Effect]:
    task = f"SmolLM2 with YaRN × 2, trained with {TRAINED}, n = {TRAINED + 1} to {FULL.length}"
    added = "added when results were known"
    arms = (
        (PRIMARY, CONSTANT, gains, "", ""),
        (PRIMARY, CONSTANT, gains_by_kind, " (unit: a kind of documents)", "this unit came later"),
        ("Su", CONSTANT, gains, "", "not the primary arm"),
        (CONSTANTS, CONSTANT, gains, "", added),
        (CONSTANTS, CONSTANT, gains_by_kind, " (unit: a kind of documents)", added),
        (TWO_NUMBERS[1], CONSTANTS, gains, "", added),
    )
    return [
        Effect(
            BOTH, task, arm.replace("Su", "log n") + unit, other,
            decide(of(results, arm, other), SMALLEST), SMALLEST, "nats per token", why, "+.3f",
        )
        for arm, other, of, unit, why in arms
    ]  # fmt: skip


def claims(results: dict[str, Any]) -> list[Claim]:
    def claim(source: str, says: str, arm: str) -> Claim:
        found = decide(gains(results, arm, NO_LAW), SMALLEST)
        text = f"Gain in nats per token beyond the trained length: {show(found)}."
        return Claim(source, says, text, answered(found))

    return [
        claim(
            "YaRN, arXiv 2309.00071",
            "A constant temperature lowers the perplexity of longer contexts.",
            CONSTANT,
        ),
        claim(
            "post 9588",
            "A factor log n beyond the trained length improves extrapolation.",
            "Su",
        ),
    ]


def picture(results: dict[str, Any]) -> Figure:
    """Plot the gain of each arm against no law, by bands of n, with intervals over the documents."""
    edges, arms = results["edges"], results["arms"]
    figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    colors = plt.get_cmap("tab20").colors
    for arm, color in zip(laws_in(results), colors, strict=False):
        pairs = [(arms[NO_LAW][x]["bands"], found["bands"]) for x, found in arms[arm].items()]
        gained = ([a - b for a, b in zip(*pair, strict=True)] for pair in pairs)
        plot_means(axis, middles, list(zip(*gained, strict=True)), label=arm, color=color)
    axis.axvline(TRAINED, color="gray", linestyle=":")
    axis.set_xlabel("keys")
    axis.set_ylabel("gain over no law, nats per token")
    axis.set_title("means over the documents, with their 95 % intervals", fontsize=9)
    figure.legend(fontsize=8, loc="outside right upper")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = pretrained.model_parser(NAME, __doc__, quick="ten minutes, and no verdict")
    parser.add_argument(
        "--arms", type=arms, metavar="NAME,NAME", help="only these, and those without a law"
    )
    parser.add_argument(
        "--processes", type=experiment.positive, default=2, metavar="COUNT",
        help="each of one thread, and with up to 8 GB (%(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    size, name = (QUICK, f"{NAME}-quick") if options.quick else (FULL, NAME)
    size = size._replace(arms=options.arms or size.arms)
    results = run(size, options.cache / "model", options.output / name, options.processes)
    experiment.finish(name, results, report, picture, options.output)


def arms(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if unknown := [x for x in names if x not in ARMS]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(ARMS)}, got {unknown[0]}")
    return tuple(x for x in ARMS if x in {NO_LAW, CONSTANT, *names})


if __name__ == "__main__":
    main()
