"""The ops of a step, and what each peer contributes to them, derived from seeds: a peer makes them, the checker again.

Contributions are small whole numbers, so that sums are exact in every type here, in whatever order they are added.
pccl is not imported: the checker uses this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ALL_REDUCE, ALL_GATHER, BROADCAST, REDUCE_SCATTER, BARRIER = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "reduce_scatter",
    "barrier",
)
MAGNITUDE = 1000
IMPATIENT_S = 0.2
SAMPLED = 8
"""The number of elements of a result that are reported as they are, where the bytes cannot be foretold."""


@dataclass(frozen=True)
class Load:
    """The weight of a run: how many ops a step has and how large they are."""

    ops: int = 5
    small_max: int = 4096
    """Elements of most ops."""
    large: int = 0
    """Elements of one op in each step; 0: there is none."""
    state_bytes: int = 1 << 20
    rest_s: float = 0.04
    """The time between two steps."""
    impatient: float = 0.0
    """The share of waiting calls that are given up after at most IMPATIENT_S."""
    optimize_every: int = 0
    """Revisions between two calls of optimize_topology; 0: there are none."""


@dataclass(frozen=True)
class Op:
    tag: int
    kind: str
    how: str = "SUM"
    dtype: str = "float32"
    count: int = 1
    is_quantized: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the bytes of the result follow from the contributions."""
        return not self.is_quantized and self.how != "AVG"

    @property
    def is_applied(self) -> bool:
        """Whether peers apply its result to their state: it is the same on all."""
        return self.kind not in (REDUCE_SCATTER, BARRIER)


def ops_of_step(seed: int, step: int, load: Load) -> list[Op]:
    random = Random(f"{seed} {step}")
    ops = [_op(random, tag, random.randint(1, load.small_max)) for tag in range(load.ops)]
    if load.large:
        ops.append(Op(load.ops, ALL_REDUCE, random.choice(("SUM", "AVG", "MAX")), "float32", load.large))
    return ops


def _op(random: Random, tag: int, count: int) -> Op:
    kind = random.choices((ALL_REDUCE, ALL_GATHER, BROADCAST, REDUCE_SCATTER, BARRIER), weights=(12, 2, 2, 2, 1))[0]
    if kind == BARRIER:
        return Op(tag, kind)
    dtype = random.choice(("float32", "float32", "float64", "int64", "int32"))
    if kind in (ALL_GATHER, BROADCAST):
        return Op(tag, kind, "", dtype, count)
    if kind == REDUCE_SCATTER:
        return Op(tag, kind, "SUM", dtype, count)
    how = random.choice(("SUM", "SUM", "MAX", "AVG" if dtype.startswith("float") else "SUM"))
    return Op(tag, kind, how, dtype, count, how == "SUM" and dtype == "float32" and random.random() < 0.3)


def contribution(seed: int, peer: str, label: str, step: int, op: Op) -> Array:
    """What this peer gives to the op; a fresh array. Of a barrier: an empty one."""
    if op.kind == BARRIER:
        return np.zeros(0, np.float32)
    words = hashlib.blake2b(f"{seed} {peer} {label} {step} {op.tag}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(int.from_bytes(words)))
    return generator.integers(-MAGNITUDE, MAGNITUDE + 1, op.count, np.int32).astype(op.dtype)


def result(op: Op, contributions: Sequence[Array], rank: int) -> Array:
    """What the peer of this rank has after an op of the peers with these contributions, by rank."""
    if op.kind == BARRIER:
        return contributions[0]
    if op.kind == ALL_GATHER:
        return np.concatenate([each.reshape(-1) for each in contributions])
    if op.kind == BROADCAST:
        return contributions[0]  # the root is always the peer of rank 0
    total = contributions[0].copy()
    for each in contributions[1:]:
        if op.how == "MAX":
            np.maximum(total, each, out=total)
        else:
            total += each
    if op.how == "AVG":
        total /= len(contributions)
    if op.kind == REDUCE_SCATTER:
        return np.array_split(total, len(contributions))[rank]
    return total


def tolerance(op: Op, world: int) -> float:
    """The most that an element may be away from `result`."""
    if op.is_quantized:
        # A grid of 255 steps over at most this range, once for each contribution on its way and once for the sum.
        return 2 * world * MAGNITUDE / 255 * (world + 1)
    return 1e-3 if op.how == "AVG" else 0.0


def sample(result: Array) -> list[float]:
    """Return some elements from all over a result, and its least and its largest one."""
    if not result.size:
        return []
    places = np.linspace(0, result.size - 1, min(SAMPLED, result.size)).astype(int)
    chosen: list[float] = [*result[places].astype(float), float(result.min()), float(result.max())]
    return chosen


def digest(data: Array) -> str:
    return hashlib.blake2b(np.ascontiguousarray(data).data.cast("B") if data.size else b"", digest_size=8).hexdigest()


class State:
    """The state of a peer: a chain of digests of all that was ever applied, and bulk that follows from the chain.

    After each step the chain is the digest of itself and of what the ops of the step gave, and one block of the bulk is
    overwritten with bytes that the chain determines. So two peers that have the same chain have made the same steps,
    and their bulk is the same as far as it was copied right.
    """

    BLOCK = 4096

    def __init__(self, size_bytes: int) -> None:
        self.label = np.zeros(64, np.uint8)
        self.chain = np.zeros(16, np.uint8)
        self.bulk = np.zeros(max(1, size_bytes // self.BLOCK) * self.BLOCK, np.uint8)

    @property
    def arrays(self) -> dict[str, Array]:
        return {"label": self.label, "chain": self.chain, "bulk": self.bulk}

    @property
    def name(self) -> str:
        return self.label.tobytes().rstrip(b"\0").decode()

    @name.setter
    def name(self, name: str) -> None:
        data = name.encode()
        assert len(data) <= len(self.label)
        self.label[:] = 0
        self.label[: len(data)] = np.frombuffer(data, np.uint8)

    def reset(self) -> None:
        self.chain[:] = 0
        self.bulk[:] = 0

    def advance(self, step: int, applied: Sequence[tuple[int, str]]) -> None:
        """Apply what the ops with these tags gave."""
        after = next_chain(self.chain.tobytes(), applied)
        self.chain[:] = np.frombuffer(after, np.uint8)
        blocks = len(self.bulk) // self.BLOCK
        start = step % blocks * self.BLOCK
        generator = np.random.Generator(np.random.Philox(int.from_bytes(after)))
        self.bulk[start : start + self.BLOCK] = generator.integers(0, 256, self.BLOCK, np.uint8)


def next_chain(chain: bytes, applied: Sequence[tuple[int, str]]) -> bytes:
    return hashlib.blake2b(chain + repr(sorted(applied)).encode(), digest_size=16).digest()
