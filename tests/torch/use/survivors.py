"""Programs of `tests.torch.use.ranks` that train on after a rank was killed in the middle of a backward pass."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.torch.use.programs import sharded, train, weights

SAVED_STEP = 2
KILLED_STEP = 4
END_STEP = 7
VICTIM = 2


def folder() -> Path:
    return Path(os.environ["RANKS_FOLDER"])


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder() / f"step-{dist.get_backend()}")


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    saved = {"model": state, "optimizer": optimizer_state}
    dcp.load(saved, checkpoint_id=folder() / f"step-{dist.get_backend()}")
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def first_part() -> dict[str, Any]:
    """The steps up to the checkpoint."""
    model, optimizer = new_model()
    train(model, optimizer, range(SAVED_STEP))
    save(model, optimizer)
    return weights(model)


def second_part() -> dict[str, Any]:
    """The steps from the checkpoint to the end, by however many ranks there are."""
    model, optimizer = new_model()
    load(model, optimizer)
    train(model, optimizer, range(SAVED_STEP, END_STEP))
    return weights(model)


def killed() -> dict[str, Any]:
    """Three ranks train, and one dies in a backward pass; the others form a group of two, load and continue."""
    rank = dist.get_rank()
    first_part()
    model, optimizer = new_model()
    load(model, optimizer)
    train(model, optimizer, range(SAVED_STEP, KILLED_STEP))
    if rank == VICTIM:
        assert isinstance(model, nn.Sequential)
        model[2].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    try:
        train(model, optimizer, range(KILLED_STEP, END_STEP))
    except RuntimeError as error:
        failure = error
    else:
        raise AssertionError("a rank was lost without an error")
    seconds = time.monotonic() - began
    lost = getattr(failure, "lost", ())
    dist.destroy_process_group()
    survivors = [each for each in range(3) if each not in lost]
    dist.init_process_group(
        "pccl", init_method=f"file://{folder()}/again", rank=survivors.index(rank), world_size=len(survivors)
    )
    return {"error": str(failure), "lost": lost, "seconds": seconds, "weights": second_part()}
