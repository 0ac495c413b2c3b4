"""What all trials rely on: helpers that have peers work, masters die, time pass, and that look at what came of it."""

from __future__ import annotations

import random

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.master_host import Memory
from tests.simulation.node import Node
from tests.simulation.scene import MASTER_TIMEOUT_S
from tests.simulation.world import World

TAGS = (21, 22, 23)
LAST_TAG = 24
MOMENTS: tuple[type[m.Message], ...] = (
    *(m.PreVoteRequest, m.VoteRequest, m.VoteRequest, m.Resumed, m.Resumed, m.StartOver, m.Flush, m.Prepare, m.Install),
    *(m.JointResult, m.JointResult, m.SyncPlan, m.OpsCommit, m.OpAbort),
)
"""Masters die just after they have said one of these."""
PEERS_MIN = 2
PEERS_MAX = 5
DELIVERIES = (0, 1, 2, 4, 8, 16, 30, 60, 120)
TICK_S = 0.5
MARGIN_S = 4.0
"""Seconds that whatever is promised may take longer than promised here, where time passes by `TICK_S`."""
SEARCH_TIMEOUTS = 6.0
"""Number of peer timeouts in which all peers have come to one of several masters."""
RESETS_MAX = 40
"""More resets of all its connections than a link outlives."""
ADMITTED_S = 30.0
"""Seconds in which a newcomer has found the master that leads."""


class Trial:
    def __init__(self, world: World, rng: random.Random, slack: float, groups: int) -> None:
        """`slack`: the seconds that the slowest clock may take for one of its own."""
        self._world = world
        world.searches_in_turn = True
        self._rng = rng
        self._slack = slack
        self._groups = groups
        self._timeout_s = world.peer_timeout_s
        self._heals_at: dict[Node, float] = {}
        """Nodes that reach no master, and when they do again."""
        self._is_recorded = world.memory is Memory.DISK and world.addresses == 1
        """Few may go on: their master knows who was in the run, and nobody else can have led it."""
        self._needs_all = world.memory is Memory.NONE and world.addresses == 1
        """A new master without a record continues the run only with all peers of its last view."""

    # What peers do.

    def gather(self) -> bool:
        """Have enough peers, and none that cannot be accepted. Return False if that cannot be."""
        world = self._world
        if all(node.site for node in world.accepted):
            return False
        for node in [node for node in world.alive if not node.views or node.site]:
            world.leave(node)  # a site is lost as a whole
        world.run()
        for _ in range(self._rng.randint(PEERS_MIN, PEERS_MAX) - len(world.accepted)):
            world.add(self._rng.randrange(self._groups))
        self._be_whole()
        return True

    def _be_whole(self) -> None:
        """Everybody who has come is accepted, and ops and calls of all succeed."""
        world = self._world
        self._admit()
        self._all_succeed(Kind.SYNC)
        ops = [(node, world.launch(node, LAST_TAG)) for node in world.accepted]
        world.run()
        for node, op in ops:
            expected = Result.SUCCESS if node.view.world_size > 1 else Result.TOO_FEW_PEERS
            assert node.result(op) is expected, f"{node}: {node.results[op]}"

    def _admit(self) -> None:
        """All newcomers are accepted, soon."""
        world = self._world
        world.run()
        end_at = world.now + ADMITTED_S * self._slack
        while not all(node.views for node in world.alive) and world.now < end_at:
            if world.master.admissible:
                self._all_succeed(Kind.UPDATE_TOPOLOGY)
            else:
                world.wait(TICK_S)
                world.run()
        waiting = [node for node in world.alive if not node.views]
        assert not waiting, f"{waiting} are not accepted"

    def _all_succeed(self, kind: str) -> None:
        world = self._world
        for node in world.accepted:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
        made = [(node, world.joint(node, kind)) for node in self._rng.sample(world.accepted, len(world.accepted))]
        world.run()
        for node, number in made:
            assert number in node.calls, f"{node} waits in {kind}, and all have called"
            assert node.calls[number].code is Result.SUCCESS, f"{node}: {node.calls[number]}"

    def _newcomers(self) -> list[Node]:
        world, rng = self._world, self._rng
        found = [world.add(rng.randrange(self._groups)) for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < 0.8:
            world.run()
        return found

    def _work(self, kind: str, nodes: list[Node], ops: dict[int, dict[Node, int]], calls: dict[Node, int]) -> None:
        """Have some launch ops or make a joint call."""
        world, rng = self._world, self._rng
        if kind == "ops":
            for tag in TAGS[: rng.randint(1, len(TAGS))]:
                ops[tag] = {node: world.launch(node, tag) for node in nodes if rng.random() < 0.9}
        elif kind:
            for node in nodes:
                node.strategy, node.fails_to_fetch = "enforce_popular", False
                if kind == Kind.SYNC and rng.random() < 0.5:
                    node.revision += rng.randint(1, 3)
                    node.root = rng.choice([b"a", b"b"])
                calls[node] = world.joint(node, kind)

    def _finish(
        self,
        nodes: list[Node],
        ops: dict[int, dict[Node, int]],
        calls: dict[Node, int],
        kind: str,
        victims: list[Node],
    ) -> None:
        """Everybody does what others wait for, and all end as they must."""
        world = self._world
        if kind == "ops":
            for tag, launched in ops.items():
                waiting = [node for node in nodes if node in launched and launched[node] not in node.results]
                waited_for = [other for node in waiting for other in world.ring_nodes(node) if other not in launched]
                for node in dict.fromkeys(waited_for):
                    launched[node] = world.launch(node, tag)
            world.run()
            for tag, launched in ops.items():
                for node, op in launched.items():
                    if node in victims:
                        continue
                    assert op in node.results, f"{node} waits in an op on tag {tag}, which all have launched"
                    result = node.results[op]
                    is_alone = result.code is Result.TOO_FEW_PEERS
                    if not victims:
                        assert result.code is Result.SUCCESS or is_alone, f"{node}: {result}, and nobody was lost"
                    elif result.code is Result.RANK_CONNECTION_LOST:
                        names = [f"peer {victim.number} " for victim in victims if victim.group == node.group]
                        assert any(name in result.reason for name in names), f"{node}: {result}, not of {victims}"
                    else:
                        assert result.code is Result.SUCCESS or is_alone, f"{node}: {result}"
        elif kind:
            waits = {node for node, call in calls.items() if node not in victims and call not in node.calls}
            if waits:
                company = [each for each in nodes if kind in Kind.GLOBAL or each.group in {one.group for one in waits}]
                for node in company:
                    if node not in waits:
                        node.strategy, node.fails_to_fetch = "enforce_popular", False
                        calls[node] = world.joint(node, kind)
                world.run()
            for node, call in calls.items():
                if node not in victims:
                    assert call in node.calls, f"{node} waits in {kind}, which all have called"
                    result = node.calls[call]
                    is_lost = kind == Kind.SYNC and victims and result.code is Result.NO_SHARED_STATE_AVAILABLE
                    assert result.code is Result.SUCCESS or is_lost, f"{node}: {result}"

    def _elders_win(self) -> None:
        """Whoever took part in the last sync is not outvoted by a newcomer with a higher revision, though one of them
        and perhaps a master are gone, and no revision that was elected is ever lowered."""
        world, rng = self._world, self._rng
        self._be_whole()
        elders = world.accepted
        if len(elders) < 3:
            return
        gone = rng.choice(elders)
        revisions = {node: node.revision for node in elders}
        if rng.random() < 0.5:
            world.kill(gone)
            self._pass(self._timeout_s / 2)
            world.run()
        else:
            world.leave(gone)
            world.run()
        elders.remove(gone)
        newcomer = world.add(rng.choice(elders).group)
        newcomer.revision, newcomer.root = max(revisions.values()) + 1000, b"of a newcomer"
        self._admit()
        self._all_succeed(Kind.SYNC)
        for node in elders:
            assert node.revision == revisions[node], f"{node} was outvoted by {newcomer}"
        group = [node for node in world.accepted if node.group == newcomer.group]
        for node in group:
            node.strategy, node.revision = "enforce_popular", node.revision - 1
        results = world.call_all(world.accepted, Kind.SYNC)
        for node, code in zip(world.accepted, results, strict=True):
            if node in group:
                assert code is Result.NO_SHARED_STATE_AVAILABLE, f"{node} has synced to an older revision"
        for node in group:
            node.revision += 1

    # What happens.

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            if not self._world.step():
                break

    def _until_said(self, kind: type[m.Message]) -> None:
        """Deliver until a master has said this to somebody."""
        said = self._world.from_masters
        at = len(said)
        while self._world.step():
            while at < len(said):
                if isinstance(said[at][1], kind):
                    return
                at += 1

    def _break_until(self, one: Node, other: Node, kind: type[m.Message], at_once: bool = False) -> None:
        """Have two lose their link, until a master has said this to somebody. It may outlive resets, if one connection
        is replaced before the last is found broken. `at_once`: the rest of what is under way is not delivered."""
        world = self._world
        said = len(world.from_masters)
        for _ in range(RESETS_MAX):
            if any(isinstance(message, kind) for _, message in world.from_masters[said:]):
                break
            world.break_link(one, other)
            if not at_once:
                self._drain()
                continue
            while world.step():
                if isinstance(world.from_masters[-1][1], kind):
                    break

    def _kill_masters(self) -> None:
        """Kill whoever leads, perhaps between two effects of its machine, and others at times."""
        world, rng = self._world, self._rng
        leading = [host for host in world.hosts if host.is_leading] or [h for h in world.hosts if not h.is_dead]
        if rng.random() < 0.5:
            self._until_said(rng.choice(MOMENTS))
            self._deliver(rng.choice((0, 0, 1, 2, 4)))
        for host in leading:
            if rng.random() < 0.3:
                world.kill_master_within(host, rng.choice((0, 1, 2, 3, 5, 8)))
                self._deliver(rng.choice(DELIVERIES))
                world.dooms.pop(host.name, None)
            if not host.is_dead:
                world.kill_master(host, rng.choice((0, 0, 1, 5)))

    def _begin_masters(self, all_of_them: bool) -> None:
        world, rng = self._world, self._rng
        dead = [host for host in world.hosts if host.is_dead]
        alive = [host for host in world.hosts if not host.is_dead]
        for host in dead:
            if not alive or rng.random() < (0.7 if all_of_them else 0.4):
                world.restart_master(host)
                alive.append(host)

    def _cut_off(self, node: Node, seconds: float, ways: tuple[bool, bool] = (True, True)) -> None:
        """Have a node reach no master for so long, or be reached by none, or both."""
        for host in self._world.hosts:
            if ways[0]:
                self._world.block(node, host.name)
            if ways[1]:
                self._world.block(host.name, node)
        self._heals_at[node] = self._world.now + seconds

    def _let_time_pass(self) -> None:
        """Let a little time pass, up to the next moment when something changes."""
        world = self._world
        until = min([world.now + TICK_S, *(at for at in self._heals_at.values() if at > world.now)])
        world.wait(until - world.now)
        due = [node for node, at in self._heals_at.items() if at <= world.now]
        if due:
            world.heartbeats.note()
            for node in due:
                del self._heals_at[node]
                for host in world.hosts:
                    world.network.blocked -= {(node.name, host.name), (host.name, node.name)}
        self._drain()

    def _pass(self, seconds: float) -> None:
        end_at = self._world.now + seconds
        self._drain()
        while self._world.now < end_at:
            self._let_time_pass()

    def _drain(self) -> None:
        """Deliver all that is under way, without time passing."""
        self._world.run_while_any()

    def _all_are_led(self, nodes: list[Node], run: str, bound_s: float) -> None:
        """Wait until all of these are led on, which takes so long at most."""
        world = self._world
        begun_at = world.now
        self._drain()
        while self._heals_at or any(node.masterless_since is not None or not node.is_known for node in nodes):
            for node in nodes:
                assert node.ended is None, f"{node} is put out: {node.ended}"
            assert world.now <= begun_at + bound_s, f"{nodes} are not led after {bound_s:.1f} s"
            self._let_time_pass()
        for node in nodes:
            assert node.ended is None, f"{node} is put out: {node.ended}"
            assert node.run == run, f"{node} is in {node.run}, and was in {run}"
        world.run()

    def _some(self, nodes: list[Node], count: int) -> list[Node]:
        return self._rng.sample(nodes, min(count, len(nodes)))

    def _all_have_an_end(self) -> None:
        """Everybody is led on, or has heard that it is in no run any more, before its patience ends. Who is led on in
        the moment in which most give up loses its master again, and has an end of its own."""
        self._drain()
        self._wait_for_ends()
        self._pass(2 * self._timeout_s)
        self._wait_for_ends()
        self._world.run()

    def _wait_for_ends(self) -> None:
        world = self._world
        end_at = world.now + (MASTER_TIMEOUT_S + 2 * self._timeout_s) * self._slack
        while self._heals_at or any(node.masterless_since is not None for node in world.alive):
            assert world.now <= end_at, "somebody waits for a master, and has no patience left"
            self._let_time_pass()

    def _go_on(self, run: str) -> None:
        """One master leads those who are left, and they go on."""
        world = self._world
        world.checks.agreement()
        for node in [node for node in world.alive if node.run != run]:
            world.leave(node)
        world.run()
        leaders = {node.leader for node in world.accepted}
        assert len(leaders) <= 1, f"several lead {run}: {leaders}"
        if not world.accepted:
            return
        world.cancel_all()
        if len(world.accepted) > 2 and self._rng.random() < 0.5:
            self._one_goes()
        self._be_whole()

    def _one_goes(self) -> None:
        """One of them dies. The others go on with their master, since most are there."""
        world = self._world
        gone = self._rng.choice(world.accepted)
        leaders = {node: node.leader for node in world.accepted if node is not gone}
        world.kill(gone)
        self._pass(1.5 * self._timeout_s)
        world.run()
        for node, leader in leaders.items():
            assert node.leader is leader, f"{node} has lost its master, since {gone} has died"
            assert node.ended is None, f"{node} is put out: {node.ended}"
