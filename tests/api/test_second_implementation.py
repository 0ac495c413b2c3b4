"""A peer that was written from docs/design/wire.md alone joins a run and takes part in an all-reduce.

Of pccl it uses only a master and a peer to connect to: if this fails, the specification is wrong, or the wire has
changed without it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from pccl import Communicator, MasterNode, ReduceOp
from tests.support.cluster import WAIT_S, Background, until

PROTOCOL_VERSION, FRAME_VERSION = 20, 7
TOKEN = "a token"
READY, EAGER, FRAME_HELLO, DONE = 1, 3, 5, 8
FRAME_BYTES = 88


def _crc_table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        yield value


CRC_TABLE = list(_crc_table())


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class Connection:
    """Bytes and messages."""

    def __init__(self, host: str, port: int) -> None:
        self.sock = socket.create_connection((host, port), WAIT_S)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more, "closed by the other side"
            data += more
        return data

    def send(self, *message: Any) -> bytes:
        body: bytes = msgpack.packb(message)
        self.sock.sendall(len(body).to_bytes(4, "big") + body)
        return body

    def receive_body(self) -> bytes:
        return self.read(int.from_bytes(self.read(4), "big"))

    def receive(self) -> list[Any]:
        message: list[Any] = msgpack.unpackb(self.receive_body())
        return message

    def open(self, *opening: Any) -> list[Any]:
        """The handshake of a dialer without X25519, and the answer to the opening."""
        said = self.send(*(secrets.token_bytes(32) if field == "AUTH" else field for field in opening))
        challenge = self.receive_body()
        name, auth, run = msgpack.unpackb(challenge)
        assert name == "Challenge"
        assert len(auth) == 32  # a nonce, and no public key
        psk = _hmac(TOKEN.encode(), b"pccl 2 run key" + _field(run.encode()))
        secret = _hmac(psk, bytes(32))
        transcript = hashlib.sha256(b"pccl 2 transcript" + _field(said) + _field(challenge)).digest()

        def expand(label: bytes) -> bytes:
            return _hmac(secret, b"pccl 2 " + label + transcript + b"\x01")

        self.send("Proof", expand(b"proof of the dialer"))
        assert self.receive() == ["Proof", expand(b"proof of the acceptor")]
        return self.receive()


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


class LinkConnection(Connection):
    """Frames."""

    received_frames = 0

    def send_frame(self, kind: int, key: bytes = bytes(28), body: bytes = b"", payload: bytes = b"") -> None:
        crc = crc32c(payload) if payload else 0
        head = struct.pack("<HBBIII", 0x4350, FRAME_VERSION, kind, self.received_frames, len(payload), crc) + key
        rest = body.ljust(40, b"\0")
        self.sock.sendall(head + struct.pack("<I", crc32c(head + rest)) + rest + payload)

    def receive_frame(self) -> tuple[int, bytes, bytes, bytes]:
        header = self.read(FRAME_BYTES)
        magic, version, kind, _, payload_bytes, payload_crc = struct.unpack_from("<HBBIII", header)
        assert (magic, version) == (0x4350, FRAME_VERSION)
        assert struct.unpack_from("<I", header, 44)[0] == crc32c(header[:44] + header[48:])
        payload = self.read(payload_bytes)
        assert payload_crc == (crc32c(payload) if payload else 0)
        self.received_frames += kind not in (FRAME_HELLO, 6)
        return kind, header[16:44], header[48:], payload


class SecondImplementation:
    """A peer that another one has preceded, so that it dials all links."""

    def __init__(self, master_port: int) -> None:
        self.master_port = master_port
        self.control = Connection("127.0.0.1", master_port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        port = self.listener.getsockname()[1]
        hello: tuple[Any, ...] = ("Hello", PROTOCOL_VERSION, "second", 0, [], port, 1, "second", "AUTH")
        welcome = self.control.open(*hello)
        assert welcome[0] == "Welcome"
        _, self.peer, self.run, _, self.peer_timeout_s, engine_threads = welcome[:6]
        assert engine_threads == 1
        self.is_over = threading.Event()
        self.beating = Background(self._beat)

    def _beat(self) -> None:
        connection = Connection("127.0.0.1", self.master_port)
        answer = connection.open("HeartbeatHello", PROTOCOL_VERSION, self.run, self.peer, "AUTH")
        assert answer[0] == "Accepted"
        while not self.is_over.wait(min(1.0, self.peer_timeout_s / 5)):
            connection.sock.sendall(b"b")
        connection.sock.close()

    def receive(self, name: str) -> list[Any]:
        while (message := self.control.receive())[0] != name:
            assert message[0] in ("Ack", "Prepare", "Install"), message
        return message[1:]

    def join(self) -> None:
        view, members, rings = self.receive("Prepare")[:3]
        ((_, self.epoch, self.ring),) = rings
        other = next(member for member in members if member[0] != self.peer)
        number, _, _, port, connections = other[:5]
        self.links = [LinkConnection("127.0.0.1", port) for _ in range(max(1, connections))]
        for index, link in enumerate(self.links):
            hello = (PROTOCOL_VERSION, self.run, self.peer, number, view, index, len(self.links), "AUTH", False, 0)
            answer = link.open("LinkHello", *hello)
            assert answer[0] == "Accepted"
            link.read(answer[1])  # padding
        for index, link in enumerate(self.links):
            link.send_frame(FRAME_HELLO, body=struct.pack("<I", index + 1))
            assert link.receive_frame()[0] == FRAME_HELLO
        self.control.send("LinksReady", view)
        installed, is_meshed = self.receive("Install")[:2]
        assert (installed, is_meshed) == (view, True)

    def all_reduce(self, values: np.ndarray) -> np.ndarray:
        """The sum of float32 over two ranks, direct and one-shot, as the first use of tag 0."""
        count = len(values)
        assert len(self.ring) == 2
        key = struct.pack("<QQQI", self.epoch, 0, 0, 0)
        dimensions = ((1 << count.bit_length() | count) << 6) | count.bit_length()
        description = struct.pack("<QBBBBIIIQQ", count, 10, 0, 0, 0, 0, 512 << 10, 2 | 1 << 24, 0, dimensions)
        result = values
        self.links[0].send_frame(EAGER, key, description, values.tobytes())
        expected = {EAGER, DONE}
        for kind, its_key, body, payload in self._frames():
            if kind == READY:
                assert body == description
                continue
            expected.remove(kind)
            assert its_key == key
            if kind == EAGER:
                assert body == description
                result = np.frombuffer(payload, np.float32) + values
                self.links[0].send_frame(DONE, key)
            if not expected:
                return result
        raise AssertionError

    def _frames(self) -> Iterator[tuple[int, bytes, bytes, bytes]]:
        """All that counts, from whichever connection it comes."""
        for link in self.links:
            link.sock.settimeout(0.01)
        while True:
            for link in self.links:
                try:
                    link.sock.recv(FRAME_BYTES, socket.MSG_PEEK)
                except TimeoutError:
                    continue
                link.sock.settimeout(WAIT_S)
                yield link.receive_frame()
                link.sock.settimeout(0.01)

    def leave(self) -> None:
        self.control.send("Leave", "")
        self.is_over.set()
        self.beating.outcome()
        self.listener.close()
        for connection in (self.control, *self.links):
            connection.sock.close()


def test_peer_written_from_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCCL_ENGINE_THREADS", raising=False)
    with MasterNode("127.0.0.1:0", token=TOKEN) as node, Communicator(node.address, token=TOKEN) as first:
        second = SecondImplementation(int(node.address.rpartition(":")[2]))
        joining = Background(second.join)
        until(first.are_peers_pending, "the peer is pending")
        first.update_topology()
        joining.outcome()
        ours, theirs = np.arange(6, dtype=np.float32), np.full(6, 0.5, np.float32)
        reducing = Background(lambda: second.all_reduce(theirs))
        info = first.all_reduce(ours, op=ReduceOp.SUM)
        assert info.world_size == 2
        assert reducing.outcome().tobytes() == ours.tobytes() == (np.arange(6, dtype=np.float32) + 0.5).tobytes()
        second.leave()
