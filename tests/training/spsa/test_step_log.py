"""A log of steps that ends anywhere, or is damaged anywhere."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from pccl.training.spsa.step_log import MAGIC, Entry, LogError, LogFile, LoggedStep, Mark, entries_of, read

ENTRIES: list[Entry] = [Mark(0, b"d" * 32, "run"), LoggedStep(0, (0, 1), (b"ab", b"cd")), LoggedStep(1, (0,), (b"ef",))]
HEAD_BYTES = 5
"""The kind of an entry, and its length."""


def test_incomplete_entry_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    data = b"".join(entry.encode() for entry in ENTRIES)
    ends = list(accumulate(len(entry.encode()) for entry in ENTRIES))
    for count in range(len(data) + 1):
        path.write_bytes(MAGIC + data[:count])
        whole = ENTRIES[: sum(end <= count for end in ends)]
        assert list(read(path)) == whole
        log = LogFile(path)
        log.add(ENTRIES[1])
        log.close()
        assert list(read(path)) == [*whole, ENTRIES[1]]


def test_damaged_entry_is_found() -> None:
    entry, last = ENTRIES[1].encode(), ENTRIES[2].encode()
    for place in [0, *range(HEAD_BYTES, len(entry))]:
        damaged = entry[:place] + bytes([entry[place] ^ 1]) + entry[place + 1 :]
        with pytest.raises(LogError, match="damaged at byte 0: the CRC-32 differs"):
            list(entries_of(damaged + last))
        assert list(entries_of(last + damaged)) == [ENTRIES[2]], "the last one counts as written in part"
