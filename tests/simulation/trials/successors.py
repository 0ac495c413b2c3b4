"""What a new master has to know of the run that it takes over, seen in what comes next."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from tests.simulation.trials.base import MARGIN_S, RESETS_MAX, TICK_S
from tests.simulation.trials.weak_links import LED_TIMEOUTS, WeakLinks

AHEAD = 1000
"""The number of revisions by which a newcomer is ahead."""
TAG = 19


class _Successors(WeakLinks):
    def _restart_all(self) -> None:
        """All masters die, and begin anew."""
        world = self._world
        for host in world.hosts:
            if not host.is_dead:
                world.kill_master(host)
        self._drain()
        for host in world.hosts:
            world.restart_master(host)

    def _taken_over(self) -> None:
        """All masters die, and one of those that begin anew leads on."""
        world = self._world
        self._restart_all()
        self._all_are_led(world.accepted, world.accepted[0].run, LED_TIMEOUTS * self._timeout_s * self._slack)


class Elders(_Successors):
    """A newcomer with a higher revision comes to a master that has just taken over. Those who took part in the last
    sync are not outvoted."""

    def play(self) -> None:
        world = self._world
        elders = self._company_of(2)
        if not world.masters or any(node.site for node in world.accepted):
            return
        revision = elders[0].revision
        self._taken_over()
        newcomer = world.add(elders[0].group)
        newcomer.revision, newcomer.root = revision + AHEAD, b"of a newcomer"
        self._admit()
        self._all_succeed(Kind.SYNC)
        for node in [*elders, newcomer]:
            assert node.revision == revision, f"{elders} had {revision}, and {node} is at {node.revision}"
        self._be_whole()


class OneLink(_Successors):
    """A peer stands still when its connections to the master break and one of its links does. Others have a link with
    it, also where their master is new: it is not dead."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        if any(node.site for node in world.accepted):
            return
        if world.masters and rng.random() < 0.5:
            self._taken_over()
        node, other = rng.sample(nodes, 2)
        world.freeze(node)
        world.reset(node)
        world.break_heartbeats(node)
        self._drain()
        world.break_link(node, other)
        self._drain()
        world.thaw(node)
        world.run()
        self._nobody_is_lost(nodes)
        self._pass(TICK_S)
        world.run()
        self._be_whole()


class NeededAgain(_Successors):
    """A link that no ring needed was given up. The ring needs it once a peer between the two has died, and when it
    breaks then an op ends for that."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        pairs = self._without_need(nodes)
        if len(nodes) > 4 or not pairs:
            return
        one, other = rng.choice(pairs)
        for _ in range(RESETS_MAX):
            if not one.view.is_meshed:
                break
            self._break(one, other)
        self._nobody_is_lost(nodes)
        gone = rng.choice([node for node in nodes if node not in (one, other)])
        world.kill(gone)
        world.run()
        rest = [node for node in nodes if node is not gone]
        self._reduce(rest)
        op = world.launch(one, TAG)
        world.run()
        self._break_until(one, other, m.OpAbort)
        world.run()
        assert op in one.results, f"{one} has lost its link with {other}, and waits in an op"
        world.cancel_all()
        world.run()
        self._pass(MARGIN_S)
        self._be_whole()


class ResetTogether(_Successors):
    """The connections of most peers to their master are closed at once, and they reach it no more for less time than it
    waits: it keeps them all."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        if world.addresses > 1 or not world.masters or any(node.site for node in world.accepted):
            return
        everybody, host = world.accepted, world.hosts[0]
        are_heartbeats_reset = rng.random() < 0.5
        for node in everybody[rng.randint(0, 1) :]:
            world.cut(node, host.name)
            control = node.control
            assert control is not None
            world.reset(node)
            control.outbox.clear()
            world.control_plane.lose(control)
            if are_heartbeats_reset:
                world.break_heartbeats(node)
        self._pass(rng.uniform(1.05 * self._slack, 2.6 / self._slack**2) * self._timeout_s)
        world.heal()
        self._pass(MARGIN_S * self._slack)
        world.run()
        self._nobody_is_lost(everybody)
        self._reduce(nodes)
        self._be_whole()


class LastOfAll(_Successors):
    """A peer stands still and is taken for dead, and the only one besides it dies before it has heard of a view without
    it. A newcomer waits for others to found a run with: the peer is put out, since nobody is left to put such a view in
    force, and comes again as one of them."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(2)
        for node in world.accepted:
            if node not in nodes[:2]:
                world.leave(node)
        world.run()
        if not world.masters or world.addresses > 1 or world.options.founders < 2 or len(world.accepted) != 2:
            return
        late, gone = self._some(world.accepted, 2)
        newcomers = [world.add(rng.randrange(self._groups)) for _ in range(world.options.founders - 1)]
        world.run()
        world.freeze(late)
        world.reset(late)
        world.break_heartbeats(late)
        self._drain()
        world.break_link(late, gone)
        self._until_said(m.Prepare)
        world.kill(gone)
        self._drain()
        self._pass(self._timeout_s * self._slack)
        world.thaw(late)
        self._pass((2 * self._timeout_s + MARGIN_S) * self._slack)
        world.run()
        is_waiting = late.masterless_since is not None and late.ended is None
        assert not is_waiting, f"{late} waits for its master, which has nobody any more"
        for node in newcomers:
            world.leave(node)
        if late.ended is None:
            world.leave(late)
        world.run()
        self._pass(self._timeout_s)
        for _ in range(world.options.founders):
            world.add(rng.randrange(self._groups))
        self._be_whole()


class OneByOne(_Successors):
    """Nothing gets from the only master to its peers for a while, to one after the other. Each gives it up and comes
    back, and the master hears those who have not done so yet. At least half of them go on in the end."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((3, 4, 5)))
        run = nodes[0].run
        hosts = [host for host in world.hosts if host.is_leading]
        if world.addresses == 1 or not hosts or any(node.site for node in world.accepted):
            return
        for host in world.hosts:
            if host not in hosts and not host.is_dead:
                world.kill_master(host)
        name, everybody = hosts[0].name, world.accepted
        span_s = rng.uniform(0.3, 1.8) * self._timeout_s  # else the first are lost before the last give it up
        gap_s, deaf_s = span_s / len(everybody), rng.uniform(1.05, 2.0) * self._timeout_s * self._slack
        turns = [(at * gap_s + after, node) for at, node in enumerate(everybody) for after in (0.0, deaf_s)]
        begun_at = world.now
        for at, node in sorted(turns, key=lambda turn: turn[0]):
            self._pass(begun_at + at - world.now)
            if (name, node.name) in world.network.blocked:
                world.heartbeats.note()
                world.network.blocked.discard((name, node.name))
            else:
                world.block(name, node)
            self._drain()
        for host in world.hosts:
            if host.is_dead:
                world.restart_master(host)
        self._all_have_an_end()
        left = [node for node in everybody if node.run == run and node.ended is None]
        assert 2 * len(left) >= len(everybody), f"only {left} of {everybody} are left, who heard nothing for a while"
        self._go_on(run)
