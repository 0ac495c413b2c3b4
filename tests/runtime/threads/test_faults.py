"""Faults of pccl's own: an exception that nobody expects ends the session or the master that it comes up in. All other
communicators and masters of the process go on."""

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
import trio

from pccl import AsyncCommunicator, Communicator, MasterNode, PCCLError, Result
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.session import PeerSession
from pccl.runtime.threads import portal
from tests.support.cluster import SUM, WAIT_S, Background, Cluster, ones, reduce_once, refusal, until

MACHINE = (
    "launch",
    "op_fast_completed",
    "op_handed_over",
    "op_done",
    "op_completed",
    "drain",
    "deadline",
    "plain_start",
)
"""The methods of its machine that the session calls while ops go on."""


@pytest.fixture
def clusters() -> Iterator[tuple[Cluster, Cluster]]:
    """Two runs of this process, with three and two peers."""
    with MasterNode("127.0.0.1:0") as first, MasterNode("127.0.0.1:0") as second:
        clusters = Cluster(first.address), Cluster(second.address)
        for cluster, size in zip(clusters, (3, 2), strict=True):
            cluster.join(size)
            cluster.each(reduce_once)
        yield clusters
        for cluster in clusters:
            cluster.close_all()


def session_of(peer: Communicator) -> PeerSession:
    return peer._inner.session("")


def failing(method: Callable[..., Any], after: int) -> Callable[..., Any]:
    calls = itertools.count()

    def call(*args: Any, **named: Any) -> Any:
        if next(calls) >= after:
            raise AssertionError("made up by a test")
        return method(*args, **named)

    return call


@contextmanager
def going_on(cluster: Cluster) -> Iterator[None]:
    """The cluster does all kinds of things meanwhile, and each works."""
    is_over = False

    def play(peer: Communicator, _: int) -> int:
        x = np.zeros(9, np.float32)
        rounds = 0
        while not x[8] and rounds < 100_000:
            x[:] = rounds
            x[8] = is_over
            if rounds % 2:
                peer.all_reduce(x, op=SUM)
            else:
                assert peer.all_reduce_async(x, op=SUM).wait(WAIT_S)[0]
            assert np.all(x[:8] == 2 * rounds)
            rounds += 1
        return rounds

    players = [Background(partial(play, peer, index)) for index, peer in enumerate(cluster.peers)]
    try:
        yield
    finally:
        is_over = True
        assert len({player.result() for player in players}) == 1


def reduce_until_it_fails(peer: Communicator, tag: int) -> PCCLError:
    for number in itertools.count():
        x = ones()
        try:
            if number % 2:
                peer.all_reduce(x, op=SUM, tag=tag, timeout=WAIT_S)
            else:
                peer.all_reduce_async(x, op=SUM, tag=tag).wait(WAIT_S)
        except PCCLError as error:
            assert np.all(x == 1)
            if error.result is not Result.RANK_CONNECTION_LOST:
                return error
        else:
            assert np.all(x == x[0])
    raise AssertionError


def without_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all ops go through the trio thread."""
    monkeypatch.setattr("pccl.runtime.data_plane.fast_path.COUNT_SAFE", -1)
    monkeypatch.setattr("pccl.runtime.data_plane.fast_path.BYTES_MAX", -1)


@pytest.mark.parametrize("name", MACHINE)
def test_a_fault_in_one_session_ends_that_one_alone(
    clusters: tuple[Cluster, Cluster], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, others = clusters
    after = 0 if name == "op_handed_over" else random.randrange(20)
    monkeypatch.setattr("pccl.runtime.data_plane.fast_path.WAIT_MS", 0 if name == "op_handed_over" else 5)
    if name == "launch":
        without_fast_path(monkeypatch)
    print(f"after {after}")
    broken = cluster[0]
    with going_on(others):
        machine = session_of(broken)._machine
        survivors = [Background(partial(reduce_until_it_fails, peer, 3)) for peer in cluster.peers[1:]]
        monkeypatch.setattr(machine, name, failing(getattr(machine, name), after))
        error = Background(partial(reduce_until_it_fails, broken, 3)).outcome()
        assert error.result is Result.INTERNAL_ERROR
        assert "a bug of pccl" in error.message
        assert "report" in error.message
        assert "made up by a test" in str(refusal(partial(broken.all_reduce, ones(), op=SUM)))
        broken.close()
        until(lambda: all(peer.world_size == 2 for peer in cluster.peers[1:]), "the others know")
        assert refusal(lambda: broken.world_size).result is Result.NOT_INITIALIZED
        cluster.peers.remove(broken)
        cluster.peers.pop().close()
        assert survivors[1].outcome().result in (Result.NOT_INITIALIZED, Result.TIMEOUT)
        assert survivors[0].outcome().result is Result.TOO_FEW_PEERS


def test_the_master_is_told_that_the_peer_leaves(
    clusters: tuple[Cluster, Cluster], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, _ = clusters
    caplog.set_level("INFO", "pccl")
    machine = session_of(cluster[0])._machine
    monkeypatch.setattr(machine, "launch", failing(machine.launch, 0))
    error = refusal(partial(cluster[0].all_reduce, ones(), op=SUM, tag=9))
    assert "a bug of pccl" in error.message
    until(lambda: cluster[1].world_size == 2, "the others know")
    assert any("left" in text and "a bug of pccl" in text for text in caplog.messages)


@pytest.mark.parametrize("name", ["group_call", "cancel_group_call", "received", "leave"])
def test_a_fault_in_a_group_call_or_in_leaving(
    clusters: tuple[Cluster, Cluster], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, others = clusters
    machine = session_of(cluster[0])._machine
    monkeypatch.setattr(machine, name, failing(getattr(machine, name), 0))
    with going_on(others):
        if name != "leave":
            error = refusal(partial(cluster[0].are_peers_pending, timeout=0.2))
            assert error.result in (Result.INTERNAL_ERROR, Result.TIMEOUT)
            assert refusal(partial(cluster[0].all_reduce, ones(), op=SUM)).result is Result.INTERNAL_ERROR
        cluster[0].close()
        until(lambda: cluster[1].world_size == 2, "the others know")


def test_a_fault_in_a_task_of_the_session(clusters: tuple[Cluster, Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, others = clusters
    session = session_of(cluster[0])

    async def fail() -> None:
        raise AssertionError("made up by a test")

    with going_on(others):
        portal.current().post(session._lifetime.spawn, fail)
        until(lambda: session.failure, "it is over")
        assert refusal(partial(cluster[0].all_reduce, ones(), op=SUM)).result is Result.INTERNAL_ERROR
        until(lambda: cluster[1].world_size == 2, "the others know")


def test_arrays_that_are_given_up_as_a_session_ends_come_back_after_its_engine(
    clusters: tuple[Cluster, Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op is on the fast path, and the session has not heard of it yet."""
    cluster, _ = clusters
    session = session_of(cluster[0])
    until(lambda: session._fast_path._opening, "the fast path is open")
    monkeypatch.setattr("pccl.communicator.CANCEL_GRACE_S", 0.01)
    is_closed = list[bool]()
    release = PendingOp.release

    def released(op: PendingOp) -> None:
        if op._session is session.ops:
            is_closed.append(session._engine.is_closed)
        release(op)

    monkeypatch.setattr(PendingOp, "release", released)
    is_held = threading.Event()

    def hold() -> None:
        is_held.set()
        until(lambda: session.ops._cancelled, "the caller wants its array back")
        session._lifetime.break_off(AssertionError("made up by a test"))

    portal.current().post(hold)
    assert is_held.wait(WAIT_S)
    x = ones()
    error = refusal(partial(cluster[0].all_reduce, x, op=SUM, timeout=0.2))
    assert (error.result, "made up by a test" in error.message) == (Result.INTERNAL_ERROR, True)
    assert np.all(x == 1)
    assert is_closed == [True]


@pytest.mark.parametrize("name", ["drain", "received"])
def test_a_fault_after_a_commit_does_not_make_a_failure_of_it(
    clusters: tuple[Cluster, Cluster], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view without a lost peer has committed the op, and its caller is to hear of it when the view is in force."""
    without_fast_path(monkeypatch)
    cluster, _ = clusters
    sessions = [session_of(peer) for peer in cluster.peers]
    done = list[int]()
    for session in sessions:
        machine = session._machine
        op_done = machine.op_done
        monkeypatch.setattr(machine, "op_completed", lambda op: None)
        monkeypatch.setattr(machine, "op_done", lambda *event, noted=op_done: done.append(noted(*event)))
    arrays = [ones() for _ in sessions]
    handles = [peer.all_reduce_async(x, op=SUM) for peer, x in zip(cluster.peers, arrays, strict=True)]
    until(lambda: len(done) == len(handles), "all have the result, and nobody has committed it")
    broken = sessions[0]._machine
    op_ended = broken.op_ended

    def end(*event: int) -> None:
        monkeypatch.setattr(broken, name, failing(getattr(broken, name), 0))
        op_ended(*event)

    monkeypatch.setattr(broken, "op_ended", end)
    portal.current().post(sessions[2]._lifetime.break_off, AssertionError("made up by a test"))
    found = [handle.wait(WAIT_S) for handle in handles]
    assert [code for _, code, _ in found] == [Result.SUCCESS, Result.SUCCESS, Result.INTERNAL_ERROR]
    assert [info.world_size for _, _, info in found[:2] if info is not None] == [3, 3]
    assert [set(x) for x in arrays] == [{3}, {3}, {1}]
    # Where the view came into force before the op ended, the answer to this call is what the master says next.
    other = Background(cluster[1].are_peers_pending)
    assert refusal(cluster[0].are_peers_pending).result is Result.INTERNAL_ERROR
    assert other.outcome() is False


def test_a_fault_in_a_users_trio_program_ends_the_communicator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(address: str) -> None:
        peers = [AsyncCommunicator(address) for _ in range(2)]
        async with peers[0]:
            async with trio.open_nursery() as nursery:  # both have joined at its end
                nursery.start_soon(peers[1].connect)
                while peers[0].membership.world_size < 2:
                    if await peers[0].are_peers_pending():
                        await peers[0].update_topology()
            machine = peers[0]._inner.session("")._machine
            monkeypatch.setattr(machine, "launch", failing(machine.launch, 0))
            with pytest.raises(PCCLError) as caught:
                await peers[0].all_reduce(ones(), op=SUM)
            assert caught.value.result is Result.INTERNAL_ERROR
            # Its loss has been settled once those who stay meet without it.
            with pytest.raises(PCCLError) as caught:
                await peers[1].all_reduce(ones(), op=SUM)
            assert caught.value.result in (Result.TOO_FEW_PEERS, Result.RANK_CONNECTION_LOST)
            await peers[1].close()

    with MasterNode("127.0.0.1:0") as master:
        trio.run(main, master.address)


@pytest.mark.parametrize(
    "name", ["received", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deadline", "connected"))]
)
def test_a_fault_in_one_master_ends_that_one_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = MasterNode("127.0.0.1:0"), MasterNode("127.0.0.1:0")
    clusters = []
    for master in (first, second):
        master.run()
        cluster = Cluster(master.address, master_timeout=1)
        clusters.append(cluster)
        cluster.join(2)
        cluster.each(reduce_once)
    cluster, others = clusters
    assert first._service is not None
    machine = first._service._server._machine
    with going_on(others):
        monkeypatch.setattr(machine, name, failing(getattr(machine, name), 0))
        cluster.peers.pop().close()
        with MasterNode("127.0.0.1:0") as third:  # one may begin at any time
            assert third.address
        late = Background(partial(Communicator(first.address, timeout=5).connect, 1))
        error = refusal(partial(first.wait, WAIT_S))
        assert error.result is Result.INTERNAL_ERROR
        assert "a bug of pccl" in error.message
        assert "made up by a test" in error.message
        assert isinstance(late.outcome(), PCCLError)
        failed = until(lambda: session_of(cluster[0]).failure, "its peer has found no other master")
        assert failed.result is Result.MASTER_CONNECTION_FAILED
    for cluster in clusters:
        cluster.close_all()
    second.interrupt()
    assert second.wait(WAIT_S)


def test_what_is_posted_may_fail() -> None:
    def fail() -> None:
        raise AssertionError("made up by a test")

    async def fine() -> int:
        return 7

    portal.current().post(fail)
    assert portal.current().call(fine) == 7


def test_what_a_call_raises_comes_to_its_caller() -> None:
    class Odd(BaseException):
        pass

    async def fail() -> None:
        raise Odd

    with pytest.raises(Odd):
        portal.current().call(fail)
    with pytest.raises(BaseExceptionGroup):
        portal.current().call(in_a_nursery, fail)


async def in_a_nursery(function: Callable[[], Any]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(function)
