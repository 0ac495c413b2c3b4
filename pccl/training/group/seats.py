"""Seats: small numbers that peers keep while others come and go, and an exchange of bytes under them.

Theory of operation. What a peer has computed for a step must keep its name while others are lost and ranks change, and
the names should be small: 0, 1, 2 ..., as if one machine had done it all. So each peer has a *seat*, its rank when
newcomers were let in last, and keeps it until the next time; who is lost leaves an empty one.

Taking seats and exchanging bytes are collectives that are launched again, after a loss, by whoever is left. What
follows from them is decided on the membership of a committed one alone, which all peers have alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, PCCLError, ReduceOp, Result
from pccl.training.group.membership import ABORTED, Averaged, own_number


class Info(Protocol):
    @property
    def world_size(self) -> int: ...


AnyInfo = TypeVar("AnyInfo", bound=Info)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The bytes of all who took part, by seat."""

    seats: tuple[int, ...]
    items: tuple[bytes, ...]
    traffic: Averaged


def until_committed(communicator: Communicator, call: Callable[[], AnyInfo]) -> tuple[AnyInfo | None, int]:
    """Makes a call, and again after each loss; None for who is alone. With it, how often it was aborted.

    The call should launch an op and wait for it, so that an interrupt does not abort the op for the others. PCCLError
    for anything but losses.
    """
    aborted = 0
    while communicator.world_size > 1:
        try:
            return call(), aborted
        except PCCLError as error:
            if error.result not in ABORTED:
                raise
            aborted += 1
    return None, aborted


def reduce_among_all(communicator: Communicator, vector: NDArray[Any], op: ReduceOp, tag: int) -> None:
    """All-reduces `vector` in place; alone, it stays as it is. PCCLError for anything but losses."""
    until_committed(communicator, lambda: communicator.all_reduce_async(vector, op=op, tag=tag).result())


class Seats:
    """One peer's seat, and those of the others. Uses one tag. Its methods are joint."""

    def __init__(self, communicator: Communicator, tag: int) -> None:
        self._communicator = communicator
        self._tag = tag
        self._seats: dict[int, int] = {}
        """The seats by the peers' numbers."""
        self.own = 0

    def take(self, step: int) -> None:
        """Take seats, after peers were let in. `step`, here and in `exchange`, is a count that all peers have alike."""
        info, _ = until_committed(
            self._communicator, lambda: self._communicator.launch.barrier(tag=self._tag, step=step).result()
        )
        membership = info.membership if info is not None else None
        self.own = membership.rank if membership is not None else 0
        self._seats = {peer: rank for rank, peer in enumerate(membership.peers if membership is not None else ())}

    def exchange(self, item: bytes, step: int) -> Exchanged:
        """Everybody's bytes, as many from each. PCCLError INVALID_USAGE where others were let in since `take`."""
        send = np.frombuffer(item, np.uint8)
        info, aborted = until_committed(
            self._communicator, lambda: self._communicator.launch.all_gather(send, tag=self._tag, step=step).result()
        )
        if info is None:
            return Exchanged((self.own,), (item,), Averaged(1, aborted, 0, 0, (own_number(self._communicator),)))
        peers = info.membership.peers
        if not self._seats.keys() >= {*peers}:
            what = (
                "somebody without a seat takes part: who was let in by a call of update_topology outside of this class"
            )
            raise PCCLError(Result.INVALID_USAGE, "Seats.exchange", what)
        return Exchanged(
            tuple(self._seats[peer] for peer in peers),
            tuple(row.tobytes() for row in info.array),
            Averaged(info.world_size, aborted, info.tx_bytes, info.rx_bytes, peers),
        )
