"""A master inside this process."""

from __future__ import annotations

import socket
import weakref
from types import TracebackType

import trio

from pccl import security
from pccl.errors import PCCLError
from pccl.runtime import addresses, portal
from pccl.runtime.latch import Latch
from pccl.runtime.master_server import MasterServer
from pccl.types import Result

STOP_TIMEOUT_S = 5.0


class MasterNode:
    """Keeps membership and arbitrates outcomes for one run; payload never passes through it.

    `run()` listens and returns at once, `interrupt()` stops it, `wait()` waits until it has stopped. As a context
    manager it does all three. Thread-safe.

    `token` is the run's shared secret: peers that do not know it are refused, and so are those that have one while the
    master has none (default: PCCL_TOKEN in the environment; "": none).
    """

    def __init__(self, listen_address: str = f"0.0.0.0:{addresses.DEFAULT_PORT}", *, token: str | None = None) -> None:
        try:
            self._host, self._port = addresses.parse(listen_address)
        except ValueError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "MasterNode", str(error)) from None
        self._token = security.token(token, "MasterNode")
        self._service: _Service | None = None

    def run(self) -> None:
        """INVALID_ARGUMENT if the address cannot be listened on, INVALID_USAGE if it runs already."""
        if self._service is not None and not self._service.stopped.is_set():
            raise PCCLError(Result.INVALID_USAGE, "MasterNode.run", f"already running at {self.address}")
        try:
            listener = addresses.listen(self._host, self._port)
        except OSError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "MasterNode.run", str(error.strerror)) from None
        self._service = service = _Service(listener, self._token)
        portal.on_fork(service)
        portal.on_exit(service)
        portal.current().start(service.serve)
        weakref.finalize(self, _Service.interrupt, service).atexit = False

    @property
    def address(self) -> str:
        """The "host:port" it listens on, with the actual port where 0 was asked for."""
        port = self._service.port if self._service is not None else self._port
        return addresses.join(self._host, port)

    def interrupt(self) -> None:
        """Stops it: connections are closed, peers see the master lost. May be called again."""
        if self._service is not None:
            self._service.interrupt()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it has stopped; False if `timeout` seconds passed first."""
        return self._service is None or self._service.stopped.wait(timeout)

    def __enter__(self) -> MasterNode:
        self.run()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.interrupt()
        self.wait(STOP_TIMEOUT_S)


class _Service:
    """What runs in the portal. Does not refer to its MasterNode, so that one can be collected."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self.port: int = listener.getsockname()[1]
        self.stopped = Latch()
        self._server = MasterServer(listener, token=token)
        self._scope = trio.CancelScope()

    async def serve(self) -> None:
        try:
            with self._scope:
                await self._server.serve()
        finally:
            self.stopped.set()

    def interrupt(self) -> None:
        if not self.stopped.is_set():
            portal.current().post(self._scope.cancel)

    async def close(self) -> None:
        self._scope.cancel()

    def forget_after_fork(self) -> None:
        self._server.forget_after_fork()
        self.stopped.set()
