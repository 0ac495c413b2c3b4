"""The most memory that an engine may use beyond the caller's arrays, as docs/performance.md and the engine say."""

from __future__ import annotations

from collections.abc import Iterable

from pccl.bench.memory import Memory
from pccl.bench.messages import ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER, Case

OP_SCRATCH_BYTES_MAX = 16 << 20
HELD_BYTES_MAX = 64 << 20
SEGMENT_BYTES_MAX = 512 << 10
BARRIER_BYTES_MAX = 4 << 10
"""The memory of a barrier: between hosts it is an op too."""


def memory_bound(case: Case, world_size: int, largest_copy_bytes: int) -> Memory:
    """Return the bounds of a case. `largest_copy_bytes` is that of the largest op in place so far.

    Of ops in a row, one may begin a moment before the engine has taken back what the last one had.
    """
    op_bytes = _op_scratch_bytes(case, world_size)
    tensor_bytes = -(-case.bytes // case.tensors)
    if _keeps_a_copy(case):
        op_bytes += tensor_bytes
    if case.collective == REDUCE:
        op_bytes += -(-tensor_bytes // world_size)
    scratch_bytes = BARRIER_BYTES_MAX + (case.tensors + 1) * op_bytes
    return Memory(scratch_bytes, max(scratch_bytes, HELD_BYTES_MAX + largest_copy_bytes))


def largest_copy(cases: Iterable[Case]) -> int:
    """Return the size of the largest array that a case copies for an abort to put back."""
    return max((-(-case.bytes // case.tensors) for case in cases if _keeps_a_copy(case)), default=0)


def _keeps_a_copy(case: Case) -> bool:
    return case.collective == BROADCAST or (case.in_place and case.collective in (ALL_REDUCE, REDUCE))


def _op_scratch_bytes(case: Case, world_size: int) -> int:
    if case.quantization != "none":
        return max(OP_SCRATCH_BYTES_MAX, (2 * world_size - 1) * SEGMENT_BYTES_MAX)
    if world_size == 2 or case.collective not in (ALL_REDUCE, REDUCE_SCATTER, REDUCE):
        return 0
    if case.algorithm == "ring" and case.collective == ALL_REDUCE:
        return 0
    segments = (world_size - 1) * (1 if case.collective == ALL_REDUCE else 2)
    return max(OP_SCRATCH_BYTES_MAX, segments * SEGMENT_BYTES_MAX)
