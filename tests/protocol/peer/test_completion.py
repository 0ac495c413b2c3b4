"""Ops that their participants complete by themselves, and ops that the fast path starts and completes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.messages import OpRef
from pccl.protocol.peer.ops import STALL_AFTER_S
from pccl.types import Result
from tests.protocol.peer.rig import ME, TAG, Rig, commit, completed, meshed, of, prepare, said

COMMITTED = [ps.ForgetOp(1), ps.OpResult(1, Result.SUCCESS, "", 3, 1, 2)]


ABORT_VOTE_REQUEST = m.AbortVoteRequest(1, TAG, 0, Result.TIMEOUT, "late")


def test_what_all_are_done_with_is_committed_without_a_word(mesh: Rig) -> None:
    (submitted,) = of(ps.SubmitOp, mesh.launch(1))
    assert submitted.is_mutual
    assert mesh.done(1) == []
    assert completed(mesh, 1) == COMMITTED


def test_own_commits_are_told_at_a_flush(mesh: Rig) -> None:
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
def test_what_all_are_done_with_is_committed_while_ops_are_stopped(mesh: Rig, has_answered: bool) -> None:
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


def test_a_promise_is_kept_while_ops_are_stopped(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    mesh.hear(ABORT_VOTE_REQUEST)
    mesh.hear(m.Flush(8, 1))
    assert completed(mesh, 1) == []


def test_what_a_master_has_committed_is_committed_though_the_session_ends(mesh: Rig) -> None:
    """Its engine was done while ops were stopped, and the master is lost before the next view."""
    mesh.launch(1)
    mesh.hear(ABORT_VOTE_REQUEST)
    mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)]))
    mesh.hear(m.Flush(8, 1))
    mesh.done(1)
    mesh.machine.give_up("no master")
    assert of(ps.EndOp, mesh.effects()) == [ps.EndOp(1, True)]
    assert [result.code for result in of(ps.OpResult, mesh.ended(1))] == [Result.SUCCESS]


def test_a_promise_not_to_commit_is_kept(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, False)]
    assert completed(mesh, 1) == []
    assert mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)])) == COMMITTED


def test_a_promise_is_kept_of_what_is_launched_later(mesh: Rig) -> None:
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, False)]
    mesh.launch(1)
    mesh.done(1)
    assert completed(mesh, 1) == []
    assert of(ps.EndOp, mesh.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))) == [ps.EndOp(1, False)]


def test_who_is_asked_too_late_says_that_it_has_committed(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    completed(mesh, 1)
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, True)]
    assert mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)])) == [], "it knows"


def test_a_commit_may_be_here_before_the_engine_has_said_that_it_is_done(mesh: Rig) -> None:
    """Another one has heard that ours is."""
    mesh.launch(1)
    mesh.hear(ABORT_VOTE_REQUEST)
    assert mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)])) == []
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, True)]
    assert mesh.done(1) == COMMITTED


@pytest.mark.parametrize("is_done", [False, True])
def test_who_gives_up_says_whether_others_may_have_committed(mesh: Rig, is_done: bool) -> None:
    mesh.launch(1)
    if is_done:
        mesh.done(1)
    mesh.machine.cancel(1, Result.TIMEOUT, "late")
    assert mesh.effects() == [ps.FreezeOp(1)]
    mesh.machine.op_frozen(1)
    assert said(mesh.effects()) == [m.OpFailed(1, TAG, 0, Result.TIMEOUT, "late", is_done)]
    assert completed(mesh, 1) == []


def test_what_all_are_done_with_before_it_is_frozen_is_committed(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    mesh.machine.cancel(1, Result.TIMEOUT, "late")
    assert completed(mesh, 1)[1:] == COMMITTED
    mesh.machine.op_frozen(1)
    assert mesh.effects() == []


def test_a_plain_start_is_what_a_launch_would_be(mesh: Rig) -> None:
    commit(mesh, 1)
    start = mesh.machine.plain_start()
    assert start is not None
    assert mesh.machine.uses_of(TAG) == 1
    assert mesh.launch(2) == [replace(start, op=2, tag=TAG, sequence=1)]


def test_there_is_none_where_anything_else_may_come_of_it(mesh: Rig) -> None:
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


def test_what_runs_elsewhere_is_told_as_if_it_had_been_launched(mesh: Rig) -> None:
    commit(mesh, 1)
    mesh.machine.op_handed_over(2, TAG, 1, 0.0)
    assert mesh.launch(3, tag=TAG + 1)
    assert mesh.done(2) == []
    assert completed(mesh, 2) == [ps.ForgetOp(2), ps.OpResult(2, Result.SUCCESS, "", 3, 1, 2)]
    assert of(ps.SubmitOp, mesh.launch(4))[0].sequence == 2


def test_what_ran_elsewhere_is_reported(mesh: Rig) -> None:
    commit(mesh, 1)
    mesh.machine.op_fast_completed(TAG, 1)
    assert said(mesh.hear(m.AbortVoteRequest(1, TAG, 1, Result.TIMEOUT, "late"))) == [m.AbortVote(1, TAG, 1, True)]
    mesh.machine.link_lost(mesh.links[3], "reset")
    (lost,) = said(mesh.effects())
    assert isinstance(lost, m.LinkLost)
    mesh.hear(m.Flush(8, 1))
    mesh.machine.frozen(1)
    assert said(mesh.effects()) == [m.FlushReply(8, [], [OpRef(TAG, 1)])]


def test_what_takes_long_is_told_until_it_is_over(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.machine.tick(STALL_AFTER_S)
    assert said(mesh.effects()) == [m.OpsStalled(1, [OpRef(TAG, 0)])]
    assert said(mesh.done(1)) == [m.OpsDone(1, [OpRef(TAG, 0)])]
    assert said(completed(mesh, 1)) == [m.OpsOver(1, [OpRef(TAG, 0)])]


def test_a_pair_starts_as_a_launch_would(mesh: Rig) -> None:
    pair = 3, True
    assert of(ps.SubmitOp, mesh.launch(1, pair=pair))
    mesh.done(1)
    completed(mesh, 1)
    start = mesh.machine.plain_start()
    assert start is not None
    made = ps.pair_start(start, pair)
    assert made is not None
    assert mesh.machine.uses_of(made.tag | TAG) == 1
    (launched,) = mesh.launch(2, pair=pair)
    assert launched == replace(made, op=2, tag=made.tag | TAG, sequence=1)
    assert ps.pair_start(start, (99, False)) is None
