"""Runs a master over TCP. Each control connection has a reading and a sending task; one task watches the clock.

A connection's first message makes it a session's control connection, a heartbeat connection, or a request
(`requests`). If a control connection breaks, another one may continue its session (`codec.ControlSession`); the machine
knows both by the same number. Heartbeat connections belong to the heartbeat thread, which reports silent ones.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError
from pccl.protocol.codec import (
    KEY_BYTES,
    OPENING_BYTES_MAX,
    ControlSession,
    FrameCache,
    ProtocolError,
    decode_body,
    encode,
    harmless,
)
from pccl.protocol.failover.bootstrap import Start, hold_beside_s, hold_s
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.liveness import QUIET_SHARE
from pccl.protocol.master.run_state import Close, Effect, FindRings, MasterLog, MasterOptions, Send, TakeHeartbeats
from pccl.protocol.wait_reasons import LongWait, how_to_look
from pccl.runtime.master.durable_state import DurableEffects, StateDirectory
from pccl.runtime.master.requests import Checking, StatusBoard, Traceable, Tracing
from pccl.runtime.master.ring_search import best_ring
from pccl.runtime.network import addresses, handshake
from pccl.runtime.network.accepting import LogLimiter, Unauthenticated, accept_connections
from pccl.runtime.network.addresses import Address
from pccl.runtime.network.clients import NoAnswer, ask
from pccl.runtime.network.dialing import Dial, dial_tcp
from pccl.runtime.network.heartbeat import HEARTBEAT_INTERVAL_S_MAX, HEARTBEATS_PER_TIMEOUT, Silent
from pccl.runtime.network.system import SYSTEM, System
from pccl.runtime.network.tls import TlsEnd, TlsError
from pccl.runtime.network.wire import ConnectionLost, ControlConnection
from pccl.runtime.threads.process import clock_name
from pccl.types import Result

Opening = m.FromPeer | m.FromOperator | m.Reattach
DIALERS = m.Hello | m.Resume | m.Reattach | m.HeartbeatHello | m.FromOperator
"""First messages of connections to a master."""


class Authentication:
    def __init__(self, token: str, ssl_context: ssl.SSLContext | None, run: Callable[[], str]) -> None:
        """Require the `token` if it is not empty, and TLS if `ssl_context` is given. `run` returns the current run."""
        self.unauthenticated = Unauthenticated()
        self._token = token
        self._ssl_context = ssl_context
        self._run = run

    async def first_message(self, connection: ControlConnection[m.PeerMessage], host: str) -> Opening:
        """Authenticate the sender of a connection from `host` and return its first message. Raises
        ConnectionLost, TlsError, AuthError or ProtocolError."""
        with trio.CancelScope() as scope:
            number = self.unauthenticated.enter(host, scope.cancel)
            try:
                is_private = await self._agree_on_tls(connection)
                body = await connection.receive_body()
                opening: Opening = decode_body(body, Opening)
                if isinstance(opening, DIALERS):
                    self._check_tls(opening, is_private)
                    await handshake.accept(connection, self._token, self._run(), "the master", opening, body)
                    connection.trust()
                return opening
            finally:
                self.unauthenticated.leave(number)
        raise ConnectionLost("dropped: too many unauthenticated connections")

    async def _agree_on_tls(self, connection: ControlConnection[m.PeerMessage]) -> bool:
        if not await connection.speaks_tls():
            return False
        if self._ssl_context is None:
            raise AuthError("it speaks TLS, but this master has no certificate")
        await connection.start_tls(TlsEnd(self._ssl_context))
        return True

    def _check_tls(self, opening: Opening, is_private: bool) -> None:
        if not isinstance(opening, m.HeartbeatHello) and self._ssl_context is not None and not is_private:
            raise AuthError("the master asks for TLS; give the peer an ssl_context= or PCCL_TLS_CA")
        if isinstance(opening, m.HeartbeatHello) and is_private:
            raise AuthError("heartbeat connections do not use TLS")  # the heartbeat thread does not support it


logger = logging.getLogger("pccl.master")

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
LOG_CHARACTERS_MAX = 4000
CLOSE_S = 2.0
"""Time limit for sending a closed connection's backlog."""
LIFE_SHARE = 0.1
"""Interval, in peer timeouts, at which this process checks that it has not been suspended."""
WATCH_SHARE = 0.5
"""Interval, in peer timeouts, of a standby's requests to the other masters."""
SECRET_BYTES = 16
STRAGGLERS_S = 0.25
"""Interval of the search for stragglers."""
SILENT_INTERVALS = 2.5
"""Number of heartbeat intervals without a heartbeat after which a peer is reported as silent."""
STATUS_READERS_MAX = 16
"""Maximum number of connections that receive the status at the same time."""


@dataclass(eq=False)
class _Client:
    number: int
    """The number by which the machine knows the client; it belongs to the session."""
    connection: ControlConnection[m.PeerMessage]
    reading: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_for_heartbeats: bool = False


class MasterServer:
    """A master of one run on one listening socket. `serve` runs until cancelled."""

    def __init__(
        self,
        listener: socket.socket,
        options: MasterOptions | None = None,
        token: str = "",
        ssl_context: ssl.SSLContext | None = None,
        start: Start = Start.NEW,
        standby_of: Sequence[Address] = (),
        client_context: ssl.SSLContext | None = None,
        state: StateDirectory | None = None,
        system: System = SYSTEM,
    ) -> None:
        """Take the arguments of `MasterNode`. `client_context` is used for TLS to the other masters. The server closes
        `state`. Raises OSError if the `system` cannot start a thread."""
        self._listener = listener
        self._token = token
        self._client_context = client_context
        self._options = options or MasterOptions()
        self._state = state
        self._start = start
        record = state.record if state is not None and start is not Start.NEW else None
        idle_s = state.idle_s if state is not None else 0.0
        self._hold_s = hold_s(start, self._options, record, state is not None, idle_s)
        self._hold_beside_s = hold_beside_s(start, self._options)
        self._machine = Failover(
            secrets.token_hex(8),
            self._options,
            is_standby=bool(standby_of),
            secret=secrets.token_bytes(SECRET_BYTES),
            record=record,
            persists=state is not None,
        )
        self._standby_of = standby_of
        self._system = system
        self._lived_at = 0.0
        self._clients: dict[int, _Client] = {}
        """The clients that the machine knows. A client without a connection is kept while its session may continue."""
        self._sessions: dict[bytes, int] = {}
        self.board = StatusBoard(self._machine, trio.current_time)
        self._status_readers = 0
        self._tracing = Tracing(self._send_to)
        self._checking = Checking(bool(token), system)
        self._authentication = Authentication(token, ssl_context, lambda: self._machine.run)
        self._effects = DurableEffects(state, self._perform, system)
        self._limited_log = LogLimiter(logger, trio.current_time)
        self._heartbeat_thread = system.heartbeats(self._options.peer_timeout_s)
        self._searcher = system.helper("pccl-search")
        self._heartbeat_connections: set[int] = set()
        self._next_connection = 1
        self._timer_changed = trio.Event()
        self._nursery: trio.Nursery | None = None

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def forget_after_fork(self) -> None:
        """Close a forked child's copies of the sockets, so that peers still notice when the parent dies."""
        self._listener.close()
        self._heartbeat_thread.forget_after_fork()
        self._effects.forget_after_fork()
        for client in self._clients.values():
            client.connection.forget_after_fork()

    async def serve(self) -> None:
        host = addresses.plain_host(self._listener.getsockname())
        is_any = host in ("0.0.0.0", "::")
        self.board.begin(addresses.join(socket.gethostname() if is_any else host, self.port), bool(self._token))
        self._lived_at = trio.current_time()
        self._log_state()
        self._execute(self._machine.begin(self._lived_at, self._hold_s, self._hold_beside_s))
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = self._effects.nursery = nursery
                nursery.start_soon(self._watch_clock)
                nursery.start_soon(self._keep_alive)
                nursery.start_soon(self._heartbeat_thread.keep_progress)
                if self._standby_of:
                    nursery.start_soon(self._watch_others)
                nursery.start_soon(self._effects.keep_touching)
                nursery.start_soon(self._watch_heartbeats)
                nursery.start_soon(self._name_stragglers)
                await accept_connections(
                    self._listener,
                    self._authentication.unauthenticated,
                    lambda sock, address: nursery.start_soon(self._serve_connection, sock, address),
                    logger,
                )
        finally:
            self._listener.close()
            self._heartbeat_thread.close()
            self._searcher.close()
            self._effects.close()

    def _log_state(self) -> None:
        if self._state is None:
            logger.info(
                "no state directory: after a restart this master continues a run only with all peers of its last view, "
                "and a second master at this address would not be noticed. Use --state DIR"
            )
        elif self._start is Start.NEW and self._state.record is not None and not self._state.record.is_over:
            text = "started with --start new: discarding the run recorded in %s: %s"
            level = logging.INFO if self._state.is_optional else logging.WARNING
            logger.log(level, text, self._state.directory, self._state.record)
        else:
            logger.info("this master keeps its durable state in %s", self._state.directory)

    async def _serve_connection(self, sock: socket.socket, sockaddr: tuple[str, int]) -> None:
        number = self._next_connection
        self._next_connection += 1
        try:
            connection: ControlConnection[m.PeerMessage] = ControlConnection(sock, m.PeerMessage, OPENING_BYTES_MAX)
            connection.bound_silence(self._options.peer_timeout_s)
        except OSError:
            sock.close()
            return
        client = self._clients[number] = _Client(number, connection)
        host = addresses.plain_host(sockaddr)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.run_sender)
                self._execute(self._machine.connected(number, host, self._alive_now()))
                reason: str | None = "closed by the master"
                with client.reading:
                    reason = await self._read(client, host, sockaddr[1])
                if reason is None:
                    self._forget(client)
                    nursery.cancel_scope.cancel()
                elif self._clients.get(client.number) is client:
                    logger.debug("%s: %s", addresses.join(host, sockaddr[1]), reason)
                    self._lost(client, reason)
                connection.finish()
                nursery.cancel_scope.deadline = trio.current_time() + CLOSE_S
        finally:
            if connection.session is None:
                self._forget(client)
            connection.close()

    def _lost(self, client: _Client, reason: str) -> None:
        if client.connection.session is not None:
            self._note_quiet()
            self._execute(self._machine.detached(client.number, reason, self._alive_now()))
        else:
            self._forget(client)
            self._execute(self._machine.disconnected(client.number, reason, self._alive_now()))

    def _forget(self, client: _Client) -> None:
        if self._clients.get(client.number) is client:
            del self._clients[client.number]
            if client.connection.session is not None:
                self._sessions.pop(client.connection.session.key, None)

    async def _read(self, client: _Client, host: str, port: int) -> str | None:
        """Pass a client's messages to the machine until the connection ends. Return the reason of the end, or None if
        the connection now belongs to the heartbeat thread."""
        connection = client.connection
        messages: list[m.PeerMessage] | None = None
        while True:
            try:
                if messages is None:
                    opening = await self._authentication.first_message(connection, host)
                    if isinstance(opening, m.FromOperator):
                        refusal = self._refusal(opening)
                        if refusal:
                            connection.send([m.Goodbye(Result.MASTER_CONNECTION_FAILED, refusal)])
                            return refusal
                        if isinstance(opening, m.StatusRequest):
                            return await self._send_status(connection)
                        if isinstance(opening, m.KickRequest):
                            connection.send([m.Accepted()])
                            self._execute(self._machine.kick(opening.peer, self._alive_now()))
                            return f"has removed peer {opening.peer}"
                        if isinstance(opening, m.TraceRequest):
                            return await self._trace(connection, opening)
                        return await self._checking.serve(connection, host, port)
                    if isinstance(opening, m.Reattach):
                        rejection = self._reattach(client, opening)
                        if rejection is not None:
                            connection.send([m.Rejected(rejection)])
                            return rejection
                        messages = []
                    else:
                        self._begin_session(client, opening)
                        messages = [opening]
                else:
                    messages = await connection.receive()
            except ConnectionLost as error:
                return str(error)
            except TlsError as error:
                self._limited_log.log(logging.WARNING, f"{addresses.join(host, port)} refused: TLS: {error}")
                return str(error)
            except AuthError as error:
                self._limited_log.log(logging.WARNING, f"{addresses.join(host, port)} refused: {error}")
                text = f"refused by the master: {error}".replace("the dialing peer", "this peer")
                connection.send([m.Goodbye(Result.MASTER_CONNECTION_FAILED, text)])
                return str(error)
            except ProtocolError as error:
                connection.send([m.Goodbye(Result.MASTER_CONNECTION_FAILED, str(error))])
                self._end_session(connection)
                return str(error)
            for message in messages:
                if isinstance(message, m.RecordingPart):
                    self._tracing.received(client.number, message)
                    continue
                if isinstance(message, m.Resume):
                    self._note_quiet()
                self._execute(self._machine.received(client.number, message, self._alive_now()))
            if client.is_for_heartbeats:
                try:
                    self._heartbeat_thread.add(client.number, connection.detach())
                except (ConnectionLost, OSError) as error:
                    return str(error)
                self._heartbeat_connections.add(client.number)
                return None

    def _begin_session(self, client: _Client, opening: m.PeerMessage) -> None:
        if isinstance(opening, m.Hello | m.Resume) and opening.session:
            if len(opening.session) != KEY_BYTES or opening.session in self._sessions:
                raise ProtocolError("its session key is invalid or already in use")
            client.connection.session = ControlSession(opening.session)
            self._sessions[opening.session] = client.number

    def _end_session(self, connection: ControlConnection[m.PeerMessage]) -> None:
        if connection.session is not None:
            self._sessions.pop(connection.session.key, None)
            connection.session = None

    def _reattach(self, client: _Client, opening: m.Reattach) -> str | None:
        if opening.protocol != m.PROTOCOL_VERSION:
            return f"this master speaks protocol {m.PROTOCOL_VERSION}, the peer {opening.protocol}"
        number = self._sessions.get(opening.session)
        if number is None:
            return "this master does not know the session"
        old = self._clients[number]
        session = old.connection.session
        assert session is not None
        session.acknowledge(opening.received)
        now = self._alive_now()
        self._execute(self._machine.disconnected(client.number, "it continues a session", now))
        self._forget(client)
        if self._clients.get(number) is not old:
            return "the session has just ended"
        old.connection.release_session()
        old.reading.cancel()
        client.number = number
        self._clients[number] = client
        client.connection.send([m.Reattached(session.received)])
        client.connection.continue_session(session, opening.received)
        self._execute(self._machine.reattached(number, now))
        return None

    def _refusal(self, request: m.FromOperator) -> str:
        if request.protocol != m.PROTOCOL_VERSION:
            return f"this master speaks protocol {m.PROTOCOL_VERSION}, the client {request.protocol}"
        if isinstance(request, m.StatusRequest):
            is_busy = self._status_readers >= STATUS_READERS_MAX
        elif isinstance(request, m.KickRequest):
            is_known = self._machine.is_leading and request.peer in self._machine.master.state.members
            return "" if is_known else f"no peer {request.peer} is in the run of this master"
        elif isinstance(request, m.TraceRequest):
            if not self._machine.is_leading:
                return "this master does not lead a run, so it has no peers to query"
            is_busy = self._tracing.is_busy
        else:
            is_busy = self._checking.is_busy
        return "this master is busy with requests of this kind; try again" if is_busy else ""

    async def _send_status(self, connection: ControlConnection[m.PeerMessage]) -> str:
        self._status_readers += 1
        try:
            connection.send_frames([encode(m.Accepted()), self.board.frame()])
            with trio.move_on_after(CLOSE_S):
                await connection.flush()
        finally:
            self._status_readers -= 1
        return "has received the status"

    async def _trace(self, connection: ControlConnection[m.PeerMessage], request: m.TraceRequest) -> str:
        connection.send([m.Accepted()])
        members = self._machine.master.state.members.values()
        peers = [Traceable(each.peer, each.hello.name, each.connection, each.absence) for each in members]
        is_sent = False

        async def until_gone() -> None:
            await connection.receive()
            raise ProtocolError("an unexpected message")

        async def send_all() -> None:
            nonlocal is_sent
            await self._tracing.trace(peers, request, connection)
            connection.send([m.Traced(self._machine.run, clock_name())])
            with trio.move_on_after(CLOSE_S):
                await connection.until_sent(0)
            is_sent = True
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all)
                nursery.start_soon(until_gone)
        except* (ConnectionLost, ProtocolError):
            pass
        return "has received a trace" if is_sent else "was closed before the trace was complete"

    def _send_to(self, number: int, message: m.Message) -> None:
        client = self._clients.get(number)
        if client is not None:
            client.connection.send([message])

    def _execute(self, effects: list[Effect]) -> None:
        self._timer_changed.set()
        self._effects.execute(effects)

    def _perform(self, effects: list[Effect]) -> None:
        outgoing: dict[int, list[bytes]] = {}
        cache = FrameCache()
        for effect in effects:
            if isinstance(effect, Send):
                outgoing.setdefault(effect.connection, []).append(cache.frame(effect.message))
            elif isinstance(effect, TakeHeartbeats):
                self._clients[effect.connection].is_for_heartbeats = True
                outgoing.setdefault(effect.connection, []).append(cache.frame(m.Accepted()))
            elif isinstance(effect, FindRings):
                assert self._nursery is not None
                self._nursery.start_soon(self._find_rings, effect)
            elif isinstance(effect, MasterLog):
                text = harmless(effect.text, LOG_CHARACTERS_MAX)
                if effect.is_unauthenticated:
                    self._limited_log.log(LEVELS[effect.level], text)
                else:
                    about = {"run": self._machine.run, **effect.about}
                    logger.log(LEVELS[effect.level], "%s", text, extra=about)
        flooded: list[_Client] = []
        for number, frames in outgoing.items():
            client = self._clients.get(number)
            if client is not None:
                client.connection.send_frames(frames)
                if client.connection.is_flooded:
                    flooded.append(client)
        for effect in effects:
            if isinstance(effect, Close) and effect.connection in self._clients:
                client = self._clients[effect.connection]
                client.reading.cancel()
                self._forget(client)
            elif isinstance(effect, Close) and effect.connection in self._heartbeat_connections:
                self._heartbeat_connections.discard(effect.connection)
                self._heartbeat_thread.remove(effect.connection)
        for client in flooded:
            if self._clients.get(client.number) is client:
                client.connection.shutdown()
                self._end_session(client.connection)
                self._lost(client, "it does not read its messages")

    async def _find_rings(self, effect: FindRings) -> None:
        def search() -> dict[int, list[int]]:
            return {group: best_ring(problem) for group, problem in effect.problems.items()}

        rings = await self._searcher.run(search, is_left=True)
        self._execute(self._machine.rings_found(effect.search, rings, self._alive_now()))

    async def _watch_heartbeats(self) -> None:
        while True:
            events = await self._heartbeat_thread.events()
            self._note_quiet([event.connection for event in events if isinstance(event, Silent)])
            for event in events:
                self._heartbeat_connections.discard(event.connection)
                now = self._alive_now()
                if isinstance(event, Silent):
                    self._execute(self._machine.silent(event.connection, event.silent_s, now))
                else:
                    self._execute(self._machine.disconnected(event.connection, event.reason, now))

    async def _name_stragglers(self) -> None:
        silent_since: dict[int, float] = {}
        timeout_s = self._options.peer_timeout_s
        interval_s = min(HEARTBEAT_INTERVAL_S_MAX, timeout_s / HEARTBEATS_PER_TIMEOUT)
        while True:
            await trio.sleep(STRAGGLERS_S)
            now = self._alive_now()
            silent_s = SILENT_INTERVALS * interval_s
            quiet = self._heartbeat_thread.quiet(silent_s)
            silent_since = {each: silent_since.get(each, now - silent_s) for each in quiet}
            silent = {each: now - since for each, since in silent_since.items()}
            try:
                effects = self._machine.name_stragglers(silent, now)
            except Exception:  # no decision depends on the findings, so the run can continue without them
                logger.exception("the search for stragglers stopped because of a bug in pccl; please report it")
                return
            if effects:
                self._execute(effects)

    async def _watch_others(self) -> None:
        def report(text: str) -> None:
            self._machine.others = text

        def own_run() -> str:
            return self._machine.run if self._machine.is_leading else ""

        interval_s = WATCH_SHARE * self._options.peer_timeout_s
        await watch(self._standby_of, self._token, self._client_context, interval_s, report, own_run, self._system.dial)

    def _note_quiet(self, silent: Sequence[int] = ()) -> None:
        quiet = self._heartbeat_thread.quiet(QUIET_SHARE * self._options.peer_timeout_s)
        self._machine.note_quiet([*quiet, *silent])

    async def _keep_alive(self) -> None:
        while True:
            self._alive_now()
            await trio.sleep(LIFE_SHARE * self._options.peer_timeout_s)

    def _alive_now(self) -> float:
        now = trio.current_time()
        still_s = now - self._lived_at - LIFE_SHARE * self._options.peer_timeout_s
        self._lived_at = now
        if still_s > 0:
            self._execute(self._machine.stood_still(still_s, now))
        return now

    async def _watch_clock(self) -> None:
        while True:
            self._timer_changed = trio.Event()
            deadline = self._machine.deadline()
            with trio.CancelScope(deadline=deadline if deadline is not None else float("inf")):
                await self._timer_changed.wait()
            if deadline is not None and trio.current_time() >= deadline:
                self._note_quiet()
                self._execute(self._machine.tick(self._alive_now()))


# A standby requests the other masters' status. It only logs the result and sends it to newcomers.

SILENT = "no answer from "


async def watch(
    masters: Sequence[Address],
    token: str,
    ssl_context: ssl.SSLContext | None,
    interval_s: float,
    report: Callable[[str], None],
    own_run: Callable[[], str],
    dial: Dial = dial_tcp,
) -> None:
    """Request the status of all masters every `interval_s`, and call `report` after each change. `own_run` returns the
    run that this master leads, or ""."""
    known, warned = "", ""
    silences: dict[Address, LongWait] = {}
    while True:
        looked = [await _look(address, token, ssl_context, interval_s, dial) for address in masters]
        _warn_of_silence(silences, dict(zip(masters, looked, strict=True)))
        found = "; ".join(text for text, _ in looked)
        if found != known:
            logger.info("%s", found)
            report(found)
        known = found
        own = own_run()
        others = "; ".join(text for text, run in looked if own and run not in ("", None, own))
        if others and others != warned:
            text = "two runs: %s, and this one leads run %s. They cannot merge: restart the peers of one of them"
            logger.warning(text, others, own)
        warned = others
        await trio.sleep(interval_s)


def _warn_of_silence(silences: dict[Address, LongWait], looked: Mapping[Address, tuple[str, str | None]]) -> None:
    now = trio.current_time()
    for address, (text, run) in looked.items():
        where = addresses.join(*address)
        if run is None:
            silence = silences.setdefault(address, LongWait("the standby's status request", now))
            if silence.is_due(now):
                logger.warning("%s", silence.warning(now, text.removeprefix(SILENT), how_to_look(where)))
        elif (over := silences.pop(address, None)) is not None and over.is_told:
            logger.warning("the master at %s answers again: %s", where, over.ending(now))


async def _look(
    address: Address, token: str, ssl_context: ssl.SSLContext | None, limit_s: float, dial: Dial
) -> tuple[str, str | None]:
    """Return a description of a master and the name of its run: "" if it leads none, None if it does not answer."""
    where = addresses.join(*address)
    try:
        with trio.fail_after(limit_s):
            status = await ask(*address, token, ssl_context, dial)
    except NoAnswer as error:
        return f"{SILENT}the master at {where} ({error})", None
    except trio.TooSlowError:
        return f"{SILENT}the master at {where} within {limit_s:g} s", None
    if any(member.state == "accepted" for member in status.members):
        return f"the master at {where} leads run {status.run} in term {status.term}", status.run
    return f"the master at {where} answers but does not lead a run", ""
