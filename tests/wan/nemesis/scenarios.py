"""The faults of each scenario by name. `mixtures` has those by seed.

A scenario is a setting and a plan: which faults begin when, and for how long. Its times and victims are drawn from the
seed, in the bounds that the scenario is about.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from random import Random

from tests.wan.lab import Path as Way
from tests.wan.nemesis.faults import (
    Absent,
    BlackHole,
    Cut,
    Fault,
    Freeze,
    FullDisk,
    Jump,
    Kill,
    Shaped,
    Vanish,
    among,
    both_ways,
    one_way,
)
from tests.wan.nemesis.stage import Setting
from tests.wan.nemesis.supervisor import Timed
from tests.wan.nemesis.values import Load

Plan = Callable[[Random, Setting], Iterator[Timed]]
LARGE = Load(ops=2, large=400_000)
"""A step of 1.6 MB."""
HOUR_S, DAY_S = 3600.0, 86400.0


@dataclass(frozen=True)
class Scenario:
    name: str
    text: str
    setting: Setting
    plan: Plan
    seconds: float
    """The least time of the disturbed part."""
    needs_torch: bool = False

    def timed(self, seed: int) -> list[Timed]:
        return list(self.plan(Random(f"{self.name} {seed}"), self.setting))


SCENARIOS: dict[str, Scenario] = {}


def scenario(setting: Setting, seconds: float = 25.0) -> Callable[[Plan], Plan]:
    """Make a plan a scenario: its name is the function's, its text the docstring."""

    def add(plan: Plan) -> Plan:
        name = getattr(plan, "__name__", "").replace("_", "-")
        SCENARIOS[name] = Scenario(name, plan.__doc__ or "", setting, plan, seconds)
        return plan

    return add


def _split(random: Random, hosts: Collection[int], size: int) -> tuple[list[int], list[int]]:
    some = random.sample(sorted(hosts), size)
    return some, [host for host in hosts if host not in some]


def _flaps(random: Random, at_s: float, for_s: float, fault: Callable[[], Fault]) -> Iterator[Timed]:
    """A fault that comes and goes, half a second or so each."""
    end_s = at_s + for_s
    while at_s < end_s:
        off_s, on_s = random.uniform(0.1, 1.0), random.uniform(0.1, 1.0)
        yield Timed(at_s, off_s, fault())
        at_s += off_s + on_s


# Partitions.


@scenario(Setting(peers=3))
def partition(random: Random, setting: Setting) -> Iterator[Timed]:
    """One peer is cut off from everybody, longer than the peer timeout, and comes back"""
    victim = random.choice(setting.peer_hosts)
    others = [host for host in range(setting.hosts) if host != victim]
    yield Timed(random.uniform(1, 3), random.uniform(8, 12), Cut(both_ways([victim], others)))


@scenario(Setting(peers=5, masters=2), seconds=50)
def halves(random: Random, setting: Setting) -> Iterator[Timed]:
    """Two of five peers and the leading master on one side, three and the standby on the other, then the reverse"""
    few, many = _split(random, setting.peer_hosts, 2)
    yield Timed(1, random.uniform(30, 34), Cut(both_ways([0, *few], [1, *many])))
    few, many = _split(random, setting.peer_hosts, 2)
    yield Timed(40, random.uniform(6, 12), Cut(both_ways([1, *few], [0, *many])))


@scenario(Setting(peers=4), seconds=45)
def one_way_cuts(random: Random, setting: Setting) -> Iterator[Timed]:
    """Packets vanish in one direction: between two peers, to the master, from the master, from one to all peers"""
    a, b = random.sample(setting.peer_hosts, 2)
    yield Timed(1, random.uniform(4, 8), Cut(one_way([a], [b])))
    yield Timed(12, random.uniform(4, 8), Cut(one_way([random.choice(setting.peer_hosts)], [0])))
    yield Timed(23, random.uniform(4, 8), Cut(one_way([0], [random.choice(setting.peer_hosts)])))
    yield Timed(34, random.uniform(4, 8), Cut(one_way([a], [host for host in setting.peer_hosts if host != a])))


@scenario(Setting(peers=4), seconds=30)
def flapping(random: Random, setting: Setting) -> Iterator[Timed]:
    """The link of two peers, then of one peer and the master, comes and goes several times a second"""
    a, b = random.sample(setting.peer_hosts, 2)
    yield from _flaps(random, 1, 12, lambda: Cut(both_ways([a], [b])))
    yield from _flaps(random, 15, 12, lambda: Cut(both_ways([a], [0])))


@scenario(Setting(peers=5, masters=2), seconds=30)
def bridge(random: Random, setting: Setting) -> Iterator[Timed]:
    """One peer reaches both halves of the others, which do not reach each other; all reach the masters"""
    others = random.sample(setting.peer_hosts, 4)
    yield Timed(1, random.uniform(10, 20), Cut(both_ways(others[:2], others[2:])))


# Links.


@scenario(Setting(peers=4, load=LARGE), seconds=30)
def lossy(random: Random, setting: Setting) -> Iterator[Timed]:
    """All links lose packets, and deliver others late and behind those that were sent later"""
    everybody = range(setting.hosts)
    yield Timed(1, 14, Shaped(among(everybody), Way(delay_ms=5, loss=0.01, reordered=0.1, held_ms=15)))
    victim = random.choice(setting.peer_hosts)
    others = [host for host in everybody if host != victim]
    yield Timed(16, 12, Shaped(one_way([victim], others), Way(loss=0.05, reordered=0.3, held_ms=40)))


@scenario(Setting(peers=4), seconds=40)
def black_hole(random: Random, setting: Setting) -> Iterator[Timed]:
    """Large packets from and to one host vanish in the middle of the run, and get through again later"""
    yield Timed(2, random.uniform(8, 14), BlackHole(random.choice(setting.peer_hosts)))


@scenario(Setting(peers=4, late=1), seconds=40)
def black_hole_at_joining(random: Random, setting: Setting) -> Iterator[Timed]:
    """A newcomer's large packets vanish while it is let in"""
    newcomer = setting.peer_hosts[-1]
    yield Timed(0, 3, Absent(newcomer))
    yield Timed(2, random.uniform(8, 12), BlackHole(newcomer, random.choice((600, 1000, 1400))))


@scenario(Setting(peers=3, load=LARGE), seconds=30)
def collapse(random: Random, setting: Setting) -> Iterator[Timed]:
    """The bandwidth of one peer, or of one direction of one link, falls to a modem's in the middle of large ops"""
    victim, other = random.sample(setting.peer_hosts, 2)
    others = [host for host in range(setting.hosts) if host != victim]
    slow = Way(rate_mbit=random.uniform(0.3, 1.0))
    yield Timed(random.uniform(1, 2), 8, Shaped(both_ways([victim], others), slow, is_severe=True))
    yield Timed(random.uniform(14, 15), 8, Shaped(one_way([victim], [other]), slow, is_severe=True))


@scenario(Setting(peers=3, late=1, load=Load(state_bytes=32 << 20)), seconds=35)
def collapse_in_sync(random: Random, setting: Setting) -> Iterator[Timed]:
    """The links of those that send a newcomer 32 MB of state become slow, and one of them is cut off"""
    donor, newcomer = setting.peer_hosts[0], setting.peer_hosts[-1]
    yield Timed(0, 2, Absent(newcomer))
    everybody = setting.peer_hosts
    yield Timed(1, 20, Shaped(one_way(everybody, [newcomer]), Way(rate_mbit=20), is_severe=True))
    yield Timed(random.uniform(4, 8), random.uniform(4, 10), Cut(both_ways([donor], [newcomer])))


@scenario(Setting(peers=4, load=Load(impatient=0.1), encrypts=True), seconds=30)
def impatient(random: Random, setting: Setting) -> Iterator[Timed]:
    """A tenth of the waiting calls is given up within 0.2 s, by peers that encrypt, while links come and go"""
    a, b = random.sample(setting.peer_hosts, 2)
    yield from _flaps(random, 1, 10, lambda: Cut(one_way([a], [b])))
    yield Timed(13, random.uniform(4, 8), Cut(both_ways([b], [0])))


@scenario(Setting(peers=4, load=Load(optimize_every=20)), seconds=30)
def optimizing(random: Random, setting: Setting) -> Iterator[Timed]:
    """The ring is optimized again and again while a link is slow, another is cut and a peer is killed"""
    a, b, c = random.sample(setting.peer_hosts, 3)
    yield Timed(1, 12, Shaped(one_way([a], [b]), Way(rate_mbit=random.uniform(1, 10))))
    yield Timed(random.uniform(3, 8), random.uniform(2, 6), Cut(both_ways([b], [c])))
    yield Timed(random.uniform(15, 20), random.uniform(1, 4), Kill(a))


# Hosts and processes.


@scenario(Setting(peers=4), seconds=35)
def vanish(random: Random, setting: Setting) -> Iterator[Timed]:
    """A host is gone without a word, and another process comes up at its address: before and after it was missed"""
    first, second = random.sample(setting.peer_hosts, 2)
    yield Timed(1, random.uniform(0.5, 2), Vanish(first))
    yield Timed(12, random.uniform(6, 12), Vanish(second))


@scenario(Setting(peers=5), seconds=35)
def vanish_together(random: Random, setting: Setting) -> Iterator[Timed]:
    """Three of five hosts are gone at once, and come back one after the other"""
    for victim in random.sample(setting.peer_hosts, 3):
        yield Timed(2, random.uniform(4, 16), Vanish(victim))


@scenario(Setting(peers=5), seconds=40)
def churn(random: Random, setting: Setting) -> Iterator[Timed]:
    """Peers are killed every other second, and others start in their places"""
    at_s = 1.0
    while at_s < 30:
        yield Timed(at_s, random.uniform(0.2, 3), Kill(random.choice(setting.peer_hosts)))
        at_s += random.uniform(1.0, 3.0)


@scenario(Setting(peers=4), seconds=40)
def freeze(random: Random, setting: Setting) -> Iterator[Timed]:
    """Peers are stopped, for less and for more than the peer timeout, two of them at once"""
    a, b = random.sample(setting.peer_hosts, 2)
    yield Timed(1, random.uniform(0.5, 2), Freeze(a))
    yield Timed(6, random.uniform(5, 9), Freeze(b))
    yield Timed(20, random.uniform(2, 8), Freeze(a))
    yield Timed(20.5, random.uniform(2, 8), Freeze(b))


@scenario(Setting(peers=4), seconds=40)
def freeze_most(random: Random, setting: Setting) -> Iterator[Timed]:
    """Three of four peers are stopped at once: the master may take it for an outage of its own"""
    for victim in random.sample(setting.peer_hosts, 3):
        yield Timed(2, random.uniform(5, 8), Freeze(victim))


@scenario(Setting(peers=3, masters=2, jumps=True), seconds=40)
def clock_jumps(random: Random, setting: Setting) -> Iterator[Timed]:
    """Wall clocks of peers and masters jump by seconds to days, forwards and backwards, while peers are lost"""
    at_s = 0.5
    while at_s < 30:
        seconds = random.choice((-1, 1)) * random.choice((2.0, 30.0, HOUR_S, DAY_S, 365 * DAY_S))
        yield Timed(at_s, random.uniform(0.5, 6), Jump(random.randrange(setting.hosts), seconds))
        at_s += random.uniform(0.3, 1.5)
    yield Timed(8, random.uniform(1, 3), Kill(random.choice(setting.peer_hosts)))
    yield Timed(18, random.uniform(4, 8), Kill(0))


@scenario(Setting(peers=3, jumps=True), seconds=30)
def suspend(random: Random, setting: Setting) -> Iterator[Timed]:
    """Hosts are suspended: their processes stop, and find the wall clock hours later; peers, then the master"""
    yield Timed(1, random.uniform(2, 7), Freeze(random.choice(setting.peer_hosts), ahead_s=HOUR_S))
    yield Timed(12, random.uniform(2, 7), Freeze(0, ahead_s=3 * HOUR_S))


@scenario(Setting(peers=5, masters=2), seconds=150)
def endurance(random: Random, setting: Setting) -> Iterator[Timed]:
    """Two peers survive all that is done to the others and to the masters, and need no more of anything for it"""
    survivors, victims = setting.peer_hosts[:2], setting.peer_hosts[2:]
    at_s = 1.0
    while at_s < 140:
        victim, for_s = random.choice(victims), random.uniform(0.5, 5)
        others = [host for host in range(setting.hosts) if host != victim]
        yield Timed(at_s, for_s, random.choice((Kill(victim), Vanish(victim), Cut(both_ways([victim], others)))))
        at_s += random.uniform(2, 5)
    a, b = survivors
    yield Timed(40, 1.0, Cut(both_ways([a], [b])))
    yield Timed(60, 6, Kill(0))
    yield Timed(90, 6, Kill(1))


# Pipes and disks.


@scenario(Setting(peers=4, log="full pipe"), seconds=35)
def full_pipes(random: Random, setting: Setting) -> Iterator[Timed]:
    """The standard error of all processes is not read, and everything is logged there, while peers are lost and come
    back"""
    at_s = 1.0
    while at_s < 22:
        yield Timed(at_s, random.uniform(0.2, 2), Kill(random.choice(setting.peer_hosts)))
        at_s += random.uniform(2.0, 4.0)
    a, b = random.sample(setting.peer_hosts, 2)
    yield Timed(26, 6, Cut(both_ways([a], [b])))


@scenario(Setting(peers=4, keeps_state=True, disk_bytes=64 << 10), seconds=45)
def full_disk_of_the_master(random: Random, setting: Setting) -> Iterator[Timed]:
    """The disk that the master records the run on is full while a peer is lost, and has room again later"""
    yield Timed(1, random.uniform(10, 14), FullDisk(0, holds_run=True))
    yield Timed(3, random.uniform(2, 4), Kill(random.choice(setting.peer_hosts)))
    yield Timed(24, random.uniform(8, 10), FullDisk(0, holds_run=True))
    yield Timed(26, random.uniform(2, 3), Kill(0))


@scenario(Setting(peers=3, workload="diloco", disk_bytes=2 << 20), seconds=35)
def full_disk_of_checkpoints(random: Random, setting: Setting) -> Iterator[Timed]:
    """The disks that DiLoCo saves to are full: training goes on, `save` says so, and what is there can be loaded"""
    yield Timed(2, random.uniform(6, 8), FullDisk(setting.peer_hosts[0]))
    yield Timed(4, random.uniform(6, 8), FullDisk(setting.peer_hosts[1]))
    yield Timed(8, random.uniform(1, 3), Kill(setting.peer_hosts[0]))
    yield Timed(20, random.uniform(1, 3), Kill(setting.peer_hosts[2]))


# Masters.


@scenario(Setting(peers=4, masters=2), seconds=45)
def master_vanishes(random: Random, setting: Setting) -> Iterator[Timed]:
    """The leading master's host is lost and comes back; then the standby's, which leads by then"""
    yield Timed(1, random.uniform(8, 12), Vanish(0))
    yield Timed(24, random.uniform(8, 12), Vanish(1))


@scenario(Setting(peers=4, keeps_state=True), seconds=45)
def master_restarts(random: Random, setting: Setting) -> Iterator[Timed]:
    """The only master is killed and started again with its record; a peer is lost with it the second time"""
    yield Timed(1, random.uniform(0.2, 3), Kill(0))
    yield Timed(18, random.uniform(0.2, 5), Kill(0))
    yield Timed(18.1, random.uniform(0.5, 8), Kill(random.choice(setting.peer_hosts)))


@scenario(Setting(peers=3), seconds=50)
def master_without_a_record(random: Random, setting: Setting) -> Iterator[Timed]:
    """The only master, without a state directory, vanishes with its host and starts again, without a memory"""
    yield Timed(1, random.uniform(1, 6), Vanish(0))
    yield Timed(25, random.uniform(0.2, 3), Kill(0))


@scenario(Setting(peers=4, masters=2), seconds=50)
def master_is_cut_off(random: Random, setting: Setting) -> Iterator[Timed]:
    """The leading master is cut off from all but one peer, the standby takes over, and then both are seen again"""
    lonely = random.choice(setting.peer_hosts)
    many = [host for host in setting.peer_hosts if host != lonely]
    yield Timed(1, random.uniform(28, 32), Cut(both_ways([0], [1, *many])))
    yield Timed(38, random.uniform(4, 10), Cut(both_ways([1], setting.peer_hosts)))


@scenario(Setting(peers=3, masters=2), seconds=45)
def master_freezes(random: Random, setting: Setting) -> Iterator[Timed]:
    """The leading master is stopped and wakes up when another one leads; then that one"""
    yield Timed(1, random.uniform(5, 12), Freeze(0))
    yield Timed(22, random.uniform(5, 12), Freeze(1))


@scenario(Setting(peers=4, masters=3), seconds=50)
def masters_fall_one_by_one(random: Random, setting: Setting) -> Iterator[Timed]:
    """Of three masters each is lost while the one before has not come back"""
    yield Timed(1, 20, Vanish(0))
    yield Timed(14, 20, Vanish(1))
    yield Timed(26, 12, Kill(2))


@scenario(Setting(peers=4, masters=2), seconds=40)
def everything_falls(random: Random, setting: Setting) -> Iterator[Timed]:
    """The power of the whole site fails: all masters and peers are gone, and come back in any order"""
    for host in range(setting.hosts):
        yield Timed(3, random.uniform(3, 10), Vanish(host))


# Training classes.


def _training(random: Random, setting: Setting) -> Iterator[Timed]:
    a, b, c = random.sample(setting.peer_hosts, 3)
    yield Timed(1, random.uniform(5, 8), Cut(both_ways([a], [host for host in range(setting.hosts) if host != a])))
    yield Timed(14, random.uniform(1, 3), Kill(b))
    yield Timed(20, random.uniform(2, 7), Freeze(c))
    yield Timed(29, random.uniform(2, 7), Vanish(a))


for _workload, _name in (("diloco", "DiLoCo"), ("async", "AsyncDiLoCo"), ("spsa", "SPSA"), ("ddp", "DDP")):
    _text = f"A partition, a kill, a freeze and a host that vanishes while {_name} trains"
    SCENARIOS[f"training-{_workload}"] = Scenario(
        f"training-{_workload}", _text, Setting(peers=4, workload=_workload), _training, 40, _workload == "ddp"
    )
