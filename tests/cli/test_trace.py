"""`pccl trace`, and `collect` behind it: what all peers recorded, on one timeline."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.flight_recorder import Trace, collect, save
from pccl.protocol import messages as m
from pccl.protocol.codec import encode
from pccl.runtime.master import requests
from pccl.trace.clocks import shifts
from tests.conftest import Command
from tests.support.cluster import Cluster, reduce_once, run_of
from tests.support.commands import ended

CERTIFICATES = Path(__file__).parents[1] / "certificates"
OPS = 30


@pytest.fixture(autouse=True)
def without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PCCL_TOKEN", "PCCL_TLS_CA", "PCCL_MASTER"):
        monkeypatch.delenv(name, raising=False)


def number_of(peer: Communicator) -> int:
    return peer.flight_recorder().peer


def check_drawing(path: Path, world: int) -> None:
    """All ops are on all peers, and nobody finishes one before the last has launched it."""
    trace = json.loads(path.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    ops: dict[tuple[int, ...], dict[int, tuple[float, float]]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "X" and event["cat"] == "op":
            args = event["args"]
            assert args["result"] == "SUCCESS"
            done = event["ts"] + args["done_us"]
            ops[args["epoch"], args["tag"], args["sequence"]][event["pid"]] = event["ts"], done
            assert args["done_us"] <= event["dur"]
    assert len(ops) == OPS
    for peers in ops.values():
        assert len(peers) == world
        launched = max(start for start, _ in peers.values())
        assert all(done >= launched for _, done in peers.values())
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == OPS * (world - 1)
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert start["pid"] != ends[number]["pid"]
        assert start["ts"] <= ends[number]["ts"]
    assert min(event["ts"] for event in events if "ts" in event) >= 0
    assert [peer["clock"] for peer in trace["otherData"]["peers"]] == ["same clock"] * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_is_drawn(cluster: Cluster, command: Command, tmp_path: Path, world: int) -> None:
    cluster.join(world)
    cluster.each(lambda peer, _: [reduce_once(peer) for _ in range(OPS)])
    path = tmp_path / "trace.json"
    done = command("trace", cluster.address, "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{OPS} ops") == world
    assert "ui.perfetto.dev" in done.stdout
    check_drawing(path, world)


def test_only_the_last_ops(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.each(lambda peer, _: [reduce_once(peer) for _ in range(OPS)])
    for peer in collect(cluster.address, last=5).peers:
        assert peer.recording is not None
        assert [op.sequence for op in peer.recording.ops] == list(range(OPS - 5, OPS))
    trace = collect(cluster.address, seconds=1e-9)
    assert [peer.recording.ops for peer in trace.peers if peer.recording] == [[], []]


def test_recording_in_parts_during_ops(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "PART_BYTES_MAX", 200)
    cluster.join(2)
    cluster.each(lambda peer, _: [reduce_once(peer) for _ in range(OPS)])
    is_over = threading.Event()
    traces: list[Trace] = []

    def trace() -> None:
        try:
            traces.extend(collect(cluster.address) for _ in range(3))
        finally:
            is_over.set()

    asking = threading.Thread(target=trace)
    asking.start()
    running = 1
    while not is_over.is_set():
        cluster.each(reduce_once)
        running += 1
    asking.join()
    assert len(traces) == 3
    for found in traces:
        for peer in found.peers:
            assert peer.recording is not None
            assert len(peer.recording.ops) >= OPS
            assert peer.uncertainty_ns > 0
            assert peer.offset_ns is not None
            assert abs(peer.offset_ns) <= peer.uncertainty_ns, "they have one clock"


def test_offsets_are_measured(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of other machines: here their names alone differ, so the shift that is found has to be none."""
    monkeypatch.setattr("pccl.runtime.session.recorder.clock_name", lambda: str(threading.get_ident()))
    cluster.join(2)
    cluster.each(lambda peer, _: [reduce_once(peer) for _ in range(OPS)])
    trace = collect(cluster.address)
    recordings = [peer.recording for peer in trace.peers]
    assert all(recordings)
    found = shifts(trace)
    for peer in trace.peers:
        assert found[peer.peer].source.startswith("timestamps")
    first, second = (found[peer.peer] for peer in trace.peers)
    assert abs(second.shift_ns - first.shift_ns) <= first.uncertainty_ns + second.uncertainty_ns


def test_peer_lost_during_trace(cluster: Cluster) -> None:
    cluster.join(3)
    cluster.each(reduce_once)
    cluster.close(cluster[2])
    trace = collect(cluster.address)
    assert [peer.peer for peer in trace.peers] == [number_of(peer) for peer in cluster.peers]
    for peer in trace.peers:
        assert peer.recording is not None
        assert any(event.kind == "view" and "was lost" in event.text for event in peer.recording.events)
        assert any(op.world_size == 3 for op in peer.recording.ops)


@contextmanager
def silent(peer: Communicator) -> Iterator[None]:
    """A peer that does not answer what the master asks of its recorder."""
    session = peer._inner._session
    assert session is not None
    parts = session._control._recording_parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "asked", lambda request: None)
        yield


def test_silent_peer_is_named(
    cluster: Cluster, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.2)
    cluster.join(3)
    cluster.each(reduce_once)
    path = tmp_path / "trace.json"
    with silent(cluster[1]):
        done = command("trace", cluster.address, "-o", str(path))
    number = number_of(cluster[1])
    assert done.returncode == 0
    assert f"peer {number} " in done.stderr
    assert "is missing: it did not answer within 0.2 s" in done.stderr
    drawn = json.loads(path.read_text())
    lacking = [peer for peer in drawn["otherData"]["peers"] if "lack" in peer]
    assert [peer["peer"] for peer in lacking] == [number]
    names = [event["args"]["name"] for event in drawn["traceEvents"] if event["name"] == "process_name"]
    assert any("no recording: it did not answer" in name for name in names)
    cluster.each(reduce_once)
    assert all(peer.recording for peer in collect(cluster.address).peers)


def test_leading_master_is_traced(cluster: Cluster) -> None:
    with MasterNode("127.0.0.1:0", standby_of=cluster.address) as standby:
        cluster.join(2)
        cluster.each(reduce_once)
        found = collect(f"{standby.address},{cluster.address}")
        assert [peer.lack for peer in found.peers] == ["", ""]
        with pytest.raises(PCCLError, match="does not lead a run"):
            collect(str(standby.address))


def test_partial_trace_after_timeout(cluster: Cluster, command: Command, tmp_path: Path) -> None:
    cluster.join(2)
    cluster.each(reduce_once)
    with silent(cluster[1]):
        done = command("trace", cluster.address, "-o", str(tmp_path / "trace.json"), "--timeout", "0.4")
    assert done.returncode == 0, done.stderr
    assert "not all recordings arrived within 0.4 s" in done.stderr


def test_trace_needs_token(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    output = str(tmp_path / "trace.json")
    with MasterNode("127.0.0.1:0", token="secret") as node:
        cluster = Cluster(node.address, token="secret")
        cluster.join(2)
        assert command("trace", node.address, "-o", output, "--token-file", str(token)).returncode == 0
        without = command("trace", node.address, "-o", output)
        assert without.returncode == 1
        assert "this peer has none" in without.stderr
        monkeypatch.setenv("PCCL_TOKEN", "guess")
        wrong = command("trace", node.address, "-o", output)
        assert wrong.returncode == 1
        assert "a different token" in wrong.stderr
        cluster.close_all()


def test_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "master.pem")
    with MasterNode("localhost:0", ssl_context=context) as node:
        monkeypatch.setenv("PCCL_TLS_CA", str(CERTIFICATES / "ca.pem"))
        cluster = Cluster(node.address)
        cluster.join(2)
        cluster.each(reduce_once)
        assert [len(peer.recording.ops) for peer in collect(node.address).peers if peer.recording] == [1, 1]
        monkeypatch.delenv("PCCL_TLS_CA")
        with pytest.raises(PCCLError, match="asks for TLS"):
            collect(node.address)
        cluster.close_all()


def test_traces_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.join(1)
    monkeypatch.setattr(requests, "TRACES_MAX", 0)
    with pytest.raises(PCCLError, match="try again"):
        collect(cluster.address)


@contextmanager
def somebody(answer: bytes) -> Iterator[str]:
    """A server that answers whatever comes with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(4096)
                sock.sendall(answer)
                sock.recv(4096)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_an_older_master_refuses() -> None:
    """As one does that does not know what a trace is."""
    refusal = m.Goodbye(Result.MASTER_CONNECTION_FAILED, "not an expected message: Invalid value 'TraceRequest'")
    with somebody(encode(refusal)) as address, pytest.raises(PCCLError, match="TraceRequest") as caught:
        collect(address)
    assert caught.value.result is Result.MASTER_CONNECTION_FAILED


def test_no_master() -> None:
    with pytest.raises(PCCLError, match="cannot reach a master") as caught:
        collect("127.0.0.1:1")
    assert caught.value.result is Result.MASTER_CONNECTION_FAILED


def test_wrong_arguments() -> None:
    for wrong in ({"seconds": -1}, {"last": -1}):
        with pytest.raises(PCCLError) as caught:
            collect("127.0.0.1:1", **wrong)  # type: ignore[arg-type]
        assert caught.value.result is Result.INVALID_ARGUMENT


def test_files_of_ended_run(command: Command, tmp_path: Path) -> None:
    with run_of(2) as cluster:
        cluster.each(lambda peer, _: [reduce_once(peer) for _ in range(OPS)])
        for peer in cluster.peers:
            save(peer.flight_recorder(), tmp_path / f"{number_of(peer)}.json")
    path = tmp_path / "trace.json"
    done = command("trace", "--files", str(tmp_path / "1.json"), str(tmp_path / "2.json"), "-o", str(path))
    assert done.returncode == 0, done.stderr
    check_drawing(path, 2)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """A file with a recording."""
    path = tmp_path / "recording.json"
    with run_of(1) as cluster:
        save(cluster[0].flight_recorder(), path)
    return str(path)


def test_failed_trace_leaves_former_file(
    command: Command, tmp_path: Path, recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Trace) -> bytes:
        raise ValueError("cannot be drawn")

    monkeypatch.setattr("pccl.trace.timeline.encode", fail)
    path = tmp_path / "trace.json"
    path.write_text("former")
    done = command("trace", "--files", recording, "-o", str(path))
    assert (done.returncode, done.stderr) == (1, "pccl trace: cannot be drawn\n")
    assert path.read_text() == "former"
    assert sorted(os.listdir(tmp_path)) == ["recording.json", "trace.json"]


def draw_to(output: str, recording: str, stdout: int | IO[bytes]) -> subprocess.CompletedProcess[str]:
    return ended("trace", "--files", recording, "-o", output, stdout=stdout)


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_stdout_has_only_the_trace(tmp_path: Path, recording: str, output: str) -> None:
    piped = draw_to(output, recording, subprocess.PIPE)
    assert piped.returncode == 0
    assert "traceEvents" in json.loads(piped.stdout)
    assert "0 ops" in piped.stderr
    with open(tmp_path / "both", "wb") as file:
        file.write(b"before\n")
        file.flush()
        assert draw_to(output, recording, file).returncode == 0
    assert (tmp_path / "both").read_bytes() == b"before\n" + piped.stdout.encode()


@pytest.mark.parametrize("output", ["-", "/dev/full", "trace.json"])
def test_full_disk(tmp_path: Path, recording: str, output: str) -> None:
    with open("/dev/full", "wb") as full:
        done = draw_to(str(tmp_path / output) if output == "trace.json" else output, recording, full)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "cannot be written: No space left on device" in done.stderr


def test_invalid_files(command: Command, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    done = command("trace", "--files", str(wrong), "-o", str(tmp_path / "trace.json"))
    assert done.returncode == 1
    assert "not a recording" in done.stderr
    missing = command("trace", "--files", str(tmp_path / "missing.json"))
    assert missing.returncode == 1
    assert "missing.json" in missing.stderr


def test_files_of_different_runs(command: Command, tmp_path: Path) -> None:
    for number in range(2):
        with run_of(1) as cluster:
            save(cluster[0].flight_recorder(), tmp_path / f"{number}.json")
    done = command("trace", "--files", str(tmp_path / "0.json"), str(tmp_path / "1.json"))
    assert done.returncode == 1
    assert "different runs" in done.stderr
