"""What the library must compute, in plain float64 NumPy that forms everything.

None of it imports the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Attention:
    logits: np.ndarray  # −∞ where hidden; a sink is the last one
    weights: np.ndarray
    output: np.ndarray | None

    @property
    def log_normalizer(self):
        return logsumexp(self.logits)

    def entropy(self, order=1.0):
        return entropy(self.weights, order)

    @property
    def mean(self):
        return (self.weights * np.where(self.weights > 0, self.logits, 0.0)).sum(axis=-1)

    @property
    def variance(self):
        distance = np.where(self.weights > 0, self.logits - self.mean[..., None], 0.0)
        return (self.weights * distance**2).sum(axis=-1)


def attention(
    query,
    key,
    value=None,
    *,
    visible=None,
    bias=None,
    scale=None,
    factor=None,
    softcap=None,
    sinks=None,
):
    """Attention by its definition: a dense mask `visible`, a `factor` on each query's scale."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    if query.ndim > 2 and key.ndim > 2 and query.shape[-3] > key.shape[-3] > 1:
        repeats = query.shape[-3] // key.shape[-3]
        key = np.repeat(key, repeats, axis=-3)
        value = None if value is None else np.repeat(value, repeats, axis=-3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    factor = 1.0 if factor is None else np.asarray(factor)[..., None]
    s = np.einsum("...le,...se->...ls", query, key) * scale * factor
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    if sinks is not None:
        sinks = np.broadcast_to(np.asarray(sinks, np.float64)[..., None, None], (*s.shape[:-1], 1))
        s = np.concatenate((s, sinks), axis=-1)
    p = softmax(s)
    of_keys = p[..., : key.shape[-2]]
    return Attention(s, p, None if value is None else of_keys @ np.asarray(value, np.float64))


def softmax(s):
    with np.errstate(invalid="ignore"):
        e = np.exp(s - s.max(axis=-1, keepdims=True, initial=-np.inf))
        p = e / e.sum(axis=-1, keepdims=True)
    return np.where(np.isneginf(s).all(axis=-1, keepdims=True), 0.0, p)


def logsumexp(s):
    m = s.max(axis=-1)
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(m), -np.inf, m + np.log(np.exp(s - m[..., None]).sum(axis=-1)))


def entropy(p, order=1.0, family="renyi"):
    """Entropy by its definition, in nats; 0 for an empty distribution."""
    p = np.asarray(p, np.float64)
    empty = (p == 0).all(axis=-1)
    positive = np.where(p > 0, p, 1.0)
    if order == 1:
        h = -(np.where(p > 0, p, 0.0) * np.log(positive)).sum(axis=-1)
    elif np.isinf(order):
        h = (
            np.zeros_like(empty, float)
            if family == "tsallis"
            else -np.log(np.where(empty, 1, p.max(-1, initial=0)))
        )
    else:
        power = np.where(p > 0, positive**order, 0.0).sum(axis=-1)
        power = np.where(empty, 1.0, power)
        h = (1 - power) / (order - 1) if family == "tsallis" else np.log(power) / (1 - order)
    return np.where(empty, 0.0, h)


def causal(n_queries, n_keys, offset=None):
    offset = n_keys - n_queries if offset is None else offset
    return np.arange(n_keys) <= np.arange(n_queries)[:, None] + offset


def band(n_queries, n_keys, left, right):
    position = np.arange(n_queries)[:, None] + n_keys - n_queries
    keys = np.arange(n_keys)
    return (keys >= position - left) & (keys <= position + right)


def packed(starts, key_starts=None, left=np.inf, right=np.inf):
    """Sequences side by side, each with a band of its own."""
    key_starts = starts if key_starts is None else key_starts
    visible = np.zeros((starts[-1], key_starts[-1]), bool)
    for i in range(len(starts) - 1):
        (a, b), (c, d) = starts[i : i + 2], key_starts[i : i + 2]
        visible[a:b, c:d] = band(b - a, d - c, left, right)
    return visible


def log_length(n, base=512):
    return np.log(np.maximum(n, 1)) / np.log(base)


def rotary(x, positions, base=10000.0, interleaved=False):
    """Rotation as multiplication by complex numbers."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    angle = np.asarray(positions, np.float64)[..., None] * base ** (-2 * np.arange(half) / x.shape[-1])
    pairs = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    z = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angle)
    if interleaved:
        return np.stack((z.real, z.imag), axis=-1).reshape(x.shape)
    return np.concatenate((z.real, z.imag), axis=-1)
