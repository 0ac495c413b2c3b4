"""A Ray collective group whose collectives are pccl's.

Ranks. Ray numbers the actors of a group from 0; pccl has ranks of its own, which change when peers come or go. Each
actor knows which of pccl's peers was made with which of Ray's ranks. The *rank* of an actor is its place among those
that are in the group, in the order of the ranks that they were made with: as long as nobody is lost that is the rank it
was made with, and after a loss ranks are still 0 to `world_size` - 1. `world_size` counts who is in the group.

A loss. Every collective succeeds on all actors that stay or fails on all of them, with RANK_CONNECTION_LOST and who it
was; the arrays are as they were. The next one goes on among those that are left. An actor that Ray has started again
makes the same call as at first; the others let it in by `admit`.

An array that is not contiguous is copied to one that is, and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from ray.util import collective
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)
from ray.util.collective.types import ReduceOp as RayReduceOp

from pccl import Communicator, PCCLError, ReduceOp, Result
from pccl.ray.rendezvous import Rendezvous

OPS = {
    RayReduceOp.SUM: ReduceOp.SUM,
    RayReduceOp.PRODUCT: ReduceOp.PROD,
    RayReduceOp.MIN: ReduceOp.MIN,
    RayReduceOp.MAX: ReduceOp.MAX,
}
RANKS_TAG = 2**62
"""The tag of the exchange of ranks, which no collective of a group uses."""


def admit(group_name: str = "default") -> int:
    """Let actors into the group that were started again, if any wait. Every member calls it; an actor's own call of
    `init_collective_group` then returns there.

    Returns:
        The world size.

    Raises:
        PCCLError: as of `Communicator.update_topology`; INVALID_USAGE if the group is not one of pccl's.
    """
    group = collective.get_group_handle(group_name)
    if not isinstance(group, PCCLGroup):
        raise PCCLError(Result.INVALID_USAGE, "admit", f"group {group_name!r} has another backend than pccl")
    return group.admit()


class PCCLGroup(BaseGroup):  # type: ignore[misc]
    """The backend "pccl" of `ray.util.collective`, for NumPy arrays and torch tensors. Made by Ray, in an actor.

    A group of one actor needs no communication, and does none. Not thread-safe, as Ray's groups are not.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._rendezvous: Rendezvous | None = None
        self._made_as: dict[int, int] = {}
        """The rank that each peer was made with."""
        if world_size > 1:
            self._rendezvous = Rendezvous(group_name, rank, world_size)
            self._learn_ranks(self._rendezvous.communicator)

    @classmethod
    def backend(cls) -> str:
        return "PCCL"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    @property
    def rank(self) -> int:
        if self._rendezvous is None:
            return 0
        membership = self._rendezvous.communicator.membership
        return self._by_rank(membership.peers).index(membership.peers[membership.rank])

    @property
    def world_size(self) -> int:
        return 1 if self._rendezvous is None else self._rendezvous.communicator.world_size

    def destroy_group(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.leave()

    def admit(self) -> int:
        """Let actors in that wait. See the function of this name."""
        if self._rendezvous is None:
            return 1
        communicator = self._rendezvous.communicator
        if communicator.are_peers_pending():
            communicator.update_topology()
            self._learn_ranks(communicator)
        return communicator.world_size

    # Collectives. Ray hands each array in a list, which has one for each device of the process: one.

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        if self._rendezvous is not None:
            with _contiguous(_only(tensor)) as array:
                self._rendezvous.communicator.all_reduce(array, op=_op(allreduce_options))

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        if self._rendezvous is not None:
            self._rendezvous.communicator.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        """The arrays of all others than the root stay as they are."""
        if self._rendezvous is None:
            return
        array = _only(tensor)
        if self.rank != reduce_options.root_rank:
            array = _copy_of(array)
        with _contiguous(array) as reduced:
            self._rendezvous.communicator.all_reduce(reduced, op=_op(reduce_options))

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = AllGatherOptions
    ) -> None:
        targets, source = _only(tensor_list), _only(tensor)
        if self._rendezvous is None:
            _assign(targets[0], source)
            return
        with _contiguous(source, is_result=False) as array:
            info = self._rendezvous.communicator.all_gather(array)
        if info.world_size != len(targets):
            raise _changed("allgather", f"{info.world_size} actors gave an array, and there is room for {len(targets)}")
        rows = dict(zip(info.membership.peers, info.array, strict=True))
        for target, peer in zip(targets, self._by_rank(info.membership.peers), strict=True):
            _assign(target, rows[peer])

    def broadcast(self, tensor: list[Any], broadcast_options: Any = BroadcastOptions) -> None:
        if self._rendezvous is not None:
            root = self._rank_in_pccl(broadcast_options.root_rank)
            with _contiguous(_only(tensor)) as array:
                self._rendezvous.communicator.broadcast(array, root=root)

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: Any = ReduceScatterOptions,
    ) -> None:
        target, sources = _only(tensor), _only(tensor_list)
        if self._rendezvous is None:
            _assign(target, sources[0])
            return
        communicator = self._rendezvous.communicator
        peers = communicator.membership.peers
        if len(peers) != len(sources):
            raise _changed("reducescatter", f"there are {len(peers)} actors, and {len(sources)} arrays")
        by_rank = self._by_rank(peers)
        joined = _joined([sources[by_rank.index(peer)] for peer in peers])
        info = communicator.reduce_scatter(joined, op=_op(reducescatter_options))
        if info.membership.peers != peers:
            raise _changed("reducescatter", f"{info.world_size} actors took part, and there were {len(sources)} arrays")
        _assign(target, info.array.reshape(target.shape))

    def send(self, tensor: list[Any], send_options: SendOptions) -> None:
        """Return when the other actor has received it."""
        to = self._rank_in_pccl(send_options.dst_rank)
        with _contiguous(_only(tensor), is_result=False) as array:
            self._communicator.send(array, dst=to)

    def recv(self, tensor: list[Any], recv_options: RecvOptions) -> None:
        from_ = self._rank_in_pccl(recv_options.src_rank)
        with _contiguous(_only(tensor)) as array:
            self._communicator.recv(array, src=from_)

    # Ranks.

    @property
    def _communicator(self) -> Communicator:
        if self._rendezvous is None:
            raise PCCLError(Result.TOO_FEW_PEERS, "ray", f"group {self.group_name!r} has one actor")
        return self._rendezvous.communicator

    def _learn_ranks(self, communicator: Communicator) -> None:
        while True:
            try:
                info = communicator.all_gather(np.array([self._rank]), tag=RANKS_TAG)
            except PCCLError as error:
                if error.result is not Result.RANK_CONNECTION_LOST:
                    raise
                continue  # the others do it again, too
            self._made_as = dict(zip(info.membership.peers, (int(one) for (one,) in info.array), strict=True))
            return

    def _by_rank(self, peers: tuple[int, ...]) -> list[int]:
        """Return the peers in the order of their ranks."""
        return sorted(peers, key=lambda peer: (self._made_as.get(peer, self._world_size), peer))

    def _rank_in_pccl(self, rank: int) -> int:
        peers = self._communicator.membership.peers
        return peers.index(self._by_rank(peers)[rank])


def _changed(func_name: str, what: str) -> PCCLError:
    return PCCLError(Result.RANK_CONNECTION_LOST, func_name, f"the group has changed: {what}; call again")


def _op(options: Any) -> ReduceOp:
    return OPS[options.reduceOp]


def _only(arrays: list[Any]) -> Any:
    if len(arrays) != 1:
        what = f"{len(arrays)} arrays for as many devices of one actor; pccl takes one for each actor"
        raise PCCLError(Result.INVALID_ARGUMENT, "ray", what)
    return arrays[0]


@contextmanager
def _contiguous(array: Any, *, is_result: bool = True) -> Iterator[Any]:
    """Yield the array, or a contiguous copy, which is copied back if the block succeeds and it `is_result`."""
    is_contiguous = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()
    if is_contiguous:
        yield array
        return
    copy = _copy_of(array)
    yield copy
    if is_result:
        _assign(array, copy)


def _copy_of(array: Any) -> Any:
    """Return a contiguous copy."""
    if isinstance(array, np.ndarray):
        return np.array(array, order="C")
    copy = array.new_empty(array.shape)
    copy.copy_(array)
    return copy


def _assign(target: Any, source: Any) -> None:
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.copy_(source if hasattr(source, "is_contiguous") else target.new_tensor(source))


def _joined(arrays: list[Any]) -> Any:
    """Return the elements of all arrays in one flat array."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate([array.reshape(-1) for array in arrays])
    joined = arrays[0].new_empty(sum(array.numel() for array in arrays))
    start = 0
    for array in arrays:
        joined[start : start + array.numel()].copy_(array.reshape(-1))
        start += array.numel()
    return joined
