"""Links as the machine wants them: made, given more connections, tried and closed.

A link is dialled from one of its ends; the other end waits for its connections (`inbound`), and gives the link up when
none come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import trio

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.auth import Keys
from pccl.protocol.names import peer_named
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.network import links
from pccl.runtime.session.driver import Driver, Handlers
from pccl.runtime.session.lifetime import Lifetime
from pccl.runtime.session.options import SessionOptions
from pccl.runtime.session.reports import WorkCounters
from pccl.runtime.threads.tasks import start_task

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
STANDS_S = 1.0
"""Time after which a link that has lost a connection counts as having lost no more than that."""
REDIAL_S = 1.0
"""Pause before a lost connection that could not be made anew is tried once more; it doubles with each try."""
REDIAL_S_MAX = 30.0


class Outbound:
    """The links of this peer. Only for the trio thread."""

    def __init__(
        self,
        options: SessionOptions,
        driver: Driver,
        lifetime: Lifetime,
        engine: Engine,
        counters: WorkCounters,
        logger: logging.LoggerAdapter[logging.Logger],
        master_host: Callable[[], str],
    ) -> None:
        """`master_host` returns the address at which to dial peers on the master's own host."""
        self._options = options
        self._driver = driver
        self._lifetime = lifetime
        self._engine = engine
        self._counters = counters
        self._logger = logger
        self._master_host = master_host
        self._making: dict[int, list[trio.CancelScope]] = {}
        """Tasks that dial or await connections, or have something to say, by link."""
        self.handlers: Handlers = {
            ps.MakeLink: self._make_link,
            ps.AddConnections: self._add_connections,
            ps.TryLinks: lambda _, effect: lifetime.spawn(self._try_links, effect),
            ps.CloseLink: self._close_link,
            ps.PeerLog: self._log,
        }

    @property
    def links_made(self) -> int:
        """Number of links that there are, or that are being made."""
        return len(self._making)

    async def dial(
        self, member: m.PeerInfo, opening: m.PeerOpening, timeout_s: float
    ) -> tuple[trio.socket.SocketType, Keys | None]:
        """Return a connection to another peer for something else than a link. LinkError."""
        options = self._options
        return await links.dial_within(member, self._master_host(), opening, options.token, timeout_s, options.system)

    def take_connection(self, link: int, index: int, sock: trio.socket.SocketType, keys: Keys | None) -> None:
        """Give a link's connection to the engine, if the link is wanted still."""
        with self._driver.taking_over as machine:
            if machine.link_connected(link) and not self._lifetime.is_broken:
                self._engine.link_add(link, index, sock.detach(), keys if self._options.encrypt else None)
            else:
                sock.close()

    def _make_link(self, _: ps.Peer, effect: ps.MakeLink) -> None:
        scope = trio.CancelScope()
        self._counters.link_made(effect.link, effect.member.peer)
        self._making[effect.link] = [scope]
        self._lifetime.spawn(self._dial_link if effect.dial else self._await_link, effect, scope)

    async def _dial_link(self, effect: ps.MakeLink, scope: trio.CancelScope) -> None:
        def hello(index: int) -> m.LinkHello:
            return self._hello(effect, index, effect.connections)

        def take(index: int, sock: trio.socket.SocketType, keys: Keys | None) -> None:
            self.take_connection(effect.link, index, sock, keys)

        with scope:
            try:
                await links.dial_link(
                    effect.member,
                    self._master_host(),
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
            reason = f"{who} did not connect to us within {effect.timeout_s:g} s"
            with self._driver.taking_over as machine:
                machine.link_failed(effect.link, reason)

    def _hello(self, effect: ps.MakeLink | ps.AddConnections, index: int, count: int) -> m.LinkHello:
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
        )

    def _add_connections(self, _: ps.Peer, effect: ps.AddConnections) -> None:
        for index in effect.indices:
            scope = trio.CancelScope()
            self._making[effect.link].append(scope)
            self._lifetime.spawn(self._add_connection, effect, index, scope)

    async def _add_connection(self, effect: ps.AddConnections, index: int, scope: trio.CancelScope) -> None:
        hello = self._hello(effect, index, index + 1)
        pause_s = REDIAL_S
        with scope:
            while True:
                try:
                    sock, keys = await self.dial(effect.member, hello, effect.timeout_s)
                except links.LinkError as error:
                    reason = str(error)
                else:
                    self.take_connection(effect.link, index, sock, keys)
                    if effect.is_replacement:
                        self._counters.reconnected()
                    return
                peer = effect.member.peer
                self._logger.info("no further connection to peer %d: %s", peer, reason, extra={"other": peer})
                if not effect.is_replacement:
                    return
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, REDIAL_S_MAX)

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

    def _close_link(self, _: ps.Peer, effect: ps.CloseLink) -> None:
        for scope in self._making.pop(effect.link, ()):
            scope.cancel()
        self._counters.link_closed(effect.link)
        self._engine.link_close(effect.link)

    def _log(self, _: ps.Peer, effect: ps.PeerLog) -> None:
        """Log what the machine has to say; of a link only if that lasts for a while after."""
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
