"""Whatever else answers where a master should be is named as what it is, at the first attempt."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.flight_recorder import collect
from pccl.runtime.network.strangers import named
from pccl.status import run_status
from tests.runtime.network.test_tls import master_context, peer_context
from tests.support.cluster import WAIT_S, outcomes, refusal

AT_ONCE_S = 3.0
"""Less than the second attempt of `connect` would be made after; about a second is needed."""

Serve = Callable[[socket.socket], None]


@contextmanager
def server(serve: Serve) -> Iterator[str]:
    """The address of a server that does this with each connection, and counts nothing."""
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


def by_lines(answer: bytes, connection: socket.socket) -> None:
    """Waits for a line, as web servers and Redis do: they say nothing to a Hello."""
    heard = b""
    while b"\n" not in heard:
        some = connection.recv(1000)
        if not some:
            return
        heard += some
    connection.sendall(answer)


redis = partial(by_lines, b"-ERR unknown command 'GET', with args beginning with: '/' 'HTTP/1.0'\r\n")
web = partial(by_lines, b"HTTP/1.1 200 OK\r\nServer: nginx\r\n\r\nhello")


def strict_web(connection: socket.socket) -> None:
    """Answers to anything, and hangs up before all of it was read."""
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def mute_to_strangers(connection: socket.socket) -> None:
    """Hangs up on what it does not understand without a word, and answers an HTTP request."""
    if connection.recv(3) == b"GET":
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")


def mysql(connection: socket.socket) -> None:
    connection.sendall(b"\x4a\0\0\0\n8.0.36\0")
    while connection.recv(1000):
        pass


SERVERS = [
    (ssh, "an SSH server (SSH-2.0-OpenSSH_9.2p1 Debian-2)"),
    (redis, "a Redis server"),
    (web, "a web server"),
    (strict_web, "a web server"),
    (mute_to_strangers, "a web server"),
    (mysql, "a MySQL server"),
]
ASKERS: list[Callable[[str], object]] = [
    lambda address: Communicator(address, timeout=WAIT_S).connect(n_attempts=5),
    lambda address: run_status(address, timeout=WAIT_S),
    lambda address: collect(address, timeout=WAIT_S),
]
NAMES = ["connect", "status", "trace"]


@pytest.mark.parametrize(("serve", "name"), SERVERS, ids=[name for _, name in SERVERS])
def test_a_wrong_service_is_named_at_the_first_attempt(serve: Serve, name: str) -> None:
    with server(serve) as address:
        begun_s = time.monotonic()
        errors = outcomes([partial(ask, address) for ask in ASKERS])
        assert time.monotonic() < begun_s + AT_ONCE_S
        for error in errors:
            assert error.result is Result.MASTER_CONNECTION_FAILED
            assert f"this is no pccl master but {name}; check host and port" in str(error)
            assert address in str(error)


def test_a_wrong_service_is_named_to_a_peer_with_tls() -> None:
    with server(strict_web) as address:
        error = refusal(Communicator(address, ssl_context=peer_context()).connect)
    assert "this is no pccl master but a web server" in str(error)


@pytest.mark.parametrize("ask", ASKERS, ids=NAMES)
def test_the_page_of_a_run_tells_where_its_master_is(ask: Callable[[str], object]) -> None:
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as node:
        assert node.http_address is not None
        error = refusal(partial(ask, node.http_address))
        port = node.address.rpartition(":")[2]
    assert f"the page of a pccl master, which is for browsers: that master's own port is {port}" in str(error)


def test_the_page_of_a_run_tells_a_peer_with_tls_too() -> None:
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as node:
        assert node.http_address is not None
        error = refusal(Communicator(node.http_address, ssl_context=peer_context()).connect)
    assert "the page of a pccl master" in str(error)


@pytest.mark.parametrize("ask", ASKERS, ids=NAMES)
def test_a_peer_says_that_it_is_no_master(ask: Callable[[str], object], master: MasterNode) -> None:
    with Communicator(master.address, timeout=WAIT_S) as peer:
        session = peer._inner._session
        assert session is not None
        error = refusal(partial(ask, f"127.0.0.1:{session._listener.getsockname()[1]}"))
    assert "this is the port of a peer of a run, and not of its master" in str(error)


@pytest.mark.parametrize("ask", [ASKERS[0], ASKERS[1]], ids=NAMES[:2])
def test_tls_of_a_web_server_is_named(ask: Callable[[str], object]) -> None:
    """A web server with TLS answers an alert to a Hello."""

    def https(connection: socket.socket) -> None:
        connection.recv(1)
        connection.sendall(b"\x15\x03\x01\0\x02\x02\x46")

    with server(https) as address:
        assert "a server that speaks TLS, and this side does not: give the peer ssl_context= or PCCL_TLS_CA" in str(
            refusal(partial(ask, address))
        )


def test_tls_mismatches_are_named_in_both_directions(master: MasterNode) -> None:
    error = refusal(Communicator(master.address, ssl_context=peer_context()).connect)
    assert "the master does not speak TLS, and this side does" in str(error)
    error = refusal(lambda: run_status(master.address, ssl_context=peer_context()))
    assert "the master does not speak TLS, and this side does" in str(error)
    with MasterNode("127.0.0.1:0", ssl_context=master_context()) as node:
        for ask in ASKERS:
            assert "the master asks for TLS" in str(refusal(partial(ask, node.address)))


@pytest.mark.parametrize("address", ["http://example.org:48149", "https://h/x", "tcp://h:1", "a:1,http://b:2"])
def test_a_url_is_no_address(address: str) -> None:
    for call in (lambda: Communicator(address), lambda: run_status(address)):
        with pytest.raises(PCCLError, match="is a URL, and an address is host:port alone: write") as caught:
            call()
        assert caught.value.result is Result.INVALID_ARGUMENT


def test_what_may_be_pccl_is_not_named() -> None:
    assert [named(first) for first in (b"", b"H", b"\0\0\0\x10\x94", b"\0" * 100)] == [""] * 4
    assert named(b"ICY 200 OK\r\n") == "something else, which says 'ICY 200 OK'"
    assert named(b"\xff\xfe\xfd") == "something else, in a language that pccl does not know"
