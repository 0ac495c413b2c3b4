"""Communication hooks for `DDP.register_comm_hook`, which replace the plain average of a bucket of gradients.

A hook has the same signature as in torch.nn.parallel.DistributedDataParallel. It is called when all gradients of the
bucket are ready, usually within the backward pass, and returns the result tensor or a future of it. The result
must be the same on all peers. `bucket.average` sends a tensor and returns a future of its average:

    def halve(state, bucket):
        sent = bucket.buffer().bfloat16()
        return bucket.average(sent).then(lambda sent: sent.value().to(bucket.buffer().dtype))

`DDP.synchronize` completes these futures one after the other on the calling thread. Callbacks of `then` run there too,
and may call `average` again. If a peer loss aborts an average, the survivors first repeat it. A peer that is alone
gets its own tensor back. For each bucket, all peers must make the same `average` calls in the same order.
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
    """Average the gradients without compression. `state` is not used."""
    return bucket.average(bucket.buffer())


def fp16_compress_hook(state: Any, bucket: GradBucket) -> Any:
    """Send gradients as float16 (values beyond 65504 become infinite) and sum them in their original type."""
    return _cast(DataType.FLOAT16, bucket)


def bf16_compress_hook(state: Any, bucket: GradBucket) -> Any:
    """Send gradients as bfloat16, with float32's range but an eighth of float16's precision. `state` is not used."""
    return _cast(DataType.BFLOAT16, bucket)


def quantization_hook(state: QuantizationOptions, bucket: GradBucket) -> Any:
    """Quantize gradients as `state` specifies."""
    return bucket.average(bucket.buffer(), state)


def _cast(datatype: DataType, bucket: GradBucket) -> Any:
    options = QuantizationOptions(datatype, QuantizationAlgorithm.CAST)
    return bucket.average(bucket.buffer(), options if bucket.buffer().element_size() > 2 else None)
