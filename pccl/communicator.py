"""The blocking communicator, which training loops use."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from _pccl_torch import outside_graphs
from pccl import _collectives, _timeouts
from pccl._arrays import Array, Movable
from pccl._collectives import CallOf, ReduceOpDescriptor
from pccl._options import CommunicatorOptions, holder_of
from pccl._session_holder import SessionErrors, close_forgotten, hide_frames
from pccl._timeouts import DEFAULT, Timeout
from pccl.errors import PCCLError, integer_argument, invalid
from pccl.handle import (
    CANCEL_GRACE_S,
    InfoOf,
    Launch,
    Retry,
    collective_info,
    gave_up,
    interrupted,
    reduce_info,
    require_outcome,
    wait_all,
)
from pccl.protocol.messages import FIGURE_CHARACTERS_MAX
from pccl.protocol.recording import Recording
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.driver import SessionError
from pccl.runtime.session.session import PeerSession
from pccl.runtime.threads import portal
from pccl.shared_state import SharedState
from pccl.types import (
    Attribute,
    CollectiveInfo,
    ErrorFeedback,
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
P = ParamSpec("P")

SHORT_S = 0.1
"""Timeouts up to this are enforced to the millisecond. Ops with a longer timeout, or none, may take the fast path."""
EXPLAIN_S = 0.5
"""After a timeout, a call spends at most this long finding out which peers it waited for."""
ENFORCE_POPULAR = SharedStateSyncStrategy.ENFORCE_POPULAR


class CommunicatorBase:
    """The constructor and the non-blocking methods that both communicators share."""

    _is_blocking: ClassVar[bool]

    def __init__(
        self,
        address: str | None = None,
        peer_group: int = 0,
        connections: int = 0,
        *,
        timeout: float | None = None,
        name: str | None = None,
        token: str | None = None,
        encrypt: bool | None = None,
        options: CommunicatorOptions | None = None,
        **old_names: Any,
    ) -> None:
        holder = holder_of(address, peer_group, connections, timeout, name, token, encrypt, options, old_names)
        self._inner = holder
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._before_leaving: dict[Hashable, Callable[[], object]] = {}
        """Functions to call when a `with` block ends without an exception, before closing. `close` drops them."""
        self.launch = Launch(holder, is_waited_in_thread=self._is_blocking)
        """The non-blocking collectives: each method launches an op and returns a handle at once."""
        self.all_reduce_async = self.launch.all_reduce
        """The reference library's name for `launch.all_reduce`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._inner.address}: {self._inner.standing}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute under its name from version 0.2: `all_gather_async` is `launch.all_gather`."""
            new_name = name.removesuffix("_async")
            if new_name != name and not new_name.startswith("_") and hasattr(Launch, new_name):
                return getattr(self.launch, new_name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _close_when_dropped(self) -> None:
        """Make the session leave the run when this object is garbage-collected or the interpreter exits."""
        portal.on_exit(self._inner)
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, close_forgotten, self._inner)
            self._finalizer.atexit = False

    def _begin_close(self) -> bool:
        """Refuse further calls. Return whether the session still has to be closed."""
        self._before_leaving.clear()
        if self._finalizer is not None:
            self._finalizer.detach()
        return self._inner.begin_close()

    @property
    def is_connected(self) -> bool:
        """Whether this peer is currently in a run."""
        return self._inner.is_connected

    @property
    def timeout(self) -> float | None:
        """The default timeout of calls, in seconds; None waits indefinitely. It can be assigned."""
        return self._inner.default_timeout_s

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._inner.default_timeout_s = _timeouts.checked_s(timeout, "timeout")

    @property
    def world_size(self) -> int:
        """The number of accepted peers in this peer group."""
        return self._inner.view("world_size").world_size

    @property
    def rank(self) -> int:
        """This peer's position in its group, in [0, world_size). It changes when peers come or go, and in
        `optimize_topology`. Until a peer is lost, it is the index of a copy that `pccl launch` has started."""
        return self.membership.rank

    @property
    def membership(self) -> Membership:
        """This peer's rank and the peers by rank, both from the same view."""
        view = self._inner.view("membership")
        return Membership(view.ring.index(view.peer), view.ring)

    @property
    def losses(self) -> dict[int, str]:
        """The last thousand peers that left or were lost since this peer was accepted, and why, oldest first."""
        return dict(self._inner.session("losses").losses)

    @property
    def stats(self) -> dict[str, int]:
        """Engine counters: payload bytes, bytes on the wire, bytes of scratch memory, open ops and connections."""
        with SessionErrors("stats"):
            return self._inner.session("stats").stats()

    def report(self, **figures: float) -> None:
        """Show figures such as `step=10, loss=0.7` in `pccl status`, on the run's page and in `/metrics`.

        A figure stays until it is reported again; `step` also shows the time per step. The training classes of
        `pccl.training` report their `step` (and SPSA its `loss`). While this peer is in no run, reports are dropped.

        Raises:
            PCCLError: INVALID_ARGUMENT if a figure is not a number, or its name is not printable or longer than 64
                characters. At most 16 figures are kept.
        """
        found = {}
        for name, value in figures.items():
            try:
                item = getattr(value, "item", None)  # float() of a torch tensor that requires grad is warned of
                found[name] = float(item() if callable(item) else value)
            except (TypeError, ValueError, OverflowError, RuntimeError):  # torch: a tensor of several elements
                raise invalid("report", f"{name} must be a number, not {type(value).__name__}") from None
            if len(name) > FIGURE_CHARACTERS_MAX or not name.isprintable():
                text = f"the name {name!r} is longer than {FIGURE_CHARACTERS_MAX} characters or not printable"
                raise invalid("report", text)
        session = self._inner._session
        if session is not None:
            session.note_figures(found)

    def flight_recorder(self, since_ns: int = 0) -> Recording:
        """Return a recording of this peer's most recent ops and their timing, its links, views and group calls.

        `pccl trace` draws all peers' recordings. A recording holds the most recent 4096 (or PCCL_FLIGHT_RECORDS) ops.

        Args:
            since_ns: Leave out ops that ended before this time on the monotonic clock (`time.monotonic_ns`).
        """
        since_ns = integer_argument("since_ns", since_ns, "flight_recorder", 0, 2**63 - 1)
        with SessionErrors("flight_recorder"):
            return self._inner.session("flight_recorder").recording(since_ns)

    def get_attribute(self, attribute: Attribute) -> int:
        """Return a fact about the installed view. The reference library has this instead of `world_size` etc."""
        view = self._inner.view("get_attribute")
        if attribute is Attribute.GLOBAL_WORLD_SIZE:
            return view.global_world_size
        if attribute is Attribute.LOCAL_WORLD_SIZE:
            return view.world_size
        if attribute is Attribute.NUM_DISTINCT_PEER_GROUPS:
            return len(view.group_sizes)
        if attribute is Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
            return max(view.group_sizes.values())
        raise invalid("get_attribute", f"{attribute!r} is not an Attribute")


@outside_graphs
class Communicator(CommunicatorBase):
    """A peer in a run. A `with` statement connects it on entry and leaves the run on exit.

    Peers of one `peer_group` reduce together and share state; membership and topology span all groups. Any method may
    be called from any thread, and ops with different tags may be in flight at once.

    Args:
        address: The master's "host:port", or several separated by commas. Default: PCCL_MASTER in the environment. The
            default port is 48148.
        peer_group: The number of this peer's group, in [0, 2**32).
        connections: TCP connections to each neighbour, at most 64. 0 starts with two and adds more where they help.
        timeout: The time limit of every blocking call except `close`, in seconds; None waits indefinitely.
        name: This peer's name in logs, errors and the status. Default: host name and process ID.
        token: The run's shared secret. Default: PCCL_TOKEN in the environment.
        encrypt: Whether peers encrypt traffic between them, which needs a token and OpenSSL 3. All peers must use the
            same value. Default: True if PCCL_ENCRYPT is 1.
        options: Rarely needed options. The fields of `CommunicatorOptions` are also accepted here as keywords.
    """

    _is_blocking = True

    # Life.

    def connect(self, n_attempts: int | None = None, *, timeout: Timeout = DEFAULT) -> None:
        """Join the run and return once this peer is accepted.

        The first peer of a run is accepted at once; later ones are accepted when the existing peers call `admit_peers`
        or `update_topology`. If no master answers, this retries once a second for five minutes or for `timeout`
        seconds. The timeout also bounds the wait for admission.

        Args:
            n_attempts: The maximum number of attempts. Their default time limit is 30 s, or 2 s each if longer.
            timeout: Seconds; None waits indefinitely.

        Raises:
            PCCLError: MASTER_CONNECTION_FAILED if no master answers or it refuses this peer; RANK_CONNECTION_FAILED if
                no link to another peer can be established; INVALID_USAGE if already connected; TIMEOUT.
        """
        return self._call("connect", lambda: self._inner.connect(n_attempts, timeout))

    def close(self, *, timeout: float | None = None, reason: str = "") -> None:
        """Leave the run. Ops in flight fail on this peer; the other peers treat this as the loss of a peer.

        This takes a few seconds at most. It may be called repeatedly, from any thread or a signal handler, even while
        other threads wait in calls, which then fail.

        Args:
            timeout: Seconds; None waits until closing is complete.
            reason: The reason to show in the other peers' errors.

        Raises:
            PCCLError: TIMEOUT if `timeout` seconds pass first; closing then continues in the background.
        """
        limit_s = _timeouts.checked_s(timeout, "close")
        if self._begin_close():
            try:
                portal.current().call(self._inner.close, reason, timeout_s=limit_s)
            except portal.PortalTimeoutError:
                raise PCCLError(Result.TIMEOUT, "close", f"not finished within {limit_s:g} s; it continues") from None
            except portal.PortalClosedError:
                return  # the interpreter is exiting, which closes the session

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

    # Group calls, which return once all accepted peers have made them.

    def admit_peers(
        self,
        state: SharedState | None = None,
        strategy: SharedStateSyncStrategy = ENFORCE_POPULAR,
        *,
        timeout: Timeout = DEFAULT,
    ) -> bool:
        """Admit waiting newcomers. Synchronize `state` if any were admitted or if it has not been synchronized yet.

        All peers call this at the top of each step. It calls `are_peers_pending` and, when needed, `update_topology`
        and `sync_shared_state`.

        Returns:
            Whether newcomers were admitted or the state was synchronized.

        Raises:
            PCCLError: the errors of `update_topology` and `sync_shared_state`.
        """
        return self._call("admit_peers", lambda: self._inner.admit_peers(state, strategy, timeout))

    def are_peers_pending(self, *, timeout: Timeout = DEFAULT) -> bool:
        """Return whether newcomers await admission. All peers get the same answer. The call may overlap with ops.

        It also returns False if the other peers are in a group call that cannot match this one.
        """
        return self._call("are_peers_pending", lambda: self._inner.are_peers_pending(timeout))

    def update_topology(self, *, timeout: Timeout = DEFAULT) -> None:
        """Admit all waiting newcomers. This is a group call: all peers must make it.

        Raises:
            PCCLError: PENDING_ASYNC_OPS while this peer has ops in flight; INVALID_USAGE if the other peers wait in
                calls that can never match this one.
        """
        return self._call("update_topology", lambda: self._inner.update_topology(timeout))

    def wait_for_peers(self, count: int, *, timeout: Timeout = DEFAULT) -> int:
        """Admit newcomers until the peer group has `count` peers, and return its size.

        Call it once after `connect` if the peers should start together. If the other peers have started without
        waiting, it returns early with a smaller number.

        Raises:
            PCCLError: TIMEOUT, after which it may be called again; PENDING_ASYNC_OPS while this peer has ops in flight.
        """
        return self._call("wait_for_peers", lambda: self._inner.wait_for_peers(count, timeout))

    def optimize_topology(self, *, timeout: Timeout = DEFAULT) -> None:
        """Adopt the ring with the fastest bottleneck link; ties go to the ring with the lowest latency.

        This is a group call: all peers must make it. It first measures links that were not measured in the last ten
        minutes, which takes about a second per peer and at most half a minute.

        Raises:
            PCCLError: the errors of `update_topology`.
        """
        return self._call("optimize_topology", lambda: self._inner.optimize_topology(timeout))

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = ENFORCE_POPULAR,
        *,
        timeout: Timeout = DEFAULT,
    ) -> SharedStateSyncInfo:
        """Give all peers in this group the same revision and bit-identical contents. This is a group call.

        The newest revision of the peers that have synchronized before wins (at first, of all peers), with the contents
        that most of them have. Tensors in `shared_state` that differ are overwritten.

        Returns:
            A `SharedStateSyncInfo` with the bytes that this peer moved and the revision that all peers now have.

        Raises:
            PCCLError: NO_SHARED_STATE_AVAILABLE if no peer can provide the state (the message lists tensors that are
                partly overwritten); INVALID_ARGUMENT if peers list different tensors; INVALID_USAGE if SEND_ONLY peers
                differ; PENDING_ASYNC_OPS while this peer has ops in flight; INTERNAL_ERROR if a device failed.
        """
        return self._call("sync_shared_state", lambda: self._inner.sync_shared_state(shared_state, strategy, timeout))

    # Collectives.

    def all_reduce(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        quantization: QuantizationOptions | None = None,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> ReduceInfo:
        """Reduce `send` over the peer group into `recv`, or in place, with bit-identical results on all peers.

        It succeeds on all surviving peers or on none. If it raises, `send` is unchanged ([more](collectives.md)).

        Args:
            send: A contiguous NumPy array, torch tensor or `jax.Array`, with the same dtype and shape on all peers.
            recv: An array of the same dtype and size on the same device. Without `recv`, a `jax.Array` is reduced into
                a new array, which is the result's `array`.
            op: SUM, AVG, PROD, MIN or MAX. AVG of integers rounds toward minus infinity.
            tag: A number in [0, 2**63) that matches the op across peers. Only one op at a time can use a tag.
            quantization: How elements are encoded for the network.
            algorithm: RING or DIRECT, the same on all peers; None lets pccl choose.
            step: The caller's step count, the same on all peers. Ops from different steps fail instead of matching.
            timeout: Seconds until the op is aborted on all peers; None waits indefinitely.
            feedback: Keeps the errors of the quantization and adds them to the next op; float32, SUM and AVG only.

        Raises:
            PCCLError: `PeerLostError` if a peer was lost (call again), `TooFewPeersError`, `MismatchError`,
                `OpTimeoutError`, `OutcomeUnknownError`, `UsageError`, `InternalError`.
        """
        quantization = quantization if quantization is not None else quantization_options
        how = (quantization, algorithm, step, operand_descriptor)
        spec = _collectives.all_reduce(send, recv, op, tag, *how, "all_reduce", feedback=feedback)
        return self._run(spec, timeout, "all_reduce", reduce_info)

    def all_gather(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Gather all peers' `send` arrays on every peer. Row r of the result comes from rank r.

        Args:
            send: An array with the same dtype and shape on all peers. It may be this rank's part of `recv`.
            recv: An array with world_size times as many elements as `send`. Without it, the result's
                `array` is a new one of shape (world_size, *send.shape).
        """
        return self._collective(_collectives.all_gather, timeout, send, recv, tag, algorithm, step)

    def reduce_scatter(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Reduce `send` over the peer group and give every peer its rank's part of the result.

        The flat array is split as by `numpy.array_split`. The results are bit-identical to those of an all_reduce.

        Args:
            send: An array with the same dtype and shape on all peers.
            recv: An array for this rank's part that does not overlap `send`. If it is left out, the result's `array`
                is a new flat array.
        """
        return self._collective(_collectives.reduce_scatter, timeout, send, recv, op, tag, algorithm, step)

    def broadcast(
        self,
        array: Movable,
        *,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Overwrite every peer's array with that of rank `root`.

        Args:
            array: An array with the same dtype and shape on all peers. On failure it is unchanged.
            root: A rank in the caller's view (`membership`). The op fails on all peers if they disagree which peer
                this is. If that peer has left, it fails with RANK_CONNECTION_LOST.
        """
        return self._collective(_collectives.broadcast, timeout, array, root, tag, algorithm, step)

    def reduce(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Reduce `send` over the peer group and give rank `root` the result, bit-identical to that of an all_reduce.

        Args:
            send: An array with the same dtype and shape on all peers.
            recv: The root's array for the result, which may be `send`. If it is left out, the root's result
                holds a new array.
            root: As in `broadcast`.
        """
        return self._collective(_collectives.reduce, timeout, send, recv, op, root, tag, algorithm, step)

    def all_to_all(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Send one part of `send` to each peer and receive one from each. Part r of the result comes from rank r.

        Args:
            send: An array whose rows (entries of the first dimension) make up the parts, in rank order.
            recv: An array for the result that does not overlap `send`. If it is left out, the result's `array` is new.
            send_counts: The number of rows for each rank. Leave out both counts if all parts have the same size.
            recv_counts: The number of rows from each rank.
        """
        return self._collective(_collectives.all_to_all, timeout, send, recv, send_counts, recv_counts, tag, step)

    def gather(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        root: int,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Gather all peers' `send` arrays on rank `root`. Like `all_gather`, but only the root gets the result."""
        return self._collective(_collectives.gather, timeout, send, recv, root, tag, step)

    def scatter(
        self,
        send: Movable | None,
        recv: Movable,
        *,
        root: int,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Write each rank's part of the root's `send` into that peer's `recv`.

        Args:
            send: On the root, an array of world_size parts, each as large as `recv`; other peers ignore it.
            recv: An array with the same dtype and shape on all peers. On the root, it may be the root's part of `send`.
        """
        return self._collective(_collectives.scatter, timeout, send, recv, root, tag, step)

    def send(
        self, array: Movable, *, dst: int, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT
    ) -> CollectiveInfo:
        """Send an array to rank `dst`, which calls `recv`, and return once it has arrived. No other peer takes part.

        Tags are in [0, 2**35). Each pair of peers has separate tags for each direction.
        """
        return self._collective(_collectives.send, timeout, array, dst, tag, step)

    def recv(
        self, array: Movable, *, src: int, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT
    ) -> CollectiveInfo:
        """Receive an array of the same dtype and shape from rank `src`, which calls `send`."""
        return self._collective(_collectives.recv, timeout, array, src, tag, step)

    def barrier(self, *, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT) -> CollectiveInfo:
        """Return once all peers in the group have called it."""
        return self._collective(_collectives.barrier, timeout, tag, step)

    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4, timeout: Timeout = DEFAULT
    ) -> ReduceInfo:
        """Run several all_reduces until all are committed, retrying those that the loss of a peer aborts.

        At most `max_in_flight` run at once. Tags must be distinct, and all peers must use the same set. Ops
        committed before an error remain committed.

        Returns:
            A `ReduceInfo` with the summed byte counts and the smallest world size of any op.
        """
        retry = Retry(self._inner, descriptors, max_in_flight, timeout)
        try:
            try:
                while retry.launch():
                    PendingOp.wait_any(retry.in_flight, retry.left_s)
                    retry.collect()
                return retry.info()
            except PCCLError as error:
                retry.cancel()
                wait_all(retry.in_flight, CANCEL_GRACE_S)
                for op in retry.in_flight:
                    op.reclaim()
                return retry.outcome(error)
        except PCCLError:
            raise
        except BaseException:
            interrupted(retry.session, retry.in_flight)
            raise

    # Waiting.

    def _call(self, func_name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the portal's trio run."""
        self._close_when_dropped()  # before the session exists, so that an interpreter exit always closes it
        with SessionErrors(func_name):
            return portal.current().call(call)

    def _collective(
        self, make: CallOf[P], timeout: Timeout, *arguments: P.args, **keywords: P.kwargs
    ) -> CollectiveInfo:
        name = make.__name__
        made = make(self._inner.view(name), name, *arguments, **keywords)
        return self._run(made.spec, timeout, name, partial(collective_info, made))

    def _run(self, spec: OpSpec, timeout: Timeout, func_name: str, info_of: InfoOf[T]) -> T:
        """Launch an op, wait until it ends, and return `info_of(op, func_name)`. Abort the op on all peers after the
        timeout or if the caller is interrupted."""
        holder = self._inner
        limit_s = holder.default_timeout_s if timeout is DEFAULT else holder.timeout_s(timeout, func_name)
        session = holder.session(func_name)
        op = session.ops.new(spec)
        try:
            if limit_s is None or limit_s > SHORT_S:
                session.ops.launch_waiting(op)
            else:
                session.ops.launch(op)
            if op.result is None and not op.wait(limit_s):
                reason = gave_up(session, limit_s, op, _whom(session, op, limit_s))
                session.ops.cancel(op, Result.TIMEOUT, reason)
                op.wait(CANCEL_GRACE_S)
                op.reclaim()
        except SessionError as error:  # the launch was refused
            raise PCCLError(error.result, func_name, error.message) from None
        except BaseException:
            interrupted(session, [op])
            raise
        if op.is_given_up or op.result is None:
            require_outcome(session, [op], func_name)
        try:
            return info_of(op, func_name)
        except PCCLError as error:
            hide_frames(error)
            raise


def _whom(session: PeerSession, op: PendingOp, limit_s: float | None) -> str:
    """Return the peers that a timed-out op waits for, from fresh counts, or "" if fetching these takes too long."""
    if limit_s is None or limit_s <= SHORT_S:
        return ""
    with suppress(portal.PortalTimeoutError, portal.PortalClosedError, portal.PortalBrokenError):
        return portal.current().call(session.counted_whom, op, timeout_s=EXPLAIN_S)
    return ""
