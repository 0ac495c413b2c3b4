"""Packet filters and cuts of a process's own sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pccl.tools.stress.network import advertised, host_of, unavailable
from tests.support.streams import TIMEOUT_S

WHY_NOT = unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"a packet filter {WHY_NOT}")

OTHER = host_of(5)
WORKER = """
import socket, sys
from pccl.tools.stress.network import PacketFilter, host_of
listener = socket.create_server((host_of(3), 0))
packet_filter = PacketFilter(host_of(3))
dialed = socket.create_connection(("{host}", {port}))
print(listener.getsockname()[1], flush=True)
accepted = [listener.accept()[0] for _ in range(2)]
for line in sys.stdin:
    packet_filter.drop_from(line.split())
    for sock in (dialed, *accepted):
        sock.settimeout(0.5)
        try:
            print(sock.recv(1).decode(), end=" ")
        except TimeoutError:
            print("-", end=" ")
    print(flush=True)
"""
"""A process in slot 3 with one connection that it dialed and two that it accepted."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((OTHER, 0)) as sock:
        sock.settimeout(TIMEOUT_S)
        yield sock


def test_packets_of_chosen_hosts_are_dropped(listener: socket.socket) -> None:
    code = WORKER.format(host=OTHER, port=listener.getsockname()[1])
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        dialed, address = listener.accept()
        assert address[0] == host_of(3), "it dials from its own address"
        place = host_of(3), int(process.stdout.readline())
        accepted = [socket.create_connection(place, TIMEOUT_S, (host, 0)) for host in (OTHER, host_of(6))]

        def received(dropped: str, data: bytes) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{dropped}\n")
            for sock in (dialed, *accepted) if data else ():
                sock.send(data)
            return process.stdout.readline().strip()

        assert received("", b"a") == "a a a"
        received(OTHER, b"")
        assert received(OTHER, b"b") == "- - b"
        assert received("", b"") == "b b -", "TCP retransmits once the filter is lifted"
        process.stdin.close()
        for sock in (dialed, *accepted):
            sock.close()


def test_advertised_host_resolves() -> None:
    assert socket.gethostbyname(advertised(OTHER)) == OTHER
