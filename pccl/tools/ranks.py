"""torchrun's environment variables for the copies of `pccl launch`.

Ranks count all copies: node `node_rank` of `nodes` has those from `node_rank * count` on. `MASTER_ADDR` and
`MASTER_PORT` are the address of rank 0's store in a torch.distributed program, not of pccl's master (`PCCL_MASTER`).
They are passed on if the environment has them. Else the store is on this machine at a free port, or, with several
nodes, on the host of node 0 at torch's usual port.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STORE_PORT = 29500
MASTER_PORT = 48148


@dataclass(frozen=True, slots=True)
class Nodes:
    """The number of machines, each with a launcher and the same number of copies, and the number of this one."""

    count: int = 1
    rank: int = 0


ALONE = Nodes()


class NodesError(ValueError):
    """The options and the environment do not give this node's number, or the master's address."""


def nodes(count: int | None, rank: int | None, environment: Mapping[str, str]) -> Nodes:
    """Return the nodes by `--nnodes` and `--node-rank`, else by NNODES and NODE_RANK in the environment.

    Schedulers such as Kubeflow's PyTorchJob start a launcher per node with RANK and WORLD_SIZE of the nodes: these
    count where WORLD_SIZE is the number of nodes. Raises NodesError.
    """
    count = count if count is not None else _number("NNODES", environment, 1)
    if count < 1:
        raise NodesError(f"{count} nodes: there must be at least one")
    if rank is None and count > 1:
        is_per_node = environment.get("WORLD_SIZE", "") == str(count)
        rank = _number("RANK" if is_per_node and "NODE_RANK" not in environment else "NODE_RANK", environment, None)
    rank = rank or 0
    if not 0 <= rank < count:
        raise NodesError(f"node rank {rank}: must be from 0 to {count - 1} of {count} nodes")
    return Nodes(count, rank)


def _number(name: str, environment: Mapping[str, str], default: int | None) -> int:
    text = environment.get(name, "")
    if not text and default is None:
        raise NodesError("this node's number is unknown: give --node-rank, or set NODE_RANK")
    try:
        return int(text) if text else default or 0
    except ValueError:
        raise NodesError(f"{name} {text!r} is not a number") from None


def masters_address(these: Nodes, given: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the address of the copies' master, or None if this node starts it. Raises NodesError.

    Node 0 starts the master; the others find it at MASTER_ADDR unless its address is given.
    """
    if given is not None or these.rank == 0:
        return given
    host = environment.get("MASTER_ADDR", "")
    if not host:
        raise NodesError("the address of node 0's master is unknown: give --master HOST:PORT, or set MASTER_ADDR")
    return f"[{host}]:{MASTER_PORT}" if ":" in host else f"{host}:{MASTER_PORT}"


def store(these: Nodes, master: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return MASTER_ADDR and MASTER_PORT for all copies. `master` is the address of a master on another node."""
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if these.count > 1:
        host = host or (_host(master) if master else socket.gethostname())
        return host, port or str(STORE_PORT)
    return host or "127.0.0.1", port or str(_free_port())


def rank_of(these: Nodes, count: int, index: int) -> int:
    """Return the rank of copy `index` of the `count` on this node."""
    return these.rank * count + index


def variables(these: Nodes, count: int, index: int, master: str, store: tuple[str, str]) -> dict[str, str]:
    """Return the variables of copy `index` of the `count` on this node."""
    rank, world_size = rank_of(these, count, index), these.count * count
    return {
        "PCCL_MASTER": master,
        "PCCL_LAUNCH_INDEX": str(rank),
        "PCCL_LAUNCH_COUNT": str(world_size),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": store[1],
    }


def without_torchruns(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without torchrun's variables."""
    return {name: value for name, value in environment.items() if name not in TORCHRUNS}


def _host(address: str) -> str:
    first = address.split(",")[0].strip()
    if first.startswith("["):
        return first[1:].partition("]")[0]
    return first.rpartition(":")[0] or first


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
