"""The status of a run, as its master sees it at one moment: the schema of `pccl status`, the page and the metrics.

Plain values that travel as msgpack or JSON maps: a reader ignores fields that it does not know, and fields added later
have defaults. Moments are given as ages in seconds, because clocks of different machines differ; texts are printable.
"""

# Annotations are not put off here, as in `messages`.

import msgspec


class Waiting(msgspec.Struct, frozen=True):
    """A group call that a peer waits in."""

    call: str
    for_s: float
    missing: list[int]
    """The first of the peers that have not made the call yet; none: it is being carried out."""


class StalledOp(msgspec.Struct, frozen=True):
    """An op that a peer has waited in for long."""

    tag: int
    sequence: int
    missing: list[int]
    """The first of the other peers that are not done with it; of a send the receiver, of a recv the sender."""
    call: str = "op"
    """"send", "recv", or "op" where all of the group take part."""


class LinkTraffic(msgspec.Struct, frozen=True):
    """One direction of a link: what a peer sends to another. Shares and rates are of the last seconds."""

    peer: int
    tx_bytes: int
    tx_bytes_per_s: float
    round_trip_s: float = 0.0
    """The round trip now; 0 where the system does not report it."""
    round_trip_s_min: float = 0.0
    resent_share: float = 0.0
    """Retransmitted share of the TCP segments that were sent."""
    unacked_bytes: int = 0
    sender_limited: float = 0.0
    receiver_limited: float = 0.0


class PeerTraffic(msgspec.Struct, frozen=True):
    tx_bytes: int = 0
    rx_bytes: int = 0
    tx_bytes_per_s: float = 0.0
    rx_bytes_per_s: float = 0.0
    links: list[LinkTraffic] = []


class MemberStatus(msgspec.Struct, frozen=True):
    """One peer of the run, or one that waits to be admitted."""

    peer: int
    name: str
    group: int
    address: str
    state: str
    """"connecting": no heartbeat yet; "pending": waits for an update_topology; "joining": part of the view that is
    prepared; "accepted"."""
    known_s: float
    waiting: Waiting | None = None
    stalled_ops: list[StalledOp] = []
    answer_due_s: float | None = None
    """Seconds since the master asked it for an answer to a change of membership."""
    is_heard: bool = True
    traffic: PeerTraffic = PeerTraffic()


class LinkFigures(msgspec.Struct, frozen=True):
    sender: int
    receiver: int
    bytes_per_s: float
    """The rate that it could carry."""
    round_trip_s: float
    age_s: float
    """Seconds since an optimize_topology measured it, between these peers or others of their hosts."""


class GroupStatus(msgspec.Struct, frozen=True):
    group: int
    ring: list[int]
    epoch: int
    state: str
    """"running"; "flushing": its ops stop after a loss; "forming": links are made."""
    is_meshed: bool
    revision: int | None
    undecided_ops: int
    """Number of ops that some peers are done with and others not, as far as the master hears of them."""
    is_syncing: bool = False
    links: list[LinkFigures] = []
    decision: str = ""


class Totals(msgspec.Struct, frozen=True):
    """Numbers since the master started. Ops and bytes are as peers report them every few seconds."""

    ops_committed: int = 0
    ops_aborted: int = 0
    """Ops that were aborted by a loss, a timeout or a caller's mistake. Callers that want the result make them
    again."""
    joins: int = 0
    losses: int = 0
    leaves: int = 0
    tx_bytes: int = 0
    state_bytes: int = 0
    reconnects: int = 0
    """Connections between peers that broke and were made again."""


class Loss(msgspec.Struct, frozen=True):
    age_s: float
    peer: int
    name: str
    group: int
    reason: str


class Event(msgspec.Struct, frozen=True):
    age_s: float
    level: str
    """"debug", "info" or "warning"."""
    text: str


class Finding(msgspec.Struct, frozen=True):
    """A peer that the others wait for."""

    kind: str
    """"silent": no heartbeat comes from the peer; "absent": it has not made a call that others wait in; "straggler":
    the others wait for it in every step."""
    peer: int
    group: int
    text: str
    for_s: float = 0.0


class Course(msgspec.Struct, frozen=True):
    """The last minutes, step by step, oldest first. The last step is not over."""

    step_s: float
    steps: list[Totals]


class RunStatus(msgspec.Struct, frozen=True):
    run: str
    term: int
    version: str
    uptime_s: float
    peer_timeout_s: float
    view: int
    is_changing: bool
    groups: list[GroupStatus]
    members: list[MemberStatus]
    totals: Totals
    course: Course
    losses: list[Loss]
    events: list[Event]
    role: str = "leading"
    """"leading"; "vacant": it has no peers yet; "standby": it waits to take over a run."""
    findings: list[Finding] = []
    """Peers that the others wait for now, the longest first."""
    held: int = 0
    """Number of newcomers that the master holds."""
    held_for: str = ""
    """What the master waits for before newcomers may begin a run, for how long, and what skips that."""
