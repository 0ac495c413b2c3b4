"""A node's fast path into a real engine: each caller on it is a thread of the simulation, which runs the C function
that ships up to where it waits. When it goes on, and when it loses its patience, is the simulation's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pccl.protocol import peer as ps
from pccl.runtime.data_plane.op_spec import OpSpec
from tests.simulation.fast_path import FastPath, Report
from tests.simulation.real.library import Library


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
        self.calls: dict[int, int] = {}
        """The threads that run ops."""
        self.poll: Callable[[], list[Report]] = list
        """Returns what the engine has reported since."""
        self.after: Callable[[], None] = lambda: None
        """Has callers go on who have left the fast path."""

    def attach(self, threads: Any) -> None:
        """Make the ways into the engine's threads."""
        self._threads = threads
        self._paths = threads.new_fast_paths()

    def submission(self, machine: ps.Peer, op: int, tag: int) -> ps.SubmitOp | None:
        sequence = self.uses.get(tag) or machine.uses_of(tag)
        if self.start is None or sequence == 0:
            return None
        submission = replace(self.start, op=op, tag=tag, sequence=sequence)
        if not self._suits(submission):
            return None
        self.uses[tag] = sequence + 1
        self.running[op] = False
        self.submissions[op] = submission
        return submission

    def run(self, effect: ps.SubmitOp, spec: OpSpec) -> None:
        """Have a caller run an op that has come through, up to where it waits."""
        if not self._openings:
            self._openings = [path.open() for path in self._paths]
        request = self._threads.new_request()
        request.fill(effect, spec)
        first_thread = self._library.engine_threads.first_thread
        thread = first_thread(effect.tag, effect.sequence, len(self._paths))
        path = self._paths[thread]
        self.calls[effect.op] = self._library.lib.pccl_sim_call(
            path._native, self._openings[thread], request.native, effect.sequence
        )

    def hand_over(self, op: int) -> Iterator[Report]:
        """Have a caller wait no longer; the engine's reports say what has become of its op."""
        self.expire(op)
        return iter(())

    def expire(self, op: int) -> None:
        thread = self.calls.get(op)
        if thread is not None:
            self._library.lib.pccl_sim_expire(thread)
            self._library.lib.pccl_sim_finish(thread)
            self.after()
        self.running.pop(op, None)

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
        for op, thread in list(self.calls.items()):
            if lib.pccl_sim_is_over(thread):
                del self.calls[op]
                self.running.pop(op, None)
                outcome = lib.pccl_sim_call_outcome(thread, ffi.new("pccl_fast_path_result *"))
                assert outcome in (lib.PCCL_FAST_PATH_COMPLETED, lib.PCCL_FAST_PATH_HANDED_OVER), outcome
                yield self.submissions[op], outcome == lib.PCCL_FAST_PATH_COMPLETED
