"""A packet filter: what senders send while it drops it comes when it is lifted."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pccl.stress.packet_filter import LISTENING_HOST, HeldPort, PacketFilter, Place, place, unavailable
from tests.support.streams import TIMEOUT_S

WHY_NOT = unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"a packet filter {WHY_NOT}")

OWN = place(3, 0)
A_MOMENT_S = 0.3


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((LISTENING_HOST, 0)) as sock:
        sock.settimeout(TIMEOUT_S)
        yield sock


@pytest.fixture
def packet_filter(listener: socket.socket) -> Iterator[PacketFilter]:
    packet_filter = PacketFilter(None)
    yield packet_filter
    packet_filter.drop_from([])


def _connect(listener: socket.socket, host: str, timeout_s: float = TIMEOUT_S) -> socket.socket:
    return socket.create_connection(listener.getsockname(), timeout_s, (host, 0))


def _nothing_comes(sock: socket.socket) -> bool:
    sock.settimeout(A_MOMENT_S)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    sock.settimeout(TIMEOUT_S)
    return True


def test_others_are_heard_and_this_process_is_heard(listener: socket.socket, packet_filter: PacketFilter) -> None:
    with _connect(listener, OWN.host) as there, _connect(listener, "127.0.1.99") as other:
        here, address = listener.accept()
        assert address[0] == OWN.host
        with here, listener.accept()[0] as here_too:
            packet_filter.drop_from([OWN])
            there.send(b"a")
            other.send(b"b")
            here.send(b"c")
            assert here_too.recv(1) == b"b"
            assert there.recv(1) == b"c"
            assert _nothing_comes(here)
            packet_filter.drop_from([])
            assert here.recv(1) == b"a"


def test_nobody_connects_whose_packets_are_dropped(listener: socket.socket, packet_filter: PacketFilter) -> None:
    packet_filter.drop_from([OWN])
    with pytest.raises(TimeoutError):
        _connect(listener, OWN.host, A_MOMENT_S)
    _connect(listener, "127.0.1.99").close()
    packet_filter.drop_from([])
    _connect(listener, OWN.host).close()


def test_packets_of_whom_it_has_dialed_are_dropped(listener: socket.socket, packet_filter: PacketFilter) -> None:
    with _connect(listener, OWN.host) as there, listener.accept()[0] as here:
        packet_filter.drop_from([Place("", listener.getsockname()[1])])
        here.send(b"a")
        assert _nothing_comes(there)
        there.send(b"b")
        assert here.recv(1) == b"b"
        packet_filter.drop_from([])
        assert there.recv(1) == b"a"


DIALER = """
import socket, sys
from pccl.stress.packet_filter import PacketFilter, Place, place
port = int(sys.argv[1])
packet_filter = PacketFilter(place(3, 0))
socket.create_connection(("127.0.0.1", port)).close()
packet_filter.drop_from([Place("", port)])
try:
    socket.create_connection(("127.0.0.1", port), 0.3)
except TimeoutError:
    print("nobody there")
"""


def test_a_process_dials_from_its_place_and_hears_no_answer(listener: socket.socket) -> None:
    port = str(listener.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", DIALER, port], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout == "nobody there\n", done.stderr
    sock, address = listener.accept()
    sock.close()
    assert address[0] == OWN.host


def test_a_held_port_is_listened_at_by_who_knows_it() -> None:
    held = HeldPort()
    with socket.create_server((LISTENING_HOST, held.number)):
        pass
    held.close()


def test_a_held_port_is_nobody_elses() -> None:
    """Neither of others who hold some, nor of those who take any."""
    held = [HeldPort() for _ in range(50)]
    assert len({port.number for port in held}) == len(held)
    servers = [socket.create_server((LISTENING_HOST, 0)) for _ in range(50)]
    assert {port.number for port in held}.isdisjoint(server.getsockname()[1] for server in servers)
    for each in [*held, *servers]:
        each.close()
