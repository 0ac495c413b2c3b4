"""Named tensors in one file that is there whole or not at all, in the safetensors format (or `.npz`).

A safetensors file is the length of a header in 8 bytes, the header as JSON (name, dtype, shape and place of each
tensor; text metadata), and the tensors' bytes. It is written here and not by its library, because a checkpoint must be
flushed to the disk without Python's lock, fail with the OSError of what failed, and hold bfloat16 without torch.

1. A file under its name is whole: it is written under a temporary name, flushed (fsync) and renamed, and the folder is
   flushed.
2. Damage is found: the metadata hold the BLAKE3 digest of all other bytes of the file.
3. Temporary files are locked (flock) by their writer; the next save into the folder deletes unlocked ones.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import blake3
import numpy as np
from numpy.typing import NDArray

TRIES = 20


def arrays_of(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of an `.npz` by name. Raises what NumPy and zipfile raise. Thread-safe.

    NumPy parses an array's header as Python, where CPython 3.11 and 3.12 count the depth of all threads together
    (https://github.com/python/cpython/issues/106905) and sometimes refuse sound text: it is tried again.
    """
    for _ in range(TRIES):
        try:
            return _arrays_of(content)
        except SystemError:
            pass
    return _arrays_of(content)


def _arrays_of(content: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return dict(archive)


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
HEADER = "header"
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
    _atomically(path, lambda file: (_write_npz if path.suffix == ".npz" else _write_safetensors)(file, contents))


def read(path: Path) -> Contents:
    """Raises OSError; CheckpointError: the file is damaged or of another kind."""
    with _opened(path) as file:
        return _read_npz(file, path) if _is_zip(file, path) else _read_safetensors(file, path)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata without reading the tensors or verifying the digest. Raises as `read`."""
    with _opened(path) as file:
        return _read_npz(file, path).metadata if _is_zip(file, path) else _metadata(_header(file, path), path)


def _opened(path: Path) -> BinaryIO:
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder, though its name ends as that of a file does: give the file in it, or a folder of "
            "another name"
        )
    return path.open("rb")


def _is_zip(file: BinaryIO, path: Path) -> bool:
    """Whether it may be an npz. Raises CheckpointError: torch.save has written it."""
    begin = file.read(2)
    file.seek(0)
    is_of_torch = begin == b"\x80\x02"  # torch.save before 1.6, and any pickle
    if begin == b"PK":
        try:
            with zipfile.ZipFile(file) as archive:
                is_of_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
        except Exception:  # it raises what comes
            pass
        file.seek(0)
    if is_of_torch:
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint: it is what torch.save writes; read it by torch.load, give the "
            "model and the optimizer what it has of them by their load_state_dict, and join after that"
        )
    return begin == b"PK"


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
    if size > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint: it begins neither as a safetensors file nor as an npz; give what "
            "save() wrote"
        )
    header = file.read(size)
    if len(header) < size or not size:
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint: it ends within the header of a safetensors file, after "
            f"{8 + len(header)} bytes; take another checkpoint, or delete this one"
        )
    return header


def _metadata(header: bytes, path: Path) -> dict[str, str]:
    try:
        read = json.loads(header)
        if not isinstance(read, dict) or not isinstance(read.get("__metadata__", {}), dict):
            raise TypeError("it is not a header of a safetensors file")
        if DIGEST not in read.get("__metadata__", {}):
            raise ValueError(
                "it is a safetensors file of another program; read it by safetensors.torch.load_file, give the model "
                "what it has by load_state_dict, and join after that"
            )
        found = read["__metadata__"]
        if not isinstance(found[DIGEST], str):
            raise TypeError("its digest is not text")
        return {str(key): str(value) for key, value in found.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint: pccl.training does not write such a header ({error})"
        ) from None


def _read_safetensors(file: BinaryIO, path: Path) -> Contents:
    header = _header(file, path)
    metadata = _metadata(header, path)
    data = np.fromfile(file, np.uint8)
    digest = metadata.pop(DIGEST)
    hasher = blake3.blake3(header.replace(digest.encode(), NO_DIGEST.encode(), 1))
    hasher.update(data.data)
    if hasher.hexdigest() != digest:
        what = f"the digest of its contents is {hasher.hexdigest()}, not {digest}, as it says"
        try:
            tensors = [spec for name, spec in json.loads(header).items() if name != "__metadata__"]
            size = max((int(spec["data_offsets"][1]) for spec in tensors), default=0)
            if data.size < size:
                what = f"it is cut off, {size - data.size} bytes before its end"
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):  # it may be damaged, too
            pass
        raise CheckpointError(f"{path} is damaged: {what}; take another checkpoint, or delete this one")
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


def _write_npz(file: BinaryIO, contents: Contents) -> None:
    dtypes = {name: entry.dtype for name, entry in contents.entries.items()}
    header = {"metadata": contents.metadata, "dtypes": dtypes, DIGEST: _npz_digest(contents)}
    arrays: dict[str, Any] = {name: entry.array() for name, entry in contents.entries.items()}
    np.savez(file, allow_pickle=False, **{HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays})


def _npz_digest(contents: Contents) -> str:
    """Return the digest of an archive, whose CRC-32s do not cover damaged sizes."""
    entries = sorted(contents.entries.items())
    facts = [sorted(contents.metadata.items()), [(name, entry.dtype, entry.shape) for name, entry in entries]]
    hasher = blake3.blake3(json.dumps(facts).encode())
    for _, entry in entries:
        hasher.update(entry.data.data)
    return hasher.hexdigest()


def _read_npz(file: BinaryIO, path: Path) -> Contents:
    """An archive without a header comes back without metadata."""
    content = file.read()
    try:
        arrays = arrays_of(content)
        header = json.loads(arrays.pop(HEADER).tobytes()) if HEADER in arrays else None
        dtypes = header["dtypes"] if header is not None else {}
        entries = {name: _entry(array, dtypes.get(name)) for name, array in arrays.items()}
        contents = Contents(header["metadata"] if header is not None else {}, entries)
        if header is not None and _npz_digest(contents) != header[DIGEST]:
            raise ValueError("the digest of its contents is not the one that it says")
    except Exception as error:  # zipfile and NumPy raise what comes, and it is the contents' fault
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {error}") from error
    return contents


def _entry(array: NDArray[Any], dtype: str | None) -> Entry:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if dtype is None:
        dtype = dtype_name(array.dtype)
        if dtype is None:
            raise ValueError(f"it has an array of {array.dtype}")
    return Entry(dtype, array.shape, array.reshape(-1).view(np.uint8))


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return safetensors' name of a NumPy type, or None."""
    little = dtype.newbyteorder("<").str
    return next((name for name, text in NUMPY_DTYPES.items() if text == little), None)
