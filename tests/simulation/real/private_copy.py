"""Memory for an op to go on in, after the engine was told to leave the caller's arrays (pccl_engine_detach)."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.types import Collective


def buffer_bytes(spec: OpSpec, buffers: Buffers, rank: int, world_size: int, is_root: bool) -> tuple[int, int]:
    """Return how many bytes the op sends and receives here. `is_root`: this peer is the root, or sends."""
    item_bytes = spec.dtype.itemsize
    count = buffers.count
    if buffers.parts is not None:
        return sum(buffers.parts[0]) * item_bytes, sum(buffers.parts[1]) * item_bytes
    if spec.collective is Collective.REDUCE:
        return count * item_bytes, count * item_bytes * is_root
    if spec.collective is Collective.GATHER:
        return count // world_size * item_bytes, count * item_bytes * is_root
    if spec.collective is Collective.SCATTER:
        return count * item_bytes * is_root, count // world_size * item_bytes
    if spec.collective is Collective.ALL_GATHER:
        return count // world_size * item_bytes, count * item_bytes
    if spec.collective is Collective.REDUCE_SCATTER:
        return count * item_bytes, (count // world_size + (rank < count % world_size)) * item_bytes
    if spec.collective in (Collective.BROADCAST, Collective.SEND):
        return (count * item_bytes, 0) if is_root else (0, count * item_bytes)
    return count * item_bytes, count * item_bytes


class PrivateCopy:
    """Memory as large as an op's buffers, and as far apart, which the engine fills."""

    def __init__(self, buffers: Buffers, send_bytes: int, recv_bytes: int) -> None:
        """Allocate the memory. MemoryError."""
        self._callers = buffers
        self._send_bytes = send_bytes
        self._recv_bytes = recv_bytes
        self._delivering = threading.Lock()
        self._is_delivered = False
        self.is_filled = False
        """Whether `fill` was called: then the engine need not bring the content."""
        is_one = buffers.send == buffers.recv
        recv = np.empty(max(1, recv_bytes, send_bytes if is_one else 0), np.uint8)
        send = recv
        offset = buffers.send - buffers.recv
        if not is_one and not 0 <= offset < recv_bytes:
            send, offset = np.empty(max(1, send_bytes), np.uint8), 0
        at = send.ctypes.data + offset
        self.buffers = Buffers(at, recv.ctypes.data, buffers.count, (send, recv))

    def fill(self) -> None:
        """Copy what the caller gives, for an op that has not begun or has been taken back."""
        ctypes.memmove(self.buffers.send, self._callers.send, self._send_bytes)
        if self._callers.recv == self._callers.send:
            ctypes.memmove(self.buffers.recv, self._callers.recv, self._recv_bytes)
        self.is_filled = True

    def deliver(self) -> None:
        """Copy the result of a committed op to where its caller wanted it, once. Any thread."""
        with self._delivering:
            if not self._is_delivered:
                ctypes.memmove(self._callers.recv, self.buffers.recv, self._recv_bytes)
                self._is_delivered = True
