"""The only master of a run begins anew with a record on its disk: one that is out of date, or of a view that its peers
have not heard of."""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S
from tests.simulation.trials.membership import Membership

LOST = 9
"""More messages than are under way to a peer."""


class _Recorded(Membership):
    """Trials of runs with one master, which keeps a record."""

    def _kill(self, lost: int = 0) -> None:
        self._world.kill_master(None, lost)
        self._drain()

    def _away(self, nodes: list[Node], seconds: float) -> None:
        for node in nodes:
            self._cut_off(node, seconds)


class OldDisk(_Recorded):
    """A disk is lost, and found again when others have led the run on from what its peers knew: peers of a higher term
    show that its record is out of date. They wait for most of the run, and whoever has joined since is one of it."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = self._company_of(rng.choice((3, 4, 5)))
        host, run = world.hosts[0], peers[0].run
        self._kill()
        old, host.record = host.record, None
        world.restart_master(host)
        bound_s = (MARGIN_S + 2 * self._timeout_s) * self._slack
        self._all_are_led(world.accepted, run, bound_s)
        for _ in range(rng.randint(0, 2)):
            world.add(rng.choice(peers).group)
        self._be_whole()
        self._kill()
        host.record = old
        everybody = world.accepted
        few = self._some(everybody, rng.randint(1, (len(everybody) - 1) // 2))
        late_s = rng.choice((0.0, 1.0, 2.6, 3.4)) * self._timeout_s / self._slack**2
        rest = [node for node in everybody if node not in few]
        self._away(rest, late_s)
        world.restart_master(host)
        self._all_are_led(everybody, run, late_s * self._slack + bound_s + self._timeout_s)
        self._be_whole()


class _LeftOut(_Recorded):
    """The master puts few out, and dies as a view without them comes into force, which its record names."""

    def _leave_out(self, lost: int, words: type[m.Message]) -> tuple[list[Node], list[Node]]:
        """Return those whom the view leaves out, and the others."""
        world, rng = self._world, self._rng
        peers = self._company_of(rng.choice((3, 4, 5)))
        if any(node.site for node in world.accepted):
            return [], []
        few = self._some(peers, rng.randint(1, (len(peers) - 1) // 2))
        rest = [node for node in world.accepted if node not in few]
        self._away(few, 60 * self._timeout_s)
        said = len(world.from_masters)
        end_at = world.now + 2 * self._timeout_s * self._slack
        while not any(isinstance(message, words) for _, message in world.from_masters[said:]):
            if not world.step():
                assert world.now < end_at, f"{few} are silent, and there is no view without them"
                world.wait(self._timeout_s / 8)
        world.kill_master(None, lost)
        return few, rest


class LeftOutFirst(_LeftOut):
    """Those who are left out are back first, and wait in vain: the others lead the run on."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        few, rest = self._leave_out(rng.choice((0, 1)), m.Install)
        if not few:
            return
        self._drain()
        gone = {node.number for node in few}
        is_in_force = any(node.group == few[0].group and gone.isdisjoint(node.view.ring) for node in rest)
        run = rest[0].run
        late_s = 2.8 * self._timeout_s / self._slack**2
        self._heals_at = {}
        self._away(rest, late_s)
        world.restart_master()
        for node in few:
            self._heals_at[node] = world.now
        if is_in_force:
            self._all_are_led(rest, run, (late_s + 2 * MARGIN_S + 3 * self._timeout_s) * self._slack)
        self._all_have_an_end()
        if is_in_force:
            for node in few:
                assert node.ended is not None, f"{node} was left out of a view in force, and is in the run"
        self._go_on(run)


class SlowHeirs(_LeftOut):
    """All are back together, and those who could go on are stopped before they vote. The others alone are nobody who
    could lead the run on."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        few, rest = self._leave_out(rng.choice((0, LOST)), rng.choice((m.Prepare, m.Install)))
        if not few:
            return
        run = rest[0].run
        self._drain()
        world.heal()
        self._heals_at = {}
        world.restart_master()
        self._until_said(m.VoteRequest)
        self._deliver(rng.choice((0, 0, 1)))
        for node in rest:
            world.freeze(node)
        self._pass(rng.choice((2.2, 3.5)) * self._timeout_s * self._slack)
        for node in rest:
            world.thaw(node)
        self._all_have_an_end()
        self._go_on(run)
