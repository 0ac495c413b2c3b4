"""Logging: the loggers `pccl`, `pccl.master`, `pccl.peer` and so on, the fields of their records, and two formats.

By default, Python prints warnings and errors to stderr. If PCCL_LOG_LEVEL (DEBUG, INFO, WARN or ERROR) is set,
`import pccl` sends the log to stderr at that level. With PCCL_LOG_FORMAT=json, each record is one line of JSON.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import logging.handlers
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

FIELDS = ("run", "view", "group", "peer", "other", "tag", "sequence")
"""Attributes of records. `peer` is the peer that logs or that a master's record concerns; `other` is a second peer."""
SHOWN = FIELDS[1:]
"""The fields that the text format shows."""
TEXT = "%(asctime)s %(levelname)s %(name)s%(about)s: %(message)s"
FORMATS = ("text", "json")
QUEUED_MAX = 10_000
"""The maximum number of records that wait for stderr; further records are dropped."""
FLUSH_S = 1.0


class TextFormatter(logging.Formatter):
    """Formats records as text, with their fields in brackets before the message."""

    def __init__(self) -> None:
        super().__init__(TEXT, defaults={"about": ""})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in the standard library
        about = ", ".join(f"{name} {getattr(record, name)}" for name in SHOWN if hasattr(record, name))
        record.about = f" [{about}]" if about else ""
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects with time (UTC), level, logger, message, the FIELDS and any exception."""

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


class AboutLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the fields that `about()` returns to each record. A call's own `extra` takes precedence."""

    def __init__(self, logger: logging.Logger, about: Callable[[], Mapping[str, object]]) -> None:
        super().__init__(logger, {})
        self._about = about

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**self._about(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def configure(default_level: str | None = None, in_background: bool = False) -> None:
    """Send the log to stderr at PCCL_LOG_LEVEL, else `default_level`, if one is set and the logger has no handler.

    With `in_background`, a thread writes the log so that no call waits for stderr.
    """
    logger = logging.getLogger("pccl")
    level = os.environ.get("PCCL_LOG_LEVEL") or default_level
    if not level:
        return
    number = logging.getLevelNamesMapping().get(level.upper())
    kind = os.environ.get("PCCL_LOG_FORMAT") or FORMATS[0]
    own = [each for each in logger.handlers if isinstance(each, _StderrHandler)]
    if in_background:
        for each in own:
            logger.removeHandler(each)
    if not logger.handlers:
        handler = _StderrHandler(in_background)
        handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
        logger.addHandler(_queued(handler) if in_background else handler)
        logger.propagate = False
    logger.setLevel(number if number is not None else logging.INFO)
    if number is None:
        logger.warning("PCCL_LOG_LEVEL=%r is not one of DEBUG, INFO, WARN, ERROR; using INFO", level)
    if kind not in FORMATS:
        logger.warning("PCCL_LOG_FORMAT=%r is not one of %s; using %s", kind, ", ".join(FORMATS), FORMATS[0])


class _StderrHandler(logging.StreamHandler[Any]):
    """The handler that `configure` adds. In the background it takes no locks, since interpreter exit waits for them."""

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        stream: Any = sys.stderr
        if in_background:
            with suppress(OSError, ValueError, AttributeError):
                raw = io.FileIO(sys.stderr.fileno(), "w", closefd=False)
                stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        super().__init__(stream)

    def handle(self, record: logging.LogRecord) -> bool:
        if not self._in_background:
            return bool(super().handle(record))
        self.emit(record)
        return True


class _QueueHandler(logging.handlers.QueueHandler):
    """Drops records when the queue is full."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)


def _queued(handler: logging.Handler) -> logging.Handler:
    """Return a handler whose thread passes records to `handler`. At exit, the process waits up to FLUSH_S for them."""
    records: queue.Queue[Any] = queue.Queue(QUEUED_MAX)
    logging.handlers.QueueListener(records, handler).start()

    def flush() -> None:
        end_s = time.monotonic() + FLUSH_S
        while records.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.01)

    atexit.register(flush)
    return _QueueHandler(records)
