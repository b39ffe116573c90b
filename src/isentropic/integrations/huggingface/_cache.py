"""A cache of transformers whose older keys and values are quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from isentropic import jl
from isentropic._checks import check_choice, counts, type_error
from isentropic.jl._quantizers import KINDS, QuantizedVectors, Quantizer

# Tokens leave the exact part of the cache in groups of this size, as a single token is slow to encode.
_STEP = 32


def quantized_cache(
    model: Any, bits: int = 4, *, kind: str = "mse", recent: int = 64, rng: Any = 0
) -> Cache:
    """A cache for `generate` that keeps keys and values in a few bits.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of an encoder–decoder, the cache of cross-attention stays exact.
    bits : {1, 2, 3, 4, 8}
        The bits of a number. A key of 64 numbers takes 8 · bits bytes, and 4 for its scale.
    kind : {"mse", "unbiased"}
        As for `jl.quantizer`. The keys and the values have rotations of their own.
    recent : int ≥ 1
        So many tokens at the end, and up to 31 more, stay as they are. So do the tokens of a forward
        pass during that pass, and layers with a sliding window.
    rng : int or numpy.random.Generator
        The source of the rotations.

    Returns
    -------
    transformers.Cache
        Keys are quantized after their rotary positions. Each forward pass decodes the keys and values
        of a layer while it computes that layer. So the memory is that of the codes, of the recent
        tokens, and of one decoded layer. Codes have no gradients.

    Raises
    ------
    TypeError, ValueError
        For a `model` that is not of transformers, and for values out of range.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=3))
    >>> cache = huggingface.quantized_cache(model, bits=4, recent=16)
    >>> length = {"min_new_tokens": 60, "max_new_tokens": 60}
    >>> text = model.generate(torch.zeros(1, 3, dtype=int), cache=cache, **length)
    >>> cache.get_seq_length()
    62
    """
    if not hasattr(model, "config"):
        raise type_error("model", "be a model of transformers", type(model).__name__)
    check_choice("kind", kind, KINDS[:2])
    (recent,) = counts(recent=recent)
    jl.quantizer(8, bits, kind=kind, rng=0)  # which checks them
    seeds = np.random.default_rng(rng).integers(2**63, size=2)
    quantizers = _Quantizers(bits, kind, tuple(map(int, seeds)))
    layers = [
        _QuantizedLayer(quantizers, recent) if type(layer) is DynamicLayer else layer
        for layer in DynamicCache(config=model.config).layers
    ]
    cache = Cache(layers=layers)
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=model.config))


@dataclass
class _Quantizers:
    """The quantizers of keys and of values, which are drawn when their size and device are known."""

    bits: int
    kind: str
    seeds: tuple[int, ...]
    drawn: dict[Any, Quantizer] = field(default_factory=dict)

    def __call__(self, x: torch.Tensor, which: int) -> Quantizer:
        if (facts := (which, x.shape[-1], x.device)) not in self.drawn:
            self.drawn[facts] = jl.quantizer(
                x.shape[-1],
                self.bits,
                kind=self.kind,
                rng=self.seeds[which],
                like=x.new_empty(0, dtype=torch.float32),
            )
        return self.drawn[facts]


class _QuantizedLayer(DynamicLayer):
    """A layer whose `keys` and `values` are those of the recent tokens; the others are codes."""

    is_croppable = True

    def __init__(self, quantizer: _Quantizers, recent: int) -> None:
        super().__init__()
        self.quantizer, self.recent = quantizer, recent
        self.keys: Any
        self.older: list[QuantizedVectors] = []  # keys and values, or nothing

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        exact = super().update(key_states, value_states, *args, **kwargs)
        whole = exact
        if self.older:
            decoded: Any = (x.quantizer.decode(x) for x in self.older)
            whole = tuple(
                torch.cat((a.to(b.dtype), b), -2) for a, b in zip(decoded, exact, strict=True)
            )
        count = self.keys.shape[-2] - self.recent
        if count >= _STEP:
            parts = (x[..., :count, :].detach() for x in exact)
            leaving = [self.quantizer(x, i).encode(x) for i, x in enumerate(parts)]
            pairs = zip(self.older or leaving, leaving, strict=True)
            self.older = [_joined(*x) for x in pairs] if self.older else leaving
            self.keys, self.values = (x[..., count:, :].clone() for x in exact)
        return whole

    def get_seq_length(self) -> int:
        length = super().get_seq_length()
        return length + (self.older[0].scales.shape[-1] if self.older else 0)

    def reset(self) -> None:
        super().reset()
        self.older = []

    def crop(self, tokens_to_remove: int) -> None:
        exact = super().get_seq_length()
        if -tokens_to_remove <= exact or not self.older:
            super().crop(tokens_to_remove)
            return
        super().crop(-exact)
        kept = self.get_seq_length() + tokens_to_remove + exact
        self._change(lambda x: x[:, :, : max(kept, 0)])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._change(lambda x: x[indices])

    def _change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change codes and scales, whose first three axes are batch, heads and tokens."""
        self.older = [
            QuantizedVectors(function(x.codes), function(x.scales), x.quantizer) for x in self.older
        ]


def _joined(a: QuantizedVectors, b: QuantizedVectors) -> QuantizedVectors:
    codes, scales = (torch.cat(x, 2) for x in ((a.codes, b.codes), (a.scales, b.scales)))
    return QuantizedVectors(codes, scales, a.quantizer)
