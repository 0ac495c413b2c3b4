"""Converts tensors to memory that the engine reads and writes.

Tensors in contiguous host memory are used in place. Others (strided, on a device, lazy conjugates) get a contiguous
copy on the host (`stand_in`), and results are copied back (`put_back`). Collectives that only copy elements support all
dtypes: elements that the engine cannot reduce are sent as bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pccl._arrays import changes_of
from pccl.torch.errors import ArgumentError
from pccl.types import DataType

Tensor = Any
"""A torch.Tensor. pccl is type-checked without torch, whose types are then unknown."""

REDUCIBLE: dict[Any, DataType] = {dtype.to_torch_dtype(): dtype for dtype in DataType}
"""The engine's type for each dtype that it can reduce."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Contiguous elements on the host, as the engine sees them."""

    address: int
    count: int
    dtype: DataType
    bytes_of: str
    """The original dtype of elements that are sent as bytes; otherwise empty."""
    owner: Tensor


def memory(tensor: Tensor) -> Memory:
    """Return the memory of a contiguous tensor on the host."""
    dtype = REDUCIBLE.get(tensor.dtype)
    if dtype is not None:
        return Memory(tensor.data_ptr(), tensor.numel(), dtype, "", tensor)
    size_bytes = tensor.numel() * tensor.element_size()
    return Memory(tensor.data_ptr(), size_bytes, DataType.UINT8, str(tensor.dtype), tensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether the engine can use a tensor in place."""
    return bool(tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg())


def as_pairs(tensor: Tensor) -> Tensor:
    """Return a plain tensor with complex numbers viewed as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a flat host tensor.

    torch cannot view a tensor as bytes if its stride is not 1, which is possible in a contiguous tensor of one element.
    """
    host = stand_in(tensor).detach()
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8)


def stand_in(tensor: Tensor) -> Tensor:
    """Return a contiguous host tensor with the same contents, or this tensor itself if possible."""
    if is_plain(tensor):
        return tensor
    with torch.no_grad():
        return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()


def room_for(tensor: Tensor) -> Tensor:
    """Return a contiguous host tensor of equal shape and dtype for a result, or this tensor itself if possible."""
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def put_back(tensor: Tensor, host: Tensor) -> None:
    """Copy `host` to the tensor that it stands in for. Waits for copies to a device."""
    if host is tensor:
        return
    with torch.no_grad():
        tensor.detach().copy_(host.view(tensor.shape))
    if tensor.device.type == "cuda":
        # The thread that waits for the work may use the tensor in any stream.
        torch.cuda.current_stream(tensor.device).synchronize()


MOVED_BYTES_MAX = 256 << 10
"""Larger copies use torch, which can use several threads but takes some microseconds to start."""


def put_into(tensor: Tensor, host: Tensor) -> None:
    """Copy a contiguous host tensor into a tensor with the same number of elements."""
    if is_plain(tensor) and host.numel() * host.element_size() <= MOVED_BYTES_MAX:
        ctypes.memmove(tensor.data_ptr(), host.data_ptr(), host.numel() * host.element_size())
        note_written([tensor])
    else:
        put_back(tensor, host)


def note_written(tensors: Sequence[Tensor]) -> None:
    """Increment the version counters of tensors whose memory the engine has written through another tensor."""
    written = changes_of(*tensors)
    if written is not None:
        written()


def is_one_array(tensors: Sequence[Tensor]) -> bool:
    """Return whether these are contiguous host tensors that are adjacent, in order, in one storage."""
    end = 0
    for tensor in tensors:
        if not is_plain(tensor) or (end and tensor.data_ptr() != end):
            return False
        if tensor.untyped_storage().data_ptr() != tensors[0].untyped_storage().data_ptr():
            return False
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return bool(tensors) and end > 0


# Argument checks, with the error texts of torch's own backends.


def fail(what: str, message: str) -> ArgumentError:
    return ArgumentError(f"ProcessGroupPCCL::{what}: {message}")


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements, if any, are at its data pointer. In a view of freed memory, the pointer is
    just the view's offset."""
    if isinstance(tensor, FakeTensor):
        return False
    try:
        is_somewhere = bool(tensor.data_ptr()) or not tensor.numel()
    except RuntimeError:  # the tensor wraps another one
        return False
    return is_somewhere and not (tensor.numel() and tensor.storage_offset() and not tensor.untyped_storage().nbytes())


def require_dense(what: str, tensors: Sequence[Tensor], hint: str = "") -> None:
    """Raise ArgumentError unless all tensors are dense, of equal dtype, and on the host or on CUDA devices.

    `hint` precedes the error text about dtypes.
    """
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.layout is not first.layout:
            raise fail(what, f"invalid tensor layout at index {index} (expected {first.layout}, got {tensor.layout})")
        if tensor.layout is not torch.strided:
            raise fail(what, f"unsupported layout {tensor.layout}: pass a dense tensor")
        if tensor.dtype is not first.dtype:
            types = f"expected {first.dtype}, got {tensor.dtype}"
            raise fail(what, f"{hint}invalid tensor type at index {index} ({types})")
        if tensor.device.type not in ("cpu", "cuda"):
            raise fail(what, f"unsupported device type {tensor.device.type}: pass tensors on the CPU or a CUDA GPU")
        if tensor.device.type != first.device.type:
            raise fail(what, f"tensors must be on one device, not on {first.device} and {tensor.device}")
        if not has_memory(tensor):
            kind = type(tensor).__name__
            text = "pass the inner tensor: to_local() of a DTensor, or wait() of an AsyncCollectiveTensor"
            raise fail(what, f"a {kind} at index {index} has no memory of its own, or has freed it; {text}")


def require_apart(what: str, tensors: Sequence[Tensor]) -> None:
    """Raise ArgumentError unless results can be written into all tensors."""
    for tensor in tensors:
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            text = "more than one element refers to a single memory location, as in expanded tensors: clone it"
            raise fail(what, f"results cannot be written to a tensor of shape {tuple(tensor.shape)}: {text}")


def require_alike(what: str, tensors: Sequence[Tensor]) -> None:
    """Raise ArgumentError unless all are dense tensors of equal dtype and size."""
    require_dense(what, tensors)
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape:
            sizes = f"expected {tuple(first.shape)}, got {tuple(tensor.shape)}"
            raise fail(what, f"invalid tensor size at index {index} ({sizes})")


def require_some(what: str, tensors: Sequence[Tensor], kind: str = "tensor list") -> None:
    if not tensors:
        raise fail(what, f"requires non-empty {kind}")


def require_same_length(what: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    if len(outputs) != len(inputs):
        raise fail(what, "requires input/output tensor lists to have the same length")


def require_one(what: str, tensors: Sequence[Any], kind: str = "tensor list") -> None:
    if len(tensors) != 1:
        raise fail(what, f"requires a single-element {kind}, not one with {len(tensors)} elements")


def require_root(what: str, root: int, size: int) -> None:
    if not 0 <= root < size:
        raise fail(what, f"invalid root rank: {root} is not a rank in a group of {size}")
