"""The texts of the installed Python packages: their code, and the prose of their docstrings.

Each seed has its own packages for training, for choices and for tests.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

KINDS = ("code", "prose")
# A package belongs to the pool if it has at least so many bytes of code and of prose. Of larger ones
# only so many are used. Docstrings count from some length on.
LEAST, MOST = {"code": 300_000, "prose": 60_000}, {"code": 1_500_000, "prose": 400_000}
LEAST_DOCSTRING = 300
IN_TESTS, IN_CHOICES = 8, 4  # packages


@functools.cache
def pool() -> dict[str, dict[str, np.ndarray]]:
    """The bytes of the installed packages, by package and kind."""
    found = {}
    for folder in sorted(Path(sysconfig.get_path("purelib")).iterdir()):
        if folder.is_dir() and folder.name.isidentifier():
            texts = dict.fromkeys(KINDS, b"")
            for path in sorted(folder.rglob("*.py")):
                if any("vendor" in part for part in path.parts):  # copies of other packages
                    continue
                if all(len(texts[kind]) >= MOST[kind] for kind in KINDS):
                    break
                source = path.read_bytes()
                texts["code"] += source[: max(0, MOST["code"] - len(texts["code"]))]
                if len(texts["prose"]) < MOST["prose"]:
                    texts["prose"] += "\n\n".join(docstrings(source)).encode()
            if all(len(texts[kind]) >= LEAST[kind] for kind in KINDS):
                found[folder.name] = {
                    kind: np.frombuffer(x, np.uint8)[: MOST[kind]] for kind, x in texts.items()
                }
    return found


def docstrings(source: bytes) -> Iterator[str]:
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node) or ""
            if len(text) >= LEAST_DOCSTRING:
                yield text


class Split(NamedTuple):
    """Packages of a seed: for training, for choices, and for tests."""

    training: list[str]
    choices: list[str]
    tests: list[str]


def split(seed: int) -> Split:
    names = sorted(pool())
    order = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    ends = IN_TESTS, IN_TESTS + IN_CHOICES
    return Split(order[ends[1] :], order[ends[0] : ends[1]], order[: ends[0]])


def batches(names: list[str], count: int, n: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of texts (count, n + 1) from random places, half of them code."""
    parts = [torch.from_numpy(np.concatenate([pool()[x][kind] for x in names])) for kind in KINDS]
    while True:
        texts = [
            part[start + torch.arange(n + 1)]
            for part in parts
            for start in [torch.randint(len(part) - n - 1, (count // 2, 1), generator=generator)]
        ]
        yield torch.cat(texts).long()


def texts(names: list[str], count: int, n: int, seed: int) -> Tensor:
    """`count` texts of each kind (2 count, n + 1), as many of each package."""
    rng, found = np.random.default_rng(seed), []
    for kind in KINDS:
        for i in range(count):
            source = pool()[names[i % len(names)]][kind]
            start = rng.integers(len(source) - n - 1)
            found.append(source[start : start + n + 1])
    return torch.from_numpy(np.stack(found)).long()
