"""What an integration says where its library is not installed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.host

# The modules of the extras of the same name, and what they need in the order of their imports.
NEEDS = {
    "torch": ["torch"],
    "jax": ["jax"],
    "huggingface": ["torch", "transformers"],
    "sklearn": ["sklearn"],
}


def run(program, *hidden):
    """The last line of what Python writes to stderr, where imports of `hidden` fail."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); "
    result = subprocess.run([sys.executable, "-c", hide + program], capture_output=True, text=True)
    assert result.returncode == bool(result.stderr)
    return result.stderr.rpartition("\n")[0].rpartition("\n")[2]


@pytest.mark.parametrize(("extra", "missing"), [(e, name) for e in NEEDS for name in NEEDS[e]])
def test_integrations_name_the_extra(extra, missing):
    first = NEEDS[extra].index(missing)
    for name in NEEDS[extra][:first]:
        pytest.importorskip(name)
    module = f"isentropic.integrations.{extra}"
    message = run(f"import {module}", *NEEDS[extra][first:])
    assert (
        message == f"ModuleNotFoundError: {module} needs {missing}: pip install 'isentropic[{extra}]'"
    )


@pytest.mark.parametrize(
    "call",
    [
        "plots.laws({'su': laws.preset('su')}, (2, 9))",
        "plots.attention(np.ones((2, 2)))",
        "plots.distortion(jl.distortion(np.eye(3), np.eye(3)))",
    ],
)
def test_pictures_name_the_extra(call):
    program = f"import numpy as np; from isentropic import jl, laws, plots; {call}"
    message = run(program, "matplotlib")
    assert (
        message
        == "ModuleNotFoundError: isentropic.plots needs matplotlib: pip install 'isentropic[plots]'"
    )


def test_the_command_names_the_extra():
    assert (
        run("import isentropic.cli", "click")
        == "isentropic.cli needs click: pip install 'isentropic[cli]'"
    )


def test_what_needs_no_extra():
    assert (
        run("import isentropic.plots, isentropic.integrations._sharded", "torch", "jax", "matplotlib")
        == ""
    )
