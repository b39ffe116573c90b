"""Rotary positions whose differences end at a window: ReRoPE (Su 2023, spaces.ac.cn/archives/9708).

A query sees near keys at their distances, and all keys that are as far as the window or farther at the
distance of the window. The logits of the far keys come from queries at the position of the window and
keys at position 0. A module computes these by itself, from its hidden states and the cosines and sines
of those positions. So nothing here depends on how its family rotates.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from isentropic._attention.functions import attention_state
from isentropic._checks import value_error
from isentropic.integrations._observe import visible_counts
from isentropic.integrations.huggingface._hooks import argument_names, arguments_without_cache
from isentropic.integrations.huggingface._interface import law_and_options
from isentropic.integrations.huggingface._modules import uses_interface
from isentropic.masks import causal, window

# The cosines and sines that an attention module gets.
_POSITIONS = "position_embeddings"
_active: list[_Clamp] = []


def clamped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an attention implementation, which clamps positions within `clamping`."""
    return functools.partial(_active[-1].attend, function) if _active else function


@contextlib.contextmanager
def clamping(modules: Iterable[torch.nn.Module], length: int) -> Iterator[None]:
    """Clamp the relative positions of attention modules to a window of this length."""
    clamp = _Clamp(length)
    with contextlib.ExitStack() as stack:
        for module in modules:
            handle = module.register_forward_pre_hook(clamp.before, with_kwargs=True)
            stack.callback(handle.remove)
        _active.append(clamp)
        stack.callback(_active.remove, clamp)
        yield


def takes_rotary_positions(module: torch.nn.Module) -> bool:
    return uses_interface(module) and _POSITIONS in argument_names(module)


class _Captured(Exception):  # noqa: N818 (not an error)
    """Raised with the query and key of a module, so that it does not go on to compute attention."""


class _Clamp:
    def __init__(self, length: int) -> None:
        self.length = length
        self.is_capturing = False
        # The module that runs, with its queries and keys at the positions 0 and `length`.
        self.module: torch.nn.Module | None = None
        self.ends: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        arguments = arguments_without_cache(module, args, kwargs)
        rows = tree_leaves(arguments.get(_POSITIONS))
        if not takes_rotary_positions(module) or not all(isinstance(x, torch.Tensor) for x in rows):
            raise _not_rotary(module)
        self.module, self.ends = None, ()
        if rows[0].shape[-2] > self.length:
            self.ends = [self._moved(module, arguments, position) for position in (0, self.length)]
            self.module = module

    def _moved(self, module: Any, arguments: dict[str, Any], position: int) -> Any:
        """The query and the key of the module if all tokens have one position."""
        at_position = tree_map(
            lambda x: x[..., position : position + 1, :].expand_as(x), arguments[_POSITIONS]
        )
        self.is_capturing = True
        try:
            module.forward(**arguments | {_POSITIONS: at_position})
        except _Captured as captured:
            return captured.args
        finally:
            self.is_capturing = False
        raise _not_rotary(module)

    def attend(
        self,
        function: Callable[..., Any],
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.is_capturing:
            raise _Captured(query, key)
        if module is not self.module:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        self._check(module, query, key)
        return self._attend(module, query, key, value, attention_mask, *args, **kwargs), None

    def _check(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
        """Check that queries and keys at the positions 0 and `length` are as without clamping."""
        for position, moved in zip((0, self.length), self.ends, strict=True):
            for x, y in zip((query, key), moved, strict=True):
                if x.shape != y.shape:
                    raise _not_rotary(module)
                x, y = x[..., position, :], y[..., position, :]
                if not bool((x - y).abs().max() <= 0.01 * x.abs().max()):  # rounding is below that
                    raise _not_rotary(module)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        law, options = law_and_options(
            module, query, attention_mask, scaling, is_causal, softcap, position_bias, kwargs
        )
        visible = options.pop("mask")
        # The law counts the keys of all parts together.
        options.setdefault("n_keys", visible_counts(query, key, visible))
        (first_query, first_key), (last_query, last_key) = self.ends
        near = self.length - 1
        parts = (
            (query, key, window(near, near)),
            (last_query, first_key, causal(offset=-self.length)),
            (first_query, last_key, window(0, None, offset=self.length)),
        )
        states: list[Any] = []
        for q, k, part in parts:
            mask = part if visible is None else part & visible
            if states and not mask.visible_count(q.shape[2], k.shape[2], like=q).any():
                continue
            sinks = None if states else s_aux
            states.append(attention_state(q, k, value, mask=mask, law=law, sinks=sinks, **options))
        out = functools.reduce(operator.add, states).output()
        return out.to(query.dtype).transpose(1, 2).contiguous()


def _not_rotary(module: torch.nn.Module) -> ValueError:
    must = (
        "have attention with rotary positions, which goes through the AttentionInterface of "
        f"transformers and depends on positions by its argument `{_POSITIONS}` alone"
    )
    return value_error("model", must, type(module).__name__)
