"""Entropies of the attention of a model, laws fitted to them, and statistics while it is trained."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from isentropic import laws as laws_module
from isentropic._attention.functions import attention_entropy
from isentropic._checks import check_real, type_error, value_error
from isentropic._namespace import to_numpy
from isentropic.drift import FACTORS, CalibrationReport, DriftReport, Recorder, some_queries
from isentropic.integrations._observe import Call, Observation, Observer, listening, visible_counts
from isentropic.integrations.huggingface._calls import is_token
from isentropic.integrations.huggingface._hooks import (
    argument_names,
    cached_length,
    key_source,
    run_with_laws,
)
from isentropic.integrations.huggingface._laws import Laws, apply, per_layer
from isentropic.integrations.huggingface._layer_law import law_of
from isentropic.integrations.huggingface._modules import (
    attention_modules,
    evaluation,
    family_of,
    uses_interface,
)
from isentropic.laws._law import Constant, Law
from isentropic.masks import as_mask

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
        lengths, and an encoder–decoder the inputs of the decoder too, such as ``decoder_input_ids``.
    laws : Law, sequence or mapping, optional
        Laws as in `use`, applied during the measurement by the attention implementation that the model
        has. By default the model keeps its laws.
    count : {"keys", "positions"}
        What the n of `laws` counts, as in `use`. The lengths of the report are always numbers of keys.
    progress : bool or str
        Whether to show a progress bar. A string is its label.

    Returns
    -------
    DriftReport
        The report does not include padding. With sinks, the entropy is that of the distribution over
        the keys and the sink. Layers of different kinds, as in an encoder–decoder, have their names in
        the report. The n of cross-attention is the number of keys of the encoder.

    Raises
    ------
    TypeError, ValueError
        As in `use`; also for `batches` of another type, for inputs with a cache, and for `count`
        without `laws`.

    Notes
    -----
    The entropies are exact. They need no L×S arrays beyond the masks that transformers makes, and cost
    as much as attention once more. The model runs without gradients, in evaluation mode. Queries are
    grouped as in `drift.entropy_drift`.

    Models that do not use the AttentionInterface of transformers materialize the weights, and their
    entropies are computed from these. Queries of cross-attention count as padding where those of the
    self-attention before it do.

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


def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    reference_length: float | None = None,
    progress: bool | str = False,
) -> CalibrationReport:
    """Fit a law to every attention head of a model, to hold its entropy at the value for one length.

    Parameters
    ----------
    model, batches, progress
        As in `profile`. The model runs on all batches twice; those of an iterator are kept in memory.
        The range of lengths should be as wide as possible.
    reference_length : float, optional
        The number of keys at which the laws are 1, and whose entropies are the targets. By default it
        is the geometric mean of the smallest and the largest number of keys that queries see.

    Returns
    -------
    CalibrationReport
        Its ``laws`` are for `use`: one law per layer, in the order of `laws_of`, a `laws.Knots` with
        NumPy factors (H, knots). For a layer whose queries never see as many keys as the reference
        length, the law is 1 everywhere, which is standard attention. It also has the factors at each
        length, and those to expect beyond.

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
    queries at most of each group of lengths in each sequence. Layers with hooks run once for each
    factor, with all queries.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(**size, num_hidden_layers=3))
    >>> batches = [torch.randint(8, (4, n)) for n in (16, 32, 64)]
    >>> laws = huggingface.calibrate(model, batches, reference_length=32).laws
    >>> len(laws), laws[0](64).shape
    (3, (2,))
    """
    if reference_length is not None:
        check_real("reference_length", reference_length, least=2)
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
    return second.calibration(reference_length, target, first)


def observe(
    model: Any,
    every: int | None = 100,
    *,
    sequences: int | None = None,
    then: Callable[[Observation], None] | None = None,
    warn_below: float | None = None,
    patience: int = 3,
) -> Observer:
    """Measure the attention of a model while it is trained.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model. Its attention implementation stays as it is: "sdpa", "eager", "isentropic" or
        another. It may have laws.
    every, sequences, then, warn_below, patience
        As in `isentropic.integrations.torch.observe`.

    Returns
    -------
    Observer
        Its ``latest`` is an `Observation` with one row per attention layer, numbered as in `use`. Its
        ``close()``, or the end of its ``with`` block, stops the measurements.

    Raises
    ------
    TypeError, ValueError
        For a `model` that is not a transformers model, or none of whose attention goes through the
        AttentionInterface, and for arguments of the wrong type or out of range.

    Warns
    -----
    UserWarning
        See `warn_below`. Also if the attention of a layer cannot be observed, once for the layer.

    Notes
    -----
    What `isentropic.integrations.torch.observe` says of the training step, of its cost and of
    `torch.compile` holds here too. :doc:`/how-to/monitor-training` shows how a `transformers.Trainer`
    logs the statistics. Padding is not part of the statistics. In self-attention a query is
    padding if it does not see its own position. In cross-attention all queries are counted.

    A forward pass that is observed raises nothing that it would not raise otherwise, except what `then`
    raises. Layers that cannot be observed are NaN: those with a sink for each token, and those that
    :doc:`/reference/models` lists as "through hooks". `profile` measures these.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=3)).train()
    >>> observer = huggingface.observe(model, every=10)
    >>> tokens = torch.randint(8, (4, 16))
    >>> model(tokens, labels=tokens).loss.backward()
    >>> observer.latest.entropy.shape  # layers, heads
    (3, 2)
    >>> observer.close()
    """
    named = attention_modules(model)
    if not any(map(uses_interface, named.values())):
        kinds = ", ".join(sorted({type(module).__name__ for module in named.values()}))
        must = "have attention that goes through the AttentionInterface of transformers, to be observed"
        raise value_error("model", must, f"{type(model).__name__}, where {kinds} does not")
    return Observer(
        model, named, every=every, sequences=sequences, then=then, warn_below=warn_below,
        patience=patience,
    )  # fmt: skip


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
    """Let the recorder record the entropies of all layers while the model runs."""
    named = attention_modules(model)
    check_batches(batches)
    layers = {module: law_of(module) for module in named.values()}
    if laws is not None:
        layers = per_layer(laws, count, named)
    # With a cache, transformers does not detect packed sequences.
    accepted = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in accepted else {}
    # Layers of one kind, as in a decoder, have numbers.
    kinds = {re.sub(r"[0-9]+", "", name) for name in named}
    recorder.names = tuple(named) if len(kinds) > 1 else None
    run = _Run(layers, recorder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(apply(model, layers))
        stack.enter_context(evaluation(model))
        stack.enter_context(run.recording())
        for batch in tqdm(batches, desc=str(label), unit=" batches", disable=not label):
            if isinstance(batch, torch.Tensor):
                model(batch.to(model.device), **options)
            else:
                inputs = dict(as_mapping(batch))
                for name, x in inputs.items():
                    inputs[name] = x.to(model.device) if isinstance(x, torch.Tensor) else x
                model(**options | inputs)
    if len(run.seen) < len(layers):
        must = f"run all {len(layers)} attention layers of `model` (or pass the part that runs)"
        raise value_error("batches", must, len(run.seen))
    return recorder


class _Run:
    """Hands a recorder the entropies of each attention, at each of its factors on the logits."""

    def __init__(self, modules: Iterable[Any], recorder: Recorder) -> None:
        self.layers = {module: layer for layer, module in enumerate(modules)}
        self.recorder = recorder
        self.seen: set[Any] = set()
        self.is_cross = False  # whether the present attention is cross-attention
        self.counted: Any = None  # those queries of the last self-attention that are not padding

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self.layers:
                start = partial(self._start, argument_names(module))
                stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
                if family_of(module) is not None:
                    handle = module.register_forward_hook(self._run_again, with_kwargs=True)
                    stack.callback(handle.remove)
            stack.enter_context(listening(self._hear))
            stack.enter_context(torch.no_grad())
            yield

    def _start(self, names: Sequence[str], module: Any, args: Any, kwargs: Any) -> None:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        self.is_cross = key_source(arguments) is not None
        if not self.is_cross and (cached := cached_length(module, arguments)):
            raise value_error("model", "have no cache", f"one of {cached} keys")

    def _hear(self, module: torch.nn.Module, call: Callable[[], Call]) -> None:
        """Of attention that is announced, with all queries or some of them."""
        if module not in self.layers:
            return
        query, key, law, options, sink = call()[:5]
        n = visible_counts(query, key, options["mask"]).reshape(-1, query.shape[2])
        counted = self._counted_queries(options["mask"], query, query.shape[2], key.shape[2])
        weight: Any = 1.0  # the number of queries that each stands for
        if len(self.recorder.factors) > 1:
            rows, weight = some_queries(to_numpy(n * counted.any(0)))
            query, options = _at_rows(rows, query, key, options)
            n, counted = n[:, rows], counted[:, rows]
        entropies = [
            attention_entropy(query, key, law=_scaled(law, factor), sinks=sink, **options)
            for factor in self.recorder.factors
        ]
        self.seen.add(module)
        self.recorder.add(self.layers[module], n, entropies, counted, weight=weight)

    def _run_again(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Of attention with hooks, by further runs of the module."""
        law, count = law_of(module)
        scaled = (_scaled(law, factor) for factor in self.recorder.factors)
        entropies, visible, n_keys = run_with_laws(module, args, kwargs, scaled, count)
        n = torch.tensor([[n_keys]]) if visible is None else visible.sum(-1)[:, 0]
        counted = self._counted_queries(visible, entropies[0], entropies[0].shape[2], n_keys)
        self.seen.add(module)
        self.recorder.add(self.layers[module], n, entropies, counted)

    def _counted_queries(self, mask: Any, like: Any, n_queries: int, n_keys: int) -> Any:
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
            visible: Any = is_token(mask.expand(-1, -1, n_queries, n_queries))
            counted = counted & visible[:, 0]
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
