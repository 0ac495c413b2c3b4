"""Training across sites and through churn, as a few lines around one's own loop.

The training classes, one a folder:

    diloco       `DiLoCo`, `AsyncDiLoCo`, `DiLoCoOptimizer`: many local steps, then one average
    ddp          `DDP`: every step's gradients, averaged during the backward pass; `torch_comm_hook`
    spsa         `SPSA`: forward passes alone, one byte from each peer and step
    data         `ElasticSampler`: each sample of an epoch once, whoever comes and goes; `RandomStreams`

They stand on, from the top to the ground:

    consistency  what all peers have in common, how newcomers get it, and how peers find out that it differs
    state        the state as canonical bytes and as files: checkpoints
    group        who is there: joining, admitting newcomers, exchanges that survive losses; `Site`
    tensors      a model as one flat vector, the tensors in use, a rank's shards

All of it uses the public API of pccl alone, `pccl.signs`, `pccl._floating_point` and `pccl._integers`. torch is never
imported here: a program that hands over a torch module has imported it. Objects are for one thread; all peers of a
group make the same calls in the same order.
"""

from pccl.training.consistency.digests import DivergenceError
from pccl.training.data import ElasticSampler, RandomStreams
from pccl.training.ddp import DDP, Step, torch_comm_hook
from pccl.training.diloco import AsyncDiLoCo, DiLoCo, DiLoCoOptimizer, OuterNesterov, OuterStep
from pccl.training.group.site import Site
from pccl.training.spsa import SPSA, LogError, SPSAOptions, SPSAStep
from pccl.training.state.checkpoint import Stateful, latest_checkpoint
from pccl.training.state.tensor_file import CheckpointError
from pccl.training.tensors.shards import local_shard

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
