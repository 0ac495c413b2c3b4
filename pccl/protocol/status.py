"""The status of a run as the master sees it: the schema of `pccl status`, the status page and the metrics.

The status is sent as msgpack or JSON maps. Readers ignore fields that they do not know, and fields added later have
defaults. Times are given as ages in seconds, because the clocks of machines differ. Texts are printable.
"""

# No `from __future__ import annotations` here, as in `messages`.

import msgspec


class Waiting(msgspec.Struct, frozen=True):
    """The group call that a peer waits in."""

    call: str
    for_s: float
    missing: list[int]
    """The first few peers that have not made the call yet; empty once the call is in progress."""


class StalledOp(msgspec.Struct, frozen=True):
    """An op that a peer has waited in for a long time."""

    tag: int
    sequence: int
    missing: list[int]
    """The first few other peers that have not completed it: the receiver for a send, the sender for a recv."""
    call: str = "op"
    """"send", "recv", or "op" if the whole group takes part."""


class LinkTraffic(msgspec.Struct, frozen=True):
    """One direction of a link, from one peer to another. Shares and rates cover the last few seconds."""

    peer: int
    tx_bytes: int
    tx_bytes_per_s: float
    round_trip_s: float = 0.0
    """The current round trip; 0 if the system does not report it."""
    round_trip_s_min: float = 0.0
    resent_share: float = 0.0
    """Share of sent TCP segments that were retransmissions."""
    unacked_bytes: int = 0
    sender_limited: float = 0.0
    receiver_limited: float = 0.0
    is_udp: bool = False


class PeerTraffic(msgspec.Struct, frozen=True):
    tx_bytes: int = 0
    rx_bytes: int = 0
    tx_bytes_per_s: float = 0.0
    rx_bytes_per_s: float = 0.0
    links: list[LinkTraffic] = []
    waited: float = 0.0
    """Share of the last few seconds during which the program waited for ops of the whole group."""


class MemberStatus(msgspec.Struct, frozen=True):
    """A peer of the run, or one that waits to be admitted."""

    peer: int
    name: str
    group: int
    address: str
    state: str
    """"connecting": it has sent no heartbeat yet; "pending": it waits for an update_topology; "joining": it is in the
    prepared view; "accepted"."""
    known_s: float
    waiting: Waiting | None = None
    stalled_ops: list[StalledOp] = []
    answer_due_s: float | None = None
    """Seconds since the master requested an answer to a membership change that the peer has not sent yet."""
    is_heard: bool = True
    traffic: PeerTraffic = PeerTraffic()
    figures: dict[str, float] = {}
    """Figures from the peer's program (`Communicator.report`); `step_s` is the time per step."""


class LinkFigures(msgspec.Struct, frozen=True):
    sender: int
    receiver: int
    bytes_per_s: float
    """The capacity of the link."""
    round_trip_s: float
    age_s: float
    """Seconds since an optimize_topology measured it between these peers or other peers on their hosts."""


class GroupStatus(msgspec.Struct, frozen=True):
    group: int
    ring: list[int]
    epoch: int
    state: str
    """"running"; "flushing": its ops are being stopped after a loss; "forming": its links are being made."""
    is_meshed: bool
    revision: int | None
    undecided_ops: int
    """Number of ops reported to the master that some peers have completed and others have not."""
    is_syncing: bool = False
    links: list[LinkFigures] = []
    decision: str = ""


class Totals(msgspec.Struct, frozen=True):
    """Counts since the master started. Peers report ops and bytes every few seconds."""

    ops_committed: int = 0
    ops_aborted: int = 0
    """Ops aborted by a loss, a timeout or a caller's mistake. A retry counts as a new op."""
    joins: int = 0
    losses: int = 0
    leaves: int = 0
    tx_bytes: int = 0
    state_bytes: int = 0
    reconnects: int = 0
    """Connections between peers that broke and were re-established."""


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
    """A peer that the others wait for, with the evidence."""

    kind: str
    """"silent": the peer sends no heartbeats; "absent": other peers wait in a call that this peer has not made;
    "straggler": the other peers wait for this peer in every step."""
    peer: int
    group: int
    text: str
    for_s: float = 0.0


class Course(msgspec.Struct, frozen=True):
    """Totals per time step over the last few minutes, oldest first. The last step is incomplete."""

    step_s: float
    steps: list[Totals]
    loss: list[float | None] = []
    """For each step, the mean of the `loss` figures that programs reported; empty if there was none."""


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
    """"leading"; "vacant": without peers so far; "standby": ready to take over a run; "recovering": waiting for the
    peers of a run that have lost their master (`recovery`)."""
    findings: list[Finding] = []
    """Peers that the others currently wait for, the longest wait first."""
    held: int = 0
    """Number of newcomers whose admission the master delays."""
    held_for: str = ""
    """What the master waits for before newcomers may start a run, how long it will wait, and how to skip the wait."""
    recovery: str = ""
    """The peers of a run that have returned to a restarted master, and the remaining wait for the others; empty if it
    waits for none."""
    hour: Course = Course(1.0, [])
    """The same figures as in `course`, over the last hour and at longer intervals."""
    address: str = ""
    """The "host:port" at which new peers can probably reach the master."""
    run_name: str = ""
    """The user's name for the run, if it has one."""
    has_token: bool = False
    """Whether peers need a token."""
