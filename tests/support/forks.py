"""Forked children of the test process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see what is open")


def sockets() -> set[str]:
    """Return the open sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return {name for name in found if name.startswith("socket:")}


@contextmanager
def forking() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking a process with threads
        yield


def in_child(call: Callable[[], str]) -> str:
    """Run `call` in a forked child that then ends at once, and return its result."""
    reading, writing = os.pipe()
    with forking():
        child = os.fork()
    if child == 0:
        try:
            text = call()
        except BaseException as error:
            text = repr(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text
