"""Arrays, synchronization and timing for each backend."""

import importlib
import os
import time

import numpy as np

NAMESPACES = {
    "numpy": "array_api_compat.numpy",
    "torch": "array_api_compat.torch",
    "jax": "jax.numpy",
    "cupy": "array_api_compat.cupy",
}
CPU = ["numpy", "torch", "jax"]
GPU = ["torch", "jax", "cupy"]

# A limit on all lengths, to check quickly that no benchmark is broken.
_LONGEST = int(os.environ.get("BENCHMARK_LONGEST", "0")) or None


def length(n):
    return n if _LONGEST is None else min(n, _LONGEST)


def namespace(backend):
    try:
        xp = importlib.import_module(NAMESPACES[backend])
    except ImportError as error:
        raise NotImplementedError(f"{backend} is not installed") from error
    if backend == "cupy" and not xp.is_available():
        raise NotImplementedError("CuPy sees no GPU")
    return xp


def gpu(backend):
    """The GPU of a backend. Without one, the benchmark is skipped."""
    xp = namespace(backend)
    if backend == "torch" and not xp.cuda.is_available():
        raise NotImplementedError("PyTorch sees no GPU")
    if backend == "jax":
        import jax

        if jax.default_backend() != "gpu":
            raise NotImplementedError("JAX sees no GPU")
        return jax.devices("gpu")[0]
    return "cuda" if backend == "torch" else xp.cuda.Device(0)


def arrays(backend, n, heads=8, head_dim=64, *, dtype="float32", device=None):
    """Queries, keys and values (heads, n, head_dim), with the same numbers on every backend."""
    xp = namespace(backend)
    x = np.random.default_rng(0).normal(size=(3, heads, length(n), head_dim)).astype("float32")
    return [xp.asarray(part, dtype=getattr(xp, dtype), device=device) for part in x]


def synchronized(backend, function):
    """`function`, jitted in JAX, that returns only when the result has been computed."""
    if backend == "jax":
        import jax

        compiled = jax.jit(function)
        return lambda *a: jax.block_until_ready(compiled(*a))
    if backend == "cupy":
        import cupy

        return _then(function, cupy.cuda.Device().synchronize)
    if backend == "torch":
        import torch

        return _then(function, torch.cuda.synchronize) if torch.cuda.is_available() else function
    return function


def _then(function, synchronize):
    def run(*a):
        result = function(*a)
        synchronize()
        return result

    return run


def gradient(backend, function, n_arguments=3):
    """A function that computes the gradients of the sum of all outputs of `function`."""
    if backend == "jax":
        import jax

        def loss(*a):
            return sum(x.sum() for x in jax.tree.leaves(function(*a)))

        return synchronized("jax", jax.grad(loss, argnums=tuple(range(n_arguments))))
    import torch

    def run(*a):
        a = [x.detach().requires_grad_() for x in a]
        out = function(*a)
        loss = sum(x.sum() for x in (out if isinstance(out, tuple) else (out,)))
        return torch.autograd.grad(loss, a[:n_arguments])

    return synchronized("torch", run)


def ratio(ours, theirs, rounds=7, pause=0.05, clock=time.perf_counter):
    """The median time of one function over that of another, timed alternately in this process.

    A library may still be busy when a call has returned: its threads spin in wait for work, those of
    OpenBLAS for a tenth of a second, and large arrays are freed. So a `pause` (in seconds) comes before
    each call, and lasts until the process is idle. Without it the other function would share the
    processor with that.
    """
    times = {ours: [], theirs: []}
    for _ in range(rounds + 1):  # the first round is a warm-up
        for function, record in times.items():
            if pause:  # even a pause of 0 seconds is a call to the system
                wait_until_idle(pause)
            start = clock()
            function()
            record.append(clock() - start)
    return float(np.median(times[ours][1:]) / np.median(times[theirs][1:]))


def wait_until_idle(pause, longest=1.0):
    """Sleep for `pause` seconds, again and again until the process was idle meanwhile."""
    end = time.perf_counter() + longest
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(pause)
        if time.process_time() - before < pause / 10:
            return
