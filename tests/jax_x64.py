"""A context in which JAX has float64, by every supported version."""

import importlib

import jax


def enable_x64(enabled):
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    return importlib.import_module("jax.experimental").enable_x64(enabled)
