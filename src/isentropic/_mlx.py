"""MLX in the terms of the array API standard: all that a library outside of the standard needs.

MLX has most functions of the standard. Its arrays have no device, and its dtypes are compared by `==`.
This module imports MLX.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

_FLOATS = (mx.float16, mx.bfloat16, mx.float32, mx.float64)
_KINDS = {
    "bool": (mx.bool_,),
    "signed integer": (mx.int8, mx.int16, mx.int32, mx.int64),
    "unsigned integer": (mx.uint8, mx.uint16, mx.uint32, mx.uint64),
    "real floating": _FLOATS,
    "complex floating": (mx.complex64,),
}
_KINDS["integral"] = _KINDS["signed integer"] + _KINDS["unsigned integer"]
_KINDS["numeric"] = _KINDS["integral"] + _FLOATS + _KINDS["complex floating"]


class _Namespace(ModuleType):
    """The functions of `mlx.core`, and those of the standard that it lacks or has in another form."""

    __array_api_version__ = "2024.12"
    bool = mx.bool_

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def isdtype(self, dtype: Any, kind: Any) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        return any(dtype == x for k in kinds for x in _KINDS[k])

    def finfo(self, dtype: Any) -> Any:
        if dtype == mx.bfloat16:  # NumPy has no such dtype
            most = mx.finfo(dtype).max
            return SimpleNamespace(eps=2.0**-7, tiny=2.0**-126, max=most, min=-most)
        return np.finfo(str(dtype).rpartition(".")[2])

    def astype(self, x: Any, dtype: Any, *, copy: Any = True, device: None = None) -> Any:
        return x.astype(dtype)

    def asarray(self, x: Any, *, dtype: Any = None, device: None = None, copy: Any = None) -> Any:
        return mx.array(x, dtype=dtype)

    def clip(self, x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002 (names of the standard)
        return mx.clip(x, min, max)

    def sum(self, x: Any, *, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
        return mx.sum(x if dtype is None else x.astype(dtype), axis=axis, keepdims=keepdims)


# Arrays of MLX are in memory that its devices share, so its functions take no device.
def _without_device(name: str) -> Any:
    def function(self: _Namespace, *args: Any, device: None = None, **options: Any) -> Any:
        return getattr(mx, name)(*args, **{key: x for key, x in options.items() if x is not None})

    return function


for _name in (
    "arange",
    "empty",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "zeros",
    "zeros_like",
):
    setattr(_Namespace, _name, _without_device(_name))

namespace = _Namespace("mlx")
