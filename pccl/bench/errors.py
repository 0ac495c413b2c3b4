"""The error that ends a benchmark without a result."""

from __future__ import annotations


class BenchError(Exception):
    """There is no measurement. If a worker has failed, its own words are on stderr."""
