"""Outbox: the effects of a peer's machine in order, and what of them its master hears.

Nothing is kept for a master that is not there. What the next one has to know is state of the machine's other parts,
and is told anew when that one leads. What may be said together is held back until the batch of events is over, or
until something is said that must come after it.
"""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import OpRef
from pccl.protocol.peer.effects import Effect, ToMaster


class Outbox:
    """All that one peer does and says."""

    def __init__(self) -> None:
        self.is_led = True
        """Whether a master hears what is said."""
        self.is_closed = False
        """Whether the session is over: nothing is said any more."""
        self._effects: list[Effect] = []
        self._epoch = 0
        """The epoch whose ops are reported; 0: none."""
        self._done: list[OpRef] = []
        self._stalled: list[OpRef] = []
        self._over: list[OpRef] = []

    def act(self, effect: Effect) -> None:
        """Have this carried out."""
        self._effects.append(effect)

    def say(self, message: m.FromPeer) -> None:
        """Tell the master that leads, if one does."""
        if self.is_led and not self.is_closed:
            self._effects.append(ToMaster(message))

    def answer(self, message: m.FromPeer) -> None:
        """Tell whichever master asks, also one that does not lead yet."""
        self._effects.append(ToMaster(message))

    def report_ops_of(self, epoch: int) -> None:
        """Report ops of this epoch from here on; 0: ops do not run, and there is nothing to report."""
        self._epoch = epoch
        self.discard_reports()

    def report_done(self, op: OpRef) -> None:
        """Report that all result bytes of this op are here."""
        self._done.append(op)

    def report_stalled(self, op: OpRef) -> None:
        """Report that this op takes long."""
        self._stalled.append(op)

    def report_over(self, op: OpRef) -> None:
        """Report that this op, which was reported as stalled, is committed."""
        self._over.append(op)

    def send_reports(self) -> None:
        """Say all that has been reported."""
        if self._epoch:
            if self._done:
                self.say(m.OpsDone(self._epoch, self._done))
            if self._stalled:
                self.say(m.OpsStalled(self._epoch, self._stalled))
            if self._over:
                self.say(m.OpsOver(self._epoch, self._over))
        self.discard_reports()

    def discard_reports(self) -> None:
        self._done, self._stalled, self._over = [], [], []

    def drain(self) -> list[Effect]:
        """Return the effects of all events since the last call, in order."""
        self.send_reports()
        effects, self._effects = self._effects, []
        return effects
