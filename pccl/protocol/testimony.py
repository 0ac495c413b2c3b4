"""What follows from the testimony of peers that have lost their master: a pure function, for whoever would succeed it.

The last view is the highest that any witness has installed. Newer ones may have been prepared. Each of them counts as
the last one too if it may be in force somewhere: at somebody who has not come, and that takes that everybody in it had
answered; one witness who had not, or whom the same master has told of a yet newer one instead, shows that it never was.
Not only the newest may be: those whom it admits can be all who know of it, and say nothing of one before it; and a
master may have died that knew, or could not rule out, that the one before was in force, and told of the newer one some
who have never installed the one before. So witnesses say all that they have answered, but for what a master that they
have followed since has ruled out (Resumed): of those who follow it somebody had not answered, or all had come and none
had installed it, so nobody ever will.

A majority of the last view decides: of each where several count. Where peers know of several masters, those who do not
go on, or have not come, must be no majority either: one who is sent away may never hear of it, and testify elsewhere.
(So where a view may be in force that was to accept as many as there were before, or more, nobody goes on until all of
them have come, or one who has it installed.)
Every master that leads had a majority of the same view, or of one that a majority of it had to answer before it came
into force, and a witness follows the highest term only. So two masters can never both lead.

Where peers know one master only, that one evicts whomever it loses, also most of a view, and those may come first to
its successor. What keeps them from leading is a `Fence`, where the successor has one:

    1  Of the views in force the fence's counts, unless a witness has installed a later one. Those whom it does not name
       are nobody.
    2  A view that the fence says was prepared is treated as one that a witness tells of: it may be in force unless one
       of its peers here has not answered it. So who was left out of it cannot go on before somebody of it has come.
    3  Where it is not in force, and the one before lacks its majority, a majority of the prepared view goes on: nobody
       but the master that has the fence can have led the others.
    4  A master that has led the run itself until just then needs no majority: whoever does not come is lost, as it
       would have been if that master had never doubted (`failover`).

Who goes on: all witnesses of the last view. Whoever is missing is lost to the others, as if it had died. Where a
witness has settled its ops by a prepared view, its verdicts stand, and they are those of the peers of that view: nobody
else goes on. Newcomers testify too, for a view that would have accepted them may be in force; if it is not, they say
Hello again.

Ops. If all peers of a group are there, and their ops run, these go on and nobody notices. Otherwise the group is
flushed as after a loss. A verdict that a witness has heard stands, be it by a message or by a prepared view. For all
others what holds at every flush holds: committed if all survivors are done. A commit that was heard by somebody who
does not go on was made since all were done, so it is made again. An abort that only such a one heard may become a
commit for the others: they do not meet again.

Joint calls. Peers state again what they wait in. Who waits in a call of which another has heard the end, while both
were accepted, is told that end: whoever waits in a call has heard of all that ended before it. So nobody is told that
a sync succeeded that ended without it, and whose state it lacks: whoever has heard that end has heard before, by a
prepared view, whom its group had lost, and those do not go on. An end that only such have heard as do not go on is none
for the others, who make the call again: a revision that is not to go back is one that somebody here has heard elected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pccl.protocol import messages as m
from pccl.protocol.fence import Fence, FencedView
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.quorum import majority
from pccl.protocol.tally import Stance, Tally, Views
from pccl.types import Result


@dataclass(frozen=True)
class Standing:
    """How far testimony has come."""

    view: int
    """The last one; 0 if no witness has ever been accepted."""
    peers: frozenset[int]
    """Of the last one."""
    decisive: dict[int, frozenset[int]]
    """The peers of each view that counts as the last one, that in force first."""
    expected: frozenset[int]
    """Who can go on."""
    has_majority: bool
    is_complete: bool
    """They are a majority, and none is missing."""
    here: int
    """How many of `peers` have come."""
    is_reduced: bool = False
    """It counts a view that never came into force, but which the run's last master had prepared."""

    def __str__(self) -> str:
        if not self.peers:
            return "nobody of its last view has come"
        return f"{self.here} of the {len(self.peers)} peers of view {self.view} have come"


@dataclass
class Group:
    number: int
    epoch: int
    ring: list[int]
    """Of those who go on, in their order."""
    former: list[int]
    """Of the last view."""
    is_steady: bool
    """All are there and their ops run."""
    is_decided: bool = False
    """A prepared view has settled all ops."""
    unsettled: dict[int, int] = field(default_factory=dict)
    """Whose ops have to be flushed, and in which epoch they are."""
    commits: set[OpRef] = field(default_factory=set)
    """Verdicts that some have heard and others might not have."""
    aborts: dict[OpRef, m.Aborted] = field(default_factory=dict)
    missing: set[tuple[int, int]] = field(default_factory=set)
    """Pairs that have no link and need none."""
    revision: int | None = None
    synced: set[int] = field(default_factory=set)
    """Who took part in the last sync."""
    results: dict[str, m.Met] = field(default_factory=dict)
    """The last end of each kind of joint call that any of them has heard of."""


@dataclass
class Recovered:
    """A run as it stands without its master."""

    view: int
    """The last one in force."""
    view_heard: int
    """The highest number of one."""
    peers: frozenset[int]
    """Of the last view in force."""
    decisive: dict[int, frozenset[int]]
    """Those, and the peers of each view that may be in force too, by its number."""
    members: dict[int, m.Testimony]
    """Who goes on."""
    newcomers: set[int]
    """Witnesses who say Hello again."""
    strangers: set[int]
    """Witnesses who were lost before."""
    missing: list[int]
    """Who has not come."""
    groups: list[Group]
    is_unchanged: bool
    """All that was goes on as it stands."""
    meeting: int
    in_force: FencedView
    possible: list[FencedView]
    """As of Fence: `installed` and `prepared`."""


def is_sound(peer: int, stance: Stance, views: Views | None = None) -> bool:
    """This peer may say so: it does not contradict itself in what others rely on."""
    installed = stance.installed
    rings = (views or Views()).of(installed) if installed is not None else None
    groups = rings.groups_of.get(peer, []) if rings is not None else []
    if isinstance(stance, m.Testimony):
        own = [stance.me.group] if installed is not None else []
        if stance.me.peer != peer or groups != own:
            return False
    if rings is None:
        return not (stance.is_settled or (isinstance(stance, m.Testimony) and stance.is_running))
    return len(groups) == 1 and rings.are_peers


def _may_be_in_force(view: int, peers: frozenset[int], tally: Tally[Any]) -> bool:
    return tally.have_answered(view, peers) and tally.count(peers) < len(peers)


def _in_force(installed: m.InstalledView, peers: frozenset[int], fence: Fence | None) -> FencedView:
    """The last view that certainly is, where `installed` is the last that a witness tells of."""
    if fence is not None and fence.installed is not None and fence.installed.view >= installed.view:
        return fence.installed
    return FencedView(installed.view, peers)


def stand(
    stances: Tally[Any] | Mapping[int, Stance],
    has_rivals: bool = True,
    fence: Fence | None = None,
    needs_majority: bool = True,
) -> Standing:
    """`has_rivals`: witnesses may follow other masters. Otherwise a `fence` counts, if there is one. Of a tally it
    takes the same time however many have come."""
    tally = stances if isinstance(stances, Tally) else Tally.of(stances)
    installed = tally.last_installed()
    if installed is None:
        return Standing(0, frozenset(), {}, frozenset(), has_majority=False, is_complete=False, here=0)
    peers = tally.views.of(installed).peers
    last = _in_force(installed, peers, fence)
    settled_by = tally.settled(after=installed.view, by=peers)
    settled = [] if settled_by is None else [tally.views.of(settled_by).peers]

    def judged(decisive: dict[int, frozenset[int]], is_reduced: bool) -> Standing:
        expected = tally.common([peers, *decisive.values(), *settled])
        members = tally.count(expected)  # they are in all that is decisive
        has_majority = members > 0 and all(
            not needs_majority
            or (
                tally.count(listed) >= majority(len(listed))
                and not (has_rivals and len(listed) - members >= majority(len(listed)))
            )
            for listed in decisive.values()
        )
        is_complete = has_majority and not is_reduced and members == len(expected)
        here = tally.count(peers)
        return Standing(installed.view, peers, decisive, expected, has_majority, is_complete, here, is_reduced)

    decisive = {last.view: last.peers}
    for view, listed in _prepared(tally, last.view, fence).items():
        if _may_be_in_force(view, listed, tally):
            decisive[view] = listed
    found = judged(decisive, is_reduced=False)
    if found.has_majority or fence is None or fence.newest.view <= last.view or fence.newest.view in decisive:
        return found
    reduced = judged({fence.newest.view: fence.newest.peers}, is_reduced=True)
    return reduced if reduced.has_majority else found


def _prepared(tally: Tally[Any], after: int, fence: Fence | None) -> dict[int, frozenset[int]]:
    """The peers of each view newer than `after`, as one witness or the fence tells of it."""
    found = {view.view: view.peers for view in (fence.prepared if fence is not None else ()) if view.view > after}
    return found | {view.view: tally.views.of(view).peers for view in tally.prepared(after)}


def rebuild(
    stances: Tally[m.Testimony] | Mapping[int, m.Testimony],
    has_rivals: bool = True,
    fence: Fence | None = None,
    needs_majority: bool = True,
) -> Recovered:
    """The testimony must have a majority, if it needs one."""
    tally = stances if isinstance(stances, Tally) else Tally.of(stances)
    testimonies = tally.stances
    standing = stand(tally, has_rivals, fence, needs_majority)
    installed = tally.last_installed()
    assert installed is not None
    assert standing.has_majority
    seats = {(peer, ring.group) for ring in installed.rings for peer in ring.peers if peer in standing.expected}
    members = {peer: each for peer, each in testimonies.items() if (peer, each.me.group) in seats}
    others = {peer: each for peer, each in testimonies.items() if peer not in members}
    groups = [_group(ring, members) for ring in installed.rings]
    newer = _prepared(tally, installed.view, fence)
    in_force, *possible = (FencedView(view, listed) for view, listed in standing.decisive.items())
    if standing.is_reduced:
        in_force, possible = _in_force(installed, standing.peers, fence), [in_force]
    is_unchanged = (
        not newer
        and in_force.view == installed.view
        and all(each.installed is not None and each.installed.view == installed.view for each in members.values())
    )
    return Recovered(
        view=installed.view,
        view_heard=max([installed.view, in_force.view, *newer]),
        peers=standing.peers,
        decisive=standing.decisive,
        members=members,
        newcomers={peer for peer, each in others.items() if each.installed is None},
        strangers={peer for peer, each in others.items() if each.installed is not None},
        missing=sorted(standing.peers - set(members)),
        groups=[group for group in groups if group.ring],
        is_unchanged=is_unchanged and all(group.is_steady for group in groups),
        meeting=max((number for each in members.values() for number in _meetings(each)), default=0),
        in_force=in_force,
        possible=possible,
    )


def _meetings(testimony: m.Testimony) -> list[int]:
    return [testimony.joined_after, *(met.meeting for met in testimony.met)]


def _own_epoch(testimony: m.Testimony) -> int:
    """Of its group, as it is in force there; 0 before its first."""
    installed = testimony.installed
    rings = installed.rings if installed is not None else []
    return next((ring.epoch for ring in rings if ring.group == testimony.me.group), 0)


def _group(ring: m.Ring, members: Mapping[int, m.Testimony]) -> Group:
    ours = {peer: members[peer] for peer in ring.peers if peer in members}
    is_steady = len(ours) == len(ring.peers) and all(
        each.is_running and _own_epoch(each) == ring.epoch for each in ours.values()
    )
    group = Group(ring.group, ring.epoch, list(ours), list(ring.peers), is_steady)
    for peer, each in ours.items():
        if not each.is_settled and each.installed is not None:
            group.unsettled[peer] = _own_epoch(each)
        if _own_epoch(each) == ring.epoch:
            group.is_decided = group.is_decided or each.is_settled
            group.commits.update(each.commits)
            group.aborts.update({OpRef(op.tag, op.sequence): op for op in each.aborts})
        # else: what it has heard was settled by the last view itself, as everybody's was.
    _note_links(group, ring, ours)
    _note_meetings(group, ours)
    return group


def _note_links(group: Group, ring: m.Ring, ours: Mapping[int, m.Testimony]) -> None:
    is_mesh = all(each.installed is None or each.installed.is_meshed for each in ours.values())
    if is_mesh:
        return  # a link that was lost since is told anew
    group.missing = {(min(peer, other), max(peer, other)) for peer, each in ours.items() for other in each.unlinked}
    if not group.missing and len(ring.peers) > 1:
        # It stands by now, but the others were told that the group is no mesh.
        low, high, *_ = sorted(ring.peers)
        group.missing = {(low, high)}


def _note_meetings(group: Group, ours: Mapping[int, m.Testimony]) -> None:
    for each in ours.values():
        for met in each.met:
            if met.kind not in group.results or group.results[met.kind].meeting < met.meeting:
                group.results[met.kind] = met
    synced = {peer: each.synced for peer, each in ours.items() if each.synced is not None}
    last = max(synced.values(), default=None)
    sync = group.results.get(Kind.SYNC)
    if last is not None:
        group.revision = last[1]
        group.synced = {peer for peer, each in synced.items() if each == last}
        if sync is not None and sync.meeting == last[0] and sync.code == Result.SUCCESS:
            # Whoever has not heard of it yet took part in it, unless it joined later, as who does not even know that it
            # is accepted.
            group.synced |= {
                peer for peer, each in ours.items() if each.installed is not None and each.joined_after < last[0]
            }


def unheard(testimony: m.Testimony, recovered: Recovered) -> m.Met | None:
    """The end of the joint call that this peer waits in, if somebody has heard of it."""
    kind = testimony.waits_in
    heard = [met.meeting for met in testimony.met if met.kind == kind]
    known = [
        group.results[kind]
        for group in recovered.groups
        if kind in group.results and (kind in Kind.GLOBAL or group.number == testimony.me.group)
    ]
    last = max(known, key=lambda met: met.meeting, default=None)
    if last is None or testimony.installed is None or last.meeting <= max([*heard, testimony.joined_after]):
        return None
    return last
