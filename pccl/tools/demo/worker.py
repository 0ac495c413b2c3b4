"""One peer of the demo: `python -m pccl.tools.demo.worker JSON`. An outer step of its loop is

    admit    only in the join step: wait for the newcomer, then sync_shared_state
    train    inner steps on this peer's shard, starting from the shared parameters
    reduce   average the changes, with a separate all-reduce for each part of the parameters
    apply    the outer Nesterov step, on the shared parameters and momentum; revision += 1

A reduce that a loss aborts is relaunched among the remaining peers. The victim launches half of its all-reduces and
waits to be killed, so that each survivor has ops that must abort. The newcomer connects as soon as it has loaded its
text; the others admit it only in the join step.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import blake3
import msgspec
import numpy as np
from numpy.typing import NDArray

from pccl import (
    AsyncReduceHandle,
    Communicator,
    DataType,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOp,
    Result,
    SharedState,
)
from pccl.tools import harness
from pccl.tools.demo import model as corpus
from pccl.tools.demo.model import AdamW, ByteModel, ModelShape, Muon, cosine_scale
from pccl.tools.demo.plan import At, Doing, Finished, StepDone, WorkerOptions
from pccl.training import OuterNesterov

POLL_INTERVAL_S = 0.05
ADMISSION_POLLS_MAX = 1000
VALIDATION_SEQUENCES = 512
REPORTS_PER_STEP = 10

_QUANTIZATION = {
    "none": QuantizationAlgorithm.NONE,
    "min-max": QuantizationAlgorithm.MIN_MAX,
    "zero-point": QuantizationAlgorithm.ZERO_POINT_SCALE,
}

Part: TypeAlias = NDArray[np.floating]


@dataclass
class _Traffic:
    world_size: int
    aborted: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    state_bytes: int = 0
    sync_seconds: float = 0.0


class Worker:
    """A peer with its text, its replica of the shared state and its inner optimizer."""

    def __init__(self, options: WorkerOptions) -> None:
        self._peer = options.peer
        self._plan = plan = options.plan
        self._evaluates = options.peer == 0
        self._joins = options.peer == plan.newcomer
        self._communicator = Communicator(options.master, connections=plan.connections)

        shards, validation = corpus.split(plan.shards)
        self._text = corpus.read(shards[options.peer])
        if self._evaluates:
            length_bytes = plan.context + plan.positions
            self._validation = corpus.spread(corpus.read(validation), VALIDATION_SEQUENCES, length_bytes)

        self._shape = ModelShape(plan.context, plan.embedding, plan.hidden)
        # The newcomer starts from zeros, which proves that its parameters come from the sync.
        self._parameters = np.zeros(self._shape.size, np.float32) if self._joins else self._shape.initial(plan.seed)
        self._momentum = np.zeros_like(self._parameters)
        self._step = np.zeros(1, np.int64)
        self._state = SharedState.from_numpy(
            {"parameters": self._parameters, "momentum": self._momentum, "step": self._step}
        )
        self._own = np.empty_like(self._parameters)
        self._pseudo_gradient = np.empty_like(self._parameters)
        self._gradient = np.empty_like(self._parameters)
        self._inner = (
            Muon(self._shape, self._own, plan.learning_rate)
            if plan.optimizer == "muon"
            else AdamW(self._own, plan.learning_rate)
        )
        self._outer = OuterNesterov(plan.outer_learning_rate, plan.outer_momentum)
        self._quantization = QuantizationOptions(DataType.UINT8, _QUANTIZATION[plan.quantize])

    def run(self) -> None:
        self._at("connecting")
        with self._communicator:
            entered: _Traffic | None = self._enter()
            while self._step[0] < self._plan.steps:
                self._outer_step(entered)
                entered = None
        step = int(self._step[0])
        harness.send(Finished(peer=self._peer, step=step, revision=self._state.revision, digest=self._digest()))

    def _digest(self) -> str:
        """Return the BLAKE3 digest of the shared state, in hexadecimal."""
        hasher = blake3.blake3()
        for array in (self._parameters, self._momentum, self._step):
            hasher.update(array.tobytes())
        return hasher.hexdigest()

    # Membership and shared state

    def _enter(self) -> _Traffic:
        """Sync for the first time. Return the traffic to count in the next step."""
        if not self._joins:
            self._at("gathering")
            self._communicator.wait_for_peers(self._plan.peers)
        traffic = _Traffic(self._communicator.world_size)
        started = time.monotonic()
        self._sync(traffic)
        if self._joins:
            return traffic
        self._step_done(traffic, admitted=0, seconds=time.monotonic() - started)
        return _Traffic(traffic.world_size)

    def _admit(self) -> int:
        """Wait for the newcomer in the join step. Return the number of admitted peers."""
        if not self._plan.join or self._step[0] + 1 != self._plan.join_step:
            return 0
        self._at("admitting")
        before = self._communicator.world_size
        for _ in range(ADMISSION_POLLS_MAX):  # with a time limit, peers would stop at different polls
            if self._communicator.are_peers_pending():
                self._communicator.update_topology()
                break
            time.sleep(POLL_INTERVAL_S)
        return self._communicator.world_size - before

    def _sync(self, traffic: _Traffic) -> None:
        self._at("syncing")
        started = time.monotonic()
        info = self._communicator.sync_shared_state(self._state)
        traffic.sent_bytes += info.tx_bytes
        traffic.received_bytes += info.rx_bytes
        traffic.state_bytes = info.rx_bytes
        traffic.sync_seconds = time.monotonic() - started

    # One outer step

    def _outer_step(self, entered: _Traffic | None) -> None:
        started = time.monotonic()
        admitted, traffic = 0, entered
        if traffic is None:
            admitted = self._admit()
            traffic = _Traffic(self._communicator.world_size)
            if admitted:
                self._sync(traffic)
        self._train()
        np.subtract(self._parameters, self._own, out=self._pseudo_gradient)
        self._reduce(traffic)
        self._outer.step(self._parameters, self._momentum, self._pseudo_gradient)
        self._step += 1
        self._state.revision += 1
        self._step_done(traffic, admitted, time.monotonic() - started)

    def _train(self) -> None:
        plan = self._plan
        outer_step = int(self._step[0])
        random = np.random.default_rng([plan.seed, self._peer + 1, outer_step])
        np.copyto(self._own, self._parameters)
        model = ByteModel(self._shape, self._own)
        report_every = max(1, plan.inner_steps // REPORTS_PER_STEP)
        for inner_step in range(plan.inner_steps):
            if inner_step % report_every == 0:
                self._at("training", done=inner_step / plan.inner_steps)
            batch = corpus.sample(self._text, random, plan.sequences, plan.context + plan.positions)
            model.loss_and_gradient(batch, self._gradient)
            done = (outer_step + inner_step / plan.inner_steps) / plan.steps
            self._inner.step(self._own, self._gradient, cosine_scale(done))

    def _reduce(self, traffic: _Traffic) -> None:
        """Average the pseudo-gradient over the peers that remain when its last part commits."""
        waiting = dict(enumerate(self._shape.parts(self._pseudo_gradient).values()))
        if self._peer == self._plan.victim and self._step[0] + 1 == self._plan.kill_step:
            self._wait_for_death(list(waiting.values()))
        while waiting:
            if self._communicator.world_size < 2:
                traffic.world_size = 1
                return
            handles = {}
            for tag, part in waiting.items():
                try:
                    handles[tag] = self._launch(tag, part)
                except PCCLError as error:
                    if error.result != Result.TOO_FEW_PEERS:
                        raise
                    break
            self._at("reducing", done=1.0, launched=len(handles))
            for tag, handle in handles.items():
                try:
                    info = handle.result()
                except PCCLError as error:
                    if error.result not in (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS):
                        raise
                    traffic.aborted += 1
                    continue
                del waiting[tag]
                traffic.world_size = min(traffic.world_size, info.world_size)
                traffic.sent_bytes += info.tx_bytes
                traffic.received_bytes += info.rx_bytes

    def _launch(self, tag: int, part: Part) -> AsyncReduceHandle:
        return self._communicator.all_reduce_async(part, op=ReduceOp.AVG, tag=tag, quantization=self._quantization)

    def _wait_for_death(self, parts: list[Part]) -> NoReturn:
        handles = [self._launch(tag, part) for tag, part in enumerate(parts[: len(parts) // 2])]
        self._at("reducing", done=1.0, launched=len(handles))
        while True:
            signal.pause()

    # Reports

    def _step_done(self, traffic: _Traffic, admitted: int, seconds: float) -> None:
        bits_per_byte = None
        if self._evaluates:
            self._at("evaluating", done=1.0)
            bits_per_byte = ByteModel(self._shape, self._parameters).bits_per_byte(self._validation)
        loss = {} if bits_per_byte is None else {"loss": bits_per_byte}
        self._communicator.report(step=int(self._step[0]), **loss)
        harness.send(
            StepDone(
                peer=self._peer,
                step=int(self._step[0]),
                world_size=traffic.world_size,
                admitted=admitted,
                aborted=traffic.aborted,
                sent_bytes=traffic.sent_bytes,
                received_bytes=traffic.received_bytes,
                seconds=seconds,
                state_bytes=traffic.state_bytes,
                sync_seconds=traffic.sync_seconds,
                bits_per_byte=bits_per_byte,
            )
        )

    def _at(self, doing: Doing, done: float = 0.0, launched: int = 0) -> None:
        harness.send(At(peer=self._peer, step=int(self._step[0]) + 1, doing=doing, done=done, launched=launched))


def main() -> int:
    try:
        Worker(msgspec.json.decode(sys.argv[1], type=WorkerOptions)).run()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
