"""Enumerations and small value types of the public API.

The values of `DataType`, `ReduceOp` and `QuantizationAlgorithm` are those of the engine's header.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from pccl._integers import as_int

if TYPE_CHECKING:
    import numpy as np


class Result(IntEnum):
    """The outcome of a call. Every `PCCLError` carries one."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    """The communicator is not connected, was closed, or lives in a forked child."""
    INTERNAL_ERROR = 2
    """A bug of pccl itself, or a device that has failed."""
    INVALID_ARGUMENT = 3
    """A wrong argument, or one that differs from the other peers' for the same op."""
    INVALID_USAGE = 4
    """A call that cannot succeed here, such as group calls in an order that can never match."""
    TOO_FEW_PEERS = 5
    """This peer is alone in its group."""
    MASTER_CONNECTION_FAILED = 6
    """The master cannot be reached, refused or evicted this peer, or went away."""
    RANK_CONNECTION_FAILED = 7
    """A link to another peer could not be made."""
    RANK_CONNECTION_LOST = 8
    """A peer was lost and the op was aborted on every survivor; `send` is as it was."""
    NO_SHARED_STATE_AVAILABLE = 9
    """No peer can provide the shared state."""
    PENDING_ASYNC_OPS = 10
    """The call needs this peer's own ops to have ended."""
    UPDATE_TOPOLOGY_FAILED = 11
    """Never raised, as the next one: kept for scripts that were written for the reference library."""
    TOPOLOGY_OPTIMIZATION_FAILED = 12
    TIMEOUT = 13
    """The caller's `timeout=` has passed. An op is aborted on all peers, or was never begun by this one."""
    OUTCOME_UNKNOWN = 14
    """This peer has cancelled an op that the others may have committed; `send` is as it was."""


class Attribute(Enum):
    """Facts of the installed view that `Communicator.get_attribute` returns."""

    GLOBAL_WORLD_SIZE = "global_world_size"
    """Accepted peers of all groups."""
    LOCAL_WORLD_SIZE = "local_world_size"
    """Accepted peers of this communicator's own group."""
    NUM_DISTINCT_PEER_GROUPS = "num_distinct_peer_groups"
    """Groups that have accepted peers."""
    LARGEST_PEER_GROUP_WORLD_SIZE = "largest_peer_group_world_size"
    """Accepted peers of the largest group."""


class ReduceOp(IntEnum):
    """The function that an all_reduce or reduce_scatter applies to the elements of all peers."""

    SUM = 0
    AVG = 1
    """The sum divided by the world size. Integers are rounded to minus infinity, as by NumPy's `//`."""
    PROD = 2
    MAX = 3
    MIN = 4


class Collective(IntEnum):
    """The kinds of ops, with the engine's numbers for them."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    BROADCAST = 2
    SEND = 3
    BARRIER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    REDUCE = 9


class ReduceAlgorithm(IntEnum):
    """The path of an op's elements in a group of W peers."""

    RING = 0
    """Elements go from neighbour to neighbour in a ring, in 2 (W - 1) steps. Quantized, a value is rounded W times."""
    DIRECT = 1
    """Elements go between all pairs, in 2 steps. Quantized, a value is rounded twice. It needs a link between every two
    peers; groups of up to 16 make them where the network allows it."""


class DistributionHint(Enum):
    """The expected distribution of values. Accepted for scripts of the reference library, and not used."""

    NONE = "none"
    NORMAL = "normal"
    UNIFORM = "uniform"


class QuantizationAlgorithm(IntEnum):
    """The ways to encode elements for the network. See `QuantizationOptions`."""

    NONE = 0
    MIN_MAX = 1
    """Blocks of codes between their least and their greatest element."""
    ZERO_POINT_SCALE = 2
    """Blocks of codes whose range includes 0, which is exact."""
    CAST = 3
    """Each element as a 16-bit float."""


class SharedStateSyncStrategy(Enum):
    """A peer's part in a `sync_shared_state`."""

    ENFORCE_POPULAR = "enforce_popular"
    """The peer votes for its own state. It sends that if it is elected, and is overwritten if not."""
    RECEIVE_ONLY = "receive_only"
    """The peer neither votes nor sends: it takes whatever is elected."""
    SEND_ONLY = "send_only"
    """The peer votes and is never overwritten: the call fails in the whole group if another state is elected."""


class DataType(IntEnum):
    """The types of elements that can be reduced. FLOAT has 32 bits, DOUBLE 64."""

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
    FLOAT32 = 10
    FLOAT64 = 11

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return _ITEM_BYTES[self]

    @property
    def is_float(self) -> bool:
        """Whether it is one of the four floating-point types."""
        return self >= DataType.FLOAT16

    @classmethod
    def from_numpy_dtype(cls, dtype: Any) -> DataType:
        """Return the type of a NumPy dtype; `ml_dtypes.bfloat16` is BFLOAT16. ValueError if there is none."""
        import numpy as np

        dtype = np.dtype(dtype)
        known = _FROM_NUMPY.get(dtype)
        if known is not None:
            return known
        if not dtype.isnative:
            raise ValueError(
                f"dtype {dtype.str!r} is byte-swapped: convert it with .astype({dtype.newbyteorder('=')!s})"
            )
        found = _FROM_NUMPY[dtype] = cls._from_name(dtype.name, f"dtype {dtype}")
        return found

    def to_numpy_dtype(self) -> np.dtype[Any]:
        """Return the NumPy dtype. For BFLOAT16 that is the one of `ml_dtypes`; TypeError if it is not installed."""
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
        """Return the type of a torch dtype. ValueError if there is none."""
        return cls._from_name(str(dtype).removeprefix("torch."), str(dtype))

    @classmethod
    def _from_name(cls, name: str, shown: str) -> DataType:
        if name not in _FROM_NUMPY_NAME:
            raise ValueError(f"{shown} cannot be reduced; use one of {', '.join(_FROM_NUMPY_NAME)}")
        return _FROM_NUMPY_NAME[name]

    def to_torch_dtype(self) -> Any:
        """Return the torch dtype."""
        import torch

        return getattr(torch, _NUMPY_NAMES[self])


_NUMPY_NAMES = {dtype: dtype.name.lower() for dtype in DataType} | {
    DataType.FLOAT32: "float32",
    DataType.FLOAT64: "float64",
}
_FROM_NUMPY: dict[Any, DataType] = {}
"""A cache by NumPy dtype, whose name is slow to get."""
_FROM_NUMPY_NAME = {name: dtype for dtype, name in _NUMPY_NAMES.items()}
_ITEM_BYTES = (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ReduceOperandDescriptor:
    """The type and the expected distribution of an op's elements. The type must be that of the arrays."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


QUANTIZATION_BLOCK_MAX = 65536
SEED_MAX = 2**64 - 1
_BLOCK_SIZES = {4: 64, 8: 256, 16: 256}
_CODES = [DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16]
_CASTS = [DataType.FLOAT16, DataType.BFLOAT16]


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """How float tensors are encoded for the network, in fewer bits. docs/collectives.md has error bounds and advice.

    All peers of an op give the same, except for `stochastic` and `seed`.

    Args:
        quantized_datatype: UINT8 or INT8, UINT16 or INT16 for MIN_MAX and ZERO_POINT_SCALE; FLOAT16 or BFLOAT16 for
            CAST.
        algorithm: MIN_MAX, ZERO_POINT_SCALE or CAST; NONE turns quantization off.
        block_size: Elements that share a scale; 0 is 64 with 4 bits and 256 otherwise. CAST has no blocks.
        bits: Bits of a code: 4 with an 8-bit datatype, else the width of the datatype, which is the default.
        stochastic: Round to one of the two neighbours at random, so that errors average out over many ops.
        seed: A number in [0, 2**64) that the random choices depend on.

    Raises:
        ValueError: the combination is not in the table of docs/collectives.md.
    """

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX
    block_size: int = 0
    bits: int = 0
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "bits", "seed"):
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        object.__setattr__(self, "stochastic", bool(self.stochastic))
        given: Any = self.algorithm
        if not isinstance(given, QuantizationAlgorithm):
            raise ValueError(f"algorithm {given!r}: must be a QuantizationAlgorithm")
        if not 0 <= self.seed <= SEED_MAX:
            raise ValueError(f"seed {self.seed}: must be from 0 to 2**64 - 1")
        if self.algorithm is QuantizationAlgorithm.NONE:
            return
        is_cast = self.algorithm is QuantizationAlgorithm.CAST
        allowed = _CASTS if is_cast else _CODES
        if self.quantized_datatype not in allowed:
            names = ", ".join(d.name for d in allowed)
            given = self.quantized_datatype
            raise ValueError(f"quantized_datatype {given!r}: must be one of {names} for {self.algorithm.name}")
        width = 8 * self.quantized_datatype.itemsize
        bits = self.bits or width
        if bits != width and (bits != 4 or width != 8):
            choice = "8 or 4" if width == 8 else str(width)
            raise ValueError(f"bits {self.bits}: must be {choice} for {self.quantized_datatype.name}")
        object.__setattr__(self, "bits", bits)
        if is_cast:
            if self.block_size != 0:
                raise ValueError(f"block_size {self.block_size}: CAST has no blocks, leave it 0")
            return
        block_size = self.block_size or _BLOCK_SIZES[bits]
        if not 8 <= block_size <= QUANTIZATION_BLOCK_MAX:
            raise ValueError(f"block_size {block_size}: must be from 8 to {QUANTIZATION_BLOCK_MAX} elements")
        if bits == 4 and block_size % 2 == 1:
            raise ValueError(f"block_size {block_size}: must be even with 4 bits, which travel in pairs")
        object.__setattr__(self, "block_size", block_size)

    def check_tensor(self, dtype: DataType) -> None:
        """Raise ValueError if tensors of this type cannot be quantized so."""
        if self.algorithm is QuantizationAlgorithm.NONE:
            return
        if not dtype.is_float:
            raise ValueError(f"only float tensors can be quantized, not {dtype.name}")
        if self.algorithm is QuantizationAlgorithm.CAST and dtype.itemsize <= self.quantized_datatype.itemsize:
            to = self.quantized_datatype.name
            raise ValueError(f"a CAST of {dtype.name} to {to} does not make it smaller: use MIN_MAX or no quantization")


@dataclass(frozen=True, slots=True)
class ReduceDescriptor:
    """An all_reduce without its arrays, for `ReduceOpDescriptor`. See `Communicator.all_reduce`."""

    count: int
    """Elements to reduce: the first of the arrays."""
    op: ReduceOp
    tag: int = 0
    """The number that pairs the ops of several peers, in [0, 2**63)."""
    operand_descriptor: ReduceOperandDescriptor | None = None
    quantization_options: QuantizationOptions = field(
        default_factory=lambda: QuantizationOptions(algorithm=QuantizationAlgorithm.NONE)
    )
    algorithm: ReduceAlgorithm | None = None
    """None chooses by size, world size, quantization and measured links."""
    step: int | None = None
    """The caller's count of its steps, the same on all peers, or None on all."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The peers of a group in one view. Ranks change with every join and loss, a peer's number never."""

    rank: int
    """This peer's rank, from 0."""
    peers: tuple[int, ...]
    """The numbers of the peers, by rank."""

    @property
    def world_size(self) -> int:
        return len(self.peers)


def _kind_of(array: Any) -> str:
    if array is None:
        return "None"
    if not hasattr(array, "dtype"):
        return f"<{type(array).__name__} of {len(array)}>"
    return f"<{type(array).__name__} {array.dtype} {list(array.shape)}>"


@dataclass(frozen=True, slots=True)
class ReduceInfo:
    """The result of a committed all_reduce on this peer. Bytes are payload, without frame headers."""

    local_world_size: int
    """The number of peers whose contribution is in the result."""
    tx_bytes: int
    rx_bytes: int
    membership: Membership | None = field(default=None, compare=False)
    """These peers, and this peer's rank among them. None for several ops whose peers were not the same."""
    array: Any = field(default=None, compare=False)
    """The result as a new array, if `send` is a `jax.Array` without `recv`."""

    def __repr__(self) -> str:
        shown = f"local_world_size={self.local_world_size}, tx_bytes={self.tx_bytes}, rx_bytes={self.rx_bytes}"
        array = "" if self.array is None else f", array={_kind_of(self.array)}"
        return f"ReduceInfo({shown}, membership={self.membership!r}{array})"

    @property
    def world_size(self) -> int:
        """The same as `local_world_size`."""
        return self.local_world_size


@dataclass(frozen=True, slots=True)
class CollectiveInfo:
    """The result of another committed collective on this peer. Bytes are payload, without frame headers."""

    membership: Membership
    """The peers that took part, and this peer's rank among them."""
    tx_bytes: int
    rx_bytes: int
    array: Any = None
    """The array with the result: the given one, or a new one of the same kind as the input. None after a barrier."""

    def __repr__(self) -> str:
        shown = f"membership={self.membership!r}, tx_bytes={self.tx_bytes}, rx_bytes={self.rx_bytes}"
        return f"CollectiveInfo({shown}, array={_kind_of(self.array)})"

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def world_size(self) -> int:
        return self.membership.world_size


@dataclass(frozen=True, slots=True)
class SharedStateSyncInfo:
    """The result of a `sync_shared_state` on this peer. Bytes are tensor contents, without digests and headers."""

    tx_bytes: int
    rx_bytes: int
    revision: int = 0
    """The revision that every peer of the group now has."""
