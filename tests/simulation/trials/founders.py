"""Founders whose master stands still or dies before the run is founded, and masters of another version."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol import messages as m
from pccl.protocol.failover.bootstrap import BIRTH_MARGIN_S, HOLD_S
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.effects import Close, Effect, Send
from pccl.types import Result
from tests.simulation.master_host import Memory
from tests.simulation.trials.base import MARGIN_S, SEARCH_TIMEOUTS, Trial


class Founders(Trial):
    """All have left, and several newcomers found a run together. Their master stands still or dies before all are
    there: who need not start over does not, and who must is told so soon."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        host = world.hosts[0]
        for each in world.hosts[1:]:
            if not each.is_dead and each.is_leading:
                return  # a standby founds no run
        for node in world.alive:
            world.leave(node)
        world.run()
        if not host.is_dead:
            world.kill_master(host)
        world.restart_master(host)  # in a run that had a view in force others might lead
        self._pass(self._timeout_s + BIRTH_MARGIN_S)
        count = world.options.founders
        founders = [world.add(rng.randrange(self._groups)) for _ in range(count - 1)]
        self._until(lambda: all(node.number for node in founders))
        numbers = {node: node.number for node in founders}
        if rng.random() < 0.6:
            world.freeze_master(host)
            self._pass(rng.choice((0.6, 0.8)) * self._timeout_s / self._slack**2)
            world.thaw_master(host)
            self._drain()
            self._pass(0.2 * self._timeout_s)
            for node in founders:
                assert node.number == numbers[node], f"{node} has to start over, and its master stood still only"
                assert node.masterless_since is None, f"{node} has lost its master, which stood still only"
        else:
            said = len(world.from_masters)
            world.kill_master(host)
            others = [each for each in world.hosts if each is not host and not each.is_dead]
            if others:
                self._pass((2 + SEARCH_TIMEOUTS / 3) * self._timeout_s * self._slack)
                told = {name for name, message in world.from_masters[said:] if isinstance(message, m.StartOver)}
                for node in founders:
                    assert node.name in told, f"{node} was never accepted, and nobody has it start over"
            world.restart_master(host)
        world.add(rng.randrange(self._groups))
        self._until(lambda: bool(world.accepted))
        self._be_whole()

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for what must come about where nothing stands in its way."""
        world = self._world
        end_at = world.now + (4 * self._timeout_s + BIRTH_MARGIN_S + HOLD_S + 2 * MARGIN_S) * self._slack
        self._drain()
        while not condition():
            assert world.now <= end_at, f"{world.alive} do not found a run"
            self._let_time_pass()


class LostFounder(Trial):
    """A standby leads the run, and the first master has begun anew. Newcomers come there first, one of whom reaches no
    other: it waits for others to found a run with. Those who do reach the master that leads join that run."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        count, run = world.options.founders, world.accepted[0].run
        if world.addresses == 1 or count < 2 or world.memory is Memory.DISK:
            return  # a first master with an old record waits for its peers
        first = world.hosts[0]
        if first.is_leading:
            world.kill_master(first)
        for host in world.hosts[1:]:
            if host.is_dead:
                world.restart_master(host)
        bound_s = (MARGIN_S + (SEARCH_TIMEOUTS + 2) * self._timeout_s) * self._slack
        self._all_are_led(world.accepted, run, bound_s)
        if not first.is_dead:
            world.kill_master(first)
        world.restart_master(first)
        self._pass((self._timeout_s + BIRTH_MARGIN_S) * self._slack + MARGIN_S)
        if first.is_leading:
            return
        lost = world.add(rng.randrange(self._groups))
        for host in world.hosts[1:]:
            world.cut(lost, host.name)
        end_at = world.now + (MARGIN_S + 2 * HOLD_S) * self._slack
        while not lost.number:
            assert world.now <= end_at, f"{lost} has asked all masters that it reaches, and may not found a run"
            self._let_time_pass()
        others = [world.add(rng.randrange(self._groups)) for _ in range(count)]
        self._drain()
        self._pass(MARGIN_S)
        for node in others:
            assert node.run == run, f"{node} is in {node.run or 'no run'} with {lost}, and reaches the master of {run}"
        world.leave(lost)
        world.run()
        world.heal()
        self._be_whole()


class LeftStandby(Trial):
    """A standby leads the run while the first master has begun anew, and too few founders have come to it when all
    others leave. Those who come later reach the first master only, which founds runs: all found one there."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers, count = world.accepted, world.options.founders
        if world.addresses == 1 or count < 2:
            return
        first, run = world.hosts[0], peers[0].run
        if first.is_leading:
            world.kill_master(first)
        for host in world.hosts[1:]:
            if host.is_dead:
                world.restart_master(host)
        self._all_are_led(peers, run, (MARGIN_S + (SEARCH_TIMEOUTS + 2) * self._timeout_s) * self._slack)
        if not first.is_dead:
            world.kill_master(first)
        first.record = None
        world.restart_master(first)
        self._pass((self._timeout_s + BIRTH_MARGIN_S) * self._slack + MARGIN_S)
        early = [world.add(rng.randrange(self._groups)) for _ in range(rng.randint(1, count - 1))]
        self._drain()
        self._pass(MARGIN_S)
        if first.is_leading or not all(node.number for node in early):
            return
        for node in peers:
            world.leave(node)
        self._drain()
        late = [world.add(rng.randrange(self._groups)) for _ in range(count - len(early))]
        for node in late:
            for host in world.hosts[1:]:
                world.cut(node, host.name)
        end_at = world.now + (self._timeout_s + BIRTH_MARGIN_S + HOLD_S + 2 * MARGIN_S) * self._slack
        self._drain()
        while not world.accepted:
            assert world.now <= end_at, f"{early} and {late} do not find each other"
            self._let_time_pass()
        world.heal()
        self._be_whole()


class OtherVersion(Trial):
    """The master has died, and something of another version is at its address for a while. It sends all away, in words
    that end nobody's session, since it does not know the run."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run = peers[0].run
        host = next(host for host in world.hosts if host.is_leading)
        world.kill_master(host, rng.choice((0, 1)))
        others = [each for each in world.hosts if each is not host]
        for each in others:
            if not each.is_dead:
                world.kill_master(each)
        strange = [host, *(each for each in others if rng.random() < 0.5)]
        for each in strange:
            world.restart_master(each)
            each.machine = _Stranger("strange")
            each.seen = each.machine.master
        self._pass(rng.choice((0.5, 2.0, 4.0)) * self._timeout_s)
        for node in peers:
            assert node.ended is None, f"{node} believes a stranger: {node.ended}"
        for each in strange:
            world.kill_master(each)
        for each in world.hosts:
            if each.is_dead:
                world.restart_master(each)
        bound_s = MARGIN_S + self._timeout_s + (SEARCH_TIMEOUTS * self._timeout_s if world.addresses > 1 else 0.0)
        self._all_are_led(peers, run, bound_s * self._slack)
        self._be_whole()


class _Stranger(Failover):
    """It refuses everybody, as a master of another version does."""

    def received(self, connection: int, message: m.FromPeer, now: float) -> list[Effect]:
        if isinstance(message, m.HeartbeatHello):
            return super().received(connection, message, now)
        if self.master.host_of(connection) is None:
            return []
        self.master.disconnected(connection, "refused", now)
        text = "this master speaks protocol 1; install the same version of pccl on both"
        return [Send(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, text)), Close(connection)]
