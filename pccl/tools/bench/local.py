"""Benchmarks between processes on this machine: a master and its peers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from pccl import MasterNode
from pccl.tools.bench.peer import LocalPeer
from pccl.tools.bench.plan import Plan, cases
from pccl.tools.bench.report import Row
from pccl.tools.harness import Child, Processes
from pccl.tools.report import ToolError

SHUTDOWN_TIMEOUT_S = 5.0


def measure(plan: Plan) -> Iterator[Row]:
    cases(plan)  # rejects an invalid plan before any process starts
    token = secrets.token_urlsafe() if plan.encrypt else None
    for world_size in plan.peers:
        peer = LocalPeer("", 0, msgspec.structs.replace(plan, peers=[world_size]))
        with _peers(peer, world_size, token) as (processes, children):
            rows = 0
            try:
                for row in _rows(processes, children):
                    rows += 1
                    yield row
            except ToolError:
                if rows < plan.rows // len(plan.peers):
                    raise  # otherwise the measurement is complete: torch's processes may abort as they end


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


def _rows(processes: Processes, children: list[Child]) -> Iterator[Row]:
    """Yield the rows until all peers have ended. Raise ToolError if a peer fails."""
    running = set(children)
    while running:
        event = processes.next_event()
        assert event is not None
        child, line = event
        if isinstance(line, bytes):
            yield msgspec.json.decode(line, type=Row)
            continue
        running.discard(child)
        if line:
            raise ToolError(f"{child.name} ended with {line}: {child.last_errors()}")
