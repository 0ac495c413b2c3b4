"""The handshake: vectors computed without pccl, and what an attacker who records, reflects or mixes would try."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol.auth import ACCEPTOR, DIALER, NONCE_BYTES, Acceptor, AuthError, Dialer, payload_key, proof, run_key
from pccl.protocol.codec import LENGTH_BYTES, ProtocolError, decode_body

TOKEN = "correct horse battery staple"
HELLO = m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 1)
LINK = m.LinkHello(m.PROTOCOL_VERSION, "run", 2, 1, 7, 0, 1)

# printf '%s' DATA | openssl dgst -sha256 -mac HMAC -macopt hexkey:KEY, where DATA is put together as the specification
# in auth.py says.
VECTORS = [
    (
        TOKEN,
        "0123456789abcdef",
        b"opening",
        b"challenge",
        "a17e15ac0fd40ea3c495a366b8a931afb0ab6382e88e2bda0e35733496dcc9da",
        "65074012a017bd0f59394e489d521955f6e4d2d988971f3f6c392c3fe6ccf77c",
        "191f798848ef0ea9880d29d870f176f177d3244300e3fd733df4ca94d7279922",
    ),
    (
        "\u00fc",
        "",
        b"",
        b"\0" * 300,
        "c8d16fe73982a6006035a528a0f7562c976f4fa6d43952ed155e7f5831c9c1d6",
        "de00be241053cb14acc1e6b40170ce39945e39f774d9fc5873639c62e5f08212",
        "833b05dc4ece271dc11c2b6360139bc98dc51cf78badd3508f0bf498acb94899",
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
    ) -> None:
        self.dialer = Dialer(dialer_token, nonces[0], opening, "run")
        self.acceptor = Acceptor(acceptor_token, nonces[1], run, "peer 1")

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


@pytest.mark.parametrize(("token", "run", "opening", "challenge", "key", "dialer", "acceptor"), VECTORS)
def test_vectors(token: str, run: str, opening: bytes, challenge: bytes, key: str, dialer: str, acceptor: str) -> None:
    assert run_key(token, run).hex() == key
    assert proof(bytes.fromhex(key), DIALER, opening, challenge).hex() == dialer
    assert proof(bytes.fromhex(key), ACCEPTOR, opening, challenge).hex() == acceptor


@pytest.mark.parametrize("opening", [HELLO, LINK, m.StateHello(1, "run", 2, 1, 9), m.ProbeHello(1, "run", 2, 1, False)])
def test_who_knows_the_token_gets_through(opening: m.Opening) -> None:
    shake = Handshake(opening=opening)
    frames = [shake.dialer.opening]
    frames.append(shake.challenge())
    frames.append(shake.answer(frames[-1]))
    frames.append(shake.accept(frames[-1]))
    shake.finish(frames[-1])
    assert read(frames[0]) == msgspec.structs.replace(opening, auth=b"d" * NONCE_BYTES)
    for secret in (TOKEN.encode(), run_key(TOKEN, "run")):
        assert all(secret not in frame for frame in frames)


def test_without_a_token_nothing_is_asked() -> None:
    shake = Handshake("", "")
    assert read(shake.dialer.opening) == LINK
    assert shake.acceptor.challenge(LINK, b"") is None
    shake.dialer.check_answer(m.Accepted())


def test_another_token_is_refused_on_both_sides() -> None:
    shake = Handshake("mine", "yours")
    challenge = shake.challenge()
    with pytest.raises(AuthError, match="another token than peer 1"):
        shake.accept(shake.answer(challenge))
    pretended = proof(run_key("yours", "run"), ACCEPTOR, body(shake.dialer.opening), body(challenge))
    with pytest.raises(AuthError, match="does not know the token"):
        shake.dialer.check(m.Proof(pretended))


def test_a_side_without_a_token_is_named() -> None:
    with pytest.raises(AuthError, match="peer 1 has a token and the dialing peer has none"):
        Handshake("", TOKEN).challenge()
    with pytest.raises(AuthError, match="the dialing peer has a token and peer 1 has none"):
        Handshake(TOKEN, "").challenge()
    with pytest.raises(AuthError, match="this side has none"):
        Handshake("", TOKEN).answer(Handshake().challenge())
    with pytest.raises(AuthError, match="it has no token"):
        Handshake(TOKEN, "").dialer.check_answer(m.Accepted())
    Handshake(TOKEN, "").dialer.check_answer(m.Rejected("full"))
    Handshake(TOKEN, "").dialer.check_answer(m.Goodbye(1, "full"))


def test_a_recorded_handshake_is_worth_nothing() -> None:
    recorded = Handshake()
    opening = recorded.dialer.opening
    answer = recorded.answer(recorded.challenge())
    replayed = Handshake(nonces=(b"d" * NONCE_BYTES, b"b" * NONCE_BYTES))
    replayed.challenge(opening)
    with pytest.raises(AuthError):
        replayed.accept(answer)


def test_a_recorded_acceptor_convinces_nobody() -> None:
    recorded = Handshake()
    challenge = recorded.challenge()
    theirs = recorded.accept(recorded.answer(challenge))
    fresh = Handshake(nonces=(b"e" * NONCE_BYTES, b"a" * NONCE_BYTES))
    fresh.answer(challenge)
    with pytest.raises(AuthError):
        fresh.finish(theirs)


def test_a_proof_sent_back_is_no_proof() -> None:
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
        HELLO,
    ],
)
def test_a_proof_is_of_no_use_for_another_opening(other: m.Opening) -> None:
    """A man in the middle changes the opening and passes on everything else."""
    shake = Handshake()
    changed = Handshake(opening=other).dialer.opening
    with pytest.raises(AuthError):
        shake.accept(shake.answer(shake.challenge(changed)))


def test_a_proof_is_of_no_use_in_another_run() -> None:
    assert run_key(TOKEN, "run") != run_key(TOKEN, "run2")
    with pytest.raises(AuthError, match="'elsewhere', not 'run'"):
        Handshake().answer(Handshake(run="elsewhere").challenge())


def test_a_proof_before_any_challenge_is_refused() -> None:
    for check in (Handshake().acceptor.check, Handshake().dialer.check):
        with pytest.raises(AuthError):
            check(m.Proof(b""))


@pytest.mark.parametrize("auth", [b"x", b"x" * (NONCE_BYTES - 1), b"x" * (NONCE_BYTES + 1)])
def test_a_nonce_has_one_length(auth: bytes) -> None:
    with pytest.raises(AuthError, match=f"{len(auth)} bytes"):
        Handshake().acceptor.challenge(msgspec.structs.replace(LINK, auth=auth), b"")
    with pytest.raises(AuthError, match=f"{len(auth)} bytes"):
        Handshake().dialer.answer(m.Challenge(auth, "run"), b"")


@given(st.integers(0, 3), st.data())
def test_a_change_of_any_byte_on_the_way_is_found(which: int, data: st.DataObject) -> None:
    """By one side or the other: as a message that cannot be, or as a proof that fails."""
    shake = Handshake()

    def pass_on(frame: bytes, number: int) -> bytes:
        if number != which:
            return frame
        changed = bytearray(frame)
        changed[data.draw(st.integers(LENGTH_BYTES, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
        return bytes(changed)

    def converse() -> None:
        frame = pass_on(shake.dialer.opening, 0)
        for number, step in enumerate([shake.challenge, shake.answer, shake.accept], 1):
            frame = pass_on(step(frame), number)
        shake.finish(frame)

    with pytest.raises((AssertionError, ProtocolError)):
        converse()


def test_vectors_of_payload_keys() -> None:
    key = bytes.fromhex(VECTORS[0][4])  # type: ignore[arg-type]
    assert payload_key(key, DIALER, b"opening", b"challenge").hex() == (
        "98227db2ca0bc2e854da594f6205bfd7a96d0fa8fa6cc78ca80ab87113feb563"
    )
    assert payload_key(key, ACCEPTOR, b"opening", b"challenge").hex() == (
        "934a870d57afd4a6772e819fe8c80143a46beef8839c9d19fd8a234645719b3a"
    )


def test_both_sides_have_the_same_payload_keys_and_no_connection_those_of_another() -> None:
    found: set[bytes] = set()
    for nonce in (b"a", b"b"):
        shake = Handshake(nonces=(b"d" * NONCE_BYTES, nonce * NONCE_BYTES))
        assert shake.dialer.payload_keys is None
        shake.finish(shake.accept(shake.answer(shake.challenge())))
        assert shake.dialer.payload_keys is not None
        assert shake.dialer.payload_keys == (shake.acceptor.payload_keys or ())[::-1]
        found.update(shake.dialer.payload_keys)
    assert len(found) == 4
