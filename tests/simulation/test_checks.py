"""The checkers object: each promise is broken in what they are told of a run that is otherwise good."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.view import View
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.world import TAG, World

Change = Callable[[Node, Any], Any]


@pytest.fixture
def world() -> World:
    """A run that need not come to rest."""
    return World()


def told_otherwise(world: World, what: str, change: Change) -> None:
    """Have the checks be told something else of a node; None: none at all."""
    original = getattr(world.checks, what)

    def tell(node: Node, told: Any, *rest: Any) -> None:
        changed = change(node, told)
        if changed is not None:
            original(node, changed, *rest)

    setattr(world.checks, what, tell)  # peers look it up at each result


def of(name: str, change: Callable[[Any], Any]) -> Change:
    """A change of what is told of one node."""
    return lambda node, told: change(told) if node.name == name else told


def with_view(view: Callable[[View], View]) -> Change:
    return of("n2", lambda effect: dataclasses.replace(effect, view=view(effect.view)))


def aborted(effect: ps.OpResult) -> ps.OpResult:
    return dataclasses.replace(effect, code=Result.RANK_CONNECTION_LOST, reason="a peer was lost", world_size=0)


def reduce_to_rest(world: World, nodes: list[Node]) -> None:
    for node in nodes:
        world.launch(node, TAG)
    world.run()
    world.check_rest()


@pytest.mark.parametrize(
    "change",
    [aborted, lambda effect: dataclasses.replace(effect, world_size=2), lambda effect: None],
    ids=["other verdict", "other world", "lost"],
)
def test_a_result(world: World, change: Callable[[ps.OpResult], ps.OpResult | None]) -> None:
    nodes = world.join(0, 0, 0)
    assert world.reduce(nodes) == [Result.SUCCESS] * 3
    world.check_rest()
    told_otherwise(world, "op_result", of("n2", change))
    with pytest.raises(AssertionError):
        reduce_to_rest(world, nodes)


def buffer_changed(change: Callable[[frozenset[tuple[str, int]]], frozenset[tuple[str, int]]]) -> Change:
    def tell(node: Node, effect: ps.OpResult) -> ps.OpResult:
        if node.name == "n2":
            node.buffers[effect.op] = change(node.buffers[effect.op])
        return effect

    return tell


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value - {next(each for each in value if each[0] == "n1")},
        lambda value: value | {("n1", 99)},
        lambda value: frozenset((name, number + 1) for name, number in value),
        lambda value: value - {next(each for each in value if each[0] == "n1")} | {("n1", 99)},
    ],
    ids=["one is missing", "one is there twice", "all are others", "one is another"],
)
def test_the_bytes_of_a_result(world: World, change: Callable[[Any], Any]) -> None:
    nodes = world.join(0, 0, 0)
    told_otherwise(world, "op_result", buffer_changed(change))
    with pytest.raises(AssertionError):
        world.reduce(nodes)


def test_a_result_that_comes_twice(world: World) -> None:
    nodes = world.join(0, 0, 0)
    original = world.checks.op_result

    def twice(*told: Any) -> None:
        original(*told)
        original(*told)

    world.checks.op_result = twice
    with pytest.raises(AssertionError):
        world.reduce(nodes)


def test_an_input_that_an_abort_has_not_put_back(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    world.engines.held_back = {"n2"}
    for node in (a, b, c):
        world.launch(node, TAG)
    world.run()
    told_otherwise(world, "op_result", buffer_changed(lambda value: value | {("n1", 1)}))
    world.kill(c)
    with pytest.raises(AssertionError, match="lost its input"):
        world.run()


def test_commit_of_an_incomplete_op(world: World) -> None:
    a, b = world.join(0, 0)
    told_otherwise(world, "commit", lambda node, key: (b.held.discard(key), key)[1])
    with pytest.raises(AssertionError, match="lacks the result"):
        world.reduce([a, b])


@pytest.mark.parametrize(
    "change",
    [
        lambda view: dataclasses.replace(view, ring=tuple(reversed(view.ring))),
        lambda view: dataclasses.replace(view, ring=view.ring[:-1]),
        lambda view: dataclasses.replace(view, view=view.view - 1),
        lambda view: dataclasses.replace(view, group_sizes={0: 2}),
        lambda view: dataclasses.replace(view, is_meshed=not view.is_meshed),
        lambda view: dataclasses.replace(view, peer=view.peer + 1),
    ],
    ids=["other order", "smaller", "older", "other sizes", "other mesh", "other number"],
)
def test_a_view(world: World, change: Callable[[View], View]) -> None:
    world.join(0, 0)
    handlers, tell = world._peers._handlers, with_view(change)
    installed = handlers[ps.Installed]
    handlers[ps.Installed] = lambda node, effect: installed(node, tell(node, effect))
    with pytest.raises((AssertionError, KeyError)):
        world.join(0)


def falsify(world: World, names: set[str], **changes: Any) -> None:
    """Have the checks see other results of group calls, as sent to these nodes."""
    original = world.checks.sent

    def sent(control: Any, process: int, message: m.Message, company: list[Node]) -> None:
        if isinstance(message, m.GroupCallResult) and control.node.name in names:
            message = msgspec.structs.replace(message, **changes)
        original(control, process, message, company)

    world.checks.sent = sent  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [Kind.SYNC, Kind.UPDATE_TOPOLOGY, Kind.OPTIMIZE_TOPOLOGY])
@pytest.mark.parametrize("changes", [{"code": Result.TIMEOUT}, {"value": 77}], ids=["code", "value"])
def test_the_end_of_a_group_call(world: World, kind: str, changes: dict[str, Any]) -> None:
    nodes = world.join(0, 0, 0)
    falsify(world, {"n2"}, **changes)
    with pytest.raises(AssertionError):
        world.call_all(nodes, kind)


def test_contents_that_differ_after_a_sync(world: World) -> None:
    nodes = world.join(0, 0, 0)
    original = world.checks.sent

    def sent(control: Any, process: int, message: m.Message, company: list[Node]) -> None:
        if isinstance(message, m.GroupCallResult):
            nodes[1].root = b"other"
        original(control, process, message, company)

    world.checks.sent = sent
    for node in nodes:
        world.group_call(node, Kind.SYNC)
    with pytest.raises(AssertionError, match="different contents"):
        world.run()


def test_a_revision_that_goes_back(world: World) -> None:
    nodes = world.join(0, 0)
    for node in nodes:
        node.revision = 7
    assert world.call_all(nodes, Kind.SYNC) == [Result.SUCCESS] * 2
    falsify(world, {"n1", "n2"}, value=6)
    with pytest.raises(AssertionError, match="went back"):
        world.call_all(nodes, Kind.SYNC)


def test_an_op_that_waits_for_ever(world: World) -> None:
    """All have launched it, and no peer's engine goes on."""
    nodes = world.join(0, 0)
    world.engines.held_back = {"n1", "n2"}
    for node in nodes:
        world.launch(node, TAG)
    world.run()
    world.engines.held_back.clear()
    with pytest.raises(AssertionError, match="hangs"):
        world.check_rest()


def test_a_call_that_waits_for_ever(world: World) -> None:
    nodes = world.join(0, 0)
    for node in nodes:
        node.kinds[99] = Kind.SYNC
    with pytest.raises(AssertionError, match=r"hangs|all wait"):
        world.check_rest()


def test_a_link_that_is_gone(world: World) -> None:
    a, _ = world.join(0, 0)
    a.links.clear()
    with pytest.raises(AssertionError):
        world.check_rest()


def test_a_report_of_what_no_master_decides(world: World) -> None:
    a, _ = world.join(0, 0)
    op = m.OpRef(TAG, 0)
    world.checks.says(a, m.OpsDone(a.view.epoch, [op]))
    with pytest.raises(AssertionError, match="of which no master decides"):
        world.checks.says(a, m.OpsStalled(a.view.epoch, [m.OpRef(TAG, 1)]))


def test_a_wait_whose_end_is_not_told(world: World) -> None:
    a, _ = world.join(0, 0)
    op = world.launch(a, TAG)
    world.checks.says(a, m.OpsStalled(a.view.epoch, [m.OpRef(*a.keys[op][2:])]))
    world.checks.finds_done(a, op)
    with pytest.raises(AssertionError, match="does not tell its master of"):
        world.checks.has_heard(a)


def test_an_update_that_ends_by_itself(world: World) -> None:
    a, _ = world.join(0, 0)
    call = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    with pytest.raises(AssertionError, match="its master has not ended"):
        world.checks.call_ends(a, call, Result.SUCCESS)


def test_messages_over_a_former_connection_are_ignored() -> None:
    """A master has let its peers go, and leads them once more: it takes no notice of that, and need not act on it."""
    world = World(masters=1)
    nodes = world.join(0, 0, 0)
    former, led_first = nodes[0].control, nodes[0].leader
    assert former is not None
    world.freeze_master()
    world.wait(0.9 * world.peer_timeout_s)
    world.thaw_master()
    world.run()
    leader = nodes[0].leader
    assert leader is not None
    assert leader is not led_first
    assert leader.process == former.host.process
    world.add(1)
    world.admit_all()
    world.checks.received(former, leader.process, m.LinkLost(0, nodes[1].number, "connection reset"))
    world.add(1)
    world.admit_all()
    world.check_rest()
