"""Living in somebody else's process: many communicators, what they leave behind, garbage, signals and timeouts."""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from pccl import (
    Communicator,
    MasterNode,
    PCCLError,
    ReduceDescriptor,
    ReduceOpDescriptor,
    Result,
    SharedState,
)
from pccl.runtime.session.ops import Ops
from pccl.runtime.threads import portal
from tests.support import stacks
from tests.support.cluster import (
    SUM,
    WAIT_S,
    Background,
    Cluster,
    ones,
    outcomes,
    reduce_once,
    refusal,
    results,
    until,
    waits_at_master,
)
from tests.support.interrupts import KINDS, Interrupt, at_step, interrupted_at

# Many in one process.


def test_twenty_peers_and_their_master_in_one_process(cluster: Cluster) -> None:
    cluster.join(1, p2p_connection_pool_size=1)
    cluster.admit([cluster.new(p2p_connection_pool_size=1) for _ in range(19)])
    assert cluster.each(reduce_once) == [20] * 20
    states = [SharedState.from_numpy({"x": np.full(1000, i)}) for i in range(20)]
    cluster.each(lambda peer, i: peer.sync_shared_state(states[i]))
    cluster.close(cluster[7])
    assert cluster.each(reduce_once) == [19] * 19


def holdings() -> tuple[int, int]:
    """Descriptors and threads of this process, those of the engine among them."""
    tasks = Path("/proc/self/task")
    return len(os.listdir("/proc/self/fd")), len(os.listdir(tasks)) if tasks.exists() else threading.active_count()


def resident_kib() -> int:
    """Memory of this process, and not the most that an earlier test has used."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to count")
@pytest.mark.slow
def test_peers_that_come_and_go_leave_nothing_behind(cluster: Cluster) -> None:
    cluster.join(1)

    def come_and_go(times: int) -> None:
        for _ in range(times):
            cluster.join(1)
            cluster.each(reduce_once)
            cluster.close(cluster[1])

    come_and_go(10)
    gc.collect()  # also what other tests have left
    held = holdings()
    resident = resident_kib()
    come_and_go(190)
    until(lambda: all(now <= before for now, before in zip(holdings(), held, strict=True)), f"no more than {held} held")
    gc.collect()  # where much else lives, as with torch, Python itself seldom looks at all of it
    assert resident_kib() < resident + 16 * 1024
    assert len(portal._closers) < 10


def test_two_threads_cannot_connect_one_communicator(cluster: Cluster) -> None:
    cluster.join(1)
    newcomer = cluster.new()
    first = Background(newcomer.connect)
    until(lambda: newcomer._inner._is_connecting, "it connects")
    error = refusal(newcomer.connect)
    assert (error.result, "is connecting it" in str(error)) == (Result.INVALID_USAGE, True)
    cluster.peers.append(newcomer)
    while cluster[0].world_size < 2:
        cluster[0].update_topology()
    first.result()
    assert cluster.each(reduce_once) == [2, 2]


# Closing and forgetting in every state.


def test_closing_ends_a_connect_in_another_thread(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.join(1)
    waiting = cluster.new()
    calls = [Background(waiting.connect)]
    until(partial(waits_at_master, waiting), "it waits to be admitted")
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.01)
    with MasterNode("127.0.0.1:0") as gone:
        address = gone.address
    trying = Communicator(address)
    calls.append(Background(partial(trying.connect, 10**9)))
    until(lambda: trying._inner._is_connecting, "it tries")
    for peer in (waiting, trying):
        peer.close()
    assert [call.outcome().result for call in calls] == [Result.NOT_INITIALIZED] * 2
    until(lambda: not cluster[0].are_peers_pending(), "it has withdrawn")


@pytest.mark.parametrize("name", ["all_reduce", "many", "update_topology", "are_peers_pending", "sync_shared_state"])
def test_closing_ends_the_calls_of_other_threads(cluster: Cluster, name: str) -> None:
    cluster.join(2)
    x = ones()
    ops = [ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(8, SUM))]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": partial(cluster[0].all_reduce, x, op=SUM),
        "many": partial(cluster[0].all_reduce_multiple_with_retry, ops),
        "sync_shared_state": lambda: cluster[0].sync_shared_state(SharedState.from_numpy({"x": x})),
    }
    waiting = [Background(calls.get(name) or getattr(cluster[0], name)) for _ in range(1)]
    session = cluster[0]._inner._session
    assert session is not None
    until(lambda: session.ops.table or len(session._calls), "it waits")
    cluster.peers.pop(0).close()
    assert results([call.outcome() for call in waiting]) == [Result.NOT_INITIALIZED]
    assert np.all(x == 1)


def test_a_handle_outlives_its_communicator(cluster: Cluster) -> None:
    cluster.join(2)
    x = ones()
    handle = cluster[0].all_reduce_async(x, op=SUM)
    forgotten = weakref.ref(cluster.peers.pop(0))
    gc.collect()
    assert forgotten() is None
    assert handle.wait(WAIT_S) == (False, Result.NOT_INITIALIZED, None)
    assert "closed" in str(refusal(handle.result))
    assert np.all(x == 1)


def test_arrays_and_handles_that_nobody_holds_are_reduced_all_the_same(cluster: Cluster) -> None:
    cluster.join(2)
    x = np.ones(100_000, np.float32)
    collected = weakref.ref(x)
    handle = cluster[0].all_reduce_async(x, op=SUM, tag=1)
    forgotten = weakref.ref(handle)
    del x, handle
    gc.collect()
    assert forgotten() is None
    assert collected() is not None, "it is still reduced"
    other = np.ones(100_000, np.float32)
    cluster[1].all_reduce(other, op=SUM, tag=1)
    assert np.all(other == 2)
    until(lambda: collected() is None, "the array is let go of")
    assert cluster.each(reduce_once) == [2, 2]


def test_an_exception_inside_the_with_statement_leaves_the_run(cluster: Cluster) -> None:
    cluster.join(1)

    def fails() -> None:
        with Communicator(cluster.address) as peer:
            peer.all_reduce_async(ones(), op=SUM)
            raise ZeroDivisionError

    failing = Background(fails)
    while not failing.is_over:
        cluster[0].update_topology()
    with pytest.raises(ZeroDivisionError):
        failing.result()
    until(lambda: cluster[0].world_size == 1, "it has left")


# Signals.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.handle.INTERRUPT_GRACE_S", 0.05)
    monkeypatch.setattr("pccl.runtime.threads.portal.INTERRUPT_GRACE_S", 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_in_a_launch_leaves_nothing_in_flight(
    cluster: Cluster, impatient: None, kind: str
) -> None:
    cluster.join(2)
    session = cluster[0]._inner._session
    assert session is not None
    handle: Any = None

    def call() -> None:
        nonlocal handle
        handle = cluster[0].all_reduce_async(ones(), op=SUM)

    for step in itertools.count():
        if interrupted_at(step, call, KINDS[kind]):
            assert step > 20
            break
        until(lambda: not (session.ops.table or session.ops.holders), f"nothing is in flight after step {step}")
    # The other side hears late of each that was given up, and then meets the one that was not.
    until(lambda: results(outcomes([partial(reduce_once, cluster[1])])) == [Result.SUCCESS], "they meet")
    assert handle.wait(WAIT_S)[0]


def is_in_no_call(peer: Communicator) -> bool:
    session = peer._inner._session
    assert session is not None
    portal.current().call(trio.lowlevel.checkpoint)  # a call that was on its way to the trio thread has begun there
    return not len(session._calls)


@pytest.mark.parametrize("name", ["update_topology", "are_peers_pending", "optimize_topology", "sync_shared_state"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_in_a_group_call_withdraws_from_it(
    cluster: Cluster, impatient: None, name: str, kind: str
) -> None:
    cluster.join(2)
    arguments = [SharedState.from_numpy({"x": ones()})] if name == "sync_shared_state" else []
    for step in itertools.count():
        has_slept = interrupted_at(step, lambda: getattr(cluster[0], name)(*arguments), KINDS[kind])
        until(partial(is_in_no_call, cluster[0]), "it has withdrawn")  # else it may meet the next call of the other one
        cluster.each(lambda peer, _: getattr(peer, name)(*arguments, timeout=WAIT_S))
        if has_slept:
            assert step > 10
            break
    assert cluster.each(reduce_once) == [2, 2]


def gives_up(peer: Communicator) -> bool:
    return not peer._inner._is_connecting


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_in_connect_withdraws_from_it(cluster: Cluster, impatient: None, kind: str) -> None:
    cluster.join(1)
    for step in itertools.count():
        newcomer = cluster.new()
        has_slept = interrupted_at(step, newcomer.connect, KINDS[kind])
        until(partial(gives_up, newcomer), "it has given up")
        until(lambda: not cluster[0].are_peers_pending(), "it has withdrawn")
        if has_slept:
            assert step > 10
            break
    cluster.admit([newcomer])
    assert cluster.each(reduce_once) == [2, 2]


def test_random_numbers_of_the_program_are_its_own() -> None:
    """Also where a peer looks for another master, again and again at moments that nobody can foresee."""
    with MasterNode("127.0.0.1:0") as master:
        cluster = Cluster(master.address)
        cluster.join(2)
        random.seed(1)
        before = random.getstate()
        assert cluster.each(reduce_once) == [2, 2]
    found = cluster.outcomes(lambda peer, _: peer.update_topology())
    assert results(found) == [Result.MASTER_CONNECTION_FAILED] * 2
    assert random.getstate() == before
    cluster.close_all()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
def test_a_second_signal_ends_the_wait_for_the_first_one_to_be_settled(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.handle.INTERRUPT_GRACE_S", WAIT_S)
    cluster.join(2)
    session = cluster[0]._inner._session
    assert session is not None
    cancelled = list[tuple[Any, ...]]()
    # As if nobody answered.
    monkeypatch.setattr(Ops, "cancel", lambda _, *arguments: cancelled.append(arguments))
    main_thread = threading.get_ident()

    def sleeps_in(function: str) -> bool:
        frame = stacks.frames()[main_thread]
        names = set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        return {"wait_any", function} <= names

    def signals() -> None:
        until(lambda: sleeps_in("all_reduce"), "it waits")
        signal.pthread_kill(main_thread, signal.SIGUSR1)
        until(lambda: cancelled and sleeps_in("all_reduce"), "it waits for the end of the op")
        signal.pthread_kill(main_thread, signal.SIGUSR1)

    def handle(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        signalling = Background(signals)
        start_s = time.monotonic()
        with pytest.raises(Interrupt):
            cluster[0].all_reduce(ones(), op=SUM, tag=5)
        signalling.result()
        assert time.monotonic() - start_s < WAIT_S / 2
    finally:
        signal.signal(signal.SIGUSR1, before)
        monkeypatch.undo()
    session.ops.cancel(*cancelled[0])
    until(lambda: not session.ops.table, "it is given up")
    assert cluster.each(reduce_once) == [2, 2]


@pytest.mark.parametrize("name", ["all_reduce", pytest.param("all_reduce_async", marks=pytest.mark.slow)])
def test_a_signal_handler_may_close_the_communicator_in_the_middle_of_anything(cluster: Cluster, name: str) -> None:
    """It waits for the trio thread, which must not wait for what the interrupted call holds."""
    cluster.join(1)
    for step in itertools.count():
        (peer,) = cluster.join(1)
        cluster.peers.pop()

        def call(peer: Communicator = peer) -> None:
            with suppress(PCCLError):  # NOT_INITIALIZED, unless it had ended
                getattr(peer, name)(ones(), op=SUM)

        was_last = Background(partial(at_step, step, call, peer.close)).result()
        peer.close()
        until(lambda: cluster[0].world_size == 1, "it has left")
        if was_last:
            assert step > 20
            break


def test_a_signal_handler_may_close_the_communicator_in_the_middle_of_an_op_that_goes_past_the_session(
    cluster: Cluster,
) -> None:
    cluster.join(1)
    for step in itertools.count():
        (peer,) = cluster.join(1)
        cluster.each(reduce_once)
        cluster.peers.pop()
        x = ones()

        def call(peer: Communicator = peer, x: Any = x) -> None:
            with suppress(PCCLError):  # NOT_INITIALIZED
                peer.all_reduce(x, op=SUM)

        was_last = Background(partial(at_step, step, call, peer.close)).result()
        assert np.all(x == 1)
        peer.close()
        until(lambda: cluster[0].world_size == 1, "it has left")
        if was_last:
            assert step > 20
            break


# Timeouts.


def blocking_calls(peer: Communicator) -> dict[str, Callable[[Any], Any]]:
    x = ones()
    ops = [ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(8, SUM))]
    return {
        "all_reduce": lambda timeout: peer.all_reduce(x, op=SUM, timeout=timeout),
        "all_reduce_multiple_with_retry": lambda timeout: peer.all_reduce_multiple_with_retry(ops, timeout=timeout),
        "are_peers_pending": lambda timeout: peer.are_peers_pending(timeout=timeout),
        "update_topology": lambda timeout: peer.update_topology(timeout=timeout),
        "optimize_topology": lambda timeout: peer.optimize_topology(timeout=timeout),
        "sync_shared_state": lambda timeout: peer.sync_shared_state(SharedState.from_numpy({"x": x}), timeout=timeout),
    }


def test_every_timeout_may_be_nothing_or_huge_and_withdraws_the_call(cluster: Cluster) -> None:
    cluster.join(2)
    for name, call in blocking_calls(cluster[0]).items():
        for timeout in (0, -1, -math.inf, np.float32(0.001)):
            error = refusal(partial(call, timeout))
            assert (error.result, error.func_name) == (Result.TIMEOUT, name)
            if name.startswith("all_reduce"):  # so does the other side's part of that op, however late
                assert refusal(partial(reduce_once, cluster[1])).result is Result.TIMEOUT
    for timeout in (1e300, math.inf, 10**400, None):
        for name, call in blocking_calls(cluster[0]).items():
            del call
            cluster.each(lambda peer, _, name=name, timeout=timeout: blocking_calls(peer)[name](timeout))


@pytest.mark.parametrize("timeout", [math.nan, "1", [1], True, 1j])
def test_what_is_no_time_is_refused_at_once(cluster: Cluster, timeout: Any) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM, tag=1)
    newcomer = cluster.new()
    calls: dict[str, Callable[[Any], Any]] = {
        **blocking_calls(cluster[0]),
        "Communicator": lambda timeout: cluster.new(timeout=timeout),
        "connect": lambda timeout: newcomer.connect(timeout=timeout),
        "close": lambda timeout: cluster[0].close(timeout=timeout),
        "AsyncReduceHandle.wait": handle.wait,
        "MasterNode.wait": MasterNode("127.0.0.1:0").wait,
    }
    for name, call in calls.items():
        error = refusal(partial(call, timeout))
        assert (error.result, error.func_name, "not a number of seconds" in str(error)) == (
            Result.INVALID_ARGUMENT,
            name,
            True,
        )
    until(lambda: cluster[0].stats["ops_open"] == 1, "the op that waits is untouched")
    cluster[1].all_reduce(ones(), op=SUM, tag=1)
    assert handle.wait(WAIT_S)[0]


def test_closing_may_take_no_longer_than_asked(cluster: Cluster) -> None:
    cluster.join(2)
    peer = cluster.peers.pop()
    session = peer._inner._session
    assert session is not None
    error = refusal(partial(peer.close, timeout=0))
    assert (error.result, error.func_name) == (Result.TIMEOUT, "close")
    peer.close(timeout=WAIT_S)
    until(lambda: cluster[0].world_size == 1, "it has left all the same")
    assert refusal(peer.update_topology).result is Result.NOT_INITIALIZED


def test_times_of_other_calls() -> None:
    with MasterNode("127.0.0.1:0") as master:
        start_s = time.monotonic()
        assert [master.wait(timeout) for timeout in (0, -1, 0.001)] == [False] * 3
        newcomer = Communicator(master.address)
        assert refusal(partial(newcomer.connect, timeout=-1)).result is Result.TIMEOUT
        newcomer.connect(timeout=10**400)
        newcomer.close()
        assert time.monotonic() - start_s < WAIT_S
    assert master.wait(0)
