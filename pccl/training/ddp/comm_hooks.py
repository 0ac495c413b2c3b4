"""Communication hooks of `DDP`: what is done to a bucket of gradients instead of averaging it as it is.

Theory of operation. A hook has the signature of those of torch.nn.parallel.DistributedDataParallel:

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]

It is called when all gradients of the bucket are there, which is within the backward pass if they all have a part in
the loss, and returns a future of what is to become of them, or the tensor itself, the same on all peers. What it sends
it gives to `bucket.average`, which returns a future of the average; it can go on from there with `then`:

    def halve(state, bucket):
        sent = bucket.buffer().bfloat16()
        return bucket.average(sent).then(lambda sent: sent.value().to(bucket.buffer().dtype))

The futures of averages are completed within `DDP.synchronize`, one after the other, on the thread that calls it; what
follows them with `then` runs there, and may average once more. An average that a loss has aborted is made again among
those who are left before its future is completed. Who is alone gets what it has given.

All peers call `average` as often and with as many elements, in the same order for each bucket.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from pccl import Communicator, DataType, QuantizationAlgorithm, QuantizationOptions
from pccl.training.ddp.gradient_buckets import Bucket
from pccl.training.group.membership import Average, Averaged


class GradBucket:
    """The bucket that a hook is given: torch.distributed.GradBucket's interface, and `average`. It must not be used
    once the hook's future is complete."""

    def __init__(
        self, communicator: Communicator, bucket: Bucket, tag: int, step: int, number: int, count: int
    ) -> None:
        self.bucket = bucket
        self.flying: deque[tuple[Average, Any, Any, Any]] = deque()
        """Averages, each with its future, what was sent, and where it is received."""
        self._communicator = communicator
        self._tag = tag
        self._step = step
        self._number = number
        self._count = count

    def index(self) -> int:
        """The bucket's number from 0; buckets with the last parameters come first."""
        return self._number

    def is_last(self) -> bool:
        """Whether it is the one with the first parameters."""
        return self._number == self._count - 1

    def buffer(self) -> Any:
        """All its gradients, one after the other, in a flat tensor, to be read."""
        return self.bucket.flat

    def gradients(self) -> list[Any]:
        """The parts of `buffer`, in the shapes of the parameters."""
        return list(self.bucket.views)

    def parameters(self) -> list[Any]:
        return list(self.bucket.parameters)

    def average(self, tensor: Any, quantization: QuantizationOptions | None = None) -> Any:
        """A torch.futures.Future of the mean over all peers of `tensor`, contiguous, of any shape and a dtype that
        `all_reduce` takes. The tensor, unless it is `buffer()`, is overwritten, and must be left alone until then.

        PCCLError INVALID_ARGUMENT for one that cannot be reduced.
        """
        torch = sys.modules["torch"]
        out = self.bucket.result() if tensor is self.bucket.flat else None
        average = Average(self._communicator, tensor, self._tag, self._step, quantization, out=out)
        future = torch.futures.Future()
        self.flying.append((average, future, tensor, tensor if out is None else out))
        return future


CommHook: TypeAlias = Callable[[Any, GradBucket], Any]


class HookedAverage:
    """A bucket on its way through a hook."""

    def __init__(self, bucket: GradBucket, state: Any, hook: CommHook) -> None:
        self._bucket = bucket
        self._returned = hook(state, bucket)

    def wait(self) -> Averaged:
        """Blocks until what the hook has made of it is in the bucket's result, or, alone, in its buffer. PCCLError for
        anything but losses; RuntimeError, TypeError or ValueError of the hook, or for what it returned."""
        bucket = self._bucket
        costs = []
        while bucket.flying:
            average, future, sent, received = bucket.flying.popleft()
            costs.append(average.wait())  # in the order that is the same on all peers
            future.set_result(received if costs[-1].world_size > 1 else sent)
        returned = self._returned
        if hasattr(returned, "wait") and hasattr(returned, "done"):
            if not returned.done():
                raise RuntimeError("the communication hook returned a future that nothing completes")
            returned = returned.wait()
        flat = bucket.buffer()
        if not hasattr(returned, "copy_") or returned.numel() != flat.numel():
            what = f"{returned.numel()} elements" if hasattr(returned, "numel") else type(returned).__name__
            raise TypeError(f"the communication hook must give a tensor of {flat.numel()} elements, but gave {what}")
        world_size = min((cost.world_size for cost in costs), default=1)
        target = bucket.bucket.result() if world_size > 1 else flat
        if returned.data_ptr() != target.data_ptr():
            target.copy_(returned.detach().reshape(-1))
        return Averaged(
            world_size,
            sum(cost.aborted for cost in costs),
            sum(cost.tx_bytes for cost in costs),
            sum(cost.rx_bytes for cost in costs),
            tuple(peer for peer in costs[0].peers if all(peer in cost.peers for cost in costs)) if costs else (),
        )


def name_of(hook: tuple[Any, CommHook] | None) -> str:
    """Return what peers compare of a hook: its name, and its state where that is options."""
    if hook is None:
        return ""
    state, function = hook
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    return f"{name} {state!r}" if isinstance(state, QuantizationOptions) else name


def allreduce_hook(state: Any, bucket: GradBucket) -> Any:
    """Averages the gradients as they are. `state` is not used."""
    return bucket.average(bucket.buffer())


def fp16_compress_hook(state: Any, bucket: GradBucket) -> Any:
    """Sends gradients as float16 and adds them up in their own type; those of 16 bits go as they are. Finite values
    beyond 65504 become infinite. `state` is not used."""
    return _cast(DataType.FLOAT16, bucket)


def bf16_compress_hook(state: Any, bucket: GradBucket) -> Any:
    """Average in bfloat16: the range of float32, an eighth of float16's precision. Otherwise like
    `fp16_compress_hook`."""
    return _cast(DataType.BFLOAT16, bucket)


def quantization_hook(state: QuantizationOptions, bucket: GradBucket) -> Any:
    """Sends gradients in fewer bits, as `state` says."""
    return bucket.average(bucket.buffer(), state)


def _cast(datatype: DataType, bucket: GradBucket) -> Any:
    options = QuantizationOptions(datatype, QuantizationAlgorithm.CAST)
    return bucket.average(bucket.buffer(), options if bucket.buffer().element_size() > 2 else None)
