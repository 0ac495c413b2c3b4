"""The averages of a module's gradients: buckets that are launched as they become full, and settled once all landed.

Theory of operation. A bucket whose gradients are all complete is launched in the backward pass, unless peers give
weights: these are known only afterwards (`pccl.training.ddp.gradient_weights`). `launch_rest` launches what is left,
`land` waits for all, `settle` makes weighted means, and `give` makes the averages the gradients. Each bucket has a tag
of its own, so peers whose backward passes complete them in different orders still average like with like.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pccl import Communicator, QuantizationOptions, ReduceOp
from pccl.training.ddp.comm_hooks import CommHook, GradBucket, HookedAverage
from pccl.training.ddp.gradient_buckets import Bucket
from pccl.training.ddp.gradient_weights import factor_of, settle
from pccl.training.group.membership import Average, Averaged


class GradientAverages:
    """All buckets of a module. Not thread-safe, but for what torch calls on the thread of the backward pass."""

    def __init__(
        self,
        communicator: Communicator,
        buckets: Sequence[Bucket],
        tag: int,
        quantization: QuantizationOptions | None,
    ) -> None:
        """`tag` is that of the first bucket; the next ones have those after it."""
        self.buckets = buckets
        self.comm_hook: tuple[Any, CommHook] | None = None
        """The hook's state, and the hook."""
        self._communicator = communicator
        self._tag = tag
        self._quantization = quantization
        self._exponent: int | None = None
        """The way in which buckets are launched, the same on all peers; see `pccl.training.ddp.gradient_weights`."""
        self._is_note_queued = False

    def take(self, number: int, i: int, revision: int) -> None:
        """Take the complete gradient of parameter `i` of a bucket, and launch the bucket if it is full. Called in the
        backward pass. ValueError: the gradient cannot be averaged."""
        bucket = self.buckets[number]
        bucket.take(i)
        if bucket.is_full and self._exponent is None:
            self._launch(number, None, revision)
        elif not self._is_note_queued:
            self._is_note_queued = True
            torch = sys.modules["torch"]
            torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        """Note what gradients are, as the backward pass is over."""
        self._is_note_queued = False
        for bucket in self.buckets:
            bucket.note()

    def launch_rest(self, weight: float | None, revision: int) -> None:
        """Launch the buckets that are not on their way. Parameters without a part in the loss count as zero."""
        for number, bucket in enumerate(self.buckets):
            if bucket.average is None:
                bucket.fill()
                self._launch(number, weight, revision)

    def land(self) -> list[Averaged]:
        """Wait for all buckets. PCCLError for anything but losses."""
        return [bucket.land() for bucket in self.buckets]

    def settle(
        self, averages: list[Averaged], weights: Mapping[int, float], own: float | None, revision: int
    ) -> list[Averaged]:
        """Make what has landed the means that the peers' weights (NaN: none) ask for, and return what became of each.
        `own` is this peer's weight. A joint call; it may launch buckets again."""
        if self.comm_hook is not None:
            return averages

        def launch(number: int, exponent: int | None) -> None:
            self._launch_plain(number, exponent, own, revision)

        averages, self._exponent = settle(self.buckets, averages, weights, self._exponent, launch)
        return averages

    def give(self) -> None:
        """Make the averages the gradients."""
        for bucket in self.buckets:
            bucket.give()

    def clear(self) -> None:
        """Get ready for the next step. No average may be in flight."""
        self._is_note_queued = False
        for bucket in self.buckets:
            bucket.clear()

    def forget_weights(self) -> None:
        """Launch the next step's buckets as without weights, since newcomers do not know the exponent."""
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
        """Launch a bucket, for the first time or again after it has landed."""
        bucket = self.buckets[number]
        sent, out, op = bucket.flat, bucket.result(), ReduceOp.AVG
        if exponent is not None:
            sent, out, op = bucket.weighed(factor_of(weight or 0.0, exponent)), None, ReduceOp.SUM
        tag = self._tag + number
        bucket.average = Average(self._communicator, sent, tag, revision, self._quantization, op=op, out=out)
