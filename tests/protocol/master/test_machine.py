"""The master's machine alone: what it answers to whom, what it logs, when it wants the time, and that it forgets."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.protocol.link_metrics import FAILURE_FRESH_S
from pccl.protocol.master import op_verdicts
from pccl.protocol.master.admission import HOSTS_MAX, NAME_CHARACTERS_MAX
from pccl.protocol.master.effects import Close, Effect, FindRings, MasterLog, Send, TakeHeartbeats
from pccl.protocol.master.link_failures import RELINKS_MAX
from pccl.protocol.master.machine import Master
from pccl.protocol.master.options import MasterOptions
from pccl.protocol.master.run_state import RunState
from pccl.protocol.master.waits import LONG_WAIT_S
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.optimization import ROUND_S_MAX
from pccl.runtime.master.ring_search import best_ring
from pccl.types import Result

TAG = 7
HEARTBEATS_FROM = 1_000_000
"""Peer n's signs of life come on this connection + n."""
HELLO = m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 2)


class Rig:
    """A master whose peers are spoken for. Peer n is on connection n."""

    def __init__(self, *groups: int, options: MasterOptions | None = None) -> None:
        self.master = Master(RunState("run", options))
        self.now = 0.0
        self.effects: list[Effect] = []
        """Of the last event."""
        for group in groups:
            self.hello(group)
        if groups:
            self.update()

    @property
    def peers(self) -> list[int]:
        return [*self.master.accepted, *self.master.pending]

    def hello(self, group: int = 0) -> int:
        connection = self.master.state.next_peer
        self.effects = self.master.connected(connection, f"10.0.0.{connection}", self.now)
        self.hear(connection, m.Hello(m.PROTOCOL_VERSION, "1.0", group, [], 5000, 2, f"n{connection}"))
        self.heartbeat(connection)
        self.answer()
        return connection

    def heartbeat(self, peer: int, connection: int = 0) -> int:
        """Makes a connection for signs of life. `effects` becomes what it led to, after what was there."""
        connection = connection or HEARTBEATS_FROM + peer
        before = self.effects + self.master.connected(connection, f"10.0.0.{peer}", self.now)
        self.hear(connection, m.HeartbeatHello(m.PROTOCOL_VERSION, "run", peer))
        self.effects = before + self.effects
        return connection

    def hear(self, connection: int, *messages: m.FromPeer) -> None:
        self.effects = []
        for message in messages:
            self.effects += self.master.received(connection, message, self.now)

    def lose(self, peer: int, reason: str = "reset") -> None:
        self.effects = self.master.disconnected(peer, reason, self.now)

    def tick(self, now: float) -> None:
        self.now = now
        self.effects = self.master.tick(now)

    def answer(self, done: dict[int, list[OpRef]] | None = None) -> None:
        """Peers answer Flush and Prepare, and who is asked for rings finds them, until nothing is asked any more.
        `effects` becomes all that came of it."""
        waiting = list(self.effects)
        everything = list(waiting)
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, FindRings):
                rings = {group: best_ring(problem) for group, problem in effect.problems.items()}
                self.effects = self.master.rings_found(effect.search, rings, self.now)
                waiting += self.effects
                everything += self.effects
            if not isinstance(effect, Send) or effect.connection not in self.peers:
                continue
            said: m.FromPeer
            if isinstance(effect.message, m.Flush):
                said = m.FlushReply(effect.message.flush, (done or {}).get(effect.connection, []))
            elif isinstance(effect.message, m.Prepare):
                said = m.LinksReady(effect.message.view)
            else:
                continue
            self.hear(effect.connection, said)
            waiting += self.effects
            everything += self.effects
        self.effects = everything

    def update(self) -> None:
        if self.master.pending:
            for peer in self.master.accepted:
                self.hear(peer, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
            self.answer()

    def told(self, peer: int) -> list[m.FromMaster]:
        """Without the joint-call numbers, which tests/protocol/test_failover.py looks at."""
        sent = [effect.message for effect in self.effects if isinstance(effect, Send) and effect.connection == peer]
        numbered = m.Install | m.JointResult
        return [msgspec.structs.replace(each, call_number=0) if isinstance(each, numbered) else each for each in sent]

    @property
    def logged(self) -> list[str]:
        return [effect.text for effect in self.effects if isinstance(effect, MasterLog)]


# Arrivals.


def test_welcome_says_whether_one_is_the_first() -> None:
    rig = Rig()
    rig.hello()
    (welcome,) = [message for message in rig.told(1) if isinstance(message, m.Welcome)]
    assert welcome == m.Welcome(1, "run", 1, 0)
    rig.hello()
    assert rig.told(2) == [m.Welcome(2, "run", 1, 1)]


@pytest.mark.parametrize(
    ("advertised", "known"),
    [
        ([], ["10.0.0.1"]),
        (["example.org"], ["example.org", "10.0.0.1"]),
        (["10.0.0.1", "::1"], ["10.0.0.1", "::1"]),
    ],
)
def test_peers_are_known_by_what_they_advertise_and_by_where_they_came_from(
    advertised: list[str], known: list[str]
) -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, m.Hello(m.PROTOCOL_VERSION, "1.0", 4, advertised, 5000, 3, "me"))
    rig.heartbeat(1)
    (prepare,) = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert prepare.members == [m.PeerInfo(1, 4, known, 5000, 3, "me")]


def test_refusal_closes_after_the_farewell() -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, m.Leave())
    log, farewell, close = rig.effects
    assert isinstance(log, MasterLog)
    assert log.level == "warning"
    reason = "the first message must be Hello, not Leave"
    assert farewell == Send(1, m.Goodbye(Result.MASTER_CONNECTION_FAILED, reason))
    assert close == Close(1)
    rig.lose(1)
    assert rig.effects == []


@pytest.mark.parametrize(
    "hello",
    [
        msgspec.structs.replace(HELLO, hosts=["h"] * (HOSTS_MAX + 1)),
        msgspec.structs.replace(HELLO, hosts=["h" * (NAME_CHARACTERS_MAX + 1)]),
        msgspec.structs.replace(HELLO, name="n" * (NAME_CHARACTERS_MAX + 1)),
        msgspec.structs.replace(HELLO, name="forged\n2026-01-01 INFO pccl.master: all is well"),
        msgspec.structs.replace(HELLO, version="\x1b[2J"),
    ],
)
def test_names_are_short_and_fit_for_a_log(hello: m.Hello) -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, hello)
    assert Close(1) in rig.effects
    assert "must be printable" in rig.logged[0]
    assert rig.logged[0].isprintable()


def test_so_many_may_wait_and_no_more() -> None:
    master = Master(RunState("run", MasterOptions(pending_max=2)))
    for connection in range(1, 5):
        master.connected(connection, "10.0.0.1", 0.0)
        effects = master.received(connection, HELLO, 0.0)
        assert (Close(connection) in effects) == (connection > 2)
    assert master.pending == [1, 2]


def test_who_makes_up_ops_is_put_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_verdicts, "OPEN_OPS_MAX", 10)
    rig = Rig(0, 0, 0)
    epoch = rig.master.state.groups[0].epoch
    rig.hear(2, m.OpsDone(epoch, [OpRef(tag, 0) for tag in range(5)]))
    rig.hear(2, m.OpsStalled(epoch, [OpRef(tag, 0) for tag in range(10, 15)]))
    assert rig.master.accepted == [1, 2, 3]
    rig.hear(1, m.OpsDone(epoch, [OpRef(100, 0)]))
    rig.answer()
    assert rig.master.accepted == [1, 3]


def test_last_words_of_the_evicted_are_not_heard() -> None:
    rig = Rig(0, 0)
    rig.hear(2, HELLO)
    assert Close(2) in rig.effects
    rig.answer()
    for words in (m.Leave(), m.OpsDone(2, []), m.JointCall(9, Kind.ARE_PEERS_PENDING)):
        rig.hear(2, words)
        assert rig.effects == []
    rig.lose(2)
    assert rig.effects == []


def test_groups_that_nobody_is_in_have_no_ring() -> None:
    assert Rig(0).master.ring(5) == []


# Verdicts and their order.


def test_commit_comes_before_what_follows_from_it() -> None:
    """A peer says done and dies: the verdict must reach the others before the flush."""
    rig = Rig(0, 0)
    rig.hear(1, m.OpsDone(2, [OpRef(TAG, 0)]))
    assert rig.effects == []
    rig.hear(2, m.OpsDone(2, [OpRef(TAG, 0)]), m.Leave())
    assert [type(message) for message in rig.told(1)] == [m.OpsCommit, m.Flush]


def test_done_that_decides_during_the_flush_of_another_loss() -> None:
    rig = Rig(0, 0, 0)
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.lose(1)
    rig.hear(3, m.OpsDone(2, [OpRef(TAG, 0)]))
    assert rig.told(3) == [], "the ring is being flushed"
    rig.hear(2, m.FlushReply(_flush_of(rig), []))
    rig.hear(3, m.FlushReply(_flush_of(rig), []))
    (prepare,) = rig.told(2)
    assert isinstance(prepare, m.Prepare)
    assert prepare.commits == [OpRef(TAG, 0)]


def _flush_of(rig: Rig) -> int:
    return rig.master.state.groups[0].flush


def test_one_verdict_an_op() -> None:
    rig = Rig(0, 0)
    failed = m.OpFailed(2, TAG, 0, Result.TIMEOUT, "late")
    rig.hear(1, failed)
    assert rig.told(1) == rig.told(2) == [m.OpAbort(2, TAG, 0, Result.TIMEOUT, "late")]
    rig.hear(2, failed, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.hear(1, m.OpsDone(2, [OpRef(TAG, 0)]))
    assert rig.effects == []


def test_failure_after_the_commit_is_too_late() -> None:
    rig = Rig(0, 0)
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(2, [OpRef(TAG, 0)]))
    assert rig.told(2) == [m.OpsCommit(2, [OpRef(TAG, 0)])]
    rig.hear(1, m.OpFailed(2, TAG, 0, Result.TIMEOUT, "late"))
    assert rig.effects == []


def test_ops_of_one_message_are_committed_by_one() -> None:
    rig = Rig(0, 0)
    ops = [OpRef(tag, 0) for tag in range(5)]
    rig.hear(1, m.OpsDone(2, ops))
    rig.hear(2, m.OpsDone(2, ops[::-1]))
    assert rig.told(1) == [m.OpsCommit(2, ops[::-1])]


def test_verdicts_of_a_flush_are_told_again_with_every_preparation() -> None:
    """Who has not heard of the first has heard of none."""
    rig = Rig(0, 0, 0, 0)
    for peer in (1, 2, 3):
        rig.hear(peer, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.lose(4)
    rig.answer()
    rig = Rig(0, 0, 0, 0)
    for peer in (1, 2, 3):
        rig.hear(peer, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.lose(4)
    for peer in (1, 2, 3):
        rig.hear(peer, m.FlushReply(_flush_of(rig), []))
    rig.lose(3)
    (again,) = rig.told(1)
    assert isinstance(again, m.Prepare)
    assert again.commits == [OpRef(TAG, 0)]
    rig.answer()
    rig.lose(2)
    rig.answer()
    prepares = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert [message.commits for message in prepares] == [[]], "but not after they were installed"


# Changes.


def test_losses_are_named_until_they_are_installed() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(2, "reset")
    for peer in (1, 3):
        rig.hear(peer, m.FlushReply(_flush_of(rig), []))
    rig.lose(3, "timed out")
    (prepare,) = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert prepare.lost == [(2, "reset"), (3, "timed out")]
    rig.answer()
    rig.hello()
    rig.update()
    assert all(not message.lost for message in rig.told(1) if isinstance(message, m.Prepare))


def test_install_waits_for_all_who_must_make_links() -> None:
    rig = Rig(0)
    rig.hello()
    rig.hear(1, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(2, m.LinksReady(2))
    assert rig.effects == []
    rig.hear(1, m.LinksReady(2))
    assert rig.told(2) == [m.Install(2, True)]
    assert rig.told(1) == [m.Install(2, True), m.JointResult(1, Result.SUCCESS)], "in this order"


def test_readiness_for_an_earlier_preparation_does_not_count() -> None:
    rig = Rig(0)
    rig.hello()
    rig.hello()
    rig.hear(1, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.LinksReady(2))
        assert rig.effects == []
    for peer in (1, 2):
        rig.hear(peer, m.LinksReady(3))
    assert m.Install(3, True) in rig.told(1)


def test_an_answer_counts_once_and_only_to_its_question() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    flush = _flush_of(rig)
    for words in (m.FlushReply(flush - 1, []), m.FlushReply(flush + 1, [])):
        rig.hear(1, words)
        rig.hear(2, words)
        assert rig.effects == []
    rig.hear(1, m.FlushReply(flush, []), m.FlushReply(flush, [OpRef(TAG, 0)]))
    rig.hear(2, m.FlushReply(flush, [OpRef(TAG, 0)]))
    (prepare,) = rig.told(1)
    assert isinstance(prepare, m.Prepare)
    assert prepare.commits == [], "the first answer stands"
    rig.hear(1, m.LinksReady(3), m.LinksReady(3, [(2, "refused")]))
    rig.hear(2, m.LinksReady(3))
    assert rig.told(1) == [m.Install(3, True)]


def test_done_in_a_ring_that_is_not_in_force_yet_does_not_count() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(_flush_of(rig), []))
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(3, [OpRef(TAG, 0)]))
        assert rig.effects == []


def test_lost_link_between_peers_that_are_in_no_ring() -> None:
    rig = Rig(0)
    for _ in range(2):
        rig.hello(7)
    rig.hear(2, m.LinkLost(0, 3, "what link?"))
    assert rig.effects == []


def test_measurements_of_an_earlier_call_do_not_count() -> None:
    rig = Rig(0, 0)
    for call in (1, 2):
        for peer in (1, 2):
            rig.hear(peer, m.JointCall(call, Kind.OPTIMIZE_TOPOLOGY))
        for way in (True, False):
            assert rig.told(1) == [], "the end that dials measures both ways"
            (probe,) = rig.told(2)
            assert isinstance(probe, m.Probe)
            assert probe.links == [(1, way)]
            for peer, number in ((2, probe.probe - 1), (2, probe.probe + 1), (1, probe.probe)):
                rig.hear(peer, m.Probes(number, []))
                assert rig.effects == []
            rig.hear(2, m.Probes(probe.probe, []))
        rig.answer()
        assert rig.told(1) == [m.JointResult(call, Result.SUCCESS)]
        rig.now += FAILURE_FRESH_S


def test_rings_found_for_an_earlier_call_do_not_count() -> None:
    rig = Rig(0, 0, 0)
    for peer in (1, 2, 3):
        rig.hear(peer, m.JointCall(1, Kind.OPTIMIZE_TOPOLOGY))
    searches = _measure(rig, lambda sender, receiver: 1e9)
    for search in (searches[0].search - 1, searches[0].search + 1):
        assert rig.master.rings_found(search, {0: [1, 3, 2]}, rig.now) == []
    rig.effects = list(searches)
    rig.answer()
    assert rig.told(1) == [m.JointResult(1, Result.SUCCESS)]
    assert rig.master.rings_found(searches[0].search, {0: [1, 3, 2]}, rig.now) == []
    assert rig.master.ring(0) == [1, 2, 3]


def test_a_ring_is_made_anew_where_its_links_favour_another_algorithm() -> None:
    rig = Rig(0, 0, 0)
    for call, limits in ((1, [0]), (2, [])):
        for peer in (1, 2, 3):
            rig.hear(peer, m.JointCall(call, Kind.OPTIMIZE_TOPOLOGY))
        rig.effects = list(_measure(rig, lambda sender, receiver: 1e6))
        rig.answer()
        told = rig.told(1)
        assert [message.direct_limit for message in told if isinstance(message, m.Install)] == limits
        assert isinstance(told[-1], m.JointResult)
        assert rig.master.ring(0) == [1, 2, 3]


def test_peers_hear_whether_all_of_their_ring_are_on_one_host() -> None:
    rig = Rig()
    for hosts in (["10.1.0.1"], ["10.1.0.1"], ["10.1.0.2"]):
        connection = rig.master.state.next_peer
        rig.effects = rig.master.connected(connection, hosts[0], rig.now)
        rig.hear(connection, m.Hello(m.PROTOCOL_VERSION, "1.0", 0, hosts, 5000, 2, ""))
        rig.heartbeat(connection)
        rig.answer()
        rig.update()
        (installed,) = (message for message in rig.told(connection) if isinstance(message, m.Install))
        assert installed.is_local == (hosts == ["10.1.0.1"])


def _measure(rig: Rig, rate: Callable[[int, int], float]) -> list[FindRings]:
    """Peers measure what they are asked for. Returns what is to be searched then."""
    while asked := [each for each in rig.effects if isinstance(each, Send) and isinstance(each.message, m.Probe)]:
        came: list[Effect] = []
        for send in asked:
            assert isinstance(send.message, m.Probe)
            me = send.connection
            found = [
                m.LinkMetric(peer, inbound, rate(peer, me) if inbound else rate(me, peer), 1000)
                for peer, inbound in send.message.links
            ]
            rig.hear(me, m.Probes(send.message.probe, found))
            came += rig.effects
        rig.effects = came
    return [effect for effect in rig.effects if isinstance(effect, FindRings)]


def test_report_of_one_who_fetches_nothing_does_not_count() -> None:
    rig = Rig(0, 0)
    for peer, root in ((1, b"a"), (2, b"b")):
        rig.hear(peer, m.JointCall(1, Kind.SYNC, m.SyncOffer("enforce_popular", 0, root, [])))
    (plan,) = rig.told(1)
    assert isinstance(plan, m.SyncPlan)
    assert not plan.fetch_content
    rig.hear(1, m.SyncReport(plan.sync, False, "out of malice"))
    assert rig.effects == []
    rig.hear(2, m.SyncReport(plan.sync, True))
    assert rig.told(1) == [m.JointResult(1, Result.SUCCESS)]


@pytest.mark.parametrize("reporter", [1, 3])
def test_whoever_reports_a_pair_the_newcomer_goes(reporter: int) -> None:
    rig = Rig(0, 0)
    rig.hello()
    for peer in (1, 2):
        rig.hear(peer, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
    other = {1: 3, 3: 1}[reporter]
    for peer in (1, 2, 3):
        rig.hear(peer, m.LinksReady(3, [(other, "refused")] if peer == reporter else []))
    (farewell,) = [message for message in rig.told(3) if isinstance(message, m.Goodbye)]
    assert farewell.code == Result.RANK_CONNECTION_FAILED
    assert farewell.reason.startswith("evicted: peers 1 and 3 cannot connect to each other: refused; peer 3 may ")
    rig.answer()
    assert rig.master.accepted == [1, 2]
    assert m.JointResult(1, Result.SUCCESS) in rig.told(1)


def _sent_away_for_its_links(rig: Rig) -> m.Hello:
    """A newcomer that was; how it comes back."""
    connection = rig.hello()
    for peer in (1, 2):
        rig.hear(peer, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
    for peer in (1, 2):
        rig.hear(peer, m.LinksReady(rig.master.state.view))
    rig.hear(connection, m.LinksReady(rig.master.state.view, [(1, "no answer")]))
    rig.answer()
    assert rig.peers == [1, 2]
    return m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 2, f"n{connection}")


def _come_back(rig: Rig, hello: m.Hello) -> int:
    rig.master.connected(10, "10.0.0.3", rig.now)
    rig.hear(10, hello)
    (welcome,) = rig.told(10)
    assert isinstance(welcome, m.Welcome)
    assert "was evicted for its links 1 times" in welcome.obstacle
    rig.heartbeat(welcome.peer)
    return welcome.peer


def _are_peers_pending(rig: Rig) -> int:
    for peer in (1, 2):
        rig.hear(peer, m.JointCall(2, Kind.ARE_PEERS_PENDING))
    (result,) = rig.told(2)
    assert isinstance(result, m.JointResult)
    return result.value


def test_who_was_evicted_for_its_links_tries_them_before_it_is_pending() -> None:
    rig = Rig(0, 0)
    peer = _come_back(rig, _sent_away_for_its_links(rig))
    assert _are_peers_pending(rig) == 0
    rig.tick(4.9)
    assert rig.effects == []
    rig.tick(5.0)
    (trial,) = rig.told(10)
    assert isinstance(trial, m.Trial)
    assert [member.peer for member in trial.members] == [1, 2]
    assert _are_peers_pending(rig) == 0
    rig.hear(10, m.Tried())
    assert rig.master.admissible == [peer]
    assert _are_peers_pending(rig) == 1


def test_links_that_still_fail_are_tried_again_after_a_longer_delay() -> None:
    rig = Rig(0, 0)
    _come_back(rig, _sent_away_for_its_links(rig))
    for due_at in (5.0, 15.0, 35.0):
        assert rig.master.deadline() == due_at
        rig.tick(due_at)
        assert isinstance(rig.told(10)[0], m.Trial)
        rig.hear(10, m.Tried([(1, "no answer"), (2, "no answer")]))
    assert _are_peers_pending(rig) == 0


def test_with_nobody_left_who_was_evicted_for_its_links_is_let_in() -> None:
    rig = Rig(0, 0)
    peer = _come_back(rig, _sent_away_for_its_links(rig))
    for other in (1, 2):
        rig.hear(other, m.Leave(""))
    rig.hear(10, m.LinksReady(rig.master.state.view))
    assert rig.master.accepted == [peer]


@pytest.mark.parametrize(("reporter", "other"), [(3, 1), (1, 3)])
def test_the_word_of_the_peer_that_dials_is_enough(reporter: int, other: int) -> None:
    """The newcomer dials, and has given up. Peer 1 may wait to be dialed for much longer; peer 3, if it is peer 1 that
    has given up, may still do so."""
    rig = Rig(0, 0)
    rig.hello()
    for peer in (1, 2):
        rig.hear(peer, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(2, m.LinksReady(3))
    rig.hear(reporter, m.LinksReady(3, [(other, "no answer")]))
    assert rig.peers == ([1, 2] if reporter == 3 else [1, 2, 3])


@pytest.mark.parametrize("other", [3, 4, 99])
def test_pairs_that_need_no_link_cost_nobody_its_place(other: int) -> None:
    rig = Rig(0, 0, 1)
    rig.hello()
    for peer in (1, 2, 3):
        rig.hear(peer, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(4, m.LinksReady(3, [(other, "so they say")]))
    for peer in (1, 2, 3):
        rig.hear(peer, m.LinksReady(3))
    assert rig.master.accepted == [1, 2, 3, 4]
    assert rig.master.state.installed_view == 3


def test_update_topology_during_a_change_returns_in_the_new_view() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
        assert rig.effects == []
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(_flush_of(rig), []))
    rig.answer()
    told = rig.told(1)
    assert told.index(m.Install(3, True)) < told.index(m.JointResult(1, Result.SUCCESS))


def test_nobody_measures_while_a_ring_is_changed() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.JointCall(1, Kind.OPTIMIZE_TOPOLOGY))
        assert rig.effects == []
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(_flush_of(rig), []))
    rig.answer()
    assert [type(message) for message in rig.told(2)][-2:] == [m.Install, m.Probe]


def test_ring_avoids_the_slow_direction_of_a_link() -> None:
    rig = Rig(0, 0, 0, 0)
    for peer in (1, 2, 3, 4):
        rig.hear(peer, m.JointCall(1, Kind.OPTIMIZE_TOPOLOGY))
    fast = {(1, 4), (4, 3), (3, 2), (2, 1)}
    rig.effects = list(_measure(rig, lambda sender, receiver: 1e7 if (sender, receiver) in fast else 1e5))
    rig.answer()
    assert rig.master.ring(0) == [1, 4, 3, 2]
    assert any("slowest link" in line and "0.8 Mbit/s" in line and "80 Mbit/s" in line for line in rig.logged)


def test_only_measuring_takes_time_for_which_a_deadline_stands() -> None:
    rig = Rig(0, 0)
    for peer in (1, 2):
        rig.hear(peer, m.JointCall(1, Kind.OPTIMIZE_TOPOLOGY))
    rig.tick(ROUND_S_MAX - 0.1)
    assert rig.effects == []
    rig.tick(ROUND_S_MAX)
    assert any("1->2 could not be measured" in line for line in rig.logged)
    rig.answer()
    assert rig.told(1) == [m.JointResult(1, Result.SUCCESS)], "the one that did not answer is not asked again"


def test_relinks_are_counted_by_pair() -> None:
    rig = Rig(0, 0, 0)
    for _ in range(RELINKS_MAX):
        for a, b in ((1, 2), (2, 3)):
            rig.hear(a, m.LinkLost(rig.master.state.view, b, "reset"))
            rig.answer()
    assert rig.master.accepted == [1, 2, 3]
    rig.hear(3, m.LinkLost(rig.master.state.view, 1, "reset"))
    rig.answer()
    assert rig.master.accepted == [1, 2, 3]
    rig.hear(3, m.LinkLost(rig.master.state.view, 2, "reset"))
    rig.answer()
    assert rig.master.accepted == [1, 2]


# Time and words to operators.


def test_the_time_is_wanted_only_where_somebody_is_waited_for() -> None:
    options = MasterOptions(hello_timeout_s=3.0, answer_timeout_s=30.0)
    rig = Rig(options=options)
    assert rig.master.deadline() is None
    rig.master.connected(9, "10.0.0.9", 1.0)
    assert rig.master.deadline() == 4.0
    rig.lose(9)
    assert rig.master.deadline() is None
    rig.hello()
    rig.hello()
    assert rig.master.deadline() is None
    rig.now = 5.0
    rig.hear(1, m.JointCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(1, m.LinksReady(2))
    assert rig.master.deadline() == 5.0 + LONG_WAIT_S
    rig.tick(5.0 + LONG_WAIT_S)
    assert rig.master.deadline() == 35.0
    rig.tick(34.9)
    assert rig.effects == []
    rig.tick(35.0)
    assert rig.master.accepted == [1]
    assert "did not answer the master within 30 s" in str(rig.told(2))


def test_every_question_has_its_own_time() -> None:
    rig = Rig(0, 0, 0, options=MasterOptions(answer_timeout_s=30.0))
    rig.lose(3)
    rig.now = 29.0
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(_flush_of(rig), []))
    assert rig.master.deadline() == 59.0


def test_long_wait_is_logged_once_with_whom_it_waits_for() -> None:
    rig = Rig(0, 0, 1)
    rig.hear(1, m.JointCall(1, Kind.ARE_PEERS_PENDING))
    rig.tick(LONG_WAIT_S)
    assert rig.logged == ["peer 1 (n1) has waited 10 s in are_peers_pending for peer 2 (n2), peer 3 (n3)"]
    rig.tick(10 * LONG_WAIT_S)
    assert rig.logged == []
    rig.hear(2, m.JointCall(1, Kind.SYNC, m.SyncOffer("enforce_popular", 0, b"", [])))
    rig.tick(20 * LONG_WAIT_S)
    assert rig.logged == ["peer 2 (n2) has waited 10 s in sync_shared_state for peer 1 (n1)"]


def test_stall_is_logged_with_who_is_not_done() -> None:
    rig = Rig(0, 0, 0)
    rig.hear(1, m.OpsDone(2, [OpRef(TAG, 0)]), m.OpsStalled(2, [OpRef(TAG, 0)]))
    assert rig.logged == ["peer 1 (n1) waits in the op with tag 7; not done yet: peers [2, 3]"]
    rig.hear(1, m.OpFailed(2, TAG, 0, Result.TIMEOUT, "late"))
    rig.hear(2, m.OpsStalled(2, [OpRef(TAG, 0)]))
    assert rig.effects == []


def test_arrivals_losses_and_views_are_logged() -> None:
    rig = Rig()
    rig.hello()
    assert rig.logged == ["peer 1 (n1) from 10.0.0.1 wants to join group 0", "view 1 installed; group 0: [1]"]
    rig.hello()
    rig.lose(2)
    assert rig.logged == ["peer 2 (n2) gone before it was accepted: reset"]
    rig.lose(1)
    assert rig.logged[0] == "peer 1 (n1) lost: reset"


# What it keeps.


def test_nothing_is_kept_of_those_who_are_gone() -> None:
    rig = Rig(0, 0, 1, 1, 0)
    rig.hear(1, m.LinkLost(2, 2, "reset"))
    rig.answer()
    for peer in (1, 2, 5):
        rig.hear(peer, m.OpsDone(rig.master.state.groups[0].epoch, [OpRef(TAG, 0)]))
    rig.hear(1, m.JointCall(2, Kind.SYNC, m.SyncOffer("enforce_popular", 0, b"", [])))
    for peer in (1, 2, 3, 4, 5):
        rig.lose(peer)
        rig.answer()
    parts = [part for name, part in vars(rig.master).items() if name != "_handlers"]
    left = {
        f"{type(part).__name__}.{name}": value
        for part in [*parts, rig.master.state.change]
        for name, value in vars(part).items()
        if isinstance(value, dict | set | list) and value
    }
    assert left == {}
    rig.hello()
    assert rig.master.accepted == [6]


def test_a_master_of_a_higher_term_says_so() -> None:
    master = Master(RunState("run", term=4))
    master.connected(1, "10.0.0.1", 0.0)
    welcome = master.received(1, HELLO, 0.0)[0]
    assert isinstance(welcome, Send)
    assert welcome.message == m.Welcome(1, "run", 4, 0)


# Silence.


def test_silence_is_told_to_the_silent_and_to_the_others() -> None:
    rig = Rig(0, 0, 0)
    rig.effects = rig.master.silent(HEARTBEATS_FROM + 3, 5.04, 7.0)
    evicted = "evicted: silent for 5.0 s"
    assert rig.told(3) == [m.Goodbye(Result.MASTER_CONNECTION_FAILED, evicted)]
    assert rig.effects.count(Close(3)) == 1
    rig.answer()
    (prepare,) = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert prepare.lost == [(3, evicted)]
    assert rig.master.ring(0) == [1, 2]


def test_nothing_is_due_at_a_deposed_master() -> None:
    rig = Rig(0, 0, options=MasterOptions(peer_timeout_s=3.0))
    rig.tick(100.0)
    rig.lose(HEARTBEATS_FROM + 1)
    rig.lose(HEARTBEATS_FROM + 2)
    rig.tick(103.0)
    assert rig.master.deposed
    assert rig.master.deadline() is None


def test_loss_closes_the_connection_for_heartbeats() -> None:
    rig = Rig(0, 0)
    rig.lose(2)
    assert Close(HEARTBEATS_FROM + 2) in rig.effects
    rig.effects = rig.master.silent(HEARTBEATS_FROM + 2, 5.0, 7.0)
    assert rig.effects == []


def test_heartbeats_that_break_off_are_waited_for() -> None:
    rig = Rig(0, 0, options=MasterOptions(peer_timeout_s=3.0))
    rig.tick(100.0)
    rig.lose(HEARTBEATS_FROM + 2)
    assert rig.master.deadline() == 103.0
    rig.tick(102.9)
    assert rig.peers == [1, 2]
    connection = rig.heartbeat(2, HEARTBEATS_FROM + 22)
    assert rig.effects[-1] == TakeHeartbeats(connection)
    assert rig.master.deadline() is None
    rig.lose(connection)
    rig.tick(106.0)
    assert rig.told(2) == [m.Goodbye(Result.MASTER_CONNECTION_FAILED, "evicted: silent for 3.0 s")]


def test_new_connection_for_heartbeats_replaces_one_that_stands() -> None:
    rig = Rig(0)
    rig.effects = []
    rig.heartbeat(1, HEARTBEATS_FROM + 11)
    assert rig.effects == [Close(HEARTBEATS_FROM + 1), TakeHeartbeats(HEARTBEATS_FROM + 11)]
    rig.lose(HEARTBEATS_FROM + 1)
    assert rig.effects == []
    assert rig.master.deadline() is None


@pytest.mark.parametrize(
    "hello",
    [
        m.HeartbeatHello(m.PROTOCOL_VERSION, "run", 9),
        m.HeartbeatHello(m.PROTOCOL_VERSION, "another run", 1),
        m.HeartbeatHello(m.PROTOCOL_VERSION + 1, "run", 1),
    ],
)
def test_heartbeats_of_nobody_known_are_refused(hello: m.HeartbeatHello) -> None:
    rig = Rig(0)
    rig.master.connected(77, "10.0.0.1", rig.now)
    rig.hear(77, hello)
    ((goodbye,), close) = rig.told(77), rig.effects[-1]
    assert isinstance(goodbye, m.Goodbye)
    assert "is not in this run" in goodbye.reason
    assert close == Close(77)


def test_nobody_is_admitted_before_it_shows_a_sign_of_life() -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, HELLO)
    assert rig.told(1) == [m.Welcome(1, "run", 1, 0, peer_timeout_s=5.0)]
    assert (rig.master.pending, rig.master.admissible) == ([1], [])
    rig.tick(9.9)
    assert rig.peers == [1]
    rig.tick(10.0)
    assert rig.told(1) == [m.Goodbye(Result.MASTER_CONNECTION_FAILED, "evicted: silent for 10.0 s")]


# Tags.


def reduce(rig: Rig, tag: int, epoch: int, sequence: int = 0) -> None:
    effects: list[Effect] = []
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(epoch, [OpRef(tag, sequence)]))
        effects += rig.effects
    rig.effects = effects


def test_a_group_that_has_used_many_tags_begins_a_new_epoch_when_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "TAGS_MAX", 20)
    rig = Rig(0, 0)
    for tag in range(10):
        reduce(rig, tag, 2)
        reduce(rig, tag, 2, sequence=1)  # no further tag
        assert [type(message) for message in rig.told(1)] == [m.OpsCommit]
    rig.hear(1, m.OpsDone(2, [OpRef(99, 0)]))
    reduce(rig, 10, 2)
    assert [type(message) for message in rig.told(1)] == [m.OpsCommit], "an op is in flight"
    rig.hear(2, m.OpsDone(2, [OpRef(99, 0)]))
    assert [type(message) for message in rig.told(1)] == [m.OpsCommit, m.Flush]
    rig.answer()
    prepare, install = rig.told(2)[-2:]
    assert isinstance(prepare, m.Prepare)
    assert (prepare.rings, prepare.lost, prepare.commits) == ([m.Ring(0, 3, [1, 2])], [], [])
    assert install == m.Install(3, True)
    reduce(rig, 10, 3)
    assert rig.told(1) == [m.OpsCommit(3, [OpRef(10, 0)])]


def test_a_group_that_is_never_quiet_begins_a_new_epoch_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "TAGS_MAX", 20)
    rig = Rig(0, 0)
    rig.hear(1, m.OpsDone(2, [OpRef(99, 0)]))
    for tag in range(20):
        rig.hear(1, m.OpFailed(2, tag, 0, Result.TIMEOUT, "late"))
        assert [type(message) for message in rig.told(1)] == [m.OpAbort]
    rig.hear(1, m.OpFailed(2, 20, 0, Result.TIMEOUT, "late"))
    assert [type(message) for message in rig.told(1)] == [m.OpAbort, m.Flush]


@pytest.mark.parametrize("kind", [Kind.UPDATE_TOPOLOGY, Kind.OPTIMIZE_TOPOLOGY, Kind.SYNC])
def test_a_joint_call_that_excludes_ops_is_a_quiet_moment(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rig = Rig(0, 0)
    for tag in range(11):
        reduce(rig, tag, 2)
    monkeypatch.setattr(completion, "TAGS_MAX", 20)
    offer = m.SyncOffer("enforce_popular", 0, b"root", []) if kind == Kind.SYNC else None
    for peer in (1, 2):
        rig.hear(peer, m.JointCall(5, kind, offer))
    if kind == Kind.OPTIMIZE_TOPOLOGY:
        (search,) = _measure(rig, lambda sender, receiver: 1e6)
        rig.effects = rig.master.rings_found(search.search, {0: [1, 2]}, rig.now)
    assert [type(message) for message in rig.told(1)][-2:] == [m.Flush, m.JointResult]
    rig.answer()
    assert rig.told(1)[-1] == m.Install(3, True)


# Ops that peers end by themselves.


def give_up(rig: Rig, peer: int, may_be_done: bool = True) -> None:
    rig.hear(peer, m.OpFailed(2, TAG, 0, Result.TIMEOUT, "late", may_be_done))


def test_all_are_asked_before_what_may_be_done_is_aborted() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    assert rig.told(1) == []
    assert rig.told(2) == rig.told(3) == [m.AbortVoteRequest(2, TAG, 0, Result.TIMEOUT, "late")]
    rig.hear(2, m.AbortVote(2, TAG, 0, False))
    assert rig.effects == []
    rig.hear(3, m.AbortVote(2, TAG, 0, False))
    assert rig.told(1) == rig.told(2) == rig.told(3) == [m.OpAbort(2, TAG, 0, Result.TIMEOUT, "late")]


def test_what_one_has_committed_is_committed_by_all() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    rig.hear(2, m.AbortVote(2, TAG, 0, False))
    rig.hear(3, m.AbortVote(2, TAG, 0, True))
    assert rig.told(1) == rig.told(2) == rig.told(3) == [m.OpsCommit(2, [OpRef(TAG, 0)])]
    give_up(rig, 2)
    assert rig.effects == []


def test_who_gives_up_too_need_not_be_asked() -> None:
    rig = Rig(0, 0)
    give_up(rig, 1)
    give_up(rig, 2)
    assert rig.told(1) == [m.OpAbort(2, TAG, 0, Result.TIMEOUT, "late")]


def test_what_cannot_be_done_any_more_is_aborted_at_once() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    give_up(rig, 2, may_be_done=False)
    assert rig.told(3) == [m.OpAbort(2, TAG, 0, Result.TIMEOUT, "late")]
    rig.hear(3, m.AbortVote(2, TAG, 0, False))
    assert rig.effects == []


def test_who_does_not_answer_is_evicted() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    rig.hear(2, m.AbortVote(2, TAG, 0, False))
    rig.now += rig.master.state.options.answer_timeout_s
    rig.effects = rig.master.tick(rig.now)
    (goodbye,) = rig.told(3)
    assert isinstance(goodbye, m.Goodbye)
    rig.hear(1, m.FlushReply(_flush_of(rig), [OpRef(TAG, 0)]))
    rig.hear(2, m.FlushReply(_flush_of(rig), []))
    (prepare,) = rig.told(2)
    assert isinstance(prepare, m.Prepare)
    assert (prepare.commits, prepare.aborts) == ([], [m.Aborted(TAG, 0, Result.TIMEOUT, "late")])


def test_what_a_survivor_has_committed_is_told_to_those_who_have_not() -> None:
    """And only that: it has committed a lot."""
    rig = Rig(0, 0, 0)
    rig.lose(3)
    rig.hear(1, m.FlushReply(_flush_of(rig), [], [OpRef(TAG, 4), OpRef(TAG + 1, 0)]))
    rig.hear(2, m.FlushReply(_flush_of(rig), [OpRef(TAG, 4), OpRef(TAG + 2, 0)]))
    (prepare,) = rig.told(2)
    assert isinstance(prepare, m.Prepare)
    assert prepare.commits == [OpRef(TAG, 4)]


def test_links_that_ops_go_through_may_break_any_number_of_times() -> None:
    rig = Rig(0, 0)
    for view in range(2, 2 + 3 * RELINKS_MAX):
        rig.hear(1, m.LinkLost(view, 2, "reset", has_committed=True))
        rig.answer()
    assert rig.master.accepted == [1, 2]


def test_who_has_used_very_many_tags_is_given_a_new_epoch() -> None:
    rig = Rig(0, 0)
    rig.hear(1, m.TagsUsed(2, 40_000))
    assert [type(message) for message in rig.told(2)] == [m.Flush]
    asked = rig.effects
    rig.hear(2, m.TagsUsed(2, 40_000))
    assert rig.effects == []
    rig.effects = asked
    rig.answer()
    assert rig.told(1)[-1] == m.Install(3, True)


def test_nothing_is_due_while_an_absent_peer_is_waited_for() -> None:
    """Two say that they cannot be linked, and one of them loses its control connection before more is known."""
    rig = Rig(0, 0, 0, 0)
    rig.hear(1, m.LinkLost(rig.master.state.view, 2, "reset"))
    for peer in rig.master.accepted:
        flushes = [message for message in rig.told(peer) if isinstance(message, m.Flush)]
        for flush in flushes:
            effects = rig.effects
            rig.hear(peer, m.FlushReply(flush.flush, []))
            rig.effects = effects + rig.effects
    rig.hear(2, m.LinkFailed(rig.master.state.view, 1, "no answer"))
    assert rig.master.evidence_due_at is not None
    rig.effects = rig.master.detached(2, "reset", rig.now)
    until = rig.now + rig.master.state.options.peer_timeout_s
    while (due := rig.master.deadline()) is not None and due < until:
        assert due > rig.now
        rig.tick(due)
    assert 2 in rig.master.accepted
    rig.tick(until)
    assert 2 not in rig.master.accepted
