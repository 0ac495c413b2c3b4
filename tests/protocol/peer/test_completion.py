"""Ops that their participants complete by themselves, and ops that the fast path starts and completes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.protocol import messages as m
from pccl.protocol.messages import OpRef
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.ops import STALL_AFTER_S, pair_start
from pccl.types import Result
from tests.protocol.peer.rig import ME, TAG, Rig, commit, completed, meshed, of, prepare, said

COMMITTED = [ps.ForgetOp(1), ps.OpResult(1, Result.SUCCESS, "", 3, 1, 2)]


ABORT_VOTE_REQUEST = m.AbortVoteRequest(1, TAG, 0, Result.TIMEOUT, "late")


def test_mutual_commit_without_master(mesh: Rig) -> None:
    (submitted,) = of(ps.SubmitOp, mesh.launch(1))
    assert submitted.is_mutual
    assert mesh.done(1) == []
    assert completed(mesh, 1) == COMMITTED


def test_flush_reply_has_own_commits(mesh: Rig) -> None:
    for op in (1, 2, 3):
        mesh.launch(op)
        mesh.done(op)
        completed(mesh, op)
    mesh.launch(4)
    mesh.done(4)
    mesh.hear(m.Flush(8, 1))
    mesh.machine.frozen(1)
    assert said(mesh.effects()) == [m.FlushReply(8, [OpRef(TAG, 3)], [OpRef(TAG, 2)])]


@pytest.mark.parametrize("has_answered", [False, True])
def test_mutual_commit_after_flush_reply(mesh: Rig, has_answered: bool) -> None:
    """The others may have committed it and left, and no master may come any more: nobody else will say so."""
    mesh.launch(1)
    mesh.done(1)
    mesh.hear(m.Flush(8, 1))
    if has_answered:
        mesh.machine.frozen(1)
        assert said(mesh.effects()) == [m.FlushReply(8, [OpRef(TAG, 0)])]
    assert completed(mesh, 1) == COMMITTED
    if not has_answered:
        mesh.machine.frozen(1)
        assert said(mesh.effects()) == [m.FlushReply(8, [], [OpRef(TAG, 0)])]
    mesh.hear(prepare([1, 2], 2, commits=[OpRef(TAG, 0)]))
    assert of(ps.OpResult, mesh.effects()) == []


def test_promise_holds_after_flush(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    mesh.hear(ABORT_VOTE_REQUEST)
    mesh.hear(m.Flush(8, 1))
    assert completed(mesh, 1) == []


def test_master_commit_holds_at_session_end(mesh: Rig) -> None:
    """Its engine was done while ops were stopped, and the master is lost before the next view."""
    mesh.launch(1)
    mesh.hear(ABORT_VOTE_REQUEST)
    mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)]))
    mesh.hear(m.Flush(8, 1))
    mesh.done(1)
    mesh.machine.give_up("no master")
    assert of(ps.EndOp, mesh.effects()) == [ps.EndOp(1, True)]
    assert [result.code for result in of(ps.OpResult, mesh.ended(1))] == [Result.SUCCESS]


def test_promise_prevents_commit(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, False)]
    assert completed(mesh, 1) == []
    assert mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)])) == COMMITTED


def test_promise_holds_for_later_launch(mesh: Rig) -> None:
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, False)]
    mesh.launch(1)
    mesh.done(1)
    assert completed(mesh, 1) == []
    assert of(ps.EndOp, mesh.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))) == [ps.EndOp(1, False)]


def test_vote_after_commit_says_committed(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    completed(mesh, 1)
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, True)]
    assert mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)])) == [], "it knows"


def test_commit_before_engine_done(mesh: Rig) -> None:
    """Another one has heard that ours is."""
    mesh.launch(1)
    mesh.hear(ABORT_VOTE_REQUEST)
    assert mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)])) == []
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, True)]
    assert mesh.done(1) == COMMITTED


@pytest.mark.parametrize("is_done", [False, True])
def test_op_failed_says_may_be_done(mesh: Rig, is_done: bool) -> None:
    mesh.launch(1)
    if is_done:
        mesh.done(1)
    mesh.machine.cancel(1, Result.TIMEOUT, "late")
    assert mesh.effects() == [ps.FreezeOp(1)]
    mesh.machine.op_frozen(1)
    assert said(mesh.effects()) == [m.OpFailed(1, TAG, 0, Result.TIMEOUT, "late", is_done)]
    assert completed(mesh, 1) == []


def test_completed_before_frozen_commits(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    mesh.machine.cancel(1, Result.TIMEOUT, "late")
    assert completed(mesh, 1)[1:] == COMMITTED
    mesh.machine.op_frozen(1)
    assert mesh.effects() == []


def test_plain_start_equals_launch(mesh: Rig) -> None:
    commit(mesh, 1)
    start = mesh.machine.plain_start()
    assert start is not None
    assert mesh.machine.uses_of(TAG) == 1
    assert mesh.launch(2) == [replace(start, op=2, tag=TAG, sequence=1)]


def test_no_plain_start_if_uncertain(mesh: Rig) -> None:
    def is_plain(rig: Rig) -> bool:
        return rig.machine.plain_start() is not None

    ring, alone, stranger = Rig(), Rig(), Rig()
    ring.join([1, 2, 3])
    alone.join([ME])
    assert [is_plain(rig) for rig in (mesh, ring, alone, stranger)] == [True, False, False, False]
    for happens in (
        lambda rig: rig.hear(m.Flush(8, 1)),
        lambda rig: rig.group_call(1),
        lambda rig: rig.hear(ABORT_VOTE_REQUEST),
        lambda rig: rig.hear(m.OpAbort(1, TAG, 1, Result.TIMEOUT, "late")),
        lambda rig: rig.machine.link_lost(rig.links[3], "reset"),
        lambda rig: rig.machine.leave(""),
    ):
        rig = meshed()
        happens(rig)
        assert not is_plain(rig)


def test_handed_over_op_equals_launch(mesh: Rig) -> None:
    commit(mesh, 1)
    mesh.machine.op_handed_over(2, TAG, 1, 0.0)
    assert mesh.launch(3, tag=TAG + 1)
    assert mesh.done(2) == []
    assert completed(mesh, 2) == [ps.ForgetOp(2), ps.OpResult(2, Result.SUCCESS, "", 3, 1, 2)]
    assert of(ps.SubmitOp, mesh.launch(4))[0].sequence == 2


def test_fast_completed_op_is_reported(mesh: Rig) -> None:
    commit(mesh, 1)
    mesh.machine.op_fast_completed(TAG, 1)
    assert said(mesh.hear(m.AbortVoteRequest(1, TAG, 1, Result.TIMEOUT, "late"))) == [m.AbortVote(1, TAG, 1, True)]
    mesh.machine.link_lost(mesh.links[3], "reset")
    (lost,) = said(mesh.effects())
    assert isinstance(lost, m.LinkLost)
    mesh.hear(m.Flush(8, 1))
    mesh.machine.frozen(1)
    assert said(mesh.effects()) == [m.FlushReply(8, [], [OpRef(TAG, 1)])]


def test_stalled_mutual_op_is_reported_until_over(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.machine.tick(STALL_AFTER_S)
    assert said(mesh.effects()) == [m.OpsStalled(1, [OpRef(TAG, 0)])]
    assert said(mesh.done(1)) == [m.OpsDone(1, [OpRef(TAG, 0)])]
    assert said(completed(mesh, 1)) == [m.OpsOver(1, [OpRef(TAG, 0)])]


def test_pair_start_equals_launch(mesh: Rig) -> None:
    pair = 3, True
    assert of(ps.SubmitOp, mesh.launch(1, pair=pair))
    mesh.done(1)
    completed(mesh, 1)
    start = mesh.machine.plain_start()
    assert start is not None
    made = pair_start(start, pair)
    assert made is not None
    assert mesh.machine.uses_of(made.tag | TAG) == 1
    (launched,) = mesh.launch(2, pair=pair)
    assert launched == replace(made, op=2, tag=made.tag | TAG, sequence=1)
    assert pair_start(start, (99, False)) is None
