"""Key exchange over X25519 for the handshakes of `protocol.auth`, done by OpenSSL through the extension.

A process that joins a run has some handshakes with each of the others, all within a moment. So a key pair serves all
handshakes that begin within LIFE_S, in one trio run, and remembers the secrets that it has made:

1. A task of the trio run ends that life; it does so as well when the run ends.
2. The private key and all secrets are wiped when it has ended and the last handshake that began in it is over. Each of
   these is bounded in time.
3. A forked child wipes its copies, but for what another thread is computing with at that moment.
"""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext

import trio

from pccl.protocol.auth import PUBLIC_KEY_BYTES
from pccl.runtime.extension import ffi, lib

LIFE_S = 10.0

assert lib.PCCL_KEY_EXCHANGE_BYTES == PUBLIC_KEY_BYTES


class Exchange:
    """One side of a key exchange, with a private key that `close` wipes. Not thread-safe."""

    def __init__(self, private_key: bytes | None = None) -> None:
        """Make a key pair; `private_key` is for tests. OSError if there is no X25519 here, or no memory for it."""
        made = ffi.new("pccl_key_exchange **")
        public_key = ffi.new("uint8_t[]", PUBLIC_KEY_BYTES)
        status = lib.pccl_key_exchange_create(ffi.NULL if private_key is None else private_key, public_key, made)
        if status != lib.PCCL_OK:
            raise OSError("out of memory" if status == lib.PCCL_E_MEMORY else "OpenSSL 3 is missing, or without X25519")
        self._exchange = ffi.gc(made[0], lib.pccl_key_exchange_free)
        self.is_closed = False
        self.public_key = bytes(ffi.buffer(public_key))
        _exchanges.add(self)

    def secret(self, theirs: bytes) -> bytearray:
        """Return the secret shared with the owner of a public key, as `auth.KeyExchange`."""
        assert len(theirs) == PUBLIC_KEY_BYTES
        assert not self.is_closed
        secret = bytearray(PUBLIC_KEY_BYTES)
        if lib.pccl_key_exchange_secret(self._exchange, theirs, ffi.from_buffer("uint8_t[]", secret)) != lib.PCCL_OK:
            raise ValueError("the public key makes no secret")
        return secret

    def close(self) -> None:
        """Wipe the private key and all secrets. May be called again; `secret` may not be called after it."""
        self.is_closed = True
        ffi.release(self._exchange)


class _Shared:
    """An exchange that several handshakes use, wiped after the last of them."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._users = 1
        """Handshakes under way, and one more until the exchange's life has ended."""

    def __enter__(self) -> Exchange:
        self._users += 1
        return self._exchange

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._exchange.close()


_present: trio.lowlevel.RunVar[_Shared | None] = trio.lowlevel.RunVar("pccl_key_exchange", None)


def shared() -> AbstractContextManager[Exchange | None]:
    """Return the present exchange of this trio run, to be entered by one handshake. None if none can be made."""
    present = _present.get()
    if present is None:
        try:
            present = _Shared(Exchange())
        except OSError:
            return nullcontext()
        trio.lowlevel.spawn_system_task(_live, present)
        _present.set(present)
    return present


async def _live(shared: _Shared) -> None:
    try:
        await trio.sleep(LIFE_S)
    finally:
        _present.set(None)
        shared.leave()


_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for exchange in list(_exchanges):
        exchange.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
