"""The first words on every connection, up to and without the answer to its opening: see `protocol.auth`."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from pccl.protocol import auth
from pccl.protocol import messages as m
from pccl.protocol.codec import decode_body
from pccl.runtime.network import key_exchange


class Channel(Protocol):
    """A connection, as a handshake needs it."""

    async def send_frame(self, frame: bytes) -> None: ...

    async def receive_body(self) -> bytes:
        """Return the body of one small message; whatever follows it stays where it is."""


def _exchange(token: str) -> AbstractContextManager[key_exchange.Exchange | None]:
    """Return the key exchange of one handshake, open until the handshake has made its secret or ends."""
    return key_exchange.shared() if token else nullcontext()


async def dial(channel: Channel, token: str, run: str | None, opening: m.Opening, answers: Any) -> Any:
    """Say `opening` and return the answer to it, of the union `answers`, from somebody who knows the token, or a
    refusal from anybody. AuthError, ProtocolError or ConnectionLost. `run` is as in `auth.Dialer`."""
    return (await dial_keyed(channel, token, run, opening, answers)).answer


class Dialled(NamedTuple):
    """The result of `dial_keyed`."""

    answer: Any
    keys: auth.Keys | None
    """Keys for what follows on the connection. None without a token or where one side has no X25519, but never where an
    opening that asks for encryption was accepted."""
    is_proven: bool
    """The other side has proved that it knows the token. False without a token, and for a refusal that needed no
    proof."""


async def dial_keyed(channel: Channel, token: str, run: str | None, opening: m.Opening, answers: Any) -> Dialled:
    """Do as `dial`, and return the keys besides the answer."""
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
    """Return the keys for what follows once the sender of `opening` (in `body`) has proved that it knows the token, and
    this side has. None without a token or where one side has no X25519. AuthError, ProtocolError or ConnectionLost.
    `name` is as in `auth.Acceptor`."""
    with _exchange(token) as ours:
        side = auth.Acceptor(token, secrets.token_bytes(auth.NONCE_BYTES), run, name, ours)
        challenge = side.challenge(opening, body)
        if challenge is not None:
            await channel.send_frame(challenge)
            await channel.send_frame(side.check(decode_body(await channel.receive_body(), m.Proof)))
        return side.payload_keys
