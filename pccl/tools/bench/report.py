"""A benchmark's results: rows, tables and JSON.

If a dimension of the plan differs between rows, it is a column in the table. If it is the same in all rows, the title
names it unless it has its default.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from pccl import __version__
from pccl.tools.bench.cases import Memory
from pccl.tools.bench.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    GATHER,
    GLOO,
    PCCL,
    RAW_RING,
    REDUCE_SCATTER,
    SCATTER,
    Case,
    Plan,
    format_bytes,
    format_bytes_about,
    format_megabytes_per_second,
    format_seconds,
)


class Timing(msgspec.Struct, frozen=True):
    median_s: float
    p95_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


class Row(msgspec.Struct, frozen=True):
    peers: int
    connections: int
    bytes: int
    tensors: int
    quantization: str
    algorithm: str
    pccl: Timing
    raw_ring: Timing | None
    gloo: Timing | None
    per_cent_of_raw_ring: float | None
    times_as_fast_as_gloo: float | None
    memory: Memory | None
    """The maximum over all ranks."""
    collective: str = ALL_REDUCE


class Machine(msgspec.Struct, frozen=True):
    system: str
    processor: str
    cores: int
    python: str
    pccl: str
    numpy: str
    torch: str | None


class BenchReport(msgspec.Struct, frozen=True):
    machine: Machine
    plan: Plan
    rows: list[Row]


def row(
    world_size: int,
    connections: int,
    case: Case,
    slowest_s: Mapping[str, Sequence[float]],
    memory: Memory | None,
) -> Row:
    """Return a case's row. `slowest_s` holds the slowest rank's seconds for each contender and iteration."""
    timings = {name: timing(seconds, case.bytes, world_size, case.collective) for name, seconds in slowest_s.items()}
    pccl, raw_ring, gloo = timings[PCCL], timings.get(RAW_RING), timings.get(GLOO)
    return Row(
        *(world_size, connections, case.bytes, case.tensors, case.quantization, case.algorithm),
        *(pccl, raw_ring, gloo),
        100 * raw_ring.median_s / pccl.median_s if raw_ring else None,
        gloo.median_s / pccl.median_s if gloo else None,
        memory,
        case.collective,
    )


def timing(slowest_s: Sequence[float], size_bytes: int, world_size: int, collective: str = ALL_REDUCE) -> Timing:
    """Return a case's times and rates. Bus bandwidth is the rate of the busiest link, as in nccl-tests."""
    median_s = statistics.median(slowest_s)
    p95_s = statistics.quantiles(slowest_s, n=20, method="inclusive")[-1] if len(slowest_s) > 1 else median_s
    rate = 0.0 if collective == BARRIER else size_bytes / median_s
    share = (world_size - 1) / world_size
    passes = {ALL_REDUCE: 2 * share} | dict.fromkeys((ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER), share)
    return Timing(median_s, p95_s, rate, rate * passes.get(collective, 1.0))


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


class Dimension(NamedTuple):
    """A quantity other than the size that a benchmark can vary."""

    field: str
    heading: str
    phrase: Callable[[Any], str]
    default: Any

    def of(self, row: Row) -> Any:
        return getattr(row, self.field)


DIMENSIONS = [
    Dimension("collective", "collective", str, ALL_REDUCE),
    Dimension("peers", "peers", "{} peers".format, None),
    Dimension("connections", "conns", lambda count: f"{count or 'auto'} connections", 0),
    Dimension("tensors", "tensors", "{} tensors".format, 1),
    Dimension("quantization", "quantized", lambda text: "unquantized" if text == "none" else text, "none"),
    Dimension("algorithm", "algo", "algorithm {}".format, "auto"),
]


def varying(rows: Sequence[Row]) -> list[Dimension]:
    return [dimension for dimension in DIMENSIONS if len({dimension.of(row) for row in rows}) > 1]


def rows_table(plan: Plan, rows: Sequence[Row]) -> Table:
    table = Table(title=_title(plan, rows), box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for row in rows:
        cells = {one.heading: str(one.of(row) or "auto") for one in varying(rows)} | _results(plan, row)
        if not table.columns:
            for heading in cells:
                table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
        table.add_row(*cells.values())
    return table


def _results(plan: Plan, row: Row) -> dict[str, str]:
    """Return the results by heading. With the size and one more column, they fit into 80 characters."""
    cells = {
        "size": "-" if row.collective == BARRIER else format_bytes(row.bytes),
        "median": format_seconds(row.pccl.median_s),
        "p95": format_seconds(row.pccl.p95_s),
        "algbw\nMB/s": format_megabytes_per_second(row.pccl.algorithm_bytes_per_s),
        "busbw\nMB/s": format_megabytes_per_second(row.pccl.bus_bytes_per_s),
    }
    if RAW_RING in plan.rulers:
        cells |= {"raw ring": _median(row.raw_ring), "% of\nraw": _unless_none("{:.0f}", row.per_cent_of_raw_ring)}
    if GLOO in plan.rulers:
        cells |= {"Gloo": _median(row.gloo), "Gloo/\npccl": _unless_none("{:.2f}", row.times_as_fast_as_gloo)}
    if row.memory is not None:
        cells["scratch"] = format_bytes_about(row.memory.scratch_bytes_max)
    return cells


def _title(plan: Plan, rows: Sequence[Row]) -> str:
    what = "all-reduce" if plan.collectives == [ALL_REDUCE] else "collectives"
    parts = [f"{what} of {plan.dtype}"]
    for dimension in DIMENSIONS:
        if rows and dimension not in varying(rows) and dimension.of(rows[0]) != dimension.default:
            parts.append(dimension.phrase(dimension.of(rows[0])))
    parts += ["in place" if plan.in_place else "out of place", f"{plan.iterations} iterations"]
    parts += [f"{plan.pause_s:g} s apart"] * (plan.pause_s > 0)
    return ", ".join([*parts, "encrypted"] if plan.encrypt else parts)


def print_table(table: Table, console: Console) -> None:
    """Print a table. Lines wider than the console stay whole, because numbers must not be cut off."""
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)


def _median(timing: Timing | None) -> str:
    return format_seconds(timing.median_s) if timing else "-"


def _unless_none(template: str, value: float | None) -> str:
    return "-" if value is None else template.format(value)
