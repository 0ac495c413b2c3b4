"""One rank of a local benchmark: `python -m pccl.tools.bench.worker`, with messages over its standard streams."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import msgspec
import numpy as np

from pccl import Communicator, PCCLError, ReduceOp
from pccl.tools import harness
from pccl.tools.bench.cases import Rank, Ruler, Samples
from pccl.tools.bench.plan import GLOO, RAW_RING, Case
from pccl.tools.bench.raw_ring import join_ring

COMMIT = "commit"


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The answer to a worker's Hello."""

    rank: int
    ring_ports: list[int]
    gloo_store: str | None
    """The file through which Gloo's ranks meet; None: Gloo is not measured."""


class Connect(msgspec.Struct, tag=True, frozen=True):
    """Leave the present run, if any, and join that of `master` with a number of connections per link."""

    master: str
    connections: int
    token: str | None
    encrypt: bool | None


class Loop(msgspec.Struct, tag=True, frozen=True):
    """Reduce `bytes` until a peer was lost and `steps_after_loss` reduces were committed after it."""

    bytes: int
    steps_after_loss: int
    announce_steps: bool


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The worker listens for its neighbour of the raw ring."""

    ring_port: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The worker is connected to all others."""


class Step(msgspec.Struct, tag=True, frozen=True):
    """One reduce of a Loop, between two readings of the machine-wide monotonic clock."""

    start_s: float
    end_s: float
    verdict: str
    world_size: int


class Steps(msgspec.Struct, tag=True, frozen=True):
    """The answer to a Loop."""

    steps: list[Step]


Request = Setup | Connect | Case | Loop
Reply = Hello | Ready | Samples | Step | Steps


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    harness.send(Hello(listener.getsockname()[1]))
    requests = harness.received(Request)
    setup = next(requests)
    assert isinstance(setup, Setup)
    world_size = len(setup.ring_ports)
    with ExitStack() as resources:
        ring = join_ring(setup.rank, [("127.0.0.1", port) for port in setup.ring_ports], listener)
        resources.callback(ring.close)
        rulers: dict[str, Ruler] = {RAW_RING: ring}
        if setup.gloo_store is not None:
            from pccl.tools.bench.gloo import Gloo, file_store, interface_of

            store = file_store(setup.gloo_store, world_size)
            rulers[GLOO] = Gloo(setup.rank, world_size, store, interface_of("127.0.0.1"))
            resources.callback(rulers[GLOO].close)
        harness.send(Ready())
        rank = Rank(setup.rank, ring.barrier, rulers, shares_machine=True)
        run = resources.enter_context(ExitStack())
        communicator: Communicator | None = None
        for request in requests:
            match request:
                case Connect(master, connections, token, encrypt):
                    run.close()
                    ring.barrier()  # all have left, so a new run begins
                    communicator = run.enter_context(
                        Communicator(master, connections=connections, token=token, encrypt=encrypt)
                    )
                    communicator.wait_for_peers(world_size)
                    harness.send(Ready())
                case Case():
                    assert communicator is not None
                    harness.send(rank.run(communicator, request))
                case Loop():
                    assert communicator is not None
                    harness.send(_run_loop(request, communicator))


def _run_loop(loop: Loop, communicator: Communicator) -> Steps:
    template = np.random.default_rng().standard_normal(loop.bytes // 4, dtype=np.float32)
    values = np.empty_like(template)
    full_world_size = world_size = communicator.world_size
    steps: list[Step] = []
    committed_after_loss = 0
    while committed_after_loss < loop.steps_after_loss:
        values[:] = template
        start_s = time.monotonic()
        try:
            world_size = communicator.all_reduce(values, op=ReduceOp.AVG).world_size
            verdict = COMMIT
        except PCCLError as error:
            world_size = communicator.world_size
            verdict = error.result.name
        steps.append(Step(start_s, time.monotonic(), verdict, world_size))
        committed_after_loss += verdict == COMMIT and world_size < full_world_size
        if loop.announce_steps:
            harness.send(steps[-1])
    return Steps(steps)


if __name__ == "__main__":
    main()
