"""Connections that other peers make to this one's port, greeted and passed on to what they are for.

A connection proves first who made it (`network.handshake`), then is given to the engine (a link), to the state transfer
(`state_sync`) or to a measurement (`network.probe`). What is refused is told why.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError, Keys
from pccl.protocol.codec import ProtocolError, decode_body, encode
from pccl.runtime.network import addresses, handshake, links, probe
from pccl.runtime.network.accepting import Unauthenticated, accept_connections
from pccl.runtime.network.log_limiter import LogLimiter
from pccl.runtime.network.wire import ConnectionLost, SocketChannel, send_message
from pccl.runtime.session.driver import Driver
from pccl.runtime.session.lifetime import Lifetime
from pccl.runtime.session.options import SessionOptions
from pccl.runtime.session.outbound import Outbound
from pccl.runtime.session.state_sync import StateSync
from pccl.types import Result


class Inbound:
    """Connections that others make. Only for the trio thread."""

    def __init__(
        self,
        listener: socket.socket,
        options: SessionOptions,
        driver: Driver,
        lifetime: Lifetime,
        outbound: Outbound,
        state_sync: StateSync,
        until_master_speaks: Callable[[], Awaitable[None]],
        logger: logging.LoggerAdapter[logging.Logger],
    ) -> None:
        self.unauthenticated = Unauthenticated()
        self._listener = listener
        self._options = options
        self._driver = driver
        self._lifetime = lifetime
        self._outbound = outbound
        self._state_sync = state_sync
        self._until_master_speaks = until_master_speaks
        self._logger = logger
        self._limited_log = LogLimiter(logger, trio.current_time)

    async def accept(self) -> None:
        """Greet whoever connects, until cancelled."""
        await accept_connections(self._listener, self.unauthenticated, self._begin, self._logger)

    def _begin(self, sock: socket.socket, address: tuple[str, int]) -> None:
        if self._lifetime.ended.is_set():
            sock.close()
        else:
            self._lifetime.spawn(self._greet, sock, addresses.plain_host(address), address[1])

    async def _greet(self, raw: socket.socket, host: str, port: int) -> None:
        """Hear what a dialer wants, and pass the connection on."""
        sock = self._options.system.stream(raw)
        where = addresses.join(host, port)
        serve: Callable[[], Awaitable[None]] | None = None
        try:
            with trio.fail_after(links.OPENING_TIMEOUT_S) as scope:
                number = self.unauthenticated.enter(host, scope.cancel)
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    opening, keys = await self._hear(sock)
                    if self._options.token:
                        self.unauthenticated.leave(number)  # it may have to wait for our next message of the master
                    serve = await self._welcome(sock, opening, keys)
                finally:
                    self.unauthenticated.leave(number)
            if serve is not None:
                await serve()
        except AuthError as error:
            self._limited_log.log(logging.WARNING, f"connection from {where} refused: {error}")
        except (ConnectionLost, ProtocolError, OSError) as error:
            self._limited_log.log(logging.INFO, f"connection from {where}: {error}")
        except trio.TooSlowError:
            text = f"connection from {where}: nothing understandable came in time, or there were too many like it"
            self._limited_log.log(logging.INFO, text)
        finally:
            sock.close()

    async def _hear(self, sock: trio.socket.SocketType) -> tuple[m.PeerOpening, Keys | None]:
        """Return what a dialer wants, once it has proved itself, and the keys for what follows."""
        channel = SocketChannel(sock)
        body = await channel.receive_body()
        opening: m.Opening = decode_body(body, m.Opening)
        if not isinstance(opening, m.PeerOpening):
            await self._send_to_master(channel)
            raise ProtocolError(f"it takes this peer for a master: its first message is {type(opening).__name__}")
        await links.receive_padding(sock, opening, links.PADDING_TIMEOUT_S)
        facts = self._driver.facts
        try:
            keys = await handshake.accept(channel, self._options.token, facts.run, f"peer {facts.peer}", opening, body)
        except AuthError as error:
            await channel.send_frame(encode(m.Rejected(str(error))))
            raise
        return opening, keys

    async def _send_to_master(self, channel: SocketChannel) -> None:
        """Tell somebody that has dialled this peer where it wants a master."""
        text = "this is the port of a peer of a run, and not of its master: give the master's address"
        await channel.send_frame(encode(m.Goodbye(Result.MASTER_CONNECTION_FAILED, text)))

    async def _welcome(
        self, sock: trio.socket.SocketType, opening: m.PeerOpening, keys: Keys | None
    ) -> Callable[[], Awaitable[None]] | None:
        """Accept or reject; return what remains to be done with the connection."""
        refusal = self._refusal(opening, keys)
        if refusal is None and isinstance(opening, m.LinkHello):
            offered = await self._offer(opening)
            if isinstance(offered, int):
                await links.accept(sock)
                await links.until_used(sock)
                self._outbound.take_connection(offered, opening.index, sock, keys)
                return None
            refusal = offered
        if refusal is None and isinstance(opening, m.StateHello):
            syncing = self._state_sync.current
            if syncing is not None and await syncing.until_planned(opening.sync):
                await links.accept(sock)
                return lambda: self._state_sync.serve(sock, keys, syncing, opening.sends_digests)
            refusal = f"no sync {opening.sync} is under way here"
        if refusal is None:
            await links.accept(sock)
            assert isinstance(opening, m.ProbeHello)
            return lambda: probe.serve(sock, opening.pulls)
        await send_message(sock, m.Rejected(refusal))
        return None

    async def _offer(self, opening: m.LinkHello) -> int | str:
        """Return the link that the connection is for, or why it is refused. Wait for the master where the dialer may
        have heard of something that this peer has not."""
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
            return "no optimize_topology is under way here"  # who asks is sent as much as the network takes
        if isinstance(opening, m.LinkHello | m.StateHello) and opening.encrypt != self._options.encrypt:
            plain, encrypting = facts.peer, opening.sender
            if self._options.encrypt:
                plain, encrypting = encrypting, plain
            return (
                f"peer {encrypting} encrypts what peers send to each other and peer {plain} does not; give all peers "
                f"the same encrypt= (or PCCL_ENCRYPT)"
            )
        if self._options.encrypt and keys is None and not isinstance(opening, m.ProbeHello):
            return "this peer cannot exchange keys: it has no memory for that, or OpenSSL fails"
        return None
