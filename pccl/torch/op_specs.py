"""A process group's ops as specs for the engine, on flat arrays.

The number of ranks is fixed, so each spec is created with its buffers. After a loss, the survivors must not
execute an op among themselves, so `Fixed` makes it fail on all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pccl._arrays import changes_of
from pccl.protocol.completion import PAIR_TAG_MAX
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Pair, Root
from pccl.torch.tensors import Memory, Tensor
from pccl.types import Collective, DataType, ReduceOp

INNER_PAIR_TAG = PAIR_TAG_MAX - 2**20
"""The first tag for internal sends, such as those of the monitored barrier. Callers' tags are smaller."""
KEPT_BYTES_MAX = 64 << 20
FEWER_RANKS = "ranks are left"
"""The end of the reason for which `Fixed` rejects a smaller ring."""


class Scratch:
    """Reusable receive memory for results that are then copied into a list of tensors. Thread-safe.

    Fresh memory from the system costs more than the copy because its pages must be created. One array of at most
    `KEPT_BYTES_MAX` is kept. A concurrent call gets fresh memory, and a failed call does not return its array.
    """

    def __init__(self) -> None:
        self._taking = threading.Lock()
        self._kept: Tensor | None = None

    @contextmanager
    def rows(self, shape: tuple[int, int], dtype: Any) -> Generator[Tensor, None, None]:
        """Provide a tensor of this shape on the host within the context."""
        size_bytes = shape[0] * shape[1] * dtype.itemsize
        with self._taking:
            array, self._kept = self._kept, None
        if array is None or array.numel() < size_bytes:
            array = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        yield array[:size_bytes].view(dtype).view(shape)
        if array.numel() <= KEPT_BYTES_MAX:
            with self._taking:
                self._kept = array


class Fixed:
    """The buffers of an op that fails if the number of ranks has changed."""

    def __init__(self, buffers: Buffers, world_size: int) -> None:
        self._buffers = buffers
        self._world_size = world_size

    def place(self, rank: int, world_size: int) -> Buffers:
        if world_size != self._world_size:
            raise ValueError(f"only {world_size} of the process group's {self._world_size} {FEWER_RANKS}")
        return self._buffers


class OpSpecs:
    """Creates the op specs of one process group."""

    def __init__(self, peers: tuple[int, ...], rank: int, ring: Sequence[int]) -> None:
        """Args:
        peers: The peer number of each rank.
        ring: The same peers in the run's order.
        """
        self.peers = peers
        self.size = len(peers)
        self.rank = rank
        is_in_order = tuple(ring) == peers
        self.order = [] if is_in_order else [peers.index(peer) for peer in ring]
        """The rank at each position in the ring; empty if ranks and positions are equal."""
        self.positions = [] if is_in_order else [tuple(ring).index(peer) for peer in peers]
        """The ring position of each rank; empty if ranks and positions are equal."""
        self._pairs = {False: [Pair(peer, False) for peer in peers], True: [Pair(peer, True) for peer in peers]}
        self.scratch = Scratch()

    def _spec(
        self,
        tag: int,
        collective: Collective,
        like: Memory | None,
        buffers: Buffers,
        written: Sequence[Memory] = (),
        op: ReduceOp = ReduceOp.SUM,
        root: int | None = None,
    ) -> OpSpec:
        """Args:
        like: Memory with the op's dtype, or None for ops without elements.
        written: The memory of the result, on ranks that get one.
        """
        changes = changes_of(*(each.owner for each in written)) if written else None
        dtype, bytes_of = (DataType.UINT8, "") if like is None else (like.dtype, like.bytes_of)
        named = None if root is None else Root(root, self.peers[root])
        fixed = Fixed(buffers, self.size)
        return OpSpec(tag, dtype, op, None, fixed, None, collective, named, bytes_of=bytes_of, written=changes)

    def all_reduce(self, tag: int, send: Memory, recv: Memory, op: ReduceOp) -> OpSpec:
        buffers = Buffers(send.address, recv.address, send.count, (send.owner, recv.owner))
        return self._spec(tag, Collective.ALL_REDUCE, send, buffers, [recv], op)

    def broadcast(self, tag: int, array: Memory, root: int) -> OpSpec:
        buffers = Buffers(array.address, array.address, array.count, array.owner)
        written = [] if root == self.rank else [array]
        return self._spec(tag, Collective.BROADCAST, array, buffers, written, root=root)

    def barrier(self, tag: int) -> OpSpec:
        return self._spec(tag, Collective.BARRIER, None, Buffers(0, 0, 0, None))

    def all_gather(self, tag: int, send: Memory, recv: Memory) -> OpSpec:
        assert recv.count == self.size * send.count
        buffers = Buffers(send.address, recv.address, recv.count, (send.owner, recv.owner))
        return self._spec(tag, Collective.ALL_GATHER, send, buffers, [recv])

    def reduce_scatter(self, tag: int, send: Memory, recv: Memory, op: ReduceOp) -> OpSpec:
        assert send.count == self.size * recv.count
        buffers = Buffers(send.address, recv.address, send.count, (send.owner, recv.owner))
        return self._spec(tag, Collective.REDUCE_SCATTER, send, buffers, [recv], op)

    def reduce(self, tag: int, send: Memory, recv: Memory, op: ReduceOp, root: int) -> OpSpec:
        """Only the root uses `recv`."""
        written = [recv] if root == self.rank else []
        to = recv.address if written else 0
        buffers = Buffers(send.address, to, send.count, (send.owner, recv.owner))
        return self._spec(tag, Collective.REDUCE, send, buffers, written, op, root)

    def gather(self, tag: int, send: Memory, recv: Sequence[Memory], root: int) -> OpSpec:
        """At the root, `recv` consists of one part per rank, in rank order; elsewhere it is empty."""
        parts = self._as_in_ring(recv)
        addresses = [part.address for part in parts]
        keep = send.owner, [part.owner for part in parts]
        first = addresses[0] if addresses else 0
        buffers = Buffers(send.address, first, self.size * send.count, keep, recv_parts=addresses or None)
        return self._spec(tag, Collective.GATHER, send, buffers, parts, root=root)

    def scatter(self, tag: int, send: Sequence[Memory], recv: Memory, root: int) -> OpSpec:
        """At the root, `send` consists of one part per rank, in rank order; elsewhere it is empty."""
        parts = self._as_in_ring(send)
        addresses = [part.address for part in parts]
        keep = [part.owner for part in parts], recv.owner
        first = addresses[0] if addresses else 0
        buffers = Buffers(first, recv.address, self.size * recv.count, keep, send_parts=addresses or None)
        return self._spec(tag, Collective.SCATTER, recv, buffers, [recv], root=root)

    def _as_in_ring(self, parts: Sequence[Memory]) -> Sequence[Memory]:
        return [parts[rank] for rank in self.order] if parts and self.order else parts

    def all_to_all(
        self, tag: int, send: Memory, recv: Memory, outgoing: Sequence[int], incoming: Sequence[int]
    ) -> OpSpec:
        """`outgoing` and `incoming` hold the number of elements to and from each rank, in ring order."""
        width = send.owner.element_size() if send.bytes_of else 1
        parts = [count * width for count in outgoing], [count * width for count in incoming]
        buffers = Buffers(send.address, recv.address, max(send.count, recv.count), (send.owner, recv.owner), parts)
        return self._spec(tag, Collective.ALL_TO_ALL, send, buffers, [recv])

    def pair(self, tag: int, array: Memory, other: int, is_sender: bool) -> OpSpec:
        """Return a send to another rank or a recv from it."""
        send, recv = (array.address, 0) if is_sender else (0, array.address)
        buffers = Buffers(send, recv, array.count, array.owner)
        changes = None if is_sender else changes_of(array.owner)
        pair, dtype, op, bytes_of = self._pairs[is_sender][other], array.dtype, ReduceOp.SUM, array.bytes_of
        collective = Collective.SEND
        return OpSpec(tag, dtype, op, None, buffers, None, collective, pair=pair, bytes_of=bytes_of, written=changes)
