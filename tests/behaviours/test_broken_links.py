"""Links that cannot be made, break, and are replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.link_failures import RELINKS_MAX
from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.master.views import RETRY_S
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.world import TAG, World, rings

Block = Callable[[World, Node, Node], None]


def test_newcomer_that_cannot_reach_a_peer_is_evicted(world: World) -> None:
    a, b = world.join(0, 0)
    c = world.add()
    world.network.unreachable = {frozenset(("n1", "n3"))}
    world.run()
    assert world.call_all([a, b], Kind.UPDATE_TOPOLOGY) == [Result.SUCCESS] * 2
    assert rings([a, b]) == {(1, 2)}
    assert c.ended is not None
    assert c.ended.code is Result.RANK_CONNECTION_FAILED
    assert "peers 1 and 3 cannot connect to each other: " in c.ended.reason
    assert world.reduce([a, b]) == [Result.SUCCESS] * 2


def test_pair_that_need_not_connect_may_be_unreachable(world: World) -> None:
    world.network.unreachable = {frozenset(("n1", "n3"))}
    nodes = world.join(0, 0, 0, 0)
    assert len(nodes) == 4
    world.network.unreachable = {frozenset(("n1", "n3")), frozenset(("n2", "n4"))}
    assert rings(nodes) == {(1, 2, 3, 4)} or len(world.accepted) < 4


def test_lost_link_is_replaced(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    op = world.launch(a, TAG)
    world.run()
    world.break_link(b, c)
    world.run()
    assert a.result(op) is Result.RANK_CONNECTION_LOST
    assert "the ring was changed" in a.results[op].reason
    assert world.master.state.accepted == [1, 2, 3]
    assert a.lost == []
    relinks = [message.relink for _, message in world.from_masters if isinstance(message, m.Prepare) and message.relink]
    assert relinks == [[(1, 2), (1, 3), (2, 3)]] * 3, "once, although both ends have reported it, and all of theirs"
    assert world.reduce([a, b, c]) == [Result.SUCCESS] * 3


def test_op_done_everywhere_commits_despite_a_lost_link(world: World) -> None:
    a, b = world.join(0, 0)
    ops = [world.launch(node, TAG) for node in (a, b)]
    world.run_until(lambda: len(a.held) == len(b.held) == 1)
    world.break_link(a, b)
    world.run()
    assert (a.result(ops[0]), b.result(ops[1])) == (Result.SUCCESS, Result.SUCCESS)


def test_link_that_keeps_breaking_evicts_the_later_peer(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    for _ in range(RELINKS_MAX):
        world.break_link(b, c)
        world.run()
        assert world.master.state.accepted == [1, 2, 3]
    world.break_link(b, c)
    world.run()
    assert world.master.state.accepted == [1, 2]
    assert c.ended is not None
    assert c.ended.code is Result.RANK_CONNECTION_FAILED
    assert f"broke {RELINKS_MAX + 1} times in a row" in c.ended.reason
    assert a.lost[0][0] == 3


def test_link_that_carries_ops_may_break_any_number_of_times(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    for _ in range(RELINKS_MAX + 2):
        world.break_link(b, c)
        assert set(world.reduce([a, b, c], tag=6)) <= {Result.SUCCESS, Result.RANK_CONNECTION_LOST}
        assert world.reduce([a, b, c]) == [Result.SUCCESS] * 3
    assert world.master.state.accepted == [1, 2, 3]


def test_link_that_cannot_be_replaced_evicts_the_later_peer(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    world.network.unreachable = {frozenset(("n2", "n3"))}
    world.break_link(b, c)
    world.run()
    assert rings([a, b]) == {(1, 2)}
    assert c.ended is not None
    assert c.ended.code is Result.RANK_CONNECTION_FAILED


def test_link_attempt_of_an_earlier_view_is_repeated(world: World) -> None:
    """A slow newcomer misses the time of its neighbour; a loss elsewhere starts the preparation again, and both ends
    must then come together, although one of them has restarted and the other has not."""
    a, b = world.join(0, 1)
    c = world.add()
    world.run()
    calls = [world.group_call(node, Kind.UPDATE_TOPOLOGY) for node in (a, b)]
    world.run_until(lambda: world.master.state.is_changing)
    world.hang(c)
    world.run()  # n1 gives up waiting for n3 to dial
    assert isinstance(world.from_peers[-1][1], m.LinksReady)
    assert world.from_peers[-1][1].failed
    world.leave(b)
    world.run_until(lambda: a.links)
    world.thaw(c)
    world.run()
    assert a.call(calls[0]) is Result.SUCCESS
    assert rings([a, c]) == {(1, 3)}


def test_missing_link_outside_the_ring_costs_only_the_mesh(world: World) -> None:
    world.network.unreachable = {frozenset(("n1", "n3")), frozenset(("n2", "n4"))}
    nodes = world.join(0, 0)
    nodes += [world.add()]
    world.run()
    assert nodes[0].view.is_meshed
    world.network.unreachable = set()
    world.admit_all()
    fourth = world.add()
    world.run()
    ring = nodes[0].view.ring
    world.network.unreachable = {frozenset((fourth.name, f"n{ring[1]}"))}
    world.admit_all()
    assert all(len(node.view.ring) == 4 for node in (*nodes, fourth))
    assert not any(node.view.is_meshed for node in (*nodes, fourth))
    assert world.reduce([*nodes, fourth]) == [Result.SUCCESS] * 4


def test_missing_link_is_made_at_a_later_group_call(world: World) -> None:
    nodes = world.join(0, 0, 0)
    nodes += [world.add()]
    world.run()
    ring = nodes[0].view.ring
    world.network.unreachable = {frozenset((nodes[3].name, f"n{ring[1]}"))}
    world.admit_all()
    view = nodes[0].view
    world.wait(RETRY_S)
    world.run()
    assert world.reduce(nodes) == [Result.SUCCESS] * 4
    world.network.unreachable = set()
    world.wait(2 * RETRY_S)
    world.run()
    assert world.reduce(nodes) == [Result.SUCCESS] * 4
    assert [node.view for node in nodes] == [dataclasses.replace(view, peer=node.number) for node in nodes]
    assert world.call_all(nodes, Kind.UPDATE_TOPOLOGY) == [Result.SUCCESS] * 4
    world.run()
    assert all(node.view.is_meshed and node.view.ring == view.ring for node in nodes)
    assert world.reduce(nodes) == [Result.SUCCESS] * 4


def test_link_that_broke_often_is_retried_when_needed(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    a, b, c, d = (world.node_of(peer) for peer in nodes[0].view.ring)
    for _ in range(RELINKS_MAX + 1):
        world.break_link(a, c)
        world.run()
    assert not a.view.is_meshed
    world.kill(b)
    world.run()
    world.reduce([a, c, d])  # a and c are neighbours now
    op = world.launch(a, TAG)
    world.run()
    world.break_link(a, c)
    world.run()
    assert a.result(op) is Result.RANK_CONNECTION_LOST
    assert world.reduce([a, c, d]) == [Result.SUCCESS] * 3


# Links that carry no bytes any more, between peers that the master hears.

TIMEOUT_S = MasterOptions().peer_timeout_s


@pytest.fixture(params=["there", "back", "both ways"])
def block(request: pytest.FixtureRequest) -> Block:
    def block(world: World, a: Node, b: Node) -> None:
        if request.param != "back":
            world.block(a, b)
        if request.param != "there":
            world.block(b, a)

    return block


def _pass(world: World, seconds: float) -> None:
    """Lets time pass in small steps."""
    until = world.now + seconds
    while world.now < until - 1e-9:
        world.wait(min(0.1, until - world.now))
        while world.step():
            pass


def test_blocked_link_evicts_a_peer_within_the_peer_timeout(world: World, block: Block) -> None:
    a, b, c = world.join(0, 0, 0)
    block(world, a, b)
    ops = [world.launch(node, TAG) for node in (a, b, c)]
    _pass(world, TIMEOUT_S + 0.5)
    survivors = world.accepted
    assert len(survivors) == 2
    assert c in survivors
    assert {node.result(op) for node, op in zip((a, b, c), ops, strict=True)} <= {
        Result.RANK_CONNECTION_LOST,
        Result.RANK_CONNECTION_FAILED,
    }
    assert world.reduce(survivors) == [Result.SUCCESS] * 2
    (evicted,) = {a, b} - set(survivors)
    assert evicted.ended is not None
    assert "peers 1 and 2 cannot connect to each other" in evicted.ended.reason
    world.heal()
    world.run()
    world.check_rest()


def test_briefly_blocked_link_evicts_no_peer(world: World, block: Block) -> None:
    a, b, c = world.join(0, 0, 0)
    block(world, a, b)
    for node in (a, b, c):
        world.launch(node, TAG)
    _pass(world, TIMEOUT_S / 2 + 0.5)
    assert any(isinstance(message, m.LinkLost) for _, message in world.from_peers)
    world.heal()
    world.run()
    assert len(world.accepted) == 3
    assert world.reduce([a, b, c]) == [Result.SUCCESS] * 3
    world.check_rest()


def test_blocked_link_outside_the_ring_costs_only_the_mesh(world: World, block: Block) -> None:
    nodes = world.join(0, 0, 0, 0)
    a, c = nodes[0], nodes[2]
    assert a.view.is_meshed
    block(world, a, c)
    for node in nodes:
        world.launch(node, TAG)
    _pass(world, TIMEOUT_S + 1.0)
    assert rings(nodes) == {(1, 2, 3, 4)}
    assert not a.view.is_meshed
    assert world.reduce(nodes) == [Result.SUCCESS] * 4
    world.check_rest()


def test_idle_blocked_link_has_no_effect(world: World, block: Block) -> None:
    a, b = world.join(0, 0)
    view = world.master.state.view
    block(world, a, b)
    _pass(world, 10 * TIMEOUT_S)
    world.heal()
    assert world.reduce([a, b]) == [Result.SUCCESS] * 2
    assert world.master.state.view == view


def test_dialer_decides_which_peer_of_a_pair_is_evicted(world: World) -> None:
    """The other end would wait to be dialed for much longer."""
    _, b, c = world.join(0, 0, 0)
    world.network.unreachable = {frozenset(("n2", "n3"))}
    world.break_link(b, c)
    _pass(world, 0.1)
    assert len(world.accepted) == 2
    assert world.reduce(world.accepted) == [Result.SUCCESS] * 2


# Paths that carry small packets only.


@pytest.fixture(params=["there", "back", "both ways"])
def hole(request: pytest.FixtureRequest) -> Callable[[World, Node], None]:
    def open_holes(world: World, sick: Node) -> None:
        for other in world.nodes:
            if other is not sick and request.param != "back":
                world.open_hole(sick, other)
            if other is not sick and request.param != "there":
                world.open_hole(other, sick)

    return open_holes


@pytest.mark.parametrize("at", range(4))
def test_peer_with_most_failed_links_is_evicted(world: World, hole: Callable[[World, Node], None], at: int) -> None:
    nodes = world.join(0, 0, 0, 0)
    sick = nodes[at]
    hole(world, sick)
    for node in nodes:
        world.launch(node, TAG)
    _pass(world, TIMEOUT_S + 1.0)
    healthy = [node for node in nodes if node is not sick]
    assert world.accepted == healthy
    assert sick.ended is not None
    assert sick.ended.code is Result.RANK_CONNECTION_FAILED
    assert world.reduce(healthy) == [Result.SUCCESS] * 3
    world.check_rest()


def test_newcomer_behind_a_wrong_mtu_is_not_admitted(world: World, hole: Callable[[World, Node], None]) -> None:
    nodes = world.join(0, 0, 0)
    sick = world.add()
    hole(world, sick)
    world.run()
    calls = [world.group_call(node, Kind.UPDATE_TOPOLOGY) for node in nodes]
    _pass(world, TIMEOUT_S + 1.0)
    assert [node.call(call) for node, call in zip(nodes, calls, strict=True)] == [Result.SUCCESS] * 3
    assert world.accepted == nodes
    assert sick.ended is not None
    assert world.reduce(nodes) == [Result.SUCCESS] * 3


def test_sync_succeeds_without_a_receiver_whose_links_fail(world: World) -> None:
    nodes = world.join(0, 0, 0)
    sick = world.add()
    world.run()
    world.admit_all()
    for node in nodes:
        node.revision = 7
    for other in nodes:
        world.open_hole(other, sick)
    calls = [world.group_call(node, Kind.SYNC) for node in (*nodes, sick)]
    _pass(world, TIMEOUT_S + 1.0)
    assert world.accepted == nodes
    assert [node.call(call) for node, call in zip(nodes, calls, strict=False)] == [Result.SUCCESS] * 3
