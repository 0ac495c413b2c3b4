"""Jumps of the wall clock of one host's processes: a preloaded library (clock.c) reads the offset from a file.

A time namespace cannot do it, as it moves the clocks that count from the machine's start, at the start of a process
only, and never the time of day.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


def unavailable() -> str | None:
    """Why no clock can be made to jump here; None if one can."""
    return None if shutil.which("cc") else "a C compiler is needed to build the clock with"


def library(folder: Path) -> Path:
    """Build the library in this folder, if it is not there, and return its path."""
    built = folder / "clock.so"
    if not built.exists():
        command = ["cc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(built), str(SOURCE)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return built


class Clock:
    """One host's clock, ahead by the sum of its jumps."""

    def __init__(self, path: Path, library: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)
        self.ahead_s = 0.0
        self.environment = {"LD_PRELOAD": str(library), "NEMESIS_CLOCK": str(path)}
        """The environment of the processes that go by it."""

    def jump(self, seconds: float) -> None:
        self.ahead_s += seconds
        # One aligned store of eight bytes: no reader sees half of it.
        struct.pack_into("=q", self._page, 0, round(self.ahead_s * 1e9))

    def close(self) -> None:
        self._page.close()
