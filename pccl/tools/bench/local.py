"""Benchmarks between processes on this machine: a master and its peers."""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pccl import MasterNode
from pccl.tools.bench.peer import COMMIT, LocalPeer, Step
from pccl.tools.bench.plan import Plan, cases
from pccl.tools.bench.report import KillPlan, KillReport, Row, Survivor
from pccl.tools.harness import Child, Processes
from pccl.tools.report import ToolError

SHUTDOWN_TIMEOUT_S = 5.0


def measure(plan: Plan) -> Iterator[Row]:
    cases(plan)  # rejects an invalid plan before any process starts
    token = secrets.token_urlsafe() if plan.encrypt else None
    for world_size in plan.peers:
        peer = LocalPeer("", 0, plan=msgspec.structs.replace(plan, peers=[world_size]))
        with _peers(peer, world_size, token) as (processes, children):
            rows = 0
            try:
                for _, row in _messages(processes, children, Row):
                    rows += 1
                    yield row
            except ToolError:
                if rows < plan.rows // len(plan.peers):
                    raise  # otherwise the measurement is complete: torch's processes may abort as they end


def measure_kill(plan: KillPlan) -> KillReport:
    """Kill one of the peers in the middle of a reduce, and return the cost to the others.

    A gap is the time between the ends of two consecutive committed reduces on a survivor. A usual gap is one step; the
    longest gap contains the loss, the new view and the following reduce.
    """
    steps: list[list[Step]] = [[] for _ in range(plan.peers)]
    killed_at_s: float | None = None
    killed: set[Child] = set()
    with _peers(LocalPeer("", 0, kill=plan), plan.peers) as (processes, children):
        victim = children[-1]
        for child, step in _messages(processes, children, Step, killed):
            steps[children.index(child)].append(step)
            if killed_at_s is None and len(steps[-1]) == plan.steps_before:
                time.sleep(statistics.median(step.end_s - step.start_s for step in steps[-1]) / 2)
                killed_at_s = time.monotonic()
                killed.add(victim)
                victim.popen.kill()
    if killed_at_s is None:
        raise ToolError(f"{victim.name} ended before it was killed")
    survivors = [survivor(rank, each, killed_at_s) for rank, each in enumerate(steps[:-1])]
    usual_step_s = statistics.median(one.usual_step_s for one in survivors)
    longest_gap_s = max(one.longest_gap_s for one in survivors)
    return KillReport(plan, survivors, usual_step_s, longest_gap_s, longest_gap_s - usual_step_s)


def survivor(rank: int, steps: list[Step], killed_at_s: float) -> Survivor:
    ends_s = [step.end_s for step in steps if step.verdict == COMMIT]
    gaps_s = [(later - earlier, later) for earlier, later in itertools.pairwise(ends_s)]
    usual_s = [gap_s for gap_s, end_s in gaps_s if end_s < killed_at_s]
    after = [step for step in steps if step.end_s >= killed_at_s]
    # A peer killed between two reduces is missing from the second; a survivor may see the first end after the kill.
    interrupted = next((step for step in after if step.verdict != COMMIT), after[0] if after else None)
    if interrupted is None or not usual_s:
        raise ToolError(f"rank {rank} did not reduce both before and after the kill")
    return Survivor(rank, interrupted.verdict, statistics.median(usual_s), max(gaps_s)[0])


@contextmanager
def _peers(peer: LocalPeer, count: int, token: str | None = None) -> Iterator[tuple[Processes, list[Child]]]:
    """Run a master and `count` such peers during the `with` block."""
    node = MasterNode(listen_address="127.0.0.1:0", token=token)
    node.run()
    try:
        with Processes({"PCCL_TOKEN": token} if token else {}) as processes:
            children = []
            for number in range(count):
                own = msgspec.structs.replace(peer, master=node.address, number=number)
                options = msgspec.json.encode(own).decode()
                children.append(processes.start(f"rank {number}", "pccl.tools.bench.peer", options))
            yield processes, children
    finally:
        node.interrupt()
        node.wait(SHUTDOWN_TIMEOUT_S)


def _messages(
    processes: Processes, children: list[Child], kind: Any, killed: Collection[Child] = ()
) -> Iterator[tuple[Child, Any]]:
    """Yield all peers' messages until they have ended. Raise ToolError if a peer fails that is not in `killed`."""
    running = set(children)
    while running:
        event = processes.next_event()
        assert event is not None
        child, line = event
        if isinstance(line, bytes):
            yield child, msgspec.json.decode(line, type=kind)
            continue
        running.discard(child)
        if line and child not in killed:
            raise ToolError(f"{child.name} ended with {line}: {child.last_errors()}")
