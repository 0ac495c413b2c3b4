"""Masters that processes of a group host themselves, so that nobody has to start one.

The first rank of a world hosts its master, the next ones standbys: a loss of the first rank is then decided as any
other, by a master. A world has its own run, so its ranks wait for nobody else's.

A master must outlive its process's own part in the world: the others may still need a verdict of it on what was under
way when its process left. So it is *retired*: it goes on for `LINGER_S`, or until the end of the program.
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
"""Every interface: which of a machine's addresses the others dial, loopback or not, depends on where they are."""
LINGER_S = 10.0
"""Seconds for which a master goes on that its own process needs no more."""
STANDBY_LINGER_S = 3.0
"""The same of a standby, which is needed only if the master is lost as well, and warns of a master that is gone."""


def advertised_host(towards: str = "") -> str:
    """Return the host under which others can dial this process.

    That is PCCL_ADVERTISE in the environment, else the address from which this machine would reach the host `towards`.
    If that is the loopback address, `towards` is this machine, and others replace it by where they find `towards`
    (`as_seen_from_here`). Without `towards`, or if it is out of reach: the address that this machine's name stands for,
    else the one from which it would reach the internet, and the loopback address only if there is no other.
    """
    given = os.environ.get("PCCL_ADVERTISE", "")
    if given:
        return addresses.parse(given, default_port=0)[0]
    if towards and (found := addresses.source_towards(towards)):
        return LOOPBACK if addresses.is_loopback(found) else found
    known = filter(None, [addresses.source_towards(socket.gethostname()), *addresses.source_addresses()])
    return next((found for found in known if not addresses.is_loopback(found)), LOOPBACK)


def as_seen_from_here(address: str, store_host: str) -> str:
    """Return the "host:port" at which this process dials an address that was told through the store at `store_host`:
    there a loopback address stands for the store's machine."""
    host, port = addresses.parse(address)
    if store_host and not addresses.is_loopback(store_host):
        (host,) = addresses.reachable([host], store_host)
    return addresses.join(host, port)


def token_of(given: str) -> str:
    """Return the secret of a world: that of the environment, which is never sent, or else the one that was given."""
    return os.environ.get("PCCL_TOKEN") or given


class Hosting:
    """The masters that one process group object hosts. Thread-safe."""

    def __init__(self, host: str) -> None:
        """`host` is where others dial this process."""
        self.host = host
        self._nodes: list[tuple[MasterNode, float]] = []
        """The masters of the present world, and for how many seconds each goes on when it is retired."""
        self._retiring: dict[threading.Timer, MasterNode] = {}
        self._lock = threading.Lock()

    def found(self, founders: int, token: str) -> str:
        """Start the master of a run that so many peers found, and return its "host:port". PCCLError."""
        return self._run(MasterNode(LISTEN, token=token_of(token), founders=founders, daemon=True), LINGER_S)

    def stand_by(self, master: str, token: str) -> str:
        """Start a standby of a master, and return its "host:port". PCCLError."""
        node = MasterNode(LISTEN, token=token_of(token), standby_of=master, daemon=True)
        return self._run(node, STANDBY_LINGER_S)

    def _run(self, node: MasterNode, linger_s: float) -> str:
        node.run()
        with self._lock:
            self._nodes.append((node, linger_s))
        return addresses.join(self.host, addresses.parse(node.address)[1])

    def retire(self, after_s: float | None = None) -> None:
        """Stop the masters of the present world after some seconds; None: as long as others may need each of them."""
        with self._lock:
            nodes, self._nodes = self._nodes, []
            for node, linger_s in nodes:
                timer = threading.Timer(linger_s if after_s is None else after_s, self._stop_due)
                timer.daemon = True
                self._retiring[timer] = node
                timer.start()

    def _stop_due(self) -> None:
        """Stop the master whose timer's thread this is."""
        timer = threading.current_thread()
        assert isinstance(timer, threading.Timer)
        with self._lock:
            node = self._retiring.pop(timer)
        with suppress(PCCLError):  # it stops by itself, or with the process
            node.interrupt()
