"""Threads for blocks of NumPy work, with NumPy's BLAS limited to one thread meanwhile.

Every call starts threads of its own. So no call waits for another one, an interrupt leaves no threads
behind, and a forked process inherits none.
"""

from __future__ import annotations

import contextlib
import functools
import os
from _thread import allocate_lock  # `threading.Lock`, without the import of `threading`
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

_Item = TypeVar("_Item")


def run(function: Callable[[_Item], Any], items: Sequence[_Item]) -> None:
    """Call ``function(item)`` for all items, on one thread per core that the process may use."""
    if len(items) < 2 or n_threads() == 1:
        return _in_turn(function, items)
    with _blas.limited() as share:
        if share == 1:
            return _in_turn(function, items)
        _side_by_side(function, items, share)


def _side_by_side(function: Callable[[_Item], Any], items: Sequence[_Item], n: int) -> None:
    """Call the function on n threads, of which the caller's is one.

    A pool of `concurrent.futures` takes half a millisecond, five times as long, and its futures let the
    threads wait for one another after each item.
    """
    import threading

    waiting = deque(items)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                function(item)
        except BaseException as error:
            errors.append(error)
            waiting.clear()

    # Threads run in copies of the caller's context, which holds NumPy's errstate.
    others = range(min(n, len(items)) - 1)
    threads = [threading.Thread(target=copy_context().run, args=(work,)) for _ in others]
    try:
        for thread in threads:
            thread.start()
        work()
    finally:
        waiting.clear()  # after an interrupt
        for thread in threads:
            if thread.ident is not None:  # it has started
                thread.join()
    if errors:
        try:
            # An interrupt comes before the errors that other threads may have met.
            raise next((x for x in errors if not isinstance(x, Exception)), errors[0])
        finally:
            errors.clear()  # the traceback of an error refers to this list, which would be a cycle


def _in_turn(function: Callable[[_Item], Any], items: Sequence[_Item]) -> None:
    for item in items:
        function(item)


def n_threads() -> int:
    """The number of cores that the process may use, or of its BLAS threads if those are fewer."""
    return _blas.threads if _blas.is_limited else _available()


def _available() -> int:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    libraries = [library.num_threads for library in _controller().lib_controllers]
    return max(1, min(len(cores), max(libraries, default=len(cores))))


@functools.cache
def copies_small_operands() -> bool:
    """Whether NumPy's BLAS copies the operands of small products, as OpenBLAS does without AVX-512.

    Then small products take long, and even longer in several threads, as they share the list of the
    memory for copies.
    """
    libraries = _controller().lib_controllers
    return any(getattr(x, "architecture", None) in ("Haswell", "Zen") for x in libraries)


@functools.cache
def _controller() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


class _Blas:
    """The thread limit of the BLAS.

    Of several calls at a time, the first one sets it, and the last one to finish lifts it.
    """

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.calls = 0
        self.threads = 1
        self.is_limited = False
        self.previous: list[tuple[Any, int]] = []  # libraries, with their limits before

    @contextlib.contextmanager
    def limited(self) -> Iterator[int]:
        """Limit the BLAS to one thread, and yield the number of threads that this call may use."""
        previous_here: list[tuple[Any, int]] = []
        is_registered = False
        # Every step is inside the `try`, as an interrupt may come between any two of them.
        try:
            with self.lock:
                if not self.is_limited:
                    self.threads = _available()
                for library in _controller().lib_controllers:
                    # With OpenMP each thread has a limit of its own.
                    is_of_thread = getattr(library, "threading_layer", None) == "openmp"
                    if is_of_thread or not self.is_limited:
                        previous = previous_here if is_of_thread else self.previous
                        previous.append((library, library.num_threads))
                        _set_threads(library, 1)
                # A BLAS may ignore a limit, so it is read back.
                self.is_limited = self.is_limited or _available() == 1
                self.calls += 1
                is_registered = True
                share = max(1, self.threads // self.calls) if self.is_limited else 1
            yield share
        finally:
            with self.lock:
                self.calls -= is_registered
                _restore(previous_here)
                if not self.calls:
                    _restore(self.previous)
                    self.is_limited = False


def _set_threads(library: Any, n: int) -> None:
    library.set_num_threads(n)
    # threadpoolctl lets only the thread that has set a limit set another one, until it is cleared. The
    # lock of `_Blas` takes care of that.
    if hasattr(library, "clear_controlling_thread"):
        library.clear_controlling_thread()


def _restore(previous: list[tuple[Any, int]]) -> None:
    while previous:
        library, n = previous[-1]
        _set_threads(library, n)
        previous.pop()


_blas = _Blas()


def _reset_after_fork() -> None:
    """Lift the limit in a forked process, whose parent may have been in the middle of a call."""
    global _blas
    if _blas.is_limited:
        for library in _controller().lib_controllers:
            _set_threads(library, _blas.threads)
    _blas = _Blas()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
