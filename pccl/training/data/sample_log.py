"""A peer's log of the samples it has trained on and of the outcome of steps: JSON, a line for each event.

    {"stream": {"dataset_size": 60000, "seed": 0, "shuffle": true}}         begins each part that a process has written
    {"drawn": 7, "by": "5f...", "positions": [[96, 128]], "samples": [...]}   handed out to be trained on, for step 7
    {"discarded": 7, "by": "5f..."}                                         what was drawn for step 7 was not trained on
    {"step": 7, "before": "9a...", "after": "c4...", "used": {"5f...": [[96, 128]]}, "again": []}   committed

A line of samples is with the operating system before they are handed out, so before any step with them can commit;
every peer in a step writes its line. `pccl.tools.audit` reads them.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from pccl.training.data.sample_ledger import Commit
from pccl.training.data.stream import Range


def _drop_what_is_not_whole(file: BinaryIO) -> None:
    """Cut off an incomplete last line of a crashed process; its samples were never handed out."""
    if os.fstat(file.fileno()).st_size:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        if end < os.fstat(file.fileno()).st_size:
            os.ftruncate(file.fileno(), end)


class SampleLog:
    """A file that is added to. Each line is one write. All methods raise OSError."""

    def __init__(self, path: str | os.PathLike[str], dataset_size: int, seed: int, shuffle: bool) -> None:
        self._file: BinaryIO = Path(path).open("a+b", buffering=0)  # noqa: SIM115
        _drop_what_is_not_whole(self._file)
        self._write({"stream": {"dataset_size": dataset_size, "seed": seed, "shuffle": shuffle}})

    def drawn(self, name: str, step: int, ranges: Sequence[Range], indices: NDArray[Any]) -> None:
        self._write({"drawn": step, "by": name, "positions": ranges, "samples": indices.tolist()})

    def discarded(self, name: str, step: int) -> None:
        self._write({"discarded": step, "by": name})

    def committed(self, commit: Commit) -> None:
        links = {"step": commit.step, "before": commit.before, "after": commit.after}
        self._write({**links, "used": commit.used, "again": commit.again})

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self._file.name}: a line was written in part; is the disk full?")
