"""A run in memory: one real master and real peers, joined by queues of encoded bytes, with an engine that pretends.

Time is a number that the test moves. `World.step` delivers one pending thing, chosen by the caller's random generator
(or the oldest of the first node that has one), so a schedule is replayed by its seed.

    scene           what all parts share: the clock, chance, all nodes
    network         which nodes reach each other; connections and events that are under way
    delivery        which of all that is under way happens next
    masters         what masters' machines decide is carried out; they live on hosts
    peers           peers' machines hear of their engines, and what they decide is carried out
    control_plane   connections between masters and peers, and peers that look for a master
    heartbeats      which nodes would have heard each other
    links           connections between peers
    ops, engine     ops, their fast path, and engines that pretend
    group_calls     group calls, and the transfers and measurements that they lead to

Nodes and masters may freeze, and messages may be blocked from one of them to another for a while (`block`, `cut`,
`heal`). There may be several masters, and one that is killed may restart. Then nodes outlive them.

What the machines do is watched by `checks` at every step. `World.check_rest` looks for what hangs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from pccl.protocol import messages as m
from pccl.protocol.failover.bootstrap import Start, hold_beside_s, hold_s
from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.peer.machine import Peer
from pccl.types import Result
from tests.simulation.control_plane import ControlPlane
from tests.simulation.delivery import Delivery
from tests.simulation.engine import Engines
from tests.simulation.group_calls import GroupCalls
from tests.simulation.heartbeats import Heartbeats
from tests.simulation.links import Links
from tests.simulation.master_host import MasterHost, Memory
from tests.simulation.masters import Masters
from tests.simulation.network import large_packets
from tests.simulation.node import Node
from tests.simulation.ops import Ops
from tests.simulation.peers import Peers
from tests.simulation.scene import MASTER, MASTER_TIMEOUT_S, Doom, Scene

if TYPE_CHECKING:
    from tests.simulation.real.engines import RealEngines

__all__ = ["MASTER", "MASTER_TIMEOUT_S", "TAG", "World", "rings"]

TAG = 5
TICK_S = 1e-6
"""More than the rounding errors of clocks that drift."""


class World(Scene):
    def __init__(
        self,
        rng: random.Random | None = None,
        cut_bytes: bool = False,
        options: MasterOptions | None = None,
        masters: int = 0,
        has_fast_path: bool = False,
        memory: Memory = Memory.NONE,
        is_one_name: bool = False,
        clocks: random.Random | None = None,
        engine_seed: int | None = None,
        connections_fail: bool = True,
    ) -> None:
        """`masters`: how many there are that nodes outlive. With 0 there is one, and they end with it.
        `has_fast_path`: ops may go past the machines. `memory`: what every master keeps. `is_one_name`: nodes know all
        masters by one name. `clocks` draws the rates of everybody's clock; without it all go alike. `engine_seed`:
        the engines are those that ship, and this is the seed of their ops and chances; their connections fail by
        themselves, unless told otherwise."""
        super().__init__(rng, cut_bytes, options, masters, memory, is_one_name, clocks)
        self._masters = Masters(self)
        self._peers = Peers(self, has_fast_path)
        self.engines: Engines | RealEngines
        self.links: Links
        self.real = new_engines(self, engine_seed, connections_fail) if engine_seed is not None else None
        if self.real is not None:
            self.engines, self.links = self.real, new_links(self, self._peers, self.real)
            self._peers.start_engine, self._peers.is_real = self.real.start, True
        else:
            self.engines = Engines(self.events.carry, self.node_of, self.pick)
            self.links = Links(self, self._peers)
        self.heartbeats = Heartbeats(self, self._masters, self._peers)
        self.control_plane = ControlPlane(self, self._masters, self._peers, self.heartbeats)
        self._ops = Ops(self, self._peers, self.engines)
        self._calls = GroupCalls(self, self._peers)
        self._delivery = Delivery(self, self._peers, self.heartbeats, self.control_plane, self.real)

    # What users do.

    def add(self, group: int = 0, connections: int = 2, site: str = "", site_size: int = 0) -> Node:
        """Add a peer that wants to join, on its own or with the others of its site."""
        node = self.connect(group, connections)
        node.site = node.machine.site = site
        node.site_size = node.machine.site_size = site_size
        self.send(node, self.control_plane.hello(node))
        return node

    def connect(self, group: int = 0, connections: int = 2, host: str = "", alias: str = "") -> Node:
        """Add a peer that is connected and has not said Hello yet. `host` and `alias` are its host's address and the
        name that it gives, if it is not to have some of its own."""
        number = len(self.nodes) + 1
        machine = Peer(group, connections, may_grow=self.real is not None, outlives_masters=self.masters > 0)
        node = Node(f"n{number}", 1000 + number, machine, group=group)
        node.host, node.alias = host, alias
        node.rate = self.draw_rate()
        node.route = self.pick(list(range(len(self.hosts)))) if self.is_one_name else 0
        if self.real is not None:
            self.real.adopt(node)
        self.nodes.append(node)
        hosts = self.hosts_of(node)
        at = next((at for at, host in enumerate(hosts) if not host.is_dead), 0)  # the others refuse it at once
        node.asked = at + 1
        if hosts[at].is_dead and self.is_one_name:
            node.tried.add(hosts[at].name)  # it asks again when time has passed
        else:
            self.control_plane.connect(node, hosts[at])
        return node

    def hello(self, node: Node) -> m.Hello:
        return self.control_plane.hello(node)

    def send(self, node: Node, message: m.Message | bytes) -> None:
        """Send a message to its master in a peer's name."""
        if not isinstance(message, m.Hello) or node.number:
            self.checks.strangers.add(node)
        self.control_plane.send(node, message)

    def launch(
        self,
        node: Node,
        tag: int,
        arguments: str = "",
        is_refused: bool = False,
        pair: tuple[Node, bool] | None = None,
    ) -> int:
        """Launch an op; its number. `is_refused`: by its engine. `pair`: an op with that node alone, and whether this
        one sends."""
        return self._ops.launch(node, tag, arguments, is_refused, pair)

    def cancel(self, node: Node, op: int) -> None:
        self._ops.cancel(node, op)

    def give_up(self, node: Node, op: int) -> None:
        """Cancel an op whose caller does not wait for the verdict."""
        self._ops.give_up(node, op)

    def group_call(self, node: Node, kind: str) -> int:
        """Make a group call; its number."""
        return self._calls.call(node, kind)

    def cancel_group_call(self, node: Node, call: int) -> None:
        self._calls.cancel(node, call)

    def cancel_all(self) -> None:
        """Cancel every call and op of all accepted peers."""
        for node in self.accepted:
            for call in node.open_calls:
                self.cancel_group_call(node, call)
            for op in node.open_ops:
                self.cancel(node, op)
        self.run()

    def leave(self, node: Node) -> None:
        node.has_left = True
        self._peers.take_over(node)
        node.machine.leave("")
        self._peers.settle(node)

    # What tests often do.

    def join(self, *groups: int) -> list[Node]:
        """Add an accepted peer for each group named, in this order of seniority."""
        nodes = []
        for group in groups:
            nodes.append(self.add(group))
            self.run()
        self.admit_all()
        return nodes

    def admit_all(self) -> None:
        """Have all accepted peers call update_topology until no peer waits any more except for others of its site."""
        self.run()
        while self.master.admission.admissible and self.accepted:
            calls = [(node, self.group_call(node, m.Kind.UPDATE_TOPOLOGY)) for node in self.accepted]
            self.run()
            assert all(node.call(call) is Result.SUCCESS for node, call in calls if node.is_reachable)

    def call_all(self, nodes: list[Node], kind: str) -> list[Result]:
        """Have all make a group call; the result of each."""
        calls = [self.group_call(node, kind) for node in nodes]
        self.run()
        return [node.call(call) for node, call in zip(nodes, calls, strict=True)]

    def reduce(self, nodes: list[Node], tag: int = TAG) -> list[Result]:
        """Have all launch an op; the result of each."""
        ops = [self.launch(node, tag) for node in nodes]
        self.run()
        return [node.result(op) for node, op in zip(nodes, ops, strict=True)]

    def close(self) -> None:
        """End real engines, if there are any, and check what has become of callers' arrays."""
        if self.real is not None:
            self.real.check()
            self.real.close()

    # Time.

    def step(self) -> bool:
        """Deliver one pending thing; False if there is none."""
        return self._delivery.step()

    def run(self, steps_max: int = 200_000) -> None:
        """Deliver until all is delivered, and let time pass where a peer waits for a link."""
        for _ in range(steps_max):
            if not self.step() and not self._peers.hand_over_all() and not (self.real and self.real.rest()):
                due = self.links.due()
                for host in self.hosts:
                    if not host.is_away:
                        master = host.machine.master
                        late = [*master.liveness.absent_until.values(), master.links.evidence_due_at]
                        due += [at if host.rate == 1.0 else at / host.rate + TICK_S for at in late if at is not None]
                if not due:
                    return
                self.wait(max(0.0, min(due + self.heartbeats.due()) - self.now))
        raise AssertionError("the run does not come to rest")

    def run_while_any(self, steps_max: int = 100_000) -> None:
        """Deliver until all is delivered for now, though time would bring more."""
        for _ in range(steps_max):
            if not self.step():
                return
        raise AssertionError("there is always something to deliver")

    def run_until(self, condition: Callable[[], object], steps_max: int = 100_000) -> None:
        """Deliver until something is so."""
        for _ in range(steps_max):
            if condition():
                return
            assert self.step(), "at rest, and it is not so"
        raise AssertionError("the run does not come to it")

    def wait(self, seconds: float) -> None:
        """Move the clock, and let every timer fire whose time has come."""
        self.now += seconds
        self._peers.hand_over_all()
        self.heartbeats.time_out()
        self.links.find_stalled()
        if self.real is not None:
            self.real.pass_time(seconds)
        for host in self.hosts:
            if host.is_away:
                continue
            now = self.clock(host)
            deadline = host.machine.deadline()
            if deadline is not None and deadline <= now:
                self.heartbeats.note_quiet(host)
                self._masters.carry_out(host, host.machine.tick(now))
                deadline = host.machine.deadline()
            assert deadline is None or deadline > now
        self.control_plane.time_out()
        for node in self.alive:
            if not node.is_frozen:
                self.links.expire(node)
                self._peers.tick(node)

    def check_rest(self) -> None:
        """Check, at rest and with no peer frozen, that no peer waits for something that no other peer could bring
        about."""
        if self.real is not None:
            self.real.check()
        for node in self.accepted:
            assert not node.fast_path.running, f"{node} leaves ops on its fast path: {list(node.fast_path.running)}"
        self.checks.rest(self.accepted, self.links.is_up, bool(self.engines.held_back))

    # What becomes of peers.

    def kill(self, node: Node, lost_bytes: int = 0) -> None:
        """Kill a peer, as SIGKILL does. What it had sent still arrives, except for the last `lost_bytes`."""
        self.heartbeats.note()
        node.is_alive = False
        if node.control is not None:
            node.control.hang_up_by_node(lost_bytes)
        if self.real is not None:
            self.real.kill(node)
        node.submitted.clear()
        node.unfinished.clear()
        node.commands.clear()
        for wire in [wire for link in node.links.values() for wire in link.wires]:
            self.links.close_wire(wire, node)
        node.links.clear()
        node.reports.clear()
        node.fast_path.running.clear()
        node.resume_deferred()

    def freeze(self, node: Node) -> None:
        self.heartbeats.note()
        node.is_frozen = True
        if self.real is not None:
            self.real.freeze_node(node)

    def stop_within(self, node: Node, effects: int) -> None:
        """Freeze a peer between two effects of its machine, after that many more."""
        self.dooms[node.name] = Doom(effects, lambda: self.freeze(node))

    def kill_within(self, node: Node, effects: int) -> None:
        """Kill a peer between two effects of its machine."""
        self.dooms[node.name] = Doom(effects, lambda: self.kill(node))

    def hang(self, node: Node) -> None:
        """Freeze a peer except for its heartbeat. Ends by `thaw`."""
        self.heartbeats.note()
        node.is_frozen = node.is_hung = True

    def thaw(self, node: Node) -> None:
        node.is_frozen = node.is_hung = False
        if self.real is not None:
            self.real.freeze_node(node)
        node.master_heard_at = self.now  # one that was away blames no peer
        if node.unfinished:
            self._peers.go_on(node)
        node.resume_deferred()

    # What becomes of masters.

    def kill_master(self, host: MasterHost | None = None, lost: int = 0) -> None:
        """Kill a master, as SIGKILL does, on a machine that goes on. The last `lost` messages to each are lost."""
        self.heartbeats.note()
        host = host or self.hosts[0]
        host.is_dead = True
        host.unfinished.clear()
        for control in self.controls.values():
            if control.host is host:
                for _ in range(min(lost, len(control.inbox) - control.is_hung_up_on)):
                    if not control.is_hung_up_on:
                        control.inbox.pop()
                control.hang_up()
                control.outbox.clear()
                control.is_over = True
        for connection in list(host.heartbeats):
            self.heartbeats.lose(host, connection)

    def restart_master(self, host: MasterHost | None = None) -> None:
        """Begin a new master where one was killed."""
        host = host or self.hosts[0]
        assert host.is_dead
        seconds = hold_s(Start.AUTO, self.options, host.record, self.memory is Memory.DISK)
        self._masters.begin(host, seconds, hold_beside_s(Start.AUTO, self.options))
        for node in self.nodes:
            if node.machine.peer:
                node.tried.discard(host.name)

    def freeze_master(self, host: MasterHost | None = None) -> None:
        self.heartbeats.note()
        host = host or self.hosts[0]
        host.is_frozen = True
        host.frozen_at = self.now

    def thaw_master(self, host: MasterHost | None = None) -> None:
        host = host or self.hosts[0]
        host.is_frozen = host.is_wedged = False
        if host.unfinished:
            self._masters.go_on(host)
        if self.masters and not host.is_dead:
            seconds = (self.now - host.frozen_at) * host.rate
            self._masters.carry_out(host, host.machine.stood_still(seconds, self.clock(host)))
        for node in host.heartbeats.values():
            node.heard_at = self.now
        self._accept_all(host)

    def stop_master_within(self, host: MasterHost, effects: int) -> None:
        """Freeze a master between two effects of its machine, after that many more."""
        self.dooms[host.name] = Doom(effects, lambda: self.freeze_master(host))

    def kill_master_within(self, host: MasterHost, effects: int) -> None:
        """Kill a master between two effects of its machine."""
        self.dooms[host.name] = Doom(effects, lambda: self.kill_master(host))

    def wedge_master(self, host: MasterHost) -> None:
        """Have a master read no message and take no peer in, though its heartbeats go on. Ends by `unwedge_master`."""
        host.is_wedged = True

    def unwedge_master(self, host: MasterHost) -> None:
        host.is_wedged = False
        self._accept_all(host)

    def _accept_all(self, host: MasterHost) -> None:
        for control in self.controls.values():
            if control.host is host and not control.is_known and not control.is_over:
                self.control_plane.accept(control)

    # What becomes of connections.

    def sever(self, node: Node, lost_bytes: int = 0) -> None:
        """Break a living peer's control connection. It makes no other: its master is lost to it."""
        if node.control is not None:
            node.control.hang_up_by_node(lost_bytes)
            if not node.control.is_reset:
                node.control.hang_up()

    def reset(self, node: Node) -> None:
        """Reset a living peer's control connection, from some byte on in each direction. It dials again."""
        self.control_plane.reset(node)

    def break_heartbeats(self, node: Node) -> None:
        """Reset a peer's heartbeat connection. It makes another when time passes."""
        self.heartbeats.reset(node)

    def break_link(self, a: Node, b: Node) -> None:
        """Reset all connections between two peers; each end finds it at its own time."""
        self.links.break_all(a, b)

    def break_connection(self, a: Node, b: Node) -> None:
        """Reset one of the connections of a link, which goes on with the others."""
        self.links.break_one(a, b)

    def block(self, a: Node | str, b: Node | str) -> None:
        """Block everything from `a` to `b`."""
        self.heartbeats.note()
        self.network.blocked.add((str(a), str(b)))

    def open_hole(self, a: Node, b: Node) -> None:
        """Let only small packets get from `a` to `b` any more: the first words on a connection, no payload."""
        self.network.blocked.add((large_packets(a), str(b)))

    def cut(self, a: Node | str, b: Node | str) -> None:
        self.block(a, b)
        self.block(b, a)

    def isolate(self, node: Node) -> None:
        """Block everything from a peer and to it, as when its cable is pulled."""
        for host in self.hosts:
            self.cut(node, host.name)
        for other in self.nodes:
            if other is not node:
                self.cut(node, other)

    def heal(self) -> None:
        self.heartbeats.note()
        self.network.blocked.clear()


def new_engines(scene: Scene, seed: int, connections_fail: bool) -> RealEngines:
    from tests.simulation.real.engines import RealEngines  # builds the library

    return RealEngines(scene, seed, connections_fail)


def new_links(scene: Scene, peers: Peers, engines: RealEngines) -> Links:
    from tests.simulation.real.links import RealLinks

    return RealLinks(scene, peers, engines)


def rings(nodes: list[Node]) -> set[tuple[int, ...]]:
    """Return the rings that these peers see."""
    return {node.view.ring for node in nodes}
