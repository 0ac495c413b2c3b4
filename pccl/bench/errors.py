"""What ends a benchmark without a result."""

from __future__ import annotations


class BenchError(Exception):
    """No measurement. Where a worker failed its own words are on stderr."""
