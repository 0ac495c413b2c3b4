"""Fault-tolerant peer-to-peer collective communication.

Groups of machines on different sites train one model over ordinary internet links while members come and go. Start with
`Communicator` and `MasterNode`; `examples/` shows the usual loops, and `docs/` has a tutorial and the reference.

Names from the reference library that are missing from `__all__` can still be imported; see docs/compatibility.md.
"""

# Imported first because it explains a missing extension.
import pccl.runtime.extension  # noqa: F401

# isort: split
from importlib import import_module as _import_module

from pccl._options import CommunicatorOptions
from pccl._version import __version__
from pccl.async_communicator import AsyncCommunicator
from pccl.communicator import Communicator
from pccl.errors import (
    MasterLostError,
    MismatchError,
    OpTimeoutError,
    OutcomeUnknownError,
    PCCLError,
    PeerLostError,
    TooFewPeersError,
    UsageError,
)
from pccl.handle import AsyncCollectiveHandle, AsyncReduceHandle
from pccl.logs import configure as _configure_logging
from pccl.master_node import MasterNode
from pccl.runtime.threads.process import warn_of_misspelled as _warn_of_misspelled
from pccl.shared_state import SharedState
from pccl.types import (
    CollectiveInfo,
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceInfo,
    ReduceOp,
    Result,
    SharedStateSyncStrategy,
)

# Rarely used names, and names that scripts for the reference library use (docs/compatibility.md lists those).
# isort: split
from pccl._collectives import ReduceOpDescriptor as ReduceOpDescriptor  # isort: skip
from pccl.errors import InternalError as InternalError  # isort: skip
from pccl.errors import StateUnavailableError as StateUnavailableError  # isort: skip
from pccl.shared_state import TensorInfo as TensorInfo  # isort: skip
from pccl.types import Attribute as Attribute  # isort: skip
from pccl.types import ErrorFeedback as ErrorFeedback  # isort: skip
from pccl.types import DistributionHint as DistributionHint  # isort: skip
from pccl.types import Membership as Membership  # isort: skip
from pccl.types import ReduceDescriptor as ReduceDescriptor  # isort: skip
from pccl.types import ReduceOperandDescriptor as ReduceOperandDescriptor  # isort: skip
from pccl.types import SharedStateSyncInfo as SharedStateSyncInfo  # isort: skip

__all__ = [
    "AsyncCollectiveHandle",
    "AsyncCommunicator",
    "AsyncReduceHandle",
    "CollectiveInfo",
    "Communicator",
    "CommunicatorOptions",
    "DataType",
    "MasterLostError",
    "MasterNode",
    "MismatchError",
    "OpTimeoutError",
    "OutcomeUnknownError",
    "PCCLError",
    "PeerLostError",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "ReduceAlgorithm",
    "ReduceInfo",
    "ReduceOp",
    "Result",
    "SharedState",
    "SharedStateSyncStrategy",
    "TooFewPeersError",
    "UsageError",
    "__version__",
]
_configure_logging()
_warn_of_misspelled()


def __getattr__(name: str) -> object:
    """Import `pccl.training` when a program first uses it."""
    if name == "training":
        return _import_module("pccl.training")
    raise AttributeError(f"module 'pccl' has no attribute {name!r}")
