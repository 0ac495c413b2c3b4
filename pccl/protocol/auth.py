"""Proof that both ends of a connection know the same token, without saying it.

Specification. All parties of a run share a token, a secret text. Whoever dials says what the connection is for
(`Hello`, `BeatHello`, `StatusRequest`, `LinkHello`, `StateHello`, `ProbeHello`) with a nonce of its own in `auth`; an
empty `auth` says that the dialer has no token. Then

    dialer -> acceptor   the opening, with the dialer's nonce
    acceptor -> dialer   Challenge: the acceptor's nonce, and the run
    dialer -> acceptor   Proof(HMAC(key, "pccl 1 dialer" | transcript))
    acceptor -> dialer   Proof(HMAC(key, "pccl 1 acceptor" | transcript)), and the answer to the opening

    HMAC        HMAC-SHA256
    payload     HMAC(key, "pccl 1 payload of the dialer" | transcript), or "... of the acceptor": the key of what that
                side sends on this connection, if payload is to be encrypted
    key         HMAC(token in UTF-8, "pccl 1 run key" | field(run in UTF-8)), so keys differ from run to run
    transcript  field(body of the opening) | field(body of the Challenge), the msgpack bodies as they travelled
    field(x)    the length of x as 8 bytes, big-endian, then x
    nonce       32 fresh random bytes

What follows from it. The transcript holds every byte that was said before the proofs: kind of connection, run, sender,
receiver and both nonces. A recorded handshake fails against a fresh nonce, a proof cannot be cut out for another
connection, and one that is sent back to its author fails by its label. The dialer proves first: who only listens for
dialers learns nothing to guess at, and who dials learns nothing before it has proved itself. A token should still be
random, not a word: who takes the acceptor's place can record one proof and try words against it.

What does not. Payload keys have no forward secrecy: who learns the token and has recorded a connection can read it. A
proof says who is at the other end when the connection begins. It neither hides nor protects what follows: for that
there are TLS to the master, payload keys between peers, or a VPN. Whether a link or a state transfer is to be encrypted
stands in its opening, so nobody on the way can talk the two ends out of it. A refusal needs no proof, so that those who
have different tokens hear of it; a peer of a run that looks for its master believes none, and with or without a token
only that of a master that knows the run (`Welcome.secret`).
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.codec import LENGTH_BYTES, ProtocolError, encode

Keys = tuple[bytes, bytes]
"""Of what this side sends on a connection and of what the other side sends."""

NONCE_BYTES = 32
DIALER = b"pccl 1 dialer"
ACCEPTOR = b"pccl 1 acceptor"
REMEDY = "give both sides the same token (token=, PCCL_TOKEN or `pccl master --token-file`)"


class AuthError(ProtocolError):
    """The other side has not shown who it is in the way that is asked for here, or we cannot."""


def run_key(token: str, run: str) -> bytes:
    return _hmac(token.encode(), b"pccl 1 run key" + _field(run.encode()))


def proof(key: bytes, role: bytes, opening: bytes, challenge: bytes) -> bytes:
    """What `role` (DIALER or ACCEPTOR) proves itself with, given the bodies of the opening and of the Challenge."""
    return _hmac(key, role + _field(opening) + _field(challenge))


def payload_key(key: bytes, role: bytes, opening: bytes, challenge: bytes) -> bytes:
    """What encrypts the payload that `role` sends on the connection with this handshake."""
    label = b"pccl 1 payload of the " + role.rpartition(b" ")[2]
    return _hmac(key, label + _field(opening) + _field(challenge))


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


class Dialer:
    """The dialer's side of one handshake. `run` is the run that must answer; None: the acceptor names it."""

    def __init__(self, token: str, nonce: bytes, opening: m.Opening, run: str | None) -> None:
        """`nonce` is NONCE_BYTES of fresh randomness. An empty `token`: there is none."""
        assert len(nonce) == NONCE_BYTES
        self._token = token
        self._run = run
        self.opening = encode(msgspec.structs.replace(opening, auth=nonce if token else b""))
        """The frame to send first."""
        self._expected = b""
        self.payload_keys: Keys | None = None
        """After `answer`; to be used after `check`. None without a token."""

    def answer(self, challenge: m.Challenge, body: bytes) -> bytes:
        """The frame that answers a Challenge. AuthError."""
        if not self._token:
            raise AuthError(f"it asks for a token and this side has none; {REMEDY}")
        if len(challenge.auth) != NONCE_BYTES:
            raise AuthError(f"its challenge has {len(challenge.auth)} bytes instead of {NONCE_BYTES}")
        if self._run is not None and challenge.run != self._run:
            raise AuthError(f"it belongs to run {challenge.run!r}, not {self._run!r}")
        self._run = challenge.run
        key = run_key(self._token, challenge.run)
        opening = self.opening[LENGTH_BYTES:]
        self._expected = proof(key, ACCEPTOR, opening, body)
        self.payload_keys = payload_key(key, DIALER, opening, body), payload_key(key, ACCEPTOR, opening, body)
        return encode(m.Proof(proof(key, DIALER, opening, body)))

    def check(self, theirs: m.Proof) -> None:
        """AuthError unless the acceptor knows the token."""
        if not self._expected or not hmac.compare_digest(self._expected, theirs.auth):
            raise AuthError("it does not know the token; somebody else answers at this address")

    def check_answer(self, answer: m.Message) -> None:
        """AuthError if an answer other than a refusal came where a proof was due."""
        if self._token and not isinstance(answer, m.Goodbye | m.Rejected):
            raise AuthError(f"it has no token and this side has one; {REMEDY}")


class Acceptor:
    """The acceptor's side of one handshake. `name` is what errors call it."""

    def __init__(self, token: str, nonce: bytes, run: str, name: str) -> None:
        assert len(nonce) == NONCE_BYTES
        self._name = name
        self._token = token
        self._nonce = nonce
        self._run = run
        self._expected = b""
        self._proof = b""
        self.payload_keys: Keys | None = None
        """After `challenge`; to be used after `check`. None without a token."""

    def challenge(self, opening: m.Opening, body: bytes) -> bytes | None:
        """The frame that answers an opening; None if neither side has a token. AuthError if one side has none."""
        if not self._token:
            if opening.auth:
                raise AuthError(f"the dialing peer has a token and {self._name} has none; {REMEDY}")
            return None
        if not opening.auth:
            raise AuthError(f"{self._name} has a token and the dialing peer has none; {REMEDY}")
        if len(opening.auth) != NONCE_BYTES:
            raise AuthError(f"a nonce of {len(opening.auth)} bytes instead of {NONCE_BYTES}")
        key = run_key(self._token, self._run)
        frame = encode(m.Challenge(self._nonce, self._run))
        ours = frame[LENGTH_BYTES:]
        self._expected = proof(key, DIALER, body, ours)
        self._proof = encode(m.Proof(proof(key, ACCEPTOR, body, ours)))
        self.payload_keys = payload_key(key, ACCEPTOR, body, ours), payload_key(key, DIALER, body, ours)
        return frame

    def check(self, theirs: m.Proof) -> bytes:
        """The frame that answers the dialer's proof. AuthError unless the dialer knows the token."""
        if not self._expected or not hmac.compare_digest(self._expected, theirs.auth):
            raise AuthError(f"the dialing peer has another token than {self._name}; {REMEDY}")
        return self._proof
