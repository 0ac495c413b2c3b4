"""The right to lead a run, missing links, and the stages of a view change.

Leadership. If peers know several masters, the peers that one master loses may follow another. Only one master leads:

    1  A master that has lost a majority of the installed view is deposed.
    2  Until its first own view is installed, the same applies to every other view that may be installed (quorum views).
    3  A peer that leaves deliberately does not count as lost.
    4  A view that keeps a peer's ring may be installed before that peer answers, provided that the peers that are lost
       or have not answered are not a majority of any quorum view.
    5  A lost peer remains a member until a view without it is installed (`is_final_without`).

Missing links. A small group works without a link between two peers, but then it is not a mesh. The dialing end keeps
trying to connect (`Trial`) with a delay that doubles from RETRY_S to RETRY_S_MAX. Once all missing pairs can connect,
the group gets a new epoch at the end of a group call without ops in flight. Links that broke repeatedly
(`Group.unreliable`) are not retried.

Stages of a view change, as in view-synchronous membership:

    flush     a group that lost a peer or a link stops its ops; survivors report which of them are done
    prepare   the peers of the next view make missing links and answer
    install   the view is installed, and ops start in it

    1  View numbers only increase. After a loss during a change, the necessary stages are repeated.
    2  Each group changes by itself. A ring's *epoch* is the view in which it last changed, and is part of op names.
    3  A small group links all pairs. If all links are up it is a mesh, and ops may use the direct algorithm
       (`Install.is_meshed`) up to a size derived from the speeds of the links (`direct_limit`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.failover.durable_state import QuorumView, RecordedView, RunRecord, majority
from pccl.protocol.link_metrics import direct_limit
from pccl.protocol.master.group_calls import GroupCalls
from pccl.protocol.master.link_failures import LinkFailures
from pccl.protocol.master.liveness import Liveness
from pccl.protocol.master.ring import with_newcomers
from pccl.protocol.master.run_state import Group, Ledger, Member, Pair, Persist, RunState
from pccl.protocol.status import Totals


class Leadership:
    """One master's right to lead its run."""

    def __init__(
        self,
        state: RunState,
        in_force: RecordedView | None = None,
        possible: Sequence[RecordedView] = (),
        quorum_views: Sequence[QuorumView] = (),
        has_rivals: bool = False,
    ) -> None:
        """`in_force` and `possible` are earlier masters' views that are or may be in force."""
        self.deposed = ""
        self.has_rivals = has_rivals
        self.evicted: set[int] = set()
        self._state = state
        self._in_force = in_force
        self._possible = list(possible)
        """Other views that may be in force, until this master has installed a view of its own."""
        self._quorum_views = list(quorum_views)
        self._parted: set[int] = set()
        """Peers of the view in force that will not return because they left or were evicted."""

    @property
    def has_begun(self) -> bool:
        return self._in_force is not None

    def record(self, prepared: Sequence[RecordedView] = (), is_over: bool = False) -> RunRecord:
        state = self._state
        longest_s = max((member.master_timeout_s for member in state.members.values()), default=m.MASTER_TIMEOUT_S)
        views = [*self._possible, *prepared]
        names = {peer: member.hello.name for peer, member in state.members.items()}
        return RunRecord(state.run, state.secret, state.term, self._in_force, views, is_over, longest_s, names)

    def prepare(self, listed: Collection[int]) -> RunRecord:
        """Return the record that must be stored before a view of these peers is announced."""
        if listed:
            return self.record([RecordedView.of(self._state.view, listed)])
        if self._in_force is not None:
            # A peer that lost only its connection may return, and then learns that the run has ended.
            self._in_force = RecordedView(self._in_force.view, self._in_force.peers - self._parted)
        self._possible.clear()
        return self.record(is_over=True)

    def installed(self) -> None:
        accepted = self._state.accepted
        if accepted:
            self._in_force = RecordedView.of(self._state.view, accepted)
            self._possible.clear()
            self._parted.clear()
        self._quorum_views = [QuorumView(len(accepted), frozenset(accepted))] if accepted else []

    def is_known_to_enough(self, unaware: Collection[int]) -> bool:
        """Return whether rule 4 allows a view to be installed. `unaware` peers have not answered its Prepare."""
        return not unaware or all(
            view.lost + len(view.here.intersection(unaware)) < majority(view.size) for view in self._quorum_views
        )

    def is_final_without(self, peer: int) -> bool:
        """Return whether a view without this peer is installed, or no peer is left to install one (rule 5)."""
        views = [self._in_force] if self._in_force is not None else []
        return not self._state.accepted_count or all(peer not in view.peers for view in [*views, *self._possible])

    def evict(self, peer: int) -> None:
        self.evicted.add(peer)
        self._parted.add(peer)

    def lose(self, peer: int, is_leaving: bool) -> None:
        if is_leaving:
            self._parted.add(peer)
        for view in self._quorum_views:
            if peer in view.here:
                view.here -= {peer}
                view.size -= is_leaving
                if self.has_rivals and view.lost >= majority(view.size) and not is_leaving:
                    self.deposed = (
                        f"{view.lost} of the {view.size} peers of view {self._state.installed_view} are lost and may "
                        f"follow another master"
                    )


RETRY_S = 5.0
RETRY_S_MAX = 300.0


@dataclass
class _Retry:
    due_at: float
    delay_s: float
    works: bool = False


def _is_small(group: Group) -> bool:
    return len(group.ring) <= topology.MESH_PEERS_MAX


class MissingLinks:
    def __init__(self, state: RunState) -> None:
        self._state = state
        self._retries: dict[Pair, _Retry] = {}
        self._asked: dict[int, list[int]] = {}
        for group in state.groups.values():
            if group.running:
                self.formed(group)

    def formed(self, group: Group) -> None:
        now = self._state.now
        for pair in [pair for pair in self._retries if not set(pair).isdisjoint(group.ring)]:
            if pair not in group.missing:
                del self._retries[pair]
        for pair in group.missing if _is_small(group) else ():
            retry = self._retries.setdefault(pair, _Retry(0.0, RETRY_S))
            retry.due_at = now + retry.delay_s
            retry.works = False

    def may_stand(self, group: Group) -> bool:
        """Return whether the group would be a mesh in a new epoch, according to the last trials."""
        return bool(
            group.running
            and _is_small(group)
            and group.missing
            and not group.unreliable
            and all(pair in self._retries and self._retries[pair].works for pair in group.missing)
        )

    def try_again(self) -> None:
        state = self._state
        due: dict[int, list[int]] = {}
        for (low, high), retry in self._retries.items():
            if state.now >= retry.due_at:
                retry.delay_s = min(2 * retry.delay_s, RETRY_S_MAX)
                retry.due_at = state.now + retry.delay_s
                due.setdefault(high, []).append(low)
        for dialer, others in due.items():
            if dialer not in self._asked:
                self._asked[dialer] = others
                state.send(
                    state.members[dialer].connection, m.Trial([state.members[other].as_record() for other in others])
                )

    def tried(self, member: Member, message: m.Tried) -> None:
        failed = {peer for peer, _ in message.failed}
        for other in self._asked.pop(member.peer, ()):
            retry = self._retries.get((other, member.peer))
            if retry is None:
                continue  # one of the two peers is gone, or the link is up
            if not retry.works and other not in failed:
                text = f"peers {(other, member.peer)} have no link but can connect now; the next group call makes it"
                self._state.log("info", text, {**member.about, "other": other})
            retry.works = other not in failed

    def forget(self, peer: int) -> None:
        self._asked.pop(peer, None)
        for pair in [pair for pair in self._retries if peer in pair]:
            del self._retries[pair]

    def deadlines(self) -> list[float]:
        return [min(retry.due_at for retry in self._retries.values())] if self._retries else []


class ViewStages:
    """The stages of a run's change to its next view."""

    def __init__(
        self,
        state: RunState,
        leadership: Leadership,
        liveness: Liveness,
        links: LinkFailures,
        missing: MissingLinks,
        calls: GroupCalls,
    ) -> None:
        self._state = state
        self._leadership = leadership
        self._liveness = liveness
        self._links = links
        self._missing = missing
        self._calls = calls

    def step(self) -> bool:
        groups, change = self._state.groups.values(), self._state.change
        if any(group.awaiting_flush for group in groups):
            return False
        if change.is_renewing or change.admitting or any(group.changed for group in groups):
            if not self._links.give_up_worn():
                self._prepare()
            return True
        if not change.is_preparing or self._links.waits_for_absent():
            return False
        if not self._links.judge():
            if change.awaiting_ready or not self._leadership.is_known_to_enough(change.unaware):
                return False
            self._install()
        return True

    def _prepare(self) -> None:
        state, change = self._state, self._state.change
        state.view += 1
        change.is_renewing = False
        self._take_in(change.admitting)
        change.admitting.clear()
        for number in [number for number, group in state.groups.items() if not group.ring]:
            del state.groups[number]
        affected: set[int] = set()
        for group in state.groups.values():
            assert group.running or group.changed or group.epoch
            if group.changed:
                assert not group.running
                group.changed = False
                group.epoch = state.view
            if not group.running:
                affected.update(group.ring)
                group.missing.clear()
        relink = self._links.prepare()
        change.is_preparing = True
        change.awaiting_ready = set(affected)
        listed = sorted(peer for group in state.groups.values() for peer in group.ring)
        state.outbox.append(Persist(self._leadership.prepare(listed)))
        change.unaware = set(listed) - affected
        self._announce(listed, relink)
        state.introduced = set(listed)
        # Keep the verdicts until the install. Newcomers have none of these ops, and a peer that receives the verdicts
        # twice, after a further loss, has already ended the ops.
        self._liveness.suspect_cut()  # peers that are remaking their links are not observers

    def _take_in(self, peers: Iterable[int]) -> None:
        state = self._state
        newcomers: dict[int, list[int]] = {}
        for peer in peers:
            newcomers.setdefault(state.members[peer].hello.group, []).append(peer)
        for number, found in newcomers.items():
            group = state.groups.setdefault(number, Group(number))
            # Newcomers are admitted into an empty run or by update_topology, during which no op is in flight.
            group.running = False
            group.ledger = Ledger(())
            group.votes.clear()
            group.changed = True
            places = {peer: state.members[peer].hello.place for peer in (*group.ring, *found)}
            in_order = sorted(places, key=lambda peer: (places[peer], peer))
            is_distinct = len(set(places.values())) == len(places) or not group.ring
            if min(places.values()) >= 0 and is_distinct and [p for p in in_order if p not in found] == group.ring:
                group.ring = in_order
            else:
                group.ring = with_newcomers(group.ring, found, state.link_metrics)

    def _announce(self, listed: Sequence[int], relink: list[tuple[int, int]]) -> None:
        state = self._state
        rings = [m.Ring(group.number, group.epoch, list(group.ring)) for group in state.groups.values()]
        members = [state.members[peer].as_record() for peer in listed]
        new_members = [member for member in members if member.peer not in state.introduced]
        for group in state.groups.values():
            verdicts, reasons = list(group.commits), list(group.aborts.values())
            lost = list(state.lost)
            to_all = m.Prepare(state.view, new_members, rings, verdicts, relink, lost, reasons)
            to_new = m.Prepare(state.view, members, rings, verdicts, relink, lost, reasons)
            for peer in group.ring:
                state.request(peer, to_all if peer in state.introduced else to_new)

    def _install(self) -> None:
        state = self._state
        state.change.is_preparing = False
        state.installed_view = state.view
        number = state.group_calls_ended + 1 if self._calls.is_updating else state.group_calls_ended
        for group in state.groups.values():
            if not group.running:
                self._form(group)
            install = m.Install(state.view, group.is_meshed, number, group.direct_limit, group.is_local)
            for peer in group.ring:
                member = state.members[peer]
                if not member.accepted:
                    member.accepted = True
                    group.accepted += 1
                    state.accepted_count += 1
                    state.history.happened(state.now, Totals(joins=1))
                state.send(member.connection, install)
        state.lost.clear()
        self._leadership.installed()
        sizes = ", ".join(f"group {group.number}: {group.ring}" for group in state.groups.values())
        self._links.installed()
        state.log("info", f"view {state.view} installed; {sizes or 'no peer left'}")
        self._calls.view_installed()

    def _form(self, group: Group) -> None:
        group.running = True
        self._liveness.links_made(group)
        self._missing.formed(group)
        group.linked = topology.linked_pairs(group.ring) - group.linkless
        group.direct_limit = direct_limit(group.ring, self._state.link_metrics)
        group.is_local = self._state.link_metrics.are_on_one_host(group.ring)
        group.commits = []
        group.aborts = {}
        group.open_ops.clear()
        group.is_mutual = group.is_meshed
        group.ledger = Ledger(group.ring, group.is_mutual)

    def links_ready(self, member: Member, message: m.LinksReady) -> None:
        state, change = self._state, self._state.change
        is_due = member.peer in change.awaiting_ready or member.peer in change.unaware
        if message.view != state.view or not is_due:
            return
        change.awaiting_ready.discard(member.peer)
        change.unaware.discard(member.peer)
        state.answered(member)
        for other, reason in [*message.failed, *message.missing]:
            self._links.note_failed(member, other, reason)
