"""The session of a connected peer: creates the parts defined in this package and runs them from Hello to the end.

Everything runs in the trio thread, except methods marked for any thread. The session ends with the machine's `Ended`;
the engine then returns the buffers of open ops, so that no caller gets a buffer back that is still in use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import trio

from pccl.logs import AboutLogger
from pccl.protocol import messages as m
from pccl.protocol.names import peer_named
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.group_calls import in_flight
from pccl.protocol.peer.machine import Peer
from pccl.protocol.peer.view import View
from pccl.protocol.recording import Recording
from pccl.protocol.wait_reasons import LongWait, how_to_look
from pccl.runtime.data_plane import op_records
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.data_plane.fast_path import FastPath
from pccl.runtime.data_plane.overlapped_waits import OverlappedWaits
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.network import addresses, datagrams
from pccl.runtime.network.addresses import Address, MasterAddresses
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, dial_control
from pccl.runtime.session.control import CallReasons, Control, Heartbeats
from pccl.runtime.session.driver import (
    Driver,
    Handlers,
    Lifetime,
    MasterConnection,
    SessionError,
    SessionOptions,
    Shared,
    loop_has_ended,
)
from pccl.runtime.session.links import Inbound, Outbound, Port
from pccl.runtime.session.ops import Ops
from pccl.runtime.session.recorder import Dumps, FlightRecorder, RecordingParts
from pccl.runtime.session.reports import LongWaits, WorkCounters, interval_s
from pccl.runtime.session.state_sync import GroupCalls, StateSync
from pccl.runtime.state.transfer import Transfer
from pccl.types import Result

logger = logging.getLogger("pccl.peer")

ENGINE_DRAIN_S = 5.0
FAREWELL_S = 1.0
COUNTING_S = 0.02
"""Time limit for the engine to report the links' counters."""
LEFT = "left"
"""The reason for a loss if the peer closed its communicator."""
NAMED_MAX = 8
LOSSES_MAX = 1000
"""Maximum number of lost peers that are remembered with the reason."""


class PeerSession:
    """The session of a connected peer. Created by `open_session`; `run` must be running."""

    def __init__(
        self,
        connection: ControlConnection[m.MasterMessage],
        port: Port,
        engine: Engine,
        options: SessionOptions,
        masters: MasterAddresses,
        address: Address,
        seek_s: float,
    ) -> None:
        """`connection` leads to `address`, one of the `masters`. The master's certificate must name its host. A session
        that is not in a run yet searches for a master for `seek_s` or `options.master_timeout_s`, whichever is
        longer."""
        self.view: View | None = None
        """The installed view. It is replaced as a whole, so any thread may read it."""
        self.losses: dict[int, str] = {}
        """The most recent LOSSES_MAX peers removed from the view since this peer was accepted, with reasons, oldest
        first. Any thread may copy it."""
        self.left_out_by: dict[int, int] = {}
        """For each peer in `losses`, the number of the first view without it."""
        self.is_forgotten = False
        """Whether this session belongs to this process's parent."""
        self.installed = trio.Event()
        """Set when the first view is installed or can no longer be installed."""
        self._options = options
        self._port = port
        self._engine = engine
        self._machine = machine = Peer(options.group, options.connections, options.may_grow, outlives_masters=True)
        machine.site, machine.site_size = options.site, options.site_size
        machine.links.may_use_udp = datagrams.is_available()
        machine.master_loss_level = "info" if options.is_quiet else "warning"
        self._master = master = MasterConnection(connection, address)
        self._logger = about = AboutLogger(logger, self._about)
        self._lifetime = lifetime = Lifetime(about, lambda text: master.send([m.Leave(text)]))
        self.over = lifetime.over
        self._counters = counters = WorkCounters()
        self._fast_path = FastPath(machine, engine)
        self.overlapped_waits = OverlappedWaits(self._fast_path.in_ops_ns)
        table: dict[int, PendingOp] = {}
        self._recorder = recorder = FlightRecorder(options, machine, table, engine.records)
        self._dumps = Dumps(recorder, about)
        self.ops = Ops(self, lifetime, engine, self._fast_path, counters, recorder, table)
        """This session's ops, for any thread."""
        self._driver = driver = Driver(machine, self._fast_path, lifetime, self.ops.hear, master.send)
        self.ops.driver = driver
        shared = Shared(options, about, master, port.number, engine, lifetime, driver, counters)
        self._calls = GroupCalls(shared)
        self._outbound = Outbound(shared)
        self._state_sync = StateSync(shared, self._calls, self._outbound.dial)
        self._heartbeats = Heartbeats(shared)
        parts = RecordingParts(shared, recorder.recording)
        self._control = control = Control(shared, masters, self._heartbeats, parts, seek_s)
        self._inbound = Inbound(shared, port, self._outbound, self._state_sync, control.until_master_speaks)
        masters_named = ",".join(addresses.join(*each) for each in masters.addresses)
        self._long_waits = LongWaits(counters, about, machine.name_of, masters_named)
        self._search: LongWait | None = None
        self._led_at = float("-inf")
        self._where = how_to_look(masters_named)
        self.call_reasons = CallReasons(shared, control, lambda: self.view.global_world_size if self.view else 1)
        own: Handlers = {
            ps.StartEngine: self._start_engine,
            ps.KeepHeartbeats: self._welcomed,
            ps.Installed: self._installed,
            ps.Ended: self._end,
        }
        for part in (self.ops, self._calls, self._outbound, self._state_sync, control):
            driver.carry_out(recorder.noting(part.handlers))
        driver.carry_out(recorder.noting(own))
        self._abandoning = threading.RLock()
        self._lifetime.at_end(lambda _: self.installed.set())

    # Called by the public layer.

    @property
    def failure(self) -> SessionError | None:
        """The reason for the session's end, if it is over."""
        return self._lifetime.failure

    async def group_call(self, kind: str) -> int:
        """Make a group call, like `GroupCalls.make`."""
        with self._recorder.call(kind):
            return await self._calls.make(kind)

    def require_no_ops(self) -> None:
        """Raise SessionError PENDING_ASYNC_OPS if ops are in flight, like a group call that allows none. Only for the
        trio thread."""
        tags: list[int] = []
        with self._lifetime.contain, self._driver.taking_over as machine:
            tags = machine.ops.tags
        if tags:
            raise SessionError(Result.PENDING_ASYNC_OPS, in_flight(tags))

    async def sync(self, strategy: str, revision: int, transfer: Transfer) -> int:
        """Bring the shared state to the elected content, like `StateSync.sync`."""
        with self._recorder.call(m.Kind.SYNC):
            return await self._state_sync.sync(strategy, revision, transfer)

    def store_failed(self, reason: str) -> SessionError:
        """Leave the run because a store failed, like `StateSync.store_failed`."""
        return self._state_sync.store_failed(reason)

    async def close(self, reason: str = "") -> None:
        """Leave the run and wait until the session is over. The other peers get the `reason`."""
        if self.is_forgotten or self.over.is_set():
            return
        with self._lifetime.contain:
            self._report()
            with self._driver.taking_over as machine:
                machine.leave(reason[: m.REASON_CHARACTERS_MAX])
        await self.over.wait()

    def forget_after_fork(self) -> None:
        """Release everything in a forked child, without sending any message."""
        self.is_forgotten = True
        failure = self._lifetime.failure = SessionError(
            Result.NOT_INITIALIZED, "this communicator belongs to the parent process; create a new one after fork"
        )
        self._engine.forget_after_fork()
        self._heartbeats.forget_after_fork()
        self._master.connection.forget_after_fork()
        self._port.listener.close()
        for op in self.ops.in_flight:
            op.forget_after_fork(ps.OpResult(op.op, failure.result, failure.message, 0))

    @property
    def hears_master(self) -> bool:
        """Whether a master leads this peer. Thread-safe."""
        return self._machine.is_led

    @property
    def has_had_ops(self) -> bool:
        return self._counters.has_ops

    @property
    def is_unheard(self) -> bool:
        """Whether the connection broke before a master had answered, so that another session may succeed."""
        return self._control.is_cut_off and self.view is None

    async def until_answered(self) -> None:
        """Wait until a master has answered or the session is over."""
        await self._control.answered.wait()

    @property
    def master_address(self) -> str:
        """The address of the current master."""
        return addresses.join(*self._master.address)

    @property
    def obstacle(self) -> str:
        """Why no master admits this peer at the moment; empty if only other peers delay it."""
        machine = self._machine
        return machine.obstacle or ("" if machine.run else self._control.account())

    def named(self, peer: int) -> str:
        """Return a peer's name for use in a sentence. Thread-safe."""
        return peer_named(peer, self._options.name if peer == self._machine.peer else self._machine.name_of(peer))

    def whom(self, op: PendingOp) -> str:
        """Return a description of the peers that an op waits for, based on the latest counters. Thread-safe."""
        pair, view = op.name[1], self.view
        others = op.ring or (view.ring if view is not None else ())
        return self._long_waits.whom(
            None if pair is None else (pair.peer, pair.is_sender),
            [peer for peer in others if peer != self._machine.peer],
            op_records.awaited(self._engine.records(time.monotonic_ns()), op.epoch, op.tag, op.ring),
        )

    async def counted_whom(self, op: PendingOp) -> str:
        """Do the same as `whom`, but fetch new counters first."""
        if self._lifetime.failure is not None:
            return self.whom(op)
        with suppress(MemoryError):
            for link in self._counters.links:
                self._engine.count_link(link)
        await trio.sleep(COUNTING_S)
        if self._lifetime.failure is None:
            with self._lifetime.contain, self._driver.hearing:
                pass
        return self.whom(op)

    def recording(self, since_ns: int) -> Recording:
        """Return the flight recorder's contents, like `FlightRecorder.recording`. Thread-safe."""
        self._lifetime.require_alive()
        return self._recorder.recording(since_ns=since_ns)

    def note_figures(self, figures: Mapping[str, float]) -> None:
        """Send these figures with the next reports to the master. Thread-safe."""
        self._counters.note_figures(figures, time.monotonic())

    def stats(self) -> dict[str, int]:
        self._lifetime.require_alive()
        return self._engine.stats()

    def _about(self) -> dict[str, object]:
        """Return the attributes for this session's log lines."""
        view, machine = self.view, self._machine
        known = {"run": machine.run, "view": view.view if view is not None else 0, "group": self._options.group}
        return {**known, "peer": machine.peer} if machine.peer else {"group": self._options.group}

    # Running.

    async def run(self) -> None:
        """Run the session from Hello to the end. Only trio.Cancelled may be raised."""
        try:
            with self._lifetime.contain:
                await self._run()
        finally:
            self._lifetime.fail(Result.NOT_INITIALIZED, "this communicator was closed")
            self._release()

    async def _run(self) -> None:
        lifetime, control = self._lifetime, self._control
        async with trio.open_nursery() as senders:
            control.senders = senders
            async with trio.open_nursery() as nursery:
                lifetime.nursery = nursery
                clock, reports = self._driver.watch_clock, self._keep_reporting
                for task in (control.follow_masters, self._inbound.accept, clock, reports, self._dumps.watch):
                    lifetime.start(nursery, task)
                await lifetime.ended.wait()
                if (failure := lifetime.failure) is not None:
                    await self._dumps.last("" if failure.result is Result.NOT_INITIALIZED else failure.message)
                if not lifetime.is_broken:
                    with trio.move_on_after(ENGINE_DRAIN_S):
                        await self._driver.drained.wait()
                    with trio.move_on_after(FAREWELL_S):
                        await control.attached.wait()
                nursery.cancel_scope.cancel()
            await self._master.part(FAREWELL_S, is_heard=self.hears_master and not lifetime.is_broken)
            senders.cancel_scope.cancel()

    def abandon(self, error: BaseException) -> None:
        """End the session, all calls and all ops, because its trio run has ended or cannot be woken. Any thread may
        call this, also repeatedly."""
        with self._abandoning:
            with suppress(Exception):  # raised by trio, because its run is not available
                self._lifetime.fail(Result.INTERNAL_ERROR, loop_has_ended(error))
            self._lifetime.is_broken = True
            with suppress(Exception):
                self._fast_path.close()
            with suppress(Exception):
                self._engine.close()
            self._end_all()

    def _release(self) -> None:
        """Free the remaining resources after the end of all tasks. All steps are executed even if one fails. Callers
        get their results after the engine has restored their buffers."""
        with self._lifetime.contain, ExitStack() as last:
            last.callback(self.over.set)
            last.callback(self._end_all)
            last.callback(self._dumps.close)
            last.callback(self._engine.close)
            last.callback(self.ops.hear_last)
            last.callback(self._fast_path.close)
            last.callback(self._port.release)
            last.callback(self._master.connection.close)

    def _end_all(self) -> None:
        """End all ops in flight. Ops are in flight here only after an internal error or at the end of the trio run.
        Committed ops have their results: they waited only for a view or for the engine, which is closed now."""
        failure = self._lifetime.failure
        assert failure is not None
        self.ops.end_all(failure)

    def _start_engine(self, machine: Peer, effect: ps.StartEngine) -> None:
        try:
            self._engine.divide(effect.threads)
        except OSError as error:
            machine.fail(f"cannot start {effect.threads} engine threads: {error}")
            return
        self._fast_path.attach()
        for event_fd in self._engine.event_fds:
            self._lifetime.spawn(self._read_engine, event_fd)

    def _welcomed(self, machine: Peer, effect: ps.KeepHeartbeats) -> None:
        self._control.welcomed(effect.timeout_s)
        self._engine.set_link_timeout(machine.links.timeout_s)

    async def _read_engine(self, event_fd: int) -> None:
        while True:
            await trio.lowlevel.wait_readable(event_fd)
            with self._driver.hearing:
                pass

    async def _keep_reporting(self) -> None:
        """Report this peer's work to the master and log long waits."""
        await self.installed.wait()
        while self.view is not None and not self._lifetime.is_broken:
            self._report()
            await self._look_at_waits()
            counting_s = min(COUNTING_S, interval_s(self.view.global_world_size))
            await trio.sleep(interval_s(self.view.global_world_size) - counting_s)
            with suppress(MemoryError):
                for link in self._counters.links:
                    self._engine.count_link(link)
            await trio.sleep(counting_s)

    async def _look_at_waits(self) -> None:
        """Log long waits. Without a master, ops may wait for it, whatever the counters of links show."""
        now = trio.current_time()
        group_wait_s = self._stats()["op_wait_us"] / 1e6
        single = self._machine.ops.single_waits()
        if self._machine.is_led:
            search, self._search = self._search, None
            if search is not None:
                self._led_at = now
                if search.is_told:
                    self._logger.warning("a master leads the run again, after %.1f s", now - search.since)
            group_wait_s = min(group_wait_s, now - self._led_at)  # a wait for the master is not a wait for peers
            self._long_waits.look(now, group_wait_s, lambda: self._machine.ops.tags, single)
        elif group_wait_s or single:
            self._search = self._search or LongWait("an op", now)
            if self._search.is_due(now):
                whom = await self.call_reasons.of_admission()
                self._logger.warning("%s", self._search.warning(trio.current_time(), whom, self._where))

    def _stats(self) -> dict[str, int]:
        """Return the engine's counters, including waits through handles."""
        return self.overlapped_waits.added_to(self._engine.stats())

    def _report(self) -> None:
        if not self._machine.is_led:
            return
        with self._driver.hearing as machine:
            report = self._counters.report(self._stats(), machine.term, trio.current_time())
            if report is not None:
                machine.report(report)

    def _installed(self, _: Peer, effect: ps.Installed) -> None:
        view, former = effect.view, self.view
        for peer, reason in effect.lost:
            self.left_out_by[peer] = view.view
            self.losses[peer] = reason
            is_normal = reason == LEFT
            if self._options.is_quiet:
                is_normal = any(each.startswith(LEFT) for each in self.losses.values())  # the group is at its end
            level = logging.INFO if is_normal else logging.WARNING
            what = f"{self.named(peer)} was lost: {reason}"
            left = f"{view.world_size} of its group remain{'s' if view.world_size == 1 else ''}"
            self._logger.log(level, "%s; %s", what, left, extra={"other": peer})
            self._state_sync.lost(peer, reason)
        for oldest in list(self.losses)[:-LOSSES_MAX]:
            del self.losses[oldest], self.left_out_by[oldest]
        if former is not None and (new := [peer for peer in view.ring if peer not in former.ring]):
            names = ", ".join(map(self.named, new[:NAMED_MAX])) + (", ..." if len(new) > NAMED_MAX else "")
            level = logging.WARNING if self.has_had_ops else logging.INFO  # INFO: the run is still gathering its peers
            self._logger.log(level, "%s joined; the group has %d peers", names, view.world_size)
        self.view = view
        self._logger.info("view %d: peer %d of group %d, ring %s", view.view, view.peer, view.group, list(view.ring))
        self.installed.set()

    def _end(self, _: Peer, effect: ps.Ended) -> None:
        self._logger.info("session over: %s", effect.reason)
        self._lifetime.fail(effect.code, effect.reason)


async def open_session(
    masters: Sequence[Address], options: SessionOptions, dial_s: float = float("inf"), seek_s: float = 0.0
) -> PeerSession:
    """Connect to a master and create a session, whose `run` the caller must start. Addresses that do not answer within
    `dial_s` are skipped. `seek_s` is passed to the session. A SessionError names the addresses."""
    search = MasterAddresses(masters)
    connection: ControlConnection[m.MasterMessage] | None = None
    while connection is None:
        address = search.next(0.0).address
        try:
            connection = await dial_control(*address, m.MasterMessage, options.system.dial, dial_s)
        except ConnectionLost as error:
            search.failed(address, str(error))
            if not search.are_all_asked:
                continue
            where = ", ".join(addresses.join(*each) for each in masters)
            why = str(error) if len(masters) == 1 else search.failures()
            raise SessionError(
                Result.MASTER_CONNECTION_FAILED,
                f"cannot reach a master at {where}: {why}; is the address right, is `pccl master` running there, and "
                f"is the port open?",
            ) from None
    with ExitStack() as undo:
        undo.callback(connection.close)
        try:
            port = Port.hold(options.system, options.listen_host, options.listen_port)
        except OSError as error:
            raise SessionError(Result.INVALID_ARGUMENT, str(error.strerror)) from None
        undo.callback(port.release)
        try:
            engine = options.new_engine(options.group, options.segment_bytes, options.force_poll)
        except OSError as error:
            raise SessionError(Result.INTERNAL_ERROR, str(error)) from None
        undo.callback(engine.close)
        session = PeerSession(connection, port, engine, options, search, address, seek_s)
        undo.pop_all()
    return session
