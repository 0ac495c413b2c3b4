"""One node's engine: the shipped `Engine` over simulated threads, and what it reports in the simulation's
words."""

from __future__ import annotations

import random
from typing import Any

from pccl.protocol.peer import effects as ps
from pccl.runtime.data_plane import events
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Root
from tests.simulation.fast_path import Report
from tests.simulation.node import Node
from tests.simulation.real.arrays import Loan
from tests.simulation.real.fast_path import RealFastPath
from tests.simulation.real.library import Library
from tests.simulation.real.ops import ROOTED, Style

REPORTS: dict[type, str] = {
    events.OpHandedOver: "started",
    events.OpFastCompleted: "ran",
    events.OpDone: "done",
    events.OpCompleted: "agreed",
    events.OpEnded: "ended",
    events.OpFrozen: "stopped",
    events.OpMismatch: "mismatch",
    events.OpRefused: "refused",
}
"""Names of the reports about ops."""


class PeerEngine:
    """The engine of a node, from the start of its threads to the node's end."""

    def __init__(self, library: Library, node: Node, threads: int, rng: random.Random) -> None:
        """`rng` draws what callers on the fast path do."""
        lib = library.lib
        self._library = library
        self._node = node
        self.loans: dict[int, Loan] = {}
        self.detaching: set[int] = set()
        """Ops that were told to let go of their arrays."""
        self.untold: set[int] = set()
        """Ops on the fast path of whose end there it has not reported yet."""
        self._slices: dict[int, int] = {}
        """Slices of each op that are not done."""
        self.threads = library.engine.Engine(node.group)
        before = lib.pccl_sim_threads()
        self.threads.divide(threads)
        self.numbers = range(before + 1, before + 1 + threads) if threads > 1 else range(before, before + 1)
        self._event_fds: list[int] = self.threads.event_fds
        assert isinstance(node.fast_path, RealFastPath)
        self.fast_path = node.fast_path
        self.fast_path.attach(self.threads, rng)
        self.is_closed = False

    # What the machine and callers want of it.

    def submit(self, effect: ps.SubmitOp, style: Style, loan: Loan) -> None:
        spec = self.spec(effect, style, loan)
        request = self.threads.new_request()
        request.fill(effect, spec)
        is_fast = effect.op in self.fast_path.running
        threads = len(self.numbers)
        self._slices[effect.op] = 1 if is_fast or threads == 1 else request.slices(threads)
        if is_fast:
            self.untold.add(effect.op)
            self.fast_path.run(effect, spec)
        else:
            self.threads.submit(effect, spec)

    @staticmethod
    def spec(effect: ps.SubmitOp, style: Style, loan: Loan | None) -> OpSpec:
        is_rooted = style.collective in ROOTED
        return OpSpec(
            effect.tag,
            style.dtype,
            style.reduce_op,
            style.quantization,
            loan.buffers if loan is not None else Buffers(0, 0, style.count, None),
            style.algorithm,
            style.collective,
            Root(style.root, effect.ring[style.root]) if is_rooted else None,
            segment_bytes=style.segment_bytes,
            residuals=loan.residuals if loan is not None else None,  # type: ignore[arg-type]
        )

    def suits_fast_path(self, effect: ps.SubmitOp, style: Style) -> bool:
        request = self.threads.new_request()
        request.fill(effect, self.spec(effect, style, None))
        return len(self.numbers) == 1 or bool(request.slices(len(self.numbers)) == 1)

    def note_done(self, op: int) -> bool:
        """Note that a slice of an op is done. Return whether all are."""
        self._slices[op] -= 1
        return self._slices[op] == 0

    # What it reports.

    def has_events(self) -> bool:
        if self.is_closed:
            return False
        is_readable = self._library.lib.pccl_sim_is_readable
        return any(map(is_readable, self._event_fds))

    def poll(self) -> list[Report]:
        """Return what it has reported since."""
        if self.is_closed:
            return []
        reports = [report for event in self.threads.events() for report in self._report(event)]
        ran = [report for report in reports if report[0] == "ran"]
        ran.sort(key=lambda report: self.fast_path.submissions[report[1]].sequence)  # as of one tag
        return ran + [report for report in reports if report[0] != "ran"]

    def _report(self, event: Any) -> list[Report]:
        if isinstance(event, events.OpHandedOver | events.OpFastCompleted):
            self.untold.discard(event.op)
        kind = REPORTS.get(type(event))
        if kind is not None:
            return [(kind, event.op)]
        if isinstance(event, events.GroupFrozen):
            return [("frozen", event.epoch)]
        if isinstance(event, events.LinkDown):
            return [("lost", event.link)]
        if isinstance(event, events.LinkDegraded):
            return [("connection", event.link, event.thread, event.over_udp)]  # type: ignore[list-item]
        if isinstance(event, events.LinkLimited):
            return [("limited", event.link, event.thread, event.limit)]  # type: ignore[list-item]
        if isinstance(event, events.OpDetached):
            self.detaching.discard(event.op)
            return [("detached", event.op)]
        assert not isinstance(event, events.EngineFailed), event
        return []

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.fast_path.shut()
        self.threads.close()
        self.fast_path.end()
