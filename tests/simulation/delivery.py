"""The choice of what happens next in a simulated run, of all that is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.simulation.control_plane import ControlPlane
from tests.simulation.heartbeats import Heartbeats
from tests.simulation.network import Direction, end_of_heartbeats
from tests.simulation.node import Node
from tests.simulation.peers import Peers
from tests.simulation.scene import Scene

if TYPE_CHECKING:
    from tests.simulation.real.engines import RealEngines

SLOWNESS = 0.95
"""The probability that something else goes first where a connection is slow."""
_Choice = tuple[Callable[[Any], None], Any]
"""A function that delivers something, and its argument."""


class Delivery:
    def __init__(
        self,
        scene: Scene,
        peers: Peers,
        heartbeats: Heartbeats,
        control_plane: ControlPlane,
        engines: RealEngines | None,
    ) -> None:
        self._scene = scene
        self._engines = engines
        self._heartbeats = heartbeats
        self._control_plane = control_plane
        # One object each, so that choices can be told apart by them.
        self._to_master = control_plane.deliver_to_master
        self._to_peer = control_plane.deliver_to_peer
        self._reports = peers.hear_some
        self._closed_heartbeat = self._find_closed_heartbeat

    def step(self) -> bool:
        """Deliver one pending thing: a random one, or without chance the oldest of the first connection or node that
        has one. False if there is none."""
        rng, events = self._scene.rng, self._scene.events
        if rng is None:
            for deliver, what in self._choices():
                deliver(what)
                return True
            for index in events.ready():
                events.happen(index)
                return True
            return False
        choices, ready = list(self._choices()), list(events.ready())
        total = len(choices) + len(ready)
        if total == 0:
            return False
        chosen = int(rng.random() * total)
        if self._scene.network.is_anything_slow and rng.random() < SLOWNESS:
            chosen = next(
                (at % total for at in range(chosen, chosen + total) if not self._is_slow(choices, ready, at % total)),
                chosen,
            )
        if chosen < len(choices):
            deliver, what = choices[chosen]
            deliver(what)
        else:
            events.happen(ready[chosen - len(choices)])
        return True

    def _choices(self) -> Iterator[_Choice]:
        """Yield all that may be delivered now, except for events."""
        scene = self._scene
        passes = scene.network.passes
        for control in scene.controls.values():
            if control.outbox and scene.reaches(control.node, control.host) and not control.host.is_wedged:
                yield self._to_master, control
        for host_and_connection in self._heartbeats.closed():
            yield self._closed_heartbeat, host_and_connection
        for node in scene.nodes:
            if node.is_frozen or not node.is_alive:
                continue
            name = node.name
            if node.ended is None:
                connection = node.control
                if connection is None:
                    if self._control_plane.may_dial(node):
                        yield self._control_plane.dial, node
                elif node.reattaching_since is not None:
                    if self._control_plane.may_reattach(connection):
                        yield self._control_plane.reattach, node
                elif connection.inbox and passes(connection.host.name, name):
                    yield self._to_peer, node
            if (node.reports or node.has_news()) and passes(name, name):
                yield self._reports, node
            if node.commands:
                yield _run_command, node
        if self._engines is not None:
            yield from self._engines.choices()

    def _find_closed_heartbeat(self, host_and_connection: Any) -> None:
        self._heartbeats.find_closed(*host_and_connection)

    def _is_slow(self, choices: list[_Choice], ready: list[int], at: int) -> bool:
        if at >= len(choices):
            return self._scene.events.is_slow(ready[at - len(choices)])
        if self._engines is not None and self._engines.is_slow(*choices[at]):
            return True
        way = self._way(*choices[at])
        network = self._scene.network
        return way is not None and (way[1] in network.slow_machines or way in network.slow)

    def _way(self, deliver: Callable[[Any], None], what: Any) -> Direction | None:
        if deliver is self._to_master:
            return what.name, what.host.name
        if deliver is self._reports or deliver is _run_command:
            return what.name, what.name
        if deliver is self._to_peer:
            return what.control.host.name, what.name
        if deliver is self._closed_heartbeat:
            host, connection = what
            return end_of_heartbeats(host.heartbeats[connection])
        return None


def _run_command(node: Node) -> None:
    """Have an engine do the next thing it was told to do."""
    node.commands.popleft()()
