"""What the source keeps to, read from it."""

import ast
from pathlib import Path

import pytest

import isentropic

pytestmark = pytest.mark.host

CREATION = {"arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros"}

# Calls in functions of these names may leave the device to the library.
WITHOUT_DEVICE = {
    "_loops.py:fold": "indices of a JAX scan, within a trace",
    "_loops.py:map_blocks": "indices of a JAX scan, within a trace",
    "_loops.py:scan_blocks": "indices of a JAX scan, within a trace",
    "_loops.py:write": "NumPy alone",
    "sharded.py:joined": "a constant within a JAX trace",
}


def _creations(node, function=""):
    """(function, call) of all arrays that a module makes in a namespace `xp`."""
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef) else function
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Attribute)
            and child.func.attr in CREATION
            and ast.unparse(child.func.value) in ("xp", "self.xp", "frame.xp", "problem.xp")
        ):
            yield inside, child
        yield from _creations(child, inside)


def test_arrays_are_made_on_a_device_that_is_named():
    root = Path(isentropic.__file__).parent
    found, unnamed, excused = 0, [], set()
    for path in sorted(root.rglob("*.py")):
        for function, call in _creations(ast.parse(path.read_text(encoding="utf-8"))):
            found += 1
            names = {keyword.arg for keyword in call.keywords}
            where = f"{path.name}:{function}"
            # `**kind` holds a dtype and a device.
            if "device" in names or None in names:
                continue
            excused.add(where)
            if where not in WITHOUT_DEVICE:
                unnamed.append(f"{where}:{call.lineno}: {ast.unparse(call)}")
    assert found > 40
    assert unnamed == []
    assert excused == set(WITHOUT_DEVICE)
