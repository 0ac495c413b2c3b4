"""Network faults that a process injects into its own sockets: cut connections, and packets dropped in a partition.

With a filter on a socket (Linux, SO_ATTACH_FILTER), the kernel drops packets before TCP receives them. A process may
attach filters to its own sockets. Data, acknowledgements and connection attempts from the filtered senders are lost, in
one direction; TCP retransmits once the filter is lifted. Senders are identified by address: each process in a run
listens on and dials from its own loopback address. An audit hook binds sockets before they connect.

    python -m pccl.tools.stress.network HOST ARGUMENT...

runs `pccl master ARGUMENT...` with such a filter.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from pccl.tools.harness import received
from pccl.tools.stress.plan import Command, DropFrom

SO_ATTACH_FILTER = 26
AGAIN_AFTER_S = 0.1
"""A filter is attached again after this time, for connections that were in the accept queue the first time."""
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_SOURCE_ADDRESS = 0xFFF00000 + 12
"""The offset of the source address, relative to the network header."""


def host_of(member: int) -> str:
    """Return the loopback address of the peer in a slot, or of master -1, -2, ... (on Linux; elsewhere 127.0.0.1)."""
    if not sys.platform.startswith("linux"):
        return "127.0.0.1"
    return f"127.0.1.{1 + member}" if member >= 0 else f"127.0.2.{-member}"


def advertised(host: str) -> str:
    """Return an IPv4 address as a number, because peers would replace a loopback address with the master's host."""
    return str(_number(host))


def own_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets, each closed after its turn."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        with suppress(OSError):  # closed in the meantime
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                        yield sock


def cut_one(random: Random, masters: str) -> bool:
    """Shut down one of this process's connections to other peers. Return False if there is none."""
    addresses = set(masters.split(","))
    connected = []
    for sock in own_sockets():
        with suppress(OSError):  # not connected
            if "{}:{}".format(*sock.getpeername()[:2]) not in addresses:
                connected.append(sock.dup())
    if connected:
        with suppress(OSError):
            random.choice(connected).shutdown(socket.SHUT_RDWR)
    for sock in connected:
        sock.close()
    return bool(connected)


def unavailable() -> str:
    """Return why packets cannot be filtered on this machine, or "" if they can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux, where a socket can have a packet filter"
    try:
        with (
            socket.create_server((host_of(-1), 0)) as server,
            socket.create_connection(server.getsockname(), 1.0, (host_of(0), 0)) as there,
            server.accept()[0] as here,
        ):
            _attach(here, _program([host_of(0)]))
            there.send(b"?")
            here.settimeout(AGAIN_AFTER_S)
            here.recv(1)
    except TimeoutError:
        return ""
    except OSError as error:
        return f"needs sockets that support packet filters; here they do not: {error}"
    return "needs sockets that obey packet filters; here they accept but ignore them"


class PacketFilter:
    """The filter on all sockets of this process. At most one object per process. Thread-safe."""

    def __init__(self, own_host: str) -> None:
        self._own_host = own_host
        self._program = _program([])
        self._lock = threading.Lock()
        sys.addaudithook(self._audit)

    def drop_from(self, hosts: Sequence[str]) -> None:
        """Drop packets from these hosts only, until the next call."""
        with self._lock:
            self._program = _program(hosts)
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
        if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM and address[0].startswith("127."):
            if sock.getsockname()[0] == "0.0.0.0":
                sock.bind((self._own_host, 0))
            _attach(sock, self._program)


def _program(hosts: Sequence[str]) -> bytes:
    """Return the BPF instructions that drop packets from these hosts."""
    code: list[tuple[int, int, int, int]] = [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS)]
    for index, host in enumerate(hosts):
        code.append((_JUMP_IF_EQUAL, len(hosts) - index, 0, _number(host)))
    code += [(_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]
    return b"".join(struct.pack("=HBBI", *each) for each in code)


def _number(host: str) -> int:
    return int.from_bytes(socket.inet_aton(host), "big")


def _attach(sock: socket.socket, program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))


def _obey(packet_filter: PacketFilter, commands: Iterable[Command]) -> None:
    for command in commands:
        assert isinstance(command, DropFrom)
        packet_filter.drop_from(command.hosts)


if __name__ == "__main__":
    threading.Thread(target=_obey, args=(PacketFilter(sys.argv[1]), received(Command)), daemon=True).start()
    sys.argv = ["pccl", "master", *sys.argv[2:]]
    runpy.run_module("pccl", run_name="__main__", alter_sys=True)
