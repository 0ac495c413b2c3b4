"""`Communicator.flight_recorder`: what it has of ops, links and calls; dumps of it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, ReduceOp
from pccl.flight_recorder import OpRecord, Recording, load, save
from tests.support.cluster import Background, Cluster, ones, outcomes, reduce_once, run_of, until

MILESTONES = ("launched_ns", "joined_ns", "done_ns", "agreed_ns", "ended_ns")


def committed(peer: Communicator) -> list[OpRecord]:
    return [op for op in peer.flight_recorder().ops if op.result == "SUCCESS"]


def check_order(op: OpRecord) -> None:
    times = [getattr(op, name) for name in MILESTONES]
    assert op.launched_ns > 0
    assert times == sorted(times), op
    assert op.launched_ns <= op.first_sent_ns <= op.last_sent_ns <= op.ended_ns, op
    assert op.launched_ns <= op.first_received_ns <= op.last_received_ns <= op.done_ns, op


@pytest.mark.parametrize("world", [2, 3])
def test_ops_are_recorded_with_their_milestones(cluster: Cluster, world: int) -> None:
    cluster.join(world)
    for _ in range(20):
        cluster.each(reduce_once)
    recordings = [peer.flight_recorder() for peer in cluster.peers]
    launched: dict[tuple[int, int, int], int] = {}
    for recording in recordings:
        assert len(recording.ops) == 20
        for op in recording.ops:
            check_order(op)
            assert (op.kind, op.dtype, op.size_bytes, op.world_size) == ("all_reduce", "float", 32, world)
            assert op.joined_last in {other.peer for other in recordings} - {recording.peer}
            assert op.last_received_from in {other.peer for other in recordings} - {recording.peer}
            assert op.tx_bytes > 0 < op.rx_bytes
            launched[op.name] = max(op.launched_ns, launched.get(op.name, 0))
    assert len(launched) == 20
    for recording in recordings:  # which have one clock
        assert recording.clock == recordings[0].clock
        assert all(op.done_ns >= launched[op.name] for op in recording.ops)


def test_each_path_of_an_op_is_recorded(cluster: Cluster) -> None:
    """The fast path, launched ops, large ones, and those of two among three."""
    cluster.join(3)
    large = np.zeros(3 << 20, np.float32)

    def run(peer: Communicator, index: int) -> None:
        for _ in range(3):
            peer.all_reduce(ones(), op=ReduceOp.SUM, tag=1)
        peer.all_reduce_async(ones(), op=ReduceOp.SUM, tag=2).wait()
        peer.all_reduce(large.copy(), op=ReduceOp.SUM, tag=3)
        peer.broadcast(ones(), root=0, tag=4)
        peer.barrier(tag=5)
        if index == 0:
            peer.send(ones(), dst=1, tag=6)
        elif index == 1:
            peer.recv(ones(), src=0, tag=6)

    cluster.each(run)
    for index, peer in enumerate(cluster.peers):
        ops = committed(peer)
        kinds = {op.tag: op.kind for op in ops if op.tag < 6}
        assert kinds == {1: "all_reduce", 2: "all_reduce", 3: "all_reduce", 4: "broadcast", 5: "barrier"}
        assert [op.size_bytes for op in ops if op.tag == 3] == [12 << 20]
        of_two = [(op.kind, op.callers_tag, op.tx_bytes, op.rx_bytes) for op in ops if op.callers_tag > 5]
        assert of_two == [[("send", 6, 32, 0)], [("recv", 6, 0, 32)], []][index]
        for op in ops:
            assert op.launched_ns <= op.done_ns <= op.ended_ns


def test_op_in_flight_is_recorded(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.each(reduce_once)
    waiting = Background(lambda: reduce_once(cluster[0]))

    def is_open() -> OpRecord | None:
        return next((op for op in cluster[0].flight_recorder().ops if not op.result), None)

    op = until(is_open, "the op is in flight")
    assert (op.joined_ns, op.done_ns, op.ended_ns, op.over_ns) == (0, 0, 0, 0)
    reduce_once(cluster[1])
    waiting.result()
    assert all(op.result == "SUCCESS" for op in cluster[0].flight_recorder().ops)


def test_failed_op_has_a_reason(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.each(reduce_once)
    with pytest.raises(PCCLError):
        cluster[0].all_reduce(ones(), op=ReduceOp.SUM, tag=9, timeout=0.2)
    recording = cluster[0].flight_recorder()
    failed = next(op for op in recording.ops if op.tag == 9)
    assert failed.result == "TIMEOUT"
    assert "gave up" in failed.reason
    assert any(event.kind == "op" and "tag 9" in event.text for event in recording.events)


def test_events_name_lost_peers(cluster: Cluster) -> None:
    cluster.join(2)
    lost = cluster[1].flight_recorder()
    cluster.close(cluster[1])
    cluster.each(lambda peer, _: peer.update_topology())
    texts = [event.text for event in cluster[0].flight_recorder().events]
    assert f"peer {lost.peer} ({lost.name}) was lost: left" in texts
    assert f"peer {lost.peer} ({lost.name}): the link is closed" in texts


def test_recording_since(cluster: Cluster) -> None:
    def ends(since_ns: int = 0) -> int:
        return sum(op.ended_ns > 0 for op in cluster[0].flight_recorder(since_ns).ops)

    cluster.join(2)
    cluster.each(reduce_once)
    until(lambda: ends() == 1, "the engine thread has recorded the end of the op")
    since_ns = cluster[0].flight_recorder().taken_ns
    assert ends(since_ns) == 0
    cluster.each(reduce_once)
    until(lambda: ends(since_ns) == 1, "the engine thread has recorded the end of the other")
    assert ends() == 2


def test_last_ops_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.runtime.data_plane.engine.RECORDS", 16)
    with run_of(2) as cluster:
        cluster.each(lambda peer, _: [reduce_once(peer) for _ in range(40)])
        for peer in cluster.peers:
            assert [op.sequence for op in peer.flight_recorder().ops] == list(range(24, 40))


def test_save_and_load(cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(2)
    cluster.each(reduce_once)
    made = [peer.flight_recorder() for peer in cluster.peers]
    for recording in made:
        save(recording, tmp_path / f"{recording.peer}.json")
    loaded = load(sorted(tmp_path.iterdir()))
    assert [peer.recording for peer in loaded.peers] == made


@pytest.fixture
def dumped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("pccl.runtime.session.recorder.LOOK_S", 0.02)
    monkeypatch.setattr("pccl.runtime.session.recorder.PAUSE_S", 0.0)
    monkeypatch.setattr("pccl.runtime.session.recorder.GATHER_S", 0.0)
    monkeypatch.setenv("PCCL_TRACE_DIR", str(tmp_path / "traces"))
    return tmp_path / "traces"


def dump_of(directory: Path) -> Recording | None:
    found = list(directory.glob("*.json"))
    return load(found).peers[0].recording if found else None


def test_failed_op_is_dumped(dumped: Path) -> None:
    with run_of(2) as cluster:
        with pytest.raises(PCCLError):
            cluster[0].all_reduce(ones(), op=ReduceOp.SUM, tag=9, timeout=0.1)
        recording = until(lambda: dump_of(dumped), "a dump")
        assert "tag 9" in recording.reason
        assert any(op.tag == 9 and op.result == "TIMEOUT" for op in recording.ops)
    assert not list(dumped.glob("*.part"))


def test_long_op_is_dumped(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TRACE_HANG", "0.1")
    with run_of(2) as cluster:
        waiting = Background(lambda: reduce_once(cluster[0]))
        recording = until(lambda: dump_of(dumped), "a dump")
        assert "has not ended within 0.1 s" in recording.reason
        assert any(not op.result for op in recording.ops)
        reduce_once(cluster[1])
        waiting.result()


def test_lost_master_is_dumped(dumped: Path) -> None:
    node = MasterNode("127.0.0.1:0")
    node.run()
    peers = Cluster(node.address, master_timeout=0.2)
    peers.join(1)
    node.interrupt()
    found = outcomes([lambda: _wait_for_the_end(peers[0])])
    assert isinstance(found[0], PCCLError)
    recording = until(lambda: dump_of(dumped), "a dump")
    assert any(event.kind == "master" for event in recording.events)
    peers.close_all()


def _wait_for_the_end(peer: Communicator) -> None:
    while True:
        peer.are_peers_pending(timeout=10)
        time.sleep(0.01)


def test_dump_to_an_unwritable_directory(dumped: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumped.write_text("a file in the way")
    with run_of(2) as cluster:
        with pytest.raises(PCCLError):
            cluster[0].all_reduce(ones(), op=ReduceOp.SUM, tag=9, timeout=0.1)
        until(lambda: "cannot be written" in caplog.text, "a warning")
        cluster.each(reduce_once)
