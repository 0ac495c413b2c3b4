"""A master inside this process; `pccl master` is its command-line equivalent."""

from __future__ import annotations

import logging
import math
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING

import trio

from pccl import _timeouts, security
from pccl.errors import PCCLError, integer_argument, invalid
from pccl.protocol.failover.bootstrap import Start
from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.messages import ENGINE_THREADS_MAX, PEER_TIMEOUT_S_MAX, PEER_TIMEOUT_S_MIN
from pccl.runtime.master.durable_state import StateError, default_directory, open_directory
from pccl.runtime.master.server import MasterServer
from pccl.runtime.network import addresses
from pccl.runtime.threads import portal, tasks
from pccl.runtime.threads.portal import STOP_TIMEOUT_S
from pccl.runtime.threads.waking import Latch
from pccl.types import Result
from pccl.web.routes import Hosts, checked_names

if TYPE_CHECKING:
    from pccl.web.server import WebServer

logger = logging.getLogger("pccl.master")

DEFAULT_HTTP_PORT = 48149
HTTP_BACKLOG = 64


class MasterNode:
    """Manages the membership of one run and decides the outcome of ops. No payload passes through a master.

    `run()` starts the master, `interrupt()` stops it, and `wait()` waits for its end. A `with` block does all three.

    Args:
        listen_address: The "host:port" to listen on; port 0 picks any free port.
        token: The run's shared secret. Default: PCCL_TOKEN; "" means none.
        ssl_context: Server-side context with a certificate. If given, peers must use TLS.
        peer_timeout: Seconds without a heartbeat after which a peer or master is lost. Default: PCCL_PEER_TIMEOUT or 5.
        engine_threads: Threads per peer that move payload, 1 to 16. Default: PCCL_ENGINE_THREADS, else 1.
        http: The "host:port" that serves the status page, JSON and metrics without authentication.
        http_hosts: Additional host names under which the page may be requested.
        standby_of: "host:port,..." of the other masters. A standby only takes over a run that has lost its master.
        state: Directory for the run's durable state; "none" disables it. Default: PCCL_STATE; else, with a fixed port
            and without `standby_of`, a directory per port under XDG_STATE_HOME.
        start: "auto" continues the recorded run or starts a new one, "new" discards the record, and "resume" waits
            indefinitely for peers from an earlier run.
        run_name: The run's name. Peers of a run with another name are refused. Default: PCCL_RUN; "" matches any.
        founders: The number of peers that start a run together, in one view.
        daemon: If True, the master stops when the program ends; otherwise the program waits for the master.
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
        start: str = "auto",
        run_name: str | None = None,
        founders: int = 1,
        daemon: bool = False,
    ) -> None:
        try:
            self._start = Start(start)
        except ValueError:
            what = f"start={start!r} is not one of {', '.join(repr(each.value) for each in Start)}"
            raise invalid("MasterNode", what) from None
        default = MasterOptions
        self._options = MasterOptions(
            peer_timeout_s=_number(
                "PCCL_PEER_TIMEOUT", peer_timeout, default.peer_timeout_s, PEER_TIMEOUT_S_MIN, PEER_TIMEOUT_S_MAX, False
            ),
            engine_threads=int(
                _number("PCCL_ENGINE_THREADS", engine_threads, default.engine_threads, 1, ENGINE_THREADS_MAX, True)
            ),
            founders=integer_argument("founders", founders, "MasterNode", 1, MasterOptions.pending_max),
            run_name=security.run_name(run_name, "MasterNode"),
            takeover_level="info" if daemon else "warning",  # part of a program that reports what it loses
        )
        try:
            self._host, self._port = addresses.parse(listen_address)
            self._standby_of = addresses.parse_masters(standby_of) if standby_of else []
            self._http = None if http is None else addresses.parse(http, DEFAULT_HTTP_PORT)
            self._http_hosts = checked_names(http_hosts)
            if self._http_hosts and self._http is None:
                raise ValueError("http_hosts= needs http=")
        except ValueError as error:
            raise invalid("MasterNode", str(error)) from None
        self._state = os.environ.get("PCCL_STATE") if state is None else os.fspath(state)
        self._has_default_state = self._state is None
        if self._state is None and not standby_of:
            self._state = default_directory(self._port)
        if self._state == "none":
            self._state = ""
        self._token = security.token(token, "MasterNode")
        self._ssl_context = security.checked_context(ssl_context, "MasterNode")
        self._is_daemon = daemon
        self._service: _Service | None = None

    def run(self) -> None:
        """Listen, serve in the background, and return at once.

        Raises:
            PCCLError: INVALID_ARGUMENT if listening on the address fails or the state directory cannot be used;
                INVALID_USAGE if the master is already running; INTERNAL_ERROR if the system refuses a new thread.
        """
        if self._service is not None and not self._service.stopped.is_set():
            raise PCCLError(Result.INVALID_USAGE, "MasterNode.run", f"already running at {self.address}")
        with ExitStack() as opened:
            try:
                listener = addresses.listen(self._host, self._port)
                opened.callback(listener.close)
                web = None
                if self._http is not None:
                    web_listener = addresses.listen(*self._http, backlog=HTTP_BACKLOG)
                    opened.callback(web_listener.close)
                    web = web_listener, Hosts(web_listener.getsockname()[0], self._http[0], self._http_hosts)
            except OSError as error:
                raise invalid("MasterNode.run", str(error.strerror)) from None
            security.warn_if_exposed(self._host, self._token, stacklevel=2)
            if self._http is not None:
                security.warn_if_shown(self._http[0], stacklevel=2)
            state = None
            try:
                if self._state:
                    owner = addresses.join(self._host, listener.getsockname()[1])
                    state = open_directory(self._state, owner, self._has_default_state)
                    if state is not None:
                        opened.callback(state.close)
                start = self._start
                if start is Start.AUTO and not self._port and state is None:
                    start = Start.NEW  # no peer can know this port from an earlier master
                server = MasterServer(
                    listener,
                    self._options,
                    self._token,
                    self._ssl_context,
                    start,
                    self._standby_of,
                    security.client_tls(None, "MasterNode") if self._standby_of else None,
                    state,
                )
                service = _Service(f"the master at {addresses.join(self._host, server.port)}", server, web)
            except (OSError, StateError) as error:
                code = Result.INVALID_ARGUMENT if isinstance(error, StateError) else Result.INTERNAL_ERROR
                raise PCCLError(code, "MasterNode.run", str(error)) from None
            opened.pop_all()
        self._service = service
        portal.on_fork(service)
        if self._is_daemon:
            portal.on_exit(service)
        else:
            portal.outlasts(service)
        portal.current().start(service.serve)

    def __repr__(self) -> str:
        service = self._service
        where = self.address + (f", shown at http://{self.http_address}" if self._http is not None else "")
        if service is None:
            return f"<MasterNode {where}: not running>"
        return f"<MasterNode {where}: {'stopped' if service.stopped.is_set() else 'running'}>"

    @property
    def address(self) -> str:
        """The "host:port" that the master listens on, with the actual port if port 0 was requested."""
        port = self._service.port if self._service is not None else self._port
        return addresses.join(self._host, port)

    @property
    def http_address(self) -> str | None:
        """The "host:port" of the status page, with the actual port; None if there is no page."""
        if self._http is None:
            return None
        port = self._service.http_port if self._service is not None else self._http[1]
        return addresses.join(self._http[0], port)

    def interrupt(self) -> None:
        """Stop the master, disconnect its peers and free its ports. May be called from any thread or signal handler.

        Raises:
            PCCLError: TIMEOUT if the master has not stopped after a few seconds.
        """
        service = self._service
        if service is None or service.stopped.is_set():
            return
        service.interrupt()
        if not portal.current().is_this_thread and not service.stopped.wait(STOP_TIMEOUT_S):
            what = f"{service.description} has not stopped within {STOP_TIMEOUT_S:g} s; end this process"
            raise PCCLError(Result.TIMEOUT, "MasterNode.interrupt", what)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the master has stopped. Return False if `timeout` seconds passed first.

        Raises:
            PCCLError: INTERNAL_ERROR if an internal fault has stopped the master.
        """
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


def _number(variable: str, given: float | None, default: float, least: float, most: float, is_whole: bool) -> float:
    """Return the argument, else the variable, else the default. Raise INVALID_ARGUMENT if out of range."""
    text = os.environ.get(variable, "") if given is None else str(given)
    try:
        value = (int if is_whole else float)(text) if text else default
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        name = variable if given is None else variable.removeprefix("PCCL_").lower()
        what = f"{name} {text!r} is not a number within [{least:g}, {most:g}]"
        raise invalid("MasterNode", what)
    return value


class _Service:
    """The part of a MasterNode that runs in the portal's thread, even after the MasterNode is dropped."""

    def __init__(self, description: str, server: MasterServer, web: tuple[socket.socket, Hosts] | None) -> None:
        self.port = server.port
        self.description = description
        self.stopped = Latch()
        self.is_interrupted = False
        self.fault = ""
        """The internal error that stopped the master, if any."""
        self._server = server
        self._web: WebServer | None = None
        self.http_port = 0
        if web is not None:
            from pccl.web.routes import Routes  # not needed to run a master
            from pccl.web.server import WebServer

            web_listener, hosts = web
            self.http_port = web_listener.getsockname()[1]
            self._web = WebServer(web_listener, Routes(self._server.board, hosts, self.port))
        self._scope = trio.CancelScope()

    async def serve(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    if self._web is not None:
                        nursery.start_soon(self._web.serve)
                    await self._server.serve()
        except Exception as error:
            self.fault = tasks.report(self.description, error)
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
