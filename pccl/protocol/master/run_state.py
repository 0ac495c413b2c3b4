"""A run as its master keeps it: options, members, groups, numbering, outgoing messages, and waits in group calls.

`RunState` is plain data, shared by the parts of the master. A takeover builds one from recovery reports.

A peer waits in one group call at a time. Waiting peers are counted per call. Ended calls are numbered, so that after
the death of a master a recovery report identifies the call that a peer waits in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.direct_limit import UNKNOWN
from pccl.protocol.failover.durable_state import bounded_s, majority
from pccl.protocol.link_metrics import LinkMetrics
from pccl.protocol.master.effects import Close, Effect, MasterLog, Send
from pccl.protocol.master.ledger import Ledger
from pccl.protocol.master.statistics import History, Throughput, Traffic
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.point_to_point import participants
from pccl.protocol.stragglers import GroupScene, Scene, Stragglers
from pccl.types import Result

ANSWER_TIMEOUTS = 3.0
"""Number of peer timeouts for an answer, longer than making a link may take."""
NAMED_MAX = 20
"""Number of peers that a line of the log names."""


@dataclass(frozen=True)
class MasterOptions:
    peer_timeout_s: float = 5.0
    """Seconds that a peer may go without a heartbeat."""
    engine_threads: int = 1
    """Number of engine threads of each peer, up to ENGINE_THREADS_MAX."""
    hello_timeout_s: float = 10.0
    """Seconds that a connection may stay silent before it says Hello, and that a peer then has until its first
    heartbeat."""
    answer_timeout_s: float = 90.0
    """Seconds that an accepted peer may take to answer Flush or Prepare before it is evicted, and ANSWER_TIMEOUTS peer
    timeouts at least."""
    connections_max: int = 4096
    pending_max: int = 1024
    """Number of peers that may wait to be accepted."""
    connections_per_link_max: int = 64
    founders: int = 1
    """Number of initial peers: newcomers wait until this many are there, and one view admits them all."""

    @property
    def answer_limit_s(self) -> float:
        return max(self.answer_timeout_s, ANSWER_TIMEOUTS * self.peer_timeout_s)


Pair = tuple[int, int]
"""Two peers, the lower number first."""


@dataclass
class Wait:
    call: int
    kind: str
    offer: m.SyncOffer | None
    open_ops: list[OpRef]
    """Ops that the peer had in flight when it called."""
    since: float


@dataclass
class Member:
    """A peer that has said Hello: pending until a view that has it is installed, accepted from then on."""

    peer: int
    connection: int
    hello: m.Hello
    hosts: list[str]
    host: str
    since: float
    on_trial: list[int] | None = None
    """The peers that a newcomer on trial must connect to; None: not on trial."""
    accepted: bool = False
    """Whether a view that has it was installed."""
    wait: Wait | None = None
    heartbeat: int | None = None
    """The connection that carries its heartbeats, or None."""
    has_heartbeat: bool = False
    absence: str = ""
    """The reason why it has no control connection; empty: it has one."""

    @property
    def master_timeout_s(self) -> float:
        return bounded_s(self.hello.master_timeout_s, m.MASTER_TIMEOUT_S)

    @property
    def about(self) -> dict[str, int]:
        return {"group": self.hello.group, "peer": self.peer}

    def as_record(self) -> m.PeerInfo:
        return m.PeerInfo(
            self.peer, self.hello.group, self.hosts, self.hello.port, self.hello.connections, self.hello.name
        )

    def __str__(self) -> str:
        name = f" ({self.hello.name})" if self.hello.name else ""
        return f"peer {self.peer}{name}"


@dataclass
class OpenAbortVote:
    """An op that is aborted unless a peer has committed it."""

    code: int
    reason: str
    awaiting: set[int]
    is_deadlocked: bool
    """Whether the vote is for deadlocked group calls."""


@dataclass
class Sync:
    number: int
    revision: int
    receivers: set[int]
    members: set[int]
    donors: list[int]
    failures: dict[int, str] = field(default_factory=dict)
    """Peers that could not fetch the shared state, and why."""


@dataclass
class Group:
    number: int
    ring: list[int] = field(default_factory=list)
    epoch: int = 0
    ledger: Ledger = field(default_factory=lambda: Ledger(()))
    running: bool = False
    """Whether ops may be in flight: the ring is installed and not being flushed."""
    flush: int = 0
    awaiting_flush: set[int] = field(default_factory=set)
    commits: list[OpRef] = field(default_factory=list)
    """Ops that the last flush commits, to be told with the next Prepare."""
    aborts: dict[OpRef, m.Aborted] = field(default_factory=dict)
    """Ops that the last flush aborts for a reason of their own."""
    votes: dict[OpRef, OpenAbortVote] = field(default_factory=dict)
    open_ops: set[OpRef] = field(default_factory=set)
    """Ops that the last flush has found done at some peer, and without a verdict there."""
    is_mutual: bool = False
    """Whether its peers have been told that it is a mesh, so that they complete ops by themselves."""
    missing: set[Pair] = field(default_factory=set)
    """Pairs without a link; the group is not a mesh."""
    unreliable: set[Pair] = field(default_factory=set)
    """Pairs, not neighbours, whose link broke repeatedly. They count as missing."""
    decision: str = ""
    """The decision of the last optimize_topology and its reason."""
    direct_limit: int = UNKNOWN
    """The limit that holds for the ring in force."""
    is_local: bool = False
    """Whether all its peers are on one host, for the ring in force."""
    linked: Collection[Pair] = frozenset()
    """The pairs whose links stood when the ring in force was installed."""
    changed: bool = False
    """Whether the ring differs from the installed one, or must be made again."""
    synced: set[int] = field(default_factory=set)
    """Incumbents: peers of the last sync that are still here."""
    revision: int | None = None
    """The revision of the last sync; None before the first."""
    sync: Sync | None = None
    accepted: int = 0
    """Number of peers of the ring that are accepted."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Number of them that wait in each kind of group call."""

    @property
    def is_meshed(self) -> bool:
        return 1 < len(self.ring) <= topology.MESH_PEERS_MAX and not self.missing and not self.unreliable

    @property
    def linkless(self) -> set[Pair]:
        return self.missing | self.unreliable

    def participants(self, op: OpRef) -> list[int]:
        """Return the peers whose op it is, in the order of the ring."""
        found = participants(op.tag, self.ring)
        return [peer for peer in self.ring if peer in found]

    def forget(self, peer: int) -> None:
        """Take a lost peer out of the ring and of all that counts on it."""
        self.synced.discard(peer)
        if self.sync is not None:
            self.sync.receivers.discard(peer)
            self.sync.members.discard(peer)
            self.sync.failures.pop(peer, None)
        self.awaiting_flush.discard(peer)
        self.ring.remove(peer)
        self.unreliable = {pair for pair in self.unreliable if peer not in pair}


@dataclass
class ViewChange:
    """The state of the change to the next view."""

    is_preparing: bool = False
    """Whether Prepare was sent for the last view and it is not in force."""
    is_renewing: bool = False
    """Whether a new view is due though no group has changed."""
    admitting: set[int] = field(default_factory=set)
    """Pending peers that the next view takes in."""
    awaiting_ready: set[int] = field(default_factory=set)
    """Peers that make links for the view that was prepared last."""
    unaware: set[int] = field(default_factory=set)
    """Peers that keep their ring in the view that was prepared last, and have not said that they have heard of it."""

    def forget(self, peer: int) -> None:
        for peers in (self.admitting, self.awaiting_ready, self.unaware):
            peers.discard(peer)


class RunState:
    """One run, named by `run`. Peers of another run are refused."""

    def __init__(self, run: str, options: MasterOptions | None = None, term: int = 1, secret: bytes = b"") -> None:
        """`secret` is the run's. By it its peers tell masters that know the run from others."""
        self.run = run
        self.secret = secret
        self.term = term
        self.options = options or MasterOptions()
        self.now = 0.0
        self.next_peer = 1
        self.next_number = 1
        self.view = 0
        self.installed_view = 0
        self.group_calls_ended = 0
        """The number of the last completed group call."""
        self.members: dict[int, Member] = {}
        self.accepted_count = 0
        self.peer_of: dict[int, int] = {}
        self.groups: dict[int, Group] = {}
        self.change = ViewChange()
        self.introduced: set[int] = set()
        self.lost: list[tuple[int, str]] = []
        """Peers that the view in force has and the next one has not, and why."""
        self.asked_at: dict[int, float] = {}
        """The time since which an answer to Flush or Prepare is due, by peer, longest first."""
        self.made_in: dict[Pair, int] = {}
        """The view that made the link of a pair again, by pair."""
        self.history = History()
        self.traffic = Traffic(self.history)
        self.link_metrics = LinkMetrics()
        self.throughput = Throughput()
        self.stragglers = Stragglers()
        self.outbox: list[Effect] = []
        """Effects of the event that is being handled."""

    # Members.

    @property
    def accepted(self) -> list[int]:
        return [peer for peer, member in self.members.items() if member.accepted]

    @property
    def pending(self) -> list[int]:
        return [peer for peer, member in self.members.items() if not member.accepted]

    def is_accepted(self, peer: int) -> bool:
        return peer in self.members and self.members[peer].accepted

    def add(self, member: Member) -> None:
        self.members[member.peer] = member
        self.peer_of[member.connection] = member.peer
        self.accepted_count += member.accepted
        self.link_metrics.arrived(member.peer, member.hosts)

    def remove(self, peer: int) -> Member:
        """Forget a member. Its group keeps its place in the ring: see `Group.forget`."""
        member = self.members.pop(peer)
        del self.peer_of[member.connection]
        self.accepted_count -= member.accepted
        self.asked_at.pop(peer, None)
        self.change.forget(peer)
        self.introduced.discard(peer)
        for pair in [pair for pair in self.made_in if peer in pair]:
            del self.made_in[pair]
        self.traffic.forget(peer)
        self.throughput.forget(peer)
        self.stragglers.gone(peer)
        self.link_metrics.gone(peer)
        return member

    def group_of(self, member: Member) -> Group:
        return self.groups[member.hello.group]

    def missing(self, peers: Iterable[int], kind: str) -> list[int]:
        """Return the first NAMED_MAX of these peers that do not wait in this kind of group call."""
        absent = (peer for peer in peers if (wait := self.members[peer].wait) is None or wait.kind != kind)
        return list(islice(absent, NAMED_MAX))

    # Groups.

    @property
    def is_changing(self) -> bool:
        is_regrouping = any(group.awaiting_flush or group.changed for group in self.groups.values())
        return self.change.is_preparing or self.change.is_renewing or is_regrouping

    def stop(self, group: Group) -> None:
        """Start the flush of a group whose ring must change."""
        group.changed = True
        if not group.running:
            return
        group.running = False
        group.flush = self.number()
        group.awaiting_flush = {peer for peer in group.ring if peer in self.members}
        for vote in group.votes.values():
            vote.awaiting.clear()
        for peer in group.awaiting_flush:
            self.request(peer, m.Flush(group.flush, group.epoch))

    def number(self) -> int:
        """Return a fresh number for a flush, a sync, a round of probes or a search."""
        number = self.next_number
        self.next_number += 1
        return number

    # What is said.

    def send(self, connection: int, message: m.FromMaster) -> None:
        self.outbox.append(Send(connection, message))

    def close(self, connection: int) -> None:
        self.outbox.append(Close(connection))

    def send_to(self, peer: int, message: m.FromMaster) -> None:
        self.send(self.members[peer].connection, message)

    def send_to_all(self, peers: Iterable[int], message: m.FromMaster) -> None:
        for peer in peers:
            self.send_to(peer, message)

    def request(self, peer: int, message: m.FromMaster) -> None:
        self.asked_at.pop(peer, None)
        self.asked_at[peer] = self.now
        self.send_to(peer, message)

    def answered(self, member: Member) -> None:
        """Note that a peer has answered one of the things that it was asked; others may still be due."""
        group, peer, change = self.group_of(member), member.peer, self.change
        is_asked = any(peer in asked for asked in (group.awaiting_flush, change.awaiting_ready, change.unaware))
        if not is_asked and all(peer not in vote.awaiting for vote in group.votes.values()):
            self.asked_at.pop(peer, None)

    def log(
        self,
        level: str,
        text: str,
        about: Mapping[str, int] = MappingProxyType({}),
        is_unauthenticated: bool = False,
    ) -> None:
        """Write a line to the log. `about` names what it is about by the fields of `pccl.logs.FIELDS`."""
        known = {"view": self.installed_view, **about}
        self.outbox.append(MasterLog(level, text, is_unauthenticated, known))
        if not is_unauthenticated:
            self.history.logged(self.now, level, text)

    def drain(self) -> list[Effect]:
        effects, self.outbox = self.outbox, []
        return effects


LONG_WAIT_S = 10.0
"""Seconds after which a wait is logged once, with the peers that it waits for."""


class Waits:
    def __init__(self, state: RunState) -> None:
        self._state = state
        self.waiting: Counter[str] = Counter()
        """Number of accepted peers in each kind of group call."""
        self._unlogged: dict[int, float] = {}
        """Peers that wait and whose wait was not logged, and the time since which they do, longest first."""

    def enter(self, member: Member, message: m.GroupCall) -> None:
        now = self._state.now
        member.wait = Wait(message.call, message.kind, message.offer, message.open_ops, now)
        self._unlogged[member.peer] = now
        self._count(member, message.kind, 1)

    def answer(self, member: Member, code: Result, reason: str = "", value: int = 0, number: int = 0) -> None:
        assert member.wait is not None
        self._state.send(member.connection, m.GroupCallResult(member.wait.call, code, reason, value, number))
        self._count(member, member.wait.kind, -1)
        self._unlogged.pop(member.peer, None)
        member.wait = None

    def finish(
        self, members: Iterable[Member], kind: str, code: Result = Result.SUCCESS, reason: str = "", value: int = 0
    ) -> None:
        self._state.group_calls_ended += 1
        for member in members:
            if member.wait is not None and member.wait.kind == kind:
                self.answer(member, code, reason, value, self._state.group_calls_ended)

    def of(self, peers: Iterable[int]) -> dict[int, Wait]:
        """Return the waits of those of these peers that have one."""
        found = {peer: self._state.members[peer].wait for peer in peers}
        return {peer: wait for peer, wait in found.items() if wait is not None}

    def forget(self, member: Member) -> None:
        """Forget a peer that is gone. Its group still has it in the ring."""
        self._unlogged.pop(member.peer, None)
        if member.wait is not None:
            self._count(member, member.wait.kind, -1)

    def _count(self, member: Member, kind: str, change: int) -> None:
        for waiting in (self.waiting, self._state.group_of(member).waiting):
            waiting[kind] += change
            if not waiting[kind]:
                del waiting[kind]

    def log_long(self) -> None:
        state = self._state
        missing: dict[tuple[str, int], list[int]] = {}
        """The peers that a call waits for, by kind and, for sync_shared_state, group."""
        for peer, since in list(self._unlogged.items()):
            if state.now < since + LONG_WAIT_S:
                break
            del self._unlogged[peer]
            member = state.members[peer]
            assert member.wait is not None
            kind = member.wait.kind
            call = kind, member.hello.group if kind == Kind.SYNC else 0
            if call not in missing:
                missing[call] = state.missing(
                    state.group_of(member).ring if kind == Kind.SYNC else state.accepted, kind
                )
            if missing[call]:
                names = ", ".join(str(state.members[other]) for other in missing[call])
                state.log("info", f"{member} has waited {LONG_WAIT_S:g} s in {kind} for {names}", member.about)

    def deadlines(self) -> list[float]:
        return [since + LONG_WAIT_S for since in islice(self._unlogged.values(), 1)]


def name_stragglers(state: RunState, silent_s: Mapping[int, float]) -> None:
    """Log the peers for which the others wait. `silent_s` are peers without heartbeats, and for how many seconds."""
    if state.accepted_count > 1 and len(silent_s) >= majority(state.accepted_count):
        silent_s = {}  # more likely, this master receives nothing
    groups = [_group_scene(state, group) for group in state.groups.values() if len(group.ring) > 1]
    scene = Scene(groups, silent_s, lambda peer: str(state.members.get(peer, f"peer {peer}")))
    for change in state.stragglers.judge(scene, state.now):
        about = {"group": change.suspect.group, "peer": change.suspect.peer}
        if change.is_over:
            state.log("info", f"over after {change.for_s:.1f} s: {change.suspect.text}", about)
        else:
            state.log("warning", change.suspect.text, about)


def _group_scene(state: RunState, group: Group) -> GroupScene:
    waits = {}
    for kind in (Kind.UPDATE_TOPOLOGY, Kind.OPTIMIZE_TOPOLOGY, Kind.SYNC):
        if not group.waiting[kind] or (kind == Kind.SYNC and group.sync is not None):
            continue
        peers = group.ring if kind == Kind.SYNC else state.accepted
        missing = state.missing((peer for peer in peers if state.is_accepted(peer)), kind)
        since = [
            member.wait.since
            for peer in group.ring
            if (member := state.members.get(peer)) is not None and member.wait is not None and member.wait.kind == kind
        ]
        if missing and since:
            waits[kind] = state.now - min(since), len(since), missing
    is_running = group.running and not state.is_changing
    return GroupScene(group.number, group.ring, group.epoch, is_running, waits, group.ledger.stalled)
