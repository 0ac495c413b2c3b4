"""`pccl bench --master`: one peer of a benchmark; the others are on other hosts, started there by the same command.

There is no coordinator: what peers must tell each other goes through the collective that is measured. A tiny
all-reduce is the barrier before each iteration, another one makes each iteration's time that of its slowest rank. So
every host prints the same figures, and no port is needed but the library's. There is no raw ring here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np

from pccl import Communicator, PCCLError, ReduceOp
from pccl.bench.case import Rank, join
from pccl.bench.measure import Plan, Row, cases, row
from pccl.bench.peers import BenchError

SERVICE_TAG = 1 << 32
"""For reduces that are not measured; a case counts its tags from 0."""


def measure_as_one_peer(plan: Plan, master: str) -> Iterator[Row]:
    (world_size,) = plan.peers
    todo = cases(plan)
    try:
        with Communicator(master, p2p_connection_pool_size=plan.connections) as communicator:
            join(communicator, world_size)
            offset = secrets.randbelow(world_size)
            offset_sum = np.array([offset])
            communicator.all_reduce(offset_sum, op=ReduceOp.SUM, tag=SERVICE_TAG)

            def barrier() -> None:
                communicator.all_reduce(np.zeros(1, np.uint8), op=ReduceOp.MAX, tag=SERVICE_TAG)

            rank = Rank(communicator, world_size, offset, int(offset_sum[0]), barrier, None)
            for case in todo:
                slowest_s = np.array(rank.run(case).pccl_s)
                communicator.all_reduce(slowest_s, op=ReduceOp.MAX, tag=SERVICE_TAG)
                yield row(world_size, case, [slowest_s.tolist()], [])
    except (PCCLError, RuntimeError) as error:
        raise BenchError(str(error)) from error
