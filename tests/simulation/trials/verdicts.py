"""A master dies in the middle of deciding ops: some have heard how they end by the next view, and some have not."""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.node import Node
from tests.simulation.trials.base import Trial

ROUNDS = (1, 2, 2, 3)
BREAKS_MAX = 6
"""More resets of all its connections than a link outlives."""
TAGS = (41, 42, 43, 44)
PAIR_TAG = 45


class TornVerdicts(Trial):
    """Ops are stopped since a link is lost, or a peer, once or several times in a row, each time under a master that
    dies before all have heard of the view that decides them; or they go on, and some are given up without a master.
    Whoever goes on hears the verdict that others had heard."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run = peers[0].run
        if len(peers) < 2 or self._needs_all:
            return
        for at in range(rng.choice(ROUNDS)):
            leader = next((host for host in world.hosts if host.is_leading), None)
            here = [node for node in peers if node.is_reachable and node.masterless_since is None]
            if leader is None or len(here) < 2:
                break
            self._begin_ops(here)
            is_stopped = rng.random() < 0.7
            if is_stopped:
                self._stop_ops(here, may_kill=at == 0 and len(here) > 2)
                self._until_said(rng.choice((m.Flush, m.Prepare, m.Prepare, m.Prepare, m.Install)))
            deaf = self._some(here, rng.randint(0, len(here) - 1))
            for node in deaf:
                world.block(leader.name, node)
            self._deliver(rng.choice((0, 1, 2, 4, 8, 20, 60)))
            world.kill_master(leader, rng.choice((0, 1, 2, 5)))
            world.heal()
            if not is_stopped:
                self._give_up(here)
            self._begin_masters(all_of_them=True)
            self._come_back(here)
        self._all_have_an_end()
        self._go_on(run)

    def _begin_ops(self, nodes: list[Node]) -> None:
        """Have all launch ops, of which some are over, some done with and some neither, and some are given up."""
        world, rng = self._world, self._rng
        absent = self._some(nodes, 1) if rng.random() < 0.2 else []
        launched = []
        for tag in TAGS[: rng.randint(1, len(TAGS))]:
            for node in rng.sample(nodes, len(nodes)):
                if (node not in absent or tag == TAGS[0]) and _is_free(node, tag):
                    launched.append((node, world.launch(node, tag)))
        pair = [node for node in nodes if node.group == nodes[0].group][:2]
        if len(pair) > 1 and rng.random() < 0.5 and all(_is_free(node, PAIR_TAG) for node in nodes):
            world.launch(pair[0], PAIR_TAG, pair=(pair[1], True))
            world.launch(pair[1], PAIR_TAG, pair=(pair[0], False))
        self._deliver(rng.choice((0, 5, 20, 40, 80, 120, 200)))
        for node, op in launched:
            if rng.random() < 0.1 and op not in node.results:
                world.cancel(node, op)

    def _give_up(self, nodes: list[Node]) -> None:
        """Have some give up ops that others may have committed."""
        for node in nodes:
            for op in node.open_ops:
                if self._rng.random() < 0.4:
                    self._world.cancel(node, op)
                    self._deliver(self._rng.choice((0, 0, 5)))

    def _stop_ops(self, nodes: list[Node], may_kill: bool) -> None:
        """Have a peer or a link be lost."""
        world, rng = self._world, self._rng
        node = rng.choice(nodes)
        if may_kill and rng.random() < 0.5:
            world.kill(node, rng.choice((0, 0, 30, 1000)))
            return
        ring = [other for other in world.ring_nodes(node) if other is not node and other in nodes]
        if not ring:
            return
        said, other = len(world.from_masters), rng.choice(ring)
        for _ in range(BREAKS_MAX):
            world.break_link(node, other)
            self._deliver(rng.choice((5, 20)))
            if any(isinstance(message, m.Flush) for _, message in world.from_masters[said:]):
                break

    def _come_back(self, nodes: list[Node]) -> None:
        """Some come to the next master late, and time passes until it leads."""
        rng = self._rng
        late_s = self._timeout_s * rng.choice((0.0, 0.3, 0.8, 2.0)) / self._slack**2
        if late_s:
            for node in self._some([node for node in nodes if node.is_reachable], rng.randint(0, len(nodes) - 1)):
                self._cut_off(node, late_s)
        self._drain()
        end_at = self._world.now + late_s + self._timeout_s * rng.choice((0.0, 1.0, 4.0))
        while self._world.now < end_at and any(node.masterless_since is not None for node in self._world.alive):
            self._let_time_pass()


def _is_free(node: Node, tag: int) -> bool:
    return all(node.launched[op][0] != tag for op in node.open_ops)
