"""Makes the master that goes on where a dead one has stopped, out of what `testimony` has found.

It writes the new machine's own fields, so that the machine need not know how it may begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from zlib import crc32

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.ledger import Ledger
from pccl.protocol.master import Circle, Master, MasterOptions, Persist, _Group, _Member
from pccl.protocol.pairs import parties
from pccl.protocol.returning import Returning
from pccl.protocol.testimony import Group, Recovered, unheard
from pccl.version import __version__

VIEWS_PER_TERM = 10**6
"""Two masters that know of the same view never make the same next one."""
PEERS_PER_TERM = 10_000
"""Nor does one give a newcomer the number of another, which a dead master has welcomed and no witness knows of."""
TERMS = 100
SALTS = 1000
"""See `block`."""
NUMBERS_PER_TERM = 2**40
"""So that what was asked by a dead master is never taken for an answer to this one."""


@dataclass(frozen=True)
class Witness:
    """How a peer that goes on can be reached."""

    connection: int
    host: str
    """Where it comes from, as this master sees it."""
    masters: int
    since: float
    """When it said Resume."""
    master_timeout_s: float = m.MASTER_TIMEOUT_S


def successor(
    run: str,
    term: int,
    options: MasterOptions,
    recovered: Recovered,
    witnesses: Mapping[int, Witness],
    now: float,
    name: str,
) -> Master:
    """A master that leads this run. The first effects are what `Master.received` would return; they begin with Persist,
    and Resumed to all who go on. `name` is one that no other leader has."""
    threads = max(each.engine_threads for each in recovered.members.values())
    secrets = Counter(each.secret for each in recovered.members.values())
    secret = max(secrets, key=lambda each: (secrets[each], each))
    master = Master(run, replace(options, engine_threads=threads), term, secret)
    master._now = now
    master._next_number = term * NUMBERS_PER_TERM + 1
    salt = crc32(name.encode())
    master._next_peer = block(_highest_peer(recovered), term, PEERS_PER_TERM, salt) + 1
    master.view = block(recovered.view_heard, term, VIEWS_PER_TERM, salt)
    master.installed_view = recovered.view
    master._in_force = recovered.in_force
    master._possible = list(recovered.possible)
    master._meeting = recovered.meeting
    master._circles = [Circle(len(peers), peers & recovered.members.keys()) for peers in recovered.decisive.values()]
    master.has_rivals = any(witness.masters > 1 for witness in witnesses.values())
    for peer, testimony in sorted(recovered.members.items()):
        _add_member(master, peer, testimony, witnesses[peer])
    master.returning = Returning(recovered.members, now, options.peer_timeout_s)
    _add_figures(master, recovered, witnesses)
    master.throughput.inherit(recovered.members)
    for group in recovered.groups:
        _add_group(master, group)
    if recovered.is_unchanged:
        master._told = set(recovered.members)
    else:
        master._renewing = True
    gone = "did not come back after the loss of the master"
    master._lost = [(peer, gone) for peer in recovered.missing]
    group_of = {peer: group.number for group in recovered.groups for peer in group.former}
    for peer in recovered.missing:
        master.history.lost(now, peer, "", group_of.get(peer, 0), gone)
    if recovered.missing:
        _break_sites(master)
    for peer, testimony in recovered.members.items():
        end = unheard(testimony, recovered)
        if end is not None:
            master._unheard[peer] = end
    master._effects.append(Persist(master.fence()))
    for witness in witnesses.values():
        master._say(witness.connection, m.Resumed(term, options.peer_timeout_s, list(recovered.decisive)))
    for group in recovered.groups:
        if group.is_steady:
            _tell_verdicts(master, group)
        else:
            _flush(master, group)
    how = "as it stands" if recovered.is_unchanged else "in a new view"
    without = f", without peers {recovered.missing}" if recovered.missing else ""
    master._log("warning", f"leads run {run} in term {term}, after view {recovered.view}: {how}{without}")
    return master


def block(heard: int, term: int, size: int, salt: int) -> int:
    """Where a leader begins to number: above all that was heard, in a block of `size` that no other of TERMS terms in a
    row shares, whatever the master of each has heard, nor the same term of another `salt` modulo SALTS. A master that
    needs more than a block goes on into the next, and whoever hears of that begins farther up."""
    period = SALTS * TERMS * size
    begin = heard - heard % period + (salt % SALTS * TERMS + (term - 1) % TERMS) * size
    return begin if begin > heard else begin + period


def _highest_peer(recovered: Recovered) -> int:
    return max({*recovered.peers, *recovered.members, *recovered.newcomers, *recovered.strangers})


def _add_member(master: Master, peer: int, testimony: m.Testimony, witness: Witness) -> None:
    me, connection = testimony.me, witness.connection
    # The dead master may have seen it elsewhere: each, from its own machine, at a loopback address.
    hosts = list(dict.fromkeys([*me.hosts, witness.host]))
    hello = m.Hello(
        m.PROTOCOL_VERSION,
        __version__,
        me.group,
        hosts,
        me.port,
        me.connections,
        me.name,
        site=testimony.site,
        site_size=testimony.site_size,
        masters=witness.masters,
        master_timeout_s=witness.master_timeout_s,
    )
    member = master._members[peer] = _Member(peer, connection, hello, hosts, witness.host, master._now)
    member.accepted = testimony.installed is not None
    member.has_beaten = True
    master._accepted += member.accepted
    master._peer_of[connection] = peer
    master.figures.arrived(peer, member.hosts)


def _add_figures(master: Master, recovered: Recovered, witnesses: Mapping[int, Witness]) -> None:
    members = recovered.members
    found = [
        (witnesses[peer].since - age_s, figure.link_of(peer), figure)
        for peer, testimony in members.items()
        for figure, age_s in testimony.figures
        if figure.peer in members and figure.peer != peer
    ]
    for at, link, figure in sorted(found, key=lambda each: each[0]):  # the latest between two hosts counts
        master.figures.measured(link, figure.bytes_per_s, figure.round_trip_us / 1e6, at)


def _break_sites(master: Master) -> None:
    """Those of whose peers one may be missing. One may also have left on purpose, which nobody here knows."""
    here = Counter(member.hello.site for member in master._members.values())
    for member in master._members.values():
        site = member.hello.site
        if site and here[site] < member.hello.site_size:
            master._broken_sites[site] = "a peer of its site did not come back after the loss of the master"


def _add_group(master: Master, recovered: Group) -> None:
    group = master._groups[recovered.number] = _Group(recovered.number, list(recovered.ring), recovered.epoch)
    group.accepted = sum(master._members[peer].accepted for peer in recovered.ring)
    group.missing = {pair for pair in recovered.missing if pair in topology.linked_pairs(recovered.former)}
    group.agrees = group.is_meshed
    group.ledger = Ledger(()) if recovered.is_decided else Ledger(recovered.former, group.agrees)
    group.running = recovered.is_steady
    group.revision = recovered.revision
    group.synced = recovered.synced & set(recovered.ring)
    group.ledger.forget([*recovered.commits, *recovered.aborts])
    if not recovered.is_steady:
        group.commits = sorted(recovered.commits)
        group.aborts = dict(recovered.aborts)


def _tell_verdicts(master: Master, recovered: Group) -> None:
    """Whoever knows them ignores them."""
    epoch = recovered.epoch
    for peer in recovered.ring:
        connection = master._members[peer].connection
        commits = [op for op in sorted(recovered.commits) if peer in parties(op.tag, recovered.former)]
        if commits:
            master._say(connection, m.OpsCommit(epoch, commits))
        for op in recovered.aborts.values():
            if peer in parties(op.tag, recovered.former):
                master._say(connection, m.OpAbort(epoch, op.tag, op.sequence, op.code, op.reason))


def _flush(master: Master, recovered: Group) -> None:
    group = master._groups[recovered.number]
    group.changed = True
    group.flush = master._number()
    group.awaiting_flush = set(recovered.unsettled)
    for peer, epoch in recovered.unsettled.items():
        master._ask(peer, m.Flush(group.flush, epoch))
