"""The fixture `backend`: every test of a public function runs with each of its values."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import pytest

# scikit-learn accepts arrays of other libraries only if this is set when SciPy is imported.
os.environ.setdefault("SCIPY_ARRAY_API", "1")

# Without a GPU, Triton interprets its kernels if this is set when it is imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

BACKENDS = [
    "numpy",
    "numpy:readonly",
    "strict",
    "strict:bare",  # no boolean indexing, no data-dependent shapes, no extensions
    "strict:2024.12",  # the oldest supported version of the standard
    "strict:device1",
    "torch",
    "torch:float64-default",
    "torch:cuda",
    "jax",
    "jax:x64",
    "jax:cuda",
    "cupy",
]
# Those that run a test with all of its parameters. A GPU has kernels of its own.
FULL = ("numpy", "strict", "torch", "torch:cuda", "cupy")
MODULES = {
    "numpy": "numpy",
    "strict": "array_api_strict",
    "torch": "torch",
    "jax": "jax",
    "cupy": "cupy",
}

# What older versions of PyTorch cannot do, by the version that can: tests, and what they try. The tests
# that call `torch.compile` and `torch.export` directly skip by themselves.
NEEDS_TORCH = {
    (2, 7): (
        r"TestThroughNumPy::test_transformations\[torch"
        r"|TestAutocast::test_results\[AttentionDistribution.output-True"
        r"|test_entropy_from_the_log_sum_exp_and_the_mean_key"
        r"|TestTorch::test_vmap\[(Quantizer|distortion)\]"
        r"|TestTorch::test_refused\[second-AttentionDistribution.output\]",
        "torch.func of index maps, a backward pass inside autocast, or AuxRequest",
    ),
    (2, 13): (
        r"test_law.py::TestPerQuery::test_transformations\[torch"
        r"|TestKnots::test_transformations\[torch"
        r"|test_triton_hadamard.py|test_kernels.py|test_triton_compiler.py|TestBackends::test_names"
        r"|test_torch_nodes.py",
        "torch.compile, or its Triton,",
    ),
}


@functools.cache
def _torch_version() -> tuple[int, int]:
    """The version of PyTorch without its import, or a high one."""
    if importlib.util.find_spec("torch") is None:
        return (99, 0)
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    return int(major), int(minor)


hypothesis.settings.register_profile(
    "isentropic",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("isentropic")


@dataclass(frozen=True)
class Backend:
    """An array library with a device, in one of its modes."""

    name: str
    xp: Any
    device: Any
    float64: bool = True

    @property
    def library(self) -> str:
        return self.name.partition(":")[0]

    @property
    def is_gpu(self) -> bool:
        return self.library == "cupy" or self.name.endswith(":cuda")

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "float64") if self.float64 else ("float32",)

    @property
    def half(self) -> str | None:
        return None if self.library == "strict" else "float16"

    def array(self, x: Any, dtype: str | None = None) -> Any:
        """`x`, which is anything that NumPy accepts, as an array of this backend.

        Without `dtype` it keeps that of `x`, in 32 bits if the backend does not have 64.
        """
        x = np.array(x, dtype=dtype)
        if x.dtype == np.float64 and not self.float64:
            x = x.astype(np.float32)
        if x.dtype == np.int64 and self.library == "jax" and not self.float64:
            x = x.astype(np.int32)
        if self.library == "numpy":
            x.flags.writeable = self.name != "numpy:readonly"
            return x
        return self.xp.asarray(x, device=self.device)

    def numpy(self, x: Any) -> np.ndarray:
        if self.library == "torch":
            return x.detach().cpu().numpy()
        if self.library == "cupy":
            return x.get()
        if self.library == "strict":
            return np.asarray(x.to_device(self.xp.Device("CPU_DEVICE")))
        return np.asarray(x)

    def assert_close(self, actual: Any, expected: Any, **tolerance: float) -> None:
        """Assert that library, device, dtype, shape and values are those of `expected`.

        `expected` is an array of this backend, or a NumPy array or float.
        """
        from array_api_extra.testing import assert_close

        if isinstance(expected, np.ndarray | float | np.floating):
            expected = np.asarray(expected).astype(self.numpy(actual).dtype)
            expected = self.xp.asarray(expected, device=self.device)
        if self.library == "strict" and self.name != "strict":
            cpu = self.xp.Device("CPU_DEVICE")
            assert actual.device == self.device
            actual, expected = actual.to_device(cpu), expected.to_device(cpu)
        assert_close(actual, expected, **tolerance)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=sorted({*MODULES, *BACKENDS}),
        help="run only the tests of this backend or mode",
    )
    parser.addoption("--nightly", action="store_true", help="also run the tests marked nightly")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--backend")
        names = [n for n in BACKENDS if chosen in (None, n, n.partition(":")[0])]
        metafunc.parametrize("backend", names, indirect=True)


def pytest_collection() -> None:
    gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    # Compilers make many objects. With the defaults the collector would visit those of the libraries and
    # of all tests again and again, which is a tenth of the time of PyTorch's and JAX's tests. PyTorch
    # asks for a collection of the second generation after each compilation, which counts for the third.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 1000)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # The results are sent. To free what compilers made, object by object, takes 8 s.
        os._exit(0)
    gc.unfreeze()  # so that bindings that count their references at the end find none


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen, seen = config.getoption("--backend"), set()
    is_night = config.getoption("--nightly")

    def is_wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("nightly") and not is_night:
            return False
        if item.get_closest_marker("host"):
            return chosen in (None, "numpy")
        # A mode changes how arrays are made and which operations they support, but not the formulas. So
        # one set of parameters is enough, unless the parameters are functions. JAX counts as a mode too,
        # because it compiles every operation anew for the shapes of other parameters.
        name = item.callspec.params.get("backend", "") if hasattr(item, "callspec") else ""
        if name == "jax:x64" and not item.get_closest_marker("float64"):
            return False  # to save time: JAX compiles every operation again for the other width
        if not name or name in FULL or item.get_closest_marker("every_mode"):
            return True
        test = (name, item.nodeid.partition("[")[0])
        is_first = test not in seen
        seen.add(test)
        return is_first

    for item in items:
        for lowest, (pattern, what) in NEEDS_TORCH.items():
            if _torch_version() < lowest and re.search(pattern, item.nodeid):
                version = ".".join(map(str, lowest))
                item.add_marker(pytest.mark.skip(reason=f"{what} needs PyTorch {version}"))
    wanted = {item: is_wanted(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not wanted[item]])
    items[:] = [item for item in items if wanted[item]]


def pytest_report_header(config: pytest.Config) -> list[str]:
    missing = {name: why for name in BACKENDS if (why := unavailable(name))}
    present = ", ".join(name for name in BACKENDS if name not in missing)
    return [f"backends: {present}"] + [f"skipped {name}: {why}" for name, why in missing.items()]


@functools.cache
def unavailable(name: str) -> str | None:
    """The reason why a backend cannot be tested on this machine, or None."""
    library, _, mode = name.partition(":")
    if importlib.util.find_spec(MODULES[library]) is None:
        return f"{MODULES[library]} is not installed"
    if name == "cupy":
        import cupy

        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return f"CuPy sees no GPU: {error}"
    if mode == "cuda" and library == "torch":
        import torch

        return None if torch.cuda.is_available() else "PyTorch sees no GPU"
    if mode == "cuda":
        import jax

        return None if jax.default_backend() == "gpu" else "JAX sees no GPU"
    return None


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    name = request.param
    if why := unavailable(name):
        pytest.skip(why)
    library, _, mode = name.partition(":")
    with contextlib.ExitStack() as stack:
        yield _make(name, library, mode, stack)


def _make(name: str, library: str, mode: str, stack: contextlib.ExitStack) -> Backend:
    if library == "numpy":
        import array_api_compat.numpy as xp

        return Backend(name, xp, "cpu")
    if library == "strict":
        import array_api_strict as xp

        if mode == "bare":
            flags = xp.ArrayAPIStrictFlags(
                boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=()
            )
            stack.enter_context(flags)
        if mode == "2024.12":
            stack.enter_context(xp.ArrayAPIStrictFlags(api_version=mode))
        return Backend(name, xp, xp.Device(mode if mode == "device1" else "CPU_DEVICE"))
    if library == "torch":
        import array_api_compat.torch as xp

        if mode == "float64-default":
            stack.callback(xp.set_default_dtype, xp.get_default_dtype())
            xp.set_default_dtype(xp.float64)
        return Backend(name, xp, xp.device("cuda:0" if mode == "cuda" else "cpu"))
    if library == "jax":
        import jax

        stack.enter_context(jax.numpy_rank_promotion("raise"))  # as in the tests of JAX itself
        if mode == "x64":
            from jax_x64 import enable_x64

            stack.enter_context(enable_x64(True))
        platform = "gpu" if mode == "cuda" else "cpu"
        return Backend(name, jax.numpy, jax.devices(platform)[0], float64=mode == "x64")
    import array_api_compat.cupy as xp

    return Backend(name, xp, xp.cuda.Device(0))


@pytest.fixture(autouse=True)
def _compilers_of_old_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip what compiles or exports with a version of PyTorch that cannot do it with this library."""
    torch = sys.modules.get("torch")
    if torch is None or _torch_version() >= (2, 13):
        return

    def skip(*args: Any, **kwargs: Any) -> None:
        pytest.skip("torch.compile and torch.export need PyTorch 2.13")

    monkeypatch.setattr(torch, "compile", skip)
    monkeypatch.setattr("torch.export.export", skip)
    monkeypatch.setattr("torch.fx.experimental.proxy_tensor.make_fx", skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed PyTorch's global generator, for tests that use it. Other tests draw from `rng`."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(20260718)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260718)


@pytest.fixture
def set_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that changes block sizes, and clears the cached backend choices that depend on them."""
    from isentropic._attention.backends import choose_backend
    from isentropic._loops import BLOCKS

    def change(**sizes: int) -> None:
        for name, size in sizes.items():
            monkeypatch.setattr(BLOCKS, name, size)
        choose_backend.cache_clear()

    yield change
    choose_backend.cache_clear()


@pytest.fixture
def tiny_tiles(set_blocks: Callable[..., None]) -> None:
    """Make blocks so small that every test has several of them, with ragged ends."""
    set_blocks(
        tile=0,
        rows=3,
        columns=4,
        count_tile=4,
        chunk=3,
        cache_numbers=40,
        jax_cache_numbers=40,
        pairs=40,
        numpy_pairs=40,
    )


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX with float64, in tests without the fixture `backend`."""
    from jax_x64 import enable_x64

    with enable_x64(True):
        yield


@pytest.fixture
def only(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """A function that returns a library, or skips a test of it where another backend is tested."""

    def check(library: str) -> Any:
        if request.config.getoption("--backend") not in (None, library):
            pytest.skip(f"belongs to the backend {library}")
        return pytest.importorskip(library)

    return check


@pytest.fixture
def tree(backend):
    """The trees of the backend's library."""
    if backend.library not in ("jax", "torch"):
        pytest.skip("no trees here")
    name = {"jax": "jax.tree_util", "torch": "torch.utils._pytree"}[backend.library]
    return importlib.import_module(name)
