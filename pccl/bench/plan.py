"""The plan of a benchmark: what it is asked to measure, checked before anything is started."""

from __future__ import annotations

import importlib.util

import msgspec
import numpy as np

from pccl import DataType
from pccl.bench.errors import BenchError
from pccl.bench.messages import ALL_REDUCE, BARRIER, GLOO, Case
from pccl.bench.quantization import parse_quantization

GLOO_DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")


class Plan(msgspec.Struct, frozen=True):
    """A benchmark: all combinations of its lists are measured."""

    peers: list[int]
    connections: list[int]
    sizes_bytes: list[int]
    tensors: list[int]
    quantizations: list[str]
    algorithms: list[str]
    dtype: str
    in_place: bool
    rulers: list[str]
    """RAW_RING, GLOO, both or neither."""
    memory: bool
    iterations: int
    warmup: int
    encrypt: bool = False
    collectives: list[str] = msgspec.field(default_factory=lambda: [ALL_REDUCE])

    @property
    def rows(self) -> int:
        """The number of rows that the result will have."""
        return len(self.peers) * len(self.connections) * len(cases(self))


def cases(plan: Plan) -> list[Case]:
    """Return the cases for each number of peers and connections, in order. BenchError if one cannot be measured."""
    dtype = np.dtype(plan.dtype)
    for size_bytes in plan.sizes_bytes:
        if size_bytes % dtype.itemsize or size_bytes // dtype.itemsize < max(plan.tensors):
            raise BenchError(f"{size_bytes} bytes cannot be cut into {max(plan.tensors)} tensors of {plan.dtype}")
    for text in plan.quantizations:
        try:
            options = parse_quantization(text)
            if options is not None:
                options.check_tensor(DataType.from_numpy_dtype(dtype))
        except ValueError as error:
            raise BenchError(f"--quantize {text}: {error}") from None
    if plan.collectives != [ALL_REDUCE]:
        if plan.tensors != [1] or plan.quantizations != ["none"]:
            raise BenchError("--tensors and --quantize are for all_reduce alone: measure it by itself")
        smallest = min(plan.sizes_bytes) // dtype.itemsize
        if smallest < max(plan.peers):
            raise BenchError(f"{smallest} elements cannot be divided among {max(plan.peers)} peers")
    if GLOO in plan.rulers:
        _check_gloo(plan.dtype)
    return [
        Case(
            size_bytes,
            tensors,
            plan.dtype,
            quantization,
            algorithm,
            plan.in_place,
            plan.memory,
            plan.warmup,
            plan.iterations,
            collective,
        )
        for collective in plan.collectives
        for size_bytes in plan.sizes_bytes
        for tensors in plan.tensors
        for quantization in plan.quantizations
        for algorithm in plan.algorithms
        if collective != BARRIER or (size_bytes, algorithm) == (plan.sizes_bytes[0], plan.algorithms[0])
    ]


def _check_gloo(dtype: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise BenchError("--against gloo needs torch: pip install 'pccl-collectives[torch]'")
    if dtype not in GLOO_DTYPES:
        raise BenchError(f"--against gloo: Gloo does not reduce {dtype}, only {', '.join(GLOO_DTYPES)}")
