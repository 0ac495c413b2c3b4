"""A master dies in the middle of an election: some have voted for it, and others have not heard that it asked."""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.trials.base import MARGIN_S, SEARCH_TIMEOUTS, Trial


class SplitVote(Trial):
    """The next master leads all of them, whoever has followed in which term, and whoever comes first."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run = peers[0].run
        leader = next(host for host in world.hosts if host.is_leading)
        world.kill_master(leader)
        self._begin_masters(all_of_them=False)
        said = len(world.from_masters)
        deaf = self._some(peers, rng.randint(0, len(peers) - 1))
        self._until_said(m.VoteRequest)
        for node in deaf:
            if node.control is not None:
                world.block(node.control.host.name, node)
        self._deliver(rng.choice((1, 2, 4, 8)))
        for host in world.hosts:
            if not host.is_dead:
                world.kill_master(host, rng.choice((0, 1)))
        world.heal()
        heard = {name for name, message in world.from_masters[said:] if isinstance(message, m.VoteRequest)}
        voters = [node for node in peers if node.name in heard and node not in deaf]
        late_s = 0.0
        if world.addresses == 1:
            late_s = rng.choice((0.1, 0.3, 0.7)) * self._timeout_s / self._slack**2
            for node in voters if rng.random() < 0.7 else deaf:
                self._cut_off(node, late_s)
        self._begin_masters(all_of_them=True)
        bound_s = late_s + MARGIN_S + self._timeout_s
        if world.addresses > 1:
            bound_s += SEARCH_TIMEOUTS * self._timeout_s
        self._all_are_led(peers, run, bound_s * self._slack)
        self._be_whole()
