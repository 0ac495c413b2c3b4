"""How Gloo's ranks on different hosts find each other: by what they tell each other through an `Assembly`.

Gloo needs an interface on each host and a store that all can reach. A host uses the address from which it reaches the
master; one that has the master to itself, and so would use loopback, that from which it reaches any other host.
"""

from __future__ import annotations

import ipaddress

from pccl.bench.assembly import Assembly
from pccl.bench.errors import BenchError
from pccl.bench.gloo import Gloo, tcp_store
from pccl.bench.interfaces import address_towards, interface_of


def join_gloo(assembly: Assembly, world_size: int, master: str) -> Gloo:
    """A joint call. `master` is its HOST:PORT."""
    own = address_towards(_host(master))
    others = [address for address in assembly.gather(own) if not _is_loopback(address)]
    if others and _is_loopback(own):
        own = address_towards(others[0])
    store = tcp_store(own, 0, world_size, serves=True) if assembly.rank == 0 else None
    address, _, port = assembly.gather(f"{own} {store.port if store else 0}")[0].partition(" ")
    try:
        store = store or tcp_store(address, int(port), world_size, serves=False)
        return Gloo(assembly.rank, world_size, store, interface_of(own))
    except RuntimeError as error:
        raise BenchError(f"Gloo's ranks have not found each other through {address}:{port}: {error}") from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _host(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
