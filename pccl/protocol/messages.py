"""All messages of the wire protocol: the reference for readers and other implementations.

`codec` frames messages and keeps control sessions, `auth` authenticates connections.

Format. A message is a msgpack array `[name, field, ...]`: its class name, then its fields in order. A `Part` of a
message is an array without a name.

Compatibility. New fields are added at the end with defaults: older readers ignore them, and newer readers use the
default if they are missing. Any other change raises `PROTOCOL_VERSION`.

Conventions. Peers, views, terms and groups are numbers; peer and view numbers are unique in a run. A result code is a
value of `pccl.types.Result`. Names end in their unit (`_s`, `_ms`, `_us`, `_bytes`, `_per_s`). The `auth` of an
opening is the dialer's share of a handshake, empty without a token.
"""

# No `from __future__ import annotations` here: msgspec would spend 4 ms on compiling them at the first message.

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
"""The failure codes that a message may contain. Only callers' results may be OUTCOME_UNKNOWN."""


class OpRef(NamedTuple):
    """The name of an op within one epoch of one group."""

    tag: int
    sequence: int
    """The use count of the tag: 0 for the first op with this tag in the epoch, 1 for the second, and so on."""


OPS_MAX = 2**18
PEERS_MAX = 2**14
REPORTED_EPOCHS_MAX = 16
METRICS_KEPT_MAX = 128
PART_BYTES_MAX = 32 * 2**10
"""Maximum size of one part of a recording. Other messages on the control connection wait for at most one part."""
CHECK_BYTES_MAX = 64 * 2**10
CHECK_HOSTS_MAX = 4
REASON_CHARACTERS_MAX = 2**14
"""Maximum length of a peer's reason. Reasons are logged and forwarded to all other peers."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
PADDING_BYTES_MAX = 20 * 2**10
Padding = Annotated[int, msgspec.Meta(ge=0, le=PADDING_BYTES_MAX)]
"""Number of meaningless bytes that follow a message on a connection between peers, to test whether the path carries
full-size packets: see `runtime.network.links`."""
Age = Annotated[int, msgspec.Meta(ge=0, le=2**32)]
Ops = Annotated[list[OpRef], msgspec.Meta(max_length=OPS_MAX)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)]
FIGURES_MAX = 16
FIGURE_CHARACTERS_MAX = 64
FigureName = Annotated[str, msgspec.Meta(max_length=FIGURE_CHARACTERS_MAX)]
PeerReasons = Annotated[list[tuple[int, Reason]], msgspec.Meta(max_length=PEERS_MAX)]


class Kind:
    """The kinds of group call."""

    ARE_PEERS_PENDING = "are_peers_pending"
    UPDATE_TOPOLOGY = "update_topology"
    OPTIMIZE_TOPOLOGY = "optimize_topology"
    SYNC = "sync_shared_state"

    ALL = (ARE_PEERS_PENDING, UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY, SYNC)
    EXCLUSIVE = (UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY, SYNC)
    """Kinds of call that a peer may enter only without ops in flight."""
    GLOBAL = (ARE_PEERS_PENDING, UPDATE_TOPOLOGY, OPTIMIZE_TOPOLOGY)
    """Kinds of call that the peers of all groups make together; each group makes the other kinds by itself."""


class PendingAnswer:
    """`GroupCallResult.value` for an are_peers_pending call that ended without a count."""

    ADMITTING = -1
    ELSEWHERE = -2
    """The other peers wait in other calls, or in an op that the receiver has not launched."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The base of message components, which have no name on the wire."""


class PeerInfo(Part, frozen=True):
    """The data about a peer that other peers need to make a link with it."""

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
    """The view in which this ring last changed. It is part of each op's name."""
    peers: list[int]


class TensorOffer(Part, frozen=True):
    """The metadata of one tensor of a shared state."""

    name: str
    dtype: str
    shape: list[int]
    loose: bool
    """Whether the content of the tensor may differ between peers at the same revision."""


class LinkMetric(Part, frozen=True):
    """A peer's measurement of one direction of a link."""

    peer: int
    is_inbound: bool
    """True for the direction from `peer` to the measuring peer, False for the reverse."""
    bytes_per_s: float
    round_trip_us: int

    def link_of(self, measurer: int) -> tuple[int, int]:
        """Return the sender and the receiver of a direction that the peer `measurer` measured."""
        return (self.peer, measurer) if self.is_inbound else (measurer, self.peer)


class SyncOffer(Part, frozen=True):
    """The metadata of the shared state that a peer offers in sync_shared_state."""

    strategy: str
    revision: int
    root: bytes
    tensors: list[TensorOffer]


# Peer to master.


class Hello(Message, frozen=True):
    """The first message on the control connection of a peer without a run. The answer is Welcome, Elsewhere or
    Goodbye."""

    protocol: int
    """The sender's PROTOCOL_VERSION, as in every opening."""
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
    """Whether the sender may be the first peer of a new run. A peer that knows several masters first searches all of
    them for a run."""
    session: Secret = b""
    master_timeout_s: float = MASTER_TIMEOUT_S
    place: int = -1
    """The position in its group's ring that the sender requests if it is one of the first peers; -1: none."""
    run_name: str = ""
    """The user's name for the run. Two parties of one run may not have different names; an empty name matches any."""


class HeartbeatHello(Message, frozen=True):
    """The only message on a peer's heartbeat connection, its second connection to the master. After `Accepted`, each
    side sends a byte several times a second. The peer connects upon Welcome, and again whenever the connection
    closes."""

    protocol: int
    run: str
    peer: int
    auth: bytes = b""


class Resume(Message, frozen=True):
    """The first message on the control connection of a peer that has lost its master. The answer is PreVoteRequest,
    Elsewhere, StartOver or Goodbye."""

    protocol: int
    run: str
    term: int
    peer: int
    auth: bytes = b""
    masters: int = 1
    is_accepted: bool = True
    """Whether the peer knows that it was accepted. A newcomer may have been accepted without receiving Install."""
    session: Secret = b""
    master_timeout_s: float = MASTER_TIMEOUT_S
    run_name: str = ""


class Reattach(Message, frozen=True):
    """The first message on a control connection that continues the session of a broken connection. The answer is
    Reattached, or Rejected if the master does not know the session."""

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
    """The result of the most recent group call of one kind that the peer took part in."""

    kind: str
    call_number: int
    code: int
    reason: Reason
    value: int


class InstalledView(Part, frozen=True):
    """The view that the sender has installed."""

    view: int
    rings: list[Ring]
    is_meshed: bool


class PreparedView(Part, frozen=True):
    """A view that a master asked the sender to prepare, and that the sender has not installed."""

    view: int
    rings: list[Ring]
    answered: bool
    """Whether the sender has answered with LinksReady. Then other peers may have installed the view."""


class PreVote(Message, frozen=True):
    """The answer to PreVoteRequest: the views that this peer knows, without a vote. Fields as in RecoveryReport."""

    installed: InstalledView | None
    prepared: PreparedView | None
    has_decided: bool
    answered: list[PreparedView] = []


class RecoveryReport(Part, frozen=True):
    """What a peer knows about its run and the next master may not know: see `recovery_report`."""

    me: PeerInfo
    installed: InstalledView | None
    """The last view that this peer installed; None if it was never accepted."""
    prepared: PreparedView | None
    """The last view that a master asked this peer to prepare, if it is newer than `installed`."""
    is_running: bool
    """Whether its ops still run, which means that no flush has stopped them."""
    has_decided: bool
    """Whether `prepared` has decided all ops of the epoch in `installed`."""
    commits: Ops
    """Committed ops of the epoch in `installed` whose commit other peers might not know."""
    aborts: list[Aborted]
    waits_in: str
    outcomes: list[GroupCallOutcome]
    joined_after: int
    """The number of the last group call that ended before this peer was accepted."""
    synced: tuple[int, int] | None
    """The group call's number and the revision of this peer's last successful sync."""
    unlinked: list[int]
    peer_timeout_s: float
    engine_threads: int
    site: str = ""
    site_size: int = 0
    link_metrics: Annotated[list[tuple[LinkMetric, Age]], msgspec.Meta(max_length=METRICS_KEPT_MAX)] = []
    """The peer's measurements, the oldest first, each with its age in seconds when the peer sent Resume."""
    secret: Secret = b""
    answered: list[PreparedView] = []
    """The views newer than `installed` that this peer acknowledged to earlier masters, except those that a later master
    has ruled out. The views of the master that sent `prepared` are not included."""


class Vote(Message, frozen=True):
    """The answer to VoteRequest: this peer no longer follows any master with a lower term."""

    term: int
    report: RecoveryReport


class Leave(Message, frozen=True):
    """The peer leaves the run deliberately. This is its last message."""

    reason: Reason = ""


class GroupCall(Message, frozen=True):
    """The peer enters a group call. A peer can be in only one at a time."""

    call: int
    kind: str
    offer: SyncOffer | None = None
    """The peer's shared state for sync_shared_state; None for the other kinds."""
    open_ops: Ops = []
    """The peer's ops in flight for are_peers_pending; empty for the other kinds."""


class GroupCallCancel(Message, frozen=True):
    """The caller wants to stop waiting for its group call. A call that has begun to take effect continues."""

    call: int


class LinksReady(Message, frozen=True):
    """The answer to Prepare: every link that the view needs is up or has failed."""

    view: int
    failed: PeerReasons = []
    missing: PeerReasons = []
    """Peers whose failed links the ring does not need. Without these links the group is not a mesh."""


class LinkFailed(Message, frozen=True):
    """The sender cannot make a link that it dials for a prepared view. Sent before LinksReady, while the sender waits
    for other links."""

    view: int
    peer: int
    reason: Reason


class Tried(Message, frozen=True):
    """The answer to Trial."""

    failed: PeerReasons = []


class LinkLost(Message, frozen=True):
    """An established link of the sender broke."""

    made_in: int
    peer: int
    reason: Reason


class OpsDone(Message, frozen=True):
    """The sender has all result bytes of these ops. Sent only for ops that the master decides and for ops that the
    sender has reported as stalled."""

    epoch: int
    ops: Ops


class OpFailed(Message, frozen=True):
    """An op cannot or must not complete because the peers' arguments differ or a caller has given up the op. The
    sender will no longer commit it by itself."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: Reason
    may_be_done: bool = False
    """Whether the op is done here or may still become so. Then other peers may have committed it: see `completion`."""


class AbortVote(Message, frozen=True):
    """The answer to AbortVoteRequest: the sender has committed the op by itself, or promises never to do so."""

    epoch: int
    tag: int
    sequence: int
    is_committed: bool


class OpsStalled(Message, frozen=True):
    """These ops have waited for a long time. The master uses these reports to detect deadlocks."""

    epoch: int
    ops: Ops


class OpsOver(Message, frozen=True):
    """The sender has committed these ops by itself after it reported them as stalled."""

    epoch: int
    ops: Ops


class TagsUsed(Message, frozen=True):
    """The sender has used too many tags in this epoch. It starts no further op until a new epoch."""

    epoch: int
    tags: Count


class FlushReply(Message, frozen=True):
    """The answer to Flush: the group's ops have stopped at the sender."""

    flush: int
    ops: Ops
    """Ops that are done at the sender but have no verdict there."""
    commits: Ops = []
    """Ops committed at the sender whose commit other peers might not know."""
    aborts: list[Aborted] = []


class SyncReport(Message, frozen=True):
    """The sender had to fetch shared state, and has now completed the transfer or given it up."""

    sync: int
    success: bool
    reason: Reason = ""
    suspects: PeerReasons = []


class Probes(Message, frozen=True):
    probe: int
    found: Annotated[list[LinkMetric], msgspec.Meta(max_length=PEERS_MAX)]


class LinkReport(Part, frozen=True):
    """Counts for one direction of a link, from this peer to another, since the link was made."""

    peer: int
    tx_bytes: Count
    busy_ms: Count = 0
    """Milliseconds during which data was unacknowledged."""
    sender_ms: Count = 0
    """The part of `busy_ms` during which the send buffer was the limit."""
    receiver_ms: Count = 0
    """The part of `busy_ms` during which the other end's receive window was the limit."""
    delivered: Count = 0
    resent: Count = 0
    unacked_bytes: Count = 0
    """Currently unacknowledged bytes. This and the round trips may decrease."""
    round_trip_us: Count = 0
    round_trip_us_min: Count = 0
    is_udp: bool = False


class Report(Message, frozen=True):
    """The peer's counts since it connected, sent every few seconds if they change. They only increase, unless noted."""

    ops: Annotated[list[tuple[int, Count, Count]], msgspec.Meta(max_length=REPORTED_EPOCHS_MAX)]
    """The most recent epochs, each with its numbers of committed and aborted ops."""
    tx_bytes: Count
    rx_bytes: Count
    state_rx_bytes: Count = 0
    reconnects: Count = 0
    """Number of broken connections to other peers that this peer has redialled."""
    links: Annotated[list[LinkReport], msgspec.Meta(max_length=PEERS_MAX)] = []
    in_ops_ms: Count = 0
    """Milliseconds during which ops of the whole group were in flight."""
    op_wait_ms: Count = 0
    """Milliseconds for which such ops have been in flight without one of them ending. This may decrease."""
    at_ms: Count = 0
    """The time of the report on the peer's own clock."""
    figures: Annotated[list[tuple[FigureName, float]], msgspec.Meta(max_length=FIGURES_MAX)] = []
    """Figures from the peer's program, such as its step and loss. They may decrease."""


# Master to peer.


class Welcome(Message, frozen=True):
    """The answer to Hello: the peer is registered and waits for a view that admits it."""

    peer: int
    run: str
    term: int
    peer_timeout_s: float = 5.0
    engine_threads: int = 1
    """Number of engine threads of each peer. On both sides, a link's connection belongs to the thread `LinkHello.index`
    modulo this number."""
    secret: Secret = b""
    obstacle: Reason = ""
    """Why admission is delayed beyond the others' next update_topology; empty if it is not."""


class Reattached(Message, frozen=True):
    """The answer to Reattach: the session continues. Both sides resend the messages that the other has not received."""

    received: Count


class PreVoteRequest(Message, frozen=True):
    """The answer to Resume from a master that leads no run, but can lead the peer's run once a majority of the last
    view is connected. It asks for the views that the peer knows; the peer answers PreVote."""


class VoteRequest(Message, frozen=True):
    """A majority is connected, and this master asks to lead the run in this term. The peer answers Vote, unless it has
    voted in this term or a higher one."""

    term: int


class Resumed(Message, frozen=True):
    """This master leads the run, and the peer belongs to it. The peer repeats the messages that the last master may not
    have received: OpsDone, OpFailed, LinkLost, GroupCall."""

    term: int
    peer_timeout_s: float
    in_force: list[int] = []
    """The views that are or may be in force. Other views that the peer acknowledged never will be."""


class Elsewhere(Message, frozen=True):
    """The last message of a connection. The peer tries other masters, and later this one again."""

    reason: str


class StartOver(Message, frozen=True):
    """The last message of a connection. The peer was never accepted, and starts again as a newcomer with Hello."""

    reason: str


class Goodbye(Message, frozen=True):
    """The last message of a connection, which refuses or evicts the peer. A newcomer may still try other masters."""

    code: int
    reason: str
    secret: Secret = b""


class Flush(Message, frozen=True):
    """Stop all ops of this epoch, for example after the loss of a peer or link, and report the ops that are done. The
    answer is FlushReply."""

    flush: int
    epoch: int


class Prepare(Message, frozen=True):
    """Prepare the next view: make its links, then answer LinksReady. If the epoch of the receiver's group differs from
    the installed one, all its open ops end: those in `commits` are committed, the others aborted."""

    view: int
    members: list[PeerInfo]
    """The view's peers that no earlier Prepare has introduced to the receiver."""
    rings: list[Ring]
    commits: list[OpRef] = []
    relink: list[tuple[int, int]] = []
    """Pairs of peers that close and remake their link, the lower number first."""
    lost: list[tuple[int, str]] = []
    aborts: list[Aborted] = []


class Trial(Message, frozen=True):
    """Try to connect to these peers. The receiver is an accepted peer without links to them, or a newcomer that was
    evicted for failed links and is admitted once it can connect. The answer is Tried."""

    members: list[PeerInfo]


class Install(Message, frozen=True):
    """Install the prepared view. A peer whose ring stays the same keeps its `is_meshed`, `direct_limit` and `is_local`,
    because all peers must execute an op in the same way."""

    view: int
    is_meshed: bool = False
    call_number: int = 0
    """Number of the last group call that ended with or before this view; newcomers take part only in later calls."""
    direct_limit: int = UNKNOWN
    """Largest size in bytes for the direct algorithm, or UNKNOWN: see `direct_limit`."""
    is_local: bool = False


class OpsCommit(Message, frozen=True):
    """The master commits these ops."""

    epoch: int
    ops: list[OpRef]


class OpAbort(Message, frozen=True):
    """The master aborts this op, even for a peer that has not launched it yet."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: str
    counts_as_made: bool = False
    """Whether the op counts as launched at a peer that has not launched it. Set if a group call of that peer fails for
    the same reason, so that its next op with the tag succeeds."""


class AbortVoteRequest(Message, frozen=True):
    """The master aborts this op unless a peer has committed it. The answer is AbortVote."""

    epoch: int
    tag: int
    sequence: int
    code: int
    reason: str


class GroupCallResult(Message, frozen=True):
    """The result of the group call that the receiver waits in."""

    call: int
    code: int
    reason: str = ""
    value: int = 0
    """For are_peers_pending the number of pending peers or a `PendingAnswer`; for sync_shared_state the elected
    revision; else 0."""
    call_number: int = 0
    """The number of the group call, counted over all completed calls of the run; 0 if it ended only for some peers."""


class SyncPlan(Message, frozen=True):
    sync: int
    revision: int
    root: bytes
    donors: list[int]
    fetch_content: bool
    fetch_loose: bool


class Probe(Message, frozen=True):
    """Measure these links, all at the same time. The answer is Probes."""

    probe: int
    links: list[tuple[int, bool]]
    """For each link, the other peer and whether that peer sends."""


# Flight recorders, which bypass the machines of master and peer.


class RecordingRequest(Message, frozen=True):
    """Request one part of the receiver's recording. The answer is RecordingPart. A request for part 0 makes the
    recording, which the receiver keeps until it has sent the last part or another trace begins. One request is in
    flight at a time."""

    trace: int
    part: int
    """The number of the part, starting at 0. A request for part -1 returns only the time."""
    seconds: float = 0.0
    """The age limit for ended ops, link samples and events; 0: none."""
    last: Count = 0
    """The largest number of ops; 0: all."""


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
    """The only message of a status client. The answer is `Accepted` and `Status`, or Goodbye. Then the connection
    closes."""

    protocol: int
    auth: bytes = b""


KICKED_OUT = "the operator has removed this peer from the run (pccl status --kick)"
"""The reason in the Goodbye to a removed peer."""


class KickRequest(Message, frozen=True):
    """The only message of an operator who removes a peer from the run. The answer is `Accepted` or Goodbye."""

    protocol: int
    peer: int
    auth: bytes = b""


class Status(Message, frozen=True):
    run: RunStatus


class TraceRequest(Message, frozen=True):
    """The only message of a trace client. The answer is Goodbye, or `Accepted`, each peer's `TracePart`s and
    `TracedPeer`, and finally `Traced`. Then the connection closes."""

    protocol: int
    seconds: float = 0.0
    """As in RecordingRequest, like `last`."""
    last: Count = 0
    auth: bytes = b""


class TracePart(Message, frozen=True):
    peer: int
    content: bytes


class TracedPeer(Message, frozen=True):
    """Marks the end of a peer's recording. The peer may have no recording."""

    peer: int
    name: str
    lack: str = ""
    offset_ns: int = 0
    """The peer's monotonic clock minus the master's."""
    uncertainty_ns: int = 0
    """The error bound of `offset_ns` in either direction: half of the shortest measured round trip."""


class Traced(Message, frozen=True):
    run: str
    clock: str


# Check clients (`pccl doctor`).


class CheckRequest(Message, frozen=True):
    """The first message of a check client. The answer is `Accepted` and `Checked`, or Goodbye. `CheckEcho` and
    `CheckDial` may follow, one at a time."""

    protocol: int
    auth: bytes = b""


class Checked(Message, frozen=True):
    host: str
    """The client's address."""
    port: int
    version: str


class CheckEcho(Message, frozen=True):
    """Arbitrary bytes. The answer is a CheckEcho of `reply_bytes` bytes."""

    content: Annotated[bytes, msgspec.Meta(max_length=CHECK_BYTES_MAX)] = b""
    reply_bytes: Annotated[int, msgspec.Meta(ge=0, le=CHECK_BYTES_MAX)] = 0
    unix_s: float = 0.0


class CheckDial(Message, frozen=True):
    """Ask the master to dial these addresses as other peers would, and to send `CheckCall` to each."""

    hosts: Annotated[list[str], msgspec.Meta(max_length=CHECK_HOSTS_MAX)]
    port: int
    nonce: Secret


class CheckCall(Message, frozen=True):
    """The first message on a connection that CheckDial requested. The answer is `Accepted`."""

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


# On control connections, in both directions.


class Ack(Message, frozen=True):
    """The number of messages that the sender has received in this session, not counting Acks."""

    received: Count


# On every connection between the opening and its answer, if both sides have a token: see `auth`.


class Challenge(Message, frozen=True):
    """The acceptor's share of the handshake."""

    auth: bytes
    run: str


class Proof(Message, frozen=True):
    """The proof that the sender knows the token. The dialer sends its proof first, then the acceptor."""

    auth: bytes


# Peer to peer, before the engine or a state transfer takes the connection over.


class LinkHello(Message, frozen=True):
    """The dialer opens a connection for a link."""

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
    memory: Secret = b""
    """An offer to share memory instead of this connection's stream; empty without one: see
    `runtime.network.shared_memory`."""
    udp_secret: Secret = b""
    """An offer to use UDP instead of this connection's stream, to the dialer's `udp_port`; empty without one: see
    `runtime.network.datagrams`."""
    udp_port: int = 0


class StateHello(Message, frozen=True):
    protocol: int
    run: str
    sender: int
    receiver: int
    sync: int
    auth: bytes = b""
    encrypt: bool = False
    sends_digests: bool = False
    """Whether the receiver sends, without a request, the Digests of all its tensors that are not loose, in order."""
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
    shares_memory: bool = False
    """Whether the acceptor has opened the memory that the dialer offered."""
    uses_udp: bool = False
    """Whether the acceptor has opened a socket for the datagrams that the dialer offered."""


class Rejected(Message, frozen=True):
    reason: str


class DigestRequest(Message, frozen=True):
    tensor: int


class Digests(Message, frozen=True):
    tensor: int
    block_bytes: int
    digests: bytes


class BlockRequest(Message, frozen=True):
    """Ask a donor for blocks `[first, first + count)` of a tensor. The answer is their raw bytes, without a frame."""

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
"""The answers to CheckRequest and to the messages after it."""
ReattachAnswer = Reattached | Rejected | Goodbye
FromOperator = StatusRequest | KickRequest | TraceRequest | CheckRequest
Opening = Hello | HeartbeatHello | Resume | Reattach | FromOperator | PeerOpening
"""The possible first messages of a dialer."""
StateRequest = DigestRequest | BlockRequest
StateAnswer = Digests | Rejected

# msgspec inspects a type at its first use. For all of these that takes 2 ms, so do it here and not while a peer joins.
msgspec.msgpack.Decoder(PeerMessage | MasterMessage | Opening | PeerAnswer | HeartbeatAnswer | Credential)
