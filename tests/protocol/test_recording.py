"""Recordings as they travel and lie in files, and what follows from them."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest

from pccl.protocol import recording as r
from pccl.protocol.completion import pair_tag


def op(launched_ns: int, over_ns: int = 0, caller: int = 0, tag: int = 0, sequence: int = 0) -> r.OpRecord:
    result = "SUCCESS" if over_ns else ""
    common = ("all_reduce", "direct", "float", 4096, 0, 2)
    return r.OpRecord(1, tag, sequence, *common, caller, launched_ns, ended_ns=over_ns, result=result)


def recording(*ops: r.OpRecord, taken_ns: int = 10_000) -> r.Recording:
    return r.Recording(
        run="run",
        peer=1,
        group=0,
        name="name",
        host="host",
        process=7,
        clock="clock",
        taken_ns=taken_ns,
        taken_unix_ns=10**18,
        callers=["MainThread", "other"],
        ops=list(ops),
        links=[r.LinkSample(5_000, 2, 3, 0, {"tx_bytes": 1})],
        events=[r.RecordedEvent(4_000, "call", "update_topology", 2_000), r.RecordedEvent(1, "view", "view 1")],
    )


def test_pack_round_trip() -> None:
    made = recording(op(1_000, 2_000), op(3_000))
    assert r.unpack(r.pack(made)) == made
    assert r.from_json(r.to_json(made)) == made


def test_packed_size() -> None:
    draw = random.Random(1)
    at_ns, ops = 10**15, []
    for sequence in range(4096):
        at_ns += draw.randrange(10**4, 10**6)
        steps = sorted(at_ns + draw.randrange(10**6) for _ in range(8))
        base = op(at_ns, steps[-1], sequence=sequence)
        names = ("first_sent_ns", "last_sent_ns", "first_received_ns", "last_received_ns", "joined_ns", "done_ns")
        ops.append(msgspec.structs.replace(base, agreed_ns=steps[-2], **dict(zip(names, steps, strict=False))))
    assert len(r.pack(recording(*ops))) < 400_000


def test_garbage_is_refused() -> None:
    packed = r.pack(recording(op(1, 2)))
    for wrong in (b"", b"garbage", packed[:-5], zlib.compress(b"\xc1"), zlib.compress(msgspec.msgpack.encode({}))):
        with pytest.raises(r.RecordingError):
            r.unpack(wrong)
    for text in (b"", b"{}", b"\xff\xfe", b'{"run": 1}'):
        with pytest.raises(r.RecordingError):
            r.from_json(text)


def test_unknown_thread_is_refused() -> None:
    for caller in (-1, 2):
        made = recording(op(1_000, 2_000), op(3_000, 4_000, caller=caller))
        with pytest.raises(r.RecordingError, match="thread"):
            r.unpack(r.pack(made))
        with pytest.raises(r.RecordingError, match="thread"):
            r.from_json(r.to_json(made))


def test_compression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r, "UNPACKED_BYTES_MAX", 10_000)
    with pytest.raises(r.RecordingError, match="too large"):
        r.unpack(zlib.compress(bytes(20_000)))


def test_gaps() -> None:
    made = recording(
        op(1_000, 2_000, tag=1),
        op(1_500, 3_000, tag=2),  # overlaps with the first
        op(1_600, 9_000, tag=3, caller=1),
        op(4_000, 5_000, tag=1),
        op(5_000, 5_500, tag=1),  # at once
        op(6_000, tag=1),
    )
    found = [(gap.caller, gap.start_ns, gap.end_ns, gap.before.launched_ns) for gap in r.gaps(made)]
    assert found == [(0, 3_000, 4_000, 4_000), (0, 5_500, 6_000, 6_000)]


def test_recent_ops() -> None:
    made = recording(op(1_000, 2_000), op(2_500, 8_500), op(2_600), op(9_000, 9_500))
    assert r.recent(made) == made
    cut = r.recent(made, seconds=2e-6)
    assert [each.launched_ns for each in cut.ops] == [2_500, 2_600, 9_000]
    assert (cut.links, cut.events) == ([], [])
    last = r.recent(made, last=2)
    assert [each.launched_ns for each in last.ops] == [2_600, 9_000]
    assert [event.kind for event in last.events] == ["call"]
    assert len(last.links) == 1


def test_recent_keeps_hanging_ops() -> None:
    made = recording(op(1_000), op(1_500, 2_000), op(7_000, 8_500), op(9_000, 9_500))
    last = r.recent(made, last=2)
    assert [each.launched_ns for each in last.ops] == [1_000, 7_000, 9_000]
    assert (last.links, last.events) == ([], [])
    both = r.recent(made, seconds=2e-6, last=1)
    assert [each.launched_ns for each in both.ops] == [1_000, 9_000]


def test_recent_with_large_span() -> None:
    made = recording(op(1_000, 2_000))
    for seconds in (1e300, float("inf"), 10**400):
        assert r.recent(made, seconds=seconds) == made


def test_callers_tag() -> None:
    assert op(1_000, tag=7).callers_tag == 7
    assert op(1_000, tag=pair_tag(2, 1, 17)).callers_tag == 17
