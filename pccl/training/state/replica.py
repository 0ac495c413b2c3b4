"""A peer's model as one flat vector, and a rank's shards of distributed tensors.

A replica copies values between the program's tensors and such a vector. The vector is float64 if any parameter is,
otherwise float32. A replica can be split into parts: runs of elements, cut along the tensors' first dimension.

The threads of torch's pool inherit the floating-point environment of the thread that created them.
`default_torch_arithmetic` probes them with a product whose digits depend on the environment. If the environment of a
thread is wrong, the calling thread computes alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl._floating_point import default_environment


def plain_name(name: str) -> str:
    """Return a tensor's name without what `torch.compile` adds, so that compiled and plain modules have equal names."""
    return name.replace("_orig_mod.", "")


def named_parameters(module: Any) -> dict[str, Any]:
    """Return a torch module's parameters by their plain names."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local_shard(tensor: Any) -> Any:
    """Return this rank's part of a distributed tensor, sharing its memory, without gradient history.

    For other tensors, return the detached tensor. Raises ValueError if the tensor holds partial sums.
    """
    if not is_distributed(tensor):
        return tensor.detach()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor placed as {tensor.placements} holds partial sums; redistribute it first")
    return tensor.detach().to_local()


def as_real(tensor: Any) -> Any:
    """Return a view of a complex tensor as real numbers, with a last dimension of 2. Return other tensors unchanged."""
    return sys.modules["torch"].view_as_real(tensor) if tensor.is_complex() else tensor


def describe(tensor: Any) -> str:
    """Return the place of a shard in its site, the same at all sites; "" if the tensor is not distributed."""
    if not is_distributed(tensor):
        return ""
    mesh = tensor.device_mesh
    return f" shard {mesh.get_coordinate()} of {tuple(mesh.shape)} {tensor.placements}"


def layout_of(tensors: Mapping[str, Any]) -> str:
    """Return a line for each tensor: its name, shape, dtype and shard place."""
    return "\n".join(
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{describe(tensor)}"
        for name, tensor in tensors.items()
    )


Vector: TypeAlias = NDArray[np.floating[Any]]


def named_parts(vector: Vector, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Vector]:
    """Return views of the parts of a replica's vector, in the shapes of its parameters."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = zip(shapes.items(), np.split(vector, ends[:-1]), strict=True)
    return {name: part.reshape(shape) for (name, shape), part in parts}


def replica_of(model: Any) -> Replica:
    """Return the replica of a torch module or of named NumPy arrays. Raises TypeError, ValueError."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return TorchReplica(torch, model)
    if isinstance(model, Mapping):
        return ArrayReplica(model)
    raise TypeError(
        f"the model must be a torch.nn.Module or a mapping of names to NumPy arrays, not {type(model).__name__}"
    )


def _rows(shapes: Sequence[Sequence[int]], count: int) -> list[list[tuple[int, slice]]]:
    """Return the tensors and their rows for each of `count` parts."""
    sizes = [math.prod(shape) for shape in shapes]
    parts: list[list[tuple[int, slice]]] = [[] for _ in range(count)]
    first = 0
    for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        if size:
            rows = shape[0] if shape else 1
            ends = [
                min(max(0, (sum(sizes) * number // count - first) * rows // size), rows) for number in range(count + 1)
            ]
            for part, begin, end in zip(parts, ends, ends[1:], strict=False):
                if begin < end:
                    part.append((index, slice(begin, end)))
        first += size
    return parts


class ArrayPart:
    """A run of a model's elements, in arrays of any shape and strides. Vectors have `count` elements."""

    def __init__(self, arrays: Sequence[Vector]) -> None:
        self._arrays = arrays
        self.count = sum(array.size for array in arrays)

    def part_shapes(self) -> list[tuple[int, ...]]:
        return [array.shape for array in self._arrays]

    def _parts(self, vector: Vector) -> list[tuple[Vector, Vector]]:
        ends = np.cumsum([array.size for array in self._arrays])
        return [
            (array, vector[end - array.size : end].reshape(array.shape))
            for array, end in zip(self._arrays, ends, strict=True)
        ]

    @default_environment()
    def read(self, out: Vector) -> None:
        """`out = local`."""
        for array, part in self._parts(out):
            part[...] = array

    @default_environment()
    def difference(self, start: Vector, out: Vector) -> None:
        """`out = start - local`; `out` may be `start`."""
        for (array, begin), (_, part) in zip(self._parts(start), self._parts(out), strict=True):
            np.subtract(begin, array, out=part)

    @default_environment()
    def write(self, values: Vector) -> None:
        """`local = values`."""
        for array, part in self._parts(values):
            array[...] = part


class ArrayReplica(ArrayPart):
    """NumPy arrays by name, of any shape and strides, from float16 to float64."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(f"parameter {name!r} must be a NumPy array, not {type(array).__name__}")
            if array.dtype.kind != "f" or array.dtype.itemsize > 8 or not array.dtype.isnative:
                raise ValueError(f"parameter {name!r} is {array.dtype}; only float16, float32 and float64 are trained")
            if not array.flags.writeable:
                raise ValueError(f"parameter {name!r} is read-only")
        if not arrays:
            raise ValueError("the model has no parameters to train")
        super().__init__(list(arrays.values()))
        self.dtype = np.dtype(np.float64 if any(a.dtype == np.float64 for a in self._arrays) else np.float32)
        self.layout = layout_of(arrays)
        self.shapes = {name: array.shape for name, array in arrays.items()}

    def split(self, count: int) -> list[ArrayPart]:
        """Return `count` parts as equal in size as whole rows allow, the same on all peers. Some may be empty."""
        parts = _rows([array.shape for array in self._arrays], count)
        return [ArrayPart([np.atleast_1d(self._arrays[index])[rows] for index, rows in part]) for part in parts]

    def holds(self, parameter: Any) -> bool:
        return any(parameter is array for array in self._arrays)


class TorchPart:
    """Rows of a module's parameters on any device, or of this rank's shards of distributed parameters."""

    def __init__(self, torch: Any, module: Any, pieces: Sequence[tuple[Any, slice]]) -> None:
        """`pieces` are parameters and the rows of each."""
        self._torch = torch
        self._module = module
        self._pieces = pieces
        self._sizes = [shard.numel() for shard in self._shards()]
        self.count = sum(self._sizes)

    def part_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(shard.shape) for shard in self._shards()]

    def _shards(self) -> list[Any]:
        return [self._torch.atleast_1d(as_real(local_shard(parameter)))[rows] for parameter, rows in self._pieces]

    def _parts(self, vector: Vector) -> list[tuple[Any, Any]]:
        parts = self._torch.from_numpy(vector).split(self._sizes)
        return [(shard, part.view(shard.shape)) for shard, part in zip(self._shards(), parts, strict=True)]

    def read(self, out: Vector) -> None:
        with default_torch_arithmetic(self._torch):
            for shard, part in self._parts(out):
                part.copy_(shard)

    def difference(self, start: Vector, out: Vector) -> None:
        with default_torch_arithmetic(self._torch):
            for (shard, begin), (_, part) in zip(self._parts(start), self._parts(out), strict=True):
                self._torch.sub(begin, shard.to("cpu"), out=part)

    def write(self, values: Vector) -> None:
        for module in self._module.modules():
            # FSDP2 would otherwise keep full parameters from a forward pass that no backward pass followed.
            reshard = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()
        with self._torch.no_grad(), default_torch_arithmetic(self._torch):
            for shard, part in self._parts(values):
                shard.copy_(part)


class TorchReplica(TorchPart):
    """The parameters of a module that require gradients, complex ones as real numbers. Other parameters, and buffers,
    are left unchanged."""

    def __init__(self, torch: Any, module: Any) -> None:
        named = [(name, p) for name, p in named_parameters(module).items() if p.requires_grad]
        if not named:
            raise ValueError(f"{type(module).__name__} has no parameters that require gradients")
        for name, parameter in named:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise ValueError(
                    f"parameter {name!r} is {parameter.dtype}; only floats and complex numbers are trained"
                )
            if parameter.is_meta:
                raise ValueError(f"parameter {name!r} is on meta and has no values; materialize the module first")
        super().__init__(torch, module, [(parameter, slice(None)) for _, parameter in named])
        is_double = any(p.dtype in (torch.float64, torch.complex128) for _, p in named)
        self.dtype = np.dtype(np.float64 if is_double else np.float32)
        self.layout = layout_of(dict(named))
        self.shapes = {name: tuple(as_real(local_shard(p)).shape) for name, p in named}

    def split(self, count: int) -> list[TorchPart]:
        parts = _rows([shard.shape for shard in self._shards()], count)
        return [
            TorchPart(self._torch, self._module, [(self._pieces[index][0], rows) for index, rows in part])
            for part in parts
        ]

    def holds(self, parameter: Any) -> bool:
        return any(parameter is held for held, _ in self._pieces)


Part: TypeAlias = ArrayPart | TorchPart
Replica: TypeAlias = ArrayReplica | TorchReplica


GRAIN = 1 << 15
"""The smallest number of elements for which torch uses another thread (at::internal::GRAIN_SIZE)."""
FACTORS = np.array(
    [
        (2.0**-126, 0.5),  # a subnormal result
        (2.0**-130, 2.0**10),  # a subnormal operand
        (1 + 2.0**-12 + 2.0**-23, 1 + 2.0**-12 + 2.0**-23),  # must be rounded up
        (-1 - 2.0**-23, 1 + 2.0**-23),  # must not be rounded down
        (1 + 2.0**-23, 1 + 2.0**-23),  # must not be rounded up
    ],
    np.float32,
)


@contextmanager
def default_torch_arithmetic(torch: Any) -> Iterator[None]:
    """Compute in the default floating-point environment within the block, including on torch's threads."""
    with default_environment():
        threads = torch.get_num_threads()
        if threads == 1 or _is_default_on_all(torch, threads):
            yield
            return
        try:
            torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)


def _is_default_on_all(torch: Any, threads: int) -> bool:
    if not torch.backends.openmp.is_available():
        return False  # the assignment of parts to threads is unknown
    with torch.no_grad():
        left, right, product = (torch.from_numpy(each) for each in _probe(threads))
        torch.mul(left, right, out=product)
    rows = product.numpy().reshape(-1, GRAIN)[:, : len(FACTORS)]
    expected = FACTORS[:, 0] * FACTORS[:, 1]
    return bool((rows.view(np.uint32) == expected.view(np.uint32)).all())


@lru_cache(maxsize=2)
def _probe(threads: int) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    operands = np.ones((2, threads, GRAIN), np.float32)
    operands[:, :, : len(FACTORS)] = FACTORS.T[:, None, :]
    return operands[0].reshape(-1), operands[1].reshape(-1), np.empty(threads * GRAIN, np.float32)
