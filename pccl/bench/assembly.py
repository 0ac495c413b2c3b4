"""Ranks, barriers and messages for peers on different hosts, made of tiny reduces of the run that they measure."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, ReduceOp

SERVICE_TAG = 1 << 32
"""The tag of reduces that are not measured. Cases count their tags from 0."""


class Assembly:
    """All peers of a run, each with a rank that is drawn anew for each assembly. All peers must call each method."""

    def __init__(self, communicator: Communicator, world_size: int) -> None:
        self._communicator = communicator
        self._world_size = world_size
        self.rank = self._draw_rank()

    def barrier(self) -> None:
        """Return once all peers have called it."""
        self._reduce(np.zeros(1, np.uint8), ReduceOp.MAX)

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the greatest of all peers' first values, of their second ones, and so on."""
        found = np.array(values, np.float64)
        self._reduce(found, ReduceOp.MAX)
        return [float(value) for value in found]

    def gather(self, text: str) -> list[str]:
        """Return the texts of all peers by rank. None may be empty."""
        encoded = text.encode()
        (longest,) = self.most([len(encoded)])
        slots = np.zeros((self._world_size, int(longest)), np.uint8)
        slots[self.rank, : len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._reduce(slots, ReduceOp.SUM)
        return [slot.tobytes().rstrip(b"\0").decode() for slot in slots]

    def _draw_rank(self) -> int:
        """Draw this peer's rank: each draws a lot, and in each round the highest of those left gets the next rank."""
        lot = 1 + secrets.randbits(62)
        ranks: list[int] = []
        for rank in range(self._world_size):
            highest = np.array([0 if ranks else lot])
            self._reduce(highest, ReduceOp.MAX)
            if not ranks and int(highest[0]) == lot:
                ranks.append(rank)
        assert ranks
        return ranks[0]

    def _reduce(self, values: NDArray[Any], op: ReduceOp) -> None:
        self._communicator.all_reduce(values, op=op, tag=SERVICE_TAG)
