"""Logging: the standard `logging` tree under "pccl", silent unless asked for, but for what must be seen in time.

`PCCL_LOG_LEVEL` (DEBUG, INFO, WARN, ERROR) sends records to stderr, and `PCCL_LOG_FORMAT=json` makes each a JSON object
on a line of its own. `pccl master` shows warnings also without them. A program that configures `logging` itself needs
neither.

Where nobody has configured any logging, warnings of calls that have waited for long (`protocol.long_wait`) go to stderr
all the same: whoever looks at a program that stands still sees why. So do a master's warnings that newcomers are held
(`protocol.founding`) and of who is slow or stuck (`protocol.master.diagnosing`), and those of recordings that cannot be
written to where they should (`runtime.session.dumps`). PCCL_LOG_LEVEL=ERROR silences these, too.

A record says in words what happened. What it is about it also carries as attributes, those FIELDS that apply to it, as
ordinary `extra`s. A formatter of the program's own can use them, such as `%(peer)s`, with `defaults=` for records that
lack one.

Nobody waits for stderr, which may be a pipe that nobody reads: `BackgroundHandler` queues lines for a thread that
writes them. Records that do not fit into the queue are dropped, and their number is logged once there is room again. At
the end of the process the queue is given FLUSH_S. Handlers of the program's own may block the thread that logs;
heartbeats then reveal it (`pccl.runtime.threads.progress`).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO

FIELDS = ("run", "view", "group", "peer", "other", "tag", "sequence")
"""The run; the installed view; the peer group; the peer that logs or, in the master's log, that the record is about;
a further peer that it has to do with; the op's tag, and the number of the use of that tag."""
SHOWN = FIELDS[1:]
"""The fields that lines for people have: they know the run."""
TEXT = "%(asctime)s %(levelname)s %(name)s%(about)s: %(message)s"
FORMATS = ("text", "json")
UNASKED = "is_shown_unasked"
"""The attribute of records that are shown where nobody has configured any logging."""
QUEUED_CHARACTERS_MAX = 4 << 20
"""The most characters of records that may wait for stderr."""
FLUSH_S = 1.0
POLL_S = 0.01


class TextFormatter(logging.Formatter):
    """Formats records for people: the fields of a record stand in brackets before its words."""

    def __init__(self) -> None:
        super().__init__(TEXT, defaults={"about": ""})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in the standard library
        about = ", ".join(f"{name} {getattr(record, name)}" for name in SHOWN if hasattr(record, name))
        record.about = f" [{about}]" if about else ""
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Formats records for machines: an object with time (UTC), level, logger, message, its FIELDS, and exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class BackgroundHandler(logging.Handler):
    """Writes records to a stream, stderr by default, from a thread of its own.

    No call waits for the stream but `flush`, which waits for FLUSH_S at most.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = sys.stderr if stream is None else stream
        self._begin()

    def _begin(self) -> None:
        # Who logs may be a signal handler in the middle of another record: the queue's `put` allows for that.
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._queued = 0
        """Characters that were queued, counted by the threads that log; `_written` is counted by the handler's own."""
        self._written = 0
        self._refused = 0
        """Records that did not fit, counted by the threads that log."""
        self._lost = 0
        """Records that could not be written, less all whose loss has been logged; counted by the handler's thread."""
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """The number of records that were dropped and whose loss has not been logged."""
        return self._refused + self._lost

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. `logging` calls this with the handler's lock held."""
        try:
            if self._pid != os.getpid():
                self._begin()  # a forked child has no thread, and nothing of its parent's to say
            line = self.format(record) + "\n"
            if self._queued - self._written + len(line) > QUEUED_CHARACTERS_MAX:
                self._refused += 1
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="pccl log", daemon=True)
                self._thread.start()
            self._queued += len(line)
            self._queue.put(line)
        except Exception:
            self._refused += 1  # logging's way of telling it would wait for stderr

    def flush(self) -> None:
        """Wait until all records are written, for FLUSH_S at most."""
        end_s = time.monotonic() + FLUSH_S
        while self._thread is not None and self._pid == os.getpid() and self._queued > self._written:
            if time.monotonic() > end_s:
                return
            time.sleep(POLL_S)

    def _write_all(self) -> None:
        while True:
            line = self._queue.get()
            if not self._write(line):
                self._lost += 1
            if (dropped := self.dropped) and self._queue.empty() and self._write(self._notice(dropped)):
                self._lost -= dropped
            self._written += len(line)

    def _notice(self, dropped: int) -> str:
        text = "%d records dropped: nobody has taken them in time"
        return self.format(logging.LogRecord("pccl", logging.WARNING, __file__, 0, text, (dropped,), None)) + "\n"

    def _write(self, text: str) -> bool:
        """Write text, and return whether that succeeded.

        If there is a file behind the stream, the stream's buffer is passed by: a thread that waits for the file and
        holds that buffer's lock would abort the interpreter when it ends.
        """
        stream = self._stream
        try:
            if stream.closed:
                return False
            try:
                fd = stream.fileno()
            except OSError:
                stream.write(text)
                stream.flush()
                return True
            data = memoryview(text.encode(errors="backslashreplace"))
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:
                    select.select([], [fd], [])
            return True
        except Exception:
            return False


class _UnaskedHandler(BackgroundHandler):
    """Shows records that are UNASKED, as long as nobody else shows any record of pccl."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(TextFormatter())

    def filter(self, record: logging.LogRecord) -> bool:
        others = [*logging.getLogger("pccl").handlers, *logging.getLogger().handlers]
        return getattr(record, UNASKED, False) and all(each is self for each in others)


class AboutLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the fields that `about()` returns to each record. A call's own `extra` takes precedence."""

    def __init__(self, logger: logging.Logger, about: Callable[[], Mapping[str, object]]) -> None:
        super().__init__(logger, {})
        self._about = about

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**self._about(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def configure(default_level: str | None = None) -> None:
    """Set up logging to stderr at PCCL_LOG_LEVEL, else at `default_level`, else not at all."""
    logger = logging.getLogger("pccl")
    level = os.environ.get("PCCL_LOG_LEVEL") or default_level
    if not level:
        if not logger.handlers:
            logger.addHandler(_UnaskedHandler())
        return
    for each in [each for each in logger.handlers if isinstance(each, _UnaskedHandler)]:
        logger.removeHandler(each)
    number = logging.getLevelNamesMapping().get(level.upper())
    kind = os.environ.get("PCCL_LOG_FORMAT") or FORMATS[0]
    if not any(isinstance(handler, logging.StreamHandler | BackgroundHandler) for handler in logger.handlers):
        handler = BackgroundHandler()
        handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(number if number is not None else logging.INFO)
    if number is None:
        logger.warning("PCCL_LOG_LEVEL=%r is not one of DEBUG, INFO, WARN, ERROR; using INFO", level)
    if kind not in FORMATS:
        logger.warning("PCCL_LOG_FORMAT=%r is not one of %s; using %s", kind, ", ".join(FORMATS), FORMATS[0])
