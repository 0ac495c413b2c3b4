"""What is done to a run: each fault begins and ends, and says what it takes away.

Hosts are numbers: the masters' first, then the peers'. What a fault says of itself is for the judge of progress
(`cut`, `frozen`) and for the timeline (`hosts`, `str`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from tests.wan.lab import Path as Way
from tests.wan.nemesis.stage import Stage

Pairs = frozenset[tuple[int, int]]


def one_way(senders: Collection[int], receivers: Collection[int]) -> Pairs:
    return frozenset((a, b) for a in senders for b in receivers if a != b)


def both_ways(some: Collection[int], others: Collection[int]) -> Pairs:
    return one_way(some, others) | one_way(others, some)


def among(hosts: Collection[int]) -> Pairs:
    return one_way(hosts, hosts)


def around(host: int, stage: Stage) -> Pairs:
    """All pairs that this host is one of."""
    return both_ways([host], [seat.number for seat in stage.seats])


class Fault(ABC):
    """A fault; a run may have several at a time."""

    @abstractmethod
    def begin(self, stage: Stage) -> None: ...

    def end(self, stage: Stage) -> None:  # noqa: B027 - some need not be undone
        pass

    @abstractmethod
    def hosts(self) -> frozenset[int]: ...

    def cut(self, stage: Stage) -> Pairs:
        return frozenset()

    def frozen(self) -> frozenset[int]:
        return frozenset()


def _hosts(pairs: Pairs) -> frozenset[int]:
    return frozenset(host for pair in pairs for host in pair)


def _text(pairs: Pairs) -> str:
    """The hosts of pairs, the fewest on the left, with an arrow for one way."""
    senders = {sender for sender, _ in pairs}
    receivers = {receiver for _, receiver in pairs}
    if pairs != one_way(senders, receivers) or senders & receivers:
        both = {pair for pair in pairs if (pair[1], pair[0]) in pairs}
        if both == pairs:
            return ", ".join(f"{a}-{b}" for a, b in sorted(pairs) if a < b)
        return ", ".join(f"{a}>{b}" for a, b in sorted(pairs))
    return f"{'+'.join(map(str, sorted(senders)))} > {'+'.join(map(str, sorted(receivers)))}"


@dataclass(frozen=True)
class Cut(Fault):
    """Packets of these pairs vanish."""

    pairs: Pairs

    def begin(self, stage: Stage) -> None:
        stage.block(self.pairs, True)

    def end(self, stage: Stage) -> None:
        stage.block(self.pairs, False)

    def hosts(self) -> frozenset[int]:
        return _hosts(self.pairs)

    def cut(self, stage: Stage) -> Pairs:
        return self.pairs

    def __str__(self) -> str:
        return f"cut {_text(self.pairs)}"


@dataclass(frozen=True)
class Shaped(Fault):
    """Paths with other rates, delays, losses, and packets that overtake others."""

    pairs: Pairs
    way: Way
    is_severe: bool = False
    """Whether no progress is expected."""

    def begin(self, stage: Stage) -> None:
        stage.shape(self.pairs, self.way, True)

    def end(self, stage: Stage) -> None:
        stage.shape(self.pairs, self.way, False)

    def hosts(self) -> frozenset[int]:
        return _hosts(self.pairs)

    def cut(self, stage: Stage) -> Pairs:
        return self.pairs if self.is_severe else frozenset()

    def __str__(self) -> str:
        way = self.way
        parts = [f"{way.rate_mbit:g} Mbit/s"] if way.rate_mbit is not None else []
        parts += [f"{way.delay_ms:g} ms"] if way.delay_ms is not None else []
        parts += [f"{way.loss:.1%} lost"] if way.loss else []
        parts += [f"{way.reordered:.0%} held {way.held_ms:g} ms"] if way.reordered else []
        hosts = sorted(self.hosts())
        where = f"among {hosts}" if self.pairs == among(hosts) else _text(self.pairs)
        return f"{', '.join(parts)} {where}"


@dataclass(frozen=True)
class BlackHole(Fault):
    """Packets of more bytes from and to a host vanish without notice."""

    host: int
    bytes_max: int = 1000

    def begin(self, stage: Stage) -> None:
        stage.limit(around(self.host, stage), self.bytes_max, True)

    def end(self, stage: Stage) -> None:
        stage.limit(around(self.host, stage), self.bytes_max, False)

    def hosts(self) -> frozenset[int]:
        return frozenset({self.host})

    def cut(self, stage: Stage) -> Pairs:
        return around(self.host, stage)

    def __str__(self) -> str:
        return f"packets of more than {self.bytes_max} bytes vanish at {self.host}"


@dataclass(frozen=True)
class Vanish(Fault):
    """A host is gone without notice; another process comes up at its address later."""

    host: int

    def begin(self, stage: Stage) -> None:
        stage.block(around(self.host, stage), True)
        stage.kill(self.host)

    def end(self, stage: Stage) -> None:
        stage.block(around(self.host, stage), False)
        stage.start(self.host)

    def hosts(self) -> frozenset[int]:
        return frozenset({self.host})

    def cut(self, stage: Stage) -> Pairs:
        return around(self.host, stage)

    def __str__(self) -> str:
        return f"host {self.host} vanished"


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL; another process is started later."""

    host: int

    def begin(self, stage: Stage) -> None:
        stage.kill(self.host)

    def end(self, stage: Stage) -> None:
        stage.start(self.host)

    def hosts(self) -> frozenset[int]:
        return frozenset({self.host})

    def __str__(self) -> str:
        return f"kill {self.host}"


@dataclass(frozen=True)
class Absent(Fault):
    """A host that is empty until the end of this."""

    host: int

    def begin(self, stage: Stage) -> None:
        pass

    def end(self, stage: Stage) -> None:
        stage.start(self.host)

    def hosts(self) -> frozenset[int]:
        return frozenset({self.host})

    def __str__(self) -> str:
        return f"{self.host} has not come yet"


@dataclass(frozen=True)
class Freeze(Fault):
    """SIGSTOP, then SIGCONT; `ahead_s`: the wall clock has gone on by that much, as after a suspend."""

    host: int
    ahead_s: float = 0.0

    def begin(self, stage: Stage) -> None:
        stage.stop(self.host, True)

    def end(self, stage: Stage) -> None:
        if self.ahead_s:
            _jump(stage, self.host, self.ahead_s)
        stage.stop(self.host, False)

    def hosts(self) -> frozenset[int]:
        return frozenset({self.host})

    def frozen(self) -> frozenset[int]:
        return frozenset({self.host})

    def __str__(self) -> str:
        return f"freeze {self.host}" + (f", then {self.ahead_s:+g} s" if self.ahead_s else "")


@dataclass(frozen=True)
class Jump(Fault):
    """A host's wall clock jumps, and back at the end."""

    host: int
    seconds: float

    def begin(self, stage: Stage) -> None:
        _jump(stage, self.host, self.seconds)

    def end(self, stage: Stage) -> None:
        _jump(stage, self.host, -self.seconds)

    def hosts(self) -> frozenset[int]:
        return frozenset({self.host})

    def __str__(self) -> str:
        return f"clock of {self.host} {self.seconds:+g} s"


def _jump(stage: Stage, host: int, seconds: float) -> None:
    clock = stage.seats[host].clock
    assert clock is not None, "a scenario with jumps says so in its setting"
    clock.jump(seconds)


@dataclass(frozen=True)
class FullDisk(Fault):
    """A host's own disk is full. A master that keeps records stands still then."""

    host: int
    holds_run: bool = False

    def begin(self, stage: Stage) -> None:
        disk = stage.seats[self.host].disk
        assert disk is not None, "a scenario with full disks gives their size in its setting"
        disk.fill()

    def end(self, stage: Stage) -> None:
        disk = stage.seats[self.host].disk
        assert disk is not None
        disk.free()

    def hosts(self) -> frozenset[int]:
        return frozenset({self.host})

    def frozen(self) -> frozenset[int]:
        return frozenset({self.host}) if self.holds_run else frozenset()

    def __str__(self) -> str:
        return f"disk of {self.host} full"
