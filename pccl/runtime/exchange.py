"""Key exchange over X25519 for handshakes: what `protocol.auth` wants of one, done by OpenSSL through the extension."""

from __future__ import annotations

from pccl.protocol.auth import PUBLIC_KEY_BYTES
from pccl.runtime.extension import ffi, lib

assert lib.PCCL_EXCHANGE_BYTES == PUBLIC_KEY_BYTES


class Exchange:
    """One side, with a fresh private key that is wiped once it has served, or with `close`. Not thread-safe."""

    def __init__(self, private_key: bytes | None = None) -> None:
        """`private_key` is for tests. OSError if there is no X25519 here, or no memory for it."""
        made = ffi.new("pccl_exchange **")
        public_key = ffi.new("uint8_t[]", PUBLIC_KEY_BYTES)
        status = lib.pccl_exchange_create(ffi.NULL if private_key is None else private_key, public_key, made)
        if status != lib.PCCL_OK:
            raise OSError("out of memory" if status == lib.PCCL_E_MEMORY else "OpenSSL 3 is missing, or without X25519")
        self._exchange = ffi.gc(made[0], lib.pccl_exchange_free)
        self._is_closed = False
        self.public_key = bytes(ffi.buffer(public_key))

    def secret(self, theirs: bytes) -> bytearray:
        """As of `auth.KeyExchange`."""
        assert len(theirs) == PUBLIC_KEY_BYTES
        assert not self._is_closed
        secret = bytearray(PUBLIC_KEY_BYTES)
        status = lib.pccl_exchange_secret(self._exchange, theirs, ffi.from_buffer("uint8_t[]", secret))
        assert status != lib.PCCL_E_INVALID, "an exchange serves once"
        if status != lib.PCCL_OK:
            raise ValueError("it makes no secret")
        return secret

    def close(self) -> None:
        """Wipes the private key. May be called again; `secret` may not be called after it."""
        self._is_closed = True
        ffi.release(self._exchange)


def new_exchange() -> Exchange | None:
    """None if none can be made."""
    try:
        return Exchange()
    except OSError:
        return None
