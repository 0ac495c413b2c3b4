"""Starts, disturbs and judges the processes of a stress run.

The main thread waits on one queue until an event arrives or a fault is due. A run has three phases: peers are disturbed
until the time is over; then all peers must appear in one another's results; then they are dismissed and must exit. The
first problem ends the run.
"""

from __future__ import annotations

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

import msgspec

from pccl import PCCLError
from pccl.status import RunStatus, run_status
from pccl.tools.harness import ONE_THREAD, Child, Processes, decoded, master_line
from pccl.tools.stress.checker import Checker
from pccl.tools.stress.faults import (
    Action,
    Dismiss,
    Hit,
    Schedule,
    Start,
    disturbance,
)
from pccl.tools.stress.plan import (
    SLOTS,
    At,
    Joined,
    Leave,
    Left,
    Message,
    Plan,
    SessionOver,
    Stepped,
    WorkerOptions,
)
from pccl.tools.stress.report import Display, Disturbances, Report

TICK_S = 0.25
PEER_TIMEOUT_S = 5.0
START_S = 10.0
"""For this long after a master was killed, a connecting peer may find no master."""
KILL_S = 2.0
"""For this long after a kill, a newcomer may be refused because it has no link to the killed peer."""
TWICE_CHANCE = 0.15
AIM_S_MAX = 0.03
"""The longest time between the beginning of the aimed activity and the hit."""
AIM_FOR_S = 3.0
LOOK_S = 1.0
STATUS_S = 2.0
STARTS_WITHIN = 3
"""A starting process may take this many times as long as a call."""
STACKS_S = 3.0


@dataclass
class Peer:
    """A peer's process, its last reports, and its current or next fault."""

    number: int
    slot: int
    group: int
    process: Child
    at: At
    reported_at: float
    is_joined: bool = False
    stepped: Stepped | None = None
    """The last step; None after a fault."""
    hit: Hit | None = None
    hit_at: float | None = None
    thaw_at: float | None = None
    is_dismissed: bool = False
    has_left: bool = False

    @property
    def is_killed(self) -> bool:
        return self.hit is not None and self.hit.freeze_s is None and self.hit_at is None

    @property
    def is_doomed(self) -> bool:
        return self.is_dismissed or (self.hit is not None and self.hit.freeze_s is None)

    def __str__(self) -> str:
        return f"peer {self.number} (slot {self.slot}, group {self.group})"


@dataclass
class Master:
    number: int
    process: Child
    address: str = ""
    is_listening: bool = False
    starts: int = 1

    def __str__(self) -> str:
        return f"standby {self.number}" if self.number else "the master"


class Supervisor:
    """One run. Call `run`, then `close`."""

    def __init__(self, plan: Plan, display: Display) -> None:
        self._plan = plan
        self._display = display
        self._logs = Path(tempfile.mkdtemp(prefix="pccl-stress-"))
        self._keeps_logs = False
        self._events = (self._logs / "events.log").open("w", buffering=1)
        self._token = secrets.token_urlsafe() if plan.token or plan.encrypt else ""
        self._processes = Processes(self._environment(), self._logs)
        self._masters: list[Master] = []
        self._peers: dict[Child, Peer] = {}
        self._next_peer = 1
        self._free_slots = deque(range(SLOTS))
        self._checker = Checker()
        self._problems = self._checker.problems
        self._done = Disturbances()
        self._start_s = now = time.monotonic()
        self._killed_at = float("-inf")
        self._hit_at = float("-inf")
        """The time of the last kill, freeze or thaw."""
        self._master_killed_at = float("-inf")
        self._random = Random(f"{plan.seed} faults")
        faults = (
            (plan.disturb_every, self._disturb_peers),
            (plan.interrupts, self._interrupt),
            (plan.kill_master, self._replace_master),
        )
        self._faults = [(Schedule(every, self._random, now), make) for every, make in faults]

    def _environment(self) -> dict[str, str]:
        faulthandler = {"PYTHONFAULTHANDLER": "1"}  # the master writes its stacks on SIGABRT
        token = {"PCCL_TOKEN": self._token} if self._token else {}
        encrypt = "1" if self._plan.encrypt else "0"
        own = {"PCCL_LOG_LEVEL": "INFO", "PCCL_STATE": "", "PCCL_ENCRYPT": encrypt}
        return {**ONE_THREAD, **faulthandler, **token, **own}

    def close(self) -> None:
        self._processes.close()
        self._events.close()
        if not self._keeps_logs:
            shutil.rmtree(self._logs)

    def run(self) -> Report:
        try:
            self._run()
        except Exception:
            self._keeps_logs = True
            raise
        self._keeps_logs = bool(self._problems)
        return Report(
            plan=self._plan,
            seconds=time.monotonic() - self._start_s,
            counts=self._checker.counts,
            disturbances=self._done,
            problems=list(self._problems),
            passed=not self._problems,
            logs=str(self._logs) if self._problems else None,
        )

    def _run(self) -> None:
        self._start_masters()
        if not self._problems:
            for index in range(self._plan.peers):
                self._start(index % self._plan.groups)
            self._disturb()
            self._come_together()
            self._dismiss_all()
        if not self._problems:
            self._checker.settle(time.monotonic(), is_over=True)

    def _note(self, what: str) -> None:
        self._events.write(f"{datetime.now().isoformat(' ', 'milliseconds')} {what}\n")

    # The phases of a run

    def _disturb(self) -> None:
        end_s = time.monotonic() + 60 * self._plan.minutes
        while not self._problems and (now := time.monotonic()) < end_s:
            for schedule, make in self._faults:
                if schedule.is_due(now):
                    make()
            self._wait(min(end_s, *(schedule.next_at for schedule, _ in self._faults)))

    def _come_together(self) -> None:
        """Wait until every peer takes part in an op with all other peers in its group."""
        for peer in self._peers.values():
            if peer.thaw_at is not None:
                peer.thaw_at = time.monotonic()
            elif peer.hit is not None and not peer.is_killed:
                peer.hit = peer.hit_at = None
        look_at = time.monotonic()
        limit_s = STARTS_WITHIN * self._plan.hang_s
        end_s = look_at + limit_s
        while not self._problems and not self._are_together():
            now = time.monotonic()
            if now > look_at:
                self._dissolve_second_runs()
                look_at = now + LOOK_S
            if now > end_s:
                seen = {str(peer): peer.stepped for peer in self._peers.values()}
                self._stuck(f"the peers did not come together within {limit_s:g} s; their last steps: {seen}")
            self._wait(min(look_at, end_s))

    def _are_together(self) -> bool:
        if any(peer.is_killed or peer.is_dismissed or peer.thaw_at is not None for peer in self._peers.values()):
            return False
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

    def _dismiss_all(self) -> None:
        for peer in self._peers.values():
            self._dismiss(peer)
        while not self._problems and self._peers:
            self._wait(time.monotonic() + TICK_S)

    # Faults of peers

    def _disturb_peers(self) -> None:
        """Disturb a peer, and sometimes a second one at the same time."""
        for _ in range(2 if self._random.random() < TWICE_CHANCE else 1):
            peers = self._peers.values()
            targets = [peer.number for peer in peers if peer.hit is None and not peer.is_dismissed]
            doomed = sum(peer.is_doomed for peer in peers)
            action = disturbance(self._plan, self._random, len(peers), doomed, targets)
            if action is not None:
                self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Start(group):
                self._start(group)
            case Dismiss(number):
                self._done.dismissed += 1
                self._dismiss(self._peer(number))
            case Hit(number):
                peer = self._peer(number)
                peer.hit = action
                if action.aim is None:
                    self._hit(peer)
                else:
                    peer.hit_at = time.monotonic() + AIM_FOR_S

    def _peer(self, number: int) -> Peer:
        return next(peer for peer in self._peers.values() if peer.number == number)

    def _start(self, group: int) -> None:
        number, slot = self._next_peer, self._free_slots.popleft()
        self._next_peer += 1
        addresses = ",".join(master.address for master in self._masters)
        options = msgspec.json.encode(WorkerOptions(addresses, number, slot, group, self._plan)).decode()
        process = self._processes.start(f"peer {number}", "pccl.tools.stress.worker", options)
        now = time.monotonic()
        self._peers[process] = Peer(number, slot, group, process, At("starting", 0), now)
        self._checker.started(number, slot, group)
        if self._is_master_starting(now):
            self._checker.excuse(number, now)
        self._note(f"start {self._peers[process]}")
        self._done.started += 1
        self._done.peers_most = max(self._done.peers_most, len(self._peers))

    def _dismiss(self, peer: Peer) -> None:
        if not peer.is_dismissed:
            self._note(f"dismiss {peer}")
            peer.is_dismissed = True
            peer.process.send(Leave())

    def _hit(self, peer: Peer) -> None:
        hit = peer.hit
        assert hit is not None
        kind = "kill" if hit.freeze_s is None else f"freeze for {hit.freeze_s:.2f} s:"
        self._note(f"{kind} {peer}, {peer.at.doing} at revision {peer.at.revision}")
        peer.hit_at = None
        self._hit_at = time.monotonic()
        if hit.freeze_s is None:
            self._done.killed += 1
            self._killed_at = time.monotonic()
            peer.process.popen.kill()
        else:
            self._done.frozen += 1
            peer.process.popen.send_signal(signal.SIGSTOP)
            peer.thaw_at = time.monotonic() + hit.freeze_s
            self._excuse(peer)

    def _thaw(self, peer: Peer) -> None:
        self._note(f"thaw {peer}")
        self._hit_at = time.monotonic()
        peer.process.popen.send_signal(signal.SIGCONT)
        peer.hit = peer.thaw_at = None
        self._excuse(peer)
        for each in self._peers.values():
            each.reported_at = time.monotonic()  # they may have waited for the frozen peer

    def _excuse(self, peer: Peer) -> None:
        peer.stepped = None
        self._checker.excuse(peer.number, time.monotonic())

    def _interrupt(self) -> None:
        targets = [peer for peer in self._peers.values() if peer.at.doing != "starting" and peer.thaw_at is None]
        if targets:
            peer = self._random.choice(targets)
            self._note(f"interrupt {peer}, {peer.at.doing} at revision {peer.at.revision}")
            self._done.interrupted += 1
            peer.process.popen.send_signal(signal.SIGINT)

    # Masters

    def _start_masters(self) -> None:
        limit_s = self._start_s + STARTS_WITHIN * self._plan.hang_s
        for number in range(1 + self._plan.standbys):
            master = Master(number, self._start_master(number, 1, "127.0.0.1:0"))
            self._masters.append(master)
            while not master.is_listening and not self._problems:
                self._wait(limit_s)

    def _start_master(self, number: int, starts: int, address: str) -> Child:
        state = str(self._logs / f"state-{number}") if self._plan.keeps_state else "none"
        arguments = ["--listen", address, "--peer-timeout", str(PEER_TIMEOUT_S), "--state", state]
        if number > 0:
            others = [master.address for master in self._masters if master.number != number]
            arguments += ["--standby-of", ",".join(others)]
        elif starts == 1:
            arguments += ["--start", "new"]
        name = f"{f'standby {number}' if number else 'master'} {starts}"
        return self._processes.start(name, "pccl", "master", *arguments)

    def _leading(self) -> list[tuple[Master, RunStatus]]:
        found = []
        for master in self._masters:
            with suppress(PCCLError):
                status = run_status(master.address, token=self._token, timeout=STATUS_S)
                if status.role == "leading":
                    found.append((master, status))
        return found

    def _replace_master(self) -> None:
        """Kill the leading master, or any master if none leads, and start a replacement at its address."""
        leading = self._leading()
        self._members_of(status for _, status in leading)
        if leading:
            master, _ = max(leading, key=lambda each: (len(each[1].members), each[1].term))
        else:
            master = self._random.choice(self._masters)
        self._note(f"kill {master}, which {'leads' if leading else 'does not lead'}")
        self._done.masters_killed += 1
        master.process.popen.kill()
        master.process.popen.wait()
        self._processes.reap(master.process)
        now = time.monotonic()
        self._master_killed_at = now
        master.starts += 1
        master.is_listening = False
        master.process = self._start_master(master.number, master.starts, master.address)
        for peer in self._peers.values():
            if not peer.is_joined:
                self._checker.excuse(peer.number, now)  # it may find no leading master

    def _dissolve_second_runs(self) -> None:
        """Dismiss the peers of all runs except the largest. Peers that found no leading master may have started a
        second run."""
        members = self._members_of(status for _, status in self._leading())
        if len(members) < 2:
            return
        largest = max(members, key=lambda run: len(members[run]))
        for run, names in members.items():
            for peer in self._peers.values():
                if run != largest and f"peer {peer.number}" in names - members[largest]:
                    self._note(f"{peer} is not in the largest run")
                    self._dismiss(peer)

    def _members_of(self, leading: Iterable[RunStatus]) -> dict[str, set[str]]:
        """Return the peer names in each run. Without freezes, there must be only one run."""
        members = {
            status.run: {member.name for member in status.members}
            for status in sorted(leading, key=lambda status: status.term)
        }
        if len(members) > 1 and not self._plan.freeze:
            self._problems.append(f"two masters lead separate runs: {members}")
        return members

    def _excuse_all(self, now: float) -> None:
        """Excuse all peers while evictions cannot be judged. After losses, a standby may lead with too few peers."""
        is_led_anew = self._plan.standbys and now < self._hit_at + START_S
        if is_led_anew or self._is_master_starting(now):
            self._checker.excuse_all(now)

    def _is_master_starting(self, now: float) -> bool:
        return now < self._master_killed_at + START_S

    # Events

    def _wait(self, until_s: float) -> None:
        due = [at for peer in self._peers.values() for at in (peer.hit_at, peer.thaw_at) if at is not None]
        now = time.monotonic()
        timeout_s = max(0.0, min(until_s, now + TICK_S, *due) - now)
        for process, line in self._processes.events(timeout_s):
            self._excuse_all(time.monotonic())
            if process in self._peers:
                self._handle(self._peers[process], line)
            else:
                self._handle_master(process, line)
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.hit_at is not None and now >= peer.hit_at:
                self._hit(peer)
            elif peer.thaw_at is not None and now >= peer.thaw_at:
                self._thaw(peer)
        self._excuse_all(now)
        self._checker.settle(now)
        self._look_for_hangs(now)
        positions = {peer.number: peer.at for peer in self._peers.values()}
        self._display.moved(now - self._start_s, positions, self._checker.counts, self._done)

    def _handle(self, peer: Peer, line: bytes | int) -> None:
        if isinstance(line, int):
            self._exited(peer, line)
            return
        message: Message | None = decoded(line, Message)
        if message is None:
            return
        peer.reported_at = now = time.monotonic()
        match message:
            case At():
                peer.at = message
                if peer.hit is not None and peer.hit.aim == message.doing:
                    peer.hit_at = now + self._random.uniform(0.0, AIM_S_MAX)
                    peer.hit = replace(peer.hit, aim=None)
            case Joined():
                peer.is_joined = True
                peer.stepped = None
            case SessionOver(reason, is_own):
                if not peer.is_joined and (now < self._killed_at + KILL_S or self._is_master_starting(now)):
                    self._checker.excuse(peer.number, now)
                peer.is_joined = False
                peer.stepped = None
                self._note(f"{peer} {'left' if is_own else 'lost'} its session: {reason}")
            case Stepped():
                peer.stepped = message
            case Left():
                peer.has_left = True
        self._checker.receive(peer.number, message, now)

    def _handle_master(self, process: Child, line: bytes | int) -> None:
        master = next((each for each in self._masters if each.process is process), None)
        if master is None:
            return  # it was killed
        if isinstance(line, int):
            self._problems.append(f"{master} ended with {line}:\n{process.last_errors()}")
        elif address := master_line(line)[0]:
            master.address = address
            master.is_listening = True

    def _exited(self, peer: Peer, returncode: int) -> None:
        del self._peers[peer.process]
        self._free_slots.append(peer.slot)
        self._checker.ended(peer.number, time.monotonic())
        if not peer.is_killed and not (returncode == 0 and peer.has_left):
            self._problems.append(f"{peer} exited unexpectedly with {returncode}:\n{peer.process.last_errors()}")
        self._processes.reap(peer.process)

    # Hangs

    def _look_for_hangs(self, now: float) -> None:
        peers = self._peers.values()
        if self._problems or any(peer.thaw_at is not None for peer in peers):
            return
        late = []
        for peer in peers:
            limit_s = self._plan.hang_s * (STARTS_WITHIN if peer.at.doing == "starting" else 1)
            if not peer.is_killed and now - peer.reported_at > limit_s:
                late.append(str(peer))
        if late:
            self._stuck(f"a hang: {', '.join(late)} sent no report for {self._plan.hang_s:g} s")

    def _stuck(self, what: str) -> None:
        """Record a problem with each peer's activity. All processes write their stacks, which ends the masters."""
        now = time.monotonic()
        for peer in self._peers.values():
            peer.process.popen.send_signal(signal.SIGUSR1)
        for master in self._masters:
            master.process.popen.send_signal(signal.SIGABRT)
        time.sleep(STACKS_S)
        lines = [what]
        for peer in self._peers.values():
            waited_s = now - peer.reported_at
            lines.append(f"  {peer}: {peer.at.doing} at revision {peer.at.revision} for {waited_s:.1f} s")
        lines += [f"the last errors of {each}:\n{each.process.last_errors()}" for each in self._masters]
        self._problems.append("\n".join(lines))
