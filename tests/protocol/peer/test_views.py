"""The peer's machine and views: what it prepares, which links it makes for it, and when it says that it is ready."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import OpRef
from pccl.protocol.peer import effects as ps
from tests.protocol.peer.rig import TAG, Rig, member, of, prepare, said


def test_view_has_ranks(rig: Rig) -> None:
    view = rig.machine.view
    assert view is not None
    assert (view.view, view.epoch, view.peer, view.group, view.ring) == (1, 1, 2, 0, (1, 2, 3))
    assert (view.world_size, view.global_world_size, view.group_sizes) == (3, 5, {0: 3, 9: 2})


def test_alone_needs_no_links() -> None:
    rig = Rig()
    effects = rig.hear(prepare([2], 1))
    assert said(effects) == [m.LinksReady(1)]
    assert not of(ps.MakeLink, effects)


def test_small_group_links_all_pairs() -> None:
    rig = Rig()
    made = of(ps.MakeLink, rig.hear(prepare([1, 2, 3, 4], 1)))
    assert [link.member.peer for link in made] == [1, 3, 4]
    rig.connect(1)
    rig.machine.link_failed(rig.links[4], "connection refused")
    assert said(rig.effects()) == []
    assert said(rig.connect(3)) == [m.LinksReady(1, [], [(4, "connection refused")])]


def test_relink_has_short_timeout() -> None:
    """The end that dials has little patience. The other end has more where the link is needed, for it cannot tell why
    nothing comes; where the link is not needed it need not have."""
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
def test_links_ready_after_all_links() -> None:
    rig = Rig()
    made = of(ps.MakeLink, rig.hear(prepare([1, 2, 3, 4], 1)))
    assert [(link.member.peer, link.made_in) for link in made] == [(1, 1), (3, 1)]
    assert said(rig.connect(1)) == []
    assert said(rig.connect(3)) == [m.LinksReady(1)]


def test_later_peer_dials() -> None:
    rig = Rig()
    made = of(ps.MakeLink, rig.hear(prepare([1, 2, 3], 1)))
    assert [(link.member.peer, link.dial) for link in made] == [(1, True), (3, False)]


def test_link_has_larger_connection_wish() -> None:
    rig = Rig(connections=3)
    members = [member(1, connections=5), member(2), member(3, connections=2)]
    made = of(ps.MakeLink, rig.hear(m.Prepare(1, members, [m.Ring(0, 1, [1, 2, 3])])))
    assert [link.connections for link in made] == [5, 3]
    rig.connect(3)
    for number in range(5):
        assert not said(rig.effects()), number
        assert rig.machine.link_connected(made[0].link)
    assert said(rig.effects()) == [m.LinksReady(1)]


def test_unchanged_ring_keeps_ops_running(rig: Rig) -> None:
    rig.launch(1)
    effects = rig.hear(prepare([1, 2, 3], 2, epoch=1, lost=[(90, "reset")]))
    assert effects == [ps.ToMaster(m.LinksReady(2))]
    assert of(ps.SubmitOp, rig.launch(2, tag=8))
    (installed,) = of(ps.Installed, rig.hear(m.Install(2)))
    assert (installed.view.view, installed.view.epoch) == (2, 1)
    assert installed.lost == [(90, "reset")]
    assert said(rig.done(1)) == [m.OpsDone(1, [OpRef(TAG, 0)])]


def test_unchanged_ring_keeps_hints() -> None:
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


def test_links_to_lost_peers_are_closed(rig: Rig) -> None:
    rig.hear(m.Flush(1, 1))
    effects = rig.hear(prepare([1, 2, 4], 2))
    assert of(ps.CloseLink, effects) == [ps.CloseLink(2)]
    assert [link.member.peer for link in of(ps.MakeLink, effects)] == [4]
    assert said(rig.connect(4)) == [m.LinksReady(2)]


def test_relink_closes_and_makes_link(rig: Rig) -> None:
    rig.hear(m.Flush(1, 1))
    effects = rig.hear(prepare([1, 2, 3], 2, relink=[(2, 3), (5, 6)]))
    assert of(ps.CloseLink, effects) == [ps.CloseLink(2)]
    (made,) = of(ps.MakeLink, effects)
    assert (made.member.peer, made.made_in, made.dial) == (3, 2, False)


def test_members_are_remembered(rig: Rig) -> None:
    effects = rig.hear(m.Flush(1, 1), m.Prepare(2, [member(4)], [m.Ring(0, 2, [1, 2, 3, 4])]))
    assert [made.member.peer for made in of(ps.MakeLink, effects)] == [4]
    rig.hear(m.Prepare(3, [], [m.Ring(0, 3, [1, 2, 4])]))
    with pytest.raises(ProtocolError):
        rig.machine.received(m.Prepare(4, [], [m.Ring(0, 4, [1, 2, 3, 4])]))
