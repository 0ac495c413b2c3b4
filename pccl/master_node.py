"""A master inside this process."""

from __future__ import annotations

import logging
import math
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import trio

from pccl import _timeouts, security
from pccl.errors import PCCLError
from pccl.protocol.founding import Beginning
from pccl.protocol.master.options import MasterOptions
from pccl.protocol.messages import ENGINE_THREADS_MAX, PEER_TIMEOUT_S_MAX, PEER_TIMEOUT_S_MIN
from pccl.runtime.master.fence_file import FenceFile, StateError
from pccl.runtime.master.server import MasterServer
from pccl.runtime.network import addresses
from pccl.runtime.network.master_addresses import Address
from pccl.runtime.threads import faults, portal
from pccl.runtime.threads.latch import Latch
from pccl.runtime.threads.serving import STOP_TIMEOUT_S
from pccl.types import Result
from pccl.web.hosts import Hosts, checked_names

if TYPE_CHECKING:
    from pccl.web.server import WebServer

logger = logging.getLogger("pccl.master")

DEFAULT_HTTP_PORT = 48149
HTTP_BACKLOG = 64


class MasterNode:
    """Keeps membership and arbitrates outcomes for one run; payload never passes through it.

    `run()` listens and returns at once, `interrupt()` stops it, `wait()` waits until it has stopped, and raises if a
    fault has stopped it. As a context manager it does all three. Thread-safe.

    One that runs goes on until it is interrupted, also if you let go of it, and a program that comes to its end, or
    exits, goes on with it: Ctrl-C and SIGTERM end both in order, unless the program has handlers of its own for them,
    of which one that raises does. The communicators of the program leave the run before. A program that ends by an
    exception is not held up.

    `token` is the run's shared secret: peers that do not know it are refused, and so are those that have one while the
    master has none (default: PCCL_TOKEN in the environment; "": none). `ssl_context`, an ordinary server-side
    `ssl.SSLContext` with a certificate, makes peers use TLS on their connection to the master.

    `peer_timeout`: after so many seconds without a heartbeat a peer is lost to the others, and the master to the
    peers (default: PCCL_PEER_TIMEOUT in the environment, else 5). A process sends heartbeats also while Python is
    busy, but not while it is stopped, without power or cut off.

    `engine_threads` of every peer move its payload, 1 to 16 (default: PCCL_ENGINE_THREADS in the environment, else 1).
    More help where machines have cores to spare and links that are faster than one core. The results are the same
    bits. Each link has at least so many connections.

    A run outlives its master. One that begins at the same address takes the run over from its peers; so does a standby
    (`standby_of`, the "host:port" of the others, with commas between), which founds no run by itself and waits, at an
    address that the peers know too, for those who have lost theirs. A majority of the run's last view has to come, and
    it goes on. Where peers know several masters, one that loses more than half of a run's peers at once leads no
    further: they may be with another.

    `state` is a directory in which a master keeps what tells those of its run from whom it has left out (default:
    PCCL_STATE in the environment; "": none). One that begins there waits for the run that is recorded, and takes
    nobody else for it; no two use one directory at a time. Without it, one that begins where peers know no other
    address waits for all peers of the last view that it hears of, until the first of them would give up; with
    `resume_any` for no more than a majority and a peer timeout. A second process behind the same name is not noticed.

    A run is founded by its first peer. At an address where there may have been one before, that peer waits for a peer
    timeout and two seconds, for peers of that run to come first, or as long as such may live where `state` records
    them. `found` says that there is none, `resume` that there is one: then none is founded before that has been led.

    `http` ("host:port", best of a loopback address: it asks nobody who they are) shows the run to browsers at `/`, as
    JSON at `/status.json`, to Prometheus at `/metrics`, and says at `/healthz` that the master lives. Who asks for the
    others by a name that is not this machine's, nor one of `http_hosts`, is refused, since a page from elsewhere may do
    so behind a user's back.
    """

    def __init__(
        self,
        listen_address: str = f"0.0.0.0:{addresses.DEFAULT_PORT}",
        *,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        peer_timeout: float | None = None,
        engine_threads: int | None = None,
        http: str | None = None,
        http_hosts: Sequence[str] = (),
        standby_of: str = "",
        state: str | os.PathLike[str] | None = None,
        found: bool = False,
        resume: bool = False,
        resume_any: bool = False,
    ) -> None:
        """INVALID_ARGUMENT."""
        if found and resume:
            what = "found= says that there is no run to go on with, and resume= that there is; give one of them"
            raise PCCLError(Result.INVALID_ARGUMENT, "MasterNode", what)
        self._state = os.environ.get("PCCL_STATE", "") if state is None else os.fspath(state)
        self._beginning = Beginning.FOUND if found else Beginning.RESUME if resume else Beginning.UNKNOWN
        self._resumes_any = resume_any
        self._options = MasterOptions(
            peer_timeout_s=_peer_timeout_s(peer_timeout), engine_threads=_engine_threads(engine_threads)
        )
        try:
            self._host, self._port = addresses.parse(listen_address)
            self._standby_of = addresses.parse_masters(standby_of) if standby_of else []
            self._http = None if http is None else addresses.parse(http, DEFAULT_HTTP_PORT)
            self._http_hosts = checked_names(http_hosts)
            if self._http_hosts and self._http is None:
                raise ValueError("http_hosts are names of what http= shows, and that is not given")
        except ValueError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "MasterNode", str(error)) from None
        self._token = security.token(token, "MasterNode")
        self._ssl_context = security.checked_context(ssl_context, "MasterNode")
        self._service: _Service | None = None

    def run(self) -> None:
        """INVALID_ARGUMENT if the address cannot be listened on or the state directory not be used, INVALID_USAGE if it
        runs already, INTERNAL_ERROR if the system denies it a thread."""
        if self._service is not None and not self._service.stopped.is_set():
            raise PCCLError(Result.INVALID_USAGE, "MasterNode.run", f"already running at {self.address}")
        try:
            listener = addresses.listen(self._host, self._port)
        except OSError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "MasterNode.run", str(error.strerror)) from None
        try:
            web_listener = None if self._http is None else addresses.listen(*self._http, backlog=HTTP_BACKLOG)
        except OSError as error:
            listener.close()
            raise PCCLError(Result.INVALID_ARGUMENT, "MasterNode.run", str(error.strerror)) from None
        security.warn_if_exposed(self._host, self._token, stacklevel=2)
        if self._http is not None:
            security.warn_if_shown(self._http[0], stacklevel=2)
        state = None
        try:
            if self._state:
                state = FenceFile(self._state, addresses.join(self._host, listener.getsockname()[1]))
            beginning = self._beginning
            if beginning is Beginning.UNKNOWN and not self._port and state is None:
                beginning = Beginning.FOUND  # nobody has known this port
            web = None
            if web_listener is not None and self._http is not None:
                web = web_listener, Hosts(web_listener.getsockname()[0], self._http[0], self._http_hosts)
            service = _Service(
                self._host,
                listener,
                self._options,
                self._token,
                self._ssl_context,
                web,
                beginning,
                self._standby_of,
                state,
                self._resumes_any,
            )
        except (OSError, StateError) as error:
            for opened in (listener, web_listener, state):
                if opened is not None:
                    opened.close()
            code = Result.INVALID_ARGUMENT if isinstance(error, StateError) else Result.INTERNAL_ERROR
            raise PCCLError(code, "MasterNode.run", str(error)) from None
        self._service = service
        portal.on_fork(service)
        portal.outlasts(service)
        portal.current().start(service.serve)

    @property
    def address(self) -> str:
        """The "host:port" it listens on, with the actual port where 0 was asked for."""
        port = self._service.port if self._service is not None else self._port
        return addresses.join(self._host, port)

    @property
    def http_address(self) -> str | None:
        """The "host:port" where the run is shown, with the actual port; None if it is not."""
        if self._http is None:
            return None
        port = self._service.http_port if self._service is not None else self._http[1]
        return addresses.join(self._http[0], port)

    def interrupt(self) -> None:
        """Stops it: connections are closed, peers see the master lost, and its ports are free when this returns, as
        they are at once. May be called again, from any thread and from signal handlers. TIMEOUT after some seconds."""
        service = self._service
        if service is None or service.stopped.is_set():
            return
        service.interrupt()
        if not portal.current().is_this_thread and not service.stopped.wait(STOP_TIMEOUT_S):
            what = f"{service.description} has not stopped within {STOP_TIMEOUT_S:g} s; it does when this process ends"
            raise PCCLError(Result.TIMEOUT, "MasterNode.interrupt", what)

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it has stopped; False if `timeout` seconds passed first. INTERNAL_ERROR if a fault of pccl has
        ended it; other masters and communicators of the process are none the worse for that."""
        limit_s = _timeouts.checked_s(timeout, "MasterNode.wait")
        if self._service is None:
            return True
        if not self._service.stopped.wait(limit_s):
            return False
        if self._service.fault:
            raise PCCLError(Result.INTERNAL_ERROR, "MasterNode.wait", self._service.fault)
        return True

    def __enter__(self) -> MasterNode:
        self.run()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.interrupt()
            self.wait(STOP_TIMEOUT_S)
        except PCCLError:
            if error is None:
                raise


def _peer_timeout_s(given: float | None) -> float:
    text = os.environ.get("PCCL_PEER_TIMEOUT", "") if given is None else str(given)
    try:
        seconds = float(text) if text else MasterOptions.peer_timeout_s
    except ValueError:
        seconds = math.nan
    if not PEER_TIMEOUT_S_MIN <= seconds <= PEER_TIMEOUT_S_MAX:
        what = "PCCL_PEER_TIMEOUT" if given is None else "peer_timeout"
        raise PCCLError(
            Result.INVALID_ARGUMENT,
            "MasterNode",
            f"{what} {text!r} is no number of seconds within [{PEER_TIMEOUT_S_MIN:g}, {PEER_TIMEOUT_S_MAX:g}]",
        )
    return seconds


def _engine_threads(given: int | None) -> int:
    text = os.environ.get("PCCL_ENGINE_THREADS", "") if given is None else str(given)
    try:
        threads = int(text) if text else MasterOptions.engine_threads
    except ValueError:
        threads = 0
    if not 1 <= threads <= ENGINE_THREADS_MAX:
        what = "PCCL_ENGINE_THREADS" if given is None else "engine_threads"
        raise PCCLError(
            Result.INVALID_ARGUMENT, "MasterNode", f"{what} {text!r} is no number within [1, {ENGINE_THREADS_MAX}]"
        )
    return threads


class _Service:
    """What runs in the portal, whatever becomes of its MasterNode."""

    def __init__(
        self,
        host: str,
        listener: socket.socket,
        options: MasterOptions,
        token: str,
        ssl_context: ssl.SSLContext | None,
        web: tuple[socket.socket, Hosts] | None,
        beginning: Beginning,
        standby_of: Sequence[Address],
        state: FenceFile | None,
        resumes_any: bool,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self.description = f"the master at {addresses.join(host, self.port)}"
        self.stopped = Latch()
        self.is_interrupted = False
        self.fault = ""
        """Of pccl's own, which has ended it."""
        self._server = MasterServer(
            listener,
            options,
            token,
            ssl_context,
            beginning,
            standby_of,
            security.client_tls(None, "MasterNode") if standby_of else None,
            state,
            resumes_any,
        )
        self._web: WebServer | None = None
        self.http_port = 0
        if web is not None:
            from pccl.web.routes import Routes  # not needed to run a master
            from pccl.web.server import WebServer

            web_listener, hosts = web
            self.http_port = web_listener.getsockname()[1]
            self._web = WebServer(web_listener, Routes(self._server.board, hosts))
        self._scope = trio.CancelScope()

    async def serve(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    if self._web is not None:
                        nursery.start_soon(self._web.serve)
                    await self._server.serve()
        except Exception as error:
            self.fault = faults.report(self.description, error)
            with suppress(Exception):
                logger.error("%s", self.fault, exc_info=error)
        finally:
            self.stopped.set()

    def interrupt(self) -> None:
        self.is_interrupted = True
        if not self.stopped.is_set():
            portal.current().post(self._scope.cancel)

    async def close(self) -> None:
        self._scope.cancel()

    def forget_after_fork(self) -> None:
        self._server.forget_after_fork()
        if self._web is not None:
            self._web.forget_after_fork()
        self.stopped.set()
