"""How the laws of the experiment with SmolLM2 are fitted: by gradients, or to hold entropies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import experiment
import pretrained
import torch
from pretrained import CHUNK, TRAINED, Arm, Document, Numbers
from torch import Tensor
from transformer import affine
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import isentropic as it
from isentropic import laws

RATE = 0.02
QUERIES = 64  # of each length, in `calibrated`


class Fit(NamedTuple):
    per: str
    documents: int
    constant: float = 1.0


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
