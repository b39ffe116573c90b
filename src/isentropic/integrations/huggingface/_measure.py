"""Entropies of the attention of a model, and laws fitted to them."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from tqdm import tqdm

from isentropic import laws as laws_module
from isentropic._attention.functions import attention_entropy
from isentropic._checks import check_flag, check_real, type_error, value_error
from isentropic._namespace import to_numpy
from isentropic.drift import FACTORS, CalibrationReport, DriftReport, Recorder, some_queries
from isentropic.integrations._observe import Call, listening, visible_counts
from isentropic.integrations.huggingface._families import family_of
from isentropic.integrations.huggingface._hooks import (
    argument_names,
    arguments_without_cache,
    cached_length,
    entropies_with_law,
    key_source,
    visible_counts_and_mask,
)
from isentropic.integrations.huggingface._interface import law_of
from isentropic.integrations.huggingface._laws import Laws, apply, per_layer
from isentropic.integrations.huggingface._modules import attention_modules, evaluation
from isentropic.laws._law import Constant, Law
from isentropic.masks import as_mask

_Add = Callable[[int, Any, list[Any], Any, Any], None]
# The factors of the second run of `calibrate`, on the laws of the first.
_NEAR = tuple(2.0 ** (i / 2) for i in range(-2, 3))


def profile(
    model: Any,
    batches: Iterable[Any],
    *,
    laws: Laws = None,
    count: str = "keys",
    progress: bool | str = False,
) -> DriftReport:
    """Measure how the attention entropies of a model change with the number of keys.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        If it has a head on top, such as one for language modeling, that runs too. ``model.base_model``
        avoids the memory for its logits.
    batches : iterable
        The inputs of the model: mappings of tensors (such as ``input_ids`` and ``attention_mask``), or
        tensors. They are moved to the device of the model. An encoder needs batches of different
        lengths; in a decoder, queries see different numbers of keys anyway. For an encoder–decoder they
        have the inputs of the decoder too, such as ``decoder_input_ids`` or ``labels``.
    laws : Law, sequence or mapping, optional
        Laws as in `use`, applied during the measurement. By default the model keeps its laws.
    count : {"keys", "positions"}
        What the n of `laws` counts, as in `use`. The lengths of the report are always numbers of keys.
    progress : bool or str
        Whether to show a progress bar. A string is its label.

    Returns
    -------
    DriftReport
        The report does not include padding. In models with sinks, the entropy is that of the
        distribution over the keys and the sink. If the layers are not all of one kind, as in an
        encoder–decoder, they have their names in the report. The n of cross-attention is the number of
        keys of the encoder.

    Raises
    ------
    TypeError, ValueError
        As in `use`; also for `batches` of another type, for inputs with a cache, and for `count`
        without `laws`.

    Notes
    -----
    The entropies are exact. They need no L×S arrays beyond the masks that transformers makes, and cost
    as much as computing attention once more. The model runs without gradients, in evaluation mode.
    Queries are grouped as in `drift.entropy_drift`.

    Models that do not use the AttentionInterface of transformers materialize the weights, most of them
    L×S. Their entropies are computed from these weights. That takes about as much memory as such a
    model takes anyway. In Longformer, a query with global attention counts as one query, with all keys.

    The queries of cross-attention count as padding where those of the self-attention before it do.

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
    label = "entropies" if progress is True else progress
    return _measure(model, batches, Recorder("batches"), laws, label, count).report()


@overload
def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    reference_length: float | None = ...,
    report: Literal[False] = ...,
    progress: bool | str = ...,
) -> list[Law]: ...
@overload
def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    reference_length: float | None = ...,
    report: Literal[True],
    progress: bool | str = ...,
) -> tuple[list[Law], CalibrationReport]: ...
def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    reference_length: float | None = None,
    report: bool = False,
    progress: bool | str = False,
) -> list[Law] | tuple[list[Law], CalibrationReport]:
    """Fit a law to every attention head of a model, to hold its entropy at the value for one length.

    Parameters
    ----------
    model, batches, progress
        As in `profile`. The model runs on all batches twice; those of an iterator are kept in memory.
        The range of lengths should be as wide as possible.
    reference_length : float, optional
        The number of keys at which the laws are 1. The entropies at this length are the targets at the
        other lengths. By default it is the geometric mean of the smallest and the largest number of
        keys that queries see.
    report : bool
        Whether to return a report too.

    Returns
    -------
    laws : list of Law
        One law per layer, in the order of `layer_names`, a `laws.Knots` with NumPy factors (H, knots),
        for `use` and `save_laws`. For a layer whose queries never see as many keys as the
        reference length, the law is 1 everywhere, which is standard attention.
    report : CalibrationReport
        The factors at each length, and those to expect beyond. Only with ``report=True``.

    Raises
    ------
    TypeError, ValueError
        As in `profile`; also for a reference length outside of the range of the batches.

    Notes
    -----
    The fit is that of `drift.calibrate`. The target entropies are those of standard attention,
    even if the model has laws. The law of a layer changes the inputs of the layers after it. So the
    second run applies laws through the factors of the first, and corrects these factors.

    Each layer measures its entropy at eight factors in the first run and at five in the second, for 64
    queries at most of each group of lengths in each sequence. Layers that compute their attention
    themselves run once for each factor, with all queries.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(**size, num_hidden_layers=3))
    >>> batches = [torch.randint(8, (4, n)) for n in (16, 32, 64)]
    >>> laws = huggingface.calibrate(model, batches, reference_length=32)
    >>> len(laws), laws[0](64).shape
    (3, (2,))
    """
    if reference_length is not None:
        check_real("reference_length", reference_length, least=2)
    check_flag(report=report)
    if isinstance(batches, Iterator):
        batches = list(batches)
    label = "laws" if progress is True else progress
    labels = [label and f"{label}, run {i} of 2" for i in (1, 2)]
    standard = _measure(model, batches, Recorder("batches", FACTORS), {}, labels[0])
    if reference_length is None:
        lengths = standard.report().lengths
        reference_length = math.sqrt(lengths[0] * lengths[-1])
    target = standard.target(reference_length)
    first = standard.calibration(reference_length, target).laws
    second = _measure(model, batches, Recorder("batches", _NEAR), first, labels[1])
    found = second.calibration(reference_length, target, first)
    return (list(found.laws), found) if report else list(found.laws)


def check_batches(batches: Any) -> None:
    if isinstance(batches, (Mapping, torch.Tensor)) or not isinstance(batches, Iterable):
        raise type_error("batches", "be an iterable of batches", type(batches).__name__)


def as_mapping(batch: Any) -> Mapping[str, Any]:
    """A batch by the names of its arguments. A tensor is that of the token ids."""
    if isinstance(batch, torch.Tensor):
        return {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise type_error("batches", "give mappings or tensors", type(batch).__name__)
    return batch


def _measure(
    model: Any,
    batches: Iterable[Any],
    recorder: Recorder,
    laws: Laws,
    label: str | bool,
    count: str = "keys",
) -> Recorder:
    named = attention_modules(model)
    modules = list(named.values())
    accepted = inspect.signature(model.forward).parameters
    check_batches(batches)
    if laws is None:
        layer_laws = [law_of(module) for module in modules]
    else:
        layer_laws = per_layer(laws, count, list(named))
    # With a cache, transformers does not detect packed sequences.
    options = {"use_cache": False} if "use_cache" in accepted else {}
    recorder.names = _report_names(list(named))
    run_layers = set()

    def add(layer: int, n: Any, entropies: list[Any], counted: Any, weight: Any) -> None:
        run_layers.add(layer)
        recorder.add(layer, n, entropies, counted, weight=weight)

    with contextlib.ExitStack() as stack:
        stack.enter_context(apply(model, modules, layer_laws))
        stack.enter_context(evaluation(model))
        stack.enter_context(_recording(modules, recorder.factors, add))
        for batch in tqdm(batches, desc=str(label), unit=" batches", disable=not label):
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


def _report_names(names: Sequence[str]) -> tuple[str, ...] | None:
    """The names for a report, or None if the layers are all of one kind, and so numbers suffice."""
    kinds = {re.sub(r"[0-9]+", "", name) for name in names}
    return tuple(names) if len(kinds) > 1 else None


@contextlib.contextmanager
def _recording(modules: Sequence[Any], factors: Sequence[float], add: _Add) -> Iterator[None]:
    """Call ``add(layer, n, entropies, counted, weight)`` for every attention of the modules.

    `n` is (B or 1, L). `entropies` has an array (B, H, L) for each factor on the logits. `counted`
    (B, L) is True for queries that are not padding. `weight` is the number of queries that each stands
    for. With several factors, L counts only some of the queries.
    """
    run = _Run(factors, add)
    layers: dict[torch.nn.Module, int] = {}

    def hear(module: torch.nn.Module, call: Callable[[], Call]) -> None:
        if module in layers:
            run.record(layers[module], call())

    with contextlib.ExitStack() as stack:
        for layer, module in enumerate(modules):
            start = partial(run.start, argument_names(module))
            stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
            if family_of(module) is None:
                layers[module] = layer
            else:
                end = partial(run.run_again, layer)
                stack.callback(module.register_forward_hook(end, with_kwargs=True).remove)
        stack.enter_context(listening(hear))
        stack.enter_context(torch.no_grad())
        yield


class _Run:
    """What is recorded while a model runs."""

    def __init__(self, factors: Sequence[float], add: _Add) -> None:
        self.factors, self.add = factors, add
        self.is_cross = False  # whether the present attention is cross-attention
        self.counted: Any = None  # those queries of the last self-attention that are not padding

    def start(self, names: Sequence[str], module: Any, args: Any, kwargs: Any) -> None:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        self.is_cross = key_source(arguments) is not None
        if not self.is_cross and (cached := cached_length(module, arguments)):
            raise value_error("model", "have no cache", f"one of {cached} keys")

    def record(self, layer: int, call: Call) -> None:
        query, key, law, options, sink = call[:5]
        n = visible_counts(query, key, options["mask"])
        n = n.reshape(-1, query.shape[2])
        counted = self.counted_queries(options["mask"], query, query.shape[2], key.shape[2])
        weight: Any = 1.0
        if len(self.factors) > 1:
            rows, weight = some_queries(to_numpy(n * counted.any(0)))
            query, options = _at_rows(rows, query, key, options)
            n, counted = n[:, rows], counted[:, rows]
        entropies = [
            attention_entropy(query, key, law=_scaled(law, factor), sinks=sink, **options)
            for factor in self.factors
        ]
        self.add(layer, n, entropies, counted, weight)

    def run_again(self, layer: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        arguments = arguments_without_cache(module, args, kwargs)
        law, count = law_of(module)
        entropies, n_keys = [], 0
        for factor in self.factors:
            rows, n_keys = entropies_with_law(module, arguments, _scaled(law, factor), count)
            entropies.append(rows)
        n, visible = visible_counts_and_mask(module, arguments)
        n = torch.tensor([n_keys]) if n is None else n
        counted = self.counted_queries(visible, entropies[0], entropies[0].shape[2], n_keys)
        self.add(layer, n.reshape(-1, n.shape[-1]), entropies, counted, 1.0)

    def counted_queries(self, mask: Any, like: Any, n_queries: int, n_keys: int) -> Any:
        """Those of the queries (B, L) that are not padding. B and the device are those of `like`."""
        counted = torch.ones(len(like), n_queries, dtype=torch.bool, device=like.device)
        if self.is_cross:
            known = self.counted is not None and self.counted.shape == counted.shape
            return self.counted if known else counted
        if n_keys != n_queries:
            must = "have as many queries as keys in self-attention"
            raise value_error("model", must, f"{n_queries} and {n_keys}")
        if isinstance(mask, torch.Tensor):
            if mask.shape[1] != 1:
                raise value_error("model", "have masks that are the same for all heads", mask.shape)
            # In self-attention, a query that does not see its own position is padding.
            visible = mask.expand(-1, -1, n_queries, n_queries)[:, 0]
            counted = counted & visible.diagonal(dim1=-2, dim2=-1)
        self.counted = counted
        return counted


def _at_rows(rows: Any, query: Any, key: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Some of the queries, and the options of attention for them."""
    if len(rows) == query.shape[-2]:
        return query, options
    if (mask := options["mask"]) is not None:
        mask = as_mask(mask).rows(rows, query.shape[-2], key.shape[-2], like=query)
    options = options | {"mask": mask}
    if (bias := options.get("bias")) is not None and bias.shape[-2] > 1:
        options["bias"] = bias[..., rows, :]
    n = options.get("n_keys")
    if isinstance(n, torch.Tensor) and n.ndim and n.shape[-1] > 1:
        options["n_keys"] = n[..., rows]
    return query[..., rows, :], options


def _scaled(law: Law | None, factor: float) -> Law:
    return Constant(factor) if law is None else laws_module.scaled(law, factor)
