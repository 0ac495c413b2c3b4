"""Uses: how often this peer has used each tag in an epoch, and what it has heard of uses that it has still to make.

The use count of a tag tells one op with it from the next. All peers count alike, for all make the same calls, but not
at the same time: others may give an op up, and the master may ask for a promise not to commit it, before this peer has
launched it. Both wait here for the launch.

An exclusive joint call that succeeds is a barrier: nobody has an op in flight there, so all calls that were to be
paired before it have ended. An abort that waits here then is of a call that its caller has left out: one that has
heard another reason to give up, while the others waited. It counts as made, or from there on this peer would pair its
calls with that tag with the next ones of the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from pccl.protocol.messages import OpRef
from pccl.protocol.peer.op import Failure

EARLY_KEPT_MAX = 8
"""Number of uses of a tag that were aborted before this peer has made them and that its next calls end like. If there
are more, somebody waits for this peer again and again: they count as made, and its next call is paired with the next
one of the others."""
FORGOTTEN_AT_ONCE = 64
"""Number of uses of a tag by which a word of an op may come later than its verdict and still be found."""


class Uses:
    """The uses of all tags in one epoch."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        """Use counts by tag."""
        self._aborted: dict[OpRef, Failure] = {}
        self._overtaken: dict[int, int] = {}
        """Tags of which more than EARLY_KEPT_MAX uses were aborted since this peer has used them, and the first of
        these uses."""
        self._promised: dict[OpRef, Failure] = {}

    @property
    def tags(self) -> int:
        """Number of different tags that were used."""
        return len(self._made)

    def made(self, tag: int) -> int:
        """Return the use count of a tag. May be called from any thread."""
        return self._made.get(tag, 0)

    def is_made(self, op: OpRef) -> bool:
        return op.sequence < self._made.get(op.tag, 0)

    def make(self, tag: int) -> OpRef:
        """Count one more use of a tag."""
        sequence = self._made.get(tag, 0)
        self._made[tag] = sequence + 1
        self._overtaken.pop(tag, None)
        return OpRef(tag, sequence)

    def take_abort(self, op: OpRef) -> Failure | None:
        """Return the verdict on a use that was aborted before it was made, and forget it."""
        return self._aborted.pop(op, None)

    def promise(self, op: OpRef, failure: Failure) -> None:
        """Remember the promise not to commit a use that is still to be made."""
        self._promised[op] = failure

    def take_promise(self, op: OpRef) -> Failure | None:
        """Return the reason for which a use was promised not to be committed before it was made, and forget it."""
        return self._promised.pop(op, None)

    @property
    def aborts(self) -> Mapping[OpRef, Failure]:
        """Uses that were aborted before they were made here."""
        return self._aborted

    @property
    def promises(self) -> Mapping[OpRef, Failure]:
        """Uses that were promised not to be committed before they were made here, and why."""
        return self._promised

    def abort(self, op: OpRef, failure: Failure, counts_as_made: bool) -> int:
        """Remember the abort of a use that is still to be made, unless it counts as made.

        If with it too many of the tag wait for this peer, for the first time, return how many count as made instead;
        else 0.
        """
        if counts_as_made and op.sequence == self.made(op.tag):
            self._made[op.tag] = op.sequence + 1
            return 0
        self._aborted[op] = failure
        return self._bound_aborted(op.tag)

    def _bound_aborted(self, tag: int) -> int:
        first = end = self.made(tag)
        while OpRef(tag, end) in self._aborted:
            end += 1
        if end == first or (end - first <= EARLY_KEPT_MAX and tag not in self._overtaken):
            return 0
        given_up = 0 if tag in self._overtaken else end - first
        self._overtaken.setdefault(tag, first)
        for sequence in range(first, end):
            del self._aborted[OpRef(tag, sequence)]
        self._made[tag] = end
        return given_up

    def make_aborted(self) -> None:
        """Count uses as made that were aborted before: all peers have come past the calls that they were of."""
        for op in sorted(self._aborted):
            if op.sequence == self.made(op.tag):
                self._made[op.tag] = op.sequence + 1
                del self._aborted[op]

    def is_overtaken(self, tag: int) -> bool:
        """Whether further aborted uses of the tag count as made: very many were aborted since this peer has used it."""
        return tag in self._overtaken

    def unmade_until(self, op: OpRef) -> range:
        """Return this use and the last few before it that were not made here, of which something may have come late."""
        unmade_since = self._overtaken.get(op.tag, self.made(op.tag))
        first = min(op.sequence, max(unmade_since, op.sequence + 1 - FORGOTTEN_AT_ONCE))
        return range(first, op.sequence + 1)
