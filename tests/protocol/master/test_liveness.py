"""Silence and heartbeats at the master's machine."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import Close, MasterOptions, TakeHeartbeats
from pccl.protocol.topology import MESH_PEERS_MAX, neighbours
from pccl.types import Result
from tests.protocol.master.rig import HEARTBEATS_FROM, Rig


def test_silent_peer_is_evicted() -> None:
    rig = Rig(0, 0, 0)
    rig.effects = rig.master.silent(HEARTBEATS_FROM + 3, 5.04, 7.0)
    evicted = "evicted: silent for 5.0 s"
    assert rig.told(3) == [m.Goodbye(Result.MASTER_CONNECTION_FAILED, evicted)]
    assert rig.effects.count(Close(3)) == 1
    rig.answer()
    (prepare,) = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert prepare.lost == [(3, evicted)]
    assert rig.master.state.groups[0].ring == [1, 2]


def test_deposed_master_has_no_deadline() -> None:
    rig = Rig(0, 0, options=MasterOptions(peer_timeout_s=3.0))
    rig.tick(100.0)
    rig.lose(HEARTBEATS_FROM + 1)
    rig.lose(HEARTBEATS_FROM + 2)
    rig.tick(103.0)
    assert rig.master.deposed
    assert rig.master.deadline() is None


def test_loss_closes_heartbeat_connection() -> None:
    rig = Rig(0, 0)
    rig.lose(2)
    assert Close(HEARTBEATS_FROM + 2) in rig.effects
    rig.effects = rig.master.silent(HEARTBEATS_FROM + 2, 5.0, 7.0)
    assert rig.effects == []


def test_broken_heartbeats_get_a_timeout() -> None:
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


def test_new_heartbeat_connection_replaces_old() -> None:
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
def test_unknown_heartbeats_are_refused(hello: m.HeartbeatHello) -> None:
    rig = Rig(0)
    rig.master.connected(77, "10.0.0.1", rig.now)
    rig.hear(77, hello)
    ((goodbye,), close) = rig.told(77), rig.effects[-1]
    assert isinstance(goodbye, m.Goodbye)
    assert "is not in this run" in goodbye.reason
    assert close == Close(77)


@pytest.mark.parametrize(
    ("peers", "places"),
    [
        pytest.param(MESH_PEERS_MAX + 1, (4, 9), id="the rest may be a mesh"),
        pytest.param(MESH_PEERS_MAX + 4, (4, 5), id="neighbours"),
        pytest.param(MESH_PEERS_MAX + 4, (4, 6), id="neighbours of one"),
    ],
)
@pytest.mark.parametrize("orderly", [True, False])
def test_two_peers_die_at_once(peers: int, places: tuple[int, int], orderly: bool) -> None:
    """Whoever comes to be a neighbour by the first one's loss has no link with the other, and knows nothing of it."""
    rig = Rig(*[0] * peers)
    ring = list(rig.master.state.groups[0].ring)
    gone = [ring[place] for place in places]
    view = rig.master.state.view
    lost = [(by, m.LinkLost(view, peer, "reset")) for peer in gone for by in neighbours(ring, peer) if by not in gone]
    for by, message in lost if orderly else []:
        rig.hear(by, message)
    for peer in gone:
        rig.effects = rig.master.detached(peer, "reset", rig.now)
        rig.lose(HEARTBEATS_FROM + peer)
    for by, message in [] if orderly else lost:
        rig.hear(by, message)
    assert set(rig.peers).isdisjoint(gone)
