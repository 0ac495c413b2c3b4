"""What one alone has heard or has when a master dies: the next one goes by it, however late it comes to that."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.membership import Membership

LOST = 9
"""More messages than are under way to a peer."""
LED_TIMEOUTS = 20.0
"""Number of peer timeouts in which all are led again for whom nothing is in the way."""


class _Witnesses(Membership):
    """Trials in which masters die when one peer has heard what the others have not."""

    def _only(self, witness: Node) -> None:
        """Whatever masters say is heard by this one alone, and then they die."""
        world = self._world
        for host in world.hosts:
            for node in world.alive:
                if node is not witness:
                    world.block(host.name, node)
        self._drain()
        self._kill_all()
        world.heal()

    def _kill_all(self) -> None:
        for host in self._world.hosts:
            if not host.is_dead:
                self._world.kill_master(host, LOST)

    def _begin_anew(self) -> None:
        for host in self._world.hosts:
            self._world.restart_master(host)

    def _are_led(self) -> None:
        world = self._world
        self._all_are_led(world.accepted, world.accepted[0].run, LED_TIMEOUTS * self._timeout_s * self._slack)

    def _until(self, said_by: int, kind: type[m.Message], to: Node) -> bool:
        """Deliver until a master has said this to somebody, after so many messages. False: it does not come to it."""
        world = self._world
        end_at = world.now + LED_TIMEOUTS * self._timeout_s * self._slack
        while world.now < end_at:
            if any(name == to.name and isinstance(message, kind) for name, message in world.from_masters[said_by:]):
                return True
            if not world.step():
                self._let_time_pass()
        return False


class SlowWitness(_Witnesses):
    """One alone knows that a view is in force, says so, and is stopped before it votes. Nobody leads the others on from
    the view before."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = self._company_of(3)
        if not world.masters or self._needs_all or any(node.site for node in world.accepted):
            return
        run = peers[0].run
        world.add(peers[0].group)
        world.run()
        witness = rng.choice(peers)
        for node in world.accepted:
            world.joint(node, Kind.UPDATE_TOPOLOGY)
        self._until_said(m.Install)
        self._only(witness)
        said = len(world.from_masters)
        self._begin_anew()
        if self._until(said, m.VoteRequest, witness):
            world.freeze(witness)
            self._pass(rng.choice((1.3, 1.6, 2.5)) * self._timeout_s * self._slack)
            world.thaw(witness)
        self._all_have_an_end()
        self._go_on(run)


class HalfHeard(_Witnesses):
    """One alone has heard that a sync succeeded. All who took part in it count alike in the next one: its revision is
    the highest that any of them has come to since."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(3)
        if not world.masters:
            return
        witness = rng.choice(nodes)
        for node in nodes:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
        calls = {node: world.joint(node, Kind.SYNC) for node in nodes}
        self._until_said(m.JointResult)
        self._only(witness)
        self._begin_anew()
        self._are_led()
        for node, call in calls.items():
            assert node.call(call) is Result.SUCCESS, f"{node}: {node.calls[call]}"
        ahead = [node for node in nodes if node is not witness]
        revision = max(node.revision for node in nodes) + 2
        witness.revision, witness.root = revision - 1, b"of one"
        for node in ahead:
            node.revision, node.root = revision, b"of most"
        self._all_succeed(Kind.SYNC)
        assert witness.revision == revision, f"{witness} was in the last sync, as {ahead} were, and outvotes them"
        self._be_whole()


class BroughtUp(_Witnesses):
    """One has fetched the state of the others when a master dies, and has it to give when the next one dies: what it
    tells a third one is what it has."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(3)
        if not world.masters or any(node.site for node in nodes):
            return
        behind, slow = rng.sample(nodes, 2)
        revision = max(node.revision for node in nodes) + 1
        for node in nodes:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
            if node not in (behind, slow):
                node.revision, node.root = revision, b"new"
        for node in nodes:
            world.joint(node, Kind.SYNC)
        self._until_said(m.SyncPlan)
        world.freeze(slow)
        while behind.root != b"new" and world.step():
            pass
        self._kill_all()
        world.thaw(slow)
        plans = len(behind.plans)
        self._begin_anew()
        end_at = world.now + LED_TIMEOUTS * self._timeout_s * self._slack
        while len(behind.plans) == plans and behind.open_calls and world.now < end_at:
            if not world.step():
                self._let_time_pass()
        for host in world.hosts:
            world.block(slow, host.name)  # whose word ends the sync
        self._drain()
        self._kill_all()
        world.heal()
        heard = len(world.from_peers)
        self._begin_anew()
        self._are_led()
        for name, message in world.from_peers[heard:]:
            if name == behind.name and isinstance(message, m.JointCall) and message.offer is not None:
                ours = message.offer.revision, message.offer.root
                assert ours == (revision, b"new"), f"{behind} has {(revision, b'new')}, and tells that it has {ours}"
        self._be_whole()
