"""What users do to a simulated run, step by step: join and leave, launch ops, make group calls, give up, rest."""

from __future__ import annotations

from pccl.protocol.messages import Kind
from tests.simulation.deeds import Deeds
from tests.simulation.node import Node

TAGS = (1, 2, 3)
IMPATIENCE = 0.15
"""The probability that a caller gives up before a delivery, while callers do."""
STRATEGIES = ("enforce_popular", "enforce_popular", "enforce_popular", "receive_only", "send_only")


class Uses(Deeds):
    def add(self) -> None:
        while len(self.world.alive) < self.plan.peers and not all(host.is_dead for host in self.world.hosts):
            if self.plan.groups > 1 and self.chance(0.3):
                self.add_site()
            else:
                self.world.add(self.rng.randrange(self.plan.groups), self.rng.randint(1, 3))

    def add_site(self) -> None:
        """A rank for each group; not always all of them."""
        name, ranks = f"site {len(self.world.nodes)}", list(range(self.plan.groups))
        self.rng.shuffle(ranks)
        for rank in ranks[: self.rng.choice((None, None, None, 1))]:
            self.world.add(rank, self.rng.randint(1, 3), name, self.plan.groups)

    def leave(self) -> None:
        if (node := self.one()) and not node.is_frozen:
            self.world.leave(node)

    def _launch(self, node: Node, tag: int, is_sound: bool = False, pair: tuple[Node, bool] | None = None) -> None:
        name = tag, (pair[0].number, pair[1]) if pair else None
        if self._runs(node) and all((node.launched[op][0], node.pairs.get(op)) != name for op in node.open_ops):
            arguments = "other" if not is_sound and self.chance(0.03) else ""
            self.world.launch(node, tag, arguments, not is_sound and self.chance(0.02), pair)

    def launch_pair(self) -> None:
        if node := self.one():
            company = [other for other in self._company(node) if other in self.world.accepted]
            others = [other for other in company if other is not node and other.number in node.view.ring]
            if others:
                other = self.rng.choice(others)
                tag, sends = self.rng.choice(TAGS), self.chance(0.5)
                for one, two, is_sender in ((node, other, sends), (other, node, not sends)):
                    if self.chance(0.95):
                        self._launch(one, tag, pair=(two, is_sender))

    def launch_one(self) -> None:
        if node := self.one():
            self._launch(node, self.rng.choice(TAGS))

    def launch_all(self) -> None:
        nodes = self.world.accepted
        self.rng.shuffle(nodes)
        tag = self.rng.choice(TAGS)
        for node in nodes:
            if self.chance(0.95):
                self._launch(node, tag)

    def stream(self) -> None:
        """For a while all launch one op after the other, and so do two of them with each other."""
        tag, pair_tag = self.rng.choice(TAGS), self.rng.choice(TAGS)
        nodes = self.world.accepted
        pair = self.rng.sample(nodes, 2) if len(nodes) > 1 and self.chance(0.5) else []

        def launch_next() -> None:
            if node := self.one():
                self._launch(node, tag, is_sound=True)
            if pair and all(each in self.world.accepted for each in pair):
                at = self.rng.randrange(2)
                node, other = pair[at], pair[1 - at]
                if other.number in node.view.ring:
                    self._launch(node, pair_tag, True, (other, at == 0))

        self.between, self.is_streaming = launch_next, True

    def catch_up(self, is_sound: bool = False) -> None:
        """Everybody launches and calls what others wait for."""
        for node in self.world.accepted:
            open_ops = [(other, op) for other in self._company(node) for op in other.open_ops]
            for tag in sorted({other.launched[op][0] for other, op in open_ops if op not in other.pairs}):
                self._launch(node, tag, is_sound)
            for other, op in open_ops:
                number, is_sender = other.pairs.get(op, (0, False))
                if number == node.number:
                    self._launch(node, other.launched[op][0], is_sound, (other, not is_sender))
            if not node.open_calls:
                waits = ((other, other.kinds[other.open_calls[0]]) for other in self.world.accepted if other.open_calls)
                waiting = [kind for other, kind in waits if kind != Kind.SYNC or other.group == node.group]
                if waiting:
                    # A peer that only asks gets no, and so need not be met there.
                    kind = min(waiting, key=lambda kind: kind == Kind.ARE_PEERS_PENDING)
                    self._group_call(node, kind, is_sound)

    def _company(self, node: Node) -> list[Node]:
        return self.world.ring_nodes(node)

    def cancel(self) -> None:
        if (node := self.one()) and node.open_ops and not node.is_frozen:
            self.world.cancel(node, self.rng.choice(node.open_ops))

    def give_up(self) -> None:
        if (node := self.one()) and node.open_ops and not node.is_frozen:
            self.world.give_up(node, self.rng.choice(node.open_ops))

    def _group_call(self, node: Node, kind: str, is_sound: bool = False) -> None:
        if not self._runs(node) or (node.open_calls and self.chance(0.9)):
            return
        if kind in Kind.EXCLUSIVE and node.open_ops and self.chance(0.8):
            return  # it would be refused at once
        if kind == Kind.SYNC:
            if any(node.kinds[call] == Kind.SYNC for call in node.open_calls):
                return
            node.strategy = self.rng.choice(STRATEGIES)
            node.fails_to_fetch = not is_sound and self.chance(0.1)
            if self.chance(0.6):
                node.revision += self.rng.randint(1, 3)
                node.root = self.rng.choice([b"a", b"b"])
        self.world.group_call(node, kind)

    def group_call_by_one(self) -> None:
        if node := self.one():
            self._group_call(node, self.rng.choice(Kind.ALL))

    def group_call_by_all(self, *kinds: str) -> None:
        nodes = self.world.accepted
        self.rng.shuffle(nodes)
        kind = self.rng.choice(kinds or Kind.ALL)
        for node in nodes:
            self._group_call(node, kind)

    def update(self) -> None:
        if self.world.master.pending or self.chance(0.3):
            self.group_call_by_all(Kind.UPDATE_TOPOLOGY)

    def sync(self) -> None:
        self.group_call_by_all(Kind.SYNC)

    def optimize(self) -> None:
        for a in self.world.alive:
            for b in self.world.alive:
                self.world.network.costs[frozenset((a.name, b.name))] = self.rng.randint(1, 1000)
                self.world.network.rates[a.name, b.name] = self.rng.choice((1e3, 1e6, 2.5e6, 25e6, float("nan")))
        self.group_call_by_all(Kind.OPTIMIZE_TOPOLOGY)

    def cancel_group_call(self) -> None:
        if (node := self.one()) and node.open_calls and not node.is_frozen:
            self.world.cancel_group_call(node, self.rng.choice(node.open_calls))

    def interrupt(self) -> None:
        """Ctrl-C comes: all that its callers wait for is given up, and it may end."""
        if (node := self.one()) and not node.is_frozen:
            for op in node.open_ops:
                if self._runs(node):
                    self.world.give_up(node, op)
            for call in node.open_calls:
                if self._runs(node):
                    self.world.cancel_group_call(node, call)
            if self.chance(0.5) and self._runs(node):
                self.world.leave(node)

    def impatience(self) -> None:
        """For a while callers give up at any moment."""
        self.between = self._lose_patience

    def _lose_patience(self) -> None:
        if self.chance(IMPATIENCE):
            self.rng.choice((self.cancel, self.give_up, self.cancel_group_call))()

    def wait(self) -> None:
        self.world.wait(self.rng.choice((0.1, 1.0, 3.0)))

    def rest(self) -> None:
        world = self.world
        world.run()
        if self.plan.masters and (
            self.plan.masters > 1 or any(node.masterless_since is not None for node in world.alive)
        ):
            return
        if not (any(node.is_frozen for node in world.alive) or world.network.blocked or world.is_master_away):
            world.check_rest()
