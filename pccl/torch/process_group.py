"""`ProcessGroupPCCL`: the process group that `init_process_group("pccl")` creates.

c10d calls its methods from C++ (DDP's reducer, functional collectives) with lists and options, and from Python with
several signatures, which each method distinguishes.

c10d's own class stores some attributes, such as the group's name, in its C++ backends. This group stores them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed import ProcessGroup as TorchProcessGroup

from _pccl_torch import outside_graphs
from pccl.errors import PCCLError
from pccl.torch import bootstrap
from pccl.torch.collective_methods import CollectiveMethods
from pccl.torch.errors import Names
from pccl.torch.fault_tolerance import AbortHooks, FaultTolerance
from pccl.torch.point_to_point import PointToPointMethods
from pccl.torch.reconfigure import Reconfigurer
from pccl.torch.work import seconds

NAME = "pccl"
DEFAULT_TIMEOUT_S = 30 * 60.0
DEVICES = ("cpu", "cuda")


class Options:
    """A snapshot of a process group's settings, in the form of c10d's."""

    def __init__(self, timeout: timedelta, group_name: str = "", global_ranks: Sequence[int] = ()) -> None:
        self.backend = NAME
        self._timeout = timeout
        self.group_name = group_name
        self.global_ranks_in_group = list(global_ranks)


class BackendPCCL:
    """The result of `ProcessGroup._get_backend`. Python classes cannot derive from torch's Backend, so all other
    attributes come from the group."""

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False

    def __init__(self, group: ProcessGroupPCCL) -> None:
        self._group = group

    def name(self) -> str:
        return NAME

    getBackendName = name  # noqa: N815

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_group"], name)

    def __repr__(self) -> str:
        return f"<BackendPCCL of {self._group!r}>"


class ProcessGroupPCCL(CollectiveMethods, PointToPointMethods, FaultTolerance, TorchProcessGroup):  # type: ignore[misc]
    """A process group whose collectives run on pccl. Thread-safe.

    A group's collectives match in the order of each rank's calls. A call either succeeds on all ranks, or raises
    `BackendError` on all survivors and leaves their tensors unchanged.
    """

    is_of_pccl = True
    group_name = ""
    group_desc = ""
    bound_device_id: Any = None

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
        enable_reconfigure: bool = False,
    ) -> None:
        """Connect to the other ranks of the group through a c10d store.

        Args:
            store: A store that only this group's ranks use.
            timeout: The timeout of this call, and the default for the group's calls; 30 minutes if omitted.
            global_ranks: The global rank of each rank. If omitted, global ranks equal ranks.
            name: The group's name in messages.
            is_default: Whether PCCL_MASTER may name the run that the group joins.
            enable_reconfigure: Whether to connect only in the first `reconfigure`.
        """
        TorchProcessGroup.__init__(self, rank, size)
        super().__init__()
        self._store = store
        self._timeout_s = seconds(timeout, DEFAULT_TIMEOUT_S)
        self.group_name = name
        self._backend = BackendPCCL(self)
        called = "the default group" if is_default else f"process group {name or '?'}"
        names = Names(called, rank, global_ranks or range(size))
        self._abort_hooks = AbortHooks()
        self._reconfigurer = Reconfigurer(bootstrap.host_of(store))
        self._connect(None, names, size)
        if enable_reconfigure:
            self._await_world("it was created with enable_reconfigure, so call reconfigure first")
        elif size > 1:
            try:
                meeting = bootstrap.meet(store, names, size, self._timeout_s, is_default)
            except PCCLError as error:
                raise names.failure("init_process_group", error) from None
            self._connect(meeting, names, size)

    # c10d's accessors.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def name(self) -> str:
        return NAME

    getBackendName = name  # noqa: N815
    _get_backend_name = name

    def get_group_store(self) -> Any:
        return self._store

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    setGroupName = _set_group_name  # noqa: N815

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.group_desc

    setGroupDesc = _set_group_desc  # noqa: N815

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(kind) for kind in DEVICES]

    def _get_backend(self, device: Any) -> BackendPCCL:
        kind = torch.device(device).type
        if kind not in DEVICES:
            raise RuntimeError(f"No backend type associated with device type {kind}; use {' or '.join(DEVICES)}")
        return self._backend

    get_backend = _get_backend

    @property
    def options(self) -> Options:
        """The group's settings."""
        timeout = timedelta(seconds=self._timeout_s)
        return Options(timeout, self.group_name, self._names.global_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of later calls."""
        self._timeout_s = seconds(timeout, DEFAULT_TIMEOUT_S)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Ignored: calls are counted from 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called."""
        return self._scheduler.calls

    def _has_hooks(self) -> bool:
        return False

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        """Raise NotImplementedError: only groups written in C++ can call torch 2.15's hooks."""
        raise NotImplementedError(
            "pccl process groups do not call pre-hooks and post-hooks; use pccl.torch.PCCLWork or pccl's flight "
            "recorder to observe their calls"
        )

    register_post_hook = register_pre_hook

    def __repr__(self) -> str:
        return f"<ProcessGroupPCCL {self._names.group}: rank {self._rank} of {self._size}>"

    # Subgroups.

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroupPCCL | None:
        """Return a group of some of this group's ranks, or None on the others. All ranks of the new group call it."""
        ranks = sorted(new_ranks)
        if self._rank not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        made = ProcessGroupPCCL(
            PrefixStore(f"{name}/", self._store),
            ranks.index(self._rank),
            len(ranks),
            timeout or timedelta(seconds=self._timeout_s),
            global_ranks=[self._names.global_ranks[rank] for rank in ranks],
            name=name,
        )
        made.group_desc = group_desc or f"{self.group_desc}:split"
        made.bound_device_id = self.bound_device_id
        return made

    splitGroup = split_group  # noqa: N815

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Ignored: all ranks are already connected."""

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Ignored: ranks outside a new group do not take part in forming it."""

    # Device maps.

    def mix(self, devices: Sequence[str], others: TorchProcessGroup) -> None:
        """Serve only the device types `devices`, and leave the rest to `others`, a group of the same ranks."""
        self.__class__ = MixedGroup
        self._devices, self._others = tuple(devices), others


class MixedGroup(ProcessGroupPCCL):
    """A group of a device map, such as "cpu:pccl,cuda:nccl"."""

    _devices: tuple[str, ...]
    _others: TorchProcessGroup

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(kind) for kind in self._devices] + list(self._others._device_types)

    def _get_backend(self, device: Any) -> Any:
        return self._backend if torch.device(device).type in self._devices else self._others._get_backend(device)

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        self._others._set_default_timeout(timeout)
        super().set_timeout(timeout)

    _set_default_timeout = set_timeout

    def reconfigure(self, opts: Any) -> Any:
        raise NotImplementedError("a process group with a device map cannot be reconfigured: create another one")

    def shutdown(self) -> None:
        self._others.shutdown()
        super().shutdown()

    def abort(self) -> None:
        self._others.abort()
        super().abort()


def _routed(name: str) -> Any:
    """Return the method of a `MixedGroup` that leaves calls on other devices to their backends."""
    ours = getattr(ProcessGroupPCCL, name)

    def method(self: MixedGroup, *args: Any, **keywords: Any) -> Any:
        device = _device_in([*args, *keywords.values()])
        if device is None or device.type in self._devices:
            return ours(self, *args, **keywords)
        keywords.pop("waits", None)
        return getattr(self._others, name)(*args, **keywords)

    return method


def _device_in(values: Any) -> Any:
    """Return the device of the first tensor in the arguments of a call, or the device in its options, or None."""
    if isinstance(values, list | tuple):
        return next((found for each in values if (found := _device_in(each)) is not None), None)
    return values if isinstance(values, torch.device) else getattr(values, "device", None)


for _name in {*dir(CollectiveMethods), *dir(PointToPointMethods)} & vars(TorchProcessGroup).keys():
    if not _name.startswith("__"):
        setattr(MixedGroup, _name, _routed(_name))
outside_graphs(MixedGroup)


def split_group(
    parent: Any,
    split_ranks: Sequence[Sequence[int]] | None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """Implement `torch.distributed.split_group` for groups not bound to a GPU; torch's function requires one."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    for ranks in split_ranks:
        if not ranks:
            raise ValueError("the split group cannot be empty")
        if len(ranks) > parent.size():
            raise ValueError("the split group's size should be less or equal to the world_size of the parent group")
        if len(ranks) != len(set(ranks)):
            raise ValueError("the split group cannot have duplicate ranks")
    own = next((ranks for ranks in split_ranks if parent.rank() in ranks), None)
    if own is None:
        return None
    all_ranks = dist.get_process_group_ranks(parent)
    return dist.new_group(
        sorted(all_ranks[rank] for rank in own),
        timeout=timeout,
        backend=backend or dist.get_backend(parent),
        use_local_synchronization=True,
        group_desc=group_desc or f"{parent.group_desc}:split",
    )
