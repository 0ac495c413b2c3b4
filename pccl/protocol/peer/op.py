"""Op: one collective as its peer sees it, from its launch to its result, and the states that it goes through.

    QUEUED     launched while no ops may start: a view is being changed, or an exclusive joint call is under way
    RUNNING    submitted to the engine under (epoch, tag, use of the tag)
    DONE       all result bytes are here; the verdict is not
    STOPPED    the engine has stopped it before it was done, so it never will be
    REFUSED    the engine did not take it, so it never will be done
    COMMITTED  the master has committed it, and the engine has still to say that it is done
    SETTLED    the same, and the engine has said so while ops were stopped: it ends with the next view
    ENDING     the verdict is known; the engine gives the buffers back, on abort with `send` as it was
    HELD       the engine has nothing of it any more; its result waits for the next view
    ENDED      its caller has the result

The verdict alone decides what the caller is told. An op that all peers are done with goes from DONE to ENDED at once:
whatever this peer had to send has been received, so nothing touches the buffers any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from pccl.protocol.messages import OpRef
from pccl.types import Result

Failure = tuple[Result, str]
"""The result code and the text with which an op ended, or has to end, without success."""


class OpState(Enum):
    """The states of an op, as the module describes them."""

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
"""The states to which an op may go from each state."""
UNDECIDED = frozenset({_S.RUNNING, _S.DONE, _S.STOPPED, _S.REFUSED, _S.COMMITTED, _S.SETTLED})
"""States of an op that was submitted and of which no verdict is carried out."""
IS_DONE = frozenset({_S.DONE, _S.SETTLED})
MAY_BE_DONE = frozenset({_S.RUNNING, _S.DONE, _S.COMMITTED, _S.SETTLED})
"""Undecided states in which all result bytes are here or may still come."""


class OpWait(NamedTuple):
    """An op that its caller waits for, as the session may have to speak of it."""

    op: int
    tag: int
    since: float
    pair: tuple[int, bool] | None
    """As in `Op`."""
    is_queued: bool
    """Whether it has yet to start."""


@dataclass(eq=False)
class Op:
    """One op of this peer."""

    op: int
    tag: int
    """The tag that its caller has given."""
    launched_at: float
    pair: tuple[int, bool] | None = None
    """The other peer of a point-to-point op, and whether this one sends; None: it is an op of the group."""
    state: OpState = OpState.QUEUED
    ref: OpRef | None = None
    """The op's name among all participants, once it is submitted."""
    is_mutual: bool = False
    """Whether its participants complete it by themselves: see `completion`."""
    world_size: int = 0
    traffic: tuple[int, int] = (0, 0)
    """Payload bytes sent and received."""
    failure: Failure | None = None
    """The reason why it cannot or must not complete, as the master is told."""
    has_voted_abort: bool = False
    """Whether this peer has promised not to commit it by itself."""
    stall_reported: bool = False
    verdict: Failure | None = None
    """The op's end, success included, once that is carried out."""
    awaits_view: bool = False
    """Whether its result is held until the next view is installed."""

    def move(self, state: OpState) -> None:
        assert state in TRANSITIONS[self.state], f"op {self.op} with tag {self.tag}: {self.state} to {state}"
        self.state = state
