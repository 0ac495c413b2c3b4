"""The present control connection of a session, and the address of the master that it leads to."""

from __future__ import annotations

import trio

from pccl.protocol import messages as m
from pccl.runtime.network import addresses
from pccl.runtime.network.addresses import Address
from pccl.runtime.network.wire import ControlConnection


class MasterConnection:
    """The control connection, which is replaced when it breaks or another master is met."""

    def __init__(self, connection: ControlConnection[m.MasterMessage], address: Address) -> None:
        """`connection` leads to `address`, for whose host the master's certificate must be."""
        self.connection = connection
        self.met_at(connection, address)

    def met_at(self, connection: ControlConnection[m.MasterMessage], address: Address) -> None:
        """Note that the session's master is at this address from now on, and that this connection leads to it."""
        self.connection = connection
        self.address = address
        self.name = address[0]
        self.host = addresses.plain_host(connection.remote_address)
        self.port: int = connection.remote_address[1]

    def send(self, messages: list[m.Message]) -> None:
        """Send messages to the master. Never waits and never raises."""
        self.connection.send(messages)

    async def end(self) -> None:
        """Break the connection, wait until nothing uses it, and close it."""
        self.connection.shutdown()
        await self.connection.flush()
        self.connection.close()

    async def part(self, limit_s: float, *, is_heard: bool) -> None:
        """Send what there is to send, and part from a master that hears it, for `limit_s` at most."""
        with trio.move_on_after(limit_s):
            await (self.connection.part() if is_heard else self.connection.flush())
