"""Lower maps of JAX with their gradients for a GPU that need not be there, as `lowered_for_cuda` does.

A script and not a part of the tests, whose process interprets kernels. It prints how many calls of
Triton's kernels each function has.
"""

import json
import re

import jax
import jax.numpy as jnp
import lowered_for_cuda  # puts a GPU in place
import numpy as np

import isentropic as it
from isentropic import _row_maps
from isentropic.jl import _hadamard

_row_maps.runs_kernels = lambda xp, x: xp is jnp
_hadamard._self_test_failure = lambda xp, device: None


def main():
    assert lowered_for_cuda.found is not None
    like = jnp.zeros(1)
    maps = {
        "transform": (it.jl.hadamard_transform, 1024),
        "long": (it.jl.hadamard_transform, 65536),
        "projection": (it.jl.hadamard_projection(700, 100, rng=0, like=like), 700),
        "rotation": (it.jl.rotation(1000, rng=0, like=like), 1000),
    }
    for name, (f, n) in maps.items():
        functions = {
            "value": lambda x, f=f: f(x),
            "gradient": jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)),
            "vmap": jax.vmap(lambda x, f=f: f(x)),
        }
        for kind, function in functions.items():
            for dtype in (np.float32, jnp.bfloat16):
                lowered = jax.jit(function).trace(jnp.zeros((4, 8, n), dtype))
                text = lowered.lower(lowering_platforms=("cuda",)).as_text()
                count = len(re.findall(r"custom_call @triton_kernel_call\b", text))
                print(json.dumps({"name": f"{name}-{kind}", "calls": count}), flush=True)


if __name__ == "__main__":
    main()
