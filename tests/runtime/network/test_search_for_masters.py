"""Peers that have lost their master look for another one: all at the same place."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from pccl import Attribute, Communicator, MasterNode
from tests.support.cluster import WAIT_S, Background, together

PEERS = 4
PEER_TIMEOUT_S = 20.0
SOON_S = 10.0
"""Time within which nobody gives up the master that it waits at."""


def test_order_of_addresses_does_not_matter() -> None:
    with ExitStack() as stack:
        with MasterNode("127.0.0.1:0", peer_timeout=PEER_TIMEOUT_S) as primary:
            standbys = [
                MasterNode("127.0.0.1:0", peer_timeout=PEER_TIMEOUT_S, standby_of=primary.address) for _ in range(2)
            ]
            for standby in standbys:
                stack.enter_context(standby)
            orders = [[primary, *standbys], [primary, *reversed(standbys)]]
            addresses = [",".join(node.address for node in orders[index % 2]) for index in range(PEERS)]
            peers = [Communicator(address, master_timeout=WAIT_S) for address in addresses]
            for peer in peers:
                stack.callback(peer.close)
            together([partial(_gather, peer) for peer in peers])
        calls = [Background(peer.update_topology) for peer in peers]
        for call in calls:
            call.result(SOON_S)


def _gather(peer: Communicator) -> None:
    peer.connect()
    while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < PEERS:
        peer.update_topology()
