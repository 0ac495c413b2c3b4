"""A fault before every single delivery of a run: all survivors agree, nobody hangs, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pccl.protocol.master import MasterOptions
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.world import World


class _Interrupted(World):
    """Something happens before the n-th delivery."""

    def __init__(self, at: int, fault: Callable[[World], None]) -> None:
        super().__init__()
        self.costs = {frozenset(("n1", "n2")): 500}
        self.deliveries = 0
        self._at = at
        self._fault = fault

    def step(self) -> bool:
        self.deliveries += 1
        if self.deliveries == self._at:
            self._fault(self)
        return super().step()


def _course(world: World) -> None:
    """Three peers join, reduce, sync and measure."""
    for name in ("n1", "n2", "n3"):
        newcomer = world.add()
        newcomer.root = name.encode()
        world.run()
        _all_call(world, Kind.UPDATE_TOPOLOGY)
    for tag in (1, 2):
        for node in reversed(_able(world)):
            world.launch(node, tag)
    world.run()
    _all_call(world, Kind.SYNC)
    _all_call(world, Kind.OPTIMIZE_TOPOLOGY)
    for node in _able(world):
        world.launch(node, 3)
    world.run()


def _able(world: World) -> list[Node]:
    return [node for node in world.accepted if not node.is_frozen]


def _all_call(world: World, kind: str) -> None:
    for node in _able(world):
        world.joint(node, kind)
    world.run()


def _recover(world: World) -> None:
    """After the fault: those who are left end what cannot end, and go on."""
    world.run()
    for node in world.alive:
        if node.is_frozen:
            world.wait(MasterOptions().answer_timeout_s)
            world.run()
            world.thaw(node)
            world.run()
    world.check_rest()
    for node in world.accepted:
        for call in node.open_calls:
            world.cancel_joint(node, call)
        for op in node.open_ops:
            world.cancel(node, op)
    world.run()
    world.admit_all()
    survivors = world.accepted
    reduced = Result.SUCCESS if len(survivors) > 1 else Result.TOO_FEW_PEERS
    assert set(world.reduce(survivors, tag=9)) <= {reduced}
    assert set(world.call_all(survivors, Kind.SYNC)) <= {Result.SUCCESS}
    world.check_rest()


def _break_links(world: World, node: Node) -> None:
    for other in world.alive:
        if other is not node:
            world.break_link(node, other)


FAULTS: dict[str, Callable[[World, Node], None]] = {
    "kill": lambda world, node: world.kill(node),
    "kill in mid-sentence": lambda world, node: world.kill(node, lost_bytes=5),
    "sever": lambda world, node: world.sever(node),
    "leave": lambda world, node: world.leave(node),
    "freeze": lambda world, node: world.freeze(node),
    "break links": _break_links,
}
LOSES_NOBODY = ("break links",)


@pytest.mark.parametrize("index", [0, 1, 2], ids=["eldest", "second", "newcomer"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_before_every_delivery(name: str, index: int) -> None:
    def fault(world: World) -> None:
        if index < len(world.nodes) and world.nodes[index].is_reachable:
            FAULTS[name](world, world.nodes[index])

    at = 0
    while True:
        at += 1
        world = _Interrupted(at, fault)
        try:
            _course(world)
            if world.deliveries < at:
                break
            _recover(world)
            assert len(world.accepted) >= (3 if name in LOSES_NOBODY else 2)
        except BaseException as error:
            error.add_note(f"with the fault before delivery {at}")
            raise
    assert at > 100, "the course was not run"
    assert {node.view.ring for node in world.accepted} == {(1, 2, 3)}
