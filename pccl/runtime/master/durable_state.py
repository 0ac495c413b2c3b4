"""A master's state directory, and effects that wait for the disk.

`master.json` is the run's record (`protocol.failover.durable_state`); `lock` names the master that uses the directory.
Only the files' owner can read them, because the record contains the run's secret. The record is replaced as a whole.
The lock file is touched regularly, so the next master knows how long the directory was unused. If the default directory
becomes unwritable, its record is removed and the run continues. If another does, the run pauses until it is writable.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import trio

from pccl.protocol.failover.durable_state import RunRecord
from pccl.protocol.master.run_state import Effect, Persist, TakeHeartbeats
from pccl.runtime.network.system import SYSTEM, System

FORMAT = 1
RECORD = "master.json"
LOCK = "lock"


class StateError(Exception):
    """The directory cannot be used; the text gives its path and the reason."""


class _Document(msgspec.Struct, frozen=True):
    format: int
    record: RunRecord = msgspec.field(name="fence")


class StateDirectory:
    """Owns the directory from construction to `close`. `write` may be called in any thread, but not concurrently."""

    def __init__(self, directory: str, owner: str, is_optional: bool = False) -> None:
        """Open the directory and read the record. `owner` names this master to others. `is_optional` is true for the
        default directory. Raises StateError."""
        self.directory = directory
        self.is_optional = is_optional
        self.idle_s = 0.0
        """Seconds since the last master used the directory, according to the file system's clock."""
        self._lock_fd = -1
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._lock_fd = os.open(self._path(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"cannot keep state in {directory}: {error.strerror}") from None
        try:
            self._lock(owner)
            self.record = self._read()
        except BaseException:
            self.close()
            raise

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _lock(self, owner: str) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 200, 0).decode(errors="replace").strip() or "another process"
            raise StateError(f"{self.directory} is in use by {holder}; each master needs its own directory") from None
        except OSError as error:
            raise StateError(f"{self._path(LOCK)} cannot be locked: {error.strerror}") from None
        text = f"the master at {owner}, process {os.getpid()} on {socket.gethostname()}\n".encode()
        last_held_s = os.fstat(self._lock_fd).st_mtime
        with suppress(OSError):  # on a full disk, only the name is missing
            self.touch()
            self.idle_s = max(0.0, os.fstat(self._lock_fd).st_mtime - last_held_s)
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, text, 0)

    def touch(self) -> None:
        os.utime(self._lock_fd)

    def _read(self) -> RunRecord | None:
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
                f"{path} is not a valid record ({error}); move the file aside if none of its run's peers is alive"
            ) from None
        if document.format != FORMAT:
            raise StateError(
                f"{path} has format {document.format}, but this pccl writes {FORMAT}; use the version that wrote it"
            )
        return document.record

    def write(self, record: RunRecord) -> None:
        """Write the record and return once it is on disk. Raises OSError if it fails or the lock file was replaced."""
        self._check_lock()
        data = msgspec.json.format(msgspec.json.encode(_Document(FORMAT, record)), indent=1)
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
        with suppress(OSError):
            self._check_lock()
            os.remove(self._path(RECORD))

    def _check_lock(self) -> None:
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path(LOCK)), os.fstat(self._lock_fd)):
                return
        raise OSError(errno.ESTALE, f"its file {LOCK!r} was removed or replaced; restore it or restart this master")

    def close(self) -> None:
        """Release the directory. When a forked child calls this, the parent keeps its lock."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd != -1:
            os.close(fd)


logger = logging.getLogger("pccl.master")

WRITE_AGAIN_S = 1.0
"""Pause before a failed write is retried."""
TOUCH_S = 10.0
"""Interval of `touch`, much shorter than `bootstrap.IDLE_MARGIN_S`."""


class DurableEffects:
    """Executes effects in order, and delays those that must wait for the disk. For one trio run."""

    def __init__(
        self, state: StateDirectory | None, perform: Callable[[list[Effect]], None], system: System = SYSTEM
    ) -> None:
        """`perform` executes effects without waiting. `state` is closed with this object; if it is None, effects never
        wait. Raises OSError if no thread can be started."""
        self.nursery: trio.Nursery | None = None
        """Runs the task that writes; set while the master serves."""
        self._state = state
        self._perform = perform
        self._writer = system.helper("pccl-state") if state is not None else None
        self._is_given_up = False
        self._postponed: deque[Effect] = deque()
        """Effects that wait for the disk, starting with the one being written."""

    def execute(self, effects: list[Effect]) -> None:
        """Execute effects immediately, except those that must wait for the disk."""
        if self._state is None:
            self._perform(effects)
            return
        is_writing = bool(self._postponed)
        # The connection's reader needs TakeHeartbeats immediately, and no record depends on it.
        self._perform([effect for effect in effects if isinstance(effect, TakeHeartbeats)])
        self._postponed.extend(effect for effect in effects if not isinstance(effect, TakeHeartbeats))
        if not is_writing:
            self._perform_postponed()

    async def keep_touching(self) -> None:
        while self._state is not None and self._writer is not None:
            await trio.sleep(TOUCH_S)
            with suppress(OSError):
                await self._writer.run(self._state.touch, is_left=False)

    def _perform_postponed(self) -> None:
        effects = []
        while self._postponed and not isinstance(self._postponed[0], Persist):
            effects.append(self._postponed.popleft())
        if self._postponed:
            assert self.nursery is not None
            self.nursery.start_soon(self._write)
        self._perform(effects)

    async def _write(self) -> None:
        persist = self._postponed[0]
        assert isinstance(persist, Persist)
        assert self._state is not None
        assert self._writer is not None
        failure = ""
        while not self._is_given_up:
            try:
                await self._writer.run(partial(self._state.write, persist.record), is_left=False)
                break
            except OSError as error:
                text = error.strerror or str(error)
                if self._state.is_optional:
                    await self._writer.run(self._state.give_up, is_left=False)
                    self._is_given_up = True
                    where, failure = self._state.directory, ""
                    logger.warning("this master no longer keeps a record of its run: %s: %s", where, text)
                    continue
                if text != failure:
                    failure = text
                    logger.warning(
                        "the run pauses until its state can be written to %s: %s", self._state.directory, failure
                    )
            await trio.sleep(WRITE_AGAIN_S)
        if failure:
            logger.warning("the state has been written to %s", self._state.directory)
        self._postponed.popleft()
        self._perform_postponed()

    def close(self) -> None:
        """Release the state directory. No task may be writing."""
        if self._writer is not None:
            self._writer.close()
        if self._state is not None:
            self._state.close()

    def forget_after_fork(self) -> None:
        if self._state is not None:
            self._state.close()


def default_directory(port: int) -> str:
    """Return the default state directory of a master at this port on this host, or "" if there is none."""
    home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.expanduser("~/.local/state")
    if not port or not os.path.isabs(home):
        return ""
    return os.path.join(home, "pccl", f"master-{socket.gethostname()}-{port}")  # hosts may share a home


def open_directory(directory: str, owner: str, is_default: bool) -> StateDirectory | None:
    """Open a state directory. If it is unusable, return None for the default directory; else raise StateError."""
    try:
        return StateDirectory(directory, owner, is_optional=is_default)
    except StateError as error:
        if not is_default:
            raise
        text = "this master keeps no durable state: %s (--state DIR uses another directory, --state none uses none)"
        logger.warning(text, error)
        return None
