"""Products of matrices under PyTorch's autocast, in the dtype of the matrices.

Autocast rounds the operands to half precision, and also those of the gradient, if a backward pass runs
under autocast or is compiled for a forward pass that does. So the product has a gradient of its own.

This module imports PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from isentropic._loops import is_exporting, without_autocast


def product(a: Any, b: Any) -> Any:
    """``a @ b``, for tensors of at least two axes."""
    if is_exporting():  # an exported program cannot hold a function of Python
        return _plain_product(a, b)
    if a.ndim > b.ndim == 2:  # so that the gradient of `b` is a single product
        return _Product.apply(a.flatten(0, -2), b).unflatten(0, a.shape[:-1])
    return _Product.apply(a, b)


@without_autocast
def _plain_product(a: Any, b: Any) -> Any:
    return a @ b


class _Product(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Any, b: Any) -> Any:
        return _plain_product(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        a, b = ctx.saved_tensors
        is_wanted, b_is_wanted = ctx.needs_input_grad
        return (
            _Product.apply(upstream, b.mT).sum_to_size(a.shape) if is_wanted else None,
            _Product.apply(a.mT, upstream).sum_to_size(b.shape) if b_is_wanted else None,
        )

    @staticmethod
    def jvp(ctx: Any, a_tangent: Any, b_tangent: Any) -> Any:
        a, b = ctx.saved_tensors
        return _Product.apply(a_tangent, b) + _Product.apply(a, b_tangent)
