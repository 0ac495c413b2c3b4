"""The views that one peer knows: the one in force, the one that is prepared, and those that it has answered before.

A view may be in force elsewhere as soon as all its peers have answered it, so the next master has to hear which views
this peer has answered (`recovery_report`, rules 2 and 3):

    1  A prepared view that this peer has answered (LinksReady) counts until a view is installed here.
    2  A newer view that the same master prepares takes its place, because that master has given the one before up.
    3  A view that was answered to an earlier master counts beside the newer one, until a master that leads rules it out
       (`Resumed.in_force`): only then does anybody know that it is in force nowhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pccl.protocol import messages as m
from pccl.protocol.peer.view import View


@dataclass
class Prepared:
    """A view that is not installed yet."""

    view: int
    ring: m.Ring
    """The ring of this peer's group."""
    term: int
    """The term of the master that has prepared it."""
    rings: list[m.Ring]
    lost: list[tuple[int, str]]
    answered: bool = False
    """Whether this peer has said LinksReady, so that the view may be in force elsewhere."""


class KnownViews:
    """All views that one peer knows."""

    def __init__(self) -> None:
        self.installed: View | None = None
        self.prepared: Prepared | None = None
        self.rings: list[m.Ring] = []
        """Rings of the installed view."""
        self._answered: list[m.PreparedView] = []
        """Views newer than the installed one that were answered to earlier masters than the one that has prepared the
        last view (rule 3)."""

    @property
    def last(self) -> int:
        """The number of the last view that a master has told of; 0: none has."""
        if self.prepared is not None:
            return self.prepared.view
        return self.installed.view if self.installed is not None else 0

    @property
    def is_settled(self) -> bool:
        """Whether the prepared view has decided all ops of this peer's ring, because it changes that."""
        return self.prepared is not None and not self.keeps_ring(self.prepared.ring)

    def keeps_ring(self, ring: m.Ring) -> bool:
        """Whether this is the ring in force."""
        return self.installed is not None and ring.epoch == self.installed.epoch

    def prepare(self, message: m.Prepare, ring: m.Ring, term: int) -> Prepared:
        """Note the view that the master of this term prepares. `ring` is this peer's in it."""
        last = self.prepared
        if last is not None and last.answered and last.term != term:
            self._answered.append(m.PreparedView(last.view, last.rings, answered=True))
        self.prepared = Prepared(message.view, ring, term, message.rings, message.lost)
        return self.prepared

    def admits_newcomers(self, prepared: Prepared) -> bool:
        """Whether a view has peers that the installed one has not."""
        before = {peer for ring in self.rings for peer in ring.peers}
        return any(peer not in before for ring in prepared.rings for peer in ring.peers)

    def install(self, prepared: Prepared, message: m.Install, peer: int, group: int) -> View:
        """Put the prepared view in force. A ring that is kept keeps what all its peers choose algorithms by."""
        hints: View | m.Install = message
        if self.installed is not None and self.keeps_ring(prepared.ring):
            hints = self.installed
        self.forget_prepared()
        self.rings = prepared.rings
        self.installed = View(
            view=prepared.view,
            epoch=prepared.ring.epoch,
            peer=peer,
            group=group,
            ring=tuple(prepared.ring.peers),
            group_sizes={ring.group: len(ring.peers) for ring in prepared.rings},
            is_meshed=message.is_meshed,
            direct_limit=hints.direct_limit,
            is_local=hints.is_local,
        )
        return self.installed

    def forget_prepared(self) -> None:
        """Forget all views but the installed one."""
        self.prepared = None
        self._answered.clear()

    def rule_out_all_but(self, in_force: Collection[int]) -> None:
        """Take the word of a master that leads: of the views that were answered only these may be in force."""
        self._answered = [each for each in self._answered if each.view in in_force]
        if self.prepared is not None and self.prepared.view not in in_force:
            self.prepared.answered = False

    def summary(self) -> m.PreVote:
        """Return what a master hears that asks for this peer's views."""
        view, prepared = self.installed, self.prepared
        return m.PreVote(
            installed=None if view is None else m.InstalledView(view.view, self.rings, view.is_meshed),
            prepared=None if prepared is None else m.PreparedView(prepared.view, prepared.rings, prepared.answered),
            is_settled=view is not None and self.is_settled,
            answered=list(self._answered),
        )
