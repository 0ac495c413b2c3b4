"""Named tensors in one file, written atomically, in the safetensors format.

The safetensors library is not used, so that files are flushed without Python's lock, errors are OSErrors, and bfloat16
does not need torch. A file is written under a temporary name, flushed (fsync) and renamed; its metadata contains the
BLAKE3 digest of all other bytes. Writers lock their temporary files; the next save into the folder deletes unlocked
ones.

`encode` separates a state's tensors from the rest, so that they can be copied into existing memory and read by any
tool. A tensor's name is its path, such as `inner/state/0/exp_avg`. For a distributed tensor, this rank's shard is
stored.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import blake3
import numpy as np
from numpy.typing import NDArray

from pccl.training.state import codec
from pccl.training.state.replica import describe, is_distributed, local_shard

Bytes = NDArray[np.uint8]

DTYPES = {
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "C64": ("<c8", "complex64"),
    "BOOL": ("|b1", "bool"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", "int16"),
    "I8": ("|i1", "int8"),
    "U64": ("<u8", "uint64"),
    "U32": ("<u4", "uint32"),
    "U16": ("<u2", "uint16"),
    "U8": ("|u1", "uint8"),
    "BF16": ("<u2", "bfloat16"),
    "F8_E4M3": ("|u1", "float8_e4m3fn"),
    "F8_E5M2": ("|u1", "float8_e5m2"),
}
"""NumPy's and torch's types by safetensors name. NumPy holds the bits of types that it lacks."""
NUMPY_DTYPES = {name: numpy for name, (numpy, _) in DTYPES.items()}
TORCH_NAMES = {torch: name for name, (_, torch) in DTYPES.items()}
HEADER_BYTES_MAX = 1 << 30
CHUNK_BYTES = 1 << 24
NO_DIGEST = "0" * 64
DIGEST = "blake3"
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.pccl-tmp")


class CheckpointError(Exception):
    """A file is damaged, has another format or is from another model, or the ranks' files do not belong together."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, with safetensors' name for its dtype, and its elements in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def array(self) -> NDArray[Any]:
        """Return a view of the data, or of the bits for dtypes that NumPy lacks."""
        return self.data.view(NUMPY_DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Contents:
    metadata: dict[str, str]
    entries: dict[str, Entry]


def write(path: Path, contents: Contents) -> None:
    """Replace `path` atomically. If it raises OSError, the old file is unchanged."""
    folder = path.absolute().parent
    remove_abandoned(folder)
    temporary, file = _temporary(folder, path.name)
    try:
        with file:
            _write_safetensors(file, contents)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(folder)


def read(path: Path) -> Contents:
    """Read and verify a file. Raises OSError, or CheckpointError if it is damaged or of another kind."""
    with _opened(path) as file:
        header = _header(file, path)
        metadata = _metadata(header, path)
        data = np.fromfile(file, np.uint8)
    digest = metadata.pop(DIGEST)
    hasher = blake3.blake3(header.replace(digest.encode(), NO_DIGEST.encode(), 1))
    hasher.update(data.data)
    if hasher.hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged or truncated: its digest differs; load another checkpoint")
    return Contents(metadata, _entries(json.loads(header), data, path))


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata without reading the tensors or verifying the digest. Raises the errors of `read`."""
    with _opened(path) as file:
        return _metadata(_header(file, path), path)


def _opened(path: Path) -> BinaryIO:
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the file in it, or a folder without this suffix")
    return path.open("rb")


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that the names of new files survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably."""
    if not path.is_dir():
        make_folder(path.absolute().parent)
        path.mkdir(exist_ok=True)
        flush_folder(path.absolute().parent)


def _temporary(folder: Path, name: str) -> tuple[Path, BinaryIO]:
    while True:
        path = folder / f".{name}.{secrets.token_hex(8)}.pccl-tmp"
        file = path.open("xb")
        try:
            with suppress(OSError):  # on file systems without locks, no file is considered abandoned
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # otherwise another process deleted it before it was locked
                return path, file
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        file.close()


def remove_abandoned(folder: Path) -> None:
    """Delete temporary files of processes that ended while writing them."""
    for path in folder.iterdir():
        if not TEMPORARY.fullmatch(path.name):
            continue
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:
            continue  # it no longer exists, is being written, or belongs to another user


def _write_safetensors(file: BinaryIO, contents: Contents) -> None:
    # Tensors with wide elements come first. With a header of whole words, all tensors are then aligned.
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
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint of pccl.training: its header lacks {error}"
        ) from None


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
            raise CheckpointError(f"{path} is damaged: tensor {name!r} does not match the header: {error}") from None
        entries[name] = entry
    return entries


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return safetensors' name for a NumPy type, or None."""
    little = dtype.newbyteorder("<").str
    return next((name for name, text in NUMPY_DTYPES.items() if text == little), None)


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a shard in a distributed tensor of this shape and stride."""

    place: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def encode(state: Any) -> tuple[bytes, dict[str, Any], dict[str, Shard]]:
    """Return the state's bytes without its tensors, the tensors by path (not copied), and the places of shards.

    Raises ValueError like `codec.encode`, or if two keys have the same text or a distributed tensor has partial sums.
    """
    tensors: dict[str, Any] = {}
    shards: dict[str, Shard] = {}

    def take(path: str, value: Any) -> bool:
        if not _is_tensor(value):
            return False
        if path in tensors:
            raise ValueError(f"the state has two tensors {path!r}; its keys must differ as text")
        if is_distributed(value):
            shards[path] = Shard(describe(value).strip(), tuple(value.shape), tuple(value.stride()))
            value = local_shard(value)
        tensors[path] = value
        return True

    return codec.encode(state, take), tensors, shards


def _is_tensor(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return dtype_name(value.dtype) is not None
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    return _torch_name(value) is not None and value.layout is torch.strided and not value.is_meta


def _torch_name(tensor: Any) -> str | None:
    return TORCH_NAMES.get(str(tensor.dtype).removeprefix("torch."))


class HostMemory:
    """Copies of tensors in host memory that is allocated once per name, dtype and shape."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def copies(self, tensors: Mapping[str, Any]) -> dict[str, Entry]:
        """Return complete copies, valid until the next call."""
        held, self._held = self._held, {}
        devices = set()
        entries = {}
        for name, tensor in tensors.items():
            host = held.get(name)
            if isinstance(tensor, np.ndarray):
                dtype = tensor.dtype.newbyteorder("<")
                if not isinstance(host, np.ndarray) or (host.dtype, host.shape) != (dtype, tensor.shape):
                    host = np.empty(tensor.shape, dtype)
                host[...] = tensor
            else:
                kind = tensor.dtype, tensor.shape
                if host is None or isinstance(host, np.ndarray) or (host.dtype, host.shape) != kind:
                    empty = sys.modules["torch"].empty
                    host = empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                if tensor.is_cuda:
                    devices.add(tensor.device)
            self._held[name] = host
            entries[name] = entry_of(host)
        for device in devices:
            sys.modules["torch"].cuda.synchronize(device)
        return entries


def entry_of(tensor: Any) -> Entry:
    """Return a tensor's entry, without a copy if it is in host memory in C order."""
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).reshape(tensor.shape)
        name = dtype_name(array.dtype)
        assert name is not None, "encode leaves it in the rest"
        return Entry(name, array.shape, array.reshape(-1).view(np.uint8))
    name = _torch_name(tensor)
    assert name is not None, "encode leaves it in the rest"
    return Entry(name, tuple(tensor.shape), codec.bytes_of(tensor, "tensor"))


def tensor_of(entry: Entry, is_torch: bool) -> Any:
    """Return an entry's tensor, sharing aligned memory. Raises KeyError if it needs torch, which is not imported."""
    if not is_torch:
        return entry.array()
    torch = sys.modules["torch"]
    dtype = getattr(torch, next(name for name, code in TORCH_NAMES.items() if code == entry.dtype))
    if not entry.data.size:
        return torch.empty(entry.shape, dtype=dtype)
    aligned = (
        entry.data if entry.data.ctypes.data % np.dtype(NUMPY_DTYPES[entry.dtype]).itemsize == 0 else entry.data.copy()
    )
    return torch.from_numpy(aligned).view(dtype).view(entry.shape)
