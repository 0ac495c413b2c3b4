"""Links between one peer and the others of its ring: how they are made for a view, grown, replaced and lost.

A link is identified by the pair and the view whose `Prepare` made it (`made_in`), so both ends agree which connections
belong to it. The peer with the higher number (accepted later) dials. Link numbers are local to the peer and its engine.

*Connections.* The dialer replaces a lost connection. Unless the caller fixes their number, the dialer gives a distant
link with loss-based congestion control more connections from the start. Either end doubles the number while TCP windows
limit the link (the bandwidth-delay product is unknown in advance), and quadruples it while losses limit the link on a
path that is not full (`native/src/growth.h`). A link that loses packets first gets a connection over UDP, which takes
over from the others while it works (`native/src/wire.h`). With several engine threads, a connection's index assigns it
to one thread on both sides. Every link begins with one connection per thread. Each thread replaces its own lost
connections and adds further ones.

*On demand.* In a large group, peers that are not neighbours link at their first point-to-point op (`reach`): the op is
submitted at once and waits in the engine for the link. Each end makes its half by itself, so the end that waits for
the other to dial has no time limit. A new epoch closes these links at both ends. If a link cannot be made, the dialer
gives the pair's ops up; if it breaks, the master flushes the group, as for any link.

A link without connections is lost. If the other end has not noticed yet and still dials, its connections are refused
until the next view remakes the link.

*Silence.* An end whose data stays unacknowledged for half the peer timeout reports the link, which is then remade.
The attempt may take the other half, so a dead path is detected after one peer timeout, like a silent peer. Only the
dialer can detect a dead path; the other end waits longer, because the dialer's process may merely be busy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from math import inf

from pccl.protocol import messages as m
from pccl.protocol.messages import METRICS_KEPT_MAX, LinkMetric
from pccl.protocol.peer.effects import AddConnections, CloseLink, MakeLink, Outbox, PeerLog
from pccl.protocol.topology import are_linked_on_demand, linked_peers, neighbours

LINK_SHARE = 0.5
"""The maximum silence of a link, as a share of the peer timeout. Remaking the link may take as long again."""
LINK_TIMEOUTS = 2.0
"""Number of peer timeouts that making a link may take; the minimum is `LINK_TIMEOUT_S_MIN`."""
LINK_TIMEOUT_S_MIN = 2.0
LINK_CONNECTIONS_MAX = 64
GROWN_CONNECTIONS_MAX = 16
"""Largest number of connections of a link that is limited by windows."""
START_CONNECTIONS = 32
"""Initial connections of all distant links together, if the links request them (`native/src/growth.h`)."""
LOSSY_CONNECTIONS_MAX = 128
"""The maximum number of connections of all links whose speed losses limit. Any link may have `GROWN_CONNECTIONS_MAX`,
and none has more than `LINK_CONNECTIONS_MAX`."""
LOSSY_GROWTH = 3
"""Connections added for each existing one if losses limit the link."""
UDP_START_S = 0.01
"""Round trip from which a link whose start TCP slows down begins with UDP. On shorter paths lines are often fast, and
TCP takes less CPU time."""
UDP_TRIES = 3
"""Number of failed connections over UDP after which the links with a peer stay on TCP."""
PROBE_CONNECTIONS_MIN = 4
"""Minimum connections of a measurement if links may grow: TCP windows that ops would outgrow must not limit it."""
GRACE_S = 0.5
"""How much later than this end the other end may begin to make a link, in seconds."""


class Limit(IntEnum):
    """What limits a link (`native/src/growth.h`)."""

    RECOVERY = auto()
    WINDOWS = auto()
    START = auto()
    LOSS = auto()


CAUSES = {
    Limit.RECOVERY: "losses slow",
    Limit.WINDOWS: "TCP windows limit",
    Limit.START: "a long round trip slows",
    Limit.LOSS: "losses limit",
}


@dataclass
class _Link:
    link: int
    peer: int
    made_in: int
    connections: int
    """Connections needed before the link is up."""
    dial: bool
    is_on_demand: bool = False
    """Whether the ring did not need the link when it was made."""
    has_ops: bool = False
    """Whether point-to-point ops of this peer use the link although the ring does not need it."""
    connected: int = 0
    is_up: bool = False
    """Whether these connections are established. From then on, more may be added, and all but the last may break."""
    lost_early: list[int] = field(default_factory=list)
    """Engine threads whose connections were lost before the link was up."""
    started_early: dict[int, float] = field(default_factory=dict)
    """Engine threads that requested a start (`Limit.START`) before the link was up, and the round trip."""
    extras: dict[int, int] = field(default_factory=dict)
    """Connections dialled beyond `connections`, by engine thread."""
    udp: dict[int, Limit] = field(default_factory=dict)
    """Engine threads with a connection over UDP, and what it was opened for."""


@dataclass
class _Target:
    view: int = 0
    ring: Sequence[int] = ()
    is_open: bool = False
    failed: dict[int, str] = field(default_factory=dict)


class Links:
    def __init__(self, outbox: Outbox, connections: int, may_grow: bool) -> None:
        """`connections` is the initial number per link; it increases later if `may_grow`."""
        self.may_grow = may_grow
        self.may_use_udp = True
        self.engine_threads = 1
        self.peer_timeout_s = 0.0
        self._outbox = outbox
        self._connections = connections
        self._own = 0
        self._members: Mapping[int, m.PeerInfo] = {}
        self._target = _Target()
        self._epoch_view = 0
        """The last view that began an epoch."""
        self._links: dict[int, _Link] = {}
        self._last_link = 0
        self._broken: dict[int, m.LinkLost] = {}
        self._made_in: dict[int, int] = {}
        self._udp_failures: dict[int, int] = {}

    def welcomed(self, own: int, engine_threads: int, peer_timeout_s: float) -> None:
        self._own = own
        self.engine_threads = engine_threads
        self.peer_timeout_s = peer_timeout_s

    @property
    def timeout_s(self) -> float:
        return LINK_SHARE * self.peer_timeout_s

    def number_of(self, peer: int) -> int:
        link = self._links.get(peer)
        return link.link if link is not None else 0

    def reach(self, peer: int) -> int:
        """Return the number of the link for a point-to-point op, which is made first if the ring does not need it.
        Return 0 if it was just lost."""
        link = self._links.get(peer)
        if self._is_on_demand(peer):
            if link is None and peer not in self._broken:
                link = self._make(peer, self._epoch_view, dial=self._own > peer, is_on_demand=True)
            if link is not None:
                link.has_ops = True
        return link.link if link is not None else 0

    def peer_at(self, link: int) -> int | None:
        """Return the peer at the other end, or None once the link is closed."""
        found = self._find(link)
        return found.peer if found is not None else None

    def stands(self, peer: int) -> bool:
        link = self._links.get(peer)
        return link is not None and link.is_up

    def connections_to(self, member: m.PeerInfo) -> int:
        """Return the number of connections of the link with this peer, existing or planned."""
        link = self._links.get(member.peer)
        count = max(self._begun_with(member), link.connected if link is not None else 0)
        return max(count, PROBE_CONNECTIONS_MIN) if self.may_grow else count

    def lost_needed(self, ring: Sequence[int], is_meshed: bool) -> Iterator[m.LinkLost]:
        """Yield the lost links of the installed view that its ops need."""
        for lost in self._broken.values():
            if is_meshed or lost.peer in neighbours(ring, self._own) or self._is_on_demand(lost.peer):
                yield lost

    @property
    def gone(self) -> dict[int, str]:
        return {lost.peer: lost.reason for lost in self._broken.values()}

    # Views.

    def aim(self, view: int, ring: Sequence[int], members: Mapping[int, m.PeerInfo]) -> None:
        """Make a prepared view the target for links. `members` are the peers of all groups."""
        self._target = _Target(view, ring, is_open=True)
        self._members = members
        self._broken = {peer: lost for peer, lost in self._broken.items() if peer in members}
        self._made_in = {peer: made_in for peer, made_in in self._made_in.items() if peer in members}
        self._udp_failures = {peer: count for peer, count in self._udp_failures.items() if peer in members}

    def prepare(self, relinked: Collection[int]) -> None:
        """Make the links that the view needs, after closing all others and those with `relinked` peers."""
        ring, self._epoch_view = self._target.ring, self._target.view
        for peer in relinked:
            self._drop(peer)
        for peer in [link.peer for link in self._links.values() if link.is_on_demand or link.peer not in self._members]:
            self._drop(peer)
        for link in self._links.values():
            link.has_ops = False
        self._broken = {peer: lost for peer, lost in self._broken.items() if not self._is_on_demand(peer)}
        for peer in linked_peers(ring, self._own):
            if peer not in self._links:
                is_needed = peer in neighbours(ring, self._own)
                dial = self._own > peer
                self._make(peer, self._target.view, dial, is_urgent=peer in relinked, is_needed=is_needed)

    def readiness(self) -> m.LinksReady | None:
        """Return the answer to Prepare, or None until every link of the view is up or has failed."""
        target = self._target
        for peer in linked_peers(target.ring, self._own):
            if peer not in target.failed and not self.stands(peer):
                return None
        needed = neighbours(target.ring, self._own)
        failed = [(peer, reason) for peer, reason in sorted(target.failed.items()) if peer in needed]
        missing = [(peer, reason) for peer, reason in sorted(target.failed.items()) if peer not in needed]
        return m.LinksReady(target.view, failed, missing)

    def installed(self) -> None:
        """Record that the prepared view is installed."""
        self._target.is_open = False

    def close(self) -> None:
        """Close all links."""
        for peer in list(self._links):
            self._drop(peer)
        self._target = _Target()

    # Reports from the engine and the dialers.

    def lost(self, link: int, reason: str) -> m.LinkLost | None:
        """Record that a link broke. Return the message to send to the master, or None if none is needed."""
        found = self._find(link)
        if found is None:
            return None
        self._drop(found.peer)
        if found.peer not in self._members or not (found.has_ops or self._is_wanted(found.peer)):
            return None
        lost = m.LinkLost(found.made_in, found.peer, reason[: m.REASON_CHARACTERS_MAX])
        self._broken[found.peer] = lost
        # The master answers with another Prepare, unless the group can continue without this link.
        self._give_up(found.peer, reason)
        return lost

    def connected(self, link: int) -> bool:
        """Count a new connection of a link. Return whether to pass it to the engine; if not, the caller closes it."""
        found = self._find(link)
        if found is None or found.connected >= LINK_CONNECTIONS_MAX:
            return False
        found.connected += 1
        if found.connected == found.connections and not found.is_up:
            found.is_up = True
            for thread in found.lost_early:
                self._replace(found, thread)
            for thread, round_trip_s in found.started_early.items():
                self.limited(link, thread, Limit.START, round_trip_s)
        return True

    def connection_lost(self, link: int, reason: str, thread: int = 0, over_udp: bool = False) -> None:
        """Replace a broken connection of a link."""
        found = self._find(link)
        if found is None:
            return
        if over_udp:
            self._udp_lost(found, reason, thread)
            return
        text = f"the link with peer {found.peer} continues with one connection fewer: {reason}"
        self._outbox.emit(PeerLog("warning", text, {"other": found.peer}, link))
        if found.is_up:
            self._replace(found, thread)
        else:
            found.lost_early.append(thread)

    def _udp_lost(self, link: _Link, reason: str, thread: int) -> None:
        """Return to TCP, with the connections for which UDP was to be a substitute."""
        self._udp_failures[link.peer] = self._udp_failures.get(link.peer, 0) + 1
        text = f"the link with peer {link.peer} continues over TCP: {reason}"
        self._outbox.emit(PeerLog("info", text, {"other": link.peer}, link.link))
        self._grow(link, thread, link.udp.pop(thread, Limit.RECOVERY))

    def limited(self, link: int, thread: int = 0, limit: Limit = Limit.WINDOWS, round_trip_s: float = 0.0) -> None:
        """Add connections to a link that is limited in an engine thread, or one over UDP."""
        found = self._find(link)
        if found is None or not self.may_grow:
            return
        if not found.is_up:
            if limit is Limit.START:
                found.started_early[thread] = round_trip_s
            return
        if limit is Limit.START and not found.dial:
            return
        if limit is Limit.WINDOWS or (limit is Limit.START and round_trip_s < UDP_START_S):
            self._grow(found, thread, limit)
        elif thread in found.udp:
            found.udp[thread] = max(found.udp[thread], limit)
        elif self.may_use_udp and self._udp_failures.get(found.peer, 0) < UDP_TRIES:
            found.udp[thread] = limit
            text = f"{CAUSES[limit]} the link with peer {found.peer}: trying UDP"
            self._outbox.emit(PeerLog("info", text, {"other": found.peer}))
            self._add(found, thread, 1, is_replacement=False, over_udp=True)
        else:
            self._grow(found, thread, limit)

    def _grow(self, link: _Link, thread: int, limit: Limit) -> None:
        count = self._growth(link, limit)
        if count > 0:
            text = f"{CAUSES[limit]} the link with peer {link.peer}: adding {count} connections to {link.connected}"
            self._outbox.emit(PeerLog("info", text, {"other": link.peer}))
            self._add(link, thread, count, is_replacement=False)

    def _growth(self, link: _Link, limit: Limit) -> int:
        """Return the number of connections to add in one engine thread."""
        if limit is Limit.RECOVERY:
            return 0
        if limit is Limit.START:
            return (START_CONNECTIONS // len(self._links) - link.connections) // self.engine_threads
        by_loss = limit is Limit.LOSS
        most = self._lossy_connections_max if by_loss else GROWN_CONNECTIONS_MAX
        factor = LOSSY_GROWTH if by_loss else 1
        # Both ends may add connections at the same time; connections beyond the limit are refused.
        room = (LINK_CONNECTIONS_MAX - link.connected + link.dial) // 2
        return min(factor * link.connected // self.engine_threads, most - link.connected, room)

    def failed(self, link: int, reason: str) -> m.LinkFailed | None:
        """Record that a link could not be made. Return the message to send to the master, or None if none is needed."""
        found = self._find(link)
        if found is None or found.is_up:
            return None
        self._drop(found.peer)
        target = self._target
        if not target.is_open or not self._is_wanted(found.peer):
            return None
        if found.made_in < target.view:
            # The attempt began under an earlier Prepare: the other side may have started over since then.
            self._make(found.peer, target.view, dial=self._own > found.peer)
            return None
        self._give_up(found.peer, reason)
        if not found.dial:
            return None
        return m.LinkFailed(target.view, found.peer, reason[: m.REASON_CHARACTERS_MAX])

    def offered(self, peer: int, made_in: int) -> int | str | None:
        if made_in > self._target.view:
            return None
        if peer not in self._members or peer == self._own:
            return f"peer {peer} is not in view {self._target.view}"
        if made_in < self._made_in.get(peer, 0):
            return f"the link with peer {peer} was made again in view {self._made_in[peer]}"
        link = self._links.get(peer)
        lost = self._broken.get(peer)
        is_on_demand = self._is_on_demand(peer)
        if is_on_demand and link is None and made_in < self._epoch_view:
            return f"the epoch of view {made_in} is over"
        if link is None and lost is not None and lost.made_in == made_in:
            return f"the link with peer {peer} of view {made_in} was lost here"
        if link is None or link.made_in < made_in:
            # The dialer, which decides, has dropped the link that is still up here.
            self._drop(peer)
            link = self._make(peer, made_in, dial=False, is_on_demand=is_on_demand)
        if link.connected >= LINK_CONNECTIONS_MAX:
            return f"the link with peer {peer} has {link.connected} connections already"
        return link.link

    @property
    def _lossy_connections_max(self) -> int:
        return min(LINK_CONNECTIONS_MAX, max(GROWN_CONNECTIONS_MAX, LOSSY_CONNECTIONS_MAX // len(self._links)))

    def _find(self, link: int) -> _Link | None:
        return next((each for each in self._links.values() if each.link == link), None)

    def _is_wanted(self, peer: int) -> bool:
        return peer in linked_peers(self._target.ring, self._own)

    def _is_on_demand(self, peer: int) -> bool:
        return are_linked_on_demand(self._target.ring, self._own, peer)

    def _give_up(self, peer: int, reason: str) -> None:
        if self._target.is_open:
            self._target.failed[peer] = reason

    def _begun_with(self, member: m.PeerInfo) -> int:
        return max(self._connections, member.connections, self.engine_threads)

    def _make(
        self,
        peer: int,
        made_in: int,
        dial: bool,
        is_urgent: bool = False,
        is_needed: bool = True,
        is_on_demand: bool = False,
    ) -> _Link:
        """Begin to make a link. `is_urgent`: it broke before. `is_needed`: the group cannot run without the link."""
        member = self._members[peer]
        timeout_s = max(LINK_TIMEOUT_S_MIN, LINK_TIMEOUTS * self.peer_timeout_s)
        reach_s = self.timeout_s if is_urgent else max(LINK_TIMEOUT_S_MIN, self.peer_timeout_s)
        if is_urgent and not is_needed and not dial:
            timeout_s = min(timeout_s, reach_s + GRACE_S)
        if is_on_demand and not dial:
            timeout_s = inf
        if peer in self._broken and self._broken[peer].made_in < made_in:
            del self._broken[peer]
        self._made_in[peer] = made_in
        self._last_link += 1
        link = self._links[peer] = _Link(self._last_link, peer, made_in, self._begun_with(member), dial, is_on_demand)
        self._outbox.emit(MakeLink(link.link, member, made_in, link.connections, dial, reach_s, timeout_s))
        return link

    def _replace(self, link: _Link, thread: int) -> None:
        link.connected -= 1
        if link.dial:
            self._add(link, thread, 1, is_replacement=True)

    def _add(self, link: _Link, thread: int, count: int, is_replacement: bool, over_udp: bool = False) -> None:
        member = self._members.get(link.peer)
        if count <= 0 or member is None:
            return
        threads = self.engine_threads
        extras = link.extras.get(thread, 0)
        link.extras[thread] = extras + count
        first = link.connections + (thread - link.connections) % threads + extras * threads
        indices = range(first, first + count * threads, threads)
        timeout_s = LINK_TIMEOUTS * self.peer_timeout_s
        made_in = link.made_in
        self._outbox.emit(AddConnections(link.link, member, made_in, indices, is_replacement, timeout_s, over_udp))

    def _drop(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._outbox.emit(CloseLink(link.link))


Link = tuple[int, bool]
"""The other peer, and whether that peer sends."""


class Measurements:
    def __init__(self) -> None:
        self._found: dict[Link, tuple[LinkMetric, float]] = {}

    def add(self, found: list[LinkMetric], now: float) -> None:
        for metric in found:
            self._found[metric.peer, metric.is_inbound] = metric, now
        for oldest in list(self._found)[:-METRICS_KEPT_MAX]:
            del self._found[oldest]

    def discard(self, links: list[Link]) -> None:
        for link in links:
            self._found.pop(link, None)

    def keep(self, peers: Collection[int]) -> None:
        """Forget the links with all other peers."""
        self._found = {link: metric for link, metric in self._found.items() if link[0] in peers}

    def aged(self, now: float) -> list[tuple[LinkMetric, int]]:
        return [(metric, max(0, round(now - at))) for metric, at in self._found.values()]
