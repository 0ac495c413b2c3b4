"""Accepts connections, and limits the number of unauthenticated ones.

At most `total_max` connections may be unauthenticated, at most `per_source_max` of them from one source (an IPv4
address or an IPv6 /64 network). A new connection is always accepted. If a limit is exceeded or the process has no free
descriptors, the oldest connection from the largest source is dropped.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import NoReturn

import trio

from pccl.runtime.threads.process import close_in_child

TOTAL_MAX = 512
PER_SOURCE_MAX = 256
"""Enough for several peers on one host, each with many connections per link."""


class Unauthenticated:
    def __init__(self, total_max: int | None = None, per_source_max: int | None = None) -> None:
        self._total_max = TOTAL_MAX if total_max is None else total_max
        self._per_source_max = PER_SOURCE_MAX if per_source_max is None else per_source_max
        self._next = 1
        self._source_of: dict[int, str] = {}
        self._drops: dict[str, dict[int, Callable[[], object]]] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._source_of)

    def enter(self, host: str, drop: Callable[[], object]) -> int:
        """Add a connection from `host` and return its number for `leave`. `drop` ends the connection."""
        number = self._next
        self._next += 1
        source = source_of(host)
        self._source_of[number] = source
        self._drops.setdefault(source, {})[number] = drop
        if len(self._drops[source]) > self._per_source_max:
            self._drop(source)
        elif len(self) > self._total_max:
            self.drop_one()
        return number

    def leave(self, number: int) -> None:
        """Remove an authenticated or closed connection. No effect if it was already removed or dropped."""
        source = self._source_of.pop(number, None)
        if source is not None:
            del self._drops[source][number]
            if not self._drops[source]:
                del self._drops[source]

    def drop_one(self) -> bool:
        if not self._drops:
            return False
        self._drop(max(self._drops, key=lambda source: (len(self._drops[source]), -next(iter(self._drops[source])))))
        return True

    def _drop(self, source: str) -> None:
        number, drop = next(iter(self._drops[source].items()))
        self.leave(number)
        self.dropped += 1
        drop()


def source_of(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host


STARVED_PAUSE_S = 0.1


async def accept_connections(
    listener: socket.socket,
    unauthenticated: Unauthenticated,
    accept: Callable[[socket.socket, tuple[str, int]], None],
    logger: logging.Logger | logging.LoggerAdapter[logging.Logger],
) -> NoReturn:
    """Pass each connection and its address to `accept`, which must not wait. Runs until cancelled. Forked children
    close their copies of the sockets."""
    is_starved = False
    while True:
        await trio.lowlevel.wait_readable(listener.fileno())
        await trio.lowlevel.checkpoint_if_cancelled()  # the listener may be closed
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            continue
        except OSError as error:
            if not is_starved:
                logger.warning("cannot accept a connection: %s", error.strerror)
            is_starved = True
            unauthenticated.drop_one()
            await trio.sleep(STARVED_PAUSE_S)
            continue
        is_starved = False
        close_in_child(sock)
        accept(sock, address)


LINES_MAX = 100
WINDOW_S = 60.0


class LogLimiter:
    """Logs up to LINES_MAX lines in WINDOW_S seconds. It counts the others and logs their number in the next window."""

    def __init__(
        self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger], now: Callable[[], float]
    ) -> None:
        self._logger = logger
        self._now = now
        self._window_began = float("-inf")
        self._lines = 0

    def log(self, level: int, text: str) -> None:
        if not self._logger.isEnabledFor(level):
            return
        now = self._now()
        if now >= self._window_began + WINDOW_S:
            if self._lines > LINES_MAX:
                self._logger.warning(
                    "%d more lines about unauthenticated connections were omitted", self._lines - LINES_MAX
                )
            self._window_began = now
            self._lines = 0
        self._lines += 1
        if self._lines <= LINES_MAX:
            self._logger.log(level, "%s", text)
        elif self._lines == LINES_MAX + 1:
            self._logger.warning("too many unauthenticated connections: not logging them for up to %g s", WINDOW_S)
