"""CuPy without a GPU, for `isentropic._triton_launch`: launches are checked and not carried out.

`install` puts it in place of CuPy. It compiles kernels to machine code, so Triton must not interpret.
"""

import re
import sys
import types
from pathlib import Path

import numpy as np

from isentropic import _triton_launch

# The types of PTX by the class of an argument.
KINDS = {"u64": (np.uintp,), "u32": (np.int32,), "f32": (np.float32,)}


class Device:
    compute_capability = "90"
    __hash__ = None  # as CuPy's

    def __init__(self, number=0):
        self.id = number

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Array(np.ndarray):
    """An array of NumPy with the attributes of CuPy's that a launch reads."""

    device = property(lambda self: Device())
    data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data))


def array(x, dtype=None, aligned=True):
    """`x` as an `Array`, at an address that 16 divides, or not."""
    x = np.asarray(x, dtype)
    memory = np.empty(x.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + (0 if aligned else x.itemsize)
    out = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out.view(Array)


class Function:
    """A kernel that checks how it is launched against its PTX, and notes it in `LAUNCHES`."""

    max_dynamic_shared_size_bytes = 48 * 1024

    def __init__(self, code, name):
        self.code, self.name = code, name
        entry = re.search(rf"\.entry {name}\((.*?)\)\s*\.reqntid (\d+)", code.asm["ptx"], re.DOTALL)
        self.parameters = re.findall(r"\.param \.(\w+)( \.ptr)?", entry[1])
        self.threads = int(entry[2])

    def __call__(self, grid, block, arguments, *, shared_mem=0):
        assert len(grid) == 1
        assert 0 < grid[0] < 2**31
        assert tuple(block) == (self.threads,)
        assert shared_mem == self.code.metadata.shared <= self.max_dynamic_shared_size_bytes
        assert len(arguments) == len(self.parameters), (len(arguments), self.parameters)
        for x, (kind, pointer) in zip(arguments, self.parameters, strict=True):
            is_right = isinstance(x, Array) if pointer else False
            assert is_right or isinstance(x, KINDS[kind]), (type(x), kind, pointer)
            if isinstance(x, Array):
                assert x.flags.c_contiguous
        LAUNCHES.append((self.name, grid[0], arguments))


LAUNCHES = []
_codes = {}


class RawModule:
    def __init__(self, *, path):
        self.code = _codes[Path(path).stem]
        assert Path(path).read_bytes() == self.code.asm["cubin"]

    def get_function(self, name):
        return Function(self.code, name)


def install():
    """A module that stands in for CuPy from now on, in `sys.modules` too."""
    compiled = _triton_launch.compiled

    def noted(signature, target):
        assert str(target.arch) == Device.compute_capability
        code = compiled(signature, target)
        _codes[code.hash] = code
        return code

    _triton_launch.compiled = noted
    module = types.ModuleType("cupy")
    module.__dict__.update(
        __getattr__=lambda name: getattr(np, name),
        astype=lambda x, dtype, copy=True: array(x, dtype) if copy or x.dtype != dtype else x,
        asarray=lambda x, dtype=None, device=None: array(x, dtype),
        ascontiguousarray=lambda x: x if x.flags.c_contiguous else array(x),
        empty=lambda shape, dtype: array(np.zeros(shape, dtype)),
        ndarray=Array, RawModule=RawModule, cuda=types.SimpleNamespace(Device=Device),
    )  # fmt: skip
    sys.modules["cupy"] = module
    return module
