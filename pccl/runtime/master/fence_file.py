"""A directory in which a master keeps what fences its run (`protocol.fence`), one master at a time.

`master.json` is the record, `lock` says who holds the directory. Both are readable by their owner alone, for the record
names the run's secret.

1. The record is replaced as a whole: written beside it, synced to disk, renamed, and the directory synced. So after a
   power failure there is the old one or the new one.
2. The lock is held as long as the master lives, by whatever way it ends; the system gives it free. Its text says who
   holds it.
3. A lock on a file that has been removed keeps nobody out. So before each write it is looked at whether the file is in
   its place still.
4. The lock file is touched while the master lives, so the next one knows for how long nobody has held the directory.
5. A record that cannot be kept up is worse than none: in a directory that nobody asked for it is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress

import msgspec

from pccl.protocol.fence import Fence

FORMAT = 1
RECORD = "master.json"
LOCK = "lock"


class StateError(Exception):
    """The directory cannot be used. The message says which and why."""


class _Document(msgspec.Struct, frozen=True):
    format: int
    fence: Fence


class FenceFile:
    """Owns the directory from construction to `close`. `write` may be called in any thread, one at a time."""

    def __init__(self, directory: str, owner: str, is_optional: bool = False) -> None:
        """Make the directory if there is none, and read the record. `owner` names this master to those that want the
        directory later. One that `is_optional` was asked for by nobody. StateError."""
        self.directory = directory
        self.is_optional = is_optional
        self.idle_s = 0.0
        """Seconds for which nobody held the directory before this master, by the clock of its file system."""
        self._lock_fd = -1
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._lock_fd = os.open(self._path(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"no state can be kept in {directory}: {error.strerror}") from None
        try:
            self._take_lock(owner)
            self.fence = self._read()
        except BaseException:
            self.close()
            raise

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _take_lock(self, owner: str) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 200, 0).decode(errors="replace").strip() or "another process"
            raise StateError(f"{self.directory} is in use by {holder}; a directory is for one master") from None
        except OSError as error:
            raise StateError(f"{self._path(LOCK)} cannot be locked: {error.strerror}") from None
        text = f"the master at {owner}, process {os.getpid()} on {socket.gethostname()}\n".encode()
        last_held_s = os.fstat(self._lock_fd).st_mtime
        with suppress(OSError):  # a full disk: only the name is missing
            self.touch()
            self.idle_s = max(0.0, os.fstat(self._lock_fd).st_mtime - last_held_s)
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, text, 0)

    def touch(self) -> None:
        """Note that the directory is held now. OSError."""
        os.utime(self._lock_fd)

    def _read(self) -> Fence | None:
        path = self._path(RECORD)
        try:
            with open(path, "rb") as file:
                document = msgspec.json.decode(file.read(), type=_Document)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(f"{path} cannot be read: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StateError(
                f"{path} is no record of a master ({error}); move it away if no peer of its run is alive"
            ) from None
        if document.format != FORMAT:
            raise StateError(
                f"{path} has format {document.format}, this pccl writes {FORMAT}; use the version that wrote it"
            )
        return document.fence

    def write(self, fence: Fence) -> None:
        """Write the record; return when it is on disk. OSError, also when the directory was replaced, and may be
        another master's."""
        self._check_lock()
        data = msgspec.json.format(msgspec.json.encode(_Document(FORMAT, fence)), indent=1)
        path = self._path(RECORD)
        new = path + ".new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(new, path)
        directory_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)

    def give_up(self) -> None:
        """Remove a record that is out of date from now on, where that is possible."""
        with suppress(OSError):
            self._check_lock()  # it is gone, or another master's
            os.remove(self._path(RECORD))

    def _check_lock(self) -> None:
        """Raise OSError if the lock file was removed or replaced: the lock keeps nobody out then."""
        try:
            is_in_place = os.path.samestat(os.stat(self._path(LOCK)), os.fstat(self._lock_fd))
        except FileNotFoundError:
            is_in_place = False
        if not is_in_place:
            raise OSError(
                errno.ESTALE, f"its file {LOCK!r} was removed or replaced; put it back, or restart this master"
            )

    def close(self) -> None:
        """Give the directory free. In a forked child it closes the child's copy, and the parent keeps its lock."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd != -1:
            os.close(fd)
