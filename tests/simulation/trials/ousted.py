"""The master goes on without few, and dies. Those come back first, or together with the others."""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.scene import MASTER_TIMEOUT_S
from tests.simulation.trials.base import DELIVERIES, MARGIN_S, SEARCH_TIMEOUTS, Trial


class Ousted(Trial):
    """Those who were left out do not lead the run on, and take nothing back that the others have heard."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        n, run = len(peers), peers[0].run
        if n < 3:
            return
        few = self._some(peers, rng.randint(1, (n - 1) // 2))
        rest = [node for node in peers if node not in few]
        for tag in (35, 36):
            for node in peers:
                if rng.random() < 0.9:
                    world.launch(node, tag)
        self._deliver(rng.choice(DELIVERIES))
        away_s = 60 * self._timeout_s
        for node in few:
            self._cut_off(node, away_s)
        self._deliver(rng.choice(DELIVERIES))
        views = {node: node.view.view for node in rest}
        while all(node.is_known for node in few):
            self._let_time_pass_without_deliveries()
        self._until_said(rng.choice((m.Flush, m.Prepare, m.Prepare, m.Install, m.Install)))
        self._deliver(rng.choice((0, 0, 1, 2, 4, 8, 20)))
        is_in_force = any(node.view.view > views[node] for node in rest)
        leader = next((host for host in world.hosts if host.is_leading), None)
        if leader is not None:
            world.kill_master(leader, rng.choice((0, 0, 1, 5)))
        together = rng.random() < 0.4
        late_s = 0.0 if together else 2.8 * self._timeout_s / self._slack**2
        for node in rest if late_s else ():
            self._cut_off(node, late_s)
        self._begin_masters(all_of_them=True)
        for node in few:
            self._heals_at[node] = world.now
        bound_s = MASTER_TIMEOUT_S
        if self._is_recorded or world.addresses > 1:
            searches = SEARCH_TIMEOUTS if world.addresses > 1 else 0.0
            bound_s = late_s + 2 * MARGIN_S + (3 + searches) * self._timeout_s
        if is_in_force and (self._slack == 1 or self._is_recorded):
            self._all_are_led(rest, run, bound_s * self._slack)
        self._all_have_an_end()
        if is_in_force:
            for node in few:
                assert node.ended is not None, f"{node} was left out of a view, and is in the run"
        self._go_on(run)

    def _let_time_pass_without_deliveries(self) -> None:
        """Let time pass, after which the master may have much to say."""
        self._world.wait(self._timeout_s / 4)
        for _ in range(40):
            if not self._world.step():
                break
