"""Threads for work of NumPy in blocks, each with NumPy's BLAS held to one thread.

Every call has a pool of its own, so that none waits for another, that nothing is left behind by an
interrupt, and that a forked process finds none of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

_Item = TypeVar("_Item")


def run(function: Callable[[_Item], Any], items: Sequence[_Item]) -> None:
    """``function(item)`` for all items, on as many threads as the process has cores to use."""
    if len(items) < 2 or n_threads() == 1:
        return _in_turn(function, items)
    with _blas.limited() as share:
        if share == 1:
            return _in_turn(function, items)
        from concurrent.futures import ThreadPoolExecutor  # which takes a while, with its logging

        with ThreadPoolExecutor(min(share, len(items))) as pool:
            # Each in the context of the caller, where NumPy's errstate is.
            futures = [pool.submit(copy_context().run, function, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _in_turn(function: Callable[[_Item], Any], items: Sequence[_Item]) -> None:
    for item in items:
        function(item)


def n_threads() -> int:
    """The cores that the process may use, or the threads that its BLAS may if those are fewer."""
    return _blas.threads if _blas.is_limited else _available()


def _available() -> int:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    libraries = [library.num_threads for library in _controller().lib_controllers]
    return max(1, min(len(cores), max(libraries, default=len(cores))))


@functools.cache
def _controller() -> Any:
    import numpy as np  # noqa: F401  (its BLAS has to be there to be found)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


class _Blas:
    """The limit of the BLAS, which belongs to the process: only the one who has set it may lift it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        self.threads = 1
        self.is_limited = False

    @contextlib.contextmanager
    def limited(self) -> Iterator[int]:
        """Gives the threads that fall to this call, or 1 where another call holds the limit."""
        previous_limits: list[tuple[Any, int]] = []
        is_registered = False
        # All within the `try`: an interrupt may come after any step, the first limit among them.
        try:
            with self.lock:
                if not self.is_limited:
                    self.threads = _available()
                    previous_limits += [(x, x.num_threads) for x in _controller().lib_controllers]
                    for library, _ in previous_limits:
                        library.set_num_threads(1)
                    # It lets one thread of the process change it, and ignores the others.
                    self.is_limited = _available() == 1
                self.calls += 1
                is_registered = True
                share = max(1, self.threads // self.calls) if self.is_limited else 1
            yield share
        finally:
            with self.lock:
                self.calls -= is_registered
                for library, n in previous_limits:
                    library.set_num_threads(n)
                    self.is_limited = False


_blas = _Blas()


def _reset_after_fork() -> None:
    """For a forked process, whose parent may have been in the middle of a call."""
    global _blas
    if _blas.is_limited:
        for library in _controller().lib_controllers:
            library.set_num_threads(_blas.threads)
    _blas = _Blas()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
