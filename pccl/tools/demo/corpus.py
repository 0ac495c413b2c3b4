"""The text of the demo: the sources of the running Python's standard library, without a download.

The files are sorted by their path below the library's root. A file is held out for validation when the CRC-32 of its
path is a multiple of 25; whole files are held out, so validation text has no neighbours in the training text. The
others go, largest first, each to the shard that is smallest so far. All processes of a run compute the same split.
Tests and anything below site-packages or dist-packages are left out: they differ between installations.
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

from pccl.tools.report import ToolError

Bytes = NDArray[np.uint8]

VALIDATION_ONE_IN = 25
_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


@dataclass(frozen=True, order=True)
class SourceFile:
    """One source file; `name` is its path below the root, the sort key."""

    name: str
    size_bytes: int
    path: Path


@dataclass(frozen=True)
class Split:
    """Disjoint lists of files."""

    shards: tuple[tuple[SourceFile, ...], ...]
    validation: tuple[SourceFile, ...]


def standard_library_files(root: Path | None = None) -> list[SourceFile]:
    """Return all `*.py` files below `root` (default: this interpreter's standard library), sorted."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                found.append(SourceFile(path.relative_to(root).as_posix(), path.stat().st_size, path))
    if not found:
        raise ToolError(f"no Python source files below {root}: is the standard library installed as sources?")
    return sorted(found)


def split(files: Iterable[SourceFile], shards: int) -> Split:
    """Divide files into training shards and the held-out files."""
    training: list[SourceFile] = []
    validation: list[SourceFile] = []
    for file in sorted(files):
        held_out = zlib.crc32(file.name.encode()) % VALIDATION_ONE_IN == 0
        (validation if held_out else training).append(file)
    if len(training) < shards or not validation:
        raise ToolError(
            f"{len(training)} training and {len(validation)} validation files are too few for {shards} shards"
        )
    assigned: list[list[SourceFile]] = [[] for _ in range(shards)]
    filled_bytes = [0] * shards
    for file in sorted(training, key=lambda file: (-file.size_bytes, file.name)):
        smallest = min(range(shards), key=filled_bytes.__getitem__)
        assigned[smallest].append(file)
        filled_bytes[smallest] += file.size_bytes
    return Split(tuple(tuple(sorted(shard)) for shard in assigned), tuple(validation))


def read(files: Sequence[SourceFile]) -> Bytes:
    """Return the concatenated bytes of files, read-only."""
    return np.frombuffer(b"".join(file.path.read_bytes() for file in files), np.uint8)


def unigram_entropy_bits(text: Bytes) -> float:
    """Return the entropy of the byte frequencies in bits per byte: the least loss of a model that ignores context."""
    counts = np.bincount(text, minlength=256)
    frequencies = counts[counts > 0] / text.size
    return float(-(frequencies * np.log2(frequencies)).sum())


def sample(text: Bytes, random: np.random.Generator, sequences: int, length_bytes: int) -> Bytes:
    """Return sequences of text from random places: shape `(sequences, length_bytes)`."""
    starts = random.integers(0, text.size - length_bytes + 1, sequences)
    found: Bytes = text[starts[:, None] + np.arange(length_bytes)]
    return found


def spread(text: Bytes, sequences: int, length_bytes: int) -> Bytes:
    """Return sequences at even distances over all of the text."""
    starts = np.linspace(0, text.size - length_bytes, sequences).astype(np.int64)
    found: Bytes = text[starts[:, None] + np.arange(length_bytes)]
    return found
