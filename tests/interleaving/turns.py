"""Scenarios where callers take turns on each tag: every peer makes the same uses in the same order."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from pccl import Communicator, PCCLError, ReduceDescriptor, ReduceOpDescriptor, Result
from pccl.runtime.threads.waking import LOOK_UP_S
from tests.interleaving.choosers import Switching
from tests.interleaving.primitives import Lock
from tests.interleaving.scenario import COUNT, SUM, Array, Scenario, contribution
from tests.interleaving.world import World


class Turns(Scenario):
    """Callers of different kinds take turns on each tag: every peer makes the same uses in the same order."""

    uses = 4
    callers = 2
    STYLES: ClassVar[tuple[str, ...]] = ("call", "call", "call", "short", "launch", "launch", "poll", "many")

    def __init__(self, world: World, chooser: Switching, seed: int, is_strict: bool) -> None:
        super().__init__(world, chooser, seed, is_strict)
        self.tags = list(range(self.rng.choice((1, 2, 2, 3))))
        self.kinds = {
            (tag, use): self.rng.choice(("reduce", "reduce", "reduce", "reduce", "barrier", "broadcast", "gather"))
            for tag in self.tags
            for use in range(self.uses)
        }
        self.late: set[tuple[int, int]] = set()
        """Uses that peer 0 gives up at once, and that the others make only after that."""
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
                    patience = self.rng.choice((0.0, 0.0, 0.6 * self.rng.random(), 1.0))
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
                style, own_patience = styles[use], patience
                if (tag, use) in self.late:
                    self.scheduler.wait(lambda: number == 0 or 0 in self.ends[tag, use], "peer 0's call")  # noqa: B023
                    style, own_patience = ("short", 0.0) if number == 0 else (style, patience)
                self.ends[tag, use][number] = self.use(peer, number, tag, use, style, own_patience)

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
            handle = peer.launch.barrier(tag=tag)
        elif kind == "broadcast":
            handle = peer.launch.broadcast(x, root=root, tag=tag)
        else:
            handle = peer.launch.all_gather(x, tag=tag)
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
            self.wrong(f"{passed_s:g} s of virtual time have passed: a wake-up was missed until a thread looked")
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

    def prepare(self) -> None:
        super().prepare()
        self.late = {each for each in self.kinds if self.rng.random() < 0.4}

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
                if error.result is Result.OUTCOME_UNKNOWN and self.is_strict:
                    self.wrong(f"a verdict has not come, though no peer is slow: {error}")
                return error.result.name

    def finish(self) -> None:
        self.require_agreement()
        self.together(lambda peer: peer.all_reduce(np.ones(1, np.float32), op=SUM, tag=99))


class Watching(Turns):
    """Others read a peer's counters and its flight recorder, at any moment. Time passes, so that there are reports."""

    uses = 3

    def play(self) -> None:
        super().play()
        for number, peer in enumerate(self.world.peers):
            self.caller(f"onlooker {number}", lambda peer=peer: self.watch(peer))  # type: ignore[misc]

    def attempt(self, call: Callable[[], object]) -> str:
        self.pause(self.rng.choice((0.0, 0.0, 1.0)))
        return super().attempt(call)

    def limit_s(self, style: str, patience: float) -> float | None:
        return None

    def watch(self, peer: Communicator) -> None:
        for _ in range(4):
            found = peer.flight_recorder()
            if any(link.peer not in peer.membership.peers for link in found.links):
                self.wrong(f"the recorder knows of links to peers that are not there: {found.links}")
            peer.stats  # noqa: B018
            self.pause(self.rng.choice((0.0, 0.5)))

    def finish(self) -> None:
        self.require_agreement()


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
        text = "" if select.select([reader], [], [], self.CHILD_S)[0] else "the child prints no line"
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
