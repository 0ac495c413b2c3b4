"""The handshake: vectors computed without pccl, and what an attacker who records, reflects or mixes would try."""

from __future__ import annotations

import hashlib
import hmac
from itertools import product

import msgspec
import pytest

from pccl.protocol import messages as m
from pccl.protocol.auth import (
    ACCEPTOR,
    DIALER,
    NONCE_BYTES,
    PUBLIC_KEY_BYTES,
    Acceptor,
    AuthError,
    Dialer,
    Schedule,
    hkdf_expand,
    hkdf_extract,
    run_key,
)
from pccl.protocol.codec import LENGTH_BYTES, ProtocolError, decode_body, encode
from pccl.runtime.network.handshake import Exchange

TOKEN = "correct horse battery staple"
HELLO = m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 1)
LINK = m.LinkHello(m.PROTOCOL_VERSION, "run", 2, 1, 7, 0, 1)
SEALED_LINK = msgspec.structs.replace(LINK, encrypt=True)
SHARE_BYTES = NONCE_BYTES + PUBLIC_KEY_BYTES

# Made with OpenSSL's command line, put together as the specification in auth.py says:
# printf DATA | openssl dgst -sha256 -mac HMAC -macopt hexkey:KEY
# openssl kdf -keylen 32 -kdfopt digest:SHA256 -kdfopt mode:EXPAND_ONLY -kdfopt hexkey:SECRET -kdfopt hexinfo:INFO HKDF
VECTORS = [
    (
        (TOKEN, "0123456789abcdef", b"opening", b"challenge"),
        "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742",
        "ba95b4d2754dc79ac26f103bae11c69f46d83844f3db42aaaf6e36355d6f537e",
        (
            "a659d62a7ac803716d602f4afb201df0cb184f1a4b2fa8d628079fe2a1af7f99",
            "57cdd62a44fded4a73e89574c059eb9ba3fa7cce129fcd55028dd001f84912f4",
        ),
        (
            "549ff16c8f61b9835e7a6e4b9270d32fe3db0d9f5405dcdc8d57bbeb1950a6ce",
            "0fc7b0f7b90ff55b147629de4a98063277f624390d3c556b7f144b52be673098",
        ),
    ),
    (
        ("\u00fc", "", b"", b"\0" * 300),
        "",
        "78e644bee624e7d9965f10df1a9a707a7064f1242699bd9f3e2f89f71e3f213e",
        (
            "a6130e7fbbc0d66a707db0f86b52f93cf275f788d2d1412a3cf33a684ee847cf",
            "a542c2c25cf9d75fbfbd610ac6ed9c082d0d1519f53c63eaf01744aa1ba4bb17",
        ),
        None,
    ),
]

# RFC 5869, A.1 to A.3: keying material, salt, info, extracted key, expanded bytes.
HKDF_VECTORS = [
    (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        "0b" * 22,
        "",
        "",
        "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]


def body(frame: bytes) -> bytes:
    return frame[LENGTH_BYTES:]


def read(frame: bytes) -> m.Message:
    message: m.Message = decode_body(body(frame), m.Challenge | m.Proof | m.Opening)  # type: ignore[operator]
    return message


class Handshake:
    """One handshake in memory; what was said stays to be looked at."""

    def __init__(
        self,
        dialer_token: str = TOKEN,
        acceptor_token: str = TOKEN,
        opening: m.Opening = LINK,
        nonces: tuple[bytes, bytes] = (b"d" * NONCE_BYTES, b"a" * NONCE_BYTES),
        run: str = "run",
        private_keys: tuple[bytes | None, bytes | None] = (b"D" * 32, b"A" * 32),
    ) -> None:
        """A side without a private key has no X25519."""
        exchanges = [None if key is None else Exchange(key) for key in private_keys]
        self.dialer = Dialer(dialer_token, nonces[0], opening, "run", exchanges[0])
        self.acceptor = Acceptor(acceptor_token, nonces[1], run, "peer 1", exchanges[1])

    def complete(self) -> list[bytes]:
        """All frames."""
        frames = [self.dialer.opening, self.challenge()]
        frames.append(self.answer(frames[-1]))
        frames.append(self.accept(frames[-1]))
        self.finish(frames[-1])
        return frames

    def challenge(self, opening: bytes | None = None) -> bytes:
        said = self.dialer.opening if opening is None else opening
        hello = read(said)
        assert isinstance(hello, m.Opening)
        frame = self.acceptor.challenge(hello, body(said))
        assert frame is not None
        return frame

    def answer(self, challenge: bytes) -> bytes:
        message = read(challenge)
        assert isinstance(message, m.Challenge)
        return self.dialer.answer(message, body(challenge))

    def accept(self, answer: bytes) -> bytes:
        message = read(answer)
        assert isinstance(message, m.Proof)
        return self.acceptor.check(message)

    def finish(self, theirs: bytes) -> None:
        message = read(theirs)
        assert isinstance(message, m.Proof)
        self.dialer.check(message)


@pytest.mark.parametrize(("said", "dh", "psk", "proofs", "payload_keys"), VECTORS)
def test_proof_vectors(
    said: tuple[str, str, bytes, bytes],
    dh: str,
    psk: str,
    proofs: tuple[str, str],
    payload_keys: tuple[str, str] | None,
) -> None:
    token, run, opening, challenge = said
    assert run_key(token, run).hex() == psk
    schedule = Schedule(bytes.fromhex(psk), bytes.fromhex(dh), opening, challenge)
    assert tuple(schedule.proof(role).hex() for role in (DIALER, ACCEPTOR)) == proofs
    found = schedule.payload_keys(DIALER, ACCEPTOR)
    assert (found and tuple(key.hex() for key in found)) == payload_keys


@pytest.mark.parametrize(("material", "salt", "info", "extracted", "expanded"), HKDF_VECTORS)
def test_hkdf_vectors(material: str, salt: str, info: str, extracted: str, expanded: str) -> None:
    key = hkdf_extract(bytes.fromhex(salt), bytes.fromhex(material))
    assert key.hex() == extracted
    assert hkdf_expand(key, bytes.fromhex(info), len(expanded) // 2).hex() == expanded


def test_x25519_vectors() -> None:
    """RFC 7748, 6.1."""
    alice = Exchange(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    bob = Exchange(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert alice.public_key.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public_key.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    secrets = alice.secret(bob.public_key), bob.secret(alice.public_key)
    assert secrets[0].hex() == secrets[1].hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


def test_each_exchange_has_a_key_pair_of_its_own() -> None:
    with Exchange() as ours, Exchange() as theirs:
        secret = ours.secret(theirs.public_key)
        assert ours.secret(theirs.public_key) == secret == theirs.secret(ours.public_key)
        assert ours.public_key != theirs.public_key


KINDS = [
    HELLO,
    LINK,
    SEALED_LINK,
    m.Resume(m.PROTOCOL_VERSION, "run", 1, 1),
    m.StateHello(m.PROTOCOL_VERSION, "run", 2, 1, 9),
    m.ProbeHello(m.PROTOCOL_VERSION, "run", 2, 1, False),
]


@pytest.mark.parametrize("opening", KINDS)
def test_same_token_passes(opening: m.Opening) -> None:
    shake = Handshake(opening=opening)
    frames = shake.complete()
    assert read(frames[0]) == msgspec.structs.replace(opening, auth=b"d" * NONCE_BYTES + Exchange(b"D" * 32).public_key)
    for secret in (TOKEN.encode(), run_key(TOKEN, "run"), b"D" * 32, b"A" * 32):
        assert all(secret not in frame for frame in frames)
    shake.dialer.check_answer(m.Accepted())


@pytest.mark.parametrize("private_keys", [(None, b"A" * 32), (b"D" * 32, None), (None, None)])
def test_token_passes_without_x25519(private_keys: tuple[bytes | None, bytes | None]) -> None:
    """There are no payload keys where one side has no X25519."""
    shake = Handshake(private_keys=private_keys)
    shake.complete()
    shake.dialer.check_answer(m.Accepted())
    assert shake.dialer.payload_keys is None
    assert shake.acceptor.payload_keys is None
    shake = Handshake("mine", "yours", private_keys=private_keys)
    answer = shake.answer(shake.challenge())
    with pytest.raises(AuthError, match="a different token"):
        shake.accept(answer)


def test_no_encryption_without_key_exchange() -> None:
    with pytest.raises(AuthError, match="without a public key"):
        Handshake(opening=SEALED_LINK, private_keys=(None, b"A" * 32)).challenge()
    shake = Handshake(opening=SEALED_LINK, private_keys=(b"D" * 32, None))
    shake.complete()
    shake.dialer.check_answer(m.Rejected("peer 2 encrypts and peer 1 does not"))
    with pytest.raises(AuthError, match="would accept unencrypted data, but this side encrypts"):
        shake.dialer.check_answer(m.Accepted())


def test_no_handshake_without_token() -> None:
    shake = Handshake("", "")
    assert read(shake.dialer.opening) == LINK
    assert shake.acceptor.challenge(LINK, b"") is None
    shake.dialer.check_answer(m.Accepted())


def test_wrong_token_is_refused() -> None:
    shake = Handshake("mine", "yours")
    challenge = shake.challenge()
    with pytest.raises(AuthError, match="a different token than peer 1"):
        shake.accept(shake.answer(challenge))
    dh = Exchange(b"A" * 32).secret(Exchange(b"D" * 32).public_key)
    schedule = Schedule(run_key("yours", "run"), dh, body(shake.dialer.opening), body(challenge))
    with pytest.raises(AuthError, match="does not know the token"):
        shake.dialer.check(m.Proof(schedule.proof(ACCEPTOR)))


def test_missing_token_is_named() -> None:
    with pytest.raises(AuthError, match="peer 1 has a token, but the dialing peer has none"):
        Handshake("", TOKEN).challenge()
    with pytest.raises(AuthError, match="the dialing peer has a token, but peer 1 has none"):
        Handshake(TOKEN, "").challenge()
    with pytest.raises(AuthError, match="this side has none"):
        Handshake("", TOKEN).answer(Handshake().challenge())
    with pytest.raises(AuthError, match="it has no token"):
        Handshake(TOKEN, "").dialer.check_answer(m.Accepted())
    Handshake(TOKEN, "").dialer.check_answer(m.Rejected("full"))
    Handshake(TOKEN, "").dialer.check_answer(m.Goodbye(1, "full"))


def test_replayed_handshake_is_refused() -> None:
    recorded = Handshake()
    opening = recorded.dialer.opening
    answer = recorded.answer(recorded.challenge())
    replayed = Handshake(nonces=(b"d" * NONCE_BYTES, b"b" * NONCE_BYTES))
    replayed.challenge(opening)
    with pytest.raises(AuthError):
        replayed.accept(answer)


def test_replayed_acceptor_is_refused() -> None:
    recorded = Handshake()
    challenge = recorded.challenge()
    theirs = recorded.accept(recorded.answer(challenge))
    fresh = Handshake(nonces=(b"e" * NONCE_BYTES, b"a" * NONCE_BYTES))
    fresh.answer(challenge)
    with pytest.raises(AuthError):
        fresh.finish(theirs)


def test_reflected_proof_is_refused() -> None:
    shake = Handshake()
    answer = shake.answer(shake.challenge())
    with pytest.raises(AuthError, match="does not know the token"):
        shake.finish(answer)


@pytest.mark.parametrize(
    "other",
    [
        m.LinkHello(m.PROTOCOL_VERSION, "run", 3, 1, 7, 0, 1),
        m.LinkHello(m.PROTOCOL_VERSION, "run", 2, 4, 7, 0, 1),
        m.LinkHello(m.PROTOCOL_VERSION, "run", 2, 1, 8, 0, 1),
        m.StateHello(m.PROTOCOL_VERSION, "run", 2, 1, 7),
        SEALED_LINK,
        HELLO,
    ],
)
def test_proof_for_other_opening_is_refused(other: m.Opening) -> None:
    """A man in the middle changes the opening and passes on everything else."""
    shake = Handshake()
    changed = Handshake(opening=other).dialer.opening
    with pytest.raises(AuthError):
        shake.accept(shake.answer(shake.challenge(changed)))


def test_proof_for_other_run_is_refused() -> None:
    assert run_key(TOKEN, "run") != run_key(TOKEN, "run2")
    with pytest.raises(AuthError, match="'elsewhere', not 'run'"):
        Handshake().answer(Handshake(run="elsewhere").challenge())


def test_proof_before_challenge_is_refused() -> None:
    for check in (Handshake().acceptor.check, Handshake().dialer.check):
        with pytest.raises(AuthError):
            check(m.Proof(b""))


def test_challenge_takes_one_proof() -> None:
    """Who has guessed wrong, or has got through, needs a fresh nonce to try again."""
    shake = Handshake()
    answer = shake.answer(shake.challenge())
    with pytest.raises(AuthError, match="a different token"):
        shake.acceptor.check(m.Proof(b"a guess"))
    with pytest.raises(AuthError, match="before it was challenged"):
        shake.accept(answer)
    shake = Handshake()
    answer = shake.answer(shake.challenge())
    shake.accept(answer)
    with pytest.raises(AuthError, match="before it was challenged"):
        shake.accept(answer)


def test_shared_secret_is_wiped() -> None:
    made: list[bytearray] = []

    class Watched:
        def __init__(self, key: bytes) -> None:
            self._exchange = Exchange(key)
            self.public_key = self._exchange.public_key

        def secret(self, theirs: bytes) -> bytearray:
            made.append(self._exchange.secret(theirs))
            assert any(made[-1])
            return made[-1]

    shake = Handshake()
    shake.dialer = Dialer(TOKEN, b"d" * NONCE_BYTES, SEALED_LINK, "run", Watched(b"D" * 32))
    shake.acceptor = Acceptor(TOKEN, b"a" * NONCE_BYTES, "run", "peer 1", Watched(b"A" * 32))
    shake.complete()
    assert made == [bytearray(32)] * 2


@pytest.mark.parametrize("count", [1, NONCE_BYTES - 1, NONCE_BYTES + 1, SHARE_BYTES - 1, SHARE_BYTES + 1])
def test_share_length_is_checked(count: int) -> None:
    auth = b"x" * count
    with pytest.raises(AuthError, match=f"{count} bytes"):
        Handshake().acceptor.challenge(msgspec.structs.replace(LINK, auth=auth), b"")
    with pytest.raises(AuthError, match=f"{count} bytes"):
        Handshake().dialer.answer(m.Challenge(auth, "run"), b"")


def test_unrequested_key_is_refused() -> None:
    with pytest.raises(AuthError, match=f"{SHARE_BYTES} bytes"):
        Handshake(private_keys=(None, None)).dialer.answer(m.Challenge(b"x" * SHARE_BYTES, "run"), b"")


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31), (2**255 - 19).to_bytes(32, "little")])
def test_zero_shared_secret_is_refused(point: bytes) -> None:
    """Whatever the private key, the secret would be zero: known to all."""
    with pytest.raises(AuthError, match="public key is refused"):
        Handshake().dialer.answer(m.Challenge(b"x" * NONCE_BYTES + point, "run"), b"")
    shake = Handshake()
    opening = msgspec.structs.replace(LINK, auth=b"x" * NONCE_BYTES + point)
    shake.acceptor.challenge(opening, b"")
    with pytest.raises(AuthError, match="public key is refused"):
        shake.acceptor.check(m.Proof(b"p" * 32))


@pytest.mark.parametrize(("auth", "protocol"), [(b"x" * NONCE_BYTES, 10), (b"x" * SHARE_BYTES, m.PROTOCOL_VERSION + 1)])
def test_version_is_checked_before_token(auth: bytes, protocol: int) -> None:
    other = msgspec.structs.replace(LINK, auth=auth, protocol=protocol)
    with pytest.raises(AuthError, match=f"peer 1 speaks protocol {m.PROTOCOL_VERSION}, the dialing peer {protocol}"):
        Handshake().acceptor.challenge(other, b"")


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("has_x25519", [False, True])
def test_any_changed_byte_is_detected(which: int, has_x25519: bool) -> None:
    """One side or the other finds it: as a message that cannot be, or as a proof that fails."""
    opening = SEALED_LINK if has_x25519 else LINK
    private_keys = (b"D" * 32, b"A" * 32) if has_x25519 else (None, None)
    count = len(body(Handshake(opening=opening, private_keys=private_keys).complete()[which]))
    for position, change in product(range(LENGTH_BYTES, LENGTH_BYTES + count), (0x01, 0x80, 0xFF)):
        shake = Handshake(opening=opening, private_keys=private_keys)

        def pass_on(frame: bytes, number: int, position: int = position, change: int = change) -> bytes:
            if number != which:
                return frame
            changed = bytearray(frame)
            changed[position] ^= change
            return bytes(changed)

        def converse(shake: Handshake = shake) -> None:
            frame = pass_on(shake.dialer.opening, 0)
            for number, step in enumerate([shake.challenge, shake.answer, shake.accept], 1):
                frame = pass_on(step(frame), number)
            shake.finish(frame)

        with pytest.raises((AssertionError, ProtocolError)):
            converse()
        assert shake.dialer.payload_keys is None


def strip_keys(frame: bytes) -> bytes:
    """Change an opening or a Challenge as a man in the middle does who wants no key exchange."""
    message = read(frame)
    assert isinstance(message, m.Opening | m.Challenge)
    return encode(msgspec.structs.replace(message, auth=message.auth[:NONCE_BYTES]))


def test_key_exchange_cannot_be_stripped() -> None:
    for is_opening, is_challenge in ((True, False), (True, True), (False, True)):
        shake = Handshake()
        challenge = shake.challenge(strip_keys(shake.dialer.opening) if is_opening else None)
        answer = shake.answer(strip_keys(challenge) if is_challenge else challenge)
        with pytest.raises(AuthError):
            shake.accept(answer)


def test_payload_keys_match_and_differ_by_connection() -> None:
    """Not even one with the same nonces and one key pair of two."""
    found: set[bytes] = set()
    for private_keys in ((b"D" * 32, b"A" * 32), (b"E" * 32, b"A" * 32), (b"D" * 32, b"B" * 32)):
        shake = Handshake(private_keys=private_keys)
        answer = shake.answer(shake.challenge())
        assert shake.dialer.payload_keys is None
        assert shake.acceptor.payload_keys is None
        shake.finish(shake.accept(answer))
        assert shake.dialer.payload_keys is not None
        assert shake.dialer.payload_keys == (shake.acceptor.payload_keys or ())[::-1]
        found.update(shake.dialer.payload_keys)
    assert len(found) == 6


def mac(key: bytes, *fields: bytes) -> bytes:
    return hmac.new(key, b"".join(len(field).to_bytes(8, "big") + field for field in fields), hashlib.sha256).digest()


def keys_of_a_recording(token: str, frames: list[bytes], dhs: list[bytes]) -> set[bytes]:
    """All payload keys that these secrets make of a recorded handshake."""
    psk = run_key(token, "run")
    found = {mac(psk, body(frames[0]), body(frames[1]))}
    for dh in dhs:
        found.update(Schedule(psk, dh, body(frames[0]), body(frames[1])).payload_keys(DIALER, ACCEPTOR) or ())
    return found


def test_payload_keys_have_forward_secrecy() -> None:
    """A private key is needed as well."""
    shake = Handshake(opening=SEALED_LINK)
    frames = shake.complete()
    assert shake.dialer.payload_keys is not None
    keys = set(shake.dialer.payload_keys)
    opening, challenge = read(frames[0]), read(frames[1])
    assert isinstance(opening, m.LinkHello)
    assert isinstance(challenge, m.Challenge)
    public_keys = [opening.auth[NONCE_BYTES:], challenge.auth[NONCE_BYTES:]]
    psk = run_key(TOKEN, "run")
    guesses = [bytes(32), psk, opening.auth[:NONCE_BYTES], challenge.auth[:NONCE_BYTES], *public_keys]
    guesses += [bytes(Exchange(guess).secret(public)) for guess, public in product(guesses, public_keys) if any(guess)]
    assert not keys & keys_of_a_recording(TOKEN, frames, guesses)
    dh = bytes(Exchange(b"A" * 32).secret(public_keys[0]))
    assert keys <= keys_of_a_recording(TOKEN, frames, [dh])
    assert not keys & keys_of_a_recording("another", frames, [dh])


def test_eavesdropper_cannot_guess_token() -> None:
    """The proofs need a private key as well."""
    frames = Handshake(TOKEN, TOKEN).complete()
    said = body(frames[0]), body(frames[1])
    proofs = [read(frame) for frame in frames[2:]]
    psk = run_key(TOKEN, "run")
    for dh, is_found in ((b"", False), (bytes(Exchange(b"D" * 32).secret(Exchange(b"A" * 32).public_key)), True)):
        schedule = Schedule(psk, dh, *said)
        assert ([m.Proof(schedule.proof(role)) for role in (DIALER, ACCEPTOR)] == proofs) is is_found
