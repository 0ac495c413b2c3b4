"""The blocking communicator: what a training loop uses."""

from __future__ import annotations

import ssl
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from pccl import _timeouts
from pccl._collective_methods import Collectives
from pccl._collectives import AsyncCollectiveHandle, CallOf
from pccl._reduce import AsyncReduceHandle, ReduceOpDescriptor, info_of, op_spec
from pccl._timeouts import DEFAULT, Timeout
from pccl.async_communicator import (
    CANCEL_GRACE_S,
    INTERRUPT_GRACE_S,
    AsyncCommunicator,
    Retry,
    converting,
    deadline,
    gave_up,
    require_outcome,
)
from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.peer_session import PeerSession
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

T = TypeVar("T")

SHORT_S = 0.1
"""A timeout that is longer need not be kept to the millisecond."""


class Communicator(Collectives[CollectiveInfo]):
    """A peer of a run.

    `address` is the master's "host:port" (a name, an IPv4 or a bracketed IPv6 address; port 48148 if left out).
    There may be several, with commas between: those of a master and its standbys.
    Peers of one `peer_group` reduce together and share state; joining and topology are common to all groups.
    `p2p_connection_pool_size` is the number of TCP connections to each neighbour, 0 for a default.

    Keyword arguments: `timeout` in seconds bounds every blocking call of this communicator but `close` (None: wait),
    each call can override it; 0 or less has passed already. `listen` ("host:port") is where the one peer-to-peer port
    is opened (default: PCCL_LISTEN in the environment, else all interfaces and any free port), `advertise`
    ("host[:port]") what other peers are told to dial, for hosts behind NAT (default: PCCL_ADVERTISE, else the address
    that the master sees). `name` appears in logs. `token` is the run's shared secret, which the master and all peers
    must know or all be without (default: PCCL_TOKEN in the environment; "": none). `encrypt=True` encrypts and
    authenticates the numbers and the state that go between peers (AES-256-GCM, with keys that each connection makes of
    the token and a key exchange, so that who learns the token later cannot read what was recorded); all peers must have
    it alike (default: whether PCCL_ENCRYPT in the environment is 1). It needs a token, and OpenSSL 3 on this machine
    (INVALID_ARGUMENT). `ssl_context`, an ordinary `ssl.SSLContext`, makes the connection to the
    master use TLS (default: one that trusts the certificates in the file PCCL_TLS_CA, if the environment has that, and
    shows the one in PCCL_TLS_CERT and PCCL_TLS_KEY).

    `site` and `site_size`: so many peers that give the same name are admitted together, and with one the others are
    lost (they fail with MASTER_CONNECTION_FAILED), as is right for ranks that share the shards of one model; see
    `pccl.training.Site`. Every start of a site needs a name of its own. One that calls `close` leaves alone.

    The master may die, and the run goes on: ops that are under way go on, calls wait, and the peer looks for a master
    at the addresses that it knows, be it one that was started anew or a standby. One that has found none for
    `master_timeout` seconds fails with MASTER_CONNECTION_FAILED (default: PCCL_MASTER_TIMEOUT in the environment, else
    60).

    Memory beyond the caller's arrays: at most 16 MiB for each all_reduce in flight that is quantized or, among more
    than two peers, goes direct, and each reduce_scatter among more than two (small ones need less than twice their
    size; in groups of 16 peers and more it may be up to a megabyte a peer), and for an all_reduce in place and where a
    broadcast arrives a copy of the array, for an abort to put back. Between ops at most 64 MiB are kept,
    and the largest such copy of late. So four large ops at once, as `all_reduce_multiple_with_retry` runs them, need no
    more than 64 MiB out of place. `stats` tells: `scratch_bytes` in use, `scratch_bytes_max` at any time (only with one
    engine thread), `pool_bytes` idle. With several engine threads each keeps the largest copy of late of its own, so
    that with three and more some more than one may be kept. An op that goes on when a wait for it was given up takes a
    copy of its arrays. Arrays on a device take host memory as told in
    `pccl.devices.staging`.

    Thread-safe: any method may be called from any thread. Ops with different tags may be in flight at once. Calls made
    in a forked child fail. All errors are `PCCLError`; beyond those documented with each method, any call may fail with
    NOT_INITIALIZED (not connected, closed, or forked), MASTER_CONNECTION_FAILED (the master is gone or has evicted this
    peer: make a new communicator), or TIMEOUT. Ctrl-C ends any wait within a second. What is raised by an op, and if it
    is KeyboardInterrupt, comes once its arrays are the caller's again, as they were before; unless, with
    KeyboardInterrupt, the op has been committed by then.
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
        self._inner = AsyncCommunicator(
            address,
            peer_group,
            p2p_connection_pool_size,
            timeout=timeout,
            advertise=advertise,
            listen=listen,
            name=name,
            token=token,
            encrypt=encrypt,
            ssl_context=ssl_context,
            segment_bytes=segment_bytes,
            site=site,
            site_size=site_size,
            master_timeout=master_timeout,
        )
        self._finalizer = weakref.finalize(self, _close_forgotten, self._inner)
        self._finalizer.atexit = False
        self._before_leaving: dict[Hashable, Callable[[], object]] = {}

    # Life.

    def connect(self, n_attempts: int = 5, *, timeout: Timeout = DEFAULT) -> None:
        """Joins the run. Returns once accepted: the first peer at once, others when those accepted before call
        `update_topology`. Tries `n_attempts` times, a second apart, while no master answers.

        MASTER_CONNECTION_FAILED: no master there, or it refused; RANK_CONNECTION_FAILED: no link to a neighbour could
        be made; INVALID_USAGE: connected already.
        """
        portal.on_exit(self._inner)
        self._call("connect", lambda: self._inner.connect(n_attempts, timeout=timeout))

    def close(self, *, timeout: float | None = None) -> None:
        """Leaves the run. Ops in flight fail here; the others settle them as after a loss. May be called again, from
        any thread, also while others wait in calls, which then fail; and from a signal handler.

        Takes a few seconds at most, whoever does not answer. TIMEOUT if `timeout` passes before; it then goes on
        leaving by itself. The communicator's own timeout does not count here.
        """
        limit_s = _timeouts.checked_s(timeout, "close")
        self._before_leaving.clear()
        self._finalizer.detach()
        if self._inner.begin_close():
            try:
                portal.current().call(self._inner.close, timeout_s=limit_s)
            except TimeoutError:
                raise PCCLError(Result.TIMEOUT, "close", f"not finished within {limit_s:g} s; it goes on") from None
            except portal.PortalClosedError:
                return  # the exit of the interpreter closes it

    @staticmethod
    def _call(func_name: str, call: Callable[[], Awaitable[T]]) -> T:
        """In the portal."""
        with converting(func_name):
            return portal.current().call(call)

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

    def before_leaving(self, key: Hashable, call: Callable[[], object]) -> None:
        """Has `call()` made where a `with` block of this communicator ends without an exception, before it closes; what
        it raises comes out of the block. A later call with the same `key` takes its place, and `close` forgets all."""
        self._before_leaving[key] = call

    def get_attribute(self, attribute: Attribute) -> int:
        """A fact of the installed view; never blocks."""
        return self._inner.get_attribute(attribute)

    @property
    def world_size(self) -> int:
        """Accepted peers of this peer group."""
        return self.get_attribute(Attribute.LOCAL_WORLD_SIZE)

    @property
    def membership(self) -> Membership:
        """This peer's rank and who the others are, of the installed view; never blocks. Attributes asked for one after
        the other may be of different views, these are of one."""
        return self._inner.membership

    @property
    def stats(self) -> dict[str, int]:
        """Counters of the engine: payload and wire bytes, scratch memory, open ops and connections."""
        with converting("stats"):
            return self._inner.session("stats").stats()

    # Joint calls: return when all accepted peers have made them.

    def are_peers_pending(self, *, timeout: Timeout = DEFAULT) -> bool:
        """Whether newcomers wait for `update_topology`: the same answer on all peers. May overlap with ops.

        False also where the others are in a call that cannot meet this one, as for a newcomer that enters the usual
        loop at its top while the others go on from `update_topology`."""
        return self._call("are_peers_pending", lambda: self._inner.are_peers_pending(timeout=timeout))

    def update_topology(self, *, timeout: Timeout = DEFAULT) -> None:
        """Admits all who wait. PENDING_ASYNC_OPS while own ops are in flight; INVALID_USAGE if the other peers wait in
        calls that can never meet this one."""
        self._call("update_topology", lambda: self._inner.update_topology(timeout=timeout))

    def optimize_topology(self, *, timeout: Timeout = DEFAULT) -> None:
        """Measures what is not known of the links in each group, and adopts the ring whose slowest link is fastest; of
        several, the one with the least latency.

        What is younger than ten minutes is not measured again; so the first call takes about a second for each peer (of
        a large group a part of the links is measured, for half a minute at most), and later ones hardly any time. A
        link that cannot be measured is avoided. A measurement sends as much as the link carries for less than a second.
        Errors as `update_topology`."""
        self._call("optimize_topology", lambda: self._inner.optimize_topology(timeout=timeout))

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
        *,
        timeout: Timeout = DEFAULT,
    ) -> SharedStateSyncInfo:
        """Brings this peer group to one revision with bit-identical contents; which, is told in
        `pccl.protocol.election`. A joint call of the group. Only blocks that differ are sent. The tensors must not
        be changed meanwhile.

        NO_SHARED_STATE_AVAILABLE: nobody can provide it (the text says which tensors are partly overwritten, if any);
        INVALID_ARGUMENT: peers list different tensors; INVALID_USAGE: conflicting SEND_ONLY peers, or calls that can
        never meet; PENDING_ASYNC_OPS; INTERNAL_ERROR: a device that holds a tensor here has failed, and this peer has
        left the run.
        """
        return self._call(
            "sync_shared_state", lambda: self._inner.sync_shared_state(shared_state, strategy, timeout=timeout)
        )

    # Collectives.

    def all_reduce(
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
        """Reduces `send` over the peer group into `recv`, bit-identical on all peers; in place if `recv` is left out or
        is `send`. Ops of several peers meet by `tag`, any number in [0, 2**63); a tag can be used again and again.

        Both are contiguous NumPy arrays or torch tensors of one dtype and as many elements, and `send` has the same
        shape on all peers: (8,) is another one than (2, 4), and () than (1,). A separate `recv` may have any. Either
        the op succeeds on all peers that stay, or on none. On failure `send` is as it was; a separate `recv` is
        undefined.
        Tensors on CUDA devices go through host memory, in pieces if they are larger than 16 MiB: see
        `pccl.devices.staging`. Other peers may have theirs in memory. The result is the device's in the order of this
        thread's current CUDA stream.
        `algorithm` is chosen by size, world, quantization and, once optimize_topology has measured them, links where it
        is None; it must be the same on all peers.

        `step`, any number in [0, 2**63), is what the caller counts its calls by, the same on all peers, each of which
        gives one or none does. Ops of different steps do not go together, though their tags meet: both fail with
        INVALID_ARGUMENT, and the text shows the steps. So a peer that does not know whether the others have an op that
        failed here can call again: it cannot reduce its step with their next one.

        A peer that calls only after a loss has been settled reduces with whoever is left, so those who were told
        RANK_CONNECTION_LOST should call again: then all meet.

        RANK_CONNECTION_LOST: a peer was lost, try again; TOO_FEW_PEERS: alone in the group; INVALID_ARGUMENT: a wrong
        argument, or one that differs between peers; INVALID_USAGE: the tag is in flight already; INTERNAL_ERROR: a
        device failed on some peer, or does not take the result here, which the others have, and this peer has left.

        When `timeout` passes the op is aborted on all peers: TIMEOUT. If the master and the other peers leave it open
        for another five seconds whether it is, OUTCOME_UNKNOWN: they may have committed it, or will. Then its tag is in
        flight until they have said so (INVALID_USAGE), and reducing again could meet their next step: bring all to one
        state first (`sync_shared_state`), or tell steps apart by `step`. Whatever is raised, neither `send` nor `recv`
        is read or written any more, and `send` is as it was; only Ctrl-C may find the op committed, and leaves the
        result then. As with OUTCOME_UNKNOWN, it is `step` that keeps a repeated call from meeting the others' next one.
        """
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
        return info_of(self._run(spec, timeout, "all_reduce"), "all_reduce")

    def _run(self, spec: OpSpec, timeout: Timeout, func_name: str) -> PendingOp:
        """Launches an op and waits for its end, or has it aborted on all peers."""
        timeout_s = self._inner.timeout_s(timeout, func_name)
        session = self._inner.session(func_name)
        pending = session.ops.new(spec)
        try:
            with converting(func_name):
                if timeout_s is None or timeout_s > SHORT_S:
                    session.ops.launch_waiting(pending)
                else:
                    session.ops.launch(pending)
            if not pending.wait(timeout_s):
                session.ops.cancel(pending, Result.TIMEOUT, gave_up(session, timeout_s))
                pending.wait(CANCEL_GRACE_S)
                pending.reclaim()
        except PCCLError:
            raise
        except BaseException:
            _withdraw(session, [pending])
            raise
        finally:  # where signals have ended even that
            pending.reclaim()
        require_outcome(session, [pending], func_name)
        return pending

    def _collective(self, call: CallOf, timeout: Timeout, func_name: str) -> CollectiveInfo:
        made = call(self._inner.view(func_name), func_name)
        return made.info(self._run(made.spec, timeout, func_name), func_name)

    def launch_collective(self, call: CallOf, func_name: str) -> AsyncCollectiveHandle:
        return self._inner.launch_collective(call, func_name)

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
        """Launches an all_reduce and returns at once. Leave the arrays alone until the handle's `wait` returns.

        They are kept until then, also if you let go of them; an op whose handle is dropped goes on. With the
        communicator closed or garbage-collected its ops in flight end with NOT_INITIALIZED.

        Who is alone in the group gets TOO_FEW_PEERS here, and wrong arguments are refused here; the handle tells of all
        else, also of TOO_FEW_PEERS where the others have left since.
        """
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
        return self._inner.launch(spec, "all_reduce_async")

    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4, timeout: Timeout = DEFAULT
    ) -> ReduceInfo:
        """Runs all ops, at most `max_in_flight` at once, and again those that a loss aborted, until all are committed.
        Tags must differ and be the same set on all peers.

        Returns the summed byte counts and the smallest world size of any op. TOO_FEW_PEERS once this peer is alone.
        Other errors as `all_reduce`, of whichever op. Ops that were committed before an error stay so, and their arrays
        hold the results.
        """
        name = "all_reduce_multiple_with_retry"
        retry = Retry(descriptors, max_in_flight, name)
        limit_s = self._inner.timeout_s(timeout, name)
        end_s = deadline(limit_s)
        session = self._inner.session(name)
        try:
            while retry.has_more:
                for spec in retry.next_specs():
                    retry.launch(session, spec)
                left_s = None if limit_s is None else max(0.0, end_s - time.monotonic())
                PendingOp.wait_any(retry.in_flight, left_s)
                retry.collect(session, limit_s)
        except PCCLError as error:
            retry.abandon(session, limit_s)
            _await_verdicts(retry.in_flight, CANCEL_GRACE_S)
            for op in retry.in_flight:
                op.reclaim()
            if not (error.result is Result.TIMEOUT and retry.is_committed_after_all()):
                require_outcome(session, retry.in_flight, name, error)
                raise
        except BaseException:
            _withdraw(session, retry.in_flight)
            raise
        finally:
            for op in retry.in_flight:
                op.reclaim()
        return retry.info()


def _await_verdicts(ops: Sequence[PendingOp], grace_s: float) -> None:
    end_s = deadline(grace_s)
    for op in ops:
        op.wait(max(0.0, end_s - time.monotonic()))


def _withdraw(session: PeerSession, ops: Sequence[PendingOp]) -> None:
    """For a caller that was interrupted: has ops aborted on all peers, and their arrays back, whatever signals come."""
    try:
        for op in ops:
            session.ops.cancel(op, Result.TIMEOUT, gave_up(session, None))
        for op in ops:
            op.reclaim()
        _await_verdicts(ops, INTERRUPT_GRACE_S)
    finally:
        for op in ops:
            op.reclaim()
            session.ops.let_go(op)


def _close_forgotten(inner: AsyncCommunicator) -> None:
    """The communicator was garbage-collected, in whatever thread: leave without waiting."""
    if inner.begin_close():
        portal.current().start(inner.close)
