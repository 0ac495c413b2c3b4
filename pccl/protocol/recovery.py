"""Take a run over: build its `RunState`, and the master that leads it on, from what recovery reports have shown.

A new leader must never make a number that another leader has made or may yet make, for a view, a peer or a request. In
Paxos ballots are made unique for that, in Raft terms. Terms are unique here among masters that know of each other; what
keeps the numbers of all others apart is `block`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from zlib import crc32

from pccl._version import __version__
from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.ledger import Ledger
from pccl.protocol.master.effects import Persist
from pccl.protocol.master.leadership import Leadership
from pccl.protocol.master.machine import Master
from pccl.protocol.master.options import MasterOptions
from pccl.protocol.master.run_state import Group, Member, RunState
from pccl.protocol.point_to_point import participants
from pccl.protocol.quorum import QuorumView
from pccl.protocol.recovery_report import Recovered, RecoveredGroup, unheard
from pccl.protocol.returning import Returning

VIEWS_PER_TERM = 10**6
"""Size of a block of view numbers. Two masters that know of the same view never make the same next one."""
PEERS_PER_TERM = 10_000
"""Size of a block of peer numbers. A newcomer never gets the number of one that a dead master has welcomed and that no
survivor knows of."""
TERMS = 100
SALTS = 1000
"""Numbers of different terms and salts that `block` keeps apart."""
NUMBERS_PER_TERM = 2**40
"""Size of a block of request numbers. What answers a dead master is never taken for an answer to this one."""


@dataclass(frozen=True)
class Survivor:
    """A peer that goes on, and the way to reach it."""

    connection: int
    host: str
    """The host that it comes from, as this master sees it."""
    masters: int
    """Number of master addresses that it knows."""
    since: float
    """The time when it said Resume."""
    master_timeout_s: float = m.MASTER_TIMEOUT_S


def take_over(
    run: str,
    term: int,
    options: MasterOptions,
    recovered: Recovered,
    survivors: Mapping[int, Survivor],
    now: float,
    name: str,
) -> Master:
    """Return a master that leads this run. `name` is one that no other leader has.

    Its first effects are what `Master.received` would return; they begin with Persist, and Resumed to all who go on.
    """
    state = _run_state(run, term, options, recovered, survivors, now, name)
    leadership = Leadership(
        state,
        recovered.in_force,
        recovered.possible,
        [QuorumView(len(peers), peers & recovered.members.keys()) for peers in recovered.quorum_views.values()],
        has_rivals=any(survivor.masters > 1 for survivor in survivors.values()),
    )
    ends = {peer: unheard(report, recovered) for peer, report in recovered.members.items()}
    master = Master(
        state,
        leadership,
        Returning(recovered.members, now, options.peer_timeout_s),
        {peer: end for peer, end in ends.items() if end is not None},
        "a peer of its site did not come back after the loss of the master" if recovered.missing else "",
    )
    state.outbox.append(Persist(leadership.fence()))
    for survivor in survivors.values():
        state.send(survivor.connection, m.Resumed(term, options.peer_timeout_s, list(recovered.quorum_views)))
    for group in recovered.groups:
        if group.is_steady:
            _tell_verdicts(state, group)
        else:
            _flush(state, group)
    how = "as it stands" if recovered.is_unchanged else "in a new view"
    without = f", without peers {recovered.missing}" if recovered.missing else ""
    state.log("warning", f"leads run {run} in term {term}, after view {recovered.view}: {how}{without}")
    return master


def _run_state(
    run: str,
    term: int,
    options: MasterOptions,
    recovered: Recovered,
    survivors: Mapping[int, Survivor],
    now: float,
    name: str,
) -> RunState:
    """Return the state of the run as recovery reports have shown it."""
    threads = max(each.engine_threads for each in recovered.members.values())
    secrets = Counter(each.secret for each in recovered.members.values())
    secret = max(secrets, key=lambda each: (secrets[each], each))
    state = RunState(run, replace(options, engine_threads=threads), term, secret)
    state.now = now
    salt = crc32(name.encode())
    state.next_number = term * NUMBERS_PER_TERM + 1
    state.next_peer = block(_highest_peer(recovered), term, PEERS_PER_TERM, salt) + 1
    state.view = block(recovered.view_heard, term, VIEWS_PER_TERM, salt)
    state.installed_view = recovered.view
    state.joint_calls_ended = recovered.call_number
    for peer, report in sorted(recovered.members.items()):
        state.add(_member(peer, report, survivors[peer], now))
    _add_link_metrics(state, recovered, survivors)
    state.throughput.inherit(recovered.members)
    for group in recovered.groups:
        _add_group(state, group)
    if recovered.is_unchanged:
        state.told = set(recovered.members)
    else:
        state.change.is_renewing = True
    gone = "did not come back after the loss of the master"
    state.lost = [(peer, gone) for peer in recovered.missing]
    group_of = {peer: group.number for group in recovered.groups for peer in group.former}
    for peer in recovered.missing:
        state.history.lost(now, peer, "", group_of.get(peer, 0), gone)
    return state


def block(heard: int, term: int, size: int, salt: int) -> int:
    """Return the number above which a leader begins to number.

    It is above all that was heard, in a block of `size` that no other of TERMS terms in a row shares, whatever the
    master of each has heard, nor the same term of another `salt` modulo SALTS. A master that needs more than a block
    goes on into the next one, and whoever hears of that begins farther up.
    """
    period = SALTS * TERMS * size
    begin = heard - heard % period + (salt % SALTS * TERMS + (term - 1) % TERMS) * size
    return begin if begin > heard else begin + period


def _highest_peer(recovered: Recovered) -> int:
    return max({*recovered.peers, *recovered.members, *recovered.newcomers, *recovered.left_out})


def _member(peer: int, report: m.RecoveryReport, survivor: Survivor, now: float) -> Member:
    """Return a peer that goes on as a member of the run."""
    me = report.me
    # A loopback address at which the dead master saw it stood for that master's machine.
    known = [host for host in me.hosts if not (host.startswith("127.") or host == "::1")]
    hosts = list(dict.fromkeys([*known, survivor.host]))
    hello = m.Hello(
        m.PROTOCOL_VERSION,
        __version__,
        me.group,
        hosts,
        me.port,
        me.connections,
        me.name,
        site=report.site,
        site_size=report.site_size,
        masters=survivor.masters,
        master_timeout_s=survivor.master_timeout_s,
    )
    is_accepted = report.installed is not None
    return Member(peer, survivor.connection, hello, hosts, survivor.host, now, accepted=is_accepted, has_heartbeat=True)


def _add_link_metrics(state: RunState, recovered: Recovered, survivors: Mapping[int, Survivor]) -> None:
    members = recovered.members
    found = [
        (survivors[peer].since - age_s, metric.link_of(peer), metric)
        for peer, report in members.items()
        for metric, age_s in report.link_metrics
        if metric.peer in members and metric.peer != peer
    ]
    for at, link, metric in sorted(found, key=lambda each: each[0]):  # the latest between two hosts counts
        state.link_metrics.measured(link, metric.bytes_per_s, metric.round_trip_us / 1e6, at)


def _add_group(state: RunState, found: RecoveredGroup) -> None:
    group = state.groups[found.number] = Group(found.number, list(found.ring), found.epoch)
    group.accepted = sum(state.members[peer].accepted for peer in found.ring)
    pairs = topology.linked_pairs(found.former)
    group.missing = pairs.intersection(found.missing)
    group.linked = pairs - group.missing
    group.is_mutual = group.is_meshed
    group.ledger = Ledger(()) if found.is_decided else Ledger(found.former, group.is_mutual)
    group.running = found.is_steady
    group.revision = found.revision
    group.synced = found.synced & set(found.ring)
    group.ledger.forget([*found.commits, *found.aborts])
    if not found.is_steady:
        group.commits = sorted(found.commits)
        group.aborts = dict(found.aborts)


def _tell_verdicts(state: RunState, found: RecoveredGroup) -> None:
    """Send the verdicts that some have heard to all who go on. Those who know them ignore them."""
    for peer in found.ring:
        commits = [op for op in sorted(found.commits) if peer in participants(op.tag, found.former)]
        if commits:
            state.tell(peer, m.OpsCommit(found.epoch, commits))
        for op in found.aborts.values():
            if peer in participants(op.tag, found.former):
                state.tell(peer, m.OpAbort(found.epoch, op.tag, op.sequence, op.code, op.reason))


def _flush(state: RunState, found: RecoveredGroup) -> None:
    group = state.groups[found.number]
    group.changed = True
    group.flush = state.number()
    group.awaiting_flush = set(found.unsettled)
    for peer, epoch in found.unsettled.items():
        state.ask(peer, m.Flush(group.flush, epoch))
