"""One peer's views: the installed one, the prepared one, and those acknowledged to earlier masters.

Views are those of view-synchronous group communication: all peers of a group that install a view agree on its members
and their order, and every op in flight before it ends in the same way on all of them.

Other peers may install a view as soon as all its peers have acknowledged it, so the next master needs the views that
this peer has acknowledged (`recovery_report`, rules 2 and 3):

    1  A prepared view that this peer has acknowledged (LinksReady) counts until this peer installs a view.
    2  A newer view prepared by the same master replaces it, because that master has given up the earlier one.
    3  A view acknowledged to an earlier master counts until a leading master excludes it (`Resumed.in_force`). Only
       then is it certain that no peer has installed it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pccl.protocol import messages as m
from pccl.protocol.link_metrics import UNKNOWN


@dataclass(frozen=True)
class View:
    """An installed membership. It is immutable, so threads may keep it."""

    view: int
    epoch: int
    peer: int
    group: int
    ring: tuple[int, ...]
    group_sizes: dict[int, int]
    is_meshed: bool = False
    direct_limit: int = UNKNOWN
    is_local: bool = False

    @property
    def world_size(self) -> int:
        return len(self.ring)

    @property
    def global_world_size(self) -> int:
        return sum(self.group_sizes.values())


def alone_in(group: int) -> str:
    return f"alone in peer group {group}; wait_for_peers(2) returns when another one has joined"


@dataclass
class Prepared:
    view: int
    ring: m.Ring
    term: int
    rings: list[m.Ring]
    lost: list[tuple[int, str]]
    answered: bool = False
    """Whether this peer has sent LinksReady, so that other peers may have installed the view."""


class KnownViews:
    def __init__(self) -> None:
        self.installed: View | None = None
        self.prepared: Prepared | None = None
        self.rings: list[m.Ring] = []
        self._answered: list[m.PreparedView] = []
        """Acknowledged views, newer than the installed one, of masters before the one of `prepared` (rule 3)."""

    @property
    def last(self) -> int:
        """Number of the last view that was prepared or installed; 0 before the first."""
        if self.prepared is not None:
            return self.prepared.view
        return self.installed.view if self.installed is not None else 0

    @property
    def has_decided(self) -> bool:
        """Whether the prepared view changes this peer's ring and so decided all its ops."""
        return self.prepared is not None and not self.keeps_ring(self.prepared.ring)

    def keeps_ring(self, ring: m.Ring) -> bool:
        return self.installed is not None and ring.epoch == self.installed.epoch

    def prepare(self, message: m.Prepare, ring: m.Ring, term: int) -> Prepared:
        """Record the view that the master of this term prepares. `ring` is this peer's ring in it."""
        last = self.prepared
        if last is not None and last.answered and last.term != term:
            self._answered.append(m.PreparedView(last.view, last.rings, answered=True))
        self.prepared = Prepared(message.view, ring, term, message.rings, message.lost)
        return self.prepared

    def admits_newcomers(self, prepared: Prepared) -> bool:
        """Return whether a view has peers that the installed one lacks."""
        before = {peer for ring in self.rings for peer in ring.peers}
        return any(peer not in before for ring in prepared.rings for peer in ring.peers)

    def install(self, prepared: Prepared, message: m.Install, peer: int, group: int) -> View:
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
        self.prepared = None
        self._answered.clear()

    def rule_out_all_but(self, in_force: Collection[int]) -> None:
        """Exclude all acknowledged views except these, which may be in force according to a leading master."""
        self._answered = [each for each in self._answered if each.view in in_force]
        if self.prepared is not None and self.prepared.view not in in_force:
            self.prepared.answered = False

    def summary(self) -> m.PreVote:
        view, prepared = self.installed, self.prepared
        return m.PreVote(
            installed=None if view is None else m.InstalledView(view.view, self.rings, view.is_meshed),
            prepared=None if prepared is None else m.PreparedView(prepared.view, prepared.rings, prepared.answered),
            has_decided=view is not None and self.has_decided,
            answered=list(self._answered),
        )
