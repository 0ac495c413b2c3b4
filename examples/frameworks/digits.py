"""The parts that the trainer examples share: scikit-learn's handwritten digits, a small network, this peer's index."""

from __future__ import annotations

import os
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pccl.training import OuterStep

PEERS = int(os.environ.get("PCCL_LAUNCH_COUNT", 1))
INDEX = int(os.environ.get("PCCL_LAUNCH_INDEX", 0))
"""Which part of the data is this peer's."""
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(_name, None)  # otherwise trainers form one torch.distributed world from all peers

INNER_STEPS = 25
STEPS = 8 * INNER_STEPS

torch.set_num_threads(1)  # several peers share this machine's cores
_digits = load_digits()
_images = torch.from_numpy(_digits.data).float() / 16
_labels = torch.from_numpy(_digits.target).long()
_is_held_out = torch.arange(len(_labels)) % 5 == 0

own_part = TensorDataset(_images[~_is_held_out][INDEX % PEERS :: PEERS], _labels[~_is_held_out][INDEX % PEERS :: PEERS])


def show(step: OuterStep) -> None:
    if INDEX == 0:
        print(f"outer step {step.revision}: {step.world_size} peers, {step.tx_bytes / 1e3:.0f} kB sent", flush=True)


def batches() -> Any:
    return DataLoader(own_part, batch_size=32, shuffle=True, drop_last=True)


def network() -> Any:
    """Return a network with the same initial weights on every peer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def loss_of(logits: Any, labels: Any) -> Any:
    return functional.cross_entropy(logits, labels)


@torch.no_grad()  # type: ignore[untyped-decorator]
def accuracy(model: Any) -> float:
    """Return the accuracy on held-out digits."""
    return float((model(_images[_is_held_out]).argmax(1) == _labels[_is_held_out]).float().mean())
