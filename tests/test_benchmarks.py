"""Every benchmark runs, at tiny sizes."""

import importlib
import inspect
import itertools
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "asv_benchmarks"


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setenv("BENCHMARK_LONGEST", "64")
    monkeypatch.syspath_prepend(FOLDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)


# PyTorch's own compiler uses what PyTorch deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("module", ["attention", "gpu", "limits", "projections"])
def test_every_benchmark_runs(tiny, monkeypatch, module):
    for name in ("asv", "torch", "jax", "sklearn"):  # where benchmarks are run
        pytest.importorskip(name)
    benchmarks = importlib.import_module(f"benchmarks.{module}")
    monkeypatch.setattr(benchmarks, "ratio", lambda ours, theirs, **options: (ours(), theirs(), 1.0)[2])
    ran, skipped = 0, 0
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
                benchmark = kind()
                try:
                    getattr(benchmark, "setup", lambda *a: None)(*values)
                except NotImplementedError:  # there alone asv takes it for a skip
                    skipped += 1
                    continue
                result = getattr(benchmark, name)(*values)
                assert name.startswith(("time_", "peakmem_")) or result >= 0
                ran += 1
    assert ran > 0 or (module == "gpu" and skipped > 0)


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
