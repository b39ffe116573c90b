"""Every benchmark runs, at tiny sizes."""

import importlib
import inspect
import itertools
import json
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "asv_benchmarks"


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setenv("BENCHMARK_LONGEST", "64")
    monkeypatch.setenv("BENCHMARK_REHEARSAL", "1")  # those of a GPU run on the CPU
    monkeypatch.syspath_prepend(FOLDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)


# PyTorch's own compiler uses what PyTorch deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("module", ["attention", "gpu", "limits", "projections"])
def test_every_benchmark_runs(tiny, monkeypatch, module, pytestconfig):
    """With each value of each parameter at least once, and nightly with all combinations."""
    for name in ("asv", "torch", "jax", "sklearn"):  # where benchmarks are run
        pytest.importorskip(name)
    benchmarks = importlib.import_module(f"benchmarks.{module}")
    monkeypatch.setattr(benchmarks, "ratio", lambda ours, theirs, **options: (ours(), theirs(), 1.0)[2])
    ran, compiled, is_night = set(), set(), pytestconfig.getoption("--nightly")
    classes = [
        c
        for _, c in inspect.getmembers(benchmarks, inspect.isclass)
        if c.__module__ == benchmarks.__name__
    ]
    for kind in classes:
        names = [
            name
            for name in dir(kind)
            if name.startswith(("time_", "track_", "peakmem_")) and getattr(kind, name)
        ]
        assert names
        params = getattr(kind, "params", ())
        if not isinstance(params, tuple) or not params or not isinstance(params[0], (list, tuple)):
            params = (params,) if params else ()
        for values in itertools.product(*params):
            for name in names:
                if module == "gpu" and values[0] == "jax":
                    # JAX compiles everything again for the next parameters.
                    if (kind, name) in compiled:
                        continue
                    compiled.add((kind, name))
                used = {(kind, name, *pair) for pair in enumerate(values)}
                if used and used <= ran and not is_night:
                    continue
                benchmark = kind()
                try:
                    getattr(benchmark, "setup", lambda *a: None)(*values)
                except NotImplementedError:  # there alone asv takes it for a skip
                    continue
                result = getattr(benchmark, name)(*values)
                assert name.startswith(("time_", "peakmem_")) or result >= 0
                ran |= used or {(kind, name)}
    assert ran


def test_figures_against_a_peer_without_the_mask_are_not_shown(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    report = importlib.import_module("report")
    name = "attention.Gradients.track_ratio"
    for version, expected in ((report.UNMASKED[name], "Not recorded yet: causal."), ("new", None)):
        params = [["'torch'", "'jax'"], ["'attention'", "'causal'"]]
        run = {"results": {name: [[1.0, 2.0, 3.0, 4.0], params, version + "0" * 52]}}
        cells = report.by_choices(name, run)[1]
        assert cells["jax", "attention"] == 3.0
        assert ("jax", "causal") in cells or expected
        lines = report.table(name, {"unit": "ratio", "param_names": ["backend", "call"]}, [run])
        assert (lines[0] == expected) == (expected is not None)
        assert ("| causal | 2 | 4 |" in lines) == (expected is None)


def test_figures_of_machines_stand_side_by_side(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    report = importlib.import_module("report")
    name, params = "attention.Gradients.track_ratio", [["'torch'"], ["'attention'", "'causal'"]]
    b = "x86_64-b-name"
    machines = {f"{b}-6.1-2-cores": 3, f"{b}-6.22-2-cores": 1, f"{b}-2-cores": 4, "arm64-a-2-cores": 2}
    for machine, date in machines.items():
        (tmp_path / machine).mkdir()
        calls = [params[0], params[1][:1]] if "a-2" in machine else params
        values = [date + 0.5, 7.0][: len(calls[1])]
        run = {"date": date, "results": {name: [values, calls, "new"]}}
        (tmp_path / machine / "c-env.json").write_text(json.dumps(run))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    found = report.one_of_each_family()
    assert [runs[0][0].parent.name for runs in found] == ["arm64-a-2-cores", f"{b}-6.1-2-cores"]
    benchmark = {"unit": "ratio", "param_names": ["backend", "call"]}
    runs = [runs[0][1] for runs in found]
    assert report.table(name, benchmark, runs[::-1])[2:] == [
        "| attention | 3.5 / 2.5 |",
        "| causal | 7 / – |",
    ]
    assert report.table(name, benchmark, [None, runs[1]])[3] == "| causal | – / 7 |"


@pytest.fixture
def device(tiny, monkeypatch, tmp_path):
    """A function that runs a step of `device.py` with NumPy in place of CuPy; it returns code and record."""
    monkeypatch.delenv("BENCHMARK_LONGEST")
    device = importlib.import_module("device")
    monkeypatch.setattr(device, "gpu_name", lambda: "a GPU")

    def run(step, *options, seconds=300):
        path = tmp_path / "gpu.rehearsal.json"
        end = time.time() + seconds
        given = ["--worker", f"{step}:cupy", "--end", str(end), "--results", str(path), "--rehearse"]
        monkeypatch.setattr(sys, "argv", ["device.py", *given, *options])
        code = device.main()
        return code, json.loads(path.read_text())[0] if path.exists() else {}

    return run


class TestDevice:
    def test_goes_on_where_it_ended(self, device):
        assert device("figures", "--only", "fast_jl", seconds=5) == (1, {})  # stops before it begins
        code, first = device("figures", "--only", "fast_jl, 256")
        assert (code, list(first["figures"])) == (0, ["Copies.copies(cupy, fast_jl, 256)"])
        assert all(x > 0 for x in first["figures"]["Copies.copies(cupy, fast_jl, 256)"])
        code, second = device("figures", "--only", "fast_jl")
        assert (code, len(second["figures"])) == (0, 4)
        assert second["figures"].items() > first["figures"].items()
        _, again = device("figures", "--only", "fast_jl, 256", "--fresh")
        assert again["figures"] != second["figures"]

    def test_of_a_failure_the_rest_is_kept(self, device, monkeypatch, capsys):
        pytest.importorskip("torch", reason="PyTorch, the reference of errors, is not installed")
        gpu = importlib.import_module("benchmarks.gpu")
        monkeypatch.setattr(gpu.it, "attention_entropy", lambda *a, **k: 1 / 0)
        code, record = device("errors", "--only", "float32")
        assert code == 1
        assert "ZeroDivisionError" in capsys.readouterr().out
        assert list(record["errors"]) == ["Errors.error(cupy, float32, output, ours)"]

    def test_a_large_error_is_a_failure(self, device, monkeypatch, capsys):
        pytest.importorskip("torch", reason="PyTorch, the reference of errors, is not installed")
        gpu = importlib.import_module("benchmarks.gpu")
        attention = gpu.it.attention

        def wrong(q, *a, **k):
            return attention(q, *a, **k) * (1 if hasattr(q, "detach") else 1.01)

        monkeypatch.setattr(gpu.it, "attention", wrong)
        code, record = device("errors", "--only", "float32, output")
        assert code == 1
        assert record["errors"]["Errors.error(cupy, float32, output, ours)"] == pytest.approx(
            0.01, rel=0.1
        )
        assert "is above" in capsys.readouterr().out

    def test_the_report_has_a_column_for_each_record(self, device, monkeypatch, tmp_path):
        report = importlib.import_module("gpu_report")
        text = report.gpu_report()  # of what is committed
        assert "| PyTorch, output, causal | SDPA's output | 3.69" in text
        _, record = device("figures", "--only", "fast_jl, 256")
        records = [*json.loads(report.DATA.read_text()), record | {"commit": "new"}]
        (tmp_path / "gpu.json").write_text(json.dumps(records))
        monkeypatch.setattr(report, "DATA", tmp_path / "gpu.json")
        assert "| new |" in report.gpu_report()
        assert "CuPy, Fast JL to a quarter of 256 | a copy | – |" in report.gpu_report()

    def test_the_table_of_kernels(self):
        text = importlib.import_module("gpu_report").kernels_report()  # of what is committed
        assert "| `keys_kernel` | 128 | sm_90 |" in text
        # 128 heads of n = 4096 and 128 features take 4 n² d operations each, and an H200 989e12 a second.
        assert "| 1.11 on H200 |" in text


def test_the_report_of_tests_is_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    device = importlib.import_module("device")
    (tmp_path / "r.xml").write_text(
        '<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1"><testcase classname="a" name="b">'
        '<failure/></testcase><testcase classname="a" name="c"/></testsuite></testsuites>'
    )
    assert device.outcome(tmp_path / "r.xml") == {"passed": 2, "skipped": 1, "failed": ["a::b"]}
