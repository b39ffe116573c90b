"""Arrays and clocks of the backends."""

import importlib
import time

import numpy as np

NAMESPACES = {
    "numpy": "array_api_compat.numpy",
    "torch": "array_api_compat.torch",
    "jax": "jax.numpy",
    "cupy": "array_api_compat.cupy",
}


def namespace(backend):
    try:
        xp = importlib.import_module(NAMESPACES[backend])
    except ImportError as error:
        raise NotImplementedError(f"{backend} is not installed") from error
    if backend == "cupy" and not xp.is_available():
        raise NotImplementedError("CuPy sees no GPU")
    return xp


def synchronized(backend, function):
    """`function`, compiled where its library compiles, and returning when the result is there."""
    if backend == "jax":
        import jax

        compiled = jax.jit(function)
        return lambda *a: jax.block_until_ready(compiled(*a))
    if backend == "cupy":
        import cupy

        def run(*a):
            result = function(*a)
            cupy.cuda.Device().synchronize()
            return result

        return run
    return function


def ratio(ours, theirs, rounds=5):
    """Median time of one function as a multiple of another's, timed in turn in this process."""
    times = {ours: [], theirs: []}
    for _ in range(rounds + 1):  # the first is for warming up
        for function, record in times.items():
            start = time.perf_counter()
            function()
            record.append(time.perf_counter() - start)
    return float(np.median(times[ours][1:]) / np.median(times[theirs][1:]))
