"""The shared state: named tensors and a revision that all peers in a group keep bit-identical.

`Communicator.sync_shared_state` compares it across peers and transfers the differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pccl._arrays import JaxLeaves, Operand, changes_of, resolve
from pccl.devices.state_store import DeviceStore
from pccl.errors import integer_argument, invalid
from pccl.runtime.state.tensor_blocks import StateTensor

REVISION_MAX = 2**63 - 1


class TensorInfo:
    """One tensor in a shared state. It is held by reference, and a sync writes into its memory.

    Use `from_torch` or `from_numpy` to make one. With `allow_content_inequality`, peers may hold different contents at
    the same revision; such a tensor is sent only to peers whose revision is behind.
    """

    def __init__(self, operand: Operand, name: str, allow_content_inequality: bool) -> None:
        if not isinstance(name, str) or not name or "\0" in name:
            raise invalid("TensorInfo", f"{name!r} cannot be a tensor's name")
        if operand.wrap is not None:
            what = f"tensor {name!r} is a jax.Array, which no sync can write into; use SharedState.from_pytree"
            raise invalid("TensorInfo", what)
        if not operand.is_writable:
            raise invalid("TensorInfo", f"tensor {name!r} is read-only")
        self.name = name
        self.allow_content_inequality = allow_content_inequality
        self._operand = operand

    @classmethod
    def from_torch(cls, tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Use a dense torch tensor on the CPU or a CUDA device. Raise INVALID_ARGUMENT for others.

        The memory format, such as `torch.channels_last`, must be the same on all peers. If it is not the usual one, the
        tensor's name here states the order of its dimensions in memory.
        """
        order = _memory_order(tensor)
        if order is not None:
            tensor, name = tensor.permute(order), f"{name} in order {order}"
        return cls(resolve(tensor, f"tensor {name!r}", "TensorInfo.from_torch"), name, allow_content_inequality)

    @classmethod
    def from_numpy(cls, array: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Use a contiguous, writable NumPy array. Raise INVALID_ARGUMENT for others."""
        return cls(resolve(array, f"tensor {name!r}", "TensorInfo.from_numpy"), name, allow_content_inequality)

    def state_tensor(self) -> StateTensor:
        """Return the transfer's view of the tensor: its memory, or a store if it is on a device."""
        operand = self._operand
        store = None if operand.device is None else DeviceStore(operand.device, operand.owner, operand.size_bytes)
        data = memoryview(b"") if store is not None else operand.memory()
        return StateTensor(self.name, operand.dtype.name, operand.shape, self.allow_content_inequality, data, store)

    def note_written(self) -> None:
        """Notify autograd that a sync has written into the tensor."""
        written = changes_of(self._operand.owner)
        if written is not None:
            written()

    def __repr__(self) -> str:
        return f"TensorInfo({self.name!r}, {self._operand.dtype.name}, shape={list(self._operand.shape)})"


def _memory_order(tensor: Any) -> list[int] | None:
    """Return the order of dimensions in which a tensor is contiguous, or None if that is the usual one or none is."""
    if str(getattr(tensor, "layout", "")) != "torch.strided" or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


class SharedState:
    """Tensors in a fixed order, with distinct names, and the revision of their contents.

    Every peer makes the same change to the contents, then increments `state.revision`. Not thread-safe.

    Raises:
        PCCLError: INVALID_ARGUMENT if there are no tensors or two have the same name.
    """

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        given: Any = tensors
        if not isinstance(given, Sequence) or not all(isinstance(each, TensorInfo) for each in given):
            raise invalid("SharedState", f"tensors must be a sequence of TensorInfo, not {tensors!r}")
        self.tensors = list(tensors)
        names = [tensor.name for tensor in self.tensors]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if not names or repeated:
            what = f"these names occur twice: {', '.join(repeated)}" if repeated else "a shared state needs tensors"
            raise invalid("SharedState", what)
        self._revision = 0

    @classmethod
    def from_numpy(cls, arrays: Mapping[str, Any]) -> SharedState:
        """Make a state from a mapping of names to NumPy arrays. It raises the errors of `TensorInfo.from_numpy`."""
        given: Any = arrays
        if not isinstance(given, Mapping):
            what = f"arrays must be a mapping of names to NumPy arrays, not {type(arrays).__name__}"
            raise invalid("SharedState.from_numpy", what)
        return cls([TensorInfo.from_numpy(array, name) for name, array in arrays.items()])

    @classmethod
    def from_torch(cls, tensors: Any) -> SharedState:
        """Make a state from a mapping of names to torch tensors, or from a module's `state_dict()`."""
        if not isinstance(tensors, Mapping):
            if not hasattr(tensors, "state_dict"):
                what = f"tensors must be a module or a mapping of names to tensors, not {type(tensors).__name__}"
                raise invalid("SharedState.from_torch", what)
            # torch.compile adds "_orig_mod." to names; other peers may not compile.
            tensors = {name.replace("_orig_mod.", ""): each for name, each in tensors.state_dict().items()}
        return cls([TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()])

    @classmethod
    def from_pytree(cls, tree: Any) -> PytreeState:
        """Make a state from a JAX pytree of `jax.Array`s and NumPy arrays. The state holds copies of the values.

        Raises:
            PCCLError: INVALID_ARGUMENT if JAX is not imported, or if a leaf is of another kind, spans several devices
                or has a dtype that cannot be reduced.
        """
        return PytreeState(tree)

    @property
    def revision(self) -> int:
        """The revision number of the contents, in [0, 2**63). The newest revision wins a sync."""
        return self._revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self._revision = integer_argument("revision", revision, "SharedState.revision", 0, REVISION_MAX)

    def push_revision(self) -> int:
        """Add one to the revision and return the new revision."""
        self.revision += 1
        return self._revision

    def __repr__(self) -> str:
        return f"SharedState(revision={self.revision}, tensors={self.tensors})"


class PytreeState(SharedState):
    """A shared state for a pytree of arrays, named as JAX names the leaves: `['layer']['w']`. Not thread-safe.

    It holds copies of the values. `tree` returns new arrays with the kind, dtype and device of the original leaves:

        state.tree = parameters
        comm.sync_shared_state(state)
        parameters = state.tree
    """

    def __init__(self, tree: Any) -> None:
        name = "SharedState.from_pytree"
        self._leaves = JaxLeaves(tree, lambda what: invalid(name, what))
        super().__init__([TensorInfo.from_numpy(value, path) for path, value in self._leaves.values.items()])

    @property
    def tree(self) -> Any:
        """The state's values, as a new tree of new arrays."""
        return self._leaves.tree()

    @tree.setter
    def tree(self, tree: Any) -> None:
        """Copy a tree's values into the state. If the structure, shapes or dtypes differ, raise INVALID_ARGUMENT and
        change nothing."""
        self._leaves.copy_from(tree, lambda what: invalid("PytreeState.tree", what))
