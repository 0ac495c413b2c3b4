"""A run in a lab: a master that says whom it names, and peers, each on a host of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

from tests.wan.lab import Host, Lab, Link

QUEUE_MS = 100.0
"""What the queue in front of a slow link holds, as most do."""
UNSHAPED_MBIT = 150.0
"""About what a way carries that has no limit, where all run on two processors."""


class Name(NamedTuple):
    """A finding: its kind, the peer, and the receiver or ''."""

    kind: str
    peer: str
    to: str


@dataclass(frozen=True)
class Plan:
    """The run."""

    peers: int
    delay_ms: float
    rate_mbit: float | None
    count: int
    """Number of float32 elements that each step reduces."""
    step_ms: float
    habit: str = "steady"
    """One of `peer.HABITS`."""

    @classmethod
    def draw(cls, chance: Random) -> Plan:
        return cls(
            chance.randint(2, 5),
            chance.choice([0.2, 1.0, 5.0, 15.0]),
            chance.choice([None, 200.0, 500.0]),
            chance.choice([30_000, 60_000, 120_000, 400_000, 1_000_000]),
            chance.choice([20.0, 50.0, 100.0, 200.0]),
        )

    @property
    def op_s(self) -> float:
        """About how long an op takes: two round trips, and what each peer sends."""
        sent_bytes = 2 * (self.peers - 1) / self.peers * self.count * 4
        return 4 * self.delay_ms / 1e3 + sent_bytes * 8e-6 / (self.rate_mbit or UNSHAPED_MBIT)


class Peer:
    """The process of a peer."""

    def __init__(self, host: Host, arguments: list[str]) -> None:
        self.host = host
        self.process = host.popen(
            _command("peer", arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )

    def set_factor(self, factor: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{factor}\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Stage:
    """The run, inside `with`."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.lab = Lab(
            plan.peers + 1, Link(plan.delay_ms, plan.rate_mbit, queue_ms=QUEUE_MS), seed=seed, backend="relay"
        )
        self.peers: dict[str, Peer] = {}
        self.ring: list[str] = []
        self.now: set[Name] = set()
        """The present findings."""
        self.begun: list[tuple[float, Name, str]] = []
        """All findings so far, when they began and what they said."""
        self._changed = threading.Condition()

    def __enter__(self) -> Stage:
        self.lab.__enter__()
        try:
            self._begin()
        except BaseException:
            self.lab.__exit__(*sys.exc_info())
            raise
        return self

    def _begin(self) -> None:
        host = self.lab.hosts[0]
        self._master = host.popen(
            _command("master", [f"{host.address}:0"]), stdout=subprocess.PIPE, text=True, env=_environment()
        )
        assert self._master.stdout is not None
        address = json.loads(self._master.stdout.readline())["address"]
        threading.Thread(target=self._read, daemon=True).start()
        for number in range(self.plan.peers):
            name = f"p{number}"
            arguments = [address, name, str(self.plan.count), str(self.plan.step_ms), self.plan.habit]
            self.peers[name] = Peer(self.lab.hosts[number + 1], arguments)

    def _read(self) -> None:
        assert self._master.stdout is not None
        for line in self._master.stdout:
            said: dict[str, Any] = json.loads(line)
            with self._changed:
                found = {Name(*each[:3]): each[3] for each in said["findings"]}
                for name, text in found.items():
                    if name not in self.now:
                        self.begun.append((said["at_s"], name, text))
                self.now, self.ring = set(found), said["ring"]
                self._changed.notify_all()

    def until(self, condition: Callable[[], object], limit_s: float) -> bool:
        """Wait until something holds of the findings or the ring. Return whether it does."""
        with self._changed:
            return bool(self._changed.wait_for(condition, limit_s))

    def explain(self) -> None:
        """Have the master write its evidence to stderr."""
        self._master.send_signal(signal.SIGUSR1)
        time.sleep(0.3)

    def is_whole(self) -> bool:
        return len(self.ring) == self.plan.peers and all(self.ring)

    def settle(self, limit_s: float, quiet_s: float) -> bool:
        """Wait until all peers are in the ring, and nobody has been named for `quiet_s`."""
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0:
            if self.until(lambda: self.is_whole() and not self.now, left_s) and not self.until(
                lambda: not self.is_whole() or self.now, quiet_s
            ):
                return True
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self.peers.values():
            peer.process.kill()
            if peer.process.stdin is not None:
                peer.process.stdin.close()
        self._master.kill()
        self._master.wait()
        self.lab.__exit__(kind, error, trace)


def _command(module: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-P", "-m", f"tests.culprits.{module}", *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
