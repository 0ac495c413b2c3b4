"""A file system of a few blocks that only chosen processes see, to be filled and freed.

Theory of operation. A holder process in a mount namespace of its own mounts a tmpfs there, and the processes that are
to have it enter that namespace. Mounts are not visible to anybody else, and are gone when they have ended. From
here the files are reached by /proc/PID/root.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

FILLER = "filler"
BLOCK = 4096


class Disk:
    def __init__(self, folder: Path, size_bytes: int, process_group: int) -> None:
        """`folder` exists, and is where the disk is seen by those that are inside."""
        self.folder = folder
        script = f'mount -t tmpfs -o size={size_bytes} tmpfs "$1" && echo here && exec cat'
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=process_group,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if not self._holder.stdout.readline():
            text = self._holder.stderr.read().decode().strip()
            self.close()
            raise OSError(f"no file system of its own: {text}")

    @property
    def prefix(self) -> list[str]:
        """The words to put before the command of a process that is to have the disk."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]

    @property
    def path(self) -> Path:
        """The way to the disk from outside."""
        return Path(f"/proc/{self._holder.pid}/root{self.folder}")

    def fill(self) -> None:
        with open(self.path / FILLER, "ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(BLOCK))

    def free(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path / FILLER)

    def close(self) -> None:
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._holder.wait()
