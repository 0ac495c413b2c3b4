"""Peers without a control connection for a moment, of whom nobody can tell that they are dead: they are not lost."""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S
from tests.simulation.trials.successors import _Successors
from tests.simulation.trials.weak_links import LED_TIMEOUTS


class NotHeard(_Successors):
    """A new master begins to lead, and in that moment one of its peers loses the connection over which it would have
    heard so. It comes again, and is led as the others are."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(3)
        if not world.masters or any(node.site for node in world.accepted):
            return
        run = nodes[0].run
        self._restart_all()
        late = rng.choice(world.accepted)
        self._until_followed(late)
        self._all_are_led(world.accepted, run, LED_TIMEOUTS * self._timeout_s * self._slack)
        self._be_whole()

    def _until_followed(self, late: Node) -> None:
        """Deliver until a master that leads has told this peer so, whose connection is lost before that arrives."""
        world = self._world
        end_at = world.now + LED_TIMEOUTS * self._timeout_s * self._slack
        said = len(world.from_masters)
        while not any(isinstance(message, m.Resumed) for _, message in world.from_masters[said:]):
            if not world.step():
                assert world.now <= end_at, f"no master leads {world.accepted}"
                self._pass(self._timeout_s / 10)
        control = late.control
        if control is not None and not (control.is_over or control.is_reset or late.machine.is_led):
            control.reset(0, 0)


class MajorityGone(_Successors):
    """A majority gathers at one of several masters. All but one lose their connection to it, and go on to another one:
    who stays is not left there until the others are led without it."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        self._company_of(3)
        peers = world.accepted
        if world.addresses < 2 or any(node.site for node in peers):
            return
        run = peers[0].run
        self._restart_all()
        said = len(world.from_masters)
        while len(asked := {name for name, each in world.from_masters[said:] if isinstance(each, m.VoteRequest)}) < 2:
            if not world.step():
                self._pass(self._timeout_s / 10)
        stays = rng.choice([node for node in peers if node.name in asked])
        for node in peers:
            control = node.control
            if node is not stays and control is not None and not (control.is_over or control.is_reset):
                control.reset(0, 0)
        self._all_are_led(peers, run, LED_TIMEOUTS * self._timeout_s * self._slack)
        self._be_whole()


class NoWitness(_Successors):
    """Two peers of a group go without a link. One of them, and all who have a link with it, lose their connections to
    the master for a moment, and it loses its heartbeats, too. The other one cannot tell that it is dead."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        pairs = self._without_need(nodes)
        if not pairs or any(node.site for node in world.accepted):
            return
        one, other = rng.choice(pairs)
        world.network.unreachable.add(frozenset((one.name, other.name)))
        self._break(one, other)
        assert not one.view.is_meshed, f"{one} and {other} have no link, and a mesh"
        host = self._leader
        for node in [*(node for node in nodes if node not in (one, other)), other]:
            control = node.control
            assert control is not None
            world.cut(node, host.name)
            world.reset(node)
            control.outbox.clear()
            if node is other:
                world.break_heartbeats(node)
            world.control_plane.lose(control)
        self._drain()
        self._pass(rng.uniform(0.1, 0.4) * self._timeout_s / self._slack)
        world.heal()
        world.network.unreachable.clear()
        self._pass(MARGIN_S * self._slack)
        world.run()
        self._nobody_is_lost(nodes)
        for node in nodes:
            assert {each.number for each in nodes} <= set(node.view.ring), f"{node} has lost one that lives"
        self._be_whole()
