"""Ops that their callers run past the trio thread, among ops that are launched, and what may come in between."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, ReduceOp, Result
from pccl.runtime.threads import portal
from tests.support.cluster import SUM, WAIT_S, Background, Cluster, ones, outcomes, reduce_once, results, until
from tests.support.interrupts import Interrupt, interrupted_at

OTHER_TAG = 7


@contextmanager
def session_held_up() -> Iterator[Callable[[], None]]:
    """The trio thread, which is that of all communicators here, does nothing until the call or the end."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        go_on.wait(WAIT_S)

    portal.current().post(hold)
    assert is_held.wait(WAIT_S)
    try:
        yield go_on.set
    finally:
        go_on.set()


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A run without peers yet, whose engines have one or two threads."""
    with MasterNode("127.0.0.1:0", engine_threads=request.param) as master:
        cluster = Cluster(master.address)
        yield cluster
        cluster.close_all()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let callers wait long on the fast path: on a busy machine even a small op may take long."""
    monkeypatch.setattr("pccl.runtime.data_plane.fast_path.WAIT_MS", round(WAIT_S * 1000))


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("size", [1, 1000, 100_000])
def test_small_ops_of_a_tag_that_was_used_need_no_session(cluster: Cluster, size: int) -> None:

    def reduce_some(peer: Communicator, _: int) -> None:
        array = ones(size)
        info = peer.all_reduce(array, op=SUM)
        assert np.all(array == 3)
        assert info.world_size == 3
        assert info.rx_bytes > 0

    cluster.join(3)
    cluster.each(reduce_once)
    with session_held_up():
        for _ in range(10):
            cluster.each(reduce_some)
    cluster.each(reduce_once)


@pytest.mark.usefixtures("patience")
def test_other_collectives_may_go_the_same_way(cluster: Cluster) -> None:
    cluster.join(2)

    def gather(peer: Communicator, index: int) -> list[int]:
        array = peer.all_gather(np.full(3, index, np.int32)).array
        return [int(value) for value in array.ravel()]

    cluster.each(gather)
    with session_held_up():
        assert cluster.each(gather) == [[0, 0, 0, 1, 1, 1]] * 2
        cluster.each(lambda peer, _: peer.barrier())


@pytest.mark.usefixtures("patience")
@pytest.mark.usefixtures("patience")
def test_ops_of_one_tag_may_differ_from_one_to_the_next(cluster: Cluster) -> None:
    kinds = list(itertools.product((np.float32, np.int64), (3, 1000), (ReduceOp.SUM, ReduceOp.MAX), (False, True)))

    def reduce_as(peer: Communicator, rank: int, kind: tuple[Any, int, ReduceOp, bool]) -> None:
        dtype, size, op, is_in_place = kind
        given = np.full(size, rank + 1, dtype)
        found = given if is_in_place else np.zeros(size, dtype)
        peer.all_reduce(given, found, op=op)
        assert np.all(found == (3 if op is ReduceOp.SUM else 2))
        assert np.all(given == (found if is_in_place else rank + 1))

    cluster.join(2)
    cluster.each(reduce_once)
    random.Random(1).shuffle(kinds)
    with session_held_up():
        for kind in [kind for kind in kinds for _ in range(2)]:
            cluster.each(partial(reduce_as, kind=kind))


def test_a_new_tag_waits_for_the_session(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.each(reduce_once)
    arrays = [ones(), ones()]
    with session_held_up() as go_on:
        calls = [
            Background(partial(peer.all_reduce, x, op=SUM, tag=OTHER_TAG))
            for peer, x in zip(cluster.peers, arrays, strict=True)
        ]
        cluster.each(reduce_once)
        assert not any(call.is_over for call in calls)
        go_on()
        for call in calls:
            call.result()
    assert all(np.all(x == 2) for x in arrays)


def test_what_takes_long_becomes_the_sessions(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session gives it up, as its caller wants, on all peers; the next ones need it no more than those before."""
    cluster.join(2)
    cluster.each(reduce_once)
    x = ones()
    with pytest.raises(PCCLError) as caught:
        cluster[0].all_reduce(x, op=SUM, timeout=0.3)
    assert caught.value.result is Result.TIMEOUT
    assert np.all(x == 1)
    y = ones()
    assert results(outcomes([partial(cluster[1].all_reduce, y, op=SUM)])) == [Result.TIMEOUT]
    cluster.each(reduce_once)
    monkeypatch.setattr("pccl.runtime.data_plane.fast_path.WAIT_MS", round(WAIT_S * 1000))
    with session_held_up():
        cluster.each(reduce_once)


def waiting_for_the_other(cluster: Cluster, x: np.ndarray[Any, Any]) -> Background:
    """The first of two peers, in an op whose tag was used."""
    cluster.join(2)
    cluster.each(reduce_once)
    waiting = Background(partial(cluster[0].all_reduce, x, op=SUM))
    until(lambda: cluster[0].stats["ops_open"] == 1, "it waits for the other peer")
    return waiting


def test_a_tag_in_flight_is_refused(cluster: Cluster) -> None:
    x = ones()
    waiting = waiting_for_the_other(cluster, x)
    assert results(outcomes([partial(cluster[0].all_reduce, ones(), op=SUM)])) == [Result.INVALID_USAGE]
    reduce_once(cluster[1])
    waiting.result()
    assert np.all(x == 2)


def test_different_arguments_are_found(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.join(2)
    cluster.each(reduce_once)
    arrays = [ones(8), ones(9)]
    found = cluster.outcomes(lambda peer, i: peer.all_reduce(arrays[i], op=SUM))
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    assert all(np.all(x == 1) for x in arrays)
    cluster.each(reduce_once)
    monkeypatch.setattr("pccl.runtime.data_plane.fast_path.WAIT_MS", round(WAIT_S * 1000))
    with session_held_up():
        cluster.each(reduce_once)


def test_whoever_closes_ends_what_waits(cluster: Cluster) -> None:
    x = ones()
    waiting = waiting_for_the_other(cluster, x)
    cluster[0].close()
    outcome = waiting.outcome()
    assert isinstance(outcome, PCCLError)
    assert outcome.result is Result.NOT_INITIALIZED
    assert np.all(x == 1)


def test_views_come_and_go_in_between(cluster: Cluster) -> None:
    cluster.join(2)
    for _ in range(3):
        for _ in range(3):
            assert cluster.each(reduce_once) == [len(cluster.peers)] * len(cluster.peers)
        cluster.join()
    while len(cluster.peers) > 2:
        cluster.close(cluster.peers[-1])
        until(lambda: {peer.world_size for peer in cluster.peers} == {len(cluster.peers)}, "the others know")
        for _ in range(3):
            cluster.each(reduce_once)


def test_ops_of_all_kinds_mix(cluster: Cluster) -> None:
    """Each peer waits for some at once and for some later; ops of two have tags of their own."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    cluster.join(3)
    plan = random.Random(seed)
    ops = [(plan.randrange(3), plan.choice((1, 100, 30_000)), plan.random() < 0.2) for _ in range(150)]

    def play(peer: Communicator, index: int) -> list[Any]:
        own = random.Random(seed + index)
        found: list[Any] = []
        for number, (tag, size, is_pair) in enumerate(ops):
            if is_pair:
                sender, receiver = number % 3, (number + 1) % 3
                x = np.full(size, number, np.float32)
                if index == sender:
                    peer.send(x, dst=receiver, tag=tag)
                elif index == receiver:
                    found.append(float(peer.recv(np.empty_like(x), src=sender, tag=tag).array[-1]))
                continue
            x = np.full(size, number + index, np.float32)
            if own.random() < 0.6:
                peer.all_reduce(x, op=SUM, tag=tag)
            else:
                handle = peer.all_reduce_async(x, op=SUM, tag=tag)
                assert handle.wait()[0]
            found.append(float(x[0]))
        return found

    for index, found in enumerate(cluster.each(play)):
        expected = [
            float(number) if is_pair else 3.0 * number + 3
            for number, (_, _, is_pair) in enumerate(ops)
            if not is_pair or index == (number + 1) % 3
        ]
        assert found == expected


def reduce_unless_given_up(peer: Communicator, x: np.ndarray[Any, Any]) -> None:
    """Reduce with another peer, which may have been interrupted in it."""
    (found,) = outcomes([partial(peer.all_reduce, x, op=SUM)])
    assert results([found])[0] in (Result.SUCCESS, Result.TIMEOUT)


def test_an_interrupt_anywhere_leaves_a_run_that_goes_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the other peer calls again and again; either both have a result, or the op is none."""
    monkeypatch.setattr("pccl.handle.INTERRUPT_GRACE_S", 0.05)
    cluster.join(2)
    cluster.each(reduce_once)
    stop = 1000.0

    def follow() -> None:
        y = np.zeros(8, np.float32)
        while y[0] < stop:
            y = ones()
            reduce_unless_given_up(cluster[1], y)

    following = Background(follow)
    for step in itertools.count():
        x = ones()
        is_last = interrupted_at(step, partial(cluster[0].all_reduce, x, op=SUM), Interrupt)
        until(lambda: cluster[0].stats["ops_open"] == 0, f"nothing is in flight after step {step}")
        assert np.all(x == 1) or np.all(x == 2)
        y = ones()
        reduce_unless_given_up(cluster[0], y)
        if is_last:
            assert step > 30
            break
    last = np.full(8, stop, np.float32)
    cluster[0].all_reduce(last, op=SUM)
    following.result()
