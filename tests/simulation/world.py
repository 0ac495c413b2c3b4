"""A run in memory: one real master and real peers, joined by queues of encoded bytes, with an engine that pretends.

Time is a number that the test moves. `World.step` delivers one pending thing, chosen by the caller's random generator
(or the oldest of the first node that has one), so a schedule is replayed by its seed.

What is pretended:

    control connections   byte queues that may be cut anywhere, lose their tail, or break, on each end at its own time;
                          a session goes on over the next one (`control_session`, the real one)
    signs of life         none travel; when time passes, it is looked up who could have heard whom, and since when not
    links                 `Wire`s, dialled, offered, accepted and closed one by one; a closed wire breaks its link
    the engine            `engine.Engines`; reports reach the machine in the order they happened, in batches
    shared state          a root and a revision; a fetch copies a donor's root

Nodes and the master may freeze, and nothing may get from one of them to another for a while (`block`, `cut`, `heal`;
the master is called "master" there). What was sent before waits, as TCP would have it. From a node to itself goes what
its engine reports.

There may be several masters, and one that is killed may begin anew. Then nodes outlive them: one that has lost its
master asks all of them in turn, once, and again when time has passed.

What the machines do is watched by `checks` at every step. `World.check_rest` looks for what hangs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.codec import FrameCache, ProtocolError, encode
from pccl.protocol.control_session import ControlSession
from pccl.protocol.failover import Beginning, Failover, hold_s
from pccl.protocol.master.effects import Close, Effect, FindRings, MasterLog, Persist, Send, TakeHeartbeats
from pccl.protocol.master.liveness import QUIET_SHARE
from pccl.protocol.master.machine import Master
from pccl.protocol.master.options import MasterOptions
from pccl.runtime.master.ring_search import best_ring
from pccl.types import Result
from tests.simulation.checks import Checks
from tests.simulation.engine import Engines
from tests.simulation.gate import OPS
from tests.simulation.node import Link, Node, Wire
from tests.simulation.seat import Control, Memory, Seat

TAG = 5
BATCH_MAX = 4
FETCHED_BLOCKS = 3
MASTER = "master"
GATED = 0.7
"""How often an op goes through the gate where it may."""
IMPATIENT = 0.3
"""How often its caller may leave the gate before time passes."""
SLOWNESS = 0.95
"""How often something else goes first where a link is slow."""
MASTERS = (MASTER, "standby")
MASTER_TIMEOUT_S = 60.0
_Choice = tuple[Callable[[Any], None], Node | Control | tuple[Seat, int]]
_Event = tuple[Node | None, Callable[[], None], tuple[tuple[str, str], ...]]
HEARTBEATS_FROM = 1_000_000
"""Connections for signs of life are numbered from here."""


class World:
    def __init__(
        self,
        rng: random.Random | None = None,
        cut_bytes: bool = False,
        options: MasterOptions | None = None,
        masters: int = 0,
        has_gates: bool = False,
        memory: Memory = Memory.NONE,
    ) -> None:
        """`masters`: how many there are that nodes outlive. With 0 there is one, and they end with it. `has_gates`: ops
        may go past the machines. `memory`: of every master."""
        self.rng = rng
        self.cut_bytes = cut_bytes
        self.now = 0.0
        self.masters = masters
        self.has_gates = has_gates
        self.options = options
        self.memory = memory
        self.seats = [Seat(name, Failover("run-1", options)) for name in MASTERS[: max(1, masters)]]
        self._runs = 0
        for seat in self.seats:
            self._begin(seat, 0.0)
        self.nodes: list[Node] = []
        self.controls: dict[int, Control] = {}
        self.blocked: set[tuple[str, str]] = set()
        """From whom nothing gets to whom."""
        self.slow: set[tuple[str, str]] = set()
        """From whom things get to whom only when little else is under way, mostly."""
        self._next_heartbeats = HEARTBEATS_FROM
        self.log: list[str] = []
        self.unreachable: set[frozenset[str]] = set()
        self.costs: dict[frozenset[str], int] = {}
        """Round trips in microseconds; 100 where nothing is said."""
        self.rates: dict[tuple[str, str], float] = {}
        """Of links in bytes per second; a million where nothing is said."""
        self.said: list[tuple[str, m.FromPeer]] = []
        """Everything that the master was told, with the name of the node."""
        self.told: list[tuple[str, m.FromMaster]] = []
        self.checks = Checks(self.nodes)
        self.engines = Engines(self._carry, self.node_of, self._pick, self._tell_caller)
        self._events: list[_Event] = []
        """What is under way outside of control connections, with the node it concerns and the directions it needs."""

    # What a test does.

    def add(self, group: int = 0, connections: int = 2, site: str = "", site_size: int = 0) -> Node:
        """A peer that wants to join, on its own or with the others of its site."""
        node = self.stranger(group, connections)
        node.machine.site, node.machine.site_size = site, site_size
        self.say(node, self.hello(node))
        return node

    def stranger(self, group: int = 0, connections: int = 2) -> Node:
        """A connected peer that has not said Hello yet."""
        number = len(self.nodes) + 1
        node = Node(f"n{number}", 1000 + number, ps.Peer(group, connections, outlives_masters=self.masters > 0))
        self.nodes.append(node)
        self._connect(node, next((seat for seat in self.seats if not seat.is_dead), self.seats[0]))
        return node

    def _connect(self, node: Node, seat: Seat) -> Control:
        number = len(self.controls) + 1
        control = node.control = self.controls[number] = Control(number, node, seat, self.now)
        if not seat.is_away:
            self._accept(control)
        return control

    def _accept(self, control: Control) -> None:
        control.is_known = True
        self._act(control.seat, control.seat.machine.connected(control.number, f"10.0.0.{control.number}", self.now))

    def _begin(self, seat: Seat, hold_s: float) -> None:
        self._runs += 1
        seat.begin(self._runs, self.options, self.now, hold_s, seat.name != MASTER, self.memory)

    def hello(self, node: Node) -> m.Hello:
        return m.Hello(
            m.PROTOCOL_VERSION,
            "test",
            node.group,
            [],
            node.port,
            node.machine.connections,
            node.name,
            masters=len(self.seats),
            may_found=len(self.seats) == 1 or not any(other.machine.view for other in self.alive),
            site=node.machine.site,
            site_size=node.machine.site_size,
            master_timeout_s=MASTER_TIMEOUT_S,
        )

    def kill(self, node: Node, lost_bytes: int = 0) -> None:
        """As by SIGKILL. What it had sent still arrives, but for the last `lost_bytes`."""
        self._note_heard()
        node.is_alive = False
        self._hang_up(node, lost_bytes)
        node.submitted.clear()
        node.commands.clear()
        for wire in [wire for link in node.links.values() for wire in link.wires]:
            self._close_wire(wire, node)
        node.links.clear()
        node.reports.clear()
        node.gate.hidden.clear()
        self._answer_knocks(node)

    def sever(self, node: Node, lost_bytes: int = 0) -> None:
        """Breaks a living peer's control connection, and it makes no other: its master is lost to it."""
        self._hang_up(node, lost_bytes)
        if node.control is not None and not node.control.is_reset:
            self._close(node.control)

    def reset(self, node: Node) -> None:
        """Resets a living peer's control connection, from some byte on in each direction. It dials again."""
        control = node.control
        if control is None or control.is_over or control.is_reset or control.is_hung_up_on or not control.has_opened:
            return
        sizes = [sum(map(len, queue)) for queue in (control.inbox, control.outbox)]
        control.reset(*(self.rng.randint(0, size) if self.rng else 0 for size in sizes))

    def _close(self, control: Control) -> None:
        """At the master's end."""
        if not control.is_hung_up_on:
            control.is_hung_up_on = True
            control.inbox.append(b"")

    def freeze(self, node: Node) -> None:
        self._note_heard()
        node.is_frozen = True

    def hang(self, node: Node) -> None:
        """It does nothing, but gives signs of life. Ends by `thaw`."""
        self._note_heard()
        node.is_frozen = node.is_hung = True

    def thaw(self, node: Node) -> None:
        node.is_frozen = node.is_hung = False
        node.master_heard_at = self.now  # one who was away blames nobody
        self._answer_knocks(node)

    @property
    def master(self) -> Master:
        """The one that leads, in the highest term."""
        leading = [seat for seat in self.seats if seat.is_leading]
        seat = max(leading, key=lambda seat: seat.machine.master.term, default=self.seats[0])
        return seat.machine.master

    def freeze_master(self, seat: Seat | None = None) -> None:
        self._note_heard()
        seat = seat or self.seats[0]
        seat.is_frozen = True
        seat.frozen_at = self.now

    def thaw_master(self, seat: Seat | None = None) -> None:
        seat = seat or self.seats[0]
        seat.is_frozen = False
        if self.masters and not seat.is_dead:
            self._act(seat, seat.machine.stood_still(self.now - seat.frozen_at, self.now))
        for node in seat.heartbeats.values():
            node.heard_at = self.now
        for control in self.controls.values():
            if control.seat is seat and not control.is_known and not control.is_over:
                self._accept(control)

    def kill_master(self, seat: Seat | None = None, lost: int = 0) -> None:
        """As by SIGKILL, on a machine that goes on. The last `lost` pieces of what it had sent to each are lost."""
        self._note_heard()
        seat = seat or self.seats[0]
        seat.is_dead = True
        for control in self.controls.values():
            if control.seat is seat:
                for _ in range(min(lost, len(control.inbox) - control.is_hung_up_on)):
                    if not control.is_hung_up_on:
                        control.inbox.pop()
                self._close(control)
                control.outbox.clear()
                control.is_over = True
        for connection in list(seat.heartbeats):
            self._lose_heartbeats(seat, connection)

    def restart_master(self, seat: Seat | None = None) -> None:
        """A new one begins where one was killed."""
        seat = seat or self.seats[0]
        assert seat.is_dead
        options = self.options or MasterOptions()
        self._begin(seat, hold_s(Beginning.UNKNOWN, options, seat.fence, self.memory is Memory.DISK))
        for node in self.nodes:
            node.tried.discard(seat.name)

    def block(self, a: Node | str, b: Node | str) -> None:
        """Nothing gets from `a` to `b` any more."""
        self._note_heard()
        self.blocked.add((str(a), str(b)))

    def open_hole(self, a: Node, b: Node) -> None:
        """Of what gets from `a` to `b`, only small packets do any more: the first words on a connection, no payload."""
        self.blocked.add((_large(a), str(b)))

    def cut(self, a: Node | str, b: Node | str) -> None:
        self.block(a, b)
        self.block(b, a)

    def isolate(self, node: Node) -> None:
        """As by pulling its cable."""
        for seat in self.seats:
            self.cut(node, seat.name)
        for other in self.nodes:
            if other is not node:
                self.cut(node, other)

    def heal(self) -> None:
        self._note_heard()
        self.blocked.clear()

    def break_link(self, a: Node, b: Node) -> None:
        """Resets all connections between two peers; each end finds it at its own time."""
        for wire in [wire for link in a.links.values() for wire in link.wires if wire.other(a) is b]:
            self._close_wire(wire, a)
            self._close_wire(wire, b)

    def break_connection(self, a: Node, b: Node) -> None:
        """Resets one of the connections of a link, which goes on with the others."""
        wires = [wire for link in a.links.values() for wire in link.wires if wire.other(a) is b]
        if wires:
            wire = self._pick(wires)
            self._close_wire(wire, a)
            self._close_wire(wire, b)

    def launch(
        self,
        node: Node,
        tag: int,
        arguments: str = "",
        refused: bool = False,
        pair: tuple[Node, bool] | None = None,
    ) -> int:
        """`pair`: an op with that node alone, and whether this one sends."""
        op = node.next()
        node.launched[op] = tag, arguments
        if pair is not None:
            node.pairs[op] = pair[0].number, pair[1]
        node.buffers[op] = frozenset(((node.name, op),))
        if refused:
            node.refuses.add(op)
        if pair is None and not refused and self._goes_through_gate():
            submission = node.gate.submission(node.machine, op, tag)
            if submission is not None:
                self.engines.submit(node, submission)
                assert self.rng is not None
                if self.rng.random() < IMPATIENT:
                    self._later(node, lambda: node.reports.extend(node.gate.show(op)))
                return op
        self._hear_all(node)
        if pair is None:
            node.gate.uses.pop(tag, None)
        node.machine.launch(op, tag, self.now, node.pairs.get(op))
        self._peer(node)
        return op

    def _goes_through_gate(self) -> bool:
        return self.has_gates and self.rng is not None and self.rng.random() < GATED

    def _show_all(self) -> bool:
        """Callers have waited in gates for long enough. Whether there were any."""
        shown = False
        for node in self.nodes:
            for op in list(node.gate.hidden) if not node.is_frozen else ():
                node.reports.extend(node.gate.show(op))
                shown = True
        return shown

    def _tell_caller(self, node: Node, effect: ps.SubmitOp) -> None:
        self.checks.commit(node.keys[effect.op])
        self.checks.op_result(node, ps.OpResult(effect.op, Result.SUCCESS, "", effect.world_size, 10, 20), None)

    def _take_over(self, node: Node) -> None:
        """Before the machine is told what bears on ops, it hears of all of them."""
        if node.gate.start is not None:
            node.reports.extend(node.gate.close())
            self._hear(node, list(node.reports))

    def _hear_all(self, node: Node) -> None:
        if self.has_gates:
            self._hear(node, list(node.reports))

    def cancel(self, node: Node, op: int) -> None:
        node.reports.extend(node.gate.show(op))
        self._hear_all(node)
        if op not in node.keys and op not in node.results:
            node.cancelled_queued.add(op)
        node.machine.cancel(op, Result.TIMEOUT, "its time has passed")
        self._peer(node)

    def give_up(self, node: Node, op: int) -> None:
        """As `cancel`, by a caller who does not wait for the verdict: the engine stops the op without being told by the
        machine."""
        self.cancel(node, op)
        node.given_up_ops.add(op)
        node.machine.hasten(op)
        self.engines.detach(node, op)
        self._peer(node)

    def joint(self, node: Node, kind: str) -> int:
        call = node.next()
        node.kinds[call] = kind
        self._take_over(node)
        node.machine.joint(call, kind, self.offer(node) if kind == m.Kind.SYNC else None)
        self._peer(node)
        return call

    def offer(self, node: Node) -> m.SyncOffer:
        tensors = [m.TensorOffer("weights", "float32", [2, 3], False), m.TensorOffer("loss", "float32", [1], True)]
        return m.SyncOffer(node.strategy, node.revision, node.root, tensors)

    def cancel_joint(self, node: Node, call: int) -> None:
        if call not in node.calls:
            node.given_up.add(call)
        self._take_over(node)
        node.machine.cancel_joint(call)
        self._peer(node)

    def cancel_all(self) -> None:
        """Every call and op of everybody accepted."""
        for node in self.accepted:
            for call in node.open_calls:
                self.cancel_joint(node, call)
            for op in node.open_ops:
                self.cancel(node, op)
        self.run()

    def leave(self, node: Node) -> None:
        node.has_left = True
        self._take_over(node)
        node.machine.leave("")
        self._peer(node)

    def say(self, node: Node, message: m.Message | bytes) -> None:
        """Puts words into a peer's mouth."""
        control = node.control
        if control is None:
            return
        frame = message if isinstance(message, bytes) else encode(message)
        if not isinstance(message, m.Hello | m.Resume):
            control.at_node.keep(frame)
        if not control.is_reset:
            control.outbox.append(frame)

    def run(self, steps_max: int = 200_000) -> None:
        """Delivers until nothing is left to deliver, and lets time pass where somebody waits for a link."""
        for _ in range(steps_max):
            if not self.step() and not self._show_all():
                due = [
                    link.expires_at
                    for node in self.alive
                    for link in node.links.values()
                    if not node.is_frozen and not link.is_complete
                ]
                for seat in self.seats:
                    due += seat.machine.master.absent_until.values() if not seat.is_away else ()
                due += [
                    seat.machine.master.evidence_due_at
                    for seat in self.seats
                    if not seat.is_away and seat.machine.master.evidence_due_at is not None
                ]
                if not due:
                    return
                self.wait(max(0.0, min(due + self._silence_due()) - self.now))
        raise AssertionError("the run does not come to rest")

    def run_until(self, condition: Callable[[], object], steps_max: int = 100_000) -> None:
        """Delivers until something is so."""
        for _ in range(steps_max):
            if condition():
                return
            assert self.step(), "at rest, and it is not so"
        raise AssertionError("the run does not come to it")

    def wait(self, seconds: float) -> None:
        """Moves the clock and lets every timer fire whose time has come."""
        self.now += seconds
        self._show_all()
        self._pass_silence()
        self._pass_stillness()
        for seat in self.seats:
            if seat.is_away:
                continue
            deadline = seat.machine.deadline()
            if deadline is not None and deadline <= self.now:
                self._sense(seat)
                self._act(seat, seat.machine.tick(self.now))
                deadline = seat.machine.deadline()
            assert deadline is None or deadline > self.now
        self._pass_seeking()
        for node in self.alive:
            if node.is_frozen:
                continue
            for number, link in list(node.links.items()):
                if self.now >= link.expires_at and not link.is_complete:
                    node.machine.link_failed(number, "no connection within the time")
                    self._peer(node)
                    assert number not in node.links
            deadline = node.machine.deadline()
            if deadline is not None and deadline <= self.now:
                self._hear_all(node)
                node.machine.tick(self.now)
                self._peer(node)
                deadline = node.machine.deadline()
            assert deadline is None or deadline > self.now, "the runtime would spin"

    # What tests often do.

    def join(self, *groups: int) -> list[Node]:
        """One more accepted peer for each group named, in this order of seniority."""
        nodes = []
        for group in groups:
            nodes.append(self.add(group))
            self.run()
        self.admit_all()
        return nodes

    def call_all(self, nodes: list[Node], kind: str) -> list[Result]:
        """All make a joint call; what each is told."""
        calls = [self.joint(node, kind) for node in nodes]
        self.run()
        return [node.call(call) for node, call in zip(nodes, calls, strict=True)]

    def reduce(self, nodes: list[Node], tag: int = TAG) -> list[Result]:
        """All launch an op; what each is told."""
        ops = [self.launch(node, tag) for node in nodes]
        self.run()
        return [node.result(op) for node, op in zip(nodes, ops, strict=True)]

    @property
    def is_master_frozen(self) -> bool:
        return self.seats[0].is_frozen

    @property
    def is_master_dead(self) -> bool:
        return self.seats[0].is_dead

    @property
    def is_master_away(self) -> bool:
        return self.is_master_frozen or self.is_master_dead

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.is_reachable]

    @property
    def accepted(self) -> list[Node]:
        return [node for node in self.alive if node.machine.view is not None]

    def admit_all(self) -> None:
        """Everybody accepted calls update_topology until nobody waits any more but for others of its site."""
        self.run()
        while self.master.admissible:
            calls = [(node, self.joint(node, m.Kind.UPDATE_TOPOLOGY)) for node in self.accepted]
            self.run()
            assert all(node.call(call) is Result.SUCCESS for node, call in calls if node.is_reachable)

    def node_of(self, peer: int) -> Node:
        """Who has this number, or had it last."""
        found = [node for node in self.nodes if node.number == peer]
        return found[0] if found else next(node for node in self.nodes if peer in node.former_numbers)

    def ring_nodes(self, node: Node) -> list[Node]:
        return [self.node_of(peer) for peer in node.view.ring]

    # Delivery.

    def step(self) -> bool:
        """Delivers one pending thing; False if there is none."""
        choices: list[_Choice] = []
        for control in self._open_controls():
            if control.outbox and self._gets_through(control.node, control.seat.name):
                choices.append((self._deliver_to_master, control))
        for seat in self.seats:
            for connection, node in seat.heartbeats.items():
                is_closed = not node.is_reachable or node.heartbeats != connection
                if is_closed and not seat.is_away and self._passes(node, seat.name):
                    choices.append((self._end_heartbeats, (seat, connection)))
        for node in self.nodes:
            control_of = node.control
            if control_of is None:
                if node.is_reachable and not node.is_frozen and len(node.tried) < len(self.seats):
                    choices.append((self._dial_master, node))
            elif node.reattaching_since is not None:
                if node.is_reachable and not node.is_frozen and self._may_reattach(control_of):
                    choices.append((self._reattach, node))
            elif (
                control_of.inbox
                and node.is_reachable
                and not node.is_frozen
                and self._gets_through(control_of.seat.name, node)
            ):
                choices.append((self._deliver_to_peer, node))
            if node.reports and node.is_alive and not node.is_frozen and self._gets_through(node, node):
                choices.append((self._deliver_reports, node))
            if node.commands and node.is_alive and not node.is_frozen:
                choices.append((self._deliver_command, node))
        ready = [index for index, event in enumerate(self._events) if self._is_ready(event)]
        if not choices and not ready:
            return False
        chosen = self._choose(choices, ready) if self.rng else 0
        if chosen < len(choices):
            deliver, what = choices[chosen]
            deliver(what)
        else:
            self._events.pop(ready[chosen - len(choices)])[1]()
        return True

    def _choose(self, choices: list[_Choice], ready: list[int]) -> int:
        assert self.rng is not None
        total = len(choices) + len(ready)
        chosen = int(self.rng.random() * total)
        if self.slow and self.rng.random() < SLOWNESS:
            for at in range(chosen, chosen + total):
                if not self._is_slow(choices, ready, at % total):
                    return at % total
        return chosen

    def _is_slow(self, choices: list[_Choice], ready: list[int], at: int) -> bool:
        if at >= len(choices):
            return not self.slow.isdisjoint(self._events[ready[at - len(choices)]][2])
        deliver, what = choices[at]
        if isinstance(what, Control):
            return (what.name, what.seat.name) in self.slow
        if deliver == self._deliver_reports:
            return (what.name, what.name) in self.slow
        if deliver != self._deliver_to_peer or not isinstance(what, Node):
            return False
        assert what.control is not None
        return (what.control.seat.name, what.name) in self.slow

    def _is_ready(self, event: _Event) -> bool:
        node, _, ways = event
        is_frozen = node.is_frozen if node is not None else self.is_master_frozen
        return not is_frozen and (not ways or not self.blocked or self.blocked.isdisjoint(ways))

    def _later(
        self, node: Node | None, action: Callable[[], None], source: Node | None = None, is_answered: bool = False
    ) -> None:
        """Something that happens to a node, or to the master, at its own time. A frozen node holds it up, and so do
        blocks on the way from its source, or back if it takes an answer."""
        ways: tuple[tuple[str, str], ...] = ()
        if source is not None and node is not None:
            ways = ((source.name, node.name), (node.name, source.name))[: 1 + is_answered]
        self._events.append((node, action, ways))

    def _carry(self, node: Node, action: Callable[[], None], source: Node, is_answered: bool = False) -> None:
        """Payload gets to a node, as of `_later`."""
        self._later(node, action, source, is_answered)
        node_, action, ways = self._events.pop()
        self._events.append((node_, action, (*ways, (_large(source), node.name))))

    def _pick(self, wires: list[Wire]) -> Wire:
        return self.rng.choice(wires) if self.rng else wires[0]

    def _take(self, queue: deque[bytes]) -> bytes:
        data = queue.popleft()
        cut = 1 if self.cut_bytes else 0
        if data and self.rng is not None and self.rng.random() < 0.1:
            cut = self.rng.randrange(len(data))
        if 0 < cut < len(data):
            queue.appendleft(data[cut:])
            data = data[:cut]
        return data

    def _batch(self, waiting: int) -> int:
        """How many things the runtime finds at once."""
        return self.rng.randint(1, min(waiting, BATCH_MAX)) if self.rng else 1

    def _hang_up(self, node: Node, lost_bytes: int) -> None:
        if node.control is None or node.control.is_over or node.control.is_reset:
            return
        outbox = node.control.outbox
        while lost_bytes and outbox:
            data = outbox.pop()
            if len(data) > lost_bytes:
                outbox.append(data[: len(data) - lost_bytes])
            lost_bytes -= min(lost_bytes, len(data))
        outbox.append(b"")

    def _open_controls(self) -> list[Control]:
        """Those over which something may still get to a master, oldest first."""
        return [control for control in self.controls.values() if control.outbox]

    def _deliver_to_master(self, control: Control) -> None:
        data = self._take(control.outbox)
        seat, node = control.seat, control.node
        if not control.is_known:
            self._accept(control)
        if not data:
            control.outbox.clear()
            self._lose_control(control)
            return
        try:
            for message in control.opening_decoder.feed(data):
                if isinstance(message, m.Ack):
                    control.at_seat.acknowledge(message.received)
                    continue
                if control.has_opened:
                    self._acknowledge(control, control.at_seat, control.inbox)
                control.has_opened = True
                self.said.append((node.name, message))
                if node.home in (seat, None):
                    self.checks.said(node, message)
                if isinstance(message, m.Resume):
                    self._sense(seat)
                self._act(seat, seat.machine.received(control.number, message, self.now))
        except ProtocolError as error:
            # As the server does.
            goodbye = Send(control.number, m.Goodbye(Result.MASTER_CONNECTION_FAILED, str(error)))
            self._act(seat, [] if control.is_over else [goodbye, Close(control.number)])
            self._end_control(control, str(error))
            control.outbox.clear()

    def _acknowledge(self, control: Control, session: ControlSession, back: deque[bytes]) -> None:
        """This end has received a message, and may have to say so."""
        ack = session.receive()
        if ack is not None and not control.is_reset and not control.is_over:
            back.append(encode(ack))

    def _lose_control(self, control: Control) -> None:
        """The master finds the connection closed, and its session may go on."""
        if control.has_opened and not control.is_over:
            reason = "connection reset"
            self._act(control.seat, control.seat.machine.detached(control.number, reason, self.now))
        else:
            self._end_control(control, "connection reset")

    def _may_reattach(self, control: Control) -> bool:
        seat = control.seat
        return seat.is_dead or (self._gets_through(control.node, seat.name) and self._passes(seat.name, control.node))

    def _reattach(self, node: Node) -> None:
        control = node.control
        assert control is not None
        node.reattaching_since = None
        seat = control.seat
        if seat.is_dead or control.is_over or not self._is_member(control):
            self._take_over(node)
            node.machine.master_lost("the master does not know the session")
            self._peer(node)
            return
        control.reattach()
        self._act(seat, seat.machine.reattached(control.number, self.now))

    def _end_heartbeats(self, of: tuple[Seat, int]) -> None:
        """A master finds a connection for signs of life closed."""
        seat, connection = of
        self._lose_heartbeats(seat, connection)
        self._act(seat, seat.machine.disconnected(connection, "closed by the other side", self.now))

    def _end_control(self, control: Control, reason: str) -> None:
        control.is_over = True
        if control is control.node.control or control.seat.machine.run == control.node.machine.run:
            self._gone(control)
        self._act(control.seat, control.seat.machine.disconnected(control.number, reason, self.now))

    def _gone(self, control: Control) -> None:
        """A master has lost a node, evicted it or let it go, unless that knows it by another connection. One that has
        ended, from before it came anew, may be waited for there in vain, and says nothing."""
        node = control.node
        others = [each for each in self.controls.values() if each.node is node and each is not control]
        if not any(
            each is node.control or (each.seat is control.seat and not self._is_absent(each))
            for each in others
            if self._is_member(each)
        ):
            self.checks.gone(node)

    def _is_member(self, control: Control) -> bool:
        return control.number in control.seat.machine.master.state.peer_of

    def _is_absent(self, control: Control) -> bool:
        master = control.seat.machine.master
        return bool(master.state.members[master.state.peer_of[control.number]].absence)

    # Looking for a master.

    def _dial_master(self, node: Node) -> None:
        seat = next(seat for seat in self.seats if seat.name not in node.tried)
        node.tried.add(seat.name)
        if seat.is_dead or not (self._passes(node.name, seat.name) and self._passes(seat.name, node.name)):
            return
        self._connect(node, seat)
        patience_s = MASTER_TIMEOUT_S
        if node.masterless_since is not None:
            patience_s = max(0.0, node.masterless_since + MASTER_TIMEOUT_S - self.now)
        resume = node.machine.resume(len(self.seats), self.now, b"", MASTER_TIMEOUT_S, patience_s)
        self.say(node, resume or self.hello(node))

    def _pass_seeking(self) -> None:
        """Those without a master try all again, and give up in the end."""
        for node in self.nodes:
            node.tried.clear()
        for node in self.alive:
            since, control = node.masterless_since, node.control
            if node.is_frozen:
                continue
            if node.reattaching_since is not None and self.now >= node.reattaching_since + self._timeout_s:
                self._take_over(node)
                node.machine.master_lost("no other connection")
                self._peer(node)
            if since is None:
                continue
            self._take_over(node)
            if self.now >= since + MASTER_TIMEOUT_S:
                node.machine.give_up("no master")
                self._peer(node)
            elif control is not None and len(self.seats) > 1 and self.now >= control.opened_at + 2 * self._timeout_s:
                node.machine.master_lost("no answer")
                self._peer(node)

    @property
    def _timeout_s(self) -> float:
        return (self.options or MasterOptions()).peer_timeout_s

    def _deliver_to_peer(self, node: Node) -> None:
        control = node.control
        assert control is not None
        is_sent_away = False
        self._take_over(node)
        for _ in range(self._batch(len(control.inbox))):
            data = self._take(control.inbox)
            if not data and control.is_reset and node.machine.is_led:
                control.inbox.clear()
                node.reattaching_since = self.now
                break
            if not data:
                node.machine.master_lost("the master closed the connection")
                break
            for message in control.decoder.feed(data):
                if isinstance(message, m.Ack):
                    control.at_node.acknowledge(message.received)
                    continue
                self._acknowledge(control, control.at_node, control.outbox)
                assert encode(message) == control.told[control.at_node.received - 1], "lost, doubled or out of order"
                node.heard(message)
                node.machine.received(message)
                if isinstance(message, m.OpAbort) and node.machine.ops.uses.is_overtaken(message.tag):
                    node.uses[message.epoch, message.tag] = node.machine.uses_of(message.tag)
                if isinstance(message, m.Welcome | m.Resumed):
                    node.masterless_since = None
                    node.tried.clear()
                is_sent_away = is_sent_away or isinstance(message, m.Elsewhere | m.StartOver)
            if is_sent_away:
                break
        self._peer(node)
        self._answer_knocks(node)

    def _deliver_command(self, node: Node) -> None:
        node.commands.popleft()()

    def _deliver_reports(self, node: Node) -> None:
        batch = [node.reports[at] for at in range(self._batch(len(node.reports)))]
        if node.gate.start is not None and any(kind not in OPS for kind, _ in batch):
            node.reports.extend(node.gate.close())
            batch = list(node.reports)
        self._hear(node, batch)
        self._peer(node)

    def _hear(self, node: Node, batch: list[tuple[str, int]]) -> None:
        """These are the first of its reports."""
        for _ in batch:
            node.reports.popleft()
        ran = [report for report in batch if report[0] == "ran"]
        for kind, number in ran + [report for report in batch if report[0] != "ran"]:
            if kind in ("ran", "started"):
                node.gate.hear((kind, number), node.machine, self.now)
            elif kind == "done":
                node.machine.op_done(number, 10, 20)
            elif kind == "mismatch":
                node.machine.op_mismatch(number, "different arguments")
            elif kind == "ended":
                node.machine.op_ended(number, 10, 20)
            elif kind == "agreed":
                node.machine.op_agreed(number)
            elif kind == "stopped":
                node.machine.op_frozen(number)
            elif kind == "frozen":
                node.machine.frozen(number)
            elif kind == "connection":
                node.machine.connection_lost(number, "connection reset")
            else:
                node.machine.link_lost(number, "connection reset")

    def _is_cut(self, a: Node, b: Node) -> bool:
        """Nothing that needs an answer gets through between them, or nothing large."""
        is_open = self._gets_through(a, b) and self._gets_through(b, a)
        return not is_open or not self.blocked.isdisjoint({(_large(a), b.name), (_large(b), a.name)})

    def _pass_stillness(self) -> None:
        """Engines find links on which bytes lie that do not get across."""
        for node in self.alive:
            for number, link in list(node.links.items()):
                if node.is_frozen or not self._is_still(node, link):
                    link.still_since = None
                elif link.still_since is None:
                    link.still_since = self.now
                elif self.now - link.still_since >= node.machine.link_timeout_s:
                    del node.links[number]
                    for wire in link.wires:
                        self._close_wire(wire, node)
                    node.reports.append(("lost", number))

    def _is_still(self, node: Node, link: Link) -> bool:
        if not link.is_complete or not self._is_cut(node, self.node_of(link.effect.member.peer)):
            return False
        open_ops = [effect for key, effect in node.submitted.items() if key not in node.held]
        return any(
            link.effect.link in (effect.links if effect.is_meshed else (effect.link_prev, effect.link_next))
            for effect in open_ops
        )

    # Signs of life.

    def _gets_through(self, a: Node | str, b: Node | str) -> bool:
        return self._passes(a, b) and not any(seat.is_away for seat in self.seats if seat.name == b)

    def _passes(self, a: Node | str, b: Node | str) -> bool:
        """The network is not in the way."""
        return not self.blocked or (str(a), str(b)) not in self.blocked

    def _note_heard(self) -> None:
        """To be called before anything changes that has to do with who hears whom."""
        for node in self.nodes:
            if self._is_heard(node):
                node.heard_at = self.now
            if self._hears(node):
                node.master_heard_at = self.now

    def _is_heard(self, node: Node) -> bool:
        is_sending_heartbeats = node.is_reachable and (node.is_hung or not node.is_frozen)
        seat = node.heartbeats_seat
        return (
            node.heartbeats != 0 and seat is not None and is_sending_heartbeats and self._gets_through(node, seat.name)
        )

    def _hears(self, node: Node) -> bool:
        seat = node.heartbeats_seat
        return node.heartbeats != 0 and seat is not None and not seat.is_frozen and self._gets_through(seat.name, node)

    def _silence_due(self) -> list[float]:
        """When somebody will have been silent for too long, as things are."""
        self._note_heard()
        due = []
        for node in self.alive:
            seat = node.heartbeats_seat
            if node.heartbeats_timeout_s is not None and not self._is_heard(node) and seat and not seat.is_frozen:
                due.append(node.heard_at + node.heartbeats_timeout_s)
            if node.heartbeats_timeout_s is not None and not self._hears(node) and not node.is_frozen:
                due.append(node.master_heard_at + node.heartbeats_timeout_s)
        return [at for at in due if at > self.now]

    def _pass_silence(self) -> None:
        self._note_heard()
        for seat in self.seats:
            for connection, node in list(seat.heartbeats.items()):
                silent_s = self.now - node.heard_at
                if seat.is_away or connection not in seat.heartbeats:
                    continue
                if node.heartbeats != connection and self._passes(node, seat.name):
                    self._lose_heartbeats(seat, connection)
                    self._act(seat, seat.machine.disconnected(connection, "closed by the other side", self.now))
                elif silent_s >= self._timeout_s:
                    self._sense(seat, connection)
                    self._lose_heartbeats(seat, connection)
                    self._act(seat, seat.machine.silent(connection, silent_s, self.now))
        for node in self.alive:
            if node.heartbeats_timeout_s is None or node.is_frozen:
                continue
            if self.now - node.master_heard_at >= node.heartbeats_timeout_s:
                self._take_over(node)
                node.machine.master_lost(f"the master was silent for {self.now - node.master_heard_at:.1f} s")
                self._peer(node)
            elif not node.heartbeats:
                self._later(node, lambda node=node: self._dial_heartbeats(node))  # type: ignore[misc]

    def _sense(self, seat: Seat, *silent: int) -> None:
        """As the runtime does before the machine judges who is lost."""
        late = [
            connection
            for connection, node in seat.heartbeats.items()
            if not self._is_heard(node) and self.now - node.heard_at >= QUIET_SHARE * self._timeout_s
        ]
        seat.machine.note_quiet([*late, *silent])

    def _dial_heartbeats(self, node: Node) -> None:
        seat = node.heartbeats_seat
        if node.heartbeats or not node.is_reachable or seat is None:
            return
        if not (self._gets_through(node, seat.name) and self._gets_through(seat.name, node)):
            return
        connection = self._next_heartbeats
        self._next_heartbeats += 1
        seat.heartbeats[connection] = node
        self._act(seat, seat.machine.connected(connection, f"10.0.0.{node.port}", self.now))
        hello = m.HeartbeatHello(m.PROTOCOL_VERSION, node.machine.run, node.machine.peer)
        self._act(seat, seat.machine.received(connection, hello, self.now))

    def _lose_heartbeats(self, seat: Seat, connection: int) -> None:
        node = seat.heartbeats.pop(connection)
        if node.heartbeats == connection:
            node.heartbeats = 0

    def break_heartbeats(self, node: Node) -> None:
        """Resets its connection for signs of life. It makes another when time passes."""
        seat = node.heartbeats_seat
        if node.heartbeats and seat is not None:
            connection = node.heartbeats
            self._lose_heartbeats(seat, connection)
            self._act(seat, seat.machine.disconnected(connection, "connection reset", self.now))

    # Links.

    def _dial(self, wire: Wire, number: int) -> None:
        """A connection of the dialer's link `number` reaches the other side."""
        node, other = wire.dialer, wire.acceptor
        link = node.links.get(number)
        if link is None or not node.is_reachable:
            return
        if self._is_cut(node, other):
            return  # its padding does not get there, or none comes back
        link.expires_at = link.ends_at
        is_another = other.number != link.effect.member.peer  # it has begun anew
        if is_another or not other.is_reachable or frozenset((node.name, other.name)) in self.unreachable:
            self._later(node, lambda: self._refused(node, number, "connection refused"))
            return
        offered = None if other.is_frozen else other.machine.link_offered(node.number, link.effect.made_in)
        self._peer(other)
        if offered is None:
            other.knocking.append(lambda: self._dial(wire, number))
        elif isinstance(offered, str):
            refusal = offered
            self._later(node, lambda: self._refused(node, number, refusal))
        else:
            self._attach(wire, other, offered)
            self._later(node, lambda: self._attach(wire, node, number), other)

    def _try_links(self, node: Node, effect: ps.TryLinks) -> None:
        if not node.is_reachable:
            return
        failed = []
        for other in (self.node_of(member.peer) for member in effect.members):
            is_cut = frozenset((node.name, other.name)) in self.unreachable or self._is_cut(node, other)
            if is_cut or not other.is_reachable:
                failed.append((other.number, "no answer"))
        node.machine.tried(failed)
        self._peer(node)

    def _answer_knocks(self, node: Node) -> None:
        knocking, node.knocking = node.knocking, []
        for knock in knocking:
            knock()

    def _refused(self, node: Node, number: int, reason: str) -> None:
        if node.is_reachable and number in node.links:
            node.machine.link_failed(number, reason)
            self._peer(node)

    def _attach(self, wire: Wire, node: Node, number: int) -> None:
        """A connection stands, as seen from one side, and goes to its engine if it is still wanted."""
        if node.is_reachable and node.machine.link_connected(number) and number in node.links:
            wire.ends[node.name] = number
            link = node.links[number]
            link.wires.append(wire)
            link.is_complete = link.is_complete or len(link.wires) == link.effect.connections
            if wire.closed_by:
                self._later(node, lambda: self._find_closed(wire, node))
            wire.release()
        else:
            self._close_wire(wire, node)
        self._peer(node)

    def _close_wire(self, wire: Wire, node: Node) -> None:
        wire.closed_by.add(node.name)
        other = wire.other(node)
        self._later(other, lambda: self._find_closed(wire, other), node)

    def _find_closed(self, wire: Wire, node: Node) -> None:
        """An engine finds a connection closed, and its link lost if it was the last one or the link never stood."""
        number = wire.ends.get(node.name, 0)
        link = node.links.get(number)
        if link is None or wire not in link.wires or not node.is_alive:
            return
        link.wires.remove(wire)
        if link.wires and link.is_complete:
            node.reports.append(("connection", number))
            wire.release()
            return
        del node.links[number]
        for each in link.wires:
            self._close_wire(each, node)
        node.reports.append(("lost", number))

    def is_linked(self, a: Node, a_link: int, b: Node, b_link: int) -> bool:
        """Both ends stand and belong together."""
        if a_link not in a.links or b_link not in b.links:
            return False
        ours, theirs = a.links[a_link], b.links[b_link]
        return (
            ours.is_complete
            and theirs.is_complete
            and set(ours.wires) == set(theirs.wires)
            and not any(wire.closed_by for wire in ours.wires)
        )

    # Shared state.

    def _fetch(self, node: Node, effect: ps.RunSync, call: int, blocks: int, suspects: list[tuple[int, str]]) -> None:
        """One more block comes from a donor; the last one ends the transfer."""
        plan = effect.plan
        if not node.is_reachable or call in node.calls or node.serving != plan.sync:
            return
        giver = None
        for donor in (self.node_of(member.peer) for member in effect.donors):
            if donor.number in dict(suspects):
                continue
            if not donor.is_reachable or donor.is_frozen or not donor.serves or self._is_cut(node, donor):
                suspects.append((donor.number, "connection refused"))
            elif donor.serving < plan.sync:
                donor.knocking.append(lambda: self._fetch(node, effect, call, blocks, suspects))
                return
            elif donor.serving > plan.sync or node.fails_to_fetch:
                suspects.append((donor.number, "rejected"))
            else:
                giver = donor
                break
        if giver is not None:
            assert giver.strategy != "receive_only"
            assert node.strategy != "send_only" or not plan.fetch_content
            assert giver.root == plan.root
            is_last = blocks == 1
            if plan.fetch_content:
                node.root = giver.root if is_last else b"half " + giver.root
            if not is_last:
                self._later(node, lambda: self._fetch(node, effect, call, blocks - 1, suspects))
                return
            if plan.fetch_loose:
                node.loose = giver.loose
        reason = "" if giver is not None else "no donor is left"
        node.machine.sync_ended(plan.sync, giver is not None, reason, suspects)
        self._peer(node)

    def _probe(self, node: Node, effect: ps.RunProbe) -> None:
        if not node.is_reachable:
            return
        found = []
        for link in effect.links:
            other = self.node_of(link.member.peer)
            way = (other.name, node.name) if link.is_inbound else (node.name, other.name)
            pair = frozenset(way)
            if pair not in self.unreachable and not self._is_cut(node, other) and other.is_reachable:
                rate = self.rates.get(way, 1e6)
                found.append(m.LinkMetric(other.number, link.is_inbound, rate, self.costs.get(pair, 100)))
        node.machine.probed(effect.probe, found, self.now)
        self._peer(node)

    def _find_rings(self, seat: Seat, effect: FindRings) -> None:
        rings = {}
        for group, problem in effect.problems.items():
            rings[group] = best_ring(problem)
            self.checks.ring_found(problem, rings[group])
        if not seat.is_dead:
            self._act(seat, seat.machine.rings_found(effect.search, rings, self.now))

    # Effects.

    def _act(self, seat: Seat, effects: list[Effect]) -> None:
        self._note_succession(seat)
        # What it tells before it is deposed, or once it leads, is of another run than the other part.
        runs = {seat.run, seat.machine.run}
        accepted = [node for node in self.nodes if node.is_accepted and node.home is seat and node.machine.run in runs]
        results: list[tuple[Node, m.JointResult]] = []
        cache = FrameCache()
        for effect in effects:
            if isinstance(effect, MasterLog):
                self.log.append(effect.text)
                continue
            if isinstance(effect, Persist):
                seat.fence = effect.fence
                continue
            if isinstance(effect, FindRings):
                self._later(None, partial(self._find_rings, seat, effect))
                continue
            if effect.connection >= HEARTBEATS_FROM:
                self._answer_heartbeats(seat, effect)
                continue
            assert not isinstance(effect, TakeHeartbeats)
            control = self.controls[effect.connection]
            node = control.node
            assert not control.is_over, f"{effect} to {node}, which is gone"
            if isinstance(effect, Close):
                control.is_over = True
                self._gone(control)
                self._close(control)
                continue
            self.told.append((node.name, effect.message))
            if isinstance(effect.message, m.Welcome) and control is not node.control:
                continue  # it has come again over another connection, and is nobody here
            if isinstance(effect.message, m.Welcome | m.Resumed):
                node.home = seat
            self.checks.told(node, effect.message)
            if isinstance(effect.message, m.VoteRequest) and len(self.seats) > 1:
                self.checks.asked(
                    node, [each.node for each in self.controls.values() if each.seat is seat and not each.is_over]
                )
            if isinstance(effect.message, m.JointResult):
                results.append((node, effect.message))
                # Whom the master lets go of after that, as when it is deposed by a further loss, has been told.
                accepted = [each for each in accepted if each.is_known]
            frame = cache.frame(effect.message)
            control.at_seat.keep(frame)
            control.told.append(frame)
            if not control.is_hung_up_on and not control.is_reset:
                control.inbox.append(frame)
        if results:
            self.checks.joint_results(results[0][0].machine.run, results, accepted)
        seat.run = seat.machine.run
        if seat.machine.master is not None:
            self.checks.sites(seat.machine.master, [node for node in self.nodes if self._is_in(node, seat)])

    def _is_in(self, node: Node, seat: Seat) -> bool:
        return node.home is seat and node.machine.run == seat.machine.run

    def _note_succession(self, seat: Seat) -> None:
        """Somebody leads, or leads no further."""
        master = seat.machine.master
        if seat.seen is master:
            return
        seat.seen = master
        if master.term > 1:
            rivals = [each.machine.master for each in self.seats if each is not seat and each.is_leading]
            is_fenced = self.memory is Memory.DISK and len(self.seats) == 1
            self.checks.succeeded(master, self.nodes, rivals, is_fenced)
        else:
            self._runs += 1
            seat.number(self._runs)

    def _answer_heartbeats(self, seat: Seat, effect: Send | Close | TakeHeartbeats) -> None:
        node = seat.heartbeats[effect.connection]
        if isinstance(effect, TakeHeartbeats):
            node.heartbeats = effect.connection
            node.heard_at = node.master_heard_at = self.now
        elif isinstance(effect, Close):
            self._lose_heartbeats(seat, effect.connection)

    def _peer(self, node: Node) -> None:
        if not node.is_alive:
            return
        while True:
            while effects := node.machine.drain():
                end = next((effect for effect in effects if isinstance(effect, ps.Ended)), None)
                for effect in effects:
                    self._carry_out(node, effect, end)
            start = node.machine.plain_start() if self.has_gates else None
            if start == node.gate.start:
                return
            self._take_over(node)
            if node.machine.plain_start() == start:
                node.gate.start = start

    def _carry_out(self, node: Node, effect: ps.Effect, end: ps.Ended | None) -> None:
        if isinstance(effect, ps.ToMaster):
            self.say(node, effect.message)
            if isinstance(effect.message, m.JointCall):
                assert node.in_call is None or node.machine.term > 1
                node.in_call = effect.message.kind
                # Where a call is stated again, ops may have been launched since, which wait for its end.
                queued = node.machine.ops.queued if node.machine.term > 1 else 0
                assert node.in_call not in m.Kind.EXCLUSIVE or node.machine.open_ops == queued
            elif isinstance(effect.message, m.LinksReady):
                node.ready = effect.message.view
        elif isinstance(effect, ps.StartEngine):
            assert not node.links
        elif isinstance(effect, ps.KeepHeartbeats):
            assert node.control is not None
            node.heartbeats, node.heartbeats_seat = 0, node.control.seat
            node.heartbeats_timeout_s = effect.timeout_s
            node.master_heard_at = self.now
            self._later(node, lambda: self._dial_heartbeats(node))
        elif isinstance(effect, ps.SeekMaster):
            self._hang_up(node, 0)
            node.control = node.heartbeats_seat = node.heartbeats_timeout_s = node.reattaching_since = None
            node.heartbeats = 0
            if node.masterless_since is None:
                node.masterless_since = self.now
        elif isinstance(effect, ps.SubmitOp):
            assert node.in_call not in m.Kind.EXCLUSIVE
            self.engines.submit(node, effect)
        elif isinstance(effect, ps.FreezeOps):
            self.engines.freeze(node, effect.epoch)
        elif isinstance(effect, ps.FreezeOp):
            self.engines.freeze_op(node, effect.op)
        elif isinstance(effect, ps.ForgetUnmade):
            for use in effect.uses:
                key = node.group, effect.epoch, effect.tag, use
                assert key not in node.submitted
                node.parked.pop(key, None)
        elif isinstance(effect, ps.EndOp):
            if effect.commit:
                self.checks.commit(node.keys[effect.op])
            self.engines.end(node, effect.op, effect.commit)
        elif isinstance(effect, ps.ForgetOp):
            self.checks.commit(node.keys[effect.op])
            self.engines.end(node, effect.op, commit=True, quietly=True)
        elif isinstance(effect, ps.OpResult):
            self.checks.op_result(node, effect, end)
        elif isinstance(effect, ps.CallResult):
            assert effect.call not in node.calls
            node.calls[effect.call] = effect
            if node.in_call == node.kinds[effect.call]:
                node.in_call = None
            if node.kinds[effect.call] == m.Kind.SYNC:
                node.serving = 0
            if node.kinds[effect.call] == m.Kind.SYNC and effect.code is Result.SUCCESS:
                node.revision = effect.value
        elif isinstance(effect, ps.MakeLink):
            patience_s = effect.reach_s if effect.dial else effect.timeout_s
            link = node.links[effect.link] = Link(effect, self.now + patience_s, self.now + effect.timeout_s)
            if effect.dial:
                other = self.node_of(effect.member.peer)
                for _ in range(link.effect.connections):
                    wire = Wire(node, other)
                    dial = partial(self._dial, wire, effect.link)
                    self._later(node, dial, other, is_answered=True)
        elif isinstance(effect, ps.AddConnections):
            other = self.node_of(effect.member.peer)
            for _ in effect.indices:
                wire = Wire(node, other)
                self._later(node, partial(self._dial, wire, effect.link), other, is_answered=True)
        elif isinstance(effect, ps.TryLinks):
            self._later(node, lambda: self._try_links(node, effect))
        elif isinstance(effect, ps.CloseLink):
            closed = node.links.pop(effect.link, None)
            for wire in closed.wires if closed is not None else ():
                self._close_wire(wire, node)
        elif isinstance(effect, ps.Installed):
            self.checks.installed(node, effect)
        elif isinstance(effect, ps.RunSync):
            node.plans.append(effect)
            node.serving = effect.plan.sync
            if not node.serves:
                node.machine.sync_ended(effect.plan.sync, False, "its caller gave the sync up", [])
            elif effect.plan.fetch_content or effect.plan.fetch_loose:
                call = next(call for call in node.open_calls if node.kinds[call] == m.Kind.SYNC)
                self._later(node, lambda: self._fetch(node, effect, call, FETCHED_BLOCKS, []))
        elif isinstance(effect, ps.RunProbe):
            self._later(node, lambda: self._probe(node, effect))
        elif isinstance(effect, ps.Ended):
            assert not node.links
            node.ended = effect
            self._hang_up(node, 0)
            self._answer_knocks(node)
        else:
            assert isinstance(effect, ps.PeerLog)

    def check_rest(self) -> None:
        """At rest, with nobody frozen: nobody waits for something that nobody else could bring about."""
        self.checks.rest(self.master, self.accepted, self.is_linked, bool(self.engines.held_back))


def _large(node: Node) -> str:
    """Who sends large packets, in `World.blocked`."""
    return f"large packets of {node}"


def rings(nodes: list[Node]) -> set[tuple[int, ...]]:
    """The rings that these peers see."""
    return {node.view.ring for node in nodes}
