"""The blocking communicator: what a training loop uses."""

from __future__ import annotations

import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from _pccl_torch import outside_graphs
from pccl import _timeouts
from pccl._collectives import CallOf
from pccl._communicator_methods import RESULTS, CommunicatorMethods
from pccl._giving_up import CANCEL_GRACE_S, INTERRUPT_GRACE_S, deadline, gave_up, give_up, require_outcome
from pccl._own_methods import own_methods
from pccl._reduce import info_of
from pccl._retry import Retry
from pccl._session_holder import SessionErrors, close_forgotten
from pccl._timeouts import Timeout
from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.peer_session import PeerSession
from pccl.runtime.threads import portal
from pccl.types import CollectiveInfo, ReduceInfo, Result, SharedStateSyncInfo

T = TypeVar("T")

SHORT_S = 0.1
"""The longest timeout that is kept to the millisecond. Ops with a longer one, or with none, may take the fast path."""
WHOM_S = 0.5
"""Time that it may take to find out for whom an op has waited, before it is given up."""


@outside_graphs
@own_methods(RESULTS, are_coroutines=False)
class Communicator(CommunicatorMethods[None, bool, int, SharedStateSyncInfo, ReduceInfo, CollectiveInfo]):
    """A peer of a run.

    Peers of one `peer_group` reduce together and share state; joining and topology are common to all groups. `with`
    connects, and leaves the run at the end of its block.

    Thread-safe: any method may be called from any thread, and ops with different tags may be in flight at once. Calls
    made in a forked child fail.

    All errors are `PCCLError`. Beyond those documented with each method, any call may fail with NOT_INITIALIZED (not
    connected, closed, or forked), MASTER_CONNECTION_FAILED (the master is gone or has evicted this peer: make a new
    communicator), or TIMEOUT. Ctrl-C ends any wait within a second. When an op raises anything, its arrays are
    the caller's again and as they were before; only with KeyboardInterrupt the op may have been committed by then.

    In the reference the return types `NoneT`, `BoolT`, `IntT`, `SyncInfoT`, `ReduceInfoT` and `CollectiveInfoT` are
    `None`, `bool`, `int`, `SharedStateSyncInfo`, `ReduceInfo` and `CollectiveInfo` here, and coroutines of them in
    `AsyncCommunicator`.

    The master may die, and the run goes on: ops that are under way go on, calls wait, and the peer looks for a master
    at the addresses that it knows, be it one that was started anew or a standby.

    Memory beyond the caller's arrays: at most 16 MiB for each all_reduce in flight that is quantized or, among more
    than two peers, goes direct, and for each reduce_scatter among more than two (small ones need less than twice their
    size; in groups of 16 peers and more it may be up to a megabyte a peer); and a copy of the array for an all_reduce
    in place and where a broadcast arrives, for an abort to put back. So four large ops at once, as
    `all_reduce_multiple_with_retry` runs them, need no more than 64 MiB out of place. Between ops at most 64 MiB are
    kept, and the largest recent copy of each engine thread; with three engine threads and more, some may keep more than
    one. An op that goes on after a wait for it was given up takes a copy of its arrays. Arrays on a device take host
    memory as `pccl.devices.staging` describes. `stats` tells the amounts: `scratch_bytes` in use, `scratch_bytes_max`
    at any time (only with one engine thread), `pool_bytes` idle.

    Args:
        address: The master's "host:port": a name, an IPv4 or a bracketed IPv6 address; port 48148 if left out. Several,
            with commas between, are those of a master and its standbys. Default: PCCL_MASTER in the environment, which
            `pccl launch` sets.
        peer_group: The number of this peer's group, in [0, 2**32).
        p2p_connection_pool_size: TCP connections to each neighbour, at most 64. 0 begins with two and adds more where
            they help.
        timeout: Seconds that bound every blocking call of this communicator but `close`; None waits as long as it
            takes. Each call can override it. 0 or less has passed already.
        advertise: The "host[:port]" that other peers are told to dial, for hosts behind NAT. Default: PCCL_ADVERTISE in
            the environment, else the address that the master sees.
        listen: The "host:port" where the one peer-to-peer port is opened. Default: PCCL_LISTEN in the environment, else
            all interfaces and any free port.
        name: What this peer is called in logs, errors and the status, beside its number: `2 (vm:8141)`. Default: the
            host's name and the process's number, and under `pccl launch` its index.
        token: The run's shared secret, which the master and all peers must know or all be without. Default: PCCL_TOKEN
            in the environment; "" is none.
        encrypt: True encrypts and authenticates the numbers and the state that go between peers: AES-256-GCM, with keys
            that each connection makes of the token and a key exchange, so that nobody who learns the token later can
            read what was recorded. All peers must give the same. It needs a token, and OpenSSL 3 on this machine
            (INVALID_ARGUMENT). Default: whether PCCL_ENCRYPT in the environment is 1.
        ssl_context: An `ssl.SSLContext` that makes the connection to the master use TLS. Default: one that trusts the
            certificates in the file PCCL_TLS_CA, if the environment has that, and shows the one in PCCL_TLS_CERT and
            PCCL_TLS_KEY.
        segment_bytes: The largest payload of one frame, 0 for a default that suits most networks.
        site: A name that `site_size` peers share. They are admitted together, and if one is lost the others fail with
            MASTER_CONNECTION_FAILED, as is right for ranks that share the shards of one model (`pccl.training.Site`). A
            peer that calls `close` leaves alone. Every start of a site needs a new name.
        site_size: The number of peers of the site.
        place: The rank that this peer asks for if it is one of those that found its group. The founders get the order
            of their places if each of them gives one.
        master_timeout: Seconds after which a peer that has lost its master and found no other fails with
            MASTER_CONNECTION_FAILED. Default: PCCL_MASTER_TIMEOUT in the environment, else 60.

    Raises:
        PCCLError: INVALID_ARGUMENT.
    """

    def _set_up(self) -> None:
        self._finalizer = weakref.finalize(self, close_forgotten, self._inner)
        self._finalizer.atexit = False

    def close(self, *, timeout: float | None = None, reason: str = "") -> None:
        """Leave the run. Ops in flight fail here; the others settle them as after a loss.

        It takes a few seconds at most, even if nobody answers. It may be called again, from any thread and from a
        signal handler, also while other threads wait in calls, which then fail. The communicator's own timeout does not
        count here.

        Args:
            timeout: Seconds; None to wait until it is done.
            reason: The reason that the others are told, in their errors.

        Raises:
            PCCLError: TIMEOUT if `timeout` seconds pass before; leaving then goes on by itself.
        """
        limit_s = _timeouts.checked_s(timeout, "close")
        self._before_leaving.clear()
        self._finalizer.detach()
        if self._inner.begin_close():
            try:
                portal.current().call(self._inner.close, reason, timeout_s=limit_s)
            except portal.PortalTimeoutError:
                raise PCCLError(Result.TIMEOUT, "close", f"not finished within {limit_s:g} s; it goes on") from None
            except portal.PortalClosedError:
                return  # the exit of the interpreter closes it

    def __enter__(self) -> Communicator:
        if not self._inner.is_connected:
            self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for call in list(self._before_leaving.values()):
                    call()
        finally:
            self.close()

    def _call(self, func_name: str, call: Callable[[], Awaitable[T]]) -> T:
        portal.on_exit(self._inner)  # before there is a session, so that no exit of the interpreter misses one
        with SessionErrors(func_name):
            return portal.current().call(call)

    def _reduce(self, spec: OpSpec, timeout: Timeout, func_name: str) -> ReduceInfo:
        return info_of(self._run(spec, timeout, func_name), func_name)

    def _collective(self, call: CallOf, timeout: Timeout, func_name: str) -> CollectiveInfo:
        made = call(self._inner.view(func_name), func_name)
        return made.info(self._run(made.spec, timeout, func_name), func_name)

    def _run(self, spec: OpSpec, timeout: Timeout, func_name: str) -> PendingOp:
        """Launch an op and wait for its end, or have it aborted on all peers."""
        timeout_s = self._inner.timeout_s(timeout, func_name)
        session = self._inner.session(func_name)
        pending = session.ops.new(spec)
        is_settled = False
        try:
            with SessionErrors(func_name):
                if timeout_s is None or timeout_s > SHORT_S:
                    session.ops.launch_waiting(pending)
                else:
                    session.ops.launch(pending)
            if not pending.wait(timeout_s):
                whom = _whom(session, pending, timeout_s)
                session.ops.cancel(pending, Result.TIMEOUT, gave_up(session, timeout_s, pending, whom))
                pending.wait(CANCEL_GRACE_S)
                pending.reclaim()
            is_settled = True
        except PCCLError:
            is_settled = True
            raise
        finally:
            if not is_settled:
                give_up(session, [pending])
                _await_abortion(session, [pending])
            pending.reclaim()
        if not pending.is_over or pending.is_detached:
            require_outcome(session, [pending], func_name)
        return pending

    def _run_retry(self, retry: Retry, timeout: Timeout, func_name: str) -> ReduceInfo:
        limit_s = self._inner.timeout_s(timeout, func_name)
        end_s = deadline(limit_s)
        session = self._inner.session(func_name)
        is_settled = False
        try:
            while retry.has_more:
                for spec in retry.next_specs():
                    retry.launch(session, spec)
                left_s = None if limit_s is None else max(0.0, end_s - time.monotonic())
                PendingOp.wait_any(retry.in_flight, left_s)
                retry.collect(session, limit_s)
            is_settled = True
        except PCCLError as error:
            retry.abandon(session, limit_s)
            _await_verdicts(retry.in_flight, CANCEL_GRACE_S)
            for op in retry.in_flight:
                op.reclaim()
            is_settled = True
            if not (error.result is Result.TIMEOUT and retry.is_committed_after_all()):
                require_outcome(session, retry.in_flight, func_name, error)
                raise
        finally:
            if not is_settled:
                give_up(session, retry.in_flight)
                _await_abortion(session, retry.in_flight)
        return retry.info()


def _whom(session: PeerSession, op: PendingOp, timeout_s: float | None) -> str:
    """Return whom an op that has timed out waits for, as counted now; empty if that takes too long."""
    if timeout_s is None or timeout_s <= SHORT_S:
        return ""
    with suppress(portal.PortalTimeoutError, portal.PortalClosedError, portal.PortalBrokenError):
        return portal.current().call(session.counted_whom, op, timeout_s=WHOM_S)
    return ""


def _await_verdicts(ops: Sequence[PendingOp], grace_s: float) -> None:
    end_s = deadline(grace_s)
    for op in ops:
        op.wait(max(0.0, end_s - time.monotonic()))


def _await_abortion(session: PeerSession, ops: Sequence[PendingOp]) -> None:
    """Wait a moment for the end of ops that were given up, after which their tags are free. A signal ends the wait."""
    try:
        _await_verdicts(ops, INTERRUPT_GRACE_S)
    finally:
        for op in ops:
            session.ops.let_go(op)
