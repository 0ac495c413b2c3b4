"""The peer's machine and its links: offers, lost connections, growth, failures, and what the master hears of them."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.links import GROWN_CONNECTIONS_MAX, LINK_CONNECTIONS_MAX, UDP_START_S, UDP_TRIES, Limit
from tests.protocol.peer.rig import ME, Rig, member, of, prepare, said


def test_future_offer_is_retried() -> None:
    rig = Rig()
    assert rig.machine.link_offered(3, 1) is None
    rig.hear(prepare([1, 2, 3], 1))
    assert rig.machine.link_offered(3, 1) == rig.links[3]
    assert rig.machine.link_offered(3, 2) is None


@pytest.mark.parametrize("peer", [ME, 99])
def test_offer_from_outside_view_is_refused(rig: Rig, peer: int) -> None:
    answer = rig.machine.link_offered(peer, 1)
    assert answer == f"peer {peer} is not in view 1"


def test_connections_per_link_limit(rig: Rig) -> None:
    assert rig.machine.link_offered(3, 1) == rig.links[3]
    while rig.machine.link_connected(rig.links[3]):
        pass
    assert rig.machine.link_offered(3, 1) == f"the link with peer 3 has {LINK_CONNECTIONS_MAX} connections already"


def test_dialer_replaces_lost_connection(rig: Rig) -> None:
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


def test_early_lost_connection_is_replaced_later() -> None:
    rig = Rig(connections=2)
    rig.hear(prepare([1, 2, 3], 1))
    assert rig.machine.link_connected(rig.links[1])
    rig.machine.connection_lost(rig.links[1], "reset")
    assert of(ps.AddConnections, rig.effects()) == []
    assert rig.machine.link_connected(rig.links[1])
    assert [effect.link for effect in of(ps.AddConnections, rig.effects())] == [rig.links[1]]
    assert said(rig.connect(3)) == [m.LinksReady(1)]


def test_limited_link_doubles_connections(rig: Rig) -> None:
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


def udp_fails(rig: Rig, peer: int) -> None:
    for _ in range(UDP_TRIES):
        rig.machine.connection_lost(rig.links[peer], "UDP does not get through", over_udp=True)
    assert of(ps.AddConnections, rig.effects()) == []


@pytest.mark.parametrize("limit", [Limit.LOSS, Limit.RECOVERY])
def test_lossy_link_tries_udp_before_it_grows(rig: Rig, limit: Limit) -> None:
    rig.machine.links.may_grow = True
    for _ in range(UDP_TRIES):
        rig.machine.link_limited(rig.links[1], limit=limit)
        (tried,) = of(ps.AddConnections, rig.effects())
        assert (tried.over_udp, len(tried.indices), tried.is_replacement) == (True, 1, False)
        for later in (Limit.RECOVERY, limit):
            rig.machine.link_limited(rig.links[1], limit=later)
            assert rig.effects() == [], "while UDP is tried, or works"
        assert rig.machine.link_connected(rig.links[1])
        rig.machine.connection_lost(rig.links[1], "UDP no longer gets through", over_udp=True)
        grown = of(ps.AddConnections, rig.effects())
        assert not any(effect.over_udp for effect in grown)
        assert bool(grown) == (limit is Limit.LOSS), "more connections help against losses that slow TCP down"
    rig.machine.link_limited(rig.links[1], limit=limit)
    assert bool(of(ps.AddConnections, rig.effects())) == (limit is Limit.LOSS)
    rig.machine.link_limited(rig.links[3], limit=limit)
    assert [effect.over_udp for effect in of(ps.AddConnections, rig.effects())] == [True], "the way to another peer"


def test_link_grows_at_once_where_udp_is_turned_off(rig: Rig) -> None:
    rig.machine.links.may_grow, rig.machine.links.may_use_udp = True, False
    rig.machine.link_limited(rig.links[1], limit=Limit.LOSS)
    assert [effect.over_udp for effect in of(ps.AddConnections, rig.effects())] == [False]


def test_far_link_starts_with_udp_and_grows_if_that_fails(rig: Rig) -> None:
    rig.machine.links.may_grow = True
    rig.machine.link_limited(rig.links[1], limit=Limit.START, round_trip_s=UDP_START_S)
    assert [effect.over_udp for effect in of(ps.AddConnections, rig.effects())] == [True]
    rig.machine.connection_lost(rig.links[1], "UDP does not get through", over_udp=True)
    assert [len(effect.indices) for effect in of(ps.AddConnections, rig.effects())] == [15]
    rig.machine.link_limited(rig.links[3], limit=Limit.START, round_trip_s=UDP_START_S)
    assert of(ps.AddConnections, rig.effects()) == [], "peer 3 dials"


def test_growth_that_is_due_follows_a_failure_of_udp(rig: Rig) -> None:
    rig.machine.links.may_grow = True
    for limit in (Limit.RECOVERY, Limit.LOSS):
        rig.machine.link_limited(rig.links[1], limit=limit)
    assert [effect.over_udp for effect in of(ps.AddConnections, rig.effects())] == [True]
    rig.machine.connection_lost(rig.links[1], "UDP does not get through", over_udp=True)
    assert [len(effect.indices) for effect in of(ps.AddConnections, rig.effects())] == [3]


@pytest.mark.parametrize(("peers", "most"), [(2, 64), (3, 64), (5, 32), (9, 16), (12, 16)])
def test_lossy_link_grows_to_its_share(peers: int, most: int) -> None:
    rig = Rig(may_grow=True)
    rig.join([1, ME, *range(3, peers + 1)])
    udp_fails(rig, 1)
    counts = [1]
    for _ in range(8):
        rig.machine.link_limited(rig.links[1], limit=Limit.LOSS)
        for added in of(ps.AddConnections, rig.effects()):
            counts.append(len(added.indices))
            for _ in added.indices:
                assert rig.machine.link_connected(rig.links[1])
    assert counts[:3] == [1, 3, 12], "four times as many each time"
    assert sum(counts) == most


def test_both_ends_grow_within_the_limit(rig: Rig) -> None:
    rig.machine.links.may_grow = True
    udp_fails(rig, 1)
    udp_fails(rig, 3)
    for _ in range(31):
        assert rig.machine.link_connected(rig.links[1])
        assert rig.machine.link_connected(rig.links[3])
    added = []
    for peer in (1, 3):
        rig.machine.link_limited(rig.links[peer], limit=Limit.LOSS)
        added += [len(effect.indices) for effect in of(ps.AddConnections, rig.effects())]
    assert 32 + sum(added) == LINK_CONNECTIONS_MAX, "as its own dialer, and as the other end"


@pytest.mark.parametrize(("peers", "threads", "added"), [(2, 1, 31), (2, 2, 15), (3, 1, 15), (5, 1, 7), (40, 1, 15)])
def test_dialer_gives_far_link_a_start(peers: int, threads: int, added: int) -> None:
    rig = Rig(may_grow=True, engine_threads=threads)
    rig.join([1, ME, *range(3, peers + 1)])
    for thread in range(threads):
        rig.machine.link_limited(rig.links[1], thread, Limit.START)
        assert [len(effect.indices) for effect in of(ps.AddConnections, rig.effects())] == [added]
    for peer in range(3, peers + 1):
        if peer in rig.links:
            rig.machine.link_limited(rig.links[peer], limit=Limit.START)
    assert of(ps.AddConnections, rig.effects()) == [], "the others dial"


def test_far_link_asks_for_its_start_before_it_is_up() -> None:
    rig = Rig(may_grow=True, connections=2)
    rig.hear(prepare([1, 2, 3], 1))
    assert rig.machine.link_connected(rig.links[1])
    rig.machine.link_limited(rig.links[1], limit=Limit.START)
    assert of(ps.AddConnections, rig.effects()) == []
    assert rig.machine.link_connected(rig.links[1])
    assert [len(effect.indices) for effect in of(ps.AddConnections, rig.effects())] == [14]


def test_links_have_a_connection_per_engine_thread() -> None:
    """A link has them to begin with, where one is lost, and where a thread is held back."""
    rig = Rig(may_grow=True, engine_threads=3)
    rig.hear(prepare([1, 2, 3], 1))
    assert rig.missing == {rig.links[1]: 3, rig.links[3]: 3}
    rig.connect(1)
    rig.connect(3)
    rig.hear(m.Install(1))
    added = []
    for thread in (2, 2, 0, 1):
        rig.machine.connection_lost(rig.links[1], "reset", thread)
        added += [(thread, *effect.indices) for effect in of(ps.AddConnections, rig.effects())]
    assert added == [(2, 5), (2, 8), (0, 3), (1, 4)]
    rig.machine.link_limited(rig.links[3], 1)
    (grown,) = of(ps.AddConnections, rig.effects())
    assert list(grown.indices) == [4], "as many more as the thread has"
    for _ in range(3):
        assert rig.machine.link_connected(rig.links[3])
    rig.machine.link_limited(rig.links[3], 1)
    (grown,) = of(ps.AddConnections, rig.effects())
    assert list(grown.indices) == [7, 10]


def test_added_connections_continue_indices() -> None:
    rig = Rig(connections=4, engine_threads=3)
    rig.join([1, 2, 3])
    added = []
    for thread in (0, 1, 2, 1):
        rig.machine.connection_lost(rig.links[1], "reset", thread)
        added += [list(effect.indices) for effect in of(ps.AddConnections, rig.effects())]
    assert added == [[6], [4], [5], [7]]


def test_offer_for_replaced_link_is_refused(rig: Rig) -> None:
    rig.hear(m.Flush(1, 1), prepare([1, 2, 3], 2, relink=[(2, 3)]))
    assert rig.machine.link_offered(3, 1) == "the link with peer 3 was made again in view 2"


def test_offer_for_failed_replacement_is_refused(rig: Rig) -> None:
    """Its dialer stood still while the link was lost here, made anew, and could not be."""
    rig.machine.link_lost(rig.links[3], "reset")
    rig.hear(m.Flush(1, 1), prepare([1, 2, 3], 2, relink=[(2, 3)]))
    rig.machine.link_failed(rig.links[3], "no connection within the time")
    assert rig.machine.link_offered(3, 1) == "the link with peer 3 was made again in view 2"


def test_dialer_may_restart_link(rig: Rig) -> None:
    """The dialer has lost a link that still seems to stand here."""
    rig.hear(m.Flush(1, 1), prepare([1, 2, 3], 2))
    offered = rig.machine.link_offered(3, 2)
    effects = rig.effects()
    assert of(ps.CloseLink, effects) == [ps.CloseLink(2)]
    (made,) = of(ps.MakeLink, effects)
    assert (made.link, made.made_in, made.dial) == (offered, 2, False)


def test_failed_link_is_reported() -> None:
    rig = Rig()
    rig.hear(prepare([1, 2, 3], 1))
    rig.machine.link_failed(rig.links[1], "connection refused")
    effects = rig.effects()
    assert of(ps.CloseLink, effects) == [ps.CloseLink(rig.links[1])]
    assert said(effects) == [m.LinkFailed(1, 1, "connection refused")], "at once, for whoever looks for what is wrong"
    assert said(rig.connect(3)) == [m.LinksReady(1, [(1, "connection refused")])]


def test_stale_link_failure_is_ignored(rig: Rig) -> None:
    rig.machine.link_failed(rig.links[1], "too late")
    rig.machine.link_failed(77, "which?")
    assert rig.effects() == []
    assert not rig.machine.link_connected(77)


def test_old_attempt_is_repeated() -> None:
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


def test_link_lost_before_answer_is_missing() -> None:
    """The master may have given the pair up, and then nothing else would ever end the wait for it."""
    rig = Rig()
    rig.hear(prepare([1, 2, 3, 4, 5], 1))
    for peer in (1, 3, 5):
        assert said(rig.connect(peer)) == []
    rig.machine.link_lost(rig.links[5], "reset")
    assert said(rig.effects()) == [m.LinkLost(1, 5, "reset")]
    assert said(rig.connect(4)) == [m.LinksReady(1, [], [(5, "reset")])]


def test_lost_link_is_reported_and_closed(rig: Rig) -> None:
    rig.machine.link_lost(rig.links[3], "reset")
    effects = rig.effects()
    assert of(ps.CloseLink, effects) == [ps.CloseLink(rig.links[3])]
    assert said(effects) == [m.LinkLost(1, 3, "reset")]
    rig.machine.link_lost(rig.links[3], "again")
    assert rig.effects() == []


def test_lost_link_takes_no_replacements(rig: Rig) -> None:
    """What was on its way is gone on this side alone, and the master has been told that the link is."""
    rig.machine.link_lost(rig.links[3], "reset")
    assert said(rig.effects()) == [m.LinkLost(1, 3, "reset")]
    assert rig.machine.link_offered(3, 1) == "the link with peer 3 of view 1 was lost here"
    rig.hear(prepare([1, 2, 3], 2, relink=[(2, 3)]))
    assert rig.machine.link_offered(3, 2) == rig.links[3]


def test_op_without_link(rig: Rig) -> None:
    rig.machine.link_lost(rig.links[3], "reset")
    rig.effects()
    (submitted,) = of(ps.SubmitOp, rig.launch(1))
    assert submitted.links == (rig.links[1], 0, 0)


def test_trial_tries_links() -> None:
    rig = Rig()
    rig.join([1, 2, 3])
    (trial,) = of(ps.TryLinks, rig.hear(m.Trial([member(3)])))
    assert [each.peer for each in trial.members] == [3]
    rig.machine.tried([(3, "refused")])
    assert said(rig.effects()) == [m.Tried([(3, "refused")])]
    assert rig.machine.obstacle == "", "nothing holds it up"


def test_no_trial_during_admission() -> None:
    rig = Rig()
    rig.hear(prepare([1, 2, 3], 1))
    assert of(ps.TryLinks, rig.hear(m.Trial([member(3)]))) == []
