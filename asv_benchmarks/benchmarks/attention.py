"""Attention and its entropy on each backend: seconds, and ratios to PyTorch's own attention.

The ratios are timed in one process, in turn, and are what to compare between commits.
"""

import numpy as np

import isentropic as it

from .backends import NAMESPACES, namespace, ratio, synchronized


def arrays(backend, n, heads=8, head_dim=64):
    xp = namespace(backend)
    x = np.random.default_rng(0).normal(size=(3, heads, n, head_dim)).astype("float32")
    return [xp.asarray(part) for part in x]


CALLS = {
    "attention": it.attention,
    "attention-causal": lambda q, k, v: it.attention(q, k, v, is_causal=True),
    "attention_state": lambda q, k, v: it.attention_state(q, k, v),
    "attention_entropy": lambda q, k, v: it.attention_entropy(q, k),
}


class Attention:
    params = (list(NAMESPACES), list(CALLS), [16, 1024])
    param_names = ("backend", "call", "n")

    def setup(self, backend, call, n):
        self.arrays = arrays(backend, n)
        self.function = synchronized(backend, CALLS[call])
        self.function(*self.arrays)

    def time_call(self, backend, call, n):
        self.function(*self.arrays)

    def peakmem_call(self, backend, call, n):
        self.function(*self.arrays)


class AgainstTorch:
    """Median time as a multiple of `scaled_dot_product_attention` on PyTorch, on the CPU."""

    params = (["numpy", "torch", "jax"], list(CALLS), [1024])
    param_names = ("backend", "call", "n")
    unit = "ratio"

    def setup(self, backend, call, n):
        self.peer_arrays = arrays("torch", n)
        self.arrays = arrays(backend, n)
        self.function = synchronized(backend, CALLS[call])

    def track_ratio(self, backend, call, n):
        import torch

        peer = torch.nn.functional.scaled_dot_product_attention
        return ratio(lambda: self.function(*self.arrays), lambda: peer(*self.peer_arrays))


class Error:
    """Largest error of the float32 entropy against float64 with the weights formed."""

    params = (["numpy", "torch", "jax"], [1.0, 0.9, 2.0])
    param_names = ("backend", "order")
    unit = "nats"

    def track_entropy_error(self, backend, order):
        q, k, _ = arrays(backend, 512, heads=2)
        got = np.asarray(it.attention_entropy(q, k, order=order, law=None))
        s = np.asarray(q, np.float64) @ np.asarray(k, np.float64).swapaxes(-1, -2) / 8
        return float(np.abs(got - it.entropy_from_logits(s, order=order)).max())
