"""Members come and go: whom a broken connection costs nothing, who is missed at once, who is let in and who is not, and
what strangers are told."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.master.effects import Close, Effect, Send, TakeHeartbeats
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.master_host import MasterHost
from tests.simulation.network import end_of_heartbeats
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S, TICK_S, Trial

CONNECTIONS_MAX = 100
PENDING_MAX = 12
"""Bounds of masters, less than a trial has connections and more than schedules have."""
STRANGERS_FROM = 9_000_000
"""Connections of strangers are numbered from here."""
ROUNDS = 2


class Membership(Trial):
    def _company_of(self, size: int) -> list[Node]:
        """Return at least so many peers of a group, after those that are missing have come."""
        world = self._world
        group = self._rng.choice(sorted({node.group for node in world.accepted}))
        for _ in range(size - len([node for node in world.accepted if node.group == group])):
            world.add(group, self._rng.randint(1, 3))
        self._be_whole()
        return [node for node in world.accepted if node.group == group]

    def _all_update(self, but: Node) -> None:
        """All but one call update_topology, which ends at once."""
        world = self._world
        calls = [(node, world.joint(node, Kind.UPDATE_TOPOLOGY)) for node in world.accepted if node is not but]
        self._drain()
        for node, call in calls:
            assert call in node.calls, f"{node} waits in update_topology for {but}"
            assert node.call(call) is Result.SUCCESS, f"update_topology of {node}: {node.calls[call]}"

    @property
    def _leader(self) -> MasterHost:
        return next(host for host in self._world.hosts if host.is_leading)


class BrokenConnections(Membership):
    def play(self) -> None:
        """A peer loses connections to others and to its master, but not all. It makes others, and that is all.

        With one link its others are made anew, and until then the word of the one who lost it may count for all: where
        heartbeats and control connection are gone at the same moment, the peer may be put out (liveness, rule 3).
        """
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((1, 3, 4)))
        node = rng.choice(nodes)
        others = [other for other in world.ring_nodes(node) if other is not node]
        members = {each: each.number for each in world.accepted}
        for _ in range(ROUNDS):
            node.is_walled_in = rng.random() < 0.5  # for a moment
            steps, may_be_put_out = self._steps(node, others)
            for step in steps:
                step()
                self._deliver(rng.choice((0, 0, 1, 3, 10)))
            if node.is_walled_in:
                self._drain()
            node.is_walled_in = False
            self._pass(2 * TICK_S)
            assert node.heartbeat or not node.is_reachable, f"{node} does not make another connection for heartbeats"
            world.run()
            ops = [(each, world.launch(each, 14)) for each in world.ring_nodes(node)]
            world.run()
            if may_be_put_out and node.ended is not None:
                assert [each for each in members if each.ended is not None] == [node], f"not only {node} is put out"
                world.cancel_all()
                self._be_whole()
                return
            for each, op in ops:
                assert each.result(op) in (Result.SUCCESS, Result.TOO_FEW_PEERS), f"{each}: {each.results[op]}"
        self._pass(self._timeout_s * self._slack + MARGIN_S)
        for each, number in members.items():
            is_here = each.is_reachable and each.number == number and each in world.accepted
            assert is_here, f"{each} is put out for connections that broke: {each.ended}"

    def _steps(self, node: Node, others: list[Node]) -> tuple[list[Callable[[], None]], bool]:
        """Return what breaks, and whether that may look as if the peer had died."""
        world, rng = self._world, self._rng
        ways = rng.choice(("all but links", "all but one", "one link"))

        def break_links(links: list[Node]) -> None:
            for other in links:
                world.break_link(node, other)

        steps: list[Callable[[], None]] = [lambda: world.reset(node), lambda: world.break_heartbeats(node)]
        if ways == "one link" and len(others) > 1:
            steps.append(lambda: break_links(others[:1]))
        elif ways == "all but one":
            steps = rng.sample([*steps, lambda: break_links(others)], 2)
        rng.shuffle(steps)
        return steps, ways == "one link" and len(steps) == 3


class Deaths(Membership):
    def play(self) -> None:
        """One or two processes die. They are missed at once, by what becomes of their connections."""
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        gone = rng.sample(nodes, rng.randint(1, 2) if len(world.accepted) > 4 or not world.masters else 1)
        others = [node for node in world.accepted if node not in gone]
        for node in gone:
            world.kill(node)
        ops = [(node, world.launch(node, 15)) for node in nodes if node not in gone]
        self._drain()
        for node in others:
            here = {each.number for each in gone} & set(node.view.ring)
            assert not here, f"{here} are dead, and {node} does not know"
        for node, op in ops:
            assert op in node.results, f"{node} waits in an op with {gone}, who are dead"


class NoHeartbeats(Membership):
    def play(self) -> None:
        """A peer stops for good, and its connection for heartbeats breaks. It is missed in time."""
        world = self._world
        node = self._rng.choice(self._company_of(4))
        number, control = node.number, node.control
        world.freeze(node)
        world.break_heartbeats(node)
        self._pass((self._timeout_s + MARGIN_S) * self._slack)
        assert control is not None
        assert control.is_over, f"{node} sends no heartbeat and is kept"
        assert all(number not in other.view.ring for other in world.accepted if other is not node)
        world.kill(node)
        world.run()


class SilentNewcomer(Membership):
    def play(self) -> None:
        """Nobody waits for a newcomer that could not be missed, and it is sent away."""
        world = self._world
        node = world.add(world.accepted[0].group)
        world.run_until(lambda: node.number)
        world.freeze(node)
        control = node.control
        assert control is not None
        self._all_update(but=node)
        self._pass((world.options.hello_timeout_s + MARGIN_S) * self._slack)
        assert control.is_over, f"{node} has never sent a heartbeat, and is kept"
        world.kill(node)
        world.run()


class AbsentNewcomer(Membership):
    def play(self) -> None:
        """Nobody waits for a newcomer without its control connection. It is let in once it has another."""
        world = self._world
        node = world.add(world.accepted[0].group)
        world.run()
        node.is_walled_in = True
        world.reset(node)
        self._drain()
        assert node in world.checks.absent
        self._all_update(but=node)
        assert not node.views, f"{node} is admitted and cannot answer"
        node.is_walled_in = False
        self._drain()
        self._all_update(but=node)
        assert node.views, f"{node} is back, and is not let in"


class SilentNewcomers(Membership):
    def play(self) -> None:
        """However many newcomers stop, whoever is in the run goes on."""
        world = self._world
        group = world.accepted[0].group
        members = [(node, node.leader) for node in world.accepted]
        newcomers = [world.add(group) for _ in range(min(len(members) + 1, PENDING_MAX))]
        world.run()
        for node in newcomers:
            world.freeze(node)
        self._pass((self._timeout_s + MARGIN_S) * self._slack)
        for node, leader in members:
            is_led = node.leader is leader and node.masterless_since is None
            assert is_led, f"newcomers have fallen silent, and {node} has lost its master"
        for node in newcomers:
            assert node.control is not None
            assert node.control.is_over, f"{node} is silent, and is kept"
            world.kill(node)
        world.run()


class LastHeartbeat(Membership):
    def play(self) -> None:
        """A process dies, and its heartbeats are the last thing to end: it is missed at once all the same."""
        world = self._world
        nodes = self._company_of(3)
        gone = self._rng.choice(nodes)
        if any(node.site for node in nodes):
            return
        world.network.slow.add(end_of_heartbeats(gone))
        world.kill(gone)
        self._drain()
        world.network.slow.discard(end_of_heartbeats(gone))
        for node in nodes:
            assert node is gone or gone.number not in node.view.ring, f"{gone} is dead, and {node} does not know"
        world.run()
        self._be_whole()


class SilentMixture(Membership):
    def play(self) -> None:
        """More newcomers than there are peers stop, and one of these: most peers are there, and keep their master."""
        world = self._world
        nodes = self._company_of(3)
        gone = self._rng.choice(nodes)
        if any(node.site for node in world.accepted):
            return
        leaders = {node: node.leader for node in world.accepted if node is not gone}
        silent = [world.add(gone.group) for _ in range(min(len(world.accepted) + 1, PENDING_MAX))]
        world.run()
        for node in [gone, *silent]:
            world.freeze(node)
        self._pass((self._timeout_s + MARGIN_S) * self._slack)
        for node, leader in leaders.items():
            is_led = node.leader is leader and node.masterless_since is None
            assert is_led, f"one peer of many has fallen silent, and {node} has lost its master"
            assert gone.number not in node.view.ring, f"{gone} is silent, and {node} does not know"
        for node in [gone, *silent]:
            world.kill(node)
        world.run()
        self._be_whole()


class Sites(Membership):
    def play(self) -> None:
        """A peer that leaves its site on purpose leaves alone; when one dies the rest of its site goes."""
        world, rng = self._world, self._rng
        name, size = f"site of {len(world.nodes)}", rng.randint(2, 3)
        mates = [world.add(group, site=name, site_size=size) for group in range(size)]
        self._be_whole()
        world.leave(mates[0])
        self._pass(1.0)
        for node in mates[1:]:
            assert node.is_reachable, f"{mates[0]} has left, and {node} has to go: {node.ended}"
        for node in mates[1:]:
            world.leave(node)
        world.run()


class Strangers(Membership):
    """What strangers say is refused, with the reason, and there are never too many of them."""

    def play(self) -> None:
        tries = [
            self._one_says_nothing,
            self._one_is_of_another_version,
            self._one_is_of_another_run,
            self._sites_of_two_sizes,
            self._too_many_connect,
            self._too_many_wait,
        ]
        for each in self._rng.sample(tries, 3):
            each()
            self._world.run()

    def _one_says_nothing(self) -> None:
        node = self._world.connect()
        control = node.control
        assert control is not None
        self._pass((self._world.options.hello_timeout_s + MARGIN_S) * self._slack)
        assert control.is_over, f"{node} has said nothing, and its connection stays"
        self._world.kill(node)

    def _one_is_of_another_version(self) -> None:
        protocol = m.PROTOCOL_VERSION + self._rng.choice((-1, 1))
        reason = _refusal(self._say(0, msgspec.structs.replace(self._hello(), protocol=protocol)))
        assert "install the same version" in reason, f"a peer of another version: {reason or 'it is let in'}"

    def _one_is_of_another_run(self) -> None:
        node = self._rng.choice(self._world.accepted)
        effects = self._say(0, m.HeartbeatHello(m.PROTOCOL_VERSION, f"not {node.run}", node.number))
        assert not any(isinstance(each, TakeHeartbeats) for each in effects), "heartbeats of another run are taken"
        assert _refusal(effects)

    def _sites_of_two_sizes(self) -> None:
        hello = self._hello()
        sizes = [msgspec.structs.replace(hello, site="a site", site_size=size, name=f"of {size}") for size in (2, 3)]
        assert not _refusal(self._say(0, sizes[0]))
        reason = _refusal(self._say(1, sizes[1]))
        assert "has 2 peers by what others of it say" in reason, f"a site of two sizes: {reason or 'it is let in'}"
        self._hang_up(0)

    def _too_many_connect(self) -> None:
        free = self._free_connections
        refused = [at for at in range(CONNECTIONS_MAX + 1) if _refusal(self._connect(at))]
        assert refused[:1] == [free], f"{free} connections are free, and the first that is refused is no {refused[:1]}"
        for at in range(free):
            self._hang_up(at)

    @property
    def _free_connections(self) -> int:
        host = self._leader
        controls = self._world.controls.values()
        taken = len([each for each in controls if each.host is host and each.is_known and not each.is_over])
        return CONNECTIONS_MAX - taken - len(host.heartbeats)

    def _too_many_wait(self) -> None:
        if self._free_connections <= PENDING_MAX:
            return
        hello = self._hello()
        refused = [at for at in range(PENDING_MAX + 1) if _refusal(self._say(at, hello))]
        assert refused == [PENDING_MAX], f"{PENDING_MAX} may wait, and refused is {refused[:1]}"
        for at in range(PENDING_MAX):
            self._hang_up(at)

    def _hello(self) -> m.Hello:
        return m.Hello(m.PROTOCOL_VERSION, "test", 0, [], 999, 1, "stranger", masters=1)

    def _connect(self, number: int) -> list[Effect]:
        host = self._leader
        return host.machine.connected(STRANGERS_FROM + number, "10.1.0.1", self._world.clock(host))

    def _say(self, number: int, message: m.FromPeer) -> list[Effect]:
        """Have a stranger connect and say something. Return what its master does."""
        host = self._leader
        refused = self._connect(number)
        return refused or host.machine.received(STRANGERS_FROM + number, message, self._world.clock(host))

    def _hang_up(self, number: int) -> None:
        host = self._leader
        host.machine.disconnected(STRANGERS_FROM + number, "it hangs up", self._world.clock(host))


def _refusal(effects: list[Effect]) -> str:
    """Return the reason with which a connection is refused; empty: it is not."""
    said = [each.message for each in effects if isinstance(each, Send)]
    reasons = [message.reason for message in said if isinstance(message, m.Goodbye)]
    is_closed = any(isinstance(each, Close) for each in effects)
    assert is_closed == bool(reasons)
    return reasons[0] if reasons else ""
