"""The checked arguments of a call: the plan, which follows from their signature, and the operands."""

from __future__ import annotations

import math
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from isentropic._attention.nonfinite import are_known_finite, without_nonfinite
from isentropic._attention.torch_facts import torch_facts
from isentropic._checks import (
    check_broadcastable,
    check_choice,
    check_flag,
    check_floating,
    check_ndim,
    check_numeric,
    check_real,
    common_shape,
    is_array,
    is_integer,
    plain_float,
    plain_integer,
    type_error,
    value_error,
)
from isentropic._loops import (
    is_compiling,
    is_differentiated,
    is_known_true,
    is_readable,
    is_watched,
)
from isentropic._namespace import (
    Array,
    accumulator,
    common_device,
    device_of,
    imported_torch,
    is_jax,
    is_numpy,
    is_symbolic,
    is_torch,
    is_torch_array,
    library_of,
    namespace,
    present,
    promoted,
)
from isentropic._numerics import lift, quietly
from isentropic._records import Record
from isentropic._rows import Coded, Rows
from isentropic.laws._law import Law, check_law
from isentropic.masks import Frame, Mask, as_mask, causal, is_causal_alone, is_packed_alone

# The accepted values of `implementation`.
IMPLEMENTATIONS = (
    None, "generic", "varlen", "sdpa", "numpy_tiles", "jax_nn", "torch_tiles", "jax_tiles", "triton"
)  # fmt: skip
_CAUSAL = causal()
# The number of cached plans. A training loop needs a few; text generation needs one for each length.
_MAX_PLANS = 512
_plans: dict[Any, Plan] = {}
# The most factors that a plan keeps. For more queries their computation takes a small part of the time.
_MAX_FACTORS = 4096
# What the backends of a library have to know about the arrays of a call, beside its plan.
_FACTS = {"torch": torch_facts}


class Arguments(NamedTuple):
    """The arguments of one call, unchecked."""

    query: Array
    key: Any  # an array, or Coded
    value: Any = None
    mask: Array | Mask | None = None
    bias: Array | None = None
    law: Law | None = None
    n_keys: int | Array | None = None
    sinks: Array | None = None
    # Numbers, flags and names. `_signature` relies on their being the last fields.
    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    enable_gqa: bool = False
    implementation: str | None = None
    is_dot_product: bool = True  # whether the scores are inner products of queries and keys


_FIRST_OPTION = Arguments._fields.index("is_causal")


class Plan(Record):
    """All that follows from the signature of a call: shapes, dtypes, device, options, law, mask.

    A plan holds no arrays of the caller. The arrays that it makes itself, the factors, are
    never modified. Plans are cached: two calls with the same signature share a plan. So plans are
    compared by identity.
    """

    frame: Frame
    library: str  # "numpy", "torch", "jax", …
    dtype: Any  # the dtype of the result
    compute: Any  # the dtype of the computation
    batch: tuple[int, ...]  # the axes ``...``
    head_dim: int
    n_values: int | None  # the value size; None without values
    scale: float
    multiplier: Any  # the factor on the queries: a float, or an array (L, 1), or None
    softcap: float | None
    has_bias: bool
    has_mask: bool
    is_plain_causal: bool  # whether the mask is the causal one, with as many queries as keys
    is_packed: bool  # whether the mask is of packed sequences alone, with one window for all queries
    has_interval_mask: bool  # whether the keys that a query sees have no gaps between them
    are_all_readable: bool  # whether the values of all arrays can be read
    is_differentiated: bool  # whether PyTorch records the call for a gradient
    is_readable: bool  # whether the values of query, key and value can be read
    has_rows: bool  # whether keys or values are `Rows`, which the generic pass alone takes
    is_aligned: bool  # whether query, key, value and bias have as many axes as the result
    facts: Any  # what the backends of the library have to know beside; see `_FACTS`

    if TYPE_CHECKING:  # names for parts of `frame`, and the number of axes of the result
        xp: ModuleType
        device: Any
        n_queries: int
        n_keys: int
        ndim: int

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        # Properties would be further steps of each small call.
        parts = ("xp", "device", "n_queries", "n_keys")
        self.__dict__.update({name: getattr(self.frame, name) for name in parts})
        self.__dict__["ndim"] = len(self.batch) + 2

    def zeros(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Zeros of the shape (*batch, *shape): the result if there is nothing to attend to."""
        dtype = self.dtype if dtype is None else dtype
        return self.xp.zeros((*self.batch, *shape), dtype=dtype, device=self.device)


class Operands(NamedTuple):
    """The arrays of one call, with as many axes as the result.

    Under a mask, nonfinite numbers in query, key and value are replaced by 0, unless `is_raw`.
    """

    query: Array
    key: Array
    value: Array | None
    bias: Array | None
    mask: Mask | None
    multiplier: float | Array  # the factor on the queries, (..., L, 1)
    lengths: Array | None  # the n of the law, (..., L); None if it follows from the plan
    nonfinite: tuple[Array, Array] | None  # NaN for nonfinite rows; see `nonfinite`
    sinks: Array | None = None  # (..., 1, 1). They join the states of the backends; see `with_sinks`
    # Whether a mask may hide numbers that are not finite. `finite` then replaces them. That takes
    # several passes over the memory, which kernels do not need, and operators of torch.compile only if
    # there are such numbers.
    is_raw: bool = False

    @property
    def values(self) -> Array:
        assert self.value is not None
        return self.value


def prepare(arguments: Arguments) -> tuple[Plan, Operands]:
    """Check the arguments of a call, and return its plan and its operands."""
    if isinstance(arguments.key, Coded) or isinstance(arguments.value, Coded):
        arguments = _with_rows(arguments)
    signature, cached = _signature(arguments), None
    try:
        # torch.compile would compile again whenever a dictionary that it has read changes.
        cached = None if signature is None else _plans.get(signature)
    except TypeError:  # something cannot be hashed: an array as an option, or a symbolic length
        signature = None
    plan = _plan(arguments) if cached is None else cached
    operands = _operands(plan, arguments, is_cached=cached is not None)
    if cached is None and signature is not None:  # and no check has failed
        _keep(signature, plan)
    return (without_numpy_if_traced(plan, operands) if plan.library == "jax" else plan), operands


def _with_rows(a: Arguments) -> Arguments:
    """The arguments with the rows of coded keys and values, and queries to match."""
    value: Any = a.value.rows() if isinstance(a.value, Coded) else a.value
    if not isinstance(a.key, Coded):
        return a._replace(value=value)
    width = a.key.n_features
    if is_array(a.query) and a.query.shape[-1:] != (width,):
        raise value_error("query", f"have the {width} features of `key`", tuple(a.query.shape))
    scale = 1 / math.sqrt(width) if a.scale is None else a.scale
    return a._replace(
        query=a.key.mapped(a.query), key=cast(Any, a.key.rows()), value=value, scale=scale
    )


def check(arguments: Arguments) -> None:
    """Check the arguments of a call that may follow, as far as that takes no arrays."""
    if isinstance(arguments.key, Coded):
        arguments = _with_rows(arguments)
    signature = _signature(arguments)
    # `prepare` must not take it for the plan of a call, whose law has been evaluated.
    key = None if signature is None else (check, signature)
    try:
        if key in _plans:
            return
    except TypeError:  # as in `prepare`
        key = None
    plan = _plan(arguments)
    if key is not None:
        _keep(key, plan)


def _keep(key: Any, plan: Plan) -> None:
    # Each step is atomic, so that threads and forked processes need no lock. If two threads make the
    # same plan at once, either one can stay.
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan


def without_numpy_if_traced(plan: Plan, operands: Operands) -> Plan:
    """The plan itself, or one that rules out NumPy if the values of the operands cannot be read.

    Inside a JAX trace, operands that are computed from the arguments cannot be read, even if the
    arguments can.
    """
    if not plan.are_all_readable:
        return plan
    computed: list[Any] = [operands.query, operands.key, operands.multiplier]
    if operands.is_raw:  # what `finite` will return
        computed.append(plan.xp.zeros((1,), device=plan.device))
    are_readable = all(isinstance(x, (float, Rows)) or is_readable(plan.xp, x) for x in computed)
    return plan if are_readable else plan.replaced(are_all_readable=False)


def _signature(a: Arguments) -> Any:
    """All that the plan of a call depends on; None for calls whose plans are not cached."""
    law, n_keys = a.law, a.n_keys
    if isinstance(a.key, Rows) or isinstance(a.value, Rows):
        return None
    # `isinstance` is slower than this, because `Law` is an abstract class.
    if law is not None and Law not in type(law).__mro__:  # the checks will refuse it
        return None
    torch = imported_torch()
    is_recording = False
    if torch is not None:
        # Symbolic lengths, levels of transformations and traced tensors are valid in one trace only.
        if torch.compiler.is_compiling() or is_watched(torch):
            return None
        is_recording = torch.is_grad_enabled()
    options = a[_FIRST_OPTION:]
    signature_of: Any = _signature_of
    if torch is not None and type(a.query) is torch.Tensor:  # the others are tensors, or refused
        signature_of = _signature_of_tensor
    try:
        return (
            is_recording,
            signature_of(a.query),
            signature_of(a.key),
            None if a.value is None else signature_of(a.value),
            None if a.bias is None else _signature_of(a.bias),
            None if a.sinks is None else _signature_of(a.sinks),
            None if a.mask is None else _signature_of(a.mask),
            None if law is None else law.signature(_signature_of),
            # A NumPy integer has a shape and a dtype, but its value matters too.
            n_keys if n_keys is None or array_or_none(n_keys) is None else _signature_of(n_keys),
            type(n_keys),
            options,
            tuple(map(type, options)),  # True equals 1, but only one of them is valid
        )
    except AttributeError:  # an argument is not an array; the checks will refuse it
        return None


_signature_of_tensor = attrgetter("__class__", "shape", "dtype", "device", "layout", "requires_grad")


def _signature_of(x: Any) -> tuple[Any, ...]:
    """The properties of an array or a mask, except for values. AttributeError for other objects."""
    kind = type(x)
    module = kind.__module__
    if module == "numpy":
        return kind, x.shape, x.dtype
    if module == "torch" or is_torch_array(x):
        return _signature_of_tensor(x)
    if isinstance(x, Mask):
        return x.signature(_signature_of)
    # Devices of CuPy have no hash. JAX has other promotion rules for arrays that it has made from
    # Python numbers (weak types), and moves arrays that were made without a device.
    device = x.device.id if module.startswith("cupy") else device_of(x)
    is_bound = device is not None and getattr(x, "committed", None)
    return kind, x.shape, x.dtype, device, is_bound, getattr(x, "weak_type", None)


@quietly  # NumPy computes the factors of tensors
def _plan(a: Arguments) -> Plan:
    """The plan of a call. It is a pure function of the signature."""
    mask, frame, batch, others = _checked(a)
    xp = frame.xp
    inputs = [x for x in (a.query, a.key, a.value) if x is not None]
    rows = [x for x in inputs if isinstance(x, Rows)]
    arrays = [x for x in (*inputs, *others) if not isinstance(x, Rows)]
    arrays += [x for part in rows for x in part.arrays]
    are_readable = [is_readable(xp, x) for x in arrays]
    can_be_read = not rows and all(are_readable[: len(inputs)])
    dtype = promoted(xp, *(x.dtype if isinstance(x, Rows) else x for x in inputs))
    compute = accumulator(xp, dtype)
    scale = 1 / math.sqrt(max(a.query.shape[-1], 1)) if a.scale is None else plain_float(a.scale)
    if a.softcap is not None:
        _check_range_of_cap(xp, plain_float(a.softcap), compute)
    multiplier = _multiplier(a, mask, frame, scale)
    if multiplier is None and can_be_read:
        multiplier = _factors(a, mask, frame, compute, scale)
    library = library_of(xp)
    facts_of = _FACTS.get(library)
    return Plan(
        frame=frame,
        library=library,
        dtype=dtype,
        compute=compute,
        batch=batch,
        head_dim=a.query.shape[-1],
        n_values=None if a.value is None else a.value.shape[-1],
        scale=scale,
        multiplier=multiplier,
        softcap=None if a.softcap is None else plain_float(a.softcap),
        has_bias=a.bias is not None,
        has_mask=mask is not None,
        is_plain_causal=mask is not None and is_causal_alone(mask, frame.n_queries, frame.n_keys),
        is_packed=mask is not None and is_packed_alone(mask),
        has_interval_mask=mask is None or mask.is_contiguous,
        are_all_readable=all(are_readable),
        is_differentiated=is_torch(xp) and any(is_differentiated(xp, x) for x in arrays),
        is_readable=can_be_read,
        has_rows=bool(rows),
        is_aligned={x.ndim for x in (*inputs, *others[: a.bias is not None])} == {len(batch) + 2},
        facts=facts_of and facts_of(frame, a.bias, arrays),
    )


def _checked(a: Arguments) -> tuple[Mask | None, Frame, tuple[int, ...], list[Array]]:
    """Check the arguments.

    Return the mask, its frame, the shape of the axes ``...``, and the arrays beside query, key and
    value that decide how the call is computed.
    """
    check_flag(is_causal=a.is_causal, enable_gqa=a.enable_gqa)
    mask = mask_of(a)
    check_law(a.law, optional=True)
    arrays = {"query": a.query, "key": a.key} | present(value=a.value)
    floats = present(bias=a.bias, sinks=a.sinks)
    n_keys_array = array_or_none(a.n_keys)
    optional = floats | present(n_keys=n_keys_array)
    in_mask, in_law = _arrays_of(mask), _arrays_of(a.law)
    rows = {name: x for name, x in arrays.items() if isinstance(x, Rows)}
    groups = (("mask", in_mask), ("law", in_law), *((name, x.arrays) for name, x in rows.items()))
    whole = {name: x for name, x in arrays.items() if name not in rows}
    xp = namespace(*groups, **whole, **optional)
    device = common_device(*groups, **whole, **optional)

    check_floating(xp, **whole, **floats)
    batch = _check_shapes(a, arrays)
    n_queries, n_keys = a.query.shape[-2], a.key.shape[-2]
    if mask is not None:
        mask.check(batch, n_queries, n_keys)
    if a.bias is not None:
        check_broadcastable("bias", a.bias.shape, (*batch, n_queries, n_keys))
    if a.sinks is not None:
        check_broadcastable("sinks", a.sinks.shape, batch)
    _check_options(a)
    # JAX maps over symbolic batches. Only lengths decide about loops there.
    sizes = (n_queries, n_keys) if is_jax(xp) else (*batch, n_queries, n_keys)
    frame = Frame(xp, device, n_queries, n_keys, is_compiling=is_compiling(xp, *sizes))
    others = [x for x in (a.bias, n_keys_array) if x is not None]
    return mask, frame, batch, [*others, *in_mask, *in_law]


def _arrays_of(part: Mask | Law | None) -> tuple[Array, ...]:
    return () if part is None else part.arrays


def _multiplier(a: Arguments, mask: Mask | None, frame: Frame, scale: float) -> float | None:
    """The factor on all queries, or None if it depends on arrays or on the mask."""
    n = _common_length(frame, mask, a.n_keys)
    if n is not None and not _arrays_of(a.law):
        return scale * (1.0 if a.law is None else a.law(n))
    return scale if a.law is None and a.n_keys is None else None


def _factors(a: Arguments, mask: Mask | None, frame: Frame, compute: Any, scale: float) -> Any:
    """The factors on the queries, (L, 1); None if they depend on arrays, or for JAX."""
    counts = None if mask is None else mask.counts(frame)
    if counts is None or len(counts) > _MAX_FACTORS or a.law is None or a.n_keys is not None:
        return None
    if a.law.arrays or not (is_numpy(frame.xp) or is_torch(frame.xp)):
        return None
    dtype = numpy_dtype(frame.xp, compute)
    factors = a.law(np.arange(counts.start, counts.stop, dtype=dtype)) * scale
    if factors.shape != (len(counts),):  # as a law of somebody else may return them
        return None
    # Every later call with this plan shares the factors.
    factors, xp = factors.astype(dtype)[:, None], cast(Any, frame.xp)
    if is_numpy(xp):
        factors.flags.writeable = False
        return factors
    with xp.inference_mode(False):  # a later call may need a gradient
        return xp.from_numpy(factors)


def numpy_dtype(xp: ModuleType, dtype: Any) -> Any:
    """The dtype of a computation, as `accumulator` returns it, as one of NumPy."""
    return np.float64 if dtype == xp.float64 else np.float32


def mask_of(a: Arguments) -> Mask | None:
    """The mask of a call, including `is_causal`."""
    if a.mask is None:
        return _CAUSAL if a.is_causal else None
    return as_mask(a.mask) & _CAUSAL if a.is_causal else as_mask(a.mask)


def _check_shapes(a: Arguments, arrays: dict[str, Array]) -> tuple[int, ...]:
    """Check the shapes, and return that of the axes ``...``, with the heads of the query."""
    check_ndim(3 if a.enable_gqa else 2, **arrays)
    # Additive attention has queries and keys of different widths.
    if a.is_dot_product and a.key.shape[-1] != a.query.shape[-1]:
        must = f"have the last dimension of `query`, {a.query.shape[-1]}"
        raise value_error("key", must, a.key.shape[-1])
    if a.value is not None and a.value.shape[-2] != a.key.shape[-2]:
        must = f"have as many rows as `key`, {a.key.shape[-2]}"
        raise value_error("value", must, a.value.shape[-2])
    shapes = {name: x.shape[:-2] for name, x in arrays.items()}
    if a.enable_gqa:
        heads = shapes["query"][-1]
        groups = shapes["key"][-1]
        if heads < groups or heads % max(groups, 1) or (heads and not groups):
            must = f"have a number of heads (axis -3) that divides the {heads} of `query`"
            raise value_error("key", must, groups)
        if "value" in shapes and shapes["value"][-1] != groups:
            must = f"have the {groups} heads (axis -3) of `key`"
            raise value_error("value", must, shapes["value"][-1])
        shapes = {name: (*shape[:-1], heads) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if shape != shapes["query"] and _has_fewer_heads(shape, shapes["query"]):
            must = f"have the {shapes['query'][-1]} heads (axis -3) of `query`, or `enable_gqa` be true"
            raise value_error(name, must, shape[-1])
    return common_shape(" in its batch axes", **shapes)


def _has_fewer_heads(groups: tuple[int, ...], heads: tuple[int, ...]) -> bool:
    """Whether shapes that do not broadcast could be those of grouped heads."""
    return bool(groups and heads) and 1 < groups[-1] < heads[-1] and heads[-1] % groups[-1] == 0


def _check_options(a: Arguments) -> None:
    for name, x in (("scale", a.scale), ("softcap", a.softcap)):
        if x is None:
            continue
        # A plan is cached, so it holds the scale as a number. A scale for each head is a law.
        if name == "scale" and is_array(x):
            law = "Constant(scale)" if a.law is None else "scaled(law, scale)"
            kind = f"{type(x).__name__}: an array is part of a law, `scale=1.0, law=laws.{law}`"
            raise type_error(name, "be a real number", kind)
        check_real(name, x, above=0 if name == "softcap" else -math.inf)
    check_choice("implementation", a.implementation, IMPLEMENTATIONS)


def _check_range_of_cap(xp: ModuleType, softcap: float, compute: Any) -> None:
    """Refuse a soft cap whose square, or quotient with a logit, may be out of the range of a dtype."""
    most = math.sqrt(float(xp.finfo(compute).max))
    if not 1 / most <= softcap <= most:
        must = f"be between {1 / most:.2g} and {most:.2g} (None is no cap)"
        raise value_error("softcap", must, softcap)


def _operands(plan: Plan, a: Arguments, *, is_cached: bool) -> Operands:
    """The operands of a call. If the plan was cached, the law has already been checked."""
    mask = mask_of(a)
    arrays: Any = (a.query, a.key, a.value, a.bias)
    query, key, value, bias = arrays
    if not plan.is_aligned:
        query, key, value, bias = (None if x is None else lift(x, plan.ndim) for x in arrays)
    # Without a mask every query sees every key, and the NaN that the products give is right.
    is_raw = mask is not None and not are_known_finite(plan, query, key, value)
    multiplier: Any = plan.multiplier
    lengths = None
    if multiplier is None:
        lengths = visible_lengths(plan, mask, a.n_keys)
        multiplier = plan.scale
        if a.law is not None:
            if is_cached:
                factors = a.law.evaluate_unchecked(plan.xp, lengths)[..., None]
            else:
                factors = factor(plan.xp, a.law, lengths, (*plan.batch, plan.n_queries))
            multiplier = factors * multiplier
    sinks = None if a.sinks is None else _sink_logits(plan, a.sinks)
    return Operands(query, key, value, bias, mask, multiplier, lengths, None, sinks, is_raw=is_raw)


def finite(plan: Plan, operands: Operands) -> Operands:
    """The operands with nonfinite numbers replaced, if a mask may hide some."""
    if not operands.is_raw:
        return operands
    query, key, value, nonfinite = without_nonfinite(plan, *operands[:3])
    return operands._replace(query=query, key=key, value=value, nonfinite=nonfinite, is_raw=False)


def _sink_logits(plan: Plan, sinks: Any) -> Array:
    """The logits of the sinks, as those of one key for all queries, (..., 1, 1)."""
    return lift(plan.xp.astype(sinks, plan.compute, copy=False)[..., None, None], plan.ndim)


def four_axes(plan: Plan, x: Any, *, expand: bool = False) -> Any:
    """Reshape `x` (..., rows, columns) to (batch, heads, rows, columns).

    `expand` broadcasts all batch axes to their full size. Grouped heads stay grouped.
    """
    batch, batch_axes = plan.batch, x.shape[:-2]
    if batch_axes == batch and 1 <= len(batch) <= 2:
        return x if len(batch) == 2 else x[None]
    if len(batch) <= 2 and not expand:
        return lift(x, 4)
    heads = batch_axes[-1] if batch_axes else 1
    if expand and batch and heads == 1:
        heads = batch[-1]
    if batch_axes != (*batch[:-1], heads):
        x = plan.xp.broadcast_to(x, (*batch[:-1], heads, *x.shape[-2:]))
    if len(batch) == 1:
        return x[None]
    return x if x.ndim == 4 else plan.xp.reshape(x, (math.prod(batch[:-1]), heads, *x.shape[-2:]))


def array_or_none(n_keys: Any) -> Array | None:
    # NumPy scalars count as arrays: NumPy's reductions return them instead of 0-d arrays.
    return None if is_integer(n_keys) or not hasattr(n_keys, "ndim") else n_keys


def _common_length(frame: Frame, mask: Mask | None, n_keys: Any) -> int | None:
    """The n of the law if it is the same for all queries and not symbolic, else None."""
    if array_or_none(n_keys) is not None or (n_keys is None and mask is not None):
        return None
    n = frame.n_keys if n_keys is None else _check_length(n_keys)
    # As a number, a symbolic length would be fixed in the graph.
    return None if frame.is_compiling else n


def visible_lengths(plan: Plan, mask: Mask | None, n_keys: Any = None) -> Array:
    """The number of keys that each query sees, or the given `n_keys`, as floats.

    The array has as many axes as (..., L) and broadcasts to it.
    """
    if n_keys is None and mask is not None:
        # A causal mask knows its counts as a range, which is faster than counting.
        xp, counts = plan.xp, mask.counts(plan.frame)
        if counts is None:
            lengths = xp.astype(mask.count(plan.frame), plan.compute)
        else:
            lengths = xp.arange(counts.start, counts.stop, dtype=plan.compute, device=plan.device)
        return lift(lengths, plan.ndim - 1)
    n = plan.n_keys if n_keys is None else n_keys
    return given_lengths(plan.xp, plan.device, plan.compute, n, (*plan.batch, plan.n_queries))


def lengths_of_law(plan: Plan, operands: Operands, n_keys: Any) -> Array:
    """The n of the law, broadcastable to (..., L)."""
    return (
        visible_lengths(plan, operands.mask, n_keys) if operands.lengths is None else operands.lengths
    )


def given_lengths(
    xp: ModuleType, device: Any, dtype: Any, n_keys: Any, shape: tuple[int, ...]
) -> Array:
    """`n_keys` as floats, with as many axes as `shape` and broadcastable to it."""
    if array_or_none(n_keys) is None:
        return xp.full((1,) * len(shape), _check_length(n_keys), dtype=dtype, device=device)
    check_numeric(xp, n_keys=n_keys)
    check_broadcastable("n_keys", n_keys.shape, shape)
    n = lift(xp.astype(n_keys, dtype), len(shape))
    # Not `n < 0`, which NaN is not.
    if is_readable(xp, n_keys) and is_known_true(xp, xp.any(~(n >= 0))):
        raise value_error("n_keys", "be at least 0", "an array with negative numbers or NaN")
    return n


def _check_length(n_keys: Any) -> int:
    if not is_integer(n_keys):
        raise type_error("n_keys", "be an integer or an array", type(n_keys).__name__)
    if n_keys < 0:
        raise value_error("n_keys", "be at least 0", n_keys)
    # Libraries hold integers of 64 bits, and each would raise an error of its own.
    if not is_symbolic(n_keys) and n_keys >= 2**63:
        raise value_error("n_keys", "be below 2**63", n_keys)
    return plain_integer(n_keys)


def factor(xp: ModuleType, law: Law, n: Array, shape: tuple[int, ...]) -> Array:
    """``law(n)`` with a last axis of length 1 for the features. Its shape is checked."""
    factors = xp.astype(law(n), n.dtype)
    check_broadcastable("law", factors.shape, shape)
    return factors[..., None]
