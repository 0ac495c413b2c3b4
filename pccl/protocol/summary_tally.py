"""Summaries of views, counted as each comes, so that judging them costs the same however many peers have come.

A judgement asks about few views, and thousands of peers tell of the same ones. So who has said what is counted when it
is said, and rings that several peers tell of are kept once. Of two views with one number the one that was told of first
counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from pccl.protocol import messages as m

Summary = m.PreVote | m.RecoveryReport
VIEWS_MAX = 64
COUNTS_MAX = 64
"""Bounds of what is remembered of views, and of what is asked about them. Only peers that make views up tell of more,
and what is not remembered is looked into anew."""

S = TypeVar("S", bound=Summary)
View = TypeVar("View", m.InstalledView, m.PreparedView)


class Rings:
    """The rings of a view, and what follows from them."""

    def __init__(self, rings: list[m.Ring]) -> None:
        self.rings = rings
        self.groups_of: dict[int, list[int]] = {}
        """The groups whose ring a peer is in, by peer."""
        for ring in rings:
            for peer in dict.fromkeys(ring.peers):
                self.groups_of.setdefault(peer, []).append(ring.group)
        self.peers = frozenset(self.groups_of)
        self.epochs = {ring.group: ring.epoch for ring in rings}
        """The epoch of each group's ring."""
        self.are_peers = all(peer > 0 for peer in self.peers)
        """Whether all numbers in the rings can be those of peers."""


class Views:
    """Rings by the numbers of their views, the last VIEWS_MAX that were new."""

    def __init__(self) -> None:
        self._known: dict[int, list[Rings]] = {}
        """Rings by the number of their view. There is more than one of a number only if somebody makes them up."""
        self._order: deque[int] = deque()

    def of(self, view: m.InstalledView | m.PreparedView) -> Rings:
        """Return the rings of a view, kept once for all who tell of them."""
        known = self._known.setdefault(view.view, [])
        for rings in known:
            if rings.rings is view.rings:
                return rings
        for rings in known:
            if rings.rings == view.rings:
                return rings
        found = Rings(view.rings)
        known.append(found)
        self._order.append(view.view)
        if len(self._order) > VIEWS_MAX:
            oldest = self._order.popleft()
            del self._known[oldest][0]
            if not self._known[oldest]:
                del self._known[oldest]
        return found

    def shared(self, summary: S) -> S:
        """Return the same summary with rings of its own only where nobody else has told of them."""
        installed, prepared = summary.installed, summary.prepared
        return msgspec.structs.replace(
            summary,
            installed=None if installed is None else self._shared(installed),
            prepared=None if prepared is None else self._shared(prepared),
            answered=[self._shared(view) for view in summary.answered],
        )

    def _shared(self, view: View) -> View:
        return msgspec.structs.replace(view, rings=self.of(view).rings)


@dataclass
class _Count:
    """Numbers of peers that have come, and that have answered a view."""

    here: int = 0
    answered: int = 0


@dataclass
class SummaryTally(Generic[S]):
    """The last summary of each peer, and counts over all of them. `views` may be shared with other tallies."""

    views: Views = field(default_factory=Views)
    summaries: dict[int, S] = field(default_factory=dict)
    """Summaries by peer."""
    _installed: dict[int, dict[int, m.InstalledView]] = field(default_factory=dict)
    """Views that peers tell of, by view and peer; so are `_told` and `_settled`."""
    _told: dict[int, dict[int, m.PreparedView]] = field(default_factory=dict)
    _settled: dict[int, dict[int, m.PreparedView]] = field(default_factory=dict)
    _counts: dict[tuple[int, frozenset[int]], _Count] = field(default_factory=dict)
    _common: dict[tuple[frozenset[int], ...], frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, summaries: Mapping[int, S]) -> SummaryTally[S]:
        tally: SummaryTally[S] = cls()
        for peer, summary in summaries.items():
            tally.add(peer, summary)
        return tally

    def add(self, peer: int, summary: S) -> None:
        """Count this summary in the place of what the peer has said before."""
        self.discard(peer)
        self.summaries[peer] = summary
        if summary.installed is not None:
            self._installed.setdefault(summary.installed.view, {})[peer] = summary.installed
        for view in _told(summary):
            if view.view not in self._told:
                self._forget_counts(view.view)
            self._told.setdefault(view.view, {})[peer] = view
        if summary.has_decided and summary.prepared is not None:
            self._settled.setdefault(summary.prepared.view, {})[peer] = summary.prepared
        self._count(peer, summary, 1)

    def discard(self, peer: int) -> None:
        """Forget what this peer has said."""
        summary = self.summaries.pop(peer, None)
        if summary is None:
            return
        self._count(peer, summary, -1)
        if summary.installed is not None:
            _forget(self._installed, summary.installed.view, peer)
        for view in _told(summary):
            _forget(self._told, view.view, peer)
            if view.view not in self._told:
                self._forget_counts(view.view)
        if summary.has_decided and summary.prepared is not None:
            _forget(self._settled, summary.prepared.view, peer)

    def _count(self, peer: int, summary: S, by: int) -> None:
        for (view, peers), count in self._counts.items():
            if peer in peers:
                count.here += by
                count.answered += by if self._leaves_open(peer, summary, view) else 0

    def _forget_counts(self, view: int) -> None:
        """Count anew what is asked of a view: its rings have become known, or nobody tells of them any more."""
        for key in [key for key in self._counts if key[0] == view]:
            del self._counts[key]

    def _leaves_open(self, peer: int, summary: S, view: int) -> bool:
        """Whether a view may be in force for all that this peer of it says: the peer has answered it, or needed not,
        since the view keeps its ring and no word of a newer one has come to it."""
        told = _told(summary)
        if any(each.view >= view for each in told):
            return any(each.view == view and each.answered for each in told)
        if summary.installed is None or view not in self._told:
            return False
        before = self.views.of(summary.installed)
        after = self.views.of(next(iter(self._told[view].values())))
        groups = before.groups_of.get(peer, [])
        return bool(groups) and all(
            group in after.groups_of.get(peer, []) and after.epochs[group] == before.epochs[group] for group in groups
        )

    @property
    def peers(self) -> KeysView[int]:
        """The peers that have said something. The set changes with the tally."""
        return self.summaries.keys()

    def last_installed(self) -> m.InstalledView | None:
        """Return the newest view that a peer has installed, or None."""
        return next(iter(self._installed[max(self._installed)].values())) if self._installed else None

    def prepared(self, after: int) -> list[m.PreparedView]:
        """Return the prepared views newer than view `after`, each as one peer tells of it."""
        return [next(iter(told.values())) for view, told in self._told.items() if view > after]

    def settled(self, after: int, by: frozenset[int]) -> m.PreparedView | None:
        """Return the newest view, newer than `after`, by which one of these peers has settled its ops; None if there is
        none."""
        for view in sorted((view for view in self._settled if view > after), reverse=True):
            for peer, prepared in self._settled[view].items():
                if peer in by:
                    return prepared
        return None

    def count(self, peers: frozenset[int]) -> int:
        """Return the number of these peers that have said something."""
        return self._counted(0, peers).here

    def have_answered(self, view: int, peers: frozenset[int]) -> bool:
        """Whether this view may be in force for all that these peers of it have said: none that had to answer it has
        not, and none knows of a word that rules it out."""
        count = self._counted(view, peers)
        return count.answered == count.here

    def _counted(self, view: int, peers: frozenset[int]) -> _Count:
        count = self._counts.get((view, peers))
        if count is None:
            if len(self._counts) >= COUNTS_MAX:
                self._counts.clear()
            here = [(peer, summary) for peer, summary in self.summaries.items() if peer in peers]
            answered = sum(self._leaves_open(peer, summary, view) for peer, summary in here)
            count = self._counts[view, peers] = _Count(len(here), answered)
        return count

    def common(self, sets: Iterable[frozenset[int]]) -> frozenset[int]:
        """Return the peers that are in all of these sets."""
        key = tuple(sets)
        found = self._common.get(key)
        if found is None:
            if len(self._common) >= COUNTS_MAX:
                self._common.clear()
            found = frozenset.intersection(*key)
            found = next((each for each in key if each == found), found)  # one set is compared faster than two alike
            self._common[key] = found
        return found


def _told(summary: Summary) -> list[m.PreparedView]:
    """Return the prepared views that a summary names."""
    return summary.answered if summary.prepared is None else [summary.prepared, *summary.answered]


def _forget(found: dict[int, dict[int, View]], view: int, peer: int) -> None:
    told = found.get(view, {})
    told.pop(peer, None)
    if not told:
        found.pop(view, None)
