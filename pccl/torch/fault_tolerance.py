"""What a process group does when ranks are lost, and how it goes on: c10d's fault tolerance, for `ProcessGroupPCCL`.

`get_error` says what has happened to the group that this process did not ask for:

    SUCCESS        nothing; also after `abort`, which is asked for, and after `reconfigure`
    TIMEOUT        a call has timed out
    REMOTE_ERROR   another rank was lost, or has left
    COMM_ERROR     anything else: this process was put out of the run, or has lost its master

An abort hook is called before `abort` takes effect, and when a call fails for one of these reasons for the first time
in a world. The latter happens in the group's progress thread, so that it may take its time: whoever waits for the call
may be told first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from _pccl_torch import outside_graphs
from pccl.errors import PCCLError
from pccl.torch import ranks_elsewhere
from pccl.torch.alone import Alone
from pccl.torch.bootstrap import Meeting
from pccl.torch.errors import ArgumentError, BackendError, ErrorType, Names
from pccl.torch.reconfigure import Reconfigurer, World, result_of, why
from pccl.torch.rendezvous import RendezvousError
from pccl.torch.scheduler import Scheduler
from pccl.torch.specs import Specs
from pccl.types import Result

logger = logging.getLogger("pccl.torch")

REMOTE = frozenset({Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS})


@outside_graphs
class Reconfigured(TorchWork):  # type: ignore[misc]
    """The work of a reconfigure: it is over when the call returns."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([])
        return future


class AbortHooks:
    """Functions that a program has called when a group fails. Thread-safe."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[[], None]] = {}

    def add(self, hook_id: int, hook: Callable[[], None]) -> None:
        self._hooks[hook_id] = hook

    def remove(self, hook_id: int) -> None:
        self._hooks.pop(hook_id, None)

    def call(self) -> None:
        """Call them in the order of their numbers. One that raises does not keep the others from being called."""
        for _, hook in sorted(dict(self._hooks).items()):
            try:
                hook()
            except Exception:
                logger.exception("an abort hook has failed")


class FaultTolerance:
    """The methods of `ProcessGroupPCCL` for the loss of ranks. They may be called from any thread, `reconfigure` from
    one at a time."""

    # What the group has.
    _order: Any
    _rank: int
    _size: int
    _meeting: Meeting | None
    _names: Names
    _specs: Specs
    _scheduler: Scheduler | Alone
    _timeout_s: float
    _reconfigurer: Reconfigurer
    _abort_hooks: AbortHooks

    # c10d's names.

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can be given another membership: it can."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Return what others need to know of this process to go on with it. It stays the same."""
        return self._reconfigurer.handle

    def reconfigure(self, opts: Any) -> Reconfigured:
        """Go on with those whose `opts.handles` these are, in their order, under a uuid that was not used before.

        Returns when the new world is there.

        Raises:
            ArgumentError: if the uuid was used before, or the handles cannot be those of a world with this process. The
                group is as it was.
            BackendError: if the new world does not come about, as on all others that take part.
        """
        timeout_s = opts.timeout.total_seconds() if opts.timeout is not None else self._timeout_s
        try:
            handles = self._reconfigurer.members(opts.uuid, opts.handles)
        except RendezvousError as error:
            raise ArgumentError(f"ProcessGroupPCCL::reconfigure: {error}") from None
        self._leave("went on to another world", f"it goes on to uuid {opts.uuid}")
        try:
            world = self._reconfigurer.enter(opts.uuid, handles, timeout_s)
        except (RendezvousError, PCCLError, OSError) as error:
            text = f"reconfigure of {self._names.group} with uuid {opts.uuid} failed: {why(error)}"
            raise self._be_without_world(text, result_of(error)) from None
        self._install(world, self._names.group)
        ranks_elsewhere.update(self, world.size)
        return Reconfigured()

    def _install(self, world: World, group: str) -> None:
        """Be in a world, and be called `group` in texts."""
        names = Names(group, world.rank, range(world.size), world.names)
        meeting = world.meeting
        scheduler: Scheduler | Alone
        if meeting is None:
            scheduler, specs = Alone(names), Specs((0,), 0, (0,))
        else:
            names.number(meeting.peers)
            scheduler = self._new_scheduler(meeting, names)
            specs = Specs(meeting.peers, world.rank, meeting.ring)
        with self._order:
            self._rank, self._size = world.rank, world.size
            self._names, self._specs, self._scheduler, self._meeting = names, specs, scheduler, meeting

    def _new_scheduler(self, meeting: Meeting, names: Names) -> Scheduler:
        return Scheduler(meeting.communicator, meeting.peers, meeting.ring, names, self._abort_hooks.call)

    def _await_world(self, what_to_do: str) -> None:
        """Be without a world, until there is a first one."""
        self._meeting = None
        self._specs = Specs((0,), 0, (0,))
        self._be_without_world(f"{self._names.group} has no ranks yet: {what_to_do}", Result.NOT_INITIALIZED)

    def _be_without_world(self, text: str, result: Result) -> BackendError:
        """Let all calls raise an error, and return it."""
        nobody = Alone(self._names)
        error = BackendError(text, result)
        nobody.fail(error)
        self._scheduler = nobody
        return error

    def get_error(self) -> Any:
        """Return what has happened to the group, as an `ErrorType` of c10d."""
        trouble = self._scheduler.trouble()
        if trouble is None or trouble.result is Result.NOT_INITIALIZED:
            return ErrorType.SUCCESS
        if trouble.result is Result.TIMEOUT:
            return ErrorType.TIMEOUT
        return ErrorType.REMOTE_ERROR if trouble.result in REMOTE else ErrorType.COMM_ERROR

    @property
    def supports_abort_hooks(self) -> bool:
        """Whether abort hooks are called: they are."""
        return True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Have `hook()` called before an abort, and when a call has failed for the loss of a rank or for a timeout."""
        self._abort_hooks.add(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Have a hook called no more."""
        self._abort_hooks.remove(hook_id)

    def shutdown(self) -> None:
        """Leave the group for good. Works in flight fail."""
        self._leave("was destroyed", "it was destroyed there")
        self._reconfigurer.close()

    def abort(self) -> None:
        """Leave the group at once. Works in flight fail here, and on the other ranks as after a loss.

        A reconfigure may follow.
        """
        self._abort_hooks.call()
        self._leave("was aborted", "it was aborted there")

    def _leave(self, how: str, reason: str) -> None:
        """Leave the present world. `how` is said here, and `reason` to the others."""
        with self._order:
            meeting, self._meeting = self._meeting, None
            scheduler = self._scheduler
        text = f"{self._names.group} {how} on {self._names.of(self._rank)}"
        scheduler.leave(BackendError(text, Result.NOT_INITIALIZED))
        if meeting is not None:
            meeting.leave(f"{reason}: {self._names.group}")
        scheduler.stop()
