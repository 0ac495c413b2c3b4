"""Communicators in a larger program: many in one process, closing, garbage collection and timeouts."""

from __future__ import annotations

import gc
import math
import os
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl import (
    Communicator,
    MasterNode,
    ReduceDescriptor,
    ReduceOpDescriptor,
    Result,
    SharedState,
)
from pccl.runtime.threads import portal
from tests.support.cluster import (
    SUM,
    WAIT_S,
    Background,
    Cluster,
    ones,
    reduce_once,
    refusal,
    results,
    until,
    waits_at_master,
)

# Many in one process.


def test_twenty_peers_in_one_process(cluster: Cluster) -> None:
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
def test_closed_peers_leak_nothing(cluster: Cluster) -> None:
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


def test_connect_from_two_threads(cluster: Cluster) -> None:
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


def test_close_ends_a_connect_in_another_thread(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_close_ends_calls_in_other_threads(cluster: Cluster, name: str) -> None:
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


def test_handle_outlives_its_communicator(cluster: Cluster) -> None:
    cluster.join(2)
    x = ones()
    handle = cluster[0].all_reduce_async(x, op=SUM)
    forgotten = weakref.ref(cluster.peers.pop(0))
    gc.collect()
    assert forgotten() is None
    assert handle.wait(WAIT_S) == (False, Result.NOT_INITIALIZED, None)
    assert "closed" in str(refusal(handle.result))
    assert np.all(x == 1)


def test_op_keeps_its_array_alive(cluster: Cluster) -> None:
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


# Signals.


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


def test_timeout_zero_negative_and_huge(cluster: Cluster) -> None:
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


def test_timeout_of_close(cluster: Cluster) -> None:
    cluster.join(2)
    peer = cluster.peers.pop()
    session = peer._inner._session
    assert session is not None
    error = refusal(partial(peer.close, timeout=0))
    assert (error.result, error.func_name) == (Result.TIMEOUT, "close")
    peer.close(timeout=WAIT_S)
    until(lambda: cluster[0].world_size == 1, "it has left all the same")
    assert refusal(peer.update_topology).result is Result.NOT_INITIALIZED
