"""Data parallelism: gradients of every step, averaged during the backward pass."""

from pccl.training.ddp.ddp import DDP, Step
from pccl.training.ddp.torch_ddp import torch_comm_hook

__all__ = ["DDP", "Step", "torch_comm_hook"]
