"""Runs torch's Gloo on the same arrays as pccl, through tensors that share the arrays' memory.

This module is imported only on request, because it imports torch. torch uses one thread, and Gloo uses its default.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from numpy.typing import NDArray

TIMEOUT_S = 300.0
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16

Array = NDArray[Any]
Call = Callable[[], object]


class Gloo:
    """One rank in a Gloo process group, whose ranks find each other through `store`."""

    def __init__(self, rank: int, world_size: int, store: Any, interface: str | None) -> None:
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S)
        )

    def all_reduce(self, values: Array, tensors: int) -> Call:
        parts = torch.from_numpy(values).tensor_split(tensors)

        def reduce() -> None:
            works = [distributed.all_reduce(part, async_op=True) for part in parts]
            for work in works:
                work.wait()

        return reduce

    def all_gather(self, send: Array, recv: Array) -> Call:
        whole, part = torch.from_numpy(recv.reshape(-1)), torch.from_numpy(send)
        return lambda: distributed.all_gather_into_tensor(whole, part)

    def reduce_scatter(self, send: Array, recv: Array) -> tuple[Call, Array]:
        whole, part = torch.from_numpy(send), torch.from_numpy(recv)
        return lambda: distributed.reduce_scatter_tensor(part, whole), recv

    def all_to_all(self, send: Array, recv: Array) -> Call:
        given, taken = torch.from_numpy(send), torch.from_numpy(recv)
        return lambda: distributed.all_to_all_single(taken, given)

    def gather(self, send: Array, recv: Array) -> Call:
        row = torch.from_numpy(send)
        rows = list(torch.from_numpy(recv)) if distributed.get_rank() == 0 else None
        return lambda: distributed.gather(row, rows, dst=0)

    def scatter(self, send: Array, recv: Array) -> Call:
        row = torch.from_numpy(recv)
        rows = list(torch.from_numpy(send)) if distributed.get_rank() == 0 else None
        return lambda: distributed.scatter(row, rows, src=0)

    def reduce(self, array: Array) -> Call:
        tensor = torch.from_numpy(array)
        return lambda: distributed.reduce(tensor, dst=0)

    def broadcast(self, array: Array) -> Call:
        tensor = torch.from_numpy(array)
        return lambda: distributed.broadcast(tensor, 0)

    def send(self, array: Array) -> Call:
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


def tcp_store(address: str, port: int, world_size: int, *, serves: bool) -> Any:
    """Return a store through which the ranks find each other. One rank serves it; port 0 picks any free port."""
    timeout = timedelta(seconds=TIMEOUT_S)
    return distributed.TCPStore(address, port, world_size, serves, timeout, wait_for_workers=False)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address, or None if it cannot be found."""
    if ipaddress.ip_address(address).is_loopback:
        return next((name for _, name in socket.if_nameindex() if name.rstrip("0123456789") == "lo"), None)
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s24x", name.encode())
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8]) == address:
                    return name
    return None
