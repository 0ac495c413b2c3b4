"""Reconfiguring: another membership for the same process group object, as torch 2.15 defines it.

Each process has a *handle* (`get_reconfigure_handle`), which the program hands to the others by whatever means it has.
All who are to go on together call `reconfigure` with one new uuid and the same handles, whose order gives the ranks:

    1  The present world is left. What is in flight fails, here at once and on others as after a loss, so whoever still
       waits in it hears of that and need not take part.
    2  They meet (`rendezvous`) at the first of the handles, which starts a master, and the next ones standbys.
    3  They are admitted in one view, and exchange their numbers. The new world's calls are counted from 0.

If that fails, it fails with a reason, for all that take part, within the timeout. The group then has no world: calls
raise that reason, and another reconfigure, with another uuid, may follow. Handles stay the same as long as the object
lives, so whoever was left out can come back with the handle that it had.

A world has its own run, also where PCCL_MASTER names one: a run admits newcomers when all its peers ask for them, and
those who are left out of a world, or have not heard of it, would keep it waiting.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.runtime.network import addresses
from pccl.torch import bootstrap
from pccl.torch.bootstrap import Meeting
from pccl.torch.hosting import Hosting, advertised_host, token_of
from pccl.torch.rendezvous import Endpoint, Handle, Invitation, Masters, RendezvousError, ordered
from pccl.types import Result

ATTEMPTS = 5
"""How often a master is dialled that has started already, or is gone."""
MASTER_TIMEOUT_S = 20.0
"""Seconds in which a standby must have taken over, where the host of a world is lost: it first waits for that one's
return for a peer timeout."""


class World(NamedTuple):
    """A membership of a process group."""

    uuid: int
    rank: int
    names: list[str]
    """The name of each rank's process."""
    meeting: Meeting | None
    """Where its ranks meet; None for a single one."""

    @property
    def size(self) -> int:
        return len(self.names)


class Reconfigurer:
    """The worlds of one process group object, one after the other. Thread-safe."""

    def __init__(self, store_host: str) -> None:
        """`store_host` is where others are, so far as is known: others can dial the address from which this host would
        reach that one."""
        self._store_host = store_host
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._hosting: Hosting | None = None

    @property
    def handle(self) -> str:
        """The handle of this object, the same as long as it lives. OSError."""
        return str(self._found().handle)

    def _found(self) -> Endpoint:
        with self._lock:
            if self._endpoint is None:
                host = advertised_host(self._store_host)
                if addresses.is_loopback(host):  # handles may be read on any host
                    host = advertised_host()
                self._endpoint = Endpoint(host, f"{socket.gethostname()}:{os.getpid()}")
                self._hosting = Hosting(host)
            return self._endpoint

    def members(self, uuid: int, handles: Sequence[str] | set[str]) -> list[str]:
        """Return handles in the order of their ranks. RendezvousError unless this process can reconfigure with them."""
        given = ordered(handles)
        for handle in given:
            Handle.parse(handle)
        self._found().require(uuid, given)
        return given

    def enter(self, uuid: int, given: list[str], timeout_s: float) -> World:
        """Meet those whose handles these are, as of `members`. RendezvousError, PCCLError."""
        deadline_s = time.monotonic() + timeout_s
        endpoint = self._found()
        names = [Handle.parse(handle).name for handle in given]
        if given == [str(endpoint.handle)]:
            endpoint.use(uuid)
            return World(uuid, 0, names, None)
        assert self._hosting is not None
        hosting = self._hosting
        try:
            invitation = endpoint.meet(uuid, given, timeout_s, Masters(hosting.found, hosting.stand_by))
            rank = given.index(str(endpoint.handle))
            return World(uuid, rank, names, self._join(invitation, rank, len(given), deadline_s, hosting))
        except BaseException:
            hosting.retire(0.0)
            raise

    def _join(self, invitation: Invitation, rank: int, size: int, deadline_s: float, hosting: Hosting) -> Meeting:
        communicator = Communicator(
            invitation.masters,
            token=token_of(invitation.token),
            master_timeout=MASTER_TIMEOUT_S,
            place=rank,
        )
        try:
            communicator.connect(ATTEMPTS, timeout=_left_s(deadline_s))
            return Meeting(communicator, *bootstrap.exchange(communicator, rank, size, deadline_s), hosting)
        except BaseException:
            communicator.close(reason="the new world has not come about")
            raise

    def close(self) -> None:
        """Be found no more."""
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def why(error: Exception) -> str:
    """Return what an error of `Reconfigurer.enter` says."""
    return error.message if isinstance(error, PCCLError) else str(error)


def result_of(error: Exception) -> Result:
    """Return the kind of an error of `Reconfigurer.enter`."""
    if isinstance(error, PCCLError):
        return error.result
    is_late = isinstance(error, RendezvousError) and "timed out" in str(error)
    return Result.TIMEOUT if is_late else Result.RANK_CONNECTION_FAILED
