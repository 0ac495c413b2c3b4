"""The machine of a master process: who may found a run, who leads one, and when it does so no longer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol.completion import pair_tag
from pccl.protocol.failover.bootstrap import HOLD_S
from pccl.protocol.failover.durable_state import RecordedView, RunRecord
from pccl.protocol.failover.machine import DEPOSED_TIMEOUTS, Failover
from pccl.protocol.failover.recovery import SALTS, TERMS, block
from pccl.protocol.link_metrics import KnownMetric
from pccl.protocol.master.run_state import Close, Effect, MasterLog, MasterOptions, Persist, Send
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result
from tests.protocol.test_recovery_report import prepared, report_of, view

OPTIONS = MasterOptions(peer_timeout_s=4.0)


class Rig:
    """A machine, and what came of the last event."""

    def __init__(
        self,
        options: MasterOptions = OPTIONS,
        birth_at: float = 0.0,
        is_standby: bool = False,
        secret: bytes = b"",
        record: RunRecord | None = None,
    ) -> None:
        self.machine = Failover("new", options, is_standby, secret, record, persists=True)
        if birth_at:
            self.machine.begin(0.0, birth_at)
        self.masters = 1 if record is not None else 2
        """Number of master addresses that peers know."""
        self.now = 0.0
        self.effects: list[Effect] = []
        self.reports: dict[int, m.RecoveryReport] = {}
        """Reports of the peers that follow whoever asks them to."""

    def say(self, connection: int, message: m.FromPeer) -> None:
        self.effects = []
        if self.machine.master.admission.host_of(connection) is None and isinstance(
            message, m.Hello | m.Resume | m.HeartbeatHello
        ):
            self.effects += self.machine.connected(connection, "10.0.0.1", self.now)
        self.effects += self.machine.received(connection, message, self.now)

    def hello(self, connection: int, masters: int = 1, may_found: bool = True) -> None:
        text = m.Hello(m.PROTOCOL_VERSION, "test", 0, [], 1000, 2, masters=masters, may_found=may_found)
        self.say(connection, text)

    def heartbeat(self, connection: int, peer: int) -> None:
        self.say(connection, m.HeartbeatHello(m.PROTOCOL_VERSION, self.machine.run, peer))

    def resume(self, peer: int, term: int = 1, run: str = "old", masters: int = 0, is_accepted: bool = True) -> None:
        """Over a connection of the peer's number."""
        resume = m.Resume(m.PROTOCOL_VERSION, run, term, peer, masters=masters or self.masters, is_accepted=is_accepted)
        self.say(peer, resume)

    def quorum_of(self, report: m.RecoveryReport) -> None:
        summary = m.PreVote(report.installed, report.prepared, report.has_decided, report.answered)
        self.say(report.me.peer, summary)

    def deliver(self, report: m.RecoveryReport) -> None:
        """Says where it stands, and follows as soon as it is asked to; so do all who reported before. The effects are
        those of all that."""
        self.reports[report.me.peer] = report
        self.quorum_of(report)
        self.answer()

    def answer(self) -> None:
        """Whoever is asked to follow does."""
        effects: list[Effect] = []
        while self.effects:
            effect = self.effects.pop(0)
            if (
                isinstance(effect, Send)
                and isinstance(effect.message, m.VoteRequest)
                and effect.connection in self.reports
            ):
                waiting, self.effects = self.effects, []
                self.say(effect.connection, m.Vote(effect.message.term, self.reports[effect.connection]))
                self.effects = waiting + self.effects
            else:
                effects.append(effect)
        self.effects = effects

    def settle(self) -> None:
        """All who are led answer Flush and Prepare, so that the next view comes into force."""
        state = self.machine.master.state
        for group in state.groups.values():
            for peer in sorted(group.awaiting_flush):
                self.say(state.members[peer].connection, m.FlushReply(group.flush, []))
        for peer in sorted(state.change.awaiting_ready):
            self.say(state.members[peer].connection, m.LinksReady(state.view))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.machine.deadline()
        self.effects = self.machine.tick(self.now) if deadline is not None and deadline <= self.now else []
        after = self.machine.deadline()
        assert after is None or after > self.now

    @property
    def sent(self) -> list[Effect]:
        return [each for each in self.effects if not isinstance(each, MasterLog | Persist)]

    def told(self, connection: int) -> list[m.FromMaster]:
        return [each.message for each in self.effects if isinstance(each, Send) and each.connection == connection]

    def kinds(self, connection: int) -> list[type]:
        return [type(message) for message in self.told(connection)]

    def recover(self, *peers: int, masters: int = 1, **rest: Any) -> None:
        """These are the last view's, and all come."""
        for peer in peers:
            self.resume(peer, masters=masters)
        everything: list[Effect] = []
        for peer in peers:
            self.deliver(report_of(peer, view(7, *peers), **rest))
            everything += self.effects
        self.effects = everything


def test_kicked_peer_without_connection_gets_the_reason_when_it_returns() -> None:
    rig = Rig(secret=b"secret")
    rig.recover(1, 2, 3)
    rig.settle()
    rig.machine.detached(3, "reset", rig.now)
    rig.effects = rig.machine.kick(3, rig.now)
    (goodbye,) = rig.told(3)
    assert isinstance(goodbye, m.Goodbye)
    rig.settle()
    rig.resume(3, term=2)
    assert rig.told(3) == [goodbye]
    assert (goodbye.code, goodbye.secret) == (Result.INVALID_USAGE, rig.machine.master.state.secret)
    assert "the operator has removed this peer" in goodbye.reason


# Birth.


def test_fresh_master_founds_at_once() -> None:
    rig = Rig()
    rig.hello(1)
    assert rig.kinds(1) == [m.Welcome]
    assert rig.machine.is_leading


def test_newcomers_wait_for_earlier_run() -> None:
    rig = Rig(birth_at=2.0)
    rig.hello(1)
    assert rig.sent == []
    assert rig.machine.deadline() == 2.0
    rig.wait(2.0)
    assert rig.kinds(1) == [m.Welcome]


def test_newcomers_wait_while_peers_recover() -> None:
    rig = Rig(birth_at=2.0)
    rig.hello(9)
    rig.resume(1)
    rig.deliver(report_of(1, view(7, 1, 2, 3)))
    rig.wait(2.0)
    assert not rig.machine.is_leading
    rig.resume(2)
    rig.resume(3)
    rig.deliver(report_of(2, view(7, 1, 2, 3)))
    rig.deliver(report_of(3, view(7, 1, 2, 3)))
    (welcome,) = rig.told(9)
    assert isinstance(welcome, m.Welcome)
    assert welcome.run == "old"
    assert welcome.peer > 9


def test_held_newcomers_are_sent_away() -> None:
    rig = Rig()
    rig.resume(1)
    rig.deliver(report_of(1, view(7, 1, 2, 3)))
    rig.hello(9)
    rig.wait(HOLD_S - 0.1)
    assert rig.told(9) == []
    rig.wait(0.1)
    assert rig.told(9) == [
        m.Elsewhere("it waits for the peers of run 'old' (1 of the 3 peers of view 7 have connected)")
    ]


def test_held_newcomers_found_after_peers_leave() -> None:
    rig = Rig()
    rig.resume(1)
    rig.deliver(report_of(1, view(7, 1, 2, 3)))
    rig.hello(9)
    assert rig.sent == []
    rig.machine.disconnected(1, "closed", rig.now)
    rig.wait(OPTIONS.peer_timeout_s)
    assert rig.kinds(9) == [m.Welcome]


def test_standby_founds_no_run() -> None:
    rig = Rig(is_standby=True)
    rig.hello(1)
    assert rig.kinds(1) == [m.Elsewhere]
    assert Close(1) in rig.effects


def test_newcomer_with_several_masters_asks_all() -> None:
    rig = Rig()
    rig.hello(1, masters=2, may_found=False)
    assert rig.told(1) == [m.Elsewhere("it leads no run yet")]
    rig.hello(2, masters=2)
    assert rig.kinds(2) == [m.Welcome]
    rig.hello(3, masters=2, may_found=False)
    assert rig.kinds(3) == [m.Welcome]


# Gathering.


def test_majority_leads_after_timeout() -> None:
    rig = Rig()
    for peer in (1, 2):
        rig.resume(peer)
        assert rig.told(peer) == [m.PreVoteRequest()]
        rig.deliver(report_of(peer, view(7, 1, 2, 3)))
        assert rig.sent == []
    rig.wait(3.9)
    assert not rig.machine.is_leading
    rig.wait(0.1)
    assert rig.machine.is_leading
    assert rig.kinds(1) == [m.Resumed, m.Flush]
    assert (rig.machine.run, rig.machine.master.state.term) == ("old", 2)
    rig.settle()
    rig.resume(3)
    (goodbye,) = rig.told(3)
    assert isinstance(goodbye, m.Goodbye)
    assert "has continued without peer 3" in goodbye.reason


@pytest.mark.parametrize(("followers", "newest"), [((1,), 7), ((1, 2), 9)], ids=["too few", "of an older view"])
def test_voters_without_rivals_must_be_majority(followers: tuple[int, ...], newest: int) -> None:
    rig = Rig()
    for peer in (1, 2, 3):
        report = report_of(peer, view(newest if peer == 3 else 7, 1, 2, 3))
        rig.resume(peer)
        rig.reports |= {peer: report} if peer in followers else {}
        rig.quorum_of(report)
        rig.answer()
    for _ in range(6):
        rig.wait(1.0)
        assert not rig.machine.is_leading


def test_ops_continue_if_all_return() -> None:
    rig = Rig()
    rig.recover(1, 2, commits=[OpRef(4, 1)])
    for peer in (1, 2):
        assert rig.told(peer) == [m.Resumed(2, 4.0, [7]), m.OpsCommit(7, [OpRef(4, 1)])]
    rig.say(1, m.OpsDone(7, [OpRef(4, 2)]))
    rig.say(2, m.OpsDone(7, [OpRef(4, 2)]))
    assert rig.told(1) == rig.told(2) == [m.OpsCommit(7, [OpRef(4, 2)])]


def test_pair_verdict_reaches_pair() -> None:
    rig = Rig()
    op = OpRef(pair_tag(0, 2, 5), 0)
    rig.recover(1, 2, 3, commits=[op])
    assert [m.OpsCommit(7, [op]) in rig.told(peer) for peer in (1, 2, 3)] == [True, False, True]


def test_known_call_end_reaches_others_once() -> None:
    rig = Rig()
    outcome = m.GroupCallOutcome(Kind.UPDATE_TOPOLOGY, 5, Result.SUCCESS, "", 0)
    rig.resume(1)
    rig.resume(2)
    rig.deliver(report_of(1, view(7, 1, 2), outcomes=[outcome]))
    rig.deliver(report_of(2, view(7, 1, 2), waits_in=Kind.UPDATE_TOPOLOGY))
    rig.say(2, m.GroupCall(3, Kind.UPDATE_TOPOLOGY))
    assert rig.told(2) == [m.GroupCallResult(3, Result.SUCCESS, call_number=5)]
    rig.say(2, m.GroupCall(4, Kind.UPDATE_TOPOLOGY))
    assert rig.told(2) == []
    rig.say(1, m.GroupCall(8, Kind.UPDATE_TOPOLOGY))
    assert rig.told(2) == [m.GroupCallResult(4, Result.SUCCESS, call_number=6)]


def test_lost_state_error_names_peers() -> None:
    """Peers 2 and 3 were fetching it from peer 1. Their callers have offered to send, and what they had is gone."""
    rig = Rig()
    for peer in (2, 3):
        rig.resume(peer)
        rig.deliver(report_of(peer, view(7, 1, 2, 3)))
    rig.wait(3 * OPTIONS.peer_timeout_s)
    flushes = [each for each in rig.effects if isinstance(each, Send) and isinstance(each.message, m.Flush)]
    rig.answer()
    for each in flushes:
        assert isinstance(each.message, m.Flush)
        rig.say(each.connection, m.FlushReply(each.message.flush, []))
    for peer in (2, 3):
        rig.say(peer, m.LinksReady(rig.machine.master.state.view))
    for peer in (2, 3):
        rig.say(peer, m.GroupCall(1, Kind.SYNC, m.SyncOffer("receive_only", 3, b"", [])))
    (result,) = rig.told(3)
    assert isinstance(result, m.GroupCallResult)
    assert result.code == Result.NO_SHARED_STATE_AVAILABLE
    assert "RECEIVE_ONLY" not in result.reason
    assert "peers [2, 3] were being overwritten" in result.reason
    assert "peer 1 was lost: did not come back" in result.reason


def test_unaware_accepted_peer_is_not_readmitted() -> None:
    """Whoever had heard it is lost: now nobody in the run is accepted, and a view that has the rest is under way."""
    rig = Rig()
    for peer in (1, 2, 3):
        rig.resume(peer, is_accepted=peer == 1)
    rig.deliver(report_of(1, view(7, 1, 2, 3)))
    for peer in (2, 3):
        rig.deliver(report_of(peer, None, prepared(7, 1, 2, 3)))
    for peer in (2, 3):
        rig.heartbeat(10 + peer, peer)
    rig.say(1, m.Leave())
    views = [message for message in rig.told(2) if isinstance(message, m.Prepare)]
    assert [ring.peers for message in views for ring in message.rings] == [[2, 3]]
    for peer in (2, 3):
        rig.say(peer, m.LinksReady(rig.machine.master.state.view))
    assert rig.machine.master.state.accepted == [2, 3]


@pytest.mark.parametrize("kind", [Kind.SYNC, Kind.ARE_PEERS_PENDING])
def test_calls_wait_for_unaware_accepted_peers(kind: str) -> None:
    """Whoever has heard it calls, and expects them in the call."""
    rig = Rig()
    rig.resume(1)
    rig.resume(2, is_accepted=False)
    rig.deliver(report_of(1, view(7, 1, 2)))
    rig.deliver(report_of(2, None, prepared(7, 1, 2)))
    (flush,) = [each for each in rig.told(1) if isinstance(each, m.Flush)]
    offer = m.SyncOffer("enforce_popular", 3, b"root", []) if kind == Kind.SYNC else None
    rig.heartbeat(12, 2)
    rig.say(1, m.GroupCall(1, kind, offer))
    assert rig.sent == []
    rig.say(1, m.FlushReply(flush.flush, []))
    assert rig.kinds(2) == [m.Prepare]
    for peer in (1, 2):
        rig.say(peer, m.LinksReady(rig.machine.master.state.view))
    assert rig.kinds(1) == [m.Install]
    rig.say(2, m.GroupCall(1, kind, offer))
    for peer in (1, 2):
        (result,) = rig.told(peer)
        assert isinstance(result, m.GroupCallResult)
        assert (result.code, result.value) == (Result.SUCCESS, 3 if kind == Kind.SYNC else 0)


def test_known_call_end_cannot_be_cancelled() -> None:
    rig = Rig()
    outcome = m.GroupCallOutcome(Kind.ARE_PEERS_PENDING, 5, Result.SUCCESS, "", 1)
    for peer in (1, 2, 3):
        rig.resume(peer)
    rig.deliver(report_of(1, view(7, 1, 2, 3), outcomes=[outcome]))
    rig.deliver(report_of(2, view(7, 1, 2, 3), waits_in=Kind.ARE_PEERS_PENDING))
    rig.wait(4.0)
    rig.say(2, m.GroupCall(3, Kind.ARE_PEERS_PENDING))
    rig.say(2, m.GroupCallCancel(3))
    assert rig.told(2) == []
    (flush,) = {group.flush for group in rig.machine.master.state.groups.values()}
    for peer in (1, 2):
        rig.say(peer, m.FlushReply(flush, []))
    for peer in (1, 2):
        rig.say(peer, m.LinksReady(rig.machine.master.state.view))
    assert rig.told(2)[1:] == [m.GroupCallResult(3, Result.SUCCESS, value=1, call_number=5)]


def test_takeover_flush_commits_done_ops() -> None:
    rig = Rig()
    abort = m.Aborted(3, 0, Result.TIMEOUT, "given up")
    for peer in (1, 2):
        rig.resume(peer)
    rig.deliver(report_of(1, view(7, 1, 2, 3), commits=[OpRef(1, 0)]))
    rig.deliver(report_of(2, view(7, 1, 2, 3), aborts=[abort]))
    rig.wait(4.0)
    (flush,) = [each for each in rig.told(1) if isinstance(each, m.Flush)]
    rig.say(1, m.FlushReply(flush.flush, [OpRef(2, 0), OpRef(3, 0)], [OpRef(1, 0)]))
    rig.say(2, m.FlushReply(flush.flush, [OpRef(1, 0), OpRef(2, 0)], [], [abort]))
    (prepare,) = rig.told(1)
    assert isinstance(prepare, m.Prepare)
    assert sorted(prepare.commits) == [OpRef(1, 0), OpRef(2, 0)]
    assert prepare.aborts == [abort]
    assert prepare.lost == [(3, "did not come back after the loss of the master")]
    assert prepare.view > 7


def test_long_wait_does_not_shorten_patience() -> None:
    """One who was put out of the run, or cut off from its master, waits here when that dies: the rest come together."""
    rig = Rig()
    for early in (9, 1):
        rig.resume(early)
        rig.deliver(report_of(early, view(6 if early == 9 else 7, 1, 2, 3, *({early} - {1}))))
    rig.wait(8.0)
    rig.resume(2)
    rig.deliver(report_of(2, view(7, 1, 2, 3)))
    rig.wait(3.9)
    assert not rig.machine.is_leading
    rig.resume(3)
    rig.deliver(report_of(3, view(7, 1, 2, 3)))
    assert rig.machine.master.state.accepted == [1, 2, 3]


def test_broken_majority_restarts_patience() -> None:
    rig = Rig()
    for peer in (1, 2):
        rig.resume(peer)
        rig.deliver(report_of(peer, view(7, 1, 2, 3)))
    rig.wait(2.0)
    rig.machine.disconnected(2, "reset", rig.now)
    rig.wait(2.0)
    rig.resume(3)
    rig.deliver(report_of(3, view(7, 1, 2, 3)))
    rig.wait(3.9)
    assert not rig.machine.is_leading
    rig.wait(0.1)
    assert rig.machine.master.state.accepted == [1, 3]


def test_no_vote_request_without_majority() -> None:
    rig = Rig()
    for peer in (1, 2):
        rig.resume(peer)
        rig.quorum_of(report_of(peer, view(7, 1, 2, 3, 4)))
        assert rig.sent == []
    for outsider in (8, 9):
        rig.resume(outsider)
        rig.quorum_of(report_of(outsider, view(5, 1, 2, 3, 4, outsider)))
        assert rig.sent == []
    rig.wait(5.0)
    assert rig.sent == []
    rig.resume(3)
    rig.quorum_of(report_of(3, view(7, 1, 2, 3, 4)))
    assert [rig.told(peer) for peer in (1, 2, 3)] == [[m.VoteRequest(2)]] * 3
    rig.resume(4)
    rig.quorum_of(report_of(4, view(7, 1, 2, 3, 4)))
    assert rig.told(4) == [m.VoteRequest(2)]


def test_higher_term_raises_vote_request() -> None:
    rig = Rig()
    for peer in (1, 2):
        rig.resume(peer)
        rig.quorum_of(report_of(peer, view(7, 1, 2, 3)))
    assert rig.told(1) == rig.told(2) == [m.VoteRequest(2)]
    rig.resume(3, term=5)
    assert rig.told(1) == rig.told(2) == [m.VoteRequest(6)]
    assert rig.told(3) == [m.PreVoteRequest()]
    for peer in (1, 2, 3):
        rig.say(peer, m.Vote(2, report_of(peer, view(7, 1, 2, 3))))
    assert not rig.machine.is_leading
    rig.quorum_of(report_of(3, view(7, 1, 2, 3)))
    assert rig.told(3) == [m.VoteRequest(6)]
    for peer in (1, 2, 3):
        rig.say(peer, m.Vote(6, report_of(peer, view(7, 1, 2, 3))))
    assert rig.machine.master.state.term == 6


def test_unasked_vote_is_ignored() -> None:
    rig = Rig()
    rig.resume(1)
    rig.say(1, m.Vote(2, report_of(1, view(7, 1))))
    assert not rig.machine.is_leading


def test_repeated_resume_counts_once() -> None:
    rig = Rig()
    rig.resume(1)
    rig.deliver(report_of(1, view(7, 1, 2)))
    rig.say(11, m.Resume(m.PROTOCOL_VERSION, "old", 2, 1))
    assert rig.kinds(1) == [m.Elsewhere]
    rig.say(11, m.PreVote(view(7, 1, 2), None, False))
    assert not rig.machine.is_leading


def test_report_of_other_peer_is_refused() -> None:
    rig = Rig()
    rig.resume(1)
    rig.quorum_of(report_of(1, view(7, 1)))
    rig.say(1, m.Vote(2, report_of(2, view(7, 2))))
    assert rig.kinds(1) == [m.Goodbye]
    assert not rig.machine.is_leading


def test_unsound_report_is_refused() -> None:
    rig = Rig()
    rig.resume(1)
    rig.deliver(report_of(1, view(7, 2)))
    assert rig.kinds(1) == [m.Goodbye]
    assert not rig.machine.is_leading


def test_unaccepted_peers_start_over() -> None:
    rig = Rig()
    rig.resume(1)
    rig.resume(2, is_accepted=False)
    rig.deliver(report_of(2, None, prepared(8, 1, 2)))
    rig.deliver(report_of(1, view(7, 1), prepared(8, 1, 2)))
    assert rig.kinds(2) == [m.StartOver]
    assert rig.machine.master.state.accepted == [1]


def test_newcomers_alone_are_no_run() -> None:
    rig = Rig()
    rig.resume(2, is_accepted=False)
    rig.deliver(report_of(2, None))
    rig.wait(4.0)
    assert rig.kinds(2) == [m.StartOver]
    rig.hello(3)
    assert rig.sent == []
    rig.wait(4.0)
    assert rig.kinds(3) == [m.Welcome]


# Deposition.


@pytest.mark.parametrize(("masters", "leads"), [(1, True), (2, False)])
def test_lost_majority_deposes_with_rivals(masters: int, leads: bool) -> None:
    rig = Rig()
    rig.recover(1, 2, 3, masters=masters)
    rig.machine.disconnected(1, "reset", rig.now)
    assert rig.machine.is_leading
    rig.effects = rig.machine.disconnected(2, "reset", rig.now)
    assert rig.machine.is_leading is leads
    assert rig.kinds(3) == ([] if leads else [m.Elsewhere])


def test_lost_majority_of_possible_view_deposes() -> None:
    """Those three could go on with peer 1, which that view would have accepted."""
    rig = Rig()
    for peer in (1, 2, 3, 4):
        rig.resume(peer, masters=2)
        rig.deliver(report_of(peer, view(7, 1, 2, 3, 4), prepared(8, *range(1, 8))))
    assert rig.machine.is_leading
    (resumed, *_) = rig.told(4)
    assert isinstance(resumed, m.Resumed)
    assert resumed.in_force == [7, 8]
    rig.machine.disconnected(1, "reset", rig.now)
    assert not rig.machine.is_leading


def test_higher_term_deposes() -> None:
    rig = Rig()
    rig.recover(1, 2, 3)
    rig.say(12, m.Resume(m.PROTOCOL_VERSION, "old", 3, 2))
    assert rig.kinds(1) == [m.Elsewhere]
    assert rig.told(12) == [m.PreVoteRequest()]
    assert not rig.machine.is_leading


def test_secret_survives_takeover() -> None:
    rig = Rig(secret=b"of a new one")
    rig.recover(1, 2, 3, secret=b"of the run")
    rig.resume(9)
    (goodbye,) = rig.told(9)
    assert isinstance(goodbye, m.Goodbye)
    assert goodbye.secret == b"of the run"
    rig.hello(10)
    (welcome,) = rig.told(10)
    assert isinstance(welcome, m.Welcome)
    assert welcome.secret == b"of the run"


def test_new_run_has_own_secret() -> None:
    rig = Rig(secret=b"of a new one")
    rig.hello(1)
    (welcome,) = rig.told(1)
    assert isinstance(welcome, m.Welcome)
    assert welcome.secret == b"of a new one"


def test_higher_term_of_outsider_is_ignored() -> None:
    """That peer was put out of the run, and has followed a master that nobody follows who is in it."""
    rig = Rig()
    rig.recover(1, 2, 3)
    rig.machine.disconnected(3, "reset", rig.now)
    rig.settle()
    rig.resume(3, term=7)
    assert rig.kinds(3) == [m.Goodbye]
    rig.resume(9, term=7, is_accepted=False)
    assert rig.kinds(9) == [m.StartOver]
    assert rig.machine.is_leading


@pytest.mark.parametrize(("seconds", "leads"), [(1.0, True), (3.0, False)])
def test_standstill_deposes(seconds: float, leads: bool) -> None:
    rig = Rig()
    rig.recover(1, 2)
    rig.effects = rig.machine.stood_still(seconds, rig.now)
    assert rig.kinds(1) == ([] if leads else [m.Elsewhere])
    assert rig.machine.is_leading is leads


def test_peers_return_after_standstill() -> None:
    rig = Rig()
    rig.recover(1, 2)
    rig.machine.stood_still(9.0, rig.now)
    for peer in (1, 2):
        rig.resume(peer, term=2)
        rig.deliver(report_of(peer, view(7, 1, 2)))
    assert rig.machine.master.state.term == 3


def test_newcomer_after_standstill_is_welcomed() -> None:
    """A newcomer that would give up soon, as long as it has a peer timeout, is let in by a master that has no run to
    wait for."""
    rig = Rig(options=MasterOptions(peer_timeout_s=1.0))
    rig.hello(1, masters=2)
    rig.heartbeat(2, 1)
    rig.say(1, m.LinksReady(1, [], []))
    rig.machine.stood_still(3.0, rig.now)
    rig.hello(3)
    rig.wait(1.0)
    assert rig.sent == []
    rig.wait(DEPOSED_TIMEOUTS - 1.0)
    assert rig.kinds(3) == [m.Welcome]


def test_peers_of_other_run_are_sent_elsewhere() -> None:
    rig = Rig()
    rig.recover(1, 2)
    rig.resume(8, run="another")
    assert rig.kinds(8) == [m.Elsewhere]
    rig.resume(9, run="another", is_accepted=False)
    assert rig.kinds(9) == [m.StartOver]


@given(
    st.integers(1, 250),
    st.integers(0, TERMS - 1),
    st.integers(0, 2**32),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 10**10), min_size=2, max_size=2),
)
def test_number_blocks_are_disjoint(term: int, later: int, salt: int, other_salt: int, heard: list[int]) -> None:
    one, other = block(heard[0], term, 1000, salt), block(heard[1], term + later, 1000, other_salt)
    assert one > heard[0]
    assert other > heard[1]
    assert abs(one - other) >= 1000 or (later == 0 and salt % SALTS == other_salt % SALTS)


def test_takeover_numbers_exceed_known_peers() -> None:
    """One that nobody else knew of comes back when the run is led already, with a number that a newcomer might have."""
    rig = Rig()
    ring = 25_000, 25_001
    rig.recover(*ring)
    rig.hello(1)
    (welcome,) = rig.told(1)
    assert isinstance(welcome, m.Welcome)
    rig.resume(25_002, is_accepted=False)
    assert rig.kinds(25_002) == [m.StartOver]
    assert welcome.peer not in range(25_002, 30_000)
    assert rig.machine.master.state.members[welcome.peer].connection == 1


def test_takeover_keeps_link_metrics() -> None:
    """The latest counts where two have measured between the same hosts."""
    rig = Rig()
    rig.now = 100.0
    for peer in (1, 2, 3):
        rig.resume(peer)
    rig.now = 103.0
    old, late, of_one_gone = (
        m.LinkMetric(2, False, 1e6, 500),
        m.LinkMetric(2, False, 4e6, 500),
        m.LinkMetric(9, True, 1e6, 1),
    )
    rig.deliver(report_of(3, view(7, 1, 2, 3), link_metrics=[(late, 20), (of_one_gone, 10)]))
    rig.deliver(report_of(1, view(7, 1, 2, 3), link_metrics=[(old, 30)]))
    rig.deliver(report_of(2, view(7, 1, 2, 3)))
    metrics = rig.machine.master.state.link_metrics
    assert metrics.get((1, 2)) == KnownMetric(1e6, 0.0005, at=70.0)
    assert metrics.get((3, 2)) == metrics.get((3, 1)) == KnownMetric(4e6, 0.0005, at=80.0)
    assert metrics.get((9, 3)) is None


def test_takeover_keeps_sites_together() -> None:
    rig = Rig()
    for peer in (1, 2, 3):
        rig.resume(peer)
    for peer in (1, 2, 3):
        site = {"site": "rack", "site_size": 2} if peer == 1 else {}
        rig.deliver(msgspec.structs.replace(report_of(peer, view(7, 1, 2, 3, 4)), **site))
    rig.wait(4.0)
    (goodbye,) = [each for each in rig.told(1) if isinstance(each, m.Goodbye)]
    assert "site" in goodbye.reason


def test_peer_of_run_with_other_name_does_not_wait_here() -> None:
    rig = Rig(MasterOptions(run_name="b"))
    rig.say(1, m.Resume(m.PROTOCOL_VERSION, "old", 1, 1, run_name="a"))
    (answer,) = [effect.message for effect in rig.effects if isinstance(effect, Send)]
    assert isinstance(answer, m.Elsewhere)
    assert "serves run 'b', but this peer belongs to run 'a'" in answer.reason
    rig.say(2, m.Resume(m.PROTOCOL_VERSION, "old", 1, 2, run_name="b"))
    assert [effect.message for effect in rig.effects if isinstance(effect, Send)] == [m.PreVoteRequest()]


def test_restarted_master_tells_which_peers_are_back_and_for_how_long_it_waits() -> None:
    record = RunRecord("old", b"", 1, RecordedView.of(7, [1, 2, 3]), names={2: "lost", 3: "late"})
    rig = Rig(record=record, birth_at=65.0)
    assert rig.machine.recovery(5.0) == (
        "master restarted; 0 of 3 peers are back; waiting for peers 1, 2 (lost), 3 (late), 60 s left"
    )
    rig.resume(1)
    assert rig.machine.recovery(0.0) == "master restarted; no peer of its last view is back"
    rig.deliver(report_of(1, view(7, 1, 2, 3)))
    waits = "master restarted; 1 of 3 peers are back; waiting for peers 2 (lost), 3 (late), 8 s left"
    assert rig.machine.recovery(0.0) == waits
    rig.resume(3)
    rig.deliver(report_of(3, view(7, 1, 2, 3)))
    assert rig.machine.recovery(0.0) == ("master restarted; 2 of 3 peers are back; waiting for peer 2 (lost), 4 s left")
    rig.now = 4.0
    rig.effects = rig.machine.tick(rig.now)
    assert rig.machine.is_leading
    assert rig.machine.recovery(4.0) == ""
    assert [(loss.peer, loss.name) for loss in rig.machine.master.state.history.losses(4.0)] == [(2, "lost")]
