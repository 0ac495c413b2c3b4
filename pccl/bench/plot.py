"""Draws the results: time against size, and bus bandwidth against size.

A solid line for each configuration of pccl; its marker tells the number of peers where that varies. The rulers are
dashed, one line for each number of peers (Gloo: and of tensors): of all the cases that measured the same the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pccl.bench.dimensions import DIMENSIONS, Dimension, varying
from pccl.bench.errors import BenchError
from pccl.bench.measure import Row, Timing
from pccl.bench.plan import Plan
from pccl.bench.report import title
from pccl.bench.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = 5.0
LEGEND_CHARACTERS = 150
"""The characters of a legend that fit into the width of the picture."""
MARKERS = "osD^vPX*"
COLOURS = ("blue", "orange", "green", "red", "purple", "brown", "pink", "olive", "cyan")
RULERS: list[tuple[str, str, tuple[str, ...], Callable[[Row], Timing | None]]] = [
    ("raw ring", "0.45", ("peers",), lambda row: row.raw_ring),
    ("Gloo", "black", ("peers", "tensors"), lambda row: row.gloo),
]


def check_plot(path: Path) -> None:
    """Raise BenchError if `draw_plot` could not write `path`, so that the user knows it before a run."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'pccl-collectives[plot]'") from None
    if path.suffix.lstrip(".").lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise BenchError(f"--plot {path}: not a known kind of image; use a name such as bench.png or bench.svg")
    if not path.absolute().parent.is_dir():
        raise BenchError(f"--plot {path}: there is no folder {path.absolute().parent}")


def draw_plot(plan: Plan, rows: Sequence[Row], path: Path) -> None:
    check_plot(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(11, PANEL_INCHES), layout="constrained")
    times, rates = figure.subplots(1, 2, sharex=True)
    _draw(times, rows, lambda timing: timing.median_s * 1e3)
    _draw(rates, rows, lambda timing: timing.bus_bytes_per_s / 1e9)
    times.set(ylabel="median time, ms", yscale="log")
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_major_formatter("{x:g}")
    times.yaxis.set_minor_locator(NullLocator())
    rates.set(ylabel="bus bandwidth, GB/s", ylim=(0, None))
    sizes = sorted({row.bytes for row in rows})
    for axes in (times, rates):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="bytes per rank")
        axes.grid(alpha=0.3)
    handles, labels = times.get_legend_handles_labels()
    columns = max(1, LEGEND_CHARACTERS // (max(map(len, labels)) + 10))
    figure.set_figheight(PANEL_INCHES + 0.25 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title(plan, rows), fontsize="medium")
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, rows: Sequence[Row], value: Callable[[Timing], float]) -> None:
    named = varying(rows)
    world_sizes = sorted({row.peers for row in rows})

    def marker(members: Sequence[Row], turn: int = 0) -> str:
        return MARKERS[(world_sizes.index(members[0].peers) + turn) % len(MARKERS)]

    for number, (label, members) in enumerate(_lines(rows, named).items()):
        points = _points(members, lambda row: row.pccl, value)
        turn, index = divmod(number, len(COLOURS))  # colours come again with other markers
        axes.plot(*points, color=f"tab:{COLOURS[index]}", marker=marker(members, turn), label=f"pccl{label}")
    for name, colour, fields, timing_of in RULERS:
        measured = [row for row in rows if timing_of(row) is not None]
        for label, members in _lines(measured, [one for one in named if one.field in fields]).items():
            points = _points(members, timing_of, value)
            axes.plot(*points, "--", color=colour, marker=marker(members), markersize=4, label=f"{name}{label}")


def _points(
    rows: Sequence[Row], timing_of: Callable[[Row], Timing | None], value: Callable[[Timing], float]
) -> tuple[list[int], list[float]]:
    """Return the sizes, and the median of the values of each."""
    by_size: dict[int, list[float]] = {}
    for row in rows:
        if (timing := timing_of(row)) is not None:
            by_size.setdefault(row.bytes, []).append(value(timing))
    sizes = sorted(by_size)
    return sizes, [statistics.median(by_size[size]) for size in sizes]


def _lines(rows: Sequence[Row], named: Sequence[Dimension]) -> dict[str, list[Row]]:
    """Return the rows of each line, by what tells it from the others: in words, each with a comma before it."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        label = "".join(f", {one.phrase(one.of(row))}" for one in DIMENSIONS if one in named)
        found.setdefault(label, []).append(row)
    return found
