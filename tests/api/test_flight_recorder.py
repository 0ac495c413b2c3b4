"""`Communicator.flight_recorder`: what it has of ops, links and calls; dumps of it."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, ReduceOp, Result
from pccl.flight_recorder import OpRecord, Recording, Trace, collect, cut, gaps, load, save
from pccl.protocol.recording import from_json, pack, to_json, unpack
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


def test_all_ways_of_an_op_are_recorded(cluster: Cluster) -> None:
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


def test_threads_that_come_one_after_the_other_are_no_caller_that_waits_in_between(cluster: Cluster) -> None:
    """The system gives the next one the same address, and pccl's own threads have one of those, too."""

    cluster.join(2)

    def three_times() -> None:
        for _ in range(3):
            reduce_once(cluster[1])

    others = Background(three_times)
    for step in range(3):
        thread = threading.Thread(target=partial(reduce_once, cluster[0]), name=f"step {step}")
        thread.start()
        thread.join(20)
    others.outcome()
    recording = cluster[0].flight_recorder()
    launched = [op.caller for op in recording.ops][-3:]
    assert len(set(launched)) == 3, recording.callers
    assert not any(gap.before.caller in launched for gap in gaps(recording))
    assert not any("pccl" in recording.callers[caller] for caller in launched)


@pytest.mark.parametrize("name", ["load \udce9t\udce9", "\ud800"])
def test_a_thread_with_an_unprintable_name_is_recorded(cluster: Cluster, name: str) -> None:
    cluster.join(2)

    def named(peer: Communicator, _: int) -> None:
        thread = threading.current_thread()
        before, thread.name = thread.name, name
        try:
            reduce_once(peer)
            recording = peer.flight_recorder()
        finally:
            thread.name = before
        assert from_json(to_json(recording)) == unpack(pack(recording)) == recording

    cluster.each(named)


def test_callers_and_their_gaps(cluster: Cluster) -> None:
    cluster.join(2)
    paused = threading.Event()

    def run(peer: Communicator, _: int) -> None:
        reduce_once(peer)
        paused.wait(0.05)
        reduce_once(peer)
        peer.all_reduce_async(ones(), op=ReduceOp.SUM, tag=3).wait()

    cluster.each(run)
    for peer in cluster.peers:
        recording = peer.flight_recorder()
        assert len({op.caller for op in recording.ops}) == 1
        assert len(recording.callers) == 1
        longest = max(gaps(recording), key=lambda gap: gap.end_ns - gap.start_ns)
        assert longest.end_ns - longest.start_ns >= 40_000_000


def test_an_op_that_waits_is_in_it(cluster: Cluster) -> None:
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


def test_a_failed_op_says_why(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.each(reduce_once)
    with pytest.raises(PCCLError):
        cluster[0].all_reduce(ones(), op=ReduceOp.SUM, tag=9, timeout=0.2)
    recording = cluster[0].flight_recorder()
    failed = next(op for op in recording.ops if op.tag == 9)
    assert failed.result == "TIMEOUT"
    assert "gave up" in failed.reason
    assert any(event.kind == "op" and "tag 9" in event.text for event in recording.events)


def test_calls_in_each_step_leave_room_for_what_has_happened(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that asks `are_peers_pending` in each step makes thousands of calls between two views."""
    monkeypatch.setattr("pccl.runtime.session.recorder.EVENTS_KEPT", 16)
    cluster.join(2)
    for _ in range(20):
        cluster.each(lambda peer, _: peer.are_peers_pending())
    events = cluster.peers[0].flight_recorder().events
    assert [event.at_ns for event in events] == sorted(event.at_ns for event in events)
    assert sum(event.kind == "call" for event in events) == 16
    assert {"view", "link", "master"} <= {event.kind for event in events}


def test_events_and_calls(cluster: Cluster) -> None:
    cluster.join(2)
    events = cluster[0].flight_recorder().events
    kinds = {event.kind for event in events}
    assert {"view", "master", "link", "call"} <= kinds
    assert any(event.kind == "call" and event.text == "update_topology" and event.duration_ns for event in events)
    assert any(event.kind == "view" and event.about.get("view") for event in events)


def test_events_name_peers_that_are_lost(cluster: Cluster) -> None:
    cluster.join(2)
    lost = cluster[1].flight_recorder()
    cluster.close(cluster[1])
    cluster.each(lambda peer, _: peer.update_topology())
    texts = [event.text for event in cluster[0].flight_recorder().events]
    assert f"peer {lost.peer} ({lost.name}) was lost: left" in texts
    assert f"peer {lost.peer} ({lost.name}): the link is closed" in texts


def test_only_what_is_new(cluster: Cluster) -> None:
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


def test_several_engine_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_ENGINE_THREADS", "3")
    with run_of(2) as cluster:
        big = np.ones(6 << 20, np.float32)
        cluster.each(lambda peer, _: peer.all_reduce(big.copy(), op=ReduceOp.SUM))
        cluster.each(reduce_once)
        for peer in cluster.peers:
            ops = committed(peer)
            assert [op.size_bytes for op in ops] == [24 << 20, 32]
            assert all(op.launched_ns <= op.done_ns <= op.ended_ns for op in ops)


def test_the_last_ops_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.runtime.data_plane.engine.RECORDS", 16)
    with run_of(2) as cluster:
        cluster.each(lambda peer, _: [reduce_once(peer) for _ in range(40)])
        for peer in cluster.peers:
            assert [op.sequence for op in peer.flight_recorder().ops] == list(range(24, 40))


def test_without_a_recorder_ops_run_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.runtime.data_plane.engine.RECORDS", 0)
    with run_of(2) as cluster:
        cluster.each(reduce_once)
        assert cluster[0].flight_recorder().ops == []


def test_it_belongs_to_a_connected_communicator() -> None:
    with pytest.raises(PCCLError) as caught:
        Communicator("127.0.0.1:1").flight_recorder()
    assert caught.value.result is Result.NOT_INITIALIZED


def test_save_and_load(cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(2)
    cluster.each(reduce_once)
    made = [peer.flight_recorder() for peer in cluster.peers]
    for recording in made:
        save(recording, tmp_path / f"{recording.peer}.json")
    loaded = load(sorted(tmp_path.iterdir()))
    assert [peer.recording for peer in loaded.peers] == made


def test_one_may_look_back_as_far_as_one_likes(cluster: Cluster) -> None:
    cluster.join(1)
    for seconds in (1e300, 10**400):
        (peer,) = collect(cluster.address, seconds=seconds).peers
        assert peer.lack == ""
        assert peer.recording is not None
        assert cut(Trace("", "", [peer]), seconds).peers[0].recording == peer.recording


def test_a_thread_of_an_odd_name_is_recorded(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.current_thread(), "name", os.fsdecode(b"load \xe9t\xe9"))
    cluster.join(2)
    other = Background(lambda: reduce_once(cluster[1]))
    reduce_once(cluster[0])
    other.result()
    odd = collect(cluster.address).peers[0]
    assert odd.recording is not None, odd.lack
    assert odd.recording.callers == ["load \\udce9t\\udce9"]
    save(cluster[0].flight_recorder(), tmp_path / "odd.json")


def test_a_recording_that_cannot_be_read_is_missed_with_the_reason(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Recording) -> bytes:
        raise MemoryError("all of it is in use")

    monkeypatch.setattr("pccl.runtime.session.recorder.pack", fail)
    cluster.join(1)
    assert [peer.lack for peer in collect(cluster.address).peers] == [
        "its recording cannot be read: all of it is in use"
    ]


def test_a_save_that_fails_leaves_the_former_file(cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(1)
    path = tmp_path / "recording.json"
    recording = cluster[0].flight_recorder()
    save(recording, path)
    former = path.read_bytes()
    with pytest.raises(UnicodeEncodeError):
        save(msgspec.structs.replace(recording, name="\udce9"), path)
    assert path.read_bytes() == former
    assert os.listdir(tmp_path) == ["recording.json"]


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


def test_a_failed_op_is_dumped(dumped: Path) -> None:
    with run_of(2) as cluster:
        with pytest.raises(PCCLError):
            cluster[0].all_reduce(ones(), op=ReduceOp.SUM, tag=9, timeout=0.1)
        recording = until(lambda: dump_of(dumped), "a dump")
        assert "tag 9" in recording.reason
        assert any(op.tag == 9 and op.result == "TIMEOUT" for op in recording.ops)
    assert not list(dumped.glob("*.part"))


def test_a_program_that_goes_elsewhere_has_its_dumps_where_it_began(
    dumped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PCCL_TRACE_DIR", "traces")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with run_of(2) as cluster:
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(PCCLError):
            cluster[0].all_reduce(ones(), op=ReduceOp.SUM, timeout=0.1)
        until(lambda: dump_of(dumped), "a dump")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_op_that_hangs_is_dumped(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TRACE_HANG", "0.1")
    with run_of(2) as cluster:
        waiting = Background(lambda: reduce_once(cluster[0]))
        recording = until(lambda: dump_of(dumped), "a dump")
        assert "has not ended within 0.1 s" in recording.reason
        assert any(not op.result for op in recording.ops)
        reduce_once(cluster[1])
        waiting.result()


def test_a_session_that_loses_its_master_is_dumped(dumped: Path) -> None:
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


def test_a_directory_that_cannot_be_written_harms_nobody(dumped: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumped.write_text("a file in the way")
    with run_of(2) as cluster:
        with pytest.raises(PCCLError):
            cluster[0].all_reduce(ones(), op=ReduceOp.SUM, tag=9, timeout=0.1)
        until(lambda: "cannot be written" in caplog.text, "a warning")
        cluster.each(reduce_once)
