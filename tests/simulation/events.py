"""Events: all that is under way in a simulated run outside of control connections, each happening at its own time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.simulation.master_host import MasterHost
from tests.simulation.network import Direction, Network, large_packets
from tests.simulation.node import Node

Action = Callable[[], None]
_Event = tuple[Node | MasterHost, Action, tuple[Direction, ...]]
"""An event's target, its action, and the directions of the network that it needs."""


class Events:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._events: list[_Event] = []

    def later(
        self, target: Node | MasterHost, action: Action, source: Node | None = None, is_answered: bool = False
    ) -> None:
        """Add something that happens to a node or a master. It is held up while its target is frozen, and by blocks on
        the way from its source, or on the way back if it takes an answer."""
        ways: tuple[Direction, ...] = ()
        if source is not None:
            ways = ((source.name, target.name), (target.name, source.name))[: 1 + is_answered]
        self._events.append((target, action, ways))

    def carry(self, target: Node, action: Action, source: Node, is_answered: bool = False) -> None:
        """Add payload that gets to a node. Also what blocks large packets holds it up."""
        ways = ((source.name, target.name), (target.name, source.name))[: 1 + is_answered]
        self._events.append((target, action, (*ways, (large_packets(source), target.name))))

    def ready(self) -> Iterator[int]:
        """Yield the indices of all that may happen now, oldest first."""
        blocked = self._network.blocked
        for index, (target, _, ways) in enumerate(self._events):
            if not target.is_frozen and (not blocked or blocked.isdisjoint(ways)):
                yield index

    def happen(self, index: int) -> None:
        _, action, _ = self._events.pop(index)
        action()

    def is_slow(self, index: int) -> bool:
        target, _, ways = self._events[index]
        return target.name in self._network.slow_machines or not self._network.slow.isdisjoint(ways)
