"""Fault-tolerant peer-to-peer collective communication.

Groups of machines on different sites train one model over ordinary internet links while members come and go. Start with
`Communicator` and `MasterNode`; `examples/` shows the usual loops, and `docs/` has a tutorial and the reference.
"""

# First, so that where nothing is installed its sentence is what one reads.
import pccl.runtime.extension  # noqa: F401

# isort: split
from pccl._collectives import AsyncCollectiveHandle
from pccl._reduce import AsyncReduceHandle, ReduceOpDescriptor
from pccl._version import __version__
from pccl.async_communicator import AsyncCommunicator
from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.logs import configure as _configure_logging
from pccl.master_node import MasterNode
from pccl.shared_state import SharedState, TensorInfo
from pccl.types import (
    Attribute,
    CollectiveInfo,
    DataType,
    DistributionHint,
    Membership,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
    Result,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)

__all__ = [
    "AsyncCollectiveHandle",
    "AsyncCommunicator",
    "AsyncReduceHandle",
    "Attribute",
    "CollectiveInfo",
    "Communicator",
    "DataType",
    "DistributionHint",
    "MasterNode",
    "Membership",
    "PCCLError",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "ReduceAlgorithm",
    "ReduceDescriptor",
    "ReduceInfo",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "Result",
    "SharedState",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "TensorInfo",
    "__version__",
]

_configure_logging()
