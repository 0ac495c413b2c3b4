"""The ends of a control session: what they count, keep, acknowledge and resend."""

from __future__ import annotations

import random

import pytest

from pccl.protocol.codec import ACK_EVERY, KEPT_BYTES_MAX, ControlSession, ProtocolError


def session(frames: int = 0) -> ControlSession:
    made = ControlSession(b"key")
    for number in range(frames):
        made.keep(b"%d" % number)
    return made


def test_reattach_resends_missing_messages() -> None:
    mine = session(5)
    assert mine.reattach(3) == [b"3", b"4"]
    assert mine.reattach(3) == [b"3", b"4"]
    mine.keep(b"5")
    assert mine.reattach(5) == [b"5"]
    assert mine.reattach(6) == []
    assert mine.kept_bytes == 0


@pytest.mark.parametrize("received", [1, 6, 2**60])
def test_impossible_count_is_refused(received: int) -> None:
    mine = session(5)
    mine.acknowledge(2)
    with pytest.raises(ProtocolError, match=f"{received} messages are acknowledged after 2, but 5 were sent"):
        mine.acknowledge(received)


def test_acknowledgements_bound_kept_frames() -> None:
    one, other = session(), session()
    acks = 0
    for _ in range(1000):
        one.keep(b"frame")
        ack = other.receive()
        if ack is not None:
            acks += 1
            one.acknowledge(ack.received)
        assert len(one._kept) < ACK_EVERY
    assert acks == 1000 // ACK_EVERY


def test_missing_acknowledgements_flood() -> None:
    mine = session()
    for _ in range(KEPT_BYTES_MAX // 2**20):
        mine.keep(bytes(2**20))
    assert not mine.is_flooded
    mine.keep(b"x")
    assert mine.is_flooded


@pytest.mark.parametrize("seed", range(20))
def test_broken_connections_keep_one_sequence(seed: int) -> None:
    rng = random.Random(seed)
    sender, receiver = session(), session()
    sent: list[bytes] = []
    heard: list[bytes] = []
    way: list[bytes] = []
    for _ in range(500):
        match rng.randrange(4):
            case 0 | 1:
                sent.append(b"%d" % len(sent))
                sender.keep(sent[-1])
                way.append(sent[-1])
            case 2 if way:
                heard.append(way.pop(0))
                ack = receiver.receive()
                if ack is not None and rng.random() < 0.7:
                    sender.acknowledge(ack.received)
            case 3 if rng.random() < 0.2:
                way = sender.reattach(receiver.received)
    heard += sender.reattach(receiver.received)
    assert heard == sent
