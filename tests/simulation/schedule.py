"""Schedules: lists of steps that are done to a run, with deliveries between them.

The steps are those of a `Plan`; `uses` and `faults` say what each does. When the steps are done, all faults stop. Then
everything must come to rest in bounded time, a peer that waits gets through once the others do what he waits for, and
closing calls all succeed. `checks` looks at every step before.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.faults import Faults
from tests.simulation.master_host import Memory
from tests.simulation.node import Node
from tests.simulation.plan import DRIFT, ONE_NAME, Plan
from tests.simulation.scene import CLOCK_RATES
from tests.simulation.world import MASTER_TIMEOUT_S, World

CONNECTIONS_MAX = 100
PENDING_MAX = 12
"""Bounds of masters, more than schedules have."""
CLOSING_TAGS = (11, 12)
GONE_TAG = 13
"""Unused before: a verdict may have ended a use of the others that some peers have yet to make."""
LED_AGAIN_MAX = 3
"""The number of times that a run may be led once more, and lose its majority, after faults have stopped."""
SETTLED_AFTER_S = 30.0
"""All that faults have left behind is over by then."""
DEAD_S = 2.5
"""A peer whose process has ended is lost by then: its links say so, and no peer waits for a peer timeout."""
FOUNDED_S = 45.0
"""As many newcomers as found a run together have founded it by then."""
SHORT_S = 0.3
"""A time when no peer waits for long at a master that leads no run."""
CATCH_UPS_MAX = 30
"""Rounds where everybody does what others wait for. Each may end only one of several waits of each peer."""


class Schedule(Faults):
    def __init__(self, plan: Plan, is_real: bool = False) -> None:
        """`is_real`: over the C engine."""
        rng = random.Random(plan.seed)
        self._founders = 1 if ONE_NAME in plan.traits else plan.founders
        world = World(
            rng,
            options=MasterOptions(
                engine_threads=plan.seed // 6 % 3 + 1 if is_real else 1,
                founders=self._founders,
                connections_max=CONNECTIONS_MAX,
                pending_max=PENDING_MAX,
            ),
            masters=plan.masters,
            has_fast_path=plan.seed % 2 == 1,
            memory=(Memory.NONE, Memory.DISK, Memory.DISK)[plan.seed // 2 % 3],
            is_one_name=ONE_NAME in plan.traits,
            clocks=random.Random(plan.seed) if DRIFT in plan.traits else None,
            engine_seed=plan.seed if is_real else None,
        )
        super().__init__(plan, world, rng)
        self._slack = 1 / CLOCK_RATES[0] if DRIFT in plan.traits else 1.0
        """The seconds that the slowest clock may take for one of its own."""

    def run(self) -> None:
        self.add()
        if self.plan.is_admitted:
            self.world.admit_all()
        if self.world.real is not None:
            self.world.real.unsettle()
        for step in self.plan.steps:
            self.rng.seed(step.seed)
            self.between, self.is_streaming = None, False
            getattr(self, step.action)()
            for _ in range(step.deliveries):
                if not self.world.step() and not self._goes_on_streaming():
                    break
                if self.between is not None:
                    self.between()
        self.rng.seed(self.plan.seed)
        self.close()

    def _goes_on_streaming(self) -> bool:
        """Whether callers do more though all is delivered. Then a moment passes."""
        if self.is_streaming and self.world.real is not None:
            self.world.real.rest()
        return self.is_streaming

    # The end.

    def close(self) -> None:
        """Faults have stopped: what everybody does now must succeed."""
        world = self.world
        if world.real is not None:
            world.real.calm()
        world.dooms.clear()
        self.between = None
        self.mend()
        self.quicken()
        self.heal()
        self.thaw()
        self.thaw_master()
        if world.is_one_name:
            self._leave_one_behind_the_name()
        elif self.plan.masters and self.chance(0.8):
            for host in world.hosts:
                if host.is_dead and (len(world.hosts) == 1 or self.chance(0.7)):
                    world.restart_master(host)
        self._settle()
        world.checks.agreement()
        if self.plan.masters:
            self._give_up()
        if self._founders > 1:
            self._found()
        if all(host.is_dead for host in world.hosts) or (self.plan.masters and not world.accepted):
            assert not world.alive or self.plan.masters, "they have not noticed that the master is gone"
            self._nobody_waits()
            return
        world.check_rest()
        if self.chance(0.7):
            self._catch_up()
        world.cancel_all()
        world.check_rest()
        self._nobody_waits()
        while world.master.admission.admissible:
            self._all_succeed(lambda node: world.group_call(node, Kind.UPDATE_TOPOLOGY))
        assert all(node.site for node in world.alive if not node.views)
        for tag in CLOSING_TAGS:
            for node in self.rng.sample(world.accepted, len(world.accepted)):
                world.launch(node, tag)
        world.run()
        for node in world.accepted:
            codes = [node.result(op) for op in list(node.launched)[-2:]]
            assert codes == [Result.SUCCESS if node.view.world_size > 1 else Result.TOO_FEW_PEERS] * 2
        for node in world.accepted:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
        self._all_succeed(lambda node: world.group_call(node, Kind.SYNC))
        self._all_succeed(lambda node: world.group_call(node, Kind.OPTIMIZE_TOPOLOGY))
        self._all_succeed(lambda node: world.group_call(node, Kind.ARE_PEERS_PENDING))
        world.check_rest()
        if self.chance(0.6):
            self._one_goes()
        world.checks.agreement()
        for node in world.alive:
            world.leave(node)
        world.run()
        assert not any(host.is_leading for host in world.hosts)
        assert world.master.deadline() is None or self.plan.masters

    def _one_goes(self) -> None:
        """Check that a peer which stops for good or dies, with all else well, is lost in time, and the others go on."""
        world = self.world
        nodes = world.accepted
        if len(nodes) < 3 or any(node.site for node in nodes):
            return
        gone, *others = self.rng.sample(nodes, len(nodes))
        others = [node for node in others if node.group == gone.group]
        dies = self.chance(0.5)
        if dies:
            world.kill(gone)
        else:
            world.freeze(gone)
        for node in others:
            world.launch(node, GONE_TAG)
        self._pass((DEAD_S if dies and others else SETTLED_AFTER_S / 2) * self._slack)
        for node in others:
            if node.ended is not None and "their link broke" in node.ended.reason:
                continue  # its link with the dead one had broken often before
            assert gone.number not in node.view.ring, f"{gone} has stopped, and {node} waits for it"
            assert not node.open_ops, f"{node} waits in an op with {gone}, which has stopped"
        if not dies:
            world.thaw(gone)
        world.run()

    def _leave_one_behind_the_name(self) -> None:
        """Of several masters behind a name one is left, which may restart."""
        world = self.world
        left = self.rng.choice(world.hosts)
        for host in world.hosts:
            if host is not left and not host.is_dead:
                world.kill_master(host)
        if left.is_dead and self.chance(0.8):
            world.restart_master(left)
        for node in world.nodes:
            node.route = world.hosts.index(left)

    def _found(self) -> None:
        """Where no peer is in a run, as many come as found one together, and they do, soon."""
        world = self.world
        host = next((host for host in world.hosts if not host.is_dead and not host.machine.is_standby), None)
        if world.accepted or host is None:
            return
        # A master waits for peers of a run that was in force, for as long as they may look for one.
        before_s = MASTER_TIMEOUT_S if any(node.views for node in world.nodes) else 0.0
        end_at = world.now + (before_s + FOUNDED_S) * self._slack
        while not world.accepted:
            for _ in range(self._founders - len([node for node in world.alive if not node.site])):
                world.add()
            world.run()
            assert world.now < end_at, f"{len(world.alive)} newcomers found no run, {self._founders} of them could"
            world.wait(SHORT_S)
            world.run()

    def _give_up(self) -> None:
        """Wait until one of several masters leads, and until all that have found none or have no majority have given
        up."""
        world = self.world
        patience_s = (MASTER_TIMEOUT_S + 2.5) * self._slack
        self._pass(patience_s)
        for _ in range(LED_AGAIN_MAX):
            # A run that is led once more and loses its majority for good has its peers begin to wait again.
            since = [node.masterless_since for node in world.accepted if node.masterless_since is not None]
            self._pass(max(since, default=world.now - patience_s) + patience_s - world.now)
        leading = [host.machine.run for host in world.hosts if host.is_leading]
        assert len(leading) == len(set(leading)), f"two masters lead: {leading}"
        for node in world.accepted:
            assert node.masterless_since is None, f"{node} has waited for a master for too long"
        ours = world.master.state.run
        while others := [node for node in world.alive if node.run not in (ours, "")]:
            for node in others:
                world.leave(node)  # another run, founded when this one could not be found
            world.run()

    def _pass(self, seconds: float) -> None:
        end_at = self.world.now + seconds
        while self.world.now < end_at:
            self.world.wait(2.5)
            self.world.run()

    def _settle(self) -> None:
        """Everything comes to rest, and what time alone can end has ended."""
        world = self.world
        world.run()
        # Without a memory, a master that restarted waits for all as long as the peers do.
        patience_s = (
            MASTER_TIMEOUT_S * self._slack
            if self.plan.masters and world.memory is Memory.NONE and world.addresses == 1
            else 0.0
        )
        end_at = world.now + patience_s
        while world.now < end_at and any(node.masterless_since is not None for node in world.alive):
            world.wait(2.5)
            world.run()
        begun_at = world.now
        while world.now < begun_at + SETTLED_AFTER_S / 2:
            world.wait(2.5)
            world.run()
        assert world.now < begun_at + SETTLED_AFTER_S, "it takes too long"

    def _catch_up(self) -> None:
        """A peer that waits gets through, once all others do what he waits for."""
        for _ in range(CATCH_UPS_MAX):
            if not any(node.open_ops or node.open_calls for node in self.world.accepted):
                return
            self.catch_up(is_sound=True)
            self.world.run()
            self.world.wait(2.5)
            self.world.run()
        waits = {node: (node.open_ops, node.open_calls) for node in self.world.accepted}
        raise AssertionError(f"whatever they do, they wait: {waits}")

    def _nobody_waits(self) -> None:
        for node in self.world.nodes:
            if node.is_alive:
                assert not node.open_ops, f"{node} waits for ops that are over"
                assert not node.open_calls, f"{node} waits for calls that are over"

    def _all_succeed(self, call: Callable[[Node], int]) -> None:
        made = [(node, call(node)) for node in self.rng.sample(self.world.accepted, len(self.world.accepted))]
        self.world.run()
        for node, number in made:
            result = node.calls[number]
            assert result.code is Result.SUCCESS, f"{node}: {result}"


def play(plan: Plan, is_real: bool = False) -> World:
    schedule = Schedule(plan, is_real)
    try:
        schedule.run()
        schedule.world.close()
    except Exception as error:
        error.add_note("the master's last words:\n" + "\n".join(schedule.world.log[-20:]))
        engine = " --engine real" if is_real else ""
        error.add_note(f"python -m tests.simulation{engine} --plan '{plan.dumps()}'")
        raise
    return schedule.world
