"""Links of one peer with the others of its ring: made for a view, grown, replaced, lost.

A link is named by the pair and the view whose `Prepare` made it (`made_in`), so both ends agree which connections
belong to it. The peer with the higher number (accepted later) dials. The engine knows a link by a number that means
nothing elsewhere.

Connections. A link that stands may get more of them. Its dialer makes a lost one anew. Where the caller leaves their
number to us, either end adds as many as there are while the engine finds that their windows hold them back: what a pair
needs is its bandwidth times its round trip, which nobody can know before. The same where losses hold them back on a
path that is not full (`native/src/growth.h`). Where the path is full, more streams only crowd each other. Where engines
have several threads, each connection belongs to one of them by its index, on both sides, and every link begins with a
connection for each. A lost one is replaced in its thread, and the connections of a thread grow by themselves.

A link whose connections were all lost is lost at both ends. Each notices at its own time, so the dialer may be
replacing connections of a link that the other end has dropped, with all that was on its way. Such connections are
refused, also when the link was made anew meanwhile, even in vain: the dialer then loses the last of its own, and the
next view has a new link.

Silence. A link between two live peers that carries nothing any more is missed by whichever end has something lying on
it, after half the peer timeout, and made anew. The other half is for that, so that a path that stays dead is known
after a peer timeout, as a silent peer is. Only the dialer can tell that nothing gets through to the other side; the end
that expects it to dial is patient, because a process may be merely busy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.messages import METRICS_KEPT_MAX, LinkMetric
from pccl.protocol.peer.effects import AddConnections, CloseLink, MakeLink, Outbox, PeerLog
from pccl.protocol.topology import linked_peers, neighbours

LINK_SHARE = 0.5
"""Share of the peer timeout for which a link may carry nothing, and for which making it anew may then get nowhere."""
LINK_TIMEOUTS = 2.0
"""Number of peer timeouts that making a link may take, and `LINK_TIMEOUT_S_MIN` at least."""
LINK_TIMEOUT_S_MIN = 2.0
LINK_CONNECTIONS_MAX = 64
"""Number of connections of a link. More are refused, whoever dials."""
GROWN_CONNECTIONS_MAX = 16
"""Number of connections up to which a link grows by itself where windows hold it back."""
LOSSY_CONNECTIONS_MAX = 128
"""Connections up to which all links together grow where losses hold them back. Each link may have
`GROWN_CONNECTIONS_MAX` of these, and has `LINK_CONNECTIONS_MAX` at most."""
LOSSY_GROWTH = 3
"""Number of connections added for each that losses hold back: at a loss rate that matters many are needed."""
PROBE_CONNECTIONS_MIN = 4
"""Number of connections of a measurement where links may grow: it must not stop at a window that an op would have
outgrown."""
GRACE_S = 0.5
"""Seconds by which the other end may begin later to make a link."""


@dataclass
class _Link:
    """One link, from the time when it begins to be made."""

    link: int
    peer: int
    made_in: int
    connections: int
    """Number of connections without which it does not stand."""
    dial: bool
    connected: int = 0
    is_up: bool = False
    """Whether all of them have come. Further ones may come then, and any but the last may go."""
    lost_early: list[int] = field(default_factory=list)
    """Engine threads of the connections that were lost before that."""
    extras: dict[int, int] = field(default_factory=dict)
    """Number of connections dialled beyond those, by engine thread."""


@dataclass
class _Target:
    """The links that the last prepared view asks for."""

    view: int = 0
    ring: Sequence[int] = ()
    is_open: bool = False
    """Whether the view is not installed yet."""
    failed: dict[int, str] = field(default_factory=dict)
    """Peers with whom a link could not be made, and why."""


class Links:
    """All links of one peer."""

    def __init__(self, outbox: Outbox, connections: int, may_grow: bool) -> None:
        """Each link begins with `connections` connections, and may add more where it `may_grow`."""
        self.may_grow = may_grow
        self.engine_threads = 1
        self.peer_timeout_s = 0.0
        self._outbox = outbox
        self._connections = connections
        self._own = 0
        self._members: Mapping[int, m.PeerInfo] = {}
        self._target = _Target()
        self._links: dict[int, _Link] = {}
        """Links by peer."""
        self._last_link = 0
        self._broken: dict[int, m.LinkLost] = {}
        """Links of the installed view that were lost since, by peer."""
        self._made_in: dict[int, int] = {}
        """The newest view for which a link was made, by peer, whatever has become of it."""

    def welcomed(self, own: int, engine_threads: int, peer_timeout_s: float) -> None:
        """Note what the master has said: this peer's number, and what all of a run have in common."""
        self._own = own
        self.engine_threads = engine_threads
        self.peer_timeout_s = peer_timeout_s

    @property
    def timeout_s(self) -> float:
        """Seconds for which bytes may lie on a link without anything getting through; 0 before Welcome."""
        return LINK_SHARE * self.peer_timeout_s

    def number_of(self, peer: int) -> int:
        """Return the number of the link to a peer; 0, which is no link, where there is none."""
        link = self._links.get(peer)
        return link.link if link is not None else 0

    def peer_at(self, link: int) -> int | None:
        """Return the peer at the other end; None once the link is closed."""
        found = self._find(link)
        return found.peer if found is not None else None

    def stands(self, peer: int) -> bool:
        link = self._links.get(peer)
        return link is not None and link.is_up

    def connections_to(self, member: m.PeerInfo) -> int:
        """Return the number of connections that the link with this peer has, or would have once it is used."""
        link = self._links.get(member.peer)
        count = max(self._begun_with(member), link.connected if link is not None else 0)
        return max(count, PROBE_CONNECTIONS_MIN) if self.may_grow else count

    def lost_needed(self, ring: Sequence[int], is_meshed: bool) -> Iterator[m.LinkLost]:
        """Yield the links of the installed view that were lost since and that its ops need."""
        for lost in self._broken.values():
            if is_meshed or lost.peer in neighbours(ring, self._own):
                yield lost

    @property
    def gone(self) -> dict[int, str]:
        """The peers whose links were lost since the view was installed, and why."""
        return {lost.peer: lost.reason for lost in self._broken.values()}

    # Views.

    def aim(self, view: int, ring: Sequence[int], members: Mapping[int, m.PeerInfo]) -> None:
        """Make this prepared view the one that links are for. `members` are the peers of all groups."""
        self._target = _Target(view, ring, is_open=True)
        self._members = members
        self._broken = {peer: lost for peer, lost in self._broken.items() if peer in members}
        self._made_in = {peer: made_in for peer, made_in in self._made_in.items() if peer in members}

    def prepare(self, relinked: Collection[int]) -> None:
        """Make the links that the view needs and close those it does not, those with `relinked` peers first."""
        for peer in relinked:
            self._drop(peer)
        for peer in [peer for peer in self._links if peer not in self._members]:
            self._drop(peer)
        ring = self._target.ring
        for peer in linked_peers(ring, self._own):
            if peer not in self._links:
                is_needed = peer in neighbours(ring, self._own)
                dial = self._own > peer
                self._make(peer, self._target.view, dial, is_urgent=peer in relinked, is_needed=is_needed)

    def readiness(self) -> m.LinksReady | None:
        """Return the answer to Prepare, once every link of the view stands or has failed; None before."""
        target = self._target
        for peer in linked_peers(target.ring, self._own):
            if peer not in target.failed and not self.stands(peer):
                return None
        needed = neighbours(target.ring, self._own)
        failed = [(peer, reason) for peer, reason in sorted(target.failed.items()) if peer in needed]
        missing = [(peer, reason) for peer, reason in sorted(target.failed.items()) if peer not in needed]
        return m.LinksReady(target.view, failed, missing)

    def installed(self) -> None:
        """Note that the prepared view is in force."""
        self._target.is_open = False

    def close(self) -> None:
        """Close all links, and aim at none."""
        for peer in list(self._links):
            self._drop(peer)
        self._target = _Target()

    # What the engine and the makers of links report.

    def lost(self, link: int, reason: str) -> m.LinkLost | None:
        """Note that an established link broke. Return what the master is told of it, if anything."""
        found = self._find(link)
        if found is None:
            return None
        self._drop(found.peer)
        if found.peer not in self._members or not self._is_wanted(found.peer):
            return None
        lost = m.LinkLost(found.made_in, found.peer, reason[: m.REASON_CHARACTERS_MAX])
        self._broken[found.peer] = lost
        # The master answers with another Prepare, unless the group may go on without this link.
        self._give_up(found.peer, reason)
        return lost

    def connected(self, link: int) -> bool:
        """Count one more connection of a link. Return False if it is not wanted any more: then it must be closed, else
        handed to the engine."""
        found = self._find(link)
        if found is None or found.connected >= LINK_CONNECTIONS_MAX:
            return False
        found.connected += 1
        if found.connected == found.connections and not found.is_up:
            found.is_up = True
            for thread in found.lost_early:
                self._replace(found, thread)
        return True

    def connection_lost(self, link: int, reason: str, thread: int = 0) -> None:
        """Note that a connection of a link broke; the link goes on with its others, unless they break, too.

        A peer that leaves or dies closes one after the other, which need not be logged one by one.
        """
        found = self._find(link)
        if found is None:
            return
        text = f"the link with peer {found.peer} goes on with a connection less: {reason}"
        self._outbox.act(PeerLog("warning", text, {"other": found.peer}, link))
        if found.is_up:
            self._replace(found, thread)
        else:
            found.lost_early.append(thread)

    def limited(self, link: int, thread: int = 0, by_loss: bool = False) -> None:
        """Add connections to a link that windows, or losses, hold back in an engine thread."""
        found = self._find(link)
        most = self._lossy_connections_max if by_loss else GROWN_CONNECTIONS_MAX
        if found is None or not found.is_up or not self.may_grow or found.connected >= most:
            return
        factor = LOSSY_GROWTH if by_loss else 1
        count = min(factor * found.connected // self.engine_threads, most - found.connected)
        cause = "losses hold" if by_loss else "windows hold"
        text = f"{cause} back the link with peer {found.peer}: {count} connections more than {found.connected}"
        self._outbox.act(PeerLog("info", text, {"other": found.peer}))
        self._add(found, thread, count, is_replacement=False)

    def failed(self, link: int, reason: str) -> m.LinkFailed | None:
        """Note that a link could not be made. Return what the master is told of it while it waits for this peer's
        links."""
        found = self._find(link)
        if found is None or found.is_up:
            return None
        self._drop(found.peer)
        target = self._target
        if not target.is_open or not self._is_wanted(found.peer):
            return None
        if found.made_in < target.view:
            # It was begun under an earlier Prepare, and the other side may have begun anew since: once more.
            self._make(found.peer, target.view, dial=self._own > found.peer)
            return None
        self._give_up(found.peer, reason)
        if not found.dial:
            return None
        return m.LinkFailed(target.view, found.peer, reason[: m.REASON_CHARACTERS_MAX])

    def offered(self, peer: int, made_in: int) -> int | str | None:
        """Find the link that an incoming connection shall belong to: its number, a refusal, or None: ask again after
        the next message of the master, which may tell who that is."""
        if made_in > self._target.view:
            return None
        if peer not in self._members or peer == self._own:
            return f"peer {peer} is not in view {self._target.view}"
        if made_in < self._made_in.get(peer, 0):
            return f"the link with peer {peer} was made anew in view {self._made_in[peer]}"
        link = self._links.get(peer)
        lost = self._broken.get(peer)
        if link is None and lost is not None and lost.made_in == made_in:
            return f"the link with peer {peer} of view {made_in} was lost here"
        if link is None or link.made_in < made_in:
            # The dialer has dropped the link that we still have: its word counts.
            self._drop(peer)
            link = self._make(peer, made_in, dial=False)
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

    def _give_up(self, peer: int, reason: str) -> None:
        if self._target.is_open:
            self._target.failed[peer] = reason

    def _begun_with(self, member: m.PeerInfo) -> int:
        return max(self._connections, member.connections, self.engine_threads)

    def _make(self, peer: int, made_in: int, dial: bool, is_urgent: bool = False, is_needed: bool = True) -> _Link:
        """Begin to make a link. `is_urgent`: it had stood, and broke. The group can go on without one that is not
        needed."""
        member = self._members[peer]
        timeout_s = max(LINK_TIMEOUT_S_MIN, LINK_TIMEOUTS * self.peer_timeout_s)
        reach_s = self.timeout_s if is_urgent else max(LINK_TIMEOUT_S_MIN, self.peer_timeout_s)
        if is_urgent and not is_needed and not dial:
            timeout_s = min(timeout_s, reach_s + GRACE_S)
        if peer in self._broken and self._broken[peer].made_in < made_in:
            del self._broken[peer]
        self._made_in[peer] = made_in
        self._last_link += 1
        link = self._links[peer] = _Link(self._last_link, peer, made_in, self._begun_with(member), dial)
        self._outbox.act(MakeLink(link.link, member, made_in, link.connections, dial, reach_s, timeout_s))
        return link

    def _replace(self, link: _Link, thread: int) -> None:
        link.connected -= 1
        if link.dial:
            self._add(link, thread, 1, is_replacement=True)

    def _add(self, link: _Link, thread: int, count: int, is_replacement: bool) -> None:
        member = self._members.get(link.peer)
        if count <= 0 or member is None:
            return
        threads = self.engine_threads
        extras = link.extras.get(thread, 0)
        link.extras[thread] = extras + count
        first = link.connections + (thread - link.connections) % threads + extras * threads
        indices = range(first, first + count * threads, threads)
        timeout_s = LINK_TIMEOUTS * self.peer_timeout_s
        self._outbox.act(AddConnections(link.link, member, link.made_in, indices, is_replacement, timeout_s))

    def _drop(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._outbox.act(CloseLink(link.link))


Link = tuple[int, bool]
"""The other peer, and whether it is the one that sends."""


class Measurements:
    """The last measurement of each link, the oldest first."""

    def __init__(self) -> None:
        self._found: dict[Link, tuple[LinkMetric, float]] = {}

    def add(self, found: list[LinkMetric], now: float) -> None:
        for metric in found:
            self._found[metric.peer, metric.is_inbound] = metric, now
        for oldest in list(self._found)[:-METRICS_KEPT_MAX]:
            del self._found[oldest]

    def discard(self, links: list[Link]) -> None:
        """Forget links that are about to be measured: of one that cannot be measured nothing is known."""
        for link in links:
            self._found.pop(link, None)

    def keep(self, peers: Collection[int]) -> None:
        """Forget the links with all peers but these."""
        self._found = {link: metric for link, metric in self._found.items() if link[0] in peers}

    def aged(self, now: float) -> list[tuple[LinkMetric, int]]:
        """Return all measurements, each with its age in seconds."""
        return [(metric, max(0, round(now - at))) for metric, at in self._found.values()]
