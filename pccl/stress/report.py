"""The report of a stress run, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from rich.table import Table

from pccl.stress.checker import Counts
from pccl.stress.plan import Plan


class Disturbances(msgspec.Struct, rename={"partitions": "split", "failover_s": "succession_s"}):
    """The disturbances of a run by its supervisor. The JSON keeps the names that scripts read."""

    started: int = 0
    killed: int = 0
    frozen: int = 0
    dismissed: int = 0
    partitions: int = 0
    """The number of partitions."""
    masters_killed: int = 0
    masters_stood_by: int = 0
    """The number of killed masters that came back as standbys."""
    failover_s: float = 0.0
    """The longest time from when a new master listened to the end of the first step after it, if nothing else happened
    in between."""
    interrupted: int = 0
    """Signals sent."""
    peers_most: int = 0
    """Processes at once."""


class Report(msgspec.Struct, frozen=True):
    plan: Plan
    seconds: float
    counts: Counts
    disturbances: Disturbances
    problems: list[str]
    longest_step: list[str]
    """The events in the longest step and right before, if it was long."""
    logs: str | None
    """The folder with everybody's log, kept because something went wrong."""

    @property
    def passed(self) -> bool:
        return not self.problems


def to_json(report: Report) -> str:
    facts: dict[str, Any] = msgspec.to_builtins(report)
    facts = {"passed": report.passed, **facts, "counts": dataclasses.asdict(report.counts)}
    return msgspec.json.format(msgspec.json.encode(facts)).decode()


def table(report: Report) -> Table:
    counts, done = report.counts, report.disturbances
    rows = [
        ("peers started", f"{done.started}, at most {done.peers_most} at once"),
        ("killed", str(done.killed)),
        ("frozen", str(done.frozen)),
        ("masters killed", f"{done.masters_killed}, {done.masters_stood_by} came back as standbys"),
        ("longest wait for steps after that", f"{done.failover_s:.2f} s"),
        ("left of their own accord", str(done.dismissed)),
        ("connections cut", str(counts.cuts)),
        ("partitions", str(done.partitions)),
        ("interrupts", f"{done.interrupted}, after {counts.sessions_left} of them or of timeouts a peer began anew"),
        ("joins and reconnections accepted", str(counts.sessions)),
        ("evictions seen by the evicted", str(counts.evictions)),
        ("steps of a peer, all ops committed", str(counts.steps)),
        ("steps that ended alone", str(counts.steps_cut_short)),
        ("ops committed", str(counts.ops_committed)),
        ("results read and compared", str(counts.results_checked)),
        ("aborts heard, and retried by hand", str(counts.ops_aborted)),
        ("most participants of an op", str(counts.participants_max)),
        ("syncs of a peer", f"{counts.syncs}, {counts.sync_bytes / 1e6:.1f} MB received"),
        ("syncs that failed for want of a donor", str(counts.sync_failures)),
        ("longest step", f"{counts.longest_step_s:.2f} s"),
        ("problems", str(len(report.problems))),
    ]
    result = Table(title=f"seed {report.plan.seed}, {report.seconds:.0f} s", show_header=False, title_justify="left")
    result.add_column()
    result.add_column(justify="right")
    for row in rows:
        result.add_row(*row)
    return result
