"""Named tensors in one file, whole or absent, in the safetensors format.

A safetensors file is the length of a header in 8 bytes, the header as JSON (name, dtype, shape and place of each
tensor; text metadata), and the tensors' bytes. This module writes it without the safetensors library, so that files are
flushed without Python's lock, errors are OSErrors, and bfloat16 needs no torch.

1. A file under its name is whole: it is written under a temporary name, flushed (fsync) and renamed, and the folder is
   flushed.
2. Damage is found: the metadata hold the BLAKE3 digest of all other bytes of the file.
3. Writers lock their temporary files (flock); the next save into the folder deletes unlocked ones.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import blake3
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

NUMPY_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "C64": "<c8",
    "BOOL": "|b1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BF16": "<u2",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
}
"""The NumPy types by safetensors' names. A type that NumPy lacks is its bits."""
HEADER_BYTES_MAX = 1 << 30
CHUNK_BYTES = 1 << 24
NO_DIGEST = "0" * 64
DIGEST = "blake3"
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.pccl-tmp")


class CheckpointError(Exception):
    """A file that is damaged, of another format, or of another model; or pieces that do not belong together."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: its dtype as safetensors names it, and its elements in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def array(self) -> NDArray[Any]:
        """Return a view of the data; of dtypes that NumPy lacks, of the bits."""
        return self.data.view(NUMPY_DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Contents:
    metadata: dict[str, str]
    entries: dict[str, Entry]


def write(path: Path, contents: Contents) -> None:
    """Replace `path` atomically. Raises OSError; the former file is still there then."""
    _atomically(path, lambda file: _write_safetensors(file, contents))


def read(path: Path) -> Contents:
    """Raises OSError; CheckpointError: the file is damaged or of another kind."""
    with _opened(path) as file:
        return _read_safetensors(file, path)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata without reading the tensors or verifying the digest. Raises as `read`."""
    with _opened(path) as file:
        return _metadata(_header(file, path), path)


def _opened(path: Path) -> BinaryIO:
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the file in it, or a folder with another suffix")
    return path.open("rb")


def _atomically(path: Path, fill: Callable[[BinaryIO], None]) -> None:
    folder = path.absolute().parent
    remove_abandoned(folder)
    temporary, file = _temporary(folder, path.name)
    try:
        with file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Flush a folder: the names of new files would be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, durably."""
    if not path.is_dir():
        make_folder(path.absolute().parent)
        path.mkdir(exist_ok=True)
        flush_folder(path.absolute().parent)


def _temporary(folder: Path, name: str) -> tuple[Path, BinaryIO]:
    """Return a locked file of this process alone."""
    while True:
        path = folder / f".{name}.{secrets.token_hex(8)}.pccl-tmp"
        file = path.open("xb")
        try:
            with suppress(OSError):  # file systems without locks: no file counts as abandoned there
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # else another process took it for abandoned, before it was locked
                return path, file
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        file.close()


def remove_abandoned(folder: Path) -> None:
    """Delete temporary files of processes that ended while they wrote them."""
    for path in folder.iterdir():
        if not TEMPORARY.fullmatch(path.name):
            continue
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:
            continue  # it is gone, being written, or another user's


def _write_safetensors(file: BinaryIO, contents: Contents) -> None:
    # Wide elements first: with a header of whole words all tensors are aligned.
    names = sorted(
        contents.entries, key=lambda name: (-np.dtype(NUMPY_DTYPES[contents.entries[name].dtype]).itemsize, name)
    )
    header: dict[str, Any] = {"__metadata__": {DIGEST: NO_DIGEST, **contents.metadata}}
    end = 0
    for name in names:
        entry = contents.entries[name]
        begin, end = end, end + entry.data.nbytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    place = file.tell() + 8 + text.index(NO_DIGEST.encode())
    hasher = blake3.blake3(text)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        data = contents.entries[name].data
        for first in range(0, data.nbytes, CHUNK_BYTES):
            chunk = data[first : first + CHUNK_BYTES].data
            hasher.update(chunk)
            file.write(chunk)
    file.seek(place)
    file.write(hasher.hexdigest().encode())


def _header(file: BinaryIO, path: Path) -> bytes:
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= HEADER_BYTES_MAX:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: it has no safetensors header")
    header = file.read(size)
    if len(header) < size:
        raise CheckpointError(f"{path} is damaged: it ends within its header; load another checkpoint")
    return header


def _metadata(header: bytes, path: Path) -> dict[str, str]:
    try:
        found = json.loads(header)["__metadata__"]
        if not isinstance(found[DIGEST], str):
            raise TypeError("the digest is not text")
        return {str(key): str(value) for key, value in found.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint of pccl.training: its header lacks {error}") from None


def _read_safetensors(file: BinaryIO, path: Path) -> Contents:
    header = _header(file, path)
    metadata = _metadata(header, path)
    data = np.fromfile(file, np.uint8)
    digest = metadata.pop(DIGEST)
    hasher = blake3.blake3(header.replace(digest.encode(), NO_DIGEST.encode(), 1))
    hasher.update(data.data)
    if hasher.hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged or cut off: its digest differs; load another checkpoint")
    return Contents(metadata, _entries(json.loads(header), data, path))


def _entries(header: Mapping[str, Any], data: Bytes, path: Path) -> dict[str, Entry]:
    entries = {}
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = spec["data_offsets"]
            entry = Entry(spec["dtype"], tuple(spec["shape"]), data[begin:end])
            size = math.prod(entry.shape) * np.dtype(NUMPY_DTYPES[entry.dtype]).itemsize
            if not 0 <= begin <= end <= data.nbytes or end - begin != size:
                raise ValueError(f"it is at bytes {begin} to {end} of {data.nbytes}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: it has no tensor {name!r} as its header says: {error}") from None
        entries[name] = entry
    return entries


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return safetensors' name of a NumPy type, or None."""
    little = dtype.newbyteorder("<").str
    return next((name for name, text in NUMPY_DTYPES.items() if text == little), None)
