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
    raw_ring: Timing
    per_cent_of_raw_ring: float


def measure(plan: Plan) -> Iterator[Row]:
    item_bytes = np.dtype(plan.dtype).itemsize
    for size_bytes in plan.sizes_bytes:
        if size_bytes % item_bytes or size_bytes // item_bytes < max(plan.tensors):
            raise BenchError(f"{size_bytes} bytes cannot be cut into {max(plan.tensors)} tensors of {plan.dtype}")
    for world_size in plan.peers:
        with LocalPeers(world_size, connections=plan.connections) as peers:
            for size_bytes in plan.sizes_bytes:
                for tensors in plan.tensors:
                    peers.send_all(
                        Case(size_bytes, tensors, plan.dtype, plan.quantization, plan.warmup, plan.iterations)
                    )
                    yield _row(world_size, size_bytes, tensors, peers.receive_all(Samples))


def _row(world_size: int, size_bytes: int, tensors: int, samples: list[Samples]) -> Row:
    pccl = timing([rank.pccl_s for rank in samples], size_bytes, world_size)
    raw_ring = timing([rank.raw_s for rank in samples], size_bytes, world_size)
    return Row(world_size, size_bytes, tensors, pccl, raw_ring, 100 * raw_ring.median_s / pccl.median_s)


def timing(seconds_by_rank: list[list[float]], size_bytes: int, world_size: int) -> Timing:
    slowest = [max(iteration) for iteration in zip(*seconds_by_rank, strict=True)]
    median_s = statistics.median(slowest)
    p95_s = statistics.quantiles(slowest, n=20, method="inclusive")[-1] if len(slowest) > 1 else median_s
    rate = size_bytes / median_s
    return Timing(median_s, p95_s, rate, rate * 2 * (world_size - 1) / world_size)
