"""The dimensions that a benchmark varies besides the size, and their words in tables and plots.

A dimension that differs between rows is a column of the table and a part of a line's name. One that is the same in all
rows is named in the title, unless it has its default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pccl.bench.measure import Row
from pccl.bench.messages import ALL_REDUCE


class Dimension(NamedTuple):
    """One thing that a benchmark can vary."""

    field: str
    """The field of a row that has its value."""
    heading: str
    cell: Callable[[Any], str]
    phrase: Callable[[Any], str]
    default: Any

    def of(self, row: Row) -> Any:
        return getattr(row, self.field)

    def cell_of(self, row: Row) -> str:
        return self.cell(self.of(row))


DIMENSIONS = [
    Dimension("collective", "collective", str, str, ALL_REDUCE),
    Dimension("peers", "peers", str, "{} peers".format, None),
    Dimension(
        "connections",
        "conns",
        lambda count: str(count or "auto"),
        lambda count: f"{count} connection{'s' * (count != 1)}" if count else "connections auto",
        0,
    ),
    Dimension("tensors", "tensors", str, lambda count: f"{count} tensor{'s' * (count != 1)}", 1),
    Dimension("quantization", "quantized", str, lambda text: "unquantized" if text == "none" else text, "none"),
    Dimension("algorithm", "algo", str, "algorithm {}".format, "auto"),
]


def varying(rows: Sequence[Row]) -> list[Dimension]:
    """Return the dimensions in which rows differ."""
    return [dimension for dimension in DIMENSIONS if len({dimension.of(row) for row in rows}) > 1]


def constants(rows: Sequence[Row]) -> list[str]:
    """Return in words what all rows share, if it is not the default."""
    shared = [dimension for dimension in DIMENSIONS if dimension not in varying(rows)]
    return [
        dimension.phrase(dimension.of(rows[0]))
        for dimension in shared
        if rows and dimension.of(rows[0]) != dimension.default
    ]
