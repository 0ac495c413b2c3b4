"""A node's gate, pretended: ops that its callers run past its machine, as in `pccl.runtime.data_plane.fast_path`.

An op that came through the gate is hidden: what the engine finds of it stays here. It is told, when all who take part
are done, or shown: by what closes the gate, by a mismatch, or because its caller has waited for long enough, which may
be at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pccl.protocol import peer as ps

OPS = ("started", "ran", "done", "agreed", "ended")
"""Reports that tell of nothing but ops."""

Report = tuple[str, int]


@dataclass
class Gate:
    start: ps.SubmitOp | None = None
    """How ops that come through it start; None: it is closed."""
    uses: dict[int, int] = field(default_factory=dict)
    """Of the tags that came through this opening."""
    hidden: dict[int, bool] = field(default_factory=dict)
    """Whether they are done."""
    submissions: dict[int, ps.SubmitOp] = field(default_factory=dict)
    """Of all that ever came through it."""

    def submission(self, machine: ps.Peer, op: int, tag: int) -> ps.SubmitOp | None:
        """How an op with this tag would go through; None: it would not."""
        sequence = self.uses.get(tag) or machine.uses_of(tag)
        if self.start is None or sequence == 0:
            return None
        self.uses[tag] = sequence + 1
        self.hidden[op] = False
        self.submissions[op] = replace(self.start, op=op, tag=tag, sequence=sequence)
        return self.submissions[op]

    def show(self, op: int) -> Iterator[Report]:
        if op in self.hidden:
            yield "started", op
            if self.hidden.pop(op):
                yield "done", op

    def close(self) -> Iterator[Report]:
        """What the events tell then."""
        self.start = None
        self.uses.clear()
        for op in list(self.hidden):
            yield from self.show(op)

    def hear(self, report: Report, machine: ps.Peer, now: float) -> None:
        kind, op = report
        made = self.submissions[op]
        if kind == "ran":
            machine.op_ran(made.tag, made.sequence)
        else:
            machine.op_started(op, made.tag, made.sequence, now)
