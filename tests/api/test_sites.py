"""Peers that come and go together: the master alone, and communicators."""

from __future__ import annotations

from functools import partial

import pytest

from pccl import Attribute, Communicator, MasterNode, PCCLError, ReduceOp, Result
from pccl.protocol import messages as m
from tests.protocol.master.rig import Rig
from tests.support.cluster import Background, ones, refusal, together, until, waits_at_master


class SiteRig(Rig):
    def rank(self, site: str, group: int, size: int = 2) -> int:
        connection = self.master.state.next_peer
        self.effects = self.master.connected(connection, f"10.0.0.{connection}", self.now)
        self.hear(connection, m.Hello(m.PROTOCOL_VERSION, "1.0", group, [], 5000, 2, site=site, site_size=size))
        self.heartbeat(connection)
        self.answer()
        return connection

    @property
    def rings(self) -> dict[int, list[int]]:
        return {group.number: group.ring for group in self.master.state.groups.values() if group.ring}


def test_first_site_is_admitted_when_complete() -> None:
    rig = SiteRig()
    rig.rank("a", 0)
    assert rig.master.state.accepted == []
    rig.rank("a", 1)
    assert rig.rings == {0: [1], 1: [2]}


def test_half_a_site_is_not_admitted() -> None:
    rig = SiteRig()
    for site in ("a", "b"):
        for group in (0, 1):
            rig.rank(site, group)
    rig.update()
    assert rig.rings == {0: [1, 3], 1: [2, 4]}
    rig.rank("c", 0)
    for peer in rig.master.state.accepted:
        rig.hear(peer, m.GroupCall(1, m.Kind.ARE_PEERS_PENDING))
    assert rig.told(4) == [m.GroupCallResult(1, Result.SUCCESS, "", 0)]
    rig.update()
    assert rig.master.state.pending == [5]
    rig.hello(1)  # a peer on its own does not complete it
    rig.rank("c", 1)
    rig.update()
    assert rig.rings == {0: [1, 3, 5], 1: [2, 4, 6, 7]}


def test_site_is_evicted_as_a_whole() -> None:
    rig = SiteRig()
    for site in ("a", "b", "c"):
        for group in (0, 1):
            rig.rank(site, group)
        rig.update()
    view = rig.master.state.view
    rig.lose(3)
    assert [message.reason for message in rig.told(4) if isinstance(message, m.Goodbye)] == [
        "evicted: peer 3 of its site was lost: reset"
    ]
    rig.answer()
    assert rig.rings == {0: [1, 5], 1: [2, 6]}
    assert rig.master.state.view == view + 1


def test_site_name_cannot_be_used_twice() -> None:
    rig = SiteRig()
    rig.rank("a", 0)
    rig.rank("a", 1)
    connection = rig.master.state.next_peer
    rig.effects = rig.master.connected(connection, "10.0.0.9", rig.now)
    rig.hear(connection, m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 2, site="a", site_size=2))
    goodbye = rig.told(connection)[0]
    assert isinstance(goodbye, m.Goodbye)
    assert "give each start of a site a new name" in goodbye.reason


# Communicators.


def ranks_of(master: MasterNode, site: str, size: int = 2) -> list[Communicator]:
    return [Communicator(master.address, peer_group=rank, site=site, site_size=size) for rank in range(size)]


def test_sites_join_and_are_evicted(master: MasterNode) -> None:
    first, second = ranks_of(master, "first"), ranks_of(master, "second")
    together([peer.connect for peer in first])
    half = Background(second[0].connect)
    until(lambda: waits_at_master(second[0]), "half of the second site waits")
    assert together([peer.are_peers_pending for peer in first]) == [False, False]
    other = Background(second[1].connect)
    while not together([peer.are_peers_pending for peer in first])[0]:
        pass
    together([peer.update_topology for peer in first])
    half.result()
    other.result()
    everybody = [*first, *second]
    arrays = [ones() for _ in everybody]
    together([partial(peer.all_reduce, array, op=ReduceOp.SUM) for peer, array in zip(everybody, arrays, strict=True)])
    assert {float(array[0]) for array in arrays} == {2.0}
    assert second[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 4

    session = second[1]._inner._session
    assert session is not None
    session._master.connection.send_frames([b"\0\0\0\1\xc1"])  # no message, which ends its session
    until(lambda: first[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2, "the second site is lost")
    assert refusal(second[0].update_topology).result is Result.MASTER_CONNECTION_FAILED
    together([peer.close for peer in everybody])


@pytest.mark.parametrize(("site", "size"), [("a", 0), ("", 2), ("a", -1)])
def test_site_name_and_size_belong_together(site: str, size: int) -> None:
    with pytest.raises(PCCLError, match=r"give both|not an integer in"):
        Communicator("127.0.0.1:1", site=site, site_size=size)
