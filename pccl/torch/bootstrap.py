"""How the ranks of a process group find each other: from a c10d store to a connected communicator.

1. The group's first rank starts a master, on the address with which it reaches the store, and writes where it is into
   the store. A token that only the store tells keeps everybody else out.
2. All connect to it, and one view admits them all (`founders`). They then exchange their ranks by an all_gather: from
   then on each knows which peer has which rank.
3. What was written may be read only once, for the same group may be made again with the same store: the first rank
   deletes it before it takes part in the exchange, when all have read it. A rank that finds what a rank that died left
   behind cannot connect to it, and reads again.
4. With PCCL_MASTER in the environment the default group meets in that run instead, and starts no master.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from torch.distributed import DistStoreError

from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.runtime.network import addresses
from pccl.torch.hosting import Hosting, advertised_host, listen_host, token_of
from pccl.types import Result

KEY = "pccl/master"
MASTER_VARIABLE = "PCCL_MASTER"
POLL_S = 0.002
RETRY_S = 0.05
LEAVE_S = 1.0
"""Seconds for which a rank that leaves waits until that has come through."""
LOST_MASTER_S = 5.0
"""Seconds for which survivors of the rank that had the master look for it."""


class Meeting(NamedTuple):
    """What a rank has when its group has met."""

    communicator: Communicator
    peers: tuple[int, ...]
    """The peer number of each rank."""
    hosting: Hosting | None
    """The masters that this process hosts for the group."""

    def leave(self, reason: str) -> None:
        """Leave the run. The others are told the reason. Masters go on for a while, for the others to leave."""
        try:
            self.communicator.close(timeout=LEAVE_S, reason=reason)
        except PCCLError as error:
            if error.result is not Result.TIMEOUT:  # it goes on leaving
                raise
        if self.hosting is not None:
            self.hosting.retire()


def meet(store: Any, rank: int, size: int, timeout_s: float, is_default: bool) -> Meeting:
    """Connect to the other ranks of a group, and return when all are there.

    Raises:
        DistStoreError: if the first rank has not come in time.
        PCCLError: if the others have not, or cannot be reached.
    """
    deadline_s = time.monotonic() + timeout_s
    known = os.environ.get(MASTER_VARIABLE, "") if is_default else ""
    hosting: Hosting | None = None
    communicator: Communicator | None = None
    try:
        if known:
            communicator = Communicator(known, place=rank)
            communicator.connect(timeout=_left_s(deadline_s))
            _await_all(communicator, size, deadline_s)
        elif rank == 0:
            host = advertised_host(host_of(store))
            token = secrets.token_hex(16)
            hosting = Hosting(host)
            address = hosting.found(size, token)
            store.set(KEY, json.dumps({"address": address, "token": token}))
            communicator = _communicator(address, token, host, rank)
            communicator.connect(timeout=_left_s(deadline_s))
            store.delete_key(KEY)
        else:
            communicator = _join_first_rank(store, rank, deadline_s)
        return Meeting(communicator, exchange(communicator, rank, size, deadline_s), hosting)
    except BaseException:
        if communicator is not None:
            communicator.close()
        if hosting is not None:
            hosting.retire(0.0)
        raise


def _communicator(address: str, token: str, host: str, rank: int) -> Communicator:
    """Return a communicator of a process that others dial at `host`."""
    listen = None if "PCCL_LISTEN" in os.environ else addresses.join(listen_host(host), 0)
    return Communicator(address, token=token_of(token), listen=listen, master_timeout=LOST_MASTER_S, place=rank)


def _join_first_rank(store: Any, rank: int, deadline_s: float) -> Communicator:
    """Return a communicator that is connected to the first rank's master, however often what the store says is out of
    date."""
    while True:
        try:
            store.wait([KEY], timedelta(seconds=_left_s(deadline_s)))
            found = json.loads(store.get(KEY))
        except DistStoreError as error:
            text = f"the first rank of the process group has not started its pccl master in time: {error}"
            raise DistStoreError(text) from None
        address = found["address"]
        host = advertised_host(addresses.parse(address)[0])
        communicator = _communicator(address, found["token"], host, rank)
        try:
            communicator.connect(1, timeout=_left_s(deadline_s))
            return communicator
        except PCCLError as error:
            communicator.close()
            if error.result is not Result.MASTER_CONNECTION_FAILED or _left_s(deadline_s) <= RETRY_S:
                raise
        time.sleep(RETRY_S)


def _await_all(communicator: Communicator, size: int, deadline_s: float) -> None:
    """Return when all ranks are in a run that is not the group's own."""
    while communicator.world_size < size:
        if communicator.are_peers_pending(timeout=_left_s(deadline_s)):
            communicator.update_topology(timeout=_left_s(deadline_s))
        else:
            time.sleep(POLL_S)
        if _left_s(deadline_s) <= 0.0:
            text = f"{communicator.world_size} of {size} ranks have come in time"
            raise PCCLError(Result.TIMEOUT, "init_process_group", text)


def exchange(communicator: Communicator, rank: int, size: int, deadline_s: float) -> tuple[int, ...]:
    """Return the peer number of each rank."""
    info = communicator.all_gather(np.array([rank, size]), timeout=_left_s(deadline_s))
    said = [(int(one), int(its_size)) for one, its_size in info.array]
    if sorted(said) != [(each, size) for each in range(size)]:
        found = ", ".join(f"rank {one} of {its_size}" for one, its_size in said)
        text = f"the run has {found}, and not each of {size} ranks once: is another job in it?"
        raise PCCLError(Result.INVALID_USAGE, "init_process_group", text)
    return tuple(peer for _, peer in sorted(zip(said, info.membership.peers, strict=True)))


def host_of(store: Any) -> str:
    """Return the host of a store that is a server; empty: it is none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "") or "")


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
