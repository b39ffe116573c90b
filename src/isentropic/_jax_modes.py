"""Calls under settings of JAX that would refuse single operations of them.

- A mesh of devices with explicit axes: JAX refuses each operation whose result it cannot shard by
  itself, such as the product of queries and keys that are both sharded over their length. So calls run
  in the automatic mode, in which the compiler shards the intermediate arrays.
- ``jax_debug_infs``: hidden keys have logits of −∞. So only the results are checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

_R = TypeVar("_R")


def call(function: Callable[..., _R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _R:
    """``function(*args, **kwargs)`` under any settings of JAX, for arguments that are trees of JAX.

    Over explicit mesh axes, each array of the result is sharded like the first argument of the most
    axes, along the axes in which their sizes agree.
    """
    import jax

    if not (jax.config.jax_debug_infs or jax.config.jax_debug_nans):
        return _across_meshes(function, args, kwargs)
    with jax.debug_infs(False), jax.debug_nans(False):
        result = _across_meshes(function, args, kwargs)
    return _map_arrays(lambda x: x.copy(), result)  # an operation, whose result JAX checks


def _across_meshes(function: Callable[..., _R], args: Any, kwargs: Any) -> _R:
    import jax

    leaves, tree = jax.tree.flatten((args, kwargs))
    explicit = [x for x in leaves if isinstance(x, jax.Array) and _mesh(x).explicit_axes]
    if not explicit:
        return function(*args, **kwargs)
    model = max(explicit, key=lambda x: x.ndim)
    mesh = _mesh(model)
    automatic = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, jax.sharding.AxisType.Auto))
    if not isinstance(model, jax.core.Tracer):
        mesh = model.sharding.mesh  # with its devices, to which JAX moves constants
    with jax.sharding.use_abstract_mesh(automatic):
        whole = jax.sharding.NamedSharding(automatic, jax.sharding.PartitionSpec())
        # By identity, since `==` compares arrays number by number.
        leaves = [
            jax.sharding.reshard(x, whole) if any(x is y for y in explicit) else x for x in leaves
        ]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        result = function(*args, **kwargs)

    def shard(x: Any) -> Any:
        axes = zip(x.shape, model.shape, jax.typeof(model).sharding.spec, strict=False)
        spec = jax.sharding.PartitionSpec(
            *(name if size == other else None for size, other, name in axes)
        )
        return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))

    return _map_arrays(shard, result)


def _mesh(x: Any) -> Any:
    import jax

    return jax.typeof(x).sharding.mesh


def _map_arrays(function: Callable[[Any], Any], result: _R) -> _R:
    """``function`` of each array in a result, which may also be a report: a dataclass or words."""
    import jax

    def convert(x: Any) -> Any:
        if dataclasses.is_dataclass(x):
            fields = {name: convert(value) for name, value in vars(x).items()}
            return dataclasses.replace(x, **fields)  # type: ignore[type-var]
        return function(x) if isinstance(x, jax.Array) else x

    return result if isinstance(result, dict) else jax.tree.map(convert, result)
