"""What peers and the master say to each other.

Every message is a msgspec struct that travels as a msgpack array `[name, field, ...]`. A field added later goes to
the end with a default: an older reader ignores it, a newer one fills it in. `PROTOCOL_VERSION` changes only when that
is not enough.

`auth` of an opening is the dialer's share of a handshake, empty without a token: see module `auth`.

Reserved room: `Welcome.auth` and `Accepted.auth`.
"""

# Annotations are not put off here: msgspec would compile the text of each, 4 ms when the first message comes.

from typing import Annotated, NamedTuple

import msgspec

from pccl.protocol.direct_limit import UNKNOWN
from pccl.protocol.status import RunStatus
from pccl.types import Result

PROTOCOL_VERSION = 14

PEER_TIMEOUT_S_MIN = 0.1
PEER_TIMEOUT_S_MAX = 86400.0
"""Bounds of `Welcome.peer_timeout_s`."""
ENGINE_THREADS_MAX = 16
"""Bound of `Welcome.engine_threads`."""
MASTER_TIMEOUT_S = 60.0
"""For so long a peer that has lost its master looks for one, unless it is told otherwise."""

FAILURES = frozenset(Result) - {Result.SUCCESS, Result.OUTCOME_UNKNOWN}
"""The codes that may say why something failed."""


class OpRef(NamedTuple):
    """An op within one epoch of one group: its tag and the how-manieth use of the tag it is."""

    tag: int
    sequence: int


OPS_MAX = 2**18
"""Ops that one message of a peer may name."""
PEERS_MAX = 2**14
REPORTED_EPOCHS_MAX = 16
METRICS_KEPT_MAX = 128
"""Measurements that a peer remembers for a master after this one: all of its own in a group in which all pairs are
measured, and those of the last calls in a larger one."""
REASON_CHARACTERS_MAX = 2**14
"""Reasons of a peer are passed on to all others and logged."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
PADDING_BYTES_MAX = 20 * 2**10
Padding = Annotated[int, msgspec.Meta(ge=0, le=PADDING_BYTES_MAX)]
"""How many bytes without a meaning follow a message, on a connection between peers: see `runtime.links`."""
Age = Annotated[int, msgspec.Meta(ge=0, le=2**32)]
"""In seconds."""
Ops = Annotated[list[OpRef], msgspec.Meta(max_length=OPS_MAX)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)]
PeerReasons = Annotated[list[tuple[int, Reason]], msgspec.Meta(max_length=PEERS_MAX)]


class Kind:
    """Kinds of joint call."""

    ARE_PEERS_PENDING = "are_peers_pending"
    UPDATE_TOPOLOGY = "update_topology"
    OPTIMIZE_TOPOLOGY = "optimize_topology"
    SYNC = "sync_shared_state"

    ALL = (ARE_PEERS_PENDING, UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY, SYNC)
    EXCLUSIVE = (UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY, SYNC)
    """Those during which this peer has no op in flight."""
    GLOBAL = (ARE_PEERS_PENDING, UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY)
    """Those that the peers of all groups make together."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of what messages are composed of."""


class PeerInfo(Part, frozen=True):
    """A peer as the others need to know it."""

    peer: int
    group: int
    hosts: list[str]
    """Where its listening port may be reached, best first. A loopback address stands for 'the master's machine'."""
    port: int
    connections: int
    """TCP connections it wants in each of its links."""
    name: str = ""


class Ring(Part, frozen=True):
    """A group's ring order. `epoch` is the view in which it last changed."""

    group: int
    epoch: int
    peers: list[int]


class TensorOffer(Part, frozen=True):
    name: str
    dtype: str
    shape: list[int]
    loose: bool
    """Content may differ between peers of one revision."""


class LinkMetric(Part, frozen=True):
    """What was measured of the link to a peer, or from it where it `is_inbound`."""

    peer: int
    is_inbound: bool
    bytes_per_s: float
    round_trip_us: int

    def link_of(self, measurer: int) -> tuple[int, int]:
        """Sender and receiver."""
        return (self.peer, measurer) if self.is_inbound else (measurer, self.peer)


class SyncOffer(Part, frozen=True):
    """What a peer brings to sync_shared_state."""

    strategy: str
    revision: int
    root: bytes
    """Digest of all tensors that are not loose."""
    tensors: list[TensorOffer]


# Peer to master.


class Hello(Message, frozen=True):
    """The first message on a control connection."""

    protocol: int
    version: str
    group: int
    hosts: list[str]
    """Addresses to advertise; empty: the address that the master sees."""
    port: int
    connections: int
    name: str = ""
    auth: bytes = b""
    site: str = ""
    """Whose peers are admitted together and lost together; empty: a peer on its own."""
    site_size: int = 0
    """Peers of the site; 0 without one."""
    masters: int = 1
    """How many addresses of masters it knows."""
    may_found: bool = True
    """It may be the first of a new run. Who knows several masters asks all of them for a run first."""
    session: Secret = b""
    """The key of the session that begins here (`control_session`); empty: it ends with the connection."""
    master_timeout_s: float = MASTER_TIMEOUT_S
    """For so long it looks for a master after it has lost one."""


class HeartbeatHello(Message, frozen=True):
    """The first and only message on a peer's second connection to the master, which carries heartbeats: after
    `Accepted`, each side sends a byte every so often. The peer makes it upon Welcome, and anew whenever it is closed.
    """

    protocol: int
    run: str
    peer: int
    auth: bytes = b""


class Resume(Message, frozen=True):
    """The first message on a control connection of a peer that has lost its master. The answer is PreVoteRequest,
    Elsewhere, StartOver or Goodbye."""

    protocol: int
    run: str
    term: int
    """The highest that it has followed."""
    peer: int
    auth: bytes = b""
    masters: int = 1
    """As of Hello."""
    is_accepted: bool = True
    """False: a newcomer, which may have been accepted and not heard of it."""
    session: Secret = b""
    """As of Hello."""
    master_timeout_s: float = MASTER_TIMEOUT_S
    """As of Hello."""
    patience_s: float = MASTER_TIMEOUT_S
    """What is left of that."""


class Reattach(Message, frozen=True):
    """The first message on a control connection that shall go on where one of this session broke off. The answer is
    Reattached, or Rejected by a master that does not know the session."""

    protocol: int
    session: Secret
    received: Count
    """Messages of the master, over all connections of the session."""
    auth: bytes = b""


class Aborted(Part, frozen=True):
    """A verdict that was heard."""

    tag: int
    sequence: int
    code: int
    reason: Reason


class JointOutcome(Part, frozen=True):
    """How the last joint call of a kind ended that this peer took part in. `call_number` as of JointResult."""

    kind: str
    call_number: int
    code: int
    reason: Reason
    value: int


class InstalledView(Part, frozen=True):
    view: int
    rings: list[Ring]
    is_meshed: bool
    """The group of whoever says so is a mesh."""


class PreparedView(Part, frozen=True):
    view: int
    rings: list[Ring]
    answered: bool
    """LinksReady was said, so it may be in force elsewhere."""


class PreVote(Message, frozen=True):
    """The answer to PreVoteRequest: the views that this peer knows of, with the meanings that they have in
    RecoveryReport. Nothing is promised by it."""

    installed: InstalledView | None
    prepared: PreparedView | None
    is_settled: bool
    answered: list[PreparedView] = []


class RecoveryReport(Part, frozen=True):
    """What a peer knows of its run. See `recovery_report`."""

    me: PeerInfo
    installed: InstalledView | None
    """The last one."""
    prepared: PreparedView | None
    """A newer one."""
    is_running: bool
    """Its ops go on."""
    is_settled: bool
    """`prepared` has decided all ops of its installed epoch."""
    commits: Ops
    """Of its installed epoch, those that others might not have heard of."""
    aborts: list[Aborted]
    """The same, with a reason of their own."""
    waits_in: str
    """The kind of joint call that it is in; empty: none."""
    outcomes: list[JointOutcome]
    joined_after: int
    """The joint-call number of the last one before it was accepted."""
    synced: tuple[int, int] | None
    """The joint-call number and the revision of the last sync that it took part in with success."""
    unlinked: list[int]
    """Peers of its ring that it has no link with."""
    peer_timeout_s: float
    engine_threads: int
    site: str = ""
    site_size: int = 0
    link_metrics: Annotated[list[tuple[LinkMetric, Age]], msgspec.Meta(max_length=METRICS_KEPT_MAX)] = []
    """What it has measured, the oldest first, and how long before Resume."""
    secret: Secret = b""
    """As of Welcome."""
    answered: list[PreparedView] = []
    """Of masters before the one that made `prepared`, what it had answered of what is newer than `installed`."""


class Vote(Message, frozen=True):
    """The answer to VoteRequest: this peer follows no master of a lower term any more."""

    term: int
    report: RecoveryReport


class Leave(Message, frozen=True):
    reason: Reason = ""


class JointCall(Message, frozen=True):
    """Enters a joint call. A peer is in one at a time."""

    call: int
    kind: str
    offer: SyncOffer | None = None
    open_ops: Ops = []
    """are_peers_pending: what this peer has in flight."""


class JointCancel(Message, frozen=True):
    """The caller no longer wants to wait. A call that has begun to take effect goes on."""

    call: int


class LinksReady(Message, frozen=True):
    """The answer to `Prepare`: all links are up, but for the needed ones in `failed` and the others in `missing`."""

    view: int
    failed: PeerReasons = []
    missing: PeerReasons = []


class LinkFailed(Message, frozen=True):
    """Said before `LinksReady` by a peer that still waits for other links: one that it dials cannot be made."""

    view: int
    peer: int
    reason: Reason


class Tried(Message, frozen=True):
    """The answer to `Trial`: with whom no connection carries full-size packets, and why."""

    failed: PeerReasons = []


class LinkLost(Message, frozen=True):
    """An established link broke. `made_in` is the view whose `Prepare` made it."""

    made_in: int
    peer: int
    reason: Reason
    has_committed: bool = False
    """The sender has committed ops by itself in this epoch."""


class OpsDone(Message, frozen=True):
    """This peer holds all result bytes of these ops, which the master decides on, or which were said to be stalled."""

    epoch: int
    ops: Ops


class OpFailed(Message, frozen=True):
    """This op cannot or must not complete: differing arguments, or its caller gave up. The sender will not commit it by
    itself."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: Reason
    may_be_done: bool = False
    """It is done here, or may become so, and others may have committed it: see `completion`."""


class AbortVote(Message, frozen=True):
    """The answer to AbortVoteRequest: the sender has committed the op by itself, or promises that it will not."""

    epoch: int
    tag: int
    sequence: int
    is_committed: bool


class OpsStalled(Message, frozen=True):
    """These ops have waited for long. Lets the master find waits that can never end."""

    epoch: int
    ops: Ops


class OpsOver(Message, frozen=True):
    """The sender has committed these by itself. It had said that they were stalled."""

    epoch: int
    ops: Ops


class TagsUsed(Message, frozen=True):
    """The sender has used so many tags in this epoch that it starts no further op in it."""

    epoch: int
    tags: Count


class FlushReply(Message, frozen=True):
    """The group's ops have stopped here; `ops` are those of them that are done and without a verdict, `commits` and
    `aborts` verdicts that others might not have heard."""

    flush: int
    ops: Ops
    commits: Ops = []
    aborts: list[Aborted] = []


class SyncReport(Message, frozen=True):
    """A receiver has ended its transfer. `suspects`: donors that failed it, and how."""

    sync: int
    success: bool
    reason: Reason = ""
    suspects: PeerReasons = []


class Probes(Message, frozen=True):
    """The answer to `Probe`. What could not be measured is not among it."""

    probe: int
    found: Annotated[list[LinkMetric], msgspec.Meta(max_length=PEERS_MAX)]


class LinkReport(Part, frozen=True):
    """A link to another peer: payload sent over it since it was made, by ops."""

    peer: int
    tx_bytes: Count
    full_ms: Count = 0
    """For how long it was what held up the ops: see `throughput`."""
    full_bytes: Count = 0
    """What got across meanwhile."""


class Report(Message, frozen=True):
    """What this peer has done since it connected, every few seconds while that changes. All numbers only grow."""

    ops: Annotated[list[tuple[int, Count, Count]], msgspec.Meta(max_length=REPORTED_EPOCHS_MAX)]
    """Of the last epochs: number, ops committed, ops aborted."""
    tx_bytes: Count
    """Payload of ops, as the next."""
    rx_bytes: Count
    state_rx_bytes: Count = 0
    """Shared state fetched from others."""
    reconnects: Count = 0
    """Connections to other peers that broke and were dialled anew from here."""
    links: Annotated[list[LinkReport], msgspec.Meta(max_length=PEERS_MAX)] = []


# Master to peer.


class Welcome(Message, frozen=True):
    """You are known, and wait for a view that has you."""

    peer: int
    run: str
    term: int
    accepted_peers: int
    """How many peers are in the run already: 0 means that you are admitted at once."""
    auth: bytes = b""
    peer_timeout_s: float = 5.0
    """Whoever is silent for longer counts as lost, on either side."""
    engine_threads: int = 1
    """The number of engine threads of each peer. A link's connection belongs to thread `LinkHello.index` modulo that
    number, on both sides."""
    secret: Secret = b""
    """The run's. A master that has it knows the run."""
    obstacle: Reason = ""
    """Why the peer is not let in for a while, though the others call update_topology; empty: nothing holds it up."""


class Reattached(Message, frozen=True):
    """The session goes on. Both sides now resend what the other has not received."""

    received: Count
    """Messages of the peer, over all connections of the session."""


class PreVoteRequest(Message, frozen=True):
    """This master leads no run, and might lead yours once a majority of its last view has come. The answer is
    PreVote."""


class VoteRequest(Message, frozen=True):
    """A majority has come: this master would lead your run in this term. The answer is Vote, unless you have followed
    one of this term or a higher one."""

    term: int


class Resumed(Message, frozen=True):
    """This master leads your run, and you are in it. The answer is whatever the last master may not have heard:
    OpsDone, OpFailed, LinkLost, JointCall. What follows is as ever."""

    term: int
    peer_timeout_s: float
    """As of Welcome."""
    in_force: list[int] = []
    """The views that are, or may be. Any other that you have answered never was and never will be."""


class Elsewhere(Message, frozen=True):
    """The last message before the master closes: it can do nothing for you, another one may. Try again later."""

    reason: str


class StartOver(Message, frozen=True):
    """The last message before the master closes: the view that you were to be accepted in has never been. Say Hello
    again."""

    reason: str


class Goodbye(Message, frozen=True):
    """The last message before the master closes: refusal or eviction. A peer of a run that has lost its master believes
    it only of one that knows the run."""

    code: int
    reason: str
    secret: Secret = b""
    """As of Welcome, in answer to Resume."""


class Flush(Message, frozen=True):
    """A peer of your group was lost: stop the ops of this epoch and say which are done."""

    flush: int
    epoch: int


class Prepare(Message, frozen=True):
    """The next view. Make the links it needs, then answer `LinksReady`.

    `members` are those of its peers that the receiver has not heard of by an earlier Prepare.

    Where your group's epoch differs from the installed one, your open ops end here: those in `commits` are committed,
    all others aborted.
    """

    view: int
    members: list[PeerInfo]
    rings: list[Ring]
    commits: list[OpRef] = []
    relink: list[tuple[int, int]] = []
    lost: list[tuple[int, str]] = []
    """Peers that the installed view has and this one has not, and why."""
    aborts: list[Aborted] = []
    """Those of the aborted ops that were so before, for a reason of their own."""


class Trial(Message, frozen=True):
    """To a newcomer that was evicted for its links before: it is let in once it has connections with these."""

    members: list[PeerInfo]


class Install(Message, frozen=True):
    """The prepared view is in force. `is_meshed`: in your group every pair has a link, so ops may go direct; up to
    `direct_limit` bytes they had better, see `direct_limit`. `is_local`: all of your group are on one host. Who keeps
    its ring keeps these two as well, for an op must be the same on all peers."""

    view: int
    is_meshed: bool = False
    call_number: int = 0
    """The last one before whoever is accepted by this."""
    direct_limit: int = UNKNOWN
    is_local: bool = False


class OpsCommit(Message, frozen=True):
    epoch: int
    ops: list[OpRef]


class OpAbort(Message, frozen=True):
    """Verdict on one op, also for a peer that has not launched it yet. Where it `counts_as_made`, that peer's joint
    call fails for the same reason, so its caller need not hear it again from the next op with the tag."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: str
    counts_as_made: bool = False


class AbortVoteRequest(Message, frozen=True):
    """This op shall be aborted for this reason, unless somebody has committed it. Vote: say that you have, or promise
    not to commit it by yourself any more (AbortVote)."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: str


class JointResult(Message, frozen=True):
    call: int
    code: int
    reason: str = ""
    value: int = 0
    """are_peers_pending: how many wait. sync_shared_state: the elected revision."""
    call_number: int = 0
    """Counts the joint calls of the run that ended for all who were to make them. 0: this one ended for some."""


class SyncPlan(Message, frozen=True):
    """How a sync goes on: who sends, and whether you fetch."""

    sync: int
    revision: int
    root: bytes
    donors: list[int]
    fetch_content: bool
    fetch_loose: bool


class Probe(Message, frozen=True):
    """Measure these links, all at once, and answer `Probes`: to each peer, or from it where it `is_inbound`."""

    probe: int
    links: list[tuple[int, bool]]


# Whoever asks the master how the run stands, and is no peer.


class StatusRequest(Message, frozen=True):
    """The first and only message on a connection that is answered by `Accepted` and `Status`, and closed."""

    protocol: int
    auth: bytes = b""


class Status(Message, frozen=True):
    run: RunStatus


FromPeer = (
    Hello
    | HeartbeatHello
    | Resume
    | PreVote
    | Vote
    | Leave
    | JointCall
    | JointCancel
    | LinksReady
    | LinkFailed
    | Tried
    | LinkLost
    | OpsDone
    | OpFailed
    | AbortVote
    | OpsStalled
    | OpsOver
    | TagsUsed
    | FlushReply
    | SyncReport
    | Probes
    | Report
)
FromMaster = (
    Welcome
    | PreVoteRequest
    | VoteRequest
    | Resumed
    | Elsewhere
    | StartOver
    | Goodbye
    | Flush
    | Prepare
    | Trial
    | Install
    | OpsCommit
    | OpAbort
    | AbortVoteRequest
    | JointResult
    | SyncPlan
    | Probe
)


# On control connections, either way.


class Ack(Message, frozen=True):
    """The sender has received so many messages in this session. Not counted itself."""

    received: Count


# On every connection between its opening and the answer to that, if both sides have a token: see `auth`.


class Challenge(Message, frozen=True):
    """The acceptor's share, and the run whose key it wants to be convinced with."""

    auth: bytes
    run: str


class Proof(Message, frozen=True):
    """First the dialer's, then the acceptor's."""

    auth: bytes


# Peer to peer, before a connection is handed to the engine or to a state transfer.


class LinkHello(Message, frozen=True):
    """The dialer of a connection that shall belong to a link."""

    protocol: int
    run: str
    sender: int
    receiver: int
    made_in: int
    index: int
    count: int
    auth: bytes = b""
    encrypt: bool = False
    """What follows is encrypted with the handshake's payload keys; the acceptor must want that too."""
    padding_bytes: Padding = 0


class StateHello(Message, frozen=True):
    """The dialer wants to fetch shared state from the receiver under this sync."""

    protocol: int
    run: str
    sender: int
    receiver: int
    sync: int
    auth: bytes = b""
    encrypt: bool = False
    """As of LinkHello."""
    tells: bool = False
    """The receiver shall send the Digests of all its tensors that are not loose, in order and unasked."""
    padding_bytes: Padding = 0


class ProbeHello(Message, frozen=True):
    """The dialer measures: see `runtime.probe`. Where it `pulls`, the payload comes from the acceptor."""

    protocol: int
    run: str
    sender: int
    receiver: int
    pulls: bool
    auth: bytes = b""
    padding_bytes: Padding = 0


class Accepted(Message, frozen=True):
    auth: bytes = b""
    padding_bytes: Padding = 0


class Rejected(Message, frozen=True):
    reason: str


class DigestRequest(Message, frozen=True):
    """Asks a donor for the block digests of a tensor."""

    tensor: int


class Digests(Message, frozen=True):
    """BLAKE3 digests of a tensor's blocks, 32 bytes each, one after the other."""

    tensor: int
    block_bytes: int
    digests: bytes


class BlockRequest(Message, frozen=True):
    """Asks a donor for blocks `[first, first + count)` of a tensor; their raw bytes follow, without any frame."""

    tensor: int
    first: int
    count: int


PeerOpening = LinkHello | StateHello | ProbeHello
PeerAnswer = Accepted | Rejected
HeartbeatAnswer = Accepted | Goodbye | Elsewhere
Credential = Challenge | Proof
ToWatcher = Accepted | Status | Goodbye
"""Accepted and Status, or Goodbye."""
ReattachAnswer = Reattached | Rejected | Goodbye
Opening = Hello | HeartbeatHello | Resume | Reattach | StatusRequest | PeerOpening
"""All that a dialer may begin with."""
StateRequest = DigestRequest | BlockRequest
StateAnswer = Digests | Rejected

# msgspec finds out about a type when it first meets it, 2 ms for all of these: better here than while a peer joins.
msgspec.msgpack.Decoder(FromPeer | FromMaster | Opening | PeerAnswer | HeartbeatAnswer | Credential)
