"""`pccl bench --master`: one peer of a benchmark; the others are on other hosts, started there by the same command.

There is no coordinator: what peers must tell each other goes through the collective that is measured (`assembly`). A
tiny all-reduce is the barrier before each timed part, another one makes each iteration's time that of its slowest rank.
So every host prints the same numbers, and no port is needed but the library's. Rulers, which need ports of their own,
are measured only where asked for (`between_hosts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec

from pccl import Communicator, PCCLError
from pccl.bench.assembly import Assembly
from pccl.bench.between_hosts import join_gloo, join_raw_ring
from pccl.bench.case import Rank, Ruler, join
from pccl.bench.errors import BenchError
from pccl.bench.measure import Row, row
from pccl.bench.memory import Memory
from pccl.bench.memory_bound import largest_copy
from pccl.bench.messages import GLOO, RAW_RING
from pccl.bench.movement import Mover
from pccl.bench.plan import Plan, cases


def measure_as_one_peer(plan: Plan, master: str) -> Iterator[Row]:
    (world_size,) = plan.peers
    todo = cases(plan)
    rulers: dict[str, Ruler] = {}
    movers: dict[str, Mover] = {}
    try:
        with ExitStack() as resources:
            for connections in plan.connections:
                encrypt = True if plan.encrypt else None
                with Communicator(master, p2p_connection_pool_size=connections, encrypt=encrypt) as communicator:
                    join(communicator, world_size)
                    assembly = Assembly(communicator, world_size)
                    _check_agreement(assembly, plan)
                    if not rulers:
                        rulers, movers = _join_rulers(plan, assembly, master, resources)
                    rank = Rank(assembly.rank, world_size, assembly.barrier, rulers, movers, shares_machine=False)
                    for case in todo:
                        samples = rank.run(communicator, case)
                        slowest_s = {name: assembly.most(seconds) for name, seconds in samples.seconds.items()}
                        memories = [_largest(assembly, samples.memory)] if samples.memory else []
                        yield row(world_size, connections, case, slowest_s, memories, largest_copy(todo))
    except (PCCLError, RuntimeError, OSError) as error:
        raise BenchError(str(error)) from error


def _check_agreement(assembly: Assembly, plan: Plan) -> None:
    """Raise BenchError if peers have different plans: they would wait for each other in vain."""
    own = msgspec.to_builtins(plan)
    for text in assembly.gather(msgspec.json.encode(plan).decode()):
        for field, theirs in msgspec.json.decode(text).items():
            if theirs != own.get(field):
                raise BenchError(f"hosts were asked for different {field}: {own.get(field)} here, {theirs} on another")


def _join_rulers(
    plan: Plan, assembly: Assembly, master: str, resources: ExitStack
) -> tuple[dict[str, Ruler], dict[str, Mover]]:
    rulers: dict[str, Ruler] = {}
    movers: dict[str, Mover] = {}
    if RAW_RING in plan.rulers:
        ring = join_raw_ring(assembly, master)
        resources.callback(ring.close)
        rulers[RAW_RING] = ring.ruler
        movers[RAW_RING] = ring
    if GLOO in plan.rulers:
        gloo = join_gloo(assembly, plan.peers[0], master)
        resources.callback(gloo.close)
        rulers[GLOO] = gloo.ruler
        movers[GLOO] = gloo
    return rulers, movers


def _largest(assembly: Assembly, memory: Memory) -> Memory:
    scratch_bytes, held_bytes = assembly.most([memory.scratch_bytes_max, memory.held_bytes_max])
    return Memory(int(scratch_bytes), int(held_bytes))
