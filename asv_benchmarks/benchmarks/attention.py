"""Attention, its state and entropies: seconds, memory, and ratios to other implementations.

For a ratio both functions are timed alternately in one process. Compare commits by ratios, not seconds.
"""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np

import isentropic as it
from isentropic import masks

from .backends import CPU, NAMESPACES, arrays, gradient, length, namespace, ratio, synchronized

CALLS = {
    "attention": it.attention,
    "causal": lambda q, k, v: it.attention(q, k, v, is_causal=True),
    "window": lambda q, k, v: it.attention(q, k, v, mask=masks.window(512)),
    "output and entropy": lambda q, k, v: _output_and_entropy(q, k, v),
    "entropy": lambda q, k, v: it.attention_entropy(q, k),
    "state": it.attention_state,
    "entropy of order 2": lambda q, k, v: it.attention_entropy(q, k, order=2),
    "factor for 5 nats": lambda q, k, v: (
        it.AttentionDistribution(q, k, law=None).factor_for_entropy(5.0)
    ),
}  # fmt: skip

# Calls that PyTorch's kernel does not have, or has with an L×S array. The bias is one number per key.
# With a scale of 2 the logits of a row are up to 150 nats apart.
FURTHER = {
    "bias": lambda q, k, v: it.attention(q, k, v, bias=_bias(k)),
    "soft cap": lambda q, k, v: it.attention(q, k, v, softcap=30.0),
    "output and entropy, window": lambda q, k, v: _output_and_entropy(q, k, v, mask=masks.window(512)),
    "output and entropy, bias": lambda q, k, v: _output_and_entropy(q, k, v, bias=_bias(k)),
    "output and entropy, soft cap": lambda q, k, v: _output_and_entropy(q, k, v, softcap=30.0),
    "output and entropy, scale of 2": lambda q, k, v: _output_and_entropy(q, k, v, scale=2.0),
    "entropy of order 1/2": lambda q, k, v: it.attention_entropy(q, k, order=0.5),
    "entropy of order ∞": lambda q, k, v: it.attention_entropy(q, k, order=math.inf),
    "KL divergence from other keys": lambda q, k, v: _divergence(q, k, v),
    "KL divergence from other keys, causal": lambda q, k, v: _divergence(q, k, v, is_causal=True),
}  # fmt: skip


def _output_and_entropy(q, k, v, **options):
    state = it.attention_state(q, k, v, **options)
    return state.output(), state.entropy()


def _divergence(q, k, v, **options):
    p, other = (it.AttentionDistribution(q, x, **options) for x in (k, v))
    return p.kl_divergence(other)


def _bias(k):
    return k[..., None, :, 0]


class Attention:
    """Seconds for 8 heads of size 64 in float32."""

    params = (list(NAMESPACES), list(CALLS), [16, 2048])
    param_names = ("backend", "call", "n")

    def setup(self, backend, call, n):
        self.arrays = arrays(backend, n)
        self.function = synchronized(backend, CALLS[call])
        self.function(*self.arrays)

    def time_call(self, backend, call, n):
        self.function(*self.arrays)


class Memory:
    """Peak memory of the process, proportional to n. L×S logits would be 0.5 GB and 8.6 GB."""

    params = (list(NAMESPACES), ["attention", "output and entropy", "gradient"], [4096, 16384])
    param_names = ("backend", "call", "n")
    timeout = 300

    def setup(self, backend, call, n):
        if call == "gradient" and backend in ("numpy", "cupy"):
            raise NotImplementedError("no gradients")
        if call == "gradient" and n > 4096:
            raise NotImplementedError("takes long")
        self.arrays = arrays(backend, n)
        if call == "gradient":
            self.function = gradient(backend, CALLS["output and entropy"])
        else:
            self.function = synchronized(backend, CALLS[call])

    def peakmem_call(self, backend, call, n):
        self.function(*self.arrays)


def torch_sdpa(call, n):
    """PyTorch's kernel for the output, with the mask of a call as an array."""
    import torch

    mask = {"is_causal": call == "causal"}
    if call == "window":
        ones = torch.ones(n, n, dtype=torch.bool)
        mask = {"attn_mask": ones.tril() & ones.triu(-512)}

    def function(q, k, v):
        q, k, v = (x[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **mask)

    return function


class AgainstTorch:
    """Time relative to PyTorch's `scaled_dot_product_attention` with the same mask."""

    params = (CPU, list(CALLS), [4096])
    param_names = ("backend", "call", "n")
    unit = "ratio"
    timeout = 300

    def track_ratio(self, backend, call, n):
        own = arrays(backend, n)
        function = synchronized(backend, CALLS[call])
        peer, others = torch_sdpa(call, length(n)), arrays("torch", n)
        return ratio(lambda: function(*own), lambda: peer(*others))


class FurtherAgainstTorch:
    """Time relative to PyTorch's `scaled_dot_product_attention` without a mask, at n = 4096."""

    params = (CPU, list(FURTHER))
    param_names = ("backend", "call")
    unit = "ratio"
    timeout = 300

    def track_ratio(self, backend, call):
        own, others = arrays(backend, 4096), arrays("torch", 4096)
        function, peer = synchronized(backend, FURTHER[call]), torch_sdpa(call, length(4096))
        return ratio(lambda: function(*own), lambda: peer(*others))


class HalfPrecision:
    """PyTorch in bfloat16, relative to its `scaled_dot_product_attention` with the same mask."""

    params = (["attention", "causal", "output and entropy", "entropy"], [1, 4096])
    param_names = ("call", "queries")
    unit = "ratio"
    timeout = 300

    def setup(self, call, queries):
        if call == "causal" and queries == 1:
            raise NotImplementedError("the last query sees all keys")

    def track_ratio(self, call, queries):
        q, k, v = arrays("torch", 4096, dtype="bfloat16")
        q, peer = q[:, -queries:], torch_sdpa(call, length(4096))
        return ratio(lambda: CALLS[call](q, k, v), lambda: peer(q, k, v))


class ManyKeys:
    """64 queries and a million keys, one head, relative to PyTorch's kernel."""

    params = (CPU, ["attention", "output and entropy", "entropy"])
    param_names = ("backend", "call")
    unit = "ratio"
    timeout = 300

    def track_ratio(self, backend, call):
        own, others = (self.arrays(library) for library in (backend, "torch"))
        function, peer = synchronized(backend, CALLS[call]), torch_sdpa(call, length(64))
        return ratio(lambda: function(*own), lambda: peer(*others))

    def arrays(self, library):
        q, k, v = arrays(library, 10**6, heads=1)
        return q[:, :64], k, v


class Callers:
    """Entropies in 16 threads of the caller, with as many threads of the BLAS as there are cores.

    The time is relative to that with one thread of the BLAS.
    """

    params = ([384, 1024],)
    param_names = ("n",)
    unit = "ratio"

    def track_ratio(self, n):
        from concurrent.futures import ThreadPoolExecutor

        from threadpoolctl import threadpool_limits

        q, k, _ = arrays("numpy", n)
        with ThreadPoolExecutor(16) as pool:

            def run():
                list(pool.map(lambda _: it.attention_entropy(q, k), range(16)))

            def run_with_one_thread():
                with threadpool_limits(1, user_api="blas"):
                    run()

            return ratio(run, run_with_one_thread)


class AgainstOwnLibrary:
    """Time relative to the usual expression or function of the same library, at n = 4096."""

    unit = "ratio"
    timeout = 300

    def track_numpy_naive(self):
        q, k, v = arrays("numpy", 4096)
        return ratio(lambda: it.attention(q, k, v), lambda: _naive(q, k, v))

    def track_torch_entropy_of_weights(self):
        import torch

        q, k, _ = arrays("torch", 4096)

        def of_weights():
            p = torch.softmax(q @ k.mT / 8, -1)
            return torch.special.entr(p).sum(-1)

        return ratio(lambda: it.attention_entropy(q, k), of_weights)

    def track_jax(self):
        import jax

        own = arrays("jax", 4096)
        others = _heads_last(own)
        ours = synchronized("jax", it.attention)
        theirs = synchronized("jax", jax.nn.dot_product_attention)
        return ratio(lambda: ours(*own), lambda: theirs(*others))


class Gradients:
    """Forward and backward at n = 4096, relative to SDPA or `jax.nn` with the same mask."""

    params = (["torch", "jax"], ["attention", "causal", "output and entropy"])
    param_names = ("backend", "call")
    unit = "ratio"
    timeout = 600

    def track_ratio(self, backend, call):
        own = arrays(backend, 4096)
        ours = gradient(backend, CALLS[call])
        if backend == "torch":
            theirs, others = gradient("torch", torch_sdpa(call, length(4096))), own
        else:
            import jax

            def peer(q, k, v):
                return jax.nn.dot_product_attention(q, k, v, is_causal=call == "causal")

            theirs, others = gradient("jax", peer), _heads_last(own)
        return ratio(lambda: ours(*own), lambda: theirs(*others))


class FurtherGradients:
    """Forward and backward at n = 4096, relative to SDPA or `jax.nn` without a mask."""

    params = (["torch", "jax"], [call for call in FURTHER if "order" not in call])
    param_names = ("backend", "call")
    unit = "ratio"
    timeout = 600

    def track_ratio(self, backend, call):
        own = arrays(backend, 4096)
        ours = gradient(backend, FURTHER[call])
        if backend == "torch":
            theirs, others = gradient("torch", torch_sdpa(call, length(4096))), own
        else:
            import jax

            theirs, others = gradient("jax", jax.nn.dot_product_attention), _heads_last(own)
        return ratio(lambda: ours(*own), lambda: theirs(*others))


class CompiledMemory:
    """Growth of the peak memory by output, entropy and gradient under `torch.compile`.

    2 heads at n = 8192, whose logits are 537 MB.
    """

    params = (["aot_eager", "inductor"],)
    param_names = ("compiler",)
    unit = "bytes"
    timeout = 600

    def track_growth(self, compiler):
        program = f"""
import resource, torch, isentropic as it

@torch.compile(fullgraph=True, backend={compiler!r})
def loss(q, k, v):
    state = it.attention_state(q, k, v, is_causal=True)
    return (state.output() ** 2).sum() + state.entropy().sum()

def run(n):
    q, k, v = (torch.randn(2, n, 64, requires_grad=True) for _ in range(3))
    loss(q, k, v).backward()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

run({length(256)}); run({length(512)})
before = peak()
run({length(8192)})
print(peak() - before)
"""
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return float(result.stdout.split()[-1])


class SmallCalls:
    """4 heads at n = 16, relative to the naive expression or to SDPA, with the same mask."""

    params = (["numpy", "torch"], ["attention", "causal", "entropy", "state"])
    param_names = ("backend", "call")
    unit = "ratio"

    def track_ratio(self, backend, call):
        own = arrays(backend, 16, heads=4)
        if backend == "torch":
            peer = torch_sdpa(call, 16)
        else:
            peer = _naive_causal if call == "causal" else _naive
        return ratio(lambda: CALLS[call](*own), lambda: peer(*own), rounds=1000, pause=0)


class Hops:
    """How hard a small call is to follow: calls in the package, files, and switches between files."""

    params = (["numpy", "torch"], ["attention", "causal", "entropy", "state"])
    param_names = ("backend", "call")

    def setup(self, backend, call):
        own = arrays(backend, 16, heads=4)
        for _ in range(2):  # caches are filled
            CALLS[call](*own)
        folder, self.files = str(Path(it.__file__).parent), []

        def note(frame, event, argument):
            name = frame.f_code.co_filename
            if event == "call" and name.startswith(folder):
                self.files.append(name)

        sys.setprofile(note)
        try:
            CALLS[call](*own)
        finally:
            sys.setprofile(None)

    def track_calls(self, backend, call):
        return len(self.files)

    def track_files(self, backend, call):
        return len(set(self.files))

    def track_switches(self, backend, call):
        return sum(a != b for a, b in itertools.pairwise(self.files))


class Imports:
    """Milliseconds that importing isentropic adds to array_api_compat."""

    unit = "ms"

    def track_import(self):
        program = (
            "import array_api_compat, time; start = time.perf_counter(); import isentropic; "
            "print((time.perf_counter() - start) * 1000)"
        )
        runs = [subprocess.run([sys.executable, "-c", program], capture_output=True) for _ in range(5)]
        return float(np.median([float(run.stdout) for run in runs]))


class Error:
    """Largest differences between float32 and float64 with all weights formed, n = 1024."""

    params = (CPU, ["generic", None])
    param_names = ("backend", "implementation")

    def setup(self, backend, implementation):
        self.q, self.k, self.v = arrays(backend, 1024, heads=2)
        q, k = (np.asarray(x, np.float64) for x in (self.q, self.k))
        self.logits = q @ k.swapaxes(-1, -2) / 8

    def track_entropy_error(self, backend, implementation):
        got = it.attention_entropy(self.q, self.k, law=None, implementation=implementation)
        return float(np.abs(np.asarray(got) - it.entropy_from_logits(self.logits)).max())

    track_entropy_error.unit = "nats"

    def track_output_error(self, backend, implementation):
        got = it.attention(self.q, self.k, self.v, law=None, implementation=implementation)
        p = np.exp(self.logits - self.logits.max(-1, keepdims=True))
        expected = p / p.sum(-1, keepdims=True) @ np.asarray(self.v, np.float64)
        return float(np.abs(np.asarray(got) - expected).max())

    track_output_error.unit = "absolute"


class Graphs:
    """How many graphs ten lengths need under `torch.compile`."""

    params = (("attention", "causal", "entropy"), (None, True))
    param_names = ("call", "dynamic")
    unit = "graphs"
    timeout = 600

    def track_graphs(self, call, dynamic):
        import torch
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(CALLS[call], backend=counter, fullgraph=True, dynamic=dynamic)
        for n in range(100, 1100, 100):
            compiled(*(torch.zeros(2, length(n) + n // 100, 16) for _ in range(3)))
        return counter.frame_count


class Compilation:
    """Twelve calls in one function under `torch.compile`, 4 heads at n = 16."""

    params = (("attention", "causal", "entropy", "output and entropy"),)
    param_names = ("call",)
    timeout = 600
    number = 1

    def setup(self, call):
        self.own = arrays("torch", 16, heads=4)

    def time_tracing(self, call):
        """The time to make the graph, without generating code."""
        import torch

        torch._dynamo.reset()
        torch.compile(_twelve(CALLS[call]), backend="eager", fullgraph=True)(*self.own)

    def track_call(self, call):
        """Time of a call of the compiled function, relative to one with PyTorch's kernel."""
        import torch

        torch._dynamo.reset()
        kernel = torch_sdpa(call, 16)
        ours = torch.compile(_twelve(CALLS[call]), fullgraph=True)
        # Functions with the same code would share a list of graphs, which a call searches.
        theirs = torch.compile(lambda *own: [kernel(*own) for _ in range(12)], fullgraph=True)
        return ratio(lambda: ours(*self.own), lambda: theirs(*self.own), rounds=200, pause=0)

    track_call.unit = "ratio"


def _twelve(call):
    count = 12 if length(4096) == 4096 else 1  # generating code takes long
    return lambda *own: [call(*own) for _ in range(count)]


class LinearAttention:
    """Random features with 256 components, relative to exact attention at n = 4096."""

    params = (CPU, [False, True])
    param_names = ("backend", "is_causal")
    unit = "ratio"
    timeout = 300

    def track_ratio(self, backend, is_causal):
        q, k, v = (x * 0.3 for x in arrays(backend, 4096))
        phi = it.layers.positive_features(64, 256, rng=1, like=q)
        ours = synchronized(
            backend, lambda q, k, v: it.layers.linear_attention(q, k, v, phi, is_causal=is_causal)
        )
        exact = synchronized(backend, lambda q, k, v: it.attention(q, k, v, is_causal=is_causal))
        return ratio(lambda: ours(q, k, v), lambda: exact(q, k, v))


class Laws:
    """A law for one length, and for 4096 lengths."""

    params = (("LogLength", "AffineLog", "PowerLog", "InfoScale"),)
    param_names = ("law",)

    def setup(self, name):
        from isentropic.laws import LogLength, _formulas

        parameters = {"AffineLog": (0.5,), "PowerLog": (0.1, 0.5, 1.5), "InfoScale": (512, 64)}
        self.law = getattr(_formulas, name, LogLength)(*parameters.get(name, ()))
        self.lengths = namespace("numpy").arange(1, 4097)

    def time_number(self, name):
        self.law(4096)

    def time_array(self, name):
        self.law(self.lengths)


def _naive(q, k, v):
    return _softmax(q @ np.swapaxes(k, -1, -2) / 8) @ v


def _naive_causal(q, k, v):
    s = q @ np.swapaxes(k, -1, -2) / 8
    return _softmax(np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf)) @ v


def _softmax(s):
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _heads_last(x):
    """Arrays (heads, n, width) in the layout of `jax.nn`, (1, n, heads, width)."""
    return [part.swapaxes(0, 1)[None] for part in x]
