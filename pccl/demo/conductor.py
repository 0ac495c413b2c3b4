"""Decides what the supervisor does, from the workers' messages. There is no I/O, and the time is an argument.

Theory of operation. The supervisor feeds messages and exits; each call returns the actions to be done now. Three
actions make the show:

*Kill.* The victim is killed when all peers have begun their all-reduces: then each survivor has ops that cannot end,
and must abort and retry them.

*Start.* The newcomer is started once the kill is over (or would have been), so that it has a few steps' time to load.

*Connect.* The newcomer is told to connect once some peer has ended the step before the join step. By then every peer
has polled for the last time before the join step, so the newcomer is seen by the poll of that step and of no other.

Rows are made in order. A row is complete when as many peers have reported the step as there were in it; a peer that
is lost before it reports leaves a gap, which is closed when a later row is complete.

Nothing here waits for ever: a run in which no step ends for `step_timeout_s` is given up, with a sentence that
says where each peer stands.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from signal import SIGKILL
from typing import TypeAlias

import msgspec

from pccl.demo.messages import At, Finished, Message, Ready, StepDone, Synced
from pccl.demo.plan import Plan
from pccl.demo.report import Event, Joined, Killed, Row, Survivor, megabytes


@dataclass(frozen=True)
class Start:
    """The supervisor is to start this worker."""

    peer: int


@dataclass(frozen=True)
class Kill:
    """The supervisor is to send this worker SIGKILL, now."""

    peer: int


@dataclass(frozen=True)
class Connect:
    """The supervisor is to tell the newcomer to connect."""

    peer: int


@dataclass(frozen=True)
class Show:
    """A row is complete, for the supervisor to show."""

    row: Row


Action: TypeAlias = Start | Kill | Connect | Show

_WAITS = {
    "starting": "is still starting",
    "connecting": "waits to be let in by the master",
    "gathering": "waits for the initial peers to be there",
    "admitting": "is in are_peers_pending or update_topology before step {step}",
    "syncing": "is in sync_shared_state before step {step}",
    "training": "trains in step {step}",
    "reducing": "is in the all-reduce of step {step}",
    "evaluating": "measures the validation loss after step {done}",
}


class Conductor:
    """The decisions of one run, from the first start to the last exit."""

    def __init__(self, plan: Plan, now_s: float) -> None:
        self._plan = plan
        self._progress_s = now_s
        self.peers: dict[int, At] = {}
        """The last position of each worker that runs."""
        self.rows: list[Row] = []
        self.killed: Killed | None = None
        self.joined: Joined | None = None
        self.survivors: list[Survivor] = []
        self.problems: list[str] = []
        self.given_up = False
        self._reports: dict[int, dict[int, StepDone]] = defaultdict(dict)
        self._kill_sent = False
        self._newcomer_started = False
        self._newcomer_ready = False
        self._connect_sent = False
        self._unexplained: list[int] = []  # exits that no row has told about yet

    @property
    def over(self) -> bool:
        return self.given_up or not self.peers

    def start(self) -> list[Action]:
        return [self._start(peer) for peer in range(self._plan.peers)]

    def heard(self, message: Message, now_s: float) -> list[Action]:
        """Take a worker's message, and return what to do."""
        plan = self._plan
        match message:
            case At(peer=peer):
                if peer in self.peers:
                    self.peers[peer] = message
                return self._kill_if_all_reduce()
            case Ready():
                self._newcomer_ready = True
                return self._connect_if_due()
            case Synced(peer=peer):
                self._progress_s = now_s
                if peer == plan.newcomer:
                    self.joined = Joined(peer, message.step + 1, message.received_bytes, message.seconds)
            case StepDone(peer=peer, step=step):
                self._progress_s = now_s
                self._reports[step][peer] = message
                return [*self._start_newcomer_if_due(step), *self._connect_if_due(), *self._rows()]
            case Finished(peer=peer):
                self._progress_s = now_s
                self.survivors.append(Survivor(peer, message.step, message.revision, message.digest))
                self.survivors.sort(key=lambda survivor: survivor.peer)
        return []

    def exited(self, peer: int, returncode: int, last_words: str) -> list[Action]:
        """Take the end of a worker and the end of its standard error, for the report. Returns what to do."""
        self.peers.pop(peer, None)
        planned = peer == self._plan.victim and self._kill_sent and returncode == -SIGKILL
        if returncode != 0:
            self._unexplained.append(peer)
        if returncode != 0 and not planned:
            how = f"exit code {returncode}" if returncode > 0 else f"signal {-returncode}"
            self.problems.append(f"peer {peer} ended by itself with {how}" + (f": {last_words}" if last_words else ""))
            if not self._reports:
                self._give_up("a peer was lost before training began")
        return self._rows(everything=not self.peers)

    def master_exited(self, returncode: int, last_words: str) -> None:
        self._give_up(f"the master ended with exit code {returncode}" + (f": {last_words}" if last_words else ""))

    def deadline_s(self) -> float:
        """The time at which `overdue` gives the run up, unless something moves before."""
        return self._progress_s + self._plan.step_timeout_s

    def overdue(self, now_s: float) -> None:
        """Give the run up if no step has ended for too long, and return what to do."""
        if now_s < self.deadline_s() or self.over:
            return
        stands = "; ".join(f"peer {peer} {_where(at)}" for peer, at in sorted(self.peers.items()))
        self._give_up(f"no step has ended for {self._plan.step_timeout_s:g} s: {stands}")

    def _give_up(self, problem: str) -> None:
        self.problems.append(problem)
        self.given_up = True

    def _start(self, peer: int) -> Action:
        self.peers[peer] = At(peer=peer, step=0, doing="starting")
        return Start(peer)

    def _start_newcomer_if_due(self, step_done: int) -> list[Action]:
        newcomer = self._plan.newcomer
        if newcomer is None or self._newcomer_started or step_done < self._plan.kill_step:
            return []
        self._newcomer_started = True
        return [self._start(newcomer)]

    def _kill_if_all_reduce(self) -> list[Action]:
        plan = self._plan
        if plan.victim not in self.peers or self._kill_sent:
            return []
        in_flight = [
            at.launched
            for at in self.peers.values()
            if at.doing == "reducing" and at.step == plan.kill_step and at.launched
        ]
        if len(in_flight) < len(self.peers):
            return []
        self._kill_sent = True
        victim = self.peers[plan.victim]
        self.killed = Killed(plan.victim, victim.step, victim.launched, max(in_flight))
        return [Kill(plan.victim)]

    def _connect_if_due(self) -> list[Action]:
        newcomer = self._plan.newcomer
        due = self._newcomer_ready and self._reports.get(self._plan.join_step - 1) and not self._connect_sent
        if newcomer is None or not due:
            return []
        self._connect_sent = True
        return [Connect(newcomer)]

    def _rows(self, everything: bool = False) -> list[Action]:
        """Return an action for each row that has become complete, in order; with `everything` also for all others."""
        complete = [
            step
            for step, reports in self._reports.items()
            if reports and len(reports) >= min(report.world_size for report in reports.values())
        ]
        last = max(self._reports, default=-1) if everything else max(complete, default=-1)
        shown = []
        while len(self.rows) <= last:
            step = len(self.rows)
            if not (reports := self._reports.get(step)):
                break
            self.rows.append(self._row(step, reports))
            shown.append(Show(self.rows[-1]))
        return list(shown)

    def _row(self, step: int, reports: dict[int, StepDone]) -> Row:
        world_size = min(report.world_size for report in reports.values())
        admitted = max(report.admitted for report in reports.values())
        aborted = max(report.aborted for report in reports.values())
        before = self.rows[-1].world_size if self.rows else world_size
        events = []
        if admitted:
            events.append(self._joined_event(step, admitted))
        events += self._lost_events(step, before + admitted - world_size)
        if aborted:
            events.append(Event("retried", f"{aborted} all-reduce{'s' * (aborted > 1)} aborted and retried"))
        if self.killed and self.killed.step == step:
            aborts = {peer: report.aborted for peer, report in sorted(reports.items())}
            self.killed = msgspec.structs.replace(self.killed, aborted=aborts)
        measured = [report.bits_per_byte for report in reports.values() if report.bits_per_byte is not None]
        return Row(
            step=step,
            bits_per_byte=measured[0] if measured else None,
            world_size=world_size,
            sent_bytes=sum(report.sent_bytes for report in reports.values()),
            received_bytes=sum(report.received_bytes for report in reports.values()),
            seconds=max(report.seconds for report in reports.values()),
            events=events,
            agreed=len({report.world_size for report in reports.values()}) == 1,
        )

    def _joined_event(self, step: int, admitted: int) -> Event:
        if admitted == 1 and self.joined and self.joined.step == step:
            synced = f"synced {megabytes(self.joined.received_bytes)} in {self.joined.sync_seconds * 1000:.0f} ms"
            return Event("joined", f"peer {self.joined.peer} joined, {synced}", self.joined.peer)
        return Event("joined", f"{admitted} joined")

    def _lost_events(self, step: int, lost: int) -> list[Event]:
        events = []
        if lost > 0 and self.killed and self.killed.step == step:
            killed = self.killed
            text = f"peer {killed.peer} lost: killed with {killed.launched} of {killed.of} all-reduces begun"
            events.append(Event("lost", text, killed.peer))
            lost -= 1
        for _ in range(lost):
            # Survivors notice a loss before its exit is seen here, or after.
            others = [peer for peer in self._unexplained if peer != self._plan.victim or not self.killed]
            peer = others[0] if others else None
            if peer is not None:
                self._unexplained.remove(peer)
            events.append(Event("lost", "a peer was lost" if peer is None else f"peer {peer} lost", peer))
        return events


def _where(at: At) -> str:
    return _WAITS[at.doing].format(step=at.step, done=at.step - 1)
