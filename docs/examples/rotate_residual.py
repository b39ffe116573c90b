"""Rotate the residual stream of a language model, without any change of its logits.

    python rotate_residual.py    # half a minute

All weights of SmolLM2-135M-Instruct that write into the residual stream are rotated on their output.
Those that read it are rotated on their input. An RMS norm commutes with a rotation once its weight is
folded into the layers behind it. So nothing is computed at run time (QuaRot, Ashkboos et al. 2024,
arXiv 2404.00456).

Quantities: the largest change of a logit, and the largest entry of the residual stream relative to the
root mean square of its token, median over the tokens of a text and mean over the layers.
"""

from __future__ import annotations

import copy
import json
import statistics
from typing import Any

import experiment
import pretrained
import torch
from torch import Tensor, nn

import isentropic as it

NAME = "rotate_residual"
LENGTH, TEXT = 256, "topics 0"


def absorb(norm: nn.Module, *layers: nn.Linear) -> None:
    """Move the weight of an RMS norm into the linear layers that read its output."""
    for layer in layers:
        layer.weight.data = layer.weight.data * norm.weight.data
    norm.weight.data = torch.ones_like(norm.weight.data)


def rotated(model: Any, f: Any) -> Any:
    """A copy of a Llama model whose residual stream is ``f`` of the stream of the original."""
    model = copy.deepcopy(model)
    inner, head = model.model, model.lm_head
    # The embeddings and the last layer share their weights in some models, and differ from here on.
    model.config.tie_word_embeddings = False
    head.weight = nn.Parameter(head.weight.data.clone(), requires_grad=False)
    absorb(inner.norm, head)
    readers, writers = [head], []
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        read = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
        absorb(layer.input_layernorm, *read[0])
        absorb(layer.post_attention_layernorm, *read[1])
        readers += read[0] + read[1]
        writers += [attention.o_proj, mlp.down_proj]
    inner.embed_tokens.weight.data = f(inner.embed_tokens.weight.data)
    for layer in readers:
        layer.weight.data = f.fold_into(layer.weight.data, side="input")
    for layer in writers:
        layer.weight.data = f.fold_into(layer.weight.data, side="output")
    return model


@torch.no_grad()
def measure(model: Any, ids: Tensor) -> dict[str, float]:
    f = it.jl.rotation(model.config.hidden_size, rng=0, like=model.lm_head.weight)
    before = model(ids[None], output_hidden_states=True)
    after = rotated(model, f)(ids[None], output_hidden_states=True)
    return {
        "logits": before.logits.abs().max().item(),
        "change": (after.logits - before.logits).abs().max().item(),
        "largest before": largest(before.hidden_states[1:-1]),
        "largest after": largest(after.hidden_states[1:-1]),
    }


def largest(layers: tuple[Tensor, ...]) -> float:
    """The largest entry relative to the root mean square: median over tokens, mean over layers."""
    ratios = (x.abs().amax(-1) / x.square().mean(-1).sqrt() for x in layers)
    return statistics.fmean(x.median().item() for x in ratios)


def main(arguments: list[str] | None = None) -> None:
    options = pretrained.model_parser(NAME, __doc__).parse_args(arguments)
    model, tokenizer = pretrained.load(options.cache / "model")
    results = measure(model, pretrained.read(TEXT, tokenizer, LENGTH).ids)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{NAME}.json"
    path.write_text(json.dumps(experiment.rounded(results), indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
