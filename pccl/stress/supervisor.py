"""Runs the processes of a stress run: starts, hears, disturbs, judges, and never leaves one behind.

Theory of operation. Only the main thread decides; it sleeps on one queue until something is heard or due. For each
process a thread reads its output into the queue until it ends, then puts its exit. All processes are in the group of a
`Guard`, so they end with this one however it ends, and a terminal's Ctrl-C reaches this process only. Standard error
goes to a file per process, in a folder that is kept only if something went wrong. What a process must do is written to
its standard input.

A run has three parts: peers are disturbed until the time is over; then all who are left must come together, every one
in everybody's results; then they are dismissed and must end by themselves. The first problem ends the run.
"""

from __future__ import annotations

import queue
import secrets
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random
from types import TracebackType

import msgspec

from pccl import PCCLError
from pccl.launcher import Child, Guard, Heard, local_environment, module_command
from pccl.status import RunStatus, run_status
from pccl.stress.checker import Checker
from pccl.stress.churn import AIM_FOR_S, Action, Churn, Dismiss, Hit, Start
from pccl.stress.deafness import LISTENING_HOST, HeldPort, Place, place
from pccl.stress.display import Display
from pccl.stress.interrupts import Interrupts
from pccl.stress.masters import PEER_TIMEOUT_S, PROGRESS_S, Masters
from pccl.stress.messages import (
    At,
    BeDeaf,
    Joined,
    Leave,
    Left,
    Message,
    SessionOver,
    Stepped,
    WorkerOptions,
    line,
)
from pccl.stress.plan import Plan
from pccl.stress.report import Disturbances, Report
from pccl.stress.splits import MASTER, Splits, may_be_lost
from pccl.stress.values import SLOTS, op_count

LEADING = "leading"
MASTER_READY = b"pccl master listening on "
TICK_S = 0.25
STARTS_WITHIN = 3
"""A process that loads its modules on a busy machine may take this many times longer than a call."""
LOGS_KEPT = 40
"""Of processes that have ended as they should: what led to a failure may be in them."""
STATUS_S = 2.0
KILL_S = 2.0
"""A newcomer may be refused so long after a kill, for want of a link to the one that was killed."""
LOOK_S = 1.0
"""Between two looks at who leads whom, until all are together."""
STACKS_S = 3.0
LONG_STEP_S = 1.0
"""What lasts longer is noted among the events."""
BEFORE_STEP_S = 2.0
"""What was done to peers so short a time before a long step is told with it."""
EVENTS_KEPT = 500
# Many peers on few cores: threads of one array operation would only wait for each other.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PCCL_LOG_LEVEL": "INFO",
    "PYTHONFAULTHANDLER": "1",  # the master shows its stacks on SIGABRT
}


@dataclass
class _Peer:
    number: int
    slot: int
    group: int
    process: Child
    at: At
    heard_at: float
    is_joined: bool = False
    stepped: Stepped | None = None
    """Its last step; none since something was done to it."""
    hit: Hit | None = None
    """What will be, or has been, done to it."""
    hit_at: float | None = None
    thaw_at: float | None = None
    """It is frozen."""
    is_dismissed: bool = False
    has_left: bool = False

    @property
    def is_killed(self) -> bool:
        return self.hit is not None and self.hit.freeze_s is None and self.hit_at is None

    @property
    def is_doomed(self) -> bool:
        """It is about to end, or has ended."""
        return self.is_dismissed or (self.hit is not None and self.hit.freeze_s is None)

    @property
    def is_sound(self) -> bool:
        """It takes part in ops, as far as is known."""
        return self.is_joined and not self.is_doomed and self.thaw_at is None and self.stepped is not None

    @property
    def name(self) -> str:
        """By which the run knows it."""
        return f"peer {self.number}"

    def __str__(self) -> str:
        return f"{self.name} (slot {self.slot}, group {self.group})"


@dataclass
class _Seat:
    """An address of a master: one process after the other."""

    number: int
    address: str
    process: Child
    is_standby: bool = False
    starts: int = 1
    is_listening: bool = False

    def __str__(self) -> str:
        return f"standby {self.number}" if self.number else "the master"


class Supervisor:
    """One run: `with Supervisor(...) as supervisor: report = supervisor.run()`."""

    def __init__(self, plan: Plan, display: Display) -> None:
        self._plan = plan
        self._display = display
        self._logs = Path(tempfile.mkdtemp(prefix="pccl-stress-"))
        self._keeps_logs = True
        self._events = (self._logs / "events.log").open("w", buffering=1)
        self._noted: deque[tuple[float, str]] = deque(maxlen=EVENTS_KEPT)
        self._longest_s = LONG_STEP_S
        self._longest_step: list[str] = []
        self._guard = Guard()
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._seats: list[_Seat] = []
        self._peers: dict[Child, _Peer] = {}
        self._ended: deque[Child] = deque()
        self._next_peer = 1
        self._killed_at = float("-inf")
        """When the last peer was."""
        self._free_slots = deque(range(SLOTS))
        self._checker = Checker(op_count(plan.threads))
        self._done = Disturbances()
        self._problems = self._checker.problems
        self._start_s = time.monotonic()
        self._churn = Churn(plan, Random(f"{plan.seed} churn"), self._start_s)
        self._masters = Masters(plan, Random(f"{plan.seed} masters"), self._start_s)
        self._splits = Splits(plan, Random(f"{plan.seed} splits"), self._start_s)
        self._interrupts = Interrupts(plan, Random(f"{plan.seed} interrupts"), self._start_s)
        self._ports = [HeldPort() for _ in range(SLOTS if plan.partition is not None else 0)]
        self._master_ports: list[HeldPort] = []
        self._deaf_to: dict[Child, list[int]] = {}
        """As each process was told last."""
        self._environment = {**local_environment(), **_ENVIRONMENT}
        self._token = secrets.token_urlsafe() if plan.token or plan.encrypt else ""
        if self._token:
            self._environment["PCCL_TOKEN"] = self._token
        self._environment.pop("PCCL_STATE", None)
        self._environment["PCCL_ENCRYPT"] = "1" if plan.encrypt else "0"

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.close()
        for process in [*self._peers, *self._ended, *(seat.process for seat in self._seats)]:
            process.close()
        for port in [*self._ports, *self._master_ports]:
            port.close()
        self._events.close()
        if not self._keeps_logs or isinstance(error, KeyboardInterrupt):
            shutil.rmtree(self._logs)

    def run(self) -> Report:
        """To the end of the time, or to the first problem."""
        self._start_masters()
        if not self._problems:
            for action in self._churn.initial():
                self._act(action)
            self._disturb()
            self._heal(float("inf"))
            self._come_together()
            self._dismiss()
        if not self._problems:
            self._checker.settle(time.monotonic(), is_over=True)
        self._keeps_logs = bool(self._problems)
        return Report(
            plan=self._plan,
            seconds=time.monotonic() - self._start_s,
            counts=self._checker.counts,
            disturbances=self._done,
            problems=list(self._problems),
            longest_step=self._longest_step,
            logs=str(self._logs) if self._problems else None,
        )

    # The parts of a run.

    def _disturb(self) -> None:
        end_s = time.monotonic() + 60 * self._plan.minutes
        while not self._problems and (now := time.monotonic()) < end_s:
            if now >= self._churn.next_at:
                peers = self._peers.values()
                targets = [peer.number for peer in peers if peer.hit is None and not peer.is_dismissed]
                for action in self._churn.disturb(now, len(peers), sum(peer.is_doomed for peer in peers), targets):
                    self._act(action)
            if now >= self._splits.next_at:
                self._split(now)
            if now >= self._interrupts.next_at:
                self._interrupt(now)
            if now >= self._masters.next_at:
                self._replace_master()
            due = (self._churn.next_at, self._splits.next_at, self._interrupts.next_at, self._masters.next_at)
            self._wait(min(end_s, *due))

    def _come_together(self) -> None:
        """Everybody who is left must take part in an op with everybody else of the group."""
        for peer in self._peers.values():
            if peer.thaw_at is not None:
                peer.thaw_at = time.monotonic()
            elif peer.hit is not None and not peer.is_killed:
                peer.hit = peer.hit_at = None
        start_s = time.monotonic()
        look_at = start_s
        limit_s = STARTS_WITHIN * self._plan.hang_s
        while not self._problems and not self._are_together():
            if time.monotonic() > look_at:
                self._dissolve_second_runs()
                look_at = time.monotonic() + LOOK_S
            if time.monotonic() > start_s + limit_s:
                seen = {str(peer): peer.stepped for peer in self._peers.values()}
                self._stuck(f"those who are left did not come together within {limit_s:g} s; their last steps: {seen}")
            self._wait(min(look_at, start_s + limit_s))

    def _are_together(self) -> bool:
        if any(peer.is_killed or peer.is_dismissed or peer.thaw_at is not None for peer in self._peers.values()):
            return False  # its end, or its return, is still to be heard of
        for group in range(self._plan.groups):
            peers = [peer for peer in self._peers.values() if peer.group == group]
            slots = sorted(peer.slot for peer in peers)
            for peer in peers:
                if not peer.is_joined or peer.stepped is None:
                    return False
                outcomes = peer.stepped.outcomes
                if len(peers) > 1 and not (outcomes and all(each.participants == slots for each in outcomes)):
                    return False
        return True

    def _dismiss(self) -> None:
        for peer in self._peers.values():
            self._ask_to_leave(peer)
        while not self._problems and self._peers:
            self._wait(time.monotonic() + TICK_S)

    # Acting.

    def _note(self, what: str) -> None:
        """For whoever looks into a failure; the clock is that of the peers' logs."""
        line = f"{datetime.now().isoformat(' ', 'milliseconds')} {what}"
        self._events.write(line + "\n")
        self._noted.append((time.monotonic(), line))

    def _act(self, action: Action) -> None:
        match action:
            case Start(group):
                self._start(group)
            case Dismiss(number):
                self._done.dismissed += 1
                self._ask_to_leave(self._peer(number))
            case Hit():
                peer = self._peer(action.peer)
                peer.hit = action
                if action.aim is None:
                    self._hit(peer)
                else:
                    peer.hit_at = time.monotonic() + AIM_FOR_S

    def _peer(self, number: int) -> _Peer:
        return next(peer for peer in self._peers.values() if peer.number == number)

    def _child(self, name: str, command: list[str]) -> Child:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        return Child(name, command, guard=self._guard, heard=self._heard, environment=self._environment, log=log)

    def _start(self, group: int) -> None:
        number, slot = self._next_peer, self._free_slots.popleft()
        self._next_peer += 1
        where = self._place(slot) if self._ports else None
        options = WorkerOptions(self._addresses, number, slot, group, self._plan, where)
        command = module_command("pccl.stress.worker", msgspec.json.encode(options).decode())
        process = self._child(f"peer {number}", command)
        now = time.monotonic()
        self._peers[process] = _Peer(number, slot, group, process, At("starting", 0), now)
        self._checker.started(number, slot, group)
        if self._masters.is_starting(now):
            self._checker.excuse(number, now)
        self._make_deaf()
        self._note(f"start {self._peers[process]}")
        self._done.started += 1
        self._done.peers_most = max(self._done.peers_most, len(self._peers))

    def _ask_to_leave(self, peer: _Peer) -> None:
        if not peer.is_dismissed:
            self._note(f"dismiss {peer}")
            self._masters.disturbed()
            peer.is_dismissed = True
            peer.process.say(line(Leave()))

    def _hit(self, peer: _Peer) -> None:
        hit = peer.hit
        assert hit is not None
        self._masters.disturbed()
        kind = "kill" if hit.freeze_s is None else f"freeze for {hit.freeze_s:.2f} s:"
        self._note(f"{kind} {peer}, {peer.at.doing} at revision {peer.at.revision}")
        peer.hit_at = None
        if hit.freeze_s is None:
            self._done.killed += 1
            self._killed_at = time.monotonic()
            peer.process.popen.kill()
        else:
            self._done.frozen += 1
            peer.process.popen.send_signal(signal.SIGSTOP)
            peer.thaw_at = time.monotonic() + hit.freeze_s
            self._doubt(peer)

    def _interrupt(self, now: float) -> None:
        """Not those that do not heed it yet."""
        targets = [peer for peer in self._peers.values() if peer.at.doing != "starting" and peer.thaw_at is None]
        number = self._interrupts.target(now, [peer.number for peer in targets])
        if number is not None:
            peer = self._peer(number)
            self._note(f"interrupt {peer}, {peer.at.doing} at revision {peer.at.revision}")
            self._masters.disturbed()
            self._done.interrupted += 1
            peer.process.popen.send_signal(signal.SIGINT)

    def _thaw(self, peer: _Peer) -> None:
        self._note(f"thaw {peer}")
        peer.process.popen.send_signal(signal.SIGCONT)
        peer.hit = peer.thaw_at = None
        self._doubt(peer)
        for each in self._peers.values():
            # Nobody could be expected to go on before, so everybody's time begins now.
            each.heard_at = time.monotonic()

    def _doubt(self, peer: _Peer) -> None:
        """It may lose its place, and takes part in ops again when it says so."""
        peer.stepped = None
        self._checker.excuse(peer.number, time.monotonic())

    # Masters.

    @property
    def _addresses(self) -> str:
        return ",".join(seat.address for seat in self._seats)

    def _start_masters(self) -> None:
        """The standbys begin once the address of the first is known."""
        limit_s = self._start_s + STARTS_WITHIN * self._plan.hang_s
        for number in range(1 + self._plan.standbys):
            port = HeldPort()
            self._master_ports.append(port)
            address = f"{LISTENING_HOST}:{port.number}"
            seat = _Seat(number, address, self._master(number, 1, address, self._addresses), number > 0)
            self._seats.append(seat)
            while not seat.is_listening and not self._problems:
                self._wait(limit_s)

    def _master(self, number: int, starts: int, address: str, standby_of: str) -> Child:
        name = f"standby {number}" if number else "master"
        arguments = ["--listen", address, "--peer-timeout", str(PEER_TIMEOUT_S)]
        if self._plan.keeps_state:
            arguments += ["--state", str(self._logs / f"state-{number}")]
        if standby_of:
            arguments += ["--standby-of", standby_of]
        elif starts == 1:
            arguments.append("--found")
        return self._child(f"{name} {starts}", module_command("pccl.stress.master", *arguments))

    def _replace_master(self) -> None:
        """Kills the one that leads, or any if none does, and starts another one in its place."""
        leading = [(seat, status) for seat, status in self._ask_masters() if status.role == LEADING]
        if leading:
            seat, _ = max(leading, key=lambda each: (len(each[1].members), each[1].term))
            self._runs(status for _, status in leading)
        else:
            seat = self._masters.any_of(self._seats)
        now = time.monotonic()
        others = [other for other in self._seats if other is not seat]
        seat.is_standby = self._masters.kill(now, any(not other.is_standby for other in others))
        is_calm = all(peer.is_sound for peer in self._peers.values()) and not self._splits.active
        if not is_calm or not leading:
            self._masters.disturbed()
        how = "which stands by from now on" if seat.is_standby else "which is begun anew"
        self._note(f"kill {seat}, which {'leads' if leading else 'leads nothing'} and {how}")
        self._done.masters_killed += 1
        self._done.masters_stood_by += seat.is_standby
        seat.process.popen.kill()
        seat.process.popen.wait()
        self._deaf_to.pop(seat.process, None)
        seat.process.close()
        self._ended.append(seat.process)
        seat.starts += 1
        seat.is_listening = False
        standby_of = ",".join(other.address for other in others) if seat.is_standby else ""
        seat.process = self._master(seat.number, seat.starts, seat.address, standby_of)
        self._make_deaf()
        for peer in self._peers.values():
            if not peer.is_joined:
                self._checker.excuse(peer.number, now)  # it may find no master, or none that leads

    def _ask_masters(self) -> list[tuple[_Seat, RunStatus]]:
        """How things stand at those that answer."""
        found = []
        for seat in self._seats:
            with suppress(PCCLError):
                found.append((seat, run_status(seat.address, token=self._token, timeout=STATUS_S)))
        return found

    def _dissolve_second_runs(self) -> None:
        """Who was cut off from the master that leads when it came, or came while the master was dead and the others
        frozen or cut off, may have founded a run of its own. That has to end before all can come together."""
        members = self._runs([status for _, status in self._ask_masters() if status.role == LEADING])
        if len(members) < 2:
            return
        largest = max(members, key=lambda run: len(members[run]))
        for run, names in members.items():
            for peer in self._peers.values():
                if run != largest and peer.name in names - members[largest]:
                    self._note(f"{peer} is in another run than the most")
                    self._ask_to_leave(peer)

    def _runs(self, leading: Iterable[RunStatus]) -> dict[str, set[str]]:
        """Names of the peers of each run that is led. It is one where all can hear of the others in time."""
        members = {  # of a run that two think to lead, the later
            status.run: {member.name for member in status.members}
            for status in sorted(leading, key=lambda status: status.term)
        }
        if len(members) > 1 and self._plan.partition is None and not self._plan.freeze:
            self._problems.append(f"two masters lead, each a run of its own: {members}")
        return members

    # Splits.

    def _split(self, now: float) -> None:
        split = self._splits.split(now, [peer.slot for peer in self._peers.values() if not peer.is_doomed])
        if split is not None:
            self._note(str(split))
            self._done.split += 1
            self._make_deaf()
            self._masters.disturbed()

    def _heal(self, now: float) -> None:
        for split in self._splits.heal(now):
            self._note(f"heal {split}")
            self._make_deaf()
            self._masters.disturbed()

    def _make_deaf(self) -> None:
        """Tells every process whom not to hear."""
        slots = {seat.process: MASTER - seat.number for seat in self._seats}
        slots.update((peer.process, peer.slot) for peer in self._peers.values())
        for process, slot in slots.items():
            deaf_to = self._splits.deaf_to(slot)
            if deaf_to != self._deaf_to.get(process, []):
                self._deaf_to[process] = deaf_to
                process.say(line(BeDeaf([self._place(other) for other in deaf_to])))

    def _place(self, slot: int) -> Place:
        if slot <= MASTER:
            return Place("", int(self._seats[MASTER - slot].address.rpartition(":")[2]))
        return place(slot, self._ports[slot].number)

    def _excuse(self) -> None:
        """Says who may lose its place, because of splits or since too few are left for a master to go on with. Looked
        up again and again, as peers come and go."""
        now = time.monotonic()
        peers = self._peers.values()
        groups = {peer.slot: peer.group for peer in peers if peer.is_sound}
        may_be_lost_now = {slot for split in self._splits.active for slot in may_be_lost(split, groups)}
        for peer in peers:
            if peer.slot in may_be_lost_now:
                peer.stepped = None
            self._checker.split(peer.number, peer.slot in may_be_lost_now, now)
        sound = sum(peer.is_sound for peer in peers)
        if self._masters.may_run_end(now, sound, sum(peer.is_joined for peer in peers) - sound):
            for peer in peers:
                self._checker.excuse(peer.number, now)

    # Hearing.

    def _wait(self, until_s: float) -> None:
        """Handles what is heard within a moment, and whatever is due."""
        due = [at for peer in self._peers.values() for at in (peer.hit_at, peer.thaw_at) if at is not None]
        due.append(self._splits.heals_at)
        now = time.monotonic()
        timeout_s = max(0.0, min(until_s, now + TICK_S, *due) - now)
        try:
            while True:
                process, heard = self._heard.get(timeout=timeout_s)
                timeout_s = 0.0
                self._handle(process, heard)
        except queue.Empty:
            pass
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.hit_at is not None and now >= peer.hit_at:
                self._hit(peer)
            elif peer.thaw_at is not None and now >= peer.thaw_at:
                self._thaw(peer)
        self._heal(now)
        self._excuse()
        self._checker.settle(now)
        self._look_for_hangs(now)
        places = {peer.number: peer.at for peer in self._peers.values()}
        self._display.moved(now - self._start_s, places, self._checker.counts, self._done)

    def _handle(self, process: Child, heard: bytes | int) -> None:
        if process not in self._peers:
            self._handle_master(process, heard)
            return
        peer = self._peers[process]
        if isinstance(heard, int):
            self._exited(peer, heard)
            return
        try:
            message: Message = msgspec.json.decode(heard, type=Message)
        except msgspec.DecodeError:
            return  # something printed by whatever the interpreter loads at its start
        peer.heard_at = time.monotonic()
        match message:
            case At():
                peer.at = message
                if peer.hit is not None and peer.hit.aim == message.doing:
                    peer.hit_at = time.monotonic() + peer.hit.delay_s
                    peer.hit = replace(peer.hit, aim=None)
            case Joined():
                peer.is_joined = True
                peer.stepped = None
            case SessionOver():
                is_link_lost = peer.heard_at < self._killed_at + KILL_S
                if not peer.is_joined and (is_link_lost or self._masters.is_starting(peer.heard_at)):
                    self._checker.excuse(peer.number, peer.heard_at)
                if message.is_own:
                    self._masters.disturbed()
                    self._masters.lost(peer.heard_at, peer.group)
                peer.is_joined = False
                peer.stepped = None
                self._note(f"{peer} {'left' if message.is_own else 'lost'} its session: {message.reason}")
            case Stepped():
                peer.stepped = message
                if message.outcomes:
                    self._note_progress(peer, peer.heard_at - message.seconds)
                if message.seconds > LONG_STEP_S:
                    self._note(f"{peer} needed {message.seconds:.2f} s for revision {message.revision}")
                if message.seconds > self._longest_s:
                    self._longest_s = message.seconds
                    since_s = time.monotonic() - message.seconds - BEFORE_STEP_S
                    self._longest_step = [line for at_s, line in self._noted if at_s >= since_s]
            case Left():
                peer.has_left = True
            case _:
                pass
        self._checker.heard(peer.number, message, peer.heard_at)

    def _handle_master(self, process: Child, heard: bytes | int) -> None:
        seat = next((seat for seat in self._seats if seat.process is process), None)
        if seat is None:
            return  # it was killed
        if isinstance(heard, int):
            self._problems.append(f"{seat} ended with {heard}:\n{process.last_words()}")
        elif heard.startswith(MASTER_READY):
            seat.address = heard.removeprefix(MASTER_READY).decode().strip()
            seat.is_listening = True
            self._masters.listens(time.monotonic())

    def _note_progress(self, peer: _Peer, begun_at: float) -> None:
        """A step with others, begun then, is over."""
        listened_at = self._masters.stepped(peer.group, begun_at)
        if listened_at is not None:
            self._done.succession_s = max(self._done.succession_s, peer.heard_at - listened_at)

    def _exited(self, peer: _Peer, returncode: int) -> None:
        del self._peers[peer.process]
        self._deaf_to.pop(peer.process, None)
        self._free_slots.append(peer.slot)
        self._checker.ended(peer.number, time.monotonic())
        self._masters.lost(time.monotonic(), peer.group)
        if not peer.is_killed and not (returncode == 0 and peer.has_left):
            self._problems.append(f"{peer} ended by itself with {returncode}:\n{peer.process.last_words()}")
        peer.process.close()
        self._ended.append(peer.process)
        if len(self._ended) > LOGS_KEPT:
            log = self._ended.popleft().log
            assert log is not None
            log.unlink()

    # Hangs.

    def _look_for_hangs(self, now: float) -> None:
        if self._problems or any(peer.thaw_at is not None for peer in self._peers.values()):
            return
        if now > self._masters.progress_due_at:
            limit_s = PEER_TIMEOUT_S + PROGRESS_S
            self._stuck(f"nobody has made a step in the {limit_s:g} s since a successor of the master listens")
            return
        late = []
        for peer in self._peers.values():
            limit_s = self._plan.hang_s * (STARTS_WITHIN if peer.at.doing == "starting" else 1)
            if not peer.is_killed and now - peer.heard_at > limit_s:
                late.append(peer)
        if late:
            self._stuck(f"a hang: {', '.join(str(peer) for peer in late)} said nothing for {self._plan.hang_s:g} s")

    def _stuck(self, what: str) -> None:
        """Names who waits in what, and has everybody write down all stacks."""
        now = time.monotonic()
        for peer in self._peers.values():
            peer.process.popen.send_signal(signal.SIGUSR1)
        for seat in self._seats:
            seat.process.popen.send_signal(signal.SIGABRT)
        time.sleep(STACKS_S)
        lines = [what]
        for peer in self._peers.values():
            lines.append(f"  {peer}: {peer.at.doing} at revision {peer.at.revision} for {now - peer.heard_at:.1f} s")
        lines += [f"the last words of {seat}:\n{seat.process.last_words()}" for seat in self._seats]
        self._problems.append("\n".join(lines))
