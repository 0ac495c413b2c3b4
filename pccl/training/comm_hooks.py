"""Communication hooks for `DDP.register_comm_hook`: what is done to a bucket of gradients instead of a plain average.

A hook has the signature of those of torch.nn.parallel.DistributedDataParallel. It is called when all gradients of the
bucket are there, usually within the backward pass, and returns a future of the result, or the tensor itself, the same
on all peers. `bucket.average` sends a tensor and returns a future of its average:

    def halve(state, bucket):
        sent = bucket.buffer().bfloat16()
        return bucket.average(sent).then(lambda sent: sent.value().to(bucket.buffer().dtype))

`DDP.synchronize` completes these futures one after the other, on the thread that calls it; callbacks of `then` run
there, and may average again. An average that a loss has aborted is made again among the survivors first. Alone, a peer
gets what it has given. All peers call `average` equally often, with as many elements, in one order for each bucket.
"""

from __future__ import annotations

from typing import Any

from pccl import DataType, QuantizationAlgorithm, QuantizationOptions
from pccl.training.ddp.gradients import CommHook, GradBucket

__all__ = [
    "CommHook",
    "GradBucket",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "quantization_hook",
]


def allreduce_hook(state: Any, bucket: GradBucket) -> Any:
    """Average the gradients as they are. `state` is not used."""
    return bucket.average(bucket.buffer())


def fp16_compress_hook(state: Any, bucket: GradBucket) -> Any:
    """Send gradients as float16 (values beyond 65504 become infinite) and add them up in their own type."""
    return _cast(DataType.FLOAT16, bucket)


def bf16_compress_hook(state: Any, bucket: GradBucket) -> Any:
    """Send gradients as bfloat16: the range of float32, an eighth of float16's precision. `state` is not used."""
    return _cast(DataType.BFLOAT16, bucket)


def quantization_hook(state: QuantizationOptions, bucket: GradBucket) -> Any:
    """Send gradients in fewer bits, quantized by `state`."""
    return bucket.average(bucket.buffer(), state)


def _cast(datatype: DataType, bucket: GradBucket) -> Any:
    options = QuantizationOptions(datatype, QuantizationAlgorithm.CAST)
    return bucket.average(bucket.buffer(), options if bucket.buffer().element_size() > 2 else None)
