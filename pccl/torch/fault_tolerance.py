"""c10d's fault tolerance for `ProcessGroupPCCL`: its behaviour when ranks are lost.

Abort hooks are called before `abort` takes effect, and after the first failed call in a world. In the latter case they
run in the group's progress thread, so waiting callers may get the error first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import ErrorType

from pccl.errors import PCCLError
from pccl.torch.bootstrap import Meeting
from pccl.torch.calls import Coalesced, GroupCalls
from pccl.torch.errors import ArgumentError, BackendError, Names
from pccl.torch.op_specs import OpSpecs
from pccl.torch.reconfigure import Reconfigurer, RendezvousError, World, forget_ranks
from pccl.torch.scheduler import Scheduler
from pccl.torch.transport import LocalTransport, Transport
from pccl.types import Result

logger = logging.getLogger("pccl.torch")

REMOTE = frozenset({Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS})


class AbortHooks:
    """Functions to call when a group fails. Thread-safe."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[[], None]] = {}

    def add(self, hook_id: int, hook: Callable[[], None]) -> None:
        self._hooks[hook_id] = hook

    def remove(self, hook_id: int) -> None:
        self._hooks.pop(hook_id, None)

    def call(self) -> None:
        """Call the hooks in the order of their ids, and log their exceptions."""
        for _, hook in sorted(dict(self._hooks).items()):
            try:
                hook()
            except Exception:
                logger.exception("an abort hook failed")


class FaultTolerance(GroupCalls):
    """The methods of `ProcessGroupPCCL` that handle lost ranks. Thread-safe, with one `reconfigure` at a time."""

    _meeting: Meeting | None
    supports_reconfigure = True
    supports_abort_hooks = True

    _reconfigurer: Reconfigurer
    _abort_hooks: AbortHooks

    def get_reconfigure_handle(self) -> str:
        """Return the string that identifies this process group object to other processes. It never changes."""
        return str(self._reconfigurer.handle)

    def reconfigure(self, opts: Any) -> Coalesced:
        """Form a new world from the ranks of `opts.handles`, in this order, under a new uuid.

        Raises:
            ArgumentError: The uuid was used before, or the handles do not form a world that includes this process. The
                group is unchanged.
            BackendError: The new world could not be formed. Raised on all ranks that take part.
        """
        timeout_s = opts.timeout.total_seconds() if opts.timeout is not None else self._timeout_s
        try:
            known = self._reconfigurer.members(opts.uuid, opts.handles)
        except RendezvousError as error:
            raise ArgumentError(f"ProcessGroupPCCL::reconfigure: {error}") from None
        self._leave("moved to another world", f"it moved to uuid {opts.uuid}")
        try:
            world = self._reconfigurer.enter(opts.uuid, known, timeout_s, self._names.group)
        except (RendezvousError, PCCLError) as error:
            reason = getattr(error, "message", error)
            text = f"reconfigure of {self._names.group} with uuid {opts.uuid} failed: {reason}"
            raise self._be_without_world(text, error.result) from None
        self._install(world, self._names.group)
        forget_ranks(self, self._size)
        return Coalesced([])  # a completed work

    def _install(self, world: World, group: str) -> None:
        self._connect(world.meeting, Names(group, world.rank, range(len(world.names)), world.names), len(world.names))

    def _connect(self, meeting: Meeting | None, names: Names, size: int) -> None:
        scheduler, specs = Scheduler(LocalTransport(), names), OpSpecs((0,), 0, (0,))
        if meeting is not None:
            names.number(meeting.peers)
            names.is_first_rank_master = names.rank == 1 and size == 2 and meeting.is_own_run
            transport = Transport(meeting.communicator, meeting.ring)
            scheduler = Scheduler(transport, names, meeting.peers, self._abort_hooks.call)
            specs = OpSpecs(meeting.peers, names.rank, meeting.ring)
        with self._order:
            self._rank, self._size = names.rank, size
            self._names, self._specs, self._scheduler, self._meeting = names, specs, scheduler, meeting

    def _await_world(self, what_to_do: str) -> None:
        self._be_without_world(f"{self._names.group} has no ranks yet: {what_to_do}", Result.NOT_INITIALIZED)

    def _be_without_world(self, text: str, result: Result) -> BackendError:
        error = BackendError(text, result)
        scheduler = Scheduler(LocalTransport(), self._names)
        scheduler.leave(error)
        self._scheduler = scheduler
        return error

    def get_error(self) -> Any:
        """Return c10d's ErrorType: SUCCESS (also after `abort` and `reconfigure`), TIMEOUT, REMOTE_ERROR (another rank
        was lost or left), or COMM_ERROR (this process was excluded from the run or lost its master)."""
        failure = self._scheduler.current_failure()
        if failure is None or failure.result is Result.NOT_INITIALIZED:
            return ErrorType.SUCCESS
        if failure.result is Result.TIMEOUT:
            return ErrorType.TIMEOUT
        return ErrorType.REMOTE_ERROR if failure.result in REMOTE else ErrorType.COMM_ERROR

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call `hook()` before an abort, and after the first call that fails because of a lost rank or a timeout."""
        self._abort_hooks.add(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._abort_hooks.remove(hook_id)

    def shutdown(self) -> None:
        """Leave the group permanently. Works in flight fail."""
        self._leave("was destroyed", "it was destroyed there")
        self._reconfigurer.close()

    def abort(self) -> None:
        """Leave the group immediately. Works in flight fail; on the other ranks, they fail as if this rank were lost.

        `reconfigure` may be called afterwards.
        """
        self._abort_hooks.call()
        self._leave("was aborted", "it was aborted there")

    def _leave(self, how: str, reason: str) -> None:
        """Leave the current world. `how` is the explanation in this rank's errors, `reason` in other ranks' errors."""
        with self._order:
            meeting, self._meeting = self._meeting, None
            scheduler = self._scheduler
        text = f"{self._names.group} {how} on {self._names.of(self._rank)}"
        scheduler.leave(BackendError(text, Result.NOT_INITIALIZED))
        if meeting is not None:
            meeting.leave(f"{reason}: {self._names.group}")
        scheduler.stop()
