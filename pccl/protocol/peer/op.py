"""One op of a peer: its states, use counts of tags, and the verdicts of an epoch.

    QUEUED     launched while ops may not start: during a view change or an exclusive group call
    RUNNING    submitted to the engine under (epoch, tag, use count)
    DONE       all result bytes have arrived; the verdict is open
    STOPPED    stopped by the engine before it was done
    REFUSED    not accepted by the engine
    COMMITTED  committed by the master before the engine reports it done
    SETTLED    the same, reported done while ops were stopped: it ends with the next view
    ENDING     the verdict is known; the engine returns the buffers, on abort with `send` restored
    HELD       released by the engine; the result waits for the next view
    ENDED      the caller has the result

The verdict alone decides the caller's result. An op that all peers have completed goes from DONE to ENDED at once: its
data has been received everywhere, so the engine does not touch the buffers any more.

*Use counts.* The use count of a tag tells one op with it from the next. All peers count alike, because all make the
same calls, but at different times: other peers may abort an op, or the master may ask for an abort vote, before this
peer has launched it. `Uses` keeps both until the launch. An exclusive group call that succeeds is a barrier: no op is
in flight, so an abort that is still kept then belongs to a call that this peer skipped. It counts as made; otherwise
later calls with the tag would be paired wrongly.

*Verdicts.* `KnownVerdicts` keeps the verdicts of an epoch that other peers may lack, for the next master. A peer has
one op per tag in flight, so a commit decides all earlier uses of the tag: the last commit and the aborts since suffice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import OpRef
from pccl.types import Result

Failure = tuple[Result, str]
"""Result code and text of an op without success."""


class OpState(Enum):
    """States of an op; see the module."""

    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()
    STOPPED = auto()
    REFUSED = auto()
    COMMITTED = auto()
    SETTLED = auto()
    ENDING = auto()
    HELD = auto()
    ENDED = auto()


_S = OpState
TRANSITIONS = {
    _S.QUEUED: {_S.RUNNING, _S.ENDED},
    _S.RUNNING: {_S.DONE, _S.STOPPED, _S.REFUSED, _S.COMMITTED, _S.ENDING},
    _S.DONE: {_S.ENDING, _S.ENDED},
    _S.STOPPED: {_S.REFUSED, _S.ENDING},
    _S.REFUSED: {_S.HELD, _S.ENDED},
    _S.COMMITTED: {_S.SETTLED, _S.REFUSED, _S.ENDING, _S.ENDED},
    _S.SETTLED: {_S.ENDING},
    _S.ENDING: {_S.HELD, _S.ENDED},
    _S.HELD: {_S.ENDED},
    _S.ENDED: set[OpState](),
}
"""Legal transitions."""
UNDECIDED = frozenset({_S.RUNNING, _S.DONE, _S.STOPPED, _S.REFUSED, _S.COMMITTED, _S.SETTLED})
"""States of a submitted op without a verdict carried out."""
IS_DONE = frozenset({_S.DONE, _S.SETTLED})
MAY_BE_DONE = frozenset({_S.RUNNING, _S.DONE, _S.COMMITTED, _S.SETTLED})
"""Undecided states in which all result bytes have arrived or may still arrive."""


class OpWait(NamedTuple):
    """An op without a result, for wait reasons."""

    op: int
    tag: int
    since: float
    pair: tuple[int, bool] | None
    """As in `Op`."""
    is_queued: bool
    """Whether it has not started."""


@dataclass(eq=False)
class Op:
    """One op of this peer."""

    op: int
    tag: int
    """The caller's tag."""
    launched_at: float
    pair: tuple[int, bool] | None = None
    """Other peer of a point-to-point op, and whether this peer sends; None for an op of the group."""
    state: OpState = OpState.QUEUED
    ref: OpRef | None = None
    """Name shared by all participants, once submitted."""
    is_mutual: bool = False
    """Whether its participants complete it without the master: see `completion`."""
    world_size: int = 0
    traffic: tuple[int, int] = (0, 0)
    """Payload bytes sent and received."""
    failure: Failure | None = None
    """Failure reported to the master."""
    has_voted_abort: bool = False
    """Whether this peer has voted not to commit it without the master."""
    stall_reported: bool = False
    verdict: Failure | None = None
    """Verdict being carried out, success included."""
    awaits_view: bool = False
    """Whether the result waits for the next view."""

    def move(self, state: OpState) -> None:
        assert state in TRANSITIONS[self.state], f"op {self.op} with tag {self.tag}: {self.state} to {state}"
        self.state = state


EARLY_KEPT_MAX = 8
"""Aborted future uses of a tag that are kept. Beyond that they count as made, and this peer's next call is paired with
the next one of the other peers."""
FORGOTTEN_AT_ONCE = 64
"""Uses of a tag by which a late message of an op may follow its verdict and still be found."""


class Uses:
    """Use counts of all tags in one epoch, and what is known of future uses."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        """Use counts by tag."""
        self._aborted: dict[OpRef, Failure] = {}
        self._overtaken: dict[int, int] = {}
        """First of more than EARLY_KEPT_MAX aborted uses since this peer last used the tag, by tag."""
        self._promised: dict[OpRef, Failure] = {}

    @property
    def tags(self) -> int:
        """Number of tags used."""
        return len(self._made)

    def made(self, tag: int) -> int:
        """Return the use count of a tag. Any thread."""
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
        """Pop the verdict on a use that was aborted before it was made."""
        return self._aborted.pop(op, None)

    def promise(self, op: OpRef, failure: Failure) -> None:
        """Keep an abort vote on a future use."""
        self._promised[op] = failure

    def take_promise(self, op: OpRef) -> Failure | None:
        """Pop the reason of an abort vote on a use that was not made."""
        return self._promised.pop(op, None)

    @property
    def aborts(self) -> Mapping[OpRef, Failure]:
        """Uses that were aborted before they were made here."""
        return self._aborted

    @property
    def promises(self) -> Mapping[OpRef, Failure]:
        """Abort votes on future uses."""
        return self._promised

    def abort(self, op: OpRef, failure: Failure, counts_as_made: bool) -> int:
        """Keep the abort of a future use, unless it counts as made.

        Return how many kept aborts of the tag count as made from now on because they exceed the limit; else 0.
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
        """Count aborted future uses as made: all peers are past these calls."""
        for op in sorted(self._aborted):
            if op.sequence == self.made(op.tag):
                self._made[op.tag] = op.sequence + 1
                del self._aborted[op]

    def is_overtaken(self, tag: int) -> bool:
        """Whether further aborted uses of the tag count as made."""
        return tag in self._overtaken

    def unmade_until(self, op: OpRef) -> range:
        """Return this use and the last few before it that were not made here; late messages may concern them."""
        unmade_since = self._overtaken.get(op.tag, self.made(op.tag))
        first = min(op.sequence, max(unmade_since, op.sequence + 1 - FORGOTTEN_AT_ONCE))
        return range(first, op.sequence + 1)


ABORTS_KEPT_MAX = 1000
"""Successive aborted uses of a tag that are kept for the next master."""
ABORTS_KEPT_IN_ALL_MAX = 10_000
"""Aborted uses of all tags that are kept."""


def failure_of(code: int, reason: str) -> Failure:
    """Return a failure sent by the master. Raises ProtocolError for an invalid code."""
    if code not in m.FAILURES:
        raise ProtocolError(f"a failure with code {code}")
    return Result(code), reason


class KnownVerdicts:
    """Verdicts of one epoch."""

    def __init__(self) -> None:
        self._by_tag: dict[int, list[tuple[int, Failure | None]]] = {}
        """Uses of each tag with their failures; None if committed."""
        self._aborts: deque[OpRef] = deque()
        """All aborts, the oldest first, superseded ones included."""

    def __len__(self) -> int:
        return sum(map(len, self._by_tag.values()))

    def commit(self, op: OpRef) -> None:
        heard = self._by_tag.setdefault(op.tag, [])
        if (op.sequence, None) not in heard:
            # Later uses may have been aborted before they were made here.
            heard[:] = [verdict for verdict in heard if verdict[0] > op.sequence]
            heard.append((op.sequence, None))

    def abort(self, op: OpRef, failure: Failure) -> None:
        heard = self._by_tag.setdefault(op.tag, [])
        if (op.sequence, failure) in heard:
            return
        if heard and heard[-1][1] == failure:
            failure = heard[-1][1]  # share the text
        if len(heard) >= ABORTS_KEPT_MAX:
            del heard[0]
        self._aborts.append(op)
        if len(self._aborts) > ABORTS_KEPT_IN_ALL_MAX:
            self._forget(self._aborts.popleft())
        heard.append((op.sequence, failure))

    def _forget(self, abort: OpRef) -> None:
        heard = self._by_tag[abort.tag]
        heard[:] = [verdict for verdict in heard if verdict[0] != abort.sequence or verdict[1] is None]

    def was_aborted(self, op: OpRef) -> bool:
        heard = self._by_tag.get(op.tag, ())
        return any(sequence == op.sequence and failure is not None for sequence, failure in heard)

    def newest(self) -> tuple[list[OpRef], list[m.Aborted]]:
        """Return commits and aborts as messages hold them."""
        commits, aborts = [], []
        for tag, verdicts in self._by_tag.items():
            for sequence, failure in verdicts:
                if failure is None:
                    commits.append(OpRef(tag, sequence))
                else:
                    aborts.append(m.Aborted(tag, sequence, *failure))
        return commits, aborts
