"""Buckets of gradients: flat buffers that are averaged while the backward pass goes on.

Theory of operation. The parameters are dealt into buckets of about the same size, last parameter first, because
backward passes produce gradients roughly in that order. A bucket has two buffers: the gradients are views of one, which
is sent, and the average is received in the other, whose views become the gradients when it is there; then they change
places. Nothing is copied, and an all-reduce out of place needs no copy of its own either.

*Gradients in flight.* A bucket is in flight from when its last gradient is complete until `give`. The program can see
its gradients meanwhile, and must not write them: what is sent would be neither the old values nor the new ones. Two
things are kept of each bucket and compared when the program asks for the average:

1. Each view's version counter, which torch counts up for every operation in place, also for one that changes nothing.
   (Views are made so that each has a counter of its own.)
2. The sum of the buffer's words. Some writes pass the counters by: those through `tensor.data` or NumPy, and
   `torch.amp.GradScaler.unscale_`. Whatever moves all values towards zero makes the sum smaller, and anything else is
   as unlikely to leave it alone as a sum of 64 bits is.

Writes that nobody notices change what is sent, and with it the average, for all peers alike: the program never had the
memory in which the average arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from pccl.training.group.membership import Averaged
from pccl.training.tensors.torch_arithmetic import default_torch_arithmetic

WORD_BYTES = 8
CHUNK = 1 << 18
"""Elements that are weighed at a time, so that float64 takes little memory."""
ALL = -1
"""A place in a bucket that means: it is not known which gradient."""


class InFlight(Protocol):
    """An average on its way, in `Bucket.result` if there are others, and else what the bucket has."""

    def wait(self) -> Averaged: ...


class FlatBuffer:
    """A flat tensor and its views in the shapes of parameters."""

    def __init__(self, torch: Any, parameters: Sequence[Any]) -> None:
        first = parameters[0]
        counts = [p.numel() for p in parameters]
        size_bytes = sum(counts) * first.element_size()
        memory = torch.zeros(-(-size_bytes // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8, device=first.device)
        self.flat = memory[:size_bytes].view(first.dtype)
        # `data` has a version counter of its own.
        self.views = [part.view(p.shape).data for part, p in zip(self.flat.split(counts), parameters, strict=True)]
        self._words = memory.view(torch.int64)
        self._host = self._words.numpy().view(np.uint64) if first.device.type == "cpu" else None

    def sum(self) -> Any:
        """Return the sum of the words: a number, or a tensor on the buffer's device, which nobody has waited for."""
        return int(self._host.sum()) if self._host is not None else self._words.sum()


class Bucket:
    """Parameters and their gradients, which are averaged together. Not thread-safe."""

    def __init__(self, torch: Any, parameters: Sequence[Any]) -> None:
        """`parameters` are of one dtype and on one device."""
        self.parameters = list(parameters)
        self.average: InFlight | None = None
        """The average of this step, in flight or landed."""
        self._torch = torch
        self._sent = FlatBuffer(torch, parameters)
        self._received: FlatBuffer | None = None
        self._landed: Averaged | None = None
        self._versions: list[int | None] = [None] * len(self.parameters)
        """The version of each gradient that this backward pass has completed."""
        self._sum: Any = None

    @property
    def flat(self) -> Any:
        """The gradients, one after the other."""
        return self._sent.flat

    @property
    def views(self) -> list[Any]:
        """The gradients in the shapes of their parameters."""
        return self._sent.views

    @property
    def is_full(self) -> bool:
        return None not in self._versions

    def has(self, i: int) -> bool:
        """Whether this step has the gradient of parameter `i` already."""
        return self.average is not None or self._versions[i] is not None

    def take(self, i: int) -> None:
        """The gradient of parameter `i` is complete. ValueError for one that cannot be averaged."""
        self._move_in(i)
        self._versions[i] = self.views[i]._version
        self._sum = None

    def note(self) -> None:
        """The backward pass is over: what is there is left alone from here on."""
        if self._sum is None:
            self._sum = self._sent.sum()

    def fill(self) -> None:
        """Fill in the gradients of parameters without a part in the loss: zero, or what earlier backward passes have
        added."""
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if self._versions[i] is not None:
                continue
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view
            else:
                self._move_in(i)

    def result(self) -> Any:
        """Return the flat tensor where the average is to be received."""
        if self._received is None:
            self._received = FlatBuffer(self._torch, self.parameters)
        return self._received.flat

    def weighed(self, factor: float) -> Any:
        """The gradients times `factor` in `result`, where the sum is to be received; 0 for what is not finite, too,
        where that is 0."""
        flat = self.result()
        if factor == 0:
            return flat.zero_()
        with default_torch_arithmetic(self._torch):
            for sent, part in zip(self._sent.flat.split(CHUNK), flat.split(CHUNK), strict=True):
                part.copy_(sent.to(self._torch.float64).mul_(factor))
        return flat

    def divide(self, total: float) -> None:
        """Makes the sum that has landed the mean: the same bits on CPUs and GPUs."""
        flat = self.result()
        # A number would be inverted and multiplied by on GPUs.
        divisor = self._torch.tensor(total, dtype=self._torch.float64, device=flat.device)
        with default_torch_arithmetic(self._torch):
            for part in flat.split(CHUNK):
                part.copy_(part.to(self._torch.float64).div_(divisor))

    def keep_none(self) -> None:
        """Makes the mean 0."""
        self.result().zero_()
        self._sent.flat.zero_()

    def changed(self) -> int | None:
        """The place of a gradient that was written since it was complete, or ALL: one of them was."""
        for i, (parameter, view, version) in enumerate(zip(self.parameters, self.views, self._versions, strict=True)):
            if version is not None and (parameter.grad is not view or view._version != version):
                return i
        return ALL if self._sum is not None and bool(self._sum != self._sent.sum()) else None

    def land(self) -> Averaged:
        """Waits for the average. PCCLError for anything but losses."""
        assert self.average is not None
        self._landed = self.average.wait()
        return self._landed

    def give(self) -> None:
        """Makes the average that has landed the gradients, but of parameters that have been frozen meanwhile: a step
        leaves those alone that have none."""
        assert self._landed is not None
        if self._landed.world_size > 1:
            assert self._received is not None
            self._sent, self._received = self._received, self._sent
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view if parameter.requires_grad else None

    def note_given(self) -> None:
        """Note what `give` has given, for `is_as_given`."""
        self._sum = self._sent.sum()

    def is_as_given(self) -> bool:
        """Whether nobody has changed the averages since `note_given`."""
        return bool(self._sum == self._sent.sum())

    def has_movable(self) -> bool:
        """Whether multiplying the gradients would change any."""
        return bool((self.flat.isfinite() & (self.flat != 0)).any())

    def clear(self) -> None:
        """Makes ready for the next step. No average may be in flight."""
        self.average = self._landed = self._sum = None
        self._versions = [None] * len(self.parameters)
        self._sent.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def _move_in(self, i: int) -> None:
        parameter, view = self.parameters[i], self.views[i]
        if parameter.grad.is_sparse:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse; only dense ones "
                "are averaged, as an Embedding has them without sparse=True"
            )
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view


def dealt(parameters: Sequence[Any], bucket_bytes: int) -> Iterator[list[Any]]:
    """The parameters in groups of one dtype on one device, last parameter first."""
    bucket: list[Any] = []
    size_bytes = 0
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        if bucket and (size_bytes >= bucket_bytes or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(parameter)
        size_bytes += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
