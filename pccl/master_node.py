"""The master as an object of this process; `pccl master` is the same on the command line."""

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
from pccl._default_state import opened as opened_state
from pccl.errors import PCCLError, integer_argument
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
    """A master: it keeps the membership of one run and decides the outcome of ops that a loss leaves open.

    No payload passes through it. `run()` listens and returns at once, `interrupt()` stops it, and `wait()` waits until
    it has stopped. As a context manager it does all three. Thread-safe.

    A master that runs goes on until it is interrupted, even if you let go of the object. A program that comes to its
    end, or exits, goes on with it: Ctrl-C and SIGTERM then end both in order, unless the program has handlers of its
    own for these signals (one that raises ends both as well). The communicators of the program leave the run before. A
    program that ends by an exception is not held up.

    *A run outlives its master.* A master that begins at the same address takes the run over from its peers; so does a
    standby, at an address that the peers know too. The run goes on once a majority of its last view has come. If peers
    know several masters, one that loses more than half of a run's peers at once stops leading it: they may be with
    another.

    *A run is founded by its first peer.* At an address where there may have been a run before, that peer waits for a
    peer timeout and two seconds, so that peers of that run can come first, or, with `state`, for as long as those on
    record may look for a master. Both log what they wait for.

    Args:
        listen_address: The "host:port" to listen on: a name, an IPv4 or a bracketed IPv6 address; port 0 is any free
            one.
        token: The run's shared secret. Peers that do not know it are refused, and so are those that have one while the
            master has none. Default: PCCL_TOKEN in the environment; "" is none.
        ssl_context: A server-side `ssl.SSLContext` with a certificate, which makes peers use TLS on their connection to
            the master.
        peer_timeout: Seconds without a heartbeat after which a peer is lost to the others, and the master to the peers.
            A process sends heartbeats even while Python is busy, but not while it is stopped, without power or cut off.
            Default: PCCL_PEER_TIMEOUT in the environment, else 5.
        engine_threads: How many threads of every peer move its payload, 1 to 16. More help on machines with cores to
            spare and links that are faster than one core. The results are the same bits. Each link has at least as many
            connections. Default: PCCL_ENGINE_THREADS in the environment, else 1.
        http: The "host:port" at which the run is shown to browsers at `/`, as JSON at `/status.json` and to Prometheus
            at `/metrics`; `/healthz` says that the master lives. It asks nobody who they are, so a loopback address is
            best.
        http_hosts: Names of this machine by which the page may be asked for, beside its own. Requests for other
            names are refused, since a page from elsewhere may make them behind a user's back.
        standby_of: The "host:port" of the other masters, with commas between. A standby founds no run by itself, and
            waits for peers that have lost their master.
        state: A directory in which the master records what tells peers of its run from those that it has left out. A
            master that begins there waits for the run that is recorded, and takes nobody else for it. No two masters
            use one directory at a time. Without it, a master that begins where peers know no other address waits for
            all peers of the last view that it hears of, until the first of them would give up; a second master behind
            the same name is not noticed. Default: PCCL_STATE in the environment; "" and "none" are none. (`pccl master`
            at a fixed port has a default of its own, a directory of its user.)
        found: True if there is no run to go on with: one is founded at once.
        resume: True if there is one: none is founded before that has been led.
        founders: How many peers found a run together: as long as nobody is in the run, newcomers wait until so many are
            there, and one view admits them all.
        daemon: True if the end of the program shall not wait for this master, and stops it.

    Raises:
        PCCLError: INVALID_ARGUMENT.
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
        founders: int = 1,
        daemon: bool = False,
    ) -> None:
        if found and resume:
            what = "found= says that there is no run to go on with, and resume= that there is; give one of them"
            raise PCCLError(Result.INVALID_ARGUMENT, "MasterNode", what)
        self._state = os.environ.get("PCCL_STATE", "") if state is None else os.fspath(state)
        if self._state == "none":
            self._state = ""
        self._beginning = Beginning.FOUND if found else Beginning.RESUME if resume else Beginning.UNKNOWN
        self._options = MasterOptions(
            peer_timeout_s=_peer_timeout_s(peer_timeout),
            engine_threads=_engine_threads(engine_threads),
            founders=integer_argument("founders", founders, "MasterNode", 1, MasterOptions.pending_max),
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
        self._is_daemon = daemon
        self._service: _Service | None = None

    def run(self) -> None:
        """Listen, serve in the background, and return at once.

        Raises:
            PCCLError: INVALID_ARGUMENT if the address cannot be listened on or the state directory cannot be used;
                INVALID_USAGE if it runs already; INTERNAL_ERROR if the system denies it a thread.
        """
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
                state = opened_state(self._state, addresses.join(self._host, listener.getsockname()[1]))
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
            )
        except (OSError, StateError) as error:
            for opened in (listener, web_listener, state):
                if opened is not None:
                    opened.close()
            code = Result.INVALID_ARGUMENT if isinstance(error, StateError) else Result.INTERNAL_ERROR
            raise PCCLError(code, "MasterNode.run", str(error)) from None
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
        """The "host:port" that it listens on, with the actual port if 0 was asked for."""
        port = self._service.port if self._service is not None else self._port
        return addresses.join(self._host, port)

    @property
    def http_address(self) -> str | None:
        """The "host:port" where the run is shown, with the actual port; None if it is not shown."""
        if self._http is None:
            return None
        port = self._service.http_port if self._service is not None else self._http[1]
        return addresses.join(self._http[0], port)

    def interrupt(self) -> None:
        """Stop the master: its connections are closed, and its ports are free when this returns.

        Peers see the master lost. It may be called again, from any thread and from signal handlers.

        Raises:
            PCCLError: TIMEOUT if it has not stopped after some seconds.
        """
        service = self._service
        if service is None or service.stopped.is_set():
            return
        service.interrupt()
        if not portal.current().is_this_thread and not service.stopped.wait(STOP_TIMEOUT_S):
            what = f"{service.description} has not stopped within {STOP_TIMEOUT_S:g} s; it does when this process ends"
            raise PCCLError(Result.TIMEOUT, "MasterNode.interrupt", what)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the master has stopped. Return False if `timeout` seconds passed first.

        Raises:
            PCCLError: INTERNAL_ERROR if a fault of pccl has stopped it. Other masters and communicators of the process
                are not affected by that.
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
    """The part of a MasterNode that runs in the portal's thread. It goes on if the MasterNode is dropped."""

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
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self.description = f"the master at {addresses.join(host, self.port)}"
        self.stopped = Latch()
        self.is_interrupted = False
        self.fault = ""
        """The fault of pccl that has stopped it, in words; empty if there is none."""
        self._server = MasterServer(
            listener,
            options,
            token,
            ssl_context,
            beginning,
            standby_of,
            security.client_tls(None, "MasterNode") if standby_of else None,
            state,
        )
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
