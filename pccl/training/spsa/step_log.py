"""The log of a run whose steps are a few bytes each: which peers took part, and the bytes they exchanged.

A *step* leads from one revision to the next. A *mark* holds the digest of the weights at a revision and names the run:
algorithm, options and model. An incomplete entry at the end of a file is ignored. Numbers are little-endian:

    file    b"pccl steps 1\\n", then entries
    entry   kind u8, bytes u32, that many bytes, CRC-32 of all this u32
    mark    (kind 1)  revision u64, digest 32 bytes, run in UTF-8
    step    (kind 2)  revision u64, peers u16, a stable rank u32 for each, the bytes of each
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

MAGIC = b"pccl steps 1\n"
MARK, STEP = 1, 2
ENTRY_BYTES_MAX = 1 << 26

_HEAD = struct.Struct("<BI")
_CRC = struct.Struct("<I")
_MARK = struct.Struct("<Q32s")
_STEP = struct.Struct("<QH")


class LogError(Exception):
    """A log is damaged or from another run."""


@dataclass(frozen=True, slots=True)
class Mark:
    revision: int
    digest: bytes
    run: str

    def encode(self) -> bytes:
        return _sealed(MARK, _MARK.pack(self.revision, self.digest) + self.run.encode())


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step from `revision` to the next."""

    revision: int
    ranks: tuple[int, ...]
    codes: tuple[bytes, ...]
    """The bytes from each stable rank's peer, all of equal length."""

    def encode(self) -> bytes:
        ranks = struct.pack(f"<{len(self.ranks)}I", *self.ranks)
        return _sealed(STEP, _STEP.pack(self.revision, len(self.ranks)) + ranks + b"".join(self.codes))


Entry: TypeAlias = Mark | LoggedStep


def _sealed(kind: int, body: bytes) -> bytes:
    entry = _HEAD.pack(kind, len(body)) + body
    return entry + _CRC.pack(zlib.crc32(entry))


def _decode(kind: int, body: bytes) -> Entry:
    if kind == MARK:
        revision, digest = _MARK.unpack_from(body)
        return Mark(revision, digest, body[_MARK.size :].decode())
    revision, peers = _STEP.unpack_from(body)
    ranks = struct.unpack_from(f"<{peers}I", body, _STEP.size)
    codes = body[_STEP.size + 4 * peers :]
    each = len(codes) // peers if peers else 0
    if kind != STEP or each * peers != len(codes):
        raise LogError(f"an entry of kind {kind} with {len(body)} bytes is invalid")
    return LoggedStep(revision, ranks, tuple(codes[i * each : (i + 1) * each] for i in range(peers)))


def _split(data: bytes, begin: int = 0) -> Iterator[tuple[int, Entry]]:
    """Yield each complete entry and its end offset. Raises LogError if a complete entry is invalid."""
    while begin + _HEAD.size <= len(data):
        kind, size = _HEAD.unpack_from(data, begin)
        body = begin + _HEAD.size
        end = body + size + _CRC.size
        if size > ENTRY_BYTES_MAX:
            raise LogError(f"damaged at byte {begin}: an entry of {size} bytes")
        if end > len(data):
            return
        if zlib.crc32(data[begin : body + size]) != _CRC.unpack_from(data, body + size)[0]:
            if end == len(data):
                return  # the last entry was only partly written
            raise LogError(f"damaged at byte {begin}: the CRC-32 differs")
        try:
            yield end, _decode(kind, data[body : body + size])
        except (struct.error, UnicodeDecodeError) as error:
            raise LogError(f"the entry at byte {begin} is invalid: {error}") from None
        begin = end


def entries_of(data: bytes) -> Iterator[Entry]:
    """Yield consecutive entries up to the first incomplete one. Raises LogError if one is invalid."""
    return (entry for _, entry in _split(data))


def read(path: str | os.PathLike[str]) -> Iterator[Entry]:
    """Yield the entries of a file. Raises OSError, LogError."""
    return (entry for _, entry in _entries(Path(path).read_bytes(), str(path)))


def _entries(data: bytes, name: str) -> Iterator[tuple[int, Entry]]:
    """Yield the entries of a file's content and their end offsets."""
    if not data.startswith(MAGIC):
        raise LogError(f"{name} is not a log of steps")
    try:
        yield from _split(data, len(MAGIC))
    except LogError as error:
        raise LogError(f"{name}: {error}") from None


class LogFile:
    """An append-only log. Entries survive a crash of the process, but not a power failure."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create the file, or continue an existing one after its last complete entry. Raises OSError, LogError."""
        path = Path(path)
        self._file: BinaryIO = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise LogError(f"another process is writing {path}; each peer needs its own log") from None
        self._file.seek(0)
        data = self._file.read()
        if not data:
            self._file.write(MAGIC)
            return
        try:
            ends = [end for end, _ in _entries(data, str(path))]
        except LogError:
            self._file.close()
            raise
        self._file.truncate(max(ends, default=len(MAGIC)))

    def add(self, entry: Entry) -> None:
        """Raises OSError."""
        data = entry.encode()
        if self._file.write(data) != len(data):
            raise OSError(f"{self._file.name}: only partly written; is the disk full?")

    def close(self) -> None:
        self._file.close()
