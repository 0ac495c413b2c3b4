"""Checks of membership, as callers see it.

a view is newer than the last one that the same peer has had, and is in force only once its links were up
peers in one view see the same rings, the same sizes of groups, and the same answer to whether all pairs have a link
no site is in a view in part, except for peers that have left on purpose
"""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from tests.simulation.checks.facts import Epoch, Facts
from tests.simulation.node import Node


class Views:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.meshed: dict[Epoch, bool] = {}
        """Whether all pairs have a link."""
        self._sizes: dict[int, dict[int, int]] = {}
        """The sizes of every view's groups."""
        self._whole: set[int] = set()
        """The views whose sites have been looked at."""

    def installed(self, node: Node, effect: ps.Installed) -> None:
        """Check a view that a peer's callers are told of."""
        view = effect.view
        assert view.peer == node.number
        assert self._facts.rings[view.group, view.epoch] == view.ring
        assert sum(view.group_sizes.values()) == len(self._facts.listed[view.view])
        assert self._sizes.setdefault(view.view, view.group_sizes) == view.group_sizes
        assert self.meshed.setdefault((view.group, view.epoch), view.is_meshed) == view.is_meshed
        before = node.views[-1] if node.views else None
        assert before is None or view.view > before.view
        if before is None or view.epoch != before.epoch:
            assert node.ready == view.view, f"{node} is in view {view.view} and has not said LinksReady"
        node.views.append(view)
        again = {peer for peer, _ in effect.lost} & {peer for peer, _ in node.lost}
        assert not again, f"{node} is told again that {again} are lost"
        node.lost += effect.lost

    def puts_in_force(self, message: m.Install) -> None:
        """Check a view that a master puts in force."""
        listed = self._facts.listed.get(message.view)
        assert listed is not None, f"view {message.view} is put in force and was never announced"
        if message.view in self._whole:
            return
        self._whole.add(message.view)
        sites: dict[str, list[Node]] = {}
        for node in self._facts.nodes:
            if node.site:
                sites.setdefault(node.site, []).append(node)
        for site, members in sites.items():
            here = [node for node in members if node.number in listed]
            left = [node for node in members if node.has_left and node not in here]
            assert not here or len(here + left) == here[0].site_size, f"only {here} of {site}"
