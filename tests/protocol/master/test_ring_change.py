"""optimize_topology at the master's machine: what is measured, and which ring comes of it."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.link_metrics import FAILURE_FRESH_S
from pccl.protocol.messages import Kind
from pccl.protocol.topology import ring_pairs
from pccl.types import Result
from tests.protocol.master.rig import Rig, flush_of, measure


def test_stale_measurements_are_ignored() -> None:
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


def test_stale_rings_are_ignored() -> None:
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
    assert rig.master.state.groups[0].ring == [1, 2, 3]


def test_linkless_pairs_are_not_neighbours() -> None:
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
    assert (1, 3) not in ring_pairs(rig.master.state.groups[0].ring)
    assert rig.master.state.accepted == [1, 2, 3, 4]


def test_changed_direct_limit_renews_ring() -> None:
    rig = Rig(0, 0, 0)
    for call, limits in ((1, [0]), (2, [])):
        for peer in (1, 2, 3):
            rig.hear(peer, m.GroupCall(call, Kind.OPTIMIZE_TOPOLOGY))
        rig.effects = list(measure(rig, lambda sender, receiver: 1e6))
        rig.answer()
        told = rig.told(1)
        assert [message.direct_limit for message in told if isinstance(message, m.Install)] == limits
        assert isinstance(told[-1], m.GroupCallResult)
        assert rig.master.state.groups[0].ring == [1, 2, 3]


def test_install_has_is_local() -> None:
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


def test_no_probes_during_view_change() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(1, Kind.OPTIMIZE_TOPOLOGY))
        assert rig.effects == []
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(flush_of(rig), []))
    rig.answer()
    assert [type(message) for message in rig.told(2)][-2:] == [m.Install, m.Probe]


def test_ring_avoids_slow_direction() -> None:
    rig = Rig(0, 0, 0, 0)
    for peer in (1, 2, 3, 4):
        rig.hear(peer, m.GroupCall(1, Kind.OPTIMIZE_TOPOLOGY))
    fast = {(1, 4), (4, 3), (3, 2), (2, 1)}
    rig.effects = list(measure(rig, lambda sender, receiver: 1e7 if (sender, receiver) in fast else 1e5))
    rig.answer()
    assert rig.master.state.groups[0].ring == [1, 4, 3, 2]
    assert any("slowest link" in line and "0.8 Mbit/s" in line and "80 Mbit/s" in line for line in rig.logged)
