"""Memory that two processes of one host share in place of a connection's TCP stream (`native/src/wire_shm.c`).

The dialer makes the memory and offers it in `LinkHello`; the acceptor opens it and says so in `Accepted`. The handshake
authenticates the offer. Where the memory cannot be made or opened, as between users or containers, the connection stays
on TCP. So do encrypted connections.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from pccl.runtime.extension import ffi, lib
from pccl.runtime.threads.process import number_of

OFFER_BYTES: int = lib.PCCL_MEMORY_OFFER_BYTES


class SharedMemory:
    """One end of the memory. It is freed unless it is passed to an engine."""

    def __init__(self, handle: Any, offer: bytes) -> None:
        self._handle = ffi.gc(handle, lib.pccl_memory_free)
        self.offer = offer

    def detach(self) -> Any:
        """Return the handle, whose owner is the caller from now on."""
        handle, self._handle = self._handle, ffi.NULL
        ffi.gc(handle, None)
        return handle

    def close(self) -> None:
        if self._handle != ffi.NULL:
            ffi.release(self._handle)
            self._handle = ffi.NULL


def create() -> SharedMemory:
    """Raises OSError."""
    offer = ffi.new("uint8_t[]", OFFER_BYTES)
    made = _call(lambda made: lib.pccl_memory_create(made, offer))
    return SharedMemory(made, bytes(ffi.buffer(offer)))


def open_offered(offer: bytes) -> SharedMemory:
    """Raises OSError."""
    if len(offer) != OFFER_BYTES:
        raise OSError(errno.EINVAL, "not an offer")
    return SharedMemory(_call(lambda made: lib.pccl_memory_open(offer, made)), offer)


def _call(function: Any) -> Any:
    if not number_of("PCCL_SHM", 1, 1):
        raise OSError(errno.EPERM, "PCCL_SHM is 0")
    made = ffi.new("pccl_memory **")
    status = function(made)
    if status != lib.PCCL_OK:
        number = ffi.errno if status == lib.PCCL_E_SYSTEM else errno.ENOMEM
        raise OSError(number, os.strerror(number))
    return made[0]
