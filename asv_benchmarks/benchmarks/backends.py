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
# Whether the benchmarks of GPUs run on the CPU, with NumPy in place of CuPy, to find errors in them
# without a GPU.
REHEARSAL = os.environ.get("BENCHMARK_REHEARSAL") == "1"


def length(n):
    return n if _LONGEST is None else min(n, _LONGEST)


def namespace(backend):
    backend = "numpy" if REHEARSAL and backend == "cupy" else backend
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
    if REHEARSAL:
        return importlib.import_module("jax").devices("cpu")[0] if backend == "jax" else "cpu"
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


def synchronized(backend, function, calls=1):
    """Calls `function`, jitted in JAX, so many times, and returns when all has been computed."""
    if backend == "jax":
        import jax

        return _repeated(jax.jit(function), calls, jax.block_until_ready)
    if backend == "cupy" and not REHEARSAL:
        import cupy

        return _repeated(function, calls, lambda _: cupy.cuda.Device().synchronize())
    if backend == "torch":
        import torch

        if torch.cuda.is_available():
            return _repeated(function, calls, lambda _: torch.cuda.synchronize())
    return _repeated(function, calls) if calls > 1 else function


def _repeated(function, calls, wait_for=lambda result: None):
    def run(*a):
        for _ in range(calls):
            result = function(*a)
        wait_for(result)
        return result

    return run


def gradient(backend, function, n_arguments=3, calls=1):
    """A function that computes the gradients of the sum of all outputs of `function`."""
    if backend == "jax":
        import jax

        def loss(*a):
            return sum(x.sum() for x in jax.tree.leaves(function(*a)))

        return synchronized("jax", jax.grad(loss, argnums=tuple(range(n_arguments))), calls)
    import torch

    def run(*a):
        a = [x.detach().requires_grad_() for x in a]
        out = function(*a)
        loss = sum(x.sum() for x in (out if isinstance(out, tuple) else (out,)))
        return torch.autograd.grad(loss, a[:n_arguments])

    return synchronized("torch", run, calls)


LAST = {}  # the median times of the last ratio, in seconds


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
    medians = [float(np.median(record[1:])) for record in times.values()]
    LAST.update(zip(("ours", "theirs"), medians, strict=True))
    return medians[0] / medians[1]


def wait_until_idle(pause, longest=1.0):
    """Sleep for `pause` seconds, again and again until the process was idle meanwhile."""
    end = time.perf_counter() + longest
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(pause)
        if time.process_time() - before < pause / 10:
            return
