"""Accepts the connections that come to a listening socket, a master's or a peer's.

A process may run out of descriptors. Whoever is connected already must not suffer from that, so the longest waiting of
the unauthenticated connections is dropped to make room, and the loop goes on after a pause.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import NoReturn

import trio

from pccl.runtime.network.unauthenticated import Unauthenticated
from pccl.runtime.threads.fork_guard import close_in_child

STARVED_PAUSE_S = 0.1


async def accept_connections(
    listener: socket.socket,
    unauthenticated: Unauthenticated,
    greet: Callable[[socket.socket, tuple[str, int]], None],
    logger: logging.Logger | logging.LoggerAdapter[logging.Logger],
) -> NoReturn:
    """Pass each connection and its address to `greet`, which does not wait, until cancelled. Forked children close
    their copies."""
    is_starved = False
    while True:
        await trio.lowlevel.wait_readable(listener.fileno())
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
        greet(sock, address)
