"""Runs that several peers found together, while all kinds of things happen to them and to their masters.

A newcomer that founds with others waits for them, and is in no view. Whatever it goes through before all are
there, it must not be left to wait: once faults have ended and as many founders live as are needed, all that live are in
the run within FOUNDED_S.
"""

from __future__ import annotations

import random

import trio
from trio.testing import MockClock

from pccl import PCCLError
from pccl.protocol.failover.bootstrap import Start
from tests.simulation.session import schedule
from tests.simulation.session.checks import PEERS_MAX, CheckError
from tests.simulation.session.network import Weather
from tests.simulation.session.program import Caller
from tests.simulation.session.schedule import Fault
from tests.simulation.session.world import World

FOUNDED_S = 40.0
MASTER_TIMEOUT_S = 120.0
"""More than FOUNDED_S: a peer that gives up and comes again does so outside of pccl."""
CONNECT_S = 300.0
AGAIN_S = 0.5
FAULTS_S = 10.0
STANDSTILLS_S = (0.5, 1.2, 1.9, 3.0, 6.0)


class Founder(Caller):
    """A peer that joins, and lets others in."""

    is_in = False

    async def run(self) -> None:
        plan = self._plan
        while not plan.is_over:
            comm = self._process.communicator(
                plan.masters, CONNECT_S, plan.token, plan.connections, master_timeout_s=MASTER_TIMEOUT_S
            )
            try:
                await comm.connect(n_attempts=8, timeout=CONNECT_S)
                self._note(f"is in, world {comm.world_size}")
                while not plan.is_over:
                    self.is_in = True
                    await trio.sleep(AGAIN_S)
                    await comm.update_topology()
            except PCCLError as error:
                plan.checker.raised(self.number, error)
                self._note(f"is out: {error}")
                await trio.sleep(AGAIN_S)
            finally:
                self.is_in = False
                with trio.CancelScope(shield=self._process.is_alive):
                    await comm.close()


class FoundingWorld(World):
    async def until_progress(self) -> None:
        """Wait until all that live are in."""
        end_s = trio.current_time() + FOUNDED_S
        while out := [number for number in self.alive if not self.callers[number].is_in]:
            if trio.current_time() >= end_s:
                raise CheckError(f"callers {out} are not in the run {FOUNDED_S:g} s after the last fault")
            await trio.sleep(0.1)


def _stand_still(world: World, chance: random.Random) -> None:
    """A master's process was stopped for a while."""
    living = [process for process in world.masters.values() if process.is_alive and process.server is not None]
    if living:
        process, seconds = chance.choice(living), chance.choice(STANDSTILLS_S)
        world.note(f"FAULT: the master {process.host} has stood still for {seconds:g} s")
        assert process.server is not None
        process.server._lived_at -= seconds


def _stop_time(world: World, chance: random.Random) -> None:
    """All processes were stopped for a while, as when a machine has too much to do."""
    seconds = chance.choice(STANDSTILLS_S)
    world.note(f"FAULT: everything has stood still for {seconds:g} s")
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    clock.jump(seconds)


def _start_peer(world: World, _: random.Random) -> None:
    if len(world.peers) < PEERS_MAX and len(world.alive) <= world.founders:
        world.start_peer()


FAULTS: list[tuple[Fault, int]] = [
    *((fault, weight) for fault, weight in schedule.FAULTS if fault is not schedule._start_peer),
    (_start_peer, 6),
    (_stand_still, 5),
    (_stop_time, 2),
]


class FoundingSchedule:
    """What a seed chooses."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        chance = self._random = random.Random(f"founding {seed}")
        self.masters = chance.choice([1, 2, 2, 3])
        self.founders = chance.choice([1, 2, 3, 3, 4, 5])
        self._arrival_s = chance.choice([0.1, 2.0, FAULTS_S])
        kinds = [fault for fault, _ in FAULTS]
        self._kinds = [fault for fault in kinds if chance.random() < 0.5] or kinds
        self._count = chance.choice([1, 2, 5, 10, 20])
        self.weather = Weather(
            latency_s=chance.choice([0.0002, 0.005, 0.05]),
            jitter_s=chance.choice([0.0, 0.001, 0.03]),
            reset_share=chance.choice([0.0, 0.0, 0.0, 0.1]),
            reset_within=chance.choice([300, 3000]),
            refusal_share=chance.choice([0.0, 0.0, 0.05]),
        )

    def world(self) -> World:
        hosts = [f"10.0.1.{number + 1}" for number in range(self.masters)]
        self._random.shuffle(hosts)
        world = FoundingWorld(self.seed, self.masters, hosts, self.founders, Founder)
        world.network.weather = self.weather
        world.plan.token = self._random.choice(["", "a token that is long enough"])
        return world

    async def faults(self, world: World) -> None:
        """Start masters and founders, and have the faults happen."""
        chance = self._random
        for number, host in enumerate(world.master_hosts):
            world.start_master(host, Start.NEW, is_standby=number > 0)
        times = sorted(
            [(chance.random() * self._arrival_s, True) for _ in range(self.founders)]
            + [(chance.random() * FAULTS_S, False) for _ in range(self._count)]
        )
        weights = [weight for fault, weight in FAULTS if fault in self._kinds]
        for at_s, is_arrival in times:
            await trio.sleep(max(0.0, at_s - trio.current_time()))
            if any(world.callers[number].is_in for number in world.alive):
                break  # what may become of a run that has been founded is for the other schedules
            if is_arrival or not world.alive:
                _start_peer(world, chance)
            else:
                chance.choices(self._kinds, weights)[0](world, chance)
        world.network.weather.reset_share = world.network.weather.refusal_share = 0.0
        for host, process in list(world.masters.items()):
            if not process.is_alive:
                await process.ended.wait()
                schedule._revive(world, host)
        while len(world.alive) < self.founders:
            world.start_peer()
