"""The engines of all nodes, as they ship, in the place of those that pretend (`tests.simulation.engine`).

What is under way between them are bytes on pairs of sockets, and what is to be done are turns of their threads; both
are among the events of which the simulation chooses what happens next. None of it happens by itself.

Time passes for engines with the simulation's clock, a little faster: where all waits, and an engine has something to
look at soon, such as whether a connection moves, it gets that moment. When the clock jumps by more than a moment, the
network has carried everything by then, and all engines that are not frozen have done what was to be done, as they would
have.

Connections fail by themselves (`ConnectionFaults`), at any byte that is carried, until the run is told to be calm.

`held`, what engines know to be done, is noted before anybody is told (`native/simulation/witness.c`).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from pccl.protocol.completion import ranks_of
from pccl.protocol.peer import effects as ps
from pccl.runtime.network.datagrams import SECRET_BYTES, Datagrams
from pccl.types import Result
from tests.simulation.fast_path import Report
from tests.simulation.node import Key, Node, Value
from tests.simulation.real.arrays import Loan
from tests.simulation.real.fast_path import RealFastPath
from tests.simulation.real.library import Library, library
from tests.simulation.real.ops import Array, Style, style_of
from tests.simulation.real.peer import PeerEngine
from tests.simulation.scene import Scene

CHOICES_MAX = 4096
CAPACITIES = (96, 160, 700, 3000, 20_000)
"""Bytes that a direction of a connection may hold."""
CARRIES_AND_RUNS = 0.6
"""The probability that what is carried is also received at once."""
MOMENTS_MAX = 4
"""Moments that engines get in a row without another event."""
GOES_ON = 0.7
"""The probability that more happens among engines before anything else does."""
RESTS = (0.02, 0.2, 1.0)
"""How often an idle thread is among those that may go on, by the seed."""
LONG_S = 0.5
"""A time when the network carries what it has."""

ENCRYPTED = 0.2
"""The share of runs whose links are encrypted."""
OVER_UDP = 0.3
"""The probability that a connection is one over UDP if it is not its thread's first."""
LIMITED = 0.1
"""The probability that a connection is held back by its window."""
RATES = (0.0, 0.0, 0.002, 0.02)
"""Of faults, by the seed."""

Choice = tuple[Callable[[Any], None], Any]
GARBAGE: Value = frozenset((("garbage", 0),))


@dataclass(frozen=True)
class ConnectionFaults:
    """How often a connection fails when something is carried on it."""

    damages: float = 0.0
    """A bit of what is under way is flipped."""
    breaks: float = 0.0
    """It is reset, at some byte in each direction."""


class Buffers(dict[int, Value]):
    """What a node's callers find in their arrays, in the words of the checkers: whose numbers they hold."""

    def __init__(self, look: Callable[[int], Value]) -> None:
        super().__init__()
        self._look = look

    def __getitem__(self, op: int) -> Value:
        return self._look(op)


class RealEngines:
    _last: RealEngines | None = None
    """The engines of the run before: there is one library, and so one run at a time."""

    def __init__(self, scene: Scene, seed: int, connections_fail: bool) -> None:
        """`connections_fail`: by themselves, as the seed has it, once `unsettle` is called."""
        if RealEngines._last is not None:
            RealEngines._last.close()
        RealEngines._last = self
        self.held_back: set[str] = set()
        self.is_real = True
        self._scene = scene
        self._seed = seed
        self._library: Library = library()
        self._lib = self._library.lib
        chance = self._chance = random.Random(f"engines {seed}")
        """For what is part of a step, and for all where the scene is not random."""
        faults = ConnectionFaults(chance.choice(RATES), chance.choice(RATES))
        self._faults_to_come = faults if connections_fail else ConnectionFaults()
        self._faults = ConnectionFaults()
        self._tune(chance)
        self._lib.pccl_sim_reset(seed, True)
        self._is_encrypted = chance.random() < ENCRYPTED
        self._capacities = [chance.choice(CAPACITIES) for _ in range(3)]
        self._rests = chance.choice(RESTS)
        self._ahead_ms = 0
        self._moments = 0
        self._numbers = self._library.ffi.new("int32_t[]", CHOICES_MAX)
        self._done_ops = self._library.ffi.new("uint64_t[]", CHOICES_MAX)
        self.of: dict[Node, PeerEngine] = {}
        self._node_of_thread: dict[int, Node] = {}
        self._node_of_caller: dict[int, Node] = {}
        """By thread: whose caller it is on the fast path."""
        self.ends: dict[int, tuple[Node, Node]] = {}
        """By descriptor: its sender and receiver."""
        self._over_udp: set[int] = set()
        self._pairs: dict[int, int] = {}
        """By descriptor: that of the other end."""
        self._loans: dict[Key, dict[tuple[str, int], Loan]] = {}
        """What was lent to each op, by node and number."""
        self._values: dict[tuple[str, int], Value] = {}
        """What callers have found when they had their arrays back."""
        self._rounded: dict[Key, Array] = {}
        self._complete: Callable[[Node, ps.SubmitOp], None] | None = None
        self.turns = 0
        self._offered: list[Choice] = []
        self._is_broken = False

    def _tune(self, chance: random.Random) -> None:
        eager_bytes, scratch_bytes = chance.choice((0, 64, 512, 1 << 19)), chance.choice((256, 2048, 1 << 24))

        def tune(options: Any) -> None:
            options.eager_bytes_max = eager_bytes
            options.op_scratch_bytes_max = scratch_bytes

        self._lib.tune = tune

    def on_completed(self, complete: Callable[[Node, ps.SubmitOp], None]) -> None:
        """Have `complete` called when all are done with an op whose caller is on the fast path."""
        self._complete = complete

    # Nodes.

    def adopt(self, node: Node) -> None:
        """Take over what a new node's engine pretends."""
        node.buffers = Buffers(lambda op: self._look(node, op))
        node.fast_path = RealFastPath(self._library, lambda effect: self._suits_fast_path(node, effect))
        node.poll = lambda: self._poll(node)
        node.has_news = lambda: node in self.of and self.of[node].has_events()

    def start(self, node: Node, threads: int) -> None:
        assert node not in self.of
        engine = self.of[node] = PeerEngine(self._library, node, threads, self._scene.rng or self._chance)
        engine.fast_path.on_thread = lambda thread: self._node_of_caller.update({thread: node})
        engine.fast_path.later = lambda action: self._scene.events.later(node, action)
        engine.fast_path.after = lambda: self._after(node)
        engine.fast_path.poll = lambda: self._reports(node)
        self._node_of_thread.update(dict.fromkeys(engine.numbers, node))

    def freeze_node(self, node: Node) -> None:
        """Note that a node is frozen, or is so no more. Engines of one that only hangs go on."""
        if node in self.of:
            for thread in (*self.of[node].numbers, *self.of[node].fast_path.threads):
                self._lib.pccl_sim_freeze(thread, node.is_frozen and not node.is_hung)
            self._after(node)

    def kill(self, node: Node) -> None:
        """Have a node's process die: its system closes the connections, and not all that it sent arrives."""
        rng = self._chance
        for fd, (sender, _) in self.ends.items():
            if sender is node:
                under_way = self._lib.pccl_sim_under_way(fd)
                lost = rng.randint(0, under_way) if rng.random() < 0.5 else 0
                self._lib.pccl_sim_abandon(fd, lost)
        if node in self.of:
            self._sync_clock()
            for loan in self.of[node].loans.values():
                loan.take_back()
            self.of[node].close()
            for loan in self.of[node].loans.values():
                loan.free()
        self._hear_done()

    # Connections.

    def connect(self, node: Node, other: Node) -> dict[str, int]:
        """Make a pair of sockets; their descriptors by the name of the node."""
        pair = self._library.ffi.new("int32_t[2]")
        self._lib.pccl_sim_connect(self._chance.choice(self._capacities), pair)
        self.ends[pair[0]], self.ends[pair[1]] = (node, other), (other, node)
        self._pairs[pair[0]], self._pairs[pair[1]] = pair[1], pair[0]
        if self._chance.random() < OVER_UDP:
            self._over_udp.update(pair)
        return {node.name: pair[0], other.name: pair[1]}

    def add_connection(self, node: Node, link: int, index: int, fd: int) -> None:
        threads = self.of[node].threads
        threads.set_link_timeout(node.machine.links.timeout_s)
        self._lib.pccl_sim_limit(fd, self._chance.random() < LIMITED)
        if fd in self._over_udp and index >= node.machine.links.engine_threads:
            sock = cast(socket.socket, SimpleNamespace(detach=lambda: fd))
            threads.link_add_udp(link, index, Datagrams(sock, bytes(SECRET_BYTES), True, self._keys(fd)))
        else:
            threads.link_add(link, index, fd, self._keys(fd))

    def _keys(self, fd: int) -> tuple[bytes, bytes] | None:
        """The keys for what is sent from a descriptor and for what is received there, where links are encrypted."""
        if not self._is_encrypted:
            return None
        ours, theirs = (number.to_bytes(32, "little") for number in (fd, self._pairs[fd]))
        return ours, theirs

    def close_link(self, node: Node, link: int) -> None:
        if node in self.of:
            self.of[node].threads.link_close(link)

    def break_socket(self, fd: int) -> None:
        """Reset a connection, at some byte in each direction."""
        self._lib.pccl_sim_break(fd, self._chance.randint(0, 200), self._chance.randint(0, 200))

    def abandon(self, fd: int) -> None:
        self._lib.pccl_sim_abandon(fd, 0)

    def is_closed(self, fd: int) -> bool:
        return bool(self._lib.pccl_sim_is_closed(fd))

    # What the machine commands.

    def submit(self, node: Node, effect: ps.SubmitOp) -> None:
        key = node.next_use(effect.op)
        assert key == (node.group, effect.epoch, effect.tag, effect.sequence)
        node.keys[effect.op] = key
        if effect.op in node.refuses:
            node.machine.op_refused(effect.op, Result.INVALID_ARGUMENT, "the engine refuses")
            return
        engine = self.of[node]
        node.submitted[key] = effect
        style = self._style(node, effect, key, node.launched[effect.op][1])
        loan = Loan(self._library, style, node.name, effect.op, effect.rank, effect.world_size)
        engine.loans[effect.op] = loan
        self._loans.setdefault(key, {})[node.name, effect.op] = loan
        self._sync_clock()
        try:
            engine.submit(effect, style, loan)
        except ValueError as error:
            raise AssertionError(f"{node} cannot submit {style}: {error}") from error
        self._after(node)

    def _style(self, node: Node, effect: ps.SubmitOp, key: Key, arguments: str) -> Style:
        return style_of(self._seed, key, ranks_of(effect.tag) is not None, effect.world_size, arguments != "")

    def _suits_fast_path(self, node: Node, effect: ps.SubmitOp) -> bool:
        key = node.group, effect.epoch, effect.tag, effect.sequence
        return self.of[node].suits_fast_path(effect, self._style(node, effect, key, ""))

    def freeze(self, node: Node, epoch: int) -> None:
        self.of[node].threads.freeze(epoch)

    def freeze_op(self, node: Node, op: int) -> None:
        self.of[node].threads.freeze_op(op)

    def forget(self, node: Node, effect: ps.ForgetUnlaunched) -> None:
        self.of[node].threads.forget_ops(effect.epoch, effect.tag, effect.uses)

    def end(self, node: Node, op: int, commit: bool, quietly: bool = False) -> None:
        engine = self.of[node]
        verdict = self._library.engine.Verdict
        node.submitted.pop(node.keys[op], None)
        engine.threads.end(op, verdict.COMMIT_BY_ALL if quietly else verdict.COMMIT if commit else verdict.ABORT)

    def detach(self, node: Node, op: int) -> None:
        """Have a caller that has given up get its arrays back, as soon as the engine lets go of them."""
        engine = self.of.get(node)
        loan = engine.loans.get(op) if engine is not None else None
        if engine is None or loan is None or loan.is_returned or op in engine.detaching or op in node.results:
            return
        engine.detaching.add(op)
        engine.threads.detach(op)

    def _detached(self, node: Node, op: int) -> None:
        loan = self.of[node].loans[op]
        result = node.results.get(op)
        if not loan.is_returned:
            # An op that has been given up may be committed before it could be told to let go.
            is_committed = result is not None and result.code is Result.SUCCESS
            assert is_committed or loan.has_input(is_aborted=True), f"{node} has op {op} back without its input"
            self._values.setdefault((node.name, op), frozenset(((node.name, op),)))
            loan.give_back()

    @property
    def drives(self) -> int:
        """How often callers have polled for their engines."""
        return int(self._lib.pccl_sim_drives())

    # What happens next.

    def choices(self) -> list[Choice]:
        """Return all that could happen now: turns of threads, and bytes that are carried."""
        lib, ffi, numbers = self._lib, self._library.ffi, self._numbers
        offered: list[Choice] = []
        for thread in ffi.unpack(numbers, lib.pccl_sim_ready(numbers, CHOICES_MAX)):
            offered.append((self._take_turn, thread))
        resting = ffi.unpack(numbers, lib.pccl_sim_resting(numbers, CHOICES_MAX))
        rng = self._scene.rng
        if resting and (not offered or rng is None or rng.random() < self._rests):
            offered.extend((self._take_moment, thread) for thread in resting)
        blocked = self._scene.network.blocked
        for fd in ffi.unpack(numbers, lib.pccl_sim_sending(numbers, CHOICES_MAX)):
            if not blocked or not self._is_blocked(fd):
                offered.append((self._take_bytes, fd))
        self._offered = offered
        return offered

    def _take_turn(self, thread: int) -> None:
        self._turn(thread)
        self._go_on()

    def _take_moment(self, thread: int) -> None:
        """Have a moment pass where no peer but this thread had anything to do."""
        self._lib.pccl_sim_wake(thread)
        self._heed_turn(thread)

    def _take_bytes(self, fd: int) -> None:
        self._carry(fd)
        self._go_on()

    def _go_on(self) -> None:
        """Have more happen of what was offered, some of them perhaps idle by now."""
        rng = self._scene.rng
        while rng is not None and rng.random() < GOES_ON and not any(self._scene.dooms):
            deliver, number = rng.choice(self._offered)
            if deliver == self._take_turn:
                if not self._lib.pccl_sim_is_over(number):
                    self._turn(number)
            elif deliver == self._take_bytes:
                self._carry(number)

    def _is_blocked(self, fd: int) -> bool:
        network = self._scene.network
        sender, receiver = self.ends[fd]
        if (sender.name, receiver.name) in network.blocked:
            return True
        return network.stops_large(sender, receiver) and self._lib.pccl_sim_under_way(fd) > SMALL_BYTES

    def is_slow(self, deliver: object, what: int) -> bool:
        if deliver != self._take_bytes:
            return False
        sender, receiver = self.ends[what]
        return (sender.name, receiver.name) in self._scene.network.slow

    def _turn(self, thread: int) -> None:
        self._sync_clock()
        self.turns += 1
        self._lib.pccl_sim_run(thread)
        self._heed_turn(thread)

    def _heed_turn(self, thread: int) -> None:
        self._look_for_failure()
        self._hear_done()
        self._after(self._node_of(thread))

    def _node_of(self, thread: int) -> Node:
        return self._node_of_thread.get(thread) or self._node_of_caller[thread]

    def _carry(self, fd: int) -> None:
        self._moments = 0
        rng, lib = self._scene.rng or self._chance, self._lib
        count = under_way = lib.pccl_sim_under_way(fd)
        if under_way > 1 and rng.random() < 0.4:
            count = rng.randint(1, under_way - 1)
        if under_way and rng.random() < self._faults.damages:
            lib.pccl_sim_damage(fd, rng.randrange(under_way), rng.randrange(8))
        if rng.random() < self._faults.breaks:
            lib.pccl_sim_break(fd, rng.randint(0, under_way), rng.randint(0, 200))
        lib.pccl_sim_carry(fd, count)
        receiver = self.ends[fd][1]
        if receiver in self.of and rng.random() < CARRIES_AND_RUNS:
            ready = self._library.ffi.unpack(self._numbers, lib.pccl_sim_ready(self._numbers, CHOICES_MAX))
            for thread in self.of[receiver].numbers:
                if thread in ready:
                    self._turn(thread)

    def _look_for_failure(self) -> None:
        failure = self._library.ffi.string(self._lib.pccl_sim_failure())
        if failure:
            self._is_broken = True
            raise AssertionError(failure.decode())

    def unsettle(self) -> None:
        """From now on connections fail by themselves, if they are to. Before, all peers come to be members: a newcomer
        that is evicted for its links could not make the call where the others wait for it."""
        self._faults = self._faults_to_come

    def calm(self) -> None:
        """No more faults come by themselves."""
        self._faults = ConnectionFaults()

    # Time.

    def _sync_clock(self) -> None:
        now_ms = self._lib.pccl_sim_now_ms()
        self._ahead_ms = max(self._ahead_ms, now_ms - round(self._scene.now * 1000))
        now_ms = max(now_ms, round(self._scene.now * 1000) + self._ahead_ms)
        self._lib.pccl_sim_set_now_ms(now_ms)

    def rest(self) -> bool:
        """Give engines a moment that one of them waits for. Return whether there was one."""
        due_ms = self._lib.pccl_sim_due_ms()
        engines = self.of.items()
        is_any_alone = any(engine.fast_path.is_left_alone for node, engine in engines if not node.is_frozen)
        if due_ms < 0 or (self._moments >= MOMENTS_MAX and not is_any_alone):
            return False
        self._moments += 1
        self._sync_clock()
        self._ahead_ms += max(0, due_ms - self._lib.pccl_sim_now_ms())
        self._sync_clock()
        return True

    def pass_time(self, seconds: float) -> None:
        """Let the time up to now pass, with this much new."""
        for fd in self.ends:
            self._lib.pccl_sim_block(fd, bool(self._scene.network.blocked) and self._is_blocked(fd))
        self._moments = 0
        now_ms = max(self._lib.pccl_sim_now_ms(), round(self._scene.now * 1000) + self._ahead_ms)
        assert self._lib.pccl_sim_pass(now_ms, seconds > LONG_S) >= 0, "engines spin"
        self._look_for_failure()
        self._hear_done()
        for node in self.of:
            self._after(node)

    # What engines have done.

    def _poll(self, node: Node) -> None:
        if node in self.of:
            node.reports.extend(self._reports(node))

    def _reports(self, node: Node) -> list[Report]:
        """Return what an engine has to report to the machine."""
        reports = self.of[node].poll()
        for report in reports:
            if report[0] == "detached":
                self._detached(node, report[1])
            elif report[0] == "stopped":
                node.stopped.add(node.keys[report[1]])
            elif report[0] == "refused":
                node.refuses.add(report[1])
            elif report[0] in ("ran", "started"):
                for effect in self.of[node].fast_path.heard(report[1], report[0] == "ran"):
                    self._complete_fast(node, effect)
        return [report for report in reports if report[0] != "detached"]

    def _hear_done(self) -> None:
        lib = self._lib
        while count := lib.pccl_sim_done(self._done_ops, self._numbers, CHOICES_MAX):
            ffi = self._library.ffi
            pairs = zip(ffi.unpack(self._done_ops, count), ffi.unpack(self._numbers, count), strict=True)
            for op, thread in dict.fromkeys(pairs):
                if thread == 0:
                    continue  # the thread that closes the fast path says once more what a thread has found
                node = self._node_of(thread)
                if node.keys[op] not in node.held and self.of[node].note_done(op):
                    node.held.add(node.keys[op])

    def _after(self, node: Node) -> None:
        """Have callers go on whose ops are over on the fast path."""
        if node.is_frozen:
            return
        self._hear_done()
        for effect, is_completed in self.of[node].fast_path.ended():
            if is_completed and node.is_alive:
                self._complete_fast(node, effect)

    def _complete_fast(self, node: Node, effect: ps.SubmitOp) -> None:
        assert self._complete is not None
        node.submitted.pop(node.keys[effect.op], None)
        self._complete(node, effect)

    # What callers find.

    def _look(self, node: Node, op: int) -> Value:
        """What a caller finds in its arrays, which are its own from then on if it has a result."""
        own: Value = frozenset(((node.name, op),))
        engine = self.of.get(node)
        loan = engine.loans.get(op) if engine is not None else None
        known = self._values.get((node.name, op))
        result = node.results.get(op)
        if engine is None or loan is None or result is None:
            return known or own
        is_success = result.code is Result.SUCCESS
        everybody: Value = frozenset(self._loans[node.keys[op]])
        if loan.is_returned:
            return everybody if is_success else known or own
        if is_success:
            has_input = loan.has_input(is_aborted=False)
            value = everybody if self._has_result(node.keys[op], loan) and has_input else GARBAGE
        else:
            value = own if loan.has_input(is_aborted=True) else GARBAGE
        self._values[node.name, op] = value
        if op not in engine.detaching:
            loan.give_back()
        return value

    def _has_result(self, key: Key, loan: Loan) -> bool:
        loans = sorted(self._loans[key].values(), key=lambda each: each.rank)
        if [each.rank for each in loans] != list(range(len(loans))):
            return False
        found = loan.result()
        if loan.style.quantization is not None:
            first = self._rounded.setdefault(key, found)
            return bool((first.view("u1") == found.view("u1")).all())
        expected = loan.style.result([each.input for each in loans], loan.rank)
        return expected.tobytes() == found.tobytes()

    def check(self) -> None:
        """Check that no peer has written to arrays that their callers have back."""
        for node, engine in self.of.items():
            for op, loan in engine.loans.items() if node.is_alive else ():
                assert all(block.is_as_returned() for block in loan.blocks), f"{node} writes to op {op}, long over"

    def close(self) -> None:
        """End all engines, and the run with them."""
        if RealEngines._last is self:
            RealEngines._last = None
        if self._is_broken:
            self.of.clear()
            return
        self._sync_clock()
        for engine in self.of.values():
            engine.close()
        for engine in self.of.values():
            for loan in engine.loans.values():
                loan.free()
        self.of.clear()


SMALL_BYTES = 120
"""What still gets through where large packets do not."""
