"""Which messages of a master a peer takes in which state; all others raise ProtocolError."""

from __future__ import annotations

from typing import get_args

import pytest

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.peer.machine import Peer
from pccl.types import Result
from tests.protocol.peer.rig import ME, TAG, Rig, prepare

MESSAGES: dict[type[m.Message], m.FromMaster] = {
    type(message): message
    for message in (
        *(m.Welcome(ME, "run", 1), m.PreVoteRequest(), m.VoteRequest(2), m.Resumed(2, 5.0), m.Elsewhere("")),
        *(m.StartOver(""), m.Goodbye(Result.MASTER_CONNECTION_FAILED, ""), m.Flush(9, 1), prepare([1, 2], 2)),
        *(m.Trial([]), m.Install(2), m.OpsCommit(1, []), m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late")),
        *(m.AbortVoteRequest(1, TAG, 0, Result.TIMEOUT, "late"), m.GroupCallResult(5, Result.SUCCESS)),
        *(m.SyncPlan(1, 1, b"", [], False, False), m.Probe(1, [])),
    )
}
ALWAYS = {m.Elsewhere, m.Goodbye}
LED = ALWAYS | {m.Trial, m.SyncPlan, m.Probe}
TAKEN = {
    "connecting": LED | {m.Welcome, m.StartOver},
    "welcomed": LED | {m.StartOver, m.Prepare},
    "installed": LED | {m.Flush, m.Prepare, m.OpsCommit, m.OpAbort, m.AbortVoteRequest},
    "prepared": LED | {m.Install},
    "recovering": ALWAYS | {m.PreVoteRequest, m.VoteRequest},
    "voted": ALWAYS | {m.PreVoteRequest, m.Resumed},
    "over": set(MESSAGES),
}


def peer_in(state: str) -> Peer:
    if state == "connecting":
        return Peer(0, 1)
    rig = Rig()
    rig.machine.outlives_masters = True
    if state != "welcomed":
        rig.join([1, 2])
    if state == "prepared":
        rig.hear(prepare([1, 2, 3], 2))
    if state in ("recovering", "voted"):
        rig.machine.master_lost("silent")
    if state == "voted":
        rig.hear(m.VoteRequest(2))
    if state == "over":
        rig.machine.leave("")
    return rig.machine


@pytest.mark.parametrize("state", TAKEN)
def test_messages_taken_in_each_state(state: str) -> None:
    assert MESSAGES.keys() == set(get_args(m.FromMaster))
    taken = set()
    for kind, message in MESSAGES.items():
        try:
            peer_in(state).received(message)
            taken.add(kind)
        except ProtocolError:
            pass
    assert taken == TAKEN[state]
