"""The codec: every message survives the wire, and nothing else gets through."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from pccl.protocol import messages as m
from pccl.protocol.codec import (
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    OPENING_BYTES_MAX,
    Decoder,
    ProtocolError,
    decode_body,
    encode,
    frame_length,
)

EVERYTHING: Any = (
    m.FromPeer | m.FromMaster | m.Credential | m.PeerOpening | m.PeerAnswer | m.StateRequest | m.StateAnswer  # type: ignore[operator]
)


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Return all that a message may say, also in fields that have a default."""
    match kind:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(kind.ge or 0, 2**63 - 1 if kind.le is None else kind.le)
        case inspect.FloatType():
            return st.floats(allow_nan=False)  # which equals nothing, itself included
        case inspect.StrType():
            return st.text(max_size=kind.max_length)
        case inspect.BytesType():
            return st.binary()
        case inspect.UnionType():
            return st.one_of([values_of(one) for one in kind.types])
        case inspect.TupleType():
            return st.tuples(*map(values_of, kind.item_types))
        case inspect.ListType():
            return st.lists(values_of(kind.item_type), max_size=min(3, kind.max_length or 3))
        case inspect.NamedTupleType() | inspect.StructType():
            return st.builds(kind.cls, *(values_of(field.type) for field in kind.fields))
    raise AssertionError(f"{kind} in a message")


anything: st.SearchStrategy[m.Message] = values_of(inspect.type_info(EVERYTHING))


def framed(plain: object) -> bytes:
    body = msgpack.packb(plain)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


@given(st.lists(anything, max_size=5), st.data())
def test_messages_survive_any_fragmentation(sent: list[m.Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder: Decoder[m.Message] = Decoder(EVERYTHING)
    received: list[m.Message] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:end])
    assert received == sent
    assert decoder.buffered_bytes == 0


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_protocol_errors(data: bytes) -> None:
    decoder: Decoder[m.Message] = Decoder(EVERYTHING, OPENING_BYTES_MAX)
    with suppress(ProtocolError):
        for message in decoder.feed(data):
            assert isinstance(message, m.Message)


@given(anything, st.data())
def test_damaged_message_raises_or_decodes(message: m.Message, data: st.DataObject) -> None:
    body = bytearray(encode(message)[LENGTH_BYTES:])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    with suppress(ProtocolError):
        assert isinstance(decode_body(body, EVERYTHING), m.Message)


def test_opening_limit() -> None:
    large = m.Leave("x" * OPENING_BYTES_MAX)
    decoder: Decoder[m.Message] = Decoder(m.FromPeer, OPENING_BYTES_MAX)
    with pytest.raises(ProtocolError, match=str(OPENING_BYTES_MAX)):
        list(decoder.feed(encode(large)))
    decoder = Decoder(m.FromPeer, OPENING_BYTES_MAX)
    assert list(decoder.feed(encode(m.Leave()) + encode(large))) == [m.Leave(), large]


def test_oversized_frame_is_refused_by_length() -> None:
    with pytest.raises(ProtocolError, match="not a pccl peer"):
        frame_length((MESSAGE_BYTES_MAX + 1).to_bytes(LENGTH_BYTES, "big"), MESSAGE_BYTES_MAX)
    with pytest.raises(ValueError, match="exceeds"):
        encode(m.Leave("x" * MESSAGE_BYTES_MAX))


def test_frame_size_limits() -> None:
    assert frame_length(MESSAGE_BYTES_MAX.to_bytes(LENGTH_BYTES, "big"), MESSAGE_BYTES_MAX) == MESSAGE_BYTES_MAX
    with pytest.raises(ProtocolError, match="an empty message"):
        frame_length(bytes(LENGTH_BYTES), MESSAGE_BYTES_MAX)


@pytest.mark.parametrize(
    "frame",
    [
        b"\0\0\0\0",
        framed([]),
        framed({}),
        framed("Leave"),
        framed(["Nonsense"]),
        framed(["Leave", 5]),
        framed([5]),
        framed(["OpsDone", 1, [[1]]]),
        framed(["Flush", "1", 2]),
        framed(["Flush", 1]),
        b"\0\0\0\5\xdd\xff\xff\xff\xff",  # an array that claims 2**32 - 1 elements
        b"\0\0\0\5\xdb\xff\xff\xff\xff",  # a string of as many bytes
        b"\0\0\0\2\xc1\xc1",
        b"\0\0\0\2\xc0\xc0",  # something after the message
        (10_000).to_bytes(4, "big") + b"\x91" * 9_999 + b"\xc0",  # ten thousand arrays in one another
    ],
)
def test_invalid_messages_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Decoder[m.Message](EVERYTHING).feed(frame))


def test_other_direction_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Install"):
        list(Decoder[m.FromPeer](m.FromPeer).feed(encode(m.Install(1))))


def test_fields_may_be_added() -> None:
    """A field added at the end is ignored by who does not know it, and filled in by who misses it."""
    assert decode_body(msgpack.packb(["Flush", 1, 2, "something new"]), m.FromMaster) == m.Flush(1, 2)
    assert decode_body(msgpack.packb(["Leave"]), m.FromPeer) == m.Leave("")
    with pytest.raises(ProtocolError, match="not msgpack"):
        decode_body(msgpack.packb(["Flush", 1, 2, msgpack.ExtType(5, b"of another format")]), m.FromMaster)


def test_op_refs_survive() -> None:
    message = decode_body(encode(m.OpsDone(1, [m.OpRef(2, 3)]))[LENGTH_BYTES:], m.FromPeer)
    assert isinstance(message.ops[0], m.OpRef)


@pytest.mark.parametrize(
    ("plain", "what"),
    [
        (5, "Expected `array`, got `int`"),
        (["Nonsense"], "Invalid value 'Nonsense' - at `$[0]`"),
        (["OpsDone", 1, [["tag", 0]]], "Expected `int`, got `str` - at `$[2][0][0]`"),
    ],
)
def test_error_names_field(plain: object, what: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_body(msgpack.packb(plain), m.FromPeer)
    assert str(caught.value) == f"not an expected message: {what}"
