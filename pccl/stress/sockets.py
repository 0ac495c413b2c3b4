"""The TCP sockets of this very process, whoever in it has made them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from random import Random


def own_sockets(random: Random | None = None) -> Iterator[socket.socket]:
    """Each as a duplicate, because a number may come to mean another socket at any moment; closed after its turn."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    numbers = [int(name) for name in os.listdir(folder)]
    if random is not None:
        random.shuffle(numbers)
    for number in numbers:
        with suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as sock:
                if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                    yield sock
