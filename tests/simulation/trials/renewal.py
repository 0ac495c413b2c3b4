"""So many tags that a new epoch has to begin, which costs no op that is alone in flight."""

from __future__ import annotations

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.membership import Membership

BREAKS_MAX = 40
"""More resets of all its connections than a link outlives."""
TAGS_MAX = 8
"""The bound of tags in an epoch, for as long as a trial lasts: the real one takes too long to come to."""
FIRST_TAG = 100
OPS = 14
AT_ONCE = 6
"""Ops at once: more than half of the bound, and less than the bound."""


class Renewal(Membership):
    """Ops with many tags, one after the other and several at once, all succeed, with a new epoch now and then. They
    do, too, if no master is there to begin one."""

    def play(self) -> None:
        nodes = self._company_of(2)
        self._begin_epoch(nodes)  # in which all have used as many tags
        before, completion.TAGS_MAX = completion.TAGS_MAX, TAGS_MAX
        try:
            self._play(nodes)
        finally:
            completion.TAGS_MAX = before

    def _play(self, nodes: list[Node]) -> None:
        world = self._world
        if not nodes[0].view.is_meshed:
            return
        epoch = nodes[0].view.epoch
        for at in range(OPS):
            self._reduce(nodes, [FIRST_TAG + at])
        epochs = {view.epoch for view in nodes[0].views if view.epoch > epoch}
        assert 1 <= len(epochs) <= 2 * OPS // TAGS_MAX + 1, f"{OPS} ops with a tag each took {len(epochs)} new epochs"
        self._begin_epoch(nodes)
        self._reduce(nodes, [FIRST_TAG + OPS + at for at in range(AT_ONCE)])
        if world.masters and self._rng.random() < 0.7:
            self._without_master(nodes)

    def _begin_epoch(self, nodes: list[Node]) -> None:
        """Have a new epoch begin: a link is made anew, of neighbours, for others may be without one. It may outlive
        that all its connections are reset, if one is replaced before the last is found broken."""
        node = nodes[0]
        ring, epoch = node.view.ring, node.view.epoch
        neighbour = ring[(ring.index(node.number) + 1) % len(ring)]
        other = next(each for each in nodes if each.number == neighbour)
        for _ in range(BREAKS_MAX):
            if node.view.epoch == epoch:
                self._world.break_link(node, other)
                self._world.run()
        assert node.view.epoch != epoch, f"no link of {node} and {other} is ever lost"

    def _reduce(self, nodes: list[Node], tags: list[int]) -> None:
        world = self._world
        ops = [(node, world.launch(node, tag)) for tag in tags for node in nodes]
        world.run()
        for node, op in ops:
            assert op in node.results, f"{node} waits in an op that all have launched"
            assert node.result(op) is Result.SUCCESS, f"{node}: {node.results[op]}"

    def _without_master(self, nodes: list[Node]) -> None:
        """The master dies just when it has to begin a new epoch."""
        world = self._world
        self._begin_epoch(nodes)
        ops: list[tuple[Node, int]] = []
        said = len(world.from_masters)
        for at in range(TAGS_MAX):
            ops += [(node, world.launch(node, FIRST_TAG + 2 * OPS + at)) for node in nodes]
            if any(op not in node.keys for node, op in ops):
                break
            self._drain()
        for host in world.hosts:
            if not host.is_dead:
                world.kill_master(host)
        self._drain()
        is_stopped = any(isinstance(message, m.Flush) for _, message in world.from_masters[said:])
        waiting = [node for node, op in ops if op not in node.results]
        assert not waiting or is_stopped, f"{waiting} wait for a master to begin a new epoch"
        for host in world.hosts:
            world.restart_master(host)
        run = nodes[0].run
        self._all_are_led(world.accepted, run, 20 * self._timeout_s * self._slack)
        world.run()
