"""Ranks of torch.distributed on hosts of their own, the first one with the store and knows it as localhost, as
Kubeflow's PyTorchJob sets MASTER_ADDR."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.support.streams import TIMEOUT_S, Lines
from tests.wan.lab import Lab
from tests.wan.shape import Link

pytestmark = pytest.mark.slow

RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("pccl", timeout=timedelta(seconds=60))
rank = dist.get_rank()
values = torch.ones(1000)
dist.all_reduce(values)
part = dist.new_group([0, 1, 2])
dist.barrier(part)
print("sum", int(values[0]), flush=True)
sys.stdin.readline()
try:
    dist.all_reduce(values)
except RuntimeError as error:
    print("lost", *error.lost, flush=True)
dist.destroy_process_group()
"""


def test_store_at_localhost() -> None:
    pytest.importorskip("torch")
    with Lab(2, Link(delay_ms=1.0)) as lab, ExitStack() as pipes:
        first, second = lab.hosts
        reader, writer = (pipes.enter_context(open(end, mode)) for end, mode in zip(os.pipe(), "rw", strict=True))
        ranks: list[subprocess.Popen[str]] = []
        said: list[Lines] = []
        for rank, host in enumerate([first, first, second]):
            store = "localhost" if host is first else first.address
            where = {"MASTER_ADDR": store, "MASTER_PORT": "29500", "RANK": str(rank), "WORLD_SIZE": "3"}
            environment = {**os.environ, **where, "PCCL_PEER_TIMEOUT": "1"}
            command = [sys.executable, "-P", "-c", RANK]
            process = host.popen(command, stdin=reader, stdout=subprocess.PIPE, text=True, env=environment)
            assert process.stdout is not None
            ranks.append(process)
            said.append(Lines(pipes.enter_context(process.stdout)))
        for lines in said:
            lines.expect("sum 3")
        ranks[0].kill()  # it has the master; the standbys are on both hosts
        writer.close()
        for process, lines in zip(ranks[1:], said[1:], strict=True):
            lines.expect("lost 0")
            assert process.wait(TIMEOUT_S) == 0
