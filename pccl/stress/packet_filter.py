"""Drops what certain other processes send to this one, as a network that is partitioned would.

Theory of operation. The kernel drops a packet before TCP has seen it where the socket has a filter that says so (Linux,
SO_ATTACH_FILTER, classic BPF), and any process may give filters to its own sockets. One filter on all sockets of a
process drops what chosen *senders* send: their data, their acknowledgements, their connection attempts. If one process
drops what another sends, the way is blocked in one direction; if both do, in both. TCP repeats what is lost, so once
the filter is lifted, connections that nobody has given up go on by themselves.

All processes are on one machine, so addresses are made to tell them apart: a process dials from a *place* of its own,
an address of the loopback network, and listens at a port of 127.0.0.1 that is known in advance. An audit hook, which
sees every connect before it is made, binds the socket to the place and gives it the filter; accepted sockets inherit
the listening socket's.
"""

from __future__ import annotations

import ctypes
import errno
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pccl.stress.sockets import own_sockets

LISTENING_HOST = "127.0.0.1"
SO_ATTACH_FILTER = 26
MOMENT_S = 0.1
AGAIN_AFTER_S = 0.1
"""A connection that the kernel had accepted and the process had not, when a filter was set, gets the filter then."""
PORTS_TRIED = 100
USUAL_GIVEN_PORTS = 32768, 60999
PORT_MIN = 10_000
"""Many ports below this one belong to services."""
PORT_MAX = 65535

_LOAD_WORD, _LOAD_HALF, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000
_SOURCE_ADDRESS = _NETWORK_HEADER + 12
_SOURCE_PORT = 0
"""The filter of a TCP socket is shown packets from the TCP header on."""
_ALL = 0xFFFFFFFF


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The addresses by which a process is told from others on the machine."""

    host: str
    """The address it dials from; empty if it does not dial."""
    port: int
    """The port it listens at on LISTENING_HOST."""


def place(number: int, port: int) -> Place:
    """Return the place of the process with this number, below 200."""
    return Place(f"127.0.1.{1 + number}", port)


def unavailable() -> str:
    """Return why packets cannot be filtered here; empty if they can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux, where a socket can have a packet filter"
    own = place(0, 0)
    try:
        with (
            socket.create_server((LISTENING_HOST, 0)) as server,
            socket.create_connection(server.getsockname(), MOMENT_S, (own.host, 0)) as there,
            server.accept()[0] as here,
        ):
            _attach(here, _program([own]))
            there.send(b"?")
            here.settimeout(MOMENT_S)
            here.recv(1)
    except TimeoutError:
        return ""
    except OSError as error:
        return f"needs sockets that take a packet filter; here they do not: {error}"
    return "needs sockets that obey a packet filter; here they take one and ignore it"


class PacketFilter:
    """The filter on all sockets of this process, of which there is one at most. Thread-safe."""

    def __init__(self, own: Place | None) -> None:
        """`own` is the place of this process if it dials."""
        self._own = own
        self._program = _program([])
        self._lock = threading.Lock()
        if own is not None:
            sys.addaudithook(self._audit)

    def drop_from(self, senders: Sequence[Place]) -> None:
        """Drop what these processes send, and nothing else, until the next call."""
        with self._lock:
            self._program = _program(senders)
            self._attach_all()
            time.sleep(AGAIN_AFTER_S)
            self._attach_all()

    def _attach_all(self) -> None:
        for sock in own_sockets():
            _attach(sock, self._program)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "socket.connect":
            return
        sock, address = arguments
        if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM and address[0] == LISTENING_HOST:
            assert self._own is not None
            if sock.getsockname()[0] == "0.0.0.0":
                sock.bind((self._own.host, 0))
            _attach(sock, self._program)


class HeldPort:
    """A free port of LISTENING_HOST that only processes which ask for it by number can listen at. `close()` frees it.

    If possible it lies outside the range from which the system serves whoever asks for any port: with the option set
    below, such a process could otherwise get it while nobody listens.
    """

    def __init__(self) -> None:
        self._sock = socket.socket()
        self.number = self._bind()
        # With this option on both sides a port may be bound twice, as long as only one of them listens.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def _bind(self) -> int:
        ports = _ports_not_given()
        for port in random.sample(ports, k=min(PORTS_TRIED, len(ports))):
            try:
                self._sock.bind((LISTENING_HOST, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
        self._sock.bind((LISTENING_HOST, 0))
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        self._sock.close()


def _ports_not_given() -> range:
    """Return the longer run of ports below or above the system's own range; it may be empty."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        first, last = USUAL_GIVEN_PORTS
    return max(range(PORT_MIN, first), range(last + 1, PORT_MAX + 1), key=len)


def _program(senders: Sequence[Place]) -> bytes:
    """Return the instructions, of classic BPF, that drop what these send."""
    code: list[tuple[int, int, int, int]] = []
    hosts = [_number(sender.host) for sender in senders if sender.host]
    ports = [sender.port for sender in senders]
    accept = len(hosts) + len(ports) + 3
    drop = accept + 1
    code.append((_LOAD_WORD, 0, 0, _SOURCE_ADDRESS))
    for host in hosts:
        code.append((_JUMP_IF_EQUAL, drop - len(code) - 1, 0, host))
    code.append((_JUMP_IF_EQUAL, 0, accept - len(code) - 1, _number(LISTENING_HOST)))
    code.append((_LOAD_HALF, 0, 0, _SOURCE_PORT))
    for port in ports:
        code.append((_JUMP_IF_EQUAL, drop - len(code) - 1, 0, port))
    assert len(code) == accept
    code += [(_RETURN, 0, 0, _ALL), (_RETURN, 0, 0, 0)]
    return b"".join(struct.pack("=HBBI", *each) for each in code)


def _number(host: str) -> int:
    return int.from_bytes(socket.inet_aton(host), "big")


def _attach(sock: socket.socket, program: bytes) -> None:
    """Give the socket this filter in place of the one it had. OSError where the kernel refuses."""
    code = ctypes.create_string_buffer(program, len(program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
