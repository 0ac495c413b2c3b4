"""How the ranks of a process group find each other: from a c10d store to a connected communicator.

1. The group's first rank starts a master, on the address with which it reaches the store, and writes where it is into
   the store. All connect to it. A token that only the store tells keeps everybody else out.
2. The ranks wait until all of them are in the run, and then exchange their numbers by an all_gather: from then on each
   knows which peer has which rank.
3. What was written may be read only once, for the same group may be made again with the same store: the first rank
   deletes it before it takes part in the exchange, when all have read it. A rank that finds what a rank that died left
   behind cannot connect to it, and reads again.
4. With PCCL_MASTER in the environment the default group meets in that run instead, and starts no master.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from torch.distributed import DistStoreError

from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.master_node import MasterNode
from pccl.types import Result

KEY = "pccl/master"
MASTER_VARIABLE = "PCCL_MASTER"
POLL_S = 0.002
RETRY_S = 0.05
LOST_MASTER_S = 5.0
"""Seconds for which survivors of the rank that had the master look for it."""
LOOPBACK = "127.0.0.1"


class Meeting(NamedTuple):
    """What a rank has when its group has met."""

    communicator: Communicator
    peers: tuple[int, ...]
    """The peer number of each rank."""
    master: MasterNode | None
    """The group's master, in the process that runs it."""

    def leave(self) -> None:
        """Leave the run, and end its master."""
        self.communicator.close()
        if self.master is not None:
            self.master.interrupt()


def meet(store: Any, rank: int, size: int, timeout_s: float, is_default: bool) -> Meeting:
    """Connect to the other ranks of a group, and return when all are there.

    Raises:
        DistStoreError: if the first rank has not come in time.
        PCCLError: if the others have not, or cannot be reached.
    """
    deadline_s = time.monotonic() + timeout_s
    known = os.environ.get(MASTER_VARIABLE, "") if is_default else ""
    master: MasterNode | None = None
    communicator: Communicator | None = None
    try:
        if known:
            communicator = Communicator(known)
            communicator.connect(timeout=_left_s(deadline_s))
        elif rank == 0:
            token = os.environ.get("PCCL_TOKEN") or secrets.token_hex(16)
            host = host_towards(store)
            master = MasterNode(_join(host, 0), token=token)
            master.run()
            store.set(KEY, json.dumps({"address": master.address, "token": token}))
            communicator = _communicator(master.address, token)
            communicator.connect(timeout=_left_s(deadline_s))
        else:
            communicator = _join_first_rank(store, deadline_s)
        _await_all(communicator, size, deadline_s)
        if master is not None:
            store.delete_key(KEY)
        return Meeting(communicator, _exchange(communicator, rank, size, deadline_s), master)
    except BaseException:
        if communicator is not None:
            communicator.close()
        if master is not None:
            master.interrupt()
        raise


def _communicator(address: str, token: str) -> Communicator:
    host = address.rpartition(":")[0]
    listen = _join(host.strip("[]"), 0) if _is_loopback(host) and "PCCL_LISTEN" not in os.environ else None
    return Communicator(address, token=token, listen=listen, master_timeout=LOST_MASTER_S)


def _join_first_rank(store: Any, deadline_s: float) -> Communicator:
    """Return a communicator that is connected to the first rank's master, however often what the store says is out of
    date."""
    while True:
        try:
            store.wait([KEY], timedelta(seconds=_left_s(deadline_s)))
            found = json.loads(store.get(KEY))
        except DistStoreError as error:
            text = f"the first rank of the process group has not started its pccl master in time: {error}"
            raise DistStoreError(text) from None
        communicator = _communicator(found["address"], found["token"])
        try:
            communicator.connect(1, timeout=_left_s(deadline_s))
            return communicator
        except PCCLError as error:
            communicator.close()
            if error.result is not Result.MASTER_CONNECTION_FAILED or _left_s(deadline_s) <= RETRY_S:
                raise
        time.sleep(RETRY_S)


def _await_all(communicator: Communicator, size: int, deadline_s: float) -> None:
    """Return when all ranks are in the run."""
    while communicator.world_size < size:
        if communicator.are_peers_pending(timeout=_left_s(deadline_s)):
            communicator.update_topology(timeout=_left_s(deadline_s))
        else:
            time.sleep(POLL_S)
        if _left_s(deadline_s) <= 0.0:
            text = f"{communicator.world_size} of {size} ranks have come in time"
            raise PCCLError(Result.TIMEOUT, "init_process_group", text)


def _exchange(communicator: Communicator, rank: int, size: int, deadline_s: float) -> tuple[int, ...]:
    """Return the peer number of each rank."""
    info = communicator.all_gather(np.array([rank, size]), timeout=_left_s(deadline_s))
    said = [(int(one), int(its_size)) for one, its_size in info.array]
    if sorted(said) != [(each, size) for each in range(size)]:
        found = ", ".join(f"rank {one} of {its_size}" for one, its_size in said)
        text = f"the run has {found}, and not each of {size} ranks once: is another job in it?"
        raise PCCLError(Result.INVALID_USAGE, "init_process_group", text)
    return tuple(peer for _, peer in sorted(zip(said, info.membership.peers, strict=True)))


# Addresses.


def host_towards(store: Any) -> str:
    """Return the address of this host with which it reaches the one of the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = str(getattr(store, "host", "") or "")
    if not host:
        return LOOPBACK
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(store.port) or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def _is_loopback(host: str) -> bool:
    return host.strip("[]") in (LOOPBACK, "::1", "localhost")


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
