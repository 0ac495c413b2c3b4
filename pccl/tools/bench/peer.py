"""One peer of a benchmark: `pccl bench --master` on each host, or `python -m pccl.tools.bench.peer JSON` here.

Peers agree by using collectives of the measured run: an all-reduce sets each iteration's time to that of its slowest
rank, so all peers get the same rows. Raw ring and Gloo open their own ports at the address from which this host dials
the master or, if the master is on this host, another host. Peers on one machine synchronize with the raw ring's
barrier, and peers on several machines use pccl's.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np

from pccl import Communicator, PCCLError, ReduceOp
from pccl.tools import harness
from pccl.tools.bench.cases import Memory, Ruler, measure_case
from pccl.tools.bench.plan import GLOO, RAW_RING, Plan, cases
from pccl.tools.bench.raw_ring import join_ring
from pccl.tools.bench.report import Row, row
from pccl.tools.report import ToolError

SERVICE_TAG = 1 << 32
"""The tag for ops that are not measured. Cases number their tags from 0."""


class LocalPeer(msgspec.Struct, frozen=True):
    """The argument of a local peer's process, as JSON."""

    master: str
    number: int
    plan: Plan


def measure_as_one_peer(plan: Plan, master: str, *, is_local: bool = False) -> Iterator[Row]:
    """Measure as one peer in the run of `master` (HOST:PORT). With `is_local`, all peers are on this machine."""
    (world_size,) = plan.peers
    todo = cases(plan)
    try:
        for connections in plan.connections:
            encrypt = True if plan.encrypt else None
            with ExitStack() as resources:
                communicator = resources.enter_context(Communicator(master, connections=connections, encrypt=encrypt))
                communicator.wait_for_peers(world_size)
                _check_agreement(communicator, plan)
                rulers = _join_rulers(plan, communicator, master, resources)
                barrier = rulers[RAW_RING].barrier if is_local else communicator.barrier
                for case in todo:
                    samples = measure_case(case, communicator, barrier, rulers, shares_machine=is_local)
                    slowest_s = {name: _most(communicator, seconds) for name, seconds in samples.seconds.items()}
                    memory = None
                    if samples.memory is not None:
                        memory = Memory(*map(int, _most(communicator, msgspec.structs.astuple(samples.memory))))
                    yield row(world_size, connections, case, slowest_s, memory)
    except (PCCLError, RuntimeError, OSError) as error:
        raise ToolError(str(error)) from error


def _most(communicator: Communicator, values: Sequence[float]) -> list[float]:
    found = np.array(values, np.float64)
    communicator.all_reduce(found, op=ReduceOp.MAX, tag=SERVICE_TAG)
    return [float(value) for value in found]


def _gather(communicator: Communicator, text: str) -> list[str]:
    encoded = text.encode()
    (longest,) = _most(communicator, [len(encoded)])
    padded = np.zeros(int(longest), np.uint8)
    padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    rows = communicator.all_gather(padded, tag=SERVICE_TAG).array
    return [bytes(each.tobytes()).rstrip(b"\0").decode() for each in rows]


def _check_agreement(communicator: Communicator, plan: Plan) -> None:
    """Raise ToolError if peers have different plans, which would deadlock."""
    own = msgspec.to_builtins(plan)
    for text in _gather(communicator, msgspec.json.encode(plan).decode()):
        for field, theirs in msgspec.json.decode(text).items():
            if theirs != own.get(field):
                raise ToolError(f"hosts were given different {field}: {own.get(field)} here, {theirs} on another")


def _join_rulers(plan: Plan, communicator: Communicator, master: str, resources: ExitStack) -> dict[str, Ruler]:
    rulers: dict[str, Ruler] = {}
    if RAW_RING in plan.rulers:
        rulers[RAW_RING] = _join_raw_ring(communicator, master)
        resources.callback(rulers[RAW_RING].close)
    if GLOO in plan.rulers:
        rulers[GLOO] = _join_gloo(communicator, master)
        resources.callback(rulers[GLOO].close)
    return rulers


def _join_raw_ring(communicator: Communicator, master: str) -> Ruler:
    own = _own_address(communicator, master)
    listener = socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
    listeners = [text.split() for text in _gather(communicator, f"{own} {listener.getsockname()[1]}")]
    addresses = [(host, int(port)) for host, port in listeners]
    try:
        return join_ring(communicator.membership.rank, addresses, listener)
    except OSError as error:
        places = ", ".join(f"{host} port {port}" for host, port in addresses)
        raise ToolError(f"the raw ring through {places} could not be closed: {error}") from error


def _join_gloo(communicator: Communicator, master: str) -> Ruler:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns about hosts without names
    from pccl.tools.bench.gloo import Gloo, interface_of, tcp_store

    rank, world_size = communicator.membership.rank, communicator.world_size
    own = _own_address(communicator, master)
    store = tcp_store(own, 0, world_size, serves=True) if rank == 0 else None
    host, port = _gather(communicator, f"{own} {store.port if store else 0}")[0].split()
    try:
        store = store or tcp_store(host, int(port), world_size, serves=False)
        return Gloo(rank, world_size, store, interface_of(own))
    except RuntimeError as error:
        raise ToolError(f"Gloo's ranks have not found each other through {host} port {port}: {error}") from error


def _own_address(communicator: Communicator, master: str) -> str:
    """Return an address of this host that the other hosts can reach."""
    own = _address_towards(_host(master))
    others = [address for address in _gather(communicator, own) if not _is_loopback(address)]
    return _address_towards(others[0]) if others and _is_loopback(own) else own


def _address_towards(host: str) -> str:
    """Return the source address of packets to `host`, without sending any."""
    family, kind, protocol, _, destination = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as one:
        one.connect(destination)
        return str(one.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _host(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def main() -> None:
    peer = msgspec.json.decode(sys.argv[1], type=LocalPeer)
    try:
        for measured in measure_as_one_peer(peer.plan, peer.master, is_local=True):
            if peer.number == 0:
                harness.send(measured)
    except ToolError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
