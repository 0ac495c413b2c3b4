"""Logging: the standard `logging` tree under "pccl", silent unless asked for.

`PCCL_LOG_LEVEL` (DEBUG, INFO, WARN, ERROR) sends it to stderr; a program that configures `logging` itself needs
nothing.
"""

from __future__ import annotations

import logging
import os

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(default_level: str | None = None) -> None:
    """Sets up stderr logging at PCCL_LOG_LEVEL, else at `default_level`, else not at all."""
    logger = logging.getLogger("pccl")
    level = os.environ.get("PCCL_LOG_LEVEL") or default_level
    if not level:
        logger.addHandler(logging.NullHandler())
        return
    number = logging.getLevelNamesMapping().get(level.upper())
    if not any(isinstance(handler, logging.StreamHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(number if number is not None else logging.INFO)
    if number is None:
        logger.warning("PCCL_LOG_LEVEL=%r is not one of DEBUG, INFO, WARN, ERROR; using INFO", level)
