"""The communicator for trio programs; `communicator.Communicator` is its blocking face."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import trio

from pccl import _timeouts, security
from pccl._collective_methods import Collectives
from pccl._collectives import AsyncCollectiveHandle, CallOf
from pccl._reduce import AsyncReduceHandle, ReduceOpDescriptor, info_of, op_spec
from pccl._timeouts import DEFAULT, Default, Timeout
from pccl.errors import PCCLError, integer_argument
from pccl.protocol.messages import Kind
from pccl.protocol.peer import View, alone_in
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.network import addresses
from pccl.runtime.session.options import SessionError, SessionOptions
from pccl.runtime.session.peer_session import PeerSession, open_session
from pccl.runtime.state.tensor_blocks import StateTensor, StoreError, fingerprint
from pccl.runtime.state.transfer import Transfer
from pccl.runtime.threads import portal
from pccl.shared_state import SharedState
from pccl.types import (
    Attribute,
    CollectiveInfo,
    Membership,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
    Result,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)

CONNECTIONS_DEFAULT = 2
"""Of a link to begin with: one alone would stand still with its first lost packet."""
CONNECTIONS_MAX = 64
UINT32_MAX = 2**32 - 1
ATTEMPT_INTERVAL_S = 1.0
CANCEL_GRACE_S = 5.0
"""How long an op whose timeout has passed may take to be aborted on all peers before its outcome is unknown."""
INTERRUPT_GRACE_S = 0.5
"""The same where its caller was interrupted or cancelled: only then its tag can be used again at once."""

T = TypeVar("T")


@contextmanager
def converting(func_name: str) -> Iterator[None]:
    """The one place where session errors, and the portal's, become PCCLError."""
    try:
        yield
    except SessionError as error:
        raise PCCLError(error.result, func_name, error.message) from None
    except portal.PortalBrokenError as error:
        raise PCCLError(Result.INTERNAL_ERROR, func_name, str(error)) from None
    except portal.PortalClosedError as error:
        raise PCCLError(Result.NOT_INITIALIZED, func_name, str(error)) from None


class AsyncCommunicator(Collectives[Coroutine[Any, Any, CollectiveInfo]]):
    """A peer of a run, as coroutines for trio. Same methods and errors as `Communicator`, which documents them.

    All methods must be called from one trio run. Background tasks are trio system tasks: they end with `close`, with
    the `async with` block, or with the run.

    Ctrl-C, where trio raises KeyboardInterrupt, comes to the program's own code or to where the main task waits. A call
    of this class that waits there withdraws what it began; the communicator can still be used. So does one that is
    cancelled, unless its op has been committed by then: that is returned as if in time.
    """

    def __init__(
        self,
        address: str,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        timeout: float | None = None,
        advertise: str | None = None,
        listen: str | None = None,
        name: str | None = None,
        token: str | None = None,
        encrypt: bool | None = None,
        ssl_context: ssl.SSLContext | None = None,
        segment_bytes: int = 0,
        site: str = "",
        site_size: int = 0,
        master_timeout: float | None = None,
    ) -> None:
        def check(is_fine: bool, message: str) -> None:
            if not is_fine:
                raise PCCLError(Result.INVALID_ARGUMENT, "Communicator", message)

        listen = os.environ.get("PCCL_LISTEN") if listen is None else listen
        advertise = os.environ.get("PCCL_ADVERTISE") if advertise is None else advertise
        try:
            self._masters = addresses.parse_masters(address)
            listen_host, listen_port = addresses.parse(listen, default_port=0) if listen else ("", 0)
            hosts: tuple[str, ...] = ()
            port: int | None = None
            if advertise:
                host, parsed = addresses.parse(advertise, default_port=0)
                hosts, port = (host,), parsed or None
        except ValueError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "Communicator", str(error)) from None
        check(name is None or isinstance(name, str), f"name {name!r}: must be text")
        peer_group = integer_argument("peer_group", peer_group, "Communicator", 0, UINT32_MAX)
        connections = integer_argument(
            "p2p_connection_pool_size", p2p_connection_pool_size, "Communicator", 0, CONNECTIONS_MAX
        )
        segment_bytes = integer_argument("segment_bytes", segment_bytes, "Communicator", 0, UINT32_MAX)
        site_size = integer_argument("site_size", site_size, "Communicator", 0, UINT32_MAX)
        check(
            isinstance(site, str) and bool(site) == (site_size > 0),
            f"site {site!r} and site_size {site_size!r} belong together: a name, and how many peers have it",
        )
        self.address = address
        secret = security.token(token, "Communicator")
        self.timeout = _timeouts.checked_s(timeout, "Communicator")
        self._options = SessionOptions(
            group=peer_group,
            connections=connections or CONNECTIONS_DEFAULT,
            may_grow=connections == 0,
            hosts=hosts,
            port=port,
            listen_host=listen_host,
            listen_port=listen_port,
            site=site,
            site_size=site_size,
            name=f"{socket.gethostname()}:{os.getpid()}" if name is None else name,
            token=secret,
            encrypt=security.encryption(encrypt, secret, "Communicator"),
            ssl_context=security.client_tls(ssl_context, "Communicator"),
            segment_bytes=segment_bytes,
            master_timeout_s=_timeouts.master_timeout_s(master_timeout, "Communicator"),
        )
        if not all(addresses.is_loopback(host) for host, _ in self._masters):
            # Where the master is out of strangers' reach, nobody tells them the run's name, without which peers refuse.
            security.warn_if_exposed(listen_host, self._options.token, stacklevel=3)
        self._session: PeerSession | None = None
        self._is_connecting = False
        self._obstacle = ""
        """What holds up the connecting."""
        self._is_closed = False

    # Life.

    @trio.lowlevel.enable_ki_protection
    async def connect(self, n_attempts: int = 5, *, timeout: Timeout = DEFAULT) -> None:
        attempts = integer_argument("n_attempts", n_attempts, "connect")
        if self._is_closed:
            raise PCCLError(Result.NOT_INITIALIZED, "connect", "this communicator was closed; make a new one")
        if self._is_connecting:
            raise PCCLError(Result.INVALID_USAGE, "connect", "another call of this communicator is connecting it")
        if self._session is not None and self._session.failure is None:
            raise PCCLError(Result.INVALID_USAGE, "connect", "already connected")
        portal.on_fork(self)
        self._is_connecting = True
        try:
            with converting("connect"):
                await self._bounded("connect", timeout, lambda: self._connect(attempts), self._hindrance)
        finally:
            self._is_connecting = False

    def _hindrance(self) -> str:
        """What holds up the connecting."""
        return (self._session.obstacle if self._session is not None else "") or self._obstacle

    async def _connect(self, n_attempts: int) -> None:
        if self._session is not None and not self._session.is_forgotten:
            self._obstacle = "what is left of the former session"
            await self._session.over.wait()  # it may listen at the port that this one is to listen at
        self._obstacle = f"no answer from {self.address}"
        for attempt in range(1, max(1, n_attempts) + 1):
            try:
                session = await open_session(self._masters, self._options)
                break
            except SessionError as error:
                if error.result is not Result.MASTER_CONNECTION_FAILED or attempt >= n_attempts:
                    if attempt > 1:
                        raise SessionError(error.result, f"{error.message} ({attempt} attempts)") from None
                    raise
                self._obstacle = error.message
                await trio.sleep(ATTEMPT_INTERVAL_S)
                if self._is_closed:
                    raise SessionError(Result.NOT_INITIALIZED, "this communicator was closed") from None
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

    def abandon(self, error: BaseException) -> None:
        """As `PeerSession.abandon`, where there is one."""
        if self._session is not None:
            self._session.abandon(error)

    @trio.lowlevel.enable_ki_protection
    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            with trio.CancelScope(shield=True):
                await self._session.close()

    async def __aenter__(self) -> AsyncCommunicator:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.view is not None and self._session.failure is None

    def get_attribute(self, attribute: Attribute) -> int:
        view = self.view("get_attribute")
        if attribute is Attribute.GLOBAL_WORLD_SIZE:
            return view.global_world_size
        if attribute is Attribute.LOCAL_WORLD_SIZE:
            return view.world_size
        if attribute is Attribute.NUM_DISTINCT_PEER_GROUPS:
            return len(view.group_sizes)
        if attribute is Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
            return max(view.group_sizes.values())
        raise PCCLError(Result.INVALID_ARGUMENT, "get_attribute", f"{attribute!r} is not an Attribute")

    @property
    def membership(self) -> Membership:
        view = self.view("membership")
        return Membership(view.ring.index(view.peer), view.ring)

    # Joint calls.

    async def are_peers_pending(self, *, timeout: Timeout = DEFAULT) -> bool:
        return await self._joint("are_peers_pending", Kind.ARE_PEERS_PENDING, timeout) > 0

    async def update_topology(self, *, timeout: Timeout = DEFAULT) -> None:
        await self._joint("update_topology", Kind.UPDATE_TOPOLOGY, timeout)

    async def optimize_topology(self, *, timeout: Timeout = DEFAULT) -> None:
        await self._joint("optimize_topology", Kind.OPTIMIZE_TOPOLOGY, timeout)

    @trio.lowlevel.enable_ki_protection
    async def _joint(self, func_name: str, kind: str, timeout: Timeout) -> int:
        with converting(func_name):
            session = self.session(func_name)
            return await self._bounded(func_name, timeout, lambda: session.joint(kind))

    @trio.lowlevel.enable_ki_protection
    async def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
        *,
        timeout: Timeout = DEFAULT,
    ) -> SharedStateSyncInfo:
        name = "sync_shared_state"
        if not isinstance(strategy, SharedStateSyncStrategy):
            raise PCCLError(Result.INVALID_ARGUMENT, name, f"{strategy!r} is not a SharedStateSyncStrategy")
        given: Any = shared_state
        if not isinstance(given, SharedState):
            raise PCCLError(Result.INVALID_ARGUMENT, name, f"shared_state must be a SharedState, not {given!r}")
        session = self.session(name)
        tensors = [tensor.state_tensor() for tensor in shared_state.tensors]
        transfer: Transfer | None = None

        async def take_part() -> tuple[int, Transfer]:
            nonlocal transfer
            try:
                own = await trio.to_thread.run_sync(fingerprint, tensors, abandon_on_cancel=True)
            except StoreError as error:
                raise session.store_failed(str(error)) from error
            transfer = Transfer(tensors, own)
            return await session.sync(strategy.value, shared_state.revision, transfer), transfer

        try:
            try:
                with converting(name):
                    revision, done = await self._bounded(name, timeout, take_part)
            finally:
                with converting(name):
                    await _settle(session, tensors)
        except PCCLError as error:
            if transfer is None or not transfer.overwritten:
                raise
            spoiled = f"overwritten here, at least in part: {', '.join(sorted(transfer.overwritten))}"
            raise PCCLError(error.result, name, f"{error.message}; {spoiled}") from None
        shared_state.revision = revision
        return SharedStateSyncInfo(done.tx_bytes, done.rx_bytes, revision)

    # Collectives.

    async def all_reduce(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> ReduceInfo:
        spec = op_spec(
            send,
            recv,
            op=op,
            tag=tag,
            operand_descriptor=operand_descriptor,
            quantization_options=quantization_options,
            algorithm=algorithm,
            step=step,
            func_name="all_reduce",
        )
        return info_of(await self._run(self.session("all_reduce"), spec, timeout, "all_reduce"), "all_reduce")

    @trio.lowlevel.enable_ki_protection
    async def _run(self, session: PeerSession, spec: OpSpec, timeout: Timeout, func_name: str) -> PendingOp:
        """Launches an op and waits for its end, or has it aborted on all peers."""
        timeout_s = self.timeout_s(timeout, func_name)
        pending = session.ops.new(spec)
        try:
            with converting(func_name):
                session.ops.launch(pending)
            with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
                await pending.async_wait()
            if not pending.is_over:
                assert timeout_s is not None
                session.ops.cancel(pending, Result.TIMEOUT, gave_up(session, timeout_s))
                with trio.move_on_after(CANCEL_GRACE_S):
                    await pending.async_wait()
                await pending.async_reclaim()
        except PCCLError:
            raise
        except BaseException as error:  # cancelled, or trio's KeyboardInterrupt
            session.ops.cancel(pending, Result.TIMEOUT, "its caller was cancelled")
            await pending.async_reclaim()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + INTERRUPT_GRACE_S):
                await pending.async_wait()
            if not isinstance(error, trio.Cancelled) or pending.is_detached or pending.has_failed:
                raise
        require_outcome(session, [pending], func_name)
        return pending

    async def _collective(self, call: CallOf, timeout: Timeout, func_name: str) -> CollectiveInfo:
        made = call(self.view(func_name), func_name)
        return made.info(await self._run(self.session(func_name), made.spec, timeout, func_name), func_name)

    def launch_collective(self, call: CallOf, func_name: str) -> AsyncCollectiveHandle:
        made = call(self.view(func_name), func_name)
        return self._launch(made.spec, func_name, lambda op: AsyncCollectiveHandle(op, made))

    def all_reduce_async(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncReduceHandle:
        """A plain function: launches the op and returns at once. Use `await handle.async_wait()`."""
        spec = op_spec(
            send,
            recv,
            op=op,
            tag=tag,
            operand_descriptor=operand_descriptor,
            quantization_options=quantization_options,
            algorithm=algorithm,
            step=step,
            func_name="all_reduce_async",
        )
        return self.launch(spec, "all_reduce_async")

    @trio.lowlevel.enable_ki_protection
    async def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4, timeout: Timeout = DEFAULT
    ) -> ReduceInfo:
        name = "all_reduce_multiple_with_retry"
        retry = Retry(descriptors, max_in_flight, name)
        limit_s = self.timeout_s(timeout, name)
        end_s = deadline(limit_s)
        session = self.session(name)
        try:
            while retry.has_more:
                for spec in retry.next_specs():
                    retry.launch(session, spec)
                with trio.move_on_after(max(0.0, end_s - time.monotonic())):
                    await PendingOp.async_wait_any(retry.in_flight)
                retry.collect(session, limit_s)
        except PCCLError as error:
            retry.abandon(session, limit_s)
            await self._await_verdicts(retry, CANCEL_GRACE_S)
            if not (error.result is Result.TIMEOUT and retry.is_committed_after_all()):
                require_outcome(session, retry.in_flight, name, error)
                raise
        except BaseException:
            retry.abandon(session, None)
            for op in retry.in_flight:
                await op.async_reclaim()
            await self._await_verdicts(retry, INTERRUPT_GRACE_S)
            raise
        return retry.info()

    async def _await_verdicts(self, retry: Retry, grace_s: float) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + grace_s):
            for op in retry.in_flight:
                await op.async_wait()
        for op in retry.in_flight:
            await op.async_reclaim()

    # What the blocking face shares.

    def launch(self, spec: OpSpec, func_name: str) -> AsyncReduceHandle:
        return self._launch(spec, func_name, AsyncReduceHandle)

    @trio.lowlevel.enable_ki_protection
    def _launch(self, spec: OpSpec, func_name: str, handle_of: Callable[[PendingOp], T]) -> T:
        """From any thread. A signal handler that raises meanwhile leaves nothing in flight."""
        session = self.session(func_name)
        view = self.view(func_name)
        if view.world_size < 2:
            raise PCCLError(Result.TOO_FEW_PEERS, func_name, alone_in(view.group))
        op = session.ops.new(spec)
        try:
            handle = handle_of(op)
            with converting(func_name):
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

    def session(self, func_name: str) -> PeerSession:
        """The session; PCCLError NOT_INITIALIZED before connect()."""
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
        """The installed one. PCCLError as `session`, or why that is over."""
        with converting(func_name):
            session = self.session(func_name)
            if session.failure is not None:
                raise session.failure
        assert session.view is not None
        return session.view

    def timeout_s(self, timeout: Timeout, func_name: str) -> float | None:
        return self.timeout if isinstance(timeout, Default) else _timeouts.checked_s(timeout, func_name)

    def begin_close(self) -> bool:
        """Refuses all further calls, from any thread. Whether `close` has anything left to do."""
        self._is_closed = True
        return self._session is not None and not self._session.is_forgotten

    def forget_after_fork(self) -> None:
        self._is_connecting = False
        if self._session is not None:
            self._session.forget_after_fork()

    async def _bounded(
        self,
        func_name: str,
        timeout: Timeout,
        call: Callable[[], Awaitable[T]],
        obstacle: Callable[[], str] = lambda: "other peers may not have called it",
    ) -> T:
        """PCCLError TIMEOUT with what was in the way."""
        limit_s = self.timeout_s(timeout, func_name)
        if limit_s is None:
            return await call()
        with trio.move_on_after(limit_s):
            return await call()
        raise PCCLError(Result.TIMEOUT, func_name, f"not finished within {limit_s:g} s; {obstacle()}")


async def _settle(session: PeerSession, tensors: Sequence[StateTensor]) -> None:
    """Waits for what is on its way to devices. SessionError."""
    for tensor in tensors:
        if tensor.store is not None:
            with trio.CancelScope(shield=True):
                try:
                    await trio.to_thread.run_sync(tensor.store.settle)
                except StoreError as error:
                    raise session.store_failed(str(error)) from error


def require_outcome(
    session: PeerSession, ops: Sequence[PendingOp], func_name: str, cause: PCCLError | None = None
) -> None:
    """For ops whose arrays are their caller's again. PCCLError OUTCOME_UNKNOWN where others may have committed one that
    was given up here, for that `cause`."""
    unknown = [op for op in ops if not op.is_over or (op.is_detached and not op.has_failed)]
    if not unknown:
        return
    tags = sorted({op.tag for op in unknown})
    view = session.view
    others = sorted({peer for op in unknown for peer in op.ring if view is None or peer != view.peer})
    what = f"the op with tag {tags[0]} was" if len(tags) == 1 else f"the ops with tags {tags[:10]} were"
    silent = (
        "not all of them have answered" if session.hears_master else "the master has been lost, and no other is found"
    )
    text = (
        f"{what} given up here, and peers {others} may have committed what this one has not: {silent}. The arrays are "
        f"as they were. Reducing again may meet the others' next step, unless steps are told apart (step=): bring all "
        f"peers to one state first (sync_shared_state), or leave the run"
    )
    raise PCCLError(Result.OUTCOME_UNKNOWN, func_name, text if cause is None else f"{text}. It was: {cause}")


def deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def gave_up(session: PeerSession, timeout_s: float | None) -> str:
    peer = session.view.peer if session.view is not None else 0
    after = "" if timeout_s is None else f" after {timeout_s:g} s"
    return f"aborted on all peers: peer {peer} gave up{after}"


class Retry:
    """The bookkeeping of all_reduce_multiple_with_retry, free of waiting.

    Ops are launched in the order of their tags on every peer, at most `max_in_flight` at once. A verdict is the same on
    all peers, and an op that was aborted leaves its place to the lowest tag that waits for one, so the lowest that is
    not committed is always in flight everywhere: the window cannot deadlock, whatever order the peers listed their ops
    in. Whichever op ends first is taken in first: a peer that has given one up may never launch an older one.
    """

    def __init__(self, descriptors: Sequence[ReduceOpDescriptor], max_in_flight: int, func_name: str) -> None:
        given: Any = descriptors
        if not isinstance(given, Sequence) or not all(isinstance(each, ReduceOpDescriptor) for each in given):
            what = f"descriptors must be a list of ReduceOpDescriptor, not {given!r}"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
        max_in_flight = integer_argument("max_in_flight", max_in_flight, func_name, 1)
        tags = [descriptor.spec.tag for descriptor in descriptors]
        repeated = sorted({tag for tag in tags if tags.count(tag) > 1}) if len(set(tags)) < len(tags) else []
        if not descriptors or repeated:
            what = f"tags {repeated} occur twice" if repeated else "there must be descriptors of ops"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
        self.in_flight: list[PendingOp] = []
        self.retries = 0
        self._func_name = func_name
        self._max_in_flight = max_in_flight
        self._specs = {descriptor.spec.tag: descriptor.spec for descriptor in descriptors}
        self._left = sorted(self._specs, reverse=True)
        self._infos: list[ReduceInfo] = []
        self._failure: PCCLError | None = None
        self._gave_up = False

    @property
    def has_more(self) -> bool:
        return bool(self.in_flight or (self._left and self._failure is None))

    def next_specs(self) -> list[OpSpec]:
        """What to launch now. A failure stops further launches, and ends the call once all in flight have ended."""
        if self._failure is not None:
            return []
        room = self._max_in_flight - len(self.in_flight)
        return [self._specs[self._left.pop()] for _ in range(min(room, len(self._left)))]

    def launch(self, session: PeerSession, spec: OpSpec) -> None:
        op = session.ops.new(spec)
        self.in_flight.append(op)
        try:
            with converting(self._func_name):
                session.ops.launch(op)
        except PCCLError:
            self.in_flight.remove(op)
            raise

    def collect(self, session: PeerSession, timeout_s: float | None) -> None:
        """Takes in every op that has ended; called when one has, or when `timeout_s` has passed: TIMEOUT.

        Once one has failed for good, those in flight are given up on all peers: a peer whose own call has failed may
        never launch them."""
        if not any(op.is_over for op in self.in_flight):
            raise PCCLError(Result.TIMEOUT, self._func_name, f"not all ops were committed within {timeout_s:g} s")
        still = []
        for op in self.in_flight:
            if not op.is_over:
                still.append(op)
                continue
            try:
                self._infos.append(info_of(op, self._func_name))
            except PCCLError as error:
                if error.result is Result.RANK_CONNECTION_LOST:
                    self.retries += 1
                    self._left.append(op.tag)
                    self._left.sort(reverse=True)
                elif self._failure is None:
                    self._failure = error
        if self._failure is not None and not self._gave_up:
            self._gave_up = True
            for op in still:
                session.ops.cancel(op, self._failure.result, self._failure.message)
        self.in_flight = still
        if self._failure is not None and not still:
            raise self._failure

    def abandon(self, session: PeerSession, timeout_s: float | None) -> None:
        """Has whatever is still in flight aborted on all peers."""
        for op in self.in_flight:
            session.ops.cancel(op, Result.TIMEOUT, gave_up(session, timeout_s))

    def is_committed_after_all(self) -> bool:
        """Whether what was given up has been committed by then, and with it all there is to do."""
        if self._failure is not None or self._left:
            return False
        if not all(op.is_over and not op.has_failed and not op.is_detached for op in self.in_flight):
            return False
        self._infos += [info_of(op, self._func_name) for op in self.in_flight]
        return True

    def info(self) -> ReduceInfo:
        """The sum over all ops; the world size is the smallest that any of them had."""
        memberships = {info.membership for info in self._infos}
        return ReduceInfo(
            min(info.local_world_size for info in self._infos),
            sum(info.tx_bytes for info in self._infos),
            sum(info.rx_bytes for info in self._infos),
            memberships.pop() if len(memberships) == 1 else None,
        )
