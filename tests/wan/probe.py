"""One plain TCP stream between two hosts of a lab: what the link alone does, without a library.

The receiver answers with one byte when it has everything, so a transfer's time is from the first byte handed over to
that answer: bytes / rate, plus one round trip, plus what TCP loses in between. The connection is used again and again,
as a library's are.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

from tests.wan.lab import Host

RECEIVE_BYTES = 1 << 20
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Transfer:
    seconds: float
    bytes: int

    @property
    def mbit_per_s(self) -> float:
        return self.bytes * 8 / self.seconds / 1e6


def connected(dialing: Host, listening: Host) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection; the caller closes them."""
    with listening.entered():
        listener = socket.create_server((listening.address, 0))
    with listener:
        with dialing.entered():
            near = socket.create_connection(listener.getsockname(), timeout=TIMEOUT_S)
        far, _ = listener.accept()
    for end in (near, far):
        end.settimeout(TIMEOUT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def round_trip_s(near: socket.socket, far: socket.socket) -> float:
    start_s = time.perf_counter()
    near.sendall(b"?")
    receive(far, 1)
    far.sendall(b"!")
    receive(near, 1)
    return time.perf_counter() - start_s


def transfer(near: socket.socket, far: socket.socket, count: int) -> Transfer:
    """`count` bytes from near to far, and one byte back."""

    def receive_and_answer() -> None:
        receive(far, count)
        far.sendall(b"!")

    receiver = threading.Thread(target=receive_and_answer)
    start_s = time.perf_counter()
    receiver.start()
    data = memoryview(bytes(RECEIVE_BYTES))
    for start in range(0, count, RECEIVE_BYTES):
        near.sendall(data[: min(RECEIVE_BYTES, count - start)])
    receive(near, 1)
    seconds = time.perf_counter() - start_s
    receiver.join()
    return Transfer(seconds, count)


def receive(end: socket.socket, count: int) -> None:
    buffer = bytearray(min(count, RECEIVE_BYTES))
    while count:
        received = end.recv_into(buffer, min(count, RECEIVE_BYTES))
        if not received:
            raise ConnectionError("closed before everything had come")
        count -= received
