"""What the callers of a schedule do, and what each must find: only what callers see.

    turns       callers that wait and callers that do not take turns on each tag
    impatient   the same, and some give up after a while
    crowd       callers that take no turns: whose tag is in flight tries again
    interrupts  Ctrl-C at any moment of a caller, in ops and joint calls
    closing     a peer is closed, or forgotten, while its callers are in ops
    exiting     the interpreter exits while callers are in ops
    forking     a child is forked while callers are in ops: nothing waits there, nothing is lost here
    founding    the first calls of a process: peers are made, connected and closed by several threads

Each use of a tag adds up numbers that tell it from all other uses, so a result that went to another op is seen.
"""

from __future__ import annotations

import os
import random
import select
import signal
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from pccl import Communicator, PCCLError, ReduceDescriptor, ReduceOp, ReduceOpDescriptor, Result
from pccl.runtime.threads import portal
from pccl.runtime.threads.latch import LOOK_UP_S
from tests.interleaving.choosers import Switching
from tests.interleaving.primitives import Lock
from tests.interleaving.scheduler import Torn
from tests.interleaving.world import ADDRESS, World, seeded

SUM = ReduceOp.SUM
MARK = -3.5
COUNT = 3

Array = np.ndarray[Any, Any]


class WrongError(Exception):
    """A caller has found something that must not be."""


class Scenario:
    """The callers of one schedule. `main` runs in its first thread."""

    peers = 2
    engine_threads: tuple[int, ...] = (1, 1, 1, 2)
    early = 0.0
    """The probability with which time passes at a hand-over, in half of the schedules."""
    may_keep_tags = False

    def __init__(self, world: World, chooser: Switching, seed: int) -> None:
        self.world = world
        self.scheduler = world.scheduler
        self.rng: random.Random = seeded(seed, "scenario")
        self._chooser = chooser
        self._left = 0
        self._given_back: list[tuple[Array, str]] = []
        """Arrays that their callers have back, and that nobody else may touch."""

    def main(self) -> None:
        """Set up, play, and check. The set-up and the end run straight."""
        world = self.world
        self.set_up()
        self.play()
        self.scheduler.wait(lambda: self._left == 0, "the callers")
        self._chooser.settle()
        self.finish()
        world.close()
        for array, whose in self._given_back:
            if not np.all(array == MARK):
                self.wrong(f"an array was written to after its caller had it back: {whose}: {array}")
        world.check()

    def set_up(self) -> None:
        """Have all peers in a run, and begin to preempt."""
        self.world.gather(self.peers)
        self.prepare()
        self._chooser.switch()

    def prepare(self) -> None:
        """Run before anything is preempted."""

    def play(self) -> None:
        """Start the callers."""
        raise NotImplementedError

    def finish(self) -> None:
        """Check what has come of it."""

    # For callers.

    def wrong(self, text: str) -> None:
        self.scheduler.fail(text)
        raise Torn

    def caller(self, name: str, run: Callable[[], object]) -> None:
        """Start a caller."""
        self._left += 1

        def play() -> None:
            run()
            self._left -= 1

        self.world.spawn(name, play)

    def together(self, call: Callable[[Communicator], object]) -> None:
        """Make a call of each peer, at the same time, and wait for all."""
        left = len(self.world.peers)

        def one(peer: Communicator) -> None:
            nonlocal left
            call(peer)
            left -= 1

        for number, peer in enumerate(self.world.peers):
            self.world.spawn(f"together {number}", lambda peer=peer: one(peer))  # type: ignore[misc]
        self.scheduler.wait(lambda: not left, "a call of all peers")

    def pause(self, seconds: float = 0.001) -> None:
        """Sleep, by the virtual clock."""
        self.scheduler.wait(lambda: False, "a pause", self.scheduler.now + seconds)

    def give_back(self, array: Array, whose: str) -> None:
        """Note that nobody may touch this array any more."""
        array[:] = MARK
        self._given_back.append((array, whose))

    def warm_up(self, tags: list[int]) -> None:
        """Use each tag once, so that the fast path is open for it."""
        for tag in tags:
            self.together(lambda peer, tag=tag: peer.all_reduce(np.ones(1, np.float32), op=SUM, tag=tag))  # type: ignore


def contribution(peer: int, tag: int, use: int) -> float:
    """Return what a peer gives to a use of a tag."""
    return 1 + use + 100 * tag + 1000 * peer


class Turns(Scenario):
    """Callers of different kinds take turns on each tag: every peer makes the same uses in the same order."""

    uses = 4
    callers = 2
    STYLES: ClassVar[tuple[str, ...]] = ("call", "call", "call", "short", "launch", "launch", "poll", "many")

    def __init__(self, world: World, chooser: Switching, seed: int) -> None:
        super().__init__(world, chooser, seed)
        self.tags = list(range(self.rng.choice((1, 2, 2, 3))))
        self.kinds = {
            (tag, use): self.rng.choice(("reduce", "reduce", "reduce", "reduce", "barrier", "broadcast", "gather"))
            for tag in self.tags
            for use in range(self.uses)
        }
        self.ends: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
        """How each use of a tag ended at each peer."""

    def prepare(self) -> None:
        self.by_rank = sorted(range(self.peers), key=lambda each: self.world.peers[each].membership.rank)
        self.warm_up(self.tags)
        self._begun_s = self.scheduler.now

    def play(self) -> None:
        for number, peer in enumerate(self.world.peers):
            for tag in self.tags:
                turn = Lock(self.scheduler)
                next_use = iter(range(self.uses))
                for which in range(self.callers):
                    styles = [self.rng.choice(self.STYLES) for _ in range(self.uses)]
                    patience = self.rng.random()
                    run = lambda *with_: lambda: self.take_turns(*with_)  # noqa: E731
                    self.caller(
                        f"caller {number}.{tag}.{which}", run(peer, number, tag, turn, next_use, styles, patience)
                    )

    def take_turns(
        self, peer: Communicator, number: int, tag: int, turn: Lock, uses: Any, styles: list[str], patience: float
    ) -> None:
        while True:
            with turn:
                use = next(uses, None)
                if use is None:
                    return
                self.ends[tag, use][number] = self.use(peer, number, tag, use, styles[use], patience)

    def use(self, peer: Communicator, number: int, tag: int, use: int, style: str, patience: float) -> str:
        """Make one use of a tag. Return how it ended."""
        kind = self.kinds[tag, use]
        given = contribution(number, tag, use)
        x = np.full(COUNT, given, np.float32)
        wanted = x
        size = len(self.world.peers)
        all_given = [contribution(other, tag, use) for other in self.by_rank]
        if kind == "reduce":
            wanted = np.full(COUNT, sum(all_given), np.float32)
        elif kind == "broadcast":
            wanted = np.full(COUNT, all_given[use % size], np.float32)
        elif kind == "gather":
            wanted = np.repeat(np.array(all_given, np.float32), COUNT).reshape(size, COUNT)
        found: list[Array] = [x]
        end = self.attempt(lambda: self.make(peer, kind, style, x, tag, use, found, patience))
        what = f"peer {number}, use {use} of tag {tag}, a {kind} by {style}"
        if end == "SUCCESS":
            if not np.array_equal(found[0], wanted):
                self.wrong(f"{what}: {found[0]} instead of {wanted}")
        elif not np.all(x == given):
            self.wrong(f"{what}, ended by {end}: {x} instead of {given}, as it was")
        self.give_back(x, what)
        return end

    def make(
        self,
        peer: Communicator,
        kind: str,
        style: str,
        x: Array,
        tag: int,
        use: int,
        found: list[Array],
        patience: float,
    ) -> None:
        """Make a call in this style."""
        limit_s = self.limit_s(style, patience)
        root = use % len(self.world.peers)
        if style == "many" and kind == "reduce":
            descriptor = ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(x.size, SUM, tag))
            peer.all_reduce_multiple_with_retry([descriptor], timeout=limit_s)
            return
        if style in ("call", "short", "many"):
            if kind == "reduce":
                peer.all_reduce(x, op=SUM, tag=tag, timeout=limit_s)
            elif kind == "barrier":
                peer.barrier(tag=tag, timeout=limit_s)
            elif kind == "broadcast":
                peer.broadcast(x, root=root, tag=tag, timeout=limit_s)
            else:
                found[0] = peer.all_gather(x, tag=tag, timeout=limit_s).array
            return
        handle: Any
        if kind == "reduce":
            handle = peer.all_reduce_async(x, op=SUM, tag=tag)
        elif kind == "barrier":
            handle = peer.barrier_async(tag=tag)
        elif kind == "broadcast":
            handle = peer.broadcast_async(x, root=root, tag=tag)
        else:
            handle = peer.all_gather_async(x, tag=tag)
        while style == "poll" and not handle.done():
            self.pause()
        info = self.wait_for(handle, limit_s)
        if kind == "gather":
            found[0] = info.array

    def wait_for(self, handle: Any, limit_s: float | None) -> Any:
        return handle.result()

    def limit_s(self, style: str, patience: float) -> float | None:
        return 0.099 if style == "short" else None

    def attempt(self, call: Callable[[], object]) -> str:
        """Make a call that must succeed."""
        call()
        return "SUCCESS"

    def finish(self) -> None:
        passed_s = self.scheduler.now - self._begun_s
        if passed_s >= LOOK_UP_S:
            self.wrong(f"{passed_s:g} s of virtual time have passed: a wake-up was missed until somebody looked")
        self.require_agreement()

    def require_agreement(self) -> None:
        for (tag, use), ends in self.ends.items():
            known = set(ends.values()) - {"OUTCOME_UNKNOWN"}
            if "SUCCESS" in known and len(known) > 1:
                self.wrong(f"use {use} of tag {tag} ended in different ways: {ends}")
        if any(len(ends) != self.peers for ends in self.ends.values()):
            self.wrong(f"not all peers have made all uses: {dict(self.ends)}")


class Impatient(Turns):
    """Some calls give up, so that ops are aborted on all peers, or go on without their caller's arrays."""

    early = 0.01
    uses = 4
    STYLES: ClassVar[tuple[str, ...]] = ("call", "short", "launch", "poll", "many")
    ALLOWED: ClassVar[frozenset[Result]] = frozenset({Result.TIMEOUT, Result.OUTCOME_UNKNOWN})

    def limit_s(self, style: str, patience: float) -> float | None:
        if patience > 0.6:
            return None
        return patience * (0.1 if style == "short" else 2.0)

    def wait_for(self, handle: Any, limit_s: float | None) -> Any:
        if limit_s is not None:
            try:
                handle.wait(limit_s)
            except PCCLError as error:
                if error.result is not Result.TIMEOUT:
                    raise
        return handle.result()

    def attempt(self, call: Callable[[], object]) -> str:
        while True:
            try:
                call()
                return "SUCCESS"
            except PCCLError as error:
                if error.result is Result.INVALID_USAGE and "is in flight still" in error.message:
                    self.pause(0.1)
                    continue
                if error.result not in self.ALLOWED:
                    raise
                return error.result.name

    def finish(self) -> None:
        self.require_agreement()
        self.together(lambda peer: peer.all_reduce(np.ones(1, np.float32), op=SUM, tag=99))


class Crowd(Scenario):
    """Callers of one tag that take no turns: whoever finds it in flight tries again. All ops find a partner each."""

    callers = 3
    each = 2

    def prepare(self) -> None:
        self.warm_up([0])
        self._pairs: dict[float, list[int]] = defaultdict(list)

    def play(self) -> None:
        for number, peer in enumerate(self.world.peers):
            for which in range(self.callers):
                style = self.rng.choice(("call", "launch"))
                run = lambda *with_: lambda: self.push(*with_)  # noqa: E731
                self.caller(f"caller {number}.{which}", run(peer, number, which, style))

    def push(self, peer: Communicator, number: int, which: int, style: str) -> None:
        for turn in range(self.each):
            own = 2.0 ** (which * self.each + turn + 12 * number)
            x = np.full(COUNT, own, np.float64).astype(np.float32)
            while True:
                try:
                    if style == "call":
                        peer.all_reduce(x, op=SUM)
                    else:
                        peer.all_reduce_async(x, op=SUM).result()
                    break
                except PCCLError as error:
                    if error.result is not Result.INVALID_USAGE or "in flight already" not in error.message:
                        raise
                    self.pause()
            other = float(x[0]) - own
            is_other = other in {2.0 ** (place + 12 * (1 - number)) for place in range(self.callers * self.each)}
            if not is_other or not np.all(x == x[0]):
                self.wrong(f"peer {number}: {x} is not {own} and one number of the other's")
            self._pairs[float(x[0])].append(number)
            self.give_back(x, f"peer {number}, caller {which}")

    def finish(self) -> None:
        if any(sorted(whose) != [0, 1] for whose in self._pairs.values()):
            self.wrong(f"results that not both peers have, once each: {dict(self._pairs)}")


class Interrupts(Scenario):
    """Ctrl-C comes at any moment of one caller, once or twice. What it launched comes to an end, its arrays are its
    own again, and the communicator goes on."""

    early = 0.002
    rounds = 3
    STYLES: ClassVar[tuple[str, ...]] = ("call", "call", "short", "launch", "many", "topology", "barrier")
    ALLOWED: ClassVar[frozenset[Result]] = frozenset({Result.TIMEOUT, Result.OUTCOME_UNKNOWN, Result.PENDING_ASYNC_OPS})

    def prepare(self) -> None:
        self.warm_up(list(range(self.rounds)))
        self._styles = [self.rng.choice(self.STYLES) for _ in range(self.rounds)]

    def play(self) -> None:
        first, second = self.world.peers
        self.caller("interrupted", lambda: self.be_interrupted(first))
        self.caller("other", lambda: self.play_along(second))
        if "topology" not in self._styles:
            self.caller("busy 0", lambda: self.be_busy(first, 0))
            self.caller("busy 1", lambda: self.be_busy(second, 1))

    def be_interrupted(self, peer: Communicator) -> None:
        me = self.scheduler.me
        assert me is not None
        for tag, style in enumerate(self._styles):
            given = contribution(0, tag, 0)
            x = np.full(COUNT, given, np.float32)
            whole = given + contribution(1, tag, 0)
            what = f"a {style} with tag {tag}"
            point = self.rng.randrange(1, self.rng.choice((20, 200, 1000)))
            if self.rng.random() < 0.3:
                self.signal_later(me)
            else:
                me.points_to_interrupt = point
            self.scheduler.begin_thread()
            end = "SUCCESS"
            try:
                try:
                    self.call(peer, style, x, tag)
                finally:
                    me.points_to_interrupt = 0
            except KeyboardInterrupt:
                end = "KeyboardInterrupt"
            except PCCLError as error:
                self.require_allowed(error)
                end = error.result.name
            me.is_signalled = False
            is_reduce = style in ("call", "short", "launch", "many")
            if is_reduce and end == "SUCCESS" and not np.all(x == whole):
                self.wrong(f"{what} has succeeded: {x} instead of {whole}")
            if end != "SUCCESS" and not (np.all(x == given) or (is_reduce and np.all(x == whole))):
                self.wrong(f"{what}, ended by {end}: {x} is neither {given}, as it was, nor {whole}")
            self.give_back(x, what)

    def require_allowed(self, error: PCCLError) -> None:
        """Raise the error unless it is one that a call may get whose partner has been interrupted."""
        can_never_meet = error.result is Result.INVALID_USAGE and "never launched" in error.message
        if error.result not in self.ALLOWED and not can_never_meet:
            raise error

    def signal_later(self, target: Any) -> None:
        """Have a signal come at some time from outside."""
        delay = self.rng.randrange(1, 60)

        def signal() -> None:
            for _ in range(delay):
                self.scheduler.step("a signal is on its way")
            target.is_signalled = True

        self.world.spawn("signal", signal)

    def call(self, peer: Communicator, style: str, x: Array, tag: int) -> None:
        if style == "call":
            peer.all_reduce(x, op=SUM, tag=tag, timeout=3.0)
        elif style == "short":
            peer.all_reduce(x, op=SUM, tag=tag, timeout=0.09)
        elif style == "launch":
            handle = peer.all_reduce_async(x, op=SUM, tag=tag)
            handle.result(3.0)
        elif style == "many":
            descriptor = ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(x.size, SUM, tag))
            peer.all_reduce_multiple_with_retry([descriptor], timeout=3.0)
        elif style == "topology":
            peer.update_topology(timeout=3.0)
        else:
            peer.barrier(tag=tag, timeout=3.0)

    def play_along(self, peer: Communicator) -> None:
        for tag, style in enumerate(self._styles):
            x = np.full(COUNT, contribution(1, tag, 0), np.float32)
            try:
                self.call(peer, "call" if style != "barrier" and style != "topology" else style, x, tag)
            except PCCLError as error:
                self.require_allowed(error)
                if not np.all(x == contribution(1, tag, 0)):
                    self.wrong(f"tag {tag}, ended by {error.result.name}: {x}")
            self.give_back(x, f"the other's, with tag {tag}")

    def be_busy(self, peer: Communicator, number: int) -> None:
        """Reduce on a tag that nobody gives up."""
        for use in range(2):
            x = np.full(COUNT, contribution(number, 50, use), np.float32)
            peer.all_reduce(x, op=SUM, tag=50)
            if not np.all(x == contribution(0, 50, use) + contribution(1, 50, use)):
                self.wrong(f"a busy caller has {x}")
            self.give_back(x, "a busy caller's")

    def finish(self) -> None:
        self.together(lambda peer: peer.all_reduce(np.ones(1, np.float32), op=SUM, tag=99))


class Closing(Scenario):
    """A peer is closed while its callers and the other's are in ops: all of them end."""

    early = 0.002
    rounds = 3
    OWN: ClassVar[frozenset[Result]] = frozenset({Result.NOT_INITIALIZED})
    OTHERS: ClassVar[frozenset[Result]] = frozenset(
        {Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS, Result.TIMEOUT, Result.OUTCOME_UNKNOWN}
    )

    def prepare(self) -> None:
        self.warm_up([0, 1])

    def play(self) -> None:
        for number, peer in enumerate(self.world.peers):
            for tag in (0, 1):
                style = self.rng.choice(("call", "launch", "many"))
                run = lambda *with_: lambda: self.go_on(*with_)  # noqa: E731
                self.caller(f"caller {number}.{tag}", run(peer, number, tag, style))
        self.caller("onlooker", lambda: self.look(self.world.peers[0]))
        closers = self.rng.choice((1, 1, 2))
        for which in range(closers):
            self.caller(f"closer {which}", lambda: self.end(self.world.peers[0]))

    def end(self, peer: Communicator) -> None:
        for _ in range(self.rng.randrange(40)):
            self.scheduler.step("before it is closed")
        peer.close()

    def look(self, peer: Communicator) -> None:
        """Read the counters, until the peer is closed."""
        for _ in range(self.rng.randrange(1, 30)):
            try:
                found = peer.stats["ops_open"]
            except PCCLError as error:
                if error.result is not Result.NOT_INITIALIZED:
                    raise
                return
            if found > 2:
                self.wrong(f"more ops are open than callers have made: {found}")

    def go_on(self, peer: Communicator, number: int, tag: int, style: str) -> None:
        for use in range(self.rounds):
            given = contribution(number, tag, use)
            x = np.full(COUNT, given, np.float32)
            try:
                if style == "call":
                    peer.all_reduce(x, op=SUM, tag=tag)
                elif style == "launch":
                    peer.all_reduce_async(x, op=SUM, tag=tag).result()
                else:
                    descriptor = ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(x.size, SUM, tag))
                    peer.all_reduce_multiple_with_retry([descriptor])
            except PCCLError as error:
                if error.result not in (self.OWN if number == 0 else self.OTHERS):
                    raise
                if not np.all(x == given):
                    self.wrong(f"peer {number}, ended by {error}: {x} instead of {given}")
                self.give_back(x, f"peer {number}'s, with tag {tag}")
                return
            if not np.all(x == contribution(0, tag, use) + contribution(1, tag, use)):
                self.wrong(f"peer {number}, use {use} of tag {tag}: {x}")
            self.give_back(x, f"peer {number}'s, with tag {tag}")


class Exiting(Closing):
    """The interpreter exits in the main thread, while others are in ops: all of them end."""

    may_keep_tags = True
    OTHERS = Closing.OTHERS | {Result.NOT_INITIALIZED}

    def end(self, peer: Communicator) -> None:
        for _ in range(self.rng.randrange(40)):
            self.scheduler.step("before the exit")
        portal._at_exit()

    def finish(self) -> None:
        pass


class Founding(Scenario):
    """The first calls of a process: a thread of its own connects each peer, and one may be closed meanwhile."""

    early = 0.002

    def set_up(self) -> None:
        self._chooser.switch()

    def play(self) -> None:
        self._is_closing = self.rng.random() < 0.5
        self._has_left = False
        self.world.peers = [Communicator(ADDRESS, name=f"peer {number}") for number in range(self.peers)]
        for number, peer in enumerate(self.world.peers):
            self.caller(f"caller {number}", lambda peer=peer, number=number: self.begin(peer, number))  # type: ignore
        if self._is_closing:
            self.caller("closer", lambda: self.end(self.world.peers[1]))

    def begin(self, peer: Communicator, number: int) -> None:
        try:
            peer.connect()
            while peer.membership.world_size < self.peers and not self._has_left:
                peer.update_topology(timeout=5.0)
            if not self._is_closing:
                x = np.full(COUNT, number + 1, np.float32)
                peer.all_reduce(x, op=SUM)
                if not np.all(x == 3):
                    self.wrong(f"peer {number}: {x} instead of 3")
        except PCCLError as error:
            allowed = {Result.TIMEOUT} if number == 0 else {Result.NOT_INITIALIZED}
            if not self._is_closing or error.result not in allowed:
                raise
        finally:
            self._has_left = self._has_left or number == 1

    def end(self, peer: Communicator) -> None:
        for _ in range(self.rng.randrange(150)):
            self.scheduler.step("before it is closed")
        peer.close()


class Forking(Turns):
    """A child is forked while callers are in ops. In it every call fails and no wait lasts; the parent goes on."""

    uses = 3
    CHILD_S = 20.0

    def play(self) -> None:
        super().play()
        self.caller("forker", lambda: self.fork(self.world.peers[0]))

    def fork(self, peer: Communicator) -> None:
        scheduler = self.scheduler
        for _ in range(self.rng.randrange(60)):
            scheduler.step("before the fork")
        handle = peer.all_reduce_async(np.ones(COUNT, np.float32), op=SUM, tag=70)
        for _ in range(self.rng.randrange(10)):
            scheduler.step("before the fork")
        reader, writer = os.pipe()
        scheduler.is_alone = True
        child = os.fork()
        if child == 0:
            text = "it has ended by something unheard of"
            try:
                text = self.in_child(handle)
            except BaseException as error:
                text = "".join(traceback.format_exception(error))
            finally:
                os.write(writer, text.encode()[-4000:])
                os._exit(0)
        scheduler.is_alone = False
        os.close(writer)
        text = "" if select.select([reader], [], [], self.CHILD_S)[0] else "the child says nothing"
        if text:
            os.kill(child, signal.SIGKILL)
        else:
            text = os.read(reader, 4096).decode()
        os.close(reader)
        os.waitpid(child, 0)
        if text:
            self.wrong(f"in a forked child: {text}")
        self.world.spawn("partner", lambda: self.world.peers[1].all_reduce(np.ones(COUNT, np.float32), op=SUM, tag=70))
        handle.result()

    def in_child(self, handle: Any) -> str:
        """Return what is wrong in a forked child."""
        end = handle.wait(1.0)[1]
        if end is not Result.NOT_INITIALIZED:
            return f"a handle of the parent's has ended by {end.name}"
        x = np.ones(COUNT, np.float32)
        calls: list[tuple[str, Callable[[Communicator], object]]] = [
            ("all_reduce", lambda peer: peer.all_reduce(x, op=SUM)),
            ("all_reduce_async", lambda peer: peer.all_reduce_async(x, op=SUM)),
            ("stats", lambda peer: peer.stats),
        ]
        for peer in self.world.peers:
            for name, call in calls:
                try:
                    call(peer)
                except PCCLError as error:
                    if error.result is not Result.NOT_INITIALIZED:
                        return f"{name} fails by {error}"
                else:
                    return f"{name} does not fail"
            peer.close()
        return ""


SCENARIOS: dict[str, type[Scenario]] = {
    "turns": Turns,
    "impatient": Impatient,
    "crowd": Crowd,
    "interrupts": Interrupts,
    "closing": Closing,
    "exiting": Exiting,
    "forking": Forking,
    "founding": Founding,
}
