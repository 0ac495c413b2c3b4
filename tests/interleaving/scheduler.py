"""A scheduler under which real Python threads run one at a time, in an order that a seed decides.

Each managed thread has a baton, a lock that it waits for; only the thread that was handed its baton runs. It gives the
turn away at *hand-overs*: `step`, where it could go on, and `wait`, where it cannot before something has happened. Who
goes on is up to a chooser (`choosers`). Rules:

1. Between two hand-overs no other thread runs, so what a managed thread does there is atomic, and a schedule is the
   sequence of its choices: the same seed plays the same one.
2. Time is virtual. It stands still while anybody can go on, unless the chooser lets it pass early, as for threads that
   the system has left waiting; where no thread can go on it jumps to the next deadline.
3. If no thread can go on and there is no deadline, that is a deadlock. Waits that time out for ever, as those of
   `Latch` do, are found by a limit on virtual time, and threads that spin by a limit on steps.
4. The first failure ends the schedule: every managed thread is torn out of its next hand-over by `Torn`.

Threads that are not managed pass through hand-overs as without a scheduler.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from tests.support import stacks

STEPS_MAX = 400_000
VIRTUAL_S_MAX = 300.0
EARLY_S_MAX = 60.0
"""Virtual time that may pass while a peer can go on: where one thread has something to do every
half second, others would never get a turn."""
REAL_S_MAX = 180.0
"""Time until a thread counts as lost to something that the scheduler does not manage."""
TEAR_S = 5.0


class Torn(BaseException):
    """The schedule is over: what the thread was doing is given up."""


class ForkedWaitError(BaseException):
    """A forked child waits for what only the parent's threads could do."""


class ScheduleError(AssertionError):
    """What went wrong in a schedule, with the stacks of its threads."""


class Chooser(Protocol):
    """Decides which thread goes on."""

    def born(self, thread: ManagedThread) -> None:
        """Note a new thread."""

    def pick(self, ready: list[ManagedThread], current: ManagedThread | None) -> ManagedThread:
        """Return the thread that goes on, one of `ready`. `current` is the thread that gives the turn away, if it may
        keep it."""

    def lets_time_pass(self) -> bool:
        """Return whether time jumps to the next deadline although threads can go on."""


class ManagedThread:
    """A thread under a scheduler."""

    def __init__(self, scheduler: Scheduler, name: str, run: Callable[[], object]) -> None:
        self.name = name
        self.until: Callable[[], bool] | None = None
        """The condition that it waits for; None: it can go on."""
        self.deadline: float | None = None
        self.what = "begins"
        """The place of its last hand-over."""
        self.is_over = False
        self.number = 0
        self.priority = 0
        self.error: BaseException | None = None
        """What it has raised."""
        self.points_to_interrupt = 0
        """Its number of hand-overs until Ctrl-C is raised in it; 0: none is."""
        self.is_signalled = False
        """Whether Ctrl-C is to be raised as soon as it runs Python; it wakes waits."""
        self.is_in_c = False
        """Whether it is in a call where no signal handler runs, nor ends a wait."""
        self.baton = threading.Lock()
        self.baton.acquire()
        self.facade: object | None = None
        self._scheduler = scheduler
        self._run = run
        self.real = threading.Thread(target=self._main, name=name, daemon=True)

    def __repr__(self) -> str:
        return self.name

    def _main(self) -> None:
        scheduler = self._scheduler
        scheduler.local.thread = self
        self.baton.acquire()
        try:
            if not scheduler.is_over:
                scheduler.begin_thread()
                self._run()
        except Torn:
            pass
        except BaseException as error:
            self.error = error
            if not scheduler.is_over:
                text = "".join(traceback.format_exception(error))
                scheduler.fail(f"thread {self.name} has ended by an uncaught exception:\n{text}")
        finally:
            sys.settrace(None)
            scheduler.thread_over(self)


class Scheduler:
    """The threads of one schedule."""

    def __init__(self, seed: int, chooser: Chooser, begin_thread: Callable[[], None] = lambda: None) -> None:
        """`begin_thread` is called in each managed thread before it runs anything."""
        self.seed = seed
        self.rng = random.Random(seed * 7919 + 1)
        """Choices other than the next thread."""
        self.chooser = chooser
        self.begin_thread = begin_thread
        self.local = threading.local()
        self.now = 0.0
        self.steps = 0
        self.switches = 0
        self.digest = 0
        """A number that tells two schedules apart."""
        self.is_over = False
        self.is_alone = False
        """Whether this is a forked child, which has one thread only, or is about to be."""
        self.failure = ""
        """The hand-overs, where a test wants to see them."""
        self._threads: list[ManagedThread] = []
        self._born = 0
        self._current: ManagedThread | None = None
        self._finished = threading.Lock()
        self._finished.acquire()

    # For managed threads.

    @property
    def me(self) -> ManagedThread | None:
        """The managed thread that asks; None for any other."""
        thread: ManagedThread | None = getattr(self.local, "thread", None)
        return thread

    def spawn(self, name: str, run: Callable[[], object]) -> ManagedThread:
        """Start a thread. It can go on from now on."""
        thread = ManagedThread(self, name, run)
        thread.number = self._born
        self._born += 1
        self._threads.append(thread)
        self.chooser.born(thread)
        thread.real.start()
        return thread

    def step(self, what: str) -> None:
        """Let another thread go on, perhaps."""
        me = self.me
        if me is None or self.is_alone:
            return
        me.what = what
        self._count(me)
        chosen = self._choose(me)
        if chosen is not me:
            self._hand_over(me, chosen)
        self._deliver(me)

    def wait(self, until: Callable[[], bool], what: str, deadline: float | None = None) -> bool:
        """Wait until `until()` is true; it is called in any thread. Return False if the deadline passed
        first. What follows is atomic with its being true."""
        me = self.me
        assert me is not None, f"{what}: a thread that is not managed cannot wait"
        me.what = what
        if self.is_alone:
            return self._wait_alone(until, what, deadline)
        while True:
            me.until, me.deadline = until, deadline
            self._count(me)
            chosen = self._choose(None)
            if chosen is not me:
                self._hand_over(me, chosen)
            me.until = me.deadline = None
            self._deliver(me)
            if until():
                return True
            if deadline is not None and deadline <= self.now:
                return False

    def _wait_alone(self, until: Callable[[], bool], what: str, deadline: float | None) -> bool:
        if until():
            return True
        if deadline is None or self.now > VIRTUAL_S_MAX:
            raise ForkedWaitError(f"a forked child waits for a thread that it does not have: {what}")
        self.now = deadline
        return False

    @staticmethod
    def _deliver(me: ManagedThread) -> None:
        """Raise Ctrl-C in the thread that runs, if it is its time."""
        if me.is_in_c:
            return
        if me.points_to_interrupt:
            me.points_to_interrupt -= 1
            me.is_signalled = me.is_signalled or me.points_to_interrupt == 0
        if me.is_signalled:
            me.is_signalled = False
            raise KeyboardInterrupt

    def fail(self, text: str) -> None:
        """End the schedule with this failure, unless another came first."""
        if not self.is_over:
            self.failure = f"{text}\n\n{self.stacks()}"
            self.is_over = True

    def stacks(self) -> str:
        """Return where each thread is."""
        frames = stacks.frames()
        found = []
        for thread in self._threads:
            waits = "can go on" if thread.until is None else "waits"
            until = "" if thread.deadline is None else f", until {thread.deadline:.3f} s"
            found.append(f"--- {thread.name}: {waits} at {thread.what}{until} (virtual time {self.now:.3f} s)")
            frame = frames.get(thread.real.ident or 0)
            entries = traceback.extract_stack(frame) if frame is not None else []
            own = ("scheduler.py", "primitives.py", "threading.py", "tracing.py")
            shown = [entry for entry in entries if not entry.filename.endswith(own)]
            found += [line.rstrip() for line in traceback.format_list(shown[-14:])]
        return "\n".join(found)

    # For the thread that plays the schedule.

    def play(self) -> None:
        """Run until all threads have ended. ScheduleError says what went wrong."""
        first = self._choose(None)
        self._current = first
        first.baton.release()
        if not self._finished.acquire(timeout=REAL_S_MAX):
            self.fail(f"no event for {REAL_S_MAX:g} s of real time")
        self._tear()
        if self.failure:
            raise ScheduleError(self.failure)

    def _tear(self) -> None:
        """End the threads that are left, one after the other."""
        self.is_over = True
        for thread in list(self._threads):
            if thread.real.is_alive() and thread.baton.locked():
                thread.baton.release()
            thread.real.join(TEAR_S)

    def thread_over(self, thread: ManagedThread) -> None:
        """Note that a thread has ended, and hand its turn on."""
        thread.is_over = True
        self._threads.remove(thread)
        if self.is_over or not self._threads:
            if self._finished.locked():
                self._finished.release()
            return
        try:
            self._current = self._choose(None)
        except Torn:
            self._finished.release()
            return
        self._current.baton.release()

    # Turns.

    def _count(self, me: ManagedThread) -> None:
        if self.is_over:
            raise Torn
        self.steps += 1
        if self.steps > STEPS_MAX:
            self._end(f"more than {STEPS_MAX} steps: threads spin")

    def _end(self, text: str) -> None:
        self.fail(text)
        if self._finished.locked():
            self._finished.release()
        raise Torn

    def _choose(self, me: ManagedThread | None) -> ManagedThread:
        """Return the thread that goes on. `me` may."""
        if self.now < EARLY_S_MAX and self.chooser.lets_time_pass():
            self._jump()
        while True:
            ready = [thread for thread in self._threads if self._can_go_on(thread)]
            if ready:
                chosen = ready[0] if len(ready) == 1 else self.chooser.pick(ready, me)
                if chosen is not self._current:
                    self.switches += 1
                    self.digest = hash((self.digest, self.steps, chosen.number))
                return chosen
            if not self._jump():
                self._end("a deadlock: no thread can go on, and none waits for a time")

    def _can_go_on(self, thread: ManagedThread) -> bool:
        if thread.until is None or (thread.deadline is not None and thread.deadline <= self.now):
            return True
        if thread.is_signalled and not thread.is_in_c:
            return True
        return thread.until()

    def _jump(self) -> bool:
        """Let time pass until the next deadline. Return False if there is none."""
        times = [
            thread.deadline for thread in self._threads if thread.deadline is not None and thread.until is not None
        ]
        if not times:
            return False
        self.now = max(self.now, min(times))
        if self.now > VIRTUAL_S_MAX:
            self._end(f"a hang: not over within {VIRTUAL_S_MAX:g} s of virtual time")
        return True

    def _hand_over(self, me: ManagedThread, to: ManagedThread) -> None:
        self._current = to
        to.baton.release()
        me.baton.acquire()
        if self.is_over:
            raise Torn
