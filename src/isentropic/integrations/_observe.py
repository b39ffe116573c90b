"""Statistics of attention while a PyTorch model is trained.

Whatever computes attention announces its queries and keys to the listeners. Observers and
`huggingface.profile` listen.

In shapes, B is the batch size, H the number of heads, L the number of queries and S the number of keys.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isentropic._attention.functions import attention_state
from isentropic._attention.state import AttentionState, merge_states
from isentropic._checks import check_count, check_real, is_array, type_error
from isentropic.laws._law import Law
from isentropic.masks import Mask, as_mask

QUANTITIES = ("entropy", "normalized_entropy", "log_normalizer", "sink_mass", "largest_logit")
# How many heads or layers a warning names.
_MOST_NAMED = 5
# `torch.compiler.disable`, which would import the compiler at once. That takes seconds.
_outside_graphs = torch._disable_dynamo
# The width of a column of the table.
_WIDTH = 16


class _Eager:
    """A context in which compiled code runs as it is written. Such contexts may end in any order."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._stance = torch.compiler.set_stance("force_eager")
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._stance.__exit__(None, None, None)


_EAGER = _Eager()


class Call(NamedTuple):
    """A call of attention."""

    query: Tensor  # (B, H, L, E)
    key: Tensor  # (B, G, S, E)
    law: Law | None
    options: dict[str, Any]  # `mask`, `bias`, `n_keys`, … of `attention_state`
    sink: Tensor | None = None  # (H,), logits that take weight and have no value
    counted: Tensor | None = None  # (B or 1, H or 1, L): False for queries that are padding
    is_first: Tensor | None = None  # (B or 1, S): True for the first key of each sequence


# A listener makes the `Call` itself, if the module concerns it: that may fail.
Listener = Callable[[torch.nn.Module, Callable[[], Call]], None]
listeners: list[Listener] = []


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener(module, call)`` for every call of attention, where ``call()`` is a `Call`."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


@_outside_graphs
def announce(module: torch.nn.Module, call: Callable[[], Call]) -> None:
    """Tell the listeners that a module computes attention. The training step does not change."""
    if listeners:
        with torch.no_grad():
            for listener in tuple(listeners):
                listener(module, call)


def visible_counts(query: Tensor, key: Tensor, mask: Mask | Tensor | None) -> Any:
    """The number of keys that each query sees, broadcastable to (B, 1, L)."""
    if mask is None:
        return torch.full((1, 1, query.shape[2]), key.shape[2], device=query.device)
    n: Any = as_mask(mask).visible_count(query.shape[2], key.shape[2], like=query)
    return n.expand(*n.shape[:-1], query.shape[2])


@dataclass(frozen=True, eq=False, repr=False)
class Observation:
    """Statistics of the attention in one forward pass, by layer and head. Its `repr` is a table.

    All arrays are NumPy arrays of the shape (layers, heads). They are NaN for a layer that did not run
    or could not be observed, and for heads that the layer does not have. Means are over the queries
    that are not padding.

    Attributes
    ----------
    step : int
        The number that `Observer.request` was given, such as that of an optimizer step. By default, how
        many forward passes in training mode came before.
    layers : tuple of str
        The names of the layers in the model.
    entropy : array
        The mean entropy of the attention weights in nats. If the model has sinks, this is the entropy
        of the distribution over the keys and the sink.
    normalized_entropy : array
        The mean of entropy / log n, where n is the number of keys that the query sees, plus 1 for a
        sink. Queries with n = 1 are left out.
    log_normalizer : array
        The mean of log Σ eˢ over the logits s.
    sink_mass : array
        The mean attention weight of the first key of the sequence, plus the weight of the sink if the
        model has one.
    largest_logit : array
        The largest logit of a visible key: after the scale, the law, a soft cap and a bias.
    """

    step: int
    layers: tuple[str, ...]
    entropy: np.ndarray
    normalized_entropy: np.ndarray
    log_normalizer: np.ndarray
    sink_mass: np.ndarray
    largest_logit: np.ndarray

    def scalars(self, prefix: str = "attention", *, heads: bool = False) -> dict[str, float]:
        """The statistics under names for a logger.

        Parameters
        ----------
        prefix : str
            The start of the names, such as ``attention/entropy/layer_0/mean``.
        heads : bool
            Whether to add every head, such as ``attention/entropy/layer_0/head_3``.

        Returns
        -------
        dict of str to float
            For each layer the means over the heads. The largest logit has the maximum over the heads in
            place of the mean, and the normalized entropy has the minimum too. NaN is left out.
        """
        values = {}
        for name in QUANTITIES:
            for layer, row in enumerate(getattr(self, name)):
                known = row[row == row]
                if not known.size:
                    continue
                parts = {"max": known.max()} if name == "largest_logit" else {"mean": known.mean()}
                if name == "normalized_entropy":
                    parts["min"] = known.min()
                if heads:
                    parts |= {f"head_{head}": x for head, x in enumerate(row) if x == x}
                for part, x in parts.items():
                    values[f"{prefix}/{name}/layer_{layer}/{part}"] = float(x)
        return values

    def to_dict(self) -> dict[str, Any]:
        """The observation as plain lists, for JSON.

        Returns
        -------
        dict
            ``step``, ``layers`` and the arrays by their names, with None in place of NaN.
        """
        arrays = {name: getattr(self, name).astype(object) for name in QUANTITIES}
        for x in arrays.values():
            x[x != x] = None
        lists = {name: x.tolist() for name, x in arrays.items()}
        return {"step": self.step, "layers": list(self.layers)} | lists

    def __repr__(self) -> str:
        columns = {
            "entropy": (self.entropy, "mean"),
            "lowest": (self.entropy, "min"),
            "/ log n": (self.normalized_entropy, "mean"),
            "log-normalizer": (self.log_normalizer, "mean"),
            "sink mass": (self.sink_mass, "mean"),
            "largest logit": (self.largest_logit, "max"),
        }
        width = max(len("layer"), *map(len, self.layers))
        lines = [
            f"Attention at step {self.step}, over {self.entropy.shape[1]} heads a layer",
            "layer".ljust(width) + "".join(title.rjust(_WIDTH) for title in columns),
        ]
        for layer, name in enumerate(self.layers):
            line = name.ljust(width)
            for x, part in columns.values():
                known = x[layer][x[layer] == x[layer]]
                line += (f"{getattr(known, part)():.3f}" if known.size else "–").rjust(_WIDTH)
            lines.append(line)
        return "\n".join(lines)


class Observer:
    """Measures the attention of a model in some of its forward passes. `observe` makes it.

    It is a context manager: the end of a ``with`` block closes it.

    Attributes
    ----------
    latest : Observation or None
        The statistics of the last pass that was observed. A pass in which nothing could be observed
        leaves it as it was.

    Raises
    ------
    TypeError, ValueError
        As in `observe`.
    """

    _model: Any = None

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Mapping[str, torch.nn.Module],
        *,
        every: int | None,
        sequences: int | None,
        then: Callable[[Observation], None] | None,
        warn_below: float | None,
        patience: int,
    ) -> None:
        for name, x in {"every": every, "sequences": sequences, "patience": patience}.items():
            if x is not None or name == "patience":
                check_count(name, x)
        if warn_below is not None:
            check_real("warn_below", warn_below, above=0)
        if then is not None and not callable(then):
            raise type_error("then", "be callable", type(then).__name__)
        self.latest: Observation | None = None
        self._model = model
        self._every, self._sequences, self._then = every, sequences, then
        self._alarm = None if warn_below is None else _Alarm(warn_below, patience)
        original: torch.nn.Module = getattr(model, "_orig_mod", model)  # of torch.compile
        self._names = {module: name for name, module in original.named_modules()}
        self._layers = set(layers.values())
        self._passes, self._step, self._is_requested = 0, 0, False
        self._requested_step: int | None = None
        self._sums: dict[torch.nn.Module, Tensor] = {}
        self._failures: dict[torch.nn.Module, str] = {}  # of this pass
        self._warned: set[str] = set()  # the layers of which a warning was given
        self._handles, self._pass = contextlib.ExitStack(), contextlib.ExitStack()
        self._handles.push(self._warn_of_no_pass)
        self._handles.callback(self._pass.close)
        for handle in (
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ):
            self._handles.callback(handle.remove)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call a function when the observer is closed."""
        self._handles.callback(callback)

    def request(self, step: int | None = None) -> None:
        """Observe the next forward pass, whatever ``every`` says, in training mode or not.

        Parameters
        ----------
        step : int, optional
            The `Observation.step` of this pass, such as the number of its optimizer step.

        Raises
        ------
        TypeError, ValueError
            For a `step` that is not an integer, or negative.
        """
        if step is not None:
            check_count("step", step, least=0)
        self._is_requested, self._requested_step = True, step

    def close(self) -> None:
        """Stop observing. The model is as before; `latest` remains.

        Warns
        -----
        UserWarning
            If passes in training mode should be observed, and there were none.
        """
        self._handles.__exit__(None, None, None)

    def __deepcopy__(self, memo: Any) -> Observer:
        """Itself: the hooks of a copied model refer to this observer, which ignores the copy."""
        return self

    def __reduce__(self) -> Any:
        # The hooks of a model that is loaded from a file refer to one that observes nothing.
        return Observer.__new__, (Observer,)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._handles.__exit__(*error)

    def _warn_of_no_pass(self, error: object, *_: object) -> None:
        # After an error in the block, a pass that did not come says nothing.
        if error is None and self._every is not None and not self._passes:
            warnings.warn(
                "Nothing was observed: the model had no forward pass in training mode. Was it in "
                "evaluation mode, or was another module called, such as a compiled one?",
                stacklevel=4,  # the line that closes it, or its `with`
            )

    @_outside_graphs
    def _begin(self, model: torch.nn.Module, inputs: Any) -> None:
        if model is not self._model:
            return
        # In the backward pass, a checkpointed model computes the same forward pass again.
        if torch._C._current_graph_task_id() != -1:
            return
        self._pass.close()  # of a pass that was interrupted
        is_due = model.training and self._every is not None and self._passes % self._every == 0
        if is_due or self._is_requested:
            self._step = self._passes if self._requested_step is None else self._requested_step
            self._is_requested, self._requested_step = False, None
            self._sums, self._failures = {}, {}
            if hasattr(model, "_orig_mod"):  # of torch.compile: its code does not announce attention
                self._pass.enter_context(_EAGER)
            self._pass.enter_context(listening(self._on_call))
        self._passes += model.training

    @_outside_graphs
    def _end(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if model is not self._model or self._on_call not in listeners:
            return
        self._pass.close()
        if output is None and sys.exc_info()[0] is not None:  # the pass has failed
            return
        self._warn_of_failures()
        if not self._sums:
            return
        self.latest, self._sums = self._observation(), {}
        if self._alarm is not None:
            self._alarm(self.latest)
        if self._then is not None:
            self._then(self.latest)

    def _on_call(self, module: torch.nn.Module, call: Callable[[], Call]) -> None:
        if module not in self._names:
            return
        self._layers.add(module)
        if module in self._failures:
            return
        try:
            sums = _statistics(_first_sequences(call(), self._sequences))
            if sums.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(sums):
                raise ValueError("it runs on the meta device or in torch.func, where it has no numbers")
            if module in self._sums:  # the layers of some models share a module
                sums = _added(self._sums[module], sums)
            self._sums[module] = sums
        except Exception as error:  # which must not stop the training
            self._failures[module] = f"{type(error).__name__}: {error}"
            self._sums.pop(module, None)

    def _warn_of_failures(self) -> None:
        layers: dict[str, list[str]] = {}
        for module, reason in self._failures.items():
            layers.setdefault(reason, []).append(self._names[module])
        if not (self._sums or self._failures):
            layers["no attention announces its queries and keys"] = ["the forward pass"]
        for reason, names in layers.items():
            if not self._warned.issuperset(names):
                self._warned.update(names)
                where = _named(names)
                warnings.warn(f"Attention could not be observed in {where}: {reason}", stacklevel=2)

    def _observation(self) -> Observation:
        modules = [module for module in self._names if module in self._layers]
        rows = {module: _means(sums.cpu().numpy()) for module, sums in self._sums.items()}
        table = np.full((len(QUANTITIES), len(modules), max(x.shape[1] for x in rows.values())), np.nan)
        for layer, module in enumerate(modules):
            if module in rows:
                table[:, layer, : rows[module].shape[1]] = rows[module]
        table.flags.writeable = False
        names = tuple(self._names[module] for module in modules)
        return Observation(self._step, names, **dict(zip(QUANTITIES, table, strict=True)))


def _named(parts: list[str]) -> str:
    more = f" and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
    return ", ".join(part or "the model itself" for part in parts[:_MOST_NAMED]) + more


class _Alarm:
    """A warning for heads whose normalized entropy stays below a threshold."""

    def __init__(self, threshold: float, patience: int) -> None:
        self._threshold, self._patience = threshold, patience
        self._counts: Any = 0  # in how many observations in a row each head was below

    def __call__(self, observation: Observation) -> None:
        low = observation.normalized_entropy < self._threshold
        if np.shape(self._counts) != low.shape:
            self._counts = np.zeros(low.shape, int)
        self._counts = np.where(low, self._counts + 1, 0)
        new = np.argwhere(self._counts == self._patience).tolist()
        if new:
            heads = _named([f"{observation.layers[i]} head {head}" for i, head in new])
            warnings.warn(
                f"At step {observation.step} the attention entropy of {heads} is below "
                f"{self._threshold:g} log n in the last {self._patience} observations.",
                stacklevel=2,
            )


def _first_sequences(call: Call, count: int | None) -> Call:
    """The call for the first sequences of the batch alone."""
    if count is None or count >= len(call.query):
        return call

    def cut(x: Any, ndim: int) -> Any:
        """Cut an array that has an axis of sequences, the first one of so many."""
        return x[:count] if is_array(x) and x.ndim == ndim and x.shape[0] > 1 else x

    def cut_mask(mask: Mask) -> Mask:
        return mask._changed(cut_mask, lambda x: cut(x, 2 + mask._own_axes))

    def cut_law(law: Law) -> Law:
        # The shapes of the arrays are in their order, and have sequences and heads before the queries.
        shapes = iter(law._named_shapes())

        def cut_parameter(x: Any) -> Any:
            _, shape, has_query_axis = next(shapes)
            return x[:count] if len(shape) - has_query_axis == 2 and x.shape[0] > 1 else x

        return law._with_arrays(cut_parameter)

    options = dict(call.options)
    for name, ndim in {"mask": 4, "bias": 4, "n_keys": 3}.items():
        x = options.get(name)
        options[name] = cut_mask(x) if isinstance(x, Mask) else cut(x, ndim)
    return call._replace(
        query=call.query[:count],
        key=call.key[:count],
        law=None if call.law is None else cut_law(call.law),
        options=options,
        counted=cut(call.counted, 3),
        is_first=cut(call.is_first, 2),
    )


# The rows of sums after the quantities: the numbers of counted queries, and of those among them that
# see two keys or more.
_COUNT, _COUNT_OF_MANY = len(QUANTITIES), len(QUANTITIES) + 1


def _statistics(call: Call) -> Tensor:
    """Sums of the quantities over the counted queries, and the numbers of queries, (7, H).

    The row of the largest logit has the maximum.
    """
    query, key, law, options, sink, counted, is_first = call
    if is_first is None:
        is_first = torch.arange(key.shape[2], device=key.device)[None] == 0
    # With the value 1 at the first keys and 0 elsewhere, the output is the weight of the first keys.
    value = is_first[:, None, :, None].to(key.dtype).expand(*key.shape[:-1], 1)
    state = attention_state(query, key, value, law=law, **options)
    n: Any = visible_counts(query, key, options.get("mask"))
    is_counted = n > 0 if counted is None else counted & (n > 0)
    largest_logit, sink_weight = state.maximum, 0.0
    if sink is not None:
        state, n = with_sink(state, sink), n + 1
        sink_weight = torch.exp(sink[:, None] - state.log_normalizer())
    is_many, entropy = is_counted & (n > 1), state.entropy()

    def total(x: Any, is_used: Tensor = is_counted) -> Tensor:
        return torch.where(is_used, x, 0.0).sum((0, 2))

    one = torch.ones_like(entropy)
    return torch.stack([
        total(entropy),
        # Queries that see a single key are not counted here. The bound keeps their log n from 0.
        total(entropy / torch.log(n.clamp(min=2).to(entropy.dtype)), is_many),
        total(state.log_normalizer()),
        total(state.output()[..., 0] + sink_weight),
        torch.where(is_counted, largest_logit, -math.inf).amax((0, 2)),
        total(one),
        total(one, is_many),
    ])  # fmt: skip


def with_sink(state: AttentionState, sink: Tensor) -> AttentionState:
    """The state with a sink (H,): a logit per head that takes weight but has no value."""
    zero = torch.zeros_like(state.normalizer)
    no_value = None if state.weighted_value is None else torch.zeros_like(state.weighted_value)
    return merge_states(state, AttentionState(zero + sink[:, None], zero + 1, no_value, zero))


def _added(a: Tensor, b: Tensor) -> Tensor:
    total = a + b
    largest = QUANTITIES.index("largest_logit")
    total[largest] = torch.maximum(a[largest], b[largest])
    return total


def _means(sums: np.ndarray) -> np.ndarray:
    """The quantities (5, H); NaN without a query."""
    counts = np.repeat(sums[_COUNT][None], len(QUANTITIES), axis=0)
    counts[QUANTITIES.index("normalized_entropy")] = sums[_COUNT_OF_MANY]
    counts[QUANTITIES.index("largest_logit")] = sums[_COUNT] > 0
    result = np.full(counts.shape, np.nan)
    np.divide(sums[: len(QUANTITIES)], counts, out=result, where=counts > 0)
    return result
