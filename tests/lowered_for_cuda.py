"""Lower attention of JAX with its gradient for a GPU that need not be there, and print what it calls.

A script and not a part of the tests, whose process interprets kernels. The packages jax-triton and
jax-cuda12-plugin translate the calls of kernels, and Triton compiles them, as on a machine with a GPU.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import jax_triton.triton_lib

import isentropic as it
from isentropic._attention import triton
from isentropic.jl import _rounds


class Library:
    """What jax-triton asks its compiled part for, where no GPU can be asked for its capability."""

    def __getattr__(self, name):
        return getattr(found, name)

    def get_compute_capability(self, device):
        return 90


found = jax_triton.triton_lib.triton_kernel_call_lib
jax_triton.triton_lib.triton_kernel_call_lib = Library()
triton.gpu_kind = _rounds.gpu_kind = lambda xp, device: "hopper"
triton._is_on_gpu = lambda plan: True
triton.self_test_failure = lambda xp, device, dtype: None


def loss(q, k, v, **options):
    state = it.attention_state(q, k, v, enable_gqa=True, **options)
    return state.output().sum() + state.entropy().sum()


def main():
    q, k = (jnp.zeros((2, heads, 300, 64), jnp.bfloat16) for heads in (4, 2))
    for options in ({}, {"is_causal": True}, {"mask": it.masks.window(20), "softcap": 30.0}):
        function = jax.jit(jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2)))
        lowered = function.trace(q, k, k).lower(lowering_platforms=("cuda",))
        names = re.findall(r"custom_call @(\w+)", lowered.as_text())
        print(json.dumps(names))


if __name__ == "__main__":
    sys.exit(main())
