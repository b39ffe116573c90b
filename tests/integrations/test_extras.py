"""What an integration says where its library is not installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

# The modules of the extras of the same name, and what they need in the order of their imports.
NEEDS = {
    "torch": ["torch"],
    "jax": ["jax"],
    "huggingface": ["torch", "transformers"],  # which brings tqdm
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
    expected = f"ModuleNotFoundError: {module} needs {missing} (the extra '{extra}'): pip install "
    assert message.startswith(expected)
    # What it recommends is what the package asks for, and is to be had.
    packages = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"][extra]
    assert message.removeprefix(expected) == " ".join(f"'{package}'" for package in packages)


@pytest.mark.parametrize(
    "call",
    [
        "plots.attention(np.ones((2, 2)))",
        "plots.distortion(jl.distortion(np.eye(3), np.eye(3)))",
    ],
)
def test_pictures_name_the_extra(call):
    program = f"import numpy as np; from isentropic import jl, plots; {call}"
    message = run(program, "matplotlib")
    assert message.startswith(
        "ModuleNotFoundError: isentropic.plots needs matplotlib (the extra 'plots'): pip install 'matplotlib"
    )


def test_the_command_names_the_extra():
    message = run("import isentropic.cli", "click")
    assert message.startswith("isentropic.cli needs click (the extra 'cli'): pip install 'click")


def test_what_needs_no_extra():
    assert (
        run("import isentropic.plots, isentropic.integrations._sharded", "torch", "jax", "matplotlib")
        == ""
    )
