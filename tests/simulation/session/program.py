"""The program that every peer of a simulated run runs: the usual loop of training, with checks.

    admit newcomers, bring the state to one, some rounds of ops whose kind follows from the state's revision

Whatever fails leads back to the top of the loop, as the guide tells users to do. A peer that is out of the run joins
again. Calls are given up now and then at any of their awaits.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import trio

from pccl import AsyncCommunicator, AsyncReduceHandle, PCCLError, ReduceOp, Result, SharedState, SharedStateSyncStrategy
from tests.simulation.session.checks import Array, Call, Checker, Synced
from tests.simulation.session.device import SimArray, SimDevice
from tests.simulation.session.machines import Process
from tests.simulation.session.sockets import Address

CALL_S = 12.0
CONNECT_S = 40.0
ALONE_S = 0.3
COMPUTE_S_MAX = 2.0
PAUSE_S = 0.1
"""Pause after a failure, for one that comes at once would come again at once."""
STATE_ELEMENTS = 700
OUT = frozenset({Result.MASTER_CONNECTION_FAILED, Result.NOT_INITIALIZED, Result.RANK_CONNECTION_FAILED})


@dataclass
class Plan:
    """What all callers of a run have in common."""

    seed: int
    masters: list[Address]
    checker: Checker
    note: Callable[[str], None]
    token: str = ""
    connections: int = 1
    give_up_share: float = 0.0
    optimize_share: float = 0.0
    device_share: float = 0.0
    """Share of the callers whose arrays are on a device."""
    is_over: bool = False


async def _ended(handle: AsyncReduceHandle) -> None:
    with suppress(PCCLError):
        await handle


class Caller:
    """One peer's program."""

    def __init__(self, number: int, process: Process, plan: Plan) -> None:
        self.number = number
        self.progress = 0
        """Number of rounds that have brought something."""
        self._process = process
        self._plan = plan
        self._random = random.Random(f"caller {number} {plan.seed}")
        self._weights = np.frombuffer(self._random.randbytes(8 * STATE_ELEMENTS), np.int64).copy()
        self._state = SharedState.from_numpy({"weights": self._weights})
        self._device: SimDevice | None = None

    def _note(self, text: str) -> None:
        self._plan.note(f"caller {self.number}: {text}")

    async def run(self) -> None:
        """Join, loop, and join again when out of the run, until the run is over."""
        plan = self._plan
        if self._random.random() < plan.device_share:
            self._device = SimDevice(f"sim:{self.number}", self._random, self._process.spawn)
        while not plan.is_over:
            comm = self._process.communicator(plan.masters, CALL_S, plan.token, plan.connections)
            try:
                await comm.connect(n_attempts=8, timeout=CONNECT_S)
                self._note(f"is in, world {comm.world_size}")
                while not plan.is_over and await self._round(comm):
                    pass
            except PCCLError as error:
                plan.checker.raised(self.number, error)
                self._note(f"is out: {error}")
                await trio.sleep(0.5)
            finally:
                with trio.CancelScope(shield=self._process.is_alive):
                    await comm.close()
        self._note("has left")

    async def _round(self, comm: AsyncCommunicator) -> bool:
        """Go through the loop once. Return False if this peer is out of the run."""
        plan = self._plan
        try:
            await self._maybe_given_up(comm.update_topology)
            if comm.world_size < 2:
                self.progress += 1
                await trio.sleep(ALONE_S)
                return True
            await self._sync(comm)
            if random.Random(f"optimize {plan.seed} {self._state.revision}").random() < plan.optimize_share:
                await self._maybe_given_up(comm.optimize_topology)
            for _ in range(3):
                await trio.sleep(self._random.random() ** 3 * COMPUTE_S_MAX)
                await self._ops(comm)
                self.progress += 1
        except PCCLError as error:
            plan.checker.raised(self.number, error)
            self._note(f"back to the top: {error}")
            await trio.sleep(PAUSE_S)
            return error.result not in OUT
        except _GivenUp:
            self._note("has given a call up")
        return True

    async def _maybe_given_up(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call, or give it up after a moment."""
        if self._random.random() >= self._plan.give_up_share:
            return await call()
        with trio.move_on_after(self._random.random() ** 3 * 2.0):
            return await call()
        raise _GivenUp

    async def _sync(self, comm: AsyncCommunicator) -> None:
        start_s = trio.current_time()
        before = self._weights.tobytes()
        run = comm._inner.session("sync")._machine.run

        async def sync() -> Any:
            return await comm.sync_shared_state(self._state, SharedStateSyncStrategy.ENFORCE_POPULAR)

        try:
            info = await self._maybe_given_up(sync)
        except BaseException:
            if self._weights.tobytes() != before:
                self._state.revision = 0  # it holds a mixture
            raise
        done = Synced(self.number, start_s, trio.current_time(), info.revision, self._weights.tobytes(), run)
        self._plan.checker.synced(done)

    async def _ops(self, comm: AsyncCommunicator) -> None:
        """One round of ops. The kind is the same for all that have the same revision."""
        kind = random.Random(f"ops {self._plan.seed} {self._state.revision}")
        size = kind.choice([0, 1, 40, 300])
        results = []
        if kind.random() < 0.5:
            results.append(await self._one_op(comm, size, kind.randrange(2)))
        else:
            results += await self._several_ops(comm, size, kind.randint(2, 4))
        for result in results:
            self._weights *= 31
            self._weights += np.resize(result, STATE_ELEMENTS)
        self._state.revision += 1

    def _call(self, size: int) -> Call:
        return self._plan.checker.call(self.number, np.frombuffer(self._random.randbytes(8 * size), np.int64) >> 8)

    def _array(self, call: Call) -> Array | SimArray:
        """Return the array to make a call with."""
        return call.given.copy() if self._device is None else SimArray(self._device, call.given)

    async def _one_op(self, comm: AsyncCommunicator, size: int, tag: int) -> Array:
        call = self._call(size)
        array = self._array(call)
        step = self._state.revision

        async def reduce() -> Any:
            return await comm.all_reduce(array, op=ReduceOp.SUM, tag=tag, step=step)

        try:
            info = await self._maybe_given_up(reduce)
        except PCCLError as error:
            self._plan.checker.failed(call, error)
            self._plan.checker.unharmed(call, _values(array))
            raise
        except BaseException:
            self._plan.checker.unharmed(call, _values(array))
            raise
        self._plan.checker.committed(call, _values(array), info.world_size)
        return _values(array)

    async def _several_ops(self, comm: AsyncCommunicator, size: int, count: int) -> list[Array]:
        calls = [self._call(size) for _ in range(count)]
        arrays = [self._array(call) for call in calls]
        order = list(range(count))
        self._random.shuffle(order)
        step = self._state.revision
        handles: dict[int, AsyncReduceHandle] = {}
        failure: PCCLError | None = None
        for tag in order:
            try:
                handles[tag] = comm.all_reduce_async(arrays[tag], op=ReduceOp.SUM, tag=tag, step=step)
            except PCCLError as error:
                failure = error
                break
        order = list(handles)
        self._random.shuffle(order)
        for tag in order:
            try:
                await self._maybe_given_up(partial(_ended, handles[tag]))
            except _GivenUp:
                await _ended(handles[tag])
            is_success, code, info = handles[tag].wait()
            if is_success and info is not None:
                self._plan.checker.committed(calls[tag], _values(arrays[tag]), info.world_size)
            else:
                self._plan.checker.failed(calls[tag], code)
                self._plan.checker.unharmed(calls[tag], _values(arrays[tag]))
                failure = failure or PCCLError(code, "all_reduce_async", "one of several")
        if failure is not None:
            raise failure
        return [_values(array) for array in arrays]


def _values(array: Array | SimArray) -> Array:
    return array.values if isinstance(array, SimArray) else array


class _GivenUp(Exception):  # noqa: N818 - not an error
    """The caller has given a call up."""
