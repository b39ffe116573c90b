"""On a GPU: times relative to the kernel of each library, and to a copy; errors against float64.

`asv` runs these benchmarks, and `device.py` those of a GPU that is at hand for minutes only.
"""

import importlib.util
import math

import numpy as np

import isentropic as it

from .backends import GPU, REHEARSAL, arrays, gpu, gradient, length, namespace, ratio, synchronized

# Each call waits until the GPU has finished, so that nothing is left to pause for. In a pause the GPU
# would lower its clock.
ROUNDS = {"rounds": 10, "pause": 0}
# So many calls are queued before the GPU is waited for, as in a model: a GPU computes while Python
# prepares the next call.
CALLS = 1 if REHEARSAL else 8
# The interpreter of Triton has no products of bfloat16, and a CPU has none of half precision in JAX.
HALF = dict.fromkeys(GPU, "bfloat16")
if REHEARSAL:
    HALF = {"torch": "float16", "jax": "float32", "cupy": "float16"}
HEADS = 2 if REHEARSAL else 128


def peer(backend, is_causal):
    """The output by SDPA in PyTorch, by cuDNN in JAX, and by the plain expression in CuPy."""
    if backend == "torch":
        from torch.nn.functional import scaled_dot_product_attention

        def output(q, k, v):
            return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=is_causal)
    elif backend == "jax":
        import jax

        kernel = "xla" if REHEARSAL else "cudnn"

        def output(q, k, v):
            q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))
            return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation=kernel)
    elif is_causal:
        raise NotImplementedError("the plain expression has no mask")
    else:
        xp = namespace(backend)

        def output(q, k, v):
            s = q @ xp.matrix_transpose(k) / math.sqrt(q.shape[-1])
            p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
            return p / xp.sum(p, axis=-1, keepdims=True) @ v

    return output


def call(result, **options):
    """A function of q, k and v that returns an output, an entropy, or both."""

    def output(q, k, v):
        return it.attention(q, k, v, **options)

    def entropy(q, k, v):
        return it.attention_entropy(q, k, **options)

    def state(q, k, v):
        state = it.attention_state(q, k, v, **options)
        return state.output(), state.entropy()

    def divergence(q, k, v):
        p, other = (it.AttentionDistribution(q, x, **options) for x in (k, v))
        return p.kl_divergence(other)

    return {"output": output, "entropy": entropy, "state": state, "divergence": divergence}[result]


def drawn(backend, head_dim=128):
    """128 heads of n = 4096 in bfloat16; for CuPy 8 heads of float32."""
    dtype, heads = ("float32", min(8, HEADS)) if backend == "cupy" else (HALF[backend], HEADS)
    return arrays(backend, 4096, heads, head_dim, dtype=dtype, device=gpu(backend))


def has_launcher(backend):
    """Whether kernels can be launched: without a GPU, in the interpreter, only on PyTorch's tensors."""
    return not REHEARSAL or backend == "torch"


def require_kernels(backend):
    for package in ("triton", *(["jax_triton"] if backend == "jax" else [])):
        if importlib.util.find_spec(package) is None:
            raise NotImplementedError(f"{package} is not installed")
    if not has_launcher(backend):
        raise NotImplementedError("only PyTorch's tensors can be interpreted")


class Attention:
    """What a call without `implementation` takes, relative to the library's kernel for the output."""

    params = (GPU, ["output", "entropy", "state", "divergence"], [False, True])
    param_names = ("backend", "result", "is_causal")
    unit = "ratio"
    implementation = None

    def setup(self, backend, result, is_causal):
        self.arrays = drawn(backend)
        self.peer = peer(backend, is_causal)
        self.call = call(result, is_causal=is_causal, implementation=self.implementation)

    def track_forward(self, backend, result, is_causal):
        ours, theirs = (synchronized(backend, f, CALLS) for f in (self.call, self.peer))
        return ratio(lambda: ours(*self.arrays), lambda: theirs(*self.arrays), **ROUNDS)


class Gradient(Attention):
    """The same with gradients: forward and backward pass."""

    params = (["torch", "jax"], *Attention.params[1:])
    track_forward = None

    def track_gradient(self, backend, result, is_causal):
        # Entropies have no values.
        ours = gradient(backend, self.call, 2 if result == "entropy" else 3, CALLS)
        theirs = gradient(backend, self.peer, 3, CALLS)
        return ratio(lambda: ours(*self.arrays), lambda: theirs(*self.arrays), **ROUNDS)


class Generic(Gradient):
    """The entropy by the pass over tiles, which runs where no kernel does."""

    params = (["torch", "jax"], ["entropy"], [False, True])
    implementation = "generic"
    track_forward = Attention.track_forward


class Kernels(Gradient):
    """The kernels of this library, for heads of 64 and of 128 features."""

    params = (GPU, ["output", "state", "entropy"], [False, True], [64, 128])
    param_names = ("backend", "result", "is_causal", "head_dim")

    def setup(self, backend, result, is_causal, head_dim):
        require_kernels(backend)
        self.arrays = drawn(backend, head_dim)
        self.peer = peer(backend, is_causal)
        self.call = call(result, is_causal=is_causal, implementation="triton")

    def track_forward(self, backend, result, is_causal, head_dim):
        return Attention.track_forward(self, backend, result, is_causal)

    def track_gradient(self, backend, result, is_causal, head_dim):
        if backend == "cupy":
            raise NotImplementedError("CuPy has no gradients")
        return super().track_gradient(backend, result, is_causal)


class Errors:
    """Errors against float64: 3 heads of 128 features, n = 1111, causal.

    Errors of outputs and gradients are norms relative to the norm of the exact array. The error of an
    entropy is the largest, in nats. "ours" is the kernel of this package, and "peer" that of the
    library. For an entropy in PyTorch, "peer" is the pass over tiles.
    """

    params = (
        GPU,
        ["float32", "float16", "bfloat16"],
        ["output", "gradient", "entropy"],
        ["ours", "peer"],
    )
    param_names = ("backend", "dtype", "quantity", "who")
    unit = "error"

    def setup(self, backend, dtype, quantity, who):
        if backend == "cupy" and (dtype == "bfloat16" or quantity == "gradient" or who == "peer"):
            raise NotImplementedError("CuPy has no bfloat16, no gradients and no such kernel")
        if backend == "jax" and quantity == "entropy" and who == "peer":
            raise NotImplementedError("JAX has no other entropy")
        if REHEARSAL and dtype not in ("float32", HALF[backend]):
            raise NotImplementedError("a CPU has no such products")
        if backend == "jax" and dtype == "float32" and who == "peer" and not REHEARSAL:
            raise NotImplementedError("cuDNN computes in half precision only")
        if who == "ours" and has_launcher(backend):
            require_kernels(backend)
        self.arrays = arrays(backend, 1111, 3, 128, dtype=dtype, device=gpu(backend))

    def track_error(self, backend, dtype, quantity, who):
        import torch

        result = "entropy" if quantity == "entropy" else "output"
        kernel = "triton" if who == "ours" and has_launcher(backend) else "generic"
        function = call(result, is_causal=True, implementation=kernel, law=None)
        if who == "peer" and quantity != "entropy":
            function = peer(backend, is_causal=True)
        host = [torch.asarray(on_host(x), dtype=torch.float64) for x in self.arrays]
        exact = call(result, is_causal=True, implementation="generic", law=None)
        if quantity == "gradient":
            function, exact = gradient(backend, function), gradient("torch", exact)
        else:
            function, exact = synchronized(backend, function), synchronized("torch", exact)
        got, expected = function(*self.arrays), exact(*host)
        if quantity != "gradient":
            got, expected = (got,), (expected,)
        pairs = [
            (in_order(backend, quantity, who, on_host(x)), y.numpy())
            for x, y in zip(got, expected, strict=True)
        ]
        if quantity == "entropy":
            return float(max(np.abs(x - y).max() for x, y in pairs))
        return float(max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs))


def in_order(backend, quantity, who, x):
    """The array with the axes (heads, n, features), of which the output of a peer has others."""
    if who == "peer" and quantity == "output":
        return x[0].swapaxes(0, 1) if backend == "jax" else x[0]
    return x


def on_host(x):
    """The array in NumPy and float64."""
    if hasattr(x, "detach"):
        x = x.detach().double().cpu().numpy()
    elif hasattr(x, "get"):
        x = x.get()
    return np.asarray(x, dtype="float64")


class Copies:
    """Maps of 2²⁶ numbers of float32, relative to a copy on the device."""

    params = (GPU, ["hadamard", "rotation", "fast_jl"], [2**8, 2**12, 11008, 2**16])
    param_names = ("backend", "map", "n")
    unit = "ratio"

    def setup(self, backend, name, n):
        if name == "hadamard" and n & (n - 1):
            raise NotImplementedError("the transform needs a power of 2")
        n = n // 16 if REHEARSAL else n
        device, xp = gpu(backend), namespace(backend)
        rows = max(1, length(2**26) // n)
        self.x = xp.ones((rows, n), dtype=xp.float32, device=device)
        maps = {
            "hadamard": lambda: it.jl.hadamard_transform,
            "rotation": lambda: it.jl.rotation(n, rng=1, like=self.x),
            "fast_jl": lambda: it.jl.hadamard_projection(n, n // 4, rng=1, like=self.x),
        }
        f = maps[name]()
        # In a function, as JAX cannot compile a map itself, which has no weak references.
        self.map = synchronized(backend, lambda x: f(x), CALLS)

    def track_copies(self, backend, name, n):
        xp = namespace(backend)
        copy = synchronized(backend, lambda x: xp.asarray(x, copy=True), CALLS)
        return ratio(lambda: self.map(self.x), lambda: copy(self.x), **ROUNDS)
