"""Results for people (tables) and for programs (JSON)."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table

from pccl import __version__
from pccl.bench.kill import KillReport
from pccl.bench.measure import Plan, Row
from pccl.bench.messages import COMMIT
from pccl.bench.sizes import format_bytes, format_rate, format_seconds


class Machine(msgspec.Struct, frozen=True):
    system: str
    processor: str
    cores: int
    python: str
    pccl: str


class BenchReport(msgspec.Struct, frozen=True):
    machine: Machine
    plan: Plan
    rows: list[Row]


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(platform.platform(), platform.machine(), cores, platform.python_version(), __version__)


def write_json(path: Path, report: BenchReport | KillReport) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def rows_table(plan: Plan, rows: Iterable[Row]) -> Table:
    quantization = "" if plan.quantization == "none" else f", {plan.quantization} quantized"
    # Fits into 80 columns.
    table = Table(
        title=f"all-reduce of {plan.dtype}{quantization}, {plan.iterations} iterations",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for heading in ("peers", "size", "tensors", "median", "p95", "algbw", "busbw", "raw ring", "of raw"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        raw_ring = row.raw_ring and format_seconds(row.raw_ring.median_s)
        table.add_row(
            str(row.peers),
            format_bytes(row.bytes),
            str(row.tensors),
            format_seconds(row.pccl.median_s),
            format_seconds(row.pccl.p95_s),
            format_rate(row.pccl.algorithm_bytes_per_s),
            format_rate(row.pccl.bus_bytes_per_s),
            raw_ring or "-",
            f"{row.per_cent_of_raw_ring:.0f} %" if raw_ring else "-",
        )
    return table


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
