"""Intruders at the master's port and at a peer's: with no token, with another one, or with somebody else's words."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, ReduceOp, Result, SharedState
from pccl.protocol import messages as m
from pccl.protocol.auth import NONCE_BYTES, Dialer
from pccl.protocol.codec import LENGTH_BYTES, OPENING_BYTES_MAX, decode_body, encode
from tests.runtime.network.flood import idle_connections, ports, steps
from tests.support.cluster import WAIT_S, Cluster

TOKEN = "a token of these tests"


@pytest.fixture
def guarded() -> Iterator[MasterNode]:
    """A master that asks for a token."""
    with MasterNode("127.0.0.1:0", token=TOKEN) as node:
        yield node


@contextmanager
def members(node: MasterNode, count: int) -> Iterator[Cluster]:
    cluster = Cluster(node.address, token=TOKEN)
    cluster.join(count)
    try:
        yield cluster
    finally:
        cluster.close_all()


def dialled(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), WAIT_S)
    sock.settimeout(WAIT_S)
    return sock


def peer_port(peer: Communicator) -> str:
    session = peer._inner._session
    assert session is not None
    return f"127.0.0.1:{session._port.number}"


def read_frame(sock: socket.socket) -> bytes:
    """Return one frame, or what there was of it before the connection ended."""
    data = b""
    while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big"):
        wanted = LENGTH_BYTES if len(data) < LENGTH_BYTES else LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
        some = sock.recv(wanted - len(data))
        if not some:
            break
        data += some
    return data


def read_message(sock: socket.socket) -> m.Message:
    message: m.Message = decode_body(
        read_frame(sock)[LENGTH_BYTES:], m.FromMaster | m.PeerAnswer | m.Challenge | m.Proof
    )
    return message


class Recorder:
    """Passes the two connections of one peer on to `address`. Keeps the frames that went each way on the first, and of
    the second, which carries heartbeats, what went forth."""

    def __init__(self, address: str) -> None:
        self._target = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.forth: list[bytes] = []
        self.back: list[bytes] = []
        self.heartbeats = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._listener, self._listener.accept()[0] as near, dialled(self._target) as far:
            passing = threading.Thread(target=self._pass_heartbeats, daemon=True)
            back = threading.Thread(target=self._pump, args=(far, near, self.back), daemon=True)
            back.start()
            passing.start()
            self._pump(near, far, self.forth)
            back.join(WAIT_S)
            passing.join(WAIT_S)

    def _pass_heartbeats(self) -> None:
        with self._listener.accept()[0] as near, dialled(self._target) as far:
            near.setblocking(False)
            far.setblocking(False)
            try:
                while ready := select.select([near, far], [], [], WAIT_S)[0]:
                    for source in ready:
                        some = source.recv(4096)
                        if not some:
                            return
                        (far if source is near else near).sendall(some)
                        self.heartbeats += some if source is near else b""
            except OSError:
                pass

    def _pump(self, source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
        try:
            while frame := read_frame(source):
                kept.append(frame)
                sink.sendall(frame)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def join(self) -> None:
        self._thread.join(WAIT_S)


def refusal(address: str, token: str | None) -> PCCLError:
    with pytest.raises(PCCLError) as caught:
        Communicator(address, token=token, timeout=WAIT_S).connect(n_attempts=5)
    assert caught.value.result is Result.MASTER_CONNECTION_FAILED
    return caught.value


def test_run_with_token(guarded: MasterNode) -> None:
    """Links, state transfers and measurements each have a handshake of their own."""
    with members(guarded, 3) as cluster:
        values = [np.full(1000, i + 1, np.float32) for i in range(3)]
        cluster.each(lambda peer, i: peer.all_reduce(values[i], op=ReduceOp.SUM))
        assert all((value == 6).all() for value in values)
        cluster.each(lambda peer, i: peer.optimize_topology())
        weights = [np.full(1000, i, np.float32) for i in range(3)]
        states = [SharedState.from_numpy({"w": array}) for array in weights]
        cluster.each(lambda peer, i: peer.sync_shared_state(states[i]))
        assert len({array.tobytes() for array in weights}) == 1


def test_wrong_token_is_refused_and_logged(guarded: MasterNode, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pccl.master"):
        error = refusal(guarded.address, "another")
    assert "this peer has a different token than the master" in str(error)
    assert guarded.address in str(error)
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == 1, "no use in trying again"
    assert "the dialing peer has a different token than the master" in refused[0]
    assert refused[0].startswith("127.0.0.1:")


def test_a_peer_without_a_token_is_refused(guarded: MasterNode) -> None:
    assert "the master has a token, but this peer has none" in str(refusal(guarded.address, ""))


def test_a_master_without_a_token_is_refused(master: MasterNode) -> None:
    assert "this peer has a token, but the master has none" in str(refusal(master.address, TOKEN))


def test_false_master_is_rejected() -> None:
    """A false master lets everybody in, but cannot prove that it knows the token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def welcome() -> None:
            with listener.accept()[0] as sock:
                read_frame(sock)
                sock.sendall(encode(m.Welcome(1, "run", 1)))
                sock.recv(1)

        threading.Thread(target=welcome, daemon=True).start()
        error = refusal(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN)
    assert "it has no token, but this side has one" in str(error)


def test_reflected_proof_is_rejected(guarded: MasterNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def mirror() -> None:
            with listener.accept()[0] as sock:
                read_frame(sock)
                sock.sendall(encode(m.Challenge(b"n" * 32, "run")))
                sock.sendall(read_frame(sock))
                sock.recv(1)

        threading.Thread(target=mirror, daemon=True).start()
        error = refusal(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN)
    assert "does not know the token" in str(error)


def test_a_replayed_join_is_refused(guarded: MasterNode, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(guarded.address)
    with Communicator(recorder.address, token=TOKEN, timeout=WAIT_S):
        recorded = recorder.forth[:2]
    recorder.join()
    assert [type(read(frame)) for frame in recorded] == [m.Hello, m.Proof]
    with dialled(guarded.address) as sock, caplog.at_level(logging.WARNING, "pccl.master"):
        sock.sendall(b"".join(recorded))
        assert isinstance(read_message(sock), m.Challenge)
        answer = read_message(sock)
        assert isinstance(answer, m.Goodbye)
        assert "a different token" in answer.reason
        assert sock.recv(1) == b""
        assert any(f"127.0.0.1:{sock.getsockname()[1]} refused" in text for text in caplog.messages)


def read(frame: bytes) -> m.Message:
    message: m.Message = decode_body(frame[LENGTH_BYTES:], m.Opening | m.Proof | m.Challenge)  # type: ignore[operator]
    return message


@pytest.mark.parametrize("kind", ["link", "state", "probe"])
def test_peer_port_refuses_unauthenticated(guarded: MasterNode, kind: str) -> None:
    """The dialer knows all that can be seen on the network, but not the token."""
    with members(guarded, 2) as cluster:
        session = cluster[0]._inner._session
        assert session is not None
        run, peer = session._machine.run, session._machine.peer
        openings = {
            "link": m.LinkHello(m.PROTOCOL_VERSION, run, peer + 1, peer, 2, 0, 4, b"n" * 32),
            "state": m.StateHello(m.PROTOCOL_VERSION, run, peer + 1, peer, 1, b"n" * 32),
            "probe": m.ProbeHello(m.PROTOCOL_VERSION, run, peer + 1, peer, False, b"n" * 32),
        }
        with dialled(peer_port(cluster[0])) as sock:
            sock.sendall(encode(openings[kind]))
            assert isinstance(read_message(sock), m.Challenge)
            sock.sendall(encode(m.Proof(b"p" * 32)))
            answer = read_message(sock)
            assert isinstance(answer, m.Rejected)
            assert f"a different token than peer {peer}" in answer.reason
            assert sock.recv(1) == b""
        values = [np.ones(10, np.float32) for _ in range(2)]
        cluster.each(lambda peer, i: peer.all_reduce(values[i], op=ReduceOp.SUM))
        assert (values[0] == 2).all()


def test_a_replayed_handshake_at_a_peers_port_is_refused(guarded: MasterNode) -> None:
    with members(guarded, 1) as cluster:
        session = cluster[0]._inner._session
        assert session is not None
        opening = m.ProbeHello(m.PROTOCOL_VERSION, session._machine.run, 2, session._machine.peer, False)
        side = Dialer(TOKEN, b"n" * NONCE_BYTES, opening, session._machine.run)
        with dialled(peer_port(cluster[0])) as sock:
            sock.sendall(side.opening)
            frame = read_frame(sock)
            challenge = read(frame)
            assert isinstance(challenge, m.Challenge)
            answer = side.answer(challenge, frame[LENGTH_BYTES:])
            sock.sendall(answer)
            theirs = read_message(sock)
            assert isinstance(theirs, m.Proof)
            side.check(theirs)
            assert isinstance(read_message(sock), m.Accepted)
        with dialled(peer_port(cluster[0])) as sock:
            sock.sendall(side.opening + answer)
            assert isinstance(read_message(sock), m.Challenge)
            assert isinstance(read_message(sock), m.Rejected)


def test_no_unrequested_flood() -> None:
    """A peer sends a flood only while all peers measure; without a token anybody may claim to be one."""
    with MasterNode("127.0.0.1:0") as node:
        cluster = Cluster(node.address)
        cluster.join(1)
        session = cluster[0]._inner._session
        assert session is not None
        opening = m.ProbeHello(m.PROTOCOL_VERSION, session._machine.run, 2, session._machine.peer, pulls=True)
        with dialled(peer_port(cluster[0])) as sock:
            sock.sendall(encode(opening))
            answer = read_message(sock)
            assert isinstance(answer, m.Rejected)
            assert "no optimize_topology" in answer.reason
        cluster.close_all()


def test_the_token_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TOKEN", f"{TOKEN}\n")
    with MasterNode("127.0.0.1:0") as node, Communicator(node.address, timeout=WAIT_S):
        refusal(node.address, "another")
        refusal(node.address, "")


def test_a_token_is_never_shown(guarded: MasterNode) -> None:
    with Communicator(guarded.address, token=TOKEN, timeout=WAIT_S) as peer:
        session = peer._inner._session
        assert session is not None
        assert TOKEN not in repr(session._options)


def test_forged_heartbeats_are_refused(guarded: MasterNode) -> None:
    with members(guarded, 1) as cluster, dialled(guarded.address) as sock:
        session = cluster[0]._inner._session
        assert session is not None
        sock.sendall(encode(m.HeartbeatHello(m.PROTOCOL_VERSION, session._machine.run, session._machine.peer)))
        answer = read_message(sock)
        assert isinstance(answer, m.Goodbye)
        assert "this peer has none" in answer.reason


def test_replayed_heartbeats_are_refused(guarded: MasterNode) -> None:
    recorder = Recorder(guarded.address)
    with Communicator(recorder.address, token=TOKEN, timeout=WAIT_S), dialled(guarded.address) as sock:
        sock.sendall(recorder.heartbeats)
        assert isinstance(read_message(sock), m.Challenge)
        answer = read_message(sock)
        assert isinstance(answer, m.Goodbye)
        assert "a different token" in answer.reason
    recorder.join()


# Those who keep connections and say nothing, too much, or nonsense.


def test_thousand_idle_connections(cluster: Cluster) -> None:
    """They come to the master's port and to every peer's: the run goes on, and newcomers get in."""
    cluster.join(2)
    with idle_connections(1000, ports(cluster)):
        steps(cluster, 20, 1000)
        cluster.join()
        steps(cluster, 20, 1000)


def test_oldest_idle_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.runtime.network.accepting.PER_SOURCE_MAX", 3)
    with MasterNode("127.0.0.1:0") as node, ExitStack() as stack:
        socks = [stack.enter_context(dialled(node.address)) for _ in range(4)]
        assert socks[0].recv(1) == b""
        for sock in socks[1:]:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
        with Communicator(node.address, timeout=WAIT_S) as peer:
            assert peer.world_size == 1


GARBAGE = [
    pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="http"),
    pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 40, id="tls"),
    pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="ssh"),
    pytest.param(b"\0\0\0\0", id="empty message"),
    pytest.param(b"\0\0\0\5\xdd\xff\xff\xff\xff", id="huge array"),
    pytest.param((2**31).to_bytes(4, "big"), id="huge message"),
    pytest.param((OPENING_BYTES_MAX + 1).to_bytes(4, "big") + b"x" * (OPENING_BYTES_MAX + 1), id="oversized"),
    pytest.param(encode(m.Install(1)), id="another message"),
    pytest.param(b"\xff" * 100_000, id="noise"),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_ends_its_own_connection_only(cluster: Cluster, garbage: bytes) -> None:
    cluster.join(2)
    for address in ports(cluster)[:2]:
        with dialled(address) as sock:
            try:
                sock.sendall(garbage)
                while sock.recv(65536):
                    pass
            except ConnectionError:
                pass
    steps(cluster, 2, 100)
    cluster.join()
    steps(cluster, 2, 100)


def test_slow_opening_times_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not extend the time."""
    cluster.join(1)
    monkeypatch.setattr("pccl.runtime.network.links.OPENING_TIMEOUT_S", 0.2)
    hello = encode(m.ProbeHello(m.PROTOCOL_VERSION, "r" * 1000, 1, 1, False))
    with dialled(ports(cluster)[1]) as sock:
        sock.settimeout(0.01)

        def dawdle() -> None:
            for byte in hello[:-1]:
                sock.sendall(bytes([byte]))
                with suppress(TimeoutError):
                    if not sock.recv(1):
                        raise ConnectionResetError

        with pytest.raises(ConnectionError):
            dawdle()
    monkeypatch.undo()  # peers' own links may take longer
    cluster.join()
    steps(cluster, 1, 10)
