"""Breaks a connection of this very process to another peer, as a stateful firewall or a rebooting router would."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from random import Random


def cut_one(random: Random, master: str) -> bool:
    """Shuts down one TCP connection that does not lead to the master; False where there is none."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    numbers = [int(name) for name in os.listdir(folder)]
    random.shuffle(numbers)
    return any(_cut(number, int(master.rpartition(":")[2])) for number in numbers)


def _cut(number: int, master_port: int) -> bool:
    with suppress(OSError):  # closed meanwhile, or not connected
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        # A duplicate: the number may come to mean another socket at any moment.
        with socket.socket(fileno=os.dup(number)) as sock:
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                if sock.getpeername()[1] == master_port:
                    return False
                sock.shutdown(socket.SHUT_RDWR)
                return True
    return False
