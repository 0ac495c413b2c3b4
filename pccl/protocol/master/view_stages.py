"""The stages in which one view follows another.

All peers of a view must come to the same end of every op of the view before, and none may start an op in a view that
others cannot take part in. So a change of view runs through three stages, as in view-synchronous membership:

    flush     a group that lost a peer (or a link) stops its ops; every survivor says which of them are done
    prepare   all peers of the next view hear of it, make the links they lack, and answer. Those that keep their ring
              only say that they have heard it, see `leadership`
    install   the view is in force, ops start in it

    1  View numbers only grow. A further loss during a change starts again the stages that it needs, because the view
       that was prepared must not come into force with a peer that is gone.
    2  Groups are flushed and formed anew one by one, so a loss in one group neither stops nor aborts ops of another.
       The *epoch* of a group's ring is the view in which it last changed. Ops are named by it, so a frame or message of
       an older ring is never taken for one of the present.
    3  A small group makes links between all pairs. If they all stand it is a mesh, and ops may take the direct
       algorithm (`Install.is_meshed`), up to a size that depends on the links' speeds (`direct_limit`) as they are
       known when the ring is installed. A link that is not needed and does not stand costs nothing but that. It is
       tried again (`missing_links`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.direct_limit import direct_limit
from pccl.protocol.insertion import with_newcomers
from pccl.protocol.ledger import Ledger
from pccl.protocol.master.effects import Persist
from pccl.protocol.master.joint_calls import JointCalls
from pccl.protocol.master.leadership import Leadership
from pccl.protocol.master.link_failures import LinkFailures
from pccl.protocol.master.liveness import Liveness
from pccl.protocol.master.missing_links import MissingLinks
from pccl.protocol.master.run_state import Group, Member, RunState


class ViewStages:
    """The change of one run to its next view."""

    def __init__(
        self,
        state: RunState,
        leadership: Leadership,
        liveness: Liveness,
        links: LinkFailures,
        missing: MissingLinks,
        calls: JointCalls,
    ) -> None:
        self._state = state
        self._leadership = leadership
        self._liveness = liveness
        self._links = links
        self._missing = missing
        self._calls = calls

    def step(self) -> bool:
        """Take the next step of a change of view. Return False if none can be taken now."""
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
        """Begin a view: take newcomers in, give changed rings a new epoch, and tell all who are in it."""
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
        state.told = set(listed)
        # A peer admitted now was not in the ring that these verdicts are about, and one that hears them twice
        # (after a further loss) has no such op open any more.
        self._liveness.suspect_cut()  # those who make their links anew are no observers

    def _take_in(self, peers: Iterable[int]) -> None:
        """Put newcomers into the rings of their groups."""
        state = self._state
        newcomers: dict[int, list[int]] = {}
        for peer in peers:
            newcomers.setdefault(state.members[peer].hello.group, []).append(peer)
        for number, found in newcomers.items():
            group = state.groups.setdefault(number, Group(number))
            # Newcomers come with update_topology, during which no op is in flight, or into an empty run.
            group.running = False
            group.ledger = Ledger(())
            group.votes.clear()
            group.changed = True
            places = {peer: state.members[peer].hello.place for peer in found}
            if not group.ring and min(places.values()) >= 0:
                group.ring = sorted(found, key=lambda peer: (places[peer], peer))
            else:
                group.ring = with_newcomers(group.ring, found, state.link_metrics)

    def _announce(self, listed: Sequence[int], relink: list[tuple[int, int]]) -> None:
        """Send Prepare to all who are in the view."""
        state = self._state
        rings = [m.Ring(group.number, group.epoch, list(group.ring)) for group in state.groups.values()]
        members = [state.members[peer].as_record() for peer in listed]
        new_members = [member for member in members if member.peer not in state.told]
        for group in state.groups.values():
            verdicts, reasons = list(group.commits), list(group.aborts.values())
            lost = list(state.lost)
            to_all = m.Prepare(state.view, new_members, rings, verdicts, relink, lost, reasons)
            to_new = m.Prepare(state.view, members, rings, verdicts, relink, lost, reasons)
            for peer in group.ring:
                state.ask(peer, to_all if peer in state.told else to_new)

    def _install(self) -> None:
        """Put the prepared view in force."""
        state = self._state
        state.change.is_preparing = False
        state.installed_view = state.view
        number = state.joint_calls_ended + 1 if self._calls.is_updating else state.joint_calls_ended
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
                    state.history.joined(state.now)
                state.send(member.connection, install)
        state.lost.clear()
        self._leadership.installed()
        sizes = ", ".join(f"group {group.number}: {group.ring}" for group in state.groups.values())
        self._links.installed()
        state.log("info", f"view {state.view} installed; {sizes or 'nobody left'}")
        self._calls.view_installed()

    def _form(self, group: Group) -> None:
        """Let ops start in a group whose ring is in force."""
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
        """Hear that a peer has made the links of the prepared view, or keeps its ring and has heard of it."""
        state, change = self._state, self._state.change
        is_due = member.peer in change.awaiting_ready or member.peer in change.unaware
        if message.view != state.view or not is_due:
            return
        change.awaiting_ready.discard(member.peer)
        change.unaware.discard(member.peer)
        state.answered(member)
        for other, reason in [*message.failed, *message.missing]:
            self._links.note_failed(member, other, reason)
