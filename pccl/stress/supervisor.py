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
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random
from types import TracebackType

import msgspec

from pccl.launcher import Child, Guard, Heard, local_environment, module_command
from pccl.stress.checker import Checker
from pccl.stress.churn import AIM_FOR_S, Action, Churn, Dismiss, Hit, Start
from pccl.stress.deafness import HeldPort, Place, place
from pccl.stress.display import Display
from pccl.stress.masters import Masters
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
from pccl.stress.values import SLOTS

MASTER_READY = b"pccl master listening on "
TICK_S = 0.25
STARTS_WITHIN = 3
"""A process that loads its modules on a busy machine may take this many times longer than a call."""
LOGS_KEPT = 40
"""Of processes that have ended as they should: what led to a failure may be in them."""
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
    """Its last step."""
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
        return self.is_joined and not self.is_doomed and self.thaw_at is None

    def __str__(self) -> str:
        return f"peer {self.number} (slot {self.slot}, group {self.group})"


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
        self._master: Child | None = None
        self._address = ""
        self._peers: dict[Child, _Peer] = {}
        self._ended: deque[Child] = deque()
        self._next_peer = 1
        self._free_slots = deque(range(SLOTS))
        self._checker = Checker()
        self._done = Disturbances()
        self._problems = self._checker.problems
        self._start_s = time.monotonic()
        self._churn = Churn(plan, Random(f"{plan.seed} churn"), self._start_s)
        self._masters = Masters(plan, Random(f"{plan.seed} masters"), self._start_s)
        self._splits = Splits(plan, Random(f"{plan.seed} splits"), self._start_s)
        self._ports = [HeldPort() for _ in range(SLOTS if plan.partition is not None else 0)]
        self._deaf_to: dict[Child, list[int]] = {}
        """As each process was told last."""
        self._environment = {**local_environment(), **_ENVIRONMENT}
        if plan.token or plan.encrypt:
            self._environment["PCCL_TOKEN"] = secrets.token_urlsafe()
        self._environment["PCCL_ENCRYPT"] = "1" if plan.encrypt else "0"

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.close()
        for process in [*self._peers, *self._ended, *([self._master] if self._master else [])]:
            process.close()
        for port in self._ports:
            port.close()
        self._events.close()
        if not self._keeps_logs or isinstance(error, KeyboardInterrupt):
            shutil.rmtree(self._logs)

    def run(self) -> Report:
        """To the end of the time, or to the first problem."""
        self._start_master("127.0.0.1:0")
        while not self._address and not self._problems:
            self._wait(self._start_s + STARTS_WITHIN * self._plan.hang_s)
        if not self._problems:
            for action in self._churn.initial():
                self._act(action)
            self._disturb()
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
            if now >= self._masters.next_at:
                self._replace_master(now)
            self._wait(min(end_s, self._churn.next_at, self._splits.next_at, self._masters.next_at))

    def _come_together(self) -> None:
        """Everybody who is left must take part in an op with everybody else of the group."""
        for peer in self._peers.values():
            if peer.thaw_at is not None:
                peer.thaw_at = time.monotonic()
            elif peer.hit is not None and not peer.is_killed:
                peer.hit = peer.hit_at = None
        self._heal(float("inf"))
        start_s = time.monotonic()
        limit_s = STARTS_WITHIN * self._plan.hang_s
        while not self._problems and not self._are_together():
            if time.monotonic() > start_s + limit_s:
                seen = {str(peer): peer.stepped for peer in self._peers.values()}
                self._stuck(f"those who are left did not come together within {limit_s:g} s; their last steps: {seen}")
            self._wait(start_s + limit_s)

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
        options = WorkerOptions(self._address, number, slot, group, self._plan, where)
        command = module_command("pccl.stress.worker", msgspec.json.encode(options).decode())
        process = self._child(f"peer {number}", command)
        self._peers[process] = _Peer(number, slot, group, process, At("starting", 0), time.monotonic())
        self._checker.started(number, slot, group)
        if self._masters.is_starting(time.monotonic()):
            self._checker.froze(number)
        self._make_deaf()
        self._note(f"start {self._peers[process]}")
        self._done.started += 1
        self._done.peers_most = max(self._done.peers_most, len(self._peers))

    def _ask_to_leave(self, peer: _Peer) -> None:
        if not peer.is_dismissed:
            self._note(f"dismiss {peer}")
            peer.is_dismissed = True
            peer.process.say(line(Leave()))

    def _hit(self, peer: _Peer) -> None:
        hit = peer.hit
        assert hit is not None
        kind = "kill" if hit.freeze_s is None else f"freeze for {hit.freeze_s:.2f} s:"
        self._note(f"{kind} {peer}, {peer.at.doing} at revision {peer.at.revision}")
        peer.hit_at = None
        if hit.freeze_s is None:
            self._done.killed += 1
            peer.process.popen.kill()
        else:
            self._done.frozen += 1
            self._checker.froze(peer.number)
            peer.process.popen.send_signal(signal.SIGSTOP)
            peer.thaw_at = time.monotonic() + hit.freeze_s

    def _thaw(self, peer: _Peer) -> None:
        self._note(f"thaw {peer}")
        peer.process.popen.send_signal(signal.SIGCONT)
        peer.hit = peer.thaw_at = None
        for each in self._peers.values():
            # Nobody could be expected to go on before, so everybody's time begins now.
            each.heard_at = time.monotonic()

    # Masters.

    def _start_master(self, address: str) -> None:
        name = f"master {self._done.masters_killed + 1}" if self._done.masters_killed else "master"
        self._master = self._child(name, module_command("pccl.stress.master", "--listen", address))

    def _replace_master(self, now: float) -> None:
        self._masters.pause(now)
        assert self._master is not None
        self._note("kill the master")
        self._done.masters_killed += 1
        self._master.popen.kill()
        self._master.popen.wait()
        self._deaf_to.pop(self._master, None)
        self._master.close()
        self._ended.append(self._master)
        self._start_master(self._address)
        self._make_deaf()
        peers = self._peers.values()
        sound = sum(peer.is_sound for peer in peers)
        is_majority_there = self._masters.is_majority_there(now, sound, sum(peer.is_joined for peer in peers) - sound)
        for peer in peers:
            if not peer.is_joined or not is_majority_there:
                self._checker.froze(peer.number)  # it may find no master, or none that leads

    # Splits.

    def _split(self, now: float) -> None:
        split = self._splits.split(now, [peer.slot for peer in self._peers.values() if not peer.is_doomed])
        if split is not None:
            self._note(str(split))
            self._done.split += 1
            self._make_deaf()

    def _heal(self, now: float) -> None:
        for split in self._splits.heal(now):
            self._note(f"heal {split}")
            self._make_deaf()

    def _make_deaf(self) -> None:
        """Tells every process whom not to hear."""
        assert self._master is not None
        slots = {self._master: MASTER, **{peer.process: peer.slot for peer in self._peers.values()}}
        for process, slot in slots.items():
            deaf_to = self._splits.deaf_to(slot)
            if deaf_to != self._deaf_to.get(process, []):
                self._deaf_to[process] = deaf_to
                process.say(line(BeDeaf([self._place(other) for other in deaf_to])))

    def _place(self, slot: int) -> Place:
        if slot == MASTER:
            return Place("", int(self._address.rpartition(":")[2]))
        return place(slot, self._ports[slot].number)

    def _excuse(self) -> None:
        """Says who may lose its place because of splits. Looked up again and again, as peers come and go."""
        groups = {peer.slot: peer.group for peer in self._peers.values() if peer.is_sound}
        may_be_lost_now = {slot for split in self._splits.active for slot in may_be_lost(split, groups)}
        for peer in self._peers.values():
            self._checker.split(peer.number, peer.slot in may_be_lost_now)

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
        if process not in self._peers and process is not self._master:
            return  # a master that was killed
        if process is self._master:
            if isinstance(heard, int):
                self._problems.append(f"the master ended with {heard}:\n{process.last_words()}")
            elif heard.startswith(MASTER_READY) and not self._address:
                self._address = heard.removeprefix(MASTER_READY).decode().strip()
            return
        peer = self._peers[process]
        if isinstance(heard, int):
            self._exited(peer, heard)
            return
        try:
            message: Message = msgspec.json.decode(heard, type=Message)
        except msgspec.DecodeError:
            return  # the last words of a killed process, cut short
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
                if not peer.is_joined and self._masters.is_starting(peer.heard_at):
                    self._checker.froze(peer.number)
                peer.is_joined = False
                self._note(f"{peer} lost its session: {message.reason}")
            case Stepped():
                peer.stepped = message
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

    def _exited(self, peer: _Peer, returncode: int) -> None:
        del self._peers[peer.process]
        self._deaf_to.pop(peer.process, None)
        self._free_slots.append(peer.slot)
        self._checker.ended(peer.number, time.monotonic())
        self._masters.lost(time.monotonic())
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
        assert self._master is not None
        self._master.popen.send_signal(signal.SIGABRT)
        time.sleep(STACKS_S)
        lines = [what]
        for peer in self._peers.values():
            lines.append(f"  {peer}: {peer.at.doing} at revision {peer.at.revision} for {now - peer.heard_at:.1f} s")
        lines.append(f"the master's last words:\n{self._master.last_words()}")
        self._problems.append("\n".join(lines))
