"""A pair whose link fails at first costs its group the mesh only until it can be made."""

from __future__ import annotations

from typing import Any

import pytest

from pccl import Communicator, MasterNode
from pccl.protocol.master import views
from pccl.protocol.peer import links as peer_links
from pccl.runtime.network import links
from tests.support.cluster import Cluster, reduce_once, until

NUMBER = 4


def _is_meshed(peer: Communicator) -> bool:
    view = peer._inner.view("test")
    return view.is_meshed


def test_a_link_that_fails_at_first_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "RETRY_S", 0.05)
    monkeypatch.setattr(peer_links, "LINK_TIMEOUTS", 0.2)
    dial, are_apart = links.dial, True

    async def refuse(member: Any, host: str, opening: Any, *arguments: Any) -> Any:
        if are_apart and {opening.sender, opening.receiver} == {2, NUMBER}:
            raise links.LinkError("a firewall refuses it")
        return await dial(member, host, opening, *arguments)

    monkeypatch.setattr(links, "dial", refuse)
    with MasterNode("127.0.0.1:0", peer_timeout=10.0) as node:
        cluster = Cluster(node.address)
        cluster.join(NUMBER)
        assert cluster[0].membership.peers == (1, 2, 3, NUMBER), "2 and 4 are no neighbours"
        assert [_is_meshed(peer) for peer in cluster.peers] == [False] * NUMBER
        assert cluster.each(reduce_once) == [NUMBER] * NUMBER
        are_apart = False

        def meets() -> bool:
            cluster.each(lambda peer, _: peer.update_topology())
            return all(_is_meshed(peer) for peer in cluster.peers)

        until(meets, "it is a mesh")
        assert cluster[0].membership.peers == (1, 2, 3, NUMBER)
        assert cluster.each(reduce_once) == [NUMBER] * NUMBER
        cluster.close_all()
