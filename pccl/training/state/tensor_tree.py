"""A state, as `state_dict()` gives it, taken apart into named tensors and the rest, and put together again.

Tensors can then be copied into existing memory, and be seen by any tool that reads the file. A tensor's name is the
path to it, `inner/state/0/exp_avg`; in the rest None stands for it. A distributed tensor (DTensor) is this rank's
shard, with a description of its place.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pccl.training.state.replica import describe, is_distributed, local_shard
from pccl.training.state.tensor_file import NUMPY_DTYPES, Entry, dtype_name

TORCH_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
VERBATIM = re.compile(r"(?![-+\d.e]*$|nan$|inf$|-inf$|True$|False$|None$)[\w.\- ]+")
"""Keys that no other kind of key looks like."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a tensor in a distributed one."""

    place: str
    """As `pccl.training.state.replica.describe` gives it."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A state in two parts."""

    rest: Any
    tensors: dict[str, Any] = field(default_factory=dict)
    """NumPy arrays and dense torch tensors on any device; they share the state's memory."""
    shards: dict[str, Shard] = field(default_factory=dict)
    """The shards of the tensors that were distributed."""


def split(state: Any) -> Parts:
    """Raises ValueError: two keys have the same name, or a distributed tensor has partial sums."""
    parts = Parts(None)
    return Parts(_split(state, "", parts), parts.tensors, parts.shards)


def _split(value: Any, path: str, parts: Parts) -> Any:
    if _is_tensor(value):
        if path in parts.tensors:
            raise ValueError(f"the state has two tensors {path!r}; its keys must differ as text")
        if is_distributed(value):
            parts.shards[path] = Shard(describe(value).strip(), tuple(value.shape), tuple(value.stride()))
            value = local_shard(value)
        parts.tensors[path] = value
        return None
    if isinstance(value, Counter):
        return value
    if isinstance(value, Mapping):
        return {key: _split(item, _below(path, key), parts) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_split(item, _below(path, i), parts) for i, item in enumerate(value))
    return value


def join(parts: Parts, shard: Any = None) -> Any:
    """Return the state. `shard(tensor, Shard)` makes the distributed tensor of this rank's part."""

    def joined(value: Any, path: str) -> Any:
        if value is None and path in parts.tensors:
            tensor = parts.tensors[path]
            return shard(tensor, parts.shards[path]) if path in parts.shards else tensor
        if isinstance(value, Counter):
            return value
        if isinstance(value, dict):
            return {key: joined(item, _below(path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(joined(item, _below(path, i)) for i, item in enumerate(value))
        return value

    return joined(parts.rest, "")


def _below(path: str, key: Any) -> str:
    text = key if isinstance(key, str) and VERBATIM.fullmatch(key) else repr(key)
    return f"{path}/{text}" if path else text


def _is_tensor(value: Any) -> bool:
    """Whether a file can hold it by name."""
    if isinstance(value, np.ndarray):
        return dtype_name(value.dtype) is not None
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    return _torch_name(value) is not None and value.layout is torch.strided and not value.is_meta


def _torch_name(tensor: Any) -> str | None:
    return TORCH_NAMES.get(str(tensor.dtype).removeprefix("torch."))


class HostMemory:
    """Copies of tensors in host memory that is allocated once for each name, dtype and shape."""

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
                if (
                    isinstance(host, np.ndarray)
                    or host is None
                    or (host.dtype, host.shape) != (tensor.dtype, tensor.shape)
                ):
                    torch = sys.modules["torch"]
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                if tensor.is_cuda:
                    devices.add(tensor.device)
            self._held[name] = host
            entries[name] = entry_of(host)
        for device in devices:
            sys.modules["torch"].cuda.synchronize(device)
        return entries


def entry_of(tensor: Any) -> Entry:
    """Return the entry of a tensor, without a copy where it is in host memory in C order."""
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).reshape(tensor.shape)
        name = dtype_name(array.dtype)
        assert name is not None, "split left it in the rest"
        return Entry(name, array.shape, array.reshape(-1).view(np.uint8))
    name = _torch_name(tensor)
    assert name is not None, "split left it in the rest"
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    flat = plain.reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return Entry(name, tuple(tensor.shape), flat)


def tensor_of(entry: Entry, is_torch: bool) -> Any:
    """Return the tensor of an entry, sharing its memory. Raises KeyError: it is torch's, which was not imported."""
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
