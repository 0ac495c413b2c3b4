"""The backend of a process group: what `ProcessGroup._get_backend` returns.

c10d asks a backend for facts and settings, also where the group itself does the work: whether it can be split, its
options, its timeout. All of that comes from the group. It is no `torch.distributed` Backend, since Python cannot derive
from that class.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

NAME = "pccl"


class Options:
    """The settings of a process group, as c10d shows them. Copies keep the values of their time."""

    def __init__(self, timeout: timedelta, group_name: str = "", global_ranks: Sequence[int] = ()) -> None:
        self.backend = NAME
        self._timeout = timeout
        self.group_name = group_name
        self.global_ranks_in_group = list(global_ranks)


class Group(Protocol):
    """A process group, as its backend needs it."""

    @property
    def options(self) -> Options: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def set_timeout(self, timeout: timedelta) -> None: ...


class BackendPCCL:
    """The backend of a process group. What is not here is the group's."""

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def name(self) -> str:
        return NAME

    getBackendName = name  # noqa: N815

    @property
    def options(self) -> Options:
        return self._group.options

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_group"], name)

    def __repr__(self) -> str:
        return f"<BackendPCCL of {self._group!r}>"
