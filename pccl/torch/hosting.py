"""Masters in the processes of a group: the first rank of a world hosts its master, the next ones standbys.

A master must outlive its process's membership: the other ranks may still need its verdict on calls in flight. So it is
*retired*: it stops after `LINGER_S`, or at the end of the program.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Any

from pccl.errors import PCCLError
from pccl.master_node import MasterNode
from pccl.runtime.network import addresses

LOOPBACK = "127.0.0.1"
LISTEN = "[::]:0"
"""All interfaces: the ranks on this machine may dial loopback, the others another address."""
LINGER_S = 10.0
"""Seconds until a retired master stops."""
STANDBY_LINGER_S = 3.0
"""The same for a standby: it is needed only if the master is lost as well, and logs warnings about a lost master."""


def advertised_host(towards: str = "") -> str:
    """Return the host that other processes can dial.

    In this order: PCCL_ADVERTISE; the source address towards the host `towards`; the address of this machine's name;
    the source address towards the internet; the loopback address. A loopback address towards `towards` means that it
    is this machine; readers replace it by `towards` as they see it (`as_seen_from_here`).
    """
    given = os.environ.get("PCCL_ADVERTISE", "")
    if given:
        return addresses.parse(given, default_port=0)[0]
    if towards and (found := addresses.source_towards(towards)):
        return LOOPBACK if addresses.is_loopback(found) else found
    known = filter(None, [addresses.source_towards(socket.gethostname()), *addresses.source_addresses()])
    return next((found for found in known if not addresses.is_loopback(found)), LOOPBACK)


def as_seen_from_here(address: str, store_host: str) -> str:
    """Return an address from the store at `store_host` as this process dials it: a loopback address there means the
    store's machine."""
    host, port = addresses.parse(address)
    if store_host and not addresses.is_loopback(store_host):
        (host,) = addresses.reachable([host], store_host)
    return addresses.join(host, port)


def token_of(given: str) -> str:
    """Return the token of a world: PCCL_TOKEN, which is never sent, or else the one from the store."""
    return os.environ.get("PCCL_TOKEN") or given


class Hosting:
    """A master, or a standby, of a process group in this process."""

    def __init__(self, host: str, token: str, *, founders: int = 1, standby_of: str = "") -> None:
        """Start the master of a run with this number of founders, or a standby of a master. PCCLError.

        `host`: the host that others dial.
        """
        role: dict[str, Any] = {"standby_of": standby_of} if standby_of else {"founders": founders}
        self._node = MasterNode(LISTEN, token=token_of(token), daemon=True, **role)
        self._linger_s = STANDBY_LINGER_S if standby_of else LINGER_S
        self._node.run()
        self.address = addresses.join(host, addresses.parse(self._node.address)[1])
        """The "host:port" for others."""

    def retire(self, after_s: float | None = None) -> None:
        """Stop the master after some seconds; None: after its linger time."""
        timer = threading.Timer(self._linger_s if after_s is None else after_s, self._stop)
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        with suppress(PCCLError):  # it stops later, or with the process
            self._node.interrupt()
