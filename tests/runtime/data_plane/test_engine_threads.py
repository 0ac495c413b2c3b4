"""Several engine threads: the same bits as one, over connections that belong to one thread each, and every way in which
an op or a link ends while its parts are in different threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pccl import (
    Communicator,
    DataType,
    ErrorFeedback,
    MasterNode,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceOp,
    Result,
)
from pccl.runtime.data_plane.engine import Engine, Verdict
from pccl.runtime.data_plane.events import EngineEvent, EngineFailedError, OpDetached
from tests.support.cluster import Cluster, results, until

Array = npt.NDArray[Any]

SUM = ReduceOp.SUM
SEGMENT_BYTES = 256
"""Size of segments, so small that an op of some thousand elements is worth slicing."""
COUNT = 10_007
WORLD = 3


@contextmanager
def run_of(world: int, threads: int, connections: int = 1) -> Iterator[Cluster]:
    with MasterNode("127.0.0.1:0", engine_threads=threads) as master:
        cluster = Cluster(master.address, segment_bytes=SEGMENT_BYTES, p2p_connection_pool_size=connections)
        cluster.join(world)
        try:
            yield cluster
        finally:
            cluster.close_all()


def engine_of(peer: Communicator) -> Engine:
    session = peer._inner._session
    assert session is not None
    return session._engine


def sent_bytes(peer: Communicator) -> list[int]:
    """Return the payload bytes that each engine thread has sent."""
    return [stats["tx_payload_bytes"] for stats in engine_of(peer).stats_by_thread()]


# The same bits.


@dataclass(frozen=True)
class Case:
    dtype: Any = np.float32
    op: ReduceOp = SUM
    algorithm: ReduceAlgorithm = ReduceAlgorithm.RING
    quantization: QuantizationOptions | None = None
    count: int = COUNT
    is_fed_back: bool = False


MIN_MAX = QuantizationAlgorithm.MIN_MAX
CASES = [
    *(Case(dtype) for dtype in (np.float16, np.float32, np.float64, np.int32)),
    *(Case(count=count) for count in (0, 1, 2, 500, 64 * 3 * 4 * 3, 100_000)),
    *(Case(algorithm=algorithm, op=ReduceOp.AVG) for algorithm in ReduceAlgorithm),
    *(
        Case(algorithm=algorithm, quantization=QuantizationOptions(*kind, **more))
        for algorithm in ReduceAlgorithm
        for kind, more in [
            ((), {}),
            ((), {"stochastic": True, "seed": 5}),
            ((DataType.INT8, MIN_MAX), {"bits": 4, "block_size": 32}),
            ((DataType.BFLOAT16, QuantizationAlgorithm.CAST), {}),
        ]
    ),
    *(Case(algorithm=each, quantization=QuantizationOptions(bits=4), is_fed_back=True) for each in ReduceAlgorithm),
]


def values_of(case: Case, rank: int) -> Array:
    random = np.random.default_rng([rank, case.count])
    return (random.standard_normal(case.count) * 100).astype(case.dtype)


def all_results(threads: int) -> list[bytes]:
    """Return what all peers have of each case, in place and out of place."""
    found: list[bytes] = []
    with run_of(WORLD, threads) as cluster:
        for case in CASES:
            feedback = [ErrorFeedback() if case.is_fed_back else None for _ in range(WORLD)]
            for in_place in (False, True):
                sends = [values_of(case, rank) for rank in range(WORLD)]
                recvs = sends if in_place else [np.empty_like(send) for send in sends]

                def call(
                    peer: Communicator,
                    i: int,
                    case: Case = case,
                    sends: Any = sends,
                    recvs: Any = recvs,
                    feedback: Any = feedback,
                ) -> Any:
                    more = {"quantization_options": case.quantization, "feedback": feedback[i]}
                    return peer.all_reduce(sends[i], recvs[i], op=case.op, algorithm=case.algorithm, **more)

                cluster.each(call)
                (contents,) = {recv.tobytes() for recv in recvs}
                found.append(contents)
        for peer in cluster.peers:
            assert len(sent_bytes(peer)) == threads
            assert min(sent_bytes(peer)) > max(sent_bytes(peer)) / 4, "no thread idles"
            assert peer.stats["tx_payload_bytes"] == sum(sent_bytes(peer))
    return found


def test_results_are_the_same_bits_whatever_the_number_of_threads() -> None:
    one = all_results(1)
    for threads in (2, 3):
        several = all_results(threads)
        for i, case in enumerate(CASES):
            assert one[2 * i : 2 * i + 2] == several[2 * i : 2 * i + 2], f"{threads} threads: {case}"


def test_small_ops_are_spread_over_the_threads() -> None:
    """Tags at regular distances are spread, and so are the ops of one tag."""
    with run_of(2, 4) as cluster:
        for tags in (range(0, 4 * 64, 4), [7] * 64):
            before = sent_bytes(cluster[0])
            for tag in tags:
                cluster.each(lambda peer, i, tag=tag: peer.all_reduce(np.ones(4, np.float32), op=SUM, tag=tag))
            moved = [after - earlier for after, earlier in zip(sent_bytes(cluster[0]), before, strict=True)]
            assert min(moved) > sum(moved) / 8, moved


def test_traffic_of_an_op_is_that_of_all_its_slices() -> None:
    infos = []
    for threads in (1, 3):
        with run_of(WORLD, threads) as cluster:
            infos.append(cluster.each(lambda peer, i: peer.all_reduce(np.ones(COUNT, np.float32), op=SUM)))
    assert infos[0] == infos[1]


# Ops that fail.


def unequal(cluster: Cluster, counts: list[int]) -> list[Any]:
    arrays = [np.full(count, 1 + i, np.float32) for i, count in enumerate(counts)]
    found = cluster.outcomes(lambda peer, i: peer.all_reduce(arrays[i], op=SUM, tag=3))
    for i, array in enumerate(arrays):
        assert (array == 1 + i).all(), "what was given is as it was"
    return found


@pytest.mark.parametrize("counts", [[COUNT, COUNT + 1], [COUNT, 5], [0, COUNT], [COUNT, COUNT * 9]])
def test_mismatch_is_told_to_all_once(counts: list[int]) -> None:
    """The same holds where one peer slices the op and the other does not."""
    with run_of(2, 3) as cluster:
        found = unequal(cluster, counts)
        assert results(found) == [Result.INVALID_ARGUMENT] * 2
        assert all(str(count) in str(error) for count in counts for error in found)
        cluster.each(lambda peer, i: peer.all_reduce(np.ones(COUNT, np.float32), op=SUM, tag=3))


@pytest.mark.parametrize("threads", [1, 2])
def test_verdict_on_an_op_that_was_refused_is_of_no_concern(threads: int) -> None:
    """Ops that others have given up may be launched late, with arguments that no engine takes: the verdict is on its
    way before the refusal is known."""
    engines = Engine(0)
    try:
        engines.divide(threads)
        engines.end(7, Verdict.ABORT)
        engines.freeze_op(7)
    finally:
        engines.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_detach_of_an_unknown_op(threads: int) -> None:
    engines = Engine(0)
    try:
        engines.divide(threads)
        engines.detach(7)
        found: list[EngineEvent] = []
        until(lambda: found.extend(engines.events()) or bool(found), "it is reported")
        assert found == [OpDetached(7)]
    finally:
        engines.close()


def test_aborted_op_restores_what_all_threads_overwrote() -> None:
    """Two of three peers: everything that can be sent without the third is under way."""
    with run_of(WORLD, 2) as cluster:
        arrays = [np.full(COUNT, 1.0 + i, np.float32) for i in range(2)]
        handles = [cluster[i].all_reduce_async(arrays[i], op=SUM) for i in range(2)]
        until(lambda: min(sent_bytes(cluster[0])) > 0, "both threads send")
        cluster.peers.pop().close()
        assert [handle.wait()[1] for handle in handles] == [Result.RANK_CONNECTION_LOST] * 2
        assert [set(array) for array in arrays] == [{1.0}, {2.0}]
        cluster.each(lambda peer, i: peer.all_reduce(arrays[i], op=SUM))
        assert [set(array) for array in arrays] == [{3.0}, {3.0}]


# Connections.


@dataclass(frozen=True)
class Noted:
    threads: Engine
    link: int
    index: int
    sock: socket.socket
    """A copy."""


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Noted]]:
    """All that are given to engines."""
    noted: list[Noted] = []
    link_add = Engine.link_add

    def note(threads: Engine, link: int, index: int, fd: int, *more: Any) -> None:
        noted.append(Noted(threads, link, index, socket.socket(fileno=os.dup(fd))))
        link_add(threads, link, index, fd, *more)

    monkeypatch.setattr(Engine, "link_add", note)
    yield noted
    for connection in noted:
        connection.sock.close()


def by_thread(peer: Communicator) -> list[int]:
    return [stats["connections"] for stats in engine_of(peer).stats_by_thread()]


def test_each_thread_has_a_connection_of_each_link() -> None:
    with run_of(WORLD, 3, connections=1) as cluster:
        until(
            lambda: [by_thread(peer) for peer in cluster.peers] == [[2, 2, 2]] * WORLD,
            "one a thread to each other peer",
        )
    with run_of(2, 2, connections=5) as cluster:
        until(lambda: [by_thread(peer) for peer in cluster.peers] == [[3, 2]] * 2, "five connections")


@pytest.mark.parametrize("index", [0, 1, 3])
def test_lost_connection_is_replaced_in_its_thread(
    index: int, connections: list[Noted], caplog: pytest.LogCaptureFixture
) -> None:
    with run_of(2, 2, connections=4) as cluster:
        until(lambda: [by_thread(peer) for peer in cluster.peers] == [[2, 2]] * 2, "the link is complete")
        lost = next(each for each in connections if each.index == index)
        known = len(connections)
        lost.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: len(connections) == known + 2, "both ends have a new one")
        assert {each.index for each in connections[known:]} == {4 + index % 2}
        until(lambda: [by_thread(peer) for peer in cluster.peers] == [[2, 2]] * 2, "the link is complete again")
        cluster.each(lambda peer, i: peer.all_reduce(np.ones(COUNT, np.float32), op=SUM))
        assert min(sent_bytes(cluster[0])) > 0
        until(lambda: caplog.text.count("continues with one connection fewer") == 2, "both ends tell of it")


def test_link_without_connections_in_one_thread_is_made_anew(connections: list[Noted]) -> None:
    with run_of(2, 2) as cluster:
        until(lambda: [by_thread(peer) for peer in cluster.peers] == [[1, 1]] * 2, "the link is complete")
        known = len(connections)
        lost = next(each for each in connections if each.index == 1)
        lost.sock.shutdown(socket.SHUT_RDWR)

        def reduce(peer: Communicator, i: int) -> Array:
            array = np.ones(COUNT, np.float32)
            while array[0] != 2:
                with suppress(PCCLError):
                    peer.all_reduce(array, op=SUM)
            return array

        assert all((array == 2).all() for array in cluster.each(reduce))
        assert sorted(each.index for each in connections[known:]) == [0, 0, 1, 1]
        assert {each.link for each in connections[known:]}.isdisjoint({lost.link})
        until(lambda: [by_thread(peer) for peer in cluster.peers] == [[1, 1]] * 2, "and nothing is left of the old one")


# Beginning.


def test_threads_that_cannot_be_had_fail_the_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Engine._start

    def deny(engine: Engine, threads: int) -> None:
        if threads == 2:
            raise OSError("the engine cannot start: no more threads")
        start(engine, threads)

    monkeypatch.setattr(Engine, "_start", deny)
    with (
        MasterNode("127.0.0.1:0", engine_threads=2) as master,
        pytest.raises(PCCLError, match=r"cannot start 2 engine threads.*no more threads") as error,
    ):
        Communicator(master.address).connect()
    assert error.value.result is Result.INTERNAL_ERROR


@pytest.mark.parametrize("value", [0, -1, 17, 1000, 1.5, "many"])
def test_number_of_threads_is_within_bounds(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PCCLError, match=rf"engine_threads '{value}' is not a number within \[1, 16\]"):
        MasterNode("127.0.0.1:0", engine_threads=value)
    monkeypatch.setenv("PCCL_ENGINE_THREADS", str(value))
    with pytest.raises(PCCLError, match=f"PCCL_ENGINE_THREADS '{value}'"):
        MasterNode("127.0.0.1:0")


@pytest.mark.parametrize(("argument", "variable", "threads"), [(None, "", 1), (None, "3", 3), (2, "3", 2)])
def test_number_of_threads_is_the_masters_choice(
    argument: int | None, variable: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_ENGINE_THREADS", variable)
    with MasterNode("127.0.0.1:0", engine_threads=argument) as master, Communicator(master.address) as peer:
        assert len(engine_of(peer).stats_by_thread()) == threads


def test_a_closed_engine_is_not_called() -> None:
    engine = Engine(0)
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.event_fds,
        engine.events,
        lambda: engine.end(1, Verdict.ABORT),
        lambda: engine.freeze(1),
        lambda: engine.freeze_op(1),
        lambda: engine.forget_ops(1, 0, range(1)),
        lambda: engine.detach(1),
        lambda: engine.set_link_timeout(1.0),
        lambda: engine.count_link(1),
        lambda: engine.link_close(1),
        engine.new_fast_paths,
    ]
    for call in calls:
        with pytest.raises(EngineFailedError, match="the engine is closed"):
            call()
