"""Real text that every machine has: the source code of Python's standard library, as bytes, in shards.

The split depends only on the names and sizes of the files, so all peers compute the same split. About one file in 25 is
held out for validation. All peers must run the same Python version to have the same text.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

HELD_OUT_ONE_IN = 25
VALIDATION_SEQUENCES = 256
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def _source_files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


class Corpus:
    """The text in `shards` disjoint parts of similar size."""

    def __init__(self, shards: int, seed: int = 0) -> None:
        self._seed = seed
        held_out = bytearray()
        dealt = [bytearray() for _ in range(shards)]
        for name, path in sorted(_source_files(Path(sysconfig.get_path("stdlib")))):
            is_held_out = zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0
            part = held_out if is_held_out else min(dealt, key=len)
            part += path.read_bytes()
        self._shards = [np.frombuffer(shard, np.uint8) for shard in dealt]
        self._held_out = np.frombuffer(held_out, np.uint8)

    def batch(self, shard: int, step: int, sequences: int, length: int) -> Bytes:
        """Return stretches from random places in a shard, which depend only on the step: (sequences, length)."""
        random = np.random.default_rng([self._seed, shard, abs(step), step < 0])
        text = self._shards[shard % len(self._shards)]
        starts = random.integers(0, text.size - length + 1, sequences)
        stretches: Bytes = text[starts[:, None] + np.arange(length)]
        return stretches

    def batch_of_all(self, step: int, sequences: int, length: int) -> Bytes:
        """Return one batch from each shard."""
        return np.concatenate([self.batch(shard, step, sequences, length) for shard in range(len(self._shards))])

    def validation(self, length: int) -> Bytes:
        """Return evenly spaced stretches of the held-out text, the same in each call."""
        return self._at(self._places(length), length)

    def test(self, length: int) -> Bytes:
        """Return stretches of the held-out text between those of `validation`, four times as many."""
        places = self._places(length)
        gaps = np.diff(places) - length
        if gaps.min() < 4 * length:
            raise ValueError("the held-out text is too short")
        between = places[:-1] + length + np.arange(4)[:, None] * (gaps // 4)
        return self._at(between.reshape(-1), length)

    def _places(self, length: int) -> Any:
        return np.linspace(0, self._held_out.size - length, VALIDATION_SEQUENCES).astype(np.int64)

    def _at(self, places: Any, length: int) -> Bytes:
        stretches: Bytes = self._held_out[places[:, None] + np.arange(length)]
        return stretches
