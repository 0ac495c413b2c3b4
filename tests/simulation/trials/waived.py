"""The only master of a run begins anew without a record, and need not wait for all. Most of those who can go on are
waited for all the same, however many of the others are there before them."""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.node import Node
from tests.simulation.scene import MASTER
from tests.simulation.trials.base import MARGIN_S
from tests.simulation.trials.membership import Membership

LOST = 9
"""More messages than are under way to a peer."""
AWAY_TIMEOUTS = 60.0
"""Number of peer timeouts for which somebody is away until it is said that it is back."""


class _Waived(Membership):
    """Trials of runs with one master that goes on with most, as time passes from the moment when it begins anew."""

    def _begin_anew(self, away: list[Node], hears: Node | None = None) -> None:
        """Have a master begin, and all come who are not away; or until `hears` alone has been asked to
        follow."""
        world = self._world
        if not world.hosts[0].is_dead:
            world.kill_master(None, LOST)
        self._drain()
        world.heal()
        self._heals_at = {}
        for node in away:
            self._cut_off(node, AWAY_TIMEOUTS * self._timeout_s)
        world.restart_master()
        self._begun_at = world.now
        if hears is None:
            self._drain()
            return
        term = hears.machine.term
        self._until_said(m.VoteRequest)
        for node in world.alive:
            if node is not hears:
                world.block(MASTER, node)
        while hears.machine.term == term and world.step():
            pass
        world.heal()
        for node in away:
            self._cut_off(node, AWAY_TIMEOUTS * self._timeout_s)

    def _are_back(self, nodes: list[Node], timeouts: float) -> None:
        """After so many peer timeouts since it began, these are back."""
        self._until(timeouts)
        for node in nodes:
            self._heals_at[node] = self._world.now
        self._let_time_pass()

    def _goes(self, node: Node, timeouts: float) -> None:
        """Then one loses its connection, and cannot make another."""
        self._until(timeouts)
        self._world.block(MASTER, node)
        self._world.sever(node)
        self._drain()
        self._cut_off(node, AWAY_TIMEOUTS * self._timeout_s)

    def _until(self, timeouts: float) -> None:
        end_at = self._begun_at + timeouts * self._timeout_s
        self._drain()
        while self._world.now < end_at:
            self._let_time_pass()

    def _all_go_on(self, nodes: list[Node], run: str) -> None:
        self._all_are_led(nodes, run, (MARGIN_S + 2 * self._timeout_s) * self._slack)
        self._all_have_an_end()
        self._go_on(run)


class CameAndWent(_Waived):
    """Most of a run are there, and one goes again. When another one has come the rest has as long as if no others had
    been there before."""

    def play(self) -> None:
        peers = self._company_of(5)
        peers = self._rng.sample(self._world.accepted, len(self._world.accepted))
        n, run = len(peers), peers[0].run
        first, late = peers[: n // 2 + 1], peers[n // 2 + 1 :]
        self._begin_anew(away=late)
        self._goes(first[0], 0.4)
        self._are_back(late[:1], 2.6)
        self._are_back([first[0], *late[1:]], 3.2)
        self._all_go_on(peers, run)


class Overruled(_Waived):
    """Those whom the last view has left out are there first, and are most of the view before. One of those who can go
    on comes, and tells of the last view; it may go again. From then on most of that are waited for."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        goes = rng.random() < 0.6
        count = rng.randint(1, 2) if goes else 3
        peers = self._company_of(2 * count + 1)
        for node in world.accepted:
            if node not in peers or node.site:
                world.leave(node)
        world.run()
        peers = world.accepted
        able = self._some(peers, (len(peers) - 1) // 2)
        left_out = [node for node in peers if node not in able]
        if len(able) < count:
            return
        run = peers[0].run
        self._put_out(left_out)
        gone = {node.number for node in left_out}
        assert all(gone.isdisjoint(node.view.ring) for node in able), f"{left_out} said what no peer says, and are kept"
        world.kill_master()
        self._begin_anew(away=able)
        self._are_back(able[:1], 0.5)
        if goes:
            self._goes(able[0], 0.7)
            self._are_back(able, 2.6)
        else:
            self._are_back(able[1:2], 2.6)
            self._are_back(able[2:], 3.2)
        self._all_go_on(able, run)
        for node in left_out:
            assert node.ended is not None, f"{node} was left out of the last view, and is in the run"

    def _put_out(self, nodes: list[Node]) -> None:
        """These say what no peer says, are put out for that, and hear nothing of it or of what follows."""
        world = self._world
        for node in nodes:
            world.block(MASTER, node)
            world.send(node, world.hello(node))
        world.run_while_any()
        for node in nodes:
            self._cut_off(node, AWAY_TIMEOUTS * self._timeout_s)
        self._pass(1.3 * self._timeout_s * self._slack)


class LateVote(_Waived):
    """A vote is late: the master has heard of a higher term since, and asks for that. Whoever is stopped before it
    follows in that one is not led on, however it has voted before."""

    def play(self) -> None:
        world = self._world
        peers = self._company_of(5)[:5]
        for node in world.accepted:
            if node not in peers or node.site:
                world.leave(node)
        world.run()
        peers = self._rng.sample(world.accepted, len(world.accepted))
        if len(peers) != 5:
            return
        run = peers[0].run
        ahead, slow, later, *others = peers
        self._begin_anew([slow, later], hears=ahead)
        self._begin_anew([ahead, later], hears=slow)
        world.block(slow, MASTER)
        self._drain()
        for node in others:
            self._goes(node, 0.1)
        self._are_back([ahead], 0.2)
        world.network.blocked.discard((slow.name, MASTER))
        self._drain()
        world.freeze(slow)
        self._are_back([later], 0.4)
        self._until(2.0)
        world.thaw(slow)
        for node in others:
            self._heals_at[node] = world.now
        self._all_have_an_end()
        self._go_on(run)
