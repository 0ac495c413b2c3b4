"""Ranks of torch.distributed for tests: `run` starts them on a backend, and returns what a program gave on each.

A program is a function without arguments in a module of `tests.torch`; it finds the default process group made, and
returns whatever torch.save takes. Ranks are forked off a process that has imported torch (see
`tests.processes.fork_server`), so a run takes little longer than its program.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.processes import fork_server

TIMEOUT_S = 120
POLL_S = 0.01


def start(program: str, backend: str, rank: int, world_size: int, folder: Path, log: int) -> subprocess.Popen[str]:
    """One rank that runs "module:function", and saves what it returns as `folder`/BACKEND-RANK.pt."""
    threads, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"  # no threads before the fork
    try:
        server = fork_server.fork_server("tests.torch.use.rank")
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
    return fork_server.Forked(server, [program, backend, str(rank), str(world_size), str(folder)], stderr=log)


def run(program: str, backend: str, world_size: int, folder: Path, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What `program` returned on each rank; a rank that fails or takes longer fails the test with all ranks' output."""
    with tempfile.TemporaryFile("w+") as log:
        ranks = [start(program, backend, rank, world_size, folder, log.fileno()) for rank in range(world_size)]
        ends_s = time.monotonic() + timeout_s
        try:
            while any(rank.poll() is None for rank in ranks):
                if time.monotonic() > ends_s or any(rank.returncode for rank in ranks):
                    break
                time.sleep(POLL_S)
        finally:
            codes = [rank.poll() for rank in ranks]
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()
        log.seek(0)
        assert codes == [0] * world_size, f"{program} on {backend}: ranks ended with {codes}\n{log.read()}"
    return [torch.load(folder / f"{backend}-{rank}.pt", weights_only=False) for rank in range(world_size)]
