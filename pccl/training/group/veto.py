"""An exchange in which any peer can refuse a step for all of them.

Theory of operation. A peer that finds out by itself that a step must not be made cannot simply raise: the others have
its part in their averages already and would go on with it. So before every step all peers gather a few integers from
each, zeros where all is well, and with them a number, such as by what the peer's part counts. The gathering is one op,
so either all survivors hear the same objections or it is aborted on all and made again; whoever objects and is lost
before it has been heard is out of the run. It is launched when nothing more can be objected to and waited for after the
averages, and so takes no time of its own on a network where delays count.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from pccl import Communicator
from pccl.training.group.membership import Averaged, own_number
from pccl.training.group.relaunch import Relaunched

FINE = (0, 0, 0)
"""No objection. What other numbers mean is the users' affair, except that the first one is positive."""
UNLIKE = -1
"""The first number of an objection to a peer that has something else where all must be alike."""


@dataclass(frozen=True, slots=True)
class Objection:
    """One peer's."""

    peer: int
    """The peer's number in `Communicator.membership`."""
    is_own: bool
    what: tuple[int, int, int]


class Veto:
    """The exchange on its way. All peers of the group launch it, with the same tag and step."""

    def __init__(
        self,
        communicator: Communicator,
        tag: int,
        step: int,
        what: tuple[int, int, int] = FINE,
        *,
        alike: str = "",
        number: float = math.nan,
    ) -> None:
        """`alike` is a text that is the same on all peers, or each objects to those that have another; `number` is told
        to the others."""
        self._communicator = communicator
        self._what = what
        self._number = number
        self.numbers: dict[int, float] = {}
        """The peers' numbers, by peer, once `wait` has returned."""
        row = np.array([*what, zlib.crc32(alike.encode()), 0], np.int64)
        row[-1:] = np.array([number]).view(np.int64)
        self._op = Relaunched(communicator, lambda: communicator.launch.all_gather(row, tag=tag, step=step))

    def wait(self) -> tuple[list[Objection], Averaged]:
        """Blocks until all peers have spoken: their objections, and what it cost. Whether there are any is the same on
        all of them. PCCLError for anything but losses."""
        info = self._op.wait()
        if info is None:
            peer = own_number(self._communicator)
            self.numbers = {peer: self._number}
            own = [Objection(peer, True, self._what)] if self._what != FINE else []
            return own, Averaged(1, self._op.aborted, 0, 0, (peer,))
        rows = info.array[:, :-1].tolist()
        self.numbers = dict(zip(info.membership.peers, info.array.view(np.float64)[:, -1].tolist(), strict=True))
        said = []
        for rank, (peer, (*what, alike)) in enumerate(zip(info.membership.peers, rows, strict=True)):
            is_own = rank == info.rank
            if tuple(what) != FINE:
                said.append(Objection(peer, is_own, tuple(what)))
            elif alike != rows[info.rank][-1]:
                said.append(Objection(peer, is_own, (UNLIKE, 0, 0)))
        return said, Averaged(info.world_size, self._op.aborted, info.tx_bytes, info.rx_bytes, info.membership.peers)
