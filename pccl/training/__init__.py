"""Training across sites and through churn, as a few lines around an ordinary loop.

    diloco       `DiLoCo`, `AsyncDiLoCo`, `DiLoCoOptimizer`: many local steps, then one average
    ddp          `DDP`: gradients of every step, averaged during the backward pass; `torch_comm_hook`
    spsa         `SPSA`: forward passes alone, one byte from each peer and step
    data         `ElasticSampler`: each sample of an epoch once, through churn; `RandomStreams`

They are built on:

    step         a step of any of these classes on all peers: begin, averages, land, commit, admission
    state        the replicated state, its comparison between peers, and its files: checkpoints
    group        membership: joining, admitting newcomers, collectives that survive losses; `Site`

The package uses pccl's public API, `pccl.signs`, `pccl._floating_point` and `pccl._integers`. It never imports torch: a
program that passes a torch module has imported it. Objects are for one thread; all peers of a group make the same calls
in the same order.
"""

from pccl.training.data import ElasticSampler, RandomStreams
from pccl.training.ddp import DDP, Step, torch_comm_hook
from pccl.training.diloco import AsyncDiLoCo, DiLoCo, DiLoCoOptimizer, OuterNesterov, OuterStep
from pccl.training.group.site import Site
from pccl.training.spsa import SPSA, LogError, SPSAOptions, SPSAStep
from pccl.training.state.checkpoint import Stateful, latest_checkpoint
from pccl.training.state.digests import DivergenceError
from pccl.training.state.replica import local_shard
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
    "OuterNesterov",
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
