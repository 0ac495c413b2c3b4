"""The peer's machine and its ops: names, verdicts, flushes, refusals, long waits, point-to-point."""

from __future__ import annotations

from math import inf

import pytest

from pccl.protocol import messages as m
from pccl.protocol.completion import pair_tag
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.ops import STALL_AFTER_S
from pccl.types import Result
from tests.protocol.peer.rig import TAG, Rig, of, prepare, said


def test_done_ops_share_a_message(rig: Rig) -> None:
    for op in range(3):
        rig.launch(op, tag=op)
    assert said(rig.done(2, 0, 1)) == [m.OpsDone(1, [OpRef(2, 0), OpRef(0, 0), OpRef(1, 0)])]


def test_result_waits_for_buffers(rig: Rig) -> None:
    rig.launch(1)
    effects = rig.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    assert effects == [ps.EndOp(1, False)]
    assert of(ps.OpResult, rig.ended(1)) == [ps.OpResult(1, Result.TIMEOUT, "late", 3, 1, 2)]
    assert rig.machine.open_ops == 0


def test_flush_reply_has_done_ops(rig: Rig) -> None:
    for op in range(4):
        rig.launch(op, tag=op)
    rig.done(0, 1)
    rig.hear(m.OpsCommit(1, [OpRef(0, 0)]))
    rig.machine.op_done(2)
    rig.machine.received(m.Flush(9, 1))
    rig.machine.op_done(3)
    assert rig.effects() == [ps.FreezeOps(1)], "what was not told yet is told in the reply"
    rig.machine.frozen(1)
    assert said(rig.effects()) == [m.FlushReply(9, [OpRef(1, 0), OpRef(2, 0), OpRef(3, 0)])]
    rig.machine.frozen(1)
    assert rig.effects() == []


def test_flush_aborts_ops_and_install_returns_them(rig: Rig) -> None:
    rig.launch(1)
    rig.launch(2, tag=8)
    rig.done(1)
    rig.hear(m.Flush(9, 1))
    rig.machine.frozen(1)
    effects = rig.hear(prepare([1, 2], 2, commits=[OpRef(TAG, 0)], lost=[(3, "reset")]))
    assert of(ps.EndOp, effects) == [ps.EndOp(1, True), ps.EndOp(2, False)]
    assert of(ps.OpResult, rig.ended(1) + rig.ended(2)) == []
    results = of(ps.OpResult, rig.hear(m.Install(2)))
    assert [(result.op, result.code) for result in results] == [(1, Result.SUCCESS), (2, Result.RANK_CONNECTION_LOST)]
    assert results[1].reason == "aborted on all peers: peer 3 was lost (reset)"


def test_buffers_return_after_install(rig: Rig) -> None:
    rig.launch(1)
    rig.hear(m.Flush(9, 1))
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2], 2))
    assert of(ps.OpResult, rig.hear(m.Install(2))) == []
    assert len(of(ps.OpResult, rig.ended(1))) == 1


def test_early_abort_fails_later_launch(rig: Rig) -> None:
    rig.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    reason = "late. That was before this call: call again"
    assert rig.launch(1) == [ps.OpResult(1, Result.TIMEOUT, reason, 3)]
    assert of(ps.SubmitOp, rig.launch(2))[0].sequence == 1


def test_early_abort_counts_as_made(rig: Rig) -> None:
    """The group call that fails with it has told the caller."""
    rig.group_call(5)
    abort = m.OpAbort(1, TAG, 0, Result.INVALID_USAGE, "never", counts_as_made=True)
    rig.hear(abort, abort, m.GroupCallResult(5, Result.INVALID_USAGE, "never"))
    assert of(ps.SubmitOp, rig.launch(1))[0].sequence == 1


def test_queued_op_gets_early_abort(rig: Rig) -> None:
    rig.group_call(5)
    rig.launch(1)
    rig.hear(m.OpAbort(1, TAG, 0, Result.INVALID_USAGE, "never", counts_as_made=True))
    effects = rig.hear(m.GroupCallResult(5, Result.INVALID_USAGE, "never"))
    assert of(ps.OpResult, effects) == [ps.OpResult(1, Result.INVALID_USAGE, "never", 3)]
    assert of(ps.SubmitOp, rig.launch(2))[0].sequence == 1


@pytest.mark.parametrize(("kind", "code", "sequence"), [
    (Kind.UPDATE_TOPOLOGY, Result.SUCCESS, 2),
    (Kind.UPDATE_TOPOLOGY, Result.INVALID_USAGE, None),
    (Kind.ARE_PEERS_PENDING, Result.SUCCESS, None),
])  # fmt: skip
def test_early_aborts_end_at_barrier(rig: Rig, kind: str, code: Result, sequence: int | None) -> None:
    """All others have come past these ops. Who would take the verdicts on them for verdicts on later ones counts
    otherwise than the others from there on."""
    rig.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    rig.group_call(5, kind)
    rig.hear(m.OpAbort(1, TAG, 1, Result.TIMEOUT, "late"))
    rig.hear(m.GroupCallResult(5, code, ""))
    submitted = of(ps.SubmitOp, rig.launch(1))
    assert [op.sequence for op in submitted] == ([] if sequence is None else [sequence])


def test_repeated_abort_spares_next_use(rig: Rig) -> None:
    abort = m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late")
    rig.launch(1)
    rig.hear(abort, abort)
    rig.ended(1)
    assert of(ps.SubmitOp, rig.launch(2))


def test_early_abort_ends_with_ring(rig: Rig) -> None:
    rig.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"), m.Flush(9, 1))
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2], 2), m.Install(2))
    assert of(ps.SubmitOp, rig.launch(1))[0].epoch == 2


def test_refusal_after_verdict(rig: Rig) -> None:
    """A launch that had to wait and its abort may come of one batch."""
    rig.group_call(5)
    rig.launch(1)
    effects = rig.hear(m.GroupCallResult(5, Result.SUCCESS), m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    assert [type(effect) for effect in effects] == [ps.CallResult, ps.SubmitOp, ps.EndOp]
    rig.machine.op_refused(1, Result.INVALID_ARGUMENT, "bad")
    assert rig.effects() == [ps.OpResult(1, Result.TIMEOUT, "late", 3)]


def test_refused_op_fails_with_verdict(rig: Rig) -> None:
    rig.launch(1)
    rig.machine.op_refused(1, Result.INVALID_ARGUMENT, "bad")
    assert said(rig.effects()) == [m.OpFailed(1, TAG, 0, Result.INVALID_ARGUMENT, "bad")]
    results = rig.hear(m.OpAbort(1, TAG, 0, Result.INVALID_ARGUMENT, "bad"))
    assert results == [ps.OpResult(1, Result.INVALID_ARGUMENT, "bad", 3)]


def test_done_precedes_cancel(rig: Rig) -> None:
    """The master may then still commit the op."""
    rig.launch(1)
    rig.machine.op_done(1)
    rig.machine.cancel(1, Result.TIMEOUT, "late")
    assert [type(message) for message in said(rig.effects())] == [m.OpsDone, m.OpFailed]


def test_stalled_op_is_reported_once(rig: Rig) -> None:
    assert rig.machine.deadline() is None
    rig.launch(1, now=10.0)
    rig.launch(2, tag=8, now=11.0)
    assert rig.machine.deadline() == 10.0 + STALL_AFTER_S
    rig.done(1)
    rig.machine.tick(10.0 + STALL_AFTER_S)
    assert said(rig.effects()) == [m.OpsStalled(1, [OpRef(TAG, 0)])]
    assert rig.machine.deadline() == 11.0 + STALL_AFTER_S
    rig.machine.tick(20.0)
    assert said(rig.effects()) == [m.OpsStalled(1, [OpRef(8, 0)])]
    assert rig.machine.deadline() is None
    rig.machine.tick(30.0)
    assert rig.effects() == []


def test_pair_op_has_own_tag_and_sequence(rig: Rig) -> None:
    (sent,) = of(ps.SubmitOp, rig.launch(1, pair=(3, True)))
    (received,) = of(ps.SubmitOp, rig.launch(2, pair=(3, False)))
    (of_all,) = of(ps.SubmitOp, rig.launch(3))
    assert (sent.tag, received.tag, of_all.tag) == (pair_tag(1, 2, TAG), pair_tag(2, 1, TAG), TAG)
    assert [op.sequence for op in (sent, received, of_all)] == [0, 0, 0]
    assert (sent.rank, sent.world_size, sent.links) == (0, 2, (0, rig.links[3]))
    assert (received.rank, received.world_size, received.links) == (1, 2, (rig.links[3], 0))
    assert sent.ring == (1, 2, 3)
    assert of(ps.SubmitOp, rig.launch(4, pair=(3, True)))[0].sequence == 1


def test_pair_op_with_left_peer_fails(rig: Rig) -> None:
    assert rig.launch(1, pair=(7, True)) == [
        ps.OpResult(1, Result.RANK_CONNECTION_LOST, "peer 7 has left; call again with a rank of the current group", 3)
    ]


def test_pair_op_without_link_fails() -> None:
    rig = Rig()
    rig.join([1, 2, 3, 4])
    assert of(ps.SubmitOp, rig.launch(1, pair=(3, True)))
    (result,) = rig.launch(2, pair=(4, False))
    assert isinstance(result, ps.OpResult)
    assert result.code is Result.INVALID_USAGE
    assert "no link with peer 4" in result.reason


@pytest.fixture
def large() -> Rig:
    """Peer 2 in a ring of five that counts as large: no links with peers 4 and 5."""
    rig = Rig()
    rig.join([1, 2, 3, 4, 5])
    return rig


@pytest.mark.usefixtures("no_mesh")
class TestLinksOnDemand:
    def test_pair_op_makes_its_link(self, large: Rig) -> None:
        (made, submitted) = large.launch(1, pair=(5, True))
        assert isinstance(made, ps.MakeLink)
        assert (made.member.peer, made.made_in, made.dial, made.timeout_s) == (5, 1, False, inf)
        assert isinstance(submitted, ps.SubmitOp)
        assert submitted.links == (0, made.link)
        assert large.machine.link_offered(5, 1) == made.link
        (again,) = large.launch(2, pair=(5, False))
        assert isinstance(again, ps.SubmitOp)
        assert again.links == (made.link, 0)

    def test_offer_makes_the_link(self, large: Rig) -> None:
        link = large.machine.link_offered(5, 1)
        assert [effect.link for effect in of(ps.MakeLink, large.effects())] == [link]
        (submitted,) = large.launch(1, pair=(5, True))
        assert isinstance(submitted, ps.SubmitOp)
        assert submitted.links == (0, link)

    def test_link_that_cannot_be_made_fails_its_ops(self) -> None:
        rig = Rig()
        rig.join([5, 2, 4, 1, 3])
        made = rig.launch(1, pair=(1, True))[0]
        assert isinstance(made, ps.MakeLink)
        assert made.dial
        rig.machine.link_failed(made.link, "peer 1: refused")
        assert of(ps.FreezeOp, rig.effects()) == [ps.FreezeOp(1)]
        rig.machine.op_frozen(1)
        (failed,) = said(rig.effects())
        assert isinstance(failed, m.OpFailed)
        assert failed.code is Result.RANK_CONNECTION_FAILED
        assert failed.reason == "no link between peer 2 and peer 1: refused"
        again = rig.launch(2, tag=8, pair=(1, True))[0]
        assert isinstance(again, ps.MakeLink)

    @pytest.mark.parametrize("has_ops", [True, False])
    def test_broken_link_with_ops_is_reported(self, large: Rig, has_ops: bool) -> None:
        link = large.machine.link_offered(5, 1)
        assert isinstance(link, int)
        large.connect(5)
        if has_ops:
            large.launch(1, pair=(5, True))
        large.machine.link_lost(link, "reset")
        assert said(large.effects()) == ([m.LinkLost(1, 5, "reset")] if has_ops else [])
        refused = "the link with peer 5 of view 1 was lost here"
        assert (large.machine.link_offered(5, 1) == refused) == has_ops

    def test_new_epoch_closes_the_link(self, large: Rig) -> None:
        (made, _) = large.launch(1, pair=(5, True))
        assert isinstance(made, ps.MakeLink)
        assert ps.CloseLink(made.link) in large.hear(prepare([1, 2, 3, 4, 5], 2))
        large.machine.link_lost(made.link, "closed by the other end")
        assert said(large.effects()) == []
        assert large.machine.link_offered(5, 1) == "the epoch of view 1 is over"
        assert isinstance(large.machine.link_offered(5, 2), int)
