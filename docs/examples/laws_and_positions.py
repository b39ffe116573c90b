"""Each law of the experiment with SmolLM2, at each kind of positions.

    python laws_and_positions.py    # three hours of one core

The model, its loss and its laws are those of `smollm2.py`: SmolLM2-135M, trained with 8192 tokens. It
reads 12288 here. Do the laws rank as they do at the positions of YaRN × 2? It is a measurement on two
documents, without a verdict.

What follows was written before the run. The positions are: those of the training ("as trained");
clamped (ReRoPE), so that no key is farther than 4096 tokens, half of the trained length; YaRN × 4; and
NTK. The laws are all arms of `smollm2.py` with the positions of YaRN × 2 but "held". The results of
these arms at YaRN × 2 are those of `smollm2.py`. YaRN's constant is (1 + 0.1 ln 4)² = 1.297 at YaRN ×
4, and (1 + 0.1 ln 2)² = 1.143 at all others. Slopes are those that `smollm2.py` fitted at the positions
of YaRN × 2. So at other positions they are used where they were not fitted. The quantity is the mean
negative log-likelihood per token, in nats, of the tokens that see 8193 to 12288 keys. Known before were
the losses without a law and with "Su" as trained and clamped (`law_or_position.py`), and on one
document those without a law at the other positions. The result of each arm is kept beside the others as
soon as it is there.

"held" was added later, when all other results were known: is it as bad elsewhere as at YaRN × 2, where
it loses 0.3 nats? Like the slopes, its entropies are those that `smollm2.py` found at YaRN × 2. It is
run on the first document only, as it takes a quarter of an hour at each kind of positions. At clamped
positions it came last of all, with factors from a bisection of this script, as no function of the
library solves for factors there.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np
import smollm2
import torch
from matplotlib.figure import Figure
from smollm2 import HELD, NO_LAW, TEMPERATURE, TRAINED, Arm, Document, Numbers
from torch import Tensor, nn
from tqdm import tqdm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import isentropic as it
from isentropic.integrations.huggingface._clamp import clamping
from isentropic.masks import causal, window

NAME = "laws_and_positions"
LENGTH = TRAINED + TRAINED // 2
WINDOW = TRAINED // 2
DOCUMENTS = ("topics 0", "source argparse")
CLAMPED, EXTENDED = "clamped", Arm().positions
CONSTANTS = {"YaRN × 4": smollm2.temperature(4)}
COLUMNS = ("as trained", CLAMPED, EXTENDED, "YaRN × 4", "NTK")
POSITIONS = tuple(x for x in COLUMNS if x != EXTENDED)  # that are run here
NOT_HERE = {HELD, *smollm2.TWO_NUMBERS}  # "held" is run on one document
LAWS = {
    name: arm
    for name, arm in smollm2.ARMS.items()
    if arm.positions == EXTENDED and name not in NOT_HERE
}
STEPS, LIMIT = 16, 1000.0  # of a bisection for factors between 1/LIMIT and LIMIT


def arm_at(positions: str, law: str) -> Arm:
    arm = smollm2.ARMS[law]._replace(positions=positions)
    return arm if arm.constant == 1 else arm._replace(constant=CONSTANTS.get(positions, TEMPERATURE))


def run(names: tuple[str, ...], length: int, converted: Path, folder: Path) -> dict[str, Any]:
    """All results. Those that the folder has are not computed again."""
    model, tokenizer = smollm2.load(converted)
    fits = experiment.load(smollm2.NAME)["fits"]
    edges = smollm2.Size(length, names, (), (), 0).edges
    losses: dict[str, dict] = {x: {law: {} for law in (*LAWS, HELD)} for x in POSITIONS}
    digests = {}
    for name in tqdm(names, desc="documents", unit=" documents"):
        document = smollm2.read(name, tokenizer, length)
        digests[name] = document.digest
        start = lru_cache(1)(lambda *key, of=document: smollm2.prefix(model, of, Arm(*key)))
        cells = [(arm_at(positions, law), law) for positions in POSITIONS for law in LAWS]
        cells += [(arm_at(positions, HELD), HELD) for positions in POSITIONS if name == names[0]]
        for arm, law in tqdm(sorted(cells), desc=name, leave=False):
            numbers = smollm2.numbers_of(arm, fits)

            def compute(
                arm: Arm = arm, numbers: Numbers = numbers, of: Document = document, start: Any = start
            ) -> list[float]:
                if arm.positions == CLAMPED:
                    return clamped(model, of, arm, numbers, edges)
                return smollm2.measure(model, of, start(*arm[:2]), arm, numbers, edges)["bands"]

            what = {"trained": TRAINED, "edges": edges, "document": document.digest, "arm": arm}
            what |= {"slopes": numbers.entropies or numbers.slopes, "window": WINDOW}
            kept = f"{name} {arm.positions} {law}"
            losses[arm.positions][law][name] = smollm2.kept(folder, kept, what, compute)
    return {"edges": edges, "documents": digests, "losses": losses}


@torch.no_grad()
def clamped(
    model: Any, document: Document, arm: Arm, numbers: Numbers, edges: list[int]
) -> list[float]:
    """The mean loss in each band, where no key is farther than the window."""
    smollm2.set_positions(model, "as trained")
    # In one piece, as keys at other positions need all hidden states.
    entropies = numbers.entropies
    with clamped_by(model, arm, numbers) if entropies is None else clamped_and_held(model, entropies):
        states = model.model(document.ids[None, :-1], use_cache=False).last_hidden_state[0]
    pairs = zip(states.split(smollm2.CHUNK), document.ids[1:].split(smollm2.CHUNK), strict=True)
    found = torch.cat(
        [nn.functional.cross_entropy(model.lm_head(x), ids, reduction="none") for x, ids in pairs]
    )
    return smollm2.means(found, edges)


@contextlib.contextmanager
def clamped_by(model: Any, arm: Arm, numbers: Numbers) -> Iterator[None]:
    modules = [layer.self_attn for layer in model.model.layers]
    with smollm2.using(model, arm, numbers), clamping(modules, WINDOW):
        yield


@contextlib.contextmanager
def clamped_and_held(model: Any, entropies: Sequence[Any]) -> Iterator[None]:
    """Clamp positions, and give each query beyond the trained length the entropy (H,) of its head."""
    far: list[Tensor] = []  # the queries at the position of the window, and the keys at position 0

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        far.clear()
        for project, place in ((module.q_proj, WINDOW), (module.k_proj, 0)):
            rows = project(kwargs["hidden_states"]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
            angles = (x[:, place : place + 1] for x in kwargs["position_embeddings"])
            far.append(apply_rotary_pos_emb(rows, rows, *angles)[0])

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        pairs = (query, key), (far[0], far[1])
        target = torch.as_tensor(entropies[module.layer_idx])[:, None]
        factor = torch.ones(query.shape[:-1])
        factor[..., TRAINED:] = factor_for(target, pairs, query.shape[-2] - TRAINED)
        return clamped_state(pairs, factor, value).output().transpose(1, 2), None

    with contextlib.ExitStack() as stack:
        for layer in model.model.layers:
            handle = layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(smollm2.attention(model, attend))
        yield


Pairs = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries and keys: near ones, far ones


def clamped_state(pairs: Pairs, factor: Tensor, value: Tensor | None = None) -> it.AttentionState:
    """The state of the last queries, times a factor for each one."""
    near, far = pairs
    first = near[0].shape[-2] - factor.shape[-1]
    masks = window(WINDOW - 1, offset=first), causal(offset=first - WINDOW)
    states = []
    for (query, key), mask in zip((near, far), masks, strict=True):
        query = query[..., first:, :] * factor[..., None]
        states.append(it.attention_state(query, key, value, mask=mask, law=None, enable_gqa=True))
    return it.merge_states(states)


def factor_for(target: Tensor, pairs: Pairs, n_queries: int) -> Tensor:
    """The factors (B, H, n_queries) of the last queries at which their entropies are the target."""
    shape = (*pairs[0][0].shape[:-2], n_queries)
    low, high = torch.full(shape, -math.log(LIMIT)), torch.full(shape, math.log(LIMIT))
    for _ in range(STEPS):
        middle = (low + high) / 2
        is_above = clamped_state(pairs, middle.exp()).entropy() > target
        low, high = torch.where(is_above, middle, low), torch.where(is_above, high, middle)
    return ((low + high) / 2).exp()


def beyond(results: dict[str, Any], extended: dict[str, Any], positions: str, law: str) -> list[float]:
    """The loss beyond the trained length, by document. `extended` are the results of `smollm2`."""
    if positions == EXTENDED:
        edges, bands = extended["edges"], extended["arms"][law]
        rows = [bands[name]["bands"] for name in results["documents"] if name in bands]
    else:
        edges, bands = results["edges"], results["losses"][positions][law]
        rows = [bands[name] for name in results["documents"] if name in bands]
    first, end = edges.index(TRAINED), edges.index(results["edges"][-1])
    return [statistics.fmean(row[first:end]) for row in rows]  # the bands are equally wide


def report(results: dict[str, Any]) -> str:
    extended, (first, *_) = experiment.load(smollm2.NAME), results["documents"]

    def row(law: str, mean: Callable[[list[float]], float]) -> list[str]:
        found = [beyond(results, extended, x, law) for x in COLUMNS]
        return [law, *(f"{mean(x):.3f}" if x else "–" for x in found)]

    of_all = [row(law, statistics.fmean) for law in LAWS]
    of_first = [row(law, itemgetter(0)) for law in (NO_LAW, HELD)]
    return f"""\
The mean negative log-likelihood per token, in nats, of {len(results["documents"])} documents, where
tokens see {TRAINED + 1} to {results["edges"][-1]} keys, by the law and the positions:

{experiment.table(["law", *COLUMNS], of_all)}

The same of the first document alone, "{first}":

{experiment.table(["law", *COLUMNS], of_first)}
"""


def picture(results: dict[str, Any]) -> Figure:
    """Plot the gain of each law over no law at the same positions, for each document.

    "held" is only in a table: its loss is so high that the others could not be told apart.
    """
    extended = experiment.load(smollm2.NAME)
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, law in enumerate(x for x in LAWS if x != NO_LAW):
        losses = [[beyond(results, extended, x, y) for x in COLUMNS] for y in (NO_LAW, law)]
        gains = np.subtract(*losses)  # by positions and documents
        places = np.arange(len(COLUMNS)) + (i - (len(LAWS) - 2) / 2) * 0.08
        for marker, gain, label in zip("os", gains.T, (law, None), strict=True):
            axis.plot(places, gain, marker, color=f"C{i}", markersize=4, label=label)
    axis.axhline(0, color="gray", linewidth=0.5)
    axis.set_xticks(range(len(COLUMNS)), COLUMNS)
    axis.set_ylabel("gain over no law, nats per token")
    axis.legend(fontsize=7)
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = smollm2.model_parser(NAME, __doc__).parse_args(arguments)
    results = run(DOCUMENTS, LENGTH, options.cache / "model", options.output / NAME)
    experiment.finish(NAME, results, report, picture, options.output)


if __name__ == "__main__":
    main()
