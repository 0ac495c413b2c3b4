"""All messages of the wire protocol, for readers and other implementations.

`codec` frames messages and keeps control sessions, `auth` authenticates connections.

Format. A message is a msgpack array `[name, field, ...]`: its class name, then its fields in order. A `Part` of a
message is an array without a name.

Compatibility. New fields go to the end and have defaults: older readers ignore them, newer ones fill them in.
`PROTOCOL_VERSION` rises when that is not enough.

Conventions. Peers, views, terms and groups are numbers; peer and view numbers are unique in a run. A result code is a
number of `pccl.types.Result`. Units are at the end of names (`_s`, `_ms`, `_us`, `_bytes`, `_per_s`). The `auth` of an
opening is the dialer's share of a handshake, empty without a token.
"""

# Annotations are not put off here: msgspec would compile the text of each, 4 ms when the first message comes.

from typing import Annotated, NamedTuple

import msgspec

from pccl.protocol.link_metrics import UNKNOWN
from pccl.protocol.status import RunStatus
from pccl.types import Result

PROTOCOL_VERSION = 20

PEER_TIMEOUT_S_MIN = 0.1
PEER_TIMEOUT_S_MAX = 86400.0
ENGINE_THREADS_MAX = 16
MASTER_TIMEOUT_S = 60.0

FAILURES = frozenset(Result) - {Result.SUCCESS, Result.OUTCOME_UNKNOWN}
"""The codes that may say why something failed. Only a caller can be left without knowing an outcome."""


class OpRef(NamedTuple):
    """The name of an op within one epoch of one group."""

    tag: int
    sequence: int
    """The use count of the tag: 0 for the first op with it in this epoch, 1 for the second."""


OPS_MAX = 2**18
PEERS_MAX = 2**14
REPORTED_EPOCHS_MAX = 16
METRICS_KEPT_MAX = 128
PART_BYTES_MAX = 32 * 2**10
"""Size of a part of a recording. Whatever else the control connection has to carry waits for one part at most."""
CHECK_BYTES_MAX = 64 * 2**10
CHECK_HOSTS_MAX = 4
REASON_CHARACTERS_MAX = 2**14
"""Length of a peer's reason. Reasons are logged and passed on to all other peers."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
PADDING_BYTES_MAX = 20 * 2**10
Padding = Annotated[int, msgspec.Meta(ge=0, le=PADDING_BYTES_MAX)]
"""Number of meaningless bytes that follow a message on a connection between peers, to prove that the path carries
packets of full size: see `runtime.network.links`."""
Age = Annotated[int, msgspec.Meta(ge=0, le=2**32)]
Ops = Annotated[list[OpRef], msgspec.Meta(max_length=OPS_MAX)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)]
PeerReasons = Annotated[list[tuple[int, Reason]], msgspec.Meta(max_length=PEERS_MAX)]


class Kind:
    """The kinds of group call."""

    ARE_PEERS_PENDING = "are_peers_pending"
    UPDATE_TOPOLOGY = "update_topology"
    OPTIMIZE_TOPOLOGY = "optimize_topology"
    SYNC = "sync_shared_state"

    ALL = (ARE_PEERS_PENDING, UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY, SYNC)
    EXCLUSIVE = (UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY, SYNC)
    """Kinds of call during which the caller has no op in flight."""
    GLOBAL = (ARE_PEERS_PENDING, UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY)
    """Kinds of call that the peers of all groups make together; the others are made by one group."""


class PendingAnswer:
    """The value of a GroupCallResult for are_peers_pending that ended without a count."""

    ADMITTING = -1
    ELSEWHERE = -2
    """They wait in other calls, or in an op that the receiver would have to launch."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The base of what messages are composed of. It carries no name on the wire."""


class PeerInfo(Part, frozen=True):
    """A peer as the others need to know it to make a link with it."""

    peer: int
    group: int
    hosts: list[str]
    port: int
    connections: int
    name: str = ""


class Ring(Part, frozen=True):
    """The order of a group's peers."""

    group: int
    epoch: int
    """The view of this ring's last change. Ops carry it."""
    peers: list[int]


class TensorOffer(Part, frozen=True):
    """One tensor of a shared state, without its content."""

    name: str
    dtype: str
    shape: list[int]
    loose: bool
    """Whether its content may differ between peers of one revision."""


class LinkMetric(Part, frozen=True):
    """A peer's measurement of one direction of a link."""

    peer: int
    is_inbound: bool
    """True: from `peer` to the one that has measured. False: to `peer`."""
    bytes_per_s: float
    round_trip_us: int

    def link_of(self, measurer: int) -> tuple[int, int]:
        """The sender and the receiver, where `measurer` is the peer that has measured."""
        return (self.peer, measurer) if self.is_inbound else (measurer, self.peer)


class SyncOffer(Part, frozen=True):
    """The shared state that a peer brings to sync_shared_state, without its content."""

    strategy: str
    revision: int
    root: bytes
    tensors: list[TensorOffer]


# Peer to master.


class Hello(Message, frozen=True):
    """The first message on a control connection of a peer that has no run yet. The answer is Welcome, Elsewhere or
    Goodbye."""

    protocol: int
    """The PROTOCOL_VERSION of the sender, here and in every other opening."""
    version: str
    group: int
    hosts: list[str]
    port: int
    connections: int
    name: str = ""
    auth: bytes = b""
    site: str = ""
    site_size: int = 0
    masters: int = 1
    may_found: bool = True
    """Whether the sender may be the first peer of a new run. A peer that knows several masters asks all of them for a
    run before it says so."""
    session: Secret = b""
    master_timeout_s: float = MASTER_TIMEOUT_S
    place: int = -1
    """The place in the ring of its group that the sender asks for, if it is one of the founders; -1: none."""


class HeartbeatHello(Message, frozen=True):
    """The only message on a peer's second connection to the master, for heartbeats. After `Accepted` each side sends a
    byte several times a second. The peer makes this connection upon Welcome, and again whenever it closes."""

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
    peer: int
    auth: bytes = b""
    masters: int = 1
    is_accepted: bool = True
    """False: the peer was still a newcomer, and may have been accepted without having heard of it."""
    session: Secret = b""
    master_timeout_s: float = MASTER_TIMEOUT_S


class Reattach(Message, frozen=True):
    """The first message on a control connection that continues the session of one that broke. The answer is Reattached,
    or Rejected by a master that does not know the session."""

    protocol: int
    session: Secret
    received: Count
    auth: bytes = b""


class Aborted(Part, frozen=True):
    tag: int
    sequence: int
    code: int
    reason: Reason


class GroupCallOutcome(Part, frozen=True):
    """The end of the last group call of a kind that a peer took part in."""

    kind: str
    call_number: int
    code: int
    reason: Reason
    value: int


class InstalledView(Part, frozen=True):
    """A view that is in force at the sender."""

    view: int
    rings: list[Ring]
    is_meshed: bool


class PreparedView(Part, frozen=True):
    """A view that the sender was told to prepare and that is not in force there."""

    view: int
    rings: list[Ring]
    answered: bool
    """Whether the sender has answered with LinksReady. Then the view may be in force elsewhere."""


class PreVote(Message, frozen=True):
    """The answer to PreVoteRequest: the views that this peer knows, without a promise. Fields as in RecoveryReport."""

    installed: InstalledView | None
    prepared: PreparedView | None
    has_decided: bool
    answered: list[PreparedView] = []


class RecoveryReport(Part, frozen=True):
    """Everything that a peer knows of its run and that the next master may not: see `recovery_report`."""

    me: PeerInfo
    installed: InstalledView | None
    """The last view in force at this peer; None: it was never accepted."""
    prepared: PreparedView | None
    """The last view that this peer was told to prepare, if that is newer than `installed`."""
    is_running: bool
    """Whether its ops still run: they were not stopped by a flush."""
    has_decided: bool
    """Whether `prepared` has decided all ops of the epoch in `installed`."""
    commits: Ops
    """Committed ops of the epoch in `installed` that other peers might not know."""
    aborts: list[Aborted]
    waits_in: str
    outcomes: list[GroupCallOutcome]
    joined_after: int
    """The number of the group call of the last call that ended before this peer was accepted."""
    synced: tuple[int, int] | None
    """The number of the group call and the revision of the last sync that this peer took part in with success."""
    unlinked: list[int]
    peer_timeout_s: float
    engine_threads: int
    site: str = ""
    site_size: int = 0
    link_metrics: Annotated[list[tuple[LinkMetric, Age]], msgspec.Meta(max_length=METRICS_KEPT_MAX)] = []
    """The peer's measurements, the oldest first, each with its age in seconds when the peer said Resume."""
    secret: Secret = b""
    answered: list[PreparedView] = []
    """Views newer than `installed` that this peer has answered to masters before the one that made `prepared`, unless a
    later master has ruled them out."""


class Vote(Message, frozen=True):
    """The answer to VoteRequest: this peer follows no master of a lower term any more."""

    term: int
    report: RecoveryReport


class Leave(Message, frozen=True):
    """The peer leaves the run on purpose. It is its last message."""

    reason: Reason = ""


class GroupCall(Message, frozen=True):
    """The peer enters a group call. It is in one at a time."""

    call: int
    kind: str
    offer: SyncOffer | None = None
    """The peer's shared state, for sync_shared_state; None for the other kinds."""
    open_ops: Ops = []
    """The ops that the peer has in flight, for are_peers_pending; empty for the other kinds."""


class GroupCallCancel(Message, frozen=True):
    """The caller no longer wants to wait. A call that has begun to take effect goes on."""

    call: int


class LinksReady(Message, frozen=True):
    """The answer to Prepare: each link that the view asks for is up or could not be made."""

    view: int
    failed: PeerReasons = []
    missing: PeerReasons = []
    """Other peers without a possible link. Without these links the group is not a mesh."""


class LinkFailed(Message, frozen=True):
    """A link that the sender dials for a prepared view cannot be made. It says so before its LinksReady, while it waits
    for other links."""

    view: int
    peer: int
    reason: Reason


class Tried(Message, frozen=True):
    """The answer to Trial."""

    failed: PeerReasons = []


class LinkLost(Message, frozen=True):
    """An established link broke."""

    made_in: int
    peer: int
    reason: Reason


class OpsDone(Message, frozen=True):
    """The sender holds all result bytes of these ops. It says so of ops that the master decides on, and of those that
    it has reported as stalled."""

    epoch: int
    ops: Ops


class OpFailed(Message, frozen=True):
    """An op cannot or must not complete: the arguments of peers differ, or a caller has given it up. The sender will
    not commit it by itself any more."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: Reason
    may_be_done: bool = False
    """Whether the op is done at the sender, or may become so. Then others may have committed it: see `completion`."""


class AbortVote(Message, frozen=True):
    """The answer to AbortVoteRequest: the sender has committed the op by itself, or promises never to do so."""

    epoch: int
    tag: int
    sequence: int
    is_committed: bool


class OpsStalled(Message, frozen=True):
    """These ops have waited for long. From this the master finds waits that can never end."""

    epoch: int
    ops: Ops


class OpsOver(Message, frozen=True):
    """The sender has committed these ops by itself, after it had reported them as stalled."""

    epoch: int
    ops: Ops


class TagsUsed(Message, frozen=True):
    """The sender has used too many tags in this epoch and starts no further op in it. A new epoch is due."""

    epoch: int
    tags: Count


class FlushReply(Message, frozen=True):
    """The answer to Flush: the group's ops have stopped at the sender."""

    flush: int
    ops: Ops
    """Ops that are done at the sender and have no verdict there."""
    commits: Ops = []
    """Committed ops of the sender that other peers might not know."""
    aborts: list[Aborted] = []


class SyncReport(Message, frozen=True):
    """A peer that had to fetch shared state has ended its transfer."""

    sync: int
    success: bool
    reason: Reason = ""
    suspects: PeerReasons = []


class Probes(Message, frozen=True):
    probe: int
    found: Annotated[list[LinkMetric], msgspec.Meta(max_length=PEERS_MAX)]


class LinkReport(Part, frozen=True):
    """The direction of a link from this peer to another, since it was made."""

    peer: int
    tx_bytes: Count
    busy_ms: Count = 0
    """Milliseconds with unacknowledged data."""
    sender_ms: Count = 0
    """The part of `busy_ms` limited by the send buffer."""
    receiver_ms: Count = 0
    """The part of `busy_ms` limited by the other end's receive window."""
    delivered: Count = 0
    resent: Count = 0
    unacked_bytes: Count = 0
    """Unacknowledged bytes now. This and the round trips may fall."""
    round_trip_us: Count = 0
    round_trip_us_min: Count = 0


class Report(Message, frozen=True):
    """The peer's counts since it connected. They are sent every few seconds while they change; no number ever falls."""

    ops: Annotated[list[tuple[int, Count, Count]], msgspec.Meta(max_length=REPORTED_EPOCHS_MAX)]
    """The last epochs, each with the number of ops that were committed and of those that were aborted."""
    tx_bytes: Count
    rx_bytes: Count
    state_rx_bytes: Count = 0
    reconnects: Count = 0
    """Number of broken connections to other peers that this peer has dialled again."""
    links: Annotated[list[LinkReport], msgspec.Meta(max_length=PEERS_MAX)] = []
    in_ops_ms: Count = 0
    """Milliseconds with ops of the whole group in flight."""
    op_wait_ms: Count = 0
    """Milliseconds since such ops are in flight without an end. This may fall."""
    at_ms: Count = 0
    """The moment of the report, by the peer's own clock."""


# Master to peer.


class Welcome(Message, frozen=True):
    """The answer to Hello: the peer is known, and waits for a view that admits it."""

    peer: int
    run: str
    term: int
    peer_timeout_s: float = 5.0
    engine_threads: int = 1
    """Number of engine threads of each peer. A connection of a link belongs to the thread `LinkHello.index` modulo this
    number, on both sides."""
    secret: Secret = b""
    obstacle: Reason = ""
    """The reason of a delay beyond the others' next update_topology; empty: none."""


class Reattached(Message, frozen=True):
    """The answer to Reattach: the session goes on. Both sides resend what the other has not received."""

    received: Count


class PreVoteRequest(Message, frozen=True):
    """The answer to Resume of a master that leads no run. It might lead the peer's once a majority of that run's last
    view has come, and asks which views the peer knows. The answer is PreVote."""


class VoteRequest(Message, frozen=True):
    """A majority has come, and this master asks to lead the run in this term. The answer is Vote, unless the peer has
    voted in this term or a higher one already."""

    term: int


class Resumed(Message, frozen=True):
    """This master leads the run, and the peer is in it. The peer answers with what the last master might not know:
    OpsDone, OpFailed, LinkLost, GroupCall."""

    term: int
    peer_timeout_s: float
    in_force: list[int] = []
    """The views that are or may be in force. Any other that the peer has answered never was and never will be."""


class Elsewhere(Message, frozen=True):
    """The last message of a connection: another master may serve the peer, which may also come again later."""

    reason: str


class StartOver(Message, frozen=True):
    """The last message of a connection: another master may serve the peer, which may also come again later."""

    reason: str


class Goodbye(Message, frozen=True):
    """The last message of a connection: another master may serve the peer, which may also come again later."""

    code: int
    reason: str
    secret: Secret = b""


class Flush(Message, frozen=True):
    """A peer of the receiver's group was lost: stop all ops of this epoch and say which are done. The answer is
    FlushReply."""

    flush: int
    epoch: int


class Prepare(Message, frozen=True):
    """The next view: make its links, then answer LinksReady. Where the epoch of the receiver's group differs from the
    installed one, its open ops end: `commits` are committed, all others aborted."""

    view: int
    members: list[PeerInfo]
    """The peers of the view that the receiver has not heard of in an earlier Prepare."""
    rings: list[Ring]
    commits: list[OpRef] = []
    relink: list[tuple[int, int]] = []
    """Pairs whose link is closed and made again, the lower number first."""
    lost: list[tuple[int, str]] = []
    aborts: list[Aborted] = []


class Trial(Message, frozen=True):
    """The receiver is a newcomer that was evicted for its links before, and is let in once it can connect to these
    peers; or it is accepted and has no links with them, and these are tried again. The answer is Tried."""

    members: list[PeerInfo]


class Install(Message, frozen=True):
    """The prepared view is installed. A peer that keeps its ring also keeps its `is_meshed`, `direct_limit` and
    `is_local`, because an op must be executed alike on all peers."""

    view: int
    is_meshed: bool = False
    call_number: int = 0
    """The number of the last group call that ends with this view or before; newcomers are accepted after it."""
    direct_limit: int = UNKNOWN
    """Largest size in bytes for the direct algorithm, or UNKNOWN: see `direct_limit`."""
    is_local: bool = False


class OpsCommit(Message, frozen=True):
    """The verdict on these ops: they are committed."""

    epoch: int
    ops: list[OpRef]


class OpAbort(Message, frozen=True):
    """The verdict on one op: it is aborted, also for a peer that has not launched it yet."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: str
    counts_as_made: bool = False
    """Whether a peer that has not launched the op counts it as launched. It does where its group call fails for the
    same reason: then its caller need not hear that again from the next op with the tag."""


class AbortVoteRequest(Message, frozen=True):
    """This op is aborted unless a peer has committed it. The answer is AbortVote."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: str


class GroupCallResult(Message, frozen=True):
    """The end of the group call that the receiver waits in."""

    call: int
    code: int
    reason: str = ""
    value: int = 0
    """The number of peers that wait, or a `PendingAnswer`, for are_peers_pending; the elected revision, for
    sync_shared_state; else 0."""
    call_number: int = 0
    """The number of the group call: the count of completed calls of the run. 0: it ended for some peers only."""


class SyncPlan(Message, frozen=True):
    sync: int
    revision: int
    root: bytes
    donors: list[int]
    fetch_content: bool
    fetch_loose: bool


class Probe(Message, frozen=True):
    """Measure these links, all at once, and answer Probes."""

    probe: int
    links: list[tuple[int, bool]]
    """The other peer of each link, and whether it is the one that sends."""


# Flight recorders, which bypass the machines of master and peer.


class RecordingRequest(Message, frozen=True):
    """Request of a part of the receiver's flight recorder. The answer is RecordingPart. The recording is taken with
    part 0 and kept until its last part was sent or another trace begins. One part is in flight at a time."""

    trace: int
    part: int
    """The number of the part, from 0; -1: only the time is asked for."""
    seconds: float = 0.0
    """How far back ops may have ended, links been looked at, and events been; 0: as far as is recorded."""
    last: Count = 0
    """How many ops at most; 0: all."""


class RecordingPart(Message, frozen=True):
    """The answer to RecordingRequest."""

    trace: int
    part: int
    parts: Count
    received_ns: Count
    sent_ns: Count
    content: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES_MAX)] = b""
    lack: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)] = ""


# Status and trace clients.


class StatusRequest(Message, frozen=True):
    """The only message of a status client. The answer is `Accepted` and `Status`, or Goodbye, and the connection
    closes."""

    protocol: int
    auth: bytes = b""


class Status(Message, frozen=True):
    run: RunStatus


class TraceRequest(Message, frozen=True):
    """The only message of a trace client. The answer is `Accepted`, for each peer its `TracePart`s and a `TracedPeer`,
    then `Traced`; or Goodbye. The connection closes."""

    protocol: int
    seconds: float = 0.0
    """As in RecordingRequest; so is `last`."""
    last: Count = 0
    auth: bytes = b""


class TracePart(Message, frozen=True):
    peer: int
    content: bytes


class TracedPeer(Message, frozen=True):
    """All of a peer's recording has been sent, or there is none."""

    peer: int
    name: str
    lack: str = ""
    offset_ns: int = 0
    """The peer's monotonic clock less the master's."""
    uncertainty_ns: int = 0
    """How far `offset_ns` may be off either way: half of the shortest round trip that was seen."""


class Traced(Message, frozen=True):
    run: str
    clock: str


# Check clients (`pccl doctor`).


class CheckRequest(Message, frozen=True):
    """The first message of a check client. The answer is `Accepted` and `Checked`, or Goodbye. `CheckEcho` and
    `CheckDial` may follow, one after the other."""

    protocol: int
    auth: bytes = b""


class Checked(Message, frozen=True):
    host: str
    """The client's address."""
    port: int
    version: str


class CheckEcho(Message, frozen=True):
    """Bytes without a meaning. It is answered by another one with as many as it asks for."""

    content: Annotated[bytes, msgspec.Meta(max_length=CHECK_BYTES_MAX)] = b""
    reply_bytes: Annotated[int, msgspec.Meta(ge=0, le=CHECK_BYTES_MAX)] = 0
    unix_s: float = 0.0


class CheckDial(Message, frozen=True):
    """Asks the master to dial these addresses, as other peers would, and to say `CheckCall` there."""

    hosts: Annotated[list[str], msgspec.Meta(max_length=CHECK_HOSTS_MAX)]
    port: int
    nonce: Secret


class CheckCall(Message, frozen=True):
    """The first message on a connection that CheckDial has asked for. It is answered by `Accepted`."""

    nonce: Secret
    content: Annotated[bytes, msgspec.Meta(max_length=CHECK_BYTES_MAX)] = b""


class CheckDialled(Message, frozen=True):
    calls: list[tuple[str, str]]


FromPeer = (
    Hello
    | HeartbeatHello
    | Resume
    | PreVote
    | Vote
    | Leave
    | GroupCall
    | GroupCallCancel
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
    | GroupCallResult
    | SyncPlan
    | Probe
)

PeerMessage = FromPeer | RecordingPart
MasterMessage = FromMaster | RecordingRequest
"""All messages of a control connection except Ack."""


# On control connections, either way.


class Ack(Message, frozen=True):
    """The number of messages of this session that the sender has received. An Ack is not counted."""

    received: Count


# On every connection between its opening and the answer to that, if both sides have a token: see `auth`.


class Challenge(Message, frozen=True):
    """The acceptor's share of the handshake."""

    auth: bytes
    run: str


class Proof(Message, frozen=True):
    """The proof that its sender knows the token. The dialer sends its own first, then the acceptor."""

    auth: bytes


# Peer to peer, before a connection is handed to the engine or to a state transfer.


class LinkHello(Message, frozen=True):
    """The dialer opens a connection that shall belong to a link."""

    protocol: int
    run: str
    sender: int
    receiver: int
    made_in: int
    index: int
    """The number of the connection within the link, from 0."""
    count: int
    auth: bytes = b""
    encrypt: bool = False
    padding_bytes: Padding = 0


class StateHello(Message, frozen=True):
    protocol: int
    run: str
    sender: int
    receiver: int
    sync: int
    auth: bytes = b""
    encrypt: bool = False
    sends_digests: bool = False
    """Whether the receiver shall send the Digests of all its tensors that are not loose, in order and unasked."""
    padding_bytes: Padding = 0


class ProbeHello(Message, frozen=True):
    """The dialer measures the link: see `runtime.network.probe`."""

    protocol: int
    run: str
    sender: int
    receiver: int
    pulls: bool
    """Whether the payload comes from the acceptor."""
    auth: bytes = b""
    padding_bytes: Padding = 0


class Accepted(Message, frozen=True):
    padding_bytes: Padding = 0


class Rejected(Message, frozen=True):
    reason: str


class DigestRequest(Message, frozen=True):
    tensor: int


class Digests(Message, frozen=True):
    tensor: int
    block_bytes: int
    digests: bytes


class BlockRequest(Message, frozen=True):
    """Asks a donor for blocks `[first, first + count)` of a tensor. Their raw bytes follow, without any frame."""

    tensor: int
    first: int
    count: int


PeerOpening = LinkHello | StateHello | ProbeHello
PeerAnswer = Accepted | Rejected
HeartbeatAnswer = Accepted | Goodbye | Elsewhere
Credential = Challenge | Proof
ToWatcher = Accepted | Status | Goodbye
ToTracer = Accepted | TracePart | TracedPeer | Traced | Goodbye
FromChecker = CheckEcho | CheckDial
ToChecker = Accepted | Checked | CheckEcho | CheckDialled | Goodbye
"""The answers to CheckRequest, and to what follows it."""
ReattachAnswer = Reattached | Rejected | Goodbye
Opening = Hello | HeartbeatHello | Resume | Reattach | StatusRequest | TraceRequest | CheckRequest | PeerOpening
"""The messages that a dialer may begin with."""
StateRequest = DigestRequest | BlockRequest
StateAnswer = Digests | Rejected

# msgspec finds out about a type when it first meets it, 2 ms for all of these: better here than while a peer joins.
msgspec.msgpack.Decoder(PeerMessage | MasterMessage | Opening | PeerAnswer | HeartbeatAnswer | Credential)
