"""The session behind a communicator: made by `connect`, handed to every call, ended by `close`.

Both communicators have a `SessionHolder`. Its coroutines run in a trio run: that of the program for
`AsyncCommunicator`, that of the portal's thread for `Communicator`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TypeVar

import trio

from pccl import _timeouts
from pccl._collectives import AsyncCollectiveHandle, CallOf
from pccl._giving_up import gave_up
from pccl._reduce import AsyncReduceHandle
from pccl._timeouts import Default, Timeout
from pccl.errors import PCCLError
from pccl.protocol.peer import View, alone_in
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.network.master_addresses import Address
from pccl.runtime.session.options import SessionError, SessionOptions
from pccl.runtime.session.peer_session import PeerSession, open_session
from pccl.runtime.threads import portal
from pccl.types import Result

ATTEMPT_INTERVAL_S = 1.0

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
        """The reason that holds up the connecting, where the session does not know it."""
        self._is_closed = False

    # Life.

    async def connect(self, n_attempts: int, timeout: Timeout) -> None:
        if self._is_closed:
            raise PCCLError(Result.NOT_INITIALIZED, "connect", "this communicator was closed; make a new one")
        if self._is_connecting:
            raise PCCLError(Result.INVALID_USAGE, "connect", "another call of this communicator is connecting it")
        if self._session is not None and self._session.failure is None:
            raise PCCLError(Result.INVALID_USAGE, "connect", "already connected")
        portal.on_fork(self)
        self._is_connecting = True
        try:
            with SessionErrors("connect"):
                await self.bounded("connect", timeout, lambda: self._connect(n_attempts), self._hindrance)
        finally:
            self._is_connecting = False

    def _hindrance(self) -> str:
        """Return what holds up the connecting, for the text of a TIMEOUT."""
        return (self._session.obstacle if self._session is not None else "") or self._obstacle

    async def _connect(self, n_attempts: int) -> None:
        """Open a session and join. While no master answers, try `n_attempts` times, ATTEMPT_INTERVAL_S apart."""
        if self._session is not None and not self._session.is_forgotten:
            self._obstacle = "what is left of the former session"
            await self._session.over.wait()  # it may listen at the port that this one is to listen at
        attempt = 1
        self._obstacle = f"no answer from {self.address}"
        while True:
            session: PeerSession | None = None
            try:
                session = await open_session(self._masters, self._options)
                await self._join(session)
                return
            except SessionError as error:
                is_answered = session is not None and not session.is_unheard
                if error.result is not Result.MASTER_CONNECTION_FAILED or is_answered or attempt >= n_attempts:
                    if attempt > 1 and not is_answered:
                        raise SessionError(error.result, f"{error.message} ({attempt} attempts)") from None
                    raise
                self._obstacle = error.message
                await trio.sleep(ATTEMPT_INTERVAL_S)
                if self._is_closed:
                    raise SessionError(Result.NOT_INITIALIZED, "this communicator was closed") from None
            attempt += 1

    async def _join(self, session: PeerSession) -> None:
        """Run a session, and return when it is in the run. SessionError."""
        self._session = session
        self._obstacle = "the peers of the run have yet to let this one in; they do so by calling update_topology"
        trio.lowlevel.spawn_system_task(session.run)
        try:
            if self._is_closed:
                await session.close()
            await session.installed.wait()
        except BaseException:  # cancelled, or trio's KeyboardInterrupt
            with trio.CancelScope(shield=True):
                await session.close()
            raise
        failure = session.failure
        if failure is not None:
            await session.over.wait()
            if failure.result is Result.MASTER_CONNECTION_FAILED:
                raise SessionError(failure.result, f"{self.address}: {failure.message}")
            raise failure

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.view is not None and self._session.failure is None

    def begin_close(self) -> bool:
        """Refuse all further calls. True if `close` has anything left to do."""
        self._is_closed = True
        return self._session is not None and not self._session.is_forgotten

    async def close(self, reason: str = "") -> None:
        """Leave the run. The others are told the `reason`."""
        self._is_closed = True
        if self._session is not None:
            with trio.CancelScope(shield=True):
                await self._session.close(reason)

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
        obstacle: Callable[[], str] = lambda: "other peers may not have called it",
    ) -> T:
        """Await `call()` for as long as `timeout` allows, then raise TIMEOUT with `obstacle()` in its text."""
        limit_s = self.timeout_s(timeout, func_name)
        if limit_s is None:
            return await call()
        with trio.move_on_after(limit_s):
            return await call()
        raise PCCLError(Result.TIMEOUT, func_name, f"not finished within {limit_s:g} s; {obstacle()}")

    async def joint(self, func_name: str, kind: str, timeout: Timeout) -> int:
        """Make a joint call of `kind` and return its number, whose meaning depends on the kind."""
        session = self.session(func_name)
        return await self.bounded(func_name, timeout, lambda: session.joint(kind))

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
        op = session.ops.new(spec)
        try:
            handle = handle_of(op)
            with SessionErrors(func_name):
                session.ops.launch(op)
            return handle
        except PCCLError:
            raise
        except BaseException:
            try:
                session.ops.cancel(op, Result.TIMEOUT, gave_up(session, None))
            finally:
                op.reclaim()
            raise
