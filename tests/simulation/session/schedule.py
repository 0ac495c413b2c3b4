"""The schedule of a seed: how many peers and masters, which faults, and when."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from pccl.protocol.failover.bootstrap import Start
from tests.simulation.session.checks import PEERS_MAX
from tests.simulation.session.network import Weather
from tests.simulation.session.world import World

FAULTS_S = 12.0
Fault = Callable[[World, random.Random], None]


def _kill_peer(world: World, chance: random.Random) -> None:
    if len(world.alive) > 1:
        number = chance.choice(world.alive)
        world.note(f"FAULT: caller {number} is killed")
        world.peers[number].kill()


def _start_peer(world: World, _: random.Random) -> None:
    if len(world.peers) < PEERS_MAX and len(world.alive) < 5:
        world.start_peer()


def _reset(world: World, chance: random.Random) -> None:
    connections = list(world.network.connections.values())
    for connection in chance.sample(connections, min(len(connections), chance.choice([1, 1, 2, 5]))):
        world.note(f"FAULT: connection {connection.number} between {' and '.join(connection.hosts())} is reset")
        if chance.random() < 0.5:
            connection.break_off()
        else:
            way = chance.randrange(2)
            connection.reset_after[way] = connection.carried[way] + chance.randrange(200)


def _hosts(world: World) -> list[str]:
    return [*world.master_hosts, *(world.peers[number].host for number in world.alive)]


def _partition(world: World, chance: random.Random) -> None:
    hosts = _hosts(world)
    side = {host for host in hosts if chance.random() < 0.4}
    ways = chance.choice(["both", "in", "out"])
    world.note(f"FAULT: {sorted(side)} are cut off, {ways}")
    for a in side:
        for b in hosts:
            if b not in side:
                if ways != "in":
                    world.network.cut(a, b)
                if ways != "out":
                    world.network.cut(b, a)


def _cut_pair(world: World, chance: random.Random) -> None:
    a, b = chance.sample(_hosts(world), 2)
    world.note(f"FAULT: blocked from {a} to {b}")
    world.network.cut(a, b)
    if chance.random() < 0.5:
        world.network.cut(b, a)


def _freeze_host(world: World, chance: random.Random) -> None:
    frozen = chance.choice(_hosts(world))
    world.note(f"FAULT: {frozen} is out of reach")
    for other in _hosts(world):
        if other != frozen:
            world.network.cut(frozen, other)
            world.network.cut(other, frozen)


def _slow(world: World, chance: random.Random) -> None:
    a, b = chance.sample(_hosts(world), 2)
    world.note(f"FAULT: {a} to {b} is slow")
    world.network.slow[a, b] = chance.choice([300.0, 3000.0, 30000.0])


def _mend(world: World, _: random.Random) -> None:
    world.note("the network is mended")
    world.network.mend()


def _kill_master(world: World, chance: random.Random) -> None:
    living = [host for host, process in world.masters.items() if process.is_alive]
    if living:
        host = chance.choice(living)
        world.note(f"FAULT: the master {host} is killed")
        world.masters[host].kill()


def _start_master(world: World, chance: random.Random) -> None:
    dead = [host for host, process in world.masters.items() if not process.is_alive and process.ended.is_set()]
    if dead:
        _revive(world, chance.choice(dead))


def _revive(world: World, host: str) -> None:
    """Start a master again as at first, except for what it cannot know."""
    world.start_master(host, Start.AUTO, is_standby=host != world.master_hosts[0])


FAULTS: list[tuple[Fault, int]] = [
    (_kill_peer, 3),
    (_start_peer, 4),
    (_reset, 6),
    (_partition, 2),
    (_cut_pair, 3),
    (_freeze_host, 2),
    (_slow, 1),
    (_mend, 6),
    (_kill_master, 2),
    (_start_master, 4),
]


class Schedule:
    """What a seed chooses."""

    def __init__(self, seed: int, faults: bool = True) -> None:
        self.seed = seed
        chance = self._random = random.Random(f"schedule {seed}")
        self.masters = chance.choice([1, 1, 2, 3])
        self.peers = chance.choice([2, 2, 3, 3, 4])
        founders = random.Random(f"founders {seed}").choice([1, 1, 1, 2, 3, 4])  # a stream of its own
        self.founders = min(founders, self.peers)
        self.is_calm = not faults
        kinds = [fault for fault, _ in FAULTS]
        self._kinds = [fault for fault in kinds if chance.random() < 0.6] or kinds
        self._count = chance.choice([0, 2, 5, 10, 20])
        self.weather = Weather(
            latency_s=chance.choice([0.0002, 0.005, 0.05]),
            jitter_s=chance.choice([0.0, 0.001, 0.03]),
            part_share=chance.choice([0.0, 0.0, 0.3]),
            reset_share=0.0 if self.is_calm else chance.choice([0.0, 0.0, 0.05, 0.2]),
            reset_within=chance.choice([300, 3000, 30000]),
            refusal_share=0.0 if self.is_calm else chance.choice([0.0, 0.0, 0.05]),
        )

    def world(self) -> World:
        world = World(self.seed, self.masters, founders=self.founders)
        chance = self._random
        world.network.weather = self.weather
        world.plan.token = chance.choice(["", "a token that is long enough"])
        world.plan.connections = chance.choice([1, 2])
        world.plan.device_share = chance.choice([0.0, 0.0, 0.5, 1.0])
        if not self.is_calm:
            world.plan.give_up_share = chance.choice([0.0, 0.0, 0.1])
            world.plan.optimize_share = chance.choice([0.0, 0.0, 0.1])
        return world

    async def faults(self, world: World) -> None:
        """Start the machines, and have the faults happen."""
        chance = self._random
        for number, host in enumerate(world.master_hosts):
            world.start_master(host, Start.NEW, is_standby=number > 0)
        for _ in range(self.peers):
            await trio.sleep(chance.random() * 0.5)
            world.start_peer()
        if self.is_calm:
            return
        await trio.sleep(chance.random() * 3)
        weights = [weight for fault, weight in FAULTS if fault in self._kinds]
        for _ in range(self._count):
            await trio.sleep(chance.random() * FAULTS_S / self._count)
            chance.choices(self._kinds, weights)[0](world, chance)
        world.network.weather.reset_share = world.network.weather.refusal_share = 0.0
        world.plan.give_up_share = 0.0
        for host, process in list(world.masters.items()):
            if not process.is_alive:
                await process.ended.wait()
                _revive(world, host)
        while len(world.alive) < self.founders:
            world.start_peer()
