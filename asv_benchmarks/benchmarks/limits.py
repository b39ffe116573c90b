"""The operations that a pass over tiles is made of, alone: what NumPy, its BLAS and XLA allow at best.

The rest of the time of the pass is what better code could gain.
"""

import numpy as np

import isentropic as it
from isentropic._attention.numpy_ops import has_fast_exponential, maxima_of_weights
from isentropic._loops import BLOCKS
from isentropic._threads import n_threads, run

from .attention import CALLS, _heads_last, torch_sdpa
from .backends import arrays, gradient, length, ratio
from .projections import matrix

N, HEADS, WIDTH = length(4096), 8, 64


class Limits:
    """Time of the operations alone, and of the call, relative to the same peer."""

    params = (
        ["operations alone", "whole call"],
        [
            "attention, NumPy",
            "causal, NumPy",
            "output and entropy, NumPy",
            "attention with gradients, JAX",
            "Hadamard transform, NumPy",
        ],
    )
    param_names = ("part", "call")
    unit = "ratio"
    timeout = 600

    def track_ratio(self, part, call):
        name, _, library = call.rpartition(", ")
        if library == "JAX":
            operations, whole, peer = _jax_gradient()
        elif name == "Hadamard transform":
            operations, whole, peer = _hadamard()
        else:
            operations, whole, peer = _numpy_attention(name)
        return ratio(operations if part == "operations alone" else whole, peer)


def _numpy_attention(name):
    """For each tile of 512 keys: two products, an exponential, and a sum.

    A state takes two sums and a maximum. A tile has as many queries as in the pass, without those that
    see none of its keys.
    """
    own, others = arrays("numpy", N), arrays("torch", N)
    sdpa = torch_sdpa(name, N)
    q, k, v = own
    exp = np.exp2 if has_fast_exponential() else np.exp
    most_rows = BLOCKS.numpy_large_rows if has_fast_exponential() else BLOCKS.numpy_rows
    n_rows, n_columns = min(most_rows, N), min(BLOCKS.numpy_columns, N)

    def compute(item):
        head, first = item
        query, ones = q[head, first : first + n_rows] / 8, np.ones(n_columns, "float32")
        logits, sums, values = (np.empty((n_rows, n), "float32") for n in (n_columns, 1, WIDTH))
        weights = np.empty_like(logits) if name == "output and entropy" else logits
        for start in range(0, first + n_rows if name == "causal" else N, n_columns):
            rows = slice(max(start - first, 0) if name == "causal" else 0, n_rows)
            s, p = logits[rows], weights[rows]
            np.matmul(query[rows], k[head, start : start + n_columns].T, out=s)
            exp(s, out=p)
            np.matmul(p, ones, out=sums[rows, 0])
            if name == "output and entropy":
                np.vecdot(p, s, out=sums[rows, 0])
                maxima_of_weights(p)
            np.matmul(p, v[head, start : start + n_columns], out=values[rows])

    blocks = [(head, first) for head in range(HEADS) for first in range(0, N, n_rows)]
    return lambda: run(compute, blocks), lambda: CALLS[name](*own), lambda: sdpa(*others)


def _jax_gradient():
    """For each tile of 1024 × 1024 logits: seven products and two exponentials."""
    import jax

    q, k, v = own = arrays("jax", N)
    others, size = _heads_last(own), min(1024, N)
    query, key, value = q[0, :size], k[0, :size].T, v[0, :size]
    product, exp = jax.jit(lambda a, b: a @ b), jax.jit(lambda x: jax.numpy.exp(x))

    def operations():
        for _ in range(HEADS * (N // size) ** 2):
            logits = product(query, key)
            weights = exp(logits)
            results = [product(query, key), product(query, key), exp(logits)]
            results += [product(weights, value) for _ in range(4)]
            jax.block_until_ready(results)

    ours, theirs = gradient("jax", it.attention), gradient("jax", jax.nn.dot_product_attention)
    return operations, lambda: ours(*own), lambda: theirs(*others)


def _hadamard():
    """For each 1 MB: three products of a factor of order 16 and 1024 columns, in a block per thread."""
    x = matrix("numpy", 4096)
    factor, threads = np.ones((16, 16), "float32"), range(n_threads())

    def compute(_):
        block, result = (np.ones((16, 16, 1024), "float32") for _ in range(2))
        for _ in range(3 * x.size // block.size // len(threads)):
            np.matmul(factor, block, out=result)

    return lambda: run(compute, threads), lambda: it.jl.hadamard_transform(x), x.copy
