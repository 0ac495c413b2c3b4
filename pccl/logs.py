"""Logging: the standard `logging` tree under "pccl", silent unless asked for.

`PCCL_LOG_LEVEL` (DEBUG, INFO, WARN, ERROR) sends it to stderr, `PCCL_LOG_FORMAT=json` as one JSON object a line;
`pccl master` shows warnings also without it. A program that configures `logging` itself needs neither.

A record says in words what happened, and carries what it is about as attributes too, the FIELDS that apply to it: with
a formatter of one's own `%(peer)s` has them, by `defaults=` where there is none. They are ordinary `extra`s.

Nobody waits for stderr, which may be a pipe that nobody reads: `BackgroundHandler` queues lines for a thread that
writes them. What does not fit is dropped, and how many records that were is logged once there is room again. At the end
of the process the queue gets FLUSH_S. Handlers of the program's own may block whoever logs; heartbeats then reveal it
(`pccl.runtime.threads.progress`).
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
"""The run; the installed view; the peer group; the peer that the line is of or, in the master's log, about; a further
one that it has to do with; the op's tag, and which use of the tag it is."""
SHOWN = FIELDS[1:]
"""In lines for people, who know the run."""
TEXT = "%(asctime)s %(levelname)s %(name)s%(about)s: %(message)s"
FORMATS = ("text", "json")
QUEUED_CHARACTERS_MAX = 4 << 20
"""Of records that wait for stderr."""
FLUSH_S = 1.0
POLL_S = 0.01


class TextFormatter(logging.Formatter):
    """Lines for people: what a record is about stands in brackets before its words."""

    def __init__(self) -> None:
        super().__init__(TEXT, defaults={"about": ""})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in the standard library
        about = ", ".join(f"{name} {getattr(record, name)}" for name in SHOWN if hasattr(record, name))
        record.about = f" [{about}]" if about else ""
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Lines for machines: an object with time (UTC), level, logger, message, the FIELDS that apply, and exception."""

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
    """Writes records to a stream, stderr by default, from a thread of its own. No call waits for the stream, but
    `flush`, for FLUSH_S at most."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = sys.stderr if stream is None else stream
        self._begin()

    def _begin(self) -> None:
        # Who logs may be a signal handler in the middle of another record: the queue's `put` allows for that.
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._queued = 0
        """Characters; counted by whoever logs, as `_written` is by the thread."""
        self._written = 0
        self._refused = 0
        """Records that did not fit; counted by whoever logs."""
        self._lost = 0
        """Records that could not be written, less those, of whatever kind, that the log has told of; by the thread."""
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Records that the log does not tell of, not even by their number."""
        return self._refused + self._lost

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock."""
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
        """Waits until all is written, for FLUSH_S at most."""
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
        """Past the stream's buffer where there is a file behind it: a thread that waits for the file with that buffer's
        lock would abort the interpreter when it ends."""
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


class AboutLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds to each record what `about` says at its time; a call's own `extra` goes before."""

    def __init__(self, logger: logging.Logger, about: Callable[[], Mapping[str, object]]) -> None:
        super().__init__(logger, {})
        self._about = about

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**self._about(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def configure(default_level: str | None = None) -> None:
    """Sets up stderr logging at PCCL_LOG_LEVEL, else at `default_level`, else not at all."""
    logger = logging.getLogger("pccl")
    level = os.environ.get("PCCL_LOG_LEVEL") or default_level
    if not level:
        logger.addHandler(logging.NullHandler())
        return
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
