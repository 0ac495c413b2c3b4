"""The master: keeps membership, arbitrates outcomes, never touches payload.

Events come in through `connected`, `received`, `disconnected`, `silent` and `tick`; each returns the effects to carry
out, in order. Within one control connection order is kept, and all arguments below rest on that.

Views. `view` counts every membership that was prepared. A change runs through three stages:

    flush     a group that lost a peer (or a link) stops its ops; every survivor says which of them are done
    prepare   all peers of the next view hear of it, make the links they lack, and answer. Those that keep their
              ring only say that they have heard it, and of them only so many are waited for that no majority of the
              view in force is left who could go on with another master from there
    install   the view is in force, ops start in it

Groups are flushed and re-formed one by one: a loss in one group neither stops nor aborts ops of another. What marks
a group's ring is its epoch, the view in which it last changed. Ops are named by it, so a frame or message of an older
ring can never be taken for one of the present.

Links. A group's ring needs the links between neighbours; a pair of neighbours that cannot connect must be separated. A
small group also makes the links between all other pairs; if they all stand it is a mesh, and ops may take the direct
algorithm (`Install.is_meshed`). One that does not stand costs nothing but that. Which algorithm an op takes that is not
told also depends on the links' speeds (`direct_limit`), as they are known when the ring is installed.

A further loss during a change starts the stages it needs again; view numbers only grow. A pair that reports that it
cannot connect is resolved by the fewest evictions (`topology.fewest_evictions`); a link that breaks between two live
peers is made anew first (`Prepare.relink`), and the pair counts as failed when that does not last.

Evidence. A pair that fails says nothing about which of the two is ill: that is told by how they get on with others. So
with a link that broke all links of both ends are made anew, which tries them; and nobody is evicted for a pair before
all that was tried is known, or EVIDENCE_SHARE of the peer timeout has passed since the first failure was: what fails
for one reason fails at one time. Who was evicted for its links waits for a delay that grows (`probation`), then tries
to connect to the others while these go on, and is pending in their eyes when that has worked.

Rings. An optimize_topology measures links and has rings searched (`optimization`, `figures`); what comes of it changes
a ring as a loss does. Otherwise a ring keeps its order: who is lost is left out, and newcomers come where they hurt
least.

Silence. Beside its control connection each peer keeps one that carries nothing but signs of life. Who falls silent
there for `peer_timeout_s` is evicted, in whatever stage anything else is; so is one whose connection was closed and who
has made no other within that time. The runtime watches the connections and says `silent` or `disconnected`. A newcomer
is not admitted before it has one, so that whoever may hold up the others can be missed.

One peer's silence is the peer's, also that of the only one. Where most peers of a view fall silent at once, by signs of
life that are late by half that time already, it is rather this master that hears nobody: it is `deposed` then, and
evicts none of them. Unless it does hear others: newcomers count as those of the view do. So it is where most are silent
or absent when the first of them would be lost for want of a sign or a connection.

Absence. A peer whose control connection breaks dials again and goes on in its session (`control_session`): the runtime
says `detached`, then `reattached`, and until then the peer is absent: it is told nothing, and what is said to it waits.
A peer that has died must not be waited for, so:

    1  An absent peer whose signs of life stand lives. It is kept for `peer_timeout_s`, and lost after that.
    2  When a process ends, its signs of life and its links end, too. So one whose signs of life have ended as well is
       lost at once when all its witnesses, and at least one, have lost their links with it, or failed to make them. Its
       witnesses are the peers of its ring that have a link with it and are not absent, newcomers only if there is
       nobody else. Who is still making its link with it is none: it may wait for the dead to dial.
    3  One that has no witness, because it is alone in its group or the others are absent, is kept as in 1: if all are
       gone at once, the network is more likely to have failed here than all of them there. So of several peers
       nobody is lost by 1 while most are absent or silent: this master is `deposed`.
    4  A pending peer is kept as in 1, unless it holds up others since it is being admitted: then it is lost as soon as
       both have ended, for it loses nothing by starting over. An
       absent one is not admitted, and a pair that cannot connect is not judged while one of the two is absent.
    5  Who dies without a word, with its machine, is silent.

A witness that is wrong, because all connections of a living peer are reset at once, costs what it costs without a
session: an eviction. The links that witnesses have lost are forgotten when a view is installed that has made them anew.

Ops. Peers start ops without asking. In a group that is a mesh they end them without asking, too (`agreement`): the
master hears of an op that takes long, or that somebody gives up, and what was committed when a flush asks. Of others
it hears every end, see `ledger`. A verdict of the master is made once and sent to each peer of the ring before anything
that follows from it.

Tags. Every peer counts the uses of each tag, from 0 in every epoch. A group that has used very many tags begins a new
epoch with the ring that it has, as after a loss, when it is quiet: so whoever takes a new tag for every step may.

Joint calls. A peer waits in one at a time. A call is complete when all accepted peers (of the group for
sync_shared_state, of the run otherwise) wait in it. Whoever is lost is taken out of it. How a sync then ends is told
after the Prepare that leaves the lost one out, so that no master after this one takes it for one of those who were
brought up (`testimony`).

Nothing could ever end the wait if all peers of a group wait and not all for the same, if all peers of the run wait for
its calls and not all for the same, or if one waits in a call while another has long waited for an op that only the
first could launch. Then those who are in are_peers_pending are told no; if there are none, the calls (and the op) fail
with INVALID_USAGE and an account of who waits in what.

Sites. Peers that work as one, such as the ranks that share a model's shards, name a common site and its size. None is
pending in the eyes of the others before so many are there, one view admits them all, and when one is lost the others of
its site are evicted in the same event. So every group sees the same sites come and go, in the same views. A peer that
leaves on purpose leaves alone.

Meetings. Joint calls that ended for all who were to make them are counted. So when a master has died and some heard
the end of one and others not, it can be told whose wait is for that one. See `testimony`.

Rivals. Where peers know of several masters, those that this one loses may follow another. It then leads no further once
it has lost a majority of the view in force: it is `deposed`, and whoever has a majority takes over. So it is, until its
first view is in force, with every view that may be at somebody whom it has not heard (`testimony`). A peer that leaves
does not count. See `succession`, which drives this machine and replaces it.

A peer is here unknown (connected), then pending (Hello), accepted (Install of a view that has it), gone.

Cost. What happens on every message takes no longer with more peers: who waits in what is counted, and what is due at
some time is kept in the order of that time. Only a view, a verdict or the end of a joint call goes through all peers,
and a message to many is one object, so that it can be encoded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, ClassVar

from pccl.protocol import agreement, optimization, topology
from pccl.protocol import messages as m
from pccl.protocol.direct_limit import UNKNOWN, direct_limit, is_outdated
from pccl.protocol.election import NotElected, elect
from pccl.protocol.fence import Fence, FencedView, bounded_s
from pccl.protocol.figures import Figures
from pccl.protocol.history import History
from pccl.protocol.insertion import with_newcomers
from pccl.protocol.ledger import Ledger
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.optimization import Optimization
from pccl.protocol.pairs import callers_tag, parties, ranks_of
from pccl.protocol.probation import Probation
from pccl.protocol.returning import Returning
from pccl.protocol.ring_problem import RingProblem
from pccl.protocol.throughput import Throughput
from pccl.protocol.traffic import Traffic
from pccl.types import Result

EVIDENCE_SHARE = 0.1
"""Of the peer timeout: for how long failures of links are gathered before somebody is evicted for them."""
RELINKS_MAX = 3
"""How often a pair's link is made anew without an op being committed in between."""
STALLS_LOGGED_MAX = 3
NAMED_MAX = 20
"""Peers that a line of the log names at most."""
HOSTS_MAX = 16
NAME_CHARACTERS_MAX = 255
SITE_PEERS_MAX = 2**12
ANSWER_TIMEOUTS = 3.0
"""More than the peer timeouts that making a link may take, of which an answer tells."""
OPEN_OPS_MAX = 2**18
"""Undecided ops of a group. Peers have far fewer in flight; one that names more is making them up."""
QUIET_SHARE = 0.5
"""Of the peer timeout: of a connection that has carried no sign of life for so long, several are missing."""
LONG_WAIT_S = 10.0
"""A joint call that waits longer is logged once, with whom it waits for."""


@dataclass(frozen=True)
class MasterOptions:
    peer_timeout_s: float = 5.0
    """How long a peer may give no sign of life."""
    engine_threads: int = 1
    """Of each peer, up to ENGINE_THREADS_MAX."""
    hello_timeout_s: float = 10.0
    """How long a connection may stay silent before it says Hello, and a peer then until its first sign of life."""
    answer_timeout_s: float = 90.0
    """How long an accepted peer may take to answer Flush or Prepare before it is evicted; ANSWER_TIMEOUTS peer timeouts
    at least."""
    connections_max: int = 4096
    pending_max: int = 1024
    """How many peers may wait to be accepted."""
    connections_per_link_max: int = 64

    @property
    def answer_limit_s(self) -> float:
        return max(self.answer_timeout_s, ANSWER_TIMEOUTS * self.peer_timeout_s)


# Effects.


@dataclass(frozen=True)
class Send:
    connection: int
    message: m.FromMaster


@dataclass(frozen=True)
class Close:
    """Close after what was sent before has left."""

    connection: int


@dataclass(frozen=True)
class TakeBeats:
    """Answer Accepted, and exchange nothing but signs of life from then on. Its end is `silent` or `disconnected`."""

    connection: int


@dataclass(frozen=True)
class FindRings:
    """Look for the best ring of each group, which takes time, then call `rings_found`."""

    search: int
    problems: dict[int, RingProblem]


@dataclass(frozen=True)
class Log:
    level: str
    """debug, info or warning."""
    text: str
    is_of_stranger: bool = False
    """Anybody can cause it, as often as they like."""
    about: Mapping[str, int] = field(default_factory=dict)
    """As in `pccl.logs.FIELDS`."""


@dataclass(frozen=True)
class Persist:
    """Remember this, where it is to outlast the process on disk, before any effect that follows is carried out."""

    fence: Fence


Effect = Send | Close | TakeBeats | FindRings | Log | Persist


@dataclass
class _Wait:
    """A peer's part in a joint call."""

    call: int
    kind: str
    offer: m.SyncOffer | None
    open_ops: list[OpRef]
    """What the peer had in flight when it called."""
    since: float


def _parties(group: _Group, op: OpRef) -> list[int]:
    """Those whose op it is, in the order of the ring."""
    found = parties(op.tag, group.ring)
    return [peer for peer in group.ring if peer in found]


def majority(peers: int) -> int:
    return peers // 2 + 1


def _account(waits: Mapping[int, _Wait]) -> str:
    return ", ".join(f"peer {peer} in {wait.kind}" for peer, wait in sorted(waits.items()))


def _is_name(text: str) -> bool:
    """Harmless in a log and in a message to all peers."""
    return len(text) <= NAME_CHARACTERS_MAX and text.isprintable()


@dataclass
class _Member:
    peer: int
    connection: int
    hello: m.Hello
    hosts: list[str]
    host: str
    """Where it has said Hello from."""
    since: float
    """When it said Hello."""
    on_trial: list[int] | None = None
    """A newcomer that was evicted for its links before and has yet to show that they carry: with whom it tries them;
    None of all others."""
    accepted: bool = False
    wait: _Wait | None = None
    beats: int | None = None
    """The connection that carries its signs of life."""
    has_beaten: bool = False
    absence: str = ""
    """How its control connection was lost; empty: it stands."""

    @property
    def master_timeout_s(self) -> float:
        return bounded_s(self.hello.master_timeout_s, m.MASTER_TIMEOUT_S)

    @property
    def about(self) -> dict[str, int]:
        """For the log."""
        return {"group": self.hello.group, "peer": self.peer}

    def as_record(self) -> m.Member:
        return m.Member(
            self.peer, self.hello.group, self.hosts, self.hello.port, self.hello.connections, self.hello.name
        )

    def __str__(self) -> str:
        name = f" ({self.hello.name})" if self.hello.name else ""
        return f"peer {self.peer}{name}"


@dataclass
class Circle:
    """Peers of a view, of whom a majority could go on with another master."""

    size: int
    """How many there were, without those who have left it on purpose since."""
    here: frozenset[int]
    """Who is neither lost nor has left."""

    @property
    def gone(self) -> int:
        """How many were lost."""
        return self.size - len(self.here)


@dataclass
class _Withdrawal:
    """An op that shall be aborted unless somebody has committed it."""

    code: int
    reason: str
    awaiting: set[int]
    """Who has still to say."""
    is_hopeless: bool
    """Nothing else would end the joint calls of those who seem never to have launched it."""


@dataclass
class _Group:
    number: int
    ring: list[int] = field(default_factory=list)
    epoch: int = 0
    ledger: Ledger = field(default_factory=lambda: Ledger(()))
    running: bool = False
    """Ops may be in flight: the ring is installed and not being flushed."""
    flush: int = 0
    awaiting_flush: set[int] = field(default_factory=set)
    commits: list[OpRef] = field(default_factory=list)
    """Verdicts of the last flush, to be told with the next Prepare."""
    aborts: dict[OpRef, m.Aborted] = field(default_factory=dict)
    """Of the ops that this flush aborts, those that have a reason of their own."""
    withdrawals: dict[OpRef, _Withdrawal] = field(default_factory=dict)
    open_ops: set[OpRef] = field(default_factory=set)
    """Those that this flush has found done and without a verdict at somebody."""
    agrees: bool = False
    """Its peers have been told that it is a mesh."""
    missing: set[tuple[int, int]] = field(default_factory=set)
    """Pairs that have no link and need none: the group is no mesh."""
    unreliable: set[tuple[int, int]] = field(default_factory=set)
    """Pairs that are no neighbours and whose link broke again and again: as if it were missing."""
    decision: str = ""
    """What the last optimize_topology came to, and why."""
    direct_limit: int = UNKNOWN
    """Of the ring in force."""
    is_local: bool = False
    linked: Collection[tuple[int, int]] = frozenset()
    """The pairs whose links stood when the ring in force was installed."""
    changed: bool = False
    """The ring differs from the installed one, or must be made anew."""
    synced: set[int] = field(default_factory=set)
    """Incumbents: peers of the last sync that are still here."""
    revision: int | None = None
    sync: _Sync | None = None
    accepted: int = 0
    """How many of the ring are accepted."""
    waiting: Counter[str] = field(default_factory=Counter)
    """How many of them wait in each kind of joint call."""

    @property
    def is_meshed(self) -> bool:
        return 1 < len(self.ring) <= topology.MESH_PEERS_MAX and not self.missing and not self.unreliable


@dataclass
class _Sync:
    number: int
    revision: int
    receivers: set[int]
    members: set[int]
    donors: list[int]
    failures: dict[int, str] = field(default_factory=dict)
    """Who could not be brought up, and why."""


class Master:
    """One run. `run` names it; peers of another run are refused."""

    def __init__(self, run: str, options: MasterOptions | None = None, term: int = 1, secret: bytes = b"") -> None:
        """`secret` is the run's, by which its peers tell masters that know it from others."""
        self.run = run
        self.secret = secret
        self.term = term
        self.options = options or MasterOptions()
        self.view = 0
        """The last view prepared."""
        self.installed_view = 0
        self.history = History()
        self.traffic = Traffic(self.history)
        self.figures = Figures()
        """What is known of the links between peers."""
        self.throughput = Throughput()
        self._effects: list[Effect] = []
        self._now = 0.0
        self._next_peer = 1
        self._next_number = 1
        self._strangers: dict[int, tuple[str, float]] = {}
        """Connections without Hello: address and when they came."""
        self._peer_of: dict[int, int] = {}
        self._beats: dict[int, int] = {}
        """Connections for signs of life, and whose they are."""
        self._members: dict[int, _Member] = {}
        self._accepted = 0
        """How many of them are accepted."""
        self._waiting: Counter[str] = Counter()
        """How many of them wait in each kind of joint call."""
        self._asked_at: dict[int, float] = {}
        """Since when an answer to Flush or Prepare is due, longest first."""
        self._first_beats_due_at: dict[int, float] = {}
        """Newcomers without a connection for signs of life, longest first, and when there must be one."""
        self._beats_due_at: dict[int, float] = {}
        """The same of those whose connection for signs of life broke off."""
        self.returning = Returning()
        """The same of those who have followed this master from another one."""
        self._absent_until: dict[int, float] = {}
        """Peers without a control connection, longest first, and when they are lost."""
        self._cut: set[tuple[int, int]] = set()
        """Who has lost its link with whom since it was made."""
        self._suspects: set[int] = set()
        """Of whom there is new evidence that they might have died."""
        self._unlogged: dict[int, float] = {}
        """Who waits in a joint call, and since when, longest first; without those whose wait was logged."""
        self._told: set[int] = set()
        """Peers of the last Prepare, all of whom know of each other."""
        self._groups: dict[int, _Group] = {}
        self._admitting: set[int] = set()
        """Pending peers that the next view takes in."""
        self._awaiting_ready: set[int] = set()
        self._unaware: set[int] = set()
        """Who keeps its ring in the last view that was prepared, and has not said that it has heard of it."""
        self._failed_pairs: dict[tuple[int, int], str] = {}
        self._given_up: set[tuple[int, int]] = set()
        """Pairs, needed or not, whose dialer has said that they cannot connect; of the view that is prepared."""
        self._evidence_due_at: float | None = None
        """When it is settled who is evicted for these, known or not."""
        self._probation = Probation(self.options.peer_timeout_s)
        self._trials_due_at: dict[int, float] = {}
        """Newcomers that were evicted for their links before, and when they may try these again."""
        self._relink: set[tuple[int, int]] = set()
        """Pairs whose link must be made anew by the next Prepare."""
        self._made_in: dict[tuple[int, int], int] = {}
        self._relinks: dict[tuple[int, int], int] = {}
        self._lost: list[tuple[int, str]] = []
        self._broken_sites: dict[str, str] = {}
        """Sites of which a peer was lost, and why: the others follow."""
        self._preparing = False
        self._updating = False
        """update_topology is complete and waits for Install."""
        self._optimization: Optimization | None = None
        self.evicted: set[int] = set()
        """Accepted peers that this master has put out of its run."""
        self._in_force: FencedView | None = None
        self._possible: list[FencedView] = []
        """Views that may be in force, of a master before this one; until this one has one in force."""
        self._parted: set[int] = set()
        """Peers of the view in force that are not expected back: they have left, or were evicted."""
        self._quiet: set[int] = set()
        """Peers whose signs of life are late, as was said last."""
        self.deposed = ""
        """Why this master must lead no further; empty: it may."""
        self.has_rivals = False
        """Peers know of other masters."""
        self._circles: list[Circle] = []
        """The view in force; where a master before this one has left others that may be, those too."""
        self._meeting = 0
        """Joint calls that ended for all who were to make them."""
        self._unheard: dict[int, m.Met] = {}
        """Who waits in a joint call that has ended under a master before this one, and how."""
        self._renewing = False
        """A new view is due though no group has changed."""

    # Events.

    def connected(self, connection: int, host: str, now: float) -> list[Effect]:
        """A control connection was accepted from `host`."""
        self._now = now
        if len(self._strangers) + len(self._members) + len(self._beats) >= self.options.connections_max:
            self._say(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, "the master has too many connections"))
            self._effects.append(Close(connection))
        else:
            self._strangers[connection] = (host, now)
        return self._drain()

    def received(self, connection: int, message: m.FromPeer, now: float) -> list[Effect]:
        self._now = now
        if connection in self._strangers:
            self._stranger_said(connection, message)
        elif connection in self._peer_of:
            member = self._members[self._peer_of[connection]]
            handler = self._HANDLERS.get(type(message))
            if handler is None or (not member.accepted and type(message) not in self._BEFORE_ACCEPTANCE):
                self._evict(member.peer, f"unexpected {type(message).__name__}", Result.INVALID_USAGE)
            else:
                handler(self, member, message)
        # else: it was evicted and its last words crossed ours.
        self._advance()
        return self._drain()

    def disconnected(self, connection: int, reason: str, now: float) -> list[Effect]:
        """The connection is gone, or what came over it was no message."""
        self._now = now
        self._strangers.pop(connection, None)
        if connection in self._peer_of:
            self._remove(self._peer_of[connection], reason)
            self._advance()
        elif connection in self._beats:
            member = self._members[self._beats.pop(connection)]
            member.beats = None
            self._beats_due_at[member.peer] = now + self.options.peer_timeout_s
            self._log("info", f"{member}: its signs of life broke off: {reason}", member.about)
            self._suspects.add(member.peer)
            self._advance()
        return self._drain()

    def detached(self, connection: int, reason: str, now: float) -> list[Effect]:
        """The connection is gone, and its session may go on over another one, unless the effects have a Close of it."""
        self._now = now
        if connection not in self._peer_of:
            self._effects.append(Close(connection))
            return self.disconnected(connection, reason, now)
        member = self._members[self._peer_of[connection]]
        member.absence = reason
        self._absent_until[member.peer] = now + self.options.peer_timeout_s
        self._suspects.add(member.peer)
        self._suspect_cut()
        self._log("info", f"{member} has lost its control connection: {reason}", member.about)
        self._advance()
        return self._drain()

    def reattached(self, connection: int, now: float) -> list[Effect]:
        """The session goes on."""
        self._now = now
        member = self._members[self._peer_of[connection]]
        member.absence = ""
        self._absent_until.pop(member.peer, None)
        self._log("info", f"{member} has another control connection", member.about)
        self._advance()
        return self._drain()

    def note_quiet(self, connections: Iterable[int]) -> None:
        """Over these connections no sign of life has come for QUIET_SHARE of the peer timeout. To be said before any
        event that may mean a loss."""
        self._quiet = {self._beats[connection] for connection in connections if connection in self._beats}

    def silent(self, connection: int, silent_s: float, now: float) -> list[Effect]:
        """No sign of life has come over this connection for so long. It is closed."""
        self._now = now
        peer = self._beats.pop(connection, None)
        if peer is not None:
            self._members[peer].beats = None
            self._evict_silent(peer, f"silent for {silent_s:.1f} s")
            self._advance()
        return self._drain()

    def rings_found(self, search: int, rings: Mapping[int, Sequence[int]], now: float) -> list[Effect]:
        """What a search has come to, by group."""
        self._now = now
        course = self._optimization
        if course is not None and course.is_searching and course.number == search:
            course.found(rings)
            self._advance()
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        self._now = now
        for connection, (host, since) in list(self._strangers.items()):
            if now >= since + self.options.hello_timeout_s:
                del self._strangers[connection]
                self._log(
                    "info", f"{host}: no Hello within {self.options.hello_timeout_s:g} s, closed", is_of_stranger=True
                )
                self._effects.append(Close(connection))
        for peer in list(self._asked_at):
            # Looked up one by one: an eviction may ask others anew.
            if now >= self._asked_at[peer] + self.options.answer_limit_s:
                self._evict(peer, f"did not answer the master within {self.options.answer_limit_s:g} s")
        silent = [
            (peer, allowed_s)
            for due_at, allowed_s in (
                (self._first_beats_due_at, self.options.hello_timeout_s),
                (self._beats_due_at, self.options.peer_timeout_s),
            )
            for peer, _ in takewhile(lambda due: now >= due[1], due_at.items())
        ]
        silent += [(peer, now - self.returning.since) for peer in self.returning.late(now)]
        for peer, silent_s in silent:
            self._evict_silent(peer, f"silent for {silent_s:.1f} s")
            if self.deposed:
                return self._drain()
        for peer, until in list(self._absent_until.items()):
            if now >= until and peer in self._absent_until:
                self._lose_late(peer, f"not back within {self.options.peer_timeout_s:g} s")
                if self.deposed:
                    return self._drain()
        for peer in [peer for peer, due_at in self._trials_due_at.items() if now >= due_at]:
            self._try_links(self._members[peer])
        if self._optimization is not None:
            self._log_unmeasured(self._optimization.expire(now))
        self._log_long_waits()
        self._advance()
        return self._drain()

    def deadline(self) -> float | None:
        """When `tick` should be called next. Of one that is deposed nothing is due."""
        if self.deposed:
            return None
        times = [since + self.options.hello_timeout_s for _, since in islice(self._strangers.values(), 1)]
        times += [asked_at + self.options.answer_limit_s for asked_at in islice(self._asked_at.values(), 1)]
        times += [since + LONG_WAIT_S for since in islice(self._unlogged.values(), 1)]
        times += [self.evidence_due_at] if self.evidence_due_at is not None else []
        times += self._trials_due_at.values()
        times += islice(self._first_beats_due_at.values(), 1)
        times += islice(self._beats_due_at.values(), 1)
        times += [self.returning.until] if self.returning.peers else []
        times += islice(self._absent_until.values(), 1)
        if self._optimization is not None and (ends_at := self._optimization.deadline()) is not None:
            times.append(ends_at)
        return min(times, default=None)

    # What tests and reports may look at.

    @property
    def accepted(self) -> list[int]:
        return [peer for peer, member in self._members.items() if member.accepted]

    @property
    def pending(self) -> list[int]:
        return [peer for peer, member in self._members.items() if not member.accepted]

    @property
    def admissible(self) -> list[int]:
        """Those pending who show signs of life and are neither absent nor on trial, if so are all of their site. With
        nobody in the run there is nobody to be kept from."""
        pending = [member for member in self._members.values() if not member.accepted]
        alive = [
            member
            for member in pending
            if member.has_beaten and not member.absence and (member.on_trial is None or not self._accepted)
        ]
        found = Counter(member.hello.site for member in alive)
        return [each.peer for each in alive if not each.hello.site or found[each.hello.site] == each.hello.site_size]

    def ring(self, group: int) -> list[int]:
        return list(self._groups[group].ring) if group in self._groups else []

    @property
    def strangers(self) -> dict[int, str]:
        """Connections that have said nothing yet, and their hosts."""
        return {connection: host for connection, (host, _) in self._strangers.items()}

    def is_accepted(self, peer: int) -> bool:
        return peer in self._members and self._members[peer].accepted

    def is_member(self, connection: int) -> bool:
        """It is a peer's control connection."""
        return connection in self._peer_of

    def connection_of(self, peer: int) -> int | None:
        return self._members[peer].connection if peer in self._members else None

    def host_of(self, stranger: int) -> str | None:
        """None if this connection is none, or has said something."""
        return self._strangers[stranger][0] if stranger in self._strangers else None

    @property
    def evidence_due_at(self) -> float | None:
        """When somebody is evicted for links that cannot be made, whatever else is heard; None: nobody is to be, or
        that waits for something else than time, such as an absent peer."""
        due_at = self._evidence_due_at
        return due_at if due_at is not None and due_at > self._now else None

    @property
    def is_vacant(self) -> bool:
        """It has met no peer yet, or all are gone."""
        return not self._members

    @property
    def is_deserted(self) -> bool:
        """All connections of all accepted peers were closed, as when their processes end together."""
        return all(member.absence and member.beats is None for member in self._members.values() if member.accepted)

    @property
    def is_changing(self) -> bool:
        is_regrouping = any(group.awaiting_flush or group.changed for group in self._groups.values())
        return self._preparing or self._renewing or is_regrouping

    def fence(self, prepared: Sequence[FencedView] = (), is_over: bool = False) -> Fence:
        """The record of this run as it stands; `prepared` by this master."""
        longest_s = max((member.master_timeout_s for member in self._members.values()), default=m.MASTER_TIMEOUT_S)
        views = [*self._possible, *prepared]
        return Fence(self.run, self.secret, self.term, self._in_force, views, is_over, longest_s)

    def abdicate(self, reason: str) -> list[Effect]:
        """Lets go of all peers, who may follow another master. Nothing may happen to this one any more."""
        for member in self._members.values():
            self._say(member.connection, m.Elsewhere(reason))
            self._effects.append(Close(member.connection))
        self._effects += [Close(connection) for connection in self._beats]
        return self._drain()

    # Arrivals and departures.

    def _stranger_said(self, connection: int, message: m.FromPeer) -> None:
        host, _ = self._strangers.pop(connection)
        if isinstance(message, m.BeatHello):
            self._beat_hello(connection, host, message)
            return
        refusal = None
        if not isinstance(message, m.Hello):
            refusal = f"the first message must be Hello, not {type(message).__name__}"
        elif message.protocol != m.PROTOCOL_VERSION:
            refusal = (
                f"this master speaks protocol {m.PROTOCOL_VERSION}, the peer {message.protocol} (pccl "
                f"{message.version}); install the same version on both"
            )
        elif not 0 <= message.group < 2**32:
            refusal = f"peer_group {message.group} is not within [0, 2**32)"
        elif not 0 < message.port < 65536:
            refusal = f"the peer's listening port {message.port} is not a port"
        elif not 1 <= message.connections <= self.options.connections_per_link_max:
            refusal = (
                f"p2p_connection_pool_size {message.connections} is not within "
                f"[1, {self.options.connections_per_link_max}]"
            )
        elif len(message.hosts) > HOSTS_MAX or not all(map(_is_name, [*message.hosts, message.name, message.version])):
            refusal = (
                f"its hosts, name and version must be printable, {NAME_CHARACTERS_MAX} characters each at most, and "
                f"{HOSTS_MAX} hosts at most"
            )
        elif len(self._members) - self._accepted >= self.options.pending_max:
            refusal = f"{self.options.pending_max} peers wait to be accepted already; try again later"
        else:
            refusal = self._site_refusal(message)
        if refusal is not None:
            self._refuse(connection, host, refusal)
            return
        assert isinstance(message, m.Hello)
        peer = self._next_peer
        self._next_peer += 1
        hosts = [*message.hosts, host] if host not in message.hosts else list(message.hosts)
        member = self._members[peer] = _Member(peer, connection, message, hosts, host, self._now)
        obstacle = self._hold_back(member)
        self.has_rivals = self.has_rivals or message.masters > 1
        self._peer_of[connection] = peer
        self.figures.arrived(peer, hosts)
        self._first_beats_due_at[peer] = self._now + self.options.hello_timeout_s
        welcome = m.Welcome(
            peer,
            self.run,
            self.term,
            self._accepted,
            peer_timeout_s=self.options.peer_timeout_s,
            engine_threads=self.options.engine_threads,
            secret=self.secret,
            obstacle=obstacle,
        )
        self._say(connection, welcome)
        held = f"; {obstacle}" if obstacle else ""
        self._log("info", f"{member} from {host} wants to join group {message.group}{held}", member.about)

    def _hold_back(self, member: _Member) -> str:
        """What the newcomer is told to be waiting for; empty: nothing but the others."""
        record = self._probation.record(member.host, member.hello.name, self._now)
        if record is None:
            return ""
        member.on_trial = []
        self._trials_due_at[member.peer] = record.until
        return (
            f"a peer of this host and name was evicted for its links {record.evictions} times, so it is let in once it "
            f"has connected to the others, which it may try in {max(0.0, record.until - self._now):.3g} s"
        )

    def _try_links(self, member: _Member) -> None:
        """Has it connect to those that it would have links with, or to some of them."""
        del self._trials_due_at[member.peer]
        ring = self.ring(member.hello.group)
        others = list(islice((peer for peer in ring if self.is_accepted(peer)), topology.MESH_PEERS_MAX))
        member.on_trial = others or None
        if others:
            self._say(member.connection, m.Trial([self._members[peer].as_record() for peer in others]))

    def _on_tried(self, member: _Member, message: m.Tried) -> None:
        others = [peer for peer in member.on_trial or () if peer in self._members]
        failed = {peer: why for peer, why in message.failed if peer in others}
        if member.accepted or not others or 2 * len(failed) < len(others):
            member.on_trial = None
            return
        delay_s = self._probation.evicted(member.host, member.hello.name, self._now)
        self._trials_due_at[member.peer] = self._now + delay_s
        other, why = next(iter(failed.items()))
        self._log(
            "warning",
            f"{member} cannot connect to {len(failed)} of {len(others)} peers and is not let in; it may try again in "
            f"{delay_s:.3g} s. Of peer {other} it says: {why}",
            member.about,
        )

    def _site_refusal(self, hello: m.Hello) -> str | None:
        if not hello.site:
            return None
        if not _is_name(hello.site):
            return f"its site's name must be printable and {NAME_CHARACTERS_MAX} characters at most"
        if not 1 <= hello.site_size <= SITE_PEERS_MAX:
            return f"site_size {hello.site_size} is not within [1, {SITE_PEERS_MAX}]"
        mates = [member for member in self._members.values() if member.hello.site == hello.site]
        sizes = {mate.hello.site_size for mate in mates} - {hello.site_size}
        if sizes:
            return f"site {hello.site!r} has {sizes.pop()} peers by what others of it say, not {hello.site_size}"
        if len(mates) >= hello.site_size or any(mate.accepted for mate in mates):
            return f"site {hello.site!r} is here already; give every start of a site a name of its own"
        return None

    def _beat_hello(self, connection: int, host: str, message: m.BeatHello) -> None:
        member = self._members.get(message.peer)
        if message.protocol != m.PROTOCOL_VERSION or message.run != self.run or member is None:
            # As a rule it was evicted, and learns why on the other connection.
            self._refuse(connection, host, f"peer {message.peer} of run {message.run!r} is not in this run", "info")
            return
        if member.beats is not None:
            # The peer has found it closed before we have.
            self._close_beats(member)
        self._beats[connection] = member.peer
        member.beats = connection
        member.has_beaten = True
        self._first_beats_due_at.pop(member.peer, None)
        self._beats_due_at.pop(member.peer, None)
        self.returning.came(member.peer, self._now)
        self._effects.append(TakeBeats(connection))

    def _close_beats(self, member: _Member) -> None:
        if member.beats is not None:
            del self._beats[member.beats]
            self._effects.append(Close(member.beats))
            member.beats = None

    def _refuse(self, connection: int, host: str, reason: str, level: str = "warning") -> None:
        self._log(level, f"{host} refused: {reason}", is_of_stranger=True)
        self._say(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, reason))
        self._effects.append(Close(connection))

    def _evict(self, peer: int, reason: str, code: Result = Result.MASTER_CONNECTION_FAILED) -> None:
        member = self._members[peer]
        if member.accepted:  # others have no run to come back to, and anybody could make these more and more
            self.evicted.add(peer)
            self._parted.add(peer)
        self._say(member.connection, m.Goodbye(code, f"evicted: {reason}"))
        self._effects.append(Close(member.connection))
        self._remove(peer, f"evicted: {reason}")

    def _lose(self, peer: int, reason: str = "") -> None:
        """One that is absent."""
        member = self._members[peer]
        self._effects.append(Close(member.connection))
        self._remove(peer, "; ".join(filter(None, [member.absence, reason])))

    def _lose_dead(self) -> bool:
        """Those of the suspects that have died, by all evidence."""
        lost = False
        while self._suspects:
            peer = self._suspects.pop()
            if peer in self._absent_until and self._is_dead(self._members[peer]):
                self._lose(peer)
                lost = True
        return lost

    def _suspect_cut(self) -> None:
        """A witness is gone: the word of the others may suffice now."""
        self._suspects.update(other for _, other in self._cut if other in self._absent_until)

    def _is_dead(self, member: _Member) -> bool:
        if not member.absence or member.beats is not None:
            return False
        group = self._groups.get(member.hello.group)
        if not member.accepted:
            return member.has_beaten and self._accepted > 0 and group is not None and member.peer in group.ring
        witnesses = self._witnesses(member)
        return bool(witnesses) and all((peer, member.peer) in self._cut for peer in witnesses)

    def _witnesses(self, member: _Member) -> list[int]:
        group = self._groups[member.hello.group]
        linkless = group.missing | group.unreliable
        found = [
            peer
            for peer in topology.linked_peers(group.ring, member.peer)
            if not self._members[peer].absence and topology.pair(peer, member.peer) not in linkless
        ]
        found = [peer for peer in found if self._members[peer].accepted] or found
        return [
            peer for peer in found if (peer, member.peer) in self._cut or not self._is_being_made(group, peer, member)
        ]

    def _is_being_made(self, group: _Group, peer: int, member: _Member) -> bool:
        """Whether `peer` is only about to have a link with `member`, as far as it has said. It may be waiting for that
        one to dial."""
        if not self._preparing or peer not in self._awaiting_ready:
            return False
        pair = topology.pair(peer, member.peer)
        return pair not in group.linked or self._made_in.get(pair) == self.view

    def _lose_late(self, peer: int, reason: str) -> None:
        """One that is absent and was expected back."""
        if not self._is_own_outage(peer):
            self._lose(peer, reason)

    def _evict_silent(self, peer: int, reason: str) -> None:
        if self._members[peer].absence:
            self._lose_late(peer, reason)  # a host that closes connections is there, and the peer may come back
        elif not self._is_own_outage(peer):
            self._evict(peer, reason)

    def _is_own_outage(self, peer: int) -> bool:
        """That this peer is missed is rather this master's fault, which is deposed then."""
        if self.is_accepted(peer) and self._accepted > 1 and self.has_lost_sight(but_of=peer):
            self.deposed = (
                f"most of its {self._accepted} peers have lost their connections to it or given no sign of life since "
                f"about the same time, as if its own network were out"
            )
        return bool(self.deposed)

    def has_lost_sight(self, but_of: int) -> bool:
        """Of most of the accepted peers this master has no sign of life either, and of most of all who have given any:
        their connections for them are late or gone. `but_of` is one of them."""
        lost: Counter[bool] = Counter()
        """Of those who are accepted, and of the others."""
        beaten = 0
        for peer, member in self._members.items():
            is_gone = (member.beats is None and member.has_beaten) or bool(member.absence)
            lost[member.accepted] += peer == but_of or peer in self._quiet or is_gone
            beaten += member.accepted or member.has_beaten
        return lost[True] >= majority(self._accepted) and lost.total() >= majority(beaten)

    def _remove(self, peer: int, reason: str, is_leaving: bool = False) -> None:
        member = self._members.pop(peer)
        del self._peer_of[member.connection]
        self._close_beats(member)
        if is_leaving and member.accepted:
            self._parted.add(peer)
        for by_peer in (self._asked_at, self._beats_due_at, self._absent_until, self._unlogged, self._unheard):
            by_peer.pop(peer, None)
        self._trials_due_at.pop(peer, None)
        self._first_beats_due_at.pop(peer, None)
        self.returning.gone(peer)
        self.traffic.forget(peer)
        if member.hello.site and not is_leaving:
            self._broken_sites.setdefault(member.hello.site, f"peer {peer} of its site was lost: {reason}")
        self._told.discard(peer)
        self._admitting.discard(peer)
        self._awaiting_ready.discard(peer)
        self._unaware.discard(peer)
        self._relink = {pair for pair in self._relink if peer not in pair}
        self._cut = {pair for pair in self._cut if peer not in pair}
        self._suspect_cut()
        self._failed_pairs = {pair: why for pair, why in self._failed_pairs.items() if peer not in pair}
        for history in (self._made_in, self._relinks):
            for pair in [pair for pair in history if peer in pair]:
                del history[pair]
        self._log(
            "info", f"{member} {'lost' if member.accepted else 'gone before it was accepted'}: {reason}", member.about
        )
        self.figures.gone(peer)
        self.throughput.forget(peer)
        if self._optimization is not None:
            self._optimization.lost(peer)
        group = self._groups.get(member.hello.group)
        if group is None or peer not in group.ring:
            return
        if member.accepted:
            self._lost.append((peer, reason))
            if is_leaving:
                self.history.left(self._now)
            else:
                self.history.lost(self._now, peer, member.hello.name, member.hello.group, reason)
            self._note_gone(peer, is_leaving)
            self._accepted -= 1
            group.accepted -= 1
            if member.wait is not None:
                self._count_wait(member, member.wait.kind, -1)
        group.synced.discard(peer)
        if group.sync is not None:
            group.sync.receivers.discard(peer)
            group.sync.members.discard(peer)
            group.sync.failures.pop(peer, None)
        self._stop(group)
        group.awaiting_flush.discard(peer)
        group.ring.remove(peer)
        group.unreliable = {pair for pair in group.unreliable if peer not in pair}

    def _note_gone(self, peer: int, is_leaving: bool) -> None:
        for circle in self._circles:
            if peer in circle.here:
                circle.here -= {peer}
                circle.size -= is_leaving
                if self.has_rivals and circle.gone >= majority(circle.size) and not is_leaving:
                    self.deposed = (
                        f"{circle.gone} of the {circle.size} peers of view {self.installed_view} are lost, and may be "
                        f"following another master"
                    )

    def _stop(self, group: _Group) -> None:
        """Starts the flush of a group whose ring must change."""
        group.changed = True
        if not group.running:
            return
        group.running = False
        group.flush = self._number()
        group.awaiting_flush = {peer for peer in group.ring if peer in self._members}
        for found in group.withdrawals.values():
            found.awaiting.clear()
        for peer in group.awaiting_flush:
            self._ask(peer, m.Flush(group.flush, group.epoch))

    # The course of a change.

    def _advance(self) -> None:
        """Takes every step that has become possible. Called after each event."""
        progress = True
        while progress and not self.deposed:
            self._dissolve_sites()
            progress = (
                self._lose_dead()
                or self._settle_flushes()
                or self._admit_first()
                or self._step_view()
                or self._step_joint()
            )
        if not self.deposed:
            self._fail_hopeless_waits()

    def _dissolve_sites(self) -> None:
        while self._broken_sites:
            site, reason = self._broken_sites.popitem()
            for peer in [peer for peer, member in self._members.items() if member.hello.site == site]:
                self._evict(peer, reason)
            self._broken_sites.pop(site, None)  # they have said the same of it

    def _settle_flushes(self) -> bool:
        settled = False
        for group in self._groups.values():
            if group.changed and not group.running and not group.awaiting_flush and group.ledger.ring:
                # Of what was heard to be committed, the rest is over for everybody.
                group.commits = [op for op in group.commits if op in group.open_ops]
                group.commits += group.ledger.settle(group.ring)
                committed = set(group.commits)
                for op, given_up in group.withdrawals.items():
                    if op not in committed:
                        group.aborts[op] = m.Aborted(*op, given_up.code, given_up.reason)
                group.withdrawals.clear()
                group.ledger = Ledger(())
                settled = True
        return settled

    def _admit_first(self) -> bool:
        """With nobody accepted there is nobody to call update_topology: whoever waits is admitted."""
        if self._accepted or self._admitting or self._preparing or not self.admissible:
            return False
        self._admitting = set(self.admissible)
        return True

    def _step_view(self) -> bool:
        if any(group.awaiting_flush for group in self._groups.values()):
            return False
        if self._renewing or self._admitting or any(group.changed for group in self._groups.values()):
            self._prepare()
            return True
        if not self._preparing:
            return False
        if any(peer in self._absent_until for pair in self._failed_pairs for peer in pair):
            self._evidence_due_at = None  # it counts once that peer is back, or lost
            return False
        if self._failed_pairs and self._is_evidence_there():
            self._resolve_failed_pairs(self._known_failures())
        elif self._awaiting_ready or not self._is_known_to_enough:
            return False
        else:
            self._install()
        return True

    @property
    def _is_known_to_enough(self) -> bool:
        """No majority of the view in force is without anybody who has heard of the one that is prepared: it could go on
        with another master, as if that view were not."""
        return not self._unaware or all(
            circle.gone + len(circle.here & self._unaware) < majority(circle.size) for circle in self._circles
        )

    def _prepare(self) -> None:
        self.view += 1
        self._renewing = False
        newcomers: dict[int, list[int]] = {}
        for peer in self._admitting:
            newcomers.setdefault(self._members[peer].hello.group, []).append(peer)
        self._admitting.clear()
        for number, peers in newcomers.items():
            group = self._groups.setdefault(number, _Group(number))
            # Newcomers come with update_topology, during which no op is in flight, or into an empty run.
            group.running = False
            group.ledger = Ledger(())
            group.changed = True
            group.ring = with_newcomers(group.ring, peers, self.figures)
        for number in [number for number, group in self._groups.items() if not group.ring]:
            del self._groups[number]
        affected: set[int] = set()
        for group in self._groups.values():
            assert group.running or group.changed or group.epoch
            if group.changed:
                assert not group.running
                group.changed = False
                group.epoch = self.view
            if not group.running:
                affected.update(group.ring)
                group.missing.clear()
        relink = self._links_to_try()
        for pair in relink:
            self._made_in[pair] = self.view
        self._relink.clear()
        self._failed_pairs.clear()
        self._given_up.clear()
        self._evidence_due_at = None
        self._preparing = True
        self._awaiting_ready = set(affected)
        rings = [m.Ring(group.number, group.epoch, list(group.ring)) for group in self._groups.values()]
        listed = sorted(peer for group in self._groups.values() for peer in group.ring)
        self._effects.append(Persist(self._next_fence(listed)))
        self._unaware = set(listed) - affected
        members = [self._members[peer].as_record() for peer in listed]
        new_members = [member for member in members if member.peer not in self._told]
        for group in self._groups.values():
            verdicts, reasons = list(group.commits), list(group.aborts.values())
            lost = list(self._lost)
            to_all = m.Prepare(self.view, new_members, rings, verdicts, relink, lost, reasons)
            to_new = m.Prepare(self.view, members, rings, verdicts, relink, lost, reasons)
            for peer in group.ring:
                self._ask(peer, to_all if peer in self._told else to_new)
        self._told = set(listed)
        # A peer admitted now was not in the ring that these verdicts are about, and one that hears them twice
        # (after a further loss) has no such op open any more.
        self._suspect_cut()  # those who make their links anew are no witnesses

    def _next_fence(self, listed: list[int]) -> Fence:
        if listed:
            return self.fence([FencedView.of(self.view, listed)])
        if self._in_force is not None:
            # Who lost its connection, not its right to be here, may come back to the end of the run.
            self._in_force = FencedView(self._in_force.view, self._in_force.peers - self._parted)
        self._possible.clear()
        return self.fence(is_over=True)

    def _links_to_try(self) -> list[tuple[int, int]]:
        """Those that broke, and all others of their ends, which tell whose fault it was."""
        suspects = {peer for pair in self._relink for peer in pair}
        witnesses = (
            pair
            for group in self._groups.values()
            if suspects and not group.running
            for pair in topology.linked_pairs(group.ring)
            if not suspects.isdisjoint(pair)
        )
        return sorted(self._relink.union(witnesses))

    def _are_settled(self, pairs: Iterable[tuple[int, int]], failed: Collection[tuple[int, int]]) -> bool:
        """Of every pair the end that dials has said what became of it, or the other that it stands. One that waits to
        be dialed by a peer that has given up need not be waited for."""
        awaiting = self._awaiting_ready
        return all(
            high not in awaiting or (low, high) in self._given_up or (low not in awaiting and (low, high) not in failed)
            for low, high in pairs
        )

    def _is_evidence_there(self) -> bool:
        """For the pairs that have failed."""
        changing = [group for group in self._groups.values() if not group.running]
        failed = {*self._failed_pairs, *(pair for group in changing for pair in group.missing)}
        if all(self._are_settled(topology.linked_pairs(group.ring), failed) for group in changing):
            return True
        if not self._known_failures():
            return False
        if self._evidence_due_at is None:
            self._evidence_due_at = self._now + EVIDENCE_SHARE * self.options.peer_timeout_s
        return self._now >= self._evidence_due_at

    def _known_failures(self) -> dict[tuple[int, int], str]:
        """Pairs that have failed by the word of the end that dials, or all if nothing better is to be heard."""
        needed = {pair for group in self._groups.values() for pair in topology.ring_pairs(group.ring)}
        if self._are_settled(needed, self._failed_pairs):
            return dict(self._failed_pairs)
        return {
            pair: why
            for pair, why in self._failed_pairs.items()
            if pair[1] not in self._awaiting_ready or pair in self._given_up
        }

    def _resolve_failed_pairs(self, failed: Mapping[tuple[int, int], str]) -> None:
        newcomers = {peer for peer, member in self._members.items() if not member.accepted or member.absence}
        weak = {pair for group in self._groups.values() for pair in group.missing | group.unreliable}
        offenders = {
            peer
            for peer in {peer for pair in failed for peer in pair}
            if self._probation.record(self._members[peer].host, self._members[peer].hello.name, self._now) is not None
        }
        for peer in sorted(topology.fewest_evictions(failed, newcomers, weak.union(self._relinks), offenders)):
            pair, why = next((pair, why) for pair, why in failed.items() if peer in pair)
            member = self._members[peer]
            delay_s = self._probation.evicted(member.host, member.hello.name, self._now)
            reason = (
                f"peers {pair[0]} and {pair[1]} cannot connect to each other: {why}; peer {peer} may connect again, "
                f"and is let in after {delay_s:.3g} s if it has links with the others then"
            )
            self._evict(peer, reason, Result.RANK_CONNECTION_FAILED)
        self._failed_pairs.clear()
        self._evidence_due_at = None

    def _install(self) -> None:
        self._preparing = False
        self.installed_view = self.view
        meeting = self._meeting + 1 if self._updating else self._meeting
        for group in self._groups.values():
            if not group.running:
                group.running = True
                self._forget_cuts(group)
                group.linked = topology.linked_pairs(group.ring) - group.missing - group.unreliable
                group.direct_limit = direct_limit(group.ring, self.figures)
                group.is_local = self.figures.are_on_one_host(group.ring)
                group.commits = []
                group.aborts = {}
                group.open_ops.clear()
                group.agrees = group.is_meshed
                group.ledger = Ledger(group.ring, group.agrees)
            install = m.Install(self.view, group.is_meshed, meeting, group.direct_limit, group.is_local)
            for peer in group.ring:
                member = self._members[peer]
                if not member.accepted:
                    member.accepted = True
                    group.accepted += 1
                    self._accepted += 1
                    self.history.joined(self._now)
                self._say(member.connection, install)
        self._lost.clear()
        if self._accepted:
            self._in_force = FencedView.of(self.view, self.accepted)
            self._possible.clear()
            self._parted.clear()
        self._circles = [Circle(self._accepted, frozenset(self.accepted))] if self._accepted else []
        sizes = ", ".join(f"group {group.number}: {group.ring}" for group in self._groups.values())
        self._log("info", f"view {self.view} installed; {sizes or 'nobody left'}")
        if self._updating:
            self._updating = False
            self._finish_all(Kind.UPDATE_TOPOLOGY)

    def _forget_cuts(self, group: _Group) -> None:
        """Its links stand again, but for those that it goes without."""
        linkless = group.missing | group.unreliable
        self._cut = {cut for cut in self._cut if cut[0] not in group.ring or topology.pair(*cut) in linkless}

    # Messages of accepted or pending peers.

    def _on_leave(self, member: _Member, message: m.Leave) -> None:
        self._effects.append(Close(member.connection))
        self._remove(member.peer, f"left{': ' + message.reason if message.reason else ''}", is_leaving=True)

    def _on_flush_reply(self, member: _Member, message: m.FlushReply) -> None:
        group = self._groups[member.hello.group]
        if message.flush != group.flush or member.peer not in group.awaiting_flush:
            return
        group.awaiting_flush.discard(member.peer)
        self._asked_at.pop(member.peer, None)
        self._heard_verdicts(group, message.commits, message.aborts)
        group.open_ops.update(message.ops)
        # All survivors being done is what settle() looks for, so an op that is committed by this very call would
        # have been by it too; it must only not be lost.
        group.commits += group.ledger.done(member.peer, message.ops) if group.ledger.ring else []

    def _heard_verdicts(self, group: _Group, commits: Iterable[OpRef], aborts: Iterable[m.Aborted]) -> None:
        """Of a group that is being flushed: of a master before this one, or of peers by themselves."""
        known = set(group.commits)
        group.commits += [op for op in commits if op not in known]
        group.aborts.update({OpRef(op.tag, op.sequence): op for op in aborts})
        group.ledger.forget([*commits, *group.aborts])

    def _on_links_ready(self, member: _Member, message: m.LinksReady) -> None:
        is_due = member.peer in self._awaiting_ready or member.peer in self._unaware
        if message.view != self.view or not is_due:
            return
        self._awaiting_ready.discard(member.peer)
        self._unaware.discard(member.peer)
        self._answered(member)
        for other, reason in [*message.failed, *message.missing]:
            self._note_failed(member, other, reason)

    def _on_link_failed(self, member: _Member, message: m.LinkFailed) -> None:
        if message.view == self.view and member.peer in self._awaiting_ready:
            self._given_up.add(topology.pair(member.peer, message.peer))
            self._note_failed(member, message.peer, message.reason)

    def _note_failed(self, member: _Member, other: int, reason: str) -> None:
        group = self._groups[member.hello.group]
        pair = topology.pair(member.peer, other)
        if pair in topology.linked_pairs(group.ring):
            self._cut.add((member.peer, other))
            self._suspects.add(other)
        if pair in topology.ring_pairs(group.ring):
            self._failed_pairs.setdefault(pair, reason)
        elif pair in topology.linked_pairs(group.ring) and pair not in group.missing:
            group.missing.add(pair)
            self._log(
                "info",
                f"group {group.number} goes without a link between peers {pair}: {reason}",
                {**member.about, "other": other},
            )

    def _on_link_lost(self, member: _Member, message: m.LinkLost) -> None:
        other = self._members.get(message.peer)
        if other is None or other.hello.group != member.hello.group or other is member:
            return
        pair = topology.pair(member.peer, message.peer)
        group = self._groups.get(member.hello.group)
        if message.made_in < self._made_in.get(pair, 0) or group is None:
            return
        if pair not in topology.linked_pairs(group.ring):
            return
        self._cut.add((member.peer, message.peer))
        self._suspects.add(message.peer)
        if pair in self._relink or self._is_dead(other):
            return
        is_needed = pair in topology.ring_pairs(group.ring)
        if not is_needed and pair in group.missing | group.unreliable:
            return
        self._log(
            "warning", f"{member} lost its link to {other}: {message.reason}", {**member.about, "other": message.peer}
        )
        if message.has_committed:
            self._forget_relinks(group)
        self._relinks[pair] = self._relinks.get(pair, 0) + 1
        if self._relinks[pair] > RELINKS_MAX and not is_needed:
            group.unreliable.add(pair)
        elif self._relinks[pair] > RELINKS_MAX:
            why = f"their link broke {self._relinks[pair]} times in a row: {message.reason}"
            self._resolve_failed_pairs({pair: why})
            return
        self._relink.add(pair)
        self._stop(group)

    def _on_ops_done(self, member: _Member, message: m.OpsDone) -> None:
        group = self._groups.get(member.hello.group)
        if group is None or message.epoch != group.epoch or member.peer not in group.ledger.ring:
            return
        commits = group.ledger.done(member.peer, message.ops)
        self._bound_book(group)
        if commits and not group.running:
            # Decided during the flush, told with the next Prepare.
            group.commits += commits
            group.open_ops.update(commits)
        elif commits:
            self._commit_ops(group, commits)

    def _commit_ops(self, group: _Group, commits: list[OpRef]) -> None:
        for op in commits:
            group.withdrawals.pop(op, None)
        of_all = m.OpsCommit(group.epoch, [op for op in commits if ranks_of(op.tag) is None])
        for peer in group.ring if of_all.ops else ():
            self._say(self._members[peer].connection, of_all)
        for op in commits:
            if ranks_of(op.tag) is not None:
                for peer in _parties(group, op):
                    self._say(self._members[peer].connection, m.OpsCommit(group.epoch, [op]))
        self._forget_relinks(group)
        self._renew_if_full(group)

    def _forget_relinks(self, group: _Group) -> None:
        """Ops go through. What broke since is counted already."""
        for pair in topology.linked_pairs(group.ring) - self._relink if self._relinks else ():
            self._relinks.pop(pair, None)

    def _bound_book(self, group: _Group) -> None:
        if group.ledger.entries > OPEN_OPS_MAX:
            self._evict(group.ledger.heaviest, f"named ops of which most cannot be: {OPEN_OPS_MAX} are undecided")

    def _on_op_failed(self, member: _Member, message: m.OpFailed) -> None:
        group = self._groups.get(member.hello.group)
        if message.code not in m.FAILURES:
            self._evict(member.peer, f"malformed OpFailed with code {message.code}", Result.INVALID_USAGE)
            return
        if group is None or message.epoch != group.epoch or not group.running:
            return
        op = OpRef(message.tag, message.sequence)
        if not message.may_be_done:
            # Where peers agree, nobody has committed it, or will.
            self._abort_op(group, op, message.code, message.reason)
        elif op in group.withdrawals:
            self._note_withdrawn(group, op, member.peer)
        elif member.peer in _parties(group, op):
            self._withdraw(group, op, message.code, message.reason, by=member.peer)

    def _withdraw(
        self, group: _Group, op: OpRef, code: int, reason: str, by: int = 0, is_hopeless: bool = False
    ) -> None:
        """Has an op aborted unless one of those who take part has committed it. `by`: who will not."""
        if group.ledger.is_decided(op):
            return
        parties = _parties(group, op)
        group.withdrawals[op] = _Withdrawal(code, reason, set(parties) - {by}, is_hopeless)
        for peer in parties:
            if peer != by:
                self._ask(peer, m.Withdraw(group.epoch, *op, code, reason))

    def _on_withdrawn(self, member: _Member, message: m.Withdrawn) -> None:
        group = self._groups[member.hello.group]
        op = OpRef(message.tag, message.sequence)
        if message.epoch == group.epoch and group.running and op in group.withdrawals:
            if not message.is_committed:
                self._note_withdrawn(group, op, member.peer)
            elif group.ledger.decide(op):
                self._commit_ops(group, [op])
        self._answered(member)

    def _note_withdrawn(self, group: _Group, op: OpRef, peer: int) -> None:
        """It has not committed the op by itself, and will not."""
        found = group.withdrawals[op]
        found.awaiting.discard(peer)
        if found.awaiting:
            return
        waits = self._waits_behind(group, op, group.ledger.stalled.get(op, set())) if found.is_hopeless else {}
        waits = {peer: wait for peer, wait in waits.items() if wait.kind in Kind.EXCLUSIVE}
        self._abort_op(group, op, found.code, found.reason, without=waits)
        if waits:
            self._end_waits(waits, found.reason)

    def _abort_op(
        self, group: _Group, op: OpRef, code: int, reason: str, without: Collection[int] = frozenset()
    ) -> None:
        """`without` are peers that have not launched it and whose callers hear the reason in another way."""
        if not group.ledger.decide(op):
            return
        group.withdrawals.pop(op, None)
        self._log(
            "info",
            f"group {group.number}, tag {op.tag}, use {op.sequence}: aborted: {reason}",
            {"group": group.number, "tag": op.tag, "sequence": op.sequence},
        )
        abort = m.OpAbort(group.epoch, op.tag, op.sequence, code, reason)
        made = m.OpAbort(group.epoch, op.tag, op.sequence, code, reason, counts_as_made=True) if without else abort
        for peer in _parties(group, op):
            self._say(self._members[peer].connection, made if peer in without else abort)
        self._renew_if_full(group)

    def _renew_if_full(self, group: _Group, is_idle: bool = False) -> None:
        """Begins a new epoch with the same ring, where the uses of tags are counted from 0 again, once too many tags
        were used in this one; sooner if no op is known to be in flight, so that as a rule none is aborted by it."""
        tags = group.ledger.tags
        if group.running and agreement.is_full(tags, is_idle or not group.ledger.entries):
            self._renew(group, tags)

    def _renew(self, group: _Group, tags: int) -> None:
        self._log(
            "info",
            f"group {group.number} begins a new epoch: {tags} tags were used in the last one",
            {"group": group.number},
        )
        self._stop(group)

    def _on_tags_used(self, member: _Member, message: m.TagsUsed) -> None:
        group = self._groups.get(member.hello.group)
        if group is not None and message.epoch == group.epoch and group.running:
            self._renew(group, message.tags)

    def _on_ops_stalled(self, member: _Member, message: m.OpsStalled) -> None:
        group = self._groups.get(member.hello.group)
        if group is None or message.epoch != group.epoch or not group.running:
            return
        group.ledger.stall(member.peer, message.ops)
        self._bound_book(group)
        for op in message.ops[:STALLS_LOGGED_MAX]:
            if op in group.ledger.stalled:
                holders = group.ledger.holders(op)
                missing = list(islice((peer for peer in group.ring if peer not in holders), NAMED_MAX))
                self._log(
                    "info",
                    f"{member} waits in the op with tag {op.tag}; not done yet: peers {missing}",
                    {**member.about, "tag": op.tag, "sequence": op.sequence},
                )

    def _on_ops_over(self, member: _Member, message: m.OpsOver) -> None:
        group = self._groups.get(member.hello.group)
        if group is not None and message.epoch == group.epoch:
            group.ledger.over(member.peer, message.ops)

    def _on_joint_call(self, member: _Member, message: m.JointCall) -> None:
        if message.kind not in Kind.ALL or (message.kind == Kind.SYNC) != (message.offer is not None):
            self._evict(member.peer, f"malformed joint call {message.kind!r}", Result.INVALID_USAGE)
            return
        if member.wait is not None:
            self._evict(member.peer, "a joint call out of turn", Result.INVALID_USAGE)
            return
        member.wait = _Wait(message.call, message.kind, message.offer, message.open_ops, self._now)
        self._unlogged[member.peer] = self._now
        self._count_wait(member, message.kind, 1)

    def _on_joint_cancel(self, member: _Member, message: m.JointCancel) -> None:
        wait = member.wait
        if wait is None or wait.call != message.call:
            return
        group = self._groups[member.hello.group]
        begun = (
            (wait.kind == Kind.UPDATE_TOPOLOGY and self._updating)
            or (wait.kind == Kind.OPTIMIZE_TOPOLOGY and self._optimization is not None)
            or (wait.kind == Kind.SYNC and group.sync is not None)
            or member.peer in self._unheard
        )
        if not begun:
            self._answer(member, Result.TIMEOUT, "cancelled by its caller")

    def _on_sync_report(self, member: _Member, message: m.SyncReport) -> None:
        sync = self._groups[member.hello.group].sync if member.accepted else None
        if sync is None or sync.number != message.sync or member.peer not in sync.receivers:
            return
        sync.receivers.discard(member.peer)
        for donor, reason in message.suspects:
            self._log("warning", f"{member} could not use donor {donor}: {reason}", {**member.about, "other": donor})
        if not message.success:
            sync.failures[member.peer] = f"{member} could not be brought up: {message.reason}"
            if message.suspects:
                self._doubt_links(member)

    def _doubt_links(self, member: _Member) -> None:
        """Has all of its links made anew, which tries them. If they fail it is evicted, and what it could not do is
        no concern of the others."""
        group = self._groups[member.hello.group]
        pairs = {pair for pair in topology.linked_pairs(group.ring) if member.peer in pair}
        if group.running and pairs:
            self._relink |= pairs
            self._stop(group)

    def _on_probes(self, member: _Member, message: m.Probes) -> None:
        course = self._optimization
        if course is None or not course.is_asked(message.probe, member.peer):
            return
        found = {link.link_of(member.peer): (link.bytes_per_s, link.round_trip_us / 1e6) for link in message.found}
        self._log_unmeasured(course.answered(member.peer, found, self._now))

    # Joint calls.

    def _step_joint(self) -> bool:
        """Carries out one joint call that has become complete."""
        if not self._accepted:
            self._optimization = None
            return False
        if self._accepted < sum(len(group.ring) for group in self._groups.values()):
            # Those who come with update_topology, for which all others wait; or whom a master before this one has
            # accepted, as some know and they do not: these will be in the next call too.
            return False
        if any(self._members[peer].wait is not None for peer in self._unheard):
            # Such a call must not be taken for one that begins now, so all others wait, too.
            if self.is_changing:
                return False
            if self._tell_unheard():
                return True
        kind = next((kind for kind, number in self._waiting.items() if number == self._accepted), None)
        if kind == Kind.ARE_PEERS_PENDING:
            self._finish_all(kind, value=len(self.admissible))
            return True
        if kind == Kind.UPDATE_TOPOLOGY and not self.is_changing and not self._updating:
            self._updating = True
            self._admitting = set(self.admissible)
            if not self._admitting:
                self._updating = False
                self._finish_all(kind)
            return True
        if kind == Kind.OPTIMIZE_TOPOLOGY and not self.is_changing:
            return self._step_optimize()
        return self._step_syncs()

    def _tell_unheard(self) -> bool:
        """Ends calls that had ended under a master before this one."""
        progress = False
        for peer, end in list(self._unheard.items()):
            member = self._members[peer]
            if member.wait is not None:
                del self._unheard[peer]
                if member.wait.kind == end.kind:
                    self._answer(member, Result(end.code), end.reason, end.value, end.meeting)
                    progress = True
        return progress

    def _step_syncs(self) -> bool:
        progress = False
        for group in self._groups.values():
            progress = self._step_sync(group) or progress
        return progress

    def _step_sync(self, group: _Group) -> bool:
        sync = group.sync
        if group.changed or (sync is not None and sync.failures and not group.running):
            return False  # who could not be brought up may be about to go
        if sync.receivers if sync is not None else not 0 < group.accepted == group.waiting[Kind.SYNC]:
            return False
        members = [self._members[peer] for peer in group.ring]
        if sync is not None:
            group.sync = None
            waiting = [member for member in members if member.peer in sync.members]
            if sync.failures:
                failure = next(iter(sync.failures.values()))
                self._finish(waiting, Kind.SYNC, Result.NO_SHARED_STATE_AVAILABLE, failure)
            else:
                self._synced(group, waiting, sync.revision)
            return True
        offers = {
            member.peer: member.wait.offer
            for member in members
            if member.accepted and member.wait is not None and member.wait.offer is not None
        }
        assert len(offers) == group.accepted
        elected = elect(offers, group.synced, group.revision)
        if isinstance(elected, NotElected):
            self._finish(members, Kind.SYNC, elected.code, elected.reason)
            return True
        self._log(
            "info",
            f"group {group.number} syncs to revision {elected.revision}: {elected.reason}",
            {"group": group.number},
        )
        loose = elected.loose_receivers if any(t.loose for t in offers[elected.donors[0]].tensors) else frozenset()
        receivers = set(elected.content_receivers | loose)
        if not receivers:
            self._synced(group, members, elected.revision)
            return True
        number = self._number()
        group.sync = _Sync(number, elected.revision, receivers, set(offers), elected.donors)
        for member in members:
            if member.peer not in offers:
                continue
            plan = m.SyncPlan(
                number,
                elected.revision,
                elected.root,
                elected.donors,
                member.peer in elected.content_receivers,
                member.peer in loose,
            )
            self._say(member.connection, plan)
        return True

    def _synced(self, group: _Group, members: Iterable[_Member], revision: int) -> None:
        waiting = [member for member in members if member.wait is not None]
        group.revision = revision
        group.synced = {member.peer for member in waiting}
        self._renew_if_full(group, is_idle=True)
        self._finish(waiting, Kind.SYNC, value=revision)

    def _step_optimize(self) -> bool:
        course = self._optimization
        if course is None:
            rings = {group.number: group.ring for group in self._groups.values()}
            self._optimization = Optimization(self.figures, rings, self.view, self._now)
            return True
        if course.is_waiting:
            return False
        if course.is_decided:
            self._optimization = None
            self._finish_all(Kind.OPTIMIZE_TOPOLOGY)
            return True
        if course.rings is not None:
            self._decide_rings(course, course.rings)
            return True
        number = self._number()
        asked = course.next_round(number, self._now)
        for peer, links in asked.items():
            told = [(receiver, False) if sender == peer else (sender, True) for sender, receiver in links]
            self._say(self._members[peer].connection, m.Probe(number, told))
        if not asked:
            rings = {group.number: group.ring for group in self._groups.values()}
            self._effects.append(FindRings(number, course.search(number, rings)))
        return True

    def _log_unmeasured(self, links: list[tuple[int, int]]) -> None:
        for sender, receiver in links:
            self._log("warning", f"the link {sender}->{receiver} could not be measured")

    def _decide_rings(self, course: Optimization, rings: Mapping[int, Sequence[int]]) -> None:
        course.is_decided = True
        seconds = self._now - course.begun_at
        cost = f"{course.measured} links measured, {course.failed} not measurable, {seconds:.1f} s"
        for group in self._groups.values():
            ring, group.decision = optimization.decide(group.ring, rings.get(group.number, group.ring), self.figures)
            self._log("info", f"group {group.number}: {group.decision}; {cost}", {"group": group.number})
            limit = direct_limit(ring, self.figures)
            if ring != group.ring or (group.is_meshed and is_outdated(group.direct_limit, limit, len(ring))):
                self._stop(group)
                group.ring = ring

    def _finish_all(self, kind: str, value: int = 0) -> None:
        for group in self._groups.values() if kind in Kind.EXCLUSIVE else ():
            self._renew_if_full(group, is_idle=True)
        self._finish(self._members.values(), kind, value=value)

    def _finish(
        self,
        members: Iterable[_Member],
        kind: str,
        code: Result = Result.SUCCESS,
        reason: str = "",
        value: int = 0,
    ) -> None:
        """Ends a call for all who were to make it."""
        self._meeting += 1
        for member in members:
            if member.wait is not None and member.wait.kind == kind:
                self._answer(member, code, reason, value, self._meeting)

    def _answer(self, member: _Member, code: Result, reason: str = "", value: int = 0, meeting: int = 0) -> None:
        assert member.wait is not None
        self._say(member.connection, m.JointResult(member.wait.call, code, reason, value, meeting))
        self._count_wait(member, member.wait.kind, -1)
        self._unlogged.pop(member.peer, None)
        member.wait = None

    def _count_wait(self, member: _Member, kind: str, change: int) -> None:
        for waiting in (self._waiting, self._groups[member.hello.group].waiting):
            waiting[kind] += change
            if not waiting[kind]:
                del waiting[kind]

    def _log_long_waits(self) -> None:
        missing: dict[tuple[str, int], list[str]] = {}
        """By kind and, for sync_shared_state, group."""
        for peer, since in list(self._unlogged.items()):
            if self._now < since + LONG_WAIT_S:
                break
            del self._unlogged[peer]
            member = self._members[peer]
            assert member.wait is not None
            kind = member.wait.kind
            call = kind, member.hello.group if kind == Kind.SYNC else 0
            if call not in missing:
                circle = self._groups[member.hello.group].ring if kind == Kind.SYNC else self.accepted
                absent = (str(self._members[peer]) for peer in circle if not self._waits_in(peer, kind))
                missing[call] = list(islice(absent, NAMED_MAX))
            if missing[call]:
                self._log(
                    "info",
                    f"{member} has waited {LONG_WAIT_S:g} s in {kind} for {', '.join(missing[call])}",
                    member.about,
                )

    def _waits_in(self, peer: int, kind: str) -> bool:
        wait = self._members[peer].wait
        return wait is not None and wait.kind == kind

    def _fail_hopeless_waits(self) -> None:
        if self.is_changing or self._updating or self._optimization is not None:
            return
        while self._end_hopeless_waits():
            pass

    def _end_hopeless_waits(self) -> bool:
        """Ends the first joint calls found that nothing else could end. False if there are none."""
        for group in self._groups.values():
            waiting = group.waiting.total()
            if not waiting:
                continue
            if waiting == len(group.ring) and waiting not in group.waiting.values():
                waits = self._waits(group.ring)
                self._end_waits(waits, f"these calls can never meet: {_account(waits)}")
                return True
            stalled = group.ledger.stalled.items() if group.running else ()
            if any(self._end_waits_behind(group, op, stuck) for op, stuck in list(stalled)):
                return True
        if 0 < self._accepted == sum(self._waiting[kind] for kind in Kind.GLOBAL):
            # Were they all in one call, it would be complete.
            waits = self._waits(self.accepted)
            self._end_waits(waits, f"these calls can never meet: {_account(waits)}")
            return True
        return False

    def _end_waits_behind(self, group: _Group, op: OpRef, stuck: set[int]) -> bool:
        """Ends the joint calls of peers that would have to launch `op` first, which `stuck` peers wait in. False if
        there are none."""
        waits = self._waits_behind(group, op, stuck)
        if not waits or op in group.withdrawals:
            return False
        reason = (
            f"peers {sorted(stuck)} wait in the op with tag {callers_tag(op.tag)}, which these never launched: "
            f"{_account(waits)}"
        )
        if all(wait.kind in Kind.EXCLUSIVE for wait in waits.values()):
            if agreement.is_agreed(op.tag, group.agrees):
                self._withdraw(group, op, Result.INVALID_USAGE, reason, is_hopeless=True)
                return False
            self._abort_op(group, op, Result.INVALID_USAGE, reason, without=waits)
        self._end_waits(waits, reason)
        return True

    def _waits_behind(self, group: _Group, op: OpRef, stuck: set[int]) -> dict[int, _Wait]:
        return {
            peer: wait
            for peer, wait in self._waits(_parties(group, op)).items()
            if peer not in stuck
            and (wait.kind in Kind.EXCLUSIVE or (wait.kind == Kind.ARE_PEERS_PENDING and op not in wait.open_ops))
        }

    def _waits(self, peers: Iterable[int]) -> dict[int, _Wait]:
        found = {peer: self._members[peer].wait for peer in peers}
        return {peer: wait for peer, wait in found.items() if wait is not None}

    def _end_waits(self, waits: Mapping[int, _Wait], reason: str) -> None:
        """Ends joint calls that nothing else could end. Those who only ask whether peers are pending are told no, and
        may then come to the call that the others wait in: so does a newcomer that enters the usual loop at its top
        while the others go on from update_topology. If nobody asks, all fail."""
        asking = [peer for peer, wait in waits.items() if wait.kind == Kind.ARE_PEERS_PENDING]
        self._log("info" if asking else "warning", reason)
        for peer in asking or waits:
            if asking:
                self._answer(self._members[peer], Result.SUCCESS, value=0)
            else:
                self._answer(self._members[peer], Result.INVALID_USAGE, reason)

    def _on_report(self, member: _Member, message: m.Report) -> None:
        for other, bytes_per_s in self.throughput.reported(member.peer, message):
            if other in self._members:
                self.figures.carried((member.peer, other), bytes_per_s, self._now)
        self.traffic.reported(member.peer, member.hello.group, message, self._now)

    # Small helpers.

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def _answered(self, member: _Member) -> None:
        """One of the things that it was asked; others may still be due."""
        group, peer = self._groups[member.hello.group], member.peer
        is_asked = any(peer in asked for asked in (group.awaiting_flush, self._awaiting_ready, self._unaware))
        if not is_asked and all(peer not in found.awaiting for found in group.withdrawals.values()):
            self._asked_at.pop(peer, None)

    def _ask(self, peer: int, message: m.FromMaster) -> None:
        """Sends what must be answered in time."""
        self._asked_at.pop(peer, None)
        self._asked_at[peer] = self._now
        self._say(self._members[peer].connection, message)

    def _say(self, connection: int, message: m.FromMaster) -> None:
        self._effects.append(Send(connection, message))

    def _log(
        self, level: str, text: str, about: Mapping[str, int] = MappingProxyType({}), is_of_stranger: bool = False
    ) -> None:
        """`about`: what it is about, as in `pccl.logs.FIELDS`."""
        self._effects.append(Log(level, text, is_of_stranger, {"view": self.installed_view, **about}))
        if not is_of_stranger:
            self.history.logged(self._now, level, text)

    def _drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    _HANDLERS: ClassVar[dict[type[m.Message], Callable[[Master, _Member, Any], None]]] = {
        m.Leave: _on_leave,
        m.JointCall: _on_joint_call,
        m.JointCancel: _on_joint_cancel,
        m.LinksReady: _on_links_ready,
        m.LinkFailed: _on_link_failed,
        m.Tried: _on_tried,
        m.LinkLost: _on_link_lost,
        m.OpsDone: _on_ops_done,
        m.OpFailed: _on_op_failed,
        m.Withdrawn: _on_withdrawn,
        m.OpsStalled: _on_ops_stalled,
        m.OpsOver: _on_ops_over,
        m.TagsUsed: _on_tags_used,
        m.FlushReply: _on_flush_reply,
        m.SyncReport: _on_sync_report,
        m.Probes: _on_probes,
        m.Report: _on_report,
    }
    _BEFORE_ACCEPTANCE: ClassVar = frozenset({m.Leave, m.LinksReady, m.LinkFailed, m.LinkLost, m.Tried})
