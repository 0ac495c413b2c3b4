"""Training across sites, while peers join and leave, with a few lines added to an ordinary loop.

    diloco       `DiLoCo`, `AsyncDiLoCo`, `DiLoCoOptimizer`: many local steps, then one average
    ddp          `DDP`: gradients averaged in every step, during the backward pass; `torch_comm_hook`
    spsa         `SPSA`: forward passes only, one byte from each peer in each step
    compression  `TopK`, `PowerSGD` and others, for `DiLoCo(compression=...)`
    data         `ElasticSampler`: each sample of an epoch once, despite churn; `RandomStreams`
    step, state, group    shared foundations: a step on all peers, the replicated state, the membership

The package never imports torch, because a program that passes a torch module has already imported it. Use each object
from one thread only. All peers of a group make the same calls in the same order.
"""

from pccl.training.data.elastic_sampler import ElasticSampler
from pccl.training.data.stream import RandomStreams
from pccl.training.ddp.ddp import DDP, Step
from pccl.training.ddp.torch_ddp import torch_comm_hook
from pccl.training.diloco.async_diloco import AsyncDiLoCo
from pccl.training.diloco.diloco import DiLoCo, OuterStep
from pccl.training.diloco.outer import OuterAdam, OuterMomentum, OuterNesterov, OuterOptimizer
from pccl.training.diloco.torch_optimizer import DiLoCoOptimizer
from pccl.training.group.site import Site
from pccl.training.spsa.spsa import SPSA, SPSAOptions, SPSAStep
from pccl.training.spsa.step_log import LogError
from pccl.training.state.checkpoint import latest_checkpoint
from pccl.training.state.digests import DivergenceError
from pccl.training.state.replica import local_shard
from pccl.training.state.replicated_state import Stateful
from pccl.training.state.tensor_file import CheckpointError

__all__ = [
    "DDP",
    "SPSA",
    "AsyncDiLoCo",
    "CheckpointError",
    "DiLoCo",
    "DiLoCoOptimizer",
    "DivergenceError",
    "ElasticSampler",
    "LogError",
    "OuterAdam",
    "OuterMomentum",
    "OuterNesterov",
    "OuterOptimizer",
    "OuterStep",
    "RandomStreams",
    "SPSAOptions",
    "SPSAStep",
    "Site",
    "Stateful",
    "Step",
    "latest_checkpoint",
    "local_shard",
    "torch_comm_hook",
]
