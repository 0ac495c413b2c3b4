"""Masters in the processes of a group: the first rank of a world hosts its master, the next ones standbys.

A master must outlive its process's membership: the other ranks may still need its verdict on calls in flight. So it is
*retired*: it stops after `LINGER_S`, or at the end of the program.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

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
    """The masters of one process group in this process. Thread-safe."""

    def __init__(self, host: str) -> None:
        """`host`: the host that others dial."""
        self.host = host
        self._nodes: list[tuple[MasterNode, float]] = []
        """Masters, and the seconds that each continues after `retire`."""
        self._lock = threading.Lock()

    def start_master(self, founders: int, token: str) -> str:
        """Start the master of a run with this number of founders, and return its "host:port". PCCLError."""
        return self._run(MasterNode(LISTEN, token=token_of(token), founders=founders, daemon=True), LINGER_S)

    def start_standby(self, master: str, token: str) -> str:
        """Start a standby of a master, and return its "host:port". PCCLError."""
        node = MasterNode(LISTEN, token=token_of(token), standby_of=master, daemon=True)
        return self._run(node, STANDBY_LINGER_S)

    def _run(self, node: MasterNode, linger_s: float) -> str:
        node.run()
        with self._lock:
            self._nodes.append((node, linger_s))
        return addresses.join(self.host, addresses.parse(node.address)[1])

    def retire(self, after_s: float | None = None) -> None:
        """Stop the masters after some seconds; None: after their linger time."""
        with self._lock:
            nodes, self._nodes = self._nodes, []
        for node, linger_s in nodes:
            timer = threading.Timer(linger_s if after_s is None else after_s, _stop, [node])
            timer.daemon = True
            timer.start()


def _stop(node: MasterNode) -> None:
    with suppress(PCCLError):  # it stops later, or with the process
        node.interrupt()
