"""The vocabulary of the public API: enumerations and small value types.

Nothing here does I/O. The integer values of `DataType`, `ReduceOp` and `QuantizationAlgorithm` are those of the
engine's header (`native/include/pccl_native.h`); a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class Result(IntEnum):
    """What became of a call. Every `PCCLError` carries one."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    """The communicator is not connected, was closed, or lives in a forked child."""
    INTERNAL_ERROR = 2
    """A bug of pccl itself."""
    INVALID_ARGUMENT = 3
    """A wrong argument, or one that differs from the other peers' for the same op."""
    INVALID_USAGE = 4
    """A call that cannot succeed where it was made, such as joint calls that can never meet."""
    TOO_FEW_PEERS = 5
    """Alone in the peer group."""
    MASTER_CONNECTION_FAILED = 6
    """The master cannot be reached, refused us, evicted us, or went away."""
    RANK_CONNECTION_FAILED = 7
    """A link to another peer could not be made."""
    RANK_CONNECTION_LOST = 8
    """A peer was lost and the op was aborted on every survivor; `send` is as it was."""
    NO_SHARED_STATE_AVAILABLE = 9
    """No peer can provide the shared state."""
    PENDING_ASYNC_OPS = 10
    """The call needs this peer's own ops to have ended."""
    UPDATE_TOPOLOGY_FAILED = 11
    TOPOLOGY_OPTIMIZATION_FAILED = 12
    TIMEOUT = 13
    """A `timeout=` given by the caller has passed."""


class Attribute(Enum):
    """What `Communicator.get_attribute` can tell, all of the installed view."""

    GLOBAL_WORLD_SIZE = "global_world_size"
    """Accepted peers of all groups."""
    LOCAL_WORLD_SIZE = "local_world_size"
    """Accepted peers of this communicator's own group."""
    NUM_DISTINCT_PEER_GROUPS = "num_distinct_peer_groups"
    LARGEST_PEER_GROUP_WORLD_SIZE = "largest_peer_group_world_size"


class ReduceOp(IntEnum):
    SUM = 0
    AVG = 1
    """The sum divided by the world size; for integers divided with rounding to minus infinity, as NumPy's `//`."""
    PROD = 2
    MAX = 3
    MIN = 4


class DistributionHint(Enum):
    """What a caller knows about its values. Accepted for compatibility; quantization adapts by block."""

    NONE = "none"
    NORMAL = "normal"
    UNIFORM = "uniform"


class QuantizationAlgorithm(IntEnum):
    NONE = 0
    MIN_MAX = 1
    ZERO_POINT_SCALE = 2


class SharedStateSyncStrategy(Enum):
    ENFORCE_POPULAR = "enforce_popular"
    """Votes; sends if elected, is overwritten if not."""
    RECEIVE_ONLY = "receive_only"
    """Never votes, never sends."""
    SEND_ONLY = "send_only"
    """Votes and is never overwritten: were others elected, the call fails on all peers of the group."""


class DataType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT = 10
    DOUBLE = 11

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]

    @property
    def is_float(self) -> bool:
        return self >= DataType.FLOAT16

    @classmethod
    def from_numpy_dtype(cls, dtype: Any) -> DataType:
        """The type of a NumPy dtype. `ml_dtypes.bfloat16` is BFLOAT16. ValueError for any other kind."""
        import numpy as np

        dtype = np.dtype(dtype)
        if not dtype.isnative:
            raise ValueError(
                f"dtype {dtype.str!r} is byte-swapped: convert it with .astype({dtype.newbyteorder('=')!s})"
            )
        found = _FROM_NUMPY_NAME.get(dtype.name)
        if found is None:
            raise ValueError(f"dtype {dtype} cannot be reduced; use one of {', '.join(_FROM_NUMPY_NAME)}")
        return found

    def to_numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype; for BFLOAT16 that of `ml_dtypes` where it is installed, else TypeError."""
        import numpy as np

        if self is DataType.BFLOAT16:
            try:
                import ml_dtypes
            except ImportError:
                raise TypeError("NumPy has no bfloat16 of its own: install ml_dtypes or use torch") from None
            bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return bfloat16
        return np.dtype(_NUMPY_NAMES[self])

    @classmethod
    def from_torch_dtype(cls, dtype: Any) -> DataType:
        """The type of a torch dtype. ValueError where there is none."""
        name = str(dtype).removeprefix("torch.")
        found = _FROM_NUMPY_NAME.get(name)
        if found is None:
            raise ValueError(f"{dtype} cannot be reduced; use one of {', '.join(_FROM_NUMPY_NAME)}")
        return found

    def to_torch_dtype(self) -> Any:
        import torch

        return getattr(torch, _NUMPY_NAMES[self])


_NUMPY_NAMES = {
    DataType.UINT8: "uint8",
    DataType.INT8: "int8",
    DataType.UINT16: "uint16",
    DataType.INT16: "int16",
    DataType.UINT32: "uint32",
    DataType.INT32: "int32",
    DataType.UINT64: "uint64",
    DataType.INT64: "int64",
    DataType.FLOAT16: "float16",
    DataType.BFLOAT16: "bfloat16",
    DataType.FLOAT: "float32",
    DataType.DOUBLE: "float64",
}
_FROM_NUMPY_NAME = {name: dtype for dtype, name in _NUMPY_NAMES.items()}
_ITEM_BYTES = (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ReduceOperandDescriptor:
    """Type and expected distribution of an op's elements. The dtype must be that of the arrays."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """How values travel. `block_size` elements share one scale: smaller blocks follow outliers better and cost
    8 bytes each on the wire. Only float tensors can be quantized. All peers of an op must give the same."""

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX
    block_size: int = 256

    def __post_init__(self) -> None:
        if self.algorithm is QuantizationAlgorithm.NONE:
            return
        allowed = (DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16)
        if self.quantized_datatype not in allowed:
            names = ", ".join(d.name for d in allowed)
            raise ValueError(f"quantized_datatype {self.quantized_datatype!r}: must be one of {names}")
        if not 8 <= self.block_size <= 65536:
            raise ValueError(f"block_size {self.block_size}: must be from 8 to 65536 elements")


@dataclass(frozen=True, slots=True)
class ReduceDescriptor:
    """An op without its buffers. `count` is the number of elements."""

    count: int
    op: ReduceOp
    tag: int = 0
    operand_descriptor: ReduceOperandDescriptor | None = None
    quantization_options: QuantizationOptions = field(
        default_factory=lambda: QuantizationOptions(algorithm=QuantizationAlgorithm.NONE)
    )


@dataclass(frozen=True, slots=True)
class ReduceInfo:
    """What a committed op did here. Bytes are payload, without frame headers."""

    local_world_size: int
    """Peers whose contribution is in the result."""
    tx_bytes: int
    rx_bytes: int

    @property
    def world_size(self) -> int:
        return self.local_world_size


@dataclass(frozen=True, slots=True)
class SharedStateSyncInfo:
    """What a sync moved here: payload bytes of tensor contents, without digests and headers."""

    tx_bytes: int
    rx_bytes: int
    revision: int = 0
    """The revision that every peer of the group now has."""
