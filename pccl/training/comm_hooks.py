"""Communication hooks for `DDP.register_comm_hook`, under the name by which programs import them.

`pccl.training.ddp.comm_hooks` has them, and says how to write another.
"""

from pccl.training.ddp.comm_hooks import (
    CommHook,
    GradBucket,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    quantization_hook,
)

__all__ = [
    "CommHook",
    "GradBucket",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "quantization_hook",
]
