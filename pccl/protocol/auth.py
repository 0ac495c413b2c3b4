"""Authentication: both ends of a connection prove that they know the same token, and derive payload keys.

Specification. All parties of a run share a token, a secret text. The dialer's first message, the opening, names the
connection's purpose (`Hello`, `HeartbeatHello`, `StatusRequest`, `TraceRequest`, `LinkHello`, `StateHello`,
`ProbeHello`) and holds its share in `auth`, which is empty without a token. With a token, the messages are

    dialer -> acceptor   the opening, with the dialer's share
    acceptor -> dialer   Challenge: the acceptor's share, and the run
    dialer -> acceptor   Proof(expand("proof of the dialer"))
    acceptor -> dialer   Proof(expand("proof of the acceptor")), and the answer to the opening

    share       nonce | public key
    nonce       32 fresh random bytes
    public key  the 32-byte public key of an X25519 key pair (RFC 7748), made for this handshake; empty from a dialer
                without X25519, and from an acceptor that lacks X25519 or received no public key
    psk         HMAC-SHA256(token in UTF-8, "pccl 2 run key" | field(run in UTF-8)), so keys differ from run to run
    dh          X25519(own private key, the other side's public key); 32 zero bytes without public keys
    secret      HKDF-Extract(salt: psk, keying material: dh)
    transcript  SHA-256("pccl 2 transcript" | field(body of the opening) | field(body of the Challenge)), with the
                msgpack bodies as sent
    expand(x)   HKDF-Expand(secret, "pccl 2 " | x | transcript, 32 bytes)
    payload     expand("payload of the dialer"), or "... of the acceptor": the key that encrypts what that side sends on
                this connection, if payload is encrypted. Without public keys there is no such key
    HKDF        of RFC 5869, with SHA-256
    field(x)    the length of x as 8 bytes, big-endian, then x

TLS 1.3 combines a pre-shared key with a key exchange in the same way (RFC 8446, psk_dhe_ke); the proofs replace its
Finished messages.

Properties:

1. A proof requires the token (through `psk`) and, if public keys were exchanged, a private key.
2. The transcript covers every byte before the proofs: protocol, purpose, run, sender, receiver, encryption, nonces
   and public keys. So no part can be changed or removed in transit, and encryption cannot be downgraded.
3. A replayed handshake fails because the nonce is fresh. A handshake from another connection fails because the
   opening differs, and a reflected proof fails because its label differs.
4. Payload keys have forward secrecy: they depend on a private key that exists only in memory and is wiped after the
   handshake. A public key that makes `dh` zero is refused.
5. With X25519 at both ends, an eavesdropper cannot test guessed tokens. A false acceptor can, because the dialer sends
   its proof first. A token should therefore be random.

Limits. A proof authenticates only the start of a connection; TLS to the master, payload keys between peers, or a VPN
protect the rest. Any holder of the token can impersonate either end. Python's copies of payload keys are freed, but
not wiped. A refusal needs no proof, so that a peer with a different token still receives it. A peer that is searching
for its master accepts only a refusal that contains the run's secret (`Welcome.secret`).
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Protocol

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.codec import LENGTH_BYTES, ProtocolError, encode

Keys = tuple[bytes, bytes]

NONCE_BYTES = 32
PUBLIC_KEY_BYTES = 32
HASH_BYTES = 32
DIALER = b"dialer"
ACCEPTOR = b"acceptor"
REMEDY = "give both sides the same token (token=, PCCL_TOKEN or `pccl master --token-file`)"


class AuthError(ProtocolError):
    """Authentication failed at either end."""


class KeyExchange(Protocol):
    """One side of X25519 key exchanges, with its own private key."""

    @property
    def public_key(self) -> bytes: ...

    def secret(self, theirs: bytes) -> bytearray:
        """Return the secret that is shared with the owner of the public key `theirs` (PUBLIC_KEY_BYTES). The caller
        wipes it. Raises ValueError if it would be zero."""


def run_key(token: str, run: str) -> bytes:
    return _hmac(token.encode(), b"pccl 2 run key" + _field(run.encode()))


def hkdf_extract(salt: bytes, material: bytes | bytearray) -> bytes:
    return _hmac(salt, material)


def hkdf_expand(key: bytes, info: bytes, count: int) -> bytes:
    """HKDF-Expand of RFC 5869, section 2.3, with SHA-256: `count` bytes, at most 255 * HASH_BYTES."""
    assert 0 <= count <= 255 * HASH_BYTES
    block, found = b"", b""
    while len(found) < count:
        block = _hmac(key, block + info + bytes([len(found) // HASH_BYTES + 1]))
        found += block
    return found[:count]


class Schedule:
    """The proofs and payload keys that both ends of a connection derive from `psk`, `dh` and the transcript."""

    def __init__(self, psk: bytes, dh: bytes | bytearray, opening: bytes, challenge: bytes) -> None:
        """`opening` and `challenge` are the message bodies as sent. `dh` is empty if no public keys were exchanged."""
        self._has_payload_keys = bool(dh)
        self._secret = hkdf_extract(psk, dh or bytes(PUBLIC_KEY_BYTES))
        said = b"pccl 2 transcript" + _field(opening) + _field(challenge)
        self._transcript = hashlib.sha256(said).digest()

    def proof(self, role: bytes) -> bytes:
        return self._expand(b"proof of the " + role)

    def payload_keys(self, ours: bytes, theirs: bytes) -> Keys | None:
        """Return the payload keys of these two roles, or None without a key exchange, because such keys would lack
        forward secrecy."""
        if not self._has_payload_keys:
            return None
        return self._expand(b"payload of the " + ours), self._expand(b"payload of the " + theirs)

    def _expand(self, label: bytes) -> bytes:
        return hkdf_expand(self._secret, b"pccl 2 " + label + self._transcript, HASH_BYTES)


def _hmac(key: bytes, data: bytes | bytearray) -> bytes:
    return hmac.digest(key, data, "sha256")


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _schedule(psk: bytes, exchange: KeyExchange | None, theirs: bytes, opening: bytes, challenge: bytes) -> Schedule:
    """Return the schedule of a handshake. `theirs` is the other side's public key, empty if no keys are exchanged.
    Raises AuthError if that key is invalid."""
    if not theirs:
        return Schedule(psk, b"", opening, challenge)
    assert exchange is not None
    try:
        dh = exchange.secret(theirs)
    except ValueError as error:
        raise AuthError(f"its public key is refused: {error}") from None
    try:
        return Schedule(psk, dh, opening, challenge)
    finally:
        dh[:] = bytes(len(dh))


def _wants_encryption(opening: m.Opening) -> bool:
    return isinstance(opening, m.LinkHello | m.StateHello) and opening.encrypt


class Dialer:
    def __init__(
        self, token: str, nonce: bytes, opening: m.Opening, run: str | None, exchange: KeyExchange | None = None
    ) -> None:
        """`nonce` is NONCE_BYTES of fresh randomness. The acceptor must belong to `run`, or to any run if `run` is
        None. `token` is empty if this side has none; `exchange` is None if this side lacks X25519."""
        assert len(nonce) == NONCE_BYTES
        self._token = token
        self._run = run
        self._exchange = exchange if token else None
        self._must_encrypt = _wants_encryption(opening)
        self._public_key = b"" if self._exchange is None else self._exchange.public_key
        self.opening = encode(msgspec.structs.replace(opening, auth=nonce + self._public_key if token else b""))
        self._expected = b""
        self.is_proven = False
        self._payload_keys: Keys | None = None

    @property
    def payload_keys(self) -> Keys | None:
        """The payload keys, or None before `check` or without a key exchange."""
        return self._payload_keys if self.is_proven else None

    def answer(self, challenge: m.Challenge, body: bytes) -> bytes:
        """Return the frame that answers an opening, or None if neither side has a token. Raises AuthError if the dialer
        must be refused."""
        if not self._token:
            raise AuthError(f"it requires a token, but this side has none; {REMEDY}")
        theirs = challenge.auth[NONCE_BYTES:]
        if len(challenge.auth) < NONCE_BYTES or len(theirs) not in (0, len(self._public_key)):
            raise AuthError(f"its share is {len(challenge.auth)} bytes; expected a nonce, optionally with a public key")
        if self._run is not None and challenge.run != self._run:
            raise AuthError(f"it belongs to run {challenge.run!r}, not {self._run!r}")
        self._run = challenge.run
        psk = run_key(self._token, challenge.run)
        schedule = _schedule(psk, self._exchange, theirs, self.opening[LENGTH_BYTES:], body)
        self._expected = schedule.proof(ACCEPTOR)
        self._payload_keys = schedule.payload_keys(DIALER, ACCEPTOR)
        return encode(m.Proof(schedule.proof(DIALER)))

    def check(self, theirs: m.Proof) -> None:
        """Check the acceptor's proof. Raises AuthError unless the acceptor knows the token."""
        if not self._expected or not hmac.compare_digest(self._expected, theirs.auth):
            raise AuthError("it does not know the token; another service answers at this address")
        self.is_proven = True

    def check_answer(self, answer: m.Message) -> None:
        """Check that the answer to the opening may be sent now. Raises AuthError if a proof or key must come first; a
        refusal needs neither."""
        if isinstance(answer, m.Goodbye | m.Rejected):
            return
        if self._token and not self.is_proven:
            raise AuthError(f"it has no token, but this side has one; {REMEDY}")
        if self._must_encrypt and self.payload_keys is None:
            raise AuthError("it would accept unencrypted data, but this side encrypts")


class Acceptor:
    def __init__(self, token: str, nonce: bytes, run: str, name: str, exchange: KeyExchange | None = None) -> None:
        """`name` names this side in errors. `nonce` and `exchange` are as for `Dialer`."""
        assert len(nonce) == NONCE_BYTES
        self._name = name
        self._token = token
        self._nonce = nonce
        self._run = run
        self._exchange = exchange
        self._said: tuple[bytes, bytes, bytes] | None = None
        self.payload_keys: Keys | None = None

    def challenge(self, opening: m.Opening, body: bytes) -> bytes | None:
        """Return the frame that answers an opening, or None if neither side has a token. Raises AuthError if the dialer
        cannot be admitted."""
        if not self._token:
            if opening.auth:
                raise AuthError(f"the dialing peer has a token, but {self._name} has none; {REMEDY}")
            return None
        if not opening.auth:
            raise AuthError(f"{self._name} has a token, but the dialing peer has none; {REMEDY}")
        if opening.protocol != m.PROTOCOL_VERSION:
            raise AuthError(
                f"{self._name} speaks protocol {m.PROTOCOL_VERSION}, the dialing peer {opening.protocol}; install the "
                f"same version of pccl on all machines"
            )
        theirs = opening.auth[NONCE_BYTES:]
        if len(opening.auth) < NONCE_BYTES or len(theirs) not in (0, PUBLIC_KEY_BYTES):
            raise AuthError(f"its share is {len(opening.auth)} bytes; expected a nonce, optionally with a public key")
        if _wants_encryption(opening) and not theirs:
            raise AuthError("encryption is requested without a public key to derive keys from")
        ours = b""
        if theirs and self._exchange is not None:
            ours = self._exchange.public_key
        frame = encode(m.Challenge(self._nonce + ours, self._run))
        self._said = theirs if ours else b"", body, frame[LENGTH_BYTES:]
        return frame

    def check(self, theirs: m.Proof) -> bytes:
        """Return the frame that answers the dialer's proof. Raises AuthError unless the dialer knows the token."""
        if self._said is None:
            raise AuthError("the dialing peer sent a proof before it was challenged")
        public_key, opening, challenge = self._said
        self._said = None
        schedule = _schedule(run_key(self._token, self._run), self._exchange, public_key, opening, challenge)
        if not hmac.compare_digest(schedule.proof(DIALER), theirs.auth):
            raise AuthError(f"the dialing peer has a different token than {self._name}; {REMEDY}")
        self.payload_keys = schedule.payload_keys(ACCEPTOR, DIALER)
        return encode(m.Proof(schedule.proof(ACCEPTOR)))
