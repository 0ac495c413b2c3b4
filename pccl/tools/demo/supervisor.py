"""The demo's supervisor, which runs the processes and decides when to kill and start peers.

- It kills the victim when all peers have begun their all-reduces, so that each survivor has ops that cannot finish.
- It starts the newcomer once the kill step is over, so that the newcomer has a few steps' time to load.
- A row is complete when all peers that took part in the step have reported it. If a lost peer leaves a row
  incomplete, the row is shown when a later row is complete.

If no step ends for `step_timeout_s`, it gives up and reports what each peer is doing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from signal import SIGKILL

import msgspec

from pccl.tools.demo import model
from pccl.tools.demo.plan import At, Finished, Message, Plan, StepDone, WorkerOptions
from pccl.tools.demo.report import Display, Event, Joined, Killed, Report, Row, Survivor, megabytes
from pccl.tools.harness import ONE_THREAD, Child, Processes, decoded, master_line

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


class Supervisor:
    """The processes of one run. Call `run`, then `close`."""

    def __init__(self, plan: Plan, display: Display, processes: Processes | None = None) -> None:
        self._plan = plan
        self._display = display
        self._processes = processes or Processes(ONE_THREAD)
        self._address = ""
        self._workers: dict[Child, int] = {}
        self._peers: dict[int, At] = {}
        """The last reported activity of each running worker."""
        self._started_s = self._progress_s = time.monotonic()
        self._reports: dict[int, dict[int, StepDone]] = defaultdict(dict)
        self._newcomer_started = False
        self._given_up = False
        self._rows: list[Row] = []
        self._killed: Killed | None = None
        self._joined: Joined | None = None
        self._survivors: list[Survivor] = []
        self._problems: list[str] = []

    def run(self, http: str | None = None) -> Report:
        """Run until the end or until giving up. `http` is the address for the status page."""
        _, validation = model.split(self._plan.shards)
        unigram_bits = model.unigram_entropy_bits(model.read(validation))
        shown = ["--http", http] if http is not None else []
        self._processes.start("master", "pccl", "master", "--listen", "127.0.0.1:0", *shown)
        while not self._address and not self._given_up:
            self._wait()
        if not self._given_up:
            self.start()
        while not self.over:
            self._wait()
        return self.report(unigram_bits)

    def report(self, unigram_bits: float) -> Report:
        return Report(
            plan=self._plan,
            unigram_bits=unigram_bits,
            rows=self._rows,
            killed=self._killed,
            joined=self._joined,
            survivors=sorted(self._survivors, key=lambda survivor: survivor.peer),
            problems=self._problems,
            seconds=time.monotonic() - self._started_s,
        )

    def close(self) -> None:
        self._processes.close()

    @property
    def over(self) -> bool:
        return self._given_up or not self._peers

    def _wait(self) -> None:
        deadline_s = self._progress_s + self._plan.step_timeout_s
        event = self._processes.next_event(max(0.0, deadline_s - time.monotonic()))
        if event is None:
            self.give_up_without_progress()
            return
        child, line = event
        if child not in self._workers:
            self._handle_master(child, line)
        elif isinstance(line, int):
            self.exited(child, line)
        elif (message := decoded(line, Message)) is not None:
            self.receive(child, message)
        self._display.moved(self._peers)

    def _handle_master(self, child: Child, line: bytes | int) -> None:
        if isinstance(line, int):
            self._give_up(f"the master ended with exit code {line}{_after_colon(child.last_errors())}")
            return
        address, page = master_line(line)
        self._address = address or self._address
        if page:
            self._display.page(page)

    def start(self) -> None:
        for peer in range(self._plan.peers):
            self._start(peer)

    def _start(self, peer: int) -> None:
        self._peers[peer] = At(peer=peer, step=0, doing="starting")
        options = msgspec.json.encode(WorkerOptions(self._address, peer, self._plan)).decode()
        self._workers[self._processes.start(f"peer {peer}", "pccl.tools.demo.worker", options)] = peer

    def receive(self, child: Child, message: Message) -> None:
        peer = self._workers[child]
        if isinstance(message, At):
            self._peers[peer] = message
            self._kill_if_due()
            return
        self._progress_s = time.monotonic()
        match message:
            case StepDone(step=step):
                self._reports[step][peer] = message
                if peer == self._plan.newcomer and self._joined is None:
                    self._joined = Joined(peer, step, message.state_bytes, message.sync_seconds)
                if self._plan.join and not self._newcomer_started and step >= self._plan.kill_step:
                    self._newcomer_started = True
                    self._start(self._plan.peers)
                self._complete_rows()
            case Finished():
                self._survivors.append(Survivor(peer, message.step, message.revision, message.digest))

    def exited(self, child: Child, returncode: int) -> None:
        peer = self._workers[child]
        self._peers.pop(peer)
        is_planned = peer == self._plan.victim and self._killed is not None and returncode == -SIGKILL
        if returncode != 0 and not is_planned:
            how = f"exit code {returncode}" if returncode > 0 else f"signal {-returncode}"
            self._problems.append(f"peer {peer} exited unexpectedly with {how}{_after_colon(child.last_errors())}")
            if not self._reports:
                self._give_up("a peer was lost before training began")
        self._complete_rows(everything=not self._peers)

    def give_up_without_progress(self) -> None:
        positions = []
        for peer, at in sorted(self._peers.items()):
            positions.append(f"peer {peer} {_POSITIONS[at.doing].format(step=at.step, done=at.step - 1)}")
        self._give_up(f"no step has ended for {self._plan.step_timeout_s:g} s: {'; '.join(positions)}")

    def _give_up(self, problem: str) -> None:
        self._problems.append(problem)
        self._given_up = True

    def _kill_if_due(self) -> None:
        plan = self._plan
        if plan.victim not in self._peers or self._killed is not None:
            return
        in_flight = [
            at.launched
            for at in self._peers.values()
            if at.doing == "reducing" and at.step == plan.kill_step and at.launched
        ]
        if len(in_flight) == len(self._peers):
            victim = self._peers[plan.victim]
            self._killed = Killed(plan.victim, victim.step, victim.launched, max(in_flight))
            next(child for child, peer in self._workers.items() if peer == plan.victim).popen.kill()

    def _complete_rows(self, everything: bool = False) -> None:
        """Show the rows that have become complete, in order; with `everything`, also incomplete rows."""
        complete = [
            step
            for step, reports in self._reports.items()
            if reports and len(reports) >= min(report.world_size for report in reports.values())
        ]
        last = max(self._reports if everything else complete, default=-1)
        while len(self._rows) <= last and (reports := self._reports.get(len(self._rows))):
            self._rows.append(self._row(len(self._rows), reports))
            self._display.row(self._rows[-1])

    def _row(self, step: int, reports: dict[int, StepDone]) -> Row:
        world_size = min(report.world_size for report in reports.values())
        admitted = max(report.admitted for report in reports.values())
        aborted = max(report.aborted for report in reports.values())
        before = self._rows[-1].world_size if self._rows else world_size
        events = []
        if admitted:
            events.append(self._joined_event(step, admitted))
        events += self._lost_events(step, before + admitted - world_size)
        if aborted:
            events.append(Event("retried", f"{aborted} all-reduce{'s' * (aborted > 1)} aborted and retried"))
        if self._killed and self._killed.step == step:
            aborts = {peer: report.aborted for peer, report in sorted(reports.items())}
            self._killed = msgspec.structs.replace(self._killed, aborted=aborts)
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
        if admitted == 1 and self._joined and self._joined.step == step:
            synced = f"synced {megabytes(self._joined.received_bytes)} in {self._joined.sync_seconds * 1000:.0f} ms"
            return Event("joined", f"peer {self._joined.peer} joined, {synced}", self._joined.peer)
        return Event("joined", f"{admitted} joined")

    def _lost_events(self, step: int, lost: int) -> list[Event]:
        events = []
        if lost > 0 and self._killed and self._killed.step == step:
            killed = self._killed
            text = f"peer {killed.peer} lost: killed with {killed.launched} of {killed.of} all-reduces begun"
            events.append(Event("lost", text, killed.peer))
        return events + [Event("lost", "a peer was lost")] * (lost - len(events))


def _after_colon(text: str) -> str:
    return f": {text}" if text else ""
