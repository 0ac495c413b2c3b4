"""Makes, extends, tests and closes links as the machine requests.

One end of a link dials; the other end waits for the connections (`Inbound`) and gives the link up if none arrive in
time.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError, Keys
from pccl.protocol.codec import ProtocolError, decode_body, encode, harmless
from pccl.protocol.names import peer_named
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.runtime.network import addresses, datagrams, handshake, links, probe
from pccl.runtime.network.accepting import LogLimiter, Unauthenticated, accept_connections
from pccl.runtime.network.datagrams import Datagrams
from pccl.runtime.network.shared_memory import SharedMemory
from pccl.runtime.network.system import System
from pccl.runtime.network.wire import ConnectionLost, SocketChannel, send_message
from pccl.runtime.session.driver import Part, Shared
from pccl.runtime.session.state_sync import StateSync
from pccl.runtime.threads.tasks import start_task
from pccl.types import Result

logger = logging.getLogger("pccl.peer")

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
STANDS_S = 1.0
"""Delay before the loss of a link's connection is logged; it is not logged if the link is closed by then."""
NO_UDP = "no UDP at one of the two ends"
REDIAL_S = 1.0
"""Pause before a lost connection is redialed after a failed attempt; it doubles with each attempt."""
REDIAL_S_MAX = 30.0


class Outbound(Part):
    """This peer's links, and the measurements of links that the machine requests."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._making: dict[int, list[trio.CancelScope]] = {}
        """Scopes of tasks that dial or await connections or will log a message, by link."""
        self.handlers = {
            ps.MakeLink: self._make_link,
            ps.AddConnections: self._add_connections,
            ps.TryLinks: lambda _, effect: self._lifetime.spawn(self._try_links, effect),
            ps.CloseLink: self._close_link,
            ps.PeerLog: self._log,
            ps.RunProbe: lambda _, effect: self._lifetime.spawn(self._probe, effect),
        }

    @property
    def links_made(self) -> int:
        """Number of links that exist or are being made."""
        return len(self._making)

    async def dial(
        self, member: m.PeerInfo, opening: m.PeerOpening, timeout_s: float
    ) -> tuple[trio.socket.SocketType, Keys | None]:
        """Return a single connection to another peer. Raises LinkError."""
        sock, payload = await self._dial(member, opening, timeout_s)
        assert not isinstance(payload, SharedMemory | Datagrams)
        return sock, payload

    async def _dial(
        self, member: m.PeerInfo, opening: m.PeerOpening, timeout_s: float
    ) -> tuple[trio.socket.SocketType, links.Payload]:
        options = self._options
        return await links.dial_within(member, self._master.host, opening, options.token, timeout_s, options.system)

    def take_connection(self, link: int, index: int, sock: trio.socket.SocketType, payload: links.Payload) -> None:
        """Give a link's connection to the engine, or close it if the link is no longer wanted."""
        with self._driver.taking_over as machine:
            if not machine.link_connected(link) or self._lifetime.is_broken:
                sock.close()
                if isinstance(payload, Datagrams):
                    payload.close()
                return
            if isinstance(payload, Datagrams):
                self._logger.debug("connection %d of link %d travels over UDP", index, link)
                sock.close()
                payload.keys = payload.keys if self._options.encrypt else None
                if not self._engine.link_add_udp(link, index, payload):
                    machine.connection_lost(link, NO_UDP, index % machine.links.engine_threads, over_udp=True)
                return
            if isinstance(payload, SharedMemory):
                self._logger.debug("connection %d of link %d travels in shared memory", index, link)
            elif not self._options.encrypt:
                payload = None
            self._engine.link_add(link, index, sock.detach(), payload)

    def _make_link(self, _: Peer, effect: ps.MakeLink) -> None:
        scope = trio.CancelScope()
        self._counters.link_made(effect.link, effect.member.peer)
        self._making[effect.link] = [scope]
        self._lifetime.spawn(self._dial_link if effect.dial else self._await_link, effect, scope)

    async def _dial_link(self, effect: ps.MakeLink, scope: trio.CancelScope) -> None:
        def hello(index: int) -> m.LinkHello:
            return self._hello(effect, index, effect.connections)

        def take(index: int, sock: trio.socket.SocketType, payload: links.Payload) -> None:
            self.take_connection(effect.link, index, sock, payload)

        with scope:
            try:
                await links.dial_link(
                    effect.member,
                    self._master.host,
                    hello,
                    effect.connections,
                    self._options.token,
                    take,
                    effect.reach_s,
                    effect.timeout_s,
                    self._options.system,
                )
            except links.LinkError as error:
                self._logger.warning("no link to %s", error, extra={"other": effect.member.peer})
                with self._driver.taking_over as machine:
                    machine.link_failed(effect.link, str(error))

    async def _await_link(self, effect: ps.MakeLink, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(effect.timeout_s)
            who = peer_named(effect.member.peer, effect.member.name)
            reason = f"{who} did not connect to this peer within {effect.timeout_s:g} s"
            with self._driver.taking_over as machine:
                machine.link_failed(effect.link, reason)

    def _hello(
        self, effect: ps.MakeLink | ps.AddConnections, index: int, count: int, over_udp: bool = False
    ) -> m.LinkHello:
        facts = self._driver.facts
        return m.LinkHello(
            m.PROTOCOL_VERSION,
            facts.run,
            facts.peer,
            effect.member.peer,
            effect.made_in,
            index,
            count,
            encrypt=self._options.encrypt,
            udp_secret=datagrams.new_secret() if over_udp else b"",
        )

    def _add_connections(self, _: Peer, effect: ps.AddConnections) -> None:
        for index in effect.indices:
            scope = trio.CancelScope()
            self._making[effect.link].append(scope)
            self._lifetime.spawn(self._add_connection, effect, index, scope)

    async def _add_connection(self, effect: ps.AddConnections, index: int, scope: trio.CancelScope) -> None:
        hello = self._hello(effect, index, index + 1, effect.over_udp)
        pause_s = REDIAL_S
        with scope:
            while True:
                try:
                    sock, payload = await self._dial(effect.member, hello, effect.timeout_s)
                except links.LinkError as error:
                    reason = str(error)
                else:
                    self.take_connection(effect.link, index, sock, payload)
                    if effect.is_replacement:
                        self._counters.reconnected()
                    if effect.over_udp and not isinstance(payload, Datagrams):
                        self._report_no_udp(effect, index, NO_UDP)
                    return
                peer = effect.member.peer
                self._logger.info("no additional connection to peer %d: %s", peer, reason, extra={"other": peer})
                if effect.over_udp:
                    self._report_no_udp(effect, index, reason)
                if not effect.is_replacement:
                    return
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, REDIAL_S_MAX)

    def _report_no_udp(self, effect: ps.AddConnections, index: int, reason: str) -> None:
        with self._driver.taking_over as machine:
            machine.connection_lost(effect.link, reason, index % machine.links.engine_threads, over_udp=True)

    async def _try_links(self, effect: ps.TryLinks) -> None:
        facts = self._driver.facts
        failed: list[tuple[int, str]] = []

        async def one(member: m.PeerInfo) -> None:
            hello = m.ProbeHello(m.PROTOCOL_VERSION, facts.run, facts.peer, member.peer, pulls=False)
            try:
                sock, _ = await self.dial(member, hello, effect.timeout_s)
            except links.LinkError as error:
                failed.append((member.peer, str(error)))
            else:
                sock.close()

        async with trio.open_nursery() as nursery:
            for member in effect.members:
                start_task(nursery, one, member)
        with self._driver.taking_over as machine:
            machine.tried(failed)

    def _close_link(self, _: Peer, effect: ps.CloseLink) -> None:
        for scope in self._making.pop(effect.link, ()):
            scope.cancel()
        self._counters.link_closed(effect.link)
        self._engine.link_close(effect.link)

    def _log(self, _: Peer, effect: ps.PeerLog) -> None:
        """Log a message from the machine. If it concerns a link, log it after STANDS_S, unless the link is closed."""
        if effect.link:
            scope = trio.CancelScope()
            self._making[effect.link].append(scope)
            self._lifetime.spawn(self._log_later, effect, scope)
        else:
            self._log_now(effect)

    def _log_now(self, effect: ps.PeerLog) -> None:
        self._logger.log(LEVELS[effect.level], "%s", effect.text, extra=effect.about)

    async def _log_later(self, effect: ps.PeerLog, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(STANDS_S)
            self._log_now(replace(effect, link=0))

    async def _probe(self, effect: ps.RunProbe) -> None:
        facts = self._driver.facts
        found: list[m.LinkMetric] = []

        async def one(link: ps.ProbedLink) -> None:
            pulls = link.is_inbound
            hello = m.ProbeHello(m.PROTOCOL_VERSION, facts.run, facts.peer, link.member.peer, pulls)

            async def dial() -> trio.socket.SocketType:
                return (await self.dial(link.member, hello, facts.peer_timeout_s))[0]

            try:
                metric = await probe.measure(dial, link.connections, pulls)
            except probe.ProbeError as error:
                way = "from" if pulls else "to"
                self._logger.info("cannot measure the link %s peer %d: %s", way, link.member.peer, error)
            else:
                round_trip_us = round(metric.round_trip_s * 1e6)
                found.append(m.LinkMetric(link.member.peer, pulls, metric.bytes_per_s, round_trip_us))

        async with trio.open_nursery() as nursery:
            for link in effect.links:
                start_task(nursery, one, link)
        with self._driver.taking_over as machine:
            machine.probed(effect.probe, found, trio.current_time())


# Connections that other peers open to this peer's port.


class Port:
    """A listening socket shared by the sessions of one trio run that listen on the same address.

    A connection's first message names a run and a peer. Before the connection is authenticated, it is passed to that
    peer's session, or refused if there is none.
    """

    def __init__(self, system: System, listener: socket.socket) -> None:
        self.listener = listener
        self.number: int = listener.getsockname()[1]
        self.unauthenticated = Unauthenticated()
        self.users: list[Inbound] = []
        self._system = system
        self._limited_log = LogLimiter(logger, trio.current_time)
        self._held = 0
        self._scope = trio.CancelScope()

    @classmethod
    def hold(cls, system: System, host: str, number: int) -> Port:
        """Return the port at this address, which each caller must `release`. Raises OSError."""
        ports, address = _ports.get(None), (system, host, number)
        if ports is None:
            _ports.set(ports := {})
        port: Port | None = ports.get(address)
        if port is None:
            port = ports[address] = cls(system, system.listen(host, number))
            trio.lowlevel.spawn_system_task(port._accept)
        port._held += 1
        return port

    def release(self) -> None:
        """Close the socket if no other session holds it."""
        self._held -= 1
        if not self._held:
            ports = _ports.get()
            del ports[next(address for address, port in ports.items() if port is self)]
            self._scope.cancel()
            self.listener.close()

    async def _accept(self) -> None:
        def begin(sock: socket.socket, address: tuple[str, int]) -> None:
            start_task(nursery, self._contained, self._greet, sock, address)

        with self._scope:
            async with trio.open_nursery() as nursery:
                await self._contained(accept_connections, self.listener, self.unauthenticated, begin, logger)

    async def _contained(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task of the port. If it raises, the sessions end as if the task were theirs."""
        try:
            await function(*args)
        except Exception as error:
            for user in list(self.users):
                user.break_off(error)

    async def _greet(self, raw: socket.socket, address: tuple[str, int]) -> None:
        """Read a dialer's opening and pass the connection on."""
        sock = self._system.stream(raw)
        host = addresses.plain_host(address)
        where = addresses.join(host, address[1])
        is_passed_on = False
        try:
            with _logged(self._limited_log, where), trio.fail_after(links.OPENING_TIMEOUT_S) as scope:
                number = self.unauthenticated.enter(host, scope.cancel)
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    user, opening, body = await self._user(SocketChannel(sock))
                finally:
                    self.unauthenticated.leave(number)
                is_passed_on = user.take(sock, host, where, scope.deadline, opening, body)
        finally:
            if not is_passed_on:
                sock.close()

    async def _user(self, channel: SocketChannel) -> tuple[Inbound, m.PeerOpening, bytes]:
        """Return the session that a connection is for, with its opening, decoded and encoded."""
        body = await channel.receive_body()
        opening: m.Opening = decode_body(body, m.Opening)
        if not isinstance(opening, m.PeerOpening):
            text = "this is the port of a peer, not of its run's master: give the master's address"
            await channel.send_frame(encode(m.Goodbye(Result.MASTER_CONNECTION_FAILED, text)))
            raise ProtocolError(f"it mistakes this peer for a master: its first message is {type(opening).__name__}")
        for user in self.users:
            if len(self.users) == 1 or user.is_meant(opening):
                return user, opening, body
        text = f"peer {opening.receiver} of run {opening.run!r} is not at this port"
        await channel.send_frame(encode(m.Rejected(text)))
        raise ProtocolError(harmless(text))


_ports: trio.lowlevel.RunVar[Any] = trio.lowlevel.RunVar("pccl_ports")


@contextmanager
def _logged(log: LogLimiter, where: str) -> Iterator[None]:
    """Log the failure of a connection from `where`."""
    try:
        yield
    except AuthError as error:
        log.log(logging.WARNING, f"connection from {where} refused: {error}")
    except (ConnectionLost, ProtocolError, OSError) as error:
        log.log(logging.INFO, f"connection from {where}: {error}")
    except trio.TooSlowError:
        text = f"connection from {where}: no valid opening in time, or too many unauthenticated connections"
        log.log(logging.INFO, text)


class Inbound(Part):
    """Connections that other peers open."""

    def __init__(
        self,
        shared: Shared,
        port: Port,
        outbound: Outbound,
        state_sync: StateSync,
        until_master_speaks: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(shared)
        self._port = port
        self._outbound = outbound
        self._state_sync = state_sync
        self._until_master_speaks = until_master_speaks
        self._limited_log = LogLimiter(self._logger, trio.current_time)

    async def accept(self) -> None:
        """Accept connections until cancelled."""
        self._port.users.append(self)
        try:
            await trio.sleep_forever()
        finally:
            self._port.users.remove(self)

    def break_off(self, error: Exception) -> None:
        """End the session because its port has failed."""
        self._lifetime.break_off(error)

    def is_meant(self, opening: m.PeerOpening) -> bool:
        """Return whether a connection is for this session."""
        facts = self._driver.facts
        return opening.run == facts.run and opening.receiver == facts.peer

    def take(self, *connection: Any) -> bool:
        """Take a connection with the arguments of `_greet`, unless the session has ended."""
        if self._lifetime.ended.is_set():
            return False
        self._lifetime.spawn(self._greet, *connection)
        return True

    async def _greet(
        self, sock: trio.socket.SocketType, host: str, where: str, ends_at: float, opening: m.PeerOpening, body: bytes
    ) -> None:
        """Authenticate a dialer and pass the connection on."""
        serve: Callable[[], Awaitable[None]] | None = None
        unauthenticated = self._port.unauthenticated
        try:
            with _logged(self._limited_log, where):
                with trio.fail_at(ends_at) as scope:
                    number = unauthenticated.enter(host, scope.cancel)
                    try:
                        keys = await self._authenticate(sock, opening, body)
                        if self._options.token:
                            unauthenticated.leave(number)  # authenticated, and may wait for the master
                        serve = await self._welcome(sock, opening, keys)
                    finally:
                        unauthenticated.leave(number)
                if serve is not None:
                    await serve()
        finally:
            sock.close()

    async def _authenticate(self, sock: trio.socket.SocketType, opening: m.PeerOpening, body: bytes) -> Keys | None:
        """Authenticate a dialer and return the connection's keys."""
        await links.receive_padding(sock, opening, links.PADDING_TIMEOUT_S)
        channel, facts = SocketChannel(sock), self._driver.facts
        try:
            return await handshake.accept(channel, self._options.token, facts.run, f"peer {facts.peer}", opening, body)
        except AuthError as error:
            await channel.send_frame(encode(m.Rejected(str(error))))
            raise

    async def _welcome(
        self, sock: trio.socket.SocketType, opening: m.PeerOpening, keys: Keys | None
    ) -> Callable[[], Awaitable[None]] | None:
        """Accept or reject a connection. Return a function that serves it, or None if it needs no service."""
        refusal = self._refusal(opening, keys)
        if refusal is None and isinstance(opening, m.LinkHello):
            offered = await self._offer(opening)
            if isinstance(offered, int):
                over_udp = self._open_datagrams(sock, opening, keys)
                memory = self._open_memory(sock, opening)
                try:
                    await links.accept(sock, memory is not None, over_udp is not None)
                    if memory is None and over_udp is None:
                        await links.until_used(sock)
                except BaseException:
                    if over_udp is not None:
                        over_udp.close()
                    raise
                self._outbound.take_connection(offered, opening.index, sock, over_udp or memory or keys)
                return None
            refusal = offered
        if refusal is None and isinstance(opening, m.StateHello):
            syncing = self._state_sync.current
            if syncing is not None and await syncing.until_planned(opening.sync):
                await links.accept(sock)
                return lambda: self._state_sync.serve(sock, keys, syncing, opening.sends_digests)
            refusal = f"no sync {opening.sync} is in progress here"
        if refusal is None:
            await links.accept(sock)
            assert isinstance(opening, m.ProbeHello)
            return lambda: probe.serve(sock, opening.pulls)
        await send_message(sock, m.Rejected(refusal))
        return None

    def _open_datagrams(
        self, sock: trio.socket.SocketType, opening: m.LinkHello, keys: Keys | None
    ) -> Datagrams | None:
        if not opening.udp_secret:
            return None
        try:
            opened = self._options.system.open_datagrams(sock, opening.udp_secret, opening.udp_port)
        except OSError as error:
            self._logger.debug("peer %d sends this one no datagrams: %s", opening.sender, error)
            return None
        opened.keys = keys
        return opened

    def _open_memory(self, sock: trio.socket.SocketType, opening: m.LinkHello) -> SharedMemory | None:
        if not opening.memory or self._options.encrypt:
            return None
        try:
            return self._options.system.open_memory(sock, opening.memory)
        except OSError as error:
            self._logger.debug("peer %d shares no memory with this one: %s", opening.sender, error)
            return None

    async def _offer(self, opening: m.LinkHello) -> int | str:
        """Return the connection's link, or the reason to refuse it. Wait for the master if the dialer may know a view
        that this peer has not received yet."""
        while True:
            with self._driver.taking_over as machine:
                offered = machine.link_offered(opening.sender, opening.made_in)
            if offered is not None:
                return offered
            await self._until_master_speaks()

    def _refusal(self, opening: m.PeerOpening, keys: Keys | None) -> str | None:
        facts = self._driver.facts
        if opening.protocol != m.PROTOCOL_VERSION:
            return f"this peer speaks protocol {m.PROTOCOL_VERSION}, not {opening.protocol}"
        if opening.run != facts.run:
            return f"this peer belongs to run {facts.run!r}, not {opening.run!r}"
        if opening.receiver != facts.peer:
            return f"this is peer {facts.peer}, not {opening.receiver}"
        if isinstance(opening, m.ProbeHello) and opening.pulls and not facts.is_optimizing:
            return "no optimize_topology is in progress here"  # a probe sends as many bytes as the network carries
        if isinstance(opening, m.LinkHello | m.StateHello) and opening.encrypt != self._options.encrypt:
            plain, encrypting = facts.peer, opening.sender
            if self._options.encrypt:
                plain, encrypting = encrypting, plain
            return (
                f"peer {encrypting} encrypts the data between peers but peer {plain} does not; give all peers "
                f"the same encrypt= (or PCCL_ENCRYPT)"
            )
        if self._options.encrypt and keys is None and not isinstance(opening, m.ProbeHello):
            return "this peer cannot exchange keys: it is out of memory, or OpenSSL fails"
        return None
