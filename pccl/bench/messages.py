"""The messages between the coordinator and its workers: one JSON object a line."""

from __future__ import annotations

import msgspec

from pccl.bench.memory import Memory

ALL_REDUCE = "all_reduce"
ALL_GATHER, REDUCE_SCATTER, BROADCAST, SEND, BARRIER = "all_gather", "reduce_scatter", "broadcast", "send", "barrier"
ALL_TO_ALL, GATHER, SCATTER, REDUCE = "all_to_all", "gather", "scatter", "reduce"
COLLECTIVES = (
    *(ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, REDUCE),
    *(BROADCAST, SEND, BARRIER),
)


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The answer to a worker's Hello."""

    rank: int
    ring_ports: list[int]
    gloo_store: str | None
    """The file through which Gloo's ranks meet; None if Gloo is not measured."""


class Connect(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker to leave its run, if it is in one, and join that of a master with so many connections a link."""

    master: str
    connections: int
    token: str | None
    """The run's token; None for that of the environment."""
    encrypt: bool | None


class Case(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker to reduce `bytes`, cut into `tensors` concurrent tensors, `iterations` times, or to call another
    collective with so many."""

    bytes: int
    tensors: int
    dtype: str
    quantization: str
    algorithm: str
    in_place: bool
    memory: bool
    warmup: int
    iterations: int
    collective: str = ALL_REDUCE


class Loop(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker to reduce `bytes` until a peer was lost and `steps_after_loss` reduces were committed after it."""

    bytes: int
    steps_after_loss: int
    announce_steps: bool


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A worker has started, and listens for its neighbour of the raw ring."""

    ring_port: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A worker is connected to all others."""


class Samples(msgspec.Struct, tag=True, frozen=True):
    """A worker's answer to a Case."""

    seconds: dict[str, list[float]]
    """The seconds of each contender's iterations."""
    memory: Memory | None


class Step(msgspec.Struct, tag=True, frozen=True):
    """One reduce of a Loop, between two readings of the machine-wide monotonic clock."""

    start_s: float
    end_s: float
    verdict: str
    world_size: int


class Steps(msgspec.Struct, tag=True, frozen=True):
    """A worker's answer to a Loop."""

    steps: list[Step]


Request = Setup | Connect | Case | Loop
Reply = Hello | Ready | Samples | Step | Steps

COMMIT = "commit"
PCCL, RAW_RING, GLOO = "pccl", "raw_ring", "gloo"
"""The names of the contenders."""
ALGORITHMS = ("auto", "ring", "direct")
DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
