"""Training across sites and through churn, as a few lines around one's own loop.

    weighted       averages by weights, such as tokens
    pace           how many inner steps a peer makes, by its speed
    outer          the outer optimizer: SGD with Nesterov momentum, the same bits on every machine
    replica        a model as one flat vector: a torch module, or NumPy arrays
    membership     who is there: joining, admitting newcomers, averaging until it succeeds
    checkpointed   `save` and `load` of all these, of ranks of a site together; it stands on
        checkpoint     one format, in the background, of which the newest are kept
        tensor_file    a file of tensors that is whole or not there
        tensor_tree    a state taken apart into tensors and the rest
        torch_state    the values of a module and an optimizer, in their places
    contract       what all peers have in common, and newcomers get
    consistency    whether they have it: digests compared while they train
    buffers        running statistics and other buffers: averaged, taken from the first peer, or local
    state_codec    the state of any object in canonical bytes, without pickle
    diloco         `DiLoCo`: many local steps, then one average
    async_diloco   `AsyncDiLoCo`: the average is made during the next local steps
    optimizer      `DiLoCoOptimizer`: either as a torch optimizer, for trainers that have loops of their own
    ddp            `DDP`: every step's gradients, averaged during the backward pass; it stands on
        gradient_buckets
                   gradients in flat buffers, and whether they are left alone in flight
        comm_hooks what else can be done to a bucket of gradients than averaging it as it is
        torch_ddp  torch's own class, averaging over pccl's peers
        module_face
                   what programs do with torch's class as if it were the module
        held_tensors
                   what peers have in common of a module and its optimizer
        veto       an exchange in which any peer can refuse a step for all
    followers      objects that are told what becomes of each step, such as an
    elastic_sampler
                   `ElasticSampler`: each sample of an epoch once, whoever comes and goes; it stands on
        permutation    an order that is never stored
        deal           who gets which positions of an endless stream
        sample_ledger  which of them are used, the same on all peers
        sample_log     what a peer has trained on, in a file
    audit          the proof, from such files
    random_streams `RandomStreams`: random numbers by peer and step
    spsa           `SPSA`: forward passes alone, one byte from each peer and step; it stands on
        grid           parameters that can be moved along random signs, and back, exactly
        gradient_byte  a projected gradient in a byte
        seats          numbers that peers keep, and an exchange of bytes under them
        step_log       the log that leads from the first weights to the last
        in_place       a model as flat arrays that are its own memory
    site           a model in shards: a grid of sites and ranks
    shards         this rank's part of a distributed tensor
    torch_arithmetic
                   torch's operations in the default floating-point environment
    relaunch       a collective that is launched again after losses
    report         what a step of any of them returns

All of it uses the public API of pccl alone, `pccl.signs` and `pccl._floating_point`. torch is never imported here: a
program that hands over a torch module has imported it. Objects are for one thread; all peers of a group make the same
calls in the same order.
"""

from pccl.training.async_diloco import AsyncDiLoCo
from pccl.training.checkpoint import Stateful, latest_checkpoint
from pccl.training.consistency import DivergenceError
from pccl.training.ddp import DDP, Step
from pccl.training.diloco import DiLoCo
from pccl.training.elastic_sampler import ElasticSampler
from pccl.training.loop import OuterStep
from pccl.training.optimizer import DiLoCoOptimizer
from pccl.training.outer import OuterNesterov
from pccl.training.random_streams import RandomStreams
from pccl.training.shards import local_shard
from pccl.training.site import Site
from pccl.training.spsa import SPSA, SPSAOptions, SPSAStep
from pccl.training.step_log import LogError
from pccl.training.tensor_file import CheckpointError
from pccl.training.torch_ddp import torch_comm_hook

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
