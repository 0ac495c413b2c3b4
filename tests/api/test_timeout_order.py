"""Timeouts that depend on each other are in order, whatever the run's peer timeout is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.protocol.failover import bootstrap, gathering
from pccl.protocol.master.run_state import ANSWER_TIMEOUTS, MasterOptions
from pccl.protocol.messages import PEER_TIMEOUT_S_MAX, PEER_TIMEOUT_S_MIN
from pccl.protocol.peer import links
from pccl.runtime.network import addresses, heartbeat
from pccl.runtime.session import control
from tests.support.cluster import WAIT_S, Cluster, outcomes, reduce_once, results, until


@pytest.mark.parametrize("peer_timeout_s", [PEER_TIMEOUT_S_MIN, 5.0, 600.0, PEER_TIMEOUT_S_MAX])
def test_what_waits_for_something_waits_longer_than_that_may_take(peer_timeout_s: float) -> None:
    options = MasterOptions(peer_timeout_s=peer_timeout_s)
    link_s = max(links.LINK_TIMEOUT_S_MIN, links.LINK_TIMEOUTS * peer_timeout_s)
    assert options.answer_limit_s > link_s, "who makes links is not evicted for it"
    assert 2 * links.LINK_SHARE <= 1.0, "a path that is black is known as soon as a silent peer"
    assert addresses.LEAD_TIMEOUTS > gathering.GATHER_TIMEOUTS, "who follows stays until it is led"
    assert ANSWER_TIMEOUTS > links.LINK_TIMEOUTS
    assert bootstrap.HOLD_S < control.WELCOME_TIMEOUT_S, "a newcomer is sent away before it gives up"
    assert MasterOptions.hello_timeout_s >= heartbeat.FIRST_HEARTBEAT_S
    assert control.REATTACH_SHARE < 1.0, "some time is left to look for another master"


def test_a_peer_that_a_majority_waits_with_does_not_give_up_before_it_is_led(tmp_path: Path) -> None:
    """One of three is gone with the master, so the next one waits for it for a peer timeout: longer than the others
    look for a master."""
    with MasterNode("127.0.0.1:0", peer_timeout=4, state=tmp_path) as first:
        address = first.address
        cluster = Cluster(address, master_timeout=3)
        cluster.join(2)
        (third,) = cluster.join(1, master_timeout=0)
    assert results(outcomes([third.are_peers_pending])) == [Result.MASTER_CONNECTION_FAILED]
    cluster.peers.remove(third)
    with MasterNode(address, peer_timeout=4, state=tmp_path):
        until(lambda: cluster[0].world_size == 2, "the two are led, without the third")
        assert cluster.each(reduce_once) == [2, 2]
        cluster.close_all()
    third.close()


def test_who_looks_for_a_master_for_less_than_a_peer_timeout_is_told() -> None:
    with MasterNode("127.0.0.1:0", peer_timeout=5) as node:
        lone = Communicator(node.address, master_timeout=0.1, timeout=WAIT_S)
        lone.connect()
    with pytest.raises(PCCLError, match=r"master_timeout is less than the run's peer_timeout of 5 s"):
        lone.are_peers_pending()
    lone.close()
