"""`ProcessGroupPCCL`: the process group that `init_process_group("pccl")` makes.

c10d calls a process group in two ways, which come together here:

    from Python, by methods with several signatures: lists of tensors with an options object, or one tensor with
    keyword arguments. C++ decides between them for its own backends; here each method does.
    from C++ (DDP's reducer, functional collectives), by the same names with lists and options.

Each method checks its arguments, takes the call's lane, has `collectives` plan it, and hands it to the scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
)
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ReduceOp as TorchOp

from pccl.errors import PCCLError
from pccl.torch import bootstrap, collectives
from pccl.torch.alone import Alone
from pccl.torch.backend import NAME, BackendPCCL, Options
from pccl.torch.collectives import Plan
from pccl.torch.errors import BackendError, Names
from pccl.torch.options import is_async, seconds
from pccl.torch.reductions import reduction
from pccl.torch.scheduler import Scheduler
from pccl.torch.specs import Specs
from pccl.torch.tensors import Tensor, fail, require_alike, require_dense, require_root, require_some
from pccl.torch.work import PCCLWork
from pccl.types import Result

DEFAULT_TIMEOUT_S = 30 * 60.0
DEVICES = ("cpu", "cuda")


class ProcessGroupPCCL(TorchProcessGroup):  # type: ignore[misc]
    """A process group whose collectives are pccl's.

    Thread-safe. Collectives of one group meet in the order in which each rank calls them. A call either succeeds on all
    ranks, or raises `BackendError` on all that are left, with their tensors as they were.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta | None = None,
        *,
        global_ranks: Sequence[int] = (),
        name: str = "",
        is_default: bool = False,
    ) -> None:
        """Meet the other ranks of the group through a c10d store.

        Args:
            store: A store that all ranks of the group share, and nobody else.
            timeout: The time that a call may take, and this one too, if it is given none of its own: 30 minutes if it
                is left out.
            global_ranks: The global rank of each rank; the same numbers if left out.
            name: What the group is called in texts.
            is_default: Whether PCCL_MASTER may name the run in which the group meets.
        """
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._store = store
        self._timeout_s = seconds(timeout, DEFAULT_TIMEOUT_S)
        self._names = Names(
            "the default group" if is_default else f"process group {name or '?'}", rank, global_ranks or range(size)
        )
        self._group_name = name
        self._bound_device: Any = None
        self._lock = threading.Lock()
        self._backend = BackendPCCL(self)
        self._meet(store, is_default)

    def _meet(self, store: Any, is_default: bool) -> None:
        if self._size == 1:
            self._meeting: bootstrap.Meeting | None = None
            self._specs = Specs((0,), 0)
            self._scheduler: Scheduler | Alone = Alone(self._names)
            return
        try:
            self._meeting = bootstrap.meet(store, self._rank, self._size, self._timeout_s, is_default)
        except PCCLError as error:
            raise self._names.failure("init_process_group", error) from None
        self._names.number(self._meeting.peers)
        self._specs = Specs(self._meeting.peers, self._rank)
        self._scheduler = Scheduler(self._meeting.communicator, self._names)

    # What c10d asks.

    # It keeps in its C++ part what belongs to backends written in C++, of which this group has none.

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def get_group_store(self) -> Any:
        return self._store

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    setGroupName = _set_group_name  # noqa: N815

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(kind) for kind in DEVICES]

    def _get_backend(self, device: Any) -> BackendPCCL:
        kind = torch.device(device).type
        if kind not in DEVICES:
            raise RuntimeError(f"No backend type associated with device type {kind}: pccl has {', '.join(DEVICES)}")
        return self._backend

    @property
    def bound_device_id(self) -> Any:
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:
        self._bound_device = device

    @property
    def options(self) -> Options:
        """The group's settings."""
        timeout = timedelta(seconds=self._timeout_s)
        return Options(timeout, self._group_name, list(self._names.global_ranks))

    def set_timeout(self, timeout: timedelta) -> None:
        """Give later calls so much time, if they are given none of their own."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are counted from 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called."""
        return self._scheduler.calls

    def __repr__(self) -> str:
        return f"<ProcessGroupPCCL {self._names.group}: rank {self._rank} of {self._size}>"

    # Calls.

    def _call(
        self,
        title: str,
        options: Any,
        plan: Callable[[int], Plan],
        tensors: Sequence[Tensor] = (),
        timeout: Any = None,
        waits: bool | None = None,
    ) -> PCCLWork:
        scheduler = self._scheduler
        with self._lock:  # calls of several threads take their lanes in the order in which they are handed over
            lane = scheduler.next_lane()
            made = plan(lane)
            limit_s = seconds(getattr(options, "timeout", timeout), self._timeout_s)
            devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
            work = PCCLWork(scheduler, title, made.script, lane, limit_s, made.is_light, list(devices))
            is_first = scheduler.enter(work)
        return scheduler.go(work, is_first, not is_async(options) if waits is None else waits)

    def allreduce(
        self, tensors: Any, opts: Any = None, op: Any = TorchOp.SUM, timeout: timedelta | None = None
    ) -> PCCLWork:
        """Reduce a tensor of each rank, in place."""
        opts, op = _options(opts, op, AllreduceOptions)
        given = _listed(tensors)
        require_some("allreduce", given)
        require_alike("allreduce", given)
        how = reduction("allreduce", op, given[0].dtype)
        return self._call(
            "allreduce", opts, lambda lane: collectives.all_reduce(self._specs, lane, given, how), given, timeout
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> PCCLWork:
        """Reduce several tensors of each rank, in place."""
        opts = opts or AllreduceCoalescedOptions()
        require_some("allreduce_coalesced", tensors)
        require_dense("allreduce_coalesced", tensors)
        how = reduction("allreduce_coalesced", opts.reduceOp, tensors[0].dtype)
        return self._call(
            "allreduce_coalesced",
            opts,
            lambda lane: collectives.all_reduce_together(self._specs, lane, tensors, how),
            tensors,
        )

    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None) -> PCCLWork:
        """Give all ranks the root's tensor, in place."""
        if isinstance(opts, int):
            opts, root = None, opts
        root_tensor = 0
        if opts is not None:
            root, root_tensor = opts.rootRank, opts.rootTensor
        given = _listed(tensors)
        require_root("broadcast", root, self._size)
        if not 0 <= root_tensor < len(given):
            raise fail("broadcast", f"invalid root tensor: {root_tensor} of {len(given)}")
        require_alike("broadcast", given)
        return self._call(
            "broadcast",
            opts if opts is not None else BroadcastOptions(),
            lambda lane: collectives.broadcast(self._specs, lane, given, root, root_tensor, self._rank),
            given,
            timeout,
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> PCCLWork:
        """Return when all ranks have called it, and all earlier calls of this rank are over."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        opts = opts if opts is not None else BarrierOptions()
        for work in self._scheduler.open_works():
            work.wait()
        return self._call("barrier", opts, lambda lane: collectives.barrier(self._specs, lane), (), timeout)

    # Life.

    def shutdown(self) -> None:
        """Leave the group. Works in flight fail."""
        self._leave("was destroyed")

    def abort(self) -> None:
        """Leave the group at once. Works in flight fail here, and on the other ranks as after a loss."""
        self._leave("was aborted")

    def _leave(self, how: str) -> None:
        with self._lock:
            meeting, self._meeting = self._meeting, None
        text = f"{self._names.group} {how} on {self._names.of(self._rank)}"
        self._scheduler.fail(BackendError(text, Result.NOT_INITIALIZED))
        if meeting is not None:
            meeting.leave()
        self._scheduler.stop()


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _options(opts: Any, op: Any, kind: type) -> tuple[Any, Any]:
    """Return options, and the reduction that they ask for: some callers give it in the place of the options."""
    if opts is None:
        return kind(), op
    if hasattr(opts, "reduceOp"):
        return opts, opts.reduceOp
    return kind(), opts
