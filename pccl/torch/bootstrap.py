"""How the ranks of a process group find each other: from a c10d store to a connected communicator.

1. The group's first rank starts a master, and writes into the store the address with which it reaches the store. A
   loopback address there means that they share a machine, and is replaced by whoever reads it with the host of the
   store. A token that only the store tells keeps everybody else out. In groups of three and more the next ranks start
   standbys, so that the loss of the first rank is decided as any other.
2. All connect to it, and one view admits them all (`founders`). They then exchange their ranks by an all_gather: from
   then on each knows which peer has which rank.
3. What was written may be read only once, for the same group may be made again with the same store: the first rank
   deletes it before it takes part in the exchange, when all have read it. A rank that finds what a rank that died left
   behind cannot connect to it, and reads again.
4. A rank that has lost its masters before all are there, as when processes stand still for seconds, tries again until
   its time is over. All know the same masters, so whoever hosts one keeps it meanwhile.
5. With PCCL_MASTER in the environment the default group meets in that run instead, and starts no master.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.runtime.network import addresses
from pccl.torch.errors import Names
from pccl.torch.hosting import Hosting, advertised_host, as_seen_from_here, token_of
from pccl.torch.store_waits import wait_for_ranks
from pccl.types import Result

KEY = "pccl/master"
MASTER_VARIABLE = "PCCL_MASTER"
RETRY_S = 0.05
LEAVE_S = 1.0
"""Seconds for which a rank that leaves waits until that has come through."""
LOST_MASTER_S = 5.0
"""Seconds for which survivors of the rank that had the master look for it or for a standby."""
LOST_PARTNER_S = 1.0
"""The same where there is no standby: in a group of two, whose other rank is lost then."""
STANDBYS = 2


class _Record(NamedTuple):
    """What the first rank writes into the store."""

    address: str
    """Its master's."""
    token: str

    @classmethod
    def read(cls, store: Any) -> _Record:
        return cls(**json.loads(store.get(KEY)))


class Meeting(NamedTuple):
    """What a rank has when its group has met."""

    communicator: Communicator
    peers: tuple[int, ...]
    """The peer number of each rank."""
    ring: tuple[int, ...]
    """The peers in the order of the run when they met; some may have left since."""
    hosting: Hosting | None
    """The masters that this process hosts for the group."""
    is_own_run: bool = False
    """Whether the group's first rank runs the master."""

    def leave(self, reason: str) -> None:
        """Leave the run. The others are told the reason. Masters go on for a while, for the others to leave."""
        try:
            self.communicator.close(timeout=LEAVE_S, reason=reason)
        except PCCLError as error:
            if error.result is not Result.TIMEOUT:  # it goes on leaving
                raise
        finally:
            if self.hosting is not None:
                self.hosting.retire()


def meet(store: Any, names: Names, size: int, timeout_s: float, is_default: bool) -> Meeting:
    """Connect to the other ranks of a group, and return when all are there.

    Raises:
        DistStoreError: if ranks have not come in time whom others meet through the store, as the first one.
        PCCLError: if others have not, or cannot be reached.
    """
    rank = names.rank
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
            hosting = Hosting(advertised_host(host_of(store)))
            token = secrets.token_hex(16)
            record = _Record(hosting.found(size, token), token)
            store.set(KEY, json.dumps(record._asdict()))
            wait_for_ranks(store, _standby_keys(token, size), names, deadline_s)
            masters = _masters(store, record, size)
            while communicator is None:
                communicator = _connected(masters, token, rank, size, deadline_s)
            for key in [KEY, *_standby_keys(token, size)]:
                store.delete_key(key)
        else:
            communicator, hosting = _join_first_rank(store, names, size, deadline_s)
        return Meeting(communicator, *exchange(communicator, rank, size, deadline_s), hosting, not known)
    except BaseException:
        if communicator is not None:
            communicator.close()
        if hosting is not None:
            hosting.retire(0.0)
        raise


def _connected(masters: str, token: str, rank: int, size: int, deadline_s: float) -> Communicator | None:
    """Return a communicator that is in the run. None: its masters were out of reach for longer than it looks for them,
    or have sent it away, and there is time to try again. PCCLError."""
    patience_s = LOST_MASTER_S if _standby_ranks(size) else LOST_PARTNER_S
    communicator = Communicator(masters, token=token_of(token), master_timeout=patience_s, place=rank)
    try:
        communicator.connect(1, timeout=_left_s(deadline_s))
        return communicator
    except BaseException as error:
        communicator.close()
        is_lost = isinstance(error, PCCLError) and error.result is Result.MASTER_CONNECTION_FAILED
        if not is_lost or _left_s(deadline_s) <= RETRY_S:
            raise
    time.sleep(RETRY_S)
    return None


def _standby_ranks(size: int) -> range:
    """Return the ranks that have a standby. Two ranks need none: the one that is left is no majority of them."""
    return range(1, min(STANDBYS, size - 1) + 1) if size > 2 else range(0)


def _standby_keys(token: str, size: int) -> dict[str, int]:
    """Return the keys under which standbys are, with the rank of each."""
    return {f"{KEY}/{token}/{rank}": rank for rank in _standby_ranks(size)}


def _masters(store: Any, record: _Record, size: int) -> str:
    """Return the addresses, as seen from here, of all masters of a group whose standbys have started."""
    told = [record.address, *(store.get(key).decode() for key in _standby_keys(record.token, size))]
    return ",".join(as_seen_from_here(each, host_of(store)) for each in told)


def _is_replaced(store: Any, record: _Record) -> bool:
    """Return whether another first rank has started a master meanwhile."""
    return bool(store.check([KEY])) and _Record.read(store) != record


def _join_first_rank(store: Any, names: Names, size: int, deadline_s: float) -> tuple[Communicator, Hosting | None]:
    """Return a communicator that is in the run of the first rank's master, and the standby of this rank, if it has one.

    What the store says may be out of date, so it is read again and again. As long as it says the same, the standby
    stays the same, too: the others may have its address already.
    """
    rank = names.rank
    record: _Record | None = None
    hosting: Hosting | None = None
    try:
        while True:
            wait_for_ranks(store, {KEY: 0}, names, deadline_s)
            found = _Record.read(store)
            if found != record:
                record = found
                if hosting is not None:
                    hosting.retire(0.0)
                if rank in _standby_ranks(size):
                    master = as_seen_from_here(found.address, host_of(store))
                    hosting = Hosting(advertised_host(addresses.parse(master)[0]))
                    store.set(f"{KEY}/{found.token}/{rank}", hosting.stand_by(master, found.token))
            is_replaced = partial(_is_replaced, store, found)
            if not wait_for_ranks(store, _standby_keys(found.token, size), names, deadline_s, is_replaced):
                continue
            masters = _masters(store, found, size)
            communicator = _connected(masters, found.token, rank, size, deadline_s)
            if communicator is not None:
                return communicator, hosting
    except BaseException:
        if hosting is not None:
            hosting.retire(0.0)
        raise


def _await_all(communicator: Communicator, size: int, deadline_s: float) -> None:
    """Return when all ranks are in a run that is not the group's own."""
    found = communicator.wait_for_peers(size, timeout=_left_s(deadline_s))
    if found < size:
        text = f"the run has gone on with {found} peers before {size} ranks have come: is another job in it?"
        raise PCCLError(Result.INVALID_USAGE, "init_process_group", text)


def exchange(
    communicator: Communicator, rank: int, size: int, deadline_s: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the peer number of each rank, and the order of these peers in the run."""
    info = communicator.all_gather(np.array([rank, size]), timeout=_left_s(deadline_s))
    said = [(int(one), int(its_size)) for one, its_size in info.array]
    if sorted(said) != [(each, size) for each in range(size)]:
        found = ", ".join(f"rank {one} of {its_size}" for one, its_size in said)
        text = f"the run has {found}, and not each of {size} ranks once: is another job in it?"
        raise PCCLError(Result.INVALID_USAGE, "init_process_group", text)
    ring = info.membership.peers
    return tuple(peer for _, peer in sorted(zip(said, ring, strict=True))), ring


def host_of(store: Any) -> str:
    """Return the host of a store that is a server; empty: it is none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "") or "")


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
