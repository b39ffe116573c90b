"""What the tests of the examples share."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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
def forget() -> Callable[[Path, str], None]:
    """A function that takes a kept result away."""

    def take(file: Path, name: str) -> None:
        lines = file.read_text().splitlines()
        rest = [line for line in lines if json.loads(line)["name"] != name]
        assert len(rest) == len(lines) - 1
        file.write_text("".join(f"{line}\n" for line in rest))

    return take
