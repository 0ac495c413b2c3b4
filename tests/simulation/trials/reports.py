"""Peers report how fast they and their links are: the master names whoever is at fault, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pccl.protocol import messages as m
from pccl.protocol.master.effects import MasterLog
from tests.simulation.node import Node
from tests.simulation.trials.membership import Membership

REPORT_S = 0.5
BEFORE = 16
"""Number of reports of a run in which all is well."""
AFTER = 26
STRANGER = 1 << 40
"""The number of no peer."""
ENDS_S = 30.0
"""Seconds after which nobody is slow any more in a run that does nothing."""
Name = tuple[int, int | None]
"""A peer that is at fault, or the two ends of a way."""


class _Reports(Membership):
    """Trials in which peers report figures that are made up. They launch no ops: what is reported stands for these."""

    def _begin(self, size: int) -> list[Node]:
        nodes = self._company_of(size)
        self._at = 0
        self._named: dict[Name, str] = {}
        """What the master has said of whom it names, up to now."""
        self._ever: dict[Name, str] = {}
        return nodes

    def _report(
        self, nodes: Sequence[Node], in_ops_ms: Callable[[Node], int], links: Callable[[Node], list[m.LinkReport]]
    ) -> None:
        """Each reports once, and the master judges."""
        world = self._world
        self._at += 1
        for node in nodes:
            report = m.Report(
                [(node.view.epoch, 4 * self._at, 0)],
                0,
                0,
                links=links(node),
                in_ops_ms=in_ops_ms(node),
                at_ms=round(1000 * REPORT_S) * self._at,
            )
            world.control_plane.send(node, report)
        self._drain()
        self._judge()
        self._pass(REPORT_S)

    def _judge(self) -> None:
        host = self._leader
        for effect in host.machine.diagnose((), {}, self._world.clock(host)):
            if not isinstance(effect, MasterLog) or "peer" not in effect.about:
                continue
            name = effect.about["peer"], effect.about.get("other")
            if effect.level == "warning":
                self._named[name] = self._ever[name] = effect.text
            else:
                self._named.pop(name, None)

    def _nobody_is_named(self) -> None:
        assert not self._ever, f"nothing is wrong, and the master says: {self._ever}"

    def _is_named(self, name: Name, word: str) -> None:
        found = {each: text for each, text in self._ever.items() if each != name or word not in text}
        assert name in self._ever, f"{name} is {word}, and the master says: {self._ever}"
        assert not found, f"{name} is {word}, and the master says more: {found}"


class TwoWays(_Reports):
    """Two peers reduce large vectors without pause. Nobody is named for a little more that lies on one of the two ways,
    or for twice as much without a queue, or where they broadcast and nearly all goes one way; where a way is slow, that
    one is. One may tell nothing of its way: then no two can be compared, and nobody is named."""

    def play(self) -> None:
        rng = self._rng
        nodes = self._begin(2)
        if len(nodes) != 2:
            return
        lying, full_ms, round_trip_ms, is_slow = rng.choice(
            ((1.0, 100, 60, False), (rng.uniform(1.0, 1.4), 0, 60, False), (2.2, 0, 30, False), (3.0, 0, 60, True))
        )
        is_half_told, is_broadcast = rng.random() < 0.3, not is_slow and rng.random() < 0.4
        sick, other = rng.sample(nodes, 2)
        totals = dict.fromkeys(nodes, 0)

        def links(node: Node) -> list[m.LinkReport]:
            at, more = self._at, lying if node is sick else 1.0
            if is_half_told and node is not sick:
                return []
            totals[node] += round(300_000 * more * rng.uniform(0.97, 1.03))
            is_empty = is_broadcast and node is not sick
            return [
                m.LinkReport(
                    (other if node is sick else sick).number,
                    (1000 if is_empty else 2_000_000) * at,
                    busy_ms=(50 if is_empty else 485) * at,
                    full_ms=full_ms * at if node is sick else 0,
                    delivered=1400 * at,
                    lying_byte_s=totals[node],
                    round_trip_us=1000 * round_trip_ms if at > 2 else 21_000,
                )
            ]

        for _ in range(AFTER):
            self._report(nodes, lambda _: 490 * self._at, links)
        if is_slow and not is_half_told:
            self._is_named((sick.number, other.number), "slow")
        else:
            self._nobody_is_named()
        self._be_whole()


class LossyWay(_Reports):
    """A way loses packets, or all ways to a peer do, one after the other."""

    def play(self) -> None:
        nodes = self._begin(3)
        if len(nodes) != 3:
            return
        if self._rng.random() < 0.5:
            self._lose_on_one_way(nodes)
        else:
            self._lose_on_a_line(nodes)
        self._be_whole()

    def _lose_on_a_line(self, nodes: list[Node]) -> None:
        """Once the other way to a peer is lossy, too, its downlink is named, and none of the ways beside that. What one
        of them says of a link to somebody who is not of the group does not count."""
        sick, first, then = self._rng.sample(nodes, 3)
        lost = dict.fromkeys(nodes, 0)

        def links(node: Node) -> list[m.LinkReport]:
            at = self._at
            lost[node] += 12 * (node is first or (node is then and at > BEFORE))
            resent = {other.number: lost[node] if other is sick else 0 for other in nodes if other is not node}
            if node is then:
                resent[STRANGER] = 12 * at
            return [
                m.LinkReport(
                    other, 20_000 * at, busy_ms=60 * at, delivered=100 * at, resent=lost_there, round_trip_us=21_000
                )
                for other, lost_there in resent.items()
            ]

        for _ in range(BEFORE):
            self._report(nodes, lambda _: 300 * self._at, links)
        self._is_named((first.number, sick.number), "loses packets")
        for _ in range(BEFORE):
            if (sick.number, None) not in self._named:
                self._report(nodes, lambda _: 300 * self._at, links)
        named = list(self._named)
        assert named == [(sick.number, None)], (
            f"the downlink of {sick} loses packets, and the master says: {self._named}"
        )

    def _lose_on_one_way(self, nodes: list[Node]) -> None:
        """A way loses packets in bursts. It is called lossy, and not slow, which it is for what it loses. No peer says
        what comes the other way, and at times nobody but one says anything."""

        rng = self._rng
        by_number = {node.number: node for node in nodes}
        ring = nodes[0].view.ring
        sick = rng.choice(nodes)
        after = {by_number[peer]: ring[(at + 1) % 3] for at, peer in enumerate(ring)}
        is_half_told = rng.random() < 0.3
        busy_ms = rng.choice((60, 60, 240))
        rest = rng.randrange(12)
        resent = 0

        def links(node: Node) -> list[m.LinkReport]:
            nonlocal resent
            at, is_sick = self._at, node is sick
            if is_sick:
                resent += 10 * ((at + rest) % 12 not in (1, 3, 4, 6, 7))
            link = m.LinkReport(
                after[node],
                20_000 * at,
                busy_ms=(450 if is_sick else busy_ms) * at,
                delivered=100 * at,
                resent=resent if is_sick else 0,
                lying_byte_s=(30_000 if is_sick else 2000) * at,
                round_trip_us=21_000,
            )
            return [] if is_half_told and not is_sick else [link]

        for _ in range(AFTER + 8):
            self._report(nodes, lambda _: 480 * self._at, links)
        self._is_named((sick.number, after[sick]), "loses packets")


class SlowPeer(_Reports):
    """A peer takes much longer between ops than the others, and is named. Nobody reduces any more then, and nobody is
    slow for long."""

    def play(self) -> None:
        rng = self._rng
        nodes = self._begin(rng.choice((2, 3, 4)))
        slow = rng.choice(nodes)
        totals = dict.fromkeys(nodes, 0)

        def in_ops_ms(node: Node) -> int:
            totals[node] += round((20 if node is slow and self._at > BEFORE else 350) * rng.uniform(0.9, 1.1))
            return totals[node]

        for _ in range(BEFORE):
            self._report(nodes, in_ops_ms, lambda _: [])
        self._nobody_is_named()
        for _ in range(AFTER):
            self._report(nodes, in_ops_ms, lambda _: [])
        self._is_named((slow.number, None), "slow")
        end_at = self._world.now + ENDS_S * self._slack
        while self._named and self._world.now < end_at:
            self._pass(2 * REPORT_S)
            self._judge()
        assert not self._named, f"nobody reduces any more, and the master says: {self._named}"
        self._be_whole()
