"""Ops that wait and ops that do not, by turns on one tag: each peer counts every use of it once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from pccl import Communicator, MasterNode
from pccl.runtime.threads import portal
from tests.support.cluster import SUM, WAIT_S, Background, Cluster, ones, reduce_once

ROUNDS = 600
"""The rounds of the hammer; a use that is counted in the wrong order is met within some hundred."""
TAGS = 3


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A run without peers yet, whose engines have one or two threads."""
    with MasterNode("127.0.0.1:0", engine_threads=request.param) as master:
        cluster = Cluster(master.address)
        yield cluster
        cluster.close_all()


class Pause:
    """Wraps a method of the trio thread's: once armed, its next call waits at its end for `go_on`."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = method
        self._is_armed = False
        self.is_there, self.go_on = threading.Event(), threading.Event()

    def arm(self) -> None:
        self._is_armed = True

    def __call__(self) -> None:
        self._method()
        if self._is_armed:
            self._is_armed = False
            self.is_there.set()
            self.go_on.wait(WAIT_S)


def test_fast_path_before_a_launch_of_the_same_tag(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op takes the fast path after the session has heard the engine, and the next of its tag is launched before
    the session looks at the queue: it has to hear again first."""
    monkeypatch.setattr("pccl.runtime.data_plane.fast_path.WAIT_MS", round(WAIT_S * 1000))
    cluster.join(2)
    for tag in range(2):
        cluster.each(lambda peer, _, tag=tag: peer.all_reduce(ones(), op=SUM, tag=tag))  # type: ignore[misc]
    session = cluster[0]._inner.session("")
    pause = Pause(session._driver.hear)
    monkeypatch.setattr(session._driver, "hear", pause)

    def begin() -> None:
        pause.arm()
        session.ops._take()

    portal.current().post(begin)
    assert pause.is_there.wait(WAIT_S)
    with_threads = session._fast_path.has_threads  # then the fast path was closed to hear
    calls = [Background(partial(reduce_once, peer)) for peer in cluster.peers]
    handles = []
    if not with_threads:
        for call in calls:
            call.result()
        x = ones()
        handles = [peer.all_reduce_async(x if i == 0 else ones(), op=SUM) for i, peer in enumerate(cluster.peers)]
    pause.go_on.set()
    for handle in handles:
        assert handle.wait()[0]
    for call in calls:
        call.result()
    cluster.each(reduce_once)


def test_blocking_and_launched_ops_alternate(cluster: Cluster) -> None:
    """Two threads of each peer alternate on each tag while others use other tags."""
    cluster.join(2)

    def play(peer: Communicator, tag: int) -> None:
        turns = threading.Semaphore(1), threading.Semaphore(0)
        failures: list[BaseException] = []

        def take_turns(which: int) -> None:
            try:
                for number in range(which, ROUNDS, 2):
                    assert turns[which].acquire(timeout=WAIT_S)
                    x = np.full(16, number, np.float32)
                    if which:
                        assert peer.all_reduce_async(x, op=SUM, tag=tag).wait(WAIT_S)[0]
                    else:
                        peer.all_reduce(x, op=SUM, tag=tag, timeout=WAIT_S)
                    assert np.all(x == 2 * number), (number, x[0])
                    turns[1 - which].release()
            except BaseException as error:
                failures.append(error)
                turns[1 - which].release()

        threads = [threading.Thread(target=take_turns, args=(which,), daemon=True) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * WAIT_S)
            assert not thread.is_alive()
        if failures:
            raise failures[0]

    players: list[Background] = [Background(partial(play, peer, tag)) for peer in cluster.peers for tag in range(TAGS)]
    for player in players:
        player.result(10 * WAIT_S)
    assert cluster.each(reduce_once) == [2, 2]
