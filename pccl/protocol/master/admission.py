"""Admission: the first message of a connection, refusals, sites, and delays after an eviction for failed links.

A peer is first unidentified (connected), then pending (after Hello), accepted (after Install), and finally gone.

    1  A Hello is refused if it is malformed, has a different protocol version, or exceeds a limit.
    2  A pending peer is *admissible* if it has sent a heartbeat, it is not absent, and its site is complete.
    3  The peers of one *site* are admitted in one view. If one is lost, the others are evicted in the same step.
       A peer that leaves deliberately does not affect the others.
    4  A peer evicted for failed links waits, then tests connections to the others without interrupting them (`Trial`).
       It is admissible once the test succeeds. The delay is one peer timeout after the first eviction and doubles up to
       DELAY_S_MAX. The peer's record, keyed by host and name without process id, expires WELL_S after the delay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.master.liveness import Liveness
from pccl.protocol.master.run_state import Member, RunState
from pccl.protocol.names import NAME_CHARACTERS_MAX, is_name, run_mismatch
from pccl.types import Result

DELAY_S_MAX = 300.0
WELL_S = 600.0
RECORDS_MAX = 1024
"""Maximum number of remembered peers. A new one replaces the oldest."""

_PROCESS_ID = re.compile(r":\d+$")


@dataclass(frozen=True)
class Restraint:
    evictions: int
    until: float


class Probation:
    def __init__(self, peer_timeout_s: float) -> None:
        self._first_s = peer_timeout_s
        self._records: dict[tuple[str, str], Restraint] = {}

    def evicted(self, host: str, name: str, now: float) -> float:
        known = self.record(host, name, now)
        evictions = 1 + (known.evictions if known is not None else 0)
        # The exponent is bounded because a float would overflow.
        delay_s = min(self._first_s * 2.0 ** min(evictions - 1, 64), max(DELAY_S_MAX, self._first_s))
        who = _who(host, name)
        self._records.pop(who, None)
        self._records[who] = Restraint(evictions, now + delay_s)
        if len(self._records) > RECORDS_MAX:
            del self._records[next(iter(self._records))]
        return delay_s

    def record(self, host: str, name: str, now: float) -> Restraint | None:
        """Return a peer's record, or None if it was never evicted for failed links or the record has expired."""
        who = _who(host, name)
        found = self._records.get(who)
        if found is not None and now >= found.until + WELL_S:
            del self._records[who]
            return None
        return found


def _who(host: str, name: str) -> tuple[str, str]:
    return host, _PROCESS_ID.sub("", name)


HOSTS_MAX = 16
SITE_PEERS_MAX = 2**12


class Admission:
    def __init__(self, state: RunState, liveness: Liveness, probation: Probation) -> None:
        self._state = state
        self._liveness = liveness
        self._probation = probation
        self.unidentified: dict[int, tuple[str, float]] = {}
        """Connections without a first message, each with its host and start time."""
        self._trials_due_at: dict[int, float] = {}
        """The newcomers that were evicted for failed links, each with the time of its next attempt to connect."""
        self._broken_sites: dict[str, str] = {}

    # Connections without a first message.

    def host_of(self, connection: int) -> str | None:
        return self.unidentified[connection][0] if connection in self.unidentified else None

    def connected(self, connection: int, host: str, others: int) -> None:
        """Register a new connection. `others` is the number of identified connections."""
        state = self._state
        if len(self.unidentified) + others >= state.options.connections_max:
            state.send(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, "the master has too many connections"))
            state.close(connection)
        else:
            self.unidentified[connection] = (host, state.now)

    def disconnected(self, connection: int) -> None:
        self.unidentified.pop(connection, None)

    def first_message(self, connection: int, message: m.FromPeer) -> Member | None:
        """Handle the first message of a connection. Return the newcomer, if the message is a valid Hello."""
        host, _ = self.unidentified.pop(connection)
        if isinstance(message, m.HeartbeatHello):
            self._heartbeat_hello(connection, host, message)
            return None
        if not isinstance(message, m.Hello):
            self._refuse(connection, host, f"the first message must be Hello, not {type(message).__name__}")
            return None
        refusal = self._refusal(message) or self._site_refusal(message)
        if refusal is not None:
            self._refuse(connection, host, refusal)
            return None
        return self._welcome(connection, host, message)

    def _refuse(self, connection: int, host: str, reason: str, level: str = "warning") -> None:
        self._state.log(level, f"{host} refused: {reason}", is_unauthenticated=True)
        self._state.send(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, reason))
        self._state.close(connection)

    def _refusal(self, hello: m.Hello) -> str | None:
        options = self._state.options
        if hello.protocol != m.PROTOCOL_VERSION:
            return (
                f"this master speaks protocol {m.PROTOCOL_VERSION}, the peer {hello.protocol} (pccl {hello.version}); "
                f"install the same version on both"
            )
        if not 0 <= hello.group < 2**32:
            return f"peer_group {hello.group} is not within [0, 2**32)"
        if not 0 < hello.port < 65536:
            return f"the peer's listening port {hello.port} is not a port"
        if not 1 <= hello.connections <= options.connections_per_link_max:
            return f"p2p_connection_pool_size {hello.connections} is not within [1, {options.connections_per_link_max}]"
        texts = [*hello.hosts, hello.name, hello.version, hello.run_name]
        if len(hello.hosts) > HOSTS_MAX or not all(map(is_name, texts)):
            return (
                f"its hosts, names and version must be printable, with at most {NAME_CHARACTERS_MAX} characters each, "
                f"and at most {HOSTS_MAX} hosts"
            )
        if len(self._state.members) - self._state.accepted_count >= options.pending_max:
            return f"{options.pending_max} peers are already waiting to be accepted; try again later"
        return run_mismatch(self._state.run_name, hello.run_name) or None

    def _welcome(self, connection: int, host: str, hello: m.Hello) -> Member:
        state = self._state
        peer = state.next_peer
        state.next_peer += 1
        hosts = [*hello.hosts, host] if host not in hello.hosts else list(hello.hosts)
        member = Member(peer, connection, hello, hosts, host, state.now)
        state.add(member)
        obstacle = self._hold_back(member)
        self._liveness.welcomed(peer)
        welcome = m.Welcome(
            peer,
            state.run,
            state.term,
            peer_timeout_s=state.options.peer_timeout_s,
            engine_threads=state.options.engine_threads,
            secret=state.secret,
            obstacle=obstacle,
        )
        state.send(connection, welcome)
        held = f"; {obstacle}" if obstacle else ""
        state.log("info", f"{member} from {host} wants to join group {hello.group}{held}", member.about)
        return member

    def _heartbeat_hello(self, connection: int, host: str, message: m.HeartbeatHello) -> None:
        member = self._state.members.get(message.peer)
        if message.protocol != m.PROTOCOL_VERSION or message.run != self._state.run or member is None:
            # Usually the peer was evicted and receives the reason on its other connection.
            self._refuse(connection, host, f"peer {message.peer} of run {message.run!r} is not in this run", "info")
        else:
            self._liveness.take_heartbeats(connection, member)

    # Admissible peers.

    @property
    def admissible(self) -> list[int]:
        """The pending peers that can be admitted: they have sent a heartbeat, are neither absent nor on trial, and the
        same is true of all peers of their site."""
        state = self._state
        alive = [
            member
            for member in state.members.values()
            if not member.accepted
            and member.has_heartbeat
            and not member.absence
            and (member.on_trial is None or not state.accepted_count)
        ]
        found = Counter(member.hello.site for member in alive)
        return [each.peer for each in alive if not each.hello.site or found[each.hello.site] == each.hello.site_size]

    # Trials.

    def _hold_back(self, member: Member) -> str:
        now = self._state.now
        record = self._probation.record(member.host, member.hello.name, now)
        if record is None:
            return ""
        member.on_trial = []
        self._trials_due_at[member.peer] = record.until
        return (
            f"a peer with this host and name was evicted for failed links {record.evictions} times, so it is admitted "
            f"once it has connected to the others, which it may try in {max(0.0, record.until - now):.3g} s"
        )

    def _try_links(self, member: Member) -> None:
        state = self._state
        del self._trials_due_at[member.peer]
        group = state.groups.get(member.hello.group)
        ring = group.ring if group is not None else []
        others = list(islice((peer for peer in ring if state.is_accepted(peer)), topology.MESH_PEERS_MAX))
        member.on_trial = others or None
        if others:
            state.send_to(member.peer, m.Trial([state.members[peer].as_record() for peer in others]))

    def tried(self, member: Member, message: m.Tried) -> None:
        state = self._state
        others = [peer for peer in member.on_trial or () if peer in state.members]
        failed = {peer: why for peer, why in message.failed if peer in others}
        if member.accepted or not others or 2 * len(failed) < len(others):
            member.on_trial = None
            return
        delay_s = self._probation.evicted(member.host, member.hello.name, state.now)
        self._trials_due_at[member.peer] = state.now + delay_s
        other, why = next(iter(failed.items()))
        state.log(
            "warning",
            f"{member} cannot connect to {len(failed)} of {len(others)} peers and is not admitted; it may try again in "
            f"{delay_s:.3g} s. Its reason for peer {other}: {why}",
            member.about,
        )

    # Sites.

    def _site_refusal(self, hello: m.Hello) -> str | None:
        if not hello.site:
            return None
        if not is_name(hello.site):
            return f"its site's name must be printable and have at most {NAME_CHARACTERS_MAX} characters"
        if not 1 <= hello.site_size <= SITE_PEERS_MAX:
            return f"site_size {hello.site_size} is not within [1, {SITE_PEERS_MAX}]"
        mates = [member for member in self._state.members.values() if member.hello.site == hello.site]
        sizes = {mate.hello.site_size for mate in mates} - {hello.site_size}
        if sizes:
            return f"site {hello.site!r} has {sizes.pop()} peers according to its other peers, not {hello.site_size}"
        if len(mates) >= hello.site_size or any(mate.accepted for mate in mates):
            return f"site {hello.site!r} is already in the run; give each start of a site a new name"
        return None

    def break_incomplete_sites(self, reason: str) -> None:
        members = self._state.members.values()
        here = Counter(member.hello.site for member in members)
        for member in members:
            site = member.hello.site
            if site and here[site] < member.hello.site_size:
                self._broken_sites[site] = reason

    def to_evict(self) -> Iterator[tuple[int, str]]:
        """Yield the peers of sites that have lost a peer, with the reason. The caller must evict each peer before it
        requests the next."""
        while self._broken_sites:
            site, reason = self._broken_sites.popitem()
            for peer in [peer for peer, member in self._state.members.items() if member.hello.site == site]:
                yield peer, reason
            self._broken_sites.pop(site, None)  # their loss would break the same site again

    # Time.

    def expire(self) -> None:
        state = self._state
        limit_s = state.options.hello_timeout_s
        for connection, (host, since) in list(self.unidentified.items()):
            if state.now >= since + limit_s:
                del self.unidentified[connection]
                state.log("info", f"{host}: closed: no Hello within {limit_s:g} s", is_unauthenticated=True)
                state.close(connection)

    def begin_trials(self) -> None:
        for peer in [peer for peer, due_at in self._trials_due_at.items() if self._state.now >= due_at]:
            self._try_links(self._state.members[peer])

    def deadlines(self) -> list[float]:
        limit_s = self._state.options.hello_timeout_s
        times = [since + limit_s for _, since in islice(self.unidentified.values(), 1)]
        return [*times, *self._trials_due_at.values()]

    def forget(self, member: Member, reason: str, is_leaving: bool) -> None:
        self._trials_due_at.pop(member.peer, None)
        if member.hello.site and not is_leaving:
            self._broken_sites.setdefault(member.hello.site, f"peer {member.peer} of its site was lost: {reason}")
