"""The arguments, their checks and the documentation of what both communicators have, stated once.

`Communicator` and `AsyncCommunicator` differ in how a call waits, and in nothing else. `CommunicatorMethods` has the
signatures, checks what it is given, and leaves the waiting to the methods that are abstract here.

A method that waits returns its result in the one and a coroutine with it in the other. So the class is generic: a
return type such as `ReduceInfoT` stands for `ReduceInfo` in `Communicator`, and for a coroutine of it in
`AsyncCommunicator`. `RESULTS` has what each of them stands for, and `own_methods` says so in the signatures.
"""

from __future__ import annotations

import os
import socket
import ssl
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from pccl import _timeouts, security
from pccl._arrays import Array
from pccl._collective_methods import CollectiveInfoT, Collectives
from pccl._collectives import AsyncCollectiveHandle, CallOf
from pccl._gathering import wait_for_peers
from pccl._reduce import AsyncReduceHandle, ReduceOpDescriptor, op_spec
from pccl._retry import Retry
from pccl._session_holder import SessionErrors, SessionHolder
from pccl._state_sync import sync_shared_state
from pccl._timeouts import DEFAULT, Timeout
from pccl.errors import PCCLError, integer_argument
from pccl.protocol.messages import Kind
from pccl.protocol.names import NAME_CHARACTERS_MAX, is_name
from pccl.protocol.recording import Recording
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.network import addresses
from pccl.runtime.session.options import SessionOptions
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
"""Connections that a link begins with. A single one would stand still with its first lost packet."""
CONNECTIONS_MAX = 64
UINT32_MAX = 2**32 - 1

NoneT = TypeVar("NoneT")
BoolT = TypeVar("BoolT")
IntT = TypeVar("IntT")
SyncInfoT = TypeVar("SyncInfoT")
ReduceInfoT = TypeVar("ReduceInfoT")
RESULTS = {
    "NoneT": None,
    "BoolT": bool,
    "IntT": int,
    "SyncInfoT": SharedStateSyncInfo,
    "ReduceInfoT": ReduceInfo,
    "CollectiveInfoT": CollectiveInfo,
}
"""The results of methods that wait, by the name of the type variable."""


def own_name() -> str:
    """Return what a peer of this process calls itself: the host's name and the process's number, and its place among
    the processes of a launcher, which begins the lines of its output with that."""
    index = os.environ.get("PCCL_LAUNCH_INDEX", "")
    return f"{socket.gethostname()}:{os.getpid()}" + (f" [{index}]" if index.isdigit() else "")


class CommunicatorMethods(
    Collectives[CollectiveInfoT], Generic[NoneT, BoolT, IntT, SyncInfoT, ReduceInfoT, CollectiveInfoT]
):
    """A peer of a run. See `Communicator` for the arguments."""

    def __init__(
        self,
        address: str | None = None,
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
        place: int | None = None,
    ) -> None:
        def check(is_fine: bool, message: str) -> None:
            if not is_fine:
                raise PCCLError(Result.INVALID_ARGUMENT, "Communicator", message)

        if address is None:
            address = os.environ.get("PCCL_MASTER", "")
            what = (
                "PCCL_MASTER is not set: `pccl launch` sets it; or set it, or give an address, to a master's host:port"
            )
            check(bool(address.strip()), what)
        listen = os.environ.get("PCCL_LISTEN") if listen is None else listen
        advertise = os.environ.get("PCCL_ADVERTISE") if advertise is None else advertise
        try:
            masters = addresses.parse_masters(address)
            listen_host, listen_port = addresses.parse(listen, default_port=0) if listen else ("", 0)
            hosts: tuple[str, ...] = ()
            port: int | None = None
            if advertise:
                host, parsed = addresses.parse(advertise, default_port=0)
                hosts, port = (host,), parsed or None
        except ValueError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "Communicator", str(error)) from None
        for what, text in (("name", name), ("site", site)):
            must = f"must be printable text of {NAME_CHARACTERS_MAX} characters at most"
            check(text is None or (isinstance(text, str) and is_name(text)), f"{what} {text!r}: {must}")
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
        place = -1 if place is None else integer_argument("place", place, "Communicator", 0, UINT32_MAX)
        secret = security.token(token, "Communicator")
        timeout_s = _timeouts.checked_s(timeout, "Communicator")
        options = SessionOptions(
            group=peer_group,
            connections=connections or CONNECTIONS_DEFAULT,
            may_grow=connections == 0,
            hosts=hosts,
            port=port,
            listen_host=listen_host,
            listen_port=listen_port,
            site=site,
            site_size=site_size,
            place=place,
            name=own_name() if name is None else name,
            token=secret,
            encrypt=security.encryption(encrypt, secret, "Communicator"),
            ssl_context=security.client_tls(ssl_context, "Communicator"),
            segment_bytes=segment_bytes,
            master_timeout_s=_timeouts.master_timeout_s(master_timeout, "Communicator"),
        )
        if not all(addresses.is_loopback(host) for host, _ in masters):
            # Whoever cannot reach the master is not told the run's name, without which peers refuse a connection.
            security.warn_if_exposed(listen_host, secret, stacklevel=2)
        self._inner = SessionHolder(address, masters, options, timeout_s)
        self._before_leaving: dict[Hashable, Callable[[], object]] = {}
        self._set_up()

    def _set_up(self) -> None:
        """Set up what else a kind of communicator consists of."""
        return

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._inner.address}: {self._inner.standing}>"

    # Each kind of communicator waits in its own way.

    @abstractmethod
    def _call(self, func_name: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine in the session's trio run."""

    @abstractmethod
    def _reduce(self, spec: OpSpec, timeout: Timeout, func_name: str) -> ReduceInfoT:
        """Run an all_reduce."""

    @abstractmethod
    def _run_retry(self, retry: Retry, timeout: Timeout, func_name: str) -> ReduceInfoT:
        """Run the ops of an all_reduce_multiple_with_retry."""

    # Life.

    def connect(self, n_attempts: int | None = None, *, timeout: Timeout = DEFAULT) -> NoneT:
        """Join the run, and return once accepted.

        The first peer of a run is accepted at once, others when those that are in it call `update_topology`. While no
        master answers, this tries once a second for five minutes, so that machines can be started in any order; it
        logs what it gets there after 2 s and then every 30 s. Once a master has answered, it waits for the peers of the
        run as long as they take. A `timeout`, given here or to the communicator, takes the place of the five minutes
        and bounds that wait as well; None bounds nothing.

        Args:
            n_attempts: How often to try at most; with no `timeout`, for no more than 30 s, or two for each attempt if
                that is more. A refusal, such as for a wrong token, or another service at that address, ends it at once
                in any case.
            timeout: Seconds.

        Raises:
            PCCLError: MASTER_CONNECTION_FAILED if there is no master at the address, or it refused this peer (the text
                says what was tried and how often, and what answers there instead); RANK_CONNECTION_FAILED if no link to
                another peer could be made; INVALID_USAGE if this communicator is connected already; TIMEOUT.
        """
        attempts = None if n_attempts is None else integer_argument("n_attempts", n_attempts, "connect")
        accepted: NoneT = self._call("connect", lambda: self._inner.connect(attempts, timeout))
        return accepted

    @property
    def address(self) -> str:
        """The addresses of masters that it was made with."""
        return self._inner.address

    @property
    def is_connected(self) -> bool:
        """Whether it takes part in a run now."""
        return self._inner.is_connected

    @property
    def timeout(self) -> float | None:
        """Seconds that a call has which is given no timeout of its own; None: as long as it takes. It may be set, and
        counts from the next call on.

        Raises:
            PCCLError: INVALID_ARGUMENT if what it is set to is no number.
        """
        return self._inner.default_timeout_s

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._inner.default_timeout_s = _timeouts.checked_s(timeout, "timeout")

    def before_leaving(self, key: Hashable, call: Callable[[], object]) -> None:
        """Have `call()` made at the end of a `with` block of this communicator, before it closes.

        It is made only if the block ends without an exception, and what it raises comes out of the block. A later call
        with the same `key` replaces it, and `close` forgets all. In an `async with` block it may be a coroutine
        function.
        """
        self._before_leaving[key] = call

    def get_attribute(self, attribute: Attribute) -> int:
        """Return a fact of the installed view. It never blocks.

        Raises:
            PCCLError: INVALID_ARGUMENT if `attribute` is no `Attribute`.
        """
        view = self._inner.view("get_attribute")
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
    def world_size(self) -> int:
        """The number of accepted peers of this peer group."""
        return self.get_attribute(Attribute.LOCAL_WORLD_SIZE)

    @property
    def membership(self) -> Membership:
        """This peer's rank, and which peer has each rank, in the installed view. It never blocks.

        Attributes that are asked for one after the other may be of different views; these are of one.
        """
        view = self._inner.view("membership")
        return Membership(view.ring.index(view.peer), view.ring)

    @property
    def losses(self) -> dict[int, str]:
        """The peers that have been lost or have left since this one was accepted, by number, each with the reason: the
        last thousand of them, oldest first."""
        return dict(self._inner.session("losses").losses)

    @property
    def stats(self) -> dict[str, int]:
        """Counters of the engine: bytes of payload and on the wire, bytes of scratch memory, open ops, connections."""
        with SessionErrors("stats"):
            return self._inner.session("stats").stats()

    def flight_recorder(self, since_ns: int = 0) -> Recording:
        """Return what this peer's last ops did when: launched, first and last byte, done, agreed; and what its links,
        views and joint calls did meanwhile. `pccl trace` draws it, for all peers at once.

        It holds the last 4096 ops (PCCL_FLIGHT_RECORDS in the environment), at a cost of less than 1 % of a small one.
        Takes some milliseconds, and no other peer.

        Args:
            since_ns: Leave out ops that were over by then, on the monotonic clock (`time.monotonic_ns`).

        Raises:
            PCCLError: NOT_INITIALIZED; INVALID_ARGUMENT if `since_ns` is no time.
        """
        since_ns = integer_argument("since_ns", since_ns, "flight_recorder", 0, 2**63 - 1)
        with SessionErrors("flight_recorder"):
            return self._inner.session("flight_recorder").recording(since_ns)

    # Joint calls: they return when all accepted peers have made them.

    def are_peers_pending(self, *, timeout: Timeout = DEFAULT) -> BoolT:
        """Return whether newcomers wait for `update_topology`: the same answer on all peers.

        A joint call of all peers, which may overlap with ops. It also returns False where the others are in a call that
        cannot meet this one, as for a newcomer that enters the usual loop at its top while the others go on from
        `update_topology`.
        """
        name = "are_peers_pending"

        async def are_pending() -> bool:
            return await self._inner.joint(name, Kind.ARE_PEERS_PENDING, timeout) > 0

        answer: BoolT = self._call(name, are_pending)
        return answer

    def update_topology(self, *, timeout: Timeout = DEFAULT) -> NoneT:
        """Admit all peers that wait. A joint call of all peers.

        Raises:
            PCCLError: PENDING_ASYNC_OPS while own ops are in flight; INVALID_USAGE if the other peers wait in calls
                that can never meet this one.
        """
        return self._change_topology("update_topology", Kind.UPDATE_TOPOLOGY, timeout)

    def wait_for_peers(self, count: int, *, timeout: Timeout = DEFAULT) -> IntT:
        """Admit newcomers until the peer group has `count` peers, and return how many it has.

        Call it once, after `connect`, where peers are to begin together. Newcomers may come in any order, and peers may
        call it at different moments; whoever is in the run makes joint calls meanwhile. Peers that have begun do not
        wait for another one: a peer that joins them later, or that has missed the moment in which there were enough,
        gets the number of those who are there, which may be below `count`. Nor does a peer group that is complete wait
        for another group: newcomers of that one come in once its peers call `update_topology`. It logs a WARNING when
        it has waited for long.

        Raises:
            PCCLError: TIMEOUT, after which it may be called again; PENDING_ASYNC_OPS while own ops are in flight;
                INVALID_ARGUMENT if `count` is below 1.
        """
        world_size: IntT = self._call(wait_for_peers.__name__, partial(wait_for_peers, self._inner, count, timeout))
        return world_size

    def optimize_topology(self, *, timeout: Timeout = DEFAULT) -> NoneT:
        """Adopt the ring whose slowest link is fastest; of several, the one with the least latency.

        A joint call of all peers. Links whose bandwidth is not known, or was measured more than ten minutes ago, are
        measured first. So the first call takes about a second for each peer (of a large group a part of the links is
        measured, for half a minute at most), and later ones hardly any time. A measurement sends as much as the link
        carries for less than a second. A link that cannot be measured is avoided.

        Raises:
            PCCLError: as `update_topology`.
        """
        return self._change_topology("optimize_topology", Kind.OPTIMIZE_TOPOLOGY, timeout)

    def _change_topology(self, func_name: str, kind: str, timeout: Timeout) -> NoneT:
        async def change() -> None:
            await self._inner.joint(func_name, kind, timeout)

        changed: NoneT = self._call(func_name, change)
        return changed

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
        *,
        timeout: Timeout = DEFAULT,
    ) -> SyncInfoT:
        """Bring this peer group to one revision with bit-identical contents.

        A joint call of the group. `pccl.protocol.master.state_sync` explains which revision and contents win. The
        tensors of `shared_state` are overwritten where they differ, in blocks; they must not be changed meanwhile.

        Returns:
            A `SharedStateSyncInfo`: the bytes moved here, and the revision that all peers now have.

        Raises:
            PCCLError: NO_SHARED_STATE_AVAILABLE if nobody can provide it (the text says which tensors are partly
                overwritten, if any); INVALID_ARGUMENT if peers list different tensors; INVALID_USAGE if SEND_ONLY peers
                contradict each other, or if the other peers wait in calls that can never meet this one;
                PENDING_ASYNC_OPS while own ops are in flight; INTERNAL_ERROR if a device that holds a tensor here has
                failed, and this peer has left the run.
        """
        name = "sync_shared_state"
        if not isinstance(strategy, SharedStateSyncStrategy):
            raise PCCLError(Result.INVALID_ARGUMENT, name, f"{strategy!r} is not a SharedStateSyncStrategy")
        given: Any = shared_state
        if not isinstance(given, SharedState):
            raise PCCLError(Result.INVALID_ARGUMENT, name, f"shared_state must be a SharedState, not {given!r}")
        info: SyncInfoT = self._call(name, partial(sync_shared_state, self._inner, shared_state, strategy, timeout))
        return info

    # Collectives.

    def all_reduce(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> ReduceInfoT:
        """Reduce `send` over the peer group into `recv`, with bit-identical results on all peers.

        Either the op succeeds on all peers that stay, or on none. On failure `send` is as it was, and a separate `recv`
        is undefined. A peer that calls only after a loss has been settled reduces with whoever is left, so peers that
        were told RANK_CONNECTION_LOST should call again: then all meet.

        Tensors on CUDA devices go through host memory, in pieces if they are larger than 16 MiB (see
        `pccl.devices.staging`); the result is on the device in the order of this thread's current CUDA stream. Other
        peers may have theirs in host memory.

        When `timeout` passes, the op is aborted on all peers: TIMEOUT. If neither the master nor the other peers have
        confirmed that within another five seconds, OUTCOME_UNKNOWN: they may have committed it, or still will. Then its
        tag stays in flight until they have answered (INVALID_USAGE), and reducing again could meet their next step:
        bring all peers to one state first (`sync_shared_state`), or tell steps apart by `step`.

        Whatever is raised, neither `send` nor `recv` is read or written any more, and `send` is as it was. Only Ctrl-C
        may find the op committed, and leaves the result then; there too it is `step` that keeps a repeated call from
        meeting the others' next one.

        Args:
            send: A contiguous NumPy array, torch tensor or `jax.Array` of any `DataType`. All peers give the same dtype
                and shape: (8,) differs from (2, 4), and () from (1,).
            recv: An array of the same dtype and number of elements on the same device, in any shape, which can be
                written into. The op is in place if it is left out or is `send`; but the result of a `jax.Array` is
                then in a new one, `array` of what is returned.
            op: SUM, AVG, PROD, MAX or MIN.
            tag: A number in [0, 2**63) by which the ops of several peers meet. It can be used again and again, but for
                one op at a time.
            operand_descriptor: The dtype of the arrays, which is checked against them.
            quantization_options: How elements are made smaller for the network; the same on all peers but for
                `stochastic` and `seed`.
            algorithm: The same on all peers. None chooses by size, world size, quantization and, once
                `optimize_topology` has measured them, links.
            step: A number in [0, 2**63) by which the caller counts its steps; either all peers give it or none. Ops of
                different steps never reduce together, though their tags meet: both fail with INVALID_ARGUMENT, and the
                text shows the steps. So a peer that does not know whether the others have an op that failed here can
                call again.
            timeout: Seconds, None to wait as long as it takes; the communicator's own if left out.

        Returns:
            A `ReduceInfo`: how many peers contributed, and the bytes sent and received.

        Raises:
            PCCLError: RANK_CONNECTION_LOST if a peer was lost (call again); TOO_FEW_PEERS if this peer is alone in the
                group; INVALID_ARGUMENT for a wrong argument, or one that differs between peers; INVALID_USAGE if the
                tag is in flight already; INTERNAL_ERROR if a device failed on some peer, or if the others have the
                result but the device here does not take it, and this peer has left the run; TIMEOUT; OUTCOME_UNKNOWN.
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
        return self._reduce(spec, timeout, "all_reduce")

    def all_reduce_async(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncReduceHandle:
        """Launch an all_reduce and return at once. Arguments as of `all_reduce`.

        Leave the arrays alone until the handle's `wait` returns. They are kept alive until then, also if you let go of
        them; an op whose handle is dropped goes on. When the communicator is closed or garbage-collected, its ops in
        flight end with NOT_INITIALIZED.

        Raises:
            PCCLError: INVALID_ARGUMENT for a wrong argument, and TOO_FEW_PEERS if this peer is alone in the group.
                Everything else is told by the handle, also TOO_FEW_PEERS if the others have left since.
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
    ) -> ReduceInfoT:
        """Run several all_reduces, and those that a loss aborted again, until all are committed.

        At most `max_in_flight` of them run at once. Their tags must differ, and be the same set on all peers. Ops that
        were committed before an error stay so, and their arrays hold the results.

        Returns:
            A `ReduceInfo`: the summed byte counts, and the smallest world size of any op.

        Raises:
            PCCLError: TOO_FEW_PEERS once this peer is alone in the group; other errors as `all_reduce`, of whichever op
                fails first.
        """
        name = "all_reduce_multiple_with_retry"
        return self._run_retry(Retry(descriptors, max_in_flight, name), timeout, name)

    def _launch_collective(self, call: CallOf, func_name: str) -> AsyncCollectiveHandle:
        """Launch a call for the method `func_name`."""
        return self._inner.launch_collective(call, func_name)
