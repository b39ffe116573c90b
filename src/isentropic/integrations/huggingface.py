"""Laws for the attention of Hugging Face transformers (the extra ``huggingface``).

In shapes, B is the batch size, H the number of heads and L the number of queries. The attention layers
of a model are numbered from 0, in the order of ``model.modules()``.

Laws are attributes of the attention modules, so that models with different laws are independent.
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
_LawAndCount = tuple[Law | None, str]  # a law, and what its n counts
_Add = Callable[[Any, list[Any], Any], None]

_NAME = "isentropic"
# Attributes of an attention module.
_LAW = "_isentropic_law"  # a _LawAndCount
_RECORD = "_isentropic_record"
# Arguments with which some models ask for attention that the mask and the logits do not determine.
_UNSUPPORTED = ("cache", "indices", "block_indices", "sinks")
_COUNTS = ("keys", "positions")
_STANDARD = (None, "keys")
_FORMAT, _VERSION = "isentropic-laws", 1
_KEYS = {"format", "version", "law", "layers"}
_LAYER = re.compile("0|[1-9][0-9]{0,5}")


def register(name: str = _NAME) -> None:
    """Register ``attn_implementation="isentropic"`` with transformers.

    It computes the same attention as "eager" and "sdpa", until `use` applies laws to a model.

    Parameters
    ----------
    name : str
        The name of the implementation. Registering it again has no effect.

    Raises
    ------
    ValueError
        If transformers already has another implementation of this name.

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
        raise value_error("name", "not be that of another implementation of transformers", repr(name))
    AttentionInterface.register(name, _attend)
    # Models do not make masks for an implementation without a mask function.
    AttentionMaskInterface.register(name, sdpa_mask)


def use(model: Any, laws: Laws, *, count: str = "keys") -> contextlib.ExitStack:
    """Apply laws to the attention of a model, permanently or for a ``with`` block.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model, which is changed in place: its attention implementation becomes "isentropic". It may
        be a part of a model, such as the text model of a multimodal one.
    laws : Law, None, sequence or mapping
        One law for all attention layers, a sequence with one law per layer, or a mapping from layer
        numbers to laws. Layers that are not in the mapping, and layers with None, use standard
        attention. Array parameters of a law have the shape (H,), one number per head. `use` moves them
        to the device of the layer, in float32, or in float64 for a float64 model; so move the model
        first. Tensors that require gradients are not moved, and must be on that device. They are not
        parameters of the model, so pass them to the optimizer separately.
    count : {"keys", "positions"}
        What the n of a law counts: the keys that the query sees, or its position plus one. The table in
        `isentropic.laws.preset` says what the rules of other models count.

    Returns
    -------
    contextlib.ExitStack
        Its ``close()``, or the end of its ``with`` block, restores the previous laws and attention
        implementation. Close several of them in reverse order.

    Raises
    ------
    TypeError
        For a `model` that is not a transformers model, and for `laws` that are not laws.
    ValueError
        For a model whose attention implementation cannot be changed, for layer numbers that it does not
        have, and for parameters that do not fit its heads. With ``count="positions"``, calling the
        model raises it if the model does not pass positions to its attention.

    Notes
    -----
    The n of a query is the number of keys that it sees. Padding, empty slots of a static cache, and
    keys outside a sliding window are not counted, so decoding with a cache equals prefill. Sinks are
    not counted as keys. The law multiplies the products of queries and keys, before a soft cap and
    position biases.

    Positions are the ``position_ids`` that the model passes to its attention, as most decoders do. The
    positions that ``generate`` makes do not count padding. If a decoder is called without
    ``position_ids``, its positions count the padding on the left too.

    Gradient checkpointing computes attention again in the backward pass, with the laws that the model
    has at that time. So run the backward pass within the ``with`` block too.

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
        An encoder or a decoder with self-attention only. If it has a head on top, such as one for
        language modeling, that runs too. ``model.base_model`` avoids the memory for its logits.
    batches : iterable
        The inputs of the model: mappings of tensors (such as ``input_ids`` and ``attention_mask``), or
        tensors. They are moved to the device of the model. An encoder needs batches of different
        lengths; in a decoder, queries see different numbers of keys anyway.
    laws : Law, sequence or mapping, optional
        Laws as in `use`, applied during the measurement. By default the model keeps its laws.
    count : {"keys", "positions"}
        What the n of `laws` counts, as in `use`. The lengths of the report are always numbers of keys.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    DriftReport
        The report does not include padding. In models with sinks, the entropy is that of the
        distribution over the keys and the sink.

    Raises
    ------
    TypeError, ValueError
        As in `use`; also for `batches` of another type, for cross-attention, and for `count` without
        `laws`.

    Notes
    -----
    The entropies are exact. They need no L×S arrays beyond the masks that transformers makes, and cost
    as much as computing attention once more. The model runs without gradients, in evaluation mode.
    Queries are grouped as in `isentropic.entropy_drift`.

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
    """Fit a law to every attention head of a model, which keeps its entropy at that of one length.

    Parameters
    ----------
    model, batches, progress
        As in `profile`. The model runs on all batches twice; those of an iterator are kept in memory.
        The range of lengths should be as wide as possible.
    reference_length : float, optional
        The number of keys at which the laws are 1. The entropies at this length are the targets at the
        other lengths. By default it is the geometric mean of the smallest and the largest number of
        keys that queries see.

    Returns
    -------
    list of AffineLog
        One law per layer, with NumPy arrays (H,) as parameters, for `use` and `save_laws`. For a layer
        whose queries never see as many keys as the reference length, the law is the constant 1, which
        is standard attention.

    Raises
    ------
    TypeError, ValueError
        As in `profile`; also for a reference length outside of the range of the batches.

    Notes
    -----
    The fit is that of `isentropic.calibrate`. The target entropies are those of standard attention,
    even if the model has laws. The law of a layer changes the inputs of the layers after it, so the
    second run applies the laws that were fitted in the first, and corrects them. Each layer measures
    its entropy at fifteen factors on its logits, which costs as much as computing attention fifteen
    more times.

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
    """Write laws to a JSON file.

    Parameters
    ----------
    laws : Law, sequence or mapping
        Laws, as for `use`.
    path : path
        The file to write.

    Raises
    ------
    TypeError, ValueError
        For `laws` that are not laws, or that have arrays that are not finite.

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
        raise _not_laws_error(laws)
    text = json.dumps({"format": _FORMAT, "version": _VERSION} | content, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_laws(path: str | os.PathLike[str]) -> Laws:
    """Read laws that `save_laws` wrote.

    Nothing in the file is executed or imported.

    Parameters
    ----------
    path : path
        The file to read.

    Returns
    -------
    Law, list or dict
        The saved laws, with NumPy arrays.

    Raises
    ------
    ValueError
        For a file that is not JSON, is of another format or version, or does not describe laws.
    TypeError
        For parameters of the wrong type.

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
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique_names)
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


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python's parser would silently take the last of repeated names."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeated names among {', '.join(names)}")
    return content


def _law_to_json(law: Law | None) -> Any:
    return None if law is None else laws_module.to_dict(law)


def _law_from_json(data: Any) -> Law | None:
    return None if data is None else laws_module.from_dict(data)


# The laws of a model


def _attention_modules(model: Any) -> list[Any]:
    """The modules whose `forward` looks up its attention in transformers' AttentionInterface."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise type_error("model", "be a model of transformers", type(model).__name__)

    def uses_interface(module: torch.nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names

    modules = [module for module in model.modules() if uses_interface(module)]
    if not modules:
        must = "be a model whose attention goes through the AttentionInterface of transformers"
        raise value_error("model", must, type(model).__name__)
    return modules


def _per_layer(laws: Laws, count: str, n_layers: int) -> list[_LawAndCount]:
    """A law, and what its n counts, for each layer."""
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
        raise _not_laws_error(laws)
    if len(laws) != n_layers:
        must = f"be as many as the model has attention layers, {n_layers}"
        raise value_error("laws", must, len(laws))
    return [(law, count) for law in laws]


def _not_laws_error(x: Any) -> TypeError:
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


def _use(model: Any, modules: Sequence[Any], laws: Sequence[_LawAndCount]) -> contextlib.ExitStack:
    converted = [
        (None if law is None else _convert_arrays(law, f"laws[{i}]", module, model), count)
        for i, ((law, count), module) in enumerate(zip(laws, modules, strict=True))
    ]
    register()

    with contextlib.ExitStack() as stack:
        stack.callback(
            _restore, _implementations(model), [(m, getattr(m, _LAW, None)) for m in modules]
        )
        model.set_attn_implementation(_NAME)
        for module, law_and_count in zip(modules, converted, strict=True):
            setattr(module, _LAW, law_and_count)
        return stack.pop_all()


def _convert_arrays(law: Law, name: str, module: Any, model: Any) -> Law:
    """The law with its arrays as tensors on the device of the module."""
    check_law(law)
    n_heads = _n_heads(module)
    parameter = next(module.parameters(), None)
    device = model.device if parameter is None else parameter.device
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32

    def convert(x: Any) -> Any:
        if n_heads is not None and tuple(x.shape) not in ((), (1,), (n_heads,)):
            must = f"have numbers as parameters, or one per head, ({n_heads},)"
            raise value_error(name, must, tuple(x.shape))
        if not isinstance(x, torch.Tensor):
            x = torch.tensor(to_numpy(x))  # a copy, because the NumPy array may be read-only
        if not x.requires_grad:
            return x.to(device, dtype)
        # A copy on another device would not be trained.
        if x.device != device:
            raise value_error(name, f"be on the device of the layer ({device})", x.device)
        return x

    return law._with_arrays(convert)


def _n_heads(module: Any) -> int | None:
    for owner, name in (
        (module, "num_heads"), (module, "num_attention_heads"), (module, "n_heads"),
        (getattr(module, "config", None), "num_attention_heads"),
    ):  # fmt: skip
        if isinstance(n := getattr(owner, name, None), int):
            return n
    return None


def _implementations(model: Any) -> list[tuple[Any, str | None]]:
    """All configurations in a model, outer before inner, and the attention implementation of each."""
    implementations: dict[int, tuple[Any, str | None]] = {}

    def visit(config: Any) -> None:
        if id(config) in implementations or not hasattr(config, "_attn_implementation"):
            return
        implementations[id(config)] = config, config._attn_implementation
        for key in config.sub_configs:
            visit(getattr(config, key, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(implementations.values())


def _restore(implementations: list[tuple[Any, str | None]], laws: list[tuple[Any, Any]]) -> None:
    for config, implementation in implementations:
        config._attn_implementation = implementation
    for module, law in laws:
        setattr(module, _LAW, law)
        if law is None:
            delattr(module, _LAW)


# The attention implementation


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
    """The output (B, L, H, Ev), and the weights or None, with the signature that transformers calls.

    The query is (B, H, L, E). The key and the value have grouped heads.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            must = "be None: the attention of isentropic does not support it"
            raise value_error(name, must, type(kwargs[name]).__name__)
    mask, bias = _visibility_mask(module, query, attention_mask, is_causal), position_bias
    if attention_mask is not None and attention_mask.is_floating_point():
        bias = attention_mask if bias is None else bias + attention_mask
    law, count = getattr(module, _LAW, _STANDARD)
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "enable_gqa": True,
    }  # fmt: skip
    if law is not None and count == "positions":
        options["n_keys"] = _positions_from_1(query, kwargs.get("position_ids"))

    record = getattr(module, _RECORD, None)
    if record is not None:
        record(query, key, s_aux, law, options)
    weights = None
    if kwargs.get("output_attentions"):
        weights = _weights(query, key, s_aux, law, options)
    out: Any
    if dropout > 0 and module.training:
        out = _attend_with_dropout(query, key, value, s_aux, law, options, dropout)
    elif s_aux is None:
        out = attention(query, key, value, law=law, **options)
    else:
        out = _state(query, key, value, s_aux, law, options).output().to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights


def _visibility_mask(
    module: torch.nn.Module, query: torch.Tensor, mask: torch.Tensor | None, is_causal: bool | None
) -> Mask | torch.Tensor | None:
    """The mask that is True where a key is visible, or None if all keys are."""
    if mask is not None:
        # A floating-point mask, as for "eager", has the lowest number of its dtype at hidden keys.
        return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Transformers omits the mask in two cases: for a single query, which sees all keys, and for a cache
    # that was empty before. In the second case queries and keys start at the same position, and the
    # empty slots of a static cache come after them. So the causal mask has the offset 0.
    return causal(offset=0) if query.shape[2] > 1 and is_causal else None


def _positions_from_1(query: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """The positions of the queries, counted from 1, broadcastable to (B, H, L)."""
    if positions is None or positions.ndim != 2 or positions.shape[1] != query.shape[2]:
        must = "be 'keys' if a model passes no `position_ids` (batch, queries) to its attention"
        raise value_error("count", must, "'positions'")
    return positions[:, None] + 1


def _state(query: Any, key: Any, value: Any, sink: Any, law: Law | None, options: Any) -> Any:
    """The state of attention, with a sink (H,): a logit per head that takes weight but has no value."""
    state = attention_state(query, key, value, law=law, **options)
    if sink is None:
        return state
    zero = torch.zeros_like(state.normalizer)
    no_value = None if state.weighted_value is None else torch.zeros_like(state.weighted_value)
    return merge_states(state, AttentionState(zero + sink[:, None], zero + 1, no_value, zero))


def _weights(query: Any, key: Any, sink: Any, law: Law | None, options: Any) -> Any:
    weights = attention_weights(query, key, law=law, **options)
    if sink is None:
        return weights
    log_keys, log_total = (
        _state(query, key, None, x, law, options).log_normalizer() for x in (None, sink)
    )
    return (weights * torch.exp(log_keys - log_total)[..., None]).to(query.dtype)


def _attend_with_dropout(
    query: Any, key: Any, value: Any, sink: Any, law: Law | None, options: Any, dropout: float
) -> Any:
    """The output by PyTorch's kernel. Attention of isentropic does not drop weights."""
    if sink is not None or options["softcap"] is not None:
        must = "be 0 while a model with soft caps or sinks is trained (set it in its configuration)"
        raise value_error("dropout", must, dropout)
    if law is not None:
        n = options["n_keys"] if "n_keys" in options else _visible_counts(query, key, options["mask"])
        query = scale_queries(query, n, law=law)
    mask, bias = options["mask"], options["bias"]
    if isinstance(mask, Mask):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, scale=options["scale"], enable_gqa=True
    )


def _visible_counts(query: torch.Tensor, key: torch.Tensor, mask: Mask | torch.Tensor | None) -> Any:
    """The number of keys that each query sees, broadcastable to (B, 1, L)."""
    if mask is None:
        return torch.full((1, 1, query.shape[2]), key.shape[2], device=query.device)
    n: Any = as_mask(mask).visible_count(query.shape[2], key.shape[2], like=query)
    return n.expand(*n.shape[:-1], query.shape[2])


# Measurement of entropies


def _measure(
    model: Any,
    batches: Iterable[Any],
    recorder: Recorder,
    laws: Laws,
    progress: bool,
    count: str = "keys",
) -> Recorder:
    modules = _attention_modules(model)
    accepted = inspect.signature(model.forward).parameters
    if "decoder_input_ids" in accepted:
        must = "be an encoder or a decoder alone (such as `model.get_encoder()`)"
        raise value_error("model", must, type(model).__name__)
    if isinstance(batches, (Mapping, torch.Tensor)):
        raise type_error("batches", "be an iterable of batches", type(batches).__name__)
    if laws is None:
        layer_laws = [getattr(module, _LAW, _STANDARD) for module in modules]
    else:
        layer_laws = _per_layer(laws, count, len(modules))
    # With a cache, transformers does not detect packed sequences.
    options = {"use_cache": False} if "use_cache" in accepted else {}
    run_layers = set()

    def add(layer: int, n: Any, entropies: list[Any], counted: Any) -> None:
        run_layers.add(layer)
        recorder.add(layer, n, entropies, counted)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_use(model, modules, layer_laws))
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        stack.enter_context(_recording(modules, recorder.factors, add))
        for batch in tqdm(batches, disable=not progress):
            if isinstance(batch, torch.Tensor):
                model(batch.to(model.device), **options)
            elif isinstance(batch, Mapping):
                model(**options | {name: _to_device(x, model.device) for name, x in batch.items()})
            else:
                raise type_error("batches", "give mappings or tensors", type(batch).__name__)
    if len(run_layers) < len(modules):
        must = f"run all {len(modules)} attention layers of `model` (or pass the part that runs)"
        raise value_error("batches", must, len(run_layers))
    return recorder


def _to_device(x: Any, device: Any) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


@contextlib.contextmanager
def _recording(
    modules: Sequence[Any], factors: Sequence[float], add: Callable[[int, Any, list[Any], Any], None]
) -> Iterator[None]:
    """Call ``add(layer, n, entropies, counted)`` for every attention of the modules.

    `n` is (B or 1, L). `entropies` has an array (B, H, L) for each factor on the logits. `counted`
    (B, L) is True for queries that are not padding.
    """
    try:
        for layer, module in enumerate(modules):
            setattr(module, _RECORD, partial(_record, factors, partial(add, layer)))
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            vars(module).pop(_RECORD, None)


def _record(
    factors: Sequence[float], add: _Add, query: Any, key: Any, sink: Any, law: Law | None, options: Any
) -> None:
    n_queries, mask = query.shape[2], options["mask"]
    if key.shape[2] != n_queries:
        must = "have self-attention alone, and no cache"
        raise value_error("model", must, f"{n_queries} queries of {key.shape[2]} keys")
    n = _visible_counts(query, key, mask)
    counted = torch.ones(query.shape[0], n_queries, dtype=torch.bool, device=query.device)
    if isinstance(mask, torch.Tensor):
        if mask.shape[1] != 1:
            raise value_error("model", "have masks that are the same for all heads", mask.shape)
        # In self-attention, a query that does not see its own position is padding.
        visible = mask.expand(-1, -1, n_queries, n_queries)[:, 0]
        counted = counted & visible.diagonal(dim1=-2, dim2=-1)
    entropies = []
    for factor in factors:
        scaled_law = Constant(factor) if law is None else laws_module.scaled(law, factor)
        entropies.append(_state(query, key, None, sink, scaled_law, options).entropy())
    add(n.reshape(-1, n_queries), entropies, counted)
