"""The hour that docs/first-hour.md describes: machines in any order, an outage, a reboot, a newcomer, a resumed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.streams import Lines
from tests.wan.lab import Host, Lab
from tests.wan.shape import Link

pytestmark = pytest.mark.slow

SCRIPT = """\
import sys
import numpy as np
from pccl import Communicator
from pccl.training import DiLoCo
folder, peers_min, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = {"weights": np.zeros(1000, np.float32)}
with Communicator() as comm:
    diloco = DiLoCo(comm, model)
    diloco.load(folder, missing_ok=True)
    diloco.join(peers_min)
    print("starts at", diloco.revision, flush=True)
    while diloco.revision < end:
        model["weights"] += np.random.standard_normal(1000).astype(np.float32)
        step = diloco.outer_step()
        diloco.save(folder, keep=2)
        print("rejoined" if step.rejoined else f"{step.world_size} peers", flush=True)
    print("ends with", diloco.digest(), flush=True)
"""


def follow(lines: Lines, pattern: str) -> str:
    """Wait for a line that matches `pattern` in full, after those that earlier calls have found."""
    lines.seen.clear()
    return lines.expect(pattern).group()


class Machine:
    def __init__(self, host: Host, folder: Path) -> None:
        self._host = host
        self._processes: list[subprocess.Popen[str]] = []
        self.folder = folder / str(host.number)
        self.script = folder / "script.py"

    def start(self, *arguments: str, **environment: str) -> Lines:
        process = self._host.popen(
            ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        return Lines(process.stdout)

    def master(self, *more: str) -> Lines:
        options = ("--listen", "0.0.0.0:48148", "--peer-timeout", "3", *more)
        return self.start("-m", "pccl", "master", *options, PCCL_STATE=str(self.folder / "state"))

    def peer(self, master: str, peers_min: int, end: int = 10**9) -> Lines:
        arguments = str(self.script), str(self.folder / "checkpoints"), str(peers_min), str(end)
        return self.start(*arguments, PCCL_MASTER=master, PCCL_LISTEN="0.0.0.0:48150")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def newest(self) -> int:
        return max(int(path.stem.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("*.safetensors"))


def test_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_MASTER_TIMEOUT", "60")
    with Lab(4, Link(delay_ms=5, rate_mbit=100, loss=0.001)) as lab:
        a, b, c, d = machines = [Machine(host, tmp_path) for host in lab.hosts]
        a.script.write_text(SCRIPT)
        address = f"{lab.hosts[0].address}:48148"

        # Peers before the master.
        on_b, on_c = b.peer(address, 3), c.peer(address, 3)
        follow(on_b, ".*connect has waited 2 s for the master.*")
        follow(on_c, ".*connect has waited 2 s for the master.*")
        follow(a.master(), ".*listening on.*")
        on_a = a.peer(address, 3)
        for lines in (on_a, on_b, on_c):
            follow(lines, "starts at 0")
            follow(lines, "3 peers")

        # A machine whose link is out for longer than the peer timeout comes back by itself.
        lab.hosts[2].down()
        follow(on_c, ".*searching for a master.*")
        follow(on_b, "2 peers")
        lab.hosts[2].up()
        follow(on_c, "rejoined")
        follow(on_c, "3 peers")
        follow(on_b, "3 peers")

        # The machine with the master and a peer reboots.
        a.kill()
        follow(on_b, ".*searching for a master.*")
        follow(a.master(), ".*leads run .* without peers.*")
        follow(on_b, "2 peers")
        on_a = a.peer(address, 3)
        follow(on_a, "3 peers")
        follow(on_b, "3 peers")

        # A machine is added, and another one is killed.
        follow(d.peer(address, 1), "4 peers")
        follow(on_b, "4 peers")
        c.kill()
        follow(on_b, "3 peers")

        # Two machines resume the run, one of them from an older checkpoint.
        for machine in machines:
            machine.kill()
        a.master("--start", "new")
        newest = b.newest()
        assert newest >= c.newest()
        resumed = [machine.peer(address, 2, newest + 5) for machine in (b, c)]
        for lines in resumed:
            follow(lines, f"starts at {newest}")
        ends = {follow(lines, "ends with.*") for lines in resumed}
        assert len(ends) == 1
