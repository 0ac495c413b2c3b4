"""Ops of a process group in the engine's terms.

The number of ranks is known when an op is made and cannot change, so each spec has its buffers at once. An op that
starts after a rank was lost must not be carried out by those who are left: `Fixed` lets it fail on all of them.

Ops describe flat arrays. Ranks that give tensors of other shapes with as many elements agree, as with other backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pccl._arrays import changes_of
from pccl.protocol.point_to_point import PAIR_TAG_MAX
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Pair, Root
from pccl.torch.scratch import Scratch
from pccl.torch.tensors import Memory
from pccl.types import Collective, DataType, ReduceOp

INNER_PAIR_TAG = PAIR_TAG_MAX - 2**20
"""The first tag of sends that a collective is composed of. Those of callers are smaller."""


class Fixed:
    """The buffers of an op that must not start with another number of ranks."""

    def __init__(self, buffers: Buffers, world_size: int) -> None:
        self._buffers = buffers
        self._world_size = world_size

    def place(self, rank: int, world_size: int) -> Buffers:
        if world_size != self._world_size:
            raise ValueError(f"only {world_size} of the {self._world_size} ranks of the process group are left")
        return self._buffers


class Specs:
    """Makes the ops of one process group."""

    def __init__(self, peers: tuple[int, ...], rank: int, ring: Sequence[int]) -> None:
        """`peers` has the peer number of each rank, and `ring` their order in the run."""
        self.peers = peers
        self.size = len(peers)
        self.rank = rank
        is_in_order = tuple(ring) == peers
        self.order = [] if is_in_order else [peers.index(peer) for peer in ring]
        """The rank of each place in the ring; empty: they are the same."""
        self.positions = [] if is_in_order else [tuple(ring).index(peer) for peer in peers]
        """The place in the ring of each rank; empty: they are the same."""
        self._pairs = {False: [Pair(peer, False) for peer in peers], True: [Pair(peer, True) for peer in peers]}
        self.scratch = Scratch()

    def _spec(
        self,
        tag: int,
        collective: Collective,
        given: Memory | None,
        send: int,
        recv: int,
        count: int,
        keep: Any,
        op: ReduceOp = ReduceOp.SUM,
        root: Root | None = None,
        written: Memory | None = None,
    ) -> OpSpec:
        """`written` is the memory for the result, if this rank gets one."""
        buffers = Fixed(Buffers(send, recv, count, keep), self.size)
        changes = None if written is None else changes_of(written.owner)
        dtype = DataType.UINT8 if given is None else given.dtype
        bytes_of = "" if given is None else given.bytes_of
        return OpSpec(
            tag, dtype, op, None, buffers, None, collective, root, shape=None, bytes_of=bytes_of, written=changes
        )

    def all_reduce(self, tag: int, send: Memory, recv: Memory, op: ReduceOp) -> OpSpec:
        keep = send.owner, recv.owner
        count = send.count
        return self._spec(tag, Collective.ALL_REDUCE, send, send.address, recv.address, count, keep, op, written=recv)

    def broadcast(self, tag: int, array: Memory, root: int) -> OpSpec:
        named = Root(root, self.peers[root])
        address, count = array.address, array.count
        written = None if root == self.rank else array
        return self._spec(
            tag, Collective.BROADCAST, array, address, address, count, array.owner, root=named, written=written
        )

    def barrier(self, tag: int) -> OpSpec:
        return self._spec(tag, Collective.BARRIER, None, 0, 0, 0, None)

    def all_gather(self, tag: int, send: Memory, recv: Memory) -> OpSpec:
        assert recv.count == self.size * send.count
        keep = send.owner, recv.owner
        count = recv.count
        return self._spec(tag, Collective.ALL_GATHER, send, send.address, recv.address, count, keep, written=recv)

    def reduce_scatter(self, tag: int, send: Memory, recv: Memory, op: ReduceOp) -> OpSpec:
        assert send.count == self.size * recv.count
        keep = send.owner, recv.owner
        count = send.count
        return self._spec(
            tag, Collective.REDUCE_SCATTER, send, send.address, recv.address, count, keep, op, written=recv
        )

    def reduce(self, tag: int, send: Memory, recv: Memory, op: ReduceOp, root: int) -> OpSpec:
        """`recv` is the root's, of whom alone it is used."""
        written = recv if root == self.rank else None
        to = recv.address if written is not None else 0
        keep = send.owner, recv.owner
        named = Root(root, self.peers[root])
        return self._spec(tag, Collective.REDUCE, send, send.address, to, send.count, keep, op, named, written)

    def gather(self, tag: int, send: Memory, recv: Sequence[Memory], root: int) -> OpSpec:
        """`recv` has a part for each rank, in their order, and is empty on all ranks but the root."""
        parts = self._as_in_ring(recv)
        addresses = [part.address for part in parts]
        keep = send.owner, [part.owner for part in parts]
        first = addresses[0] if addresses else 0
        buffers = Buffers(send.address, first, self.size * send.count, keep, recv_parts=addresses or None)
        return self._rooted(tag, Collective.GATHER, send, buffers, root, parts)

    def scatter(self, tag: int, send: Sequence[Memory], recv: Memory, root: int) -> OpSpec:
        """`send` has a part for each rank, in their order, and is empty on all ranks but the root."""
        parts = self._as_in_ring(send)
        addresses = [part.address for part in parts]
        keep = [part.owner for part in parts], recv.owner
        first = addresses[0] if addresses else 0
        buffers = Buffers(first, recv.address, self.size * recv.count, keep, send_parts=addresses or None)
        return self._rooted(tag, Collective.SCATTER, recv, buffers, root, [recv])

    def _as_in_ring(self, parts: Sequence[Memory]) -> Sequence[Memory]:
        """Return the parts of ranks in the order of the ring; none if there are none."""
        return [parts[rank] for rank in self.order] if parts and self.order else parts

    def _rooted(
        self,
        tag: int,
        collective: Collective,
        like: Memory,
        buffers: Buffers,
        root: int,
        written: Sequence[Memory],
    ) -> OpSpec:
        fixed, named = Fixed(buffers, self.size), Root(root, self.peers[root])
        changes = changes_of(*(part.owner for part in written))
        bytes_of = like.bytes_of
        return OpSpec(
            tag, like.dtype, ReduceOp.SUM, None, fixed, None, collective, named, bytes_of=bytes_of, written=changes
        )

    def all_to_all(
        self, tag: int, send: Memory, recv: Memory, outgoing: Sequence[int], incoming: Sequence[int]
    ) -> OpSpec:
        """The elements that this rank gives to each other, and gets from each, in the order of the ring."""
        width = send.owner.element_size() if send.bytes_of else 1
        parts = [count * width for count in outgoing], [count * width for count in incoming]
        buffers = Buffers(send.address, recv.address, max(send.count, recv.count), (send.owner, recv.owner), parts)
        fixed, changes, bytes_of = Fixed(buffers, self.size), changes_of(recv.owner), send.bytes_of
        collective = Collective.ALL_TO_ALL
        return OpSpec(tag, send.dtype, ReduceOp.SUM, None, fixed, None, collective, bytes_of=bytes_of, written=changes)

    def send(self, tag: int, array: Memory, to: int) -> OpSpec:
        return self._pair(tag, array, Buffers(array.address, 0, array.count, array.owner), to, True)

    def recv(self, tag: int, array: Memory, from_: int) -> OpSpec:
        return self._pair(tag, array, Buffers(0, array.address, array.count, array.owner), from_, False)

    def _pair(self, tag: int, array: Memory, buffers: Buffers, other: int, is_sender: bool) -> OpSpec:
        pair, bytes_of = self._pairs[is_sender][other], array.bytes_of
        changes = None if is_sender else changes_of(array.owner)
        collective = Collective.SEND
        return OpSpec(
            tag,
            array.dtype,
            ReduceOp.SUM,
            None,
            buffers,
            None,
            collective,
            pair=pair,
            bytes_of=bytes_of,
            written=changes,
        )
