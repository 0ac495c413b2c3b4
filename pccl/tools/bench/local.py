"""Benchmarks between processes of this machine: the coordinator of a master and W workers."""

from __future__ import annotations

import itertools
import secrets
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from pccl import MasterNode
from pccl.tools.bench.cases import Samples
from pccl.tools.bench.plan import GLOO, Plan, cases
from pccl.tools.bench.report import KillPlan, KillReport, Row, Survivor, row
from pccl.tools.bench.worker import COMMIT, Connect, Hello, Loop, Ready, Reply, Request, Setup, Step, Steps
from pccl.tools.harness import Child, Processes
from pccl.tools.report import ToolError

SHUTDOWN_TIMEOUT_S = 5.0

ReplyT = TypeVar("ReplyT", bound=Reply)


def measure(plan: Plan) -> Iterator[Row]:
    todo = cases(plan)
    for world_size in plan.peers:
        with workers(world_size, against_gloo=GLOO in plan.rulers, encrypt=plan.encrypt) as group:
            for connections in plan.connections:
                group.connect(connections)
                for case in todo:
                    group.send_all(case)
                    samples = group.receive_all(Samples)
                    slowest_s = {name: slowest([one.seconds[name] for one in samples]) for name in samples[0].seconds}
                    memories = [one.memory for one in samples if one.memory is not None]
                    yield row(world_size, connections, case, slowest_s, memories)


def slowest(seconds_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of each iteration, which lasts until its last rank ends."""
    return [max(iteration) for iteration in zip(*seconds_by_rank, strict=True)]


def measure_kill(plan: KillPlan) -> KillReport:
    """Kill one of the peers in the middle of a reduce, and return the cost to the others.

    A gap is the time between the ends of two consecutive committed reduces of a survivor. The usual gap is a step; the
    longest one contains the loss, the new view and the reduce after it.
    """
    victim = plan.peers - 1
    with workers(plan.peers) as group:
        group.connect(plan.connections)
        for rank in range(plan.peers):
            group.send(rank, Loop(plan.bytes, plan.steps_after, announce_steps=rank == victim))
        steps = [group.receive(victim, Step) for _ in range(plan.steps_before)]
        time.sleep(statistics.median(step.end_s - step.start_s for step in steps) / 2)
        killed_at_s = time.monotonic()
        group.kill(victim)
        survivors = [survivor(rank, group.receive(rank, Steps).steps, killed_at_s) for rank in range(victim)]
    usual_step_s = statistics.median(one.usual_step_s for one in survivors)
    longest_gap_s = max(one.longest_gap_s for one in survivors)
    return KillReport(plan, survivors, usual_step_s, longest_gap_s, longest_gap_s - usual_step_s)


def survivor(rank: int, steps: list[Step], killed_at_s: float) -> Survivor:
    ends_s = [step.end_s for step in steps if step.verdict == COMMIT]
    gaps_s = [(later - earlier, later) for earlier, later in itertools.pairwise(ends_s)]
    usual_s = [gap_s for gap_s, end_s in gaps_s if end_s < killed_at_s]
    after = [step for step in steps if step.end_s >= killed_at_s]
    # A peer killed between two reduces is missed in the second; a survivor may note the end of the first later.
    interrupted = next((step for step in after if step.verdict != COMMIT), after[0] if after else None)
    if interrupted is None or not usual_s:
        raise ToolError(f"rank {rank} did not reduce both before and after the kill")
    return Survivor(rank, interrupted.verdict, statistics.median(usual_s), max(gaps_s)[0])


class Workers:
    """Workers that are started and have joined the raw ring, but no run before `connect`."""

    def __init__(self, processes: Processes, children: list[Child], connect: Connect) -> None:
        self._processes = processes
        self._children = children
        self._lines: dict[Child, deque[bytes | int]] = {child: deque() for child in children}
        self._connect = connect

    def connect(self, connections: int = 0) -> None:
        """Join one run, with a number of connections per link (0: the library's choice)."""
        self.send_all(msgspec.structs.replace(self._connect, connections=connections))
        self.receive_all(Ready)

    def send(self, rank: int, request: Request) -> None:
        self._children[rank].send(request)

    def send_all(self, request: Request) -> None:
        for child in self._children:
            child.send(request)

    def receive(self, rank: int, expected: type[ReplyT]) -> ReplyT:
        child = self._children[rank]
        while not self._lines[child]:
            event = self._processes.next_event()
            assert event is not None
            self._lines[event[0]].append(event[1])
        line = self._lines[child].popleft()
        if isinstance(line, int):
            raise ToolError(f"rank {rank} ended with {line}: {child.last_errors()}")
        reply = msgspec.json.decode(line, type=Reply)
        if not isinstance(reply, expected):
            raise ToolError(f"rank {rank} sent {reply}, but {expected.__name__} was expected")
        return reply

    def receive_all(self, expected: type[ReplyT]) -> list[ReplyT]:
        return [self.receive(rank, expected) for rank in range(len(self._children))]

    def kill(self, rank: int) -> None:
        self._children[rank].popen.kill()

    def leave(self) -> None:
        """End all workers, which close their communicators within SHUTDOWN_TIMEOUT_S."""
        deadline_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for child in self._children:
            child.close_input()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.popen.wait(max(0.0, deadline_s - time.monotonic()))


@contextmanager
def workers(world_size: int, *, against_gloo: bool = False, encrypt: bool = False) -> Iterator[Workers]:
    """Start a master and workers for as long as the block lasts."""
    token = secrets.token_urlsafe() if encrypt else None
    with ExitStack() as resources:
        node = MasterNode(listen_address="127.0.0.1:0", token=token)
        node.run()
        resources.callback(node.wait, SHUTDOWN_TIMEOUT_S)
        resources.callback(node.interrupt)
        gloo_store = None
        if against_gloo:
            folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="pccl-bench-"))
            gloo_store = str(Path(folder) / "gloo")
        processes = resources.enter_context(Processes({}))
        children = [processes.start(f"rank {rank}", "pccl.tools.bench.worker") for rank in range(world_size)]
        group = Workers(processes, children, Connect(node.address, 0, token, True if encrypt else None))
        ports = [hello.ring_port for hello in group.receive_all(Hello)]
        for rank in range(world_size):
            group.send(rank, Setup(rank, ports, gloo_store))
        group.receive_all(Ready)
        yield group
        group.leave()
