"""The body of a rank: it makes the process group, runs a program, and saves what that returned. See `ranks`."""

import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # what DDP and DTensor import when they are first used
import torch.distributed as dist

import pccl.torch  # noqa: F401  (registers the backend)
import tests.torch.use.programs  # noqa: F401  (what it imports is not imported by each rank)


def main() -> None:
    """The body of a rank, in a process that was forked for it."""
    program, backend, rank, world_size, folder = sys.argv[1:]
    module, function = program.split(":")
    torch.set_num_threads(1)
    torch.manual_seed(int(rank))
    os.environ["RANKS_FOLDER"] = folder
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/{backend}-{world_size}-rendezvous",
            rank=int(rank),
            world_size=int(world_size),
            timeout=timedelta(seconds=60),
        )
        given = getattr(importlib.import_module(module), function)()
        torch.save(given, Path(folder) / f"{backend}-{rank}.pt")
        if backend == "gloo":  # its destructor may run on one of its own threads, join that thread, and abort
            dist.barrier()
            os._exit(0)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()  # in one piece, before the interpreter's end can add to it
        sys.exit(1)
