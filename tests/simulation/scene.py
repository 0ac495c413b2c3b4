"""The scene of a simulated run, which all its parts share: the clock, chance, the nodes, and the network."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pccl.protocol import messages as m
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import MasterOptions
from tests.simulation.checks import Checks
from tests.simulation.connections import Control
from tests.simulation.events import Events
from tests.simulation.master_host import MasterHost, Memory
from tests.simulation.network import Network
from tests.simulation.node import Node

MASTER = "master"
MASTERS = (MASTER, "standby", "second standby")
MASTER_TIMEOUT_S = 60.0
BATCH_MAX = 4
CLOCK_RATES = (0.9, 1.1)
"""The bounds of the rates of clocks that drift."""

T = TypeVar("T")


@dataclass
class Doom:
    """What happens to a process after that many effects more."""

    effects: int
    strike: Callable[[], None]


class Scene:
    def __init__(
        self,
        rng: random.Random | None = None,
        cut_bytes: bool = False,
        options: MasterOptions | None = None,
        masters: int = 0,
        memory: Memory = Memory.NONE,
        is_one_name: bool = False,
        clocks: random.Random | None = None,
    ) -> None:
        """See `World`."""
        self.rng = rng
        """Without one the oldest thing happens first, without cuts, losses and reordered by chance."""
        self.now = 0.0
        self.options = options or MasterOptions()
        self.masters = masters
        """The number of masters that nodes outlive. With 0 there is one, and they end with it."""
        self.memory = memory
        self.is_one_name = is_one_name
        """All masters are behind one name, which leads each node to one of them."""
        self.addresses = 1 if is_one_name else max(1, masters)
        """The number of master addresses that nodes know."""
        self.searches_in_turn = False
        """Nodes that look for a master stay at each for as long as those do that ship, and then ask the next one.
        Otherwise they stay for longer, begin with the first again when time passes, and so miss each other more."""
        self._clocks = clocks
        self.hosts = [MasterHost(name, Failover("run-1", options)) for name in MASTERS[: max(1, masters)]]
        for host in self.hosts:
            host.rate = self.draw_rate()
        self.nodes: list[Node] = []
        self.controls: dict[int, Control] = {}
        """All control connections that ever were, by their number."""
        self.network = Network()
        self.events = Events(self.network)
        is_fenced = memory is Memory.DISK and len(self.hosts) == 1
        self.checks = Checks(
            self.nodes, self.addresses, is_one_name, is_fenced, lambda: self.now, self.options.founders
        )
        self.dooms: dict[str, Doom] = {}
        """Processes that will be stopped or killed between two effects of their machines, by the names of nodes and
        masters."""
        self.log: list[str] = []
        self.from_peers: list[tuple[str, m.FromPeer]] = []
        """Every message that a master has received, with the name of the node."""
        self.from_masters: list[tuple[str, m.FromMaster]] = []
        """Every message that a master has sent, with the name of the node."""
        self._cut_bytes = cut_bytes

    # Who there is.

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.is_reachable]

    @property
    def accepted(self) -> list[Node]:
        return [node for node in self.nodes if node.is_reachable and node.views]

    @property
    def master(self) -> Master:
        """The one that leads, in the highest term."""
        leading = [host for host in self.hosts if host.is_leading]
        alive = next((host for host in self.hosts if not host.is_dead), self.hosts[0])
        host = max(leading, key=lambda host: host.machine.master.state.term, default=alive)
        return host.machine.master

    @property
    def is_master_away(self) -> bool:
        return self.hosts[0].is_away or self.hosts[0].is_wedged

    def node_of(self, peer: int) -> Node:
        """The node that has this number, or had it last."""
        for node in self.nodes:
            if node.number == peer:
                return node
        return next(node for node in self.nodes if peer in node.former_numbers)

    def ring_nodes(self, node: Node) -> list[Node]:
        return [self.node_of(peer) for peer in node.view.ring]

    def reaches(self, node: Node, host: MasterHost) -> bool:
        """Whether what the node sends gets to a master that is there."""
        return not host.is_away and self.network.passes(node.name, host.name)

    def hosts_of(self, node: Node) -> list[MasterHost]:
        """Return the masters that the addresses that a node knows lead it now."""
        return [self.hosts[node.route]] if self.is_one_name else self.hosts

    # Clocks.

    def clock(self, whose: Node | MasterHost) -> float:
        """Return the time by a peer's own clock."""
        return self.now * whose.rate

    def draw_rate(self) -> float:
        """Draw the rate of a clock."""
        return self._clocks.uniform(*CLOCK_RATES) if self._clocks is not None else 1.0

    def before_doom(self, whose: Node | MasterHost, effects: list[T]) -> list[T]:
        """Return those of some effects that a process lives to carry out, before `Doom.strike` is to be called: all, if
        its doom does not come yet."""
        doom = self.dooms[whose.name]
        carried_out = effects[: doom.effects]
        doom.effects -= len(carried_out)
        return carried_out

    @property
    def peer_timeout_s(self) -> float:
        return self.options.peer_timeout_s

    # Chance.

    def pick(self, among: list[T]) -> T:
        return self.rng.choice(among) if self.rng else among[0]

    def take(self, queue: deque[bytes]) -> bytes:
        """Take what arrives next from a connection: a frame or what is left of it, or the first bytes of it."""
        data = queue.popleft()
        cut = 1 if self._cut_bytes else 0
        if data and self.rng is not None and self.rng.random() < 0.1:
            cut = self.rng.randrange(len(data))
        if 0 < cut < len(data):
            queue.appendleft(data[cut:])
            data = data[:cut]
        return data

    def batch(self, waiting: int) -> int:
        """Draw how many of the things that wait the runtime finds at once."""
        return self.rng.randint(1, min(waiting, BATCH_MAX)) if self.rng else 1
