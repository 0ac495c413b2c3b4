"""The work of one call: what c10d hands to the caller, and the steps that it takes.

A call is a *script*: a generator that yields batches of ops for the engine, is resumed when all of a batch are over,
and returns the call's result. What it does between two batches is local: copies, folds, the next ops. Most scripts have
one batch of one op.

A work is driven in one of two ways:

    run     its caller waits: the thread that called goes through the script by itself, with the engine's fast path
    start   its caller goes on: ops are launched, and whoever ends the last op of a batch resumes the script. That is
            pccl's own thread if the script is *light*, which means that it does nothing but look at results; otherwise,
            and where futures are to be completed, whose callbacks may be anything, it is the progress thread

Either way a script is resumed by one thread at a time, because a batch ends once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work as TorchWork

from _pccl_torch import outside_graphs
from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.threads.latch import Latch
from pccl.torch import held_works
from pccl.torch.errors import BackendError
from pccl.torch.memory_use import UNUSED
from pccl.torch.options import seconds
from pccl.types import Result

WORK_SUCCESS, WORK_TIMEOUT, WORK_COMM_ERROR, WORK_UNKNOWN = 0, 1, 2, 100
"""c10d's numbers for how a work ended."""
EXPIRY_S = 1.0
"""Seconds between two attempts to give up a work whose time has passed."""

Script = Generator[Sequence[OpSpec], Sequence[PendingOp], Any]


class Driver(Protocol):
    """The process group of a work, as the work needs it."""

    def run(self, spec: OpSpec, title: str, timeout_s: float) -> PendingOp:
        """Run an op and wait for it. PCCLError."""

    def launch(self, spec: OpSpec, title: str, over: Callable[[], None], ops: list[PendingOp]) -> None:
        """Put an op into `ops`, launch it, and have `over` called when it is over. PCCLError, and then it is not
        called: the op has not been launched."""

    def outcome(self, op: PendingOp, title: str) -> None:
        """Raise PCCLError if an op that is over has failed, or had other participants than the group."""

    def may_repeat(self, batch: Sequence[OpSpec], error: PCCLError) -> bool:
        """Return whether ops that have failed with this error are to be launched again, on all their ranks."""

    def give_up(self, ops: Sequence[PendingOp], title: str, timeout_s: float) -> None:
        """Have ops aborted on all ranks, and wait until they are. PCCLError OUTCOME_UNKNOWN if nobody says so."""

    def failure(self, title: str, error: PCCLError, specs: Sequence[OpSpec] = ()) -> BackendError:
        """Return the exception of a call that failed with `error`, in ops of these specs."""

    def later(self, call: Callable[[], None]) -> None:
        """Have `call` made in the progress thread."""

    def finished(self, work: PCCLWork) -> None:
        """Note that a work is over."""


@outside_graphs
class PCCLWork(TorchWork):  # type: ignore[misc]
    """A call of a process group. Thread-safe."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        outside_graphs(cls)

    def __init__(
        self,
        driver: Driver,
        title: str,
        script: Script | None,
        lane: Hashable,
        timeout_s: float,
        is_light: bool,
        devices: Sequence[Any] = (),
    ) -> None:
        """`lane` says behind which earlier works it waits, and `devices` on which devices other than the host its
        result is."""
        super().__init__()
        self.title = title
        self.lane = lane
        self.number = 0
        """Its number among the collectives of its group, from 1 on; 0 if it is none."""
        self.source = -1
        """The rank from which a recv got its tensor; -1 if it is no recv."""
        self.blockers = 0
        """The number of works that have to be over before this one is started. The scheduler's."""
        self._driver = driver
        self._script: Script | None = script
        self._timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.use = UNUSED
        """The memory that it uses, by which later works may wait for it."""
        self.is_watched = False
        """Whether it is given up at its deadline, though nobody may wait for it. The scheduler's."""
        self._is_light = is_light
        self._lock = threading.Lock()
        self._specs: Sequence[OpSpec] = ()
        self._batch: list[PendingOp] = []
        """The ops that are under way, and what they were made of."""
        self._left = 0
        self._failed_launch: PCCLError | None = None
        self._done = Latch()
        self._value: Any = None
        self._error: BaseException | None = None
        self._devices = devices
        self._futures: list[Any] = []
        self._callbacks: list[Callable[[], None]] = []
        self._registered: Sequence[Any] = ()
        self.is_timed = False
        self._began_s = self._ended_s = 0.0
        if held_works.IS_NEEDED:
            held_works.HELD.hold(self)

    # Driving.

    def run(self) -> None:
        """Go through the script in this thread, and return when it has ended, in whatever way."""
        title, driver = self.title, self._driver
        batch: Sequence[OpSpec] = ()
        try:
            assert self._script is not None
            batch = next(self._script)
            while True:
                try:
                    is_one = len(batch) == 1
                    ops = [driver.run(batch[0], title, self._left_s())] if is_one else self.run_together(batch)
                    for op in ops:
                        driver.outcome(op, title)
                except PCCLError as error:
                    if driver.may_repeat(batch, error):
                        continue
                    raise
                batch = self._script.send(ops)
        except StopIteration as stop:
            self._end(stop.value, None)
        except PCCLError as error:
            self._end(None, driver.failure(title, error, batch))
        except BaseException as error:
            self._end(None, error)
            if not isinstance(error, Exception):
                raise

    def run_together(self, batch: Sequence[OpSpec]) -> list[PendingOp]:
        """Run the ops of a batch and wait for them."""
        over = Latch()
        self._launch(batch, over.set)
        for op in tuple(self._batch):
            op.join_started()
        if not over.wait(self._left_s()):
            self._driver.give_up(self._batch, self.title, self._timeout_s)
        if self._failed_launch is not None:
            raise self._failed_launch
        return self._batch

    def start(self) -> None:
        """Launch the first batch, and return. For a work whose turn it is."""
        self._resume(None)

    def _resume(self, ops: Sequence[PendingOp] | None) -> None:
        try:
            assert self._script is not None
            if ops is None:
                batch = next(self._script)
            else:
                if self._failed_launch is not None:
                    raise self._failed_launch
                for op in ops:
                    self._driver.outcome(op, self.title)
                batch = self._script.send(ops)
            self._launch(batch, self._batch_over)
        except StopIteration as stop:
            self._end(stop.value, None)
        except PCCLError as error:
            if self._specs and self._driver.may_repeat(self._specs, error):
                self._driver.later(lambda: self._launch(self._specs, self._batch_over))
            else:
                self._end(None, self._driver.failure(self.title, error, self._specs))
        except Exception as error:
            self._end(None, error)

    def _launch(self, batch: Sequence[OpSpec], over: Callable[[], None]) -> None:
        """Launch the ops of a batch, and have `over` called when all are over."""
        self._left = len(batch) + 1
        self._specs, self._failed_launch = batch, None

        def one_over() -> None:
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                over()

        ops = self._batch = []
        for spec in batch:
            try:
                self._driver.launch(spec, self.title, one_over, ops)
            except PCCLError as error:
                self._failed_launch = error
                one_over()
        one_over()

    def _batch_over(self) -> None:
        if self._is_light:
            self._resume(self._batch)
        else:
            self._driver.later(lambda: self._resume(self._batch))

    def interrupted(self, error: BaseException) -> None:
        """End a work whose caller was interrupted while it made the call: nobody has it. What has been launched is
        aborted on all ranks."""
        try:
            with suppress(PCCLError):  # the caller gets `error`
                self._driver.give_up(list(self._batch), self.title, self._timeout_s)
        finally:
            self._end(None, error)

    def fail(self, error: BaseException) -> None:
        """End a work that is not started by itself."""
        self._end(None, error)

    def succeed(self, value: Any) -> None:
        """End a work that is not started by itself, with its result."""
        self._end(value, None)

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._done.is_set():
                return
            if self.is_timed:
                self._ended_s = time.monotonic()
            self._value, self._error = value, error
            futures, self._futures = self._futures, []
            callbacks, self._callbacks = self._callbacks, []
            script, self._script, self._batch = self._script, None, []
            self._done.set()
        if script is not None and error is not None:
            script.close()
        self._driver.finished(self)
        for callback in callbacks:
            callback()
        if futures:
            self._driver.later(lambda: _complete(futures))

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the work is over, by whoever ends it, or now."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def be_timed(self) -> None:
        """Measure how long it takes from now on."""
        self.is_timed, self._began_s = True, time.monotonic()

    def register(self, tensors: Sequence[Any]) -> None:
        """Let `wait_tensor` of one of the tensors wait for this work: graphs may take them while it is under way."""
        held_works.HELD.hold(self)
        self._registered = tensors
        for tensor in tensors:
            c10d._register_work(tensor, self)

    def _unregister(self) -> None:
        tensors, self._registered = self._registered, ()
        held_works.HELD.let_go(self)
        for tensor in tensors:
            with suppress(Exception):  # a failure is for the caller of `wait` to raise
                torch.ops._c10d_functional.wait_tensor(tensor)  # the only way to have c10d forget it

    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def limit(self, timeout_s: float) -> None:
        """Let the work have so much time from now on."""
        self._timeout_s, self.deadline_s = timeout_s, time.monotonic() + timeout_s

    def expire(self) -> None:
        """Give the work up if its time has passed. For threads that may wait."""
        if self._done.is_set() or self._left_s() > 0:
            return
        ops = list(self._batch)
        if not ops:
            text = f"it has waited for earlier calls of the group for {self._timeout_s:g} s"
            self._end(None, self._driver.failure(self.title, PCCLError(Result.OUTCOME_UNKNOWN, self.title, text)))
            return
        try:
            self._driver.give_up(ops, self.title, self._timeout_s)
        except PCCLError as error:
            self._end(None, self._driver.failure(self.title, error))

    # What callers see, as c10d names it.

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the work is done.

        Raises:
            BackendError: as the call failed; or TIMEOUT if `timeout` has passed, and the work goes on.
        """
        done = self._done
        for op in () if done.is_set() else tuple(self._batch):
            op.join_started()
        if not done.is_set():
            limit_s = seconds(timeout, 0.0)
            left_s = self._left_s()
            if 0 < limit_s < left_s:
                if not done.wait(limit_s):
                    text = f"Operation timed out: it has not ended within {limit_s:g} s, and goes on"
                    raise self._driver.failure(self.title, PCCLError(Result.TIMEOUT, self.title, text))
            elif not done.wait(left_s):
                while not done.wait(EXPIRY_S):  # as a rule the scheduler gives it up
                    self.expire()
        if held_works.IS_NEEDED:
            held_works.HELD.let_go(self)
        if self._registered:
            self._unregister()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        """Return the tensors with the result. To be called when the work is done."""
        return self._value

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a torch.futures.Future of the tensors with the result. Where the call fails, it raises RuntimeError.

        C++ code such as DDP's reducer sees no exception that Python sets (`set_exception`): it takes that for a result
        without tensors, and crashes. What a callback raises is an error for it, too.
        """
        over: Any = torch.futures.Future(devices=list(self._devices) or None)
        future = over.then(lambda _: self._delivered())
        self._complete_later(over)
        return future

    def get_future_result(self) -> Any:
        """Return a torch.futures.Future of an integer that says how it ended, as c10d's `WorkResult` numbers it."""
        over: Any = torch.futures.Future()
        future = over.then(lambda _: self._how_it_ended())
        self._complete_later(over)
        return future

    def _complete_later(self, over: Any) -> None:
        """Complete a future when the work is over."""
        if held_works.IS_NEEDED:
            held_works.HELD.let_go(self)
        with self._lock:
            if not self._done.is_set():
                self._futures.append(over)
                return
        _complete([over])

    def _how_it_ended(self) -> int:
        if self._error is None:
            return WORK_SUCCESS
        if not isinstance(self._error, BackendError):
            return WORK_UNKNOWN
        return WORK_TIMEOUT if self._error.result is Result.TIMEOUT else WORK_COMM_ERROR

    def _get_sequence_number(self) -> int:
        return self.number

    def _get_duration(self) -> float:
        """Return how many milliseconds it took. RuntimeError if it is not over, or was not to be timed."""
        if not self.is_timed:
            raise RuntimeError(f"{self.title} was not timed: call _enable_collectives_timing of its group before it")
        if not self._done.is_set():
            raise RuntimeError(f"{self.title} is not over: wait for it first")
        return (self._ended_s - self._began_s) * 1e3

    def _delivered(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class OpWork(PCCLWork):
    """A call that is one op, whose result is where its caller wants it, and for which its caller does not wait here."""

    def __init__(
        self, driver: Driver, title: str, spec: OpSpec, lane: Hashable, timeout_s: float, tensor: Any, source: int
    ) -> None:
        super().__init__(driver, title, None, lane, timeout_s, True)
        self._spec = spec
        self._tensor = tensor
        self.source = source

    def start(self) -> None:
        ops: list[PendingOp] = []
        self._batch = ops
        try:
            self._driver.launch(self._spec, self.title, self._op_over, ops)
        except PCCLError as error:
            self._fail_or_repeat(error)

    def _op_over(self) -> None:
        ops = self._batch
        if not ops:
            return  # the work has ended before: nobody could say what became of the op
        try:
            self._driver.outcome(ops[0], self.title)
        except PCCLError as error:
            self._fail_or_repeat(error)
        else:
            self._end([self._tensor], None)

    def _fail_or_repeat(self, error: PCCLError) -> None:
        if self._driver.may_repeat((self._spec,), error):
            self._driver.later(self.start)
        else:
            self._end(None, self._driver.failure(self.title, error, (self._spec,)))


def _complete(futures: Sequence[Any]) -> None:
    for future in futures:
        future.set_result(None)
