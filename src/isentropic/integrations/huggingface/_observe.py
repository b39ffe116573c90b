"""Statistics of attention while a model of transformers is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import TrainerCallback

from isentropic._checks import check_flag, value_error
from isentropic.integrations._observe import (
    Call,
    Observation,
    Observer,
    announce,
    check_options,
    listeners,
)
from isentropic.integrations.huggingface._interface import law_and_options
from isentropic.integrations.huggingface._modules import attention_modules, uses_interface
from isentropic.masks import Mask, as_mask, causal, segments, window


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
    every : int or None
        The number of forward passes from one that is observed to the next; the first is observed. Only
        passes of `model` in training mode are counted. With gradient accumulation, each forward pass
        counts. If `every` is None, only passes for which `Observer.request` was called are observed.
    sequences : int, optional
        Measure only the first `sequences` sequences of each batch. By default all are measured.
    then : callable, optional
        Called with each `Observation`, at the end of the forward pass.
    warn_below : float, optional
        Warn about heads whose normalized entropy is below this number.
    patience : int
        The number of observations in a row in which the entropy must be below `warn_below` for a
        warning. A head that stays below is not reported again.

    Returns
    -------
    Observer
        Its ``latest`` is an `Observation` with one row per attention layer, numbered as in `use`. Its
        ``close()``, or the end of its ``with`` block, stops the measurements.

    Raises
    ------
    TypeError
        For a `model` that is not a transformers model, and arguments of the wrong type.
    ValueError
        For a model none of whose attention goes through the AttentionInterface, and numbers out of
        range.

    Warns
    -----
    UserWarning
        See `warn_below`. Also if the attention of a layer cannot be observed, once for the layer.

    Notes
    -----
    A forward pass that is observed raises nothing that it would not raise otherwise, except what `then`
    raises. Layers that cannot be observed, such as those with a sink for each token, are NaN.

    Loss and gradients are bit for bit those without observing. Only the latest observation is kept, and
    no random numbers are drawn. Gradient checkpointing computes attention again in the backward pass,
    which is not counted.

    An observed pass costs as much as another forward pass of the attention, without gradients. Padding
    is not part of the statistics, and neither is dropout.

    Observe the module that `torch.compile` returns, and not the one in it. Then observed passes run
    without compilation, which changes the rounding, and the other passes as they are compiled. If hooks
    are within the compiled module, all of its passes have graph breaks, and ``fullgraph=True`` fails.

    In self-attention a query is padding if it does not see its own position. In cross-attention all
    queries are counted.

    Attention that does not go through the AttentionInterface of transformers cannot be observed, with
    or without laws: :doc:`/reference/models` lists it as "through hooks". Its rows are NaN. `profile`
    measures it.

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
    layers = _attention_to_observe(model)
    return Observer(
        model, layers, every=every, sequences=sequences, then=then, warn_below=warn_below,
        patience=patience,
    )  # fmt: skip


class ObserveCallback(TrainerCallback):
    """Logs statistics of attention with those of a `transformers.Trainer`.

    TensorBoard, Weights & Biases and the other loggers of the trainer get them as scalars, with names
    such as ``attention/entropy/layer_0/mean``; see `Observation.scalars`.

    Parameters
    ----------
    trainer : transformers.Trainer
        The trainer whose ``log`` is called. Add the callback to it with ``trainer.add_callback(...)``.
    every : int, optional
        The number of optimizer steps from one that is observed to the next. The default is the
        ``logging_steps`` of the trainer, where 0 means none. With gradient accumulation, the first
        forward pass of the step is observed. Its `Observation.step` is the number of the optimizer
        step, as in the history of the trainer.
    heads : bool
        Whether to log every head, and not only the means over heads and the extremes.
    sequences, then, warn_below, patience
        As in `observe`.

    Attributes
    ----------
    observer : Observer or None
        The observer of the present training, None before the first.

    Raises
    ------
    TypeError, ValueError
        For arguments of the wrong type or out of range, and for models that `observe` refuses. If the
        trainer makes its model by ``model_init``, the start of the training refuses them.

    Notes
    -----
    Only the first process of a distributed training observes, and only its part of the batch.

    Examples
    --------
    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=3))
    >>> trainer = Trainer(model, TrainingArguments(tempfile.mkdtemp(), report_to="none"))
    >>> trainer.add_callback(huggingface.ObserveCallback(trainer, every=50, warn_below=0.05))
    """

    def __init__(
        self,
        trainer: Any,
        every: int | None = None,
        *,
        heads: bool = False,
        sequences: int | None = None,
        then: Callable[[Observation], None] | None = None,
        warn_below: float | None = None,
        patience: int = 3,
    ) -> None:
        check_options(every, sequences, then, warn_below, patience)
        check_flag(heads=heads)
        if trainer.model is not None:
            _attention_to_observe(trainer.model)
        self.observer: Observer | None = None
        self._trainer, self._every, self._heads = trainer, every, heads
        self._options: dict[str, Any] = {
            "sequences": sequences, "then": then, "warn_below": warn_below, "patience": patience,
        }  # fmt: skip
        self._logged: Observation | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        model, wrapped = kwargs["model"], self._trainer.model_wrapped
        outermost = wrapped if hasattr(wrapped, "_orig_mod") else model  # of torch.compile
        self.observer = Observer(outermost, _attention_to_observe(model), every=None, **self._options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The number of the step that begins is one more than that of the steps that have ended.
        every, step = self._every or state.logging_steps, state.global_step + 1
        if self.observer is not None and every and step % every == 0:
            self.observer.request(step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.observer is None or self.observer.latest in (None, self._logged):
            return
        self._logged = self.observer.latest
        should_log = control.should_log
        self._trainer.log(self._logged.scalars(heads=self._heads))
        control.should_log = should_log  # `log` unset it, but the loss of this step is not yet logged

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.observer is not None:
            self.observer.close()


def _attention_to_observe(model: Any) -> dict[str, Any]:
    named = attention_modules(model)
    if not any(map(uses_interface, named.values())):
        kinds = ", ".join(sorted({type(module).__name__ for module in named.values()}))
        must = "have attention that goes through the AttentionInterface of transformers, to be observed"
        raise value_error("model", must, f"{type(model).__name__}, where {kinds} does not")
    return named


def announced(function: Any, implementation: str) -> Any:
    """The function of an implementation, which announces its calls while there are listeners."""
    return functools.partial(_attend, function, implementation) if listeners else function


def _attend(
    function: Any,
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Announce a call of attention, and compute it."""
    model_implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    # An implementation that calls another one is announced once, with the queries of the model.
    if model_implementation in (implementation, None):
        announce(
            module, lambda: _call(implementation, module, query, key, attention_mask, *args, **kwargs)
        )
    return function(module, query, key, value, attention_mask, *args, **kwargs)


def _call(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> Call:
    counted = is_first = None
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, mask.shape[0], 1, query.shape[2], key.shape[2], query.device)
    elif "flash" in implementation:
        mask, counted, is_first = _flash_mask(module, query, key, mask, is_causal, **kwargs)
    elif mask is None and implementation == "eager":
        is_causal = False  # "eager" is given all masks
    law, options = law_and_options(
        module, query, mask, scaling, is_causal, softcap, position_bias, kwargs
    )
    visible = options["mask"]
    if isinstance(visible, torch.Tensor):
        visible = visible.expand(*visible.shape[:2], query.shape[2], key.shape[2])
        counted, is_first = is_token(visible), _first_keys(visible[:, 0])
    return Call(query, key, law, options, s_aux, counted, is_first)


def is_token(visible: torch.Tensor) -> torch.Tensor | None:
    """Whether queries are tokens, not padding, by a mask (B, 1, L, S): (B, 1, L).

    In self-attention, a query that does not see its own position is padding. Otherwise it is unknown.
    """
    is_self_attention = visible.shape[-1] == visible.shape[-2]
    return visible.diagonal(dim1=-2, dim2=-1) if is_self_attention else None


def _first_keys(visible: torch.Tensor) -> torch.Tensor:
    """Whether a key is the first of its sequence, by a mask (B, L, S): (B, S)."""
    n_queries, n_keys = visible.shape[1:]
    positions = torch.arange(n_keys, device=visible.device)
    if n_queries != n_keys:
        return positions == visible.any(1).to(torch.uint8).argmax(-1)[:, None]
    # There may be several sequences in a row. Their first token sees no key before its own.
    first_seen = visible.to(torch.uint8).argmax(-1)
    return (first_seen == positions) & visible.diagonal(dim1=-2, dim2=-1)


def _flash_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[Mask | None, torch.Tensor | None, torch.Tensor | None]:
    """The mask of FlashAttention, which queries are tokens, and which keys are the first of a sequence.

    Its arguments are a mask (B, S) of tokens, a window, and where packed sequences begin.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    positions = torch.arange(key.shape[2], device=key.device)
    parts: list[Mask] = []
    counted = is_first = None
    if sliding_window is not None:
        parts.append(window(sliding_window - 1, 0 if is_causal else sliding_window - 1))
    elif is_causal:
        parts.append(causal())
    if mask is not None:
        is_first = mask.bool() & (mask.bool().cumsum(-1) == 1)
        counted = mask.bool()[:, None] if query.shape[2] == key.shape[2] else None
        parts.append(as_mask(mask.bool()[:, None, None]))
    elif cu_seq_lens_q is not None:
        ids = torch.bucketize(positions, cu_seq_lens_q, right=True)
        is_first = torch.isin(positions, cu_seq_lens_q)[None]
        parts.append(segments(ids))
    elif position_ids is not None and len(key) == 1 and position_ids.shape == (1, key.shape[2]):
        is_first = position_ids == position_ids.min()
        parts.append(segments(is_first[0].long().cumsum(-1)))
    return functools.reduce(lambda a, b: a & b, parts) if parts else None, counted, is_first
