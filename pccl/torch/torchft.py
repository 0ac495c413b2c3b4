"""`ProcessGroupPCCL` for torchft, which runs its Manager, and thereby torchtitan, on pccl.

    from pccl.torch.torchft import ProcessGroupPCCL
    manager = torchft.Manager(pg=ProcessGroupPCCL(timeout=timedelta(seconds=60)), ...)

For each new quorum, the Manager calls `configure` (torchft 0.1 and 0.2) or `reconfigure` (0.3 and later). An all-reduce
in flight succeeds on all survivors or on none, so either all commit the step or none does. If torchft is not installed,
the class has the same methods, for use by other managers.
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
    """A work whose `wait` returns False on failure instead of raising. torchft reads the error from the work's future
    and from `errored`."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return super().wait(timeout)
        except BackendError as error:
            if self.title == "monitored_barrier":  # its caller expects an exception
                raise
            logger.info("%s", error)
            return False


class ProcessGroupPCCL(_ProcessGroup, _TorchFT):  # type: ignore[misc]
    """A process group that torchft configures; each replica is one rank. Thread-safe.

    `wait` on a failed work does not raise; `errored` and the work's future hold the error.
    """

    _work_type = ManagedWork

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """`timeout` is the limit for `configure` and the default for calls."""
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
        """Leave the current world and join a new one.

        Args:
            store_addr: The "host:port/prefix" of a store for the new ranks, with a new prefix.
            replica_id: This replica's name in errors.
            rank: The rank of this process, in [0, world_size).
            quorum_id: The quorum's number in messages.
            group_rank, group_world_size, global_ranks: Ignored.

        Raises:
            RuntimeError: Not all ranks joined within the timeout. The group then has no world.
        """
        self._leave("was configured again", "it moved to another quorum")
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
        self._install(World(rank, processes, meeting), group)

    def errored(self) -> Exception | None:
        """Return the error after which the group needs a new quorum (a loss or timeout in a call, an abort, or a failed
        `configure` or `reconfigure`), or None.

        A loss after the last call has ended does not count, because all calls are then committed on all ranks."""
        return self._scheduler.first_failure

    def abort(self, errored: bool = True) -> None:
        """Leave the group immediately. Works in flight fail; on the other ranks, they fail as if this rank were lost.

        `errored` is ignored, because an abort always counts as an error until the next quorum."""
        super().abort()

    def name(self) -> str:
        return "torchft-pccl"

    getBackendName = name  # noqa: N815


def _store(address: str, timeout_s: float) -> Any:
    where, _, prefix = address.partition("/")
    host, _, port = where.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(prefix, store)
