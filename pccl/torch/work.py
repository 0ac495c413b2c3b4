"""The work of one call, the object that c10d returns to the caller.

A call is a generator of *steps*: it yields the ops for the engine to execute, one at a time, and returns the call's
result. `PCCLWork.advance` is the only loop that executes a call. With `waits`, the caller's thread executes all steps
on the engine's fast path. Otherwise `advance` returns as soon as an op is in flight. After the op, the engine's thread
continues the call if its steps are *light*, i.e. only inspect results; otherwise a progress thread does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work as TorchWork

from _pccl_torch import outside_graphs
from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.threads.waking import Latch
from pccl.torch.errors import BackendError
from pccl.torch.memory_use import UNUSED, Use
from pccl.torch.transport import Op
from pccl.types import Result

EXPIRY_S = 1.0
"""The number of seconds between two attempts to abort a work after its deadline."""

LISTS_OF_TENSORS = """
def wait_for(over: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(over)
    return tensors

def start(over: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(wait_for, over, tensors)
"""

_units: dict[str, Any] = {}
"""The compiled code above, once for all threads: to free a unit with open futures aborts the process."""

Steps = Generator[OpSpec, None, Any]

_in_registry: dict[int, PCCLWork] = {}
"""Works registered with c10d, kept here because c10d's registry keeps only a work's C++ part alive."""


def seconds(timeout: Any, default_s: float) -> float:
    """Return a timeout in seconds. c10d represents the default as None, 0 or a negative value."""
    if timeout is None:
        return default_s
    found = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return found if found > 0 else default_s


class Calls(Protocol):
    """What a work uses of its group's `Scheduler`, which imports this module."""

    dropped: deque[PCCLWork]

    def check(self, op: Op, title: str, /) -> None: ...
    def cancel(self, op: Op, title: str, timeout_s: float, /) -> None: ...
    def later(self, call: Callable[[], None], /) -> None: ...
    def run(self, spec: OpSpec, title: str, timeout_s: float, /) -> Op: ...
    def launch(self, spec: OpSpec, title: str, started: Callable[[Op], None], over: Callable[[], None], /) -> None: ...
    def may_repeat(self, spec: OpSpec, error: PCCLError, /) -> bool: ...
    def failure(self, title: str, error: PCCLError, spec: OpSpec | None = None, /) -> BackendError: ...
    def finished(self, work: PCCLWork, /) -> None: ...


@outside_graphs
class PCCLWork(TorchWork):  # type: ignore[misc]
    """A call of a process group. Thread-safe."""

    number = 0
    """The call's number among the group's collectives, counted from 1; 0 for point-to-point calls."""
    source = -1
    """The rank that sent the tensor of a recv; -1 for other calls."""
    use: Use = UNUSED
    """The memory that the call reads and writes; later calls may have to wait for it."""
    blockers = 0
    """The number of works that must be over before this one starts. Owned by the scheduler."""
    is_first = True
    """Whether the work had no blockers when it was queued. Owned by the scheduler."""
    is_watched = False
    """Whether the background thread enforces the deadline. Owned by the scheduler."""
    _op: Op | None = None
    """The last op."""
    _is_launched = False
    """Whether `_op` is in flight, or over but not yet checked."""
    _spec: OpSpec | None = None
    """The op to launch or to check next; None before the next step."""
    _value: Any = None
    _error: BaseException | None = None
    _registered: Sequence[Any] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        outside_graphs(cls)

    def __init__(
        self,
        scheduler: Calls,
        title: str,
        steps: Steps | None,
        queue: Hashable,
        timeout_s: float,
        is_light: bool,
        tensors: Sequence[Any] = (),
    ) -> None:
        """Args:
        steps: The call; None for a work that other code completes with `end`.
        queue: The queue that holds the work.
        tensors: The tensors of the result.
        """
        TorchWork.__init__(self)
        self.title = title
        self.queue = queue
        self._scheduler = scheduler
        self._steps = steps
        self._timeout_s = timeout_s
        self.deadline_s = monotonic() + timeout_s
        self._is_light = is_light
        self._tensors = tensors
        self._lock = threading.Lock()
        self._done = Latch()
        self._callbacks: list[Callable[[], None]] = []
        self._futures: list[Any] = []

    def __del__(self) -> None:
        if len(self._tensors) == 1 and self._tensors[0].numel() == 1:
            self._scheduler.dropped.append(self)

    # Execution.

    def advance(self, waits: bool) -> None:
        """Execute steps until the call is over or, without `waits`, until an op is in flight."""
        scheduler, title, steps = self._scheduler, self.title, self._steps
        try:
            while steps is not None:
                try:
                    if self._is_launched:
                        self._is_launched = False
                        op = self._op
                        if op is None:
                            return  # another thread has ended the work
                        scheduler.check(op, title)
                        self._spec = None
                    if self._spec is None:
                        self._spec = next(steps)
                    if not waits:
                        scheduler.launch(self._spec, title, self._started, self._op_over)
                        return
                    self._started(scheduler.run(self._spec, title, max(0.0, self.deadline_s - monotonic())))
                except PCCLError as error:
                    self._is_launched = False
                    if self._spec is None or not scheduler.may_repeat(self._spec, error):
                        raise
                    if not waits:
                        scheduler.later(self._continue)
                        return
        except StopIteration as stop:
            self.end(stop.value, None)
        except PCCLError as error:
            self.end(None, self._failure(error))
        except BaseException as error:
            self.end(None, error)
            if not isinstance(error, Exception):
                raise

    def _failure(self, error: PCCLError) -> BaseException:
        return self._scheduler.failure(self.title, error, self._spec)

    def _started(self, op: Op) -> None:
        self._op, self._is_launched = op, True

    def _continue(self) -> None:
        self.advance(False)

    def _op_over(self) -> None:
        if self._done.is_set():
            return  # the work has ended before its op
        if self._is_light:
            self.advance(False)
        else:
            self._scheduler.later(self._continue)

    def interrupted(self, error: BaseException) -> None:
        """End a work whose caller was interrupted during the call. An op in flight is aborted on all ranks."""
        try:
            if self._op is not None:
                with suppress(PCCLError):  # the caller gets `error` instead
                    self._scheduler.cancel(self._op, self.title, self._timeout_s)
        finally:
            self.end(None, error)

    def end(self, value: Any, error: BaseException | None) -> None:
        """End the work with its result or error, unless it has ended."""
        with self._lock:
            if self._done.is_set():
                return
            self._value, self._error = value, error
            futures, self._futures = self._futures, []
            callbacks, self._callbacks = self._callbacks, []
            steps, self._steps, self._op = self._steps, None, None
            self._done.set()
        if error is not None and steps is not None:
            steps.close()
        self._scheduler.finished(self)
        for callback in callbacks:
            callback()
        if futures:
            self._scheduler.later(lambda: _complete(futures))

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the thread that ends the work, or now if it has ended."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def register(self, tensors: Sequence[Any]) -> None:
        """Make `wait_tensor` on one of the tensors wait for this work, because graphs may use tensors of open calls."""
        _in_registry[id(self)] = self
        self._registered = tensors
        for tensor in tensors:
            c10d._register_work(tensor, self)

    def _unregister(self) -> None:
        tensors, self._registered = self._registered, ()
        _in_registry.pop(id(self), None)
        for tensor in tensors:
            with suppress(Exception):  # `wait` raises the failure
                torch.ops._c10d_functional.wait_tensor(tensor)  # removes the tensor from c10d's registry

    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - monotonic())

    def expire(self) -> None:
        """Abort the work if its deadline has passed. May block."""
        if self._done.is_set() or self._left_s() > 0:
            return
        op = self._op
        try:
            if op is None:
                text = f"it waited {self._timeout_s:g} s for earlier calls of the group"
                raise PCCLError(Result.OUTCOME_UNKNOWN, self.title, text)
            self._scheduler.cancel(op, self.title, self._timeout_s)
        except PCCLError as error:
            self.end(None, self._scheduler.failure(self.title, error))

    # c10d's names.

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the work is done.

        Raises:
            BackendError: The call failed, or has not ended within `timeout` (TIMEOUT; the work then continues).
        """
        done = self._done
        if not done.is_set():
            op = self._op
            if op is not None:
                op.join_started()
            limit_s, left_s = seconds(timeout, 0.0), self._left_s()
            if 0 < limit_s < left_s:
                if not done.wait(limit_s):
                    text = f"Operation timed out: it did not end within {limit_s:g} s and is still in progress"
                    raise self._scheduler.failure(self.title, PCCLError(Result.TIMEOUT, self.title, text))
            elif not done.wait(left_s):
                while not done.wait(EXPIRY_S):  # usually, the scheduler has already aborted it
                    self.expire()
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
        """Return the result tensors, once the work is over."""
        return self._value

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a torch.futures.Future of the result tensors. It raises RuntimeError if the call fails.

        C++ code such as DDP's reducer sees an exception raised in a callback, but not one set by `set_exception`.
        """
        devices = list({tensor.device for tensor in self._tensors if not tensor.is_cpu})
        over: Any = torch.futures.Future(devices=devices or None)
        future = over.then(lambda _: self._delivered())
        if self.title == "allreduce" and self._tensors[0].dtype is torch.half:
            future = _typed().start(future, list(self._tensors))
        with self._lock:
            if not self._done.is_set():
                self._futures.append(over)
                return future
        _complete([over])
        return future

    def _get_sequence_number(self) -> int:
        return self.number

    def _delivered(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def _typed() -> Any:
    """Return functions whose futures hold a list of tensors that C++ code can read, as DDP's built-in FP16 hook does.
    The future of a Python callback holds a Python object instead."""
    code = LISTS_OF_TENSORS
    return _units.get(code) or _units.setdefault(code, torch.jit.CompilationUnit(code))


def _complete(futures: Sequence[Any]) -> None:
    for future in futures:
        future.set_result(None)
