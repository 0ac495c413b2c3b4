"""Scenarios where calls end in other ways than their callers meant."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from pccl import Communicator, PCCLError, ReduceDescriptor, ReduceOpDescriptor, Result
from pccl.runtime.threads import portal
from tests.interleaving.scenario import COUNT, SUM, Array, Scenario, contribution
from tests.interleaving.world import ADDRESS


class Crowd(Scenario):
    """Callers of one tag that take no turns: a peer that finds it in flight tries again. All ops find a partner
    each."""

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
                    if error.result is not Result.INVALID_USAGE or "already in flight" not in error.message:
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
            try:
                handle.result(3.0)
            except (KeyboardInterrupt, PCCLError):
                with suppress(PCCLError):
                    handle.cancel()  # a wait that was interrupted or timed out leaves the op in flight
                raise
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
        """Reduce on a tag that no peer gives up."""
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
        for _ in range(self.rng.randrange(1, 150)):
            try:
                peer.stats  # noqa: B018
            except PCCLError as error:
                if error.result is not Result.NOT_INITIALIZED:
                    raise
                return

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
    """The first calls of a process: one thread per peer connects it, and one may be closed."""

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
                self.pause()  # else it might go round for as long as no other thread may go on
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
