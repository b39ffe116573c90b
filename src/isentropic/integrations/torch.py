"""PyTorch modules (the extra ``torch``): attention with a law, trainable laws, distributed attention.

It also converts masks of this package for `torch.nn.attention.flex_attention`.

Shapes: N sequences, L queries, S keys, H heads, E features of queries and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from isentropic._attention.distribution import AttentionDistribution
from isentropic._attention.functions import attention, attention_entropy
from isentropic._checks import check_flag, is_array, requires_extra, type_error, value_error
from isentropic._namespace import namespace, present
from isentropic._products import product
from isentropic.integrations._sharded import distributed_attention_state
from isentropic.laws._law import DEFAULT_LAW, Law, check_law
from isentropic.masks import Mask, as_mask, causal

with requires_extra(__name__):
    import torch
    from torch import Tensor
    from torch.nn.functional import dropout as drop
    from torch.nn.functional import linear, pad
    from torch.nn.utils import parametrize

    from isentropic.integrations._flex import to_block_mask
    from isentropic.integrations._observe import Call, Observer, announce, listeners
    from isentropic.integrations._observe import Observation as Observation

__all__ = [
    "LawModule",
    "MultiheadAttention",
    "announce_attention",
    "distributed_attention_state",
    "observe",
    "to_block_mask",
]


def _refuse_scripting(module: torch.nn.Module) -> Any:
    name = type(module).__name__
    raise TypeError(f"{name} cannot be scripted: use `torch.compile` or `torch.export`.")


class LawModule(torch.nn.Module):
    """A module that holds the tensors of a law. Calling it without arguments returns the law.

    Parameters
    ----------
    law : Law
        Each `torch.nn.Parameter` of the law becomes a parameter of the module, with the name of its
        field. Other tensors are configuration, like numbers: they become buffers, which move with the
        module but are not in its state dict, and which casts to half precision leave as they are. A law
        inside the law becomes a submodule with the name ``law``. A law keeps its numbers through
        `to_empty`, and through the meta device if it was not made there.
    borrow : bool
        Whether tensors that require gradients belong to someone else: then they are neither parameters
        nor buffers of the module.

    Raises
    ------
    TypeError
        For a `law` that is not a law, or that has arrays that are not tensors.
    ValueError
        For a tensor that requires gradients and is neither a parameter nor borrowed: it would not be
        trained. By `to_empty`, if a buffer was made on the meta device: nothing could give it values.

    Examples
    --------
    >>> import torch
    >>> from isentropic import laws
    >>> from isentropic.integrations.torch import LawModule
    >>> law = LawModule(laws.AffineLog(torch.nn.Parameter(torch.full((4,), 0.16))))
    >>> [name for name, _ in law.named_parameters()]
    ['slope']
    >>> law()(torch.tensor([512])).shape
    torch.Size([4, 1])
    """

    __prepare_scriptable__ = _refuse_scripting  # `torch.jit.script` calls this first

    def __init__(self, law: Law, *, borrow: bool = False) -> None:
        super().__init__()
        check_law(law)
        check_flag(borrow=borrow)
        self._kind, self._numbers, self._names, self._laws = type(law), {}, [], []
        self._is_trained = not borrow and any(isinstance(x, torch.nn.Parameter) for x in law.arrays)
        self._law: Law | None = None  # the last one, which is kept unless it is trained
        self._values: dict[str, Tensor] = {}  # of tensors that were moved to the meta device
        self._unknown: set[str] = set()  # parameters from the meta device that were not loaded
        for name, x in law._named_values().items():
            # Not setattr: a field may have the name of a method of modules, such as `half`.
            if isinstance(x, Law):
                self._laws.append(name)
                self._modules[name] = LawModule(x, borrow=borrow)
            elif not is_array(x) or (borrow and isinstance(x, Tensor) and x.requires_grad):
                self._numbers[name] = x
            elif not isinstance(x, Tensor):
                raise type_error("law", "hold numbers and tensors", type(x).__name__)
            elif x.requires_grad and not isinstance(x, torch.nn.Parameter):
                must = f"have a torch.nn.Parameter as `{name}`, or borrow=True"
                raise value_error("law", must, "a tensor that requires gradients")
            else:
                self._names.append(name)
                self._hold(name, x)

    def _hold(self, name: str, x: Tensor) -> None:
        if isinstance(x, torch.nn.Parameter):
            self._parameters[name] = x
        else:
            self._buffers[name] = x
            self._non_persistent_buffers_set.add(name)

    def forward(self) -> Law:
        """The law with the present values of the tensors.

        Returns
        -------
        Law

        Raises
        ------
        ValueError
            If training has moved a parameter out of its valid range. This is only checked for numbers
            on the CPU, outside of transformations.
        """
        parts: dict[str, Any] = {name: self._inner(name)() for name in self._laws}
        parts |= {name: self._tensor(name) for name in self._names}
        law = self._law
        # Moves and casts of the module replace its tensors, and the kept law has the old ones.
        if law is None or any(getattr(law, name) is not x for name, x in parts.items()):
            law = self._kind(**self._numbers, **parts)
            # A law that is trained is made anew each time, because this checks its numbers.
            # The tensors of `torch.func` and of a compiler are not to be kept.
            is_plain = torch._C._functorch.maybe_current_level() is None
            if is_plain and not self._is_trained and not torch.compiler.is_compiling():
                self._law = law
        return law

    if TYPE_CHECKING:  # to PyTorch a call may return anything
        __call__ = forward

    def _inner(self, name: str) -> LawModule:
        return cast(LawModule, self._modules[name])

    def _tensor(self, name: str) -> Tensor:
        # Fully sharded data parallelism makes plain attributes of parameters.
        for held in (self._parameters, self._buffers, vars(self)):
            if name in held:
                return held[name]
        if parametrize.is_parametrized(self, name):
            return cast(Tensor, getattr(self, name))
        raise AttributeError(f"{type(self).__name__} has lost the tensor {name!r}")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        tensors = [*self._parameters.items(), *self._buffers.items()]
        names = {id(x): name for name, x in tensors}

        def converted(x: Tensor) -> Tensor:
            new, name = fn(x), names.get(id(x))
            if new is x or name is None:  # the gradient of a parameter has no name
                return new
            if new.is_meta:
                if not x.is_meta:
                    self._values[name] = x.detach()
                return new
            # The memory of `to_empty` is uninitialized.
            value = self._values.pop(name, None) if x.is_meta else x
            if value is not None:
                # Buffers are configuration, which half precision would round.
                # A float64 may become float32, but no buffer becomes narrower than that.
                is_rounded = new.dtype.itemsize < min(4, value.dtype.itemsize)
                dtype = value.dtype if is_rounded and name in self._buffers else new.dtype
                return _placed(value.to(new.device, dtype), new)
            if name in self._buffers:
                must = f"have a `{name}` with values (make it with `device='cpu'`, or as a number)"
                raise value_error("law", must, "one that was made on the meta device")
            self._unknown.add(name)
            return new

        return super()._apply(converted, recurse)

    def _known_values(self, prefix: str) -> dict[str, Tensor]:
        """The values of the parameters, except for uninitialized ones, by their names in a state."""
        known: dict[str, Tensor] = {}
        for name in self._laws:
            known |= self._inner(name)._known_values(f"{prefix}{name}.")
        for name, x in self.state_dict(keep_vars=True).items():
            value = self._values.get(name, x) if x.is_meta else x
            if name in self._names and name not in self._unknown and not value.is_meta:
                known[prefix + name] = value.detach()
        return known

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)
        self._unknown -= {name for name in self._unknown if prefix + name in state_dict}
        if metadata.get("assign_to_params_buffers"):  # the parameters leave the meta device
            for name, x in self._buffers.items():
                self._buffers[name] = self._values.pop(name, x) if x.is_meta else x

    def extra_repr(self) -> str:
        tensors = {name: tuple(self._tensor(name).shape) for name in self._names}
        shown = (f"{name}={x}" for name, x in (tensors | self._numbers).items())
        return ", ".join((self._kind.__name__.strip("_"), *shown))


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose scale follows a law of the number of visible keys.

    With ``law=None`` it is equivalent to PyTorch's module. Parameters have the same names, shapes and
    initial values, so that each module loads checkpoints of the other.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first
        As in `torch.nn.MultiheadAttention`.
    device, dtype
        The device and the dtype of the parameters. A law keeps its own.
    law : Law or None, default ``LogLength(512)``
        The factor on the scale as a function of n. If it has a `torch.nn.Parameter`, a single number
        or one per head, (H,), this is trained with the module; see `LawModule`.

    Attributes
    ----------
    law : LawModule or None
        ``law()`` returns the law with the present values of its parameters.

    Raises
    ------
    TypeError
        For a `law` that is not a law, or that has arrays that are not tensors.

    Notes
    -----
    n is counted per query and head. It does not include keys that are True in a boolean mask, or −∞ in
    a floating-point mask; a lowest finite number hides no key. All queries see the keys that
    `add_bias_kv` and `add_zero_attn` append, and n includes them.

    For a query that sees no key the weights are 0, and the output is the bias of the output projection.
    PyTorch's output is NaN in this case, if it materializes the weights.

    With `is_causal`, PyTorch may ignore `attn_mask` and use a causal mask aligned top-left, if weights
    are not requested and there is no `key_padding_mask`. This module does the same. But PyTorch's
    causal mask also hides appended keys; if there are any, this module uses `attn_mask`.

    Under `torch.autocast` the projections are in half precision, like those of PyTorch's module. The
    attention of the projected heads is computed as outside of it.

    Dropout acts on the weights, as in PyTorch. While it is active (in training, with ``dropout > 0``),
    or with `need_weights`, the L×S weights are materialized. Otherwise they never are.

    PyTorch's fast path, also that of a `torch.nn.TransformerEncoderLayer` around the module, would
    compute attention without the law, so it is disabled. Nested tensors, which
    `torch.nn.TransformerEncoder` makes, are padded. TorchScript cannot express a law: use
    `torch.compile` or `torch.export`.

    If a checkpoint contains no parameters of a law, those of this module keep their initial values,
    even with ``strict=True``, unless they were made on the meta device. PyTorch's module loads the
    checkpoints of this one with ``strict=False`` if the law has parameters.

    References
    ----------
    Su 2021, https://spaces.ac.cn/archives/8823; Vaswani et al. 2017, arXiv 1706.03762.

    Examples
    --------
    >>> import torch
    >>> from isentropic import laws
    >>> from isentropic.integrations.torch import MultiheadAttention
    >>> slope = torch.nn.Parameter(torch.full((8,), 0.16))
    >>> layer = MultiheadAttention(64, 8, batch_first=True, law=laws.AffineLog(slope))
    >>> x = torch.randn(2, 10, 64)
    >>> out, _ = layer(x, x, x, need_weights=False)
    >>> out.shape, layer.entropy(x, x).shape
    (torch.Size([2, 10, 64]), torch.Size([2, 8, 10]))
    >>> list(layer.state_dict())[-1]
    'law.slope'
    """

    law: LawModule | None

    __prepare_scriptable__ = _refuse_scripting  # `torch.jit.script` calls this first

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        law: Law | None = DEFAULT_LAW,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype,
        )  # fmt: skip
        self.law = None if law is None else LawModule(law)
        # Without a hook, the fast path of PyTorch's layers would compute attention without the law.
        self.register_forward_pre_hook(_no_fast_path)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Project the inputs, compute attention in each head, and project the joined heads.

        Parameters
        ----------
        query : tensor (L, N, E), (N, L, E) with `batch_first`, or (L, E)
            With `batch_first` it may be a nested tensor, if it is also `key` and `value` and there are
            no masks.
        key : tensor (S, N, kdim), (N, S, kdim) or (S, kdim)
        value : tensor (S, N, vdim), (N, S, vdim) or (S, vdim)
        key_padding_mask : tensor (N, S) or (S), optional
            Boolean, True to ignore the key; or floats that are added to the logits.
        need_weights : bool
            Whether to return the weights, which must then be formed.
        attn_mask : tensor (L, S) or (N · H, L, S), optional
            The same for each query.
        average_attn_weights : bool
            Whether to return the mean of the weights over the heads.
        is_causal : bool
            A hint that `attn_mask` is the causal mask. It requires `attn_mask`.

        Returns
        -------
        output : tensor of the shape of `query`
        weights : tensor (N, L, S) or (L, S), or None
            With ``average_attn_weights=False`` the weights of each head, (N, H, L, S) or (H, L, S).
            Appended keys come last. The weights of a nested tensor are padded.

        Raises
        ------
        TypeError
            For inputs that are not tensors, for other nested tensors, and for masks of integers.
        ValueError
            For shapes that do not fit, and for `is_causal` without `attn_mask`.
        """
        if isinstance(query, torch.fx.Proxy) and (path := query.tracer.path_of_module(self)):
            # To the tracer the module is a leaf, like PyTorch's.
            given = (
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
                is_causal,
            )  # fmt: skip
            return query.tracer.create_proxy("call_module", path, given, {})
        _check_hint(is_causal, attn_mask)
        unmasked_self = query is key is value and key_padding_mask is None and attn_mask is None
        if unmasked_self and self.batch_first and getattr(query, "is_nested", False):
            return self._attend_nested(query, need_weights, average_attn_weights)
        q, k, v = self._heads(query=query, key=key, value=value)
        options = self._options(q, k, key_padding_mask, attn_mask, is_causal, need_weights)

        weights = None
        if need_weights or (self.training and self.dropout > 0):
            weights = AttentionDistribution(q, k, **options).weights()
            weights = drop(weights, self.dropout, self.training)
            # A plain product would be rounded to half precision under autocast.
            out = product(namespace(value=v), weights, v)
        else:
            out = attention(q, k, v, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))

        if weights is not None and average_attn_weights:
            # After dropout, as in PyTorch.
            weights = weights.mean(1)
        if query.ndim == 2:
            out, weights = out[0], None if weights is None else weights[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights if need_weights else None

    if TYPE_CHECKING:  # to PyTorch a call may return anything
        __call__ = forward

    def entropy(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        order: float = 1.0,
        family: str = "renyi",
        normalized: bool = False,
    ) -> Tensor:
        """The entropy of the attention weights of each query and head, without forming them.

        Parameters
        ----------
        query, key, key_padding_mask, attn_mask, is_causal
            As in `forward`.
        order, family, normalized
            As in `isentropic.attention_entropy`.

        Returns
        -------
        tensor (N, H, L), or (H, L)
            The entropy of the weights before dropout, in nats, or in [0, 1] if `normalized`.

        Raises
        ------
        TypeError, ValueError
            As in `forward` and `isentropic.attention_entropy`.
        """
        q, k = self._heads(query=query, key=key)
        options = self._options(q, k, key_padding_mask, attn_mask, is_causal)

        h = attention_entropy(q, k, order=order, family=family, normalized=normalized, **options)
        return h if query.ndim == 3 else h[0]

    def _attend_nested(
        self, x: Tensor, need_weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of each sequence in a nested tensor."""
        lengths = [len(sequence) for sequence in x.unbind()]
        padded = torch.nested.to_padded_tensor(x, 0.0)
        # As hidden keys, the padding does not count in the n of the law.
        positions = torch.arange(padded.shape[1], device=x.device)
        hidden = positions >= torch.tensor(lengths, device=x.device)[:, None]
        out, weights = self.forward(padded, padded, padded, hidden, need_weights, None, average)
        rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=x.layout), weights

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        law_prefix = f"{prefix}law."
        if self.law is not None and not any(name.startswith(law_prefix) for name in state_dict):
            # Otherwise `strict=True` would refuse the checkpoint of a model without a law.
            state_dict |= self.law._known_values(law_prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def _n_appended(self) -> int:
        return (self.bias_k is not None) + self.add_zero_attn

    def _heads(self, **inputs: Tensor) -> list[Tensor]:
        """Queries, keys and values as (N, H, length, head size), including the appended keys."""
        self._check_inputs(inputs)
        # PyTorch's module has separate weights if keys or values have another width than queries.
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        appended = (None, self.bias_k, self.bias_v)
        heads = []
        for (name, x), w, b, row in zip(inputs.items(), weights, biases, appended, strict=False):
            x = x[None] if x.ndim == 2 else x if self.batch_first else x.transpose(0, 1)
            y = linear(x, w, b)
            if row is not None:
                y = torch.cat((y, row.expand(len(y), 1, -1)), 1)
            if self.add_zero_attn and name != "query":
                y = pad(y, (0, 0, 0, 1))
            heads.append(y.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2))
        return heads

    def _check_inputs(self, inputs: dict[str, Tensor]) -> None:
        _check_tensors(**inputs)
        query = inputs["query"]
        for (name, x), width in zip(
            inputs.items(), (self.embed_dim, self.kdim, self.vdim), strict=False
        ):
            if x.is_nested:
                must = "be dense, unless one nested tensor is query, key and value, with `batch_first`"
                raise type_error(name, f"{must} and without masks", "a nested one")
            if x.ndim not in (2, 3) or x.ndim != query.ndim:
                must = "have 2 dimensions, or 3 with a batch"
                if x is not query:
                    must = f"have the {query.ndim} dimensions of `query`"
                raise value_error(name, must, x.ndim)
            if x.shape[-1] != width:
                raise value_error(name, f"have a last dimension of {width}", x.shape[-1])
            axis = 0 if self.batch_first else 1
            if x.ndim == 3 and x.shape[axis] != query.shape[axis]:
                must = f"have the batch size of `query` in axis {axis}, {query.shape[axis]}"
                raise value_error(name, must, x.shape[axis])
        lengths = [x.shape[1 if self.batch_first and x.ndim == 3 else 0] for x in inputs.values()]
        if lengths[1] != lengths[-1]:
            raise value_error("value", f"be as long as `key`, {lengths[1]}", lengths[-1])

    def _options(
        self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None,
        is_causal: bool, need_weights: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """The keyword arguments `mask`, `bias` and `law` of the attention functions."""
        _check_hint(is_causal, attn_mask)
        _check_tensors(**present(key_padding_mask=key_padding_mask, attn_mask=attn_mask))
        options: dict[str, Any] = {"law": None if self.law is None else self.law()}
        if is_causal and key_padding_mask is None and not need_weights and not self._n_appended:
            return options | {"mask": causal(offset=0)}
        (n, heads, n_queries, _), n_keys = q.shape, k.shape[-2] - self._n_appended
        masks = []
        if (x := key_padding_mask) is not None:
            _check_mask("key_padding_mask", x, (n, n_keys) if x.ndim == 2 or n > 1 else (n_keys,))
            masks.append(x.reshape(n, 1, 1, n_keys))
        if (x := attn_mask) is not None:
            shape = (n_queries, n_keys)
            _check_mask("attn_mask", x, shape if x.ndim == 2 else (n * heads, *shape))
            # PyTorch's masks of three axes have the batch and the heads in one.
            masks.append(x if x.ndim == 2 else x.unflatten(0, (n, heads)))

        visible: Mask | None = None
        bias: Tensor | None = None
        for x in masks:
            # As separate parts of a mask: a single array would have the axes of both.
            seen = as_mask(pad(_is_token(x), (0, self._n_appended), value=True))
            visible = seen if visible is None else visible & seen
            if x.dtype != torch.bool:
                bias = x if bias is None else bias + x
        if bias is not None:
            bias = pad(bias, (0, self._n_appended))
        return options | {"mask": visible, "bias": bias}


def _is_token(mask: Tensor) -> Tensor:
    """Where a mask of PyTorch, boolean or of floats, hides no key."""
    return ~mask if mask.dtype == torch.bool else mask != -math.inf


def _placed(x: Tensor, like: Any) -> Tensor:
    """`x`, sharded like a DTensor."""
    if not hasattr(like, "placements") or hasattr(x, "placements"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, like.device_mesh, like.placements)


def _no_fast_path(module: torch.nn.Module, inputs: Any) -> None:
    """A hook that does nothing: its presence disables PyTorch's fast path."""


def _check_hint(is_causal: bool, attn_mask: Any) -> None:
    if is_causal and attn_mask is None:
        must = (
            "be given with `is_causal`, as in PyTorch's module: `is_causal` only says that it is the "
            "causal mask, `torch.nn.Transformer.generate_square_subsequent_mask(length)`"
        )
        raise value_error("attn_mask", must, None)


def _check_tensors(**inputs: Any) -> None:
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise type_error(name, "be a tensor", type(x).__name__)


def _check_mask(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if x.dtype != torch.bool and not x.is_floating_point():
        raise type_error(name, "be boolean (True = ignore) or of floats to add to the logits", x.dtype)
    if x.shape != shape:
        raise value_error(name, f"have the shape {shape}", x.shape)


def observe(
    model: torch.nn.Module,
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
    model : torch.nn.Module
        The model. Its `torch.nn.MultiheadAttention` modules are observed, those of this package
        included, and its modules that call `announce_attention`.
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

    Raises
    ------
    TypeError
        For a `model` that is not a module, and arguments of the wrong type.
    ValueError
        For numbers out of range.

    Warns
    -----
    UserWarning
        See `warn_below`. Also once for each layer whose attention cannot be observed: it is NaN.

    Notes
    -----
    Loss and gradients are bit for bit those without observing. Only the latest observation is kept, and
    no random numbers are drawn. Gradient checkpointing computes attention again in the backward pass,
    which is not counted.

    An observed pass costs as much as another forward pass of the attention, without gradients, plus the
    projections of queries and keys. Dropout is not part of the statistics.

    In a `torch.nn.MultiheadAttention`, queries are known to be padding only in self-attention with a
    `key_padding_mask`. Hooks disable PyTorch's fast path for evaluation until the observer is closed.

    Observe the module that `torch.compile` returns, and not the one in it. Then observed passes run
    without compilation, which changes the rounding, and the other passes as they are compiled. If hooks
    are within the compiled module, all of its passes have graph breaks, and ``fullgraph=True`` fails.

    Examples
    --------
    >>> import torch
    >>> from isentropic.integrations.torch import observe
    >>> model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> with observe(model, every=10) as observer:
    ...     out = model(torch.randn(2, 16, 32))
    >>> observer.latest.layers, observer.latest.entropy.shape
    (('self_attn',), (1, 4))
    """
    if not isinstance(model, torch.nn.Module):
        raise type_error("model", "be a torch.nn.Module", type(model).__name__)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.MultiheadAttention)
    }
    observer = Observer(
        model, layers, every=every, sequences=sequences, then=then, warn_below=warn_below,
        patience=patience,
    )  # fmt: skip
    for module in layers.values():
        # Layers of PyTorch pass masks by name.
        hook = module.register_forward_pre_hook(_announce_heads, with_kwargs=True)
        observer.on_close(hook.remove)
    return observer


def announce_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    *,
    law: Law | None,
    counted: Tensor | None = None,
    **options: Any,
) -> None:
    """Tell observers the queries and keys of a module that computes attention by itself.

    Parameters
    ----------
    module : torch.nn.Module
        The module that computes attention.
    query : tensor (B, H, L, E)
    key : tensor (B, G, S, E)
        G divides H.
    law : Law or None
        The law that the module applies, None for the standard scale. It has no default, because
        `isentropic.attention` has another one than PyTorch's attention.
    counted : boolean tensor broadcastable to (B, H, L), optional
        False for queries that are padding.
    **options
        ``mask``, ``bias``, ``is_causal``, ``scale``, ``n_keys``, ``softcap`` and ``sinks`` of the
        attention, as in `isentropic.attention`.

    Notes
    -----
    The options are not compared with what the module computes. So keep them in one dict for both calls.
    Without an observer, this does nothing and costs nothing. Queries and keys that do not have 4
    dimensions are not observed, with a warning. They do not stop the forward pass.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> from isentropic.integrations.torch import announce_attention, observe
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x):
    ...         announce_attention(self, x, x, law=None, is_causal=True)
    ...         return scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> model = Attention()
    >>> with observe(model) as observer:
    ...     out = model(torch.randn(2, 4, 16, 8))
    >>> observer.latest.entropy.shape
    (1, 4)
    """
    if not listeners:
        return

    # A function, because nothing has to be computed unless a listener observes this pass.
    def call() -> Call:
        for name, x in {"query": query, "key": key}.items():
            if x.ndim != 4:
                raise value_error(name, "have 4 dimensions, (batch, heads, length, features)", x.ndim)
        others = {name: x for name, x in options.items() if name != "is_causal"}
        if options.get("is_causal"):
            mask = options.get("mask")
            others["mask"] = causal() if mask is None else as_mask(mask) & causal()
        return Call(query, key, law, others | {"enable_gqa": True}, counted=counted)

    announce(module, call)


def _announce_heads(
    module: torch.nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A forward pre-hook: tell observers the projected queries and keys."""
    if listeners:
        announce(module, lambda: _call_of_module(module, *args, **kwargs))


def _call_of_module(
    module: torch.nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Call:
    heads: Any = module
    if not isinstance(module, MultiheadAttention):
        # The same parameters, without a copy, in a module that has the methods for them.
        heads = MultiheadAttention.__new__(MultiheadAttention)
        vars(heads).update(vars(module) | {"law": None})
    q, k = heads._heads(query=query, key=key)
    options = heads._options(q, k, key_padding_mask, attn_mask, is_causal)
    counted = is_first = None
    if key_padding_mask is not None:
        is_token = _is_token(key_padding_mask.reshape(len(q), -1))
        # With padding on the left the first token is not the first key.
        is_first = pad(is_token & (is_token.cumsum(-1) == 1), (0, heads._n_appended))
        counted = is_token[:, None] if query is key else None
    return Call(q, k, options.pop("law"), options, None, counted, is_first)
