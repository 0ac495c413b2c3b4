"""Logging: the standard `logging` tree under "pccl", silent unless asked for.

`PCCL_LOG_LEVEL` (DEBUG, INFO, WARN, ERROR) sends it to stderr, `PCCL_LOG_FORMAT=json` as one JSON object a line. A
program that configures `logging` itself needs neither.

A record says in words what happened, and carries what it is about as attributes too, the FIELDS that apply to it: with
a formatter of one's own `%(peer)s` has them, by `defaults=` where there is none. They are ordinary `extra`s.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

FIELDS = ("run", "view", "group", "peer", "other", "tag", "sequence")
"""The run; the installed view; the peer group; the peer that the line is of or, in the master's log, about; a further
one that it has to do with; the op's tag, and which use of the tag it is."""
SHOWN = FIELDS[1:]
"""In lines for people, who know the run."""
TEXT = "%(asctime)s %(levelname)s %(name)s%(about)s: %(message)s"
FORMATS = ("text", "json")


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
    if not any(isinstance(handler, logging.StreamHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(number if number is not None else logging.INFO)
    if number is None:
        logger.warning("PCCL_LOG_LEVEL=%r is not one of DEBUG, INFO, WARN, ERROR; using INFO", level)
    if kind not in FORMATS:
        logger.warning("PCCL_LOG_FORMAT=%r is not one of %s; using %s", kind, ", ".join(FORMATS), FORMATS[0])
