"""Each law of the experiment with SmolLM2, at each kind of positions.

    python laws_and_positions.py    # two hours on two cores that multiply bfloat16 in hardware

The model, its documents and its laws are those of `smollm2.py`: SmolLM2-135M, trained with 8192 tokens,
reads twelve documents of 16384. There, all laws are at the positions of YaRN × 2. Do they help as much
at other positions, and which pair of a law and positions has the lowest loss?

What follows was written before the run. Known were the results of `smollm2.py`, and those of an earlier
version of this script, in single precision, on two of the documents up to 12288 tokens: YaRN's constant
gained at stretched positions and lost at others, "slope per head" gained at all, and the lowest mean
was that of clamped positions with "slope per head".

Positions. Those of the training ("as trained"); clamped (ReRoPE), so that no key is farther than 4096
tokens, half of the trained length; YaRN × 4; and NTK.

Laws. Eight arms of `smollm2.py`: no law, YaRN's constant, Su, one slope, slope per layer, slope per
head, calibrated, and constant and slope per head. YaRN's constant is (1 + 0.1 ln 4)² = 1.297 at YaRN ×
4, and (1 + 0.1 ln 2)² = 1.143 at all others. Slopes are those that `smollm2.py` fitted at YaRN × 2. So
at other positions they are used where they were not fitted.

Quantity. The mean negative log-likelihood per token, in nats, where queries see n keys: beyond the
trained length, 8192 < n ≤ 16384, and within it.

Decision. At each kind of positions, paired differences over the documents, of each law against no law
and against YaRN's constant, by `experiment.decide` with a smallest relevant effect of 0.01 nats per
token. Intervals are not corrected for their number. "Slope per head" is the primary arm, as in
`smollm2.py`. The pair with the lowest mean loss of all is compared with each other pair in the same
way, those of `smollm2.py` at YaRN × 2 included.

Precision. Mixed, by PyTorch's autocast: products of matrices have bfloat16 numbers and are added in
single precision, and what the layers add up is in single precision. So that it is known what this
changes, the cells of YaRN × 2 are computed too, on three documents, and compared with those of
`smollm2.py`, which are in single precision. If the mean gain of an arm there, over no law or YaRN's
constant, is off by more than 0.002 nats, the differences here are said to have this error. (While this
was written, three of these cells had been computed: their losses were off by 0.000 to 0.003 in bands.)

The results of each document at each kind of positions are kept beside the others as soon as they are
there, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import experiment
import pretrained
import smollm2
import torch
from pretrained import TRAINED, Arm, Numbers
from smollm2 import HELD, TEMPERATURE
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

NAME = "laws_and_positions"
WINDOW = TRAINED // 2
CLAMPED, EXTENDED = "clamped", Arm().positions
CONSTANTS = {"YaRN × 4": pretrained.temperature(4)}
COLUMNS = ("as trained", CLAMPED, EXTENDED, "YaRN × 4", "NTK")
CALLED = {
    "as trained": "as trained",
    CLAMPED: "clamped",
    EXTENDED: f"at {EXTENDED}",
    "YaRN × 4": "at YaRN × 4",
    "NTK": "with NTK",
}
POSITIONS = tuple(x for x in COLUMNS if x != EXTENDED)  # on all documents
NOT_HERE = {HELD, "constant and one slope", *smollm2.TRAINED_NUMBERS}
LAWS = tuple(
    name for name, arm in smollm2.ARMS.items() if arm.positions == EXTENDED and name not in NOT_HERE
)
PRODUCTS = torch.bfloat16  # the numbers that are multiplied in products of matrices
LIMIT_OF_ERROR = 0.002  # nats


class Size(NamedTuple):
    length: int
    test: tuple[str, ...]
    some: tuple[str, ...]  # of these: also at the positions of `smollm2`


FULL = Size(2 * TRAINED, smollm2.FULL.test, ("topics 0", "docstrings networkx", "source argparse"))


def arm_at(positions: str, law: str) -> Arm:
    arm = smollm2.ARMS[law]._replace(positions=positions)
    return arm if arm.constant == 1 else arm._replace(constant=CONSTANTS.get(positions, TEMPERATURE))


# ----------------------------------------------------------------------------------------- attention


class Part(NamedTuple):
    """Attention to some of the keys, of which no other part has any."""

    output: Tensor  # (..., L, E)
    log_normalizer: Tensor  # (..., L)


def part(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Part:
    # The function behind `scaled_dot_product_attention`, which also returns the normalizer.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_normalizer = flash(query, key, value, 0.0, is_causal)
    return Part(output, log_normalizer)


def merged(parts: list[Part]) -> Tensor:
    weights = torch.stack([x.log_normalizer for x in parts]).softmax(0)
    return sum(w[..., None] * x.output for w, x in zip(weights, parts, strict=True))


Alternatives = Sequence[Tensor]  # the same at one position, or at two for keys that are near and far


def attend_to_all(queries: Alternatives, keys: Alternatives, value: Tensor) -> Tensor:
    """Causal attention of the last queries."""
    (query,), (key,) = queries, keys
    first = key.shape[-2] - query.shape[-2]
    parts = [part(query, key[..., first:, :], value[..., first:, :], is_causal=True)]
    if first:
        parts.append(part(query, key[..., :first, :], value[..., :first, :]))
    return merged(parts)


def attend_clamped(queries: Alternatives, keys: Alternatives, value: Tensor) -> Tensor:
    """The same, where keys at a distance of the window or more are far.

    Queries come in blocks as wide as the window. All keys of their own block are near, those of the one
    before it are partly near and partly far, and all earlier ones are far.
    """
    (near_keys, far_keys), end = keys, value.shape[-2]
    first = end - queries[0].shape[-2]
    found = []
    for a in range(first, end, WINDOW):
        rows = slice(a - first, a - first + WINDOW)
        own, before = slice(a, a + WINDOW), slice(a - WINDOW, a)
        near, far = (x[..., rows, :] for x in queries)
        parts = [part(near, near_keys[..., own, :], value[..., own, :], is_causal=True)]
        if a:
            parts.append(part_above(near, near_keys[..., before, :], value[..., before, :]))
            parts.append(part(far, far_keys[..., before, :], value[..., before, :], is_causal=True))
        if a > WINDOW:
            earlier = slice(a - WINDOW)
            parts.append(part(far, far_keys[..., earlier, :], value[..., earlier, :]))
        found.append(merged(parts))
    return torch.cat(found, dim=-2)


def part_above(query: Tensor, key: Tensor, value: Tensor) -> Part:
    """Attention to the keys whose index is higher than that of the query; the last one has none."""
    # In reversed order, keys with lower indices are seen, as in causal attention.
    rows, columns = query[..., :-1, :], (x[..., 1:, :] for x in (key, value))
    found = part(*(x.flip(-2) for x in (rows, *columns)), is_causal=True)
    output, log_normalizer = found.output.flip(-2), found.log_normalizer.flip(-1)
    return Part(
        nn.functional.pad(output, (0, 0, 0, 1)),
        nn.functional.pad(log_normalizer, (0, 1), value=-torch.inf),
    )


class NoPositions(nn.Module):
    """Rotary positions that rotate nothing, so that `attend` can do it."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)


@contextlib.contextmanager
def using(model: Any, arm: Arm, numbers: Numbers) -> Iterator[None]:
    """Apply an arm with its positions to the model."""
    clamps = arm.positions == CLAMPED
    pretrained.set_positions(model, "as trained" if clamps else arm.positions)
    rotary, model.model.rotary_emb = model.model.rotary_emb, NoPositions()
    of_layers = pretrained.laws_of(arm, numbers.slopes)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads

    angles = rotary(torch.ones(()), torch.arange(2 * TRAINED)[None])

    def rotated(x: Tensor, places: slice) -> Tensor:
        cos, sin = (y[:, places] for y in angles)
        return torch.addcmul(x * cos, rotate_half(x), sin)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        n = key.shape[-2]
        own = slice(n - query.shape[-2], n)
        law = of_layers[module.layer_idx] if isinstance(of_layers, list) else of_layers
        if law is not None:
            query = query * torch.as_tensor(law(torch.arange(n)[own] + 1))[..., None]
        queries, keys = [rotated(query, own)], [rotated(key, slice(n))]
        if clamps:  # The second query is at the position of the window, and its keys at position 0.
            queries.append(rotated(query, slice(WINDOW, WINDOW + 1)))
            keys.append(key)
        *keys, value = (x.repeat_interleave(groups, 1) for x in (*keys, value))
        queries, keys = ([x.to(PRODUCTS) for x in y] for y in (queries, keys))
        value = value.to(PRODUCTS)
        attended = (attend_clamped if clamps else attend_to_all)(queries, keys, value)
        return attended.transpose(1, 2), None

    try:
        with pretrained.attention(model, attend):
            yield
    finally:
        model.model.rotary_emb = rotary


# ---------------------------------------------------------------------------------------------- runs


def losses(model: Any, ids: Tensor, cache: DynamicCache) -> Tensor:
    """`pretrained.losses`, in mixed precision, and with all tokens at a time in the layers."""
    options = {"cache": cache, "use_cache": True}
    with torch.autocast("cpu", PRODUCTS, enabled=PRODUCTS is not torch.float32):
        states = model.model(ids[None, :-1], **options).last_hidden_state[0]
        return pretrained.losses_of(model, states, ids[1:])


@torch.no_grad()
def measured(
    job: tuple[str, str], size: Size, fits: dict[str, dict], converted: Path, path: Path
) -> dict[str, list[float]]:
    """The mean loss in each band, for each law, on a document at some positions."""
    positions, name = job
    model, tokenizer = loaded(converted)
    document, edges = pretrained.read(name, tokenizer, size.length), edges_of(size)

    @lru_cache(1)
    def start(constant: float) -> pretrained.Prefix:
        cache = DynamicCache(config=model.config)
        with using(model, Arm(positions, constant), Numbers()):
            return pretrained.Prefix(cache, losses(model, document.ids[: TRAINED + 1], cache))

    def bands(arm: Arm, numbers: Numbers) -> list[float]:
        before = start(arm.constant)
        with using(model, arm, numbers):
            found = losses(model, document.ids[TRAINED:], pretrained.branch(before.cache))
        experiment.advance()
        return pretrained.means(torch.cat([before.losses, found]), edges)

    arms = {law: arm_at(positions, law) for law in LAWS}
    numbers = {law: smollm2.numbers_of(arm, fits) for law, arm in arms.items()}

    def compute() -> dict[str, list[float]]:
        by_constant = sorted(arms, key=lambda law: arms[law].constant)
        return {law: bands(arms[law], numbers[law]) for law in by_constant}

    what = {"trained": TRAINED, "edges": edges, "document": document.digest, "window": WINDOW}
    what |= {"arms": arms, "slopes": {law: x.slopes for law, x in numbers.items()}}
    what["products"] = str(PRODUCTS)
    return experiment.kept(path, f"{name} {positions}", what, compute, len(LAWS))


loaded = lru_cache(1)(pretrained.load)


def edges_of(size: Size) -> list[int]:
    return smollm2.Size(size.length, (), (), (), 0).edges


def run(size: Size, converted: Path, path: Path, processes: int = 1) -> dict[str, Any]:
    """All results. Those that are kept are not computed again. Each process has one thread."""
    tokenizer = loaded(converted)[1]
    jobs = [(EXTENDED, name) for name in size.some]
    jobs += [(positions, name) for name in size.test for positions in POSITIONS]
    fits = experiment.load(smollm2.NAME)["fits"]
    work = partial(measured, size=size, fits=fits, converted=converted, path=path)
    found = experiment.run(work, jobs, len(jobs) * len(LAWS), processes)
    arms: dict[str, dict] = {positions: {law: {} for law in LAWS} for positions in COLUMNS}
    for (positions, name), of_laws in zip(jobs, found, strict=True):
        for law, bands in of_laws.items():
            arms[positions][law][name] = {"bands": bands}
    return {
        "edges": edges_of(size),
        "documents": {x: pretrained.read(x, tokenizer, size.length).digest for x in size.test},
        "positions": arms,
    }


def main(arguments: list[str] | None = None) -> None:
    import laws_and_positions_results

    parser = pretrained.model_parser(NAME, __doc__, memory=4)
    parser.add_argument(
        "--documents", type=int, choices=range(2, len(FULL.test) + 1), default=len(FULL.test),
        metavar="COUNT", help="only the first of them (%(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    size = FULL._replace(test=FULL.test[: options.documents])
    results = run(size, options.cache / "model", options.output / NAME, options.processes)
    experiment.finish(
        NAME,
        results,
        laws_and_positions_results.report,
        laws_and_positions_results.picture,
        options.output,
    )


if __name__ == "__main__":
    main()
