"""Links break again and again, or cannot be made for a while. Nobody is lost whose group can do without them."""

from __future__ import annotations

from itertools import combinations
from math import log2

from pccl.protocol import messages as m
from pccl.protocol.master.views import RETRY_S, RETRY_S_MAX
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S, RESETS_MAX, TICK_S
from tests.simulation.trials.membership import Membership

APART_S = (3.0, 12.0, 40.0, 100.0)
CALLS = 3
STEP_S = 2.0
"""The step in which time passes: nobody waits for anything else."""
BREAKS = 6
"""More than a link is made anew for without an op in between."""
EVIDENCE_S = 0.5
"""The time for which failures are gathered before somebody is put out for them."""
LED_TIMEOUTS = 20.0
"""Number of peer timeouts in which all are led again for whom nothing is in the way."""
TAG = 18


class WeakLinks(Membership):
    def _without_need(self, nodes: list[Node]) -> list[tuple[Node, Node]]:
        """Return the pairs whose link no ring needs, in a group that is a mesh."""
        if not nodes[0].view.is_meshed or any(node.site for node in nodes):
            return []
        return [pair for pair in combinations(nodes, 2) if not self._are_neighbours(*pair)]

    @staticmethod
    def _are_neighbours(one: Node, other: Node) -> bool:
        ring = one.view.ring
        return (ring.index(one.number) - ring.index(other.number)) % len(ring) in (1, len(ring) - 1)

    def _break(self, one: Node, other: Node) -> None:
        """The two lose their link: it may outlive resets, if one connection is replaced before the last is found
        broken."""
        world = self._world
        epoch = one.view.epoch
        for _ in range(RESETS_MAX):
            if one.view.epoch != epoch:
                return
            world.break_link(one, other)
            world.run()

    def _reduce(self, nodes: list[Node]) -> None:
        world = self._world
        ops = [(node, world.launch(node, TAG)) for node in nodes]
        world.run()
        for node, op in ops:
            assert op in node.results, f"{node} waits in an op that all have launched"
            assert node.result(op) is Result.SUCCESS, f"{node}: {node.results[op]}"

    def _nobody_is_lost(self, nodes: list[Node]) -> None:
        for node in nodes:
            assert node.ended is None, f"{node} is put out: {node.ended}"


class MissingLink(WeakLinks):
    """Two peers cannot connect, and no ring needs their link: the pair is tried again, ever more rarely; no epoch
    begins for a link that cannot be made; and once it can be made, one begins at a joint call."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((4, 4, 5)))
        pairs = self._without_need(nodes)
        if not pairs:
            return
        self._pair = one, other = rng.choice(pairs)
        world.network.unreachable.add(frozenset((one.name, other.name)))
        self._break(one, other)
        assert not one.view.is_meshed, f"{one} and {other} have no link, and a mesh"
        if rng.random() < 0.3:
            self._break_what_is_needed(nodes)
        if rng.random() < 0.2:
            self._one_dies(nodes)
            return
        tries, begun_at = len(self._tries()), world.now
        self._last(rng.choice(APART_S), nodes)
        delay_s = world.now - begun_at
        count = len(self._tries()) - tries
        assert count <= log2(delay_s * 1.25 / RETRY_S + 1) + 2, f"{self._pair} are tried {count} times in {delay_s} s"
        world.network.unreachable.clear()
        self._pass_by(min(2 * delay_s, RETRY_S_MAX) * self._slack + 2 * RETRY_S + MARGIN_S)
        if rng.random() < 0.4:
            self._part_once_more()
            self._pass_by(4 * delay_s * self._slack + 8 * RETRY_S + MARGIN_S)
        self._all_succeed(Kind.SYNC)
        for node in nodes:
            assert node.view.is_meshed, f"{node} lacks a mesh, and {self._pair} can connect since long"
        self._nobody_is_lost(nodes)
        self._be_whole()

    def _one_dies(self, nodes: list[Node]) -> None:
        """One of the two dies, and is missed at once: the other cannot tell, and is not waited for."""
        world, gone = self._world, self._rng.choice(self._pair)
        if world.masters:
            for host in world.hosts:
                if not host.is_dead:
                    world.kill_master(host)
            self._drain()
            for host in world.hosts:
                world.restart_master(host)
            self._all_are_led(world.accepted, gone.run, LED_TIMEOUTS * self._timeout_s * self._slack)
        world.kill(gone)
        self._drain()
        for node in nodes:
            assert node is gone or gone.number not in node.view.ring, f"{gone} is dead, and {node} does not know"
        world.network.unreachable.clear()
        world.run()
        self._be_whole()

    def _tries(self) -> list[str]:
        return [name for name, message in self._world.from_masters if isinstance(message, m.Trial)]

    def _break_what_is_needed(self, nodes: list[Node]) -> None:
        """A link that is needed breaks more often than it may without an op in between. Here masters commit ops."""
        pair = self._rng.choice([pair for pair in combinations(nodes, 2) if self._are_neighbours(*pair)])
        for _ in range(BREAKS):
            self._break(*pair)
            self._nobody_is_lost(nodes)
            self._reduce(nodes)

    def _last(self, seconds: float, nodes: list[Node]) -> None:
        """Let time pass in which the two cannot connect, with joint calls that begin no epoch for that."""
        epochs = {node: node.view.epoch for node in nodes}
        for _ in range(CALLS):
            self._pass_by(seconds / CALLS)
            self._all_succeed(Kind.SYNC)
        for node in nodes:
            assert node.view.epoch == epochs[node], f"{node} is in a new epoch, and {self._pair} cannot connect"

    def _part_once_more(self) -> None:
        """They can connect when they try, and no more when it comes to it: that costs one epoch, not one at each
        call."""
        world, (one, other) = self._world, self._pair
        epoch = one.view.epoch
        world.network.unreachable.add(frozenset((one.name, other.name)))
        for _ in range(CALLS):
            self._all_succeed(Kind.SYNC)
        begun = {view.epoch for view in one.views if view.epoch > epoch}
        assert len(begun) <= 1, f"{len(begun)} new epochs for {self._pair}, who cannot connect"
        world.network.unreachable.clear()

    def _pass_by(self, seconds: float) -> None:
        end_at = self._world.now + seconds
        while self._world.now < end_at:
            self._world.wait(STEP_S)
            self._drain()


class DeadDialer(WeakLinks):
    """The two ends of a link make all of theirs anew. One dies that is to dial them, and is missed at once: whoever
    waits for it to dial cannot tell."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        if not nodes[0].view.is_meshed or any(node.site for node in nodes):
            return
        gone = max(nodes, key=lambda node: node.number)
        one, other, *_ = rng.sample([node for node in nodes if node is not gone], 3)
        self._break_until(one, other, m.Prepare, at_once=True)
        for _ in range(rng.choice((0, 2, 5, 10, 20))):
            world.step()
        world.kill(gone)
        self._drain()
        for node in nodes:
            assert node is gone or gone.number not in node.view.ring, f"{gone} is dead, and {node} does not know"
        world.run()
        self._be_whole()


class WeakLink(WeakLinks):
    """A link that no ring needs breaks again and again, without an op in between: the group goes without it."""

    def play(self) -> None:
        nodes = self._company_of(self._rng.choice((4, 4, 5)))
        pairs = self._without_need(nodes)
        if not pairs:
            return
        pair = self._rng.choice(pairs)
        for _ in range(BREAKS):
            self._break(*pair)
            self._nobody_is_lost(nodes)
        assert not nodes[0].view.is_meshed, f"the link of {pair} broke {BREAKS} times, and is counted on"
        self._reduce(nodes)
        self._nobody_is_lost(nodes)
        self._be_whole()


class HopelessLink(WeakLinks):
    """Two neighbours lose their link and are refused another one, while nothing is heard of a third one's: one of the
    two is put out before that is known."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        if any(node.site for node in nodes):
            return
        one, other = rng.choice([pair for pair in combinations(nodes, 2) if self._are_neighbours(*pair)])
        third = rng.choice([node for node in nodes if node not in (one, other)])
        world.network.unreachable.add(frozenset((one.name, other.name)))
        world.cut(one, third)
        world.break_link(one, other)
        self._drain()
        self._pass(EVIDENCE_S * self._slack + 2 * TICK_S)
        put_out = [node for node in nodes if node.ended is not None]
        assert put_out, f"{one} and {other} cannot connect, and nobody is put out for that"
        world.network.unreachable.clear()
        world.heal()
        self._pass(2 * self._timeout_s)
        world.run()
        self._be_whole()
