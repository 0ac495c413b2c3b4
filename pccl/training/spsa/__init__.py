"""SPSA: forward passes alone, one byte from each peer and step.

Modules:

    spsa      `SPSA`, the exchange of gradient bytes
    grid      parameters that can be moved along random signs, and back, exactly
    step_log  the log that leads from the first weights to the last; `LogError`
"""

from pccl.training.spsa.spsa import SPSA, SPSAOptions, SPSAStep
from pccl.training.spsa.step_log import LogError

__all__ = ["SPSA", "LogError", "SPSAOptions", "SPSAStep"]
