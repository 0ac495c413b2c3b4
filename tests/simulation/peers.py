"""The peers' machines of a simulated run: they hear what their engines report, and what they decide is carried out.

The part that carries out each effect says so with `Peers.on`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pccl.protocol.peer import effects as ps
from pccl.types import Result
from tests.simulation.fast_path import OPS
from tests.simulation.node import Node
from tests.simulation.scene import Scene

Handler = Callable[[Node, Any], None]


class Peers:
    def __init__(self, scene: Scene, has_fast_path: bool) -> None:
        self.has_fast_path = has_fast_path
        """Ops may go past the machines."""
        self._scene = scene
        self._handlers: dict[type, Handler] = {}
        self.start_engine: Callable[[Node, int], None] = lambda node, threads: None
        """Starts a node's engine with that many threads."""
        self.is_real = False
        """Engines are real ones, all of whose reports are heard together."""
        self.on(ps.StartEngine, self._start_engine)
        self.on(ps.Installed, scene.checks.installed)
        self.on(ps.PeerLog, lambda node, effect: None)

    def on(self, kind: type, handler: Handler) -> None:
        """Have effects of this type carried out by `handler`."""
        assert kind not in self._handlers
        self._handlers[kind] = handler

    def settle(self, node: Node) -> None:
        """Carry out what a machine has decided, and open the fast path if it may be. To be called after each call of
        the machine."""
        if not node.is_alive or node.unfinished:
            return
        while True:
            while effects := node.machine.drain():
                if node.name in self._scene.dooms and self._is_cut_short(node, effects):
                    return
                self._carry_out(node, effects)
            start = node.machine.plain_start() if self.has_fast_path else None
            if start == node.fast_path.start:
                return
            self.take_over(node)
            if node.machine.plain_start() == start:
                node.fast_path.start = start

    def _carry_out(self, node: Node, effects: list[ps.Effect], rest: list[ps.Effect] | None = None) -> None:
        """Carry effects out, without `rest`."""
        end = next((effect for effect in [*effects, *(rest or ())] if isinstance(effect, ps.Ended)), None)
        for effect in effects:
            if isinstance(effect, ps.OpResult):
                self._scene.checks.op_result(node, effect, end)
            else:
                self._handlers[type(effect)](node, effect)

    def _is_cut_short(self, node: Node, effects: list[ps.Effect]) -> bool:
        """Whether a process is stopped or killed before it has carried out all of these effects. It has carried out
        those before that then."""
        carried_out = self._scene.before_doom(node, effects)
        if len(carried_out) == len(effects):
            return False
        node.unfinished = effects[len(carried_out) :]
        self._carry_out(node, carried_out, node.unfinished)
        self._scene.dooms.pop(node.name).strike()
        return True

    def go_on(self, node: Node) -> None:
        """Carry out what a process was stopped before."""
        effects, node.unfinished = node.unfinished, []
        self._carry_out(node, effects)
        self.settle(node)

    def take_over(self, node: Node) -> None:
        """Close the fast path, and have the machine hear of all ops. To be called before the machine is told what bears
        on ops."""
        if node.fast_path.start is not None:
            node.reports.extend(node.fast_path.close())
            self._hear(node, list(node.reports))

    def hear_all(self, node: Node) -> None:
        """Give all reports to a machine that may have a fast path."""
        if self.has_fast_path:
            node.poll()
            self._hear(node, list(node.reports))

    def hear_some(self, node: Node) -> None:
        """Have the machine hear the next reports of its engine."""
        if node.fast_path.start is not None and node.fast_path.closes_to_hear:
            node.reports.extend(node.fast_path.close())
        node.poll()
        count = len(node.reports) if self.is_real or not node.reports else self._scene.batch(len(node.reports))
        batch = [node.reports[at] for at in range(count)]
        if node.fast_path.start is not None and any(report[0] not in OPS for report in batch):
            node.reports.extend(node.fast_path.close())
            batch = list(node.reports)
        self._hear(node, batch)
        self.settle(node)

    def hand_over_all(self) -> bool:
        """Have the callers that wait on fast paths wait no longer there. Whether there were any."""
        were_any = False
        for node in self._scene.nodes:
            for op in node.fast_path.waiting if not node.is_frozen else ():
                node.reports.extend(node.fast_path.time_out(op))
                were_any = True
        return were_any

    def tick(self, node: Node) -> None:
        """Let the machine's timers fire whose time has come."""
        now = self._scene.clock(node)
        deadline = node.machine.deadline()
        if deadline is not None and deadline <= now:
            self.hear_all(node)
            node.machine.tick(now)
            self.settle(node)
            deadline = node.machine.deadline()
        assert deadline is None or deadline > now, "the runtime would spin"

    def _hear(self, node: Node, batch: list[tuple[str, int]]) -> None:
        """Have the machine hear these, the first of its reports."""
        for _ in batch:
            node.reports.popleft()
        ran = [report for report in batch if report[0] == "ran"]
        for kind, number, *thread in ran + [report for report in batch if report[0] != "ran"] if ran else batch:
            if kind in ("ran", "started"):
                node.fast_path.report((kind, number), node.machine, self._scene.clock(node))
            elif kind == "done":
                self._scene.checks.finds_done(node, number)
                node.machine.op_done(number, 10, 20)
            elif kind == "mismatch":
                node.machine.op_mismatch(number, "different arguments")
            elif kind == "ended":
                node.machine.op_ended(number, 10, 20)
            elif kind == "agreed":
                node.machine.op_completed(number)
            elif kind == "stopped":
                node.machine.op_frozen(number)
            elif kind == "frozen":
                node.machine.frozen(number)
            elif kind == "connection":
                node.machine.connection_lost(number, "connection reset", *thread)
            elif kind == "limited":
                node.machine.link_limited(number, *thread)
            elif kind == "refused":
                node.machine.op_refused(number, Result.INTERNAL_ERROR, "out of memory")
            else:
                assert kind == "lost"
                if number in node.broken:
                    node.lost_links.add(node.broken.pop(number))
                node.machine.link_lost(number, "connection reset")

    def _start_engine(self, node: Node, effect: ps.StartEngine) -> None:
        assert not node.links
        self.start_engine(node, effect.threads)
