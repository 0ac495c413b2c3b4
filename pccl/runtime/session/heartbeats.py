"""A session's heartbeats to its master, and noticing that the master falls silent."""

from __future__ import annotations

import socket

import trio

from pccl.protocol import messages as m
from pccl.runtime.network import addresses
from pccl.runtime.network.heartbeat import HeartbeatThread, dial_heartbeats, keep_heartbeats
from pccl.runtime.network.master_addresses import Address
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

        async def connect() -> socket.socket:
            self.is_connected = False
            if self._lifetime.ended.is_set():
                await trio.sleep_forever()  # the master has let us go
            sock = await dial_heartbeats(master, hello, self._options.token)
            self.is_connected = True
            return sock

        thread: HeartbeatThread | None = None
        with scope:
            try:
                thread = self._thread = HeartbeatThread(timeout_s)
                async with trio.open_nursery() as nursery:
                    start_task(nursery, thread.vouch)
                    reason = await keep_heartbeats(thread, connect, timeout_s)
                    nursery.cancel_scope.cancel()
            except OSError as error:
                reason = f"cannot be sent heartbeats: {error}"
            finally:
                if thread is not None:
                    thread.close()
            with self._driver.taking_over as machine:
                machine.master_lost(f"the master at {addresses.join(*master)} {reason}")
