"""A peer of a simulated run: its machine, its end of the control connection, what its engine and links would hold."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pccl.protocol import messages as m
from pccl.protocol.completion import pair_tag
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.protocol.peer.view import View
from pccl.types import Result
from tests.simulation.fast_path import FastPath

if TYPE_CHECKING:
    from tests.simulation.checks.facts import Leader
    from tests.simulation.connections import Control, Link
    from tests.simulation.engine import Frame
    from tests.simulation.master_host import MasterHost

Key = tuple[int, int, int, int]
"""The name of an op: group, epoch, tag, sequence."""
Value = frozenset[tuple[str, int]]
"""The contributions that are summed up in a buffer: names of nodes, and the ops they launched."""


@dataclass(eq=False)
class Node:
    """A peer with its side of the control connection and its pretended engine."""

    name: str
    port: int
    machine: Peer
    control: Control | None = None
    """Its connection to a master; None while it looks for one."""
    rate: float = 1.0
    """The seconds of its own clock in a second."""
    route: int = 0
    """The master behind the name, where there is one name for all."""
    host: str = ""
    """The address of its host, if several have the same."""
    alias: str = ""
    """The name that it gives, if it is another one."""
    asked: int = 0
    """The number of masters that it has asked in its present search."""
    group: int = 0
    site: str = ""
    site_size: int = 0
    tried: set[str] = field(default_factory=set)
    """Masters that it has asked without success, at this moment."""
    leaves_at: float | None = None
    """The time when it asks another master, as the one that it is at leads no run."""
    has_waited: bool = False
    """It has waited at a master in this round."""
    masterless_since: float | None = None
    reattaching_since: float | None = None
    """The time since which it dials its master again to go on in its session."""
    is_alive: bool = True
    is_frozen: bool = False
    """Stopped, as by SIGSTOP: what it has sent still travels."""
    unfinished: list[ps.Effect] = field(default_factory=list)
    """The effects of its machine that it was stopped before."""
    is_walled_in: bool = False
    """It can open no connection to its master. Those that it has go on."""
    is_hung: bool = False
    """It is frozen except for its heartbeat, as by code that lets no other thread into Python."""
    heartbeat: int = 0
    """The connection that carries its heartbeat, 0 if there is none."""
    heartbeat_timeout_s: float | None = None
    """The silence until it gives its master up; None before its Welcome."""
    heartbeat_host: MasterHost | None = None
    """The master that gets its heartbeat, or shall get it."""
    heard_at: float = 0.0
    """The time when its heartbeat last got to the master."""
    master_heard_at: float = 0.0
    """The time when the master's heartbeat last got to it."""
    number: int = 0
    """Its peer number, as the last master to take it in has said; 0 before."""
    run: str = ""
    """The run that it is in, as that master has said."""
    leader: Leader | None = None
    """The master that has taken it in or on last."""
    led_over: Control | None = None
    """The connection to that master then."""
    is_known: bool = False
    """That master has not lost it, closed on it or let it go."""
    prepared_epoch: int | None = None
    """The epoch of its group in a view that it was told to prepare, and which is not in force."""
    call_heard: int = 0
    """The number of the last group call of whose end it has heard."""
    former_numbers: list[int] = field(default_factory=list)
    is_accepted: bool = False
    """The master has sent it an Install."""
    reports: deque[tuple[str, int]] = field(default_factory=deque)
    """The engine's reports that the machine has not heard, oldest first."""
    poll: Callable[[], None] = lambda: None
    """Puts what a real engine has to report among the reports."""
    has_news: Callable[[], bool] = lambda: False
    """Whether there is any."""
    links: dict[int, Link] = field(default_factory=dict)
    broken: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Links that its engine has found broken, and its machine has yet to hear of: the peer, and the view of each."""
    lost_links: set[tuple[int, int]] = field(default_factory=set)
    """Those that it knows."""
    deferred: list[Callable[[], None]] = field(default_factory=list)
    """Requests of others that wait for the next message of the master or for the end of a freeze."""
    commands: deque[Callable[[], None]] = field(default_factory=deque)
    """The machine's orders that the engine has not carried out, oldest first."""
    launched: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Tag and arguments of every op, by its number."""
    pairs: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """The other peer's number by point-to-point op, and whether this one sends."""
    submitted: dict[Key, ps.SubmitOp] = field(default_factory=dict)
    """Ops in the engine."""
    buffers: MutableMapping[int, Value] = field(default_factory=dict)
    """The buffer of every op."""
    parked: dict[Key, list[Frame]] = field(default_factory=dict)
    """Frames of ops that are not in the engine."""
    finished: set[Key] = field(default_factory=set)
    """Ops whose result bytes have all come."""
    keys: dict[int, Key] = field(default_factory=dict)
    held: set[Key] = field(default_factory=set)
    """Ops whose engine has reported them done, or is about to."""
    uses: Counter[tuple[int, int]] = field(default_factory=Counter)
    unmade: set[tuple[int, int, int]] = field(default_factory=set)
    """Epoch, tag and use of ops that were aborted, and that it had not launched then."""
    frozen: set[int] = field(default_factory=set)
    stopped: set[Key] = field(default_factory=set)
    """Ops that were frozen one by one."""
    done_by: dict[Key, set[str]] = field(default_factory=dict)
    """Names of those that are known to be done with an op, by what their engines say to each other."""
    fast_path: FastPath = field(default_factory=FastPath)
    refuses: set[int] = field(default_factory=set)
    """Ops that its engine will refuse."""
    cancelled_queued: set[int] = field(default_factory=set)
    given_up_ops: set[int] = field(default_factory=set)
    """Ops whose callers do not wait for the next view."""
    results: dict[int, ps.OpResult] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    """The kind of every group call."""
    calls: dict[int, ps.CallResult] = field(default_factory=dict)
    in_call: str | None = None
    """The kind of the call that the master has heard of."""
    given_up: set[int] = field(default_factory=set)
    ready: int = 0
    """The last view where it has said that its links are up."""
    views: list[View] = field(default_factory=list)
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
    def view(self) -> View:
        """The last view that its callers were told of."""
        return self.views[-1]

    @property
    def is_reachable(self) -> bool:
        return self.is_alive and self.ended is None

    def next(self) -> int:
        """A fresh number for an op or a call."""
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
        """Whether it takes part in a sync that its caller has not given up."""
        calls = [call for call in self.open_calls if self.kinds[call] == m.Kind.SYNC]
        return bool(calls) and calls[0] not in self.given_up

    def tag_of(self, op: int) -> int | None:
        """The tag that peers and master know the op in this view, if they can."""
        tag, _ = self.launched[op]
        if op not in self.pairs:
            return tag
        other, is_sender = self.pairs[op]
        if other not in self.view.ring:
            return None
        ranks = self.view.ring.index(self.number), self.view.ring.index(other)
        return pair_tag(*ranks, tag) if is_sender else pair_tag(*reversed(ranks), tag)

    def next_use(self, op: int) -> Key:
        """The key of an op that starts now."""
        tag = self.tag_of(op)
        assert tag is not None
        epoch = self.view.epoch
        sequence = self.uses[epoch, tag]
        self.uses[epoch, tag] += 1
        return self.group, epoch, tag, sequence

    def heard(self, message: m.Message) -> None:
        """Count uses of a tag: a verdict on an op that this peer has not launched may stand for its own, and does once
        all have passed a barrier."""
        if isinstance(message, m.GroupCallResult):
            if self.in_call in m.Kind.EXCLUSIVE and message.code == Result.SUCCESS:
                for epoch, tag, sequence in sorted(self.unmade):
                    self.uses[epoch, tag] += self.uses[epoch, tag] == sequence
                self.unmade.clear()
        elif isinstance(message, m.OpAbort):
            waiting = [op for op in self.open_ops if op not in self.keys]
            use = message.epoch, message.tag
            if not message.counts_as_made:
                self.unmade.add((*use, message.sequence))
            elif self.uses[use] == message.sequence and all(self.tag_of(op) != message.tag for op in waiting):
                self.uses[use] += 1
            else:
                self.unmade.add((*use, message.sequence))

    def resume_deferred(self) -> None:
        """Do what others wanted of it in the meantime."""
        deferred, self.deferred = self.deferred, []
        for each in deferred:
            each()

    def __repr__(self) -> str:
        return self.name
