"""Runs a scenario: all peers connect, the faults happen, all peers take part in one op again and leave.

Theory of operation. One thread decides; it sleeps a moment at a time and looks at what is due, which have ended and
what was reported. What must hold at the two ends of the faults is part of the judgement:

1. Before them all peers meet in one op (else the machine, not the library, is to blame, and it is said so).
2. After them every fault is undone, every host has a process, and all must meet in one op within what they may take:
   the grace of `progress`, a lost master's `master_timeout`, for a peer that was evicted for its links the wait that
   docs/failures.md names, which doubles each time, and as long as the processes took to start at first.
   Peers that found no master for `master_timeout` may have founded a run of their own at one that led no run, and two
   runs never become one: then those in the smaller one are started again, as their owner would do.
3. Asked to leave (SIGTERM), every peer must end with status 0, and so must the masters after them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.wan.nemesis import checker, progress
from tests.wan.nemesis.checker import Counts, Violation
from tests.wan.nemesis.faults import Fault
from tests.wan.nemesis.history import Event
from tests.wan.nemesis.progress import Span, World
from tests.wan.nemesis.stage import READY_S, Setting, Stage

TICK_S = 0.02
LOOK_S = 0.25
START_S = 180.0
LEAVE_S = 30.0
STACKS_S = 2.0
PARTED_S = 6.0
"""The time that peers have to come together before it is asked whether they are in different runs."""
STEP_S = 3.0
"""Peers that are in a run make a step within this time."""
EVICTIONS_MAX = 4


@dataclass(frozen=True)
class Timed:
    """A fault, when it begins after all are together, and how long it lasts."""

    at_s: float
    for_s: float
    fault: Fault


@dataclass
class Outcome:
    """The result of a run."""

    setting: Setting
    world: World
    histories: dict[str, list[Event]]
    violations: list[Violation]
    counts: Counts
    standstill: progress.Standstill
    seconds: float
    spans: list[Span] = field(default_factory=list)


class NotReadyError(Exception):
    """The run did not even begin: masters that do not listen, or peers that never came together."""


class Supervisor:
    def __init__(
        self,
        setting: Setting,
        plan: Sequence[Timed],
        seconds: float,
        seed: int,
        folder: Path,
        say: Callable[[str], Any],
    ) -> None:
        """`seconds`: from the first fault to the last, or longer. `say` is told what happens, a line each."""
        self._setting = setting
        self._plan = sorted(plan, key=lambda each: each.at_s)
        self._seconds = seconds
        self._seed = seed
        self._folder = folder
        self._say = say
        self._spans: list[Span] = []
        self._active: list[tuple[float, Timed, float]] = []
        self._violations: list[Violation] = []
        self._start_s = time.monotonic()
        self._looked_at_s = 0.0
        self._starts_within_s = 0.0
        """The time that this machine, with whatever else it does, took to start all peers."""

    def run(self) -> Outcome:
        with Stage(self._setting, self._seed, self._folder) as stage:
            self._begin(stage)
            begin_s = time.monotonic()
            self._say("all are together")
            self._disturb(stage, begin_s)
            self._come_together(stage)
            end_s = time.monotonic()
            self._leave(stage)
            stage.kill_all()
            self._look(stage, at_once=True)
        for at_s, seat, name, status in stage.unexpected:
            text = f"{name} ended with {status}:\n{stage.last_words(name)}"
            self._violations.append(Violation(at_s, "exit", "" if seat.is_master else name, text))
        setting = self._setting
        world = World(
            self._spans,
            stage.lives,
            setting.peer_hosts,
            setting.peer_timeout_s,
            setting.master_timeout_s,
            waits_for_all=setting.masters == 1 and not setting.keeps_state,
            begin_s=begin_s,
            end_s=end_s,
        )
        histories = {name: reader.events for name, reader in stage.readers.items()}
        broken, counts = checker.check(histories, self._seed, setting.load)
        violations = [*self._violations, *broken, *progress.check(world, histories)]
        return Outcome(
            setting,
            world,
            histories,
            sorted(violations, key=lambda each: each.at_s),
            counts,
            progress.longest(world, histories),
            time.monotonic() - self._start_s,
            self._spans,
        )

    # The parts of a run.

    def _begin(self, stage: Stage) -> None:
        setting = self._setting
        for number in setting.master_hosts:
            stage.start(number)
        self._until(
            stage, lambda: all(stage.is_listening(number) for number in setting.master_hosts), READY_S, "masters listen"
        )
        for number in setting.peer_hosts[: setting.peers - setting.late]:
            stage.start(number)
        since_s = time.monotonic()
        self._until(stage, lambda: _are_together(stage, since_s), START_S, "all peers are together")
        self._starts_within_s = time.monotonic() - since_s

    def _until(self, stage: Stage, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            self._wait(stage, LOOK_S)
            if time.monotonic() > end_s or stage.unexpected:
                words = "\n".join(f"{seat.name}: {stage.last_words(seat.name, 600)}" for seat in stage.seats)
                raise NotReadyError(f"not within {limit_s:g} s: {what}\n{words}")

    def _disturb(self, stage: Stage, begin_s: float) -> None:
        todo = list(self._plan)
        end_s = begin_s + self._seconds
        while todo or self._active or time.monotonic() < end_s:
            now = time.monotonic()
            for entry in [entry for entry in self._active if now >= entry[2]]:
                self._end(stage, entry)
            while todo and now >= begin_s + todo[0].at_s:
                self._start(stage, todo.pop(0), begin_s)
            due = [begin_s + todo[0].at_s] if todo else []
            due += [entry[2] for entry in self._active]
            self._wait(stage, min([TICK_S * 10, *(at - now for at in due)]))

    def _start(self, stage: Stage, timed: Timed, begin_s: float) -> None:
        self._say(f"{timed.fault}")
        now = time.monotonic()
        timed.fault.begin(stage)
        self._active.append((now, timed, begin_s + timed.at_s + timed.for_s))

    def _end(self, stage: Stage, entry: tuple[float, Timed, float]) -> None:
        began_s, timed, _ = entry
        self._active.remove(entry)
        timed.fault.end(stage)
        fault, now = timed.fault, time.monotonic()
        self._say(f"over: {fault}")
        self._spans.append(Span(str(fault), began_s, now, fault.hosts(), fault.cut(stage), fault.frozen()))

    def _come_together(self, stage: Stage) -> None:
        setting = self._setting
        for number in [*setting.master_hosts, *setting.peer_hosts]:
            stage.start(number)
        since_s = time.monotonic()
        evictions = max(
            (
                sum(event.kind == "left" for reader in stage.readers.values() for event in _of(reader, number))
                for number in setting.peer_hosts
            ),
            default=0,
        )
        grace_s = setting.peer_timeout_s * (progress.TIMEOUTS + 2 ** min(evictions, EVICTIONS_MAX)) + progress.SLACK_S
        limit_s = grace_s + setting.master_timeout_s + setting.peer_timeout_s + self._starts_within_s
        may_part = self._may_part(stage)
        while not _are_together(stage, since_s):
            if stage.unexpected:
                return
            if may_part and time.monotonic() > since_s + PARTED_S and (few := _second_run(stage)):
                self._say(f"hosts {few} have a run of their own: their peers are started again")
                for number in few:
                    stage.kill(number)
                    stage.start(number)
                since_s, may_part = time.monotonic(), False
            if time.monotonic() > since_s + limit_s:
                for seat in stage.running:
                    stage.signal(seat.number, signal.SIGUSR1 if not seat.is_master else signal.SIGABRT)
                time.sleep(STACKS_S)
                stuck = ", ".join(
                    f"{reader.peer}: {reader.events[-1].kind if reader.events else 'nothing'}"
                    for reader in (seat.reader for seat in stage.running)
                    if reader is not None
                )
                text = f"the peers did not come together within {limit_s:.0f} s of the last fault; their last: {stuck}"
                self._violations.append(Violation(time.monotonic(), "progress", "", text))
                return
            self._wait(stage, LOOK_S)
        self._say(f"all are together again, after {time.monotonic() - since_s:.1f} s")

    def _may_part(self, stage: Stage) -> bool:
        """Whether some peers may have founded a run of their own: they found no master that led them for as long as
        they look for one, and then one that led no run."""
        setting = self._setting
        patience_s = setting.master_timeout_s - setting.peer_timeout_s
        spans = [span for span in self._spans if span.cut or span.frozen]
        lost_s = sum(span.end_s - span.begin_s for span in spans)
        return lost_s > patience_s or any(life.is_master for life in stage.lives)

    def _leave(self, stage: Stage) -> None:
        if self._violations or stage.unexpected:
            return
        for hosts in (self._setting.peer_hosts, self._setting.master_hosts):
            for number in hosts:
                stage.signal(number, signal.SIGTERM)
            end_s = time.monotonic() + LEAVE_S
            while any(stage.seats[number].process for number in hosts) and time.monotonic() < end_s:
                time.sleep(TICK_S)
                stage.reap(is_expected=True)
            for number in hosts:
                seat = stage.seats[number]
                if seat.process is not None:
                    stage.signal(number, signal.SIGUSR1 if not seat.is_master else signal.SIGABRT)
                    time.sleep(STACKS_S)
                    text = f"{seat} was asked to leave and has not ended within {LEAVE_S:g} s"
                    text += f"\n{stage.last_words(seat.name)}"
                    self._violations.append(Violation(time.monotonic(), "hang", seat.name, text))

    # Looking.

    def _wait(self, stage: Stage, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
        stage.reap()
        self._look(stage)

    def _look(self, stage: Stage, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and now < self._looked_at_s + LOOK_S:
            return
        self._looked_at_s = now
        stage.note_listening()
        for reader in stage.readers.values():
            reader.poll()


def _of(reader: Any, host: int) -> list[Event]:
    events: list[Event] = reader.events if reader.peer.startswith(f"{host}.") else []
    return events


def _second_run(stage: Stage) -> list[int]:
    """Return the hosts whose peers all make steps, but not together with the most; empty if that is not so."""
    runs: dict[str, list[int]] = {}
    for seat in stage.running:
        if seat.reader is None:
            continue
        steps = [event for event in _since(seat.reader.events, time.monotonic() - STEP_S) if "revision" in event.what]
        steps = [event for event in steps if event.kind in progress.PROGRESS]
        if not steps and not any(event.kind == "alone" for event in _since(seat.reader.events, time.monotonic() - 2)):
            return []
        runs.setdefault(steps[0].what["label"] if steps else seat.name, []).append(seat.number)
    most = max(runs.values(), key=len, default=[])
    return [number for run in runs.values() if run is not most for number in run]


def _are_together(stage: Stage, since_s: float) -> bool:
    """Whether every running peer has taken part in something with all the others since then."""
    peers = [seat for seat in stage.running if not seat.is_master]
    for seat in peers:
        assert seat.reader is not None
        if not any(_is_with(event, len(peers)) for event in _since(seat.reader.events, since_s)):
            return False
    return bool(peers)


def _since(events: Sequence[Event], since_s: float) -> list[Event]:
    found = []
    for event in reversed(events):
        if event.at_s <= since_s:
            break
        found.append(event)
    return found


def _is_with(event: Event, peers: int) -> bool:
    what = event.what
    if event.kind == "trained":
        return bool(what["world"] == peers)
    return event.kind == "end" and what["verdict"] == checker.COMMITTED and what["world"] == peers
