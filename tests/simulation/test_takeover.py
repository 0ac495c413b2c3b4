"""The checks of a master that takes a run over: each promise is broken in what they are told of a good one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.master_host import Memory
from tests.simulation.node import Node
from tests.simulation.world import TAG, World

Change = Callable[[Any], m.Message | None]


@pytest.fixture
def world() -> World:
    return World(masters=1, memory=Memory.DISK)


def told_otherwise(world: World, kind: type[m.Message], change: Change) -> None:
    """Have the checks see other messages of masters to the second peer; None: none at all."""
    original = world.checks.sent

    def sent(control: Any, process: int, message: m.Message, company: list[Node]) -> None:
        changed = change(message) if isinstance(message, kind) and control.node.name == "n2" else message
        if changed is not None:
            original(control, process, changed, company)

    world.checks.sent = sent  # type: ignore[method-assign]


def succeed(world: World) -> None:
    """Have another master take the run over from one that is dead."""
    world.restart_master()
    world.run()
    world.wait(2 * world.peer_timeout_s)
    world.run()
    world.check_rest()


def test_a_master_takes_a_run_over(world: World) -> None:
    nodes = world.join(0, 0, 0)
    assert world.reduce(nodes) == [Result.SUCCESS] * 3
    world.kill_master()
    succeed(world)
    assert world.reduce(nodes) == [Result.SUCCESS] * 3


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        (m.Resumed, lambda message: msgspec.structs.replace(message, in_force=[77]), "may be in force"),
        (m.OpsCommit, lambda message: None, "some have heard"),
        (m.OpsCommit, lambda message: msgspec.structs.replace(message, ops=[m.OpRef(1, 1)]), "some have heard"),
    ],
    ids=["another view", "commits untold", "other commits"],
)
def test_of_a_run_that_is_whole(kind: type[m.Message], change: Change, complaint: str) -> None:
    world = World(masters=1, memory=Memory.NONE)
    world.reduce(world.join(0, 0, 0))
    world.kill_master()
    told_otherwise(world, kind, change)
    with pytest.raises(AssertionError, match=complaint):
        succeed(world)


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        (m.Flush, lambda message: None, "ops are stopped of"),
        (m.Flush, lambda message: msgspec.structs.replace(message, epoch=77), "ops are stopped of"),
        (m.Prepare, lambda message: msgspec.structs.replace(message, commits=[m.OpRef(TAG + 1, 0)]), "hears 0 of op"),
        (m.Prepare, lambda message: msgspec.structs.replace(message, commits=[m.OpRef(TAG, 0)]), "two verdicts"),
        (m.Prepare, lambda message: msgspec.structs.replace(message, aborts=[]), "and not 13"),
    ],
    ids=[
        "goes on",
        "another epoch",
        "a commit that was none",
        "a commit of what was aborted",
        "an abort without its reason",
    ],
)
def test_of_a_run_that_has_lost_one(world: World, kind: type[m.Message], change: Change, complaint: str) -> None:
    nodes = world.join(0, 0, 0)
    world.cancel(nodes[0], world.launch(nodes[0], TAG))
    world.run()
    world.kill_master()
    world.kill(nodes[2])
    told_otherwise(world, kind, change)
    with pytest.raises(AssertionError, match=complaint):
        succeed(world)


@pytest.mark.parametrize("changes", [{"code": Result.TIMEOUT}, {"call_number": 77}], ids=["code", "number"])
def test_of_a_call_that_had_ended(world: World, changes: dict[str, Any]) -> None:
    """One has heard how it ended, and the other has not."""
    nodes = world.join(0, 0)
    calls = [world.group_call(node, Kind.UPDATE_TOPOLOGY) for node in nodes]
    world.run_until(lambda: calls[0] in nodes[0].calls)
    world.kill_master(lost=9)
    told_otherwise(world, m.GroupCallResult, lambda message: msgspec.structs.replace(message, **changes))
    with pytest.raises(AssertionError, match="others have heard"):
        succeed(world)
