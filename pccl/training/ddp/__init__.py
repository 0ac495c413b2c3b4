"""Data parallelism: every step's gradients, averaged during the backward pass.

Modules:

    ddp                `DDP`
    connected          the DDPs of `DDP.connect`, which leave the run in order as the program ends
    module_face        what programs do with torch's DistributedDataParallel as if it were the module
    gradient_averages  buckets that are launched as they become full, and settled once all have landed
    gradient_buckets   gradients in flat buffers, and whether they are left alone in flight
    gradient_weights   averages in which peers count by weights
    comm_hooks         what else can be done to a bucket of gradients than averaging it as it is
    grad_scalers       what is asked of torch's GradScalers
    objections         why a step is refused, and what each peer is told then
    fresh_state        the state that an optimizer makes in its first step, made before it
    torch_ddp          `torch_comm_hook`: torch's own class, averaging over pccl's peers
"""

from pccl.training.ddp.ddp import DDP, Step
from pccl.training.ddp.torch_ddp import torch_comm_hook

__all__ = ["DDP", "Step", "torch_comm_hook"]
