"""Attention over a mesh of JAX devices, and for Flax modules (the extra ``jax``)."""

from __future__ import annotations

import contextlib
from typing import Any

from isentropic._attention.distribution import AttentionDistribution
from isentropic._attention.functions import attention, attention_entropy
from isentropic._checks import check_choice, check_ndim, requires_extra, value_error
from isentropic._namespace import Array, ArrayT
from isentropic.integrations._sharded import ring_attention_state
from isentropic.laws._law import DEFAULT_LAW, Law
from isentropic.masks import Mask

with requires_extra(__name__):
    import jax
    import jax.numpy as jnp

__all__ = ["attention_fn", "ring_attention_state"]


def attention_fn(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    *,
    force_fp32_for_softmax: bool = True,
    einsum_dot_general: None = None,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
    law: Law | None = DEFAULT_LAW,
    n_keys: int | Array | None = None,
    sow: str = "weights",
) -> ArrayT:
    """An `attention_fn` for Flax modules, whose scale follows a law of the number of visible keys.

    With ``law=None`` it is equivalent to ``flax.nnx.dot_product_attention``, and to that of
    ``flax.linen``. For another law, use ``functools.partial(attention_fn, law=...)``.

    Parameters
    ----------
    query : array (..., L, H, E)
    key : array (..., S, G, E)
    value : array (..., S, G, Ev)
        Queries have H heads. Keys and values have G heads, and G divides H.
    bias : array, optional
        Added to the logits; broadcastable to (..., H, L, S).
    mask : array or Mask, optional
        An array broadcastable to (..., H, L, S) that is 0 or False where a key is hidden. Or a mask of
        `isentropic.masks`, which is never expanded to an L×S array.
    broadcast_dropout, dropout_rng
        Ignored, because dropout is not supported.
    dropout_rate : float
        Must be 0 unless `deterministic` is true. Dropout would need the attention weights, which are
        never materialized.
    deterministic : bool
        Whether dropout is off.
    dtype : dtype, optional
        The dtype to which query, key and value are converted.
    precision : str or jax.lax.Precision, optional
        The precision of matrix products, as in ``jax.default_matmul_precision``. By default it is that
        setting if there is one, and else "highest", the full precision of the dtype. (Flax takes JAX's
        own default, which is TF32 for float32 on many GPUs.)
    module : flax.nnx.Module or flax.linen.Module, optional
        A module in which to sow what `sow` names. Flax passes it if its module is called with
        ``sow_weights=True``.
    is_causal : bool
        Whether to apply ``masks.causal()`` too, aligned bottom-right: the last query sees every key.
        Flax aligns its causal mask top-left, which is the same for L = S.
    force_fp32_for_softmax
        Ignored, because the softmax is computed in float32 or better, whatever the dtype.
    einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum
        Must be None. They replace products of `flax.linen` with the attention weights, which are never
        formed.
    law : Law or None, default ``LogLength(512)``
        The factor on the scale as a function of n, the number of keys that each query sees; None for
        standard attention.
    n_keys : int or array, optional
        The n of the law, broadcastable to (..., H, L), if it is not the number of keys that a query
        sees, for example in rules that count positions. `n_keys` does not hide keys.
    sow : {"weights", "entropy"}
        What is sown in `module`, as an intermediate: the weights (..., H, L, S) as "attention_weights",
        which only then are formed, or their entropies (..., H, L) as "attention_entropy". Entropies do
        not take part in gradients.

    Returns
    -------
    array (..., L, H, Ev)

    Raises
    ------
    TypeError, ValueError
        As in `isentropic.attention`; also if dropout is active, or an einsum is given.

    Notes
    -----
    Flax masks empty slots of a cache, so they are not counted, and decoding equals prefill. The output
    for a query that sees no key is 0; Flax returns the mean of the values.

    To train the parameters of a law, put them into a module that is the `attention_fn`, as in the
    second example. Arrays in a ``functools.partial`` are constants.

    References
    ----------
    Su 2021, https://spaces.ac.cn/archives/8823.

    Examples
    --------
    >>> from functools import partial
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from isentropic import laws
    >>> from isentropic.integrations.jax import attention_fn
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0),
    ...     attention_fn=partial(attention_fn, law=laws.LogLength(128)),
    ... )
    >>> layer(jnp.ones((2, 10, 32)), is_causal=True).shape
    (2, 10, 32)

    One trainable slope per head:

    >>> class Attend(nnx.Module):
    ...     def __init__(self, num_heads):
    ...         self.slope = nnx.Param(jnp.full(num_heads, 0.16))
    ...
    ...     def __call__(self, *args, **kwargs):
    ...         return attention_fn(*args, law=laws.AffineLog(self.slope[...]), **kwargs)
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0), attention_fn=Attend(4)
    ... )
    >>> nnx.state(layer, nnx.Param)["attention_fn"]["slope"].shape
    (4,)

    The entropies of a layer, to be logged during training:

    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0),
    ...     attention_fn=partial(attention_fn, sow="entropy"),
    ... )
    >>> out, sown = nnx.capture(layer, nnx.Intermediate)(jnp.ones((2, 10, 32)), sow_weights=True)
    >>> sown["attention_entropy"][0].shape
    (2, 4, 10)
    """
    check_choice("sow", sow, ("weights", "entropy"))
    if not deterministic and dropout_rate > 0:
        must = (
            "be 0, or `deterministic` true: weights are never materialized, so they cannot be dropped"
        )
        raise value_error("dropout_rate", must, dropout_rate)
    products = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, product in products.items():
        if product is not None:
            must = "be None: weights are never materialized, so other products cannot form them"
            raise value_error(name, must, product)
    check_ndim(3, query=query, key=key, value=value)
    if mask is not None and not isinstance(mask, Mask):
        mask = jnp.asarray(mask) != 0
    # From Flax's (..., length, heads, features) to (..., heads, length, features).
    q, k, v = (jnp.swapaxes(jnp.asarray(x, dtype), -2, -3) for x in (query, key, value))
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "is_causal": is_causal, "law": law, "n_keys": n_keys,
        "enable_gqa": True,
    }  # fmt: skip

    with _matmul_precision(precision):
        if module is not None:
            from flax import nnx

            # The two kinds of Flax modules name their collections in different ways.
            collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
            if sow == "weights":
                weights = AttentionDistribution(q, k, **options).weights()
                module.sow(collection, "attention_weights", weights)
            else:
                fixed = jax.lax.stop_gradient((q, k))
                module.sow(collection, "attention_entropy", attention_entropy(*fixed, **options))
        return jnp.swapaxes(attention(q, k, v, **options), -2, -3)


def _matmul_precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    if isinstance(precision, (tuple, list)):  # of the two factors of a product
        if len(set(precision)) > 1:
            raise value_error("precision", "be the same for both factors", precision)
        precision = precision[0]
    if precision is None:
        return contextlib.nullcontext()
    # The names of `jax.lax.Precision` are in capitals, and those of the setting are not.
    name = getattr(precision, "name", precision)
    return jax.default_matmul_precision(
        name.lower() if isinstance(precision, jax.lax.Precision) else name
    )
