"""Data parallelism: gradients of every step, averaged during the backward pass.

Modules:

    ddp        `DDP`
    gradients  gradients in buckets, their averages, weights and communication hooks
    refusals   refusing a step on all peers: the exchange, the reasons and their texts
    torch_ddp  `torch_comm_hook`: torch's own class, averaging over pccl's peers
"""

from pccl.training.ddp.ddp import DDP, Step
from pccl.training.ddp.torch_ddp import torch_comm_hook

__all__ = ["DDP", "Step", "torch_comm_hook"]
