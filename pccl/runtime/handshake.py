"""The first words on every connection, up to and without the answer to its opening: see `protocol.auth`."""

from __future__ import annotations

import secrets
from typing import Any, Protocol

from pccl.protocol import auth
from pccl.protocol import messages as m
from pccl.protocol.codec import decode_body


class Channel(Protocol):
    """What a handshake needs of a connection."""

    async def send_frame(self, frame: bytes) -> None: ...

    async def receive_body(self) -> bytes:
        """The body of one small message; whatever follows it stays where it is."""


async def dial(channel: Channel, token: str, run: str | None, opening: m.Opening, answers: Any) -> Any:
    """Says `opening` and returns the answer to it, of the union `answers`, from one who knows the token, or a refusal
    from anybody. AuthError, ProtocolError or ConnectionLost. `run` as of `auth.Dialer`."""
    return (await dial_keyed(channel, token, run, opening, answers))[0]


async def dial_keyed(
    channel: Channel, token: str, run: str | None, opening: m.Opening, answers: Any
) -> tuple[Any, auth.Keys | None]:
    """As `dial`, with the keys for what follows; None without a token."""
    side = auth.Dialer(token, secrets.token_bytes(auth.NONCE_BYTES), opening, run)
    await channel.send_frame(side.opening)
    body = await channel.receive_body()
    answer = decode_body(body, m.Challenge | answers)
    if isinstance(answer, m.Challenge):
        await channel.send_frame(side.answer(answer, body))
        answer = decode_body(await channel.receive_body(), m.Proof | answers)
        if isinstance(answer, m.Proof):
            side.check(answer)
            return decode_body(await channel.receive_body(), answers), side.payload_keys
    side.check_answer(answer)
    return answer, None


async def accept(
    channel: Channel, token: str, run: str, name: str, opening: m.Opening, body: bytes
) -> auth.Keys | None:
    """Returns once whoever said `opening` (in `body`) has shown that it knows the token, and we have: the keys for what
    follows, None without a token. AuthError, ProtocolError or ConnectionLost. `name` as of `auth.Acceptor`."""
    side = auth.Acceptor(token, secrets.token_bytes(auth.NONCE_BYTES), run, name)
    challenge = side.challenge(opening, body)
    if challenge is not None:
        await channel.send_frame(challenge)
        await channel.send_frame(side.check(decode_body(await channel.receive_body(), m.Proof)))
    return side.payload_keys
