"""The session behind a communicator, and the group calls. `connect` opens the session, and `close` ends it.

Each communicator has a `SessionHolder`. For an `AsyncCommunicator` in trio, its coroutines run in the program's trio
run; for one in asyncio and for a `Communicator`, they run in the portal thread's.

`connect` tries to reach a master every ATTEMPT_INTERVAL_S until a deadline. It is set before the first attempt, because
a port that drops packets never answers. `n_attempts` share the time until then equally. After a master's first
message there is no deadline: the newcomer waits until the run's peers admit it with `update_topology`.

In `wait_for_peers`, every peer calls `are_peers_pending`, which gives all the same answer. If newcomers wait, all peers
admit them. Peers may enter and leave this loop at different times. If the other peers have already moved on, the master
answers ELSEWHERE, which ends the loop, or ADMITTING, which makes this peer join their update_topology.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import trio

from pccl import _timeouts
from pccl._timeouts import Default, Timeout
from pccl.errors import PCCLError, integer_argument, invalid, op_error
from pccl.protocol.messages import Kind, PendingAnswer
from pccl.protocol.peer.view import View
from pccl.protocol.wait_reasons import LongWait, how_to_look, where_to_look
from pccl.runtime.network.addresses import DIAL_S, Address
from pccl.runtime.network.wire import NO_ANSWER_MEANS
from pccl.runtime.session.driver import SessionError, SessionOptions
from pccl.runtime.session.session import PeerSession, open_session
from pccl.runtime.state.tensor_blocks import StateTensor, StoreError, fingerprint
from pccl.runtime.state.transfer import Transfer
from pccl.runtime.threads import portal
from pccl.runtime.threads.waking import waiting
from pccl.shared_state import SharedState
from pccl.types import Result, SharedStateSyncInfo, SharedStateSyncStrategy

SHORT_S = 0.1
"""A call with a shorter timeout does not exceed its timeout to complete the error text."""
ASK_S = 1.0
"""After a timeout, a call spends at most this long finding out which peers it waited for."""
HELD_S = 0.3
"""A newcomer that waits this long for an answer requests the master's status, which shows if newcomers are held."""
HELD_ASKED_MAX = 3
CLOSING = "the tasks of this session to end, and the master to be notified"
PAUSE_S_MIN = 0.01
PAUSE_S_MAX = 0.2
"""The bounds of the pause between two polls in `wait_for_peers`."""
REACH_S = 300.0
"""How long `connect` searches for a master without `timeout` and `n_attempts`."""
ATTEMPTS_REACH_S = 30.0
"""How long it searches with `n_attempts`, unless two intervals per attempt are longer."""
ATTEMPT_INTERVAL_S = 1.0
ATTEMPT_S = 5.0
"""How long an attempt may take without `n_attempts`: enough to retransmit a lost packet twice."""
FIRST_S = 2.0
EVERY_S = 30.0
TAKEN_ONLY = "the port accepts connections but does not answer"

logger = logging.getLogger("pccl")

T = TypeVar("T")


class SessionErrors:
    """Converts errors of the session and the portal, within a `with` block, to PCCLErrors of the call `func_name`."""

    def __init__(self, func_name: str) -> None:
        self._func_name = func_name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, SessionError):
            error_of = op_error if error.of_all_peers else PCCLError
            raise error_of(error.result, self._func_name, error.message) from None
        if isinstance(error, portal.PortalBrokenError):
            raise PCCLError(Result.INTERNAL_ERROR, self._func_name, str(error)) from None
        if isinstance(error, portal.PortalClosedError):
            raise PCCLError(Result.NOT_INITIALIZED, self._func_name, str(error)) from None
        if isinstance(error, PCCLError):
            hide_frames(error)


def hide_frames(error: PCCLError) -> None:
    """Leave the frames of pccl's inside out of the traceback, unless they may show a bug."""
    if error.result is not Result.INTERNAL_ERROR:
        error.__traceback__ = None


class SearchWait(LongWait):
    """The schedule of warnings for a master search."""

    def __init__(self) -> None:
        super().__init__("connect", trio.current_time(), FIRST_S, EVERY_S)

    def ending(self, now: float) -> str:
        return f"{self.what} has ended its search for a master after {now - self.since:.1f} s"


class MasterSearch:
    """One search for a master, used by one trio task."""

    def __init__(
        self, address: str, masters: int, attempts_max: int | None, reach_s: float | None, is_bound: bool
    ) -> None:
        """`masters` is the number of addresses in `address`. If `attempts_max` is None, only time bounds the search.
        The attempts share `reach_s` seconds (None: no limit); if `is_bound`, the search ends after this time."""
        self.standing = f"no answer to a connection yet: {NO_ANSWER_MEANS}"
        """The progress of the current attempt, or the result of the last one."""
        self._attempts = 0
        self._address = address
        self._masters = masters
        self._attempts_max = None if attempts_max is None else max(1, attempts_max)
        self._began_at = trio.current_time()
        self._shared_until = self._began_at + (float("inf") if reach_s is None else reach_s)
        self.ends_at = self._shared_until if is_bound else float("inf")
        """The deadline for a master's answer."""

    def begin(self) -> tuple[float, float]:
        """Begin an attempt. Return two times in seconds: the limit for each address to accept a connection, and the
        limit for finding the leader when a master refers this newcomer to another one."""
        left_s = max(0.0, self._shared_until - trio.current_time())
        share_s, seek_s = ATTEMPT_S, left_s
        if self._attempts_max is not None:
            attempts_left = self._attempts_max - self._attempts
            share_s = (left_s - (attempts_left - 1) * ATTEMPT_INTERVAL_S) / attempts_left
            seek_s = 0.0
        self._attempts += 1
        return min(left_s, max(DIAL_S, share_s / self._masters)), seek_s

    @property
    def is_over(self) -> bool:
        """Whether there are no further attempts."""
        is_last = self._attempts_max is not None and self._attempts >= self._attempts_max
        return is_last or trio.current_time() + ATTEMPT_INTERVAL_S >= self.ends_at

    def reason(self) -> str:
        """Return what the search waits for."""
        of = "" if self._attempts_max is None else f" of {self._attempts_max}"
        return f"the master at {self._address}, attempt {self._attempts}{of}: {self.standing}"

    def failure(self, reason: str) -> SessionError:
        """Return the error for a failed search."""
        how_often = "1 attempt" if self._attempts == 1 else f"{self._attempts} attempts"
        seconds = trio.current_time() - self._began_at
        text = f"{reason} ({how_often}) in {seconds:.1f} s; `pccl doctor {self._address}` looks for the reason"
        return SessionError(Result.MASTER_CONNECTION_FAILED, text)


class SessionHolder:
    """Holds the session of one communicator, if it has one.

    `session`, `view` and `begin_close` may be called from any thread, other methods only from the session's trio run.
    Each raises PCCLError on behalf of the call that `func_name` names.
    """

    def __init__(
        self, address: str, masters: Sequence[Address], options: SessionOptions, timeout_s: float | None
    ) -> None:
        """`timeout_s` is the default timeout of calls."""
        self.address = address
        self.default_timeout_s = timeout_s
        self._masters = masters
        self._options = options
        self._session: PeerSession | None = None
        self._is_connecting = False
        self._master_search: MasterSearch | None = None
        self._is_joining = False
        """Whether a master has answered and this peer waits for admission."""
        self._is_closed = False
        self._first_size = 0
        """The size of the group when this peer was admitted, until the first group call."""
        self._is_synced = False
        """Whether `admit_peers` or `sync_shared_state` has synchronized a state since newcomers were last admitted."""
        self.caller = ""
        """The call of `pccl.training` that makes the group calls, for warnings and errors; "" if it is the program."""

    # Life.

    async def connect(self, n_attempts: int | None, timeout: Timeout) -> None:
        attempts = None if n_attempts is None else integer_argument("n_attempts", n_attempts, "connect")
        if self._is_closed:
            raise PCCLError(Result.NOT_INITIALIZED, "connect", "this communicator was closed; make a new one")
        if self._is_connecting:
            raise PCCLError(Result.INVALID_USAGE, "connect", "another call of this communicator is connecting it")
        if self._session is not None and self._session.failure is None:
            raise PCCLError(Result.INVALID_USAGE, "connect", "already connected")
        limit_s = self.timeout_s(timeout, "connect")
        search_s = limit_s
        if limit_s is None and isinstance(timeout, Default):
            search_s = REACH_S if attempts is None else max(ATTEMPTS_REACH_S, 2 * attempts * ATTEMPT_INTERVAL_S)
        portal.on_fork(self)
        self._is_connecting = True
        self._is_synced = False
        self._master_search = None
        try:
            with SessionErrors("connect"):
                connect = partial(self._connect, attempts, search_s, limit_s is None)
                await self._bounded("connect", limit_s, connect, self._connect_reason, warns=False)
        finally:
            self._is_connecting = False

    async def _connect_reason(self) -> tuple[str, str]:
        """Return what delays `connect`, and where to look for the cause."""
        session = self._session
        if self._is_joining and session is not None:
            return session.obstacle or await session.call_reasons.of_admission(), where_to_look(self.address)
        search = self._master_search
        reason = search.reason() if search is not None else "the former session to end"
        return reason, how_to_look(self.address)

    async def _connect(self, n_attempts: int | None, search_s: float | None, is_bound: bool) -> None:
        """Open a session and join. The arguments are those of `MasterSearch`."""
        with ExitStack() as warnings:
            warnings.enter_context(waiting(SearchWait(), self._connect_reason, logger))
            if self._session is not None and not self._session.is_forgotten:
                await self._session.over.wait()  # it may still listen on the port that this session needs
            search = MasterSearch(self.address, len(self._masters), n_attempts, search_s, is_bound)
            self._master_search = search
            await self._search(search, warnings)

    async def _search(self, search: MasterSearch, warnings: ExitStack) -> None:
        """Open a session and join. `warnings` holds the context that logs warnings about the search."""
        while True:
            session: PeerSession | None = None
            dial_s, seek_s = search.begin()
            try:
                session = await open_session(self._masters, self._options, dial_s, seek_s)
                search.standing = TAKEN_ONLY
                await self._join(session, search, warnings)
                return
            except SessionError as error:
                if error.result is not Result.MASTER_CONNECTION_FAILED:
                    raise
                if session is not None and not session.is_unheard:
                    raise
                if search.is_over:
                    raise search.failure(error.message) from None
                search.standing = error.message
                await trio.sleep(ATTEMPT_INTERVAL_S)
                if self._is_closed:
                    raise SessionError(Result.NOT_INITIALIZED, "this communicator was closed") from None

    async def _join(self, session: PeerSession, search: MasterSearch, warnings: ExitStack) -> None:
        """Start a session and return once it has joined the run. Raise SessionError on failure."""
        self._session = session
        trio.lowlevel.spawn_system_task(session.run)
        try:
            if self._is_closed:
                await session.close()
            with trio.move_on_at(search.ends_at) as bound:
                await self._until_answered(session, search, warnings)
            if not bound.cancelled_caught:
                self._is_joining = True
                warnings.close()
                warnings.enter_context(waiting("connect", self._connect_reason, logger))
                await session.installed.wait()
                self._first_size = session.view.world_size if session.view is not None else 0
        except BaseException:  # cancelled, or trio's KeyboardInterrupt
            with trio.CancelScope(shield=True):
                await session.close()
            raise
        finally:
            self._is_joining = False
        if bound.cancelled_caught:
            with trio.CancelScope(shield=True):
                await session.close()
            raise search.failure(f"{self.address}: {TAKEN_ONLY}")
        if (failure := session.failure) is not None:
            await session.over.wait()
            if failure.result is Result.MASTER_CONNECTION_FAILED:
                raise SessionError(failure.result, f"{self.address}: {failure.message}")
            raise failure

    async def _until_answered(self, session: PeerSession, search: MasterSearch, warnings: ExitStack) -> None:
        """Wait until a master has answered or the session is over. Warn at once if a master holds back this peer."""
        scope = trio.CancelScope()

        async def note_hold() -> None:
            with scope, suppress(Exception):  # a failed warning must not end the wait
                for _ in range(HELD_ASKED_MAX):
                    await trio.sleep(HELD_S)
                    reason = await session.call_reasons.of_hold()
                    if reason == "" or scope.cancel_called:
                        return
                    if reason is not None:
                        search.standing = f"it holds newcomers: it waits for {reason}"
                        text = f"connect is held at {session.master_address}: the master waits for {reason}"
                        logger.warning("%s", text)
                        warnings.close()  # this was the first warning
                        warnings.enter_context(waiting("connect", self._connect_reason, logger))
                        return

        trio.lowlevel.spawn_system_task(note_hold)
        try:
            await session.until_answered()
        finally:
            scope.cancel()

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.view is not None and self._session.failure is None

    @property
    def standing(self) -> str:
        """A description of the communicator's state."""
        session = self._session
        failure = session.failure if session is not None else None
        if self._is_closed:
            return "closed"
        if failure is not None:
            return f"{failure.result.name}, {failure.message}"
        if session is None or session.view is None:
            return "connecting" if self._is_connecting else "not connected"
        view = session.view
        return f"rank {view.ring.index(view.peer)} of {view.world_size} in group {view.group}, peer {view.peer}"

    @property
    def is_at_rest(self) -> bool:
        """Whether the last session is over, so that the next one may live in another trio run."""
        return not self._is_connecting and (self._session is None or self._session.over.is_set())

    def begin_close(self) -> bool:
        """Refuse all further calls. Return whether `close` has anything left to do."""
        self._is_closed = True
        return self._session is not None and not self._session.is_forgotten

    async def close(self, reason: str = "", limit_s: float | None = None) -> bool:
        """Leave the run; the other peers see the `reason`. If `limit_s` passes first, return False and keep closing."""
        self._is_closed = True
        if self._session is None:
            return True

        async def reason_to_wait() -> tuple[str, str]:
            return CLOSING, how_to_look(self.address)

        end_s = float("inf") if limit_s is None else trio.current_time() + limit_s
        with trio.CancelScope(shield=True, deadline=end_s) as scope, waiting("close", reason_to_wait, logger):
            await self._session.close(reason)
        return not scope.cancelled_caught

    def abandon(self, error: BaseException) -> None:
        """End the session after its trio run has ended with `error`."""
        if self._session is not None:
            self._session.abandon(error)

    def forget_after_fork(self) -> None:
        """Make all calls fail in a forked child, as the session belongs to the parent."""
        self._is_connecting = False
        if self._session is not None:
            self._session.forget_after_fork()

    # Calls.

    def session(self, func_name: str) -> PeerSession:
        """Return the session. NOT_INITIALIZED before `connect`, after `close` and in a forked child."""
        if self._is_closed:
            raise PCCLError(Result.NOT_INITIALIZED, func_name, "this communicator was closed")
        session = self._session
        if session is None or (session.view is None and session.failure is None):
            raise PCCLError(Result.NOT_INITIALIZED, func_name, "call connect() first")
        if session.is_forgotten:
            # Checked before any use of a device, which is not allowed in a forked child.
            assert session.failure is not None
            raise PCCLError(session.failure.result, func_name, session.failure.message)
        return session

    def view(self, func_name: str) -> View:
        """Return the installed view. Raise the errors of `session`, or the error that ended the session."""
        with SessionErrors(func_name):
            session = self.session(func_name)
            if session.failure is not None:
                raise session.failure
        assert session.view is not None
        return session.view

    def timeout_s(self, timeout: Timeout, func_name: str) -> float | None:
        """Return a call's timeout in seconds: its own `timeout`, else the communicator's."""
        return self.default_timeout_s if isinstance(timeout, Default) else _timeouts.checked_s(timeout, func_name)

    async def _bounded(
        self,
        func_name: str,
        timeout: Timeout,
        call: Callable[[], Awaitable[T]],
        reason: Callable[[], Awaitable[tuple[str, str]]],
        warns: bool = True,
    ) -> T:
        """Await `call()` for at most `timeout`, then raise TIMEOUT.

        `reason()` returns the peers that the call waits for and where to look, for the error and for warnings. If
        `warns`, log the warnings here, because `call` does not.
        """
        limit_s = self.timeout_s(timeout, func_name)
        whom = where = ""
        scope = trio.CancelScope(deadline=float("-inf") if limit_s is not None and limit_s <= 0 else float("inf"))
        expiry = trio.CancelScope()

        async def expire(after_s: float) -> None:
            nonlocal whom, where
            with expiry:
                await trio.sleep(after_s)
                with suppress(Exception), trio.move_on_after(ASK_S if after_s > SHORT_S else after_s):
                    whom, where = await reason()  # before the call is withdrawn
                scope.cancel()

        if limit_s is not None and limit_s > 0:
            trio.lowlevel.spawn_system_task(expire, limit_s)
        try:
            with waiting(func_name, reason, logger) if warns else nullcontext(), scope:
                return await call()
        finally:
            expiry.cancel()
        reason_text = f"; it waited for {whom}; {where}" if whom else ""
        raise PCCLError(Result.TIMEOUT, func_name, f"not finished within {limit_s:g} s{reason_text}")

    def _call_reason(self, session: PeerSession, kind: str) -> Callable[[], Awaitable[tuple[str, str]]]:
        async def reason() -> tuple[str, str]:
            look = where_to_look if session.hears_master else how_to_look
            whom = await session.call_reasons.of_call(kind)
            return whom.replace(f"not called {kind}", f"not called {self.caller or kind}"), look(self.address)

        return reason

    async def group_call(self, func_name: str, kind: str, timeout: Timeout) -> int:
        """Make a group call and return its result, a number whose meaning depends on `kind`."""
        func_name = self.caller or func_name
        session = self.session(func_name)
        self._first_size = 0
        if kind == Kind.UPDATE_TOPOLOGY:
            self._is_synced = False  # even if the call fails here, since it may have succeeded on the other peers
        return await self._bounded(
            func_name, timeout, lambda: session.group_call(kind), self._call_reason(session, kind)
        )

    async def are_peers_pending(self, timeout: Timeout) -> bool:
        return await self.group_call("are_peers_pending", Kind.ARE_PEERS_PENDING, timeout) > 0

    async def update_topology(self, timeout: Timeout) -> None:
        await self.group_call("update_topology", Kind.UPDATE_TOPOLOGY, timeout)

    async def optimize_topology(self, timeout: Timeout) -> None:
        await self.group_call("optimize_topology", Kind.OPTIMIZE_TOPOLOGY, timeout)

    async def wait_for_peers(self, count: int, timeout: Timeout) -> int:
        """Return the size of the group, once it has `count` peers or the others have continued with fewer."""
        name = "wait_for_peers"
        count = integer_argument("count", count, name, 1)

        async def more() -> tuple[str, str]:
            view = self.view(name)
            present = f"{view.world_size} of {count} are in group {view.group} now"
            return f"more peers to connect to {self.address}: {present}", where_to_look(self.address)

        async def gather() -> int:
            pause_s = PAUSE_S_MIN
            first_size, self._first_size = self._first_size, 0
            if first_size >= count and not self.session(name).has_had_ops:
                return first_size  # admitted together, though others may have left since
            if self.view(name).world_size < count:
                self.session(name).require_no_ops()  # newcomers cannot be admitted before all ops have ended
            while (world_size := self.view(name).world_size) < count:
                pending = await self.group_call(name, Kind.ARE_PEERS_PENDING, None)
                if pending == PendingAnswer.ELSEWHERE:
                    logger.info("wait_for_peers(%d): the other peers continue with %d peers", count, world_size)
                    break
                if pending > 0 or pending == PendingAnswer.ADMITTING:
                    if (admitted := await self.group_call(name, Kind.UPDATE_TOPOLOGY, None)) >= count:
                        return admitted  # other peers may continue and leave before this one checks
                    pause_s = PAUSE_S_MIN
                    continue
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            return self.view(name).world_size

        return await self._bounded(name, timeout, gather, more)

    async def admit_peers(self, state: SharedState | None, strategy: SharedStateSyncStrategy, timeout: Timeout) -> bool:
        """Admit newcomers, and synchronize the state if it is out of date. Return whether it did either."""
        name = "admit_peers"
        limit_s = self.timeout_s(timeout, name)
        end_s = float("inf") if limit_s is None else trio.current_time() + limit_s

        def left_s() -> float | None:
            return None if limit_s is None else max(0.0, end_s - trio.current_time())

        is_admitting = await self.group_call(name, Kind.ARE_PEERS_PENDING, left_s()) > 0
        if is_admitting:
            await self.group_call(name, Kind.UPDATE_TOPOLOGY, left_s())
        is_syncing = state is not None and not self._is_synced
        if state is not None and is_syncing:
            await self.sync_shared_state(state, strategy, left_s(), name)
        return is_admitting or is_syncing

    async def sync_shared_state(
        self, state: SharedState, strategy: SharedStateSyncStrategy, timeout: Timeout, name: str = "sync_shared_state"
    ) -> SharedStateSyncInfo:
        """Take part in the group's sync and set the revision of `state`. Return once all copies to devices are done."""
        given: Any = state
        name = self.caller or name
        if not isinstance(strategy, SharedStateSyncStrategy):
            raise invalid(name, f"{strategy!r} is not a SharedStateSyncStrategy")
        if not isinstance(given, SharedState):
            raise invalid(name, f"shared_state must be a SharedState, not {given!r}")
        session = self.session(name)
        tensors = [tensor.state_tensor() for tensor in state.tensors]
        transfer: Transfer | None = None

        async def take_part() -> tuple[int, Transfer]:
            nonlocal transfer
            try:
                own = await trio.to_thread.run_sync(fingerprint, tensors, abandon_on_cancel=True)
            except StoreError as error:
                raise session.store_failed(str(error)) from error
            transfer = Transfer(tensors, own)
            return await session.sync(strategy.value, state.revision, transfer), transfer

        try:
            try:
                with SessionErrors(name):
                    reason = self._call_reason(session, Kind.SYNC)
                    revision, done = await self._bounded(name, timeout, take_part, reason)
            finally:
                with SessionErrors(name):
                    await _settle(session, tensors)
                for info in state.tensors:
                    if transfer is not None and info.name in transfer.overwritten:
                        info.note_written()
        except PCCLError as error:
            if transfer is None or not transfer.overwritten:
                raise
            spoiled = f"overwritten here at least partly: {', '.join(sorted(transfer.overwritten))}"
            raise PCCLError(error.result, name, f"{error.message}; {spoiled}") from None
        state.revision = revision
        self._is_synced = True
        return SharedStateSyncInfo(done.tx_bytes, done.rx_bytes, revision)


async def _settle(session: PeerSession, tensors: Sequence[StateTensor]) -> None:
    """Wait for unfinished copies to devices. Raise SessionError if a device has failed."""
    for tensor in tensors:
        if tensor.store is not None:
            with trio.CancelScope(shield=True):
                try:
                    await trio.to_thread.run_sync(tensor.store.settle)
                except StoreError as error:
                    raise session.store_failed(str(error)) from error


def close_forgotten(holder: SessionHolder) -> None:
    """Leave the run without waiting after the communicator was garbage-collected. May be called in any thread."""
    if holder.begin_close():
        portal.current().start(holder.close)
