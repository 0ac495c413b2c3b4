"""Runs the cases of a benchmark and boils their samples down to rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec
import numpy as np

from pccl.bench.messages import Case, Samples
from pccl.bench.peers import BenchError, LocalPeers


class Plan(msgspec.Struct, frozen=True):
    peers: list[int]
    sizes_bytes: list[int]
    tensors: list[int]
    dtype: str
    connections: int
    quantization: str
    iterations: int
    warmup: int


class Timing(msgspec.Struct, frozen=True):
    median_s: float
    p95_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


class Row(msgspec.Struct, frozen=True):
    peers: int
    bytes: int
    tensors: int
    pccl: Timing
    raw_ring: Timing | None
    per_cent_of_raw_ring: float | None


def measure(plan: Plan) -> Iterator[Row]:
    todo = cases(plan)
    for world_size in plan.peers:
        with LocalPeers(world_size, connections=plan.connections) as peers:
            for case in todo:
                peers.send_all(case)
                samples = peers.receive_all(Samples)
                yield row(world_size, case, [rank.pccl_s for rank in samples], [rank.raw_s for rank in samples])


def cases(plan: Plan) -> list[Case]:
    """What is measured for each world size, in this order."""
    item_bytes = np.dtype(plan.dtype).itemsize
    for size_bytes in plan.sizes_bytes:
        if size_bytes % item_bytes or size_bytes // item_bytes < max(plan.tensors):
            raise BenchError(f"{size_bytes} bytes cannot be cut into {max(plan.tensors)} tensors of {plan.dtype}")
    return [
        Case(size_bytes, tensors, plan.dtype, plan.quantization, plan.warmup, plan.iterations)
        for size_bytes in plan.sizes_bytes
        for tensors in plan.tensors
    ]


def row(world_size: int, case: Case, pccl_s: list[list[float]], raw_s: list[list[float]]) -> Row:
    """From seconds by rank and iteration; there may be none of the raw ring."""
    pccl = timing(pccl_s, case.bytes, world_size)
    if not raw_s:
        return Row(world_size, case.bytes, case.tensors, pccl, None, None)
    raw_ring = timing(raw_s, case.bytes, world_size)
    return Row(world_size, case.bytes, case.tensors, pccl, raw_ring, 100 * raw_ring.median_s / pccl.median_s)


def timing(seconds_by_rank: list[list[float]], size_bytes: int, world_size: int) -> Timing:
    slowest = [max(iteration) for iteration in zip(*seconds_by_rank, strict=True)]
    median_s = statistics.median(slowest)
    p95_s = statistics.quantiles(slowest, n=20, method="inclusive")[-1] if len(slowest) > 1 else median_s
    rate = size_bytes / median_s
    return Timing(median_s, p95_s, rate, rate * 2 * (world_size - 1) / world_size)
