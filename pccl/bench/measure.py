"""Runs the cases of a benchmark and sums up their samples in rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pccl.bench.errors import BenchError
from pccl.bench.memory import Memory
from pccl.bench.memory_bound import largest_copy, memory_bound
from pccl.bench.messages import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    GATHER,
    GLOO,
    PCCL,
    RAW_RING,
    REDUCE_SCATTER,
    SCATTER,
    Case,
    Samples,
)
from pccl.bench.peers import LocalPeers
from pccl.bench.plan import Plan, cases
from pccl.bench.sizes import format_bytes


class Timing(msgspec.Struct, frozen=True):
    median_s: float
    p95_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


class Row(msgspec.Struct, frozen=True):
    peers: int
    connections: int
    bytes: int
    tensors: int
    quantization: str
    algorithm: str
    pccl: Timing
    raw_ring: Timing | None
    gloo: Timing | None
    per_cent_of_raw_ring: float | None
    times_as_fast_as_gloo: float | None
    memory: Memory | None
    """The memory of the rank that used most."""
    memory_bound: Memory | None
    """The most that it may be."""
    collective: str = ALL_REDUCE


def measure(plan: Plan) -> Iterator[Row]:
    todo = cases(plan)
    for world_size in plan.peers:
        with LocalPeers(world_size, against_gloo=GLOO in plan.rulers, encrypt=plan.encrypt) as peers:
            for connections in plan.connections:
                peers.connect(connections)
                for case in todo:
                    peers.send_all(case)
                    samples = peers.receive_all(Samples)
                    slowest_s = {name: slowest([one.seconds[name] for one in samples]) for name in samples[0].seconds}
                    memories = [one.memory for one in samples]
                    yield row(world_size, connections, case, slowest_s, memories, largest_copy(todo))


def slowest(seconds_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of each iteration, which lasts until its last rank is done."""
    return [max(iteration) for iteration in zip(*seconds_by_rank, strict=True)]


def row(
    world_size: int,
    connections: int,
    case: Case,
    slowest_s: Mapping[str, Sequence[float]],
    memories: Sequence[Memory | None],
    largest_copy_bytes: int,
) -> Row:
    """Return the row of a case, from each contender's seconds by iteration and the memory of the ranks."""
    timings = {name: timing(seconds, case.bytes, world_size, case.collective) for name, seconds in slowest_s.items()}
    pccl, raw_ring, gloo = timings[PCCL], timings.get(RAW_RING), timings.get(GLOO)
    known = [memory for memory in memories if memory is not None]
    return Row(
        world_size,
        connections,
        case.bytes,
        case.tensors,
        case.quantization,
        case.algorithm,
        pccl,
        raw_ring,
        gloo,
        100 * raw_ring.median_s / pccl.median_s if raw_ring else None,
        gloo.median_s / pccl.median_s if gloo else None,
        _most(known) if known else None,
        memory_bound(case, world_size, largest_copy_bytes) if known else None,
        case.collective,
    )


def _most(memories: Sequence[Memory]) -> Memory:
    return Memory(
        max(memory.scratch_bytes_max for memory in memories), max(memory.held_bytes_max for memory in memories)
    )


def check_memory(rows: Iterable[Row]) -> None:
    """Raise BenchError if a rank has used more memory beyond the caller's arrays than it may."""
    for row in rows:
        if row.memory is None or row.memory_bound is None:
            continue
        for what, used, allowed in (
            ("used", row.memory.scratch_bytes_max, row.memory_bound.scratch_bytes_max),
            ("held", row.memory.held_bytes_max, row.memory_bound.held_bytes_max),
        ):
            if used > allowed:
                raise BenchError(
                    f"{row.peers} peers, {format_bytes(row.bytes)}, {row.quantization}, {row.algorithm}: a rank has "
                    f"{what} {used} bytes beyond the user's arrays, more than the {allowed} that it may"
                )


def timing(slowest_s: Sequence[float], size_bytes: int, world_size: int, collective: str = ALL_REDUCE) -> Timing:
    """Return the times and rates of a case. Bus bandwidth is as in nccl-tests: what the busiest link carries."""
    median_s = statistics.median(slowest_s)
    p95_s = statistics.quantiles(slowest_s, n=20, method="inclusive")[-1] if len(slowest_s) > 1 else median_s
    rate = 0.0 if collective == BARRIER else size_bytes / median_s
    share = (world_size - 1) / world_size
    passes = {ALL_REDUCE: 2 * share} | dict.fromkeys((ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER), share)
    return Timing(median_s, p95_s, rate, rate * passes.get(collective, 1.0))
