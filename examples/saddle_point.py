"""MASHA (Beznosikov et al. 2021, arXiv:2110.03313): a saddle point, found by peers that send compressed operators.

    pccl launch -n 4 examples/saddle_point.py

The peers solve min over x, max over y of the mean of their `x A y + b x - c y + 0.05 (|x|^2 - |y|^2)`, each with its
own A, b and c. `F(z)` is the gradient by x and the negative gradient by y, whose mean is 0 at the saddle point.

    extragradient  all peers exchange F in float64, twice per iteration
    MASHA1         unbiased compression: random elements, scaled up
    MASHA2         contractive compression: the largest elements, with error feedback

In both MASHAs, the difference of F between two points is compressed on its way to rank 0 and their mean again on its
way back. F of the second point is exchanged exactly, but only in few iterations, chosen by a common random generator.
The table shows the norm of the mean of F, relative to the start, and the bytes that a peer sends, with frame headers.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from pccl import Communicator, ReduceOp
from pccl.training.compression import Compressor, RandomK, TopK

Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
SIZE = 4000
REGULARIZATION = 0.1


class Saddle:
    """This peer's part of the problem, and the exchange with the other peers."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.membership.rank
        random = np.random.default_rng(1 + self.rank)
        self.order = random.permutation(SIZE // 2)
        self.factors = 0.75 * random.choice([-1.0, 1.0], SIZE // 2)
        self.shift = random.standard_normal(SIZE)

    def operator(self, point: Vector) -> Vector:
        """Return F(point), for A with `factors` at rows 0, 1, ... and columns `order`."""
        x, y = np.split(point, 2)
        by_y = np.empty_like(y)
        by_y[self.order] = self.factors * x
        operator: Vector = REGULARIZATION * point + np.concatenate([self.factors * y[self.order], -by_y]) + self.shift
        return operator

    def mean(self, array: Vector) -> Vector:
        found = array.copy()
        self.communicator.all_reduce(found, op=ReduceOp.AVG)
        return found

    def compressed_mean(self, up: "Channel", down: "Channel", vector: Vector) -> Vector:
        """Return the mean of the peers' vectors, compressed on both ways, the same on all peers."""
        codes = self.communicator.gather(up.encode(vector), root=0).array
        code = np.zeros(up.length, np.uint8)
        if self.rank == 0:
            code = down.encode(np.mean([up.decode(each) for each in codes], axis=0))
        self.communicator.broadcast(code, root=0)
        return down.decode(code)


class Channel:
    """A compressor, with a scale that makes it unbiased, or with the error that it has made."""

    def __init__(self, compressor: Compressor, scale: float = 1.0, *, has_feedback: bool = False) -> None:
        self.compressor, self.scale, self.has_feedback = compressor, scale, has_feedback
        self.error = np.zeros(SIZE)
        self.length = compressor.bound(SIZE)

    def encode(self, vector: Vector) -> Any:
        whole = vector + self.error
        code = np.frombuffer(self.compressor.encode(whole.astype(np.float32)), np.uint8)
        if self.has_feedback:
            self.error = whole - self.decode(code)
        return code

    def decode(self, code: Any) -> Vector:
        out = np.zeros(SIZE, np.float32)
        self.compressor.decode_add(memoryview(code), out)
        return self.scale * out.astype(np.float64)


def extragradient(saddle: Saddle, steps: int, rate: float = 1.2) -> Vector:
    point = np.zeros(SIZE)
    for _ in range(steps):
        middle = point - rate * saddle.mean(saddle.operator(point))
        point = point - rate * saddle.mean(saddle.operator(middle))
    return point


def masha(saddle: Saddle, steps: int, channels: Sequence[Channel], rate: float, tau: float) -> Vector:
    """Algorithms 1 and 2 of the paper, with channels to the root and back. The probability of an exact exchange is
    `1 - tau`."""
    common = np.random.default_rng(0)
    point = anchor = np.zeros(SIZE)
    own = saddle.operator(anchor)
    mean = saddle.mean(own)
    for _ in range(steps):
        middle = tau * point + (1 - tau) * anchor - rate * mean
        point = middle - saddle.compressed_mean(channels[0], channels[1], rate * (saddle.operator(middle) - own))
        if common.random() < 1 - tau:
            anchor, own = point, saddle.operator(point)
            mean = saddle.mean(own)
    return point


def main() -> None:
    with Communicator() as communicator:
        communicator.wait_for_peers(int(os.environ["PCCL_LAUNCH_COUNT"]))
        saddle = Saddle(communicator)

        def report(name: str, solve: Callable[[int], Vector], steps: int) -> None:
            before = communicator.stats["tx_wire_bytes"]
            point = solve(steps)
            sent = communicator.stats["tx_wire_bytes"] - before
            assert len({each.tobytes() for each in communicator.all_gather(point).array}) == 1
            left, start = (np.linalg.norm(saddle.mean(saddle.operator(each))) for each in (point, np.zeros(SIZE)))
            total = saddle.mean(np.array([float(sent)]))[0]
            if saddle.rank == 0:
                print(f"{name:14} {steps:5} iterations, |F| {left / start:.1e}, {total / 1e6:.2f} MB", flush=True)

        kept = 1 / 4
        unbiased = [Channel(RandomK(kept, seed=seed), 1 / kept) for seed in (1 + saddle.rank, 0)]
        contractive = [Channel(TopK(kept, SIZE), has_feedback=True) for _ in range(2)]
        report("extragradient", lambda steps: extragradient(saddle, steps), 40)
        report("MASHA1", lambda steps: masha(saddle, steps, unbiased, 0.2, 0.9), 500)
        report("MASHA2", lambda steps: masha(saddle, steps, contractive, 0.3, 0.95), 400)


if __name__ == "__main__":
    main()
