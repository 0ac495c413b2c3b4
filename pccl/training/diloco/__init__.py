"""DiLoCo: many local steps, then one average of what they changed.

Modules:

    diloco            `DiLoCo`: the average is waited for
    async_diloco      `AsyncDiLoCo`: the average is made during the next local steps
    torch_optimizer   `DiLoCoOptimizer`: either as a torch optimizer, for trainers that have loops of their own
    outer_loop        what both have in common: the outer state, joining, checkpoints; `OuterStep`
    outer_optimizer   `OuterNesterov`: SGD with Nesterov momentum, the same bits on every machine
    weighted_average  averages by weights, such as tokens
    pace              how many inner steps a peer makes, by its speed
"""

from pccl.training.diloco.async_diloco import AsyncDiLoCo
from pccl.training.diloco.diloco import DiLoCo, OuterNesterov, OuterStep
from pccl.training.diloco.torch_optimizer import DiLoCoOptimizer

__all__ = ["AsyncDiLoCo", "DiLoCo", "DiLoCoOptimizer", "OuterNesterov", "OuterStep"]
