"""The collectives of a process group with c10d's signatures and checks. `collectives` plans them.

A method with several signatures distinguishes them by the arguments: a list of tensors and an options object, or one
tensor and keyword arguments. Error texts use the words of c10d's own backends because programs match them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp as TorchOp

from pccl.torch import collectives
from pccl.torch.calls import Coalesced, GroupCalls
from pccl.torch.reductions import reduction
from pccl.torch.tensors import (
    Tensor,
    fail,
    require_alike,
    require_apart,
    require_dense,
    require_one,
    require_root,
    require_same_length,
    require_some,
)
from pccl.torch.work import PCCLWork


class CollectiveMethods(GroupCalls):
    """The methods for collectives. Each returns a work."""

    # Reductions.

    def allreduce(
        self, tensors: Any, opts: Any = None, op: Any = TorchOp.SUM, timeout: timedelta | None = None
    ) -> PCCLWork | Coalesced:
        """Reduce a tensor from each rank in place. Sparse tensors can only be summed."""
        what = "allreduce"
        opts, op = _options(opts, op, AllreduceOptions, timeout)
        given = _listed(tensors)
        require_some(what, given)
        if any(each.layout is torch.sparse_coo for each in given):
            collectives.require_summable(what, given, op)
            return self._call(what, opts, collectives.all_reduce_sparse, (given,), given)
        require_alike(what, given)
        require_apart(what, given)
        how = reduction(what, op, given[0].dtype)
        return self._call(what, opts, collectives.all_reduce, (given, how), given)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> PCCLWork | Coalesced:
        """Reduce several tensors from each rank in place."""
        what = "allreduce_coalesced"
        opts = opts if opts is not None else AllreduceCoalescedOptions()
        given = list(tensors)
        require_some(what, given)
        require_dense(what, given, "tensors must all have the same type: ")
        require_apart(what, given)
        how = reduction(what, opts.reduceOp, given[0].dtype)
        return self._call(what, opts, collectives.all_reduce_together, (given, how), given)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = TorchOp.SUM,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> PCCLWork | Coalesced:
        """Reduce a tensor from each rank into the root's. Other ranks' tensors are unchanged."""
        what = "reduce"
        is_bare = opts is None or isinstance(opts, int)
        opts = _with_root(opts, ReduceOptions, root, timeout)
        if is_bare:
            opts.reduceOp = op
        given = _listed(tensors)
        require_root(what, opts.rootRank, self._size)
        if opts.rootTensor != 0:
            raise fail(what, f"invalid root tensor: {opts.rootTensor} of {len(given)}")
        require_one(what, given)
        require_dense(what, given)
        root, tensor = opts.rootRank, given[0]
        if self._rank == root:
            require_apart(what, given)
        how = reduction(what, opts.reduceOp, tensor.dtype)
        return self._call(what, opts, collectives.reduce, (tensor, how, root), given)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, op: Any = TorchOp.SUM, timeout: timedelta | None = None
    ) -> PCCLWork | Coalesced:
        """Reduce lists that hold one tensor for each rank, and scatter the results."""
        what = "reduce_scatter"
        opts, op = _options(opts, op, ReduceScatterOptions, timeout)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        require_one(what, outputs, "output tensor list")
        require_one(what, inputs, "input list")
        output, given = outputs[0], list(inputs[0])
        if len(given) != self._size:
            raise fail(what, f"invalid input tensor list at index 0 (expected length {self._size}, got {len(given)})")
        require_dense(what, [output, *given])
        require_apart(what, [output])
        if output.numel() != given[self._rank].numel():
            sizes = f"expected {tuple(given[self._rank].shape)}, got {tuple(output.shape)}"
            raise fail(what, f"invalid tensor size of the output ({sizes})")
        how = reduction(what, op, output.dtype)
        return self._call(what, opts, collectives.reduce_scatter_lists, (output, given, how), [output], given)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> PCCLWork | Coalesced:
        """Reduce a tensor that consists of one part per rank, and scatter the parts."""
        what = "reduce_scatter_single"
        opts = opts if opts is not None else ReduceScatterOptions()
        self._require_parts(what, given, output, "input", "output")
        how = reduction(what, opts.reduceOp, output.dtype)
        return self._call(what, opts, collectives.reduce_scatter, (output, given, how), [output], [given])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> PCCLWork | Coalesced:
        """Perform several `reduce_scatter_single` calls together."""
        what = "reduce_scatter_single_coalesced"
        opts = opts if opts is not None else ReduceScatterOptions()
        outputs, inputs = list(outputs), list(inputs)
        require_some(what, inputs)
        require_same_length(what, outputs, inputs)
        for output, given in zip(outputs, inputs, strict=True):
            self._require_parts(what, given, output, "input", "output")
        require_dense(what, outputs)
        how = reduction(what, opts.reduceOp, outputs[0].dtype)
        return self._call(what, opts, collectives.reduce_scatter_together, (outputs, inputs, how), outputs, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _require_parts(self, what: str, whole: Tensor, part: Tensor, whole_role: str, part_role: str) -> None:
        if whole.dtype is not part.dtype:
            raise fail(what, f"{whole_role} tensor must have the same type as {part_role} tensor: {part.dtype}")
        if whole.numel() != part.numel() * self._size:
            raise fail(
                what,
                f"{whole_role} tensor size must be equal to world_size times {part_role} tensor size: they have "
                f"{whole.numel()} and {part.numel()} elements, with {self._size} ranks",
            )
        require_dense(what, [whole, part])
        require_apart(what, [whole if whole_role == "output" else part])

    # From one rank to all, from all to one, from all to all.

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> PCCLWork | Coalesced:
        """Copy the root's tensor to all ranks, in place."""
        what = "broadcast"
        opts = _with_root(opts, BroadcastOptions, root, timeout)
        given = _listed(tensors)
        root, root_tensor = opts.rootRank, opts.rootTensor
        require_root(what, root, self._size)
        if not 0 <= root_tensor < len(given):
            raise fail(what, f"invalid root tensor: {root_tensor} of {len(given)}")
        require_alike(what, given)
        if self._rank != root:
            require_apart(what, given)
        return self._call(what, opts, collectives.broadcast, (given, root, root_tensor), given)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> PCCLWork | Coalesced:
        """Gather the tensors of all ranks into lists on every rank."""
        what = "allgather"
        opts = _with_timeout(opts, AllgatherOptions, timeout)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        lists, given = [list(each) for each in outputs], list(inputs)
        require_some(what, given, "input tensor list")
        require_same_length(what, lists, given)
        for index, each in enumerate(lists):
            expected = self._size * len(given)
            if len(each) != expected:
                sizes = f"expected length {expected}, got {len(each)}"
                raise fail(what, f"invalid output tensor list at index {index} ({sizes})")
        require_alike(what, given)
        for each in lists:
            require_alike(what, [given[0], *each])
        flat = [output for each in lists for output in each]
        require_apart(what, flat)
        return self._call(what, opts, collectives.all_gather_lists, (lists, given), given, given, flat)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> PCCLWork | Coalesced:
        """Gather the tensors of all ranks, concatenated, on every rank."""
        what = "all_gather_single"
        opts = opts if opts is not None else AllgatherOptions()
        self._require_parts(what, output, given, "output", "input")
        return self._call(what, opts, collectives.all_gather, (output, given), [output], [given])

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> PCCLWork | Coalesced:
        """Gather several tensors from all ranks on every rank, as one list per source rank."""
        what = "allgather_coalesced"
        opts = opts if opts is not None else AllgatherOptions()
        lists, given = [list(each) for each in output_lists], list(inputs)
        require_some(what, given, "input tensor list")
        if len(lists) != self._size:
            raise fail(what, f"output lists should be equal to world size: {len(lists)} of {self._size}")
        for index, each in enumerate(lists):
            if len(each) != len(given):
                raise fail(what, f"invalid output size: (expected length {len(given)}, got {len(each)})")
            for output, tensor in zip(each, given, strict=True):
                if output.shape != tensor.shape:
                    sizes = f"expected {tuple(tensor.shape)}, got {tuple(output.shape)}"
                    raise fail(what, f"invalid size of output tensor at index {index} ({sizes})")
                if output.dtype is not tensor.dtype:
                    types = f"expected {tensor.dtype}, got {output.dtype}"
                    raise fail(what, f"invalid tensor type at index {index} ({types})")
        require_dense(what, given)
        flat = [tensor for each in lists for tensor in each]
        require_apart(what, flat)
        return self._call(what, opts, collectives.all_gather_together, (lists, given, flat), flat[:1], given, flat)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> PCCLWork | Coalesced:
        """Perform several `all_gather_single` calls together."""
        what = "all_gather_single_coalesced"
        opts = opts if opts is not None else AllgatherOptions()
        whole, given = list(outputs), list(inputs)
        require_some(what, given)
        require_same_length(what, whole, given)
        for output, tensor in zip(whole, given, strict=True):
            self._require_parts(what, output, tensor, "output", "input")
        return self._call(what, opts, collectives.all_gather_wholes, (whole, given), whole, given)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> PCCLWork | Coalesced:
        """Gather the tensors of all ranks into a list on the root."""
        what = "gather"
        opts = _with_root(opts, GatherOptions, root, timeout)
        if isinstance(inputs, torch.Tensor):
            inputs = [inputs]
            outputs = [outputs] if outputs else []
        root = opts.rootRank
        require_root(what, root, self._size)
        require_one(what, inputs, "input tensor list")
        given = inputs[0]
        require_dense(what, inputs)
        into = self._list_of_root(what, "output", outputs, given, root)
        require_apart(what, into)
        return self._call(what, opts, collectives.gather, (into, given, root), [given], [given], into)

    def scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> PCCLWork | Coalesced:
        """Send each rank one tensor from the root's list."""
        what = "scatter"
        opts = _with_root(opts, ScatterOptions, root, timeout)
        if isinstance(outputs, torch.Tensor):
            outputs = [outputs]
            inputs = [inputs] if inputs else []
        root = opts.rootRank
        require_root(what, root, self._size)
        require_one(what, outputs, "output tensor list")
        output = outputs[0]
        require_dense(what, outputs)
        require_apart(what, outputs)
        given = self._list_of_root(what, "input", inputs, output, root)
        return self._call(what, opts, collectives.scatter, (output, given, root), [output], given)

    def _list_of_root(self, what: str, role: str, lists: Any, like: Tensor, root: int) -> list[Tensor]:
        if self._rank != root:
            if lists and list(lists[0]):
                raise fail(what, f"requires empty {role} on non-root")
            return []
        if len(lists) != 1:
            raise fail(what, f"requires a single-element {role} list containing a list with {self._size} tensors")
        tensors = list(lists[0])
        if len(tensors) != self._size:
            size = role.capitalize()
            text = f"Incorrect {role} list size {len(tensors)}. {size} list size should be {self._size}"
            raise fail(what, f"{text}, same as size of the process group")
        require_alike(what, [like, *tensors])
        return tensors

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> PCCLWork | Coalesced:
        """Send a part of a tensor to each rank and receive one from each, split along the first dimension."""
        what = "all_to_all_single"
        opts = _with_timeout(opts, AllToAllOptions, timeout)
        if output.dtype is not given.dtype:
            raise fail(what, f"output tensor must have the same type as input tensor: {given.dtype}")
        require_dense(what, [output, given])
        if not (output.is_contiguous() and given.is_contiguous()):  # as with all of torch's own backends
            raise fail(what, "Tensors must be contiguous")
        incoming = collectives.parts(what, output, output_splits, self._size)
        outgoing = collectives.parts(what, given, input_splits, self._size)
        return self._call(
            what, opts, collectives.all_to_all_single, (output, given, incoming, outgoing), [output], [given]
        )

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> PCCLWork | Coalesced:
        """Send one tensor from a list to each rank, and receive one from each."""
        what = "alltoall"
        opts = _with_timeout(opts, AllToAllOptions, timeout)
        whole, given = list(outputs), list(inputs)
        for role, tensors in (("output", whole), ("input", given)):
            if len(tensors) != self._size:
                raise fail(what, f"{role} tensor list must have {self._size} tensors, one for each rank")
        require_dense(what, [*whole, *given])
        require_apart(what, whole)
        return self._call(what, opts, collectives.all_to_all, (whole, given), whole, given)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> PCCLWork | Coalesced:
        """Wait for all ranks, and for all earlier collectives of this rank."""
        opts = _with_timeout(opts, BarrierOptions, timeout)
        return self._call("barrier", opts, collectives.barrier, (), is_barrier=True)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _options(opts: Any, op: Any, kind: type, timeout: timedelta | None) -> tuple[Any, Any]:
    """Return options and the reduction. Some callers pass only the reduction in place of options."""
    if hasattr(opts, "reduceOp"):
        return opts, opts.reduceOp
    return _with_timeout(None, kind, timeout), op if opts is None else opts


def _with_root(opts: Any, kind: type, root: int, timeout: timedelta | None) -> Any:
    """Return options with a root. Some callers pass only the root in place of options."""
    if opts is not None and not isinstance(opts, int):
        return opts
    made = _with_timeout(None, kind, timeout)
    made.rootRank = root if opts is None else opts
    return made


def _with_timeout(opts: Any, kind: type, timeout: timedelta | None) -> Any:
    """Return options with a timeout. Some callers pass only the timeout in place of options."""
    if opts is not None and not isinstance(opts, timedelta):
        return opts
    made: Any = kind()
    timeout = timeout if opts is None else opts
    if timeout is not None:
        made.timeout = timeout
    return made
