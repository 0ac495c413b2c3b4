"""One rank of a benchmark, as a process: `python -m pccl.bench.worker`, driven over its standard streams."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import ExitStack

import msgspec
import numpy as np

from pccl import Attribute, Communicator, PCCLError, ReduceOp
from pccl.bench.case import Rank, Ruler, join
from pccl.bench.interfaces import loopback_interface
from pccl.bench.messages import (
    COMMIT,
    GLOO,
    RAW_RING,
    Case,
    Connect,
    Hello,
    Loop,
    Ready,
    Reply,
    Request,
    Setup,
    Step,
    Steps,
)
from pccl.bench.movement import Mover
from pccl.bench.raw_ring import join_ring
from pccl.launcher import say_line


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    _reply(Hello(listener.getsockname()[1]))
    setup = _request()
    assert isinstance(setup, Setup)
    with ExitStack() as resources:
        ring = join_ring(setup.rank, [("127.0.0.1", port) for port in setup.ring_ports], listener)
        resources.callback(ring.close)
        world_size = len(setup.ring_ports)
        rulers: dict[str, Ruler] = {RAW_RING: ring.ruler}
        movers: dict[str, Mover] = {RAW_RING: ring}
        if setup.gloo_store is not None:
            from pccl.bench.gloo import Gloo, file_store

            gloo = Gloo(setup.rank, world_size, file_store(setup.gloo_store, world_size), loopback_interface())
            resources.callback(gloo.close)
            rulers[GLOO] = gloo.ruler
            movers[GLOO] = gloo
        _reply(Ready())
        rank = Rank(setup.rank, world_size, ring.barrier, rulers, movers, shares_machine=True)
        in_run = resources.enter_context(ExitStack())
        communicator: Communicator | None = None
        while (request := _request()) is not None:
            match request:
                case Connect():
                    in_run.close()
                    ring.barrier()  # nobody joins before all have left: the run begins anew
                    communicator = in_run.enter_context(
                        Communicator(
                            request.master,
                            p2p_connection_pool_size=request.connections,
                            token=request.token,
                            encrypt=request.encrypt,
                        )
                    )
                    join(communicator, world_size)
                    _reply(Ready())
                case Case():
                    assert communicator is not None
                    _reply(rank.run(communicator, request))
                case Loop():
                    assert communicator is not None
                    _reply(_run_loop(request, communicator))
                case Setup():
                    raise ValueError("set up already")


def _request() -> Request | None:
    """Return the coordinator's next request, None if it is gone or has no more."""
    line = sys.stdin.buffer.readline()
    return msgspec.json.decode(line, type=Request) if line else None


def _reply(reply: Reply) -> None:
    say_line(msgspec.json.encode(reply))


def _run_loop(loop: Loop, communicator: Communicator) -> Steps:
    template = np.random.default_rng().standard_normal(loop.bytes // 4, dtype=np.float32)
    values = np.empty_like(template)
    full_world_size = world_size = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)
    steps: list[Step] = []
    committed_after_loss = 0
    while committed_after_loss < loop.steps_after_loss:
        values[:] = template
        start_s = time.monotonic()
        try:
            world_size = communicator.all_reduce(values, op=ReduceOp.AVG).world_size
            verdict = COMMIT
        except PCCLError as error:
            world_size = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)
            verdict = error.result.name
        steps.append(Step(start_s, time.monotonic(), verdict, world_size))
        committed_after_loss += verdict == COMMIT and world_size < full_world_size
        if loop.announce_steps:
            _reply(steps[-1])
    return Steps(steps)


if __name__ == "__main__":
    main()
