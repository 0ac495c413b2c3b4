"""DiLoCo: many local steps, then one average of what they changed."""

from pccl.training.diloco.async_diloco import AsyncDiLoCo
from pccl.training.diloco.diloco import DiLoCo, OuterNesterov, OuterStep
from pccl.training.diloco.torch_optimizer import DiLoCoOptimizer

__all__ = ["AsyncDiLoCo", "DiLoCo", "DiLoCoOptimizer", "OuterNesterov", "OuterStep"]
