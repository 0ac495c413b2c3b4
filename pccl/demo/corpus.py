"""The text the demo learns: the source files of the running Python's standard library.

Every machine that can run the demo has this text, so nothing is downloaded. The files are listed in one order
(sorted by their path below the library's root, with `/` between parts), which together with the number of shards
fixes everything else: all processes of one run compute the same split without talking to each other.

*Held-out text.* A file is kept for validation when the CRC-32 of its relative path is a multiple of 25, about one in
twenty-five. Whole files are held out, so no validation byte has its neighbours in the training text.

*Shards.* The other files go, largest first, each to the shard that is smallest so far. Shards are disjoint, differ
in size by less than the largest file, and a process reads only its own.

Tests of the standard library and anything below site-packages or dist-packages are left out: the former are not
installed everywhere, the latter are not the same everywhere.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

VALIDATION_ONE_IN = 25
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"},
)


class CorpusError(Exception):
    """The standard library's sources are not readable here, or too few for what was asked."""


@dataclass(frozen=True, order=True)
class SourceFile:
    """One source file: its path below the root (the sort key), its size and where it lies."""

    name: str
    size_bytes: int
    path: Path


@dataclass(frozen=True)
class Split:
    """Disjoint file lists: one per shard, and the held-out ones."""

    shards: tuple[tuple[SourceFile, ...], ...]
    validation: tuple[SourceFile, ...]


def standard_library_files(root: Path | None = None) -> list[SourceFile]:
    """Return all `*.py` files below `root` (default: this interpreter's standard library), in the run's fixed order."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                found.append(SourceFile(path.relative_to(root).as_posix(), path.stat().st_size, path))
    if not found:
        raise CorpusError(f"no Python source files below {root}: is the standard library installed as sources?")
    return sorted(found)


def split(files: Iterable[SourceFile], shards: int) -> Split:
    """Divide `files` into `shards` training shards and the held-out files. It depends on nothing else."""
    training: list[SourceFile] = []
    validation: list[SourceFile] = []
    for file in sorted(files):
        held_out = zlib.crc32(file.name.encode()) % VALIDATION_ONE_IN == 0
        (validation if held_out else training).append(file)
    if len(training) < shards or not validation:
        raise CorpusError(
            f"{len(training)} training and {len(validation)} validation files are too few for {shards} shards"
        )
    dealt: list[list[SourceFile]] = [[] for _ in range(shards)]
    filled_bytes = [0] * shards
    for file in sorted(training, key=lambda file: (-file.size_bytes, file.name)):
        smallest = min(range(shards), key=filled_bytes.__getitem__)
        dealt[smallest].append(file)
        filled_bytes[smallest] += file.size_bytes
    return Split(tuple(tuple(sorted(shard)) for shard in dealt), tuple(validation))


def read(files: Sequence[SourceFile]) -> Bytes:
    """Return the bytes of `files`, one after the other: shape `(bytes,)`, uint8, read-only."""
    return np.frombuffer(b"".join(file.path.read_bytes() for file in files), np.uint8)


def unigram_entropy_bits(text: Bytes) -> float:
    """Return the entropy of the byte frequencies of `text`, in bits per byte.

    No model that ignores the context can have a lower loss on `text`: a loss clearly below it shows that the
    model learnt how bytes follow one another.
    """
    counts = np.bincount(text, minlength=256)
    frequencies = counts[counts > 0] / text.size
    return float(-(frequencies * np.log2(frequencies)).sum())


def sample(text: Bytes, random: np.random.Generator, sequences: int, length_bytes: int) -> Bytes:
    """Return `sequences` stretches of `text` from random places: shape `(sequences, length_bytes)`."""
    starts = random.integers(0, text.size - length_bytes + 1, sequences)
    stretches: Bytes = text[starts[:, None] + np.arange(length_bytes)]
    return stretches


def spread(text: Bytes, sequences: int, length_bytes: int) -> Bytes:
    """Return `sequences` stretches at even distances over all of `text`, the same ones every time."""
    starts = np.linspace(0, text.size - length_bytes, sequences).astype(np.int64)
    stretches: Bytes = text[starts[:, None] + np.arange(length_bytes)]
    return stretches
