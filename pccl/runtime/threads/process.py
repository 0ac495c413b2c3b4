"""Closes copies of sockets in forked children, names the process's clock, and reads numbers from its environment.

A copy of a socket in a child that lives on (such as a dataloader worker) keeps the connection open when the parent
closes it or dies. The engine and the heartbeat thread close their own sockets; this module closes those that Python
holds: unfinished links, unauthenticated connections and state transfers.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from difflib import get_close_matches
from typing import Any

logger = logging.getLogger("pccl")

_sockets: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_child(sock: Any) -> None:
    """Make forked children close their copies of a Python or trio socket. The socket may be closed, detached or
    garbage-collected at any time."""
    _sockets.add(sock)


def _after_fork_in_child() -> None:
    for sock in list(_sockets):
        # trio's own `close` would require a trio run, which the child does not have.
        fd = sock.detach() if sock.fileno() != -1 else -1
        if fd != -1:
            os.close(fd)


os.register_at_fork(after_in_child=_after_fork_in_child)


def clock_name() -> str:
    """Return this machine's boot ID and the process's time namespace; processes that share both share a clock. If the
    system does not provide them, return a name that no other process has."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


VARIABLES = (
    *("PCCL_MASTER", "PCCL_RUN", "PCCL_TOKEN", "PCCL_ENCRYPT", "PCCL_TLS_CA", "PCCL_TLS_CERT", "PCCL_TLS_KEY"),
    *("PCCL_LISTEN", "PCCL_ADVERTISE", "PCCL_UDP", "PCCL_SHM", "PCCL_PINNED_BYTES"),
    *("PCCL_PEER_TIMEOUT", "PCCL_MASTER_TIMEOUT", "PCCL_STATE", "PCCL_ENGINE_THREADS"),
    *("PCCL_LOG_LEVEL", "PCCL_LOG_FORMAT", "PCCL_FLIGHT_RECORDS", "PCCL_TRACE_DIR", "PCCL_TRACE_HANG"),
    *("PCCL_LAUNCH_INDEX", "PCCL_LAUNCH_COUNT"),
)
"""All environment variables that pccl reads."""


def warn_of_misspelled() -> None:
    """Warn of environment variables that resemble one of pccl's."""
    known = [each.removeprefix("PCCL_") for each in VARIABLES]
    for name in sorted(os.environ.keys() - set(VARIABLES)):
        if name.startswith("PCCL_") and (close := get_close_matches(name.removeprefix("PCCL_"), known, 1, cutoff=0.65)):
            logger.warning("the environment variable %s is not one of pccl's: is it PCCL_%s?", name, close[0])


_warned_of: set[str] = set()
"""Warnings that this process has already logged."""


def number_of(name: str, default: float, most: float) -> float:
    """Return the number from 0 to `most` in an environment variable, or the default if it is unset or invalid."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= most:
        return value
    warning = f"{name}={text}: not a number from 0 to {most:.10g}; using {default:.10g}"
    if warning not in _warned_of:
        _warned_of.add(warning)
        logger.warning("%s", warning)
    return default
