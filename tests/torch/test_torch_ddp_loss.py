"""A rank that is lost while DDP's reducer, which is C++, waits for a future of ours."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.support.cluster import WAIT_S

pytest.importorskip("torch")

PROGRAM = """
    import threading
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from pccl.torch import ProcessGroupPCCL
    from tests.torch.ranks import worlds

    store, limit, made = dist.HashStore(), timedelta(seconds=30), threading.Barrier(2)

    def rank_main(rank):
        dist.init_process_group("pccl", store=store, rank=rank, world_size=2, timeout=limit)
        model = DistributedDataParallel(torch.nn.Linear(8, 1))
        loss = model(torch.ones(2, 8)).sum()
        made.wait()
        if rank == 1:
            threading.Timer(0.2, dist.distributed_c10d._get_default_group().abort).start()
            return
        try:
            loss.backward()  # the other rank never comes
        except RuntimeError as error:
            print("raised:", "it was aborted there" in str(error))

    with worlds():
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
"""


def test_a_loss_in_the_backward_pass_of_ddp_raises() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    ended = subprocess.run(command, timeout=WAIT_S, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "raised: True\n"), ended.stderr
