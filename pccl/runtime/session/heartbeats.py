"""A session's heartbeats to its master, and noticing that the master falls silent."""

from __future__ import annotations

import trio

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.runtime.network import addresses, handshake
from pccl.runtime.network.addresses import Address
from pccl.runtime.network.heartbeat import HeartbeatThread, keep_heartbeats
from pccl.runtime.network.wire import ConnectionLost, SocketChannel
from pccl.runtime.session.driver import Driver
from pccl.runtime.session.lifetime import Lifetime
from pccl.runtime.session.options import SessionOptions
from pccl.runtime.threads.tasks import start_task


class Heartbeats:
    """The heartbeats between this peer and its master. Only for the trio thread."""

    def __init__(self, options: SessionOptions, driver: Driver, lifetime: Lifetime) -> None:
        self.is_connected = False
        """Whether there is a connection for heartbeats."""
        self._options = options
        self._driver = driver
        self._lifetime = lifetime
        self._scope = trio.CancelScope()
        self._thread: HeartbeatThread | None = None

    def begin(self, master: Address, timeout_s: float) -> None:
        """Exchange heartbeats with a master that has taken this peer in, and with no other any more."""
        self._scope.cancel()
        self._scope = trio.CancelScope()
        self._lifetime.spawn(self._send, master, timeout_s, self._scope)

    def stop(self) -> None:
        self._scope.cancel()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def forget_after_fork(self) -> None:
        if self._thread is not None:
            self._thread.forget_after_fork()

    async def _send(self, master: Address, timeout_s: float, scope: trio.CancelScope) -> None:
        hello = m.HeartbeatHello(m.PROTOCOL_VERSION, self._driver.facts.run, self._driver.facts.peer)

        async def connect() -> trio.socket.SocketType:
            self.is_connected = False
            if self._lifetime.ended.is_set():
                await trio.sleep_forever()  # the master has let us go
            sock = await self._dial(master, hello)
            self.is_connected = True
            return sock

        thread: HeartbeatThread | None = None
        with scope:
            try:
                thread = self._thread = self._options.system.heartbeats(timeout_s)
                async with trio.open_nursery() as nursery:
                    start_task(nursery, thread.keep_progress)
                    reason = await keep_heartbeats(thread, connect, timeout_s)
                    nursery.cancel_scope.cancel()
            except OSError as error:
                reason = f"cannot be sent heartbeats: {error}"
            finally:
                if thread is not None:
                    thread.close()
            with self._driver.taking_over as machine:
                machine.master_lost(f"the master at {addresses.join(*master)} {reason}")

    async def _dial(self, master: Address, hello: m.HeartbeatHello) -> trio.socket.SocketType:
        """Return a connection to the master at this numeric address, on which it has accepted `hello`.
        ConnectionLost."""
        system = self._options.system
        try:
            sock = system.stream(await system.dial(*master))
        except OSError as error:
            raise ConnectionLost(error.strerror or str(error)) from None
        try:
            channel = SocketChannel(sock)
            answer = await handshake.dial(channel, self._options.token, hello.run, hello, m.HeartbeatAnswer)
            if not isinstance(answer, m.Accepted):
                raise ConnectionLost(f"refused: {answer.reason}")
            return sock
        except ProtocolError as error:
            sock.close()
            raise ConnectionLost(str(error)) from None
        except BaseException:
            sock.close()
            raise
