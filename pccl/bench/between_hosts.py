"""Connects rulers on different hosts, whose ranks exchange their addresses through an `Assembly`.

A ruler opens ports of its own, at an address of each host that the others can reach: that from which the host reaches
the master or, where it has the master to itself and so would use loopback, that from which it reaches any other host.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from pccl.bench.assembly import Assembly
from pccl.bench.errors import BenchError
from pccl.bench.interfaces import address_towards, interface_of
from pccl.bench.raw_ring import RawRing, join_ring

if TYPE_CHECKING:
    from pccl.bench.gloo import Gloo


def join_raw_ring(assembly: Assembly, master: str) -> RawRing:
    """Return this rank's end of a raw ring of all peers, which must all call this. `master` is its HOST:PORT."""
    own = _own_address(assembly, master)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    listener = socket.create_server((own, 0), family=family)
    listeners = [text.split() for text in assembly.gather(f"{own} {listener.getsockname()[1]}")]
    addresses = [(host, int(port)) for host, port in listeners]
    try:
        return join_ring(assembly.rank, addresses, listener)
    except OSError as error:
        places = ", ".join(f"{host} port {port}" for host, port in addresses)
        raise BenchError(f"the raw ring through {places} has not closed: {error}") from error


def join_gloo(assembly: Assembly, world_size: int, master: str) -> Gloo:
    """Return this rank's end of a Gloo group of all peers, which must all call this. `master` is its HOST:PORT."""
    # Else torch warns that hosts' addresses have no names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from pccl.bench.gloo import Gloo, tcp_store

    own = _own_address(assembly, master)
    store = tcp_store(own, 0, world_size, serves=True) if assembly.rank == 0 else None
    host, port = assembly.gather(f"{own} {store.port if store else 0}")[0].split()
    try:
        store = store or tcp_store(host, int(port), world_size, serves=False)
        return Gloo(assembly.rank, world_size, store, interface_of(own))
    except RuntimeError as error:
        raise BenchError(f"Gloo's ranks have not found each other through {host} port {port}: {error}") from error


def _own_address(assembly: Assembly, master: str) -> str:
    own = address_towards(_host(master))
    others = [address for address in assembly.gather(own) if not _is_loopback(address)]
    return address_towards(others[0]) if others and _is_loopback(own) else own


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _host(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
