"""A fault at any moment of a run: all survivors agree, no call hangs, and the run goes on.

The fault comes before every ninth delivery. `python -m tests.simulation` tries random ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest

from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.world import MASTER, World

RELIEF_AFTER = 20
"""Deliveries until a short fault ends."""
EVERY = 9
"""Deliveries between two moments."""
STRIDE = 3
"""Factor for faults that have the same effect at neighbouring deliveries."""


class _Interrupted(World):
    """Something happens before the n-th delivery. If it is short, it ends `RELIEF_AFTER` deliveries later, or when
    all is delivered, before any time passes."""

    def __init__(self, at: int, fault: Callable[[World], None], is_short: bool = False, masters: int = 0) -> None:
        super().__init__(masters=masters)
        self.network.costs = {frozenset(("n1", "n2")): 500}
        self.deliveries = 0
        self._at = at
        self._fault = fault
        self._is_short = is_short

    def step(self) -> bool:
        self.deliveries += 1
        if self.deliveries == self._at:
            self._fault(self)
        if self._is_short and self.deliveries == self._at + RELIEF_AFTER:
            self.relieve()
        if super().step():
            return True
        if self._is_short and self.deliveries >= self._at:
            self._is_short = False
            self.relieve()
            return True
        return False

    def relieve(self) -> None:
        self.heal()
        self.network.slow.clear()
        for node in self.alive:
            if node.is_frozen:
                self.thaw(node)


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
        world.group_call(node, kind)
    world.run()


def _recover(world: World) -> None:
    """Let the survivors end what cannot end, and go on."""
    world.run()
    for node in world.alive:
        if node.is_frozen:
            world.wait(MasterOptions().answer_timeout_s)
            world.run()
            world.thaw(node)
            world.run()
    if world.network.blocked:
        _pass(world)
        world.heal()
        _pass(world)
    is_anybody_seeking = any(node.masterless_since is not None for node in world.alive)
    if world.master.state.pending != world.master.admission.admissible or is_anybody_seeking:
        _pass(world)  # heartbeats that were cut off are tried again after a while
    world.check_rest()
    world.cancel_all()
    world.admit_all()
    survivors = world.accepted
    reduced = Result.SUCCESS if len(survivors) > 1 else Result.TOO_FEW_PEERS
    assert set(world.reduce(survivors, tag=9)) <= {reduced}
    assert set(world.call_all(survivors, Kind.SYNC)) <= {Result.SUCCESS}
    world.check_rest()


def _pass(world: World) -> None:
    """Long enough for everything that depends on the peer timeout."""
    for _ in range(6):
        world.wait(MasterOptions().peer_timeout_s / 2)
        world.run()


def _other(world: World, node: Node) -> Node | str:
    return next((other for other in world.alive if other is not node), MASTER)


def _slow(world: World, node: Node) -> None:
    world.rng = random.Random(1)
    for other in (MASTER, str(_other(world, node))):
        world.network.slow |= {(node.name, other), (other, node.name)}


def _break_links(world: World, node: Node) -> None:
    for other in world.alive:
        if other is not node:
            world.break_link(node, other)


def _reset_all(world: World, node: Node) -> None:
    world.rng = random.Random(1)
    for each in world.alive:
        world.reset(each)
        world.break_heartbeats(each)


FAULTS: dict[str, Callable[[World, Node], None]] = {
    "kill": lambda world, node: world.kill(node),
    "kill in mid-sentence": lambda world, node: world.kill(node, lost_bytes=5),
    "sever": lambda world, node: world.sever(node),
    "leave": lambda world, node: world.leave(node),
    "freeze": lambda world, node: world.freeze(node),
    "break links": _break_links,
}
SHORT_FAULTS: dict[str, Callable[[World, Node], None]] = {
    "freeze and thaw": lambda world, node: world.freeze(node),
    "not heard by the master for a while": lambda world, node: world.block(node, MASTER),
    "cut from a peer for a while": lambda world, node: world.cut(node, _other(world, node)),
    "slow": _slow,
    "reset control connection": lambda world, node: world.reset(node),
    "all connections to the master reset": _reset_all,
}
CUTS: dict[str, Callable[[World, Node], None]] = {
    "not heard by the master": lambda world, node: world.block(node, MASTER),
    "hears no master": lambda world, node: world.block(MASTER, node),
    "not heard by a peer": lambda world, node: world.block(node, _other(world, node)),
    "cut from a peer": lambda world, node: world.cut(node, _other(world, node)),
    "isolated": lambda world, node: world.isolate(node),
}
LOSES_NOBODY = ("break links",)
IDS = ["eldest", "second", "newcomer"]


@pytest.mark.parametrize("index", [0, 1, 2], ids=IDS)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_at_any_time(name: str, index: int) -> None:
    _try_all(FAULTS[name], index, 3 if name in LOSES_NOBODY else 2)


@pytest.mark.parametrize("index", [0, 1, 2], ids=IDS)
@pytest.mark.parametrize("name", SHORT_FAULTS)
def test_short_fault_at_any_time_evicts_no_peer(name: str, index: int) -> None:
    is_reset = "reset" in name  # a newcomer may have to start over
    _try_all(SHORT_FAULTS[name], index, 3, 1 if is_reset else STRIDE, is_short=True, masters=int(is_reset))


@pytest.mark.parametrize("index", [0, 1, 2], ids=IDS)
@pytest.mark.parametrize("name", CUTS)
def test_partition_at_any_time_evicts_one_peer_at_most(name: str, index: int) -> None:
    _try_all(CUTS[name], index, 2, STRIDE)


def _try_all(
    do: Callable[[World, Node], None],
    index: int,
    survivors: int,
    stride: int = 1,
    is_short: bool = False,
    masters: int = 0,
) -> None:
    def fault(world: World) -> None:
        if index < len(world.nodes) and world.nodes[index].is_reachable:
            do(world, world.nodes[index])

    for at in count(1, EVERY * stride):
        world = _Interrupted(at, fault, is_short, masters)
        try:
            _course(world)
            if world.deliveries < at:
                break
            _recover(world)
            assert len(world.accepted) >= survivors
        except BaseException as error:
            error.add_note(f"with the fault before delivery {at}")
            raise
    assert at > 100, "the course was not run"
    assert {node.view.ring for node in world.accepted} == {(1, 2, 3)}
