"""Who is who among peers that come and go: numbers that stay, and an exchange of bytes under them.

Theory of operation. A peer's rank changes when another is lost; what it has computed for a step must keep its name. So
each has a *seat*, a number that it keeps from one admission to the next. All take seats anew when newcomers have been
let in; who is lost leaves an empty one. Taking seats and exchanging bytes are ops that are launched again, after a
loss, by whoever is left. What follows from them is decided on committed results alone, which all peers have alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, PCCLError, ReduceOp, Result
from pccl.training.membership import Averaged

PLACES = 1 << 12


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The bytes of all who took part, by seat."""

    seats: tuple[int, ...]
    items: tuple[bytes, ...]
    traffic: Averaged


def reduce_among_all(communicator: Communicator, vector: NDArray[Any], op: ReduceOp, tag: int) -> Averaged:
    """All-reduces `vector` in place, again after each loss; alone, it stays as it is. PCCLError, but not for losses."""
    aborted = 0
    while communicator.world_size > 1:
        try:
            info = communicator.all_reduce(vector, op=op, tag=tag)
            return Averaged(info.world_size, aborted, info.tx_bytes, info.rx_bytes)
        except PCCLError as error:
            if error.result not in (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS):
                raise
            aborted += 1
    return Averaged(1, aborted, 0, 0)


class Seats:
    """One peer's seat, and those of the others. Uses one tag. All methods are joint."""

    def __init__(self, communicator: Communicator, tag: int) -> None:
        self._communicator = communicator
        self._tag = tag
        self._count = 0
        self.own = 0

    def take(self) -> None:
        """After peers were let in."""
        while True:
            place = random.SystemRandom().randrange(PLACES)
            marks = np.zeros(PLACES, np.uint8)
            marks[place] = 1
            reduce_among_all(self._communicator, marks, ReduceOp.SUM, self._tag)
            if marks.max() == 1:
                taken = np.flatnonzero(marks).tolist()
                self._count, self.own = len(taken), taken.index(place)
                return

    def exchange(self, item: bytes) -> Exchanged:
        """Everybody's bytes, as many from each."""
        table = np.zeros((self._count, 1 + len(item)), np.uint8)
        table[self.own, 0] = 1
        table[self.own, 1:] = np.frombuffer(item, np.uint8)
        traffic = reduce_among_all(self._communicator, table.reshape(-1), ReduceOp.SUM, self._tag)
        seats = np.flatnonzero(table[:, 0]).tolist()
        return Exchanged(tuple(seats), tuple(table[seat, 1:].tobytes() for seat in seats), traffic)
