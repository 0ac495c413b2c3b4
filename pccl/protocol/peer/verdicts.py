"""Verdicts that a peer has heard in an epoch and that others might not have: what the next master has to know.

A peer has one op of a tag in flight at a time, so whoever commits a use of it has decided all uses before: of each tag
the last commit suffices, and the aborts since. Aborts are bounded, for a caller that gives up again and again makes
many.
"""

from __future__ import annotations

from collections import deque

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import OpRef
from pccl.protocol.peer.op import Failure
from pccl.types import Result

ABORTS_KEPT_MAX = 1000
"""Number of aborted uses of a tag, one after the other, that are remembered for the next master."""
ABORTS_KEPT_IN_ALL_MAX = 10_000
"""Number of aborted uses of all tags that are remembered."""


def failure_of(code: int, reason: str) -> Failure:
    """Return a failure as the master tells of it. Raises ProtocolError if the code is none."""
    if code not in m.FAILURES:
        raise ProtocolError(f"a failure with code {code}")
    return Result(code), reason


class HeardVerdicts:
    """Verdicts of one epoch."""

    def __init__(self) -> None:
        self._by_tag: dict[int, list[tuple[int, Failure | None]]] = {}
        """Uses of each tag with their failures; None: committed."""
        self._aborts: deque[OpRef] = deque()
        """All aborts that were noted, the oldest first; some have been superseded since."""

    def __len__(self) -> int:
        return sum(map(len, self._by_tag.values()))

    def commit(self, op: OpRef) -> None:
        heard = self._by_tag.setdefault(op.tag, [])
        if (op.sequence, None) not in heard:
            # Later uses may have been aborted already, before they were made here.
            heard[:] = [verdict for verdict in heard if verdict[0] > op.sequence]
            heard.append((op.sequence, None))

    def abort(self, op: OpRef, failure: Failure) -> None:
        heard = self._by_tag.setdefault(op.tag, [])
        if (op.sequence, failure) in heard:
            return
        if heard and heard[-1][1] == failure:
            failure = heard[-1][1]  # a text that a thousand aborts have in common is kept once
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

    def told(self) -> tuple[list[OpRef], list[m.Aborted]]:
        """Return commits and aborts as a master is told of them."""
        commits, aborts = [], []
        for tag, verdicts in self._by_tag.items():
            for sequence, failure in verdicts:
                if failure is None:
                    commits.append(OpRef(tag, sequence))
                else:
                    aborts.append(m.Aborted(tag, sequence, *failure))
        return commits, aborts
