"""A Ray collective group over a pccl run.

Ray numbers a group's actors from 0, but ranks in pccl change when peers join or leave. An actor's rank is its position
among the present actors, ordered by Ray's ranks: without losses this is Ray's rank, and after a loss it is still a
number from 0 to `world_size` - 1.

Every collective succeeds on all surviving actors, or fails on all of them with RANK_CONNECTION_LOST and unchanged
arrays. The next collective continues among the survivors. An actor that Ray has restarted makes the same call as the
first time, and the others admit it with `admit`. Non-contiguous arrays are copied to contiguous ones and back.

The rendezvous uses Ray's key-value store:

1. Rank 0 starts a master in its process and stores the master's address and a token under the group's name. Rank 1
   starts a standby and adds its address, so that the group survives the loss of the actor with the master.
2. Once both addresses are stored, rank 0 connects, which starts the run, and records this in the store. Then the other
   actors connect, and those that are already connected admit them.
3. If a record's masters do not answer, it belongs to an earlier group with the same name. Rank 0 then writes a new
   record, which the others read.
4. If a master answers and leads members, the group is alive: a restarted actor joins it as a newcomer and waits until
   the members call `admit`.
5. Members exchange their ranks with an all_gather at the start and after each admission.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.experimental import internal_kv
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

from pccl import Communicator, MasterNode, PCCLError, ReduceOp, Result
from pccl.status import run_status

OPS = {
    RayReduceOp.SUM: ReduceOp.SUM,
    RayReduceOp.PRODUCT: ReduceOp.PROD,
    RayReduceOp.MIN: ReduceOp.MIN,
    RayReduceOp.MAX: ReduceOp.MAX,
}
RANKS_TAG = 2**62
"""The tag for exchanging ranks. A group's collectives do not use it."""
TIMEOUT_S = 180.0
"""The time for all actors in a group to connect; Ray may have to start them first."""
POLL_S = 0.05
ANSWER_S = 2.0
"""The time within which a live master answers."""
LEAVE_S = 5.0
ATTEMPTS = 5


@dataclass(frozen=True)
class Record:
    masters: list[str]
    token: str
    is_founded: bool = False
    is_complete: bool = False
    """Whether all actors have joined the run at some time; any later newcomer is a restarted actor."""

    @property
    def address(self) -> str:
        return ",".join(self.masters)

    def leads(self) -> int | None:
        """Return the number of members, or None if no master answers."""
        try:
            status = run_status(self.address, token=self.token, timeout=ANSWER_S)
        except PCCLError:
            return None
        return len(status.members)


class Rendezvous:
    """An actor's communicator in a group, and its master if it hosts one."""

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        """Return once the actor is in the group. PCCLError: TIMEOUT, or the errors of `Communicator.connect`."""
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._deadline_s = time.monotonic() + TIMEOUT_S
        self._master: MasterNode | None = None
        try:
            record = self._found() if rank == 0 else self._awaited()
            self.token = record.token
            self.communicator = Communicator(
                record.address, token=record.token, place=rank, name=f"rank {rank} of {name}"
            )
            self.communicator.connect(ATTEMPTS, timeout=self._left_s)
            if not record.is_complete:
                self._gather(record)
        except BaseException:
            self._stop_master()
            raise

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _gather(self, record: Record) -> None:
        if self._rank == 0:
            self._write(replace(record, is_founded=True))
        size = self.communicator.wait_for_peers(self._world_size, timeout=self._left_s)
        if size < self._world_size:
            text = f"group {self._name!r} continues with {size} of its {self._world_size} actors"
            raise PCCLError(Result.INVALID_USAGE, "init_collective_group", text)
        if self._rank == 0:
            self._write(replace(record, is_founded=True, is_complete=True))

    def leave(self) -> None:
        """Leave the group, and delete its record if this actor started the master."""
        with suppress(PCCLError):
            self.communicator.close(timeout=LEAVE_S)
        record = self._read()
        if self._rank == 0 and record is not None and record.token == self.token:
            internal_kv._internal_kv_del(self._key)
        self._stop_master()

    def _found(self) -> Record:
        """Return the record of a live group, or of a new one once its standby has been added."""
        record = self._read()
        if record is not None and record.leads():
            return record
        token = secrets.token_urlsafe(32)
        self._write(Record([self._serve(token)], token))
        while (record := self._read()) is None or len(record.masters) < 2 or record.token != token:
            self._pause("rank 1 is missing")
        return record

    def _awaited(self) -> Record:
        """Return the record of a group with a master that answers."""
        while True:
            record = self._read()
            if record is None or record.leads() is None:
                self._pause("rank 0 is missing")
            elif record.is_founded:
                return record
            elif self._rank == 1 and self._master is None and len(record.masters) == 1:
                self._write(replace(record, masters=[*record.masters, self._serve(record.token, record.address)]))
            else:
                self._pause("rank 0 has not started the run")

    def _serve(self, token: str, standby_of: str = "") -> str:
        host = ray.util.get_node_ip_address()
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._master = MasterNode(listen, token=token, standby_of=standby_of, daemon=True)
        self._master.run()
        return self._master.address

    def _stop_master(self) -> None:
        if self._master is not None:
            self._master.interrupt()
            self._master = None

    def _pause(self, what: str) -> None:
        if time.monotonic() > self._deadline_s:
            text = f"rank {self._rank} of group {self._name!r} has waited for {TIMEOUT_S:g} s: {what}"
            raise PCCLError(Result.TIMEOUT, "init_collective_group", text)
        time.sleep(POLL_S)

    @property
    def _key(self) -> str:
        return f"pccl/collective/{self._name}"

    def _read(self) -> Record | None:
        found: Any = internal_kv._internal_kv_get(self._key)
        return None if found is None else Record(**json.loads(found))

    def _write(self, record: Record) -> None:
        internal_kv._internal_kv_put(self._key, json.dumps(asdict(record)))


def admit(group_name: str = "default") -> int:
    """Admit restarted actors to the group. Every member calls it.

    Args:
        group_name: The name of the group.

    Returns:
        The world size.

    Raises:
        PCCLError: The errors of `Communicator.update_topology`; INVALID_USAGE if the group has another backend.
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
        if self._rendezvous is None:
            return 1
        communicator = self._rendezvous.communicator
        if communicator.are_peers_pending():
            communicator.update_topology()
            self._learn_ranks(communicator)
        return communicator.world_size

    # Collectives. Ray passes a list with one array per device of the process; there must be exactly one.

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        if self._rendezvous is not None:
            with _contiguous(_only(tensor)) as array:
                self._rendezvous.communicator.all_reduce(array, op=_op(allreduce_options))

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        if self._rendezvous is not None:
            self._rendezvous.communicator.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        """Reduce to the root; the other actors' arrays stay unchanged."""
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
                continue  # the other peers retry, too
            self._made_as = dict(zip(info.membership.peers, (int(one) for (one,) in info.array), strict=True))
            return

    def _by_rank(self, peers: tuple[int, ...]) -> list[int]:
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
        what = f"{len(arrays)} arrays, one per device of the actor; pccl supports only one per actor"
        raise PCCLError(Result.INVALID_ARGUMENT, "ray", what)
    return arrays[0]


@contextmanager
def _contiguous(array: Any, *, is_result: bool = True) -> Iterator[Any]:
    """Yield the array or a contiguous copy. If `is_result`, the copy is copied back after success."""
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
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate([array.reshape(-1) for array in arrays])
    joined = arrays[0].new_empty(sum(array.numel() for array in arrays))
    start = 0
    for array in arrays:
        joined[start : start + array.numel()].copy_(array.reshape(-1))
        start += array.numel()
    return joined
