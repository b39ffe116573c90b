"""Statistics of attention while a model of transformers is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from isentropic._checks import check_flag, value_error
from isentropic.integrations._observe import Observation, Observer, check_options
from isentropic.integrations.huggingface._modules import attention_modules, uses_interface


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
    `torch.compile` holds here too. Padding is not part of the statistics. In self-attention a query is
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
    layers = _attention_to_observe(model)
    return Observer(
        model, layers, every=every, sequences=sequences, then=then, warn_below=warn_below,
        patience=patience,
    )  # fmt: skip


class ObserveCallback(TrainerCallback):
    """Logs statistics of attention with those of a `transformers.Trainer`, by `Observation.scalars`.

    Parameters
    ----------
    trainer : transformers.Trainer
        The trainer whose ``log`` is called, and to which the callback is added.
    every : int, optional
        The number of optimizer steps from one that is observed to the next, by its first forward pass.
        The default is the ``logging_steps`` of the trainer, where 0 means none. `Observation.step` is
        the number of the optimizer step, as in the history of the trainer.
    heads : bool
        Whether to log every head, and not only the means over heads and the extremes.
    sequences, then, warn_below, patience
        As in `observe`.

    Attributes
    ----------
    observer : Observer or None
        The observer of the present training, None before the first. Only the first process of a
        distributed training has one, which observes its part of the batch.

    Raises
    ------
    TypeError, ValueError
        As in `observe`. If the trainer makes its model by ``model_init``, the start of the training
        refuses it.

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
