"""Products and sums along axes, which each library has its own best way to compute."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from isentropic._loops import autocast_device, is_exporting
from isentropic._namespace import Array, imported_torch, is_jax, is_numpy, is_torch


def last_axis(xp: ModuleType, x: Array, axis: int) -> Array:
    """`x` with an axis moved to the end."""
    # Not `moveaxis` of array_api_compat: `torch.vmap` cannot batch it.
    axis = int(axis) % x.ndim
    order = [i for i in range(x.ndim) if i != axis]
    x = xp.permute_dims(x, (*order, axis))
    # NumPy adds numbers one by one, except along an axis that is contiguous in memory.
    return xp.ascontiguousarray(x) if is_numpy(xp) else x


def sum_of_rows(xp: ModuleType, x: Array) -> Any:
    """The sum over axis −2. With NumPy it is a sum of sums of blocks, as NumPy adds rows one by one."""
    size, n_rows = 512, x.shape[-2]
    end = n_rows // size * size
    if not is_numpy(xp) or end <= size:
        return xp.sum(x, axis=-2)
    in_blocks = xp.reshape(x[..., :end, :], (*x.shape[:-2], end // size, size, x.shape[-1]))
    return xp.sum(xp.sum(in_blocks, axis=-2), axis=-2) + xp.sum(x[..., end:, :], axis=-2)


def product(xp: ModuleType, a: Array, b: Array) -> Any:
    """``a @ b`` in the full precision of the dtype, for arrays of at least two axes.

    JAX would round float32 on a GPU; see `matmul_precision`. PyTorch's autocast would round it to half
    precision, in the product and in its gradient.
    """
    if is_jax(xp):
        return xp.matmul(a, b, precision=matmul_precision())
    if is_torch(xp) and autocast_device() is not None:
        compiler = imported_torch().compiler
        if compiler.is_dynamo_compiling() and not is_exporting():
            from isentropic._torch_nodes import product as exact_product
        else:
            from isentropic._torch_products import product as exact_product
        return exact_product(a, b)
    return a @ b


def matmul_precision() -> Any:
    """The precision of products in JAX: the full one, unless `jax.default_matmul_precision` is set.

    By itself JAX rounds float32 to TF32 on a GPU.
    """
    import jax

    return jax.config.jax_default_matmul_precision or "highest"


def row_products(xp: ModuleType, a: Array, b: Array) -> Array:
    """The inner products of the rows of `a` and `b`, in the full precision of the dtype."""
    # PyTorch cannot batch the `vecdot` of array_api_compat, and JAX would round to TF32 on a GPU.
    return xp.vecdot(a, b) if is_numpy(xp) else xp.sum(a * b, axis=-1)


def grouped_matmul(xp: ModuleType, a: Array, b: Array) -> Any:
    """``a @ b``, where axis −3 of `b` may divide that of `a`: the heads of a group share a product."""
    if a.ndim < 3 or b.ndim < 3 or not a.shape[-3] > b.shape[-3] > 1:
        return product(xp, a, b)
    *batch, heads, rows, inner = a.shape
    groups = b.shape[-3]
    out = product(xp, xp.reshape(a, (*batch, groups, heads // groups * rows, inner)), b)
    return xp.reshape(out, (*out.shape[:-3], heads, rows, b.shape[-1]))
