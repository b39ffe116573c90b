"""On a GPU: times relative to the kernel of each library, and to a copy. Skipped without a GPU."""

import isentropic as it

from .backends import GPU, arrays, gpu, gradient, namespace, ratio, synchronized

# Each call waits until the GPU has finished, so that nothing is left to pause for. In a pause the GPU
# would lower its clock.
ROUNDS = {"rounds": 20, "pause": 0}


class Attention:
    """128 heads of size 128, n = 4096, bfloat16, against SDPA and cuDNN; for CuPy float32 and naive."""

    params = (GPU, [False, True])
    param_names = ("backend", "is_causal")
    unit = "ratio"

    def setup(self, backend, is_causal):
        dtype = "float32" if backend == "cupy" else "bfloat16"
        heads = 8 if backend == "cupy" else 128
        self.arrays = arrays(backend, 4096, heads, 128, dtype=dtype, device=gpu(backend))
        if backend == "cupy" and is_causal:
            raise NotImplementedError("the naive expression has no mask")

    def calls(self, backend, is_causal):
        if backend == "torch":
            from torch.nn.functional import scaled_dot_product_attention

            def peer(q, k, v):
                return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=is_causal)
        elif backend == "jax":
            import jax

            def peer(q, k, v):
                q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))
                return jax.nn.dot_product_attention(
                    q, k, v, is_causal=is_causal, implementation="cudnn"
                )
        else:
            xp = namespace(backend)

            def peer(q, k, v):
                s = q @ xp.matrix_transpose(k) / 128**0.5
                p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
                return p / xp.sum(p, axis=-1, keepdims=True) @ v

        return lambda q, k, v: it.attention(q, k, v, is_causal=is_causal), peer

    def track_forward(self, backend, is_causal):
        ours, theirs = (synchronized(backend, f) for f in self.calls(backend, is_causal))
        return ratio(lambda: ours(*self.arrays), lambda: theirs(*self.arrays), **ROUNDS)

    def track_entropy(self, backend, is_causal):
        entropy = synchronized(backend, lambda q, k, v: it.attention_entropy(q, k, is_causal=is_causal))
        theirs = synchronized(backend, self.calls(backend, is_causal)[1])
        return ratio(lambda: entropy(*self.arrays), lambda: theirs(*self.arrays), **ROUNDS)


class Gradient(Attention):
    """Forward and backward."""

    params = (["torch", "jax"], [False, True])
    track_forward = track_entropy = None

    def track_gradient(self, backend, is_causal):
        ours, theirs = (gradient(backend, f) for f in self.calls(backend, is_causal))
        return ratio(lambda: ours(*self.arrays), lambda: theirs(*self.arrays), **ROUNDS)


class Kernels:
    """The kernels of Triton and Pallas, relative to the library's, which computes the output alone."""

    params = (["torch", "jax"], ["output", "state", "entropy"], [False, True])
    param_names = ("backend", "result", "is_causal")
    unit = "ratio"

    def setup(self, backend, result, is_causal):
        self.arrays = arrays(backend, 4096, 128, 128, dtype="bfloat16", device=gpu(backend))

    def calls(self, backend, result, is_causal):
        options = {
            "is_causal": is_causal,
            "implementation": {"torch": "triton", "jax": "pallas"}[backend],
        }

        def ours(q, k, v):
            if result == "output":
                return it.attention(q, k, v, **options)
            if result == "entropy":
                return it.attention_entropy(q, k, **options)
            state = it.attention_state(q, k, v, **options)
            return state.output(), state.entropy()

        return ours, Attention().calls(backend, is_causal)[1]

    def track_forward(self, backend, result, is_causal):
        ours, theirs = (synchronized(backend, f) for f in self.calls(backend, result, is_causal))
        return ratio(lambda: ours(*self.arrays), lambda: theirs(*self.arrays), **ROUNDS)

    def track_gradient(self, backend, result, is_causal):
        ours, theirs = self.calls(backend, result, is_causal)
        ours = gradient(backend, ours, 2 if result == "entropy" else 3)  # entropies have no values
        theirs = gradient(backend, theirs)
        return ratio(lambda: ours(*self.arrays), lambda: theirs(*self.arrays), **ROUNDS)


class Hadamard:
    """Time relative to a copy on the device."""

    params = (GPU, [2**8, 2**12, 2**16])
    param_names = ("backend", "n")
    unit = "ratio"

    def setup(self, backend, n):
        self.device = gpu(backend)

    def track_copies(self, backend, n):
        xp = namespace(backend)
        x = xp.ones((2**26 // n, n), dtype=xp.float32, device=self.device)
        transform = synchronized(backend, it.jl.hadamard_transform)
        copy = synchronized(backend, lambda x: xp.asarray(x, copy=True))
        return ratio(lambda: transform(x), lambda: copy(x), **ROUNDS)
