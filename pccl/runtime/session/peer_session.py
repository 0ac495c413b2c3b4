"""One connected peer: drives a `protocol.Peer` with the master's messages, the engine's events and the user's calls.

Everything here runs in the trio thread, except `launch`, `launch_waiting`, `cancel`, `ask_for_release` and what these
say of themselves, which any thread may call: launches go into a queue and wake the trio thread once for all that have
gathered. They take no lock, for a signal handler that closes the communicator may run in the middle of one, and waits
there for the trio thread.

Small ops of callers that wait need not come here: they go through the gate (`fast_path`) while it is open. Before the
machine is told anything that bears on ops, be it a message, a call or a loss, `_take_over` closes it, and tells the
machine first what has come of those. `_pump` opens it again.

The rule that keeps this simple: every event handler feeds the machine and then calls `_pump`, which carries out the
effects in order. Effects never wait; those that need time (making a link, moving state) become tasks that report back
as events.

Use counts are right, that is, ops with one tag reach the machine in the order in which the tag was used, because

1. who has the tag of an op frees it only once the op is over, and an op that its gate has told or shown is among the
   engine's events before its caller knows;
2. so whatever came through the gate before a launch of the same tag was queued is among the events by then;
3. `_take_launches` first notes how many launches there are, then hears the engine, and takes no more than those: each
   finds its predecessor counted. The gate may stay open meanwhile, also for the tags of later launches.

With cancels it is the same: they are noted before the launches, so an op whose cancel is taken is in the machine, or
among the events heard, or was submitted by nobody and never will be.

A control connection that breaks is made anew, to the same master, and carries the session on (`control_session`); the
machine does not hear of it. The master is lost when it does not know the session, when no connection has come about for
a peer timeout, or half of `master_timeout_s` if that is less, and at once where there are other masters to ask, nothing
listens at its port any more and its signs of life have ended as well.

A master that is lost is looked for, at all its addresses in turn (`master_addresses`), while the engine goes on; who
finds none for `master_timeout_s` gives up.

A caller that gives an op up gets its arrays back when the engine has let go of them (`ask_for_release`, and
`detached`), whatever becomes of the op, whose tag stays in use until its verdict is known.

The session ends when the machine says so (`Ended`). It then lets the engine give back the buffers of open ops, so that
no caller regains a buffer that is still in use.

It shares its thread with other sessions and masters, which outlive its faults: everything here that others call, be it
a task, a callback of trio's or a method, is contained (`_contain`). An exception that nobody expects ends this session
alone: the machine is asked nothing any more, the master is told that this peer leaves, the engine is closed, which
restores the buffers, and callers get INTERNAL_ERROR.
"""

from __future__ import annotations

import errno
import itertools
import logging
import random
import secrets
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import trio

from pccl.logs import AboutLogger
from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.auth import AuthError, Keys
from pccl.protocol.codec import ProtocolError, decode_body, encode
from pccl.protocol.control_session import KEY_BYTES, ControlSession
from pccl.protocol.messages import MASTER_TIMEOUT_S
from pccl.runtime.data_plane import engine as native
from pccl.runtime.data_plane.detached import PrivateCopy
from pccl.runtime.data_plane.fast_path import Gate
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.data_plane.staged_ops import Pieces, hint
from pccl.runtime.network import addresses, handshake, links, probe
from pccl.runtime.network.encrypted import SealedStream
from pccl.runtime.network.heartbeat import Beacon, dial_beats, keep_beats
from pccl.runtime.network.log_limiter import Refusals
from pccl.runtime.network.master_addresses import DIAL_S, LEAD_TIMEOUTS, Address, Candidates
from pccl.runtime.network.tls import TlsEnd, TlsError
from pccl.runtime.network.unauthenticated import Strangers
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, SocketChannel, dial_control, send_message
from pccl.runtime.session.reports import Tally, interval_s
from pccl.runtime.state.tensor_blocks import StoreError
from pccl.runtime.state.transfer import Stream, Transfer, TransferError
from pccl.runtime.threads import faults
from pccl.runtime.threads.fork_guard import close_in_child
from pccl.runtime.threads.latch import Latch
from pccl.runtime.threads.tasks import start_task
from pccl.types import Result
from pccl.version import __version__

logger = logging.getLogger("pccl.peer")

NOTHING_BUT_OPS = native.OpStarted | native.OpRan | native.OpDone | native.OpAgreed | native.OpEnded | native.OpDetached
"""Events that tell of what the machine has decided, or will."""
OUR_OWN = native.EngineFailedError, MemoryError
"""What ends a session without being a bug."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
ENGINE_DRAIN_S = 5.0
ENGINE_POLL_MS = 1000
DEVICE_GRACE_S = 5.0
"""How long the array of an op that goes on may be copied from its device after its caller wanted it back."""
LEAVE_S = 5.0
FAREWELL_S = 1.0
STANDS_S = 1.0
"""A link that has lost a connection and stands so long after that has lost no more than that."""
REDIAL_S = 1.0
"""After that a lost connection that could not be made anew is tried once more, then after twice as long, and so on."""
REDIAL_S_MAX = 30.0
WITHDRAW_S = 5.0
"""How long a cancelled joint call waits for the master to say whether it has taken effect."""
WELCOME_TIMEOUT_S = 10.0
REATTACH_SHARE = 0.5
"""Of the master timeout: how long a broken control connection may take to be made anew, at most."""
REATTACH_PAUSE_S_MIN = 0.02
REATTACH_PAUSE_S_MAX = 0.5
"""Between two attempts at that."""


class SessionError(Exception):
    """A call that failed; becomes a PCCLError in the public layer."""

    def __init__(self, result: Result, message: str) -> None:
        super().__init__(message)
        self.result = result
        self.message = message


@dataclass
class _PendingCall:
    event: trio.Event = field(default_factory=trio.Event)
    result: ps.CallResult | None = None


@dataclass
class _Syncing:
    transfer: Transfer
    plan: m.SyncPlan | None = None
    planned: trio.Event = field(default_factory=trio.Event)
    """Set by the next plan."""
    is_over: bool = False
    fetching: trio.CancelScope | None = None
    is_fetching: trio.Lock = field(default_factory=trio.Lock)
    scopes: list[trio.CancelScope] = field(default_factory=list)

    def plan_with(self, plan: m.SyncPlan) -> None:
        """A plan, or that of another master after it, which begins anew with what has come by then."""
        self.plan = plan
        self.planned.set()
        self.planned = trio.Event()
        if self.fetching is not None:
            self.fetching.cancel()
            self.fetching = None

    async def until_planned(self, sync: int) -> bool:
        """Waits for the plan of this sync. False if it is over."""
        while not self.is_over and (self.plan is None or self.plan.sync < sync):
            await self.planned.wait()
        return not self.is_over and self.plan is not None and self.plan.sync == sync

    def scope(self) -> trio.CancelScope:
        """For one task that moves state: cancelled when the call is over, so that no tensor is touched after it."""
        scope = trio.CancelScope()
        if self.is_over:
            scope.cancel()
        self.scopes.append(scope)
        return scope

    def end(self) -> None:
        self.is_over = True
        self.planned.set()
        for scope in self.scopes:
            scope.cancel()


@dataclass(frozen=True)
class SessionOptions:
    group: int
    connections: int
    """Of each link to begin with."""
    may_grow: bool = False
    """It gets more where they help."""
    hosts: tuple[str, ...] = ()
    """Addresses to advertise."""
    port: int | None = None
    """Port to advertise where it is not the one listened on (NAT)."""
    listen_host: str = ""
    listen_port: int = 0
    name: str = ""
    site: str = ""
    """Whose peers come and go together, and how many they are; empty and 0: a peer on its own."""
    site_size: int = 0
    token: str = field(default="", repr=False)
    """The run's shared secret; empty: none."""
    encrypt: bool = False
    """What peers send to each other is encrypted. Needs a token."""
    ssl_context: ssl.SSLContext | None = None
    """For the control connection; None: no TLS."""
    master_timeout_s: float = MASTER_TIMEOUT_S
    """How long a lost master, or one after it, may take to be found."""
    segment_bytes: int = 0
    force_poll: bool = False


class _Containment:
    """For all that others call: what nobody expects ends the session. May be entered again within itself."""

    def __init__(self, end: Callable[[Exception], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._end(error)
        return True


class PeerSession:
    """Created by `open_session`; `run` must be running."""

    def __init__(
        self,
        connection: ControlConnection[m.FromMaster],
        listener: socket.socket,
        engine: Pieces,
        options: SessionOptions,
        candidates: Candidates,
        address: Address,
    ) -> None:
        """`connection` leads to `address`, one of the `candidates`, for whose host its certificate must be."""
        self.view: ps.View | None = None
        """The installed view. Replaced as a whole: any thread may read it."""
        self.failure: SessionError | None = None
        """Why the session is over."""
        self.is_forgotten = False
        """It belongs to the parent of this process."""
        self.installed = trio.Event()
        """The first view is there, or there will be none."""
        self.over = trio.Event()
        """Nothing of this session runs any more."""
        self._options = options
        self._connection = connection
        self._master_port: int
        self._met_at(address)
        self._listener = listener
        self._engine = engine
        self._machine = ps.Peer(options.group, options.connections, options.may_grow, outlives_masters=True)
        self._machine.site, self._machine.site_size = options.site, options.site_size
        self._token = trio.lowlevel.current_trio_token()
        self._abandoning = threading.RLock()
        self._launches: deque[PendingOp] = deque()
        self._cancels: deque[tuple[PendingOp, Result, str]] = deque()
        self._reclaims: deque[tuple[PendingOp, bool]] = deque()
        self._detaching: dict[int, PendingOp] = {}
        """The engine has been told, and has not done so yet."""
        self._gate = Gate(self._machine, engine)
        self._tags: dict[tuple[int, native.Pair | None], PendingOp] = {}
        """In flight, or about to be."""
        self._op_numbers = itertools.count(1)
        self._call_numbers = itertools.count(1)
        self._ops: dict[int, PendingOp] = {}
        self._calls: dict[int, _PendingCall] = {}
        self._syncing: _Syncing | None = None
        self._making: dict[int, list[trio.CancelScope]] = {}
        """Tasks that dial or await connections, or have something to say, by link."""
        self._candidates = candidates
        self._attending = trio.CancelScope()
        """Around what concerns the present control connection."""
        self._patience: trio.CancelScope | None = None
        """Ends when a master takes this peer in; its deadline is when the search ends."""
        self._beating = trio.CancelScope()
        self._is_beating = False
        """A connection for signs of life stands."""
        self._attached = trio.Event()
        """The control connection stands, as far as is known."""
        self._attached.set()
        self._beacon: Beacon | None = None
        self._heard_master = trio.Event()
        self._timer_changed = trio.Event()
        self._timer_deadline = float("inf")
        self._tally = Tally()
        self._strangers = Strangers()
        self._logger = AboutLogger(logger, self._about)
        self._refusals = Refusals(self._logger, trio.current_time)
        self._ended = trio.Event()
        self._drained = trio.Event()
        """It has ended, and the engine has given all buffers back."""
        self._is_broken = False
        """It has a fault: its machine is not to be believed."""
        self._nursery: trio.Nursery | None = None
        self._senders: trio.Nursery | None = None
        """They outlive all other tasks, for last words."""
        self._is_pumping = False
        self._contain = _Containment(self._break)

    # What the public layer calls.

    def new_op(self, spec: native.OpSpec) -> PendingOp:
        """An op to `launch`. Who has it before that can cancel it, should a signal come in the middle of `launch`."""
        return PendingOp(next(self._op_numbers), spec.launched(), self)

    def launch(self, op: PendingOp) -> None:
        """Launches an op from any thread. SessionError at once for a tag in flight or a session that is over."""
        self._claim_tag(op)
        self._enqueue(op)

    def launch_waiting(self, op: PendingOp) -> None:
        """`launch`, by a thread that will do nothing but wait for the op: it may be over already then."""
        self._claim_tag(op)
        try:
            has_run = self._gate.run(op)
        except Exception as error:
            # The op may have been submitted: its caller waits for the session, which ends now and restores its buffers.
            has_run = self._gate.has(op)
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._break, error)
        if not has_run:
            self._enqueue(op)
        else:
            self.let_go(op)

    def let_go(self, op: PendingOp) -> None:
        """For the thread that has launched it by `launch_waiting`: if it is over, its tag may be used again."""
        if op.is_over and self._tags.get(op.name) is op:
            self._tags.pop(op.name, None)

    def _claim_tag(self, op: PendingOp) -> None:
        self._require_alive_for(op)
        holder = self._tags.setdefault(op.name, op)
        if holder is op:
            return
        text = f"an op with tag {op.tag} is in flight already; wait for it or use another tag"
        if holder.is_detached:
            text = (
                f"an op with tag {op.tag} is in flight still: its caller has given it up, and the master or the other "
                f"peers have yet to say what becomes of it; use another tag, or try again later"
            )
        raise self._refused(op, SessionError(Result.INVALID_USAGE, text))

    def _require_alive_for(self, op: PendingOp) -> None:
        if self.failure is not None:
            raise self._refused(op, SessionError(self.failure.result, self.failure.message))

    @staticmethod
    def _refused(op: PendingOp, error: SessionError) -> SessionError:
        """It is over before it was launched."""
        op.finish(ps.OpResult(op.op, error.result, error.message, 0))
        return error

    def _enqueue(self, op: PendingOp) -> None:
        self._launches.append(op)
        try:
            self._token.run_sync_soon(self._take_launches, idempotent=True)
        except OSError as error:  # the run cannot be woken
            self.abandon(error)
        except trio.RunFinishedError:
            # The session has ended with its trio run, since we looked.
            with suppress(ValueError):
                self._launches.remove(op)
            self._require_alive_for(op)
            raise

    def cancel(self, op: PendingOp, code: Result, reason: str) -> None:
        """Asks for an op to be aborted on all peers, from any thread. It ends as the master says. Its `launch` may have
        been interrupted anywhere."""
        self._cancels.append((op, code, reason))
        try:
            self._token.run_sync_soon(self._take_launches, idempotent=True)
        except OSError as error:
            self.abandon(error)
        except trio.RunFinishedError:
            pass

    def ask_for_release(self, op: PendingOp, goes_on: bool) -> None:
        """Has the op let go of its caller's arrays, from any thread: `PendingOp.reclaim` calls it."""
        self._reclaims.append((op, goes_on))
        try:
            self._token.run_sync_soon(self._take_launches, idempotent=True)
        except OSError as error:
            self.abandon(error)
        except trio.RunFinishedError:
            # The engine was closed before the run ended, and has put everything back.
            reason = self.failure or SessionError(Result.NOT_INITIALIZED, "the trio run has ended")
            op.finish(ps.OpResult(op.op, reason.result, reason.message, 0))
            op.release()

    def wait_for_release(self, op: PendingOp) -> None:
        if self._is_own_thread():
            self._release_here(op)
        else:
            op.wait_released()

    def _is_own_thread(self) -> bool:
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False

    def _release_here(self, op: PendingOp) -> None:
        """For a caller in the trio thread that does not await: nobody else hears the engine meanwhile."""
        self._take_launches()
        poller = select.poll()
        for event_fd in self._engine.event_fds:
            poller.register(event_fd, select.POLLIN)
        end_s = trio.current_time() + DEVICE_GRACE_S
        while not op.is_released:
            poller.poll(ENGINE_POLL_MS)
            with self._contain:
                self._hear_engine()
                if op.feed is not None and trio.current_time() >= end_s:
                    self._stop_reading(op)
                self._pump()
            if self._is_broken:
                self._hear_last()
                self._engine.close()
                op.release()

    async def joint(self, kind: str, offer: m.SyncOffer | None = None) -> int:
        """Makes a joint call and returns its value. SessionError. When cancelled, the peer is taken out of the call and
        the cancellation goes on, unless the call has taken effect by then, which is returned as if in time."""
        self._require_alive()
        number = next(self._call_numbers)
        call = self._calls[number] = _PendingCall()
        with self._contain:
            self._take_over()
            self._machine.joint(number, kind, offer)
            self._pump()
        try:
            await call.event.wait()
        except BaseException as error:  # cancelled, or trio's KeyboardInterrupt
            if self._syncing is not None and kind == m.Kind.SYNC:
                self._syncing.end()
            with self._contain:
                self._take_over()
                self._machine.cancel_joint(number)
                self._pump()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + WITHDRAW_S):
                await call.event.wait()
            if not isinstance(error, trio.Cancelled) or call.result is None or call.result.code is Result.TIMEOUT:
                raise
        finally:
            self._calls.pop(number, None)
        assert call.result is not None
        if call.result.code is not Result.SUCCESS:
            raise SessionError(call.result.code, call.result.reason)
        return call.result.value

    async def sync(self, strategy: str, revision: int, transfer: Transfer) -> int:
        """Makes the joint call with this peer's part of it and returns the elected revision. SessionError; what was
        overwritten by then is in `transfer.overwritten`, also when cancelled."""
        self._require_alive()
        if self._syncing is not None:
            raise SessionError(Result.INVALID_USAGE, "another sync_shared_state of this communicator is under way")
        offer = m.SyncOffer(strategy, revision, transfer.own.root, [tensor.offer() for tensor in transfer.tensors])
        try:
            encode(m.JointCall(0, m.Kind.SYNC, offer))
        except ValueError as error:
            raise SessionError(
                Result.INVALID_ARGUMENT, f"{len(transfer.tensors)} tensors are too many to list, join some: {error}"
            ) from None
        syncing = self._syncing = _Syncing(transfer)
        try:
            return await self.joint(m.Kind.SYNC, offer)
        finally:
            self._syncing = None
            syncing.end()
            self._tally.state_fetched(transfer.rx_bytes)

    async def close(self) -> None:
        """Leaves the run and waits until nothing of the session is left."""
        if self.is_forgotten or self.over.is_set():
            return
        with self._contain:
            self._report()
            self._take_over()
            self._machine.leave("")
            self._pump()
        await self.over.wait()

    def forget_after_fork(self) -> None:
        """In a forked child: lets go of everything without a word to anybody."""
        self.is_forgotten = True
        self.failure = SessionError(
            Result.NOT_INITIALIZED, "this communicator belongs to the parent process; make one of your own after fork"
        )
        self._engine.forget_after_fork()
        if self._beacon is not None:
            self._beacon.forget_after_fork()
        self._connection.forget_after_fork()
        self._listener.close()
        for op in [*self._launches, *self._gate.running, *self._ops.values()]:
            op.forget_after_fork(ps.OpResult(op.op, self.failure.result, self.failure.message, 0))

    @property
    def hears_master(self) -> bool:
        """Any thread."""
        return self._machine.is_led

    @property
    def obstacle(self) -> str:
        """Why the master does not let this peer in for a while; empty: nothing but the others holds it up."""
        return self._machine.obstacle

    def stats(self) -> dict[str, int]:
        self._require_alive()
        return self._engine.stats()

    def _about(self) -> dict[str, object]:
        """For the log."""
        view, machine = self.view, self._machine
        known = {"run": machine.run, "view": view.view if view is not None else 0, "group": self._options.group}
        return {**known, "peer": machine.peer} if machine.peer else {"group": self._options.group}

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise SessionError(self.failure.result, self.failure.message)

    # Running.

    async def run(self) -> None:
        """From Hello to the end. Never raises anything but trio.Cancelled."""
        try:
            with self._contain:
                await self._run()
        finally:
            self._fail(Result.NOT_INITIALIZED, "this communicator was closed")
            self._release()

    async def _run(self) -> None:
        async with trio.open_nursery() as senders:
            self._senders = senders
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for task in (self._follow_masters, self._accept, self._watch_clock, self._keep_reporting):
                    start_task(nursery, self._contained, task)
                await self._ended.wait()
                if not self._is_broken:
                    with trio.move_on_after(ENGINE_DRAIN_S):
                        await self._drained.wait()
                    with trio.move_on_after(FAREWELL_S):
                        await self._attached.wait()
                nursery.cancel_scope.cancel()
            with trio.move_on_after(FAREWELL_S):
                await self._connection.flush()
            senders.cancel_scope.cancel()

    async def _contained(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        with self._contain:
            await function(*args)

    def _break(self, error: Exception) -> None:
        """A fault of pccl's or of this machine, of nobody else's. May be called again: one brings forth others."""
        if self._is_broken or self.over.is_set():
            return
        self._is_broken = True
        text = str(error) if isinstance(error, OUR_OWN) else faults.report("this communicator", error)
        if isinstance(error, MemoryError):
            text = f"this process is out of memory: {text}" if text else "this process is out of memory"
        elif isinstance(error, OSError) and error.errno == errno.EBADF:
            text = (
                f"the event loop has ended: {error}; something in this process closes descriptors that are not its own"
            )
        with suppress(Exception):
            self._logger.error("%s", text, exc_info=error)
        with suppress(Exception):
            self._connection.send([m.Leave(text)])
        self._fail(Result.INTERNAL_ERROR, text)

    def abandon(self, error: BaseException) -> None:
        """The trio run is no more, or cannot be woken, since somebody has closed its descriptors: ends the session from
        whatever thread, and all calls and ops. May be called again."""
        with self._abandoning:
            text = (
                f"the event loop has ended: {error}; something in this process closes descriptors that are not its own"
            )
            with suppress(Exception):  # of trio's, whose run is not to be had
                self._fail(Result.INTERNAL_ERROR, text)
            self._is_broken = True
            with suppress(Exception):
                self._gate.close()
            with suppress(Exception):
                self._engine.close()
            self._end_all()

    def _release(self) -> None:
        """Frees what is left, after all tasks have ended. Whatever fails on the way, the rest is done, and all callers
        have their results once the engine has restored their buffers."""
        with self._contain, ExitStack() as last:
            last.callback(self.over.set)
            last.callback(self._end_all)
            last.callback(self._engine.close)
            last.callback(self._hear_last)
            last.callback(self._gate.close)
            if self._beacon is not None:
                last.callback(self._beacon.close)
            last.callback(self._listener.close)
            last.callback(self._connection.close)

    def _hear_last(self) -> None:
        """Callers whose ops are committed may not have been told in a wait that was interrupted."""
        for event in self._engine.events() if not self._engine.is_closed else ():
            if isinstance(event, native.OpRan):
                self._gate.ran(event)

    def _end_all(self) -> None:
        """Only after an internal error is there anything to end."""
        assert self.failure is not None
        for op in [*self._ops.values(), *self._gate.running]:
            self._finish(op, ps.OpResult(op.op, self.failure.result, self.failure.message, 0))
        for op in self._detaching.values():
            op.release()

    def _fail(self, code: Result, reason: str) -> None:
        if self.failure is None:
            self.failure = SessionError(code, reason)
        while (op := self._next_launch()) is not None:
            self._finish(op, ps.OpResult(op.op, self.failure.result, self.failure.message, 0))
        for number, call in self._calls.items():
            if call.result is None:
                call.result = ps.CallResult(number, self.failure.result, self.failure.message, 0)
                call.event.set()
        if self._syncing is not None:
            self._syncing.end()
        self.installed.set()
        self._ended.set()

    # Sources of events.

    async def _follow_masters(self) -> None:
        while True:
            self._attending = trio.CancelScope()
            self._start_sender()
            with self._attending:
                await self._read_master()
            if self._machine.is_over:
                return
            self._connection.shutdown()
            await self._connection.flush()
            self._connection.close()
            await self._find_master()

    def _start_sender(self) -> None:
        assert self._senders is not None
        start_task(self._senders, self._contained, self._connection.run_sender)

    async def _read_master(self) -> None:
        """Until the connection ends, or the machine has done with it."""
        machine = self._machine
        self._take_over()
        session = ControlSession(secrets.token_bytes(KEY_BYTES))
        opening = self._resume(session.key) or self._hello(session.key)
        patience_s = WELCOME_TIMEOUT_S
        messages: list[m.FromMaster] | None = None
        while not machine.is_over and not self._attending.cancel_called:
            reason = ""
            try:
                with trio.move_on_after(patience_s) as scope:
                    if messages is None:
                        messages = [await self._open_control(opening, session)]
                    else:
                        messages = await self._connection.receive()
                if scope.cancelled_caught:
                    reason = f"it leads no run yet, after {patience_s:g} s"
                    if messages is None:
                        reason = f"no answer within {patience_s:g} s; is there a pccl master at this address?"
                self._take_over()
                for message in messages if messages is not None and not reason else ():
                    if isinstance(message, m.Goodbye) and not (machine.run or self._candidates.are_all_asked_again):
                        reason = f"refused: {message.reason}"
                        break
                    machine.received(message)
                    if isinstance(message, m.Elsewhere | m.StartOver | m.Goodbye):
                        refused = "refused: " if isinstance(message, m.Goodbye) else ""
                        self._candidates.failed(self._address, f"{refused}{message.reason}")
                        break
            except ConnectionLost as error:
                reason = f"lost the master: {error}"
                if machine.is_led:
                    failure = await self._reattach(session, str(error))
                    if not failure:
                        messages = []
                        continue
                    reason = f"{reason}; {failure}"
            except TlsError as error:
                reason = f"no TLS with the master: {error}"
            except AuthError as error:
                reason = f"the master was not accepted: {error}"
            except ProtocolError as error:
                reason = f"the master does not speak as a pccl master does: {error}"
                if machine.is_led and machine.run:
                    machine.give_up(reason)
            if reason:
                self._take_over()
                self._candidates.failed(self._address, reason)
                if not machine.run and self._candidates.are_all_asked and self._patience is None:
                    machine.give_up(reason)
                else:
                    machine.master_lost(reason)
            patience_s = float("inf")
            if messages and isinstance(messages[-1], m.Gather | m.Lead):
                is_majority_there = isinstance(messages[-1], m.Lead)
                if is_majority_there and self._patience is not None:
                    self._await_leadership(self._patience)
                patience_s = self._candidates.patience_s(machine.peer_timeout_s, is_majority_there)
            self._heard_master.set()
            self._heard_master = trio.Event()
            self._pump()

    def _resume(self, session: bytes) -> m.Resume | None:
        now, limit_s = trio.current_time(), self._options.master_timeout_s
        patience_s = limit_s if self._patience is None else max(0.0, self._patience.deadline - now)
        return self._machine.resume(len(self._candidates.masters), now, session, limit_s, patience_s)

    def _await_leadership(self, patience: trio.CancelScope) -> None:
        """A majority has come to this master, which may wait for the rest for a peer timeout: this peer stays, however
        little of the master timeout is left."""
        waits_s = LEAD_TIMEOUTS * self._machine.peer_timeout_s
        patience.deadline = max(patience.deadline, trio.current_time() + waits_s)

    def _hello(self, session: bytes) -> m.Hello:
        options = self._options
        return m.Hello(
            m.PROTOCOL_VERSION,
            __version__,
            options.group,
            list(options.hosts),
            options.port or self._listener.getsockname()[1],
            options.connections,
            options.name,
            site=options.site,
            site_size=options.site_size,
            masters=len(self._candidates.masters),
            may_found=self._candidates.are_all_asked,
            session=session,
            master_timeout_s=options.master_timeout_s,
        )

    async def _open_control(self, opening: m.Hello | m.Resume, session: ControlSession) -> m.FromMaster:
        """The answer to the first message. A peer of a run lets itself be sent away by nobody who has not shown that it
        knows the token."""
        options = self._options
        if options.ssl_context is not None:
            await self._connection.start_tls(TlsEnd(options.ssl_context, self._master_name))
        self._connection.session = session
        dialled = await handshake.dial_keyed(self._connection, options.token, None, opening, m.FromMaster)
        answer: m.FromMaster = dialled.answer
        if isinstance(opening, m.Resume) and isinstance(answer, m.Goodbye) and options.token and not dialled.is_proven:
            raise AuthError(answer.reason)
        self._connection.trust()
        self._connection.count()
        return answer

    async def _reattach(self, session: ControlSession, reason: str) -> str:
        """Has the session go on over another connection to the same master; "" once it does, else why not."""
        self._logger.info("the control connection was lost: %s; making it anew", reason)
        self._attached = trio.Event()
        self._connection.shutdown()
        self._connection.close()
        machine = self._machine
        limit_s = min(machine.peer_timeout_s or DIAL_S, REATTACH_SHARE * self._options.master_timeout_s)
        pause_s = REATTACH_PAUSE_S_MIN
        failure = f"no other connection within {limit_s:g} s"
        try:
            with trio.move_on_after(limit_s):
                while True:
                    try:
                        self._connection = await self._dial_again(session)
                        self._start_sender()
                        self._logger.info("the control connection stands again")
                        return ""
                    except ConnectionLost as error:
                        failure = f"no other connection within {limit_s:g} s: {error}"
                        has_choice = not machine.run or len(self._candidates.masters) > 1
                        if error.is_refused and not self._is_beating and has_choice:
                            return str(error)
                    except trio.TooSlowError:
                        failure = f"no other connection within {limit_s:g} s: no answer within {DIAL_S:g} s"
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, REATTACH_PAUSE_S_MAX)
        except (TlsError, AuthError, ProtocolError) as error:
            failure = f"it does not go on with this peer: {error}"
        finally:
            self._attached.set()
        return failure

    async def _dial_again(self, session: ControlSession) -> ControlConnection[m.FromMaster]:
        """A connection that carries the session on. ConnectionLost, or another error from one who does not know it."""
        options = self._options
        with trio.fail_after(DIAL_S):
            connection = await dial_control(self._master_host, self._master_port, m.FromMaster)
        try:
            if self._machine.run:
                connection.bound_silence(self._machine.peer_timeout_s)
            if options.ssl_context is not None:
                await connection.start_tls(TlsEnd(options.ssl_context, self._master_name))
            opening = m.Reattach(m.PROTOCOL_VERSION, session.key, session.received)
            run = self._machine.run or None
            answer = await handshake.dial(connection, options.token, run, opening, m.ReattachAnswer)
            if not isinstance(answer, m.Reattached):
                raise ProtocolError(answer.reason)
            connection.trust()
            connection.carry_on(session, answer.received)
        except BaseException:
            connection.close()
            raise
        return connection

    def _seek_master(self, effect: ps.SeekMaster) -> None:
        self._attending.cancel()
        self._beating.cancel()
        if self._patience is None:
            limit_s = self._options.master_timeout_s
            self._patience = trio.CancelScope(deadline=trio.current_time() + limit_s)
            self._candidates = self._candidates.anew()
            self._spawn(self._be_patient, self._patience, effect.reason)

    async def _be_patient(self, patience: trio.CancelScope, reason: str) -> None:
        with patience:
            await trio.sleep_forever()
        if trio.current_time() >= patience.deadline:
            limit_s = self._options.master_timeout_s
            self._take_over()
            tried = self._candidates.account()
            self._machine.give_up(
                f"{reason}; no master has taken over within {limit_s:g} s. "
                f"{f'Tried {tried}' if tried else 'No attempt at one has ended in that time'}{self._haste(limit_s)}"
            )
            self._attending.cancel()
            self._pump()

    def _haste(self, limit_s: float) -> str:
        timeout_s = self._machine.peer_timeout_s
        if limit_s >= timeout_s:
            return ""
        return (
            f". master_timeout is less than the run's peer_timeout of {timeout_s:g} s, in which peers find out that "
            f"their master is silent; give it more for runs that shall outlive masters"
        )

    async def _find_master(self) -> None:
        """Replaces the connection."""
        while True:
            attempt = self._candidates.next(random.random())
            await trio.sleep(attempt.pause_s)
            try:
                with trio.fail_after(DIAL_S):
                    self._connection = await dial_control(*attempt.address, m.FromMaster)
                    break
            except (ConnectionLost, trio.TooSlowError) as error:
                reason = str(error) or f"no answer within {DIAL_S:g} s"
                self._candidates.failed(attempt.address, reason)
                self._logger.debug("no master at %s: %s", addresses.join(*attempt.address), reason)
        self._met_at(attempt.address)

    def _met_at(self, address: Address) -> None:
        self._address = address
        self._master_name = address[0]
        self._master_host = addresses.plain_host(self._connection.remote_address)
        self._master_port = self._connection.remote_address[1]

    def _start_engine(self, effect: ps.StartEngine) -> None:
        try:
            self._engine.divide(effect.threads)
        except OSError as error:
            self._machine.fail(f"{effect.threads} engine threads cannot be had: {error}")
            return
        self._gate.attach()
        for event_fd in self._engine.event_fds:
            self._spawn(self._read_engine, event_fd)

    async def _read_engine(self, event_fd: int) -> None:
        while True:
            await trio.lowlevel.wait_readable(event_fd)
            self._hear_engine()
            self._pump()

    def _take_over(self) -> None:
        """From here to the next `_pump` all ops are the machine's."""
        if self._gate.close():
            self._hear_engine()

    def _hear_engine(self) -> None:
        if self._gate.has_lanes:
            self._gate.close()  # else what is heard of one might come after what is not heard yet of another
        events = self._engine.events()
        if not all(isinstance(event, NOTHING_BUT_OPS) for event in events) and self._gate.close():
            events += self._engine.events()
        # First: whatever else there is to tell depends on what has been committed.
        ran = [(event, self._gate.ran(event)) for event in events if isinstance(event, native.OpRan)]
        for each, op in sorted(ran, key=lambda one: one[0].sequence) if self._gate.has_lanes else ran:
            assert op.epoch is not None
            self._tally.op_ended(op.epoch, is_committed=True)
            self._machine.op_ran(op.tag, each.sequence)
        failed = next((event for event in events if isinstance(event, native.EngineFailed)), None)
        if failed is not None:  # what else there is follows from it
            raise native.EngineFailedError(failed.reason)
        for event in events:
            if isinstance(event, native.OpRan):
                continue
            if isinstance(event, native.OpStarted):
                op = self._ops[event.op] = self._gate.started(event)
                self._machine.op_started(event.op, op.tag, event.sequence, trio.current_time())
            elif isinstance(event, native.OpDone):
                self._machine.op_done(event.op, event.tx_bytes, event.rx_bytes)
            elif isinstance(event, native.OpAgreed):
                self._machine.op_agreed(event.op)
            elif isinstance(event, native.OpEnded):
                self._machine.op_ended(event.op, event.tx_bytes, event.rx_bytes)
            elif isinstance(event, native.OpDetached):
                self._detaching.pop(event.op).release()
            elif isinstance(event, native.OpFrozen):
                self._machine.op_frozen(event.op)
            elif isinstance(event, native.OpMismatch):
                self._machine.op_mismatch(event.op, self._mismatch_text(event), event.is_other_call)
            elif isinstance(event, native.OpRefused):
                self._machine.op_refused(event.op, Result.INTERNAL_ERROR, event.reason)
            elif isinstance(event, native.GroupFrozen):
                self._machine.frozen(event.epoch)
            elif isinstance(event, native.LinkLost):
                self._machine.link_lost(event.link, event.reason)
            elif isinstance(event, native.ConnectionLost):
                self._machine.connection_lost(event.link, event.reason, event.lane)
            elif isinstance(event, native.LinkCounted):
                self._tally.link_counted(event)
            elif isinstance(event, native.LinkLimited):
                self._machine.link_limited(event.link, event.lane)

    def _mismatch_text(self, event: native.OpMismatch) -> str:
        what = "different ops with the same tag" if event.is_other_call else "the same op with different arguments"
        machine = self._machine
        other = machine.peer_at(event.link)
        who = "another one" if other is None else f"peer {other}"
        lead = f"{event.steps.text(f'peer {machine.peer}', who)}: " if event.steps is not None else ""
        return f"{lead}peers called {what}: peer {machine.peer} has {event.mine}, {who} has {event.theirs}{hint(event)}"

    async def _watch_clock(self) -> None:
        while True:
            self._timer_changed = trio.Event()
            self._timer_deadline = self._machine.deadline() or float("inf")
            with trio.CancelScope(deadline=self._timer_deadline):
                await self._timer_changed.wait()
            if trio.current_time() >= self._timer_deadline:
                self._hear_engine()  # what is done need not have been said
                self._machine.tick(trio.current_time())
                self._pump()

    async def _keep_reporting(self) -> None:
        """What this peer has done, for whoever watches the run."""
        await self.installed.wait()
        while self.view is not None:
            self._report()
            self._pump()
            with suppress(MemoryError):
                for link in self._tally.links:
                    self._engine.count_link(link)  # for the next report
            await trio.sleep(interval_s(self.view.global_world_size))

    def _report(self) -> None:
        if not self._machine.is_led:
            return
        self._hear_engine()
        report = self._tally.report(self._engine.stats(), self._machine.term)
        if report is not None:
            self._machine.report(report)

    def _take_launches(self) -> None:
        """As trio calls it: what it raised would end everything in this thread."""
        with self._contain:
            reclaims, cancels, launches = len(self._reclaims), len(self._cancels), len(self._launches)
            if self.failure is None:
                with self._contain:
                    self._hear_engine()
            for _ in range(launches):
                self._take_launch()
            for _ in range(cancels):
                self._take_cancel(*self._cancels.popleft())
            self._pump()
            for _ in range(reclaims):
                self._take_reclaim(*self._reclaims.popleft())
            self._pump()

    def _take_launch(self) -> None:
        launched = self._next_launch()
        if launched is None:
            return
        if self.failure is not None:
            self._finish(launched, ps.OpResult(launched.op, self.failure.result, self.failure.message, 0))
            return
        spec = launched.spec
        assert spec is not None
        pair = None if spec.pair is None else (spec.pair.peer, spec.pair.is_sender)
        if pair is None:
            self._gate.forget_uses(launched.tag)
        self._machine.launch(launched.op, launched.tag, trio.current_time(), pair)

    def _ends_with_the_session(self, op: PendingOp) -> bool:
        """The session has a fault, and the engine may have the op until it is closed, which gives the arrays back."""
        return self._is_broken and (op.op in self._ops or self._gate.has(op))

    def _take_cancel(self, op: PendingOp, code: Result, reason: str) -> None:
        if self._ends_with_the_session(op):
            return
        if op.op in self._ops:
            self._machine.cancel(op.op, code, reason)
        elif not op.is_over and self._tags.get(op.name) is op:
            del self._tags[op.name]  # interrupted before it was in the queue, or in the gate
            self._gate.drop(op)

    def leave_for(self, reason: str) -> None:
        """Leaves the run, as `store_failed` does, from any thread, which then finds the session over."""
        if self._is_own_thread():
            self.store_failed(reason)
            return
        has_left = Latch()

        def leave() -> None:
            self.store_failed(reason)
            has_left.set()

        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(leave)
            has_left.wait(LEAVE_S)

    def _take_reclaim(self, op: PendingOp, goes_on: bool) -> None:
        if op.is_released or op.is_detached or self._ends_with_the_session(op):
            return
        if op.op not in self._ops:
            # Interrupted before it was in the queue, or in the gate.
            self._gate.drop(op)
            self._finish(op, ps.OpResult(op.op, Result.TIMEOUT, "its caller was interrupted before it began", 0))
            return
        if self._machine.hasten(op.op) or self.failure is not None:
            self._pump()
            return  # the engine gives the buffers back, if it has not done so
        if op.epoch is None:
            self._reclaim_queued(op, goes_on)
        else:
            self._detach(op, goes_on)

    def _reclaim_queued(self, op: PendingOp, goes_on: bool) -> None:
        spec = op.spec
        assert spec is not None
        if goes_on and spec.feed is None and isinstance(spec.buffers, native.Buffers):
            copy = self._copied(op)
            if copy is not None:
                copy.fill()
                op.spec = replace(spec, buffers=copy.buffers)
                op.copy, op.is_detached = copy, True
                op.release()
                return
        reason = "taken back before it began: its caller did not wait any longer"
        self._machine.cancel(op.op, Result.TIMEOUT, reason)

    def _detach(self, op: PendingOp, goes_on: bool) -> None:
        copy = None
        if op.feed is None:
            copy = self._copied(op) if goes_on else None
        elif not goes_on:
            op.feed.abandon()
        op.copy, op.is_detached = copy, True
        self._detaching[op.op] = op
        self._engine.detach_from(op.op, copy)
        if op.feed is not None and goes_on:
            self._spawn(self._bound_reading, op)

    async def _bound_reading(self, op: PendingOp) -> None:
        await trio.sleep(DEVICE_GRACE_S)
        self._stop_reading(op)
        self._pump()

    def _stop_reading(self, op: PendingOp) -> None:
        """Of an op that should go on: its device has not copied what its caller wants back."""
        if op.is_released:
            return
        if op.feed is not None:
            op.feed.abandon()
        me = f"peer {self._machine.peer}"
        reason = f"aborted on all peers: {me} gave up; its device has copied nothing for {DEVICE_GRACE_S:g} s"
        self._machine.cancel(op.op, Result.INTERNAL_ERROR, reason)
        op.release()

    def _copied(self, op: PendingOp) -> PrivateCopy | None:
        """None: there is no memory, and the op has been given up on all peers."""
        try:
            return op.copied(self._machine.peer)
        except MemoryError:
            reason = "no memory for a copy of its arrays, which its caller has taken back"
            self._machine.cancel(
                op.op, Result.INTERNAL_ERROR, f"aborted on all peers: peer {self._machine.peer} has {reason}"
            )
            self._pump()
            return None

    def _next_launch(self) -> PendingOp | None:
        """At any moment an op is in the queue, in `_ops`, or over: a child may be forked."""
        if not self._launches:
            return None
        op = self._ops[self._launches[0].op] = self._launches[0]
        self._launches.popleft()
        return op

    # Effects.

    def _pump(self) -> None:
        if self._is_pumping or self._is_broken:
            return
        self._is_pumping = True
        try:
            outgoing: list[m.Message] = []
            while True:
                while effects := self._machine.drain():
                    for effect in effects:
                        if isinstance(effect, ps.ToMaster):
                            outgoing.append(effect.message)
                        else:
                            self._CARRY_OUT[type(effect)](self, effect)
                start = self._machine.plain_start()
                if self._gate.is_as(start):
                    break
                self._take_over()
                if start is not None and self._machine.plain_start() == start:
                    self._gate.open(start)
            if outgoing:
                self._connection.send(outgoing)
        finally:
            self._is_pumping = False
        if (self._machine.deadline() or float("inf")) < self._timer_deadline:
            self._timer_changed.set()
        if self._machine.is_over and not self._machine.open_ops:
            self._drained.set()

    def _submit(self, effect: ps.SubmitOp) -> None:
        op = self._ops[effect.op]
        op.epoch = effect.epoch
        assert op.spec is not None
        op.ring, op.rank = effect.ring, effect.ring.index(self._machine.peer)
        try:
            self._engine.submit(effect, op.placed(op.spec, effect.rank, effect.world_size))
        except ValueError as error:
            reason = f"peer {self._machine.peer} cannot take part: {error}"
            self._machine.op_refused(effect.op, Result.INVALID_ARGUMENT, reason)
        except native.RootLostError as error:
            self._machine.op_refused(effect.op, Result.RANK_CONNECTION_LOST, str(error))
        except MemoryError as error:
            self._machine.op_refused(effect.op, Result.INTERNAL_ERROR, f"out of memory: {error}")

    def _freeze(self, effect: ps.FreezeOps) -> None:
        self._engine.freeze(effect.epoch)

    def _freeze_op(self, effect: ps.FreezeOp) -> None:
        self._engine.freeze_op(effect.op)

    def _forget_unmade(self, effect: ps.ForgetUnmade) -> None:
        with suppress(MemoryError):
            self._engine.forget_ops(effect.epoch, effect.tag, effect.uses)

    def _end_op(self, effect: ps.EndOp) -> None:
        self._engine.end(effect.op, native.Verdict.COMMIT if effect.commit else native.Verdict.ABORT)

    def _forget_op(self, effect: ps.ForgetOp) -> None:
        self._engine.end(effect.op, native.Verdict.COMMIT_BY_ALL)

    def _op_result(self, effect: ps.OpResult) -> None:
        op = self._ops[effect.op]
        if op.epoch is not None:
            self._tally.op_ended(op.epoch, effect.code is Result.SUCCESS)
        self._finish(op, effect)

    def _finish(self, op: PendingOp, result: ps.OpResult) -> None:
        if self._tags.get(op.name) is op:
            # First: who waits for the op may launch the next one at once. Where the session has a fault, its caller may
            # let go of it at the same time.
            self._tags.pop(op.name, None)
        op.finish(result)
        self._ops.pop(op.op, None)

    def _call_result(self, effect: ps.CallResult) -> None:
        call = self._calls.get(effect.call)
        if call is not None:
            call.result = effect
            call.event.set()

    def _installed(self, effect: ps.Installed) -> None:
        for peer, reason in effect.lost:
            self._logger.info("peer %d was lost: %s", peer, reason, extra={"other": peer})
            if self._syncing is not None:
                self._syncing.transfer.lost(peer, reason)
        view = effect.view
        self.view = view
        self._logger.info("view %d: peer %d of group %d, ring %s", view.view, view.peer, view.group, list(view.ring))
        self.installed.set()

    def _session_ended(self, effect: ps.Ended) -> None:
        self._logger.info("session over: %s", effect.reason)
        self._fail(effect.code, effect.reason)

    def _keep_beats(self, effect: ps.KeepBeats) -> None:
        """A master has taken this peer in."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._connection.bound_silence(effect.timeout_s)
        self._engine.set_link_timeout(self._machine.link_timeout_s)
        self._beating.cancel()
        self._beating = trio.CancelScope()
        self._spawn(self._beat, effect.timeout_s, self._beating)

    async def _beat(self, timeout_s: float, scope: trio.CancelScope) -> None:
        master = (self._master_host, self._master_port)
        hello = m.BeatHello(m.PROTOCOL_VERSION, self._machine.run, self._machine.peer)
        token = self._options.token

        async def connect() -> socket.socket:
            self._is_beating = False
            if self._ended.is_set():
                await trio.sleep_forever()  # the master has let us go
            sock = await dial_beats(master, hello, token)
            self._is_beating = True
            return sock

        beacon: Beacon | None = None
        with scope:
            try:
                beacon = self._beacon = Beacon(timeout_s)
                async with trio.open_nursery() as nursery:
                    start_task(nursery, beacon.vouch)
                    reason = await keep_beats(beacon, connect, timeout_s)
                    nursery.cancel_scope.cancel()
            except OSError as error:
                reason = f"cannot be given signs of life: {error}"
            finally:
                if beacon is not None:
                    beacon.close()
            self._take_over()
            self._machine.master_lost(f"the master at {addresses.join(*master)} {reason}")
            self._pump()

    def _log(self, effect: ps.Log) -> None:
        if effect.link:
            scope = trio.CancelScope()
            self._making[effect.link].append(scope)
            self._spawn(self._log_later, effect, scope)
        else:
            self._logger.log(LEVELS[effect.level], "%s", effect.text, extra=effect.about)

    async def _log_later(self, effect: ps.Log, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(STANDS_S)
            self._log(replace(effect, link=0))

    def _spawn(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        if self._nursery is not None and not self._ended.is_set():
            start_task(self._nursery, self._contained, function, *args)

    # Links.

    def _make_link(self, effect: ps.MakeLink) -> None:
        scope = trio.CancelScope()
        self._tally.link_made(effect.link, effect.member.peer)
        self._making[effect.link] = [scope]
        self._spawn(self._dial_link if effect.dial else self._await_link, effect, scope)

    def _add_connections(self, effect: ps.AddConnections) -> None:
        for index in effect.indices:
            scope = trio.CancelScope()
            self._making[effect.link].append(scope)
            self._spawn(self._add_connection, effect, index, scope)

    def _try_links(self, effect: ps.TryLinks) -> None:
        self._spawn(self._try_each, effect)

    async def _try_each(self, effect: ps.TryLinks) -> None:
        machine = self._machine
        failed: list[tuple[int, str]] = []

        async def one(member: m.Member) -> None:
            hello = m.ProbeHello(m.PROTOCOL_VERSION, machine.run, machine.peer, member.peer, pulls=False)
            token = self._options.token
            try:
                sock, _ = await links.dial_within(member, self._master_host, hello, token, effect.timeout_s)
            except links.LinkError as error:
                failed.append((member.peer, str(error)))
            else:
                sock.close()

        async with trio.open_nursery() as nursery:
            for member in effect.members:
                start_task(nursery, one, member)
        machine.tried(failed)
        self._pump()

    def _close_link(self, effect: ps.CloseLink) -> None:
        for scope in self._making.pop(effect.link, ()):
            scope.cancel()
        self._tally.link_closed(effect.link)
        self._engine.link_close(effect.link)

    def _link_hello(self, effect: ps.MakeLink | ps.AddConnections, index: int, count: int) -> m.LinkHello:
        machine = self._machine
        return m.LinkHello(
            m.PROTOCOL_VERSION,
            machine.run,
            machine.peer,
            effect.member.peer,
            effect.made_in,
            index,
            count,
            encrypt=self._options.encrypt,
        )

    async def _add_connection(self, effect: ps.AddConnections, index: int, scope: trio.CancelScope) -> None:
        hello = self._link_hello(effect, index, index + 1)
        pause_s = REDIAL_S
        with scope:
            while True:
                try:
                    sock, keys = await links.dial_within(
                        effect.member, self._master_host, hello, self._options.token, effect.timeout_s
                    )
                except links.LinkError as error:
                    reason = str(error)
                else:
                    self._take_connection(effect.link, index, sock, keys)
                    if effect.is_replacement:
                        self._tally.reconnected()
                    return
                peer = effect.member.peer
                self._logger.info("no further connection to peer %d: %s", peer, reason, extra={"other": peer})
                if not effect.is_replacement:
                    return
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, REDIAL_S_MAX)

    async def _dial_link(self, effect: ps.MakeLink, scope: trio.CancelScope) -> None:
        machine = self._machine
        token = self._options.token

        def hello(index: int) -> m.LinkHello:
            return self._link_hello(effect, index, effect.connections)

        def take(index: int, sock: trio.socket.SocketType, keys: Keys | None) -> None:
            self._take_connection(effect.link, index, sock, keys)

        with scope:
            try:
                await links.dial_link(
                    effect.member,
                    self._master_host,
                    hello,
                    effect.connections,
                    token,
                    take,
                    effect.reach_s,
                    effect.timeout_s,
                )
            except links.LinkError as error:
                self._logger.warning("no link to %s", error, extra={"other": effect.member.peer})
                machine.link_failed(effect.link, str(error))
                self._pump()

    async def _await_link(self, effect: ps.MakeLink, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(effect.timeout_s)
            reason = f"peer {effect.member.peer} did not connect to us within {effect.timeout_s:g} s"
            self._machine.link_failed(effect.link, reason)
            self._pump()

    def _take_connection(self, link: int, index: int, sock: trio.socket.SocketType, keys: Keys | None) -> None:
        if self._machine.link_connected(link):
            self._engine.link_add(link, index, sock.detach(), keys if self._options.encrypt else None)
        else:
            sock.close()
        self._pump()

    async def _accept(self) -> None:
        starved = False
        while True:
            await trio.lowlevel.wait_readable(self._listener.fileno())
            try:
                raw, sockaddr = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if not starved:
                    self._logger.warning("cannot accept a connection: %s", error.strerror)
                starved = True
                self._strangers.drop_one()
                await trio.sleep(0.1)
                continue
            starved = False
            close_in_child(raw)
            if self._ended.is_set():
                raw.close()
                continue
            self._spawn(self._greet, raw, addresses.plain_host(sockaddr), sockaddr[1])

    async def _greet(self, raw: socket.socket, host: str, port: int) -> None:
        """Hears what a stranger wants, and passes the connection on."""
        sock = trio.socket.from_stdlib_socket(raw)
        where = addresses.join(host, port)
        serve: Callable[[], Awaitable[None]] | None = None
        try:
            with trio.fail_after(links.OPENING_TIMEOUT_S) as scope:
                stranger = self._strangers.enter(host, scope.cancel)
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    opening, keys = await self._hear(sock)
                    if self._options.token:
                        self._strangers.leave(stranger)  # it may have to wait for our next message of the master
                    serve = await self._welcome(sock, opening, keys)
                finally:
                    self._strangers.leave(stranger)
            if serve is not None:
                await serve()
        except AuthError as error:
            self._refusals.log(logging.WARNING, f"connection from {where} refused: {error}")
        except (ConnectionLost, ProtocolError, OSError) as error:
            self._refusals.log(logging.INFO, f"connection from {where}: {error}")
        except trio.TooSlowError:
            text = f"connection from {where}: nothing to be understood in time, or too many like it"
            self._refusals.log(logging.INFO, text)
        finally:
            sock.close()

    async def _hear(self, sock: trio.socket.SocketType) -> tuple[m.PeerOpening, Keys | None]:
        """What a stranger wants, once it has proved itself, and the keys for what follows."""
        channel = SocketChannel(sock)
        body = await channel.receive_body()
        opening: m.PeerOpening = decode_body(body, m.PeerOpening)
        await links.receive_padding(sock, opening, links.PADDING_TIMEOUT_S)
        try:
            machine = self._machine
            name = f"peer {machine.peer}"
            keys = await handshake.accept(channel, self._options.token, machine.run, name, opening, body)
        except AuthError as error:
            await channel.send_frame(encode(m.Rejected(str(error))))
            raise
        return opening, keys

    async def _welcome(
        self, sock: trio.socket.SocketType, opening: m.PeerOpening, keys: Keys | None
    ) -> Callable[[], Awaitable[None]] | None:
        """Accepts or rejects; returns what remains to be done with the connection."""
        refusal = self._refusal(opening, keys)
        if refusal is None and isinstance(opening, m.LinkHello):
            while True:
                heard = self._heard_master
                offered = self._machine.link_offered(opening.sender, opening.made_in)
                self._pump()
                if offered is not None:
                    break
                await heard.wait()
            if isinstance(offered, int):
                await links.accept(sock)
                await links.until_used(sock)
                self._take_connection(offered, opening.index, sock, keys)
                return None
            refusal = offered
        if refusal is None and isinstance(opening, m.StateHello):
            syncing = self._syncing
            if syncing is not None and await syncing.until_planned(opening.sync):
                await links.accept(sock)
                stream = self._stream(sock, keys)
                return lambda: self._serve_state(stream, syncing, opening.tells)
            refusal = f"no sync {opening.sync} is under way here"
        if refusal is None:
            await links.accept(sock)
            assert isinstance(opening, m.ProbeHello)
            return lambda: probe.serve(sock, opening.pulls)
        await send_message(sock, m.Rejected(refusal))
        return None

    def _refusal(self, opening: m.PeerOpening, keys: Keys | None) -> str | None:
        machine = self._machine
        if opening.protocol != m.PROTOCOL_VERSION:
            return f"this peer speaks protocol {m.PROTOCOL_VERSION}, not {opening.protocol}"
        if opening.run != machine.run:
            return f"this peer belongs to run {machine.run!r}, not {opening.run!r}"
        if opening.receiver != machine.peer:
            return f"this is peer {machine.peer}, not {opening.receiver}"
        if isinstance(opening, m.ProbeHello) and opening.pulls and not machine.is_optimizing:
            return "no optimize_topology is under way here"  # who asks is sent as much as the network takes
        if isinstance(opening, m.LinkHello | m.StateHello) and opening.encrypt != self._options.encrypt:
            plain, encrypting = machine.peer, opening.sender
            if self._options.encrypt:
                plain, encrypting = encrypting, plain
            return (
                f"peer {encrypting} encrypts what peers send to each other and peer {plain} does not; give all peers "
                f"the same encrypt= (or PCCL_ENCRYPT)"
            )
        if self._options.encrypt and keys is None and not isinstance(opening, m.ProbeHello):
            return "this peer cannot exchange keys: it has no memory for that, or OpenSSL fails"
        return None

    # Shared state.

    def _run_sync(self, effect: ps.RunSync) -> None:
        syncing = self._syncing
        if syncing is None:
            # The caller gave up while the plan was on its way.
            self._machine.sync_ended(effect.plan.sync, False, "its caller gave the sync up", [])
            return
        syncing.plan_with(effect.plan)
        if effect.plan.fetch_content or effect.plan.fetch_loose:
            self._spawn(self._fetch_state, syncing, effect)

    async def _fetch_state(self, syncing: _Syncing, effect: ps.RunSync) -> None:
        plan = effect.plan
        machine = self._machine

        async def connect(donor: m.Member, tells: bool) -> Stream:
            options = self._options
            version, run = m.PROTOCOL_VERSION, machine.run
            hello = m.StateHello(
                version, run, machine.peer, donor.peer, plan.sync, encrypt=options.encrypt, tells=tells
            )
            timeout_s = machine.peer_timeout_s
            return self._stream(*await links.dial_within(donor, self._master_host, hello, options.token, timeout_s))

        success, reason, suspects = False, "its caller gave the sync up", list[tuple[int, str]]()
        scope = syncing.fetching = syncing.scope()
        with scope:
            async with syncing.is_fetching:
                if syncing.plan is not plan:
                    return  # another one has followed it
                try:
                    with self._leaving_on_store_errors():
                        suspects = await syncing.transfer.fetch(plan, effect.donors, connect, machine.peer_timeout_s)
                    success, reason = True, ""
                except TransferError as error:
                    suspects, reason = error.suspects, str(error)
        machine.sync_ended(plan.sync, success, reason, suspects)
        self._pump()

    def _stream(self, sock: trio.socket.SocketType, keys: Keys | None) -> Stream:
        if not self._options.encrypt:
            return sock
        assert keys is not None
        return SealedStream(sock, keys)

    async def _serve_state(self, stream: Stream, syncing: _Syncing, tells: bool) -> None:
        with syncing.scope(), self._leaving_on_store_errors():
            await syncing.transfer.serve(stream, tells)

    @contextmanager
    def _leaving_on_store_errors(self) -> Iterator[None]:
        try:
            yield
        except* StoreError as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.store_failed(str(error))

    def store_failed(self, reason: str) -> SessionError:
        """Leaves the run, for this peer's tensors are of no use any more. What to raise."""
        reason = f"{reason}; this peer has left the run"
        with self._contain:
            self._take_over()
            self._machine.fail(reason)
            self._pump()
        return SessionError(Result.INTERNAL_ERROR, reason)

    # Measuring.

    def _run_probe(self, effect: ps.RunProbe) -> None:
        self._spawn(self._probe, effect)

    async def _probe(self, effect: ps.RunProbe) -> None:
        machine = self._machine
        found: list[m.LinkFigure] = []

        async def one(link: ps.ProbedLink) -> None:
            pulls = link.is_inbound
            hello = m.ProbeHello(m.PROTOCOL_VERSION, machine.run, machine.peer, link.member.peer, pulls)

            async def dial() -> trio.socket.SocketType:
                token, timeout_s = self._options.token, machine.peer_timeout_s
                return (await links.dial_within(link.member, self._master_host, hello, token, timeout_s))[0]

            try:
                figure = await probe.measure(dial, link.connections, pulls)
            except probe.ProbeError as error:
                way = "from" if pulls else "to"
                self._logger.info("cannot measure the link %s peer %d: %s", way, link.member.peer, error)
            else:
                round_trip_us = round(figure.round_trip_s * 1e6)
                found.append(m.LinkFigure(link.member.peer, pulls, figure.bytes_per_s, round_trip_us))

        async with trio.open_nursery() as nursery:
            for link in effect.links:
                start_task(nursery, one, link)
        machine.probed(effect.probe, found, trio.current_time())
        self._pump()

    _CARRY_OUT: ClassVar[dict[type, Callable[[PeerSession, Any], None]]] = {
        ps.SubmitOp: _submit,
        ps.FreezeOps: _freeze,
        ps.FreezeOp: _freeze_op,
        ps.EndOp: _end_op,
        ps.ForgetUnmade: _forget_unmade,
        ps.ForgetOp: _forget_op,
        ps.OpResult: _op_result,
        ps.CallResult: _call_result,
        ps.MakeLink: _make_link,
        ps.AddConnections: _add_connections,
        ps.TryLinks: _try_links,
        ps.CloseLink: _close_link,
        ps.RunSync: _run_sync,
        ps.RunProbe: _run_probe,
        ps.Installed: _installed,
        ps.Ended: _session_ended,
        ps.StartEngine: _start_engine,
        ps.KeepBeats: _keep_beats,
        ps.SeekMaster: _seek_master,
        ps.Log: _log,
    }


async def open_session(masters: Sequence[Address], options: SessionOptions) -> PeerSession:
    """Connects to a master and creates a session; the caller spawns its `run`. SessionError names the addresses."""
    candidates = Candidates(masters)
    connection: ControlConnection[m.FromMaster] | None = None
    while connection is None:
        address = candidates.next(0.0).address
        try:
            connection = await dial_control(*address, m.FromMaster)
        except ConnectionLost as error:
            candidates.failed(address, str(error))
            if not candidates.are_all_asked:
                continue
            where = ", ".join(addresses.join(*each) for each in masters)
            why = str(error) if len(masters) == 1 else candidates.account()
            raise SessionError(
                Result.MASTER_CONNECTION_FAILED,
                f"cannot reach a master at {where}: {why}; is `pccl master` running there, and is the port open?",
            ) from None
    with ExitStack() as undo:
        undo.callback(connection.close)
        try:
            listener = addresses.listen(options.listen_host, options.listen_port)
        except OSError as error:
            raise SessionError(Result.INVALID_ARGUMENT, str(error.strerror)) from None
        undo.callback(listener.close)
        try:
            engine = Pieces(options.group, options.segment_bytes, options.force_poll)
        except OSError as error:
            raise SessionError(Result.INTERNAL_ERROR, str(error)) from None
        undo.callback(engine.close)
        session = PeerSession(connection, listener, engine, options, candidates, address)
        undo.pop_all()
    return session
