"""The name of this process's monotonic clock, by which others can tell whether theirs is the same one."""

from __future__ import annotations

import os
import socket


def clock_name() -> str:
    """Return the boot of this machine and the process's time namespace: within one of these there is one clock. Where
    the system does not tell, return a name that no other process has."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
