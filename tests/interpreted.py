"""Launches of Triton kernels in its interpreter, for arrays of NumPy and JAX."""

import threading

import numpy as np

# The interpreter replaces functions of Triton while it runs, and XLA may run two callbacks at a time.
LOCK = threading.Lock()
TYPES = {"float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}


class _Pointer:
    """An array in the way in which the interpreter asks a tensor for its memory."""

    def __init__(self, x):
        self.x, self.dtype = x, TYPES[str(x.dtype)]

    def data_ptr(self):
        return self.x.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        pass

    def copy_(self, _):
        pass

    def storage_offset(self):
        pass

    size = stride = storage_offset


def on_numpy(call):
    """Run a kernel on NumPy arrays, as the launchers of `isentropic._triton_launch` do on a GPU."""
    outputs = [np.zeros(x.shape, x.dtype) for x in call.outputs]
    pointers = map(_Pointer, [*call.inputs, *outputs])
    with LOCK, np.errstate(all="ignore"):
        call.kernel[(call.grid,)](*pointers, **call.numbers, **call.constants)
    return tuple(outputs)


def on_jax(call):
    """The same on JAX arrays, also inside traces."""
    import jax

    def run(*inputs):
        return on_numpy(call._replace(inputs=[np.ascontiguousarray(x) for x in inputs]))

    kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.outputs]
    return jax.pure_callback(run, tuple(kinds), *call.inputs)
