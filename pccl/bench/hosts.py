"""`pccl bench --master`: one peer of a benchmark; the others are on other hosts, started there by the same command.

There is no coordinator: what peers must tell each other goes through the collective that is measured (`assembly`). A
tiny all-reduce is the barrier before each timed part, another one makes each iteration's time that of its slowest rank.
So every host prints the same figures, and no port is needed but the library's; Gloo, where asked for, opens its own.
There is no raw ring here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from pccl import Communicator, PCCLError
from pccl.bench.assembly import Assembly
from pccl.bench.case import Rank, Ruler, join
from pccl.bench.errors import BenchError
from pccl.bench.measure import Row, row
from pccl.bench.memory import Memory
from pccl.bench.messages import GLOO
from pccl.bench.plan import Plan, cases


def measure_as_one_peer(plan: Plan, master: str) -> Iterator[Row]:
    (world_size,) = plan.peers
    todo = cases(plan)
    rulers: dict[str, Ruler] = {}
    try:
        with ExitStack() as resources:
            for connections in plan.connections:
                with Communicator(master, p2p_connection_pool_size=connections) as communicator:
                    join(communicator, world_size)
                    assembly = Assembly(communicator, world_size)
                    if plan.against_gloo and not rulers:
                        from pccl.bench.gloo_between_hosts import join_gloo

                        gloo = join_gloo(assembly, world_size, master)
                        resources.callback(gloo.close)
                        rulers[GLOO] = gloo.ruler
                    rank = Rank(assembly.rank, world_size, assembly.barrier, rulers)
                    for case in todo:
                        samples = rank.run(communicator, case)
                        slowest_s = {name: assembly.most(seconds) for name, seconds in samples.seconds.items()}
                        memories = [_largest(assembly, samples.memory)] if samples.memory else []
                        yield row(world_size, connections, case, slowest_s, memories)
    except (PCCLError, RuntimeError) as error:
        raise BenchError(str(error)) from error


def _largest(assembly: Assembly, memory: Memory) -> Memory:
    scratch_bytes, held_bytes = assembly.most([memory.scratch_bytes_max, memory.held_bytes_max])
    return Memory(int(scratch_bytes), int(held_bytes))
