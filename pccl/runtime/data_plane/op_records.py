"""Reads the engine's flight recorder. Each op gets one record, joined from the records of its slices.

An op begins with its first slice and ends with its last. Ranks refer to the ring of the op's epoch, but in a send and
its recv the sender has rank 0 and the receiver rank 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from pccl.protocol.completion import ranks_of
from pccl.protocol.recording import OpRecord
from pccl.runtime.extension import ffi, lib
from pccl.types import Collective, DataType, ReduceAlgorithm

_CODES = {"uint64_t": "u8", "int64_t": "i8", "uint32_t": "u4", "uint8_t": "u1"}
Name = tuple[int, int, int]
"""Epoch, tag and sequence."""


def _columns() -> np.dtype[Any]:
    """Return the NumPy dtype of the C library's `pccl_op_record`, with the key's fields inline."""
    names, formats, offsets = [], [], []
    for name, field in ffi.typeof("pccl_op_record").fields:
        inner = field.type.fields if field.type.kind == "struct" else [(name, field)]
        base = field.offset if field.type.kind == "struct" else 0
        for part, each in inner:
            names.append(part)
            formats.append(_CODES[each.type.cname])
            offsets.append(base + each.offset)
    size = ffi.sizeof("pccl_op_record")
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


COLUMNS = _columns()
NAMES: tuple[str, ...] = COLUMNS.names or ()
COLLECTIVES = {int(each): each.name.lower() for each in Collective}
ALGORITHMS = {int(each): each.name.lower() for each in ReduceAlgorithm}
RECEIVER = 1
"""The receiver's rank in a send."""
DTYPES = {int(each): each for each in DataType}


Row = SimpleNamespace
"""A record from the C library, with its fields as attributes."""


def read(path: Any, records: int, since_ns: int) -> list[Row]:
    """Return the records of ops that are in flight or ended after `since_ns` in the engine of a fast path."""
    found = np.empty(records, COLUMNS)
    count = lib.pccl_fast_path_read_records(path, since_ns, ffi.from_buffer("pccl_op_record *", found), records)
    return [Row(**dict(zip(NAMES, values, strict=True))) for values in found[:count].tolist()]


def name_of(row: Row) -> Name:
    return row.epoch, row.tag, row.sequence


def awaited(rows: Iterable[Row], epoch: int | None, tag: int, ring: Sequence[int]) -> list[int] | None:
    """Return peers that may not have launched the op in flight with this tag, at least one if any have not. Return None
    if this is the only op in flight or has no record."""
    open_rows = [row for row in rows if not row.ended_ns]
    found = [row for row in open_rows if (row.epoch, row.tag) == (epoch, tag)]
    if not found or len(found) == len(open_rows):
        return None
    ranks = {row.awaits for row in found if not row.done_ns and row.awaits != row.rank}
    return sorted(ring[rank] for rank in ranks if rank < len(ring))


def _kind(row: Row) -> str:
    """Return the name of this peer's call."""
    if row.collective == Collective.SEND and row.rank == RECEIVER and ranks_of(row.tag) is not None:
        return "recv"
    return COLLECTIVES.get(row.collective, "?")


@dataclass(slots=True)
class Launch:
    """The part of an op's record that the session keeps, if the op did not use the fast path."""

    launched_ns: int
    caller: int
    over_ns: int = 0
    result: str = ""
    reason: str = ""


def joined(
    rows: Sequence[Row], launch: Launch | None, ring: Sequence[int], caller_number: Callable[[int], int]
) -> OpRecord:
    """Join the records of one op. `ring` lists its epoch's peers by rank; it is empty if they are unknown."""
    first = rows[0]
    pair = ranks_of(first.tag)
    ranks = range(len(ring)) if pair is None else pair

    def peer(rank: int) -> int:
        return ring[ranks[rank]] if rank < len(ranks) and ranks[rank] < len(ring) else 0

    def latest(at: str, who: str) -> tuple[int, int]:
        last = max(rows, key=lambda row: getattr(row, at))
        at_ns: int = getattr(last, at)
        return at_ns, peer(getattr(last, who)) if at_ns else 0

    def all_by(at: str) -> int:
        times = [getattr(row, at) for row in rows]
        return max(times) if all(times) else 0

    def earliest(at: str) -> int:
        return min((getattr(row, at) for row in rows if getattr(row, at)), default=0)

    dtype = DTYPES.get(first.dtype)
    received_ns, received_from = latest("last_rx_ns", "last_from")
    joined_ns, joined_last = latest("heard_ns", "heard_from")
    ended_ns = all_by("ended_ns")
    awaited = next((row.awaits for row in rows if not row.done_ns and row.awaits != row.rank), None)
    if awaited is not None:
        joined_ns, joined_last = 0, 0
    launched_ns, caller = earliest("launched_ns"), first.caller
    outcome = max(row.outcome for row in rows) if ended_ns else lib.PCCL_RECORD_OPEN
    result = {lib.PCCL_RECORD_COMMITTED: "SUCCESS", lib.PCCL_RECORD_ABORTED: "ABORTED"}.get(outcome, "")
    reason, agreed_ns = "", all_by("completed_ns")
    if launch is None and agreed_ns and result != "ABORTED":  # fast path: the caller continues before the op's end
        ended_ns, result = agreed_ns, "SUCCESS"
    if launch is not None:
        if launch.launched_ns:
            launched_ns, caller = launch.launched_ns, launch.caller
        ended_ns, result, reason = launch.over_ns, launch.result, launch.reason
    return OpRecord(
        *name_of(first),
        kind=_kind(first),
        algorithm=ALGORITHMS.get(first.algorithm, "?"),
        dtype=dtype.name.lower() if dtype is not None else "?",
        size_bytes=first.count * (dtype.itemsize if dtype is not None else 1),
        rank=first.rank,
        world_size=first.world_size,
        caller=caller_number(caller),
        launched_ns=launched_ns,
        first_sent_ns=earliest("first_tx_ns"),
        last_sent_ns=max(row.last_tx_ns for row in rows),
        first_received_ns=earliest("first_rx_ns"),
        last_received_ns=received_ns,
        last_received_from=received_from,
        joined_ns=joined_ns,
        joined_last=joined_last,
        done_ns=all_by("done_ns"),
        agreed_ns=agreed_ns,
        ended_ns=ended_ns,
        tx_bytes=sum(row.tx_bytes for row in rows),
        rx_bytes=sum(row.rx_bytes for row in rows),
        result=result,
        reason=reason,
        awaited=peer(awaited) if awaited is not None else 0,
    )
