"""FSDP2 that survives the loss of a rank: torch.distributed on "pccl", a checkpoint, and a smaller group.

    python examples/fsdp_survivors.py --ranks 3 --kill 1 --at 12

Each rank holds a shard of a small GPT (`fully_shard`), and every `--every` steps all ranks save it with
torch.distributed.checkpoint. Rank `--kill` is killed with SIGKILL in step `--at`; you can also kill one by hand. Then
the collective in flight fails on all others with an error that names the lost rank. They form a group without it, load
the last checkpoint, which is resharded for fewer ranks, and continue.

Any rank may be lost, even the first: the ranks meet through files in `--folder`, which several hosts must share. With
torch 2.15, `torch.distributed._reconfigure` can be used instead of leaving the group and creating a new one.
"""

import argparse
import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from common.gpt import BATCH, CONTEXT, GPT, LEARNING_RATE
from common.text import Corpus
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pccl.torch import BackendError


def meet(members: list[int], number: int, options: argparse.Namespace) -> None:
    """Create the default group from these ranks. All of them call it."""
    file = options.folder / f"group-{'-'.join(map(str, members))}"
    dist.init_process_group(
        "pccl",
        init_method=f"file://{file.absolute()}",
        rank=members.index(number),
        world_size=len(members),
        timeout=timedelta(seconds=60),
    )


def build() -> tuple[Any, torch.optim.Optimizer]:
    """Return the model, sharded over all ranks of the default group, and its optimizer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def save(model: Any, optimizer: torch.optim.Optimizer, step: int, options: argparse.Namespace) -> None:
    """Save each rank's part; the step counts as saved when all ranks have saved it."""
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=options.folder / f"step-{step}")


def load(model: Any, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> int:
    """Load the newest complete checkpoint, if there is one, and return its step, or 0."""
    saved = [int(path.parent.name[5:]) for path in options.folder.glob("step-*/.metadata")]
    newest = [max(saved, default=0)]
    dist.broadcast_object_list(newest)  # as rank 0 sees the folder
    if newest[0]:
        state, optimizer_state = get_state_dict(model, optimizer)
        found = {"model": state, "optimizer": optimizer_state}
        dcp.load(found, checkpoint_id=options.folder / f"step-{newest[0]}")
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return newest[0]


def train(number: int, options: argparse.Namespace) -> None:
    """Train in the default group until the last step. Raise BackendError when a rank is lost."""
    model, optimizer = build()
    corpus = Corpus(shards=options.ranks)
    for step in range(load(model, optimizer, options) + 1, options.steps + 1):
        if (number, step) == (options.kill, options.at):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model.loss(corpus.batch(number, step, BATCH, CONTEXT + 1))
        loss.backward()
        optimizer.step()
        if step % options.every == 0:
            save(model, optimizer, step, options)
        if dist.get_rank() == 0:
            print(f"step {step:3}  {dist.get_world_size()} ranks  loss {float(loss.detach()):.3f}", flush=True)


def run_rank(number: int, options: argparse.Namespace) -> None:
    """Run one process, from its first group to the end of its last."""
    torch.set_num_threads(1)
    members = list(range(options.ranks))
    while True:
        meet(members, number, options)
        try:
            train(number, options)
            dist.destroy_process_group()
            return
        except BackendError as error:
            print(f"rank {number}: {error}", flush=True)
            if not error.lost:
                raise
            members = [member for rank, member in enumerate(members) if rank not in error.lost]
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a small GPT with FSDP2, and continues after losing a rank.")
    parser.add_argument("--ranks", type=int, default=3, help="initial number of processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints (default: %(default)s)")
    parser.add_argument("--kill", type=int, help="the rank that is killed with SIGKILL")
    parser.add_argument("--at", type=int, default=12, help="its last step (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        context = processes.spawn(run_rank, (options,), nprocs=options.ranks, join=False)
        assert context is not None
        for process in context.processes:
            process.join()
        ended = [process.exitcode for process in context.processes]
        print(f"{ended.count(0)} of {options.ranks} processes trained to the end")
        raise SystemExit(0 if all(code in (0, -signal.SIGKILL) for code in ended) and 0 in ended else 1)
