"""Connects the ranks of a process group with a communicator, given a c10d store.

1. The first rank starts a master and writes its address and a random token into the store. In groups of three or more,
   the next ranks start standbys.
2. All ranks connect, and one view admits them all (`founders`). An all_gather of their ranks then yields the mapping
   from peers to ranks.
3. The first rank deletes its record, because the same group may be formed again with the same store. A rank that reads
   the record of a dead rank fails to connect and reads the store again.
4. A rank that loses all masters before all ranks are connected retries until its timeout.
5. If PCCL_MASTER is set in the environment, the default group joins that run and does not start a master.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.distributed import DistStoreError

from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.master_node import MasterNode
from pccl.protocol.wait_reasons import LongWait
from pccl.runtime.network import addresses
from pccl.torch.errors import Names
from pccl.torch.transport import be_of_rank
from pccl.types import Result

logger = logging.getLogger("pccl.torch")

KEY = "pccl/master"
MASTER_VARIABLE = "PCCL_MASTER"
RETRY_S = 0.05
LEAVE_S = 1.0
"""How long, in seconds, a leaving rank waits until the others know that it leaves."""
LOST_MASTER_S = 5.0
"""How long, in seconds, ranks that lost the master try to reach it or a standby."""
LOST_PARTNER_S = 1.0
"""The same limit in a group of two, which has no standby."""
STANDBYS = 2
LOCAL_CONNECTIONS = 1
"""Connections of a link between two ranks on the masters' machine, each with three descriptors in shared memory. Ranks
on other machines ask for the default, and a link has as many as either end asks for."""
PAUSE_S_MIN = 0.001
PAUSE_S_MAX = 0.1
"""The pause between two queries of a store grows from the first value to the second."""


class _Record(NamedTuple):
    """The record that the first rank writes into the store."""

    address: str
    token: str

    @classmethod
    def read(cls, store: Any) -> _Record:
        return cls(**json.loads(store.get(KEY)))


class Meeting(NamedTuple):
    """A group whose ranks are connected."""

    communicator: Communicator
    peers: tuple[int, ...]
    """The peer number of each rank."""
    ring: tuple[int, ...]
    """The peers in the run's order when the group was formed."""
    hosting: Hosting | None
    """The group's master or standby in this process."""
    is_own_run: bool = False
    """Whether the group's first rank runs the master."""

    def leave(self, reason: str) -> None:
        """Leave the run and send the reason to the others. A master in this process stops some seconds later."""
        try:
            self.communicator.close(timeout=LEAVE_S, reason=reason)
        except PCCLError as error:
            if error.result is not Result.TIMEOUT:  # leaving continues in the background
                raise
        finally:
            if self.hosting is not None:
                self.hosting.retire()


def meet(store: Any, names: Names, size: int, timeout_s: float, is_default: bool) -> Meeting:
    """Connect to the other ranks of a group. Raises DistStoreError or PCCLError if ranks do not appear in time."""
    rank = names.rank
    deadline_s = time.monotonic() + timeout_s
    known = os.environ.get(MASTER_VARIABLE, "") if is_default else ""
    hosting: Hosting | None = None
    communicator: Communicator | None = None
    try:
        if known:
            communicator = Communicator(known, place=rank)
            be_of_rank(communicator, names.global_ranks[rank])
            communicator.connect(timeout=_left_s(deadline_s))
            _await_all(communicator, size, deadline_s)
        elif rank == 0:
            token = secrets.token_hex(16)
            hosting = Hosting(advertised_host(host_of(store)), token, founders=size)
            record = _Record(hosting.address, token)
            store.set(KEY, json.dumps(record._asdict()))
            wait_for_ranks(store, _standby_keys(token, size), names, deadline_s)
            masters = _masters(store, record, size)
            while communicator is None:
                communicator = _connected(masters, token, names, size, deadline_s)
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


def _connected(masters: str, token: str, names: Names, size: int, deadline_s: float) -> Communicator | None:
    """Return a connected communicator, or None if its masters were lost and time is left. Raises PCCLError."""
    patience_s = LOST_MASTER_S if _standby_ranks(size) else LOST_PARTNER_S
    hosts = {addresses.parse(each)[0] for each in masters.split(",")}
    connections = LOCAL_CONNECTIONS if all(addresses.source_towards(host) == host for host in hosts) else 0
    communicator = Communicator(
        masters, token=token_of(token), master_timeout=patience_s, place=names.rank, connections=connections
    )
    be_of_rank(communicator, names.global_ranks[names.rank])
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
    """Return the ranks with a standby. Groups of two have none because one survivor is not a majority."""
    return range(1, min(STANDBYS, size - 1) + 1) if size > 2 else range(0)


def _standby_keys(token: str, size: int) -> dict[str, int]:
    return {f"{KEY}/{token}/{rank}": rank for rank in _standby_ranks(size)}


def _masters(store: Any, record: _Record, size: int) -> str:
    """Return the addresses that this process uses to reach the master and the standbys, which must have started."""
    found = [record.address, *(store.get(key).decode() for key in _standby_keys(record.token, size))]
    return ",".join(as_seen_from_here(each, host_of(store)) for each in found)


def _is_replaced(store: Any, record: _Record) -> bool:
    return bool(store.check([KEY])) and _Record.read(store) != record


def _join_first_rank(store: Any, names: Names, size: int, deadline_s: float) -> tuple[Communicator, Hosting | None]:
    """Return a connected communicator and this rank's standby, if it has one.

    The store is read again after each failure, because its record may be from a dead rank.
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
                    hosting = Hosting(advertised_host(addresses.parse(master)[0]), found.token, standby_of=master)
                    store.set(f"{KEY}/{found.token}/{rank}", hosting.address)
            is_replaced = partial(_is_replaced, store, found)
            if not wait_for_ranks(store, _standby_keys(found.token, size), names, deadline_s, is_replaced):
                continue
            masters = _masters(store, found, size)
            communicator = _connected(masters, found.token, names, size, deadline_s)
            if communicator is not None:
                return communicator, hosting
    except BaseException:
        if hosting is not None:
            hosting.retire(0.0)
        raise


def _await_all(communicator: Communicator, size: int, deadline_s: float) -> None:
    found = communicator.wait_for_peers(size, timeout=_left_s(deadline_s))
    if found < size:
        text = f"the run continued with {found} peers before {size} ranks had joined: does another job use it?"
        raise PCCLError(Result.INVALID_USAGE, "init_process_group", text)


def exchange(
    communicator: Communicator, rank: int, size: int, deadline_s: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the peer number of each rank, and these peers in the run's order."""
    info = communicator.all_gather(np.array([rank, size]), timeout=_left_s(deadline_s))
    said = [(int(one), int(its_size)) for one, its_size in info.array]
    if sorted(said) != [(each, size) for each in range(size)]:
        found = ", ".join(f"rank {one} of {its_size}" for one, its_size in said)
        text = f"the run has {found}, instead of each of {size} ranks once: does another job use it?"
        raise PCCLError(Result.INVALID_USAGE, "init_process_group", text)
    ring = info.membership.peers
    return tuple(peer for _, peer in sorted(zip(said, ring, strict=True))), ring


def host_of(store: Any) -> str:
    """Return the host of a TCPStore, or "" for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "") or "")


def wait_for_ranks(
    store: Any,
    rank_of: Mapping[str, int],
    names: Names,
    deadline_s: float,
    is_moot: Callable[[], bool] = lambda: False,
    action: str = "",
) -> bool:
    """Return True once the store has all keys, or False once `is_moot()` returns True.

    Args:
        rank_of: The rank that sets each key.
        action: The operation that sets the keys, for warnings and errors, which name the missing ranks.

    Raises DistStoreError at the deadline.
    """
    action = action or f"forming {names.group}"
    began = time.monotonic()
    wait = LongWait(action, began)
    missing, now, pause_s = list(rank_of.values()), began, PAUSE_S_MIN
    while missing:
        missing = [rank for key, rank in rank_of.items() if not store.check([key])]
        now = time.monotonic()
        if not missing or is_moot():
            break
        ranks = ", ".join(map(names.of, missing))
        have = "has" if len(missing) == 1 else "have"
        if now >= deadline_s:
            text = f"{action} timed out on {names.of(names.rank)} after {now - began:.1f} s: {ranks} {have}"
            raise DistStoreError(f"{text} not called it or cannot reach the store")
        if wait.is_due(now):
            waits_for = f"{ranks}, which {have} not called it"
            logger.warning("%s", wait.warning(now, waits_for, "check what the program is doing there"))
        time.sleep(min(pause_s, deadline_s - now))
        pause_s = min(PAUSE_S_MAX, pause_s * 1.5)
    if wait.is_told:
        logger.warning("%s", wait.ending(now))
    return not missing


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


# The first rank of a world hosts its master, and the next ranks host standbys. A master must outlive its process's
# membership because the other ranks may still need its verdict on calls in flight. So it is *retired*: it stops later.

LOOPBACK = "127.0.0.1"
LISTEN = "[::]:0"
"""All interfaces: ranks on this machine may use loopback, but other ranks use another address."""
LINGER_S = 10.0
"""The number of seconds until a retired master stops."""
STANDBY_LINGER_S = 3.0
"""The number of seconds until a retired standby stops. A standby is needed only if the master is lost."""


def advertised_host(towards: str = "") -> str:
    """Return a host name or address that other processes can use to reach this one.

    Uses the first of these that is known: PCCL_ADVERTISE; the source address towards the host `towards`; the address
    of this machine's name; the source address towards the internet; the loopback address. If the source address towards
    `towards` is loopback, `towards` is this machine; readers then substitute the store's host (`as_seen_from_here`).
    """
    given = os.environ.get("PCCL_ADVERTISE", "")
    if given:
        return addresses.parse(given, default_port=0)[0]
    if towards and (found := addresses.source_towards(towards)):
        return LOOPBACK if addresses.is_loopback(found) else found
    known = filter(None, [addresses.source_towards(socket.gethostname()), *addresses.source_addresses()])
    return next((found for found in known if not addresses.is_loopback(found)), LOOPBACK)


def as_seen_from_here(address: str, store_host: str) -> str:
    """Return an address from the store in a form that this process can use. A loopback address in the store means the
    store's machine, `store_host`."""
    host, port = addresses.parse(address)
    if store_host and not addresses.is_loopback(store_host):
        (host,) = addresses.reachable([host], store_host)
    return addresses.join(host, port)


def token_of(given: str) -> str:
    """Return a world's token: PCCL_TOKEN (which is never sent) if it is set, otherwise `given`, from the store."""
    return os.environ.get("PCCL_TOKEN") or given


class Hosting:
    """A process group's master or standby in this process."""

    def __init__(self, host: str, token: str, *, founders: int = 1, standby_of: str = "") -> None:
        """Start the master of a run with this number of founders, or a standby of a master. Raises PCCLError.

        `host` is the host others use to reach it.
        """
        role: dict[str, Any] = {"standby_of": standby_of} if standby_of else {"founders": founders}
        self._node = MasterNode(LISTEN, token=token_of(token), daemon=True, **role)
        self._linger_s = STANDBY_LINGER_S if standby_of else LINGER_S
        self._node.run()
        self.address = addresses.join(host, addresses.parse(self._node.address)[1])
        """The "host:port" other processes use to reach it."""

    def retire(self, after_s: float | None = None) -> None:
        """Stop the master after some seconds, by default after its linger time."""
        timer = threading.Timer(self._linger_s if after_s is None else after_s, self._stop)
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        with suppress(PCCLError):  # it then stops later, or with the process
            self._node.interrupt()
