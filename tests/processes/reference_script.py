"""A training script as it is written for the reference API: no timeouts, no `with`, no close.

    python reference_script.py MASTER WORLD numpy|torch

Every peer prints the digest of its final parameters.
"""

# mypy: ignore-errors
import sys
import time
import zlib

import numpy as np

from pccl import (
    Attribute,
    Communicator,
    DataType,
    DistributionHint,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)

MASTER, WORLD, LIBRARY = sys.argv[1], int(sys.argv[2]), sys.argv[3]
STEPS = 6
N = 1000

weights = np.random.randn(N).astype(np.float32)
momentum = np.zeros(N, np.float64)
if LIBRARY == "torch":
    import torch

    weights, momentum = torch.from_numpy(weights), torch.from_numpy(momentum)
    make_info, make_descriptor, like = TensorInfo.from_torch, ReduceOpDescriptor.from_torch, torch.zeros_like
    dtype = DataType.from_torch_dtype(weights.dtype)
else:
    make_info, make_descriptor, like = TensorInfo.from_numpy, ReduceOpDescriptor.from_numpy, np.zeros_like
    dtype = DataType.from_numpy_dtype(weights.dtype)

shared_state = SharedState(
    [
        make_info(weights, "weights", allow_content_inequality=False),
        make_info(momentum, "momentum", allow_content_inequality=False),
    ]
)
communicator = Communicator(MASTER, 0)
communicator.connect(n_attempts=15)

synced_world_size = 0
while shared_state.revision < STEPS:
    if communicator.are_peers_pending():
        communicator.update_topology()
    world_size = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
    if world_size < WORLD:
        time.sleep(0.01)
        continue
    if world_size != synced_world_size:
        communicator.optimize_topology()
        info = communicator.sync_shared_state(shared_state, SharedStateSyncStrategy.ENFORCE_POPULAR)
        assert info.tx_bytes + info.rx_bytes > 0
        synced_world_size = world_size

    gradient = like(weights)
    gradient[:] = 0.01 * weights + 0.001 * shared_state.revision
    reduced = like(gradient)
    while world_size > 1:
        try:
            info = communicator.all_reduce(
                gradient,
                reduced,
                op=ReduceOp.SUM,
                tag=0,
                operand_descriptor=ReduceOperandDescriptor(datatype=dtype, distribution_hint=DistributionHint.NORMAL),
                quantization_options=QuantizationOptions(
                    quantized_datatype=DataType.UINT8, algorithm=QuantizationAlgorithm.MIN_MAX
                ),
            )
            assert info.local_world_size == world_size
            break
        except PCCLError as error:
            print(f"all_reduce failed: {error.result}", file=sys.stderr)
            world_size = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)

    handle = communicator.all_reduce_async(momentum, momentum, op=ReduceOp.AVG, tag=1)
    is_success, status, info = handle.wait()
    assert is_success, status
    parts = [weights[: N // 2], weights[N // 2 :]]
    info = communicator.all_reduce_multiple_with_retry(
        [
            make_descriptor(
                part,
                part,
                ReduceDescriptor(
                    count=N // 2,
                    op=ReduceOp.MAX,
                    tag=tag,
                    operand_descriptor=ReduceOperandDescriptor(dtype, DistributionHint.NONE),
                    quantization_options=QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.NONE),
                ),
            )
            for tag, part in enumerate(parts)
        ],
        max_in_flight=8,
    )
    assert info.tx_bytes > 0

    momentum *= 0.9
    momentum += reduced
    weights -= reduced
    shared_state.revision += 1

print(zlib.crc32(np.asarray(weights)), zlib.crc32(np.asarray(momentum)), shared_state.revision)
