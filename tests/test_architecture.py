"""What the source keeps to, read from it."""

import ast
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import definitions

import isentropic
from isentropic.laws import Law
from isentropic.masks import Mask

pytestmark = pytest.mark.host

DOCS = Path(__file__).parent.parent / "docs"

CREATION = {"arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros"}

# Calls in functions of these names may leave the device to the library.
WITHOUT_DEVICE = {
    "_loops.py:fold": "indices of a JAX scan, within a trace",
    "_loops.py:map_blocks": "indices of a JAX scan, within a trace",
    "_loops.py:scan_blocks": "indices of a JAX scan, within a trace",
    "_loops.py:write": "NumPy alone",
    "jax.py:_over_axes": "indices of JAX loops, which go where the arrays are",
    "jax.py:starts": "indices of JAX loops, which go where the arrays are",
    "jax.py:with_tile": "indices within a JAX loop",
    "jax.py:empty": "the start of a JAX loop",
    "_sharded.py:with_joint_type": "a constant within a JAX trace",
}


def _creations(node, function=""):
    """(function, call) of all arrays that a module makes in a namespace `xp`."""
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef) else function
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Attribute)
            and child.func.attr in CREATION
            and ast.unparse(child.func.value) in ("xp", "self.xp", "frame.xp", "plan.xp")
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


# Files whose tests are not in the file of the same name.
TESTED_IN = {
    "_divergences.py": "_attention/test_divergences.py",
    "_attention/nonfinite.py": "_attention/test_plan.py",
    "_attention/numpy_ops.py": "_attention/test_numpy.py",
    "_attention/schedule.py": "_attention/test_backends.py",
    "_attention/state.py": "_attention/test_generic.py",
    "_attention/statistics.py": "_attention/test_generic.py",
    "_attention/triton.py": "_attention/test_kernels.py",
    "_attention/triton_kernels.py": "_attention/test_kernels.py",
    "_attention/torch_facts.py": "_attention/test_plan.py",
    "_attention/torch_operator.py": "_attention/test_torch.py",
    "_triton_launch.py": "_attention/test_triton_compiler.py",
    "_torch_products.py": "test_torch.py",
    "_namespace.py": "test_contract.py",
    "_ops.py": "_attention/test_tile.py",
    "_numerics.py": "test_entropy.py",
    "_products.py": "test_torch.py",
    "_pytrees.py": "test_jax.py",
    "_rows.py": "_attention/test_quantized.py",
    "_quadrature.py": "test_theory.py",
    "_records.py": "_attention/test_plan.py",
    "integrations/huggingface/_hooks.py": "integrations/huggingface/test_families.py",
    "integrations/huggingface/_laws.py": "integrations/huggingface/test_interface.py",
    "integrations/huggingface/_layer_law.py": "integrations/huggingface/test_saving.py",
    "integrations/huggingface/_measure.py": "integrations/huggingface/test_calibrate.py",
    "integrations/huggingface/_modules.py": "integrations/huggingface/test_names.py",
    "jl/_flat.py": "jl/test_rotation.py",
    "jl/_kronecker.py": "jl/test_hadamard.py",
    "jl/_maps.py": "jl/test_projections.py",
    "jl/_rounds.py": "jl/test_triton_hadamard.py",
}


def test_tests_are_where_the_source_is():
    root, tests = Path(isentropic.__file__).parent, Path(__file__).parent
    files = [x.relative_to(root) for x in root.rglob("*.py") if not x.name.startswith("__")]
    for file in files:
        same = (file.parent / f"test_{file.stem.lstrip('_')}.py").as_posix()
        where = TESTED_IN.get(file.as_posix(), same)
        assert (tests / where).exists(), f"{file} has no {where}"
        assert where == same or not (tests / same).exists(), f"{file} is in `TESTED_IN`, and has {same}"
    assert TESTED_IN.keys() <= {file.as_posix() for file in files}


def test_the_reference_hides_what_is_not_public():
    """Masks and laws have methods for other modules, which the template of their pages leaves out."""
    template = DOCS / "_templates" / "autosummary" / "class.rst"
    if not template.exists():
        pytest.skip("the documentation is not here")
    (listed,) = re.findall(r":exclude-members: (.+)", template.read_text(encoding="utf-8"))
    hidden, public = set(listed.split(", ")), {Mask: {"visible_count"}, Law: {"evaluate", "to_dict"}}
    for kind, expected in public.items():
        assert {name for name in vars(kind) if not name.startswith("_")} - hidden == expected
    assert hidden <= {name for kind in public for name in dir(kind)}


def test_a_small_call_is_easy_to_follow(monkeypatch):
    """How many functions of the package it calls, in how many files, and how often the file changes."""
    # Where PyTorch is imported, each call asks in one more file whether PyTorch traces it.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    x = np.zeros((4, 16, 8))
    isentropic.attention(x, x, x, is_causal=True)  # caches are filled
    root, files = str(Path(isentropic.__file__).parent), []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        isentropic.attention(x, x, x, is_causal=True)
    finally:
        sys.setprofile(before)
    assert 0 < len(files) <= 30
    assert len(set(files)) <= 12
    assert sum(a != b for a, b in itertools.pairwise(files)) <= 16


PAGE = DOCS.parent / "CONTRIBUTING.md"


def test_formulas_are_where_the_page_says():
    if not PAGE.exists():
        pytest.skip("the documentation is not here")
    root = Path(isentropic.__file__).parent
    text = PAGE.read_text(encoding="utf-8").partition("\n## What is where\n")[2]
    entries = re.findall(r"`([\w/]+\.py):([\w.]+)`", text)
    assert len(entries) > 50
    wrong = [f"{file}:{name}" for file, name in entries if name not in definitions(root / file)]
    wrong += [file for file in re.findall(r"`([\w/]+\.py)`", text) if not (root / file).exists()]
    assert wrong == []
