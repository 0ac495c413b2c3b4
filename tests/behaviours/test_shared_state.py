"""sync_shared_state as the master arranges it; transfers are pretended."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.world import World


def test_equal_states_need_no_transfer(world: World) -> None:
    nodes = world.join(0, 0)
    assert world.call_all(nodes, Kind.SYNC) == [Result.SUCCESS] * 2
    assert not any(node.plans for node in nodes)


def test_newcomer_gets_the_state_from_all_holders(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    for node in (a, b):
        node.revision, node.root, node.loose = 5, b"new", b"theirs"
    assert world.call_all([a, b, c], Kind.SYNC) == [Result.SUCCESS] * 3
    assert (c.revision, c.root, c.loose) == (5, b"new", b"theirs")
    plan = c.plans[0].plan
    assert (plan.revision, plan.donors, plan.fetch_content, plan.fetch_loose) == (5, [1, 2], True, True)
    assert not a.plans[0].plan.fetch_content


def test_newcomer_cannot_outvote_peers(world: World) -> None:
    a, b = world.join(0, 0)
    world.call_all([a, b], Kind.SYNC)
    (c,) = world.join(0)
    c.revision, c.root = 1000, b"wrong"
    assert world.call_all([a, b, c], Kind.SYNC) == [Result.SUCCESS] * 3
    assert {(node.revision, node.root) for node in (a, b, c)} == {(0, b"root")}


def test_elected_revision_never_goes_back(world: World) -> None:
    a, b = world.join(0, 0)
    a.revision = b.revision = 7
    world.call_all([a, b], Kind.SYNC)
    a.revision = b.revision = 6
    assert world.call_all([a, b], Kind.SYNC) == [Result.NO_SHARED_STATE_AVAILABLE] * 2
    assert "revision 7" in a.calls[max(a.calls)].reason


def test_without_peers_the_newest_revision_wins(world: World) -> None:
    a, b = world.join(0, 0)
    a.revision, a.root = 7, b"seven"
    assert world.call_all([a, b], Kind.SYNC) == [Result.SUCCESS] * 2
    c, d = world.join(0, 0)
    for node in (a, b):
        world.kill(node)
    world.run()
    c.revision = 3
    assert world.call_all([c, d], Kind.SYNC) == [Result.SUCCESS] * 2
    assert d.revision == 3


def test_groups_sync_by_themselves(world: World) -> None:
    a, b, c = world.join(0, 0, 1)
    b.root = b"other"
    assert world.call_all([a, b], Kind.SYNC) == [Result.SUCCESS] * 2
    assert b.root == a.root == b"root"
    assert c.root == b"root"
    assert not c.calls or max(c.calls) not in c.open_calls


def test_receiver_lost_in_mid_sync(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    c.root = b"other"
    calls = [world.group_call(node, Kind.SYNC) for node in (a, b, c)]
    world.run_until(lambda: any(isinstance(message, m.SyncPlan) for _, message in world.from_masters))
    world.kill(c)
    world.run()
    assert (a.call(calls[0]), b.call(calls[1])) == (Result.SUCCESS, Result.SUCCESS)


def test_donor_lost_in_mid_sync(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    c.root = b"other"
    calls = [world.group_call(node, Kind.SYNC) for node in (a, b, c)]
    world.run_until(lambda: any(isinstance(message, m.SyncPlan) for _, message in world.from_masters))
    world.kill(a)
    world.run()
    assert (b.call(calls[1]), c.call(calls[2])) == (Result.SUCCESS, Result.SUCCESS)
    assert c.root == b"root"
    report = next(message for _, message in world.from_peers if isinstance(message, m.SyncReport))
    assert report.suspects == [(1, "connection refused")]


def test_last_donor_lost_in_mid_sync(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    a.revision, a.root = 1, b"new"
    calls = [world.group_call(node, Kind.SYNC) for node in (a, b, c)]
    world.run_until(lambda: any(isinstance(message, m.SyncPlan) for _, message in world.from_masters))
    world.kill(a)
    world.run()
    assert (b.call(calls[1]), c.call(calls[2])) == (Result.NO_SHARED_STATE_AVAILABLE,) * 2


def test_receiver_that_fails_fails_the_call_on_all(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    b.root, b.fails_to_fetch = b"other", True
    assert world.call_all([a, b, c], Kind.SYNC) == [Result.NO_SHARED_STATE_AVAILABLE] * 3
    assert "peer 2 (n2) could not fetch the shared state" in a.calls[max(a.calls)].reason


def test_receiver_whose_call_timed_out_fails_the_call_on_all(world: World) -> None:
    a, b = world.join(0, 0)
    b.root = b"other"
    calls = [world.group_call(node, Kind.SYNC) for node in (a, b)]
    world.run_until(lambda: any(isinstance(message, m.SyncPlan) for _, message in world.from_masters))
    world.cancel_group_call(b, calls[1])
    world.run()
    assert (a.call(calls[0]), b.call(calls[1])) == (Result.NO_SHARED_STATE_AVAILABLE,) * 2


def test_sync_without_a_donor_fails(world: World) -> None:
    nodes = world.join(0, 0)
    for node in nodes:
        node.strategy = "receive_only"
    assert world.call_all(nodes, Kind.SYNC) == [Result.NO_SHARED_STATE_AVAILABLE] * 2
