"""Dumps of the flight recorder to a file, for a look when nobody can be asked any more.

With PCCL_TRACE_DIR in the environment, a session writes its recording there when an op fails, when one has been in
flight for PCCL_TRACE_HANG seconds, and when the session ends with a failure. A program may end of the op that failed:
what has not been written when its session ends is written then. There is one file for each session, and it is written
anew each time: the recorder remembers what was before. Of each host the last FILES_KEPT stay, for a program that fails
may be started again and again.

A thread of its own writes, for a disk may be slow, full or gone; then the log says so, and nothing else happens.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

import trio

from pccl.protocol.recording import to_json
from pccl.runtime.environment import number_of
from pccl.runtime.session.flight_recorder import FlightRecorder
from pccl.runtime.session.op_table import OpTable
from pccl.runtime.threads.helper_thread import HelperThread

GATHER_S = 0.2
"""Time between a failure and its dump, in which others may come that follow from it."""
PAUSE_S = 5.0
"""Time after a dump in which there is no other."""
LAST_S = 2.0
"""Time that the last dump may take."""
FILES_KEPT = 64
"""Number of files of one host in the directory, which other hosts may write to, too."""
HANG_S = 30.0
LOOK_S = 1.0
"""Interval in which ops are looked at."""
_warned_of: set[Path] = set()
"""Directories of which this process has warned that they cannot be written."""


class Dumps:
    """The dumps of one session. Only for the trio thread, but for `ask`."""

    def __init__(self, recorder: FlightRecorder, table: OpTable, logger: logging.LoggerAdapter[logging.Logger]) -> None:
        """Start the thread, if there is a directory."""
        directory = os.environ.get("PCCL_TRACE_DIR", "")
        self._directory = Path(directory).absolute()  # the program may go elsewhere
        self._recorder = recorder
        self._table = table
        self._logger = logger
        self._hang_s = number_of("PCCL_TRACE_HANG", HANG_S, 1e9)
        self._asked: list[str] = []
        self._writing = trio.Lock()
        """Held while a dump is being written."""
        self._since: dict[int, float] = {}
        """The time at which each op in flight was first seen."""
        self._told: set[int] = set()
        """Ops of which a dump has told that they hang."""
        self._thread: HelperThread | None = None
        if directory:
            try:
                self._thread = HelperThread("pccl-dumps")
                recorder.on_failure = self.ask
            except OSError as error:
                logger.warning("the flight recorder will not be written to %s: %s", directory, error)

    def ask(self, reason: str) -> None:
        """Have a dump made soon. The first reason is the one that it names."""
        if len(self._asked) < 2:
            self._asked.append(reason)

    async def watch(self) -> None:
        """Make the dumps that are asked for, and those of ops that hang."""
        if self._thread is None:
            return
        while True:
            await trio.sleep(LOOK_S)
            self._look_for_hangs()
            if self._asked:
                await trio.sleep(GATHER_S)
                await self._dump()
                await trio.sleep(PAUSE_S)

    def _look_for_hangs(self) -> None:
        now = trio.current_time()
        self._since = {number: self._since.get(number, now) for number in self._table.ops}
        hanging = {number for number, since in self._since.items() if now - since >= self._hang_s}
        for number in sorted(hanging - self._told):
            tag = self._table.ops[number].tag
            self.ask(f"op with tag {tag} has not ended within {self._hang_s:g} s")
        self._told = hanging

    async def last(self, failure: str) -> None:
        """Make the dump of a session that ends with a failure (empty: with none), or one that has been asked for, and
        wait for what is being written."""
        if self._thread is not None:
            if failure:
                self.ask(failure)
            with trio.move_on_after(LAST_S):
                await self._dump()

    async def _dump(self) -> None:
        """Make a dump, unless what was asked for has been written meanwhile."""
        async with self._writing:
            if self._asked:
                reason, self._asked = self._asked[0], []
                await self._write_for(reason)

    async def _write_for(self, reason: str) -> None:
        assert self._thread is not None
        try:
            path = await self._thread.run(lambda: self._write(reason), is_left=True)
            self._logger.info("the flight recorder was written to %s: %s", path, reason)
        except Exception as error:  # whatever it is, the run does not depend on it
            level = logging.INFO if self._directory in _warned_of else logging.WARNING
            _warned_of.add(self._directory)
            why = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
            self._logger.log(level, "the flight recorder cannot be written to %s: %s", self._directory, why)

    def _write(self, reason: str) -> Path:
        recording = self._recorder.recording(reason)
        run = re.sub(r"\W", "", recording.run)
        host = re.sub(r"[^\w.-]", "", recording.host)
        path = self._directory / f"pccl-{run}-peer-{recording.peer}-{host}-{recording.process}.json"
        part = path.with_suffix(".part")
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(to_json(recording))
            part.replace(path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        with suppress(OSError):
            self._remove_oldest(host)
        return path

    def _remove_oldest(self, host: str) -> None:
        """Remove the oldest files of a host, and what dumps that were killed have left of theirs. OSError."""
        own = re.compile(rf"pccl-\w*-peer-\d+-{re.escape(host)}-\d+\.(json|part)")
        found = [
            (each.stat().st_mtime_ns, each.path) for each in os.scandir(self._directory) if own.fullmatch(each.name)
        ]
        for _, path in sorted(found, reverse=True)[FILES_KEPT:]:
            os.unlink(path)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
