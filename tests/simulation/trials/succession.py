"""A master dies in the middle of something, and all that it led go on."""

from __future__ import annotations

from pccl.protocol.messages import Kind
from tests.simulation.master_host import Memory
from tests.simulation.node import Node
from tests.simulation.trials.base import DELIVERIES, MARGIN_S, SEARCH_TIMEOUTS, Trial


class Succession(Trial):
    def play(self) -> None:
        """The master dies in the middle of something, once or several times, and with it perhaps few of the peers."""
        world, rng = self._world, self._rng
        peers = world.accepted
        n = len(peers)
        lost_before = {node: len(node.lost) for node in peers}
        run = peers[0].run
        is_parted = self._part(peers) if rng.random() < 0.2 else False
        views_before = {node: len(node.views) for node in peers}
        deaths = rng.choice((1, 1, 1, 2, 3))
        # Who asks several masters while they die one by one may find that none leads a run, and one that has no record
        # on its disk, or need not wait, takes that for the truth.
        is_certain = deaths == 1 and world.memory is Memory.NONE
        may_come = not is_parted and (is_certain or world.addresses == 1)
        newcomers = self._newcomers() if rng.random() < 0.4 and may_come else []
        ops: dict[int, dict[Node, int]] = {}
        calls: dict[Node, int] = {}
        kind = rng.choice(("", "ops", "ops", Kind.SYNC, Kind.UPDATE_TOPOLOGY, Kind.OPTIMIZE_TOPOLOGY))
        absent = self._some(peers, rng.choice((0, 0, 1, 1, n - 1)))
        self._work(kind, [node for node in peers if node not in absent], ops, calls)
        victims: list[Node] = []
        may_lose = n - 1 if self._is_recorded else (n - 1) // 2
        if may_lose and not self._needs_all and not is_parted and rng.random() < 0.4:
            victims = self._some(peers, rng.randint(1, may_lose))
            if not self._is_recorded and len(newcomers) + len(victims) > (n + len(newcomers)) // 2:
                victims = []  # a view may be in force that needs one of them
        late_s = 0.0
        for at in range(deaths):
            self._deliver(rng.choice(DELIVERIES))
            self._kill_masters()
            if at == 0:
                for node in victims:
                    world.kill(node, rng.choice((0, 0, 1, 30, 1000)))
            if at == deaths - 1:
                late_s = self._come_late([node for node in peers if node not in victims])
            self._deliver(rng.choice(DELIVERIES))
            self._begin_masters(all_of_them=at == deaths - 1)
        survivors = [node for node in peers if node not in victims]
        self._all_are_led(survivors, run, self._bound_s(len(survivors), n, late_s))
        for node in survivors:
            gone = {peer for peer, _ in node.lost[lost_before[node] :]}
            assert gone <= {victim.number for victim in victims}, f"{node} has lost {gone}, and only {victims} died"
        self._finish(survivors, ops, calls, kind, victims)
        if not victims and not newcomers and kind in ("", "ops", Kind.SYNC):
            for node in survivors:
                assert len(node.views) == views_before[node], f"{node} has got a new view, and nobody was lost"
        world.network.unreachable.clear()
        if rng.random() < 0.3:
            self._elders_win()
        self._be_whole()

    def _part(self, peers: list[Node]) -> bool:
        """Have two that are no neighbours go without a link. Return False if there are no such two."""
        world = self._world
        one = self._rng.choice(peers)
        ring = world.ring_nodes(one)
        if len(ring) < 4:
            return False
        other = ring[(ring.index(one) + 2) % len(ring)]
        world.network.unreachable.add(frozenset((one.name, other.name)))
        world.break_link(one, other)
        self._pass(3 * self._timeout_s)
        world.run()
        for node in peers:
            assert node.ended is None, f"{node} is put out for a link that nobody needs: {node.ended}"
        return True

    def _come_late(self, nodes: list[Node]) -> float:
        """Have some of them reach no master for a while: few come at once, the rest about the same time later. Return
        the seconds until all may have come."""
        world, rng = self._world, self._rng
        if rng.random() < 0.5 or not nodes:
            return 0.0
        timeout_s = self._timeout_s / self._slack**2
        # Of several masters they may first wait at another one, for nearly as long as they are waited for.
        together_s = 0.8 * timeout_s if world.addresses == 1 else 0.0
        first = self._some(nodes, rng.randint(0, (len(nodes) - 1) // 2))
        after_s = timeout_s * rng.choice((0.0, 0.5, 0.9, 1.2) if self._is_recorded else (0.0, 0.9, 2.0, 4.0))
        if world.memory is Memory.NONE and world.addresses == 1 and self._slack == 1:
            # Others may have led the run on without those who are here, so it waits for all while they have patience.
            first = self._some(nodes, rng.randint(0, len(nodes) - 1))
            after_s = timeout_s * rng.choice((0.0, 0.9, 2.0, 7.0))
        are_met = any(node.control is not None and not node.control.host.is_dead for node in nodes)
        if len(world.accepted) < len(world.alive) or are_met:
            after_s = 0.0  # newcomers would found a run, or a master lose who is away for so long
        for node in nodes:
            if node not in first:
                self._cut_off(node, after_s + together_s * rng.choice((0.0, 0.3, 0.9)))
        return after_s + together_s

    def _bound_s(self, survivors: int, peers: int, late_s: float) -> float:
        """Return the time within which a master must lead survivors of so many peers."""
        world = self._world
        s = late_s + MARGIN_S
        if world.addresses > 1:
            s += SEARCH_TIMEOUTS * self._timeout_s
        if survivors < peers:
            s += self._timeout_s
            if 2 * survivors <= peers:
                s += 2 * self._timeout_s
        return s * self._slack
