"""Optional numbers in the environment: an invalid one is a warning."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("pccl")

_warned_of: set[str] = set()
"""Warnings that this process has logged."""


def number_of(name: str, default: float, most: float) -> float:
    """Return the number in an environment variable, from 0 to `most`; the default if it is not set or invalid."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= most:
        return value
    warning = f"{name}={text}: not a number from 0 to {most:.10g}; {default:.10g} is used"
    if warning not in _warned_of:
        _warned_of.add(warning)
        logger.warning("%s", warning)
    return default
