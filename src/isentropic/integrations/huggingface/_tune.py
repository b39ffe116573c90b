"""Laws that are trained alone: the weights of the model stay as they are."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from isentropic._checks import check_count, check_real, plain_integer, type_error, value_error
from isentropic._namespace import Array
from isentropic._numerics import clip
from isentropic.integrations.huggingface._calls import NAME
from isentropic.integrations.huggingface._laws import apply, warn_of_rules
from isentropic.integrations.huggingface._measure import as_mapping, check_batches
from isentropic.integrations.huggingface._modules import (
    attention_modules,
    evaluation,
    layer_device,
    n_heads,
)
from isentropic.laws._formulas import Knots
from isentropic.laws._law import Law


@dataclass(frozen=True)
class _Beyond(Law):
    """constant · (1 + slope · ln(n / base)) beyond `base`, and the constant (H,) up to there.

    The slope (H,) may have either sign.
    """

    slope: Any
    constant: Any
    base: float

    def evaluate(self, xp: ModuleType, n: Array) -> Array:
        rise = self.slope[..., None] * xp.log(clip(xp, n / self.base, min=1.0))
        return self.constant[..., None] * (1 + rise)

    def knots(self, longest: int) -> Knots:
        """The same law for any library, with NumPy arrays, and its last knot at the longest length."""
        slope, constant = (
            x.detach().cpu().double().numpy()[:, None] for x in (self.slope, self.constant)
        )
        rise = [0.0, 0.0, math.log(longest / self.base)]
        return Knots((self.base / 2, self.base, longest), constant * (1 + slope * rise))


def tune(
    model: Any,
    batches: Iterable[Any],
    *,
    reference_length: int,
    constant: float | None = None,
    learning_rate: float = 0.02,
    chunk_size: int = 1024,
    base: str = NAME,
    progress: bool | str = False,
) -> list[Knots]:
    """Train a law for each attention head of a language model, for texts beyond its trained length.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder that generates text with a cache. None of its weights change.
    batches : iterable
        Texts: tensors of token ids (B, tokens), or mappings with `input_ids` and an `attention_mask`,
        without padding. Each has at least ``reference_length + 2`` tokens. They are moved to the device
        of the model.
    reference_length : int ≥ 2
        The number of keys from which on the laws may grow, such as the trained length of the model.
    constant : float > 0, optional
        Also train a constant factor for each head, from this number on. It acts at all lengths. None
        keeps the laws 1 up to the reference length, so the model does not change there.
    learning_rate : float > 0
        The learning rate of Adam at the first step. It falls to 0 along a half cosine.
    chunk_size : int
        The number of tokens of a step. A step needs memory for the activations of so many tokens.
    base : str
        The attention implementation during the training, as in `use`.
    progress : bool or str
        Whether to show a progress bar. A string is its label.

    Returns
    -------
    list of Knots
        A law for each layer, in the order of `laws_of`, with NumPy arrays (H, 3), for `use`:
        ``c · (1 + a · ln(n / reference_length))`` beyond the reference length, and c up to there, with
        a trained slope a for each head. c is 1, or the trained constant. Layers that no text reaches,
        such as those for images, have the law 1, or `constant`.

    Raises
    ------
    TypeError, ValueError
        As in `use`; also for models that are not causal, that have an encoder, or whose cache has other
        states than keys and values; for texts that are too short or padded; and if the loss becomes NaN
        or infinite.

    Notes
    -----
    The loss is the mean negative log-likelihood of the tokens whose queries see more keys than the
    reference length. Each text is read up to there without gradients. Then each chunk gives one step of
    Adam. Gradients do not reach the keys of earlier chunks, which saves memory and time. A trained
    constant may raise the loss within the reference length, which no step sees. So test it there too.

    There are few parameters, one or two per head, so a few texts suffice; test the laws on others. A
    law cannot mend positions that the model does not know. :doc:`/how-to/save-and-train-laws` has
    measurements and advice, and :doc:`/how-to/law-or-position` says which of the two fails.

    Laws that the model has are ignored here, and restored afterwards.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=3))
    >>> texts = [torch.randint(8, (1, 33)) for _ in range(4)]
    >>> laws = huggingface.tune(model, texts, reference_length=16, chunk_size=8)
    >>> len(laws), laws[0].factors.shape
    (3, (2, 3))
    """
    check_count("reference_length", reference_length, least=2)
    if constant is not None:
        check_real("constant", constant, above=0)
    check_real("learning_rate", learning_rate, above=0)
    check_count("chunk_size", chunk_size)
    modules = list(attention_modules(model).values())
    is_causal = any(getattr(module, "is_causal", True) for module in modules)
    if not is_causal or not model.can_generate() or model.config.is_encoder_decoder:
        raise value_error("model", "be a causal decoder that generates text", type(model).__name__)
    if any(weight.is_inference() for weight in model.parameters()):
        raise value_error("model", "be made outside of `torch.inference_mode`", "inference tensors")
    check_batches(batches)
    reference_length, chunk_size = plain_integer(reference_length), plain_integer(chunk_size)
    label = "laws" if progress is True else progress
    # Gradients are needed even if the caller has switched them off, by `no_grad` too.
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        texts = [_ids(batch, reference_length).to(model.device) for batch in batches]
        if not texts:
            raise value_error("batches", "have at least one text", "none")
        starts = [range(reference_length, x.shape[1] - 1, chunk_size) for x in texts]
        laws = [_law(model, module, constant, reference_length) for module in modules]
        warn_of_rules(modules)
        layers = {module: (law, "keys") for module, law in zip(modules, laws, strict=True)}
        stack.enter_context(apply(model, layers, base))
        stack.enter_context(evaluation(model))
        for weight in model.parameters():
            stack.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(False)
        bar = tqdm(total=sum(map(len, starts)), desc=str(label), unit=" steps", disable=not label)
        stack.enter_context(bar)
        _train(model, laws, texts, starts, learning_rate, bar)
    longest = max(x.shape[1] for x in texts) - 1  # the last token has a loss, but no query
    return [law.knots(longest) for law in laws]


def _train(
    model: Any,
    laws: list[_Beyond],
    texts: list[torch.Tensor],
    starts: list[range],
    learning_rate: float,
    bar: tqdm,
) -> None:
    """Train laws with one step for each chunk of a text. `starts` holds where its chunks start."""
    parameters = [x for law in laws for x in (law.slope, law.constant)]
    trained = [x for x in parameters if x.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sum(map(len, starts)))
    for ids, chunks in zip(texts, starts, strict=True):
        cache = _cache(model, ids[:, : chunks.start], chunks.step)
        for start in chunks:
            loss = _loss(model, ids[:, start : start + chunks.step + 1], cache)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            for layer in cache.layers:  # keeps what the step has added, without its gradients
                if layer.is_initialized:
                    layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()


def _law(model: Any, module: torch.nn.Module, constant: float | None, base: float) -> _Beyond:
    """The law of a layer, on its device, at the start of the training."""
    # Not in the default dtype, which may be half precision.
    kind: dict[str, Any] = {"dtype": torch.float32, "device": layer_device(model, module)}
    slope = torch.zeros(n_heads(module) or 1, **kind, requires_grad=True)
    start = torch.full_like(slope, 1.0 if constant is None else constant, requires_grad=False)
    return _Beyond(slope, start.requires_grad_(constant is not None), base)


def _ids(batch: Any, reference_length: int) -> torch.Tensor:
    """The token ids (B, tokens) of a batch."""
    batch = as_mapping(batch)
    ids, must = batch.get("input_ids"), "have `input_ids` as a tensor (sequences, tokens) of integers"
    if not isinstance(ids, torch.Tensor):
        raise type_error("batches", must, type(ids).__name__)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise type_error("batches", must, ids.dtype)
    if ids.ndim != 2 or 0 in ids.shape:
        raise value_error("batches", must, tuple(ids.shape))
    if ids.shape[1] < reference_length + 2:
        must = f"have texts of at least `reference_length` + 2 = {reference_length + 2} tokens"
        raise value_error("batches", must, ids.shape[1])
    if others := batch.keys() - {"input_ids", "attention_mask"}:
        must = "have `input_ids` and `attention_mask` alone"
        raise value_error("batches", must, ", ".join(f"`{x}`" for x in sorted(others)))
    mask = batch.get("attention_mask")
    if not (mask is None or isinstance(mask, torch.Tensor)):
        must = "have a tensor as its `attention_mask`, or none"
        raise type_error("batches", must, type(mask).__name__)
    if mask is not None and not (mask.shape == ids.shape and bool(mask.all())):
        must = "have no padding: an `attention_mask` of ones, with the shape of the ids"
        raise value_error("batches", must, tuple(mask.shape) if mask.shape != ids.shape else "zeros")
    ids = ids.long()
    return ids.clone() if ids.is_inference() else ids  # as ids are saved for a gradient


@torch.no_grad()
def _cache(model: Any, ids: torch.Tensor, chunk_size: int) -> DynamicCache:
    """The keys and values of the first tokens, (B, tokens)."""
    cache = DynamicCache(config=model.config)
    # Other states, such as those of Mamba, are not always continued over chunks.
    kinds = {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    for part in () if kinds else ids.split(chunk_size, dim=1):
        model.base_model(input_ids=part, use_cache=True, **_with_cache(model.base_model, cache))
    if kinds or cache.get_seq_length() != ids.shape[1]:
        must = "keep the keys and values of all tokens in its cache, and no other states"
        raise value_error("model", must, ", ".join(x.__name__ for x in kinds) or type(model).__name__)
    return cache


def _with_cache(model: Any, cache: DynamicCache) -> dict[str, Any]:
    """The cache as an argument of the model, which transformers renamed in 5.24."""
    is_new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if is_new else "past_key_values": cache}


def _loss(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """The mean loss of all tokens except the first.

    They continue the tokens in the cache, and are added to it.
    """
    logits = model(input_ids=ids[:, :-1], use_cache=True, **_with_cache(model, cache)).logits
    dtype = torch.promote_types(logits.dtype, torch.float32)
    loss = cross_entropy(logits.to(dtype).transpose(1, 2), ids[:, 1:])
    if not torch.isfinite(loss):
        raise value_error("model", "give a finite loss", loss.item())
    return loss
