"""Waits for ops that were launched before: what counts as time in ops."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from pccl import Communicator
from pccl.runtime.data_plane import overlapped_waits
from pccl.runtime.data_plane.overlapped_waits import OverlappedWaits
from tests.support.cluster import SUM, Background, ones, run_of, until

STATS = {"in_ops_us": 100, "op_wait_us": 7, "late_ms": 3}


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_us = 5_000

    def monotonic_ns(self) -> int:
        return 1000 * self.now_us


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(overlapped_waits, "time", clock)
    return clock


def test_waits_count_once_however_many_there_are(clock: Clock) -> None:
    waits = OverlappedWaits()
    assert waits.added_to(STATS) == STATS
    for op, now_us in ((1, 6_000), (2, 7_000)):
        clock.now_us = now_us
        waits.begin(op)
    clock.now_us = 7_500
    assert waits.added_to(STATS) == {"in_ops_us": 1_600, "op_wait_us": 1_500, "late_ms": 3}
    waits.end(1)
    assert waits.added_to(STATS) == {"in_ops_us": 1_600, "op_wait_us": 500, "late_ms": 3}
    clock.now_us = 8_000
    waits.end(2)
    clock.now_us = 9_000
    assert waits.added_to(STATS) == {"in_ops_us": 2_100, "op_wait_us": 7, "late_ms": 3}


def test_an_op_is_waited_for_until_the_last_of_its_callers_gives_up(clock: Clock) -> None:
    waits = OverlappedWaits()
    waits.begin(1)
    clock.now_us += 10
    waits.begin(2)
    waits.end(1)
    clock.now_us += 10
    assert waits.added_to(STATS)["in_ops_us"] == 120
    waits.end(2)
    clock.now_us += 10
    assert waits.added_to(STATS)["in_ops_us"] == 120


def test_what_the_engine_times_does_not_count_twice(clock: Clock) -> None:
    engine_us = 0
    waits = OverlappedWaits(lambda: 1000 * engine_us)
    waits.begin(1)
    clock.now_us += 100
    engine_us += 70  # another thread was in an op
    assert waits.added_to({"in_ops_us": engine_us, "op_wait_us": 0})["in_ops_us"] == 100
    waits.end(1)
    clock.now_us += 100
    engine_us += 50
    assert waits.added_to({"in_ops_us": engine_us, "op_wait_us": 0})["in_ops_us"] == 150


def test_only_waits_count_where_a_caller_polls(clock: Clock) -> None:
    waits = OverlappedWaits()
    for _ in range(3):
        waits.begin(1)
        clock.now_us += 100
        waits.end(1)
        clock.now_us += 900
    assert waits.added_to(STATS) == {"in_ops_us": 400, "op_wait_us": 7, "late_ms": 3}


def test_a_signal_handler_may_close_the_communicator_within_any_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler waits for a lock that the interrupted thread holds."""
    with run_of(2) as cluster:
        handle = cluster[0].all_reduce_async(ones(), op=SUM)
        is_armed = True

        def monotonic_ns() -> int:
            nonlocal is_armed
            if is_armed and threading.current_thread() is threading.main_thread():
                is_armed = False
                signal.raise_signal(signal.SIGUSR1)
            return time.monotonic_ns()

        before = signal.signal(signal.SIGUSR1, lambda *_: cluster[0].close())
        try:
            monkeypatch.setattr(overlapped_waits, "time", SimpleNamespace(monotonic_ns=monotonic_ns))
            assert not handle.wait()[0]
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert not is_armed
        assert not cluster[0].is_connected


def stats_of(peer: Communicator) -> dict[str, int]:
    session = peer._inner.session("stats")
    return session.overlapped_waits.added_to(session.stats())


@pytest.mark.parametrize("elements", [8, 1 << 20])
def test_an_op_counts_from_when_its_handle_is_waited_for(elements: int) -> None:
    with run_of(2) as cluster:
        before = stats_of(cluster[0])["in_ops_us"]
        handle = cluster[0].all_reduce_async(ones(elements), op=SUM)
        until(lambda: stats_of(cluster[0])["ops_open"], "it is in flight")
        assert stats_of(cluster[0])["op_wait_us"] == 0
        assert stats_of(cluster[0])["in_ops_us"] == before
        waiter = Background(handle.wait)
        until(lambda: stats_of(cluster[0])["op_wait_us"] > 10_000, "a caller waits for it")
        cluster[1].all_reduce(ones(elements), op=SUM)
        assert waiter.result()[0]
        assert stats_of(cluster[0])["op_wait_us"] == 0
        assert stats_of(cluster[0])["in_ops_us"] >= before + 10_000


def test_a_wait_that_is_given_up_is_no_time_in_ops_any_more() -> None:
    with run_of(2) as cluster:
        handle = cluster[0].all_reduce_async(ones(), op=SUM)
        assert not handle.wait(0.05)[0]
        in_ops_us = stats_of(cluster[0])["in_ops_us"]
        assert in_ops_us >= 50_000
        assert stats_of(cluster[0])["in_ops_us"] == in_ops_us
        cluster[1].all_reduce(ones(), op=SUM)
        assert handle.wait()[0]


def test_the_oldest_op_tells_for_how_long_somebody_waits() -> None:
    """Ops of other threads that begin and end meanwhile do not make it young again."""
    with run_of(2) as cluster:
        waiter = Background(partial(cluster[0].all_reduce, ones(), op=SUM, tag=1))
        until(lambda: stats_of(cluster[0])["ops_open"], "it is in flight")
        ages = []
        for _ in range(3):
            beside = Background(partial(cluster[1].all_reduce, ones(), op=SUM))
            cluster[0].all_reduce(ones(), op=SUM)
            beside.result()
            ages.append(stats_of(cluster[0])["op_wait_us"])
        assert 0 < ages[0] < ages[1] < ages[2]
        cluster[1].all_reduce(ones(), op=SUM, tag=1)
        waiter.result()
        until(lambda: not stats_of(cluster[0])["op_wait_us"], "no caller waits any more")


def test_wait_on_fast_path_counts_as_a_whole(clock: Clock) -> None:
    waits = OverlappedWaits()
    clock.now_us = 1_000
    began_ns = 1_000_000
    clock.now_us = 1_300
    waits.joined(began_ns)
    assert waits.added_to(STATS)["in_ops_us"] == STATS["in_ops_us"] + 300
