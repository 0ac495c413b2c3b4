"""What the coordinator and its workers say to each other: one JSON object a line."""

from __future__ import annotations

import msgspec


class Setup(msgspec.Struct, tag=True, frozen=True):
    """To a worker that has said Hello."""

    rank: int
    master: str
    ring_ports: list[int]
    connections: int


class Case(msgspec.Struct, tag=True, frozen=True):
    """Reduce `bytes`, cut into `tensors` concurrent tensors, `iterations` times."""

    bytes: int
    tensors: int
    dtype: str
    quantization: str
    warmup: int
    iterations: int


class Loop(msgspec.Struct, tag=True, frozen=True):
    """Reduce `bytes` until a peer was lost and `steps_after_loss` more reduces have been committed."""

    bytes: int
    steps_after_loss: int
    announce_steps: bool


class Hello(msgspec.Struct, tag=True, frozen=True):
    ring_port: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The rank is connected to everybody."""


class Samples(msgspec.Struct, tag=True, frozen=True):
    """Answers a Case: seconds per iteration."""

    pccl_s: list[float]
    raw_s: list[float]


class Step(msgspec.Struct, tag=True, frozen=True):
    """One reduce of a Loop, between two readings of the machine-wide monotonic clock."""

    start_s: float
    end_s: float
    verdict: str
    world_size: int


class Steps(msgspec.Struct, tag=True, frozen=True):
    """Answers a Loop."""

    steps: list[Step]


Request = Setup | Case | Loop
Reply = Hello | Ready | Samples | Step | Steps

COMMIT = "commit"
QUANTIZATIONS = ("none", "min-max", "zero-point-scale")
DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
