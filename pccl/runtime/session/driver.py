"""The one way to the protocol machine of a session: everything that tells it something does so in a *turn*.

A turn is a context that makes the machine ready, yields it, and carries out its effects in order when it ends:

    with driver.taking_over as machine:
        machine.received(message)

Who has no turn sees only facts (`Facts`), which nobody can tell anything. Turns keep these rules:

1. Before the machine is told anything that bears on ops, be it a message, a call or a loss, the fast path is closed,
   and the machine is told what has come of the ops on it (`taking_over`). So it decides as if each had been launched by
   it. A link that is made or fails counts as bearing on ops: it is rare, and closing costs little.
2. Launches, cancels and the clock leave the fast path open, but the machine hears the engine before it is told of them
   (`hearing`): what is done need not have been said, and a launch follows the op that had its tag before.
3. Effects are carried out at the end of the outermost turn, in order, and never wait: what needs time (making a link,
   moving state) becomes a task that reports back in a turn of its own. An effect that can be answered at once is
   answered to the machine that its handler gets; that answer's effects come after those of the same batch.
4. The fast path is opened again when a turn ends, if the machine has nothing to decide for a small op then.
5. A turn that raises carries nothing out: the exception ends the session (`lifetime`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import trio

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.runtime.data_plane.fast_path import FastPath
from pccl.runtime.session.lifetime import Lifetime

Handlers = Mapping[type, Callable[[ps.Peer, Any], None]]
"""Functions that carry effects out, by the effects' types. They get the machine, for what can be answered at once."""


class Facts(Protocol):
    """The state of the machine that anybody may read at any time."""

    @property
    def run(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def term(self) -> int: ...
    @property
    def obstacle(self) -> str: ...
    @property
    def peer_timeout_s(self) -> float: ...
    @property
    def link_timeout_s(self) -> float: ...
    @property
    def is_led(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def is_optimizing(self) -> bool: ...
    def name_of(self, peer: int) -> str: ...


class Turn:
    """A context in which the machine may be told things; the module says how."""

    __slots__ = ("_begin", "_machine", "_pump")

    def __init__(self, machine: ps.Peer, begin: Callable[[], None], pump: Callable[[], None]) -> None:
        self._machine = machine
        self._begin = begin
        self._pump = pump

    def __enter__(self) -> ps.Peer:
        self._begin()
        return self._machine

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is None:
            self._pump()


class Driver:
    """The owner of the machine. Only for the trio thread."""

    def __init__(
        self,
        machine: ps.Peer,
        fast_path: FastPath,
        lifetime: Lifetime,
        hear: Callable[[ps.Peer], None],
        send: Callable[[list[m.Message]], None],
    ) -> None:
        """`hear` tells the machine what the engine has to say. `send` sends to the master, and never waits."""
        self.facts: Facts = machine
        self.drained = trio.Event()
        """Set when the session has ended, and the engine has given all buffers back."""
        self.taking_over = Turn(machine, self._take_over, self._pump)
        self.hearing = Turn(machine, self.hear, self._pump)
        self.after_hearing = Turn(machine, lambda: None, self._pump)
        """A turn for callers that have heard the engine by themselves, or must not ask it any more."""
        self._machine = machine
        self._fast_path = fast_path
        self._lifetime = lifetime
        self._hear = hear
        self._send = send
        self._handlers: dict[type, Callable[[ps.Peer, Any], None]] = {}
        self._timer_changed = trio.Event()
        self._timer_deadline = float("inf")
        self._is_pumping = False

    def carry_out(self, handlers: Handlers) -> None:
        """Have these effects carried out by these handlers."""
        assert not self._handlers.keys() & handlers.keys()
        self._handlers.update(handlers)

    def hear(self) -> None:
        self._hear(self._machine)

    def _take_over(self) -> None:
        if self._fast_path.close():
            self._hear(self._machine)

    def _pump(self) -> None:
        if self._is_pumping or self._lifetime.is_broken:
            return
        machine, fast_path, handlers = self._machine, self._fast_path, self._handlers
        self._is_pumping = True
        try:
            outgoing: list[m.Message] = []
            while True:
                while effects := machine.drain():
                    for effect in effects:
                        if isinstance(effect, ps.ToMaster):
                            outgoing.append(effect.message)
                        else:
                            handlers[type(effect)](machine, effect)
                start = machine.plain_start()
                if fast_path.is_as(start):
                    break
                self._take_over()
                if start is not None and machine.plain_start() == start:
                    fast_path.open(start)
            if outgoing:
                self._send(outgoing)
        finally:
            self._is_pumping = False
        if (machine.deadline() or float("inf")) < self._timer_deadline:
            self._timer_changed.set()
        if machine.is_over and not machine.open_ops:
            self.drained.set()

    async def watch_clock(self) -> None:
        """Tell the machine the time whenever its deadline has come."""
        while True:
            self._timer_changed = trio.Event()
            self._timer_deadline = self._machine.deadline() or float("inf")
            with trio.CancelScope(deadline=self._timer_deadline):
                await self._timer_changed.wait()
            if trio.current_time() >= self._timer_deadline:
                with self.hearing as machine:
                    machine.tick(trio.current_time())
