"""A node's fast path, pretended: ops that its callers run past its machine, as in `pccl.runtime.data_plane.fast_path`.

The machine does not know of an op that runs here: what the engine finds of it stays here. It is completed when all that
take part are done, or handed over to the machine: when the path closes, by a mismatch, or because its caller has waited
for long enough, which may be at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pccl.protocol.completion import callers_tag
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.protocol.peer.ops import pair_start

OPS = ("started", "ran", "done", "agreed", "ended")
"""Reports about ops only."""

Report = tuple[str, int]


@dataclass
class FastPath:
    start: ps.SubmitOp | None = None
    """The submission that ops which come through are made after; None: it is closed."""
    uses: dict[int, int] = field(default_factory=dict)
    """Use counts of the tags that came through since it was opened, by the names that all participants know."""
    running: dict[int, bool] = field(default_factory=dict)
    """The ops that run here, and whether their results are there."""
    submissions: dict[int, ps.SubmitOp] = field(default_factory=dict)
    """The submission of each op that ever came through."""
    pairs: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """The other peer's number of each of these that is point-to-point, and whether this one sends."""
    ran: set[tuple[int, int, int]] = field(default_factory=set)
    """Epoch, tag and sequence of the ops that the machine knows that they were completed here."""

    def submission(self, machine: Peer, op: int, tag: int, pair: tuple[int, bool] | None = None) -> ps.SubmitOp | None:
        """Let an op with this tag through, if it may. None: it may not. `pair`: as in `Node.pairs`."""
        start = self.start if self.start is None or pair is None else pair_start(self.start, pair)
        if start is None:
            return None
        shared_tag = start.tag | tag
        sequence = self.uses.get(shared_tag) or machine.uses_of(shared_tag)
        if sequence == 0:
            return None
        submission = replace(start, op=op, tag=shared_tag, sequence=sequence)
        if not self.suits(submission):
            return None
        self.uses[shared_tag] = sequence + 1
        self.running[op] = False
        self.submissions[op] = submission
        if pair is not None:
            self.pairs[op] = pair
        return submission

    def suits(self, submission: ps.SubmitOp) -> bool:
        """Whether an op is small enough and of the right kind."""
        return True

    @property
    def waiting(self) -> list[int]:
        """The ops that run here and have a caller that waits."""
        return list(self.running)

    @property
    def closes_to_hear(self) -> bool:
        """Whether it has to be closed before any report is heard: what one engine thread reports says nothing of the
        others."""
        return False

    def hand_over(self, op: int) -> Iterator[Report]:
        """Yield what the machine is to hear of an op that it goes on with."""
        if op in self.running:
            yield "started", op
            if self.running.pop(op):
                yield "done", op

    def time_out(self, op: int) -> Iterator[Report]:
        """Yield what the machine is to hear of an op that its caller has waited for for long enough."""
        return self.hand_over(op)

    def close(self) -> Iterator[Report]:
        """Close the path, and yield what the machine is to hear of the ops that run here."""
        self.start = None
        self.uses.clear()
        for op in list(self.running):
            yield from self.hand_over(op)

    def report(self, report: Report, machine: Peer, now: float) -> None:
        """Have the machine hear that an op has run here, or goes on as its own."""
        kind, op = report
        made = self.submissions[op]
        if kind == "ran":
            machine.op_fast_completed(made.tag, made.sequence)
            self.ran.add((made.epoch, made.tag, made.sequence))
        else:
            machine.op_handed_over(op, callers_tag(made.tag), made.sequence, now, self.pairs.get(op))
