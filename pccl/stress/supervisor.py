"""Runs the processes of a stress run: starts, hears, disturbs, judges, and never leaves one behind.

Theory of operation. Only the main thread decides; it sleeps on one queue until something is heard (`processes`) or due.
When to disturb what is up to `churn`, `masters`, `partitions` and `interrupts`, which have no I/O of their own.

A run has three parts: peers are disturbed until the time is over; then all who are left must come together, every one
in everybody's results; then they are dismissed and must end by themselves. The first problem ends the run.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from types import TracebackType

import msgspec

from pccl.launcher import Child, module_command
from pccl.status import RunStatus
from pccl.stress import hangs
from pccl.stress.checker import Checker
from pccl.stress.churn import AIM_FOR_S, Action, Churn, Dismiss, Hit, Start
from pccl.stress.display import Display
from pccl.stress.events import EventLog
from pccl.stress.interrupts import Interrupts
from pccl.stress.masters import Masters
from pccl.stress.messages import (
    At,
    Joined,
    Leave,
    Left,
    Message,
    SessionOver,
    Stepped,
    WorkerOptions,
    line,
)
from pccl.stress.network import Network
from pccl.stress.partitions import Partitions, may_be_lost
from pccl.stress.peer import Peer
from pccl.stress.plan import Plan
from pccl.stress.processes import Processes
from pccl.stress.report import Disturbances, Report
from pccl.stress.seats import MASTER_READY, Seats
from pccl.stress.values import SLOTS, op_count

TICK_S = 0.25
KILL_S = 2.0
"""A newcomer may be refused so long after a kill, for want of a link to the one that was killed."""
LOOK_S = 1.0
"""The time between two looks at who leads whom, until all are together."""


class Supervisor:
    """One run: `with Supervisor(...) as supervisor: report = supervisor.run()`."""

    def __init__(self, plan: Plan, display: Display) -> None:
        self._plan = plan
        self._display = display
        self._processes = Processes(plan)
        self._keeps_logs = True
        self._events = EventLog(self._processes.logs / "events.log")
        self._seats = Seats(plan, self._processes)
        self._peers: dict[Child, Peer] = {}
        self._next_peer = 1
        self._killed_at = float("-inf")
        """When a peer was killed last."""
        self._free_slots = deque(range(SLOTS))
        self._checker = Checker(op_count(plan.threads))
        self._done = Disturbances()
        self._problems = self._checker.problems
        self._start_s = time.monotonic()
        self._churn = Churn(plan, Random(f"{plan.seed} churn"), self._start_s)
        self._masters = Masters(plan, Random(f"{plan.seed} masters"), self._start_s)
        self._partitions = Partitions(plan, Random(f"{plan.seed} splits"), self._start_s)
        self._interrupts = Interrupts(plan, Random(f"{plan.seed} interrupts"), self._start_s)
        self._network = Network(self._partitions, self._seats, plan.partition is not None)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.close()
        self._network.close()
        self._seats.close()
        self._events.close()
        if not self._keeps_logs or isinstance(error, KeyboardInterrupt):
            self._processes.remove_logs()

    def run(self) -> Report:
        """Run to the end of the time, or to the first problem."""
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
            longest_step=self._events.longest_step,
            logs=str(self._processes.logs) if self._problems else None,
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
            if now >= self._partitions.next_at:
                self._begin_partition(now)
            if now >= self._interrupts.next_at:
                self._interrupt(now)
            if now >= self._masters.next_at:
                self._replace_master()
            due = (self._churn.next_at, self._partitions.next_at, self._interrupts.next_at, self._masters.next_at)
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
        limit_s = hangs.STARTS_WITHIN * self._plan.hang_s
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

    def _peer(self, number: int) -> Peer:
        return next(peer for peer in self._peers.values() if peer.number == number)

    def _start(self, group: int) -> None:
        number, slot = self._next_peer, self._free_slots.popleft()
        self._next_peer += 1
        where = self._network.place_of(slot)
        options = WorkerOptions(self._seats.addresses, number, slot, group, self._plan, where)
        command = module_command("pccl.stress.worker", msgspec.json.encode(options).decode())
        process = self._processes.start(f"peer {number}", command)
        now = time.monotonic()
        self._peers[process] = Peer(number, slot, group, process, At("starting", 0), now)
        self._checker.started(number, slot, group)
        if self._masters.is_starting(now):
            self._checker.excuse(number, now)
        self._network.tell(self._peers.values())
        self._events.note(f"start {self._peers[process]}")
        self._done.started += 1
        self._done.peers_most = max(self._done.peers_most, len(self._peers))

    def _ask_to_leave(self, peer: Peer) -> None:
        if not peer.is_dismissed:
            self._events.note(f"dismiss {peer}")
            self._masters.disturbed()
            peer.is_dismissed = True
            peer.process.say(line(Leave()))

    def _hit(self, peer: Peer) -> None:
        hit = peer.hit
        assert hit is not None
        self._masters.disturbed()
        kind = "kill" if hit.freeze_s is None else f"freeze for {hit.freeze_s:.2f} s:"
        self._events.note(f"{kind} {peer}, {peer.at.doing} at revision {peer.at.revision}")
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
        """Send SIGINT to a peer, if there is one that heeds it already."""
        targets = [peer for peer in self._peers.values() if peer.at.doing != "starting" and peer.thaw_at is None]
        number = self._interrupts.target(now, [peer.number for peer in targets])
        if number is not None:
            peer = self._peer(number)
            self._events.note(f"interrupt {peer}, {peer.at.doing} at revision {peer.at.revision}")
            self._masters.disturbed()
            self._done.interrupted += 1
            peer.process.popen.send_signal(signal.SIGINT)

    def _thaw(self, peer: Peer) -> None:
        self._events.note(f"thaw {peer}")
        peer.process.popen.send_signal(signal.SIGCONT)
        peer.hit = peer.thaw_at = None
        self._doubt(peer)
        for each in self._peers.values():
            # Nobody could be expected to go on before, so everybody's time begins now.
            each.heard_at = time.monotonic()

    def _doubt(self, peer: Peer) -> None:
        """Note that it may lose its place, and takes part in ops again when it says so."""
        peer.stepped = None
        self._checker.excuse(peer.number, time.monotonic())

    # Masters.

    def _start_masters(self) -> None:
        """The standbys begin once the address of the first is known."""
        limit_s = self._start_s + hangs.STARTS_WITHIN * self._plan.hang_s
        for _ in range(1 + self._plan.standbys):
            seat = self._seats.begin()
            while not seat.is_listening and not self._problems:
                self._wait(limit_s)

    def _replace_master(self) -> None:
        """Kill the master that leads, or any if none does, and start another one in its place."""
        leading = self._seats.leading()
        if leading:
            seat, _ = max(leading, key=lambda each: (len(each[1].members), each[1].term))
            self._runs(status for _, status in leading)
        else:
            seat = self._masters.any_of(self._seats.all)
        now = time.monotonic()
        is_founder_left = any(not other.is_standby for other in self._seats.all if other is not seat)
        is_standby = self._masters.kill(now, is_founder_left)
        is_calm = all(peer.is_sound for peer in self._peers.values()) and not self._partitions.active
        if not is_calm or not leading:
            self._masters.disturbed()
        how = "which stands by from now on" if is_standby else "which is begun anew"
        self._events.note(f"kill {seat}, which {'leads' if leading else 'leads nothing'} and {how}")
        self._done.masters_killed += 1
        self._done.masters_stood_by += is_standby
        self._seats.replace(seat, is_standby)
        self._network.tell(self._peers.values())
        for peer in self._peers.values():
            if not peer.is_joined:
                self._checker.excuse(peer.number, now)  # it may find no master, or none that leads

    def _dissolve_second_runs(self) -> None:
        """Dismiss the peers of all runs but the largest: all cannot come together before.

        Who was cut off from the master that leads when it came, or came while the master was dead and the others frozen
        or cut off, may have founded a run of its own."""
        members = self._runs(status for _, status in self._seats.leading())
        if len(members) < 2:
            return
        largest = max(members, key=lambda run: len(members[run]))
        for run, names in members.items():
            for peer in self._peers.values():
                if run != largest and peer.name in names - members[largest]:
                    self._events.note(f"{peer} is in another run than the most")
                    self._ask_to_leave(peer)

    def _runs(self, leading: Iterable[RunStatus]) -> dict[str, set[str]]:
        """Return the names of the peers of each run that is led. There must be one only, unless some were cut off or
        frozen and could not hear of the others in time."""
        members = {  # of a run that two think to lead, the later
            status.run: {member.name for member in status.members}
            for status in sorted(leading, key=lambda status: status.term)
        }
        if len(members) > 1 and self._plan.partition is None and not self._plan.freeze:
            self._problems.append(f"two masters lead, each a run of its own: {members}")
        return members

    # Partitions.

    def _begin_partition(self, now: float) -> None:
        partition = self._partitions.begin(now, [peer.slot for peer in self._peers.values() if not peer.is_doomed])
        if partition is not None:
            self._events.note(str(partition))
            self._done.partitions += 1
            self._network.tell(self._peers.values())
            self._masters.disturbed()

    def _heal(self, now: float) -> None:
        for partition in self._partitions.heal(now):
            self._events.note(f"heal {partition}")
            self._network.tell(self._peers.values())
            self._masters.disturbed()

    def _excuse(self) -> None:
        """Tell the checker who may lose its place, because of partitions or since too few are left for a master to go
        on with. Called again and again, as peers come and go."""
        now = time.monotonic()
        peers = self._peers.values()
        groups = {peer.slot: peer.group for peer in peers if peer.is_sound}
        may_be_lost_now = {slot for each in self._partitions.active for slot in may_be_lost(each, groups)}
        for peer in peers:
            if peer.slot in may_be_lost_now:
                peer.stepped = None
            self._checker.partitioned(peer.number, peer.slot in may_be_lost_now, now)
        sound = sum(peer.is_sound for peer in peers)
        if self._masters.may_run_end(now, sound, sum(peer.is_joined for peer in peers) - sound):
            for peer in peers:
                self._checker.excuse(peer.number, now)

    # Hearing.

    def _wait(self, until_s: float) -> None:
        """Handle what is heard within a moment, and whatever is due."""
        due = [at for peer in self._peers.values() for at in (peer.hit_at, peer.thaw_at) if at is not None]
        due.append(self._partitions.heals_at)
        now = time.monotonic()
        timeout_s = max(0.0, min(until_s, now + TICK_S, *due) - now)
        for process, heard in self._processes.heard(timeout_s):
            self._handle(process, heard)
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
                self._events.note(f"{peer} {'left' if message.is_own else 'lost'} its session: {message.reason}")
            case Stepped():
                peer.stepped = message
                if message.outcomes:
                    self._note_progress(peer, peer.heard_at - message.seconds)
                self._events.step_ended(str(peer), message.revision, message.seconds)
            case Left():
                peer.has_left = True
            case _:
                pass
        self._checker.heard(peer.number, message, peer.heard_at)

    def _handle_master(self, process: Child, heard: bytes | int) -> None:
        seat = self._seats.of(process)
        if seat is None:
            return  # it was killed
        if isinstance(heard, int):
            self._problems.append(f"{seat} ended with {heard}:\n{process.last_words()}")
        elif heard.startswith(MASTER_READY):
            seat.address = heard.removeprefix(MASTER_READY).decode().strip()
            seat.is_listening = True
            self._masters.listens(time.monotonic())

    def _note_progress(self, peer: Peer, begun_at: float) -> None:
        """Note that a step with others, begun then, is over."""
        listened_at = self._masters.stepped(peer.group, begun_at)
        if listened_at is not None:
            self._done.failover_s = max(self._done.failover_s, peer.heard_at - listened_at)

    def _exited(self, peer: Peer, returncode: int) -> None:
        del self._peers[peer.process]
        self._free_slots.append(peer.slot)
        self._checker.ended(peer.number, time.monotonic())
        self._masters.lost(time.monotonic(), peer.group)
        if not peer.is_killed and not (returncode == 0 and peer.has_left):
            self._problems.append(f"{peer} ended by itself with {returncode}:\n{peer.process.last_words()}")
        self._processes.put_away(peer.process)

    # Hangs.

    def _look_for_hangs(self, now: float) -> None:
        if self._problems:
            return
        if what := hangs.hang(self._peers.values(), self._masters.progress_due_at, self._plan.hang_s, now):
            self._stuck(what)

    def _stuck(self, what: str) -> None:
        """Note as a problem that the run does not go on, with where everybody stands."""
        self._problems.append(hangs.account(what, self._peers.values(), self._seats.all))
