"""A Ray collective group over a pccl run.

Ray numbers the actors of a group from 0; ranks in pccl change when peers come or go. The rank of an actor is its place
among the present actors, ordered by the ranks of Ray: without losses the rank of Ray, and after a loss still a number
from 0 to `world_size` - 1.

Every collective succeeds on all actors that stay, or fails on all of them with RANK_CONNECTION_LOST and unchanged
arrays. The next one continues among the actors that are left. An actor that Ray has restarted makes the same call as at
first; the others let it in by `admit`. Arrays that are not contiguous are copied to contiguous ones, and back.
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
    """Admit restarted actors to the group. Every member calls it.

    Args:
        group_name: The name of the group.

    Returns:
        The world size.

    Raises:
        PCCLError: As `Communicator.update_topology`; INVALID_USAGE if the group has another backend.
    """
    group = collective.get_group_handle(group_name)
    if not isinstance(group, PCCLGroup):
        raise PCCLError(Result.INVALID_USAGE, "admit", f"group {group_name!r} has a backend other than pccl")
    return group.admit()


class PCCLGroup(BaseGroup):  # type: ignore[misc]
    """The backend "pccl" of `ray.util.collective`, for NumPy arrays and torch tensors. Not thread-safe.

    A group of one actor has no master and does not communicate.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._rendezvous: Rendezvous | None = None
        self._made_as: dict[int, int] = {}
        """Ray's rank of each peer."""
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
        """Admit waiting actors and return the world size."""
        if self._rendezvous is None:
            return 1
        communicator = self._rendezvous.communicator
        if communicator.are_peers_pending():
            communicator.update_topology()
            self._learn_ranks(communicator)
        return communicator.world_size

    # Collectives. Ray passes a list with an array per device of the process, which must have one.

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        if self._rendezvous is not None:
            with _contiguous(_only(tensor)) as array:
                self._rendezvous.communicator.all_reduce(array, op=_op(allreduce_options))

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        if self._rendezvous is not None:
            self._rendezvous.communicator.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        """Reduce to the root; other arrays stay unchanged."""
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
            raise _changed("allgather", f"{info.world_size} actors, but room for {len(targets)} arrays")
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
            raise _changed("reducescatter", f"{len(peers)} actors, but {len(sources)} arrays")
        by_rank = self._by_rank(peers)
        joined = _joined([sources[by_rank.index(peer)] for peer in peers])
        info = communicator.reduce_scatter(joined, op=_op(reducescatter_options))
        if info.membership.peers != peers:
            raise _changed("reducescatter", f"{info.world_size} actors took part, but there were {len(sources)} arrays")
        _assign(target, info.array.reshape(target.shape))

    def send(self, tensor: list[Any], send_options: SendOptions) -> None:
        """Send an array; returns when the other actor has received it."""
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
                continue  # as on the other peers
            self._made_as = dict(zip(info.membership.peers, (int(one) for (one,) in info.array), strict=True))
            return

    def _by_rank(self, peers: tuple[int, ...]) -> list[int]:
        """Return the peers ordered by rank."""
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
    """Yield the array or a contiguous copy, which is copied back after success if it `is_result`."""
    is_contiguous = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()
    if is_contiguous:
        yield array
        return
    copy = _copy_of(array)
    yield copy
    if is_result:
        _assign(array, copy)


def _copy_of(array: Any) -> Any:
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
    """Return the concatenated elements of all arrays."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate([array.reshape(-1) for array in arrays])
    joined = arrays[0].new_empty(sum(array.numel() for array in arrays))
    start = 0
    for array in arrays:
        joined[start : start + array.numel()].copy_(array.reshape(-1))
        start += array.numel()
    return joined
