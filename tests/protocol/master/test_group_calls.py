"""Group calls of peers that are at different places of their loop."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind, OpRef, PendingAnswer
from tests.protocol.master.rig import TAG, Rig

OP = OpRef(TAG, 0)
ASK = m.GroupCall(2, Kind.ARE_PEERS_PENDING)


def answers(rig: Rig, peer: int) -> list[int]:
    return [each.value for each in rig.told(peer) if isinstance(each, m.GroupCallResult)]


def test_question_after_a_long_op_waits_for_the_other_peers() -> None:
    """The reports that they have completed the op are slower than this peer's next call."""
    rig = Rig(0, 0, 0)
    epoch = rig.master.state.groups[0].epoch
    for peer in (1, 2, 3):
        rig.hear(peer, m.OpsStalled(epoch, [OP]))
    rig.hear(3, m.OpsOver(epoch, [OP]), ASK)
    assert answers(rig, 3) == []
    for peer in (1, 2):
        rig.hear(peer, m.OpsOver(epoch, [OP]), ASK)
    assert [answers(rig, peer) for peer in (1, 2, 3)] == [[0], [0], [0]]


@pytest.mark.parametrize("asked_at", [0.0, 0.9])
def test_question_ends_while_others_wait_in_an_op_of_this_peer(asked_at: float) -> None:
    """At 0.9 s, adding a second and taking it away again gives less."""
    rig = Rig(0, 0)
    rig.now = asked_at
    epoch = rig.master.state.groups[0].epoch
    rig.hear(1, m.OpsStalled(epoch, [OP]))
    rig.hear(2, ASK)
    assert answers(rig, 2) == []
    due = rig.master.deadline()
    assert due is not None
    rig.tick(due)
    assert answers(rig, 2) == [PendingAnswer.ELSEWHERE]
    assert rig.master.deadline() is None


def test_question_ends_with_the_report_that_others_have_waited_long() -> None:
    rig = Rig(0, 0)
    rig.hear(2, ASK)
    rig.now += 2.0
    rig.hear(1, m.OpsStalled(rig.master.state.groups[0].epoch, [OP]))
    assert answers(rig, 2) == [PendingAnswer.ELSEWHERE]
