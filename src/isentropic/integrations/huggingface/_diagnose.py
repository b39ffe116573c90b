"""Whether dilution or unseen positions raise the loss of a model beyond its trained length."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy, pad
from tqdm import tqdm

from isentropic._checks import check_count, type_error, value_error
from isentropic._loops import BLOCKS
from isentropic.integrations.huggingface._clamp import clamping, takes_rotary_positions
from isentropic.integrations.huggingface._laws import Laws, apply, per_layer
from isentropic.integrations.huggingface._measure import as_mapping, check_batches
from isentropic.integrations.huggingface._modules import attention_modules, evaluation
from isentropic.integrations.huggingface._rules import warn_of_rules
from isentropic.laws._law import Law, LogLength

# The label of tokens that have no loss, as in PyTorch and transformers.
_IGNORED = -100
# The treatments, in the order of the axes of the losses: the law first, then the clamped positions.
_ARMS = {"as it is": (0, 0), "law": (1, 0), "clamped": (0, 1), "law, clamped": (1, 1)}
_EFFECTS = ("rise", "law_alone", "clamping_alone", "both", "law", "clamping")
_TITLES = (
    "rise of the loss", "the law alone removes", "clamping alone removes", "both remove",
    "of which the law", "of which clamping",
)  # fmt: skip


class Effect(NamedTuple):
    """A difference of mean losses per token.

    Attributes
    ----------
    nats : float
    error : float
        The standard error over the sequences. NaN for a single sequence.
    share : float
        The part of the rise of the loss. NaN if the loss does not rise.
    """

    nats: float
    error: float
    share: float


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """Losses of a model with and without a law, and clamped positions. Its `repr` is a table.

    Attributes
    ----------
    trained_length, window : int
        As in `diagnose`.
    bands : NumPy array (bands, 2)
        The smallest and the largest number of keys of each band: up to half of the trained length,
        the octave up to the trained length, and half octaves beyond it.
    sequence_counts : NumPy array (sequences, bands)
        The number of tokens with a loss in each sequence.
    sequence_losses : NumPy array ``(sequences, 2, 2, bands)``
        The mean loss of these tokens in nats: without and with the law, with positions as they are and
        clamped. NaN without a token.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic.integrations.huggingface import Diagnosis
    >>> bands = np.array([[1, 32], [33, 64], [65, 90], [91, 128]])
    >>> loss = np.array([[[3.0, 2.0, 3.0, 5.0], [3.0, 2.0, 3.0, 5.0]], [[3.0, 2.0, 2.0, 2.0]] * 2])
    >>> Diagnosis(64, 32, bands, np.array([[32, 32, 26, 38]]), loss[None])
    Loss per token in nats, by number of keys; trained length 64, window 32
    keys            1–32   33–64   65–90  91–128
    tokens            32      32      26      38
    as it is       3.000   2.000   3.000   5.000
    law            3.000   2.000   2.000   2.000
    clamped        3.000   2.000   3.000   5.000
    law, clamped   3.000   2.000   2.000   2.000
    Beyond 64 keys              nats       ±   of the rise
    rise of the loss           2.188       –         100 %
    the law alone removes      2.188       –         100 %
    clamping alone removes     0.000       –           0 %
    both remove                2.188       –         100 %
    of which the law           2.188       –         100 %
    of which clamping          0.000       –           0 %
    """

    trained_length: int
    window: int
    bands: np.ndarray
    sequence_counts: np.ndarray
    sequence_losses: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """The number of tokens in each band, (bands,)."""
        total: np.ndarray = self.sequence_counts.sum(axis=0)
        return total

    @property
    def losses(self) -> np.ndarray:
        """The mean loss per token in nats, ``(2, 2, bands)``: by law, clamped positions and keys."""
        mean: np.ndarray = self._sums.sum(axis=0) / self.counts
        return mean

    @property
    def effects(self) -> dict[str, Effect]:
        """Differences of losses beyond the trained length, the mean over all tokens there.

        Returns
        -------
        dict of Effect
            With the loss L of the model as it is, L(law) with the law, L(clamped) with clamped
            positions and L(both) with both:

            - ``rise``: L less the loss of the model as it is in the last octave of the trained length;
            - ``law_alone``: L − L(law);
            - ``clamping_alone``: L − L(clamped);
            - ``both``: L − L(both);
            - ``law``: what the law removes, the mean of L − L(law) and L(clamped) − L(both);
            - ``clamping``: the mean of L − L(clamped) and L(law) − L(both).

            The last two add up to ``both``: they are its Shapley values.
        """
        counts, sums = self.sequence_counts, self._sums
        effects = self._effects(counts.sum(axis=0), sums.sum(axis=0))
        n = len(counts)
        error = np.full(len(_EFFECTS), np.nan)
        if n > 1:  # jackknife
            rest = zip(counts.sum(axis=0) - counts, sums.sum(axis=0) - sums, strict=True)
            without_one = np.stack([self._effects(*x) for x in rest])
            error = math.sqrt(n - 1) * without_one.std(axis=0)
        share = effects / effects[0] if effects[0] > 0 else np.full(len(_EFFECTS), np.nan)
        rows = np.stack([effects, error, share], axis=1).tolist()
        return {name: Effect(*row) for name, row in zip(_EFFECTS, rows, strict=True)}

    @property
    def _sums(self) -> np.ndarray:
        counts = self.sequence_counts[:, None, None]
        sums: np.ndarray = np.where(counts > 0, self.sequence_losses, 0) * counts
        return sums

    def _effects(self, counts: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """The differences in the order of `_EFFECTS`, from sums (2, 2, bands) of losses."""
        first, last = self.bands.T
        beyond, before = first > self.trained_length, last == self.trained_length
        with np.errstate(invalid="ignore"):  # without one sequence there may be no token
            level = sums[0, 0, before].sum() / counts[before].sum()
            (plain, clamped), (law, both) = sums[..., beyond].sum(axis=-1) / counts[beyond].sum()
        by_law = (plain - law + clamped - both) / 2
        by_clamping = (plain - clamped + law - both) / 2
        removed = (plain - law, plain - clamped, plain - both, by_law, by_clamping)
        return np.array([plain - level, *removed])

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain numbers and lists, for JSON.

        Returns
        -------
        dict
            The attributes, ``counts``, ``losses`` and ``effects``, with None in place of NaN.
        """
        lists: dict[str, Any] = {"trained_length": self.trained_length, "window": self.window}
        for name in ("bands", "counts", "losses", "sequence_counts", "sequence_losses"):
            x = getattr(self, name).astype(object)
            x[x != x] = None
            lists[name] = x.tolist()
        effects = {
            name: {key: None if x != x else x for key, x in effect._asdict().items()}
            for name, effect in self.effects.items()
        }
        return lists | {"effects": effects}

    def __repr__(self) -> str:
        ranges = [f"{first}–{last}" for first, last in self.bands]
        width = max(8, *(len(x) + 2 for x in [*ranges, *map(str, self.counts)]))
        lines = [
            "Loss per token in nats, by number of keys; "
            f"trained length {self.trained_length}, window {self.window}",
            _row("keys", ranges, width),
            _row("tokens", map(str, self.counts), width),
        ]
        for name, arm in _ARMS.items():
            lines.append(_row(name, (format(x, "z.3f") for x in self.losses[arm]), width))
        lines.append(f"Beyond {self.trained_length} keys".ljust(24) + "    nats       ±   of the rise")
        for title, (nats, error, share) in zip(_TITLES, self.effects.values(), strict=True):
            part = "–" if share != share else f"{100 * share:z.0f} %"
            numbers = (format(nats, "z.3f"), "–" if error != error else format(error, ".3f"))
            lines.append(title.ljust(24) + "".join(x.rjust(8) for x in numbers) + part.rjust(14))
        return "\n".join(lines)


def _row(name: str, cells: Iterable[str], width: int) -> str:
    return name.ljust(12) + "".join(x.rjust(width) for x in cells)


def diagnose(
    model: Any,
    batches: Iterable[Any],
    *,
    trained_length: int,
    law: Laws = None,
    window: int | None = None,
    progress: bool | str = False,
) -> Diagnosis:
    """Measure whether dilution or unseen positions raise the loss of a model beyond its trained length.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A language model with rotary positions and its head, causal or masked.
    batches : iterable
        The inputs of the model, as in `profile`, with sequences longer than `trained_length`. The
        labels of a causal model are the tokens, if there are no ``labels``. Labels of −100 are ignored.
        Batches must not have ``position_ids``, so packed sequences are not supported.
    trained_length : int
        The longest context of the training.
    law : Law, sequence or mapping, optional
        The law, or laws of the layers as in `use`. The default is
        ``LogLength(trained_length, minimum=1)``, which is 1 up to the trained length.
    window : int, optional
        The relative position at which positions are clamped, less than the trained length. The default
        is half of the trained length: the largest distances are rare in training, and a short window
        costs within the trained length.
    progress : bool or str
        Whether to show a progress bar. A string is its label.

    Returns
    -------
    Diagnosis
        The mean loss per token by the number of tokens that a query may see, with and without the law,
        with positions as they are and clamped. `Diagnosis.effects` has their differences.

    Raises
    ------
    TypeError, ValueError
        As in `use` and `profile`; for a model without rotary positions that go through the
        AttentionInterface of transformers, for batches without tokens on both sides of the trained
        length, and for a window that is not shorter than it.

    Notes
    -----
    As contexts grow, more keys share the weight, and distances appear that the training did not have.
    The law counters the first, and clamped positions avoid the second. Neither does so perfectly: the
    law that suits a model may be another one, and far keys lose their order. So a cause may cost more
    than its treatment removes. A law may also gain for other reasons than length. The rise compares
    different tokens, so it also holds how hard the texts are at their beginnings and ends. The other
    differences compare the same tokens.

    Clamped positions are those of ReRoPE (Su 2023, https://spaces.ac.cn/archives/9708): a key at the
    distance of the window or farther has the distance of the window. Up to the window the loss is that
    of the model as it is. The table shows what clamping costs from there up to the trained length.

    The standard errors are those of the jackknife over sequences. Use several independent texts.

    Laws that the model has are not used. The model runs four times, in evaluation mode. Attention with
    clamped positions computes queries and keys three times, and no L×S array beyond the masks of
    transformers. Logits are formed in parts if the model supports ``logits_to_keep``. Layers other
    than attention, and attention without positions, are not changed.

    A warning names a rule by which the model already scales its logits, as in `use`.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from isentropic.integrations import huggingface
    >>> size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=1))
    >>> tokens = torch.randint(8, (4, 40))
    >>> diagnosis = huggingface.diagnose(model, [tokens], trained_length=16)
    >>> diagnosis.bands.tolist()
    [[1, 8], [9, 16], [17, 22], [23, 32], [33, 39]]
    >>> diagnosis.losses.shape  # law, clamped positions, bands
    (2, 2, 5)
    """
    check_count("trained_length", trained_length, least=2)
    # Measured on bytes with a Llama of 2 layers of one seed, trained at 64: the loss at 33–64 and at
    # 182–255 keys. Window 8: 1.148, 1.454; 16: 1.100, 1.201; 32: 1.095, 1.173; 48: 1.096, 1.177; 63:
    # 1.096, 1.197. Not clamped: 1.096, 3.728.
    window = trained_length // 2 if window is None else window
    check_count("window", window)
    if window >= trained_length:
        raise value_error("window", f"be less than the trained length, {trained_length}", window)
    if law is not None and not isinstance(law, (Law, Sequence, Mapping)):
        raise type_error("law", "be a law, or a sequence or mapping of laws", type(law).__name__)
    check_batches(batches)
    arms = _Arms(model, LogLength(trained_length, minimum=1) if law is None else law, window)
    rows: list[Any] = []
    label = "losses" if progress is True else progress
    with evaluation(model), torch.no_grad():
        for batch in tqdm(batches, desc=str(label), unit=" batches", disable=not label):
            for n, losses in arms.sequences(batch):
                rows.append(_sums_by_band(n, losses, trained_length))
    return _diagnosis(rows, trained_length, window)


class _Arms:
    """A model with and without laws, and clamped positions."""

    def __init__(self, model: Any, law: Laws, window: int) -> None:
        named = attention_modules(model)
        self.model, self.modules, self.window = model, list(named.values()), window
        self.laws = [per_layer(x, "keys", list(named)) for x in (None, law)]
        rotary = [module for module in self.modules if takes_rotary_positions(module)]
        if not rotary or model.config.is_encoder_decoder:
            must = "have rotary positions, as `position_embeddings` of its attention, and no encoder"
            raise value_error("model", must, type(model).__name__)
        self.is_causal = any(map(is_causal, rotary))
        # The attention to images of a multimodal model is not causal, and stays as it is.
        self.text_modules = [module for module in self.modules if is_causal(module) == self.is_causal]
        self.accepted = inspect.signature(model.forward).parameters
        warn_of_rules(self.modules, [x for x, _ in self.laws[1]])

    def sequences(self, batch: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each sequence, of tokens with a loss: the numbers of keys, and the losses of all arms."""
        inputs, labels, n = self.inputs_labels_counts(batch)
        losses = torch.stack([x.to("cpu", torch.float64) for x in self.losses(inputs, labels)])
        for i, is_used in enumerate((labels != _IGNORED).cpu()):
            yield n[i, is_used], losses[:, i, is_used]

    def inputs_labels_counts(self, batch: Any) -> tuple[dict[str, Any], Any, Any]:
        """The arguments of the model, and for its logits the labels and numbers of keys, (B, L)."""
        batch = as_mapping(batch)
        for name in ("position_ids", "past_key_values", "cache"):
            if batch.get(name) is not None:
                raise value_error("batches", f"leave `{name}` to the model", f"`{name}`")
        device = self.model.device
        inputs = {name: x.to(device) if hasattr(x, "to") else x for name, x in batch.items()}
        labels, mask = inputs.pop("labels", None), inputs.get("attention_mask")
        ids, name = inputs.get("input_ids"), "input_ids" if labels is None else "labels"
        if labels is None:
            if not self.is_causal or "input_ids" not in inputs:
                must = "have `labels`, unless the model is causal and has `input_ids`"
                raise value_error("batches", must, ", ".join(batch))
            labels = ids
        labels = checked_ids(name, labels)
        is_token = torch.ones_like(labels) if mask is None else mask
        for name, x in {"input_ids": ids, "attention_mask": is_token}.items():
            if x is not None and (got := tuple(getattr(x, "shape", ()))) != tuple(labels.shape):
                must = f"have an `{name}` of the shape of the labels, {tuple(labels.shape)}"
                raise value_error("batches", must, got)
        labels = labels.masked_fill(is_token == 0, _IGNORED)
        n = is_token.long().cumsum(-1)
        if self.is_causal:  # the logits are those of the next token
            labels = pad(labels[:, 1:], (0, 1), value=_IGNORED)
            labels = labels.masked_fill(is_token == 0, _IGNORED)  # of padding before the first token
        else:
            n = n[:, -1:].expand_as(n)
        return inputs, labels, n.cpu()

    def losses(self, inputs: dict[str, Any], labels: torch.Tensor) -> Iterator[torch.Tensor]:
        """The losses (B, L), in the order (0, 1), (0, 0), (1, 0), (1, 1) of law and clamped positions.

        A model whose positions cannot be clamped fails at once.
        """
        for with_law, is_clamped in ((0, 1), (0, 0), (1, 0), (1, 1)):
            with contextlib.ExitStack() as stack:
                stack.enter_context(apply(self.model, self.modules, self.laws[with_law]))
                if is_clamped:
                    stack.enter_context(clamping(self.text_modules, self.window))
                yield self._loss(inputs, labels)

    def _loss(self, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        options = {"use_cache": False} if "use_cache" in self.accepted else {}
        if "logits_to_keep" not in self.accepted or self.model.base_model is self.model:
            return _token_losses(self.model(**options | inputs), labels)
        sequences, length = labels.shape
        vocabulary = self.model.config.get_text_config().vocab_size
        step = max(1, BLOCKS.vocabulary_logits // (sequences * vocabulary))
        with _computed_once(self.model.base_model):
            parts = [
                _token_losses(self.model(**options | inputs, logits_to_keep=rows), labels[:, rows])
                for rows in torch.arange(length, device=labels.device).split(step)
            ]
        return torch.cat(parts, -1)


def checked_ids(name: str, labels: Any) -> torch.Tensor:
    must = f"have `{name}` as a tensor (sequences, tokens) of integers"
    if not isinstance(labels, torch.Tensor):
        raise type_error("batches", must, type(labels).__name__)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise type_error("batches", must, labels.dtype)
    if labels.ndim != 2 or 0 in labels.shape:
        raise value_error("batches", must, tuple(labels.shape))
    return labels.long()


def is_causal(module: Any) -> bool:
    return bool(getattr(module, "is_causal", True))


def _token_losses(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """The losses in nats, (B, L); 0 for tokens that are ignored."""
    logits = getattr(output, "logits", None)
    if logits is None or logits.shape[:-1] != labels.shape:
        must = "be a language model that gives logits for its tokens"
        raise value_error("model", must, type(output).__name__)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(
        logits.to(dtype).transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none"
    )


@contextlib.contextmanager
def _computed_once(module: torch.nn.Module) -> Iterator[None]:
    """Let a module give the output of its first call in all calls, to run its head on parts of it."""
    forward, previous = module.forward, vars(module).get("forward")
    outputs: list[Any] = []

    def forward_once(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(forward(*args, **kwargs))
        return outputs[0]

    vars(module)["forward"] = forward_once
    try:
        yield
    finally:
        if previous is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = previous


def _band(n: np.ndarray, trained_length: int) -> np.ndarray:
    """The band of n keys: 0 up to half of the trained length, 1 up to all of it, then half octaves."""
    octaves = np.log2(n / trained_length)
    bands: np.ndarray = np.where(octaves > -1, 1 + np.maximum(np.ceil(2 * octaves), 0), 0).astype(int)
    return bands


def _sums_by_band(n: Any, losses: Any, trained_length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Of one sequence: the numbers of tokens (bands,), sums of losses (4, bands), and the largest n."""
    n = n.numpy()
    band = _band(n, trained_length)
    sums = [np.bincount(band, x, minlength=2) for x in losses.numpy()]
    return np.bincount(band, minlength=2), np.stack(sums), int(n.max(initial=0))


def _diagnosis(rows: Sequence[Any], trained_length: int, window: int) -> Diagnosis:
    largest = max((n for _, _, n in rows), default=0)
    if largest <= trained_length:
        must = f"have sequences with more than the trained length, {trained_length} keys"
        raise value_error("batches", must, f"{largest} at most")
    n_bands = max(len(counts) for counts, _, _ in rows)
    counts = np.stack([np.pad(x, (0, n_bands - len(x))) for x, _, _ in rows])
    sums = np.stack([np.pad(x, ((0, 0), (0, n_bands - x.shape[1]))) for _, x, _ in rows])
    if not counts[:, 1].any():
        must = f"have tokens with labels and {trained_length // 2 + 1} to {trained_length} keys too"
        raise value_error("batches", must, "none")
    ends = trained_length * np.array([0, 0.5, *2 ** (np.arange(n_bands - 1) / 2)])
    ends = np.minimum(np.floor(ends), largest).astype(int)
    bands, known = np.stack([ends[:-1] + 1, ends[1:]], axis=1), counts.any(axis=0)
    # From the order of `_Arms.losses` to that of law and clamped positions.
    with np.errstate(invalid="ignore"):
        means = (sums[:, [1, 0, 2, 3]] / counts[:, None]).reshape(len(rows), 2, 2, n_bands)
    return Diagnosis(trained_length, window, bands[known], counts[:, known], means[..., known])
