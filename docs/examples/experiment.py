"""Shared functions of the experiments: parallel runs, results as JSON, tables and verdicts."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"

# "exploratory": the criterion for what was found was not registered before the run
Verdict = Literal["reproduced", "in part", "not reproduced", "not decided", "exploratory", "not tested"]
Effect = Literal["helps", "no effect", "harms", "not decided"]


class Claim(NamedTuple):
    """A claim of a document about an experiment, and the result."""

    source: str
    says: str
    found: str
    verdict: Verdict


def verdict(reproduced: bool) -> Verdict:
    return "reproduced" if reproduced else "not reproduced"


# -------------------------------------------------------------------------------------- decisions


class Decision(NamedTuple):
    """What paired differences say about an effect: the verdict, their mean and its interval."""

    verdict: Effect
    mean: float
    low: float
    high: float

    def interval(self, form: str = "+.1f") -> str:
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def decide(differences: Sequence[float], smallest: float, confidence: float = 0.95) -> Decision:
    """Decide by the t interval of the mean of paired differences (of seeds, or of texts).

    `smallest` is the smallest effect that matters. An interval above it is "helps", one between
    −smallest and smallest is "no effect" (of that size), and one below −smallest is "harms". Only a
    comparison that was registered before its run has a verdict. Of others show the interval alone.
    """
    mean, n = statistics.fmean(differences), len(differences)
    half = half_width(statistics.stdev(differences), n, confidence)
    low, high = mean - half, mean + half
    if low > smallest:
        return Decision("helps", mean, low, high)
    if high < -smallest:
        return Decision("harms", mean, low, high)
    is_within = -smallest < low and high < smallest
    return Decision("no effect" if is_within else "not decided", mean, low, high)


def answered(found: Decision) -> Verdict:
    """The verdict on a claim that something helps."""
    verdicts: dict[str, Verdict] = {"helps": "reproduced", "not decided": "not decided"}
    return verdicts.get(found.verdict, "not reproduced")


def half_width(deviation: float, n: int, confidence: float = 0.95) -> float:
    """Half the width of the t interval of the mean of n normal numbers."""
    from scipy import special

    quantile = float(special.stdtrit(n - 1, (1 + confidence) / 2))
    return quantile * deviation / math.sqrt(n)


# ------------------------------------------------------------------------------------------ causes


def diagnosis(results: dict[str, Any], arms: Sequence[str], window: int, count: int) -> str:
    """How much of the rise of the loss beyond the first length a law removes, and how much clamping.

    `arms` are the standard scale, the law, clamped positions, and both. `count` is the number of
    predictions at each length. The errors are over seeds.
    """
    import numpy as np
    from causes import Causes

    lengths = results["lengths"]
    plain, law, clamped, both = (
        np.asarray([seed["loss"] for seed in results["arms"][arm]]) for arm in arms
    )
    losses = np.stack([np.stack([plain, clamped], 1), np.stack([law, both], 1)], 1)
    counts = np.full((len(plain), len(lengths)), count)
    bands = np.repeat(np.asarray(lengths)[:, None], 2, axis=1)
    return str(Causes(lengths[0], window, bands, counts, losses))


# ------------------------------------------------------------------------------------------ runs


def run(
    work: Callable[[Any], Any], jobs: Sequence[Any], steps: int, workers: int | None = None
) -> list:
    """``[work(job) for job in jobs]`` in parallel processes, with a progress bar of `steps` steps.

    Each process has one thread, so that the results do not depend on the number of processes. `work`
    calls `advance` as it progresses.
    """
    if not jobs:
        return []
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    workers = min(workers or len(os.sched_getaffinity(0)), len(jobs))
    seconds = 0.2 if sys.stderr.isatty() else 30.0  # a file would keep every state of the bar
    with (
        tqdm(total=steps, unit=" steps", smoothing=0.05, mininterval=seconds) as bar,
        context.Pool(workers, _start, (done,)) as pool,
    ):
        results = pool.map_async(work, jobs, chunksize=1)
        while not results.ready():
            results.wait(0.2)
            bar.update(done.value - bar.n)
        found = results.get()
        bar.update(done.value - bar.n)
        return found


def _start(done: Any) -> None:
    import torch

    global _done
    _done = done
    torch.set_num_threads(1)


_done: Any = None


def advance(steps: int = 1) -> None:
    """Advance the progress bar of `run`."""
    if _done is not None:
        with _done.get_lock():
            _done.value += steps


def kept(path: Path, name: str, what: Any, compute: Callable[[], Any], steps: int = 0) -> Any:
    """``compute()``, kept under the name and all that it depends on, so that it is computed once.

    A result that is there already advances the progress bar by `steps`, as its computation would.
    """
    if stored(path, name, what) is None:
        store(path, name, what, compute())
    else:
        advance(steps)
    return stored(path, name, what)


def stored(path: Path, name: str, what: Any) -> Any:
    """A result in the file of lines, or None: `what` is all that it depends on."""
    file, digest = lines_of(path), digest_of(what)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else ()
    for line in (x for x in lines if digest in x):
        with contextlib.suppress(json.JSONDecodeError):  # half a line, where a run was stopped
            found = json.loads(line)
            if (found["name"], found["digest"]) == (name, digest):
                return found["result"]
    return None


def store(path: Path, name: str, what: Any, result: Any) -> None:
    """Append the line that `stored` reads. Processes may do so at the same time."""
    file = lines_of(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"name": name, "digest": digest_of(what), "result": result}, ensure_ascii=False)
    is_torn = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("ab", buffering=0) as end:  # one write, so that lines of processes do not mix
        end.write((b"\n" if is_torn else b"") + text.encode() + b"\n")


def lines_of(path: Path) -> Path:
    """The file of the kept results, next to the file of the experiment."""
    return path.with_name(f"{path.name}.jsonl")


def digest_of(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


class Job:
    """A model to be trained and tested: the methods of a dataclass with the field `path`.

    That is where its results are kept.
    """

    path: Path

    def name(self) -> str:
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What the result depends on. One with another identity is of another job."""
        raise NotImplementedError

    def result(self) -> dict[str, dict] | None:
        """The results by arm if the job is finished."""
        return stored(self.path, self.name(), self.identity())

    def write(self, arms: dict[str, dict]) -> None:
        store(self.path, self.name(), self.identity(), arms)


def finish_jobs(work: Callable[[Any], None], jobs: Iterable[Job], steps: int) -> None:
    """Run those of the jobs that are not finished. Each advances the progress bar by `steps`."""
    left = [job for job in jobs if job.result() is None]
    run(work, left, len(left) * steps)


# --------------------------------------------------------------------------------------- results


def parser(name: str, description: str, seeds: int | None = None) -> argparse.ArgumentParser:
    """A parser with the options that all experiments share."""
    result = argparse.ArgumentParser(prog=f"{name}.py", description=description.partition("\n")[0])
    if seeds is not None:
        result.add_argument(
            "--seeds", type=positive, default=seeds, metavar="COUNT", help=f"how many ({seeds})"
        )
    result.add_argument(
        "--output", type=Path, default=RESULTS, metavar="FOLDER", help=f"for {name}.json and {name}.png"
    )
    return result


def main_of_arms(
    name: str,
    description: str,
    seeds: int,
    sizes: tuple[Any, Any],
    run: Callable[[int, Any, Path], dict[str, Any]],
    report: Callable[[dict], str],
    picture: Callable[[dict], Figure],
    arguments: list[str] | None,
) -> None:
    """Run an experiment that compares arms over seeds, in its full size or with --quick."""
    options = parser(name, description, seeds=seeds)
    options.add_argument("--quick", action="store_true", help="two seeds, and less of everything")
    found = options.parse_args(arguments)
    if found.seeds < 2:
        options.error("argument --seeds: differences have no spread with fewer than 2")
    if found.quick:
        name, found.seeds = f"{name}_quick", min(found.seeds, 2)
    results = run(found.seeds, sizes[found.quick], found.output / f"{name}_runs")
    finish(name, results, report, picture, found.output)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def finish(
    name: str,
    results: dict[str, Any],
    report: Callable[[dict], str],
    picture: Callable[[dict], Figure],
    folder: Path,
) -> None:
    """Write the results and their plot, and print the report for the documentation."""
    import torch

    import isentropic

    results["versions"] = {
        "isentropic": isentropic.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rounded(results), indent=1) + "\n")
    figure = picture(results)
    figure.savefig(folder / f"{name}.png", dpi=120)
    plt.close(figure)
    print(report(results))
    print(f"written: {folder / name}.json and .png")


def plot_means(axes: Any, x: Sequence[float], samples: Sequence[Sequence[float]], **style: Any) -> None:
    """Plot the mean of a sample for each x, with a band: the 95 % interval of the mean."""
    means = [statistics.fmean(sample) for sample in samples]
    (line,) = axes.plot(x, means, **{"marker": "o", "markersize": 4} | style)
    if len(samples[0]) > 1:
        halves = [half_width(statistics.stdev(sample), len(sample)) for sample in samples]
        low, high = zip(*((m - h, m + h) for m, h in zip(means, halves, strict=True)), strict=True)
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, lw=0)


def plot_intervals(axes: Any, x: Sequence[float], found: Sequence[Decision], **style: Any) -> None:
    """Plot the mean of each decision as a dot, with its interval."""
    halves = [one.high - one.mean for one in found]
    axes.errorbar(x, [one.mean for one in found], halves, **{"fmt": "o"} | style)


def spelled(arm: str) -> str:
    """The name of an arm in words: O is the standard scale, and E has log n in training too."""
    return re.sub(r"\bE\b", "trained with log n", re.sub(r"\bO\b", "standard", arm))


def length_axis(axes: Any, lengths: Sequence[int], label: str) -> None:
    """Make the horizontal axis logarithmic, with these ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set_xlabel(label)


def load(name: str) -> dict[str, Any]:
    """The committed results of an experiment."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rounded(x: Any, digits: int = 5) -> Any:
    """Nested lists and dictionaries, with floats rounded to this number of significant digits."""
    if isinstance(x, dict):
        return {key: rounded(value, digits) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value, digits) for value in x]
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x


# ---------------------------------------------------------------------------------------- tables


def table(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown. Columns of numbers are aligned right, and all others left."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    columns = zip(*lines, strict=True)
    is_number = [all(re.match(r"\W*(\d|$)", cell) for cell in column) for _, *column in columns]
    lines.insert(1, ["--:" if x else "---" for x in is_number])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The mean ± the standard deviation over seeds."""
    mean = statistics.fmean(values)
    return f"{mean:{form}} ± {statistics.stdev(values):{form}}" if len(values) > 1 else f"{mean:{form}}"


def slope(lengths: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line through the values against log n."""
    return statistics.linear_regression([math.log(n) for n in lengths], values).slope
