"""The array library, device and dtype of a call; equality of arrays. The lowest layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import EllipsisType, GenericAlias, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import array_api_compat
import numpy as np


class Array(Protocol):
    """An array of any library that follows the Python array API standard."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __and__(self, other: Any, /) -> Any: ...
    def __or__(self, other: Any, /) -> Any: ...
    def __eq__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...


if TYPE_CHECKING:
    from typing import Generic as Generic

    from typing_extensions import TypeVar

    # The type of the arrays in an object. `AttentionState` alone means arrays of any type.
    A_co = TypeVar("A_co", bound=Array, covariant=True, default=Any)
    # The type of `like`; without it NumPy's.
    LikeT = TypeVar("LikeT", bound=Array, default=np.ndarray)
else:
    from typing import TypeVar

    A_co, LikeT = TypeVar("A_co", covariant=True), TypeVar("LikeT")

    class Subscripted:
        """Lets a user write the type of the arrays behind the name of a class."""

        __slots__ = ()
        __class_getitem__ = classmethod(GenericAlias)

    class Generic:
        """No base of a NamedTuple. Some trees have a NamedTuple with a second base as a leaf."""

        def __class_getitem__(cls, parameter):
            return cls()

        def __mro_entries__(self, bases):
            return () if NamedTuple in bases else (Subscripted,)


# A function that takes arrays of this type returns arrays of the same type.
ArrayT = TypeVar("ArrayT", bound=Array)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Sliced(Array, Protocol[T_co]):
    """An array whose slices are of the type T.

    NumPy's types count dimensions. That of a slice does not, and so may have fewer, as results have.
    """

    def __getitem__(self, key: EllipsisType, /) -> T_co: ...


_torch = sys.modules.get("torch")  # if it was imported before this package

# Arrays that belong to one argument, such as those inside a mask.
Group = tuple[str, tuple[Array, ...]]


def namespace(*groups: Group, **arrays: Any) -> ModuleType:
    """The common array namespace of all arrays. Error messages name the arguments."""
    xp, first, kind, torch = None, "", None, imported_torch()
    for name, x in _named(groups, arrays):
        # Dense and sparse PyTorch tensors have the same type.
        is_tensor = torch is not None and isinstance(x, torch.Tensor)
        its_kind = (type(x), x.layout) if is_tensor else type(x)
        if its_kind == kind:
            continue
        its_xp, kind = _namespace_of(name, x), its_kind
        if xp is None:
            xp, first = its_xp, name
        elif its_xp is not xp:
            raise TypeError(
                f"`{name}` must be an array of the library of `{first}` ({library_of(xp)}), "
                f"got {library_of(its_xp)}."
            )
    assert xp is not None, "there is an array argument"
    return xp


def common_device(*groups: Group, **arrays: Any) -> Any:
    """The common device of all arrays; None if it is unknown (a JAX tracer), or left to JAX."""
    common, first = None, ""
    for name, x in _named(groups, arrays):
        # torch.compile supports `x.device`, but not `array_api_compat.device`.
        if type(x).__module__ == "numpy":
            its_device = "cpu"
        elif is_torch_array(x):
            its_device = x.device
        else:
            its_device = device_of(x)
            # JAX itself moves arrays that were made without a device to that of the others.
            if its_device is not None and not getattr(x, "committed", True):
                continue
        # The `device` of a sharded JAX array is a sharding. Arrays with different layouts over the
        # same set of devices can be used together.
        devices = getattr(its_device, "device_set", its_device)
        if devices is None:
            continue
        if common is None:
            common, first = devices, name
        elif common != devices:
            raise ValueError(f"`{name}` must be on the device of `{first}` ({common}), got {devices}.")
    if isinstance(common, (set, frozenset)):
        return next(iter(common)) if len(common) == 1 else None
    return common


def namespace_with_drawn(drawn: Group, **arrays: Any) -> ModuleType:
    """The common namespace of arrays and of random draws for them, which must share one device."""
    try:
        xp = namespace(drawn, **arrays)
        common_device(drawn, **arrays)
    except (TypeError, ValueError) as error:
        namespace(drawn), namespace(**arrays)  # these raise their own error for non-arrays
        hint = f"draw the {drawn[0]} with `like={next(iter(arrays))}`"
        raise type(error)(f"{str(error).removesuffix('.')}: {hint}.") from None
    return xp


def present(**arrays: Any) -> dict[str, Any]:
    """The optional arrays that are not None."""
    return {name: x for name, x in arrays.items() if x is not None}


def _named(groups: tuple[Group, ...], arrays: dict[str, Any]) -> list[tuple[str, Any]]:
    return [*arrays.items(), *[(name, x) for name, members in groups for x in members]]


def _namespace_of(name: str, x: Any) -> ModuleType:
    if is_torch_array(x):
        import array_api_compat.torch as xp

        if x.layout is not xp.strided:
            raise TypeError(f"`{name}` must be a dense tensor, got one of the layout {x.layout}.")
        return xp
    if is_dask(x):
        raise TypeError(
            f"`{name}` must be an array in memory, got a Dask array: call its `compute()`. Only "
            f"projections and hadamard_transform take Dask arrays."
        )
    try:
        # These subclasses of ndarray redefine the operators. Proxies of `torch.fx` have all attributes.
        if type(x).__name__ in ("matrix", "MaskedArray") or type(x).__module__ == "torch.fx.proxy":
            raise TypeError
        if _is_mlx(x):
            from isentropic._mlx import namespace

            return namespace
        xp = array_api_compat.array_namespace(x)
        if not hasattr(xp, "__array_api_version__"):  # a namespace that is not that of the standard
            raise TypeError
        return xp
    except TypeError:
        raise TypeError(
            f"`{name}` must be an array (NumPy, CuPy, PyTorch, JAX or another library of the "
            f"array API standard), got {_described_type(x)}."
        ) from None


def _described_type(x: Any) -> str:
    """The full name of the type of what is not an array here, and how to make an array of it."""
    kind = type(x)
    if kind.__module__ == "builtins":
        is_sequence = isinstance(x, (list, tuple))
        return kind.__name__ + ": convert it with `asarray` of your library" * is_sequence
    if kind.__module__ == "torch.fx.proxy":
        return "a proxy of `torch.fx`, which records a function only if `torch.fx.wrap` names it"
    is_numpy = kind.__module__.partition(".")[0] == "numpy"  # of a masked array it would drop the mask
    mend = "" if is_numpy or not hasattr(x, "__array__") else ": convert it with `np.asarray`"
    mend = getattr(kind, "_how_to_convert", mend)  # of quantized vectors
    return f"{kind.__module__}.{kind.__qualname__}{mend}"


def imported_torch() -> Any:
    """PyTorch, or None if the program has not imported it."""
    # Where torch.compile meets `sys.modules`, it wraps each of thousands of modules.
    return sys.modules.get("torch") if _torch is None else _torch


def is_torch_array(x: Any) -> bool:
    # `array_api_compat.is_torch_array` uses functools.lru_cache, for which torch.compile warns.
    torch = imported_torch()
    return torch is not None and isinstance(x, torch.Tensor)


def _is_mlx(x: Any) -> bool:
    mlx = sys.modules.get("mlx.core")
    return mlx is not None and isinstance(x, mlx.array)


def _is_array(x: Any) -> bool:
    return _is_mlx(x) or array_api_compat.is_array_api_obj(x)


def device_of(x: Any) -> Any:
    """The device of an array. Those of MLX have none."""
    return None if _is_mlx(x) else array_api_compat.device(x)


def is_dask(x: Any) -> bool:
    """Whether `x` is a Dask array. Only some functions accept it, and it has no namespace here."""
    dask = sys.modules.get("dask.array")
    return dask is not None and isinstance(x, dask.Array)


def is_jax(xp: ModuleType) -> bool:
    return xp.__name__ == "jax.numpy"


def is_cupy(xp: ModuleType) -> bool:
    return xp.__name__ in ("cupy", "array_api_compat.cupy")


def is_numpy(xp: ModuleType) -> bool:
    return xp.__name__ in ("numpy", "array_api_compat.numpy")


def is_torch(xp: ModuleType) -> bool:
    return xp.__name__ == "array_api_compat.torch"


def is_symbolic(size: Any) -> bool:
    """Whether a size is a symbol, as in ``jax.export`` and in graphs of ``torch.export``."""
    return type(size).__name__ in ("SymInt", "_DimExpr")


def library_of(xp: ModuleType) -> str:
    """The name of the library: numpy, torch, jax, cupy, …"""
    return xp.__name__.removeprefix("array_api_compat.").partition(".")[0]


def isdtype(xp: ModuleType, dtype: Any, kind: str | tuple[str, ...]) -> bool:
    """``xp.isdtype``, also for the dtypes that the package ml_dtypes adds to NumPy.

    Of these only bfloat16 is of a kind, "real floating". Floats of fewer than 16 bits are of no kind,
    whatever the library: they are made for storage, and promote to no other dtype.
    """
    if _is_added(xp, dtype):
        return dtype.name == "bfloat16" and "real floating" in kind
    is_narrow = getattr(dtype, "itemsize", 2) == 1 and xp.isdtype(dtype, "real floating")
    return not is_narrow and xp.isdtype(dtype, kind)


def largest_number(xp: ModuleType, dtype: Any) -> float:
    """The largest finite number of a floating dtype, also of NumPy's bfloat16."""
    return (2 - 2**-7) * 2.0**127 if _is_added(xp, dtype) else float(xp.finfo(dtype).max)


def _is_added(xp: ModuleType, dtype: Any) -> bool:
    """Whether the dtype is not NumPy's own, but registered by another package."""
    return is_numpy(xp) and dtype.isbuiltin == 2


def promoted(xp: ModuleType, *arrays: Any) -> Any:
    """The dtype to which arrays or dtypes promote."""
    dtypes = [getattr(x, "dtype", x) for x in arrays]
    if dtypes.count(dtypes[0]) == len(dtypes):
        return dtypes[0]
    if is_numpy(xp):  # where bfloat16 and float16 do not promote
        arrays = tuple(xp.float32 if _is_added(xp, dtype) else dtype for dtype in dtypes)
    return xp.result_type(*arrays)


def default_dtype(xp: ModuleType, kind: str, device: Any) -> Any:
    """The library's default dtype of a kind, such as "integral", on a device."""
    return xp.__array_namespace_info__().default_dtypes(device=device)[kind]


def accumulator(xp: ModuleType, dtype: Any) -> Any:
    """The dtype to compute in: float64 for float64, else float32."""
    if dtype == xp.float64:
        return dtype
    # Only NumPy has float64 in non-native byte order, which is not equal to float64, and longdouble.
    return xp.float64 if is_numpy(xp) and dtype.itemsize > 4 else xp.float32


def measure_dtype(xp: ModuleType, dtype: Any) -> Any:
    """The dtype of a quantity measured on arrays of `dtype`, such as an entropy: at least float32."""
    if dtype == xp.float64:  # JAX can be set to refuse promotion
        return dtype
    # NumPy has other byte orders, which promotion makes native.
    return xp.float32 if accumulator(xp, dtype) == xp.float32 else xp.result_type(dtype, xp.float32)


def from_numpy(values: Any, like: Array, dtype: Any = None) -> Any:
    """An array of the library and device of `like` with the given values; by default of its dtype."""
    xp, device = namespace(like=like), common_device(like=like)
    return xp.asarray(values, dtype=like.dtype if dtype is None else dtype, device=device)


def to_numpy(x: Array) -> Any:
    """A copy of an array as a NumPy array on the host."""
    if "bfloat16" in str(x.dtype):  # NumPy has no such dtype of its own
        xp: Any = _namespace_of("x", x)
        x = xp.astype(x, xp.float32)
    if isinstance(x, np.ndarray):
        return np.array(x)
    if is_torch_array(x):
        # Not a copy of x.numpy(), which would fix the size of the memory of x. FSDP changes it.
        return x.detach().to("cpu", copy=True).numpy()  # type: ignore[attr-defined]
    # JAX's may be sharded, and DLPack exports one device.
    if array_api_compat.is_jax_array(x) or _is_mlx(x):
        return np.array(x)
    if array_api_compat.is_cupy_array(x):
        return x.get()  # type: ignore[attr-defined]
    return np.from_dlpack(x, device="cpu", copy=True)  # type: ignore[arg-type]


def same_arrays(a: Array, b: Array) -> bool:
    """Whether two arrays of any libraries and dtypes have the same shape and equal values."""
    if a is b:  # also for tracers, whose values cannot be read
        return True
    a, b = to_numpy(a), to_numpy(b)
    return a.shape == b.shape and bool((a == b).all())


def equal_by_value(kind: type[T]) -> type[T]:
    """Make `==` of a NamedTuple of arrays compare values.

    The `==` of tuples would ask for the truth value of an array, which is ambiguous.
    """

    def equal(self: Any, other: object) -> bool:
        return type(other) is type(self) and _same_leaves(self, other)

    def unequal(self: Any, other: object) -> bool:  # tuple defines `__ne__` too
        return not equal(self, other)

    def hashed(self: Any) -> int:
        # The hash of a tensor is its identity, so equal tuples would have different hashes.
        if any(map(_is_array, leaves_of(self))):
            raise TypeError(f"unhashable: {kind.__name__} with arrays")
        return tuple.__hash__(self)

    for name, method in (("__eq__", equal), ("__ne__", unequal), ("__hash__", hashed)):
        setattr(kind, name, method)
    return kind


def leaves_of(x: Any) -> Iterator[Any]:
    """The leaves of nested tuples."""
    for part in x:
        if isinstance(part, tuple):
            yield from leaves_of(part)
        else:
            yield part


def _same_leaves(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same_leaves, a, b))
    # JAX transformations replace arrays in a tree by numbers, None and placeholders.
    arrays = [_is_array(x) for x in (a, b)]
    return same_arrays(a, b) if all(arrays) else not any(arrays) and a == b
