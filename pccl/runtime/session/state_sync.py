"""Takes part in sync_shared_state: makes the group call, fetches state as planned, and serves other peers."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import Keys
from pccl.protocol.codec import encode
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.runtime.network.handshake import EncryptedStream
from pccl.runtime.session.driver import Part, SessionError, Shared
from pccl.runtime.state.tensor_blocks import StoreError
from pccl.runtime.state.transfer import ClosableStream, Transfer, TransferError
from pccl.types import Result

Dial = Callable[[m.PeerInfo, m.PeerOpening, float], Awaitable[tuple[trio.socket.SocketType, Keys | None]]]
"""A function that connects to another peer. Raises LinkError."""


@dataclass
class Syncing:
    """A `sync_shared_state` call of this peer."""

    transfer: Transfer
    plan: m.SyncPlan | None = None
    planned: trio.Event = field(default_factory=trio.Event)
    """Set, and then replaced, when the next plan arrives."""
    is_over: bool = False
    fetching: trio.CancelScope | None = None
    is_fetching: trio.Lock = field(default_factory=trio.Lock)
    scopes: list[trio.CancelScope] = field(default_factory=list)

    def plan_with(self, plan: m.SyncPlan) -> None:
        """Start with a plan, or continue with a later master's plan, keeping the state already received."""
        self.plan = plan
        self.planned.set()
        self.planned = trio.Event()
        if self.fetching is not None:
            self.fetching.cancel()
            self.fetching = None

    async def until_planned(self, sync: int) -> bool:
        """Wait for the plan of this sync. Return False if the sync is over."""
        while not self.is_over and (self.plan is None or self.plan.sync < sync):
            await self.planned.wait()
        return not self.is_over and self.plan is not None and self.plan.sync == sync

    def scope(self) -> trio.CancelScope:
        """Return a scope for a task that transfers state. The end of the call cancels it, so that no tensor is
        accessed afterwards."""
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


class StateSync(Part):
    """This peer's part in `sync_shared_state`."""

    def __init__(self, shared: Shared, calls: GroupCalls, dial: Dial) -> None:
        super().__init__(shared)
        self.current: Syncing | None = None
        """The call in progress."""
        self._calls = calls
        self._dial = dial
        self.handlers = {ps.RunSync: self._run_sync}
        self._lifetime.at_end(lambda _: self._interrupt())

    async def sync(self, strategy: str, revision: int, transfer: Transfer) -> int:
        """Make the group call with this peer's state, and return the elected revision. After an error or a
        cancellation, `transfer.overwritten` names the overwritten tensors."""
        self._lifetime.require_alive()
        if self.current is not None:
            raise SessionError(Result.INVALID_USAGE, "another sync_shared_state of this communicator is in progress")
        offer = m.SyncOffer(strategy, revision, transfer.own.root, [tensor.offer() for tensor in transfer.tensors])
        try:
            encode(m.GroupCall(0, m.Kind.SYNC, offer))
        except ValueError as error:
            raise SessionError(
                Result.INVALID_ARGUMENT, f"{len(transfer.tensors)} tensors are too many to list; combine some: {error}"
            ) from None
        syncing = self.current = Syncing(transfer)
        try:
            return await self._calls.make(m.Kind.SYNC, offer, self._interrupt)
        finally:
            self.current = None
            syncing.end()
            self._counters.state_fetched(transfer.rx_bytes)

    def lost(self, peer: int, reason: str) -> None:
        """Record that a peer has left the run."""
        if self.current is not None:
            self.current.transfer.lost(peer, reason)

    def store_failed(self, reason: str) -> SessionError:
        """Leave the run because this peer's tensors have become unusable. Return the error to raise."""
        reason = f"{reason}; this peer has left the run"
        with self._lifetime.contain, self._driver.taking_over as machine:
            machine.fail(reason)
        return SessionError(Result.INTERNAL_ERROR, reason)

    async def serve(
        self, sock: trio.socket.SocketType, keys: Keys | None, syncing: Syncing, sends_digests: bool
    ) -> None:
        """Serve another peer that fetches this peer's state."""
        stream = self._stream(sock, keys)
        with syncing.scope(), self._leaving_on_store_errors():
            await syncing.transfer.serve(stream, sends_digests)

    def _interrupt(self) -> None:
        if self.current is not None:
            self.current.end()

    def _run_sync(self, machine: Peer, effect: ps.RunSync) -> None:
        syncing = self.current
        if syncing is None:
            # The caller gave up before the plan arrived.
            machine.sync_ended(effect.plan.sync, False, "its caller gave up the sync", [])
            return
        syncing.plan_with(effect.plan)
        if effect.plan.fetch_content or effect.plan.fetch_loose:
            self._lifetime.spawn(self._fetch, syncing, effect)

    async def _fetch(self, syncing: Syncing, effect: ps.RunSync) -> None:
        plan = effect.plan
        facts = self._driver.facts

        async def connect(donor: m.PeerInfo, sends_digests: bool) -> ClosableStream:
            encrypt = self._options.encrypt
            hello = m.StateHello(
                m.PROTOCOL_VERSION,
                facts.run,
                facts.peer,
                donor.peer,
                plan.sync,
                encrypt=encrypt,
                sends_digests=sends_digests,
            )
            return self._stream(*await self._dial(donor, hello, facts.peer_timeout_s))

        success, reason, suspects = False, "its caller gave up the sync", list[tuple[int, str]]()
        scope = syncing.fetching = syncing.scope()
        with scope:
            async with syncing.is_fetching:
                if syncing.plan is not plan:
                    return  # a later plan has replaced it
                try:
                    with self._leaving_on_store_errors():
                        suspects = await syncing.transfer.fetch(plan, effect.donors, connect, facts.peer_timeout_s)
                    success, reason = True, ""
                except TransferError as error:
                    suspects, reason = error.suspects, str(error)
        with self._driver.taking_over as machine:
            machine.sync_ended(plan.sync, success, reason, suspects)

    def _stream(self, sock: trio.socket.SocketType, keys: Keys | None) -> ClosableStream:
        if not self._options.encrypt:
            return sock
        assert keys is not None
        return EncryptedStream(sock, keys)

    @contextmanager
    def _leaving_on_store_errors(self) -> Iterator[None]:
        try:
            yield
        except* StoreError as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.store_failed(str(error))


# A session's group calls.

CANCEL_S = 5.0
"""Time that a cancelled group call waits for the master to report whether it has taken effect."""


@dataclass
class _PendingCall:
    event: trio.Event = field(default_factory=trio.Event)
    result: ps.CallResult | None = None
    world_size: int = 0
    """The world size at the end of the call, because the view may change before the caller continues."""


class GroupCalls(Part):
    """The group calls in progress."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _PendingCall] = {}
        self.handlers = {ps.CallResult: self._call_result}
        self._lifetime.at_end(self._end)

    def __len__(self) -> int:
        return len(self._calls)

    async def make(
        self, kind: str, offer: m.SyncOffer | None = None, interrupted: Callable[[], None] = lambda: None
    ) -> int:
        """Make a group call and return its value; for update_topology, the size of the group. Raises SessionError.

        A cancellation removes the peer from the call and then propagates. But if the call has already taken effect, its
        value is returned instead. On a cancellation, `interrupted` is called before the peer is removed.
        """
        self._lifetime.require_alive()
        number = next(self._numbers)
        call = self._calls[number] = _PendingCall()
        with self._lifetime.contain, self._driver.taking_over as machine:
            machine.group_call(number, kind, offer)
        try:
            await call.event.wait()
        except BaseException as error:  # cancelled, or trio's KeyboardInterrupt
            interrupted()
            with self._lifetime.contain, self._driver.taking_over as machine:
                machine.cancel_group_call(number)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CANCEL_S):
                await call.event.wait()
            if not isinstance(error, trio.Cancelled) or call.result is None or call.result.code is Result.TIMEOUT:
                raise
        finally:
            self._calls.pop(number, None)
        assert call.result is not None
        if call.result.code is not Result.SUCCESS:
            raise SessionError(call.result.code, call.result.reason, of_all_peers=True)
        return call.world_size if kind == m.Kind.UPDATE_TOPOLOGY else call.result.value

    def _call_result(self, machine: Peer, effect: ps.CallResult) -> None:
        call = self._calls.get(effect.call)
        if call is not None:
            call.world_size = machine.view.world_size if machine.view is not None else 0
            call.result = effect
            call.event.set()

    def _end(self, failure: SessionError) -> None:
        for number, call in self._calls.items():
            if call.result is None:
                call.result = ps.CallResult(number, failure.result, failure.message, 0)
                call.event.set()
