"""Newcomers whose masters die join the run that is there, or found one, with the sessions that ship."""

from __future__ import annotations

from collections.abc import Callable

import trio

from pccl.protocol.failover.bootstrap import Start
from tests.simulation.session.machines import PEER_TIMEOUT_S
from tests.simulation.session.program import Caller
from tests.simulation.session.world import World, play

PEERS = 2
SOON_S = 40.0


class _Calm(Caller):
    """It joins once, lets others in when it is told to, and leaves when it is told to."""

    is_in = False
    lets_in = False
    leaves = False
    world_size = 0

    async def run(self) -> None:
        comm = self._process.communicator(self._plan.masters, SOON_S, "", 1)
        await comm.connect(timeout=SOON_S)
        self.is_in = True
        while not (self._plan.is_over or self.leaves):
            if self.lets_in:
                await comm.update_topology()
            self.world_size = comm.world_size
            self.progress += 1
            await trio.sleep(0.1)
        await comm.close()
        while not self._plan.is_over:
            self.progress += 1
            await trio.sleep(0.1)


def test_who_is_to_start_over_founds_no_run_beside_the_one_that_is_led_on() -> None:
    """The standby that leads says that the view was never in force which was to accept it. The other master, begun
    again, knows of no run, and may be asked to found one only by a peer that has heard from the standby that it leads
    none."""
    world = World(seed=1, masters=2, new_caller=_Calm)
    primary, standby = world.master_hosts

    async def faults(world: World) -> None:
        world.start_master(primary, Start.NEW, is_standby=False)
        world.start_master(standby, Start.NEW, is_standby=True)
        members = [_caller(world) for _ in range(PEERS)]
        members[0].lets_in = True
        await _until(lambda: all(member.world_size == PEERS for member in members))
        members[0].lets_in = False
        newcomer = _caller(world)
        await trio.sleep(1.0)
        world.network.cut("10.0.0.3", standby)
        world.network.cut(standby, "10.0.0.3")
        world.masters[primary].kill()
        await trio.sleep(8.0)
        world.network.mend()
        world.start_master(primary, Start.AUTO, is_standby=False)
        await trio.sleep(12.0)
        assert not newcomer.is_in, "it is in a run that no peer has let it into"
        for member in members:
            member.lets_in = True
        await _until(lambda: newcomer.is_in)
        newcomer.lets_in = True
        await _until(lambda: all(caller.world_size == PEERS + 1 for caller in [*members, newcomer]))

    play(world, faults)


def test_who_has_waited_at_one_master_hears_that_another_leads_by_now() -> None:
    """Newcomers are held by a master that was restarted. The peers of the run come to the standby, which had
    no peer when it was asked."""
    world = World(seed=1, masters=2, new_caller=_Calm)
    primary, standby = world.master_hosts

    async def faults(world: World) -> None:
        world.start_master(primary, Start.NEW, is_standby=False)
        world.start_master(standby, Start.NEW, is_standby=True)
        members = [_caller(world) for _ in range(PEERS)]
        members[0].lets_in = True
        await _until(lambda: all(member.world_size == PEERS for member in members))
        members[0].lets_in = False
        for number in range(PEERS):
            for host in (primary, standby):
                world.network.cut(f"10.0.0.{number + 1}", host)
                world.network.cut(host, f"10.0.0.{number + 1}")
        world.masters[primary].kill()
        await world.masters[primary].ended.wait()
        world.start_master(primary, Start.AUTO, is_standby=False)
        newcomers = [_caller(world) for _ in range(PEERS)]
        await trio.sleep(PEER_TIMEOUT_S)
        world.network.mend()
        for number in range(PEERS):
            world.network.cut(f"10.0.0.{number + 1}", primary)
            world.network.cut(primary, f"10.0.0.{number + 1}")
        await trio.sleep(6.0)
        assert not any(newcomer.is_in for newcomer in newcomers), "they are in a run that no peer has let them into"
        for member in members:
            member.lets_in = True
        await _until(lambda: all(caller.world_size >= PEERS + 1 for caller in members))
        for newcomer in newcomers:
            newcomer.lets_in = True
        await _until(lambda: all(caller.world_size == 2 * PEERS for caller in [*members, *newcomers]))

    play(world, faults)


def test_founders_that_have_joined_at_a_standby_whose_run_ends_meet_those_who_come_later() -> None:
    """The standby founds no run, so a later one waits at the other master."""
    world = World(seed=1, masters=3, founders=2, new_caller=_Calm)
    primary, *standbys = world.master_hosts

    async def faults(world: World) -> None:
        world.start_master(primary, Start.NEW, is_standby=False)
        for standby in standbys:
            world.start_master(standby, Start.NEW, is_standby=True)
        members = [_caller(world) for _ in range(PEERS)]
        await _until(lambda: all(member.is_in for member in members))
        world.masters[primary].kill()
        await world.masters[primary].ended.wait()
        early = _caller(world)
        await trio.sleep(2.0)
        assert not early.is_in
        for member in members:
            member.leaves = True
        await trio.sleep(1.0)
        world.start_master(primary, Start.AUTO, is_standby=False)
        late = _caller(world)
        await _until(lambda: early.is_in and late.is_in)
        for caller in (early, late):
            caller.lets_in = True
        await _until(lambda: early.world_size == late.world_size == 2)

    play(world, faults)


def _caller(world: World) -> _Calm:
    caller = world.callers[world.start_peer()]
    assert isinstance(caller, _Calm)
    return caller


async def _until(condition: Callable[[], bool]) -> None:
    end_s = trio.current_time() + SOON_S
    while not condition():
        assert trio.current_time() < end_s
        await trio.sleep(0.05)
