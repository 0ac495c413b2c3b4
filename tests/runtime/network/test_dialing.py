"""Connections to other processes: which of a name's addresses, what goes wrong, and what a forked child sees of it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import trio
import trio.testing

from pccl.runtime.network import dialing
from pccl.runtime.network.addresses import listen
from pccl.runtime.network.dialing import dial_tcp
from tests.support.forks import needs_proc, sockets

BOUND_S = 60
Address = tuple[str, int]


def run(function: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(BOUND_S):
            await function()

    trio.run(bounded)


@contextmanager
def mute() -> Iterator[Address]:
    """An address that answers to nobody, as one does whose machine is gone: its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Address]], None]:
    """Says which addresses all names have."""

    def resolve(addresses: Sequence[Address]) -> None:
        async def found(*_: object, **__: object) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]

        monkeypatch.setattr(trio.socket, "getaddrinfo", found)

    return resolve


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_dead_address_does_not_delay_dial(
    listener: socket.socket, resolve: Callable[[Sequence[Address]], None]
) -> None:
    async def body() -> None:
        with mute() as silent, socket.create_server(("127.0.0.1", 0)) as closed:
            refusing = closed.getsockname()
            closed.close()
            resolve([refusing, silent, listener.getsockname()])
            with await dial_tcp("host", 1) as sock:
                assert sock.getpeername() == listener.getsockname()
                assert not sock.getblocking()

    run(body)


def test_if_none_answers_it_says_why(resolve: Callable[[Sequence[Address]], None]) -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refusing = closed.getsockname()
        resolve([refusing, refusing])
        with pytest.raises(OSError, match="refused"):
            await dial_tcp("host", 1)

    run(body)


def test_self_connection_is_refused(
    resolve: Callable[[Sequence[Address]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        itself = closed.getsockname()
    monkeypatch.setattr(dialing, "close_in_child", lambda sock: sock.bind(itself))  # what the system does by chance

    async def body() -> None:
        resolve([itself])
        with pytest.raises(ConnectionRefusedError):
            await dial_tcp("host", 1)

    run(body)
    listen(*itself).close()


@pytest.mark.parametrize("name", ["a..b", "x" * 70 + ".example"])
def test_invalid_host_name(name: str) -> None:
    async def body() -> None:
        with pytest.raises(OSError, match=r"not a valid host name|not known|resolution|No address"):
            await dial_tcp(name, 1)

    run(body)


def test_an_address_is_not_looked_up(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: object, **__: object) -> list[Any]:
        raise AssertionError("it was")

    async def body() -> None:
        with await dial_tcp(*listener.getsockname()) as sock:
            assert sock.getpeername() == listener.getsockname()
            assert not sock.getblocking()
        with pytest.raises(AssertionError, match="it was"):
            await dial_tcp("localhost", 1)

    monkeypatch.setattr(trio.socket, "getaddrinfo", found)
    run(body)


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6 here")
def test_an_ipv6_address_may_be_dialled() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"there is no IPv6 here: {error}")

    async def body() -> None:
        with await dial_tcp("::1", listener.getsockname()[1]) as sock:
            assert sock.getpeername() == listener.getsockname()

    with listener:
        run(body)


@needs_proc
def test_cancelled_dial_leaves_no_socket(resolve: Callable[[Sequence[Address]], None]) -> None:
    async def body() -> None:
        with mute() as silent:
            resolve([silent])
            before = sockets()
            with trio.move_on_after(0.01):
                await dial_tcp("host", 1)
            assert sockets() == before

    run(body)
