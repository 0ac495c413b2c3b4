"""The handshake of every connection: X25519 key exchange, authentication (`protocol.auth`), and encrypted sockets.

The extension computes the key exchange with OpenSSL. Each handshake uses a new key pair and wipes it at the end.

`EncryptedStream` uses the extension's `pccl_records` (`native/src/records.h`), like the engine's connections.
"""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import trio

from pccl.protocol import auth
from pccl.protocol import messages as m
from pccl.protocol.auth import PUBLIC_KEY_BYTES, Keys
from pccl.protocol.codec import decode_body
from pccl.runtime.extension import ffi, lib, text
from pccl.runtime.network.wire import ConnectionLost

assert lib.PCCL_KEY_EXCHANGE_BYTES == PUBLIC_KEY_BYTES


class Exchange:
    """One side of a key exchange. Leaving its `with` block wipes the private key. Not thread-safe."""

    def __init__(self, private_key: bytes | None = None) -> None:
        """Create a key pair; `private_key` is for tests. Raises OSError if X25519 or memory is unavailable."""
        made = ffi.new("pccl_key_exchange **")
        public_key = ffi.new("uint8_t[]", PUBLIC_KEY_BYTES)
        status = lib.pccl_key_exchange_create(ffi.NULL if private_key is None else private_key, public_key, made)
        if status != lib.PCCL_OK:
            raise OSError("out of memory" if status == lib.PCCL_E_MEMORY else "OpenSSL 3 is missing or lacks X25519")
        self._exchange = ffi.gc(made[0], lib.pccl_key_exchange_free)
        self.public_key = bytes(ffi.buffer(public_key))

    def secret(self, theirs: bytes) -> bytearray:
        """Return the secret shared with the owner of a public key (`auth.KeyExchange`)."""
        assert len(theirs) == PUBLIC_KEY_BYTES
        secret = bytearray(PUBLIC_KEY_BYTES)
        if lib.pccl_key_exchange_secret(self._exchange, theirs, ffi.from_buffer("uint8_t[]", secret)) != lib.PCCL_OK:
            raise ValueError("no secret can be computed from the public key")
        return secret

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        ffi.release(self._exchange)


class Channel(Protocol):
    async def send_frame(self, frame: bytes) -> None: ...

    async def receive_body(self) -> bytes:
        """Return the body of one small message without consuming any data after it."""


def _exchange(token: str) -> AbstractContextManager[Exchange | None]:
    with suppress(OSError):
        return Exchange() if token else nullcontext()
    return nullcontext()


async def dial(channel: Channel, token: str, run: str | None, opening: m.Opening, answers: Any) -> Any:
    """Send `opening` and return the authenticated answer, which is in the union `answers`, or any refusal. `run` is as
    in `auth.Dialer`. Raises AuthError, ProtocolError or ConnectionLost."""
    return (await dial_keyed(channel, token, run, opening, answers)).answer


class Dialled(NamedTuple):
    answer: Any
    keys: auth.Keys | None
    """The connection's keys; None without a token or if one side lacks X25519. Never None if an opening that requests
    encryption was accepted."""
    is_proven: bool
    """Whether the other side has proved that it knows the token."""


async def dial_keyed(channel: Channel, token: str, run: str | None, opening: m.Opening, answers: Any) -> Dialled:
    with _exchange(token) as ours:
        side = auth.Dialer(token, secrets.token_bytes(auth.NONCE_BYTES), opening, run, ours)
        await channel.send_frame(side.opening)
        body = await channel.receive_body()
        answer = decode_body(body, m.Challenge | answers)
        proof = side.answer(answer, body) if isinstance(answer, m.Challenge) else None
    if proof is not None:
        await channel.send_frame(proof)
        answer = decode_body(await channel.receive_body(), m.Proof | answers)
        if isinstance(answer, m.Proof):
            side.check(answer)
            answer = decode_body(await channel.receive_body(), answers)
    side.check_answer(answer)
    return Dialled(answer, side.payload_keys, side.is_proven)


async def accept(
    channel: Channel, token: str, run: str, name: str, opening: m.Opening, body: bytes
) -> auth.Keys | None:
    """Return the connection's keys once both sides have proved that they know the token. Return None without a token,
    or if one side lacks X25519. `name` is as in `auth.Acceptor`. Raises AuthError, ProtocolError or ConnectionLost."""
    with _exchange(token) as ours:
        side = auth.Acceptor(token, secrets.token_bytes(auth.NONCE_BYTES), run, name, ours)
        challenge = side.challenge(opening, body)
        if challenge is not None:
            await channel.send_frame(challenge)
            await channel.send_frame(side.check(decode_body(await channel.receive_body(), m.Proof)))
        return side.payload_keys


UNREADABLE = "cannot be decrypted: changed in transit, or not from this peer"


def why_unavailable() -> str:
    error = ffi.new("char[256]")
    return text(error) if lib.pccl_encryption_available(error, len(error)) != lib.PCCL_OK else ""


def link_keys(keys: Keys | None) -> Any:
    return ffi.NULL if keys is None else ffi.new("pccl_link_keys *", keys)


class EncryptedStream:
    """An encrypted `wire.ByteStream` over a connected socket. After a cancelled `send`, no more can be sent; a
    cancelled `recv_into` consumes no data."""

    def __init__(self, sock: trio.socket.SocketType, keys: Keys) -> None:
        self._sock = sock
        made = ffi.new("pccl_records **")
        if lib.pccl_records_create(link_keys(keys), made) != lib.PCCL_OK:
            raise ConnectionLost(f"cannot be encrypted: {why_unavailable() or 'out of memory, or OpenSSL fails'}")
        self._records = ffi.gc(made[0], lib.pccl_records_free)
        self._at = ffi.new("uint8_t const **")
        self._size = ffi.new("size_t *")
        self._opened = memoryview(b"")
        """The unread part of the last record."""
        self._is_cut = False

    async def send(self, data: bytes | memoryview) -> int:
        """Send at least one byte unless `data` is empty. Return the number. Raises OSError or ConnectionLost."""
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
        """Receive at least one byte and return the number of bytes, or 0 at the end of the stream. Raises OSError, or
        ConnectionLost if decryption fails."""
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
