"""The package as a whole: what it exports, imports and documents."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import isentropic as it
from isentropic import drift, jl, laws, layers, masks, theory

PUBLIC = [
    "AttentionDistribution", "AttentionState", "attention", "attention_entropy", "attention_state",
    "cross_entropy", "drift", "entropy", "entropy_from_logits",
    "entropy_penalty", "factor_for_entropy", "integrations", "jl",
    "kl_divergence", "laws", "layers", "masks", "merge_states", "plots", "scale_queries", "theory",
]  # fmt: skip
MODULES = (drift, jl, laws, layers, masks, theory)

ATTENTION = (
    "(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, law=LogLength(base=512, "
    "minimum=None), n_keys=None, softcap=None, sinks=None, enable_gqa=False, implementation=None)"
)

# What functions say whose errors their module has once for all of them.
ERRORS_OF_THEORY = "See `theory` for types and errors."


def _functions():
    for module in (it, *MODULES):
        for name in module.__all__:
            x = getattr(module, name)
            if not inspect.ismodule(x):
                yield pytest.param(x, id=f"{module.__name__}.{name}")


class TestPackage:
    def test_exports(self):
        assert it.__all__ == PUBLIC == sorted(PUBLIC)
        for module in MODULES:
            assert module.__all__ == sorted(module.__all__)
            assert all(hasattr(module, name) for name in module.__all__)

    def test_signatures(self):
        bare = inspect.signature(it.attention).replace(return_annotation=inspect.Signature.empty)
        parameters = [p.replace(annotation=p.empty) for p in bare.parameters.values()]
        assert str(bare.replace(parameters=parameters)) == ATTENTION
        common = list(inspect.signature(it.attention).parameters)[3:]
        for function in (
            it.AttentionDistribution, it.attention_state, it.attention_entropy,
            it.layers.multi_head_attention,
        ):  # fmt: skip
            theirs = inspect.signature(function).parameters
            assert [name for name in theirs if name in common] == common
            for name in common:
                assert theirs[name].default == inspect.signature(it.attention).parameters[name].default

    @pytest.mark.parametrize("x", list(_functions()))
    def test_documented_with_an_example(self, x):
        doc = inspect.getdoc(x)
        assert doc
        assert ">>>" in doc
        if inspect.isfunction(x):
            for section in ("Parameters", "Returns", "Examples"):
                if section != "Parameters" or inspect.signature(x).parameters:
                    assert f"{section}\n{'-' * len(section)}" in doc, section
            if inspect.signature(x).parameters:
                assert "Raises\n------" in doc or ERRORS_OF_THEORY in doc
            for name in inspect.signature(x).parameters:
                assert name in doc

    def test_theory_says_which_errors_its_functions_raise(self):
        assert "raise a TypeError" in theory.__doc__
        assert "raises a ValueError" in theory.__doc__

    def test_import_brings_no_other_array_library(self):
        code = (
            "import sys, isentropic\n"
            "found = {'torch', 'jax', 'cupy', 'scipy'} & set(sys.modules)\n"
            "assert not found, found\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.host
    def test_import_brings_what_attention_needs(self):
        code = (
            "import sys, array_api_compat; before = set(sys.modules); import isentropic\n"
            "slow = {'array_api_extra', 'concurrent.futures', 'difflib', 'importlib.metadata', 'logging'}\n"
            "others = {'drift', '_factors', '_special', 'cli', 'integrations', 'jl', 'layers', 'plots', 'theory', 'laws._configurations'}\n"
            "slow |= {f'isentropic.{name}' for name in others}\n"
            "found = slow & (set(sys.modules) - before)\n"
            "assert not found, found\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.host
    @pytest.mark.parametrize(
        "name", ["drift", "integrations", "jl", "layers", "factor_for_entropy", "plots", "theory"]
    )
    def test_what_is_imported_later_can_be_the_first_name(self, name):
        code = (
            "import isentropic as it\n"
            f"assert '{name}' in dir(it)\n"
            f"x = it.{name}\n"
            f"from isentropic import {name}\n"
            f"assert {name} is x\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_other_names_are_errors(self):
        with pytest.raises(AttributeError, match=r"^module 'isentropic' has no attribute 'nothing'$"):
            it.nothing  # noqa: B018

    @pytest.mark.parametrize("module", MODULES)
    def test_names_of_modules_say_where_they_are(self, module):
        for name in set(module.__all__) - set(it.__all__):
            with pytest.raises(
                AttributeError, match=f"no attribute '{name}'.*{module.__name__}.{name}`"
            ):
                getattr(it, name)

    @pytest.mark.host
    def test_integrations_are_imported_on_first_use(self):
        code = (
            "import sys, isentropic as it\n"
            "it.plots, it.integrations, dir(it)\n"
            "found = {'matplotlib', 'torch', 'jax', 'sklearn', 'transformers'} & set(sys.modules)\n"
            "assert not found, found\n"
            "from importlib.util import find_spec\n"  # the package is tested without its extras, too
            "assert find_spec('sklearn') is None or it.integrations.sklearn.JLTransformer\n"
            "assert not hasattr(it.integrations, 'nothing')\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_a_call_brings_no_other_array_library(self):
        code = (
            "import sys, numpy as np, isentropic as it\n"
            "x = np.ones((3, 2))\n"
            "it.attention(x, x, x, is_causal=True); it.laws.LogLength()(5); it.entropy(x)\n"
            "it.jl.min_dim(100); it.jl.distortion(x, it.jl.hadamard_projection(2, 1)(x)).failure_rate(0.1)\n"
            "found = {'torch', 'jax', 'cupy', 'scipy'} & set(sys.modules)\n"
            "assert not found, found\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.host
class TestRelease:
    """What is published says the same as `pyproject.toml` and the package."""

    ROOT = Path(__file__).parents[1]

    @pytest.fixture
    def project(self):
        return tomllib.loads((self.ROOT / "pyproject.toml").read_text())["project"]

    def test_versions(self):
        version = it.__version__.partition(".dev")[0]
        assert f"\nversion: {version}\n" in (self.ROOT / "CITATION.cff").read_text()
        assert f'version: "{version}"' in (self.ROOT / "docs" / "conda" / "recipe.yaml").read_text()
        changelog = (self.ROOT / "CHANGELOG.md").read_text()
        assert re.search(rf"^## {re.escape(version)} \(", changelog, re.MULTILINE)

    def test_conda_recipe(self, project):
        lines = (self.ROOT / "docs" / "conda" / "recipe.yaml").read_text().splitlines()
        start = lines.index("  run:") + 1
        needed = [
            x.strip(" -").replace(" ", "") for x in lines[start : lines.index("  run_constraints:")]
        ]
        assert sorted(needed) == sorted(
            [f"python{project['requires-python']}", *project["dependencies"]]
        )
        optional = {x for extra in project["optional-dependencies"].values() for x in extra}
        start = lines.index("  run_constraints:") + 1
        constraints = [x.strip(" -").replace(" ", "") for x in lines[start : lines.index("tests:") - 1]]
        assert constraints
        assert {x.replace("pytorch", "torch") for x in constraints} <= optional
