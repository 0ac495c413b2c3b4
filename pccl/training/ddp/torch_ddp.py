"""A communication hook that makes torch's DistributedDataParallel average over pccl's peers.

    state = SharedState.from_torch(model)
    model = torch.nn.parallel.DistributedDataParallel(model)  # over a process group of this process alone
    model.register_comm_hook(None, torch_comm_hook(communicator, model, revision=lambda: state.revision))

Use it in programs that must keep that class; `DDP` does more. torch reassigns gradients to buckets after the first
backward pass, so a newcomer's buckets would differ from the others'. The hook therefore has its own buckets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from _pccl_torch import outside_graphs
from pccl import Communicator, QuantizationOptions
from pccl.training.ddp.gradients import BUCKET_BYTES, FlatBuffer, bucketed
from pccl.training.group.relaunch import Relaunched, average


def torch_comm_hook(
    communicator: Communicator,
    model: Any,
    *,
    revision: Callable[[], int],
    quantization: QuantizationOptions | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    tag: int = 0,
) -> Callable[[Any, Any], Any]:
    """Return a hook for `model.register_comm_hook(None, hook)` that averages over pccl's peers.

    All peers give the same arguments. Use the hook with one communicator, on the thread of the backward passes.
    `backward` raises PCCLError for failures other than losses, and RuntimeError if an earlier pass failed halfway.

    Args:
        communicator: The peer group. The hook uses one tag per bucket, from `tag` up.
        model: The DistributedDataParallel, over a process group of one process.
        revision: Returns the number of steps in the run. It must be equal on all peers that average together.
        quantization: How to quantize the gradients that are sent.
        bucket_bytes: The size of a bucket.
        tag: The first tag.

    Raises:
        TypeError: `model` is of another class.
        ValueError: The model's process group contains several processes, or the model sets `find_unused_parameters` or
            `static_graph`, with which torch ignores averages of parameters that only other peers used.
    """
    torch = sys.modules["torch"]
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(f"model must be a torch.nn.parallel.DistributedDataParallel, not {type(model).__name__}")
    if model.process_group.size() != 1:
        raise ValueError(
            f"the model's process group has {model.process_group.size()} processes: give each its own process group, "
            "process_group=torch.distributed.new_group([rank]), or use FSDP and pccl.training.Site"
        )
    for name in ("find_unused_parameters", "static_graph"):
        if getattr(model, name):
            raise ValueError(f"{name}=True: use pccl.training.DDP, which counts unused parameters as zero")
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    assigned = bucketed(parameters, bucket_bytes)
    hook = _Hook(torch, communicator, [_Bucket(torch, each) for each in assigned], revision, quantization, tag)
    return lambda state, bucket: hook.take(bucket)  # torch rejects annotations other than its own


class _Bucket:
    def __init__(self, torch: Any, parameters: Sequence[Any]) -> None:
        self.parameters = parameters
        self.sent = FlatBuffer(torch, parameters)
        self.received = FlatBuffer(torch, parameters)
        self.has = [False] * len(parameters)
        self.average: Relaunched | None = None

    def land(self) -> list[Any]:
        """Return the averages, in the shapes of the parameters."""
        assert self.average is not None
        found = self.received if self.average.wait().world_size > 1 else self.sent
        self.average = None
        self.has = [False] * len(self.has)
        return found.views


@outside_graphs
class _Hook:
    def __init__(
        self,
        torch: Any,
        communicator: Communicator,
        buckets: list[_Bucket],
        revision: Callable[[], int],
        quantization: QuantizationOptions | None,
        tag: int,
    ) -> None:
        self._torch = torch
        self._communicator = communicator
        self._buckets = buckets
        self._revision = revision
        self._quantization = quantization
        self._tag = tag
        self._places = {
            id(p): (number, i) for number, bucket in enumerate(buckets) for i, p in enumerate(bucket.parameters)
        }
        self._open: list[tuple[Any, Any]] = []
        """torch's buckets of this backward pass, and the futures of their averages."""

    def take(self, given: Any) -> Any:
        """Return a torch.futures.Future of the averages of one of torch's buckets."""
        for parameter, gradient in zip(given.parameters(), given.gradients(), strict=True):
            number, i = self._places[id(parameter)]
            bucket = self._buckets[number]
            if bucket.has[i]:
                raise RuntimeError("an earlier backward pass failed halfway: create a new DistributedDataParallel")
            bucket.sent.views[i].copy_(gradient)
            bucket.has[i] = True
            if all(bucket.has):
                bucket.average = average(
                    self._communicator,
                    bucket.sent.flat,
                    self._tag + number,
                    self._revision(),
                    self._quantization,
                    out=bucket.received.flat,
                )
        devices = [given.buffer().device] if given.buffer().is_cuda else None
        future = self._torch.futures.Future(devices=devices)
        self._open.append((given, future))
        if all(bucket.average is not None for bucket in self._buckets):
            self._land()
        return future

    def _land(self) -> None:
        averages = [bucket.land() for bucket in self._buckets]
        done, self._open = self._open, []
        for given, future in done:
            for parameter, gradient in zip(given.parameters(), given.gradients(), strict=True):
                number, i = self._places[id(parameter)]
                gradient.copy_(averages[number][i])
            future.set_result(given.buffer())
