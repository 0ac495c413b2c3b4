"""Newcomers of the simulated network ask masters as sessions do."""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.world import MASTER, World


def test_a_newcomer_asks_each_address_before_it_may_found_though_one_master_begins_anew() -> None:
    """Else it would found a run beside one that the other master leads, which no session does."""
    world = World(masters=2)
    world.kill_master()
    newcomer = world.add()
    world.run_until(lambda: newcomer.tried == {MASTER})
    world.restart_master()
    asked = len(world.from_peers)
    world.run_until(lambda: len(world.from_peers) > asked)
    assert newcomer.control is not None
    assert newcomer.control.host is world.hosts[1]
    hello = world.from_peers[-1][1]
    assert isinstance(hello, m.Hello)
    assert hello.may_found
