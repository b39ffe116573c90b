"""All that a GPU has to show, in eight minutes: errors, figures, tests, and a sweep of sizes of tiles.

    nox -s device                       in an environment with the pinned versions
    python asv_benchmarks/device.py     in one that has PyTorch, JAX and CuPy already

Each step runs each library in a process of its own, so that one that fails leaves the others alone.
What is measured is written to `gpu.json` at once. A second run at the same commit, with the same GPU
and versions, goes on where the first one ended. Without a GPU, ``--rehearse`` runs all of it on the CPU
at tiny sizes, with NumPy in place of CuPy. It only collects the tests, and writes to another file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RESULTS = FOLDER / "gpu.json"
LIBRARIES = ["torch", "jax", "cupy"]
# The tests of a library are stopped after so many seconds. The sweep has what is left.
TEST_SECONDS = 60
# The largest errors of kernels, relative or in nats: ten roundings of the dtype.
BOUNDS = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}
# Those that use what differs on a GPU: kernels, devices, synchronization.
ATTENTION = ["_attention/test_kernels.py", "_attention/test_functions.py"]
TESTS = {
    "torch:cuda": [
        *ATTENTION,
        "_attention/test_backends.py",
        "_attention/test_divergences.py",
        "test_contract.py",
    ],
    "jax:cuda": ["test_contract.py"],
    "cupy": [*ATTENTION[1:], "_attention/test_generic.py", "test_contract.py", "test_masks.py", "jl"],
}
# Rows, columns, warps and stages that the sweep tries, by kernel; and the calls that it times.
CANDIDATES = {
    "attention_kernel": [(64, 128), (32, 64, 128), (4, 8), (2, 3, 4)],
    "queries_kernel": [(32, 64, 128), (32, 64), (4, 8), (1, 2)],
    "keys_kernel": [(32, 64), (32, 64, 128), (4, 8), (1, 2)],
}
SWEEPS = [
    (kernel, result, width, dtype)
    for dtype in ("bfloat16", "float32")
    for width in (128, 64)
    for kernel, result in (
        ("attention_kernel", "state"), ("keys_kernel", "output"), ("queries_kernel", "output"),
        ("attention_kernel", "output"),
    )
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8, help="stop after so many (default: 8)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file to continue")
    steps = "selftests,errors,figures,tests,sweep"
    parser.add_argument("--steps", default=steps, help="which, in which order")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--only", default="", help="only figures whose names contain this")
    parser.add_argument("--fresh", action="store_true", help="measure again what is known")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument(
        "--worker", help=argparse.SUPPRESS
    )  # a step and a library, in a process of its own
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rehearse:
        os.environ |= {"BENCHMARK_REHEARSAL": "1", "BENCHMARK_LONGEST": "64", "TRITON_INTERPRET": "1"}
        options.results = options.results.with_name("gpu.rehearsal.json")
    if options.worker:
        return work(options)
    options.end = time.time() + 60 * options.minutes
    jobs = [
        f"{step}:{library}"
        for step in options.steps.split(",")
        for library in options.libraries.split(",")
        if step != "sweep" or library == "torch"  # one source of kernels
    ]
    failed = [job for job in jobs if not run(job, options)]
    print("\nFailed or not finished:", ", ".join(failed) or "nothing")
    return 1 if failed else 0


def run(job: str, options: argparse.Namespace) -> bool:
    """Whether a process did all of a step with a library, in the time that is left."""
    left = options.end - time.time()
    print(f"\n{job}, {left:.0f} s left", flush=True)
    if left < 5:
        return False
    command = [sys.executable, __file__, "--worker", job, "--end", str(options.end)]
    command += ["--results", str(options.results), "--only", options.only]
    command += [f"--{name}" for name in ("fresh", "rehearse") if getattr(options, name)]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT / "src"), str(FOLDER), os.environ.get("PYTHONPATH")])
    )
    try:
        # A worker stops by itself. This is for one that hangs.
        return subprocess.run(command, env=environment, timeout=left + 30, cwd=ROOT).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def work(options: argparse.Namespace) -> int:
    step, library = options.worker.split(":")
    record = Record(options.results, fresh=options.fresh)
    functions = {"selftests": self_test, "errors": measure, "figures": measure}
    return (functions | {"tests": test, "sweep": sweep})[step](
        record, library, options, *(["Errors"] if step == "errors" else [])
    )


class Record:
    """What this GPU gave at this commit with these versions, as a part of a file of such records."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self.path, self.fresh = path, fresh
        self.key = {"commit": commit(), "gpu": gpu_name(), "libraries": versions()}

    def update(self, part: str, name: str, value: object) -> None:
        records, mine = self._read()
        mine.setdefault(part, {})[name] = value
        text = json.dumps(records, indent=1, ensure_ascii=False) + "\n"
        draft = self.path.with_suffix(".part")
        draft.write_text(text)
        draft.replace(self.path)

    def has(self, part: str, name: str) -> bool:
        return not self.fresh and name in self._read()[1].get(part, {})

    def get(self, part: str, name: str) -> Any:
        """What is recorded, or an empty dictionary."""
        return {} if self.fresh else self._read()[1].get(part, {}).get(name, {})

    def _read(self) -> tuple[list[dict], dict]:
        """All records of the file, and that of this commit, GPU and versions among them."""
        records = json.loads(self.path.read_text()) if self.path.exists() else []
        for record in records:
            if all(record.get(name) == value for name, value in self.key.items()):
                return records, record
        return [*records, mine := dict(self.key)], mine


def commit() -> str:
    """The commit of the working tree, marked if files differ from it; unknown without Git."""
    command = ["git", "describe", "--always", "--abbrev=8", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def gpu_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "none"
    return lines[0].replace(", ", ", driver ")


def versions() -> dict[str, str]:
    """The versions of what computes, without local parts such as that of CUDA."""
    names = ["torch", "triton", "jax", "cupy-cuda12x", "cupy-cuda13x", "numpy"]
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name.partition("-")[0]] = importlib.metadata.version(name).partition("+")[0]
    return found


def self_test(record: Record, library: str, options: argparse.Namespace) -> int:
    """Record whether the kernels pass their self-test, by dtype. Without a pass nothing uses them."""
    backends = importlib.import_module("benchmarks.backends")
    triton = importlib.import_module("isentropic._attention.triton")
    xp, device, failures = backends.namespace(library), backends.gpu(library), {}
    if library == "cupy" and options.rehearse:
        return 0  # NumPy has no launcher
    for name in ("float32", "float16", "bfloat16"):
        if library == "cupy" and name == "bfloat16":
            continue
        start, dtype = time.time(), getattr(xp, name)
        dtype = dtype if library == "torch" else xp.dtype(dtype)
        failure = triton.self_test_failure(xp, device, dtype)
        print(f"{library}, {name}: {failure or 'passed'} ({time.time() - start:.0f} s)", flush=True)
        record.update("selftests", f"{library}, {name}", failure or "passed")
        failures[name] = failure
    return 1 if any(failures.values()) and not options.rehearse else 0


def measure(record: Record, library: str, options: argparse.Namespace, only_class: str = "") -> int:
    """Run the benchmarks of `benchmarks/gpu.py`: errors, or ratios and the times that they are of."""
    benchmarks = importlib.import_module("benchmarks.gpu")
    backends = importlib.import_module("benchmarks.backends")
    names = [only_class] if only_class else ["Attention", "Gradient", "Kernels", "Generic", "Copies"]
    part, is_complete = ("errors" if only_class else "figures"), True
    for kind in (getattr(benchmarks, name) for name in names):
        tracks = [name for name in dir(kind) if name.startswith("track_") and getattr(kind, name)]
        # The first of two methods for all parameters, then the second.
        for track, values in itertools.product(tracks, itertools.product(*kind.params)):
            name = f"{kind.__name__}.{track.removeprefix('track_')}({', '.join(map(str, values))})"
            if values[0] != library or options.only not in name or record.has(part, name):
                continue
            if time.time() > options.end - 10:
                print("no time is left")
                return 1
            benchmark, start = kind(), time.time()
            try:
                benchmark.setup(*values)
                value = getattr(benchmark, track)(*values)
            except NotImplementedError:
                continue
            except Exception as error:  # the other figures do not depend on this one
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                is_complete = False
                continue
            digits = float(f"{value:.3g}")
            result = digits
            if part == "figures":
                calls = benchmarks.CALLS / 1e3  # seconds of so many calls, as milliseconds of one
                times = [float(f"{backends.LAST[who] / calls:.4g}") for who in ("ours", "theirs")]
                result = [digits, *times]
            elif values[-1] == "ours" and not value < BOUNDS[values[1]]:
                print(f"{name} is above {BOUNDS[values[1]]}")
                is_complete = False
            record.update(part, name, result)
            print(f"{name}: {result} ({time.time() - start:.0f} s)", flush=True)
    return 0 if is_complete else 1


def test(record: Record, library: str, options: argparse.Namespace) -> int:
    """Run the chosen tests, and record how many passed, and which failed."""
    mode = gpu_mode = next(name for name in TESTS if name.partition(":")[0] == library)
    if options.rehearse:
        mode = "numpy" if library == "cupy" else library
    if record.get("tests", mode).get("finished"):
        return 0
    files = [f"tests/{name}" for name in TESTS[gpu_mode]]
    report = options.results.with_name(f"{options.results.stem}.{library}.xml")
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"--backend={mode}",
        "-q",
        "--tb=line",
        f"--junitxml={report}",
    ]
    command += ["-p", "no:cacheprovider", "--maxfail=30"]
    if options.rehearse:
        return subprocess.run([*command, "--collect-only", "-q", *files], cwd=ROOT).returncode
    if importlib.util.find_spec("xdist"):
        command += ["-n", "4", "--dist", "loadscope"]
    tests = subprocess.Popen([*command, *files], cwd=ROOT)
    try:
        code = tests.wait(min(TEST_SECONDS, options.end - time.time()))
    except subprocess.TimeoutExpired:
        tests.send_signal(signal.SIGINT)  # then pytest reports what has run
        code = tests.wait(20)
    record.update("tests", mode, outcome(report) | {"finished": code in (0, 1)})
    report.unlink()
    return code


def outcome(report: Path) -> dict[str, object]:
    """What a report of pytest in the format of JUnit says."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    return {"passed": passed, "skipped": count["skipped"], "failed": failed}


def median_seconds(function: Callable[..., Any], arguments: list) -> float:
    times = []
    for _ in range(6):  # the first compiles
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def sweep(record: Record, library: str, options: argparse.Namespace) -> int:
    """Time the Triton kernels with other sizes of tiles, each in milliseconds. None: did not run."""
    benchmarks = importlib.import_module("benchmarks.gpu")
    backends = importlib.import_module("benchmarks.backends")
    kernels = importlib.import_module("isentropic._attention.triton_kernels")
    chosen = kernels.configuration

    def try_(kernel: str, sizes: tuple[int, ...] | None) -> None:
        def configuration(function, *facts):
            is_meant = sizes is not None and function.__name__ == kernel
            return kernels.Configuration(*sizes) if is_meant else chosen(function, *facts)

        kernels.configuration = configuration

    for kernel, result, width, dtype in SWEEPS:
        dtype = "float16" if options.rehearse else dtype
        heads = benchmarks.HEADS if dtype != "float32" else min(16, benchmarks.HEADS)
        arrays = backends.arrays("torch", 4096, heads, width, dtype=dtype, device=backends.gpu("torch"))
        function = benchmarks.call(result, is_causal=True, implementation="triton")
        is_gradient = kernel != "attention_kernel"
        ours = backends.gradient if is_gradient else backends.synchronized
        timed = ours("torch", function, calls=benchmarks.CALLS)
        candidates = list(itertools.product(*CANDIDATES[kernel]))
        for sizes in [None, *(candidates[:1] if options.rehearse else candidates)]:
            name = f"{kernel}, {result}, {width}, {dtype}: {sizes or 'as it is'}"
            if record.has("sweep", name):
                continue
            if time.time() > options.end - 10:
                print("no time is left")
                return 1
            try_(kernel, sizes)
            try:
                seconds = median_seconds(timed, arrays)
                milliseconds = float(f"{seconds / benchmarks.CALLS * 1e3:.4g}")
            except Exception as error:  # such as too little shared memory
                print(f"{type(error).__name__}: {str(error)[:120]}")
                milliseconds = None
            record.update("sweep", name, milliseconds)
            print(f"{name}: {milliseconds} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
