"""Encryption of connections between peers: whether there is any, and a socket that nobody but its other end can read
or write. The work is done by `pccl_records` of the extension (`native/src/records.h`), as on the engine's connections.
"""

from __future__ import annotations

from typing import Any

import trio

from pccl.protocol.auth import Keys
from pccl.runtime.extension import ffi, lib, text
from pccl.runtime.network.wire import ConnectionLost

UNREADABLE = "cannot be decrypted: changed on the way, or not from this peer"


def why_unavailable() -> str:
    """Return why there is no encryption here, naming what was looked for; empty if there is."""
    error = ffi.new("char[256]")
    return text(error) if lib.pccl_encryption_available(error, len(error)) != lib.PCCL_OK else ""


def link_keys(keys: Keys | None) -> Any:
    """Return the keys as the extension takes them."""
    return ffi.NULL if keys is None else ffi.new("pccl_link_keys *", keys)


class EncryptedStream:
    """A connected socket as a `wire.ByteStream`. After a cancelled `send` nothing more can be sent; a cancelled
    `recv_into` has taken nothing."""

    def __init__(self, sock: trio.socket.SocketType, keys: Keys) -> None:
        self._sock = sock
        made = ffi.new("pccl_records **")
        if lib.pccl_records_create(link_keys(keys), made) != lib.PCCL_OK:
            raise ConnectionLost(f"cannot be encrypted: {why_unavailable() or 'out of memory, or OpenSSL fails'}")
        self._records = ffi.gc(made[0], lib.pccl_records_free)
        self._at = ffi.new("uint8_t const **")
        self._size = ffi.new("size_t *")
        self._opened = memoryview(b"")
        """The part of the last record that has still to be handed out."""
        self._is_cut = False

    async def send(self, data: bytes | memoryview) -> int:
        """Send at least one byte of `data`, unless it is empty; return how many. OSError or ConnectionLost."""
        if self._is_cut:
            raise ConnectionLost("a message was cut off")
        encrypted: int = lib.pccl_records_encrypt(self._records, ffi.from_buffer(data), len(data))
        if data and not encrypted:
            raise ConnectionLost("OpenSSL cannot encrypt")
        self._is_cut = True
        while True:
            at = lib.pccl_records_out(self._records, self._size)
            if not self._size[0]:
                break
            lib.pccl_records_sent(self._records, await self._sock.send(ffi.buffer(at, self._size[0])))
        self._is_cut = False
        return encrypted

    async def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receive at least one byte; return how many, 0 at the end. OSError, or ConnectionLost if the other side has
        not encrypted this."""
        while not self._opened:
            status = lib.pccl_records_decrypt(self._records, self._at, self._size)
            if status < 0:
                raise ConnectionLost(UNREADABLE)
            if status > 0:
                self._opened = memoryview(ffi.buffer(self._at[0], self._size[0]))
                break
            at = lib.pccl_records_in(self._records, self._size)
            received = await self._sock.recv_into(memoryview(ffi.buffer(at, self._size[0])))
            if not received:
                return 0
            lib.pccl_records_received(self._records, received)
        count = min(len(self._opened), len(buffer))
        memoryview(buffer)[:count] = self._opened[:count]
        self._opened = self._opened[count:]
        return count

    def close(self) -> None:
        self._sock.close()
