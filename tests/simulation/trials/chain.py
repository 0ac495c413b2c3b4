"""Masters die one after the other, each while a view of its own comes into force, and few of its peers with it."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from tests.simulation.master_host import MasterHost
from tests.simulation.node import Node
from tests.simulation.scene import MASTER_TIMEOUT_S
from tests.simulation.trials.base import Trial

MASTERS_MAX = 4


class Chain(Trial):
    """Each view may be in force at one that has died, and counts beside those before it. Whoever may go on agrees."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run = peers[0].run
        if len(peers) < 3 or self._needs_all:
            return
        for at in range(rng.randint(2, MASTERS_MAX)):
            leader = self._until_led()
            here = [node for node in peers if node.is_reachable]
            if leader is None or len(here) < 2:
                break
            mute = self._begin_change(here, leader, may_grow=at == 0 or rng.random() < 0.3)
            if rng.random() < 0.3:
                world.block(leader.name, rng.choice(here))
            self._deliver(rng.choice((4, 8, 20, 60, 60, 120)))
            world.kill_master(leader, rng.choice((0, 0, 1, 2)))
            world.heal()
            if rng.random() < 0.7:
                for node in mute:
                    world.kill(node, rng.choice((0, 30, 1000)))
            self._begin_masters(all_of_them=rng.random() < 0.8)
        self._begin_masters(all_of_them=True)
        self._all_have_an_end()
        self._go_on(run)

    def _until_led(self) -> MasterHost | None:
        """Let time pass until a master leads, as of just now, and return it. None: there is none for long."""
        world = self._world
        end_at = world.now + (MASTER_TIMEOUT_S + self._timeout_s) * self._slack
        while world.now < end_at:
            leader = next((host for host in world.hosts if host.is_leading), None)
            if leader is not None:
                return leader
            if not world.step():
                self._world.wait(self._timeout_s / 4)
        return None

    def _begin_change(self, here: list[Node], leader: MasterHost, may_grow: bool) -> list[Node]:
        """Have newcomers be admitted, or go on with the view that a new master begins with. Return those whose answers
        do not get to the master, so that the view does not come into force: the newcomers, or one of the others."""
        world, rng = self._world, self._rng
        mute = [rng.choice(here)]
        if may_grow:
            is_new = rng.random() < 0.3
            group = max(node.group for node in world.nodes) + 1 if is_new else rng.choice(here).group
            count = 2 if is_new else rng.choice((1, 1, max(1, len(here) // 2)))
            mute = [world.add(group) for _ in range(count)]
            world.run_while_any()
            for node in here:
                world.joint(node, Kind.UPDATE_TOPOLOGY)
            self._until_said(m.Prepare)
            if is_new and rng.random() < 0.7:
                self._lose(mute.pop(), mute, leader)
        for node in mute:
            world.block(node, leader.name)
        return mute

    def _lose(self, gone: Node, others: list[Node], leader: MasterHost) -> None:
        """Have a newcomer be lost after the others have answered, who do not hear of the view without it."""
        self._deliver(self._rng.choice((8, 20, 60)))
        for node in others:
            self._world.block(leader.name, node)
        self._world.kill(gone)
        self._until_said(m.Prepare)
