"""DiLoCo: many local steps, then one average of what they changed.

Modules:

    diloco            `DiLoCo`, the outer state and optimizer, and what both forms have in common
    async_diloco      `AsyncDiLoCo`: the average is made during the next local steps
    torch_optimizer   `DiLoCoOptimizer`: either as a torch optimizer, for trainers with loops of their own
    weighted_average  averages by weights, such as tokens
"""

from pccl.training.diloco.async_diloco import AsyncDiLoCo
from pccl.training.diloco.diloco import DiLoCo, OuterNesterov, OuterStep
from pccl.training.diloco.torch_optimizer import DiLoCoOptimizer

__all__ = ["AsyncDiLoCo", "DiLoCo", "DiLoCoOptimizer", "OuterNesterov", "OuterStep"]
