"""`ProcessGroupPCCL` for torchft: its Manager, and torchtitan through that, run on pccl.

    from pccl.torch.torchft import ProcessGroupPCCL
    manager = torchft.Manager(pg=ProcessGroupPCCL(timeout=timedelta(seconds=60)), ...)

torchft's lighthouse says who is there, and with each new quorum the Manager calls `configure` (torchft 0.1 and 0.2) or
`reconfigure` (0.3 and later). What pccl adds is that a loss is heard of in milliseconds, by all, with one outcome and
the reason: an all-reduce that was under way has succeeded on all survivors or on none, so that they all commit the
step, or none of them does.

Without torchft the class has the same methods, and can be configured by whoever takes the part of the Manager.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pccl.errors import PCCLError
from pccl.torch import bootstrap
from pccl.torch.errors import BackendError, Names
from pccl.torch.process_group import ProcessGroupPCCL as _ProcessGroup
from pccl.torch.reconfigure import World
from pccl.torch.work import PCCLWork
from pccl.types import Result

try:
    from torchft.process_group import ProcessGroup as _TorchFT
except ImportError:
    _TorchFT = dist.ProcessGroup

logger = logging.getLogger("pccl.torch")

DEFAULT_TIMEOUT = timedelta(seconds=60)


class ManagedWork(PCCLWork):
    """A work whose failure the Manager hears of from its future and from `errored`, as torchft wants it: `wait` returns
    False and raises nothing."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return super().wait(timeout)
        except BackendError as error:
            if self.title == "monitored_barrier":  # waits for works itself, and raises for their failures
                raise
            logger.info("%s", error)
            return False


class ProcessGroupPCCL(_ProcessGroup, _TorchFT):  # type: ignore[misc]
    """A process group that torchft configures.

    Thread-safe. A replica that has configured it is one rank of `world_size`; the others are other replicas. A work
    that has failed does not raise when it is waited for: `errored` has the error then, and so has the work's future.
    """

    _work_type = ManagedWork

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """`timeout` is what `configure` may take, and a call that is given none of its own."""
        super().__init__(dist.HashStore(), 0, 1, timeout, name="of torchft", enable_reconfigure=True)
        self._await_world("call configure first")

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Leave the present ranks, and be one of others.

        Args:
            store_addr: The "host:port/prefix" of a store that all of them share, with a prefix that was never used.
            replica_id: What this replica is called in errors.
            rank: The rank of this process, in [0, world_size).
            world_size: The number of ranks.
            quorum_id, group_rank, group_world_size, global_ranks: What torchft says besides, for texts.

        Raises:
            RuntimeError: if they do not meet within the timeout. The group has no ranks then.
        """
        self._leave("was configured anew", "it goes on to another quorum")
        quorum = "" if quorum_id is None else f" in quorum {quorum_id}"
        group = f"process group of torchft{quorum}"
        own = f"{replica_id}, {socket.gethostname()}:{os.getpid()}"
        names = Names(group, rank, range(world_size))
        try:
            store = _store(store_addr, self._timeout_s)
            store.set(f"pccl/name/{rank}", own)
            meeting = None
            if world_size > 1:
                meeting = bootstrap.meet(store, names, world_size, self._timeout_s, is_default=False)
            processes = [store.get(f"pccl/name/{each}").decode() for each in range(world_size)]
        except PCCLError as error:
            raise self._be_without_world(str(names.failure("configure", error)), error.result) from None
        except RuntimeError as error:
            raise self._be_without_world(f"configure of {group} failed: {error}", Result.TIMEOUT) from error
        self._install(World(quorum_id or 0, rank, processes, meeting), group)

    def errored(self) -> Exception | None:
        """Return the reason why the group needs its next quorum, if there is one: a loss or a timeout that a call has
        met, an abort, or a `configure` or `reconfigure` that has failed. The next one that succeeds ends it.

        A loss that no call has met spoils nothing: what was called before it is committed on all."""
        return self._scheduler.first_failure

    def abort(self, errored: bool = True) -> None:
        """Leave the group at once. Works in flight fail here, and on the other ranks as after a loss.

        `errored` is what torchft's own groups take. Here an abort is always an error until the next quorum."""
        super().abort()

    def name(self) -> str:
        return "torchft-pccl"

    getBackendName = name  # noqa: N815


def _store(address: str, timeout_s: float) -> Any:
    """Return a client of the store at "host:port/prefix". RuntimeError."""
    where, _, prefix = address.partition("/")
    host, _, port = where.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(prefix, store)
