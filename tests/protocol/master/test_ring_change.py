"""optimize_topology at the master's machine: what is measured, and which ring comes of it."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.link_metrics import FAILURE_FRESH_S
from pccl.protocol.master.ring import ROUND_S_MAX
from pccl.protocol.messages import Kind
from pccl.protocol.topology import ring_pairs
from pccl.types import Result
from tests.protocol.master.rig import Rig, flush_of, measure


def test_measurements_of_an_earlier_call_do_not_count() -> None:
    rig = Rig(0, 0)
    for call in (1, 2):
        for peer in (1, 2):
            rig.hear(peer, m.GroupCall(call, Kind.OPTIMIZE_TOPOLOGY))
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
        assert rig.told(1) == [m.GroupCallResult(call, Result.SUCCESS)]
        rig.now += FAILURE_FRESH_S


def test_rings_found_for_an_earlier_call_do_not_count() -> None:
    rig = Rig(0, 0, 0)
    for peer in (1, 2, 3):
        rig.hear(peer, m.GroupCall(1, Kind.OPTIMIZE_TOPOLOGY))
    searches = measure(rig, lambda sender, receiver: 1e9)
    for search in (searches[0].search - 1, searches[0].search + 1):
        assert rig.master.rings_found(search, {0: [1, 3, 2]}, rig.now) == []
    rig.effects = list(searches)
    rig.answer()
    assert rig.told(1) == [m.GroupCallResult(1, Result.SUCCESS)]
    assert rig.master.rings_found(searches[0].search, {0: [1, 3, 2]}, rig.now) == []
    assert rig.master.ring(0) == [1, 2, 3]


def test_a_pair_that_goes_without_a_link_is_not_put_next_to_each_other() -> None:
    """What was measured while they had one is still known, and is not measured again so soon."""
    rig = Rig(0, 0, 0, 0)
    for call in (1, 2):
        for peer in (1, 2, 3, 4):
            rig.hear(peer, m.GroupCall(call, Kind.OPTIMIZE_TOPOLOGY))
        rig.effects = list(measure(rig, lambda sender, receiver: 1e9))
        rig.answer()
        if call == 2:
            break
        rig.hear(3, m.LinkLost(rig.master.state.view, 1, "reset"))
        for peer in (1, 2, 3, 4):
            rig.hear(peer, m.FlushReply(flush_of(rig), []))
        for peer in (1, 2, 3, 4):
            rig.hear(peer, m.LinksReady(rig.master.state.view, [], [(1, "refused")] if peer == 3 else []))
        assert rig.master.state.groups[0].missing == {(1, 3)}
        for pair in ((1, 2), (2, 1)):
            rig.master.state.link_metrics.measured(pair, 1e6, 0.001, rig.now)
    assert (1, 3) not in ring_pairs(rig.master.ring(0))
    assert rig.master.accepted == [1, 2, 3, 4]


def test_a_ring_is_made_anew_where_its_links_favour_another_algorithm() -> None:
    rig = Rig(0, 0, 0)
    for call, limits in ((1, [0]), (2, [])):
        for peer in (1, 2, 3):
            rig.hear(peer, m.GroupCall(call, Kind.OPTIMIZE_TOPOLOGY))
        rig.effects = list(measure(rig, lambda sender, receiver: 1e6))
        rig.answer()
        told = rig.told(1)
        assert [message.direct_limit for message in told if isinstance(message, m.Install)] == limits
        assert isinstance(told[-1], m.GroupCallResult)
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


def test_nobody_measures_while_a_ring_is_changed() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(1, Kind.OPTIMIZE_TOPOLOGY))
        assert rig.effects == []
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(flush_of(rig), []))
    rig.answer()
    assert [type(message) for message in rig.told(2)][-2:] == [m.Install, m.Probe]


def test_ring_avoids_the_slow_direction_of_a_link() -> None:
    rig = Rig(0, 0, 0, 0)
    for peer in (1, 2, 3, 4):
        rig.hear(peer, m.GroupCall(1, Kind.OPTIMIZE_TOPOLOGY))
    fast = {(1, 4), (4, 3), (3, 2), (2, 1)}
    rig.effects = list(measure(rig, lambda sender, receiver: 1e7 if (sender, receiver) in fast else 1e5))
    rig.answer()
    assert rig.master.ring(0) == [1, 4, 3, 2]
    assert any("slowest link" in line and "0.8 Mbit/s" in line and "80 Mbit/s" in line for line in rig.logged)


def test_only_measuring_takes_time_for_which_a_deadline_stands() -> None:
    rig = Rig(0, 0)
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(1, Kind.OPTIMIZE_TOPOLOGY))
    rig.tick(ROUND_S_MAX - 0.1)
    assert rig.effects == []
    rig.tick(ROUND_S_MAX)
    assert any("1->2 could not be measured" in line for line in rig.logged)
    rig.answer()
    assert rig.told(1) == [m.GroupCallResult(1, Result.SUCCESS)], "the one that did not answer is not asked again"
