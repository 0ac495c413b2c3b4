"""The session behind a communicator: made by `connect`, handed to every call, ended by `close`.

Both communicators have a `SessionHolder`. Its coroutines run in a trio run: that of the program for an
`AsyncCommunicator` in trio, that of the portal's thread for one in asyncio and for `Communicator`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from types import TracebackType
from typing import TypeVar

import trio

from pccl import _timeouts
from pccl._collectives import AsyncCollectiveHandle, CallOf
from pccl._giving_up import give_up
from pccl._master_search import ATTEMPT_INTERVAL_S, TAKEN_ONLY, MasterSearch, SearchWait, reach_s
from pccl._reduce import AsyncReduceHandle
from pccl._timeouts import Default, Timeout
from pccl.errors import PCCLError
from pccl.protocol.long_wait import how_to_look, where_to_look
from pccl.protocol.peer import View, alone_in
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.network.addresses import Address
from pccl.runtime.session.options import SessionError, SessionOptions
from pccl.runtime.session.peer_session import PeerSession, open_session
from pccl.runtime.threads import portal
from pccl.runtime.threads.waits import waiting
from pccl.types import Result

SHORT_S = 0.1
"""The longest timeout that is not exceeded by much, whatever its error could tell."""
ASK_S = 1.0
"""Time by which a call exceeds its timeout at most, to learn for whom it has waited."""
HELD_S = 0.3
"""Seconds without an answer after which a newcomer asks for the master's status, which says whether it is held."""
HELD_ASKED_MAX = 3
"""How often it asks a master that does not tell: one that is busy has better things to do."""
CLOSING = "what runs in this session to end, and the master to be told"

logger = logging.getLogger("pccl")

T = TypeVar("T")


class SessionErrors:
    """A `with` block in which errors of the session and of the portal become PCCLErrors of the call `func_name`.

    It is a class, and not a generator, because every op passes through it: that takes half as many calls.
    """

    def __init__(self, func_name: str) -> None:
        self._func_name = func_name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, SessionError):
            raise PCCLError(error.result, self._func_name, error.message) from None
        if isinstance(error, portal.PortalBrokenError):
            raise PCCLError(Result.INTERNAL_ERROR, self._func_name, str(error)) from None
        if isinstance(error, portal.PortalClosedError):
            raise PCCLError(Result.NOT_INITIALIZED, self._func_name, str(error)) from None


class _Limit:
    """A context that is left after a time. Right before, `account` is asked for whom the call in it waits, and where to
    look."""

    def __init__(self, limit_s: float, account: Callable[[], Awaitable[tuple[str, str]]]) -> None:
        self.whom = self.where = ""
        self._limit_s = limit_s
        self._ask = account
        self._scope = trio.CancelScope(deadline=trio.current_time() if limit_s <= 0 else float("inf"))
        self._expiry = trio.CancelScope()

    def __enter__(self) -> _Limit:
        if self._limit_s > 0:
            trio.lowlevel.spawn_system_task(self._expire)
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._expiry.cancel()
        return bool(self._scope.__exit__(kind, error, traceback))

    async def _expire(self) -> None:
        with self._expiry:
            await trio.sleep(self._limit_s)
            ask_s = ASK_S if self._limit_s > SHORT_S else self._limit_s
            with suppress(Exception), trio.move_on_after(ask_s):  # the text may lack it
                self.whom, self.where = await self._ask()
            self._scope.cancel()


class SessionHolder:
    """The session of one communicator, if it has one.

    `session`, `view`, `launch`, `launch_collective` and `begin_close` may be called from any thread, the others in the
    trio run that the session lives in. Each raises PCCLError, for the call that `func_name` names.
    """

    def __init__(
        self, address: str, masters: Sequence[Address], options: SessionOptions, timeout_s: float | None
    ) -> None:
        """`timeout_s` is what a call is given that has no timeout of its own."""
        self.address = address
        self.default_timeout_s = timeout_s
        self._masters = masters
        self._options = options
        self._session: PeerSession | None = None
        self._is_connecting = False
        self._obstacle = ""
        """The thing that holds up the connecting before a master has answered."""
        self._is_joining = False
        """Whether a master has answered, and the peers of its run have to let this one in."""
        self._is_closed = False

    # Life.

    async def connect(self, n_attempts: int | None, timeout: Timeout) -> None:
        if self._is_closed:
            raise PCCLError(Result.NOT_INITIALIZED, "connect", "this communicator was closed; make a new one")
        if self._is_connecting:
            raise PCCLError(Result.INVALID_USAGE, "connect", "another call of this communicator is connecting it")
        if self._session is not None and self._session.failure is None:
            raise PCCLError(Result.INVALID_USAGE, "connect", "already connected")
        limit_s = self.timeout_s(timeout, "connect")
        search_s = reach_s(n_attempts) if limit_s is None and isinstance(timeout, Default) else limit_s
        portal.on_fork(self)
        self._is_connecting = True
        try:
            with SessionErrors("connect"):
                await self.bounded(
                    "connect",
                    limit_s,
                    lambda: self._connect(n_attempts, search_s, limit_s is None),
                    self._hindrance,
                    self._where_to_look,
                    warns=False,
                )
        finally:
            self._is_connecting = False

    async def _hindrance(self) -> str:
        """Return what holds up the connecting."""
        session = self._session
        if self._is_joining and session is not None:
            return session.obstacle or await session.call_reasons.of_admission()
        return self._obstacle

    def _where_to_look(self) -> str:
        """Return where to look for what holds up the connecting."""
        return (where_to_look if self._is_joining else how_to_look)(self.address)

    async def _wait_account(self) -> tuple[str, str]:
        return await self._hindrance(), self._where_to_look()

    async def _connect(self, n_attempts: int | None, search_s: float | None, is_bound: bool) -> None:
        """Open a session and join. The arguments are those of `MasterSearch`."""
        with ExitStack() as warnings:
            warnings.enter_context(waiting(SearchWait(), self._wait_account, logger))
            if self._session is not None and not self._session.is_forgotten:
                self._obstacle = "what is left of the former session"
                await self._session.over.wait()  # it may listen at the port that this one is to listen at
            search = MasterSearch(self.address, len(self._masters), n_attempts, search_s, is_bound)
            await self._search(search, warnings)

    async def _search(self, search: MasterSearch, warnings: ExitStack) -> None:
        """Open a session and join. `warnings` holds the context that warns of the search."""
        while True:
            session: PeerSession | None = None
            dial_s = search.begin()
            self._obstacle = search.account()
            try:
                session = await open_session(self._masters, self._options, dial_s, search.seek_s)
                search.has_connected()
                self._obstacle = search.account()
                await self._join(session, search, warnings)
                return
            except SessionError as error:
                if error.result is not Result.MASTER_CONNECTION_FAILED:
                    raise
                if session is not None and not session.is_unheard:
                    raise
                if search.is_over:
                    raise search.failure(error.message) from None
                search.has_failed(error.message)
                self._obstacle = search.account()
                await trio.sleep(ATTEMPT_INTERVAL_S)
                if self._is_closed:
                    raise SessionError(Result.NOT_INITIALIZED, "this communicator was closed") from None

    async def _join(self, session: PeerSession, search: MasterSearch, warnings: ExitStack) -> None:
        """Run a session, and return when it is in the run. SessionError."""
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
                warnings.enter_context(waiting("connect", self._wait_account, logger))
                await session.installed.wait()
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
        failure = session.failure
        if failure is not None:
            await session.over.wait()
            if failure.result is Result.MASTER_CONNECTION_FAILED:
                raise SessionError(failure.result, f"{self.address}: {failure.message}")
            raise failure

    async def _until_answered(self, session: PeerSession, search: MasterSearch, warnings: ExitStack) -> None:
        """Wait until some master has answered, or the session is over. Say so at once if a master holds this peer."""
        scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._note_hold, scope, session, search, warnings)
        try:
            await session.until_answered()
        finally:
            scope.cancel()

    async def _note_hold(
        self, scope: trio.CancelScope, session: PeerSession, search: MasterSearch, warnings: ExitStack
    ) -> None:
        with scope, suppress(Exception):  # a warning must not end anything
            for _ in range(HELD_ASKED_MAX):
                await trio.sleep(HELD_S)
                reason = await session.call_reasons.of_hold()
                if reason == "" or scope.cancel_called:
                    return
                if reason is not None:
                    search.is_held(reason)
                    self._obstacle = search.account()
                    text = f"connect is held at {session.master_address}: the master waits for {reason}"
                    logger.warning("%s", text)
                    warnings.close()  # that was the first
                    warnings.enter_context(waiting("connect", self._wait_account, logger))
                    return

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.view is not None and self._session.failure is None

    @property
    def standing(self) -> str:
        """Where the communicator stands, in a few words: for people."""
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
        """Whether nothing of a session is left, so that the next one may live in another trio run."""
        return not self._is_connecting and (self._session is None or self._session.over.is_set())

    def begin_close(self) -> bool:
        """Refuse all further calls. True if `close` has anything left to do."""
        self._is_closed = True
        return self._session is not None and not self._session.is_forgotten

    async def close(self, reason: str = "", limit_s: float | None = None) -> bool:
        """Leave the run, and tell the others the `reason`.

        Return False if `limit_s` has passed before nothing was left to do, which then goes on.
        """
        self._is_closed = True
        if self._session is None:
            return True

        async def account() -> tuple[str, str]:
            return CLOSING, how_to_look(self.address)

        end_s = float("inf") if limit_s is None else trio.current_time() + limit_s
        with trio.CancelScope(shield=True, deadline=end_s) as scope, waiting("close", account, logger):
            await self._session.close(reason)
        return not scope.cancelled_caught

    def abandon(self, error: BaseException) -> None:
        """End the session from outside its trio run, which has ended with `error`."""
        if self._session is not None:
            self._session.abandon(error)

    def forget_after_fork(self) -> None:
        """Make all calls fail in a forked child, to which the session does not belong."""
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
            # Before anything is asked of a device: a forked child may not use one.
            assert session.failure is not None
            raise PCCLError(session.failure.result, func_name, session.failure.message)
        return session

    def view(self, func_name: str) -> View:
        """Return the installed view. Errors as of `session`, or the reason why the session is over."""
        with SessionErrors(func_name):
            session = self.session(func_name)
            if session.failure is not None:
                raise session.failure
        assert session.view is not None
        return session.view

    def timeout_s(self, timeout: Timeout, func_name: str) -> float | None:
        """Return the seconds that a call has: its own `timeout`, or else the communicator's."""
        return self.default_timeout_s if isinstance(timeout, Default) else _timeouts.checked_s(timeout, func_name)

    async def bounded(
        self,
        func_name: str,
        timeout: Timeout,
        call: Callable[[], Awaitable[T]],
        whom: Callable[[], Awaitable[str]],
        where: str | Callable[[], str],
        warns: bool = True,
    ) -> T:
        """Await `call()` for as long as `timeout` allows, then raise TIMEOUT. `whom()` is asked for whom it waits, for
        the texts of that and of the warnings on the way, which `where` ends with where to look. `warns`: `call` does
        not warn by itself."""
        limit_s = self.timeout_s(timeout, func_name)

        async def account() -> tuple[str, str]:
            return await whom(), where if isinstance(where, str) else where()

        with waiting(func_name, account, logger) if warns else nullcontext():
            if limit_s is None:
                return await call()
            with _Limit(limit_s, account) as limit:
                return await call()
        whom_it_waited_for = f"; it waited for {limit.whom}; {limit.where}" if limit.whom else ""
        raise PCCLError(Result.TIMEOUT, func_name, f"not finished within {limit_s:g} s{whom_it_waited_for}")

    async def joint(self, func_name: str, kind: str, timeout: Timeout) -> int:
        """Make a joint call of `kind` and return its number, whose meaning depends on the kind."""
        session = self.session(func_name)
        return await self.bounded(
            func_name,
            timeout,
            lambda: session.joint(kind),
            lambda: session.call_reasons.of_call(kind),
            where_to_look(self.address),
        )

    def launch(self, spec: OpSpec, func_name: str) -> AsyncReduceHandle:
        """Launch an all_reduce."""
        return self._launch(spec, func_name, AsyncReduceHandle)

    def launch_collective(self, call: CallOf, func_name: str) -> AsyncCollectiveHandle:
        """Launch another collective."""
        made = call(self.view(func_name), func_name)
        return self._launch(made.spec, func_name, lambda op: AsyncCollectiveHandle(op, made))

    @trio.lowlevel.enable_ki_protection
    def _launch(self, spec: OpSpec, func_name: str, handle_of: Callable[[PendingOp], T]) -> T:
        """Launch an op. A signal handler that raises meanwhile leaves nothing in flight."""
        session = self.session(func_name)
        view = self.view(func_name)
        if view.world_size < 2:
            raise PCCLError(Result.TOO_FEW_PEERS, func_name, alone_in(view.group))
        is_overlapped = spec.pair is None
        op = session.ops.new(spec._replace(is_overlapped=True) if is_overlapped else spec)
        op.waits = session.overlapped_waits if is_overlapped else None
        try:
            handle = handle_of(op)
            with SessionErrors(func_name):
                session.ops.launch(op)
        except PCCLError:
            raise
        except BaseException:
            give_up(session, [op])
            raise
        return handle


def close_forgotten(holder: SessionHolder) -> None:
    """Leave the run without waiting, for a communicator that was garbage-collected, in whatever thread. Its session
    lives in the portal's thread."""
    if holder.begin_close():
        portal.current().start(holder.close)
