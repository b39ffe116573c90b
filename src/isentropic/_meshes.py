"""Calls with JAX arrays over a mesh of devices whose axes are explicit.

There JAX refuses each operation whose result it cannot shard by itself, such as the product of queries
and keys that are both sharded over their length. So calls run in JAX's automatic mode, in which the
compiler shards the intermediate arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def across_meshes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function in automatic mode if an argument is an array over explicit mesh axes.

    Each array of the result is sharded like the first argument of the most axes, along the axes in
    which their sizes agree. Arguments and results are trees of JAX.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "jax" not in sys.modules or (args and type(args[0]).__module__ == "numpy"):
            return function(*args, **kwargs)
        import jax

        leaves, tree = jax.tree.flatten((args, kwargs))
        explicit = [x for x in leaves if isinstance(x, jax.Array) and _mesh(x).explicit_axes]
        if not explicit:
            return function(*args, **kwargs)
        model = max(explicit, key=lambda x: x.ndim)
        mesh = _mesh(model)
        types = dict.fromkeys(mesh.explicit_axes, jax.sharding.AxisType.Auto)
        automatic = mesh.update_axis_types(types)
        if not isinstance(model, jax.core.Tracer):
            mesh = model.sharding.mesh  # with its devices, to which JAX moves constants
        with jax.sharding.use_abstract_mesh(automatic):
            whole = jax.sharding.NamedSharding(automatic, jax.P())
            leaves = [
                jax.sharding.reshard(x, whole) if any(x is y for y in explicit) else x for x in leaves
            ]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            result = function(*args, **kwargs)

        def shard(x: Any) -> Any:
            if dataclasses.is_dataclass(x):  # a report, which is no tree
                fields = {name: shard(value) for name, value in vars(x).items()}
                return dataclasses.replace(x, **fields)  # type: ignore[type-var]
            if not isinstance(x, jax.Array):
                return x
            axes = zip(x.shape, model.shape, jax.typeof(model).sharding.spec, strict=False)
            spec = jax.P(*(name if size == other else None for size, other, name in axes))
            return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))

        return result if isinstance(result, dict) else jax.tree.map(shard, result)

    return call


def _mesh(x: Any) -> Any:
    import jax

    return jax.typeof(x).sharding.mesh
