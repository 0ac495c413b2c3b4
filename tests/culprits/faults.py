"""The faults that are injected: how each begins and ends, and what has to be named for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from random import Random

from pccl.protocol.diagnosis.findings import Kind
from tests.culprits.stage import Name, Stage
from tests.wan.lab import Path

Fault = Callable[[Stage, Random], "Injected"]
STOPPED_S = 0.45
RUNNING_S = 0.05


class Injected:
    """A fault that is in force, until `end`. It is named rightly by any of `names`."""

    def __init__(self, names: set[Name], what: str, end: Callable[[], None]) -> None:
        self.names = names
        self.what = what
        self.end = end


def _peer(stage: Stage, chance: Random) -> str:
    return chance.choice(sorted(stage.ring))


def _way(stage: Stage, chance: Random) -> tuple[str, str]:
    at = chance.randrange(len(stage.ring))
    return stage.ring[at], stage.ring[(at + 1) % len(stage.ring)]


def slow_steps(stage: Stage, chance: Random) -> Injected:
    """A peer takes several times as long between ops, for which the others wait, and at most a second with the op: it
    takes four steps to tell."""
    name, factor = _peer(stage, chance), chance.choice([3.0, 4.0, 6.0])
    op_ms = stage.plan.op_s * 1e3
    factor = min(
        factor + (100 + op_ms) / stage.plan.step_ms, max(900 - op_ms, 2.5 * stage.plan.step_ms) / stage.plan.step_ms
    )
    stage.peers[name].set_factor(factor)
    return Injected({Name(Kind.SLOW, name, "")}, f"{name} x{factor:.1f}", lambda: stage.peers[name].set_factor(1.0))


def throttled(stage: Stage, chance: Random) -> Injected:
    """A peer is stopped for most of the time, a little at once, as by a CPU limit."""
    name = _peer(stage, chance)
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            stage.peers[name].signal(signal.SIGSTOP)
            over.wait(STOPPED_S)
            stage.peers[name].signal(signal.SIGCONT)
            over.wait(RUNNING_S)

    thread = threading.Thread(target=throttle, daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return Injected({Name(Kind.SLOW, name, "")}, name, end)


def frozen(stage: Stage, chance: Random) -> Injected:
    """A peer's process is stopped."""
    name = _peer(stage, chance)
    stage.peers[name].signal(signal.SIGSTOP)
    return Injected({Name(Kind.SILENT, name, "")}, name, lambda: stage.peers[name].signal(signal.SIGCONT))


def _changed(stage: Stage, way: tuple[str, str], kind: str, path: Path, what: str) -> Injected:
    sender, receiver = stage.peers[way[0]].host, stage.peers[way[1]].host
    stage.lab.reshape(sender, receiver, path)
    return Injected({Name(kind, *way)}, f"{way[0]} to {way[1]}: {what}", lambda: stage.lab.reshape(sender, receiver))


def slow_way(stage: Stage, chance: Random) -> Injected:
    """One direction between neighbours carries so little that an op takes several times as long as a step."""
    way = _way(stage, chance)
    world = len(stage.ring)
    op_bytes = 2 / world * stage.plan.count * 4  # each pair exchanges its parts: these ops are small
    usual_s = stage.plan.step_ms / 1e3 + stage.plan.op_s
    seconds = min(1.5, usual_s * chance.choice([3.0, 5.0]) + 0.1)
    rate_mbit = op_bytes * 8e-6 / seconds
    return _changed(stage, way, Kind.SLOW_WAY, Path(rate_mbit=rate_mbit), f"{rate_mbit:.1f} Mbit/s")


def lossy(stage: Stage, chance: Random) -> Injected:
    """One direction between neighbours loses packets."""
    loss = chance.choice([0.06, 0.1, 0.2])
    return _changed(stage, _way(stage, chance), Kind.LOSSY, Path(loss=loss), f"{loss:.0%}")


def black_hole(stage: Stage, chance: Random) -> Injected:
    """One direction between neighbours swallows large packets."""
    way = _way(stage, chance)
    sender, receiver = stage.peers[way[0]].host, stage.peers[way[1]].host
    stage.lab.limit(sender, receiver, chance.choice([600, 1000, 1400]))
    return Injected({Name(Kind.MTU, *way)}, f"{way[0]} to {way[1]}", lambda: stage.lab.limit(sender, receiver, 0))


FAULTS: dict[str, Fault] = {
    "slow steps": slow_steps,
    "throttled": throttled,
    "frozen": frozen,
    "slow way": slow_way,
    "lossy": lossy,
    "black hole": black_hole,
}
