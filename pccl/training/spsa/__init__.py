"""SPSA: forward passes alone, one byte from each peer and step."""

from pccl.training.spsa.spsa import SPSA, SPSAOptions, SPSAStep
from pccl.training.spsa.step_log import LogError

__all__ = ["SPSA", "LogError", "SPSAOptions", "SPSAStep"]
