"""The demo's supervisor: decides when to kill, start and admit peers, and runs their processes.

`Conductor` makes the decisions from messages and exits, without I/O, and returns actions:

Kill      when all peers have begun their all-reduces: each survivor then has ops that cannot end.
Start     the newcomer once the kill step is over, so that it has a few steps' time to load.
Show      a row of the table. A row is complete when as many peers have reported the step as took part in it. A lost
          peer leaves a gap, which is closed when a later row is complete.

A run without a step for `step_timeout_s` is given up with the position of each peer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from signal import SIGKILL
from typing import TypeAlias

import msgspec

from pccl.tools.demo import model
from pccl.tools.demo.plan import At, Finished, Message, Plan, StepDone, Synced, WorkerOptions
from pccl.tools.demo.report import Display, Event, Joined, Killed, Report, Row, Survivor, megabytes
from pccl.tools.harness import MASTER_READY, MASTER_SHOWS, ONE_THREAD, Child, Closing, Processes, decoded


@dataclass(frozen=True)
class Start:
    peer: int


@dataclass(frozen=True)
class Kill:
    peer: int


@dataclass(frozen=True)
class Show:
    row: Row


Action: TypeAlias = Start | Kill | Show

_POSITIONS = {
    "starting": "is still starting",
    "connecting": "waits for the master to admit it",
    "gathering": "waits for the initial peers",
    "admitting": "waits for the newcomer before step {step}",
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
        """The last position of each running worker."""
        self.rows: list[Row] = []
        self.killed: Killed | None = None
        self.joined: Joined | None = None
        self.survivors: list[Survivor] = []
        self.problems: list[str] = []
        self.given_up = False
        self._reports: dict[int, dict[int, StepDone]] = defaultdict(dict)
        self._newcomer_started = False

    @property
    def over(self) -> bool:
        return self.given_up or not self.peers

    def start(self) -> list[Action]:
        return [self._start(peer) for peer in range(self._plan.peers)]

    def receive(self, message: Message, now_s: float) -> list[Action]:
        """Take a worker's message and return what to do."""
        plan = self._plan
        match message:
            case At(peer=peer):
                if peer in self.peers:
                    self.peers[peer] = message
                return self._kill_if_due()
            case Synced(peer=peer):
                self._progress_s = now_s
                if peer == plan.newcomer:
                    self.joined = Joined(peer, message.step + 1, message.received_bytes, message.seconds)
            case StepDone(peer=peer, step=step):
                self._progress_s = now_s
                self._reports[step][peer] = message
                return [*self._start_newcomer_if_due(step), *self._complete_rows()]
            case Finished(peer=peer):
                self._progress_s = now_s
                self.survivors.append(Survivor(peer, message.step, message.revision, message.digest))
                self.survivors.sort(key=lambda survivor: survivor.peer)
        return []

    def exited(self, peer: int, returncode: int, errors: str) -> list[Action]:
        """Take the exit of a worker with the end of its standard error, and return what to do."""
        self.peers.pop(peer, None)
        planned = peer == self._plan.victim and self.killed is not None and returncode == -SIGKILL
        if returncode != 0 and not planned:
            how = f"exit code {returncode}" if returncode > 0 else f"signal {-returncode}"
            self.problems.append(f"peer {peer} ended by itself with {how}" + (f": {errors}" if errors else ""))
            if not self._reports:
                self._give_up("a peer was lost before training began")
        return self._complete_rows(everything=not self.peers)

    def master_exited(self, returncode: int, errors: str) -> None:
        self._give_up(f"the master ended with exit code {returncode}" + (f": {errors}" if errors else ""))

    def deadline_s(self) -> float:
        """The time for `overdue` to give the run up."""
        return self._progress_s + self._plan.step_timeout_s

    def overdue(self, now_s: float) -> None:
        """Give the run up if no step has ended for too long."""
        if now_s < self.deadline_s() or self.over:
            return
        positions = []
        for peer, at in sorted(self.peers.items()):
            positions.append(f"peer {peer} {_POSITIONS[at.doing].format(step=at.step, done=at.step - 1)}")
        self._give_up(f"no step has ended for {self._plan.step_timeout_s:g} s: {'; '.join(positions)}")

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

    def _kill_if_due(self) -> list[Action]:
        plan = self._plan
        if plan.victim not in self.peers or self.killed is not None:
            return []
        in_flight = [
            at.launched
            for at in self.peers.values()
            if at.doing == "reducing" and at.step == plan.kill_step and at.launched
        ]
        if len(in_flight) < len(self.peers):
            return []
        victim = self.peers[plan.victim]
        self.killed = Killed(plan.victim, victim.step, victim.launched, max(in_flight))
        return [Kill(plan.victim)]

    def _complete_rows(self, everything: bool = False) -> list[Action]:
        """Return the rows that have become complete, in order; with `everything` also the others."""
        complete = [
            step
            for step, reports in self._reports.items()
            if reports and len(reports) >= min(report.world_size for report in reports.values())
        ]
        last = max(self._reports, default=-1) if everything else max(complete, default=-1)
        shown: list[Action] = []
        while len(self.rows) <= last and (reports := self._reports.get(len(self.rows))):
            self.rows.append(self._row(len(self.rows), reports))
            shown.append(Show(self.rows[-1]))
        return shown

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
        return events + [Event("lost", "a peer was lost")] * (lost - len(events))


class Supervisor(Closing):
    """The processes of one run: `with Supervisor(...) as supervisor: report = supervisor.run()`."""

    def __init__(self, plan: Plan, display: Display, http: str | None = None) -> None:
        """`http` is the address of the master's page, None for none."""
        self._plan = plan
        self._http = http
        self._display = display
        self._processes = Processes(ONE_THREAD)
        self._master: Child | None = None
        self._workers: dict[int, Child] = {}
        self._address = ""
        self._conductor = Conductor(plan, time.monotonic())

    def run(self) -> Report:
        """Run to the end, or until the conductor gives up."""
        started_s = time.monotonic()
        _, validation = model.split(self._plan.shards)
        unigram_bits = model.unigram_entropy_bits(model.read(validation))
        conductor = self._conductor
        shown = ["--http", self._http] if self._http is not None else []
        self._master = self._processes.start("master", "pccl", "master", "--listen", "127.0.0.1:0", *shown)
        while not self._address and not conductor.given_up:
            self._wait()
        if not conductor.given_up:
            self._do(conductor.start())
        while not conductor.over:
            self._wait()
        return Report(
            plan=self._plan,
            unigram_bits=unigram_bits,
            rows=conductor.rows,
            killed=conductor.killed,
            joined=conductor.joined,
            survivors=conductor.survivors,
            problems=conductor.problems,
            seconds=time.monotonic() - started_s,
        )

    def close(self) -> None:
        self._processes.close()

    def _wait(self) -> None:
        """Handle the next message, exit or timeout."""
        conductor = self._conductor
        event = self._processes.next_event(max(0.0, conductor.deadline_s() - time.monotonic()))
        if event is None:
            conductor.overdue(time.monotonic())
            return
        child, line = event
        if child is self._master:
            if isinstance(line, int):
                conductor.master_exited(line, child.last_errors())
            elif line.startswith(MASTER_READY):
                self._address = line.removeprefix(MASTER_READY).decode().strip()
            elif line.startswith(MASTER_SHOWS):
                self._display.page(line.removeprefix(MASTER_SHOWS).decode().strip())
        elif isinstance(line, int):
            peer = next(peer for peer, each in self._workers.items() if each is child)
            self._do(conductor.exited(peer, line, child.last_errors()))
        elif (message := decoded(line, Message)) is not None:
            self._do(conductor.receive(message, time.monotonic()))
        self._display.moved(conductor.peers)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Kill(peer):
                    self._workers[peer].popen.kill()
                case Start(peer):
                    options = msgspec.json.encode(WorkerOptions(self._address, peer, self._plan)).decode()
                    self._workers[peer] = self._processes.start(f"peer {peer}", "pccl.tools.demo.worker", options)
                case Show(row):
                    self._display.row(row)
