"""Statistics of attention while a model of transformers is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isentropic._checks import value_error
from isentropic.integrations._observe import Observation, Observer
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
