"""Reconfiguration, as torch 2.15 defines it: a new membership for the same process group object.

Each process group object has a *handle*, which contains the address of a c10d TCPStore that the object starts. All
ranks of the next *world* call `reconfigure` with the same new uuid and the same handles, whose order gives the ranks:

    1  Each rank leaves its present world, whose calls in flight fail.
    2  All ranks check in at the store of the first handle. An error names the ranks that do not check in.
    3  They connect through that store, exactly as in `init_process_group` (`bootstrap`).

A failed attempt fails on all participating ranks within the timeout and leaves the group without a world. A uuid is
used only once, even if the attempt fails, so a late rank of a failed attempt never joins the next one.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from pccl.runtime.network import addresses
from pccl.torch import bootstrap
from pccl.torch.bootstrap import LOOPBACK, Meeting, advertised_host
from pccl.torch.errors import Names
from pccl.types import Result

PROBE_S = 0.5
"""The number of seconds between two probes of the missing ranks, and the time limit of each probe."""
GRACE_S = 1.0
"""How far, in seconds, a call may exceed its timeout if the store does not answer."""
_HANDLE = re.compile(r"pccl:([0-9a-f]{16}):(\d{1,5}):([^:]+):([^:]*)")


class RendezvousError(RuntimeError):
    """The new world could not be formed; the message gives the reason."""

    @property
    def result(self) -> Result:
        return Result.TIMEOUT if "timed out" in str(self) else Result.RANK_CONNECTION_FAILED


class Handle(NamedTuple):
    """The identity of a process group object and the address of its store."""

    id: str
    """16 random hexadecimal digits."""
    host: str
    port: int
    name: str
    """The name of the process in messages: host name and process id."""

    def __str__(self) -> str:
        return f"pccl:{self.id}:{self.port}:{quote(self.host, safe='')}:{quote(self.name, safe='')}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Parse a handle. Raises RendezvousError if the text is not one."""
        found = _HANDLE.fullmatch(text)
        if found is None:
            raise RendezvousError(
                f"{text!r} is not a handle of a pccl process group; use the return value of get_reconfigure_handle"
            )
        return cls(found[1], unquote(found[3]), int(found[2]), unquote(found[4]))


class World(NamedTuple):
    """A membership of a process group."""

    rank: int
    names: list[str]
    """The name of each rank's process."""
    meeting: Meeting | None
    """The connected ranks, or None for a single rank."""


def ordered(handles: Sequence[str] | set[str] | frozenset[str]) -> list[str]:
    """Return handles in rank order: a list in its own order, a set sorted. Raises RendezvousError."""
    found = list(handles) if isinstance(handles, list | tuple) else sorted(handles)
    if not found:
        raise RendezvousError("reconfigure needs at least the handle of this process")
    twice = {handle for handle in found if found.count(handle) > 1}
    if twice:
        named = ", ".join(Handle.parse(handle).name for handle in sorted(twice))
        raise RendezvousError(f"reconfigure was given the handles of {named} more than once; handles must be unique")
    return found


class Reconfigurer:
    """Forms the successive worlds of one process group object. Thread-safe."""

    def __init__(self, store_host: str) -> None:
        """`store_host` is the host of the group's first store, used to choose this machine's address; may be empty."""
        self._store_host = store_host
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._store: Any = None
        self._used: set[int] = set()

    @property
    def handle(self) -> Handle:
        """The handle of this object. The first call starts its store."""
        with self._lock:
            if self._handle is None:
                host = advertised_host(self._store_host)
                if addresses.is_loopback(host):  # a loopback address would be useless to other hosts
                    host = advertised_host()
                self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
                name = f"{socket.gethostname()}:{os.getpid()}"
                self._handle = Handle(secrets.token_hex(8), host, self._store.port, name)
            return self._handle

    def close(self) -> None:
        """Stop the store."""
        with self._lock:
            self._handle = self._store = None

    def members(self, uuid: int, handles: Sequence[str] | set[str]) -> list[Handle]:
        """Return handles in rank order. Raises RendezvousError unless this process can reconfigure with them."""
        known, own = [Handle.parse(handle) for handle in ordered(handles)], self.handle
        if own not in known:
            raise RendezvousError(
                f"the handle of this process ({own.name}) is not among the {len(known)} passed to reconfigure: "
                f"only processes of the new world may call it"
            )
        if uuid in self._used:
            text = f"the uuid {uuid} was already used; use a new one for each reconfigure"
            self._refuse(uuid, known, text)
            raise RendezvousError(text)
        return known

    def _refuse(self, uuid: int, known: Sequence[Handle], text: str) -> None:
        """Make the other ranks' check-ins fail, because this process does not take part."""
        rank = known.index(self.handle)
        with suppress(RendezvousError, RuntimeError):  # the others then wait until their timeouts
            store = self._store if rank == 0 else _store_of(known[0], time.monotonic() + PROBE_S)
            if not store.check([f"{uuid}/failed"]):
                store.set(f"{uuid}/failed", f"rank {rank} ({known[rank].name}) refused it: {text}")

    def enter(self, uuid: int, known: Sequence[Handle], timeout_s: float, group: str) -> World:
        """Form a world with the ranks from `members`. Raises RendezvousError, PCCLError."""
        self._used.add(uuid)
        rank, processes = known.index(self.handle), [handle.name for handle in known]
        if len(known) == 1:
            return World(rank, processes, None)
        names = Names(group, rank, range(len(known)), processes)
        deadline_s = time.monotonic() + timeout_s
        meeting = _bounded(timeout_s + GRACE_S, lambda: self._meet(uuid, known, names, deadline_s))
        return World(rank, processes, meeting)

    def _meet(self, uuid: int, known: Sequence[Handle], names: Names, deadline_s: float) -> Meeting:
        store = self._store if names.rank == 0 else _store_of(known[0], deadline_s)
        digest = hashlib.sha256("\n".join([str(uuid), *map(str, known)]).encode()).hexdigest()
        try:
            _check_in(store, uuid, digest, known, names, deadline_s)
            left_s = max(0.0, deadline_s - time.monotonic())
            return bootstrap.meet(PrefixStore(digest, store), names, len(known), left_s, is_default=False)
        except (DistStoreError, DistNetworkError) as error:  # DistNetworkError: the store's process is lost
            raise RendezvousError(str(error)) from None


def _store_of(first: Handle, deadline_s: float) -> Any:
    """Connect to the first handle's store. Raises RendezvousError immediately if its process is dead."""
    where = f"{first.name} at {addresses.join(first.host, first.port)}, the first of the handles,"
    left_s = max(0.001, deadline_s - time.monotonic())
    try:
        socket.create_connection((first.host, first.port), left_s).close()
        left = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
        return TCPStore(first.host, first.port, is_master=False, wait_for_workers=False, timeout=left)
    except TimeoutError:
        raise RendezvousError(f"timed out after {left_s:.1f} s: {where} did not answer") from None
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RendezvousError(f"{where} cannot be reached: {reason}; is that process alive?") from None


def _check_in(store: Any, uuid: int, digest: str, known: Sequence[Handle], names: Names, deadline_s: float) -> None:
    """Wait until all ranks have called reconfigure with the same arguments. Raises RendezvousError on all ranks."""
    keys = {f"{uuid}/{handle.id}": rank for rank, handle in enumerate(known)}
    failed = f"{uuid}/failed"
    next_probe_s = 0.0

    def look() -> bool:
        nonlocal next_probe_s
        if store.check([failed]):
            raise RendezvousError(store.get(failed).decode())
        missing = [rank for key, rank in keys.items() if not store.check([key])]
        for key, rank in keys.items():
            if rank not in missing and store.get(key).decode() != digest:
                text = f"passed different handles than this process, or the same in another order, for uuid {uuid}"
                raise RendezvousError(f"{names.of(rank)} {text}")
        if names.rank == 0 and time.monotonic() >= next_probe_s:
            for rank in missing:
                _require_alive(known[rank])
            next_probe_s = time.monotonic() + PROBE_S
        return False

    try:
        store.set(f"{uuid}/{known[names.rank].id}", digest)
        bootstrap.wait_for_ranks(store, keys, names, deadline_s, look, f"reconfigure with uuid {uuid}")
        look()
    except (RendezvousError, DistStoreError) as error:
        if not store.check([failed]):
            store.set(failed, str(error))
        raise RendezvousError(str(error)) from None


def _require_alive(handle: Handle) -> None:
    """Raise RendezvousError if the handle's port refuses connections because its process is dead."""
    try:
        socket.create_connection((handle.host, handle.port), PROBE_S).close()
    except ConnectionRefusedError:
        where = addresses.join(handle.host, handle.port)
        raise RendezvousError(f"{handle.name} cannot be reached at {where}; is that process alive?") from None
    except OSError:
        return  # it may be alive and able to reach this process


def _bounded(limit_s: float, call: Callable[[], Meeting]) -> Meeting:
    """Return `call()`, run in a thread because an unreachable store may never answer. Raises RendezvousError."""
    meeting: Future[Meeting] = Future()

    def run() -> None:
        try:
            found = call()
        except BaseException as error:
            with suppress(InvalidStateError):
                meeting.set_exception(error)
            return
        try:
            meeting.set_result(found)
        except InvalidStateError:  # the caller no longer waits
            found.leave("reconfigure was interrupted there")

    threading.Thread(target=run, name="pccl reconfigure", daemon=True).start()
    try:
        return meeting.result(limit_s)
    except BaseException as error:
        if not meeting.cancel():
            if isinstance(error, FutureTimeoutError):
                return meeting.result()  # it came between the timeout and the cancellation
            if meeting.exception() is None:
                meeting.result().leave("reconfigure was interrupted there")
        elif isinstance(error, FutureTimeoutError):
            text = f"timed out after {limit_s:g} s: the store of the first handle does not answer"
            raise RendezvousError(text) from None
        raise


def forget_ranks(group: Any, size: int) -> None:
    """Clear torch's caches of a group's ranks, which torch assumes never change.

    c10d caches the global rank of each rank in a group; in the default group the two are equal. DTensor caches
    the results of its sharding rules by mesh and treats meshes with the same number of ranks as equal, so shards would
    get the coordinates of the previous world.
    """
    if group is c10d._world.default_pg:
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute, debug

    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in [*vars(_redistribute).values(), *vars(type(propagator)).values(), *vars(propagator).values()]:
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    for name, cached in list(vars(propagator).items()):
        if hasattr(cached, "cache_info") and not hasattr(cached, "cache_clear"):
            # torch 2.7 has one cache per thread; they can only be replaced together
            setattr(propagator, name, type(cached)(cached.cache.__wrapped__))
    for name in ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache"):  # each release has one of them
        if hasattr(debug, name):
            getattr(debug, name)()
            break
