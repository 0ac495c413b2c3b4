"""An exchange in which any peer can refuse a step for all of them.

Theory of operation. A peer that finds out by itself that a step must not be made cannot simply raise: the others have
its part in their averages already and would go on with it. So before every step all peers gather a few integers from
each, zeros where all is well. The gathering is one op, so either all survivors hear the same objections or it is
aborted on all and made again; whoever objects and is lost before it has been heard is out of the run. It is launched
when nothing more can be objected to and waited for after the averages, and so takes no time of its own on a network
where delays count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pccl import Communicator, PCCLError, Result
from pccl.training.membership import ABORTED, Averaged

FINE = (0, 0, 0)
"""No objection. What other numbers mean is the users' affair, except that the first one is not 0."""


@dataclass(frozen=True, slots=True)
class Objection:
    """One peer's."""

    peer: int
    """Its number in `Communicator.membership`."""
    is_own: bool
    what: tuple[int, int, int]


class Veto:
    """The exchange on its way. All peers of the group launch it, with the same tag and step."""

    def __init__(self, communicator: Communicator, tag: int, step: int, what: tuple[int, int, int] = FINE) -> None:
        self._communicator = communicator
        self._tag = tag
        self._step = step
        self._what = np.array(what, np.int64)
        self._handle = self._launch()

    def _launch(self) -> Any:
        """None: alone."""
        if self._communicator.world_size < 2:
            return None
        try:
            return self._communicator.all_gather_async(self._what, tag=self._tag, step=self._step)
        except PCCLError as error:
            if error.result is not Result.TOO_FEW_PEERS:
                raise
            return None

    def wait(self) -> tuple[list[Objection], Averaged]:
        """Blocks until all peers have spoken: their objections, the same on all of them, and what it cost. PCCLError
        for anything but losses."""
        aborted = 0
        while self._handle is not None:
            _, status, info = self._handle.wait()
            if info is not None:
                said = [
                    Objection(peer, rank == info.rank, (int(what[0]), int(what[1]), int(what[2])))
                    for rank, (peer, what) in enumerate(zip(info.membership.peers, info.array, strict=True))
                    if what[0]
                ]
                return said, Averaged(info.world_size, aborted, info.tx_bytes, info.rx_bytes)
            if status not in ABORTED:
                self._handle.result()  # raises, with the reason
            aborted += 1
            self._handle = self._launch()
        own = [Objection(0, True, (int(self._what[0]), int(self._what[1]), int(self._what[2])))]
        return own if self._what[0] else [], Averaged(1, aborted, 0, 0)
