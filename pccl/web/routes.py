"""The paths of the page: maps a method, a path and a Host to an answer. There are no sockets here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Protocol

from pccl.protocol.status import RunStatus
from pccl.runtime.network.tls import begins_tls
from pccl.runtime.network.wire import PAGE_HEADER
from pccl.web import prometheus
from pccl.web.hosts import Hosts

TEXT = "text/plain; charset=utf-8"
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of the page, which is one file and talks to nobody but this server."""


class Board(Protocol):
    """The part of a master's status board that is needed here."""

    def status(self) -> RunStatus: ...

    def json(self) -> bytes: ...


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    content_type: str
    body: bytes
    headers: list[tuple[str, str]] = field(default_factory=list)


def is_no_browser(first: bytes) -> bool:
    """Whether somebody who begins a connection with these bytes speaks as a peer does, or TLS."""
    return first[:1] == b"\0" or begins_tls(first)


ANY_HOST = "/healthz"
"""The path that is answered for any Host: probes ask for it by whatever address they have, and it reveals nothing."""


class Routes:
    """The answers of a run's page."""

    def __init__(self, board: Board, hosts: Hosts, master_port: int) -> None:
        """`master_port` is told to peers that come here by mistake."""
        self._board = board
        self._master_port = master_port
        self._hosts = hosts
        self._page = files("pccl.web").joinpath("page.html").read_bytes()
        self._makers: dict[str, Callable[[], Answer]] = {
            "/": lambda: Answer(
                200, "text/html; charset=utf-8", self._page, [("Content-Security-Policy", PAGE_POLICY)]
            ),
            "/status.json": lambda: Answer(200, "application/json", self._board.json()),
            "/metrics": self._metrics,
            ANY_HOST: lambda: Answer(200, TEXT, b"ok\n"),
        }

    def answer(self, method: str, target: str, host: str | None) -> Answer:
        """Answer a request. `host` is its Host header, None if it has none."""
        path = target.partition("?")[0]
        if path != ANY_HOST and host is not None and not self._hosts.know(host):
            return Answer(421, TEXT, f"{self._hosts.refusal(host)}\n".encode())
        maker = self._makers.get(path)
        if maker is None:
            return Answer(404, TEXT, f"nothing is at this path; there are {', '.join(self._makers)}\n".encode())
        if method not in ("GET", "HEAD"):
            return Answer(405, TEXT, b"only GET and HEAD: nothing can be changed here\n", [("Allow", "GET, HEAD")])
        return maker()

    def answer_to_peers(self) -> Answer:
        """Answer somebody who speaks as peers do, or TLS, and is here by mistake."""
        text = f"this is the page of a pccl master, for browsers and without TLS: peers dial port {self._master_port}\n"
        return Answer(400, TEXT, text.encode(), [(PAGE_HEADER, str(self._master_port))])

    def _metrics(self) -> Answer:
        try:
            content_type, body = prometheus.exposition(self._board.status())
        except prometheus.NotInstalledError as error:
            return Answer(501, TEXT, f"{error}\n".encode())
        return Answer(200, content_type, body)
