"""Masters stand still, or reach nobody or few for a while. Nobody is lost by that who could be waited for."""

from __future__ import annotations

from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.master_host import MasterHost
from tests.simulation.node import Node
from tests.simulation.trials.base import DELIVERIES, MARGIN_S, SEARCH_TIMEOUTS, Trial

UNNOTICED_SHARE = 0.4
"""Share of the peer timeout for which a master may be away and nobody minds."""
WAYS = ((True, True), (True, True), (True, False), (False, True))
"""Whether a node is not heard, and whether it hears nothing."""


class _Interruption(Trial):
    def _begin_work(self, peers: list[Node]) -> str:
        """Have peers do something, in the middle of which it happens. Return what."""
        self._lost = {node: len(node.lost) for node in peers}
        self._ops: dict[int, dict[Node, int]] = {}
        self._calls: dict[Node, int] = {}
        kind = self._rng.choice(("", "ops", Kind.SYNC, Kind.OPTIMIZE_TOPOLOGY))
        absent = self._some(peers, self._rng.choice((0, 1, 1)))
        self._work(kind, [node for node in peers if node not in absent], self._ops, self._calls)
        self._deliver(self._rng.choice(DELIVERIES))
        return kind

    def _leader(self) -> MasterHost:
        return next(host for host in self._world.hosts if host.is_leading)

    def _nobody_minds(self, peers: list[Node], leaders: dict[Node, object]) -> None:
        for node in peers:
            assert node.leader is leaders[node], f"{node} has another master, and was away for a moment only"
            gone = node.lost[self._lost[node] :]
            assert not gone, f"{node} has lost {gone}, and was away for a moment only"


class Standstill(_Interruption):
    """A master stands still for a while: all whom it led are led on, by it or by another one."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run, host = peers[0].run, self._leader()
        views = {node: len(node.views) for node in peers}
        leaders: dict[Node, object] = {node: node.leader for node in peers}
        kind = self._begin_work(peers)
        timeouts = rng.choice((0.2, UNNOTICED_SHARE, 0.7, 0.9, 1.2, 1.5, 4.0))
        world.freeze_master(host)
        self._pass(timeouts * self._timeout_s / self._slack)
        world.thaw_master(host)
        bound_s = MARGIN_S + self._timeout_s + (SEARCH_TIMEOUTS * self._timeout_s if world.addresses > 1 else 0.0)
        if timeouts > 1.0 and world.addresses > 1:
            # Those who ask the master that stands still, just as the others gather at another one, may come too late.
            self._all_have_an_end()
            late = [node for node in peers if node.ended is not None]
            assert 2 * len(late) <= len(peers), f"{late} are put out, and a master stood still only"
            if late:
                self._finish([node for node in peers if node not in late], self._ops, self._calls, kind, late)
                self._be_whole()
                return
        self._all_are_led(peers, run, bound_s * self._slack)
        if timeouts <= UNNOTICED_SHARE:
            self._nobody_minds(peers, leaders)
        self._finish(peers, self._ops, self._calls, kind, [])
        for node in peers if kind != Kind.OPTIMIZE_TOPOLOGY else ():
            assert len(node.views) == views[node], f"{node} has got a new view, and its master stood still only"
        self._be_whole()


class Outage(_Interruption):
    """Most or all of a run reach no master for a while, though the masters live: nobody of them is lost."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        n = len(peers)
        run = peers[0].run
        kind = self._begin_work(peers)
        late: list[Node] = []
        most = self._some(peers, rng.choice((n, n, n - 1, n // 2 + 1)))
        if world.addresses == 1:
            # Its master knows who was in the run, so those who are back wait for the rest for two timeouts.
            timeouts = rng.choice((0.3, 0.6, 0.9, 1.0, 1.1, 1.5, 2.0))
        else:
            timeouts = rng.choice((0.3, 0.6, 0.9, 1.0, 1.1, 3.0, 6.0))
            most = peers
        ways = rng.choice(WAYS)
        if ways == (False, True) and 0.6 <= timeouts < 1.5:
            timeouts = 1.5  # not just as the first gives the master up, which still hears the others then
        # Were the peers away for longer, newcomers would found a run; with more of these it would not be an outage.
        newcomers = rng.randint(1, n - 1) if rng.random() < 0.4 and most == peers and timeouts <= 2.0 else 0
        # Nor may some be back when the others have just been silent for too long, or give the master up one by one.
        shares = (1.0,) if 0.6 < timeouts < 1.5 or ways == (False, True) else (1.0, 0.97, 0.9)
        if len(most) < n and n - len(most) > n // 2 - 1:
            most = peers
        is_reset = rng.random() < 0.5
        for node in most if is_reset else ():
            world.reset(node)
            world.break_heartbeats(node)
            for host in world.hosts:
                world.block(host.name, node)
        if is_reset:
            self._drain()  # the masters find that, and nobody can come again
        for node in most:
            seconds = timeouts * self._timeout_s / self._slack**2
            self._cut_off(node, seconds * rng.choice(shares), ways)
        for _ in range(newcomers):
            world.add(rng.randrange(self._groups))
        late_s = timeouts * self._timeout_s
        bound_s = late_s + MARGIN_S + self._timeout_s
        if world.addresses > 1:
            bound_s += SEARCH_TIMEOUTS * self._timeout_s
        self._pass(late_s)
        if ways == (False, True):
            # They give the master up one by one, and it cannot know of the others when the first of them say so.
            late = [node for node in peers if node.ended is not None]
            assert 2 * len(late) <= n, f"{late} are put out, and most peers heard nothing"
            peers = [node for node in peers if node not in late]
        self._all_are_led(peers, run, bound_s * self._slack)
        self._finish(peers, self._ops, self._calls, kind, late)
        self._be_whole()


class Few(_Interruption):
    """Few are cut off. The others go on undisturbed, also when those are back, who hear what has become of them."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        n = len(peers)
        if n < 3:
            return
        few = self._some(peers, rng.randint(1, n // 2 if world.addresses > 1 else (n - 1) // 2))
        rest = [node for node in peers if node not in few]
        leaders: dict[Node, object] = {node: node.leader for node in peers}
        self._begin_work(peers)
        timeouts = rng.choice((0.3, UNNOTICED_SHARE, 2.0, 3.0, 8.0))
        host = self._leader()
        others = [each for each in world.hosts if each is not host]
        may_reach_others = rng.random() < 0.6
        ways = rng.choice(WAYS)
        for node in few:
            self._cut_off(node, timeouts * self._timeout_s / self._slack**2, ways)
            for other in others if may_reach_others else ():
                world.network.blocked -= {(node.name, other.name), (other.name, node.name)}
            if rng.random() < 0.3:
                world.reset(node)
        tag_of_rest = self._rng.choice((31, 32))
        self._pass(timeouts * self._timeout_s)
        world.heal()
        if timeouts <= UNNOTICED_SHARE:
            self._pass(self._timeout_s)
            self._nobody_minds(peers, leaders)
            self._finish(peers, self._ops, self._calls, self._kind_of_work(), [])
        else:
            self._are_put_out(few)
            for node in rest:
                assert node.leader is leaders[node], f"{node} has lost its master because of {few}"
                assert node.ended is None
            world.cancel_all()
            made = [(node, world.launch(node, tag_of_rest)) for node in rest]
            world.run()
            for node, op in made:
                assert node.result(op) in (Result.SUCCESS, Result.TOO_FEW_PEERS), f"{node}: {node.results[op]}"
        world.cancel_all()
        self._be_whole()

    def _kind_of_work(self) -> str:
        if self._ops:
            return "ops"
        node = next(iter(self._calls), None)
        return node.kinds[self._calls[node]] if node is not None else ""

    def _are_put_out(self, few: list[Node]) -> None:
        """All of these hear soon that they are in the run no more."""
        world = self._world
        end_at = world.now + (MARGIN_S + 2 * self._timeout_s) * self._slack
        while any(node.ended is None for node in few):
            waiting = [node for node in few if node.ended is None]
            assert world.now <= end_at, f"{waiting} were lost, and nobody tells them"
            self._let_time_pass()
        for node in few:
            assert node.ended is not None
            assert "evicted" in node.ended.reason, f"{node}: {node.ended}"


class Departures(_Interruption):
    """Some leave on purpose and some are lost at once: the others go on with their master, as long as most of those
    who have not left are there."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        n = len(peers)
        if n < 3:
            return
        leaving = self._some(peers, rng.randint(1, n - 2))
        others = [node for node in peers if node not in leaving]
        dying = self._some(others, rng.randint(0, (len(others) - 1) // 2))
        rest = [node for node in others if node not in dying]
        leaders: dict[Node, object] = {node: node.leader for node in peers}
        self._begin_work(peers)
        for node in leaving:
            world.leave(node)
        self._deliver(rng.choice((0, 1, 3, 10)))
        self._all_have_heard_of(leaving)
        for node in dying:
            world.kill(node)
        self._pass(1.5 * self._timeout_s)
        world.run()
        for node in rest:
            assert node.ended is None, f"{node} is put out: {node.ended}"
            assert node.leader is leaders[node], f"{node} has lost its master, since {leaving} left and {dying} died"
        world.cancel_all()
        self._be_whole()

    def _all_have_heard_of(self, leaving: list[Node]) -> None:
        """The master has taken in that these have left."""
        while any(node.is_known for node in leaving) and self._world.step():
            pass
