"""A node's fast path into a real engine: each caller on it is a thread of the simulation, which runs the C functions
that ship up to where it waits. When it goes on, and when it loses its patience, is the simulation's choice.

A caller waits for its op, or starts it and goes on (`_Call.is_started`). Then any number of threads wait for it later:
none, one, or several at once; and what the library keeps of the op is forgotten before its end or after. A thread that
waits drives the engine if no other peer does, as `native/src/driver.h` has it, which the library decides by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pccl.protocol.peer import effects as ps
from pccl.runtime.data_plane.op_spec import OpSpec
from tests.simulation.fast_path import FastPath, Report
from tests.simulation.real.library import Library

WAITS_MS = (1, 3, 20)
"""The times that callers wait on the fast path, one of them in a run."""
STARTED = 0.4
"""The share of ops whose callers go on."""
WAITERS = (0, 1, 1, 2, 3)
"""The numbers of threads that wait for such an op."""
FORGOTTEN_EARLY = 0.5
"""The probability that an op without a waiting caller is forgotten at once."""


@dataclass
class _Call:
    """An op on the fast path."""

    path: Any
    threads: list[int]
    """Those that have submitted it or wait for it, and have not been seen to be over."""
    is_started: bool
    waiters: int = 0
    """Threads that will wait for it, but do not yet."""
    started: Any = None
    """What the library has returned for an op that was started; None: not yet, or it is forgotten."""
    is_completed: bool | None = None
    """Whether it was completed or handed over; None: that is not known."""

    def note_end(self, is_completed: bool) -> bool:
        """Note its end; all that learn it must learn the same. Return whether this is news."""
        assert self.is_completed in (None, is_completed), "completed for one, and handed over for another"
        is_news = self.is_completed is None
        self.is_completed = is_completed
        return is_news


class RealFastPath(FastPath):
    def __init__(self, library: Library, suits: Callable[[ps.SubmitOp], bool]) -> None:
        """`suits` says whether an op is small enough and of the right kind."""
        super().__init__()
        self._library = library
        self._suits = suits
        self._threads: Any = None
        self._paths: list[Any] = []
        self._openings: list[int] = []
        """The numbers of the opening in each engine thread; none while it is closed."""
        self._wait_ms = WAITS_MS[0]
        self._rng = random.Random(0)
        self.calls: dict[int, _Call] = {}
        """Ops on the way with a rest left here, by number."""
        self.on_thread: Callable[[int], None] = lambda thread: None
        """Is told of every thread that calls the library."""
        self.later: Callable[[Callable[[], None]], None] = lambda action: None
        """Has something happen at a time that the simulation chooses."""
        self.poll: Callable[[], list[Report]] = list
        """Returns what the engine has reported since."""
        self.after: Callable[[], None] = lambda: None
        """Has callers go on that have left the fast path."""

    def attach(self, threads: Any, rng: random.Random) -> None:
        """Make the ways into the engine's threads. `rng` draws how ops are called."""
        self._threads = threads
        self._paths = threads.new_fast_paths()
        self._rng = rng
        self._wait_ms = rng.choice(WAITS_MS)

    def suits(self, submission: ps.SubmitOp) -> bool:
        return self._suits(submission)

    def run(self, effect: ps.SubmitOp, spec: OpSpec) -> None:
        """Have a caller run or start an op that has come through, up to where it waits."""
        if not self._openings:
            self._openings = [path.open() for path in self._paths]
        request = self._threads.new_request()
        request.fill(effect, spec)
        first_thread = self._library.engine.first_thread
        at = first_thread(effect.tag, effect.sequence, len(self._paths))
        is_started = self._rng.random() < STARTED
        lib, path = self._library.lib, self._paths[at]
        make = lib.pccl_sim_start if is_started else lib.pccl_sim_call
        thread = make(path._native, self._openings[at], request.native, effect.sequence, self._wait_ms)
        call = self.calls[effect.op] = _Call(path, [thread], is_started)
        self.on_thread(thread)
        if is_started:
            call.waiters = self._rng.choice(WAITERS)
            for _ in range(call.waiters):
                self.later(lambda: self._join(effect.op))

    def _join(self, op: int) -> None:
        """Have one more thread wait for an op that was started."""
        if self._threads is None:
            return
        call = self.calls[op]
        call.waiters -= 1
        self._finish_start(call)
        if call.started is not None:
            thread = self._library.lib.pccl_sim_join_call(call.path._native, call.started)
            call.threads.append(thread)
            self.on_thread(thread)
        self.after()

    def _finish_start(self, call: _Call) -> None:
        """Have the thread that starts an op return from that."""
        if call.is_started and call.started is None and call.threads:
            self._library.lib.pccl_sim_finish(call.threads[0])
            self._take_started(call)

    def _take_started(self, call: _Call) -> None:
        call.started = self._library.lib.pccl_sim_started(call.threads.pop(0))
        if call.waiters == 0 and self._rng.random() < FORGOTTEN_EARLY:
            self._forget(call)

    def _forget(self, call: _Call) -> None:
        self._library.lib.pccl_fast_path_forget(call.path._native, call.started)
        call.started = None

    def is_waited_for(self, op: int) -> bool:
        """Whether a caller is there for an op: in it, or about to wait for it."""
        call = self.calls.get(op)
        return call is not None and bool(call.threads or call.waiters)

    def hand_over(self, op: int) -> Iterator[Report]:
        """Have a caller wait no longer; the engine's reports say what has become of its op. Where none waits, the one
        that gives the op up has the path closed."""
        call = self.calls.get(op)
        if call is not None and call.is_started:
            self._finish_start(call)
            if not call.threads and op in self.running:
                return self.close()
        self.expire(op)
        return iter(())

    def time_out(self, op: int) -> Iterator[Report]:
        call = self.calls[op]
        self._finish_start(call)
        if call.threads:
            self.expire(op)
        return iter(())

    def expire(self, op: int) -> None:
        call = self.calls.get(op)
        for thread in call.threads if call is not None else ():
            self._library.lib.pccl_sim_finish(thread)
        if call is not None:
            self.after()
        self.running.pop(op, None)

    @property
    def waiting(self) -> list[int]:
        return [op for op in self.running if self.calls[op].threads]

    @property
    def is_left_alone(self) -> bool:
        """Whether an op without a waiting caller runs: its time passes, too."""
        return any(not self.calls[op].threads for op in self.running)

    @property
    def threads(self) -> list[int]:
        """The threads of all callers."""
        return [thread for call in self.calls.values() for thread in call.threads]

    @property
    def closes_to_hear(self) -> bool:
        return len(self._paths) > 1

    def close(self) -> Iterator[Report]:
        self.shut()
        return iter(self.poll())

    def shut(self) -> None:
        self.start = None
        self.uses.clear()
        self._openings = []
        for path in self._paths:
            path.close()
        self.running.clear()

    def ended(self) -> Iterator[tuple[ps.SubmitOp, bool]]:
        """Yield the ops whose callers have left the fast path since, and whether they are completed."""
        lib, ffi = self._library.lib, self._library.ffi
        for op, call in list(self.calls.items()):
            if call.is_started and call.started is None and call.threads and lib.pccl_sim_is_over(call.threads[0]):
                self._take_started(call)
            for thread in list(call.threads):
                if lib.pccl_sim_is_over(thread):
                    call.threads.remove(thread)
                    self.running.pop(op, None)
                    outcome = lib.pccl_sim_call_outcome(thread, ffi.new("pccl_fast_path_result *"))
                    assert outcome in (lib.PCCL_FAST_PATH_COMPLETED, lib.PCCL_FAST_PATH_HANDED_OVER), outcome
                    is_completed = outcome == lib.PCCL_FAST_PATH_COMPLETED
                    if call.note_end(is_completed):
                        yield self.submissions[op], is_completed
            self._drop_if_over(op, call)

    def heard(self, op: int, is_completed: bool) -> Iterator[ps.SubmitOp]:
        """Note that the engine has reported an op as completed or handed over. Yield it if it is completed, and no
        caller has found that out."""
        call = self.calls.get(op)
        self.running.pop(op, None)
        if call is not None and call.is_started:
            is_news = call.note_end(is_completed)
            self._drop_if_over(op, call)
            if is_completed and is_news:
                yield self.submissions[op]

    def _drop_if_over(self, op: int, call: _Call) -> None:
        if call.is_completed is not None and not call.threads and not call.waiters:
            if call.started is not None:
                self._forget(call)
            del self.calls[op]

    def end(self) -> None:
        """Have all callers return, since the engine has ended, and forget what they have started."""
        for call in self.calls.values():
            self._finish_start(call)
            for thread in call.threads:
                self._library.lib.pccl_sim_finish(thread)
            if call.started is not None:
                self._forget(call)
        self.calls.clear()
        self._threads = None
