"""Threads of NumPy's passes: the limit of the BLAS, callers in threads of their own, exceptions, forks."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import isentropic as it
from isentropic import _threads

pytestmark = pytest.mark.host

LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@pytest.fixture(autouse=True)
def _blas_of_several_threads():
    """The environment may limit the BLAS to one thread for the other tests."""
    before = [(library, library.num_threads) for library in _threads._controller().lib_controllers]
    for library, _ in before:
        _threads._set_threads(library, os.cpu_count())
    yield
    for library, n in before:
        _threads._set_threads(library, n)


@pytest.fixture
def four_threads(monkeypatch):
    available = _threads._available
    monkeypatch.setattr(_threads, "_available", lambda: 4 if available() > 1 else 1)
    if available() == 1:
        pytest.skip("there is one core")


def blas_threads():
    return [library.num_threads for library in _threads._controller().lib_controllers]


def test_all_items_once_each_with_a_blas_of_one_thread(four_threads):
    before, seen, limits, who = blas_threads(), [], [], set()

    def work(i):
        seen.append(i)
        limits.extend(blas_threads())
        who.add(threading.get_ident())
        barrier.wait(timeout=30)  # four at a time, or this breaks

    barrier = threading.Barrier(4)
    _threads.run(work, range(8))
    assert sorted(seen) == list(range(8))
    assert set(limits) <= {1}
    assert len(who) == 4
    assert blas_threads() == before


def test_exception_reaches_the_caller_and_leaves_nothing_behind(four_threads):
    before, threads, done = blas_threads(), threading.enumerate(), []

    def work(i):
        if i == 2:
            raise KeyboardInterrupt
        done.append(i)

    with pytest.raises(KeyboardInterrupt):
        _threads.run(work, range(10_000))
    assert blas_threads() == before
    assert _threads._blas.calls == 0
    assert len(done) < 10_000
    assert threading.enumerate() == threads


def test_an_interrupt_comes_before_errors_of_other_threads(four_threads):
    def work(i):
        barrier.wait(timeout=30)
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.1)
            raise KeyboardInterrupt
        raise ValueError

    barrier = threading.Barrier(4)
    with pytest.raises(KeyboardInterrupt):
        _threads.run(work, range(4))


def test_interrupt_before_the_first_item_lifts_the_limit(monkeypatch):
    before, available = blas_threads(), _threads._available

    def interrupted():
        if blas_threads() != before:
            raise KeyboardInterrupt
        return available()

    if available() == 1:
        pytest.skip("there is no limit to lift")
    monkeypatch.setattr(_threads, "_available", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _threads.run(print, range(4))
    assert blas_threads() == before
    assert _threads._blas.calls == 0


def test_errstate_of_the_caller_holds(four_threads):
    def work(i):
        np.log(np.zeros(3))

    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        _threads.run(work, range(4))
    with np.errstate(divide="ignore"):
        _threads.run(work, range(4))


def test_one_thread_where_the_blas_may_use_one(rng):
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"):
        who = set()
        _threads.run(lambda i: who.add(threading.get_ident()), range(4))
    assert who == {threading.get_ident()}


def test_callers_in_a_thread_pool(four_threads, rng):
    q, k, v = rng.normal(size=(3, 2, 700, 8)).astype("float32")
    expected = it.attention(q, k, v, is_causal=True), it.attention_entropy(q, k, order=2)
    before = blas_threads()

    def call(_):
        return it.attention(q, k, v, is_causal=True), it.attention_entropy(q, k, order=2)

    with ThreadPoolExecutor(16) as pool:
        for got in pool.map(call, range(32)):
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert blas_threads() == before


def test_a_thread_that_may_not_change_the_limit_leaves_the_work_to_the_blas(four_threads):
    # threadpoolctl gives the limit to the thread that has set it, until that thread clears it.
    who, limits, before = set(), set(), blas_threads()
    for library in _threads._controller().lib_controllers:
        library.set_num_threads(library.num_threads)

    def work(i):
        who.add(threading.get_ident())
        limits.update(blas_threads())

    caller = threading.Thread(target=_threads.run, args=(work, range(4)))
    caller.start()
    caller.join(timeout=30)
    for library in _threads._controller().lib_controllers:
        getattr(library, "clear_controlling_thread", lambda: None)()
    assert who
    assert who == {caller.ident} or limits <= {1}
    assert blas_threads() == before
    assert not _threads._blas.is_limited


def test_the_limit_holds_until_the_last_of_several_calls_ends(four_threads):
    before = blas_threads()
    first_is_in, second_is_in, limits = threading.Event(), threading.Event(), []

    def first():
        with _threads._blas.limited() as share:
            limits.append((share, blas_threads()))
            first_is_in.set()
            assert second_is_in.wait(timeout=30)

    def second():
        assert first_is_in.wait(timeout=30)
        with _threads._blas.limited() as share:
            second_is_in.set()
            threads[0].join(timeout=30)
            limits.append((share, blas_threads()))

    threads = [threading.Thread(target=call) for call in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    ones = [1] * len(before)
    assert limits == [(4, ones), (2, ones)]
    assert blas_threads() == before


def test_nested(four_threads):
    total = []
    _threads.run(lambda i: _threads.run(lambda j: total.append((i, j)), range(5)), range(5))
    assert len(set(total)) == 25


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_fork_in_the_middle_of_a_call():
    program = """
        import os
        import numpy as np
        import isentropic as it
        from isentropic import _threads

        available = _threads._available
        _threads._available = lambda: 4 if available() > 1 else 1
        q = np.random.default_rng(0).normal(size=(1500, 8)).astype("float32")

        def work(i):
            if i == 1:
                child = os.fork()
                if child == 0:
                    assert _threads._blas.calls == 0
                    os._exit(0 if np.isfinite(it.attention(q, q, q)).all() else 1)
                assert os.waitpid(child, 0)[1] == 0

        _threads.run(work, range(4))
        print("done")
    """
    environment = {name: value for name, value in os.environ.items() if name not in LIMITS}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert run.stdout == "done\n", run.stderr
