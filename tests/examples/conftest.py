"""What the tests of the examples share."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """PyTorch computes the small models of these tests faster with one thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list:
    """Jobs of experiments run in this process, and make all steps of the progress bar.

    The fixture is the list of those that were run.
    """
    import experiment

    found: list = []
    made: list[int] = []

    def run(work: Callable, jobs: list, steps: int, *_: int) -> list:
        found.extend(jobs)
        made.clear()
        results = [work(job) for job in jobs]
        assert sum(made) == steps
        return results

    monkeypatch.setattr(experiment, "run", run)
    monkeypatch.setattr(experiment, "advance", lambda steps=1: made.append(steps))
    return found


@pytest.fixture
def random_packages(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The pool of packages, whose texts are random bytes."""
    import from_scratch
    import key_dimension
    import package_texts

    rng = np.random.default_rng(0)
    found = {
        f"p{i:02}": {x: rng.integers(0, 256, 2000).astype(np.uint8) for x in package_texts.KINDS}
        for i in range(16)
    }
    for module in (package_texts, from_scratch, key_dimension):
        monkeypatch.setattr(module, "pool", lambda: found)
    return found


@pytest.fixture
def forget() -> Callable[[Path, str], None]:
    """A function that takes a kept result away."""

    def take(file: Path, name: str) -> None:
        lines = file.read_text().splitlines()
        rest = [line for line in lines if json.loads(line)["name"] != name]
        assert len(rest) == len(lines) - 1
        file.write_text("".join(f"{line}\n" for line in rest))

    return take
