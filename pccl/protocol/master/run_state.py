"""The master's state of a run: options, members, groups, numbering and outgoing messages.

`RunState` is plain data shared by the master's parts. A takeover builds it from recovery reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.completion import call_of, is_mutual, participants, ranks_of
from pccl.protocol.failover.durable_state import RunRecord, bounded_s, majority
from pccl.protocol.link_metrics import UNKNOWN, LinkMetrics
from pccl.protocol.master.statistics import History, Traffic
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.stragglers import GroupScene, Stragglers
from pccl.protocol.topology import RingProblem

ANSWER_TIMEOUTS = 3.0
"""Number of peer timeouts that an answer may take. Making a link takes less."""
NAMED_MAX = 20


@dataclass(frozen=True)
class MasterOptions:
    peer_timeout_s: float = 5.0
    engine_threads: int = 1
    hello_timeout_s: float = 10.0
    """Time limit in seconds for a connection's Hello, and then for the peer's first heartbeat."""
    answer_timeout_s: float = 90.0
    """Seconds after which an accepted peer that has not answered Flush or Prepare is evicted. The limit is at least
    ANSWER_TIMEOUTS peer timeouts."""
    connections_max: int = 4096
    pending_max: int = 1024
    connections_per_link_max: int = 64
    founders: int = 1
    """Number of first peers: newcomers wait until this many have connected, and one view admits them all."""
    run_name: str = ""
    """The user's name for the run (`Hello.run_name`)."""
    takeover_level: str = "warning"
    """The log level of a takeover."""

    @property
    def answer_limit_s(self) -> float:
        return max(self.answer_timeout_s, ANSWER_TIMEOUTS * self.peer_timeout_s)


Pair = tuple[int, int]


@dataclass
class Wait:
    call: int
    kind: str
    offer: m.SyncOffer | None
    open_ops: list[OpRef]
    since: float


@dataclass
class Member:
    """A peer that has sent Hello: pending until a view with it is installed, then accepted."""

    peer: int
    connection: int
    hello: m.Hello
    hosts: list[str]
    host: str
    since: float
    on_trial: list[int] | None = None
    """The peers to which a newcomer on trial must connect; None if it is not on trial."""
    accepted: bool = False
    wait: Wait | None = None
    heartbeat: int | None = None
    has_heartbeat: bool = False
    absence: str = ""
    """Why the peer has no control connection; empty if it has one."""

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
    """A vote on an op that the master aborts unless a peer has committed it."""

    code: int
    reason: str
    awaiting: set[int]
    is_deadlocked: bool


@dataclass
class Sync:
    number: int
    revision: int
    receivers: set[int]
    members: set[int]
    failures: dict[int, str] = field(default_factory=dict)


@dataclass
class Group:
    number: int
    ring: list[int] = field(default_factory=list)
    epoch: int = 0
    ledger: Ledger = field(default_factory=lambda: Ledger(()))
    running: bool = False
    """Whether ops may be in flight, because the ring is installed and not being flushed."""
    flush: int = 0
    awaiting_flush: set[int] = field(default_factory=set)
    commits: list[OpRef] = field(default_factory=list)
    aborts: dict[OpRef, m.Aborted] = field(default_factory=dict)
    votes: dict[OpRef, OpenAbortVote] = field(default_factory=dict)
    open_ops: set[OpRef] = field(default_factory=set)
    is_mutual: bool = False
    """Whether the peers know that the group is a mesh, and so complete ops by themselves."""
    missing: set[Pair] = field(default_factory=set)
    unreliable: set[Pair] = field(default_factory=set)
    """Pairs of non-neighbours whose links broke repeatedly and so count as missing."""
    decision: str = ""
    direct_limit: int = UNKNOWN
    is_local: bool = False
    linked: Collection[Pair] = frozenset()
    changed: bool = False
    """Whether the ring differs from the installed one, or must be re-established."""
    synced: set[int] = field(default_factory=set)
    revision: int | None = None
    sync: Sync | None = None
    accepted: int = 0
    waiting: Counter[str] = field(default_factory=Counter)

    @property
    def is_meshed(self) -> bool:
        return 1 < len(self.ring) <= topology.MESH_PEERS_MAX and not self.missing and not self.unreliable

    @property
    def linkless(self) -> set[Pair]:
        return self.missing | self.unreliable

    def participants(self, op: OpRef) -> list[int]:
        found = participants(op.tag, self.ring)
        return [peer for peer in self.ring if peer in found]

    def forget(self, peer: int) -> None:
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
    is_preparing: bool = False
    """Whether Prepare was sent for the last view but the view is not in force yet."""
    is_renewing: bool = False
    admitting: set[int] = field(default_factory=set)
    """Pending peers that the next view admits."""
    awaiting_ready: set[int] = field(default_factory=set)
    """Peers that are still making links for the last prepared view."""
    unaware: set[int] = field(default_factory=set)
    """Peers that keep their ring in the last prepared view and have not answered its Prepare."""

    def forget(self, peer: int) -> None:
        for peers in (self.admitting, self.awaiting_ready, self.unaware):
            peers.discard(peer)


class RunState:
    """The state of the run named `run`. Peers of other runs are refused."""

    def __init__(self, run: str, options: MasterOptions | None = None, term: int = 1, secret: bytes = b"") -> None:
        """`secret` proves to peers that a master knows the run."""
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
        self.members: dict[int, Member] = {}
        self.accepted_count = 0
        self.peer_of: dict[int, int] = {}
        self.groups: dict[int, Group] = {}
        self.change = ViewChange()
        self.introduced: set[int] = set()
        self.lost: list[tuple[int, str]] = []
        """Peers that are in the view in force but not in the next one, each with the reason."""
        self.kicked: set[int] = set()
        """Peers that the operator has removed."""
        self.asked_at: dict[int, float] = {}
        """Peers that have yet to answer a request, each with its time, the longest wait first."""
        self.made_in: dict[Pair, int] = {}
        self.history = History()
        self.traffic = Traffic(self.history)
        self.link_metrics = LinkMetrics()
        self.stragglers = Stragglers(lambda peer: str(self.members.get(peer, f"peer {peer}")))
        self.outbox: list[Effect] = []

    @property
    def run_name(self) -> str:
        """The master's name for the run, or that of the first peer that has one."""
        names = (member.hello.run_name for member in self.members.values() if member.hello.run_name)
        return self.options.run_name or next(names, "")

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

    def remove(self, peer: int) -> None:
        member = self.members.pop(peer)
        del self.peer_of[member.connection]
        self.accepted_count -= member.accepted
        self.asked_at.pop(peer, None)
        self.change.forget(peer)
        self.introduced.discard(peer)
        for pair in [pair for pair in self.made_in if peer in pair]:
            del self.made_in[pair]
        self.traffic.forget(peer)
        self.stragglers.gone(peer)
        self.link_metrics.gone(peer)

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
        number = self.next_number
        self.next_number += 1
        return number

    # Messages.

    def send(self, connection: int, message: m.FromMaster) -> None:
        self.outbox.append(Send(connection, message))

    def close(self, connection: int) -> None:
        self.outbox.append(Close(connection))

    def send_to(self, peer: int, message: m.FromMaster) -> None:
        self.send(self.members[peer].connection, message)

    def request(self, peer: int, message: m.FromMaster) -> None:
        self.asked_at.pop(peer, None)
        self.asked_at[peer] = self.now
        self.send_to(peer, message)

    def answered(self, member: Member) -> None:
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
        known = {"view": self.installed_view, **about}
        self.outbox.append(MasterLog(level, text, is_unauthenticated, known))
        if not is_unauthenticated:
            self.history.logged(self.now, level, text)

    def drain(self) -> list[Effect]:
        effects, self.outbox = self.outbox, []
        return effects


def name_stragglers(state: RunState, silent_s: Mapping[int, float]) -> None:
    if state.accepted_count > 1 and len(silent_s) >= majority(state.accepted_count):
        silent_s = {}  # the master itself is more likely to be cut off
    groups = [_group_scene(state, group) for group in state.groups.values() if len(group.ring) > 1]
    begun, over = state.stragglers.judge(groups, silent_s, state.now)
    for level, findings in (("warning", begun), ("info", over)):
        for found in findings:
            text = found.text if level == "warning" else f"over after {found.for_s:.1f} s: {found.text}"
            state.log(level, text, {"group": found.group, "peer": found.peer})


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


@dataclass(frozen=True)
class Send:
    connection: int
    message: m.FromMaster


@dataclass(frozen=True)
class Close:
    """Close the connection after sending everything queued earlier."""

    connection: int


@dataclass(frozen=True)
class TakeHeartbeats:
    """Answer Accepted and use this connection only for heartbeats until `silent` or `disconnected` reports its end."""

    connection: int


@dataclass(frozen=True)
class FindRings:
    """Search for the best ring of each group, which takes a while, then call `rings_found`."""

    search: int
    problems: dict[int, RingProblem]


@dataclass(frozen=True)
class MasterLog:
    level: str
    text: str
    is_unauthenticated: bool = False
    """Whether an unauthenticated client can cause this line at an arbitrary rate."""
    about: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Persist:
    """Store this record, on disk if it must survive the process, before performing any later effect."""

    record: RunRecord


Effect = Send | Close | TakeHeartbeats | FindRings | MasterLog | Persist


# The undecided ops of one group in one epoch, with the peers that reported them done.

DECIDED_TAGS_MAX = 100_000
"""Number of tags whose last verdict is remembered. Late messages concern only recent verdicts."""


class Ledger:
    def __init__(self, ring: Sequence[int], is_meshed: bool = False) -> None:
        self.ring = frozenset(ring)
        self._is_meshed = is_meshed
        self._order = tuple(ring)
        self.stalled: dict[OpRef, set[int]] = {}
        """Undecided ops, each with the peers that have waited in it for a long time."""
        self._done: dict[OpRef, set[int]] = {}
        self._decided: dict[int, int] = {}
        self._verdicts: dict[OpRef, None] = {}
        """Ops that peers usually complete by themselves but the master decided, the oldest first."""

    def done(self, peer: int, ops: Iterable[OpRef]) -> list[OpRef]:
        """Record that `peer` has done these ops; return the ops that this commits."""
        assert peer in self.ring
        committed = []
        for op in ops:
            needed = self.ring if ranks_of(op.tag) is None else participants(op.tag, self._order)
            if self.is_decided(op) or peer not in needed:
                continue
            holders = self._done.setdefault(op, set())
            holders.add(peer)
            if len(holders) == len(needed):
                self._decide(op)
                committed.append(op)
        return committed

    def decide(self, op: OpRef) -> bool:
        """Record that an op is decided, so that later reports are ignored. Return False if it already was."""
        if self.is_decided(op):
            return False
        self._decide(op)
        return True

    def forget(self, ops: Iterable[OpRef]) -> None:
        for op in ops:
            self.decide(op)

    def stall(self, peer: int, ops: Iterable[OpRef]) -> None:
        for op in ops:
            if not self.is_decided(op):
                self.stalled.setdefault(op, set()).add(peer)

    def over(self, peer: int, ops: Iterable[OpRef]) -> None:
        for op in ops:
            for book in (self.stalled, self._done):
                if op in book:
                    book[op].discard(peer)
                    if not book[op]:
                        del book[op]

    def settle(self, survivors: Collection[int]) -> list[OpRef]:
        """Return the ops to commit at the end of a flush; all others are aborted. Do not use the ledger afterwards."""
        alive = self.ring.intersection(survivors)
        commits = [op for op, holders in self._done.items() if alive & participants(op.tag, self._order) <= holders]
        self._done.clear()
        self.stalled.clear()
        return commits

    def missing(self, op: OpRef, peer: int) -> tuple[str, Iterator[int]]:
        """Return the call that a peer waits in (`call_of`), and the other peers that have not completed the op."""
        holders, ranks = self._done.get(op, set()), ranks_of(op.tag)
        if ranks is None:
            return "op", (each for each in self._order if each not in holders and each != peer)
        needed = participants(op.tag, self._order)
        rank = self._order.index(peer) if peer in needed else -1
        return call_of(op.tag, rank), (each for each in self._order if each in needed - holders - {peer})

    @property
    def undecided(self) -> int:
        return len(self._done)

    @property
    def tags(self) -> int:
        return len(self._decided)

    @property
    def entries(self) -> int:
        return len(self._done) + len(self.stalled)

    def is_decided(self, op: OpRef) -> bool:
        if is_mutual(op.tag, self._is_meshed):
            return op in self._verdicts
        return op.sequence <= self._decided.get(op.tag, -1)

    def _decide(self, op: OpRef) -> None:
        self._done.pop(op, None)
        self.stalled.pop(op, None)
        self._decided.pop(op.tag, None)
        self._decided[op.tag] = op.sequence
        if len(self._decided) > DECIDED_TAGS_MAX:
            del self._decided[next(iter(self._decided))]
        if is_mutual(op.tag, self._is_meshed):
            self._verdicts[op] = None
        if len(self._verdicts) > DECIDED_TAGS_MAX:
            del self._verdicts[next(iter(self._verdicts))]
