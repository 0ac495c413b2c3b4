"""A peer's own model, seen as one flat vector.

The core of the training algorithms works on flat NumPy vectors: one buffer to reduce, one to synchronize. A replica
moves values between such a vector and the tensors where the user's inner steps find them, in one pass and without
further copies. There is one for a torch module and one for NumPy arrays.

Parameters of float32 and narrower are kept in float32 outside, so that small outer updates of bfloat16 weights are not
rounded away; as soon as one is float64, everything is.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from pccl.training.outer import Vector
from pccl.training.shards import describe, local_shard


class Replica(Protocol):
    """The local parameters. Vectors have `count` elements of `dtype`."""

    count: int
    dtype: np.dtype[Any]
    layout: str
    """Names, shapes and dtypes: equal on all peers that train the same model."""

    def read(self, out: Vector) -> None:
        """`out = local`."""

    def difference(self, start: Vector, out: Vector) -> None:
        """`out = start - local`."""

    def write(self, values: Vector) -> None:
        """`local = values`."""

    def pack(self, state: Any) -> bytes:
        """What an inner optimizer's `state_dict()` gave, for a file."""

    def unpack(self, data: bytes) -> Any:
        """The reverse of `pack`."""


def replica_of(model: Any) -> Replica:
    """TypeError or ValueError, with the reason, for what cannot be trained."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return TorchReplica(torch, model)
    if isinstance(model, Mapping):
        return ArrayReplica(model)
    raise TypeError(
        f"the model must be a torch.nn.Module or a mapping of names to NumPy arrays, not {type(model).__name__}"
    )


class ArrayReplica:
    """NumPy arrays by name: any shape and strides, float16 to float64."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(f"parameter {name!r} must be a NumPy array, not {type(array).__name__}")
            if array.dtype.kind != "f" or array.dtype.itemsize > 8 or not array.dtype.isnative:
                raise ValueError(f"parameter {name!r} is {array.dtype}; only float16, float32 and float64 are trained")
            if not array.flags.writeable:
                raise ValueError(f"parameter {name!r} is read-only")
        if not arrays:
            raise ValueError("there are no parameters to train")
        self._arrays = list(arrays.values())
        self.count = sum(array.size for array in self._arrays)
        self.dtype = np.dtype(np.float64 if any(a.dtype == np.float64 for a in self._arrays) else np.float32)
        self.layout = "\n".join(f"{name} {array.shape} {array.dtype}" for name, array in arrays.items())

    def _parts(self, vector: Vector) -> list[tuple[Vector, Vector]]:
        """Each array beside its part of `vector`, in the same shape."""
        ends = np.cumsum([array.size for array in self._arrays])
        return [
            (array, vector[end - array.size : end].reshape(array.shape))
            for array, end in zip(self._arrays, ends, strict=True)
        ]

    def read(self, out: Vector) -> None:
        for array, part in self._parts(out):
            part[...] = array

    def difference(self, start: Vector, out: Vector) -> None:
        for (array, begin), (_, part) in zip(self._parts(start), self._parts(out), strict=True):
            np.subtract(begin, array, out=part)

    def write(self, values: Vector) -> None:
        for array, part in self._parts(values):
            array[...] = part

    def pack(self, state: Any) -> bytes:
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **state)
        return file.getvalue()

    def unpack(self, data: bytes) -> Any:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return dict(archive)


class TorchReplica:
    """The parameters of a module that require gradients, on whatever device; of distributed ones this rank's shards.

    The others, and buffers, stay as they are on each peer: build them alike.
    """

    def __init__(self, torch: Any, module: Any) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(f"{type(module).__name__} has no parameters that require gradients")
        for name, parameter in named:
            if not parameter.is_floating_point():
                raise ValueError(f"parameter {name!r} is {parameter.dtype}; only floats are trained")
        self._torch = torch
        self._module = module
        self._parameters = [parameter for _, parameter in named]
        self._sizes = [local_shard(parameter).numel() for parameter in self._parameters]
        self.count = sum(self._sizes)
        self.dtype = np.dtype(np.float64 if any(p.dtype == torch.float64 for p in self._parameters) else np.float32)
        self.layout = "\n".join(
            f"{name} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}{describe(p)}" for name, p in named
        )

    def _parts(self, vector: Vector) -> list[tuple[Any, Any]]:
        """Each parameter's values here beside its part of `vector`, in the same shape, sharing their memory."""
        shards = [local_shard(parameter) for parameter in self._parameters]
        parts = self._torch.from_numpy(vector).split(self._sizes)
        return [(shard, part.view(shard.shape)) for shard, part in zip(shards, parts, strict=True)]

    def read(self, out: Vector) -> None:
        for shard, part in self._parts(out):
            part.copy_(shard)

    def difference(self, start: Vector, out: Vector) -> None:
        for (shard, begin), (_, part) in zip(self._parts(start), self._parts(out), strict=True):
            self._torch.sub(begin, shard.to("cpu"), out=part)

    def write(self, values: Vector) -> None:
        for module in self._module.modules():
            # FSDP2 goes on with whole parameters that it has gathered for a forward pass alone.
            reshard = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()
        with self._torch.no_grad():
            for shard, part in self._parts(values):
                shard.copy_(part)

    def pack(self, state: Any) -> bytes:
        file = io.BytesIO()
        self._torch.save(state, file)
        return file.getvalue()

    def unpack(self, data: bytes) -> Any:
        return self._torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
