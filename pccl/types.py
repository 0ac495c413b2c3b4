"""Enumerations and small value types of the public API.

`DataType`, `ReduceOp` and `QuantizationAlgorithm` use the values from the engine's header.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """The communicator is not connected, was closed, or is used in a forked child."""
    INTERNAL_ERROR = 2
    """A bug in pccl, or a device failure."""
    INVALID_ARGUMENT = 3
    """An invalid argument, or one that differs from the other peers' for the same op."""
    INVALID_USAGE = 4
    """A call that cannot succeed here, such as group calls in an order that can never match."""
    TOO_FEW_PEERS = 5
    """This peer is alone in its group."""
    MASTER_CONNECTION_FAILED = 6
    """The master was lost, cannot be reached, or has refused or evicted this peer."""
    RANK_CONNECTION_FAILED = 7
    """A link to another peer could not be established."""
    RANK_CONNECTION_LOST = 8
    """A peer was lost and the op was aborted on every survivor; `send` is unchanged."""
    NO_SHARED_STATE_AVAILABLE = 9
    """No peer can provide the shared state."""
    PENDING_ASYNC_OPS = 10
    """The call requires that none of this peer's ops are in flight."""
    UPDATE_TOPOLOGY_FAILED = 11
    """Never raised, like TOPOLOGY_OPTIMIZATION_FAILED; kept for scripts written for the reference library."""
    TOPOLOGY_OPTIMIZATION_FAILED = 12
    TIMEOUT = 13
    """The caller's `timeout=` has passed. The op was aborted on all peers, or this peer never started it."""
    OUTCOME_UNKNOWN = 14
    """This peer has cancelled an op that the other peers may have committed; `send` is unchanged."""

    def __str__(self) -> str:
        return self.name


class Attribute(Enum):
    """Facts about the installed view that `Communicator.get_attribute` returns."""

    GLOBAL_WORLD_SIZE = "global_world_size"
    """The number of accepted peers in all groups."""
    LOCAL_WORLD_SIZE = "local_world_size"
    """The number of accepted peers in this communicator's group."""
    NUM_DISTINCT_PEER_GROUPS = "num_distinct_peer_groups"
    """The number of groups that have accepted peers."""
    LARGEST_PEER_GROUP_WORLD_SIZE = "largest_peer_group_world_size"
    """The number of accepted peers in the largest group."""


class ReduceOp(IntEnum):
    """The function that an all_reduce or reduce_scatter applies to the elements of all peers."""

    SUM = 0
    AVG = 1
    """The sum divided by the world size. Integers are rounded toward minus infinity, as by NumPy's `//`."""
    PROD = 2
    MAX = 3
    MIN = 4


class Collective(IntEnum):
    """The kinds of ops, numbered as in the engine."""

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
    """How an op's elements travel in a group of W peers."""

    RING = 0
    """Neighbours in a ring exchange elements in 2 (W - 1) steps. With quantization, a value is rounded W times."""
    DIRECT = 1
    """Every two peers exchange elements directly, in 2 steps, or in 1 for small all-reduces. Quantized values are
    rounded twice. This needs a link between every two peers, which groups of up to 16 peers establish where the network
    permits."""


class DistributionHint(Enum):
    """The expected distribution of values. It is ignored, and exists for scripts written for the reference library."""

    NONE = "none"
    NORMAL = "normal"
    UNIFORM = "uniform"


class QuantizationAlgorithm(IntEnum):
    """The ways to encode elements for the network. See `QuantizationOptions`."""

    NONE = 0
    MIN_MAX = 1
    """Encode blocks of elements as codes between the block's minimum and maximum."""
    ZERO_POINT_SCALE = 2
    """Encode blocks of elements as codes whose range includes 0; zeros stay exact."""
    CAST = 3
    """Send each element as a 16-bit float."""
    LLOYD_MAX = 4
    """Encode blocks of elements as one of four levels, the best ones for normally distributed elements (Max, 1960)."""
    SIGN = 5
    """Encode blocks of elements as their signs times their mean magnitude."""


class SharedStateSyncStrategy(Enum):
    """A peer's role in a `sync_shared_state`."""

    ENFORCE_POPULAR = "enforce_popular"
    """The peer votes for its own state. If elected, that state is sent to other peers; otherwise it is overwritten."""
    RECEIVE_ONLY = "receive_only"
    """The peer neither votes nor sends; it receives the elected state."""
    SEND_ONLY = "send_only"
    """The peer votes and keeps its state; if another state is elected, the call fails in the whole group."""


class DataType(IntEnum):
    """The element types that can be reduced. FLOAT is 32 bits wide, and DOUBLE is 64."""

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
        """The size of one element in bytes."""
        return _ITEM_BYTES[self]

    @property
    def is_float(self) -> bool:
        """Whether it is one of the four floating-point types."""
        return self >= DataType.FLOAT16

    @classmethod
    def from_numpy_dtype(cls, dtype: Any) -> DataType:
        """Return the type for a NumPy dtype; `ml_dtypes.bfloat16` is BFLOAT16. Raise ValueError if there is none."""
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
        """Return the NumPy dtype; BFLOAT16 is the one from `ml_dtypes`. Raise TypeError if that is not installed."""
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
        """Return the type for a torch dtype. Raise ValueError if there is none."""
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
"""A cache by NumPy dtype, because getting a dtype's name is slow."""
_FROM_NUMPY_NAME = {name: dtype for dtype, name in _NUMPY_NAMES.items()}
_ITEM_BYTES = (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ReduceOperandDescriptor:
    """The type and expected distribution of an op's elements. The type must match the arrays."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


QUANTIZATION_BLOCK_MAX = 65536
SEED_MAX = 2**64 - 1
_BLOCK_SIZES = {1: 64, 2: 64, 4: 64, 8: 256, 16: 256}
_LEVEL_BITS = {QuantizationAlgorithm.LLOYD_MAX: 2, QuantizationAlgorithm.SIGN: 1}
_LEVEL_BLOCK_MAX = 1024
_CODES = [DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16]
_CASTS = [DataType.FLOAT16, DataType.BFLOAT16]


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """How to encode float tensors in fewer bits for the network. docs/collectives.md gives error bounds and advice.

    The options of an op must be the same on all peers, except for `stochastic` and `seed`.

    Args:
        quantized_datatype: FLOAT16 or BFLOAT16 for CAST; UINT8 for LLOYD_MAX and SIGN; otherwise UINT8, INT8, UINT16 or
            INT16.
        algorithm: NONE turns quantization off.
        block_size: The number of elements that share a scale; 0 means 64 up to 4 bits, else 256. CAST has none.
        bits: Bits per code: 2 for LLOYD_MAX, 1 for SIGN. The default is the width of the datatype; 4 is possible with
            an 8-bit datatype.
        stochastic: Round up or down at random, so that errors average out over many ops.
        seed: A number in [0, 2**64) that seeds the random choices.

    Raises:
        ValueError: the combination is not in the table in docs/collectives.md.
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
            raise ValueError(f"algorithm must be a QuantizationAlgorithm, not {given!r}")
        if not 0 <= self.seed <= SEED_MAX:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, not {self.seed}")
        if self.algorithm is QuantizationAlgorithm.NONE:
            return
        is_cast = self.algorithm is QuantizationAlgorithm.CAST
        level_bits = _LEVEL_BITS.get(self.algorithm)
        allowed = _CASTS if is_cast else _CODES if level_bits is None else _CODES[:1]
        if not isinstance(self.quantized_datatype, DataType) or self.quantized_datatype not in allowed:
            names = ", ".join(d.name for d in allowed)
            given = self.quantized_datatype
            raise ValueError(f"quantized_datatype must be one of {names} for {self.algorithm.name}, not {given!r}")
        width = 8 * self.quantized_datatype.itemsize
        bits = self.bits or level_bits or width
        if level_bits is not None:
            if bits != level_bits or self.stochastic:
                name = self.algorithm.name
                raise ValueError(f"{name} has codes of {level_bits} bits that are rounded to nearest, not {self!r}")
        elif bits != width and (bits != 4 or width != 8):
            choice = "8 or 4" if width == 8 else str(width)
            raise ValueError(f"bits must be {choice} for {self.quantized_datatype.name}, not {self.bits}")
        object.__setattr__(self, "bits", bits)
        if is_cast:
            if self.block_size != 0:
                raise ValueError(f"CAST has no blocks, so block_size must be 0, not {self.block_size}")
            return
        block_size = self.block_size or _BLOCK_SIZES[bits]
        if not 8 <= block_size <= QUANTIZATION_BLOCK_MAX:
            raise ValueError(f"block_size must be from 8 to {QUANTIZATION_BLOCK_MAX} elements, not {block_size}")
        if level_bits is not None and (block_size % 8 or block_size > _LEVEL_BLOCK_MAX):
            text = f"block_size must be a multiple of 8 up to {_LEVEL_BLOCK_MAX}, not {block_size}"
            raise ValueError(f"{text}, for {self.algorithm.name}")
        if bits == 4 and block_size % 2 == 1:
            raise ValueError(f"4-bit codes are packed in pairs, so block_size must be even, not {block_size}")
        object.__setattr__(self, "block_size", block_size)

    def check_tensor(self, dtype: DataType) -> None:
        """Raise ValueError if these options cannot quantize tensors of this type."""
        if self.algorithm is QuantizationAlgorithm.NONE:
            return
        if not dtype.is_float:
            raise ValueError(f"only float tensors can be quantized, not {dtype.name}")
        if self.algorithm is QuantizationAlgorithm.CAST and dtype.itemsize <= self.quantized_datatype.itemsize:
            to = self.quantized_datatype.name
            raise ValueError(f"a CAST of {dtype.name} to {to} does not make it smaller; use MIN_MAX or no quantization")
        if self.algorithm in _LEVEL_BITS and dtype is not DataType.FLOAT:
            raise ValueError(f"{self.algorithm.name} encodes FLOAT tensors, not {dtype.name}")


class KeptResidual:
    """What an `ErrorFeedback` keeps between ops."""

    def __init__(self) -> None:
        self.array: Any = None
        """The residual in float32, one number per element."""
        self.key: object = None
        """The view and count that it belongs to."""
        self.holder: Callable[[], Any] = lambda: None
        """Returns the op that was last launched with it, if that still exists."""


class ErrorFeedback:
    """Adds the errors of a quantized all_reduce to the next one (Seide et al. 2014; Karimireddy et al. 2019).

    In an op each peer encodes each element once: its own, for the peer that reduces that element; in a ring, its
    partial sum; and the result of the elements that it reduces itself. It adds the residual before it encodes, and the
    new residual is `decay` times what the encoding loses. So errors do not add up over many ops.

    Residuals are dropped when the group's view or the number of elements changes. An op that fails leaves them as they
    were. Peers need not agree. For float32, SUM and AVG. Use one object for each array, and in one op at a time. It
    holds 4 bytes per element, and twice as many during an op.

    Args:
        decay: From 0 to 1. With 1, the default, no error is lost. Training with codes of 2 bits or 1 bit and an
            outer momentum needs less, such as 0.4.

    Raises:
        ValueError: `decay` is out of range.
    """

    def __init__(self, decay: float = 1.0) -> None:
        self.decay = float(decay)
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, not {decay}")
        self.kept = KeptResidual()

    def __repr__(self) -> str:
        return f"ErrorFeedback(decay={self.decay:g})"

    def reset(self) -> None:
        """Drop the residuals, including those of an op in flight."""
        self.kept = KeptResidual()


@dataclass(frozen=True, slots=True)
class ReduceDescriptor:
    """An all_reduce without its arrays, for `ReduceOpDescriptor`. See `Communicator.all_reduce`."""

    count: int
    """The number of elements to reduce, from the start of the arrays."""
    op: ReduceOp
    tag: int = 0
    """A number in [0, 2**63) that matches the op across peers."""
    operand_descriptor: ReduceOperandDescriptor | None = None
    quantization_options: QuantizationOptions = field(
        default_factory=lambda: QuantizationOptions(algorithm=QuantizationAlgorithm.NONE)
    )
    algorithm: ReduceAlgorithm | None = None
    """None lets pccl choose by size, world size, quantization and measured links."""
    step: int | None = None
    """The caller's step count, which must be the same on all peers, or None on all."""
    feedback: ErrorFeedback | None = None


@dataclass(frozen=True, slots=True)
class Membership:
    """The peers of a group in one view. Ranks change with every join and loss; a peer's number never changes."""

    rank: int
    """This peer's rank, from 0."""
    peers: tuple[int, ...]
    """The peers' numbers, by rank."""

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
    """The result of a committed all_reduce on this peer. Byte counts cover payload, not frame headers."""

    local_world_size: int
    """The number of peers that contributed to the result."""
    tx_bytes: int
    rx_bytes: int
    membership: Membership | None = field(default=None, compare=False)
    """These peers, and this peer's rank among them. None if several ops had different peers."""
    array: Any = field(default=None, compare=False)
    """The result as a new array, if `send` was a `jax.Array` and `recv` was left out."""

    def __repr__(self) -> str:
        shown = f"world_size={self.local_world_size}, tx_bytes={self.tx_bytes}, rx_bytes={self.rx_bytes}"
        array = "" if self.array is None else f", array={_kind_of(self.array)}"
        return f"ReduceInfo({shown}, membership={self.membership!r}{array})"

    @property
    def world_size(self) -> int:
        """The same as `local_world_size`."""
        return self.local_world_size


@dataclass(frozen=True, slots=True)
class CollectiveInfo:
    """The result of any other committed collective on this peer. Byte counts cover payload, not frame headers."""

    membership: Membership
    """The peers that took part, and this peer's rank among them."""
    tx_bytes: int
    rx_bytes: int
    array: Any = None
    """The array that holds the result: the caller's, or a new one of the input's kind. None after a barrier."""

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
    """The result of a `sync_shared_state` on this peer. Byte counts cover tensor contents, not digests or headers."""

    tx_bytes: int
    rx_bytes: int
    revision: int = 0
    """The revision that every peer of the group now has."""
