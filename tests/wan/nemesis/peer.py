"""A peer as a user would write it: `python -m tests.wan.nemesis.peer SETTINGS`.

Theory of operation. The loop is that of `examples/churn.py`: synchronize after every admission, reduce, apply, ask
whether a peer waits. What a step reduces follows from the revision, which is also its `step=`. An op that a loss
aborted is reduced again until it is committed or this peer is alone; a step where it is left alone ends with what
was committed. A peer that comes back from an eviction calls its state by another *label*: what it has may from then on
differ from what others made of the same revision.

Each peer chooses by itself between launched and waiting calls, and between results in place and elsewhere. Arrays that
an error has given back are filled with a mark, and must keep it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from pccl import (
    AsyncCollectiveHandle,
    AsyncReduceHandle,
    CollectiveInfo,
    Communicator,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    Result,
    SharedState,
)
from tests.wan.nemesis import values
from tests.wan.nemesis.script import OwnEndError, Script, Settings, main
from tests.wan.nemesis.values import Array, Op, State

SYNC_EVERY = 20
"""Revisions between two syncs when no peer comes."""
BULK_EVERY = 10
SYNC_FAILURES_MAX = 20
RETRIED = (Result.RANK_CONNECTION_LOST, Result.TIMEOUT)
DISAGREEMENTS_MAX = 50
"""The most times in a row that a broadcast may fail because peers saw different groups."""
MARK = 0xA5
GIVEN_BACK_MAX = 100
ALONE_S = 0.05
ALONE_SAID_EVERY_S = 1.0
QUANTIZATION = QuantizationOptions(algorithm=QuantizationAlgorithm.MIN_MAX)
HOW = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "MAX": ReduceOp.MAX}
Info = ReduceInfo | CollectiveInfo
Handle = AsyncReduceHandle | AsyncCollectiveHandle


@dataclass
class Attempt:
    """One op of this step, and the arrays of the present attempt at it."""

    op: Op
    original: Array
    in_place: bool
    disagreements: int = 0
    send: Array = field(init=False)
    recv: Any = field(init=False)

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Allocate new arrays after an error."""
        self.send = self.original.copy()
        self.recv = np.full_like(self.send, 7)

    def launch(self, communicator: Communicator, step: int) -> Handle:
        handle: Handle = self._call(communicator, "_async", {"step": step})
        return handle

    def wait(self, communicator: Communicator, step: int, timeout_s: float | None) -> Info:
        info: Info = self._call(communicator, "", {"step": step, "timeout": timeout_s})
        return info

    def _call(self, communicator: Communicator, suffix: str, more: dict[str, Any]) -> Any:
        op, send = self.op, self.send
        method = getattr(communicator, op.kind + suffix)
        more["tag"] = op.tag
        if op.kind == values.BARRIER:
            return method(**more)
        if op.kind == values.BROADCAST:
            return method(send, root=0, **more)
        if op.kind == values.ALL_GATHER:
            return method(send, **more)
        if op.kind == values.REDUCE_SCATTER:
            return method(send, op=HOW[op.how], **more)
        options = QUANTIZATION if op.is_quantized else None
        recv = None if self.in_place else self.recv
        return method(send, recv, op=HOW[op.how], quantization=options, **more)

    def output(self, info: Info) -> Array:
        if self.op.kind == values.ALL_REDUCE:
            return self.send if self.in_place else self.recv
        if isinstance(info, CollectiveInfo) and info.array is not None:
            found: Array = np.asarray(info.array)
            return found.reshape(-1)
        return np.zeros(0, np.float32)

    @property
    def overwrites(self) -> bool:
        return self.op.kind == values.BROADCAST or (self.op.kind == values.ALL_REDUCE and self.in_place)


class Peer(Script):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._random = Random(f"{settings.seed} {settings.peer}")
        self._state = State(settings.load.state_bytes)
        self._shared = SharedState.from_numpy(self._state.arrays)
        self._labels = 0
        self._said_alone_s = 0.0
        self._given_back: deque[Array] = deque()
        self._begin_label(None)

    def _begin_label(self, base: str | None) -> None:
        self._labels += 1
        self._state.name = f"{self.settings.peer}/{self._labels}"
        self.reporter.say("lineage", label=self._state.name, base=base, revision=self._shared.revision)

    def left(self, verdict: str, text: str) -> None:
        super().left(verdict, text)
        self._begin_label(self._state.name)

    def take_part(self, communicator: Communicator) -> None:
        is_synced = False
        while not self.is_leaving:
            if communicator.world_size > 1:
                if not is_synced or self._shared.revision % SYNC_EVERY == 0:
                    self._sync(communicator)
                    is_synced = True
                every = self.settings.load.optimize_every
                if every and self._shared.revision % every == every - 1:
                    communicator.optimize_topology()
                self._step(communicator)
                time.sleep(self.settings.load.rest_s)
            else:
                self._be_alone()
            self.report_usage()
            for array in self._given_back:
                self._look_at(array)
            if communicator.are_peers_pending():
                communicator.update_topology()
                is_synced = False

    def _be_alone(self) -> None:
        now = time.monotonic()
        if now > self._said_alone_s + ALONE_SAID_EVERY_S:
            self._said_alone_s = now
            self.reporter.say("alone")
        time.sleep(ALONE_S)

    def _sync(self, communicator: Communicator) -> None:
        for _ in range(SYNC_FAILURES_MAX):
            self.reporter.say("syncing", label=self._state.name, revision=self._shared.revision)
            try:
                communicator.sync_shared_state(self._shared)
            except PCCLError as error:
                if error.result is not Result.NO_SHARED_STATE_AVAILABLE:
                    raise
                is_spoiled = "overwritten here" in error.message
                self.reporter.say("unsynced", text=str(error), is_spoiled=is_spoiled)
                if is_spoiled:
                    self._state.reset()
                    self._shared.revision = 0
                    self._begin_label(None)
                continue
            self._say_state("synced", with_bulk=True)
            return
        raise RuntimeError(f"{SYNC_FAILURES_MAX} syncs in a row have failed")

    def _say_state(self, event: str, with_bulk: bool, **more: Any) -> None:
        state = self._state
        if with_bulk:
            more["bulk"] = values.digest(state.bulk)
        chain = state.chain.tobytes().hex()
        self.reporter.say(event, label=state.name, revision=self._shared.revision, chain=chain, **more)

    def _step(self, communicator: Communicator) -> None:
        settings, step = self.settings, self._shared.revision
        attempts = [
            Attempt(
                op,
                values.contribution(settings.seed, settings.peer, self._state.name, step, op),
                self._random.random() < 0.5,
            )
            for op in values.ops_of_step(settings.seed, step, settings.load)
        ]
        applied: list[tuple[int, str]] = []
        begun = False
        if self._random.random() < 0.7:
            handles = [self._launched(communicator, each, step) for each in attempts]
            for attempt, handle in zip(attempts, handles, strict=True):
                begun |= self._follow(communicator, attempt, step, handle, applied)
        else:
            for attempt in attempts:
                begun |= self._until_committed(communicator, attempt, step, applied)
        if not begun:
            return  # alone before anything was committed
        self._state.advance(step, applied)
        self._shared.revision += 1
        with_bulk = self._shared.revision % BULK_EVERY == 0
        self._say_state("state", with_bulk, applied=applied)

    def _say_launch(self, communicator: Communicator, attempt: Attempt, step: int) -> None:
        membership = communicator.membership
        self.reporter.say(
            "launch",
            op=attempt.op.tag,
            label=self._state.name,
            step=step,
            number=membership.peers[membership.rank],
            input=values.digest(attempt.send),
        )

    def _launched(self, communicator: Communicator, attempt: Attempt, step: int) -> Handle | None:
        """Launch an op, and return its handle; None if this peer is left alone."""
        self._say_launch(communicator, attempt, step)
        try:
            handle = attempt.launch(communicator, step)
        except PCCLError as error:
            self._failed(attempt, step, error)
            return None
        return handle

    def _follow(
        self,
        communicator: Communicator,
        attempt: Attempt,
        step: int,
        handle: Handle | None,
        applied: list[tuple[int, str]],
    ) -> bool:
        """Wait for an op, and launch it again where it was aborted. True if it was committed."""
        while handle is not None:
            try:
                info = handle.result()
            except PCCLError as error:
                if not self._failed(attempt, step, error):
                    return False
                handle = self._launched(communicator, attempt, step)
                continue
            self._committed(attempt, step, info, applied)
            return True
        return False

    def _until_committed(
        self, communicator: Communicator, attempt: Attempt, step: int, applied: list[tuple[int, str]]
    ) -> bool:
        while True:
            self._say_launch(communicator, attempt, step)
            try:
                info = attempt.wait(communicator, step, self._patience_s())
            except PCCLError as error:
                if not self._failed(attempt, step, error):
                    return False
                continue
            self._committed(attempt, step, info, applied)
            return True

    def _patience_s(self) -> float | None:
        is_impatient = self._random.random() < self.settings.load.impatient
        return self._random.uniform(0.0, values.IMPATIENT_S) if is_impatient else None

    def _committed(self, attempt: Attempt, step: int, info: Info, applied: list[tuple[int, str]]) -> None:
        op, output, membership = attempt.op, attempt.output(info), info.membership
        assert membership is not None
        found = values.digest(output)
        self.reporter.say(
            "end",
            op=op.tag,
            label=self._state.name,
            step=step,
            verdict="committed",
            peers=membership.peers,
            rank=membership.rank,
            world=info.world_size,
            output=found,
            sample=[] if op.is_exact else values.sample(output),
            input="" if attempt.overwrites else values.digest(attempt.send),
        )
        if op.is_applied:
            applied.append((op.tag, found))

    def _keep(self, attempt: Attempt) -> None:
        """Mark arrays that an error has given back, and check the oldest ones for later writes."""
        for array in (attempt.send, attempt.recv):
            array.view(np.uint8)[:] = MARK
            self._given_back.append(array)
        while len(self._given_back) > GIVEN_BACK_MAX:
            self._look_at(self._given_back.popleft())

    def _look_at(self, array: Array) -> None:
        if (array.view(np.uint8) != MARK).any():
            self.reporter.say("touched", text="an array that an error had given back was written later")

    def _failed(self, attempt: Attempt, step: int, error: PCCLError) -> bool:
        """Report how an attempt ended, and decide: True to try again, False where this peer is alone."""
        op, result = attempt.op, error.result
        self.reporter.say(
            "end",
            op=op.tag,
            label=self._state.name,
            step=step,
            verdict=result.name,
            text=str(error),
            input=values.digest(attempt.send),
        )
        self._keep(attempt)
        attempt.renew()
        if result is Result.TOO_FEW_PEERS:
            return False
        if result is Result.OUTCOME_UNKNOWN:
            raise OwnEndError(str(error))
        if result is Result.INVALID_ARGUMENT and op.kind == values.BROADCAST:
            attempt.disagreements += 1
            if attempt.disagreements <= DISAGREEMENTS_MAX:
                return True
        if result not in RETRIED:
            raise error
        return True


if __name__ == "__main__":
    main(Peer)
