"""The algorithms by the names that a benchmark has for them."""

from __future__ import annotations

from pccl import ReduceAlgorithm

ALGORITHMS = {"auto": None, "ring": ReduceAlgorithm.RING, "direct": ReduceAlgorithm.DIRECT}
