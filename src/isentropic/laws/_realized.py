"""The factor that somebody else's attention applies to its logits, measured from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from isentropic._checks import (
    check_count,
    check_floating,
    check_real,
    is_array,
    type_error,
    value_error,
)
from isentropic._namespace import Array, common_device, namespace, to_numpy
from isentropic._numerics import quietly


@quietly
def realized_factor(
    attend: Callable[[Any, Any, Any], Any],
    n_keys: Iterable[int],
    *,
    n_queries: int = 1,
    n_heads: int = 1,
    n_key_heads: int | None = None,
    head_dim: int = 64,
    scale: float | None = None,
    like: Array | None = None,
) -> np.ndarray:
    """The factor on the logits that an attention function really applies, by number of keys.

    It tests engines and kernels that apply a law of their own: compare it with ``law(n)``.

    Parameters
    ----------
    attend : callable
        ``attend(query, key, value)`` gets arrays of the shapes (2, H, L, E), (2, G, n, E) and
        (2, G, n, E), and returns the output (2, H, L, E). The queries are the last L of n positions.
        It may add what an engine adds: padding, masks, sinks, caches, chunks. It must not rotate or
        normalize queries and keys.
    n_keys : iterable of int ≥ 2
        The numbers of keys n, with a call for each.
    n_queries : int, default 1
        L: 1 as in decoding, more as in a prefill. It is at most n in each call.
    n_heads, n_key_heads : int
        H and G. G divides H, and is H by default.
    head_dim : int ≥ 2
        E.
    scale : float, optional
        The scale of the logits without the law; ``1/√E`` by default.
    like : array, optional
        An array whose library, device and dtype the arrays get. The default is float32 in NumPy.

    Returns
    -------
    numpy.ndarray (len(n_keys), H), float64
        The factor for the last query in each head; NaN or infinite where its output has no weight on
        some kind of keys. Near 1 it is accurate to about 1e-5 in float32, 1e-3 in float16 and 1e-2 in
        bfloat16.

    Raises
    ------
    TypeError
        If `attend` is not callable, or an argument is not a number.
    ValueError
        If a number is out of range, or if an output has another shape.

    Notes
    -----
    There are two keys, u and −u, which alternate, and two values that tell them apart. So the output
    has the weights a of all keys u and b of all keys −u, and ``log(a/b) = 2 λ s q·u + log(m)``, where m
    is the ratio of their numbers. The second batch element has the query −q. Half of the difference of
    the two logarithms is ``2 λ s q·u``, in which neither the number of visible keys nor a sink occurs.

    Examples
    --------
    >>> import numpy as np
    >>> from isentropic import attention, laws
    >>> law = laws.LogLength(512)
    >>> def attend(query, key, value):
    ...     return attention(query, key, value, is_causal=True, law=law)
    >>> laws.realized_factor(attend, [64, 512, 4096])[:, 0].round(5)
    array([0.66667, 1.     , 1.33333])
    >>> law(np.asarray([64.0, 512.0, 4096.0])).round(5)
    array([0.66667, 1.     , 1.33333])
    """
    if not callable(attend):
        raise type_error("attend", "be callable", type(attend).__name__)
    n_key_heads = n_heads if n_key_heads is None else n_key_heads
    counts = {"n_queries": n_queries, "n_heads": n_heads, "n_key_heads": n_key_heads}
    for name, x in counts.items():
        check_count(name, x, least=1)
    check_count("head_dim", head_dim, least=2)
    if n_heads % n_key_heads:
        raise value_error("n_key_heads", f"divide `n_heads`, {n_heads}", n_key_heads)
    if scale is not None:
        check_real("scale", scale, above=0)
    like = np.zeros(1, np.float32) if like is None else like
    xp, device = namespace(like=like), common_device(like=like)
    check_floating(xp, like=like)
    if not isinstance(n_keys, Iterable):
        raise type_error("n_keys", "be an iterable of integers", type(n_keys).__name__)
    lengths = list(n_keys)
    for n in lengths:
        check_count("n_keys", n, least=max(2, n_queries))

    def array(x: np.ndarray) -> Any:
        return xp.astype(xp.asarray(x.astype(np.float32), device=device), like.dtype, copy=False)

    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    unit = np.full(head_dim, head_dim**-0.5)
    # A logit of ±½ without a law: its weights are accurate for factors from 0.01 to 10.
    query = np.broadcast_to(unit * (0.5 / scale), (n_heads, n_queries, head_dim))
    found = []
    for n in lengths:
        is_first = (np.arange(n) % 2 == 0)[:, None]
        key, value = np.where(is_first, unit, -unit), np.zeros((n, head_dim))
        value[:, :2] = np.concatenate((is_first, ~is_first), axis=1)
        arrays = (
            np.stack((query, -query)),
            *(np.broadcast_to(x, (2, n_key_heads, *x.shape)) for x in (key, value)),
        )
        out = attend(*map(array, arrays))
        if not is_array(out):
            raise type_error("attend", "return an array", type(out).__name__)
        namespace(like=like, attend=out)
        if tuple(out.shape) != arrays[0].shape:
            raise value_error("attend", f"return an array {arrays[0].shape}", tuple(out.shape))
        weights = to_numpy(xp.astype(out, xp.float32, copy=False)).astype(np.float64)[:, :, -1, :2]
        log_ratio = np.log(weights[..., 0]) - np.log(weights[..., 1])
        found.append((log_ratio[0] - log_ratio[1]) / 2)
    # The two logits differ by 1.
    return np.stack(found) if found else np.zeros((0, n_heads))
