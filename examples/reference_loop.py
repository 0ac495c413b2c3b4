"""A script as written for the Python package of the reference library, which runs unchanged on pccl.

    pccl launch -n 2 examples/reference_loop.py

It uses positional arguments, descriptors and handles throughout, with NumPy and, if installed, torch.
`examples/hello.py` and `examples/churn.py` show pccl's shorter forms.
"""

import importlib.util
import os
import time

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
    Result,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch

STEPS = 5
ELEMENTS = 10_000


def main() -> None:
    communicator = Communicator(os.environ.get("PCCL_MASTER", "127.0.0.1:48148"), 0)
    communicator.connect(n_attempts=15)

    weights = np.zeros(ELEMENTS, dtype=np.float32)
    tensors = [TensorInfo.from_numpy(weights, "weights", allow_content_inequality=False)]
    if HAS_TORCH:
        momentum = torch.zeros(ELEMENTS, dtype=torch.float32)
        tensors.append(TensorInfo.from_torch(momentum, "momentum", allow_content_inequality=False))
    state = SharedState(tensors)

    quantized = QuantizationOptions(quantized_datatype=DataType.UINT8, algorithm=QuantizationAlgorithm.ZERO_POINT_SCALE)
    plain = QuantizationOptions(quantized_datatype=DataType.FLOAT, algorithm=QuantizationAlgorithm.NONE)
    operand = ReduceOperandDescriptor(datatype=DataType.FLOAT, distribution_hint=DistributionHint.NORMAL)

    iteration = 0
    while state.revision < STEPS:
        # A newcomer continues here after connect(), the others after update_topology().
        world_size = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        if (iteration > 0 or world_size == 1) and communicator.are_peers_pending():
            communicator.update_topology()
        world_size = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        if world_size < 2:
            time.sleep(0.05)
            continue

        sync_info = communicator.sync_shared_state(state, SharedStateSyncStrategy.ENFORCE_POPULAR)
        print(f"revision {state.revision}: sent {sync_info.tx_bytes} and received {sync_info.rx_bytes} bytes of state")

        gradient = np.random.default_rng(state.revision).standard_normal(ELEMENTS).astype(np.float32)
        reduced = np.empty_like(gradient)
        while world_size > 1:
            handle = communicator.all_reduce_async(
                gradient,
                reduced,
                op=ReduceOp.AVG,
                tag=0,
                operand_descriptor=operand,
                quantization_options=quantized,
            )
            is_success, status, info = handle.wait()
            if is_success and info is not None:
                assert status == Result.SUCCESS
                print(f"quantized: {info.local_world_size} peers, {info.tx_bytes} bytes sent")
                break
            print(f"aborted with {status}, trying again")
            world_size = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)

        # Several tensors at once, retried together.
        pieces = np.array_split(np.ones(ELEMENTS, dtype=np.float32), 4)
        sums = [np.empty_like(piece) for piece in pieces]
        descriptors = [
            ReduceOpDescriptor.from_numpy(
                piece,
                total,
                ReduceDescriptor(
                    count=piece.size,
                    op=ReduceOp.SUM,
                    tag=tag,
                    operand_descriptor=ReduceOperandDescriptor(
                        datatype=DataType.from_numpy_dtype(piece.dtype), distribution_hint=DistributionHint.NONE
                    ),
                    quantization_options=plain,
                ),
            )
            for tag, (piece, total) in enumerate(zip(pieces, sums, strict=True))
        ]
        if HAS_TORCH:
            velocity = torch.full((ELEMENTS,), 0.5)
            descriptors.append(
                ReduceOpDescriptor.from_torch(
                    velocity,
                    velocity,
                    ReduceDescriptor(
                        count=velocity.numel(),
                        op=ReduceOp.AVG,
                        tag=len(descriptors),
                        operand_descriptor=ReduceOperandDescriptor(
                            datatype=DataType.from_torch_dtype(velocity.dtype),
                            distribution_hint=DistributionHint.NORMAL,
                        ),
                        quantization_options=plain,
                    ),
                )
            )
        try:
            info = communicator.all_reduce_multiple_with_retry(descriptors, max_in_flight=8)
        except PCCLError as error:
            if error.result != Result.TOO_FEW_PEERS:
                raise
            continue
        print(f"together: {info.local_world_size} peers, {sums[0][0]:g} each")

        weights -= 0.1 * reduced
        if HAS_TORCH:
            momentum += velocity
        state.revision += 1
        iteration += 1

    print(f"done at revision {state.revision}, checksum {float(weights.sum()):.6f}")


if __name__ == "__main__":
    main()
