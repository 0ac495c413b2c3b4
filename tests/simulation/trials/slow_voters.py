"""A master dies, perhaps while a view comes into force, and some are stopped just before they vote for the next one."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from tests.simulation.trials.base import DELIVERIES, Trial


class SlowVoters(Trial):
    """The others go on without them if they are enough by all that those have told of before, and wait otherwise."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run = peers[0].run
        leader = next((host for host in world.hosts if host.is_leading), None)
        if leader is None or self._needs_all:
            return
        if rng.random() < 0.6:
            world.add(rng.choice(peers).group)
            world.run_while_any()
            for node in peers:
                world.joint(node, Kind.UPDATE_TOPOLOGY)
            self._until_said(rng.choice((m.Prepare, m.Install, m.Install)))
            self._deliver(rng.choice((0, 1, 2, 4)))
        world.kill_master(leader, rng.choice((0, 1, 2, 9)))
        self._begin_masters(all_of_them=True)
        self._until_said(m.VoteRequest)
        self._deliver(rng.choice(DELIVERIES[:4]))
        stopped = self._some([node for node in world.alive if node.is_reachable], rng.randint(1, len(peers) - 1 or 1))
        for node in stopped:
            world.freeze(node)
        self._pass(rng.choice((0.5, 1.2, 1.6, 2.5)) * self._timeout_s)
        for node in stopped:
            world.thaw(node)
        self._all_have_an_end()
        self._go_on(run)
