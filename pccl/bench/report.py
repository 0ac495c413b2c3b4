"""Results for people (tables) and for programs (JSON)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from pccl import __version__
from pccl.bench.dimensions import constants, varying
from pccl.bench.kill import KillReport
from pccl.bench.measure import Row, Timing
from pccl.bench.messages import ALL_REDUCE, BARRIER, COMMIT, GLOO, RAW_RING
from pccl.bench.plan import Plan
from pccl.bench.sizes import format_bytes, format_bytes_about, format_megabytes_per_second, format_seconds


class Machine(msgspec.Struct, frozen=True):
    system: str
    processor: str
    cores: int
    python: str
    pccl: str
    numpy: str
    torch: str | None
    """The version of torch; None if the benchmark does not use it."""


class BenchReport(msgspec.Struct, frozen=True):
    machine: Machine
    plan: Plan
    rows: list[Row]


def this_machine(*, with_torch: bool) -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        system=platform.platform(),
        processor=platform.machine(),
        cores=cores,
        python=platform.python_version(),
        pccl=__version__,
        numpy=importlib.metadata.version("numpy"),
        torch=importlib.metadata.version("torch") if with_torch else None,
    )


def write_json(path: Path, report: BenchReport | KillReport) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


class _Column(NamedTuple):
    heading: str
    cell: Callable[[Row], str]


def _measured(plan: Plan) -> list[_Column]:
    """Return the columns of what was measured. With the size and one more column they fit into 80 characters."""
    columns = [
        _Column("median", lambda row: format_seconds(row.pccl.median_s)),
        _Column("p95", lambda row: format_seconds(row.pccl.p95_s)),
        _Column("algbw\nMB/s", lambda row: format_megabytes_per_second(row.pccl.algorithm_bytes_per_s)),
        _Column("busbw\nMB/s", lambda row: format_megabytes_per_second(row.pccl.bus_bytes_per_s)),
    ]
    if RAW_RING in plan.rulers:
        columns += [
            _Column("raw ring", lambda row: _median(row.raw_ring)),
            _Column("% of\nraw", lambda row: _unless_none("{:.0f}", row.per_cent_of_raw_ring)),
        ]
    if GLOO in plan.rulers:
        columns += [
            _Column("Gloo", lambda row: _median(row.gloo)),
            _Column("Gloo/\npccl", lambda row: _unless_none("{:.2f}", row.times_as_fast_as_gloo)),
        ]
    if plan.memory:
        columns.append(
            _Column("scratch", lambda row: format_bytes_about(row.memory.scratch_bytes_max) if row.memory else "-")
        )
    return columns


def rows_table(plan: Plan, rows: Sequence[Row]) -> Table:
    columns = [_Column(one.heading, one.cell_of) for one in varying(rows)]
    columns += [
        _Column("size", lambda row: "-" if row.collective == BARRIER else format_bytes(row.bytes)),
        *_measured(plan),
    ]
    table = Table(title=title(plan, rows), box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for column in columns:
        table.add_column(column.heading, justify="right", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def title(plan: Plan, rows: Sequence[Row]) -> str:
    place = "in place" if plan.in_place else "out of place"
    what = "all-reduce" if plan.collectives == [ALL_REDUCE] else "collectives"
    parts = [f"{what} of {plan.dtype}", *constants(rows), place, f"{plan.iterations} iterations"]
    return ", ".join([*parts, "encrypted"] if plan.encrypt else parts)


def print_table(table: Table, console: Console) -> None:
    """Print a table. If it is wider than the console its lines stay whole: numbers must not be cut off."""
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)


def _median(timing: Timing | None) -> str:
    return format_seconds(timing.median_s) if timing else "-"


def _unless_none(template: str, value: float | None) -> str:
    return "-" if value is None else template.format(value)


def kill_table(report: KillReport) -> Table:
    plan = report.plan
    table = Table(
        title=f"SIGKILL of one of {plan.peers} peers reducing {format_bytes(plan.bytes)}",
        caption=f"usual step {format_seconds(report.usual_step_s)}, longest gap "
        f"{format_seconds(report.longest_gap_s)}: the loss cost {report.cost_s * 1e3:.1f} ms",
    )
    for heading in ("survivor", "interrupted reduce", "usual step", "longest gap"):
        table.add_column(heading, justify="right")
    for survivor in report.survivors:
        verdict = survivor.verdict if survivor.verdict == COMMIT else f"abort ({survivor.verdict})"
        table.add_row(
            str(survivor.rank), verdict, format_seconds(survivor.usual_step_s), format_seconds(survivor.longest_gap_s)
        )
    return table
