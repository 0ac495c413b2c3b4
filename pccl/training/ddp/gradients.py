"""Gradients in buckets: flat buffers that are averaged during the backward pass, with weights and communication hooks.

A bucket has two buffers. The gradients are views of one, which is sent; the average is received into the other, and
then the two are swapped. A bucket must not be written from its last complete gradient until `give`. To detect writes,
each view's version counter is compared before the step. The sum of the buffer's words is compared too, because some
writes do not advance the counter.

*Weights.* The mean is `sum(w * x) / sum(w)`: an all-reduce of gradients times `w / 2**e`, divided by the sum of these
factors in float64. `2**e` exceeds the largest weight, so products do not overflow. Weights are sent with the refusals,
after the backward pass. Buckets are launched plain (None) or as weighted sums with exponent `e`. On all peers:

1. If the step needs a different form than the one launched, all buckets are launched again in that form, which is kept
   from then on. The first weighted step, and the first one after an admission, thus send gradients twice.
2. If an average includes a peer whose weight is unknown because it was lost later, the bucket is launched again.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from pccl import Communicator, QuantizationOptions, ReduceOp
from pccl.training.group.relaunch import Compression, Outcome, Relaunched, average, combined, rescale
from pccl.training.state.replica import as_real, default_torch_arithmetic

BUCKET_BYTES = 4 << 20
WORD_BYTES = 8
ALONE = Outcome(1, 0, 0, 0)
CHUNK = 1 << 18
"""The number of elements scaled at a time, which limits the memory for float64."""
ALL = -1
"""The index in a bucket that stands for an unknown gradient."""


class FlatBuffer:
    """A flat tensor of real numbers and its views in the shapes of parameters, which may be complex."""

    def __init__(self, torch: Any, parameters: Sequence[Any]) -> None:
        first = parameters[0]
        counts = [p.numel() for p in parameters]
        size_bytes = sum(counts) * first.element_size()
        memory = torch.zeros(-(-size_bytes // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8, device=first.device)
        whole = memory[:size_bytes].view(first.dtype)
        self.flat = as_real(whole).view(-1)
        # `data` has its own version counter.
        parts = zip(whole.split(counts), parameters, strict=True)
        # With the parameters' own strides, which may be those of torch.channels_last.
        self.views = [part.as_strided(p.shape, p.stride(), part.storage_offset()).data for part, p in parts]
        self._words = memory.view(torch.int64)
        self._host = self._words.numpy().view(np.uint64) if first.device.type == "cpu" else None

    def sum(self) -> Any:
        """Return the sum of the words: a number, or a device tensor whose computation may not have finished."""
        return int(self._host.sum()) if self._host is not None else self._words.sum()


class Bucket:
    """Parameters whose gradients are averaged together. Not thread-safe."""

    def __init__(self, torch: Any, parameters: Sequence[Any]) -> None:
        """`parameters` have the same dtype and device."""
        self.parameters = list(parameters)
        self.average: Relaunched | HookedAverage | None = None
        self._torch = torch
        self._sent = FlatBuffer(torch, parameters)
        self._received: FlatBuffer | None = None
        self._landed: Outcome | None = None
        self._versions: list[int | None] = [None] * len(self.parameters)
        """The version of each gradient when the backward pass completed it, or None."""
        self._sum: Any = None

    @property
    def flat(self) -> Any:
        return self._sent.flat

    @property
    def views(self) -> list[Any]:
        return self._sent.views

    @property
    def is_full(self) -> bool:
        return None not in self._versions

    @property
    def is_untouched(self) -> bool:
        """Whether no backward pass has reached these parameters since the last step."""
        given = all(parameter.grad is view for parameter, view in zip(self.parameters, self.views, strict=True))
        return given and not any(self._versions) and self.average is None and not bool(self._sent.flat.any())

    def has(self, i: int) -> bool:
        """Return whether this step already has the gradient of parameter `i`."""
        return self.average is not None or self._versions[i] is not None

    def take(self, i: int) -> None:
        """Take the complete gradient of parameter `i`. Raises ValueError if it cannot be averaged."""
        self._move_in(i)
        self._versions[i] = self.views[i]._version
        self._sum = None

    def note(self) -> None:
        """Record the sum at the end of the backward pass; from then on the gradients must not change."""
        if self._sum is None:
            self._sum = self._sent.sum()

    def fill(self) -> None:
        """Fill in the gradients of unused parameters: zero, or the sum from earlier backward passes."""
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if self._versions[i] is not None:
                continue
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view
            else:
                self._move_in(i)

    def result(self) -> Any:
        """Return the flat tensor that receives the average."""
        if self._received is None:
            self._received = FlatBuffer(self._torch, self.parameters)
        return self._received.flat

    def weighed(self, factor: float) -> Any:
        """Return the gradients times `factor`, in `result`; all 0 if `factor` is 0."""
        flat = self.result()
        if factor == 0:
            return flat.zero_()
        with default_torch_arithmetic(self._torch):
            for sent, part in zip(self._sent.flat.split(CHUNK), flat.split(CHUNK), strict=True):
                part.copy_(sent.to(self._torch.float64) * factor)
        return flat

    def divide(self, total: float) -> None:
        """Turn the landed sum into the mean, with the same bits on CPUs and GPUs."""
        flat = self.result()
        # The divisor is a tensor because GPUs would multiply by the inverse of a plain number.
        divisor = self._torch.tensor(total, dtype=self._torch.float64, device=flat.device)
        with default_torch_arithmetic(self._torch):
            for part in flat.split(CHUNK):
                part.copy_(part.to(self._torch.float64).div_(divisor))

    def keep_none(self) -> None:
        """Set the mean to 0."""
        self.result().zero_()
        self._sent.flat.zero_()

    def changed(self) -> int | None:
        """Return the index of a gradient written after it was complete, ALL if the index is unknown, or None."""
        for i, (parameter, view, version) in enumerate(zip(self.parameters, self.views, self._versions, strict=True)):
            if version is not None and (parameter.grad is not view or view._version != version):
                return i
        return ALL if self._sum is not None and bool(self._sum != self._sent.sum()) else None

    def land(self) -> Outcome:
        """Wait for the average. Raises PCCLError for failures other than losses."""
        assert self.average is not None
        self._landed = self.average.wait()
        return self._landed

    def give(self) -> None:
        """Make the landed average the parameters' gradients, except for parameters frozen in the meantime."""
        assert self._landed is not None
        if self._landed.world_size > 1:
            assert self._received is not None
            self._sent, self._received = self._received, self._sent
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view if parameter.requires_grad else None

    def clear(self) -> None:
        """Prepare for the next step. No average may be in flight."""
        self.average = self._landed = self._sum = None
        self._versions = [None] * len(self.parameters)
        self._sent.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def _move_in(self, i: int) -> None:
        parameter, view = self.parameters[i], self.views[i]
        if parameter.grad.is_sparse:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse; only dense gradients can "
                "be averaged, such as those of an Embedding without sparse=True"
            )
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view


def bucketed(parameters: Sequence[Any], bucket_bytes: int) -> Iterator[list[Any]]:
    """Yield the parameters in groups of equal dtype and device, last parameter first."""
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


class GradBucket:
    """A bucket with torch.distributed.GradBucket's interface and `average`, valid until the hook's future completes."""

    def __init__(
        self, communicator: Communicator, bucket: Bucket, tag: int, step: int, number: int, count: int
    ) -> None:
        self.bucket = bucket
        self.flying: deque[tuple[Relaunched, Any, Any, Any]] = deque()
        """Averages in flight, each with its future, the tensor sent and the tensor received into."""
        self._communicator = communicator
        self._tag = tag
        self._step = step
        self._number = number
        self._count = count

    def index(self) -> int:
        """Return the bucket's number from 0; buckets with the last parameters come first."""
        return self._number

    def is_last(self) -> bool:
        """Return whether it is the bucket with the first parameters."""
        return self._number == self._count - 1

    def buffer(self) -> Any:
        """Return all gradients in a flat tensor, which must not be written."""
        return self.bucket.flat

    def gradients(self) -> list[Any]:
        """Return the parts of `buffer`, in the shapes of the parameters."""
        return list(self.bucket.views)

    def parameters(self) -> list[Any]:
        return list(self.bucket.parameters)

    def average(self, tensor: Any, quantization: QuantizationOptions | None = None) -> Any:
        """Return a torch.futures.Future of the mean of `tensor` over all peers.

        `tensor` must be contiguous and of a dtype that `all_reduce` takes. It is overwritten unless it is `buffer()`.
        Raises PCCLError.
        """
        torch = sys.modules["torch"]
        out = self.bucket.result() if tensor is self.bucket.flat else None
        op = average(self._communicator, tensor, self._tag, self._step, quantization, out=out)
        future = torch.futures.Future()
        self.flying.append((op, future, tensor, tensor if out is None else out))
        return future


CommHook: TypeAlias = Callable[[Any, GradBucket], Any]


class HookedAverage:
    """A bucket whose average a hook has started."""

    def __init__(self, bucket: GradBucket, state: Any, hook: CommHook) -> None:
        self._bucket = bucket
        self._returned = hook(state, bucket)

    def wait(self) -> Outcome:
        """Wait for the hook's result. Store it in `result`, or in the buffer if alone. Raises the hook's errors."""
        bucket = self._bucket
        costs = []
        while bucket.flying:
            op, future, sent, received = bucket.flying.popleft()
            costs.append(op.wait())  # in the same order on all peers
            future.set_result(received if costs[-1].world_size > 1 else sent)
        returned = self._returned
        if hasattr(returned, "wait") and hasattr(returned, "done"):
            if not returned.done():
                raise RuntimeError("the communication hook returned a future that never completes")
            returned = returned.wait()
        flat = bucket.buffer()
        if not hasattr(returned, "copy_") or returned.numel() != flat.numel():
            what = f"{returned.numel()} elements" if hasattr(returned, "numel") else type(returned).__name__
            raise TypeError(f"the communication hook must return a tensor of {flat.numel()} elements, not {what}")
        outcome = combined(costs) if costs else ALONE
        target = bucket.bucket.result() if outcome.world_size > 1 else flat
        if returned.data_ptr() != target.data_ptr():
            target.copy_(returned.detach().reshape(-1))
        return outcome


def name_of(hook: tuple[Any, CommHook] | None) -> str:
    """Return the text by which peers compare hooks: the name, and the state if it is quantization options."""
    if hook is None:
        return ""
    state, function = hook
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    return f"{name} {state!r}" if isinstance(state, QuantizationOptions) else name


EXPONENT_SLACK = 4
"""How far an exponent may exceed a step's need before buckets are relaunched, which costs a step's time."""


def factor_of(weight: float, exponent: int) -> float:
    return math.ldexp(weight, -exponent)


def form_of(weights: Mapping[int, float], used: int | None) -> int | None:
    """Return the form that buckets launched with `used` need for these weights (NaN: no weight)."""
    if any(math.isnan(weight) for weight in weights.values()):
        return None
    largest = max(weights.values())
    if largest == 0:
        return used or 0
    needed = math.frexp(largest)[1]
    return used if used is not None and needed <= used <= needed + EXPONENT_SLACK else needed


def settle_buckets(
    buckets: Sequence[Bucket],
    averages: Sequence[Outcome],
    weights: Mapping[int, float],
    used: int | None,
    launch: Callable[[int, int | None], None],
) -> tuple[list[Outcome], int | None]:
    """Turn the landed buckets into the means for these weights. A group call.

    Return the outcomes and the form for the next step's buckets. `launch(number, exponent)` relaunches a bucket.
    """
    form = form_of(weights, used)
    done = list(averages)
    if form != used:
        for number in range(len(buckets)):
            launch(number, form)
        done = [bucket.land().with_cost(former) for bucket, former in zip(buckets, done, strict=True)]
    if form is None:
        return done, None
    for number, bucket in enumerate(buckets):
        while not weights.keys() >= {*done[number].peers}:
            launch(number, form)
            done[number] = bucket.land().with_cost(done[number], 1)
        total = math.fsum(factor_of(weights[peer], form) for peer in done[number].peers)
        if total == 0:
            bucket.keep_none()
        elif done[number].world_size > 1:
            bucket.divide(total)
    return done, form


class GradientAverages:
    """All buckets of a module. Not thread-safe, except for the calls that torch makes on the backward pass's thread."""

    def __init__(
        self,
        communicator: Communicator,
        buckets: Sequence[Bucket],
        tag: int,
        compression: Compression,
    ) -> None:
        """`tag` is the first bucket's tag; the other buckets use the tags that follow. Raises ValueError if the type of
        a bucket cannot be compressed."""
        self.buckets = buckets
        self.comm_hook: tuple[Any, CommHook] | None = None
        self.limit = math.inf
        """The largest sum that can be sent. If finite, buckets are sent after the backward pass, once it is checked."""
        self._communicator = communicator
        self._tag = tag
        self._quantization = compression.quantization
        self._feedback = [compression.feedback(bucket.flat.dtype) for bucket in buckets]
        self._factors = [0.0] * len(buckets)
        """What each bucket's residuals are multiplied by, as parts of weighted sums."""
        self._exponent: int | None = None
        self._is_note_queued = False

    def take(self, number: int, i: int, revision: int) -> None:
        """Take the complete gradient of parameter `i`, and launch the bucket if it is full. Raises ValueError."""
        bucket = self.buckets[number]
        bucket.take(i)
        if bucket.is_full and self._exponent is None and not self._is_limited:
            self._launch(number, None, revision)
        elif not self._is_note_queued:
            self._is_note_queued = True
            torch = sys.modules["torch"]
            torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        """Record the sums at the end of the backward pass."""
        self._is_note_queued = False
        for bucket in self.buckets:
            bucket.note()

    @property
    def _is_limited(self) -> bool:
        return self.comm_hook is None and math.isfinite(self.limit)

    def are_finite(self) -> bool:
        """Return whether all of this peer's gradients are finite, also as sums on the network. Fill in those of unused
        parameters."""
        for bucket in self.buckets:
            if bucket.average is None:
                bucket.fill()
        views = [view for bucket in self.buckets for view in bucket.views]
        limit = self.limit / self._communicator.world_size
        return all(bool(view.isfinite().all()) for view in views) and (
            not self._is_limited or all(bool((view.abs() <= limit).all()) for view in views)
        )

    def discard(self) -> None:
        """Set the gradients that are not in flight to 0."""
        for bucket in self.buckets:
            if bucket.average is None:
                bucket.flat.zero_()

    def launch_rest(self, weight: float | None, revision: int) -> None:
        """Launch the buckets that are not in flight."""
        for number, bucket in enumerate(self.buckets):
            if bucket.average is None:
                bucket.fill()
                self._launch(number, weight, revision)

    def land(self) -> list[Outcome]:
        """Wait for all buckets. Raises PCCLError for failures other than losses."""
        return [bucket.land() for bucket in self.buckets]

    def settle(
        self, averages: list[Outcome], weights: Mapping[int, float], own: float | None, revision: int
    ) -> list[Outcome]:
        """Call `settle_buckets` with this peer's weight `own`. Has no effect with a communication hook."""
        if self.comm_hook is not None:
            return averages

        def launch(number: int, exponent: int | None) -> None:
            if (feedback := self._feedback[number]) is not None:
                feedback.reset()  # this step's gradients have been sent, perhaps times another factor
            self._launch_plain(number, exponent, own, revision)

        averages, self._exponent = settle_buckets(self.buckets, averages, weights, self._exponent, launch)
        return averages

    def give(self) -> None:
        for bucket in self.buckets:
            bucket.give()

    def clear(self) -> None:
        self._is_note_queued = False
        for bucket in self.buckets:
            bucket.clear()

    def forget_weights(self) -> None:
        """Launch the next step's buckets plain because newcomers do not know the exponent."""
        self._exponent = None

    def _launch(self, number: int, weight: float | None, revision: int) -> None:
        bucket = self.buckets[number]
        bucket.note()
        if self.comm_hook is None:
            self._launch_plain(number, self._exponent, weight, revision)
        else:
            given = GradBucket(self._communicator, bucket, self._tag + number, revision, number, len(self.buckets))
            bucket.average = HookedAverage(given, *self.comm_hook)

    def _launch_plain(self, number: int, exponent: int | None, weight: float | None, revision: int) -> None:
        """Launch a bucket, or relaunch it after it has landed."""
        bucket = self.buckets[number]
        sent, out, op = bucket.flat, bucket.result(), ReduceOp.AVG
        if exponent is not None:
            factor = factor_of(weight or 0.0, exponent)
            sent, out, op = bucket.weighed(factor), None, ReduceOp.SUM
            if (feedback := self._feedback[number]) is not None:
                rescale(feedback, factor / self._factors[number] if self._factors[number] else 0.0)
            self._factors[number] = factor
        tag = self._tag + number
        bucket.average = average(
            self._communicator, sent, tag, revision, self._quantization, op=op, out=out, feedback=self._feedback[number]
        )
