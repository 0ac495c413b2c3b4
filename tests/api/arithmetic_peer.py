"""A peer that reduces and trains in a floating-point environment of its own, as a process:

    python -m tests.api.arithmetic_peer ENVIRONMENT WHEN PEERS KIND MASTER

ENVIRONMENT as in `tests.api.odd_arithmetic`, taken `before` or `after` the communicator is made; KIND is a key of
`KINDS`.
Prints a line of digests, which are the same for all peers of the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import blake3
import numpy as np

from pccl import Communicator, DataType, QuantizationAlgorithm, QuantizationOptions, ReduceAlgorithm, ReduceOp
from pccl.training import DDP, DiLoCo
from tests.api import odd_arithmetic
from tests.support.cluster import until

TINY_BITS = 1 << 14
"""The bits of a subnormal float32, 2**-135; hundreds of it are subnormal, too."""
COUNT = 40_000
"""Elements; more than torch gives to one thread."""
STEPS = 4
QUANTIZATIONS = [
    None,
    QuantizationOptions(),
    QuantizationOptions(algorithm=QuantizationAlgorithm.ZERO_POINT_SCALE, stochastic=True),
    QuantizationOptions(bits=4),
    QuantizationOptions(DataType.INT16),
    QuantizationOptions(DataType.BFLOAT16, QuantizationAlgorithm.CAST),
    QuantizationOptions(DataType.FLOAT16, QuantizationAlgorithm.CAST, stochastic=True),
]


def values(number: int, count: int = COUNT) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Runs of subnormal numbers between runs of others, whose sums have to be rounded. Made of bits."""
    steps = (np.arange(count) * 37 % 101 + 1 + number).astype(np.uint32)
    usual = steps * np.uint32(0x24925) + np.uint32(0x3E000000)
    return np.where(np.arange(count) // 128 % 2 == 0, steps * np.uint32(TINY_BITS), usual).view(np.float32)


class Enter:
    """The environment, at the time that was asked for."""

    def __init__(self, environment: str, when: str) -> None:
        self.environment = environment
        self.when = when

    def at(self, time: str) -> None:
        if time == self.when:
            odd_arithmetic.take(self.environment)


def connected(address: str, enter: Enter) -> Communicator:
    enter.at("before")
    communicator = Communicator(address)
    communicator.connect()
    enter.at("after")
    return communicator


def reduce_all(address: str, peers: int, enter: Enter) -> list[str]:
    """Return the digest of the result of every quantization, algorithm, dtype and op."""
    communicator = connected(address, enter)

    def are_all_here() -> bool:
        if communicator.world_size < peers and communicator.are_peers_pending():
            communicator.update_topology()
        return communicator.world_size == peers

    until(are_all_here, f"{peers} peers")
    own = values(communicator.membership.rank)
    digests = []
    for quantization in QUANTIZATIONS:
        for algorithm in ReduceAlgorithm:
            for dtype in (np.float16, np.float32, np.float64):
                if quantization is not None and quantization.algorithm is QuantizationAlgorithm.CAST:
                    dtype = max(dtype, np.float32, key=lambda each: np.dtype(each).itemsize)
                for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD, ReduceOp.MAX):
                    array = own.astype(dtype)
                    communicator.all_reduce(array, op=op, algorithm=algorithm, quantization_options=quantization)
                    digests.append(blake3.blake3(array.data.cast("B")).hexdigest(8))
    # What IEEE 754 says of sums that are exact, on everybody.
    tiny = own[:128].copy()
    communicator.all_reduce(tiny, op=ReduceOp.SUM)
    expected = np.sum([values(rank, 128).view(np.uint32) for rank in range(peers)], axis=0, dtype=np.uint32)
    digests.append(str(np.array_equal(tiny.view(np.uint32), expected)))
    communicator.close()
    return digests


def train(address: str, peers: int, enter: Enter, make: Callable[[Communicator, Any], Any]) -> list[str]:
    """Digests of outer steps. Inner steps are in whatever environment the program is."""
    communicator = connected(address, enter)
    model = {"a": values(0).reshape(100, -1), "b": np.zeros(77, np.float32)}
    loop = make(communicator, model)
    loop.join(peers)
    own = values(communicator.membership.rank)
    digests = []
    for _ in range(STEPS):
        model["a"] -= own.reshape(100, -1) / 8
        model["b"] += own[:77]
        loop.outer_step()
        digests.append(loop.digest())
    assert odd_arithmetic.current() == enter.environment
    communicator.close()
    return digests


def diloco(address: str, peers: int, enter: Enter) -> list[str]:
    return train(address, peers, enter, DiLoCo)


def ddp(address: str, peers: int, enter: Enter) -> list[str]:
    """Train with torch, in more than one thread."""
    import torch

    torch.set_num_threads(max(2, torch.get_num_threads()))
    if enter.when == "after":
        torch.ones(1 << 20).mul_(2)  # its threads are there before
    communicator = connected(address, enter)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.from_numpy(values(0)))
    loop = DDP(communicator, module, torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9))
    loop.join(peers)
    own = torch.from_numpy(values(communicator.membership.rank))
    digests = []
    for _ in range(STEPS):
        (module.weight * own).sum().backward()
        loop.step()
        digests.append(loop.digest())
    assert odd_arithmetic.current() == enter.environment
    communicator.close()
    return digests


def torch_diloco(address: str, peers: int, enter: Enter) -> list[str]:
    import torch

    torch.set_num_threads(max(2, torch.get_num_threads()))
    communicator = connected(address, enter)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.from_numpy(values(0)))
    module.narrow = torch.nn.Parameter(torch.from_numpy(values(1)).to(torch.bfloat16))
    loop = DiLoCo(communicator, module)
    loop.join(peers)
    own = torch.from_numpy(values(communicator.membership.rank))
    digests = []
    for _ in range(STEPS):
        with torch.no_grad():
            module.weight.sub_(own / 8)
            module.narrow.sub_(own.to(torch.bfloat16))
        loop.outer_step()
        digests.append(loop.digest())
        with torch.no_grad():
            digests.append(blake3.blake3(module.weight.numpy().data.cast("B")).hexdigest())
    communicator.close()
    return digests


KINDS = {function.__name__: function for function in (reduce_all, diloco, ddp, torch_diloco)}


def main() -> None:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # torch's threads, on few cores
    environment, when, peers, kind, address = sys.argv[1:]
    print(*KINDS[kind](address, int(peers), Enter(environment, when)))


if __name__ == "__main__":
    main()
