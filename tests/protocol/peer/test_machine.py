"""The peer's machine alone: what it makes of the master, the engine, its caller, and of a master that lies."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol import topology
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.peer.links import GROWN_CONNECTIONS_MAX, LINK_CONNECTIONS_MAX
from pccl.protocol.peer.ops import STALL_AFTER_S
from pccl.protocol.point_to_point import pair_tag
from pccl.types import Result

ME = 2
TAG = 7

E = TypeVar("E")


class Rig:
    """Peer 2, a master that is spoken for, and what came out since one last looked."""

    def __init__(
        self, connections: int = 1, may_grow: bool = False, engine_threads: int = 1, secret: bytes = b""
    ) -> None:
        self.machine = ps.Peer(0, connections, may_grow)
        self.links: dict[int, int] = {}
        """Link numbers by peer."""
        self.missing: dict[int, int] = {}
        """Connections that links lack before they stand."""
        self.hear(m.Welcome(ME, "run", 1, 0, engine_threads=engine_threads, secret=secret))

    def hear(self, *messages: m.FromMaster) -> list[ps.Effect]:
        for message in messages:
            self.machine.received(message)
        return self.effects()

    def effects(self) -> list[ps.Effect]:
        found = self.machine.drain()
        for effect in found:
            if isinstance(effect, ps.MakeLink):
                self.links[effect.member.peer] = effect.link
                self.missing[effect.link] = effect.connections
        return found

    def join(self, ring: list[int], view: int = 1, **more: int) -> None:
        """The view is prepared, its links are made, and it is put in force."""
        self.hear(prepare(ring, view))
        for peer in ring:
            self.connect(peer)
        self.hear(m.Install(view))

    def connect(self, peer: int) -> list[ps.Effect]:
        for _ in range(self.missing.pop(self.links.get(peer, 0), 0)):
            self.machine.link_connected(self.links[peer])
        return self.effects()

    def launch(
        self, op: int, tag: int = TAG, now: float = 0.0, pair: tuple[int, bool] | None = None
    ) -> list[ps.Effect]:
        self.machine.launch(op, tag, now, pair)
        return self.effects()

    def done(self, *ops: int) -> list[ps.Effect]:
        for op in ops:
            self.machine.op_done(op, 1, 2)
        return self.effects()

    def ended(self, op: int) -> list[ps.Effect]:
        self.machine.op_ended(op, 1, 2)
        return self.effects()

    def joint(self, call: int, kind: str = Kind.UPDATE_TOPOLOGY) -> list[ps.Effect]:
        self.machine.joint(call, kind)
        return self.effects()


def member(peer: int, connections: int = 1) -> m.PeerInfo:
    return m.PeerInfo(peer, 0, [f"10.0.0.{peer}"], 1000 + peer, connections)


def prepare(
    ring: list[int], view: int, epoch: int | None = None, commits: list[OpRef] | None = None, **more: object
) -> m.Prepare:
    rings = [m.Ring(0, view if epoch is None else epoch, ring), m.Ring(9, 1, [90, 91])]
    members = [member(peer) for peer in (*ring, 90, 91)]
    return m.Prepare(view, members, rings, commits or [], **more)  # type: ignore[arg-type]


def of(kind: type[E], effects: list[ps.Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def said(effects: list[ps.Effect]) -> list[m.FromPeer]:
    return [effect.message for effect in of(ps.ToMaster, effects)]


@pytest.fixture
def rig() -> Rig:
    """Peer 2 in a ring of three."""
    rig = Rig()
    rig.join([1, 2, 3])
    return rig


# Views.


def test_view_says_who_is_where(rig: Rig) -> None:
    view = rig.machine.view
    assert view is not None
    assert (view.view, view.epoch, view.peer, view.group, view.ring) == (1, 1, 2, 0, (1, 2, 3))
    assert (view.world_size, view.global_world_size, view.group_sizes) == (3, 5, {0: 3, 9: 2})


def test_alone_there_is_nothing_to_link() -> None:
    rig = Rig()
    effects = rig.hear(prepare([2], 1))
    assert said(effects) == [m.LinksReady(1)]
    assert not of(ps.MakeLink, effects)


@pytest.fixture
def no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of more than three keep to the ring's links."""
    monkeypatch.setattr(topology, "MESH_PEERS_MAX", 3)


def test_small_group_links_all_pairs_but_needs_only_neighbours() -> None:
    rig = Rig()
    made = of(ps.MakeLink, rig.hear(prepare([1, 2, 3, 4], 1)))
    assert [link.member.peer for link in made] == [1, 3, 4]
    rig.connect(1)
    rig.machine.link_failed(rig.links[4], "connection refused")
    assert said(rig.effects()) == []
    assert said(rig.connect(3)) == [m.LinksReady(1, [], [(4, "connection refused")])]


def test_link_that_had_stood_is_made_anew_without_much_patience() -> None:
    """By the one that dials. The other end is patient where the link is needed, for it cannot tell why nothing comes;
    where it is not needed it need not be."""
    rig = Rig()
    for link in of(ps.MakeLink, rig.hear(prepare([1, 2, 3, 4], 1))):
        assert (link.reach_s, link.timeout_s) == (5.0, 10.0)
        rig.connect(link.member.peer)
    rig.hear(m.Install(1))
    effects = rig.hear(m.Flush(1, 1), prepare([1, 2, 3, 4], 2, relink=[(1, 2), (2, 3), (2, 4), (1, 4)]))
    made = {link.member.peer: link for link in of(ps.MakeLink, effects)}
    assert {peer: link.dial for peer, link in made.items()} == {1: True, 3: False, 4: False}
    assert (made[1].reach_s, made[1].timeout_s) == (2.5, 10.0)
    assert made[3].timeout_s == 10.0
    assert made[4].timeout_s == 3.0


@pytest.mark.usefixtures("no_mesh")
def test_ready_once_every_link_stands() -> None:
    rig = Rig()
    made = of(ps.MakeLink, rig.hear(prepare([1, 2, 3, 4], 1)))
    assert [(link.member.peer, link.made_in) for link in made] == [(1, 1), (3, 1)]
    assert said(rig.connect(1)) == []
    assert said(rig.connect(3)) == [m.LinksReady(1)]


def test_who_was_accepted_later_dials() -> None:
    rig = Rig()
    made = of(ps.MakeLink, rig.hear(prepare([1, 2, 3], 1)))
    assert [(link.member.peer, link.dial) for link in made] == [(1, True), (3, False)]


def test_a_link_has_as_many_connections_as_either_end_wants() -> None:
    rig = Rig(connections=3)
    members = [member(1, connections=5), member(2), member(3, connections=2)]
    made = of(ps.MakeLink, rig.hear(m.Prepare(1, members, [m.Ring(0, 1, [1, 2, 3])])))
    assert [link.connections for link in made] == [5, 3]
    rig.connect(3)
    for number in range(5):
        assert not said(rig.effects()), number
        assert rig.machine.link_connected(made[0].link)
    assert said(rig.effects()) == [m.LinksReady(1)]


def test_view_that_leaves_the_own_ring_alone_stops_nothing(rig: Rig) -> None:
    rig.launch(1)
    effects = rig.hear(prepare([1, 2, 3], 2, epoch=1, lost=[(90, "reset")]))
    assert effects == [ps.ToMaster(m.LinksReady(2))]
    assert of(ps.SubmitOp, rig.launch(2, tag=8))
    (installed,) = of(ps.Installed, rig.hear(m.Install(2)))
    assert (installed.view.view, installed.view.epoch) == (2, 1)
    assert installed.lost == [(90, "reset")]
    assert said(rig.done(1)) == [m.OpsDone(1, [OpRef(TAG, 0)])]


def test_who_keeps_its_ring_keeps_what_all_choose_algorithm_and_segments_by() -> None:
    rig = Rig()
    rig.hear(prepare([1, 2, 3], 1))
    for peer in (1, 3):
        rig.connect(peer)
    rig.hear(m.Install(1, direct_limit=4096, is_local=True))
    rig.hear(prepare([1, 2, 3], 2, epoch=1))
    (installed,) = of(ps.Installed, rig.hear(m.Install(2)))
    assert (installed.view.direct_limit, installed.view.is_local) == (4096, True)
    (submitted,) = of(ps.SubmitOp, rig.launch(1))
    assert (submitted.direct_limit, submitted.is_local) == (4096, True)


def test_links_that_stay_are_kept_and_those_to_the_lost_are_closed(rig: Rig) -> None:
    rig.hear(m.Flush(1, 1))
    effects = rig.hear(prepare([1, 2, 4], 2))
    assert of(ps.CloseLink, effects) == [ps.CloseLink(2)]
    assert [link.member.peer for link in of(ps.MakeLink, effects)] == [4]
    assert said(rig.connect(4)) == [m.LinksReady(2)]


def test_relink_closes_the_link_and_makes_it_anew(rig: Rig) -> None:
    rig.hear(m.Flush(1, 1))
    effects = rig.hear(prepare([1, 2, 3], 2, relink=[(2, 3), (5, 6)]))
    assert of(ps.CloseLink, effects) == [ps.CloseLink(2)]
    (made,) = of(ps.MakeLink, effects)
    assert (made.member.peer, made.made_in, made.dial) == (3, 2, False)


# Links.


def test_offer_from_the_future_is_asked_for_again() -> None:
    rig = Rig()
    assert rig.machine.link_offered(3, 1) is None
    rig.hear(prepare([1, 2, 3], 1))
    assert rig.machine.link_offered(3, 1) == rig.links[3]
    assert rig.machine.link_offered(3, 2) is None


@pytest.mark.parametrize("peer", [ME, 99])
def test_offer_of_one_who_is_not_in_the_view_is_refused(rig: Rig, peer: int) -> None:
    answer = rig.machine.link_offered(peer, 1)
    assert answer == f"peer {peer} is not in view 1"


def test_link_that_stands_takes_more_connections_up_to_a_bound(rig: Rig) -> None:
    assert rig.machine.link_offered(3, 1) == rig.links[3]
    while rig.machine.link_connected(rig.links[3]):
        pass
    assert rig.machine.link_offered(3, 1) == f"the link with peer 3 has {LINK_CONNECTIONS_MAX} connections already"


def test_lost_connection_is_made_anew_by_its_dialer(rig: Rig) -> None:
    rig.machine.connection_lost(rig.links[1], "reset")
    effects = rig.effects()
    (told,) = of(ps.PeerLog, effects)
    assert (told.level, told.link) == ("warning", rig.links[1])
    (added,) = of(ps.AddConnections, effects)
    assert (added.link, added.member.peer, added.made_in) == (rig.links[1], 1, 1)
    assert (list(added.indices), added.is_replacement) == ([1], True)
    assert rig.machine.link_connected(rig.links[1])
    rig.machine.connection_lost(rig.links[3], "reset")
    assert of(ps.AddConnections, rig.effects()) == [], "peer 3 dials"
    rig.machine.connection_lost(77, "reset")
    assert rig.effects() == []


def test_connection_lost_while_its_link_is_made_is_replaced_once_that_stands() -> None:
    rig = Rig(connections=2)
    rig.hear(prepare([1, 2, 3], 1))
    assert rig.machine.link_connected(rig.links[1])
    rig.machine.connection_lost(rig.links[1], "reset")
    assert of(ps.AddConnections, rig.effects()) == []
    assert rig.machine.link_connected(rig.links[1])
    assert [effect.link for effect in of(ps.AddConnections, rig.effects())] == [rig.links[1]]
    assert said(rig.connect(3)) == [m.LinksReady(1)]


def test_limited_link_doubles_its_connections_where_it_may_grow(rig: Rig) -> None:
    rig.machine.link_limited(rig.links[3])
    assert rig.effects() == []
    rig.machine.links.may_grow = True
    counts = []
    for _ in range(6):
        rig.machine.link_limited(rig.links[3])
        for added in of(ps.AddConnections, rig.effects()):
            assert not added.is_replacement
            counts.append(len(added.indices))
            for _ in added.indices:
                assert rig.machine.link_connected(rig.links[3])
    assert counts == [1, 2, 4, 8]
    assert 1 + sum(counts) == GROWN_CONNECTIONS_MAX


def test_links_have_connections_to_each_lane() -> None:
    """To begin with, where one is lost, and where a lane is held back."""
    rig = Rig(may_grow=True, engine_threads=3)
    rig.hear(prepare([1, 2, 3], 1))
    assert rig.missing == {rig.links[1]: 3, rig.links[3]: 3}
    rig.connect(1)
    rig.connect(3)
    rig.hear(m.Install(1))
    added = []
    for lane in (2, 2, 0, 1):
        rig.machine.connection_lost(rig.links[1], "reset", lane)
        added += [(lane, *effect.indices) for effect in of(ps.AddConnections, rig.effects())]
    assert added == [(2, 5), (2, 8), (0, 3), (1, 4)]
    rig.machine.link_limited(rig.links[3], 1)
    (grown,) = of(ps.AddConnections, rig.effects())
    assert list(grown.indices) == [4], "as many more as the lane has"
    for _ in range(3):
        assert rig.machine.link_connected(rig.links[3])
    rig.machine.link_limited(rig.links[3], 1)
    (grown,) = of(ps.AddConnections, rig.effects())
    assert list(grown.indices) == [7, 10]


def test_links_with_more_connections_than_lanes_continue_their_numbers() -> None:
    rig = Rig(connections=4, engine_threads=3)
    rig.join([1, 2, 3])
    added = []
    for lane in (0, 1, 2, 1):
        rig.machine.connection_lost(rig.links[1], "reset", lane)
        added += [list(effect.indices) for effect in of(ps.AddConnections, rig.effects())]
    assert added == [[6], [4], [5], [7]]


def test_offer_for_a_link_that_was_replaced_is_refused(rig: Rig) -> None:
    rig.hear(m.Flush(1, 1), prepare([1, 2, 3], 2, relink=[(2, 3)]))
    assert rig.machine.link_offered(3, 1) == "the link with peer 3 was made anew in view 2"


def test_dialer_that_begins_anew_is_believed(rig: Rig) -> None:
    """It has lost a link that still seems to stand here."""
    rig.hear(m.Flush(1, 1), prepare([1, 2, 3], 2))
    offered = rig.machine.link_offered(3, 2)
    effects = rig.effects()
    assert of(ps.CloseLink, effects) == [ps.CloseLink(2)]
    (made,) = of(ps.MakeLink, effects)
    assert (made.link, made.made_in, made.dial) == (offered, 2, False)


def test_offer_after_the_end_is_refused(rig: Rig) -> None:
    rig.machine.master_lost("gone")
    assert rig.machine.link_offered(3, 1) == "the session is over"


def test_failed_link_is_reported_with_the_others_up() -> None:
    rig = Rig()
    rig.hear(prepare([1, 2, 3], 1))
    rig.machine.link_failed(rig.links[1], "connection refused")
    effects = rig.effects()
    assert of(ps.CloseLink, effects) == [ps.CloseLink(rig.links[1])]
    assert said(effects) == [m.LinkFailed(1, 1, "connection refused")], "at once, for whoever looks for what is wrong"
    assert said(rig.connect(3)) == [m.LinksReady(1, [(1, "connection refused")])]


def test_failure_of_a_link_that_stands_or_is_gone_means_nothing(rig: Rig) -> None:
    rig.machine.link_failed(rig.links[1], "too late")
    rig.machine.link_failed(77, "which?")
    assert rig.effects() == []
    assert not rig.machine.link_connected(77)


def test_attempt_of_an_earlier_preparation_is_made_once_more() -> None:
    rig = Rig()
    rig.hear(prepare([1, 2, 3], 1))
    rig.hear(prepare([1, 2, 3], 2))
    rig.machine.link_failed(rig.links[1], "made anew")
    effects = rig.effects()
    (made,) = of(ps.MakeLink, effects)
    assert (made.member.peer, made.made_in, made.dial) == (1, 2, True)
    assert said(effects) == []
    rig.machine.link_failed(made.link, "connection refused")
    rig.effects()
    assert said(rig.connect(3)) == [m.LinksReady(2, [(1, "connection refused")])]


def test_link_that_stood_and_is_lost_before_the_answer_is_reported_as_missing() -> None:
    """The master may have given the pair up, and then nothing else would ever end the wait for it."""
    rig = Rig()
    rig.hear(prepare([1, 2, 3, 4, 5], 1))
    for peer in (1, 3, 5):
        assert said(rig.connect(peer)) == []
    rig.machine.link_lost(rig.links[5], "reset")
    assert said(rig.effects()) == [m.LinkLost(1, 5, "reset")]
    assert said(rig.connect(4)) == [m.LinksReady(1, [], [(5, "reset")])]


def test_lost_link_is_reported_and_let_go(rig: Rig) -> None:
    rig.machine.link_lost(rig.links[3], "reset")
    effects = rig.effects()
    assert of(ps.CloseLink, effects) == [ps.CloseLink(rig.links[3])]
    assert said(effects) == [m.LinkLost(1, 3, "reset")]
    rig.machine.link_lost(rig.links[3], "again")
    assert rig.effects() == []


@pytest.mark.usefixtures("no_mesh")
def test_loss_of_a_link_that_is_not_needed_is_not_reported() -> None:
    rig = Rig()
    rig.join([1, 2, 3, 4])
    rig.hear(m.Flush(1, 1), prepare([1, 3, 2, 4], 2))
    rig.connect(4)
    rig.hear(m.Install(2))
    rig.machine.link_lost(rig.links[1], "reset")
    assert said(rig.effects()) == []


def test_link_lost_before_it_was_complete_is_not_waited_for() -> None:
    rig = Rig(connections=2)
    rig.hear(prepare([1, 2], 1))
    assert rig.machine.link_connected(rig.links[1])
    rig.machine.link_lost(rig.links[1], "reset")
    assert m.LinksReady(1, [(1, "reset")]) in said(rig.effects())


def test_op_whose_link_has_just_been_lost_has_none(rig: Rig) -> None:
    rig.machine.link_lost(rig.links[3], "reset")
    rig.effects()
    (submitted,) = of(ps.SubmitOp, rig.launch(1))
    assert (submitted.link_prev, submitted.link_next) == (rig.links[1], 0)


# Ops.


def test_op_is_submitted_by_rank_and_use(rig: Rig) -> None:
    (first,) = of(ps.SubmitOp, rig.launch(1))
    assert first == ps.SubmitOp(1, 1, TAG, 0, 1, 3, (rig.links[1], 0, rig.links[3]), False, False)
    rig.done(1)
    effects = rig.hear(m.OpsCommit(1, [OpRef(TAG, 0)]))
    assert effects == [ps.OpResult(1, Result.SUCCESS, "", 3, 1, 2), ps.ForgetOp(1)]
    (second,) = of(ps.SubmitOp, rig.launch(2))
    assert second.sequence == 1


def test_committed_op_is_not_in_flight_any_more(rig: Rig) -> None:
    rig.launch(1)
    rig.done(1)
    rig.hear(m.OpsCommit(1, [OpRef(TAG, 0)]))
    assert rig.machine.open_ops == 0
    assert of(ps.ToMaster, rig.joint(5))


def test_ops_that_are_done_together_share_a_message(rig: Rig) -> None:
    for op in range(3):
        rig.launch(op, tag=op)
    assert said(rig.done(2, 0, 1)) == [m.OpsDone(1, [OpRef(2, 0), OpRef(0, 0), OpRef(1, 0)])]


def test_result_waits_until_the_engine_gives_the_buffers_back(rig: Rig) -> None:
    rig.launch(1)
    effects = rig.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    assert effects == [ps.EndOp(1, False)]
    assert of(ps.OpResult, rig.ended(1)) == [ps.OpResult(1, Result.TIMEOUT, "late", 3, 1, 2)]
    assert rig.machine.open_ops == 0


def test_flush_reply_tells_what_is_done_and_undecided(rig: Rig) -> None:
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


def test_flush_ends_ops_and_install_returns_them(rig: Rig) -> None:
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


def test_buffers_that_come_back_after_install(rig: Rig) -> None:
    rig.launch(1)
    rig.hear(m.Flush(9, 1))
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2], 2))
    assert of(ps.OpResult, rig.hear(m.Install(2))) == []
    assert len(of(ps.OpResult, rig.ended(1))) == 1


def test_verdict_on_an_op_that_is_not_launched_here_yet(rig: Rig) -> None:
    rig.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    assert rig.launch(1) == [ps.OpResult(1, Result.TIMEOUT, "late", 3)]
    assert of(ps.SubmitOp, rig.launch(2))[0].sequence == 1


def test_verdict_on_an_op_that_counts_as_made(rig: Rig) -> None:
    """The joint call that fails with it has told the caller."""
    rig.joint(5)
    abort = m.OpAbort(1, TAG, 0, Result.INVALID_USAGE, "never", counts_as_made=True)
    rig.hear(abort, abort, m.JointResult(5, Result.INVALID_USAGE, "never"))
    assert of(ps.SubmitOp, rig.launch(1))[0].sequence == 1


def test_who_waits_to_launch_an_op_that_counts_as_made_is_told(rig: Rig) -> None:
    rig.joint(5)
    rig.launch(1)
    rig.hear(m.OpAbort(1, TAG, 0, Result.INVALID_USAGE, "never", counts_as_made=True))
    effects = rig.hear(m.JointResult(5, Result.INVALID_USAGE, "never"))
    assert of(ps.OpResult, effects) == [ps.OpResult(1, Result.INVALID_USAGE, "never", 3)]
    assert of(ps.SubmitOp, rig.launch(2))[0].sequence == 1


def test_verdict_that_comes_twice_is_no_verdict_on_the_next_use(rig: Rig) -> None:
    abort = m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late")
    rig.launch(1)
    rig.hear(abort, abort)
    rig.ended(1)
    assert of(ps.SubmitOp, rig.launch(2))


def test_early_verdict_ends_with_its_ring(rig: Rig) -> None:
    rig.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"), m.Flush(9, 1))
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2], 2), m.Install(2))
    assert of(ps.SubmitOp, rig.launch(1))[0].epoch == 2


def test_refusal_of_an_op_that_has_its_verdict(rig: Rig) -> None:
    """Both may come of one batch: a launch that had to wait, and its abort."""
    rig.joint(5)
    rig.launch(1)
    effects = rig.hear(m.JointResult(5, Result.SUCCESS), m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    assert [type(effect) for effect in effects] == [ps.CallResult, ps.SubmitOp, ps.EndOp]
    rig.machine.op_refused(1, Result.INVALID_ARGUMENT, "bad")
    assert rig.effects() == [ps.OpResult(1, Result.TIMEOUT, "late", 3)]


def test_refused_op_fails_as_the_master_says(rig: Rig) -> None:
    rig.launch(1)
    rig.machine.op_refused(1, Result.INVALID_ARGUMENT, "bad")
    assert said(rig.effects()) == [m.OpFailed(1, TAG, 0, Result.INVALID_ARGUMENT, "bad")]
    results = rig.hear(m.OpAbort(1, TAG, 0, Result.INVALID_ARGUMENT, "bad"))
    assert results == [ps.OpResult(1, Result.INVALID_ARGUMENT, "bad", 3)]


def test_done_is_told_before_a_cancel(rig: Rig) -> None:
    """The master may then still commit the op."""
    rig.launch(1)
    rig.machine.op_done(1)
    rig.machine.cancel(1, Result.TIMEOUT, "late")
    assert [type(message) for message in said(rig.effects())] == [m.OpsDone, m.OpFailed]


def test_cancel_of_what_has_ended_is_ignored(rig: Rig) -> None:
    rig.launch(1)
    rig.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    rig.machine.cancel(1, Result.TIMEOUT, "late")
    rig.machine.cancel(99, Result.TIMEOUT, "late")
    assert rig.effects() == []


# Waiting long.


def test_stalled_op_is_reported_once(rig: Rig) -> None:
    assert rig.machine.deadline() is None
    rig.launch(1, now=10.0)
    rig.launch(2, tag=8, now=11.0)
    assert rig.machine.deadline() == 10.0 + STALL_AFTER_S
    rig.done(1)
    rig.machine.tick(10.0 + STALL_AFTER_S)
    effects = rig.effects()
    assert said(effects) == [m.OpsStalled(1, [OpRef(TAG, 0)])]
    assert "the other peers' results" in of(ps.PeerLog, effects)[0].text
    assert rig.machine.deadline() == 11.0 + STALL_AFTER_S
    rig.machine.tick(20.0)
    effects = rig.effects()
    assert said(effects) == [m.OpsStalled(1, [OpRef(8, 0)])]
    assert "data of its neighbours" in of(ps.PeerLog, effects)[0].text
    assert rig.machine.deadline() is None
    rig.machine.tick(30.0)
    assert rig.effects() == []


def test_nothing_stalls_while_the_ring_is_changed(rig: Rig) -> None:
    rig.launch(1)
    rig.hear(m.Flush(9, 1))
    assert rig.machine.deadline() is None, "or the clock would be asked again and again"
    rig.machine.tick(100.0)
    assert rig.effects() == []


# Joint calls.


def test_question_for_pending_peers_says_which_ops_are_in_flight(rig: Rig) -> None:
    rig.launch(1)
    assert said(rig.joint(5, Kind.ARE_PEERS_PENDING)) == [m.JointCall(5, Kind.ARE_PEERS_PENDING, None, [OpRef(TAG, 0)])]


def test_only_what_was_told_to_the_master_is_cancelled_there(rig: Rig) -> None:
    rig.joint(5)
    rig.joint(6)
    rig.machine.cancel_joint(6)
    assert rig.effects() == [ps.CallResult(6, Result.TIMEOUT, "cancelled by its caller", 0)]
    rig.machine.cancel_joint(5)
    assert said(rig.effects()) == [m.JointCancel(5)]
    rig.machine.cancel_joint(99)
    assert rig.effects() == []


def test_a_sync_plan_names_the_donors_to_ask(rig: Rig) -> None:
    plan = m.SyncPlan(4, 1, b"root", [3, ME, 99, 1], True, False)
    assert rig.hear(plan) == [ps.RunSync(plan, [member(3), member(1)])]
    rig.machine.sync_ended(4, False, "why", [(3, "how")])
    assert said(rig.effects()) == [m.SyncReport(4, False, "why", [(3, "how")])]


def test_probe_names_the_links_to_measure(rig: Rig) -> None:
    connections = rig.machine.connections
    links = [ps.ProbedLink(member(1), False, connections), ps.ProbedLink(member(1), True, connections)]
    assert rig.hear(m.Probe(4, [(1, False), (99, True), (1, True)])) == [ps.RunProbe(4, links)]
    found = [m.LinkMetric(1, False, 1e6, 250)]
    rig.machine.probed(4, found, 0.0)
    assert said(rig.effects()) == [m.Probes(4, found)]


def test_what_it_has_measured_is_remembered_for_the_next_master(rig: Rig) -> None:
    def reported() -> list[tuple[m.LinkMetric, int]]:
        term = rig.machine.term + 1
        rig.machine.master_lost("gone")
        rig.machine.resume(1, now=100.0)
        *_, follow = said(rig.hear(m.VoteRequest(term)))
        assert isinstance(follow, m.Vote)
        rig.hear(m.Resumed(term, 5.0))
        return follow.report.link_metrics

    rig.machine.outlives_masters = True
    to_1, from_1, to_3 = (
        m.LinkMetric(1, False, 1e6, 250),
        m.LinkMetric(1, True, 2e6, 250),
        m.LinkMetric(3, False, 3e6, 9),
    )
    rig.hear(m.Probe(4, [(1, False), (1, True), (3, False)]))
    rig.machine.probed(4, [to_1, from_1], 40.0)
    rig.machine.probed(5, [to_3], 60.0)
    assert reported() == [(to_1, 60), (from_1, 60), (to_3, 40)]
    rig.hear(m.Probe(6, [(1, False), (1, True)]))
    rig.machine.probed(6, [to_1], 90.0)
    assert reported() == [(to_3, 40), (to_1, 10)]
    rig.join([ME, 3], view=2)
    assert reported() == [(to_3, 40)]
    rig.machine.probed(7, [m.LinkMetric(peer, True, 1e6, 9) for peer in range(10**4)], 90.0)
    assert [metric.peer for metric, _ in reported()] == list(range(10**4 - m.METRICS_KEPT_MAX, 10**4))


# The end.


def test_all_that_is_open_ends_with_the_session(rig: Rig) -> None:
    rig.joint(5, Kind.ARE_PEERS_PENDING)
    rig.joint(6)
    rig.launch(1)
    rig.machine.master_lost("gone")
    effects = rig.effects()
    failure = (Result.MASTER_CONNECTION_FAILED, "gone")
    assert of(ps.EndOp, effects) == [ps.EndOp(1, False)]
    assert of(ps.CallResult, effects) == [ps.CallResult(5, *failure, 0), ps.CallResult(6, *failure, 0)]
    assert {effect.link for effect in of(ps.CloseLink, effects)} == set(rig.links.values())
    assert effects[-1] == ps.Ended(*failure)
    assert rig.ended(1) == [ps.OpResult(1, *failure, 3, 1, 2)]


def test_nothing_happens_after_the_end(rig: Rig) -> None:
    rig.machine.leave("bye")
    assert said(rig.effects()) == [m.Leave("bye")]
    assert rig.hear(m.Install(99), m.Goodbye(5, "?")) == []
    rig.machine.leave("again")
    rig.machine.master_lost("gone")
    rig.machine.sync_ended(1, True, "", [])
    rig.machine.probed(1, [], 0.0)
    rig.machine.cancel_joint(1)
    rig.machine.link_lost(rig.links[1], "reset")
    rig.machine.tick(1000.0)
    assert rig.effects() == []
    assert of(ps.OpResult, rig.launch(1))[0].code is Result.NOT_INITIALIZED
    assert of(ps.CallResult, rig.joint(2))[0].code is Result.NOT_INITIALIZED


def test_verdict_stands_when_the_session_ends_before_the_install(rig: Rig) -> None:
    rig.launch(1)
    rig.done(1)
    rig.hear(m.Flush(9, 1))
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2], 2, commits=[OpRef(TAG, 0)]))
    rig.ended(1)
    rig.machine.master_lost("gone")
    assert of(ps.OpResult, rig.effects())[0].code is Result.SUCCESS


@pytest.mark.parametrize("code", [Result.SUCCESS, 999, -1])
def test_farewell_with_a_senseless_code(rig: Rig, code: int) -> None:
    rig.launch(1)
    assert rig.hear(m.Goodbye(code, "why"))[-1] == ps.Ended(Result.MASTER_CONNECTION_FAILED, "why")


# A master that lies is a broken connection, never a broken peer.


def _with_op(rig: Rig) -> None:
    rig.launch(1)


def _frozen(rig: Rig) -> None:
    _with_op(rig)
    rig.hear(m.Flush(9, 1))


def _prepared(rig: Rig) -> None:
    _frozen(rig)
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2], 5))


def _calling(rig: Rig) -> None:
    rig.joint(5)


def _nothing(rig: Rig) -> None:
    pass


@pytest.mark.parametrize(
    ("before", "lie"),
    [
        (_nothing, m.Welcome(3, "run", 1, 0)),
        (_nothing, m.Flush(9, 2)),
        (_frozen, m.Flush(10, 1)),
        (_nothing, prepare([1, 2], 1)),
        (_nothing, prepare([1, 2], 0)),
        (_prepared, prepare([1, 2], 5)),
        (_prepared, prepare([1, 2], 4)),
        (_nothing, prepare([1, 3], 2)),
        (_nothing, m.Prepare(2, [member(2)], [m.Ring(0, 2, [1, 2, 9])])),
        (_frozen, prepare([1, 2], 2, commits=[OpRef(TAG, 0)])),
        (_nothing, m.Install(1)),
        (_prepared, m.Install(6)),
        (_with_op, m.OpsCommit(1, [OpRef(TAG, 0)])),
        (_nothing, m.OpsCommit(1, [OpRef(TAG, 0)])),
        (_with_op, m.OpsCommit(2, [OpRef(TAG, 0)])),
        (_frozen, m.OpsCommit(1, [OpRef(TAG, 0)])),
        (_with_op, m.OpAbort(1, TAG, 0, Result.SUCCESS, "?")),
        (_with_op, m.OpAbort(1, TAG, 0, 999, "?")),
        (_with_op, m.OpAbort(2, TAG, 0, Result.TIMEOUT, "?")),
        (_nothing, m.JointResult(5, Result.SUCCESS)),
        (_calling, m.JointResult(6, Result.SUCCESS)),
        (_calling, m.JointResult(5, 999)),
    ],
)
def test_what_the_master_cannot_say(rig: Rig, before: object, lie: m.FromMaster) -> None:
    assert callable(before)
    before(rig)
    rig.effects()
    with pytest.raises(ProtocolError):
        rig.machine.received(lie)
    rig.machine.master_lost("it does not speak as a master does")
    effects = rig.effects()
    assert effects[-1] == ps.Ended(Result.MASTER_CONNECTION_FAILED, "it does not speak as a master does")
    if rig.machine.open_ops:
        rig.ended(1)
    assert rig.machine.open_ops == 0


@pytest.mark.parametrize(
    "lie",
    [m.Flush(1, 0), m.Install(1), m.OpsCommit(0, []), m.OpAbort(0, 1, 0, Result.TIMEOUT, ""), m.JointResult(1, 0)],
)
def test_what_the_master_cannot_say_before_the_first_view(lie: m.FromMaster) -> None:
    with pytest.raises(ProtocolError):
        Rig().machine.received(lie)


# Signs of life.


def test_welcome_starts_heartbeats() -> None:
    machine = ps.Peer(0, 1)
    machine.received(m.Welcome(1, "run", 1, 0, peer_timeout_s=2.5))
    assert machine.drain() == [ps.StartEngine(1), ps.KeepHeartbeats(2.5)]
    assert machine.peer_timeout_s == 2.5


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_impossible_timeout_is_no_welcome(seconds: float) -> None:
    with pytest.raises(ProtocolError, match="timeout"):
        ps.Peer(0, 1).received(m.Welcome(1, "run", 1, 0, peer_timeout_s=seconds))


@pytest.mark.parametrize("threads", [0, -1, 17])
def test_impossible_number_of_engine_threads_is_no_welcome(threads: int) -> None:
    with pytest.raises(ProtocolError, match="threads"):
        ps.Peer(0, 1).received(m.Welcome(1, "run", 1, 0, engine_threads=threads))


def test_peer_that_cannot_go_on_leaves_and_says_why(rig: Rig) -> None:
    rig.launch(1)
    rig.machine.fail("no threads")
    effects = rig.effects()
    assert m.Leave("no threads") in [effect.message for effect in of(ps.ToMaster, effects)]
    assert of(ps.Ended, effects) == [ps.Ended(Result.INTERNAL_ERROR, "no threads")]
    rig.machine.fail("again")
    assert rig.effects() == []


def test_peers_that_were_told_of_once_are_known_until_they_are_gone(rig: Rig) -> None:
    effects = rig.hear(m.Flush(1, 1), m.Prepare(2, [member(4)], [m.Ring(0, 2, [1, 2, 3, 4])]))
    assert [made.member.peer for made in of(ps.MakeLink, effects)] == [4]
    rig.hear(m.Prepare(3, [], [m.Ring(0, 3, [1, 2, 4])]))
    with pytest.raises(ProtocolError):
        rig.machine.received(m.Prepare(4, [], [m.Ring(0, 4, [1, 2, 3, 4])]))


# Ops of two.


def test_an_op_of_two_has_a_name_and_a_use_of_its_own(rig: Rig) -> None:
    (sent,) = of(ps.SubmitOp, rig.launch(1, pair=(3, True)))
    (received,) = of(ps.SubmitOp, rig.launch(2, pair=(3, False)))
    (of_all,) = of(ps.SubmitOp, rig.launch(3))
    assert (sent.tag, received.tag, of_all.tag) == (pair_tag(1, 2, TAG), pair_tag(2, 1, TAG), TAG)
    assert [op.sequence for op in (sent, received, of_all)] == [0, 0, 0]
    assert (sent.rank, sent.world_size, sent.links) == (0, 2, (0, rig.links[3]))
    assert (received.rank, received.world_size, received.links) == (1, 2, (rig.links[3], 0))
    assert sent.ring == (1, 2, 3)
    assert of(ps.SubmitOp, rig.launch(4, pair=(3, True)))[0].sequence == 1


def test_who_is_named_and_has_left_is_lost(rig: Rig) -> None:
    assert rig.launch(1, pair=(7, True)) == [
        ps.OpResult(1, Result.RANK_CONNECTION_LOST, "peer 7 has left; call again with a rank of the present group", 3)
    ]


@pytest.mark.usefixtures("no_mesh")
def test_without_a_link_two_cannot_meet() -> None:
    rig = Rig()
    rig.join([1, 2, 3, 4])
    assert of(ps.SubmitOp, rig.launch(1, pair=(3, True)))
    (result,) = rig.launch(2, pair=(4, False))
    assert isinstance(result, ps.OpResult)
    assert result.code is Result.INVALID_USAGE
    assert "there is no link with peer 4" in result.reason


# Ops that those who take part end by themselves.


def meshed(outlives_masters: bool = False) -> Rig:
    """Peer 2 in a mesh of three."""
    rig = Rig()
    rig.machine.outlives_masters = outlives_masters
    rig.hear(prepare([1, 2, 3], 1))
    for peer in (1, 2, 3):
        rig.connect(peer)
    rig.hear(m.Install(1, is_meshed=True))
    return rig


@pytest.fixture
def mesh() -> Rig:
    return meshed()


COMMITTED = [ps.OpResult(1, Result.SUCCESS, "", 3, 1, 2), ps.ForgetOp(1)]
ABORT_VOTE_REQUEST = m.AbortVoteRequest(1, TAG, 0, Result.TIMEOUT, "late")


def agreed(rig: Rig, op: int) -> list[ps.Effect]:
    rig.machine.op_agreed(op)
    return rig.effects()


def commit(rig: Rig, op: int) -> None:
    rig.launch(op)
    rig.done(op)
    agreed(rig, op)


def test_what_all_are_done_with_is_committed_without_a_word(mesh: Rig) -> None:
    (submitted,) = of(ps.SubmitOp, mesh.launch(1))
    assert submitted.agrees
    assert mesh.done(1) == []
    assert agreed(mesh, 1) == COMMITTED


def test_own_commits_are_told_at_a_flush(mesh: Rig) -> None:
    for op in (1, 2, 3):
        mesh.launch(op)
        mesh.done(op)
        agreed(mesh, op)
    mesh.launch(4)
    mesh.done(4)
    mesh.hear(m.Flush(8, 1))
    assert agreed(mesh, 4) == [], "it comes too late to be committed by itself"
    mesh.machine.frozen(1)
    assert said(mesh.effects()) == [m.FlushReply(8, [OpRef(TAG, 3)], [OpRef(TAG, 2)])]


def test_a_promise_not_to_commit_is_kept(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, False)]
    assert agreed(mesh, 1) == []
    assert mesh.hear(m.OpsCommit(1, [OpRef(TAG, 0)])) == COMMITTED


def test_a_promise_is_kept_of_what_is_launched_later(mesh: Rig) -> None:
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, False)]
    mesh.launch(1)
    mesh.done(1)
    assert agreed(mesh, 1) == []
    assert of(ps.EndOp, mesh.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))) == [ps.EndOp(1, False)]


def test_who_is_asked_too_late_says_that_it_has_committed(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    agreed(mesh, 1)
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
    assert agreed(mesh, 1) == []


def test_what_all_are_done_with_before_it_is_frozen_is_committed(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.done(1)
    mesh.machine.cancel(1, Result.TIMEOUT, "late")
    assert agreed(mesh, 1)[1:] == COMMITTED
    mesh.machine.op_frozen(1)
    assert mesh.effects() == []


# Ops that start and end elsewhere.


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
        lambda rig: rig.joint(1),
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
    mesh.machine.op_started(2, TAG, 1, 0.0)
    assert mesh.launch(3, tag=TAG + 1)
    assert mesh.done(2) == []
    assert agreed(mesh, 2) == [ps.OpResult(2, Result.SUCCESS, "", 3, 1, 2), ps.ForgetOp(2)]
    assert of(ps.SubmitOp, mesh.launch(4))[0].sequence == 2


def test_what_ran_elsewhere_is_reported(mesh: Rig) -> None:
    commit(mesh, 1)
    mesh.machine.op_ran(TAG, 1)
    assert said(mesh.hear(m.AbortVoteRequest(1, TAG, 1, Result.TIMEOUT, "late"))) == [m.AbortVote(1, TAG, 1, True)]
    mesh.machine.link_lost(mesh.links[3], "reset")
    (lost,) = said(mesh.effects())
    assert isinstance(lost, m.LinkLost)
    assert lost.has_committed
    mesh.hear(m.Flush(8, 1))
    mesh.machine.frozen(1)
    assert said(mesh.effects()) == [m.FlushReply(8, [], [OpRef(TAG, 1)])]


def test_what_a_flush_has_aborted_for_a_reason_is_reported() -> None:
    """Another peer might not hear of it before the master dies."""
    rig = meshed(outlives_masters=True)
    rig.launch(1, TAG)
    rig.hear(m.Flush(1, 1))
    rig.machine.frozen(1)
    aborted = m.Aborted(TAG, 0, Result.INVALID_USAGE, "never launched")
    rig.hear(prepare([1, 2, 3], 2, aborts=[aborted]))
    rig.machine.master_lost("gone")
    *_, follow = said(rig.hear(m.VoteRequest(2)))
    assert isinstance(follow, m.Vote)
    assert follow.report.is_settled
    assert follow.report.aborts == [aborted]


def test_what_was_answered_to_masters_before_the_last_one_is_reported() -> None:
    """It may be in force elsewhere, until a newer one is here. The same master would have said so."""

    def report(term: int, *in_force: int) -> m.RecoveryReport:
        rig.machine.master_lost("gone")
        *_, follow = said(rig.hear(m.VoteRequest(term)))
        assert isinstance(follow, m.Vote)
        rig.hear(m.Resumed(term, 5.0, list(in_force)))
        return follow.report

    rig = Rig()
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    rig.hear(prepare([1, 2], 2), prepare([2], 3))
    assert report(2, 1, 3).answered == []
    rig.hear(prepare([2, 3], 10))
    third = report(3, 1, 3)
    assert third.prepared is not None
    assert (third.prepared.view, third.prepared.answered) == (10, False)
    assert [(each.view, each.answered) for each in third.answered] == [(3, True)]
    assert said(rig.connect(3)) == [], "another view follows"
    rig.hear(prepare([2], 20))
    assert [each.view for each in report(4, 1, 20).answered] == [3]
    rig.hear(prepare([2], 30))
    assert [each.view for each in report(5, 1, 20, 30).answered] == [20], "3 was ruled out"
    rig.hear(prepare([2], 40), m.Install(40))
    assert report(6, 40).answered == []


def test_who_says_where_it_stands_follows_nobody_yet() -> None:
    rig = Rig()
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    with pytest.raises(ProtocolError, match="PreVoteRequest from a master that leads"):
        rig.hear(m.PreVoteRequest())
    rig.machine.master_lost("gone")
    rig.effects()
    term = rig.machine.term
    installed = m.InstalledView(1, prepare([1, 2, 3], 1).rings, False)
    assert said(rig.hear(m.PreVoteRequest())) == [m.PreVote(installed, None, False)]
    assert rig.machine.term == term
    rig.hear(m.VoteRequest(term + 1))
    assert rig.machine.term == term + 1


def test_only_who_knows_the_run_can_put_it_out() -> None:
    rig = Rig(secret=b"of the run")
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    rig.machine.master_lost("gone")
    rig.effects()
    for secret in (b"", b"another"):
        (seek,) = rig.hear(m.Goodbye(Result.MASTER_CONNECTION_FAILED, "your run is over", secret))
        assert seek == ps.SeekMaster("refused by somebody who does not know the run: your run is over")
    (follow,) = said(rig.hear(m.VoteRequest(rig.machine.term + 1)))
    assert isinstance(follow, m.Vote)
    assert follow.report.secret == b"of the run"
    rig.hear(m.Goodbye(Result.MASTER_CONNECTION_FAILED, "evicted", b"of the run"))
    assert rig.machine.is_over


def test_what_was_promised_is_told_to_the_next_master() -> None:
    rig = meshed(outlives_masters=True)
    for op, tag in ((1, TAG), (2, TAG + 1), (3, TAG + 2)):
        rig.launch(op, tag)
    rig.hear(
        m.AbortVoteRequest(1, TAG, 0, Result.TIMEOUT, "late"), m.AbortVoteRequest(1, 99, 0, Result.TIMEOUT, "never")
    )
    rig.machine.cancel(2, Result.INTERNAL_ERROR, "mine")
    rig.machine.op_frozen(2)
    rig.done(3)
    rig.machine.master_lost("gone")
    agreed(rig, 3)
    (follow,) = said(rig.hear(m.VoteRequest(2)))
    assert isinstance(follow, m.Vote)
    assert follow.report.commits == [OpRef(TAG + 2, 0)]
    assert said(rig.hear(m.Resumed(2, 5.0))) == [
        m.OpFailed(1, TAG, 0, Result.TIMEOUT, "late", True),
        m.OpFailed(1, TAG + 1, 0, Result.INTERNAL_ERROR, "mine", False),
        m.OpFailed(1, 99, 0, Result.TIMEOUT, "never", True),
    ]


def test_what_takes_long_is_told_until_it_is_over(mesh: Rig) -> None:
    mesh.launch(1)
    mesh.machine.tick(STALL_AFTER_S)
    assert said(mesh.effects()) == [m.OpsStalled(1, [OpRef(TAG, 0)])]
    assert said(mesh.done(1)) == [m.OpsDone(1, [OpRef(TAG, 0)])]
    assert said(agreed(mesh, 1)) == [m.OpsOver(1, [OpRef(TAG, 0)])]
