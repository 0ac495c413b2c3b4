"""Leadership: whether this master may lead on, and the record that fences the run.

Where peers know several masters, those that this one loses may follow another. Two must never lead at once, which is
kept as in Viewstamped Replication and Raft, by majorities that intersect:

    1  A master leads only while it has not lost a majority of the view in force; otherwise it is deposed, because that
       majority may have chosen another master.
    2  The same holds for every view that may be in force at a peer that this master has not heard, until its first own
       view is in force: any of these *quorum views* can have made a master.
    3  A peer that leaves on purpose does not count: it follows nobody.
    4  A view that changes no ring of a peer is in force without its answer, but only once no majority of a quorum view
       is left that has not heard of it: that majority could go on elsewhere as if the view had never been.
    5  A peer that is lost counts until a view without it is in force (`is_settled_without`): if this master is deposed
       before that, whoever leads next needs a majority of the view that the peer is in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pccl.protocol import messages as m
from pccl.protocol.fence import Fence, FencedView
from pccl.protocol.master.run_state import RunState
from pccl.protocol.quorum import QuorumView, majority


class Leadership:
    """The right of one master to lead its run."""

    def __init__(
        self,
        state: RunState,
        in_force: FencedView | None = None,
        possible: Sequence[FencedView] = (),
        quorum_views: Sequence[QuorumView] = (),
        has_rivals: bool = False,
    ) -> None:
        """`in_force` and `possible` are the views that are, or may be, in force from a master before this one."""
        self.deposed = ""
        """The reason why this master must lead no further; empty: it may lead."""
        self.has_rivals = has_rivals
        """Whether peers know of other masters."""
        self.evicted: set[int] = set()
        """Accepted peers that this master has put out of its run."""
        self._state = state
        self._in_force = in_force
        self._possible = list(possible)
        """Other views that may be in force, until this master has put one of its own in force."""
        self._quorum_views = list(quorum_views)
        self._parted: set[int] = set()
        """Peers of the view in force that are not expected back: they have left, or were evicted."""

    @property
    def has_begun(self) -> bool:
        """Whether a view of the run is in force, or was: before that, nobody can lead the run but its founder."""
        return self._in_force is not None

    def fence(self, prepared: Sequence[FencedView] = (), is_over: bool = False) -> Fence:
        """Return the record of the run as it stands, with the views in `prepared` that this master has prepared."""
        state = self._state
        longest_s = max((member.master_timeout_s for member in state.members.values()), default=m.MASTER_TIMEOUT_S)
        views = [*self._possible, *prepared]
        return Fence(state.run, state.secret, state.term, self._in_force, views, is_over, longest_s)

    def prepare(self, listed: Collection[int]) -> Fence:
        """Return the record that must be kept before a view of these peers is announced."""
        if listed:
            return self.fence([FencedView.of(self._state.view, listed)])
        if self._in_force is not None:
            # A peer that lost its connection, not its right to be here, may come back to the end of the run.
            self._in_force = FencedView(self._in_force.view, self._in_force.peers - self._parted)
        self._possible.clear()
        return self.fence(is_over=True)

    def installed(self) -> None:
        """Note that the view that was prepared is in force."""
        accepted = self._state.accepted
        if accepted:
            self._in_force = FencedView.of(self._state.view, accepted)
            self._possible.clear()
            self._parted.clear()
        self._quorum_views = [QuorumView(len(accepted), frozenset(accepted))] if accepted else []

    def is_known_to_enough(self, unaware: Collection[int]) -> bool:
        """Whether rule 4 lets a view come into force. `unaware` are the peers that have not heard of it."""
        return not unaware or all(
            view.lost + len(view.here.intersection(unaware)) < majority(view.size) for view in self._quorum_views
        )

    def is_settled_without(self, peer: int) -> bool:
        """Whether a view without this peer is in force, or nobody is left who could put one in force (rule 5)."""
        views = [self._in_force] if self._in_force is not None else []
        return not self._state.accepted_count or all(peer not in view.peers for view in [*views, *self._possible])

    def evict(self, peer: int) -> None:
        """Note that an accepted peer is about to be evicted."""
        self.evicted.add(peer)
        self._parted.add(peer)

    def lose(self, peer: int, is_leaving: bool) -> None:
        """Note that an accepted peer is gone."""
        if is_leaving:
            self._parted.add(peer)
        for view in self._quorum_views:
            if peer in view.here:
                view.here -= {peer}
                view.size -= is_leaving
                if self.has_rivals and view.lost >= majority(view.size) and not is_leaving:
                    self.deposed = (
                        f"{view.lost} of the {view.size} peers of view {self._state.installed_view} are lost, and may "
                        f"be following another master"
                    )
