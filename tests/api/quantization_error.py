"""A measurement of how far off quantized sums are: `python -m tests.api.quantization_error`.

Peers of this process reduce float32 numbers of N(0, 1), with the algorithm that the library chooses. What is printed is
the mean square error as a part of the exact sum's mean square (NMSE), with 2, 4 and 8 peers; and again where one number
in 4096 is a hundred times larger, at other places on each peer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pccl import ReduceOp
from pccl.tools.bench.plan import parse_quantization
from tests.support.cluster import Cluster, run_of

COUNT = 1 << 18
WORLDS = (2, 4, 8)
WAYS = ("min-max", "zero-point-scale", "min-max:uint4", "zero-point-scale:uint4", "min-max:uint16", "cast:bfloat16")
OUTLIER_EVERY = 4096
OUTLIER_FACTOR = 100

Floats = NDArray[np.float32]


def normal(world: int) -> list[Floats]:
    random = np.random.default_rng(world)
    return [random.standard_normal(COUNT, dtype=np.float32) for _ in range(world)]


def with_outliers(parts: list[Floats]) -> list[Floats]:
    random = np.random.default_rng(1)
    found = []
    for part in parts:
        factors = np.ones(COUNT, np.float32)
        factors[random.choice(COUNT, COUNT // OUTLIER_EVERY, replace=False)] = OUTLIER_FACTOR
        found.append(part * factors)
    return found


def error(cluster: Cluster, way: str, parts: list[Floats]) -> float:
    quantization = parse_quantization(way)
    sums = [part.copy() for part in parts]
    cluster.each(lambda peer, i: peer.all_reduce(sums[i], op=ReduceOp.SUM, quantization_options=quantization))
    assert all(other.tobytes() == sums[0].tobytes() for other in sums)
    exact = np.sum(parts, axis=0, dtype=np.float64)
    return float(np.square(sums[0] - exact).mean() / np.square(exact).mean())


def main() -> None:
    rows: dict[str, list[float]] = {way: [] for way in WAYS}
    for world in WORLDS:
        with run_of(world) as cluster:
            parts = normal(world)
            for way, row in rows.items():
                row += [error(cluster, way, parts), error(cluster, way, with_outliers(parts))]
    heads = [f"{world} peers{outliers}" for world in WORLDS for outliers in ("", ", outliers")]
    print(f"{'':24}" + "".join(f"{head:>19}" for head in heads))
    for way, row in rows.items():
        print(f"{way:24}" + "".join(f"{value:19.2e}" for value in row))


if __name__ == "__main__":
    main()
