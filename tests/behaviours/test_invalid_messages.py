"""Illegal messages evict their sender; late ones are ignored."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.codec import MESSAGE_BYTES_MAX, encode
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result
from tests.simulation.world import TAG, World

ILLEGAL_ALWAYS = {
    "a second Hello": m.Hello(m.PROTOCOL_VERSION, "test", 0, [], 1, 1),
    "not msgpack": b"\0\0\0\1\xc1",
    "a message of the master": encode(m.Install(1)),
    "a huge message": (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"),
    "an unknown call": m.GroupCall(1, "dance"),
    "a sync without an offer": m.GroupCall(1, Kind.SYNC),
    "an offer without a sync": m.GroupCall(1, Kind.UPDATE_TOPOLOGY, m.SyncOffer("send_only", 0, b"", [])),
    "a failure that is a success": m.OpFailed(2, 1, 0, Result.SUCCESS, "?"),
    "a failure with an unknown code": m.OpFailed(2, 1, 0, 999, "?"),
}
ILLEGAL_WHILE_PENDING = {
    "OpsDone": m.OpsDone(2, [OpRef(TAG, 0)]),
    "OpFailed": m.OpFailed(2, TAG, 0, Result.TIMEOUT, "?"),
    "OpsStalled": m.OpsStalled(2, [OpRef(TAG, 0)]),
    "FlushReply": m.FlushReply(1, []),
    "GroupCall": m.GroupCall(1, Kind.ARE_PEERS_PENDING),
    "GroupCallCancel": m.GroupCallCancel(1),
    "SyncReport": m.SyncReport(1, True),
    "Probes": m.Probes(1, []),
}


@pytest.mark.parametrize("words", ILLEGAL_ALWAYS.values(), ids=ILLEGAL_ALWAYS)
@pytest.mark.parametrize("sender", [1, 2], ids=["accepted", "pending"])
def test_illegal_message_evicts_its_sender_only(world: World, words: m.Message | bytes, sender: int) -> None:
    a, b = world.join(0, 0)
    world.add(7)
    world.run()
    op = world.launch(a, TAG)
    world.run()
    speaker = world.nodes[sender]
    world.send(speaker, words)
    world.run()
    assert speaker.ended is not None
    assert world.master.state.accepted == ([1] if speaker is b else [1, 2])
    assert (op in a.results) == (speaker is b)
    if speaker is not b:
        assert world.reduce([b]) == [Result.SUCCESS]


@pytest.mark.parametrize("words", ILLEGAL_WHILE_PENDING.values(), ids=ILLEGAL_WHILE_PENDING)
@pytest.mark.parametrize("group", [0, 7], ids=["of a group", "of a new group"])
def test_illegal_message_of_a_newcomer_rejects_it(world: World, words: m.Message, group: int) -> None:
    a, b = world.join(0, 0)
    pending = world.add(group)
    world.run()
    op = world.launch(a, TAG)
    world.run()
    world.send(pending, words)
    world.run()
    assert pending.ended is not None
    assert pending.ended.code is Result.INVALID_USAGE
    assert f"unexpected {type(words).__name__}" in pending.ended.reason
    assert world.reduce([b]) == [Result.SUCCESS]
    assert a.result(op) is Result.SUCCESS


def test_second_group_call_at_once_is_illegal(world: World) -> None:
    a, b = world.join(0, 0)
    world.group_call(b, Kind.UPDATE_TOPOLOGY)
    world.send(b, m.GroupCall(99, Kind.UPDATE_TOPOLOGY))
    world.run()
    assert b.ended is not None
    assert "out of turn" in b.ended.reason
    assert world.master.state.accepted == [a.number]


LATE_OR_STALE = {
    "flush reply": m.FlushReply(77, [OpRef(1, 0)]),
    "links": m.LinksReady(1, [(1, "?")]),
    "done": m.OpsDone(1, [OpRef(1, 0)]),
    "failed": m.OpFailed(1, 1, 0, Result.TIMEOUT, "?"),
    "stalled": m.OpsStalled(1, [OpRef(1, 0)]),
    "cancel": m.GroupCallCancel(77),
    "report": m.SyncReport(77, False, "?", [(1, "?")]),
    "probes": m.Probes(77, [m.LinkMetric(1, False, 1e6, 5)]),
}


@pytest.mark.parametrize("words", LATE_OR_STALE.values(), ids=LATE_OR_STALE)
def test_late_message_is_ignored(world: World, words: m.Message) -> None:
    a, b = world.join(0, 0)
    view, told = world.master.state.view, len(world.from_masters)
    world.send(b, words)
    world.run()
    assert (world.master.state.view, len(world.from_masters)) == (view, told)
    assert world.reduce([a, b]) == [Result.SUCCESS] * 2
