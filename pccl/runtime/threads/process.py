"""Sockets that a forked child closes its copies of, the name of the process's clock, and numbers in its environment.

A copy in a child that lives on (a dataloader's worker) keeps the connection open when the parent closes it or dies. The
engine and the heartbeat thread close what they hold; this is for sockets that Python holds: half-made links,
unauthenticated connections, state transfers.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from typing import Any

logger = logging.getLogger("pccl")

_sockets: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_child(sock: Any) -> None:
    """Have forked children close their copies of a socket, of the socket module or of trio. It may be closed, detached
    or forgotten at any time."""
    _sockets.add(sock)


def _after_fork_in_child() -> None:
    for sock in list(_sockets):
        # trio's own `close` would look for a run, which there is not.
        fd = sock.detach() if sock.fileno() != -1 else -1
        if fd != -1:
            os.close(fd)


os.register_at_fork(after_in_child=_after_fork_in_child)


def clock_name() -> str:
    """Return the boot of this machine and the process's time namespace: within one of these there is one clock. Where
    the system does not tell, return a name that no other process has."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


_warned_of: set[str] = set()
"""Warnings that this process has logged."""


def number_of(name: str, default: float, most: float) -> float:
    """Return the number in an environment variable, from 0 to `most`; the default if it is not set or invalid."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= most:
        return value
    warning = f"{name}={text}: not a number from 0 to {most:.10g}; {default:.10g} is used"
    if warning not in _warned_of:
        _warned_of.add(warning)
        logger.warning("%s", warning)
    return default
