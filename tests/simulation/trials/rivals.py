"""Runs that several masters may lead: whoever has lost most of a run gives way, and nobody is put out for that."""

from __future__ import annotations

from tests.simulation.master_host import MasterHost
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S, SEARCH_TIMEOUTS, Trial

LOST = 9
"""More messages than are under way to a peer."""
STEP_S = 0.1
"""The step in which time passes where something is to follow at once."""


class _Rivals(Trial):
    """Trials of runs whose peers know several masters."""

    def _company(self, size: int) -> list[Node]:
        """Return the peers of the run, which are so many at least."""
        world, rng = self._world, self._rng
        for _ in range(size - len(world.accepted)):
            world.add(rng.randrange(self._groups))
        self._be_whole()
        return world.accepted

    @property
    def _leader(self) -> MasterHost:
        return next(host for host in self._world.hosts if host.is_leading)

    @property
    def _search_s(self) -> float:
        """The seconds in which all peers are led by one of several masters."""
        return (MARGIN_S + (SEARCH_TIMEOUTS + 1) * self._timeout_s) * self._slack

    def _kill_all(self, lost: int = 0) -> None:
        for host in self._world.hosts:
            if not host.is_dead:
                self._world.kill_master(host, lost)
        self._drain()


class Straggler(_Rivals):
    """A master leads a run on without one, and to its end. When that one is back it hears that nothing is left to wait
    for."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = self._company(3)
        late, *others = rng.sample(peers, len(peers))
        self._kill_all(rng.choice((0, LOST)))
        self._cut_off(late, 60 * self._timeout_s)
        for host in world.hosts:
            world.restart_master(host)
        self._until_led(others)
        for node in others:
            world.leave(node)
        world.run()
        self._heals_at[late] = world.now
        end_at = world.now + self._search_s
        while late.ended is None:
            assert world.now <= end_at, f"{late} waits for a run that has ended without it"
            self._let_time_pass()
        assert "evicted" in late.ended.reason, late.ended
        for _ in range(world.options.founders):
            world.add()
        self._admit_first()

    def _until_led(self, nodes: list[Node]) -> None:
        world = self._world
        end_at = world.now + self._search_s
        self._drain()
        while any(node.masterless_since is not None for node in nodes):
            assert world.now <= end_at, f"{nodes} are not led, and are most of the run"
            self._let_time_pass()
        world.run()

    def _admit_first(self) -> None:
        """Somebody founds a run where there is none any more."""
        world = self._world
        end_at = world.now + self._search_s + 60 * self._slack
        while not world.accepted:
            assert world.now <= end_at, f"{world.alive} found no run, and there is none"
            self._let_time_pass()
        self._be_whole()


class Deserted(_Rivals):
    """All peers hear nothing of their master, and are led by another one, which dies at once. They are back before the
    first one has missed them: it gives way to their higher term, and nobody is put out."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = self._company(3)
        run, host = peers[0].run, self._leader
        for other in world.hosts:
            if other.is_dead:
                world.restart_master(other)
        for node in peers:
            world.block(host.name, node)
        self._pass(0.7 * self._timeout_s / self._slack)
        for node in peers:
            world.block(node, host.name)
        end_at = world.now + self._search_s
        while not self._are_led_elsewhere(peers, host):
            if world.now >= end_at or not host.is_leading:
                break
            world.wait(STEP_S)
            self._drain()
        world.heal()
        if self._are_led_elsewhere(peers, host) and host.is_leading:
            for other in world.hosts:
                if other is not host and not other.is_dead:
                    world.kill_master(other, rng.choice((0, LOST)))
        self._all_are_led(peers, run, self._search_s)
        self._be_whole()

    @staticmethod
    def _are_led_elsewhere(peers: list[Node], host: MasterHost) -> bool:
        led_over = [node.led_over for node in peers if node.masterless_since is None]
        return len(led_over) == len(peers) and all(each and each.host is not host for each in led_over)


class Farewell(_Rivals):
    """Some leave and, before a view without them is in force, another one dies: most of those who have not left are
    there, so their master leads on."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = self._company(5)
        n = len(peers)
        gone, *others = rng.sample(peers, n)
        leaving = others[: rng.randint(n // 2, n - 3)]
        rest = [node for node in others if node not in leaving]
        leaders = {node: node.leader for node in rest}
        world.freeze(gone)
        for node in leaving:
            world.leave(node)
        self._drain()
        world.kill(gone)
        self._pass(1.5 * self._timeout_s)
        world.run()
        for node in rest:
            assert node.ended is None, f"{node} is put out: {node.ended}"
            is_led = node.leader is leaders[node] and node.masterless_since is None
            assert is_led, f"{node} has lost its master: {leaving} have left, and {gone} died"
        self._be_whole()


class TakenApart(_Rivals):
    """A master takes over with just enough of a run, and loses one of them before a view without the missing ones is in
    force. Now the others are more, who may follow another master: it leads no further."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = self._company(5)
        n, run = len(peers), peers[0].run
        if n % 2 == 0 or any(node.site for node in peers):
            return  # half of them would be there
        peers = rng.sample(peers, n)
        here, away = peers[: n // 2 + 1], peers[n // 2 + 1 :]
        mute, gone = here[0], here[-1]
        self._kill_all()
        for node in away:
            self._cut_off(node, 60 * self._timeout_s)
        for host in world.hosts:
            world.restart_master(host)
        end_at = world.now + self._search_s
        while not any(host.is_leading for host in world.hosts):
            assert world.now <= end_at, f"{here} are most of {peers}, and are not led"
            world.wait(STEP_S)
            while not any(host.is_leading for host in world.hosts) and world.step():
                pass
        world.hang(mute)  # it answers nothing, and so no view comes into force
        world.kill(gone)
        self._drain()
        self._pass(1.5 * self._timeout_s)
        leading = [host for host in world.hosts if host.is_leading]
        assert not leading, f"{leading[0].name} leads on with few of {peers}: {away} are not there, and {gone} died"
        world.thaw(mute)
        for node in away:
            self._heals_at[node] = world.now
        self._all_have_an_end()
        self._go_on(run)
