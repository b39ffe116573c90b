"""A held entropy at each kind of positions of a language model.

    python held_positions.py    # an hour and a half of one core

The model and its loss are those of `smollm2.py`: SmolLM2-135M, trained with 8192 tokens. There, at the
positions of YaRN × 2, holding the entropy of each query loses 0.3 nats per token ("held"). Is it as bad
at other positions? It is a measurement on one document of 12288 tokens, without a verdict.

The positions are: those of the training ("as trained"); clamped (ReRoPE), so that no key is farther
than 4096 tokens, half of the trained length; YaRN × 4; and NTK. Each query beyond the trained length
has its own factor, at which its entropy is the mean entropy of its head at that length. These entropies
are those that `smollm2.py` found at YaRN × 2. At clamped positions the factors come from a bisection of
this script, as no function of the library solves for factors there. The quantity is the mean negative
log-likelihood per token, in nats, of the tokens that see 8193 to 12288 keys. The result of each arm is
kept beside the others as soon as it is there.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import pretrained
import smollm2
import torch
from laws_and_positions import CLAMPED, POSITIONS, arm_at
from matplotlib.figure import Figure
from pretrained import TRAINED, Arm, Document, Numbers
from smollm2 import HELD, NO_LAW
from torch import Tensor
from tqdm import tqdm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import isentropic as it
from isentropic.masks import causal, window

NAME = "held_positions"
LENGTH = TRAINED + TRAINED // 2
DOCUMENT = "topics 0"
WINDOW = TRAINED // 2
LAWS = (NO_LAW, HELD)
STEPS, LIMIT = 16, 1000.0  # of a bisection for factors between 1/LIMIT and LIMIT


def run(name: str, length: int, converted: Path, path: Path) -> dict[str, Any]:
    """All results. Those that are kept are not computed again."""
    model, tokenizer = pretrained.load(converted)
    fits = experiment.load(smollm2.NAME)["fits"]
    edges = smollm2.Size(length, (), (), (), 0).edges
    document = pretrained.read(name, tokenizer, length)
    start = lru_cache(1)(lambda positions: pretrained.prefix(model, document, Arm(positions)))
    losses: dict[str, dict] = {positions: {} for positions in POSITIONS}
    cells = [(positions, law) for positions in POSITIONS for law in LAWS]
    for positions, law in tqdm(cells, unit=" arms"):
        arm = arm_at(positions, law)
        numbers = smollm2.numbers_of(arm, fits)

        def compute(arm: Arm = arm, numbers: Numbers = numbers) -> list[float]:
            if arm.positions == CLAMPED:
                return clamped(model, document, numbers, edges)
            before = start(arm.positions)
            return pretrained.measure(model, document, before, arm, numbers, edges)["bands"]

        what = {"trained": TRAINED, "edges": edges, "document": document.digest, "arm": arm}
        what |= {"slopes": numbers.entropies, "window": WINDOW}
        losses[positions][law] = experiment.kept(path, f"{name} {positions} {law}", what, compute)
    return {"edges": edges, "documents": {name: document.digest}, "losses": losses}


@torch.no_grad()
def clamped(model: Any, document: Document, numbers: Numbers, edges: list[int]) -> list[float]:
    """The mean loss in each band, where no key is farther than the window."""
    pretrained.set_positions(model, "as trained")
    # In one piece, as keys at other positions need all hidden states.
    with using(model, numbers):
        states = model.model(document.ids[None, :-1], use_cache=False).last_hidden_state[0]
        found = pretrained.losses_of(model, states, document.ids[1:])
    return pretrained.means(found, edges)


def using(model: Any, numbers: Numbers) -> contextlib.AbstractContextManager:
    """Clamp positions, and hold the entropies beyond the trained length if there are any."""

    def factor_of(layer: int, pairs: Pairs) -> Tensor:
        factor = torch.ones(pairs[0][0].shape[:-1])
        if numbers.entropies is not None:
            target = torch.as_tensor(numbers.entropies[layer])[:, None]
            factor[..., TRAINED:] = factor_for(target, pairs, factor.shape[-1] - TRAINED)
        return factor

    return clamping(model, factor_of)


@contextlib.contextmanager
def clamping(model: Any, factor_of: Callable[[int, Pairs], Tensor]) -> Iterator[None]:
    """Clamp positions, and multiply each query by the factor (..., L) that its layer gives."""
    far: list[Tensor] = []  # the queries at the position of the window, and the keys at position 0

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        far.clear()
        for project, place in ((module.q_proj, WINDOW), (module.k_proj, 0)):
            rows = project(kwargs["hidden_states"]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
            angles = (x[:, place : place + 1] for x in kwargs["position_embeddings"])
            far.append(apply_rotary_pos_emb(rows, rows, *angles)[0])

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        pairs = (query, key), (far[0], far[1])
        factor = factor_of(module.layer_idx, pairs)
        return clamped_state(pairs, factor, value).output().transpose(1, 2), None

    with contextlib.ExitStack() as stack:
        for layer in model.model.layers:
            handle = layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(pretrained.attention(model, attend))
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


def beyond(losses: dict[str, list[float]], edges: list[int], law: str) -> float:
    """The loss beyond the trained length. The bands there are equally wide."""
    return statistics.fmean(losses[law][edges.index(TRAINED) :])


def report(results: dict[str, Any]) -> str:
    found = results["losses"].values()
    rows = [[law, *(f"{beyond(x, results['edges'], law):.3f}" for x in found)] for law in LAWS]
    (name,) = results["documents"]
    return f"""\
The mean negative log-likelihood per token, in nats, of "{name}", where tokens see {TRAINED + 1} to
{results["edges"][-1]} keys, by the law and the positions:

{experiment.table(["law", *results["losses"]], rows)}
"""


def picture(results: dict[str, Any]) -> Figure:
    """Plot the loss by the number of keys, for each kind of positions."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    middles = [(a + b) / 2 for a, b in pairwise(results["edges"])]
    for i, (positions, of_laws) in enumerate(results["losses"].items()):
        for law, style in zip(LAWS, ("-", "--"), strict=True):
            axis.plot(
                middles, of_laws[law], style, marker="o", color=f"C{i}", label=f"{positions}, {law}"
            )
    axis.axvline(TRAINED, color="gray", linestyle=":")
    axis.set_xlabel("keys")
    axis.set_ylabel("loss, nats per token")
    axis.legend(fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = pretrained.model_parser(NAME, __doc__).parse_args(arguments)
    results = run(DOCUMENT, LENGTH, options.cache / "model", options.output / NAME)
    experiment.finish(NAME, results, report, picture, options.output)


if __name__ == "__main__":
    main()
