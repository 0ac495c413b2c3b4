"""The accept loop of masters and peers: who connects is greeted, also after descriptors have run out."""

from __future__ import annotations

import errno
import logging
import os
import socket
from typing import Any

import pytest
import trio

from pccl.runtime.network import accepting, addresses
from pccl.runtime.network.accepting import Unauthenticated

LIMIT_S = 30.0
logger = logging.getLogger("pccl.peer")


class Listener:
    """A listening socket whose next `failures` calls of `accept` fail for want of descriptors."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self._sock = addresses.listen("127.0.0.1", 0)
        self.port: int = self._sock.getsockname()[1]

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._sock.accept()

    def close(self) -> None:
        self._sock.close()


def accepted(listener: Listener, unauthenticated: Unauthenticated, count: int) -> list[tuple[str, int]]:
    """Addresses of so many connections, as the loop passed them on."""
    greeted: list[tuple[str, int]] = []

    async def main() -> None:
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:

                def greet(sock: socket.socket, address: tuple[str, int]) -> None:
                    sock.close()
                    greeted.append(address)
                    if len(greeted) == count:
                        nursery.cancel_scope.cancel()

                nursery.start_soon(accepting.accept_connections, listener, unauthenticated, greet, logger)

    with listener._sock:
        dialers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(count)]
        expected = [dialer.getsockname() for dialer in dialers]
        trio.run(main)
        for dialer in dialers:
            dialer.close()
    assert sorted(greeted) == sorted(expected)
    return greeted


def test_accept_passes_address() -> None:
    accepted(Listener(), Unauthenticated(), 3)


def test_accept_without_descriptors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The warning comes once, however long it lasts."""
    monkeypatch.setattr(accepting, "STARVED_PAUSE_S", 0.0)
    unauthenticated = Unauthenticated()
    dropped: list[int] = []
    for number in range(3):
        unauthenticated.enter("10.0.0.1", lambda number=number: dropped.append(number))
    accepted(Listener(failures=2), unauthenticated, 2)
    assert dropped == [0, 1]
    assert caplog.text.count("cannot accept a connection: Too many open files") == 1
