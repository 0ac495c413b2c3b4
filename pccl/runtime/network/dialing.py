"""Outgoing connections. Unlike with `trio.open_tcp_stream`, forked children close their copies (`threads.process`).

As in RFC 8305, each address gets a head start of ATTEMPT_S over the next. A dialer resets a connection to itself.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from pccl.runtime.threads.process import close_in_child
from pccl.runtime.threads.tasks import start_task

ATTEMPT_S = 0.25
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER value that makes `close` reset the connection."""

Dial = Callable[[str, int], Awaitable[socket.socket]]
"""A function that connects like `dial_tcp`."""


async def dial_tcp(host: str, port: int) -> socket.socket:
    """Return a connected non-blocking socket without Nagle's delay. Raises OSError if no address answers."""
    numeric = _numeric(host, port)
    if numeric is not None:
        return await _connected(numeric)
    try:
        targets = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"not a valid host name: {error}") from None
    except RuntimeError as error:  # no new threads start while the interpreter exits
        raise OSError(f"{host} cannot be looked up: {error}") from None
    connected: list[socket.socket] = []
    failures: list[OSError] = []

    async def attempt(target: Any, failed: trio.Event) -> None:
        try:
            connected.append(await _connected(target))
            nursery.cancel_scope.cancel()
        except OSError as error:
            failures.append(error)
            failed.set()

    try:
        async with trio.open_nursery() as nursery:
            for target in targets:
                failed = trio.Event()
                start_task(nursery, attempt, target, failed)
                with trio.move_on_after(ATTEMPT_S):
                    await failed.wait()
    except BaseException:
        for sock in connected:
            sock.close()
        raise
    if not connected:
        raise failures[0]
    for late in connected[1:]:
        late.close()
    return connected[0]


def _numeric(host: str, port: int) -> Any:
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        # Bytes, because Python would import its IDNA codec for a str.
        return socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM, flags=flags)[0]
    except (OSError, UnicodeError):
        return None


async def _connected(target: Any) -> socket.socket:
    family, kind, protocol, _, address = target
    raw = socket.socket(family, kind, protocol)
    close_in_child(raw)
    sock = trio.socket.from_stdlib_socket(raw)
    try:
        try:
            await sock.connect(address)
        except OSError as error:  # trio's text repeats the address
            raise OSError(error.errno, os.strerror(error.errno) if error.errno else str(error)) from None
        if raw.getsockname() == raw.getpeername():
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the port is closed: the dialer connected to itself")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return raw
