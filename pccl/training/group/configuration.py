"""The configuration check: peers gather their options when they join, and find those that differ.

A row has a fixed size, so that peers with any options meet, under a tag of its own. Options are a text with one line
for each: name and `repr` of the value, long values cut and followed by a digest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TAG = 2**63 - 1
"""The last tag, which no other part of `pccl.training` uses."""
ROW_BYTES = 4096
HEAD_BYTES = 32
VALUE_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """The row of one peer."""

    peer: int
    is_under_way: bool
    peers_min: int
    options: str


def described(options: Mapping[str, object]) -> str:
    """Return the text that peers compare."""
    lines = (f"{name}={_cut(_line(value))}" for name, value in options.items())
    return _cut("\n".join(lines), (ROW_BYTES - HEAD_BYTES) // 4)


def shown(options: str) -> str:
    """Return options as a message shows them: the class, and the rest in brackets."""
    first, *rest = options.split("\n")
    return f"{first.removeprefix('class=') or 'training object'} ({', '.join(rest)})"


def row_bytes(row: Row) -> NDArray[np.uint8]:
    """Return the bytes of a row, the same number for any row."""
    text = row.options.encode()
    data = np.zeros(ROW_BYTES, np.uint8)
    data[:HEAD_BYTES] = np.array([row.peer, row.is_under_way, row.peers_min, len(text)], "<i8").view(np.uint8)
    data[HEAD_BYTES : HEAD_BYTES + len(text)] = np.frombuffer(text, np.uint8)
    return data


def row_of(data: NDArray[np.uint8]) -> Row:
    """Return the row that `row_bytes` encoded."""
    peer, is_under_way, peers_min, count = data[:HEAD_BYTES].view("<i8").tolist()
    return Row(peer, bool(is_under_way), peers_min, data[HEAD_BYTES : HEAD_BYTES + count].tobytes().decode())


def unlike(rows: Sequence[Row], own: Row) -> dict[int, str]:
    """Return by peer how its options differ from those of the peers under way, or else from most peers (in a tie, the
    first). All peers find the same."""
    seniors = [row for row in rows if row.is_under_way] or rows
    right = Counter(row.options for row in seniors).most_common(1)[0][0]
    like = next(row for row in seniors if row.options == right)
    return {
        row.peer: f"{_named(row, own)} {_difference(row.options, right, _named(like, own))}"
        for row in rows
        if row.options != right
    }


def _named(row: Row, own: Row) -> str:
    return "this peer" if row.peer == own.peer else f"peer {row.peer}"


def _difference(options: str, right: str, other: str) -> str:
    mine, theirs = (dict(line.partition("=")[::2] for line in text.split("\n")) for text in (options, right))
    names = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
    have = ", ".join(f"{name}={mine[name]}" if name in mine else f"no {name}" for name in names)
    instead = ", ".join(f"{name}={theirs[name]}" if name in theirs else f"no {name}" for name in names)
    return f"has {have}, where {other} has {instead}: give the same on all peers"


def _line(value: object) -> str:
    return (value if isinstance(value, str) else repr(value)).replace("\n", " ")


def _cut(text: str, characters: int = VALUE_CHARACTERS) -> str:
    if len(text) <= characters:
        return text
    return f"{text[: characters - 14]}... {hashlib.sha256(text.encode()).hexdigest()[:10]}"
