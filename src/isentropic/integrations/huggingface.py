"""Laws for the attention of Hugging Face transformers (the extra ``huggingface``).

Here H is the number of heads and L that of queries; a model's attention layers are counted from 0, in
the order of ``model.modules()``.

Laws lie on the attention modules themselves, so that models with different laws do not meet.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from isentropic import laws as laws_module
from isentropic._attention.functions import attention, attention_state, attention_weights, scale_queries
from isentropic._attention.generic import AttentionState, merge_states
from isentropic._checks import (
    check_choice,
    check_real,
    is_integer,
    requires_extra,
    type_error,
    value_error,
)
from isentropic._namespace import to_numpy
from isentropic.drift import FACTORS, DriftReport, Recorder
from isentropic.laws._formulas import AffineLog, Constant, Law, check_law
from isentropic.masks import Mask, as_mask, causal

with requires_extra(__name__):
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from tqdm import tqdm
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

__all__ = ["calibrate", "load_laws", "profile", "register", "save_laws", "use"]

Laws = Law | Sequence[Law | None] | Mapping[int, Law | None] | None
_Counted = tuple[Law | None, str]
_Record = Callable[[Any, list[Any], Any], None]

_NAME = "isentropic"
# Attributes of an attention module.
_LAW = "_isentropic_law"  # a law, and what its n counts
_RECORD = "_isentropic_record"
# Arguments of some models that mean another attention than the mask and the logits do.
_REFUSED = ("cache", "indices", "block_indices", "sinks")
_COUNTS = ("keys", "positions")
_STANDARD = (None, "keys")
_FORMAT, _VERSION = "isentropic-laws", 1
_KEYS = {"format", "version", "law", "layers"}
_LAYER = re.compile("0|[1-9][0-9]{0,5}")


def register(name: str = _NAME) -> None:
    """Make ``attn_implementation="isentropic"`` known to transformers.

    It computes what "eager" and "sdpa" do, until `use` gives a model laws.

    Parameters
    ----------
    name : str
        The name of the implementation. Registering it again does nothing.

    Raises
    ------
    ValueError
        For a name that transformers has another implementation for.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic.integrations import huggingface
    >>> huggingface.register()
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> config = LlamaConfig(**size, num_hidden_layers=1, attn_implementation="isentropic")
    >>> LlamaForCausalLM(config).config._attn_implementation
    'isentropic'
    """
    if not isinstance(name, str):
        raise type_error("name", "be a string", type(name).__name__)
    known = AttentionInterface()
    if name == "eager" or known.get(name, _attend) is not _attend:
        raise value_error("name", "be no other implementation of transformers", repr(name))
    AttentionInterface.register(name, _attend)
    # Without it models would not make masks at all.
    AttentionMaskInterface.register(name, sdpa_mask)


def use(model: Any, laws: Laws, *, count: str = "keys") -> contextlib.ExitStack:
    """Give the attention of a model laws, from now on or for a ``with`` block.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Changed in place: its attention becomes "isentropic". It may be a part of a model, such as the
        text model of a multimodal one.
    laws : Law, None, sequence or mapping
        One law for all attention layers, a sequence of one per layer, or a mapping from the number of
        a layer to its law, where the others have none. None is the standard attention. Array
        parameters have the shape (H,), one number per head. They are moved to the device of the
        layer, in float32 (float64 where the model is): move the model before. Tensors that need
        gradients are taken as they are, and have to be on that device; they are not parameters of the
        model, so an optimizer is to be given them apart.
    count : {"keys", "positions"}
        What the n of a law is: how many keys the query sees, or its position plus one. The table in
        `isentropic.laws.preset` says what the rules of other models count.

    Returns
    -------
    contextlib.ExitStack
        Its ``close()``, or the end of its ``with`` block, restores the former laws and attention: of
        several, the last one first.

    Raises
    ------
    TypeError
        For a `model` that is not of transformers, or `laws` that are not laws.
    ValueError
        For a model whose attention cannot be chosen, numbers of layers that it does not have, or
        parameters that do not fit its heads. With ``count="positions"`` a model that hands its
        attention no positions raises it when it is called.

    Notes
    -----
    The n of a query is the number of keys that it sees: padding, empty slots of a static cache, and
    what lies outside a sliding window do not count. So decoding with a cache equals prefill. Sinks
    are no keys. The law acts on the products of queries and keys, before a soft cap and position
    biases.

    Positions are the ``position_ids`` that the model hands to its attention, as most decoders do. Those
    that ``generate`` makes count no padding. Where a decoder is called without them, they count the
    padding on the left too.

    Gradient checkpointing computes attention again in the backward pass, with the laws that the model
    has then: do that within the ``with`` block too.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic import laws
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2))
    >>> with huggingface.use(model, laws.LogLength(512, minimum=1)):
    ...     model.config._attn_implementation
    'isentropic'
    >>> model.config._attn_implementation
    'sdpa'
    """
    modules = _attention_modules(model)
    return _use(model, modules, _per_layer(laws, count, len(modules)))


def profile(
    model: Any,
    batches: Iterable[Any],
    *,
    laws: Laws = None,
    count: str = "keys",
    progress: bool = False,
) -> DriftReport:
    """Measure how the attention entropies of a model change with the number of keys.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An encoder or a decoder, all of whose attention is self-attention. Its head, if it has one, runs
        too: ``model.base_model`` saves the memory of long logits.
    batches : iterable
        What the model is called with: mappings of tensors (such as ``input_ids`` and
        ``attention_mask``), or tensors. They are moved to the device of the model. Lengths should vary
        (for decoders they do by themselves).
    laws : Law, sequence or mapping, optional
        Laws as in `use`, for the time of measuring. The default leaves those of the model.
    count : {"keys", "positions"}
        What the n of `laws` is, as in `use`. The lengths of the report are numbers of keys.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    DriftReport
        Padding does not count. Where there are sinks the entropy is that of the distribution over keys
        and sink.

    Raises
    ------
    TypeError, ValueError
        As in `use`; also for batches that are none, for cross-attention, and for `count` where `laws`
        are not given.

    Notes
    -----
    The entropies are exact, without L×S arrays beyond the masks of transformers, at the cost of one
    more attention. The model runs without gradients, in evaluation mode. Queries are grouped as in
    `isentropic.entropy_drift`.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(**size, num_hidden_layers=3))
    >>> batches = [torch.randint(8, (4, n)) for n in (16, 32, 64)]
    >>> report = huggingface.profile(model, batches)
    >>> report.lengths, report.slope.shape  # layers, heads
    (array([16., 32., 64.]), (3, 2))
    """
    if laws is None and count != "keys":
        raise value_error("count", "come with `laws`", repr(count))
    return _measure(model, batches, Recorder("batches"), laws, progress, count).report()


def calibrate(
    model: Any, batches: Iterable[Any], *, reference_length: float | None = None, progress: bool = False
) -> list[AffineLog]:
    """Fit a law to every attention head of a model, to hold the entropy that it has at one length.

    Parameters
    ----------
    model, batches, progress
        As in `profile`; the batches are run twice (those of an iterator are kept). The lengths should
        reach as far as possible.
    reference_length : float, optional
        The number of keys at which the laws are 1, and whose entropies are held; by default the
        geometric mean of the fewest and the most that queries see.

    Returns
    -------
    list of AffineLog
        One for each layer, with parameters (H,) of NumPy, as `use` and `save_laws` take them. Layers
        whose queries never see as many keys as the reference keep the standard attention.

    Raises
    ------
    TypeError, ValueError
        As in `profile`; also for a reference length outside of the batches.

    Notes
    -----
    The fit is that of `isentropic.calibrate`. The entropies to hold are those of the standard
    attention, whatever laws the model has; the second run is with the laws of the first, since layers
    feel the laws of those before them. Each attention is measured at fifteen factors on its logits,
    which costs as many more of it.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(**size, num_hidden_layers=3))
    >>> batches = [torch.randint(8, (4, n)) for n in (16, 32, 64)]
    >>> laws = huggingface.calibrate(model, batches, reference_length=32)
    >>> len(laws), laws[0].slope.shape
    (3, (2,))
    """
    if reference_length is not None:
        check_real("reference_length", reference_length, least=2)
    if isinstance(batches, Iterator):
        batches = list(batches)
    standard = _measure(model, batches, Recorder("batches", FACTORS), {}, progress)
    if reference_length is None:
        lengths = standard.report().lengths
        reference_length = math.sqrt(lengths[0] * lengths[-1])
    target = standard.target(reference_length)
    first = standard.laws(reference_length, target)
    second = _measure(model, batches, Recorder("batches", FACTORS), first, progress)
    return second.laws(reference_length, target, first)


def save_laws(laws: Laws, path: str | os.PathLike[str]) -> None:
    """Write laws, as `use` takes them, to a JSON file.

    Parameters
    ----------
    laws : Law, sequence or mapping
    path : path

    Raises
    ------
    TypeError, ValueError
        For `laws` that are not laws, or arrays that are not finite.

    Examples
    --------
    >>> import tempfile
    >>> from isentropic import laws
    >>> from isentropic.integrations import huggingface
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     huggingface.save_laws(laws.LogLength(128), f"{folder}/law.json")
    ...     huggingface.load_laws(f"{folder}/law.json")(128)
    1.0
    """
    if isinstance(laws, Law):
        content: dict[str, Any] = {"law": laws_module.to_dict(laws)}
    elif isinstance(laws, Mapping):
        _check_numbers(laws)
        content = {"layers": {str(i): _law_to_json(law) for i, law in sorted(laws.items())}}
    elif isinstance(laws, Sequence) and not isinstance(laws, str):
        content = {"layers": [_law_to_json(law) for law in laws]}
    else:
        raise _no_laws(laws)
    text = json.dumps({"format": _FORMAT, "version": _VERSION} | content, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_laws(path: str | os.PathLike[str]) -> Laws:
    """Read laws that `save_laws` wrote.

    Nothing in the file is executed or imported.

    Parameters
    ----------
    path : path

    Returns
    -------
    Law, list or dict
        What was saved, with arrays of NumPy.

    Raises
    ------
    ValueError
        For a file that is not such JSON, has another version, or does not describe laws.
    TypeError
        For parameters of the wrong kind.

    Examples
    --------
    >>> import tempfile
    >>> from isentropic import laws
    >>> from isentropic.integrations import huggingface
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     huggingface.save_laws([None, laws.LogLength(512)], f"{folder}/laws.json")
    ...     huggingface.load_laws(f"{folder}/laws.json")
    [None, LogLength(base=512, minimum=None)]
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise value_error("path", "be a JSON file", f"{path} ({error})") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise value_error("path", f"be a file of the format {_FORMAT!r}", path)
    if type(content.get("version")) is not int or content["version"] != _VERSION:
        must = f"be a file of version {_VERSION} of the format"
        raise value_error("path", must, repr(content.get("version")))
    if content.keys() >= {"law", "layers"} or not content.keys() <= _KEYS:
        must = "be a file with a 'law' or with 'layers', and nothing else"
        raise value_error("path", must, ", ".join(content))
    if "law" in content:
        return laws_module.from_dict(content["law"])
    layers = content.get("layers")
    if isinstance(layers, list):
        return [_law_from_json(x) for x in layers]
    if not isinstance(layers, dict) or not all(_LAYER.fullmatch(key) for key in layers):
        raise value_error("path", "be a file with a 'law' or with 'layers'", path)
    return {int(key): _law_from_json(x) for key, x in layers.items()}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose names may not repeat: Python would take the last and say nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeated names among {', '.join(names)}")
    return found


def _law_to_json(law: Law | None) -> Any:
    return None if law is None else laws_module.to_dict(law)


def _law_from_json(data: Any) -> Law | None:
    return None if data is None else laws_module.from_dict(data)


# The laws of a model


def _attention_modules(model: Any) -> list[Any]:
    """The modules that call the attention of transformers' interface."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise type_error("model", "be a model of transformers", type(model).__name__)

    def calls_it(module: torch.nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names

    found = [module for module in model.modules() if calls_it(module)]
    if not found:
        must = "be a model whose attention goes through the AttentionInterface of transformers"
        raise value_error("model", must, type(model).__name__)
    return found


def _per_layer(laws: Laws, count: str, n_layers: int) -> list[_Counted]:
    check_choice("count", count, _COUNTS)
    if laws is None or isinstance(laws, Law):
        return [(laws, count)] * n_layers
    if isinstance(laws, Mapping):
        _check_numbers(laws)
        if laws and max(laws) >= n_layers:
            must = f"name attention layers of the model, 0 to {n_layers - 1}"
            raise value_error("laws", must, max(laws))
        return [(laws.get(i), count) for i in range(n_layers)]
    if not isinstance(laws, Sequence) or isinstance(laws, str):
        raise _no_laws(laws)
    if len(laws) != n_layers:
        must = f"be as many as the model has attention layers, {n_layers}"
        raise value_error("laws", must, len(laws))
    return [(law, count) for law in laws]


def _no_laws(x: Any) -> TypeError:
    must = "be a law, or a sequence or mapping of laws"
    if isinstance(x, str):
        must += " (`laws.preset` has those with a name, `load_laws` those of a file)"
    elif isinstance(x, torch.nn.Module):
        must += " (a LawModule gives its law when it is called)"
    return type_error("laws", must, type(x).__name__)


def _check_numbers(laws: Mapping[int, Any]) -> None:
    for key in laws:
        if not is_integer(key):
            raise type_error("laws", "have the numbers of layers as keys", repr(key))
        if key < 0:
            raise value_error("laws", "have the numbers of layers, from 0, as keys", key)


def _use(model: Any, modules: Sequence[Any], laws: Sequence[_Counted]) -> contextlib.ExitStack:
    placed = [
        (None if law is None else _placed(law, f"laws[{i}]", module, model), count)
        for i, ((law, count), module) in enumerate(zip(laws, modules, strict=True))
    ]
    register()

    with contextlib.ExitStack() as stack:
        stack.callback(
            _restore, _implementations(model), [(m, getattr(m, _LAW, None)) for m in modules]
        )
        model.set_attn_implementation(_NAME)
        for module, counted in zip(modules, placed, strict=True):
            setattr(module, _LAW, counted)
        return stack.pop_all()


def _placed(law: Law, name: str, module: Any, model: Any) -> Law:
    """The law with its arrays as tensors beside the module's own."""
    check_law(law)
    n_heads = _n_heads(module)
    of_module = next(module.parameters(), None)
    device = model.device if of_module is None else of_module.device
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32

    def place(x: Any) -> Any:
        if n_heads is not None and tuple(x.shape) not in ((), (1,), (n_heads,)):
            must = f"have numbers as parameters, or one per head, ({n_heads},)"
            raise value_error(name, must, tuple(x.shape))
        if not isinstance(x, torch.Tensor):
            x = torch.tensor(to_numpy(x))  # may be read-only
        if not x.requires_grad:
            return x.to(device, dtype)
        # A copy would not learn.
        if x.device != device:
            raise value_error(name, f"be on the device of the layer ({device})", x.device)
        return x

    return law._with_arrays(place)


def _n_heads(module: Any) -> int | None:
    for owner, name in (
        (module, "num_heads"), (module, "num_attention_heads"), (module, "n_heads"),
        (getattr(module, "config", None), "num_attention_heads"),
    ):  # fmt: skip
        if isinstance(n := getattr(owner, name, None), int):
            return n
    return None


def _implementations(model: Any) -> list[tuple[Any, str | None]]:
    """All configurations in a model, outer before inner, and the attention that each names."""
    found: dict[int, tuple[Any, str | None]] = {}

    def visit(config: Any) -> None:
        if id(config) in found or not hasattr(config, "_attn_implementation"):
            return
        found[id(config)] = config, config._attn_implementation
        for key in config.sub_configs:
            visit(getattr(config, key, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(found.values())


def _restore(implementations: list[tuple[Any, str | None]], laws: list[tuple[Any, Any]]) -> None:
    for config, implementation in implementations:
        config._attn_implementation = implementation
    for module, law in laws:
        setattr(module, _LAW, law)
        if law is None:
            delattr(module, _LAW)


# The attention itself


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output (B, L, H, Ev), and the weights where they are asked for.

    As transformers calls it, with query (B, H, L, E), and key and value of grouped heads.
    """
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            must = "be None: the attention of isentropic does not know it"
            raise value_error(name, must, type(kwargs[name]).__name__)
    mask, bias = _visible(module, query, attention_mask, is_causal), position_bias
    if attention_mask is not None and attention_mask.is_floating_point():
        bias = attention_mask if bias is None else bias + attention_mask
    law, count = getattr(module, _LAW, _STANDARD)
    call: dict[str, Any] = {
        "mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "enable_gqa": True,
    }  # fmt: skip
    if law is not None and count == "positions":
        call["n_keys"] = _lengths(query, kwargs.get("position_ids"))

    record = getattr(module, _RECORD, None)
    if record is not None:
        record(query, key, s_aux, law, call)
    weights = None
    if kwargs.get("output_attentions"):
        weights = _weights(query, key, s_aux, law, call)
    out: Any
    if dropout > 0 and module.training:
        out = _attend_with_dropout(query, key, value, s_aux, law, call, dropout)
    elif s_aux is None:
        out = attention(query, key, value, law=law, **call)
    else:
        out = _state(query, key, value, s_aux, law, call).output().to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights


def _visible(
    module: torch.nn.Module, query: torch.Tensor, mask: torch.Tensor | None, is_causal: bool | None
) -> Mask | torch.Tensor | None:
    """Which keys are seen."""
    if mask is not None:
        # Masks of numbers, as of "eager", hide with the lowest of their dtype.
        return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Transformers leaves the mask away for single queries, which see all, and for a cache that was
    # empty, whose other slots, if it is static, come after: so both begin at the first key.
    return causal(offset=0) if query.shape[2] > 1 and is_causal else None


def _lengths(query: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """The positions of the queries, counted from 1, broadcastable to (B, H, L)."""
    if positions is None or positions.ndim != 2 or positions.shape[1] != query.shape[2]:
        must = "be 'keys' where a model hands no `position_ids` (batch, queries) to its attention"
        raise value_error("count", must, "'positions'")
    return positions[:, None] + 1


def _state(query: Any, key: Any, value: Any, sink: Any, law: Law | None, call: Any) -> Any:
    """With a sink (H,), a logit per head that takes weight and has no value."""
    state = attention_state(query, key, value, law=law, **call)
    if sink is None:
        return state
    zero = torch.zeros_like(state.normalizer)
    nothing = None if state.weighted_value is None else torch.zeros_like(state.weighted_value)
    return merge_states(state, AttentionState(zero + sink[:, None], zero + 1, nothing, zero))


def _weights(query: Any, key: Any, sink: Any, law: Law | None, call: Any) -> Any:
    weights = attention_weights(query, key, law=law, **call)
    if sink is None:
        return weights
    parts = [_state(query, key, None, x, law, call).log_normalizer() for x in (None, sink)]
    return (weights * torch.exp(parts[0] - parts[1])[..., None]).to(query.dtype)


def _attend_with_dropout(
    query: Any, key: Any, value: Any, sink: Any, law: Law | None, call: Any, dropout: float
) -> Any:
    """By PyTorch's own kernel, which alone drops weights."""
    if sink is not None or call["softcap"] is not None:
        must = "be 0 while a model with soft caps or sinks is trained (set it in its configuration)"
        raise value_error("dropout", must, dropout)
    if law is not None:
        n = call["n_keys"] if "n_keys" in call else _counts(query, key, call["mask"])
        query = scale_queries(query, n, law=law)
    mask, bias = call["mask"], call["bias"]
    if isinstance(mask, Mask):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, scale=call["scale"], enable_gqa=True
    )


def _counts(query: torch.Tensor, key: torch.Tensor, mask: Mask | torch.Tensor | None) -> Any:
    """How many keys each query sees, broadcastable to (B, 1, L)."""
    if mask is None:
        return torch.full((1, 1, query.shape[2]), key.shape[2], device=query.device)
    n: Any = as_mask(mask).visible_count(query.shape[2], key.shape[2], like=query)
    return n.expand(*n.shape[:-1], query.shape[2])


# Measuring


def _measure(
    model: Any,
    batches: Iterable[Any],
    recorder: Recorder,
    laws: Laws,
    progress: bool,
    count: str = "keys",
) -> Recorder:
    modules = _attention_modules(model)
    takes = inspect.signature(model.forward).parameters
    if "decoder_input_ids" in takes:
        must = "be an encoder or a decoder alone (such as `model.get_encoder()`)"
        raise value_error("model", must, type(model).__name__)
    if isinstance(batches, (Mapping, torch.Tensor)):
        raise type_error("batches", "be an iterable of batches", type(batches).__name__)
    if laws is None:
        used = [getattr(module, _LAW, _STANDARD) for module in modules]
    else:
        used = _per_layer(laws, count, len(modules))
    # With a cache transformers does not look for packed sequences.
    options = {"use_cache": False} if "use_cache" in takes else {}
    seen = set()

    def add(layer: int, n: Any, entropies: list[Any], counted: Any) -> None:
        seen.add(layer)
        recorder.add(layer, n, entropies, counted)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_use(model, modules, used))
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        stack.enter_context(_recording(modules, recorder.factors, add))
        for batch in tqdm(batches, disable=not progress):
            if isinstance(batch, torch.Tensor):
                model(batch.to(model.device), **options)
            elif isinstance(batch, Mapping):
                model(**options | {name: _moved(x, model.device) for name, x in batch.items()})
            else:
                raise type_error("batches", "give mappings or tensors", type(batch).__name__)
    if len(seen) < len(modules):
        must = f"run all {len(modules)} attention layers of `model` (or pass the part that runs)"
        raise value_error("batches", must, len(seen))
    return recorder


def _moved(x: Any, device: Any) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


@contextlib.contextmanager
def _recording(
    modules: Sequence[Any], factors: Sequence[float], add: Callable[[int, Any, list[Any], Any], None]
) -> Iterator[None]:
    """Hand (layer, n, entropies, counted) of every attention of the modules to `add`.

    n is (B or 1, L), the entropies (B, H, L) for each factor on the logits, and counted (B, L) are the
    queries that are not padding.
    """
    try:
        for layer, module in enumerate(modules):
            setattr(module, _RECORD, partial(_hand_over, factors, partial(add, layer)))
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            vars(module).pop(_RECORD, None)


def _hand_over(
    factors: Sequence[float], add: _Record, query: Any, key: Any, sink: Any, law: Law | None, call: Any
) -> None:
    n_queries, mask = query.shape[2], call["mask"]
    if key.shape[2] != n_queries:
        must = "have self-attention alone, and no cache"
        raise value_error("model", must, f"{n_queries} queries of {key.shape[2]} keys")
    n = _counts(query, key, mask)
    counted = torch.ones(query.shape[0], n_queries, dtype=torch.bool, device=query.device)
    if isinstance(mask, torch.Tensor):
        if mask.shape[1] != 1:
            raise value_error("model", "have masks that are the same for all heads", mask.shape)
        # In self-attention padding is what does not see itself.
        visible = mask.expand(-1, -1, n_queries, n_queries)[:, 0]
        counted = counted & visible.diagonal(dim1=-2, dim2=-1)
    entropies = []
    for factor in factors:
        own = Constant(factor) if law is None else laws_module.scaled(law, factor)
        entropies.append(_state(query, key, None, sink, own, call).entropy())
    add(n.reshape(-1, n_queries), entropies, counted)
