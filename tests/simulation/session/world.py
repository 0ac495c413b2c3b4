"""One simulated run: its machines, its log, and how it is brought to an end.

A run has three parts. While faults happen, callers go round their loops. Then every fault is mended, and all callers
that live must make progress within PROGRESS_S, or something hangs. Then all leave, which takes LEAVE_S at most, and
nothing may be left.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio
from trio.testing import MockClock

from pccl.protocol.failover.bootstrap import Start
from tests.simulation.session.checks import Checker, CheckError
from tests.simulation.session.determinism import seeded
from tests.simulation.session.device import known_arrays
from tests.simulation.session.machines import MASTER_PORT, Process, process_of_task, serve_master
from tests.simulation.session.network import Network
from tests.simulation.session.program import Caller, Plan

PROGRESS_S = 240.0
PROGRESS_ROUNDS = 3
LEAVE_S = 120.0
LOG_LINES_SHOWN = 60


class World(logging.Handler):
    """A run under way. It is the handler of pccl's log, too, of the thread that plays it."""

    def __init__(
        self,
        seed: int,
        masters: int,
        master_hosts: Sequence[str] = (),
        founders: int = 1,
        new_caller: type[Caller] = Caller,
    ) -> None:
        """There are that many `masters`, on `master_hosts` if they are given, the standbys last."""
        super().__init__()
        self.founders = founders
        """The number of peers that found the run together."""
        self._new_caller = new_caller
        self._thread = threading.get_ident()
        self.seed = seed
        self.log: list[str] = []
        self.errors: list[str] = []
        self.checker = Checker(lambda caller: self.peers[caller].is_alive)
        self.network = Network(seed, self.note)
        self.master_hosts = list(master_hosts) or [f"10.0.1.{number + 1}" for number in range(masters)]
        self.masters: dict[str, Process] = {}
        self.peers: dict[int, Process] = {}
        self.callers: dict[int, Caller] = {}
        addresses = [(host, MASTER_PORT) for host in self.master_hosts]
        self.plan = Plan(seed, addresses, self.checker, self.note)
        self._nursery: trio.Nursery | None = None

    # The log.

    def note(self, text: str) -> None:
        self.log.append(f"{trio.current_time():9.4f}  {text}")

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread != self._thread:  # another program's, whose peers have a thread of their own
            return
        text = f"{record.levelname} {record.name} {record.getMessage()}"
        if record.exc_info is not None:
            text += "".join(["\n", *traceback.format_exception(*record.exc_info)])
        self.note(text)
        process = process_of_task.get(None)
        # What a process does while it is unwound no peer would see: a real one is gone at once.
        if record.levelno >= logging.ERROR and (process is None or process.is_alive):
            self.errors.append(text)

    # Machines.

    def start_master(self, host: str, start: Start, is_standby: bool) -> None:
        others = [address for address in self.plan.masters if address[0] != host] if is_standby else []
        process = self.masters[host] = Process(host, self.network, self.seed)
        self.note(f"master {host} starts as {start.value}{', a standby' if others else ''}")
        self._start(process, lambda: serve_master(process, start, others, self.plan.token, self.founders))

    def start_peer(self) -> int:
        number = len(self.peers)
        process = self.peers[number] = Process(f"10.0.0.{number + 1}", self.network, self.seed)
        caller = self.callers[number] = self._new_caller(number, process, self.plan)
        self.note(f"caller {number} starts")
        self._start(process, caller.run)
        return number

    def _start(self, process: Process, main: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(process.run, main)

    @property
    def alive(self) -> list[int]:
        return [number for number, process in self.peers.items() if process.is_alive]

    # The run.

    async def run(self, faults: Callable[[World], Awaitable[None]]) -> None:
        """Play a run where `faults` happen. CheckError."""
        async with trio.open_nursery() as net:
            self.network.nursery = net
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await faults(self)
                self.network.mend()
                self.note("all is mended")
                await self.until_progress()
                self.note("the run is over")
                self.plan.is_over = True
                with trio.move_on_after(LEAVE_S) as scope:
                    for number in self.alive:
                        await self.peers[number].ended.wait()
                if scope.cancelled_caught:
                    raise CheckError(f"callers {self.alive} do not leave within {LEAVE_S:g} s")
                for master in self.masters.values():
                    master.kill()
            await trio.sleep(1.0)
            net.cancel_scope.cancel()
        self.checker.finish()
        if self.errors:
            raise CheckError(f"logged as errors: {self.errors[:5]}")

    async def until_progress(self) -> None:
        """Wait until all callers that live have made progress. CheckError."""
        goal = {number: self.callers[number].progress + PROGRESS_ROUNDS for number in self.alive}
        end_s = trio.current_time() + PROGRESS_S
        while any(self.callers[number].progress < goal[number] for number in goal):
            if trio.current_time() >= end_s:
                stuck = [number for number in goal if self.callers[number].progress < goal[number]]
                raise CheckError(f"callers {stuck} make no progress within {PROGRESS_S:g} s after the last fault")
            await trio.sleep(0.5)


def play(world: World, faults: Callable[[World], Awaitable[None]]) -> None:
    """Play a run from beginning to end. CheckError, or whatever else was raised unexpectedly."""
    gc.collect()  # what others have left would say so and close its descriptors
    descriptors = _descriptors()
    tree = logging.getLogger("pccl")
    before = tree.level, tree.propagate
    tree.addHandler(world)
    tree.setLevel(logging.DEBUG)
    tree.propagate = False
    try:
        with seeded(world.seed), known_arrays():
            trio.run(world.run, faults, clock=MockClock(autojump_threshold=0))
        left = _descriptors() - descriptors
        if left > 0:  # perhaps only until what holds them is collected
            gc.collect()
            left = _descriptors() - descriptors
        if left > 0:
            raise CheckError(f"{left} descriptors are left open")
    finally:
        tree.removeHandler(world)
        tree.setLevel(before[0])
        tree.propagate = before[1]


def _descriptors() -> int:
    with suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0
