"""torch's Gloo as a ruler. Only a process that was asked for it imports this module, as it imports torch.

Gloo works on the very arrays that pccl reduces: a torch tensor made from an array shares its memory. torch itself is
kept to one thread; Gloo has the threads that it starts by default.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from numpy.typing import NDArray

from pccl.bench.case import Reduce

TIMEOUT_S = 300.0


class Gloo:
    """Rank `rank` of a Gloo process group. `store` is where its ranks find each other."""

    def __init__(self, rank: int, world_size: int, store: Any, interface: str | None) -> None:
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S)
        )

    def ruler(self, values: NDArray[Any], tensors: int) -> Reduce:
        parts = torch.from_numpy(values).tensor_split(tensors)

        def reduce() -> None:
            works = [distributed.all_reduce(part, async_op=True) for part in parts]
            for work in works:
                work.wait()

        return reduce

    def all_gather(self, send: NDArray[Any], recv: NDArray[Any]) -> Reduce:
        whole, part = torch.from_numpy(recv.reshape(-1)), torch.from_numpy(send)
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        return lambda: gather(whole, part)

    def reduce_scatter(self, send: NDArray[Any], recv: NDArray[Any]) -> tuple[Reduce, NDArray[Any]]:
        whole, part = torch.from_numpy(send), torch.from_numpy(recv)
        scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        return lambda: scatter(part, whole), recv

    def all_to_all(self, send: NDArray[Any], recv: NDArray[Any]) -> Reduce:
        given, taken = torch.from_numpy(send), torch.from_numpy(recv)
        return lambda: distributed.all_to_all_single(taken, given)

    def gather(self, send: NDArray[Any], recv: NDArray[Any]) -> Reduce:
        row = torch.from_numpy(send)
        rows = list(torch.from_numpy(recv)) if distributed.get_rank() == 0 else None
        return lambda: distributed.gather(row, rows, dst=0)

    def scatter(self, send: NDArray[Any], recv: NDArray[Any]) -> Reduce:
        row = torch.from_numpy(recv)
        rows = list(torch.from_numpy(send)) if distributed.get_rank() == 0 else None
        return lambda: distributed.scatter(row, rows, src=0)

    def reduce(self, array: NDArray[Any]) -> Reduce:
        tensor = torch.from_numpy(array)
        return lambda: distributed.reduce(tensor, dst=0)

    def broadcast(self, array: NDArray[Any]) -> Reduce:
        tensor = torch.from_numpy(array)
        return lambda: distributed.broadcast(tensor, 0)

    def send(self, array: NDArray[Any]) -> Reduce:
        tensor = torch.from_numpy(array)
        if distributed.get_rank() == 0:
            return lambda: distributed.send(tensor, 1)
        if distributed.get_rank() == 1:
            return lambda: distributed.recv(tensor, 0)
        return lambda: None

    def barrier(self) -> None:
        distributed.barrier()

    def close(self) -> None:
        distributed.destroy_process_group()


def file_store(path: str, world_size: int) -> Any:
    """Return a store for ranks that share a file system. Nothing listens anywhere."""
    return distributed.FileStore(path, world_size)


def tcp_store(address: str, port: int, world_size: int, *, serves: bool) -> Any:
    """Return a store for ranks on several hosts. One serves it, at any free port if that is 0; `port` tells which."""
    timeout = timedelta(seconds=TIMEOUT_S)
    return distributed.TCPStore(address, port, world_size, serves, timeout, wait_for_workers=False)
