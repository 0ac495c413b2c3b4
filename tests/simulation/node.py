"""A peer of a run in memory: its machine, its end of the control connection, what its engine and links would hold."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.point_to_point import pair_tag
from pccl.types import Result
from tests.simulation.gate import Gate

if TYPE_CHECKING:
    from tests.simulation.engine import Frame
    from tests.simulation.seat import Control, Seat

Key = tuple[int, int, int, int]
"""An op by (group, epoch, tag, sequence)."""
Value = frozenset[tuple[str, int]]
"""Whose numbers are in a buffer: names of nodes, and the ops they launched."""


@dataclass(eq=False)
class Wire:
    """One connection of a link."""

    dialer: Node
    acceptor: Node
    ends: dict[str, int] = field(default_factory=dict)
    """Link numbers by node name, of the ends that an engine has."""
    closed_by: set[str] = field(default_factory=set)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """What was sent over it and arrives once its dialer has taken it over, unless it is lost before."""

    def other(self, node: Node) -> Node:
        return self.acceptor if node is self.dialer else self.dialer

    def release(self) -> None:
        """Has what waits set out again."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each()


@dataclass
class Link:
    """One side's end of a link."""

    effect: ps.MakeLink
    expires_at: float
    """When it is given up as things are, and when at the latest."""
    ends_at: float
    still_since: float | None = None
    """Since when bytes lie on it that do not get across."""
    wires: list[Wire] = field(default_factory=list)

    is_complete: bool = False
    """All its connections stood at one time. It goes on with those that are left."""


@dataclass(eq=False)
class Node:
    """A peer with its side of the control connection and its pretended engine."""

    name: str
    port: int
    machine: ps.Peer
    control: Control | None = None
    """Its connection to a master; None while it looks for one."""
    home: Seat | None = None
    """The last master that has taken it in."""
    tried: set[str] = field(default_factory=set)
    """Masters that it has asked in vain, at this moment."""
    masterless_since: float | None = None
    reattaching_since: float | None = None
    """Since when it dials its master again to go on in its session."""
    is_alive: bool = True
    is_frozen: bool = False
    """Stopped, as by SIGSTOP: what it has sent still travels."""
    is_hung: bool = False
    """It is frozen but for its signs of life, as by code that lets no other thread into Python."""
    heartbeats: int = 0
    """The connection that carries its signs of life, 0 if there is none."""
    heartbeats_timeout_s: float | None = None
    """Since its Welcome."""
    heartbeats_seat: Seat | None = None
    """Where these go, or shall go."""
    heard_at: float = 0.0
    """When a sign of life of it last got to the master."""
    master_heard_at: float = 0.0
    """When it was last reached by one of the master."""
    is_known: bool = True
    """The master has not lost it, closed on it or let it go."""
    number: int = 0
    """Its peer number, as the master has told it; 0 before."""
    former_numbers: list[int] = field(default_factory=list)
    is_accepted: bool = False
    """The master has sent it an Install."""
    reports: deque[tuple[str, int]] = field(default_factory=deque)
    """What the engine has to say, in order."""
    links: dict[int, Link] = field(default_factory=dict)
    knocking: list[Callable[[], None]] = field(default_factory=list)
    """What others want of it that waits for the next message of the master or for the end of a freeze."""
    commands: deque[Callable[[], None]] = field(default_factory=deque)
    """What the engine has been told to do, in order."""
    launched: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Tag and arguments of every op, by its number."""
    pairs: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Of ops of two: the number of the other, and whether this one sends."""
    submitted: dict[Key, ps.SubmitOp] = field(default_factory=dict)
    """Ops in the engine."""
    buffers: dict[int, Value] = field(default_factory=dict)
    """Of every op."""
    parked: dict[Key, list[Frame]] = field(default_factory=dict)
    """Frames of ops that are not in the engine."""
    finished: set[Key] = field(default_factory=set)
    """Ops of which all result bytes have come."""
    keys: dict[int, Key] = field(default_factory=dict)
    held: set[Key] = field(default_factory=set)
    """Ops whose engine has reported them done, or is about to."""
    uses: Counter[tuple[int, int]] = field(default_factory=Counter)
    frozen: set[int] = field(default_factory=set)
    stopped: set[Key] = field(default_factory=set)
    """Ops that were frozen one by one."""
    told_done: dict[Key, set[str]] = field(default_factory=dict)
    """Names of those who are known to be done with an op, by what their engines say to each other."""
    gate: Gate = field(default_factory=Gate)
    refuses: set[int] = field(default_factory=set)
    """Ops that its engine will refuse."""
    cancelled_queued: set[int] = field(default_factory=set)
    given_up_ops: set[int] = field(default_factory=set)
    """Whose callers do not wait for the next view."""
    results: dict[int, ps.OpResult] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    """Of every joint call."""
    calls: dict[int, ps.CallResult] = field(default_factory=dict)
    in_call: str | None = None
    """The kind of the one that the master has been told of."""
    given_up: set[int] = field(default_factory=set)
    ready: int = 0
    """The last view for which it has said that its links are up."""
    views: list[ps.View] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    plans: list[ps.RunSync] = field(default_factory=list)
    serving: int = 0
    """The sync whose plan it has, for as long as its own call for it lasts."""
    strategy: str = "enforce_popular"
    revision: int = 0
    root: bytes = b"root"
    loose: bytes = b"loose"
    fails_to_fetch: bool = False
    has_left: bool = False
    ended: ps.Ended | None = None
    last_number: int = 0

    @property
    def group(self) -> int:
        return self.machine.group

    @property
    def view(self) -> ps.View:
        assert self.machine.view is not None
        return self.machine.view

    @property
    def is_reachable(self) -> bool:
        return self.is_alive and self.ended is None

    def next(self) -> int:
        """A number for an op or a call."""
        self.last_number += 1
        return self.last_number

    def result(self, op: int) -> Result:
        return self.results[op].code

    def call(self, call: int) -> Result:
        return self.calls[call].code

    @property
    def open_ops(self) -> list[int]:
        return [op for op in self.launched if op not in self.results]

    @property
    def open_calls(self) -> list[int]:
        return [call for call in self.kinds if call not in self.calls]

    @property
    def serves(self) -> bool:
        """Takes part in a sync that its caller has not given up."""
        calls = [call for call in self.open_calls if self.kinds[call] == m.Kind.SYNC]
        return bool(calls) and calls[0] not in self.given_up

    def tag_of(self, op: int) -> int | None:
        """By which peers and master know it in this view, if they can."""
        tag, _ = self.launched[op]
        if op not in self.pairs:
            return tag
        other, is_sender = self.pairs[op]
        if other not in self.view.ring:
            return None
        ranks = self.view.ring.index(self.number), self.view.ring.index(other)
        return pair_tag(*ranks, tag) if is_sender else pair_tag(*reversed(ranks), tag)

    def next_use(self, op: int) -> Key:
        """What an op that starts now is named."""
        tag = self.tag_of(op)
        assert tag is not None
        epoch = self.view.epoch
        sequence = self.uses[epoch, tag]
        self.uses[epoch, tag] += 1
        return self.group, epoch, tag, sequence

    def heard(self, message: m.Message) -> None:
        """A verdict on an op that this peer has not launched may count as its use of the tag."""
        if not isinstance(message, m.OpAbort) or not message.counts_as_made:
            return
        waiting = [op for op in self.open_ops if op not in self.keys]
        use = message.epoch, message.tag
        if self.uses[use] == message.sequence and all(self.tag_of(op) != message.tag for op in waiting):
            self.uses[use] += 1

    def __repr__(self) -> str:
        return self.name
