"""Another server at a master's address: errors show its first bytes, at the first attempt."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.flight_recorder import collect
from pccl.status import run_status
from tests.runtime.network.test_tls import master_context, peer_context
from tests.support.cluster import WAIT_S, refusal

Serve = Callable[[socket.socket], None]


@contextmanager
def server(serve: Serve) -> Iterator[str]:
    """The address of a server that does this with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:

        def serve_one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.settimeout(WAIT_S)
                serve(connection)

        def run() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve_one, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def ssh(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
    while connection.recv(1000):
        pass


def web(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def https(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"\x15\x03\x01\0\x02\x02\x46")


ASKERS: list[Callable[[str], object]] = [
    lambda address: Communicator(address, timeout=WAIT_S).connect(n_attempts=5),
    lambda address: run_status(address, timeout=WAIT_S),
    lambda address: collect(address, timeout=WAIT_S),
]
NAMES = ["connect", "status", "trace"]
each_asker = pytest.mark.parametrize("ask", ASKERS, ids=NAMES)


@each_asker
@pytest.mark.parametrize(
    ("serve", "text"),
    [
        (ssh, "no pccl master answered (got b'SSH-2.0-OpenSSH_9.2p1 Debian-2\\r'); check host and port"),
        (web, "no pccl master answered (got b'HTTP/1.1 400 Bad Request\\r'); check host and port"),
        (https, "if it is a master that uses TLS, give the peer ssl_context= or PCCL_TLS_CA"),
    ],
    ids=["ssh", "web", "https"],
)
def test_first_bytes_of_another_server_are_shown(ask: Callable[[str], object], serve: Serve, text: str) -> None:
    with server(serve) as address:
        error = refusal(partial(ask, address))
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert text in str(error)
    assert address in str(error)


@each_asker
def test_page_of_a_run_says_where_its_master_is(ask: Callable[[str], object]) -> None:
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as node:
        assert node.http_address is not None
        error = refusal(partial(ask, node.http_address))
        port = node.address.rpartition(":")[2]
    assert f"the status page of a pccl master; that master's own port is {port}" in str(error)


def test_another_server_with_tls_on_this_side() -> None:
    with server(web) as address:
        error = refusal(Communicator(address, ssl_context=peer_context()).connect)
    assert "no pccl master answered (got b'HTTP/1.1" in str(error)


def test_tls_mismatches_are_named_in_both_directions(master: MasterNode) -> None:
    error = refusal(Communicator(master.address, ssl_context=peer_context()).connect)
    assert "the master does not speak TLS, but this side does" in str(error)
    error = refusal(lambda: run_status(master.address, ssl_context=peer_context()))
    assert "the master does not speak TLS, but this side does" in str(error)
    with MasterNode("127.0.0.1:0", ssl_context=master_context()) as node:
        for ask in ASKERS:
            assert "the master asks for TLS" in str(refusal(partial(ask, node.address)))


@pytest.mark.parametrize("address", ["http://example.org:48149", "https://h/x", "tcp://h:1", "a:1,http://b:2"])
def test_a_url_is_not_an_address(address: str) -> None:
    for call in (lambda: Communicator(address), lambda: run_status(address)):
        with pytest.raises(PCCLError, match="is a URL: write only host:port, such as") as caught:
            call()
        assert caught.value.result is Result.INVALID_ARGUMENT
