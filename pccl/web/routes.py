"""The status page's routes: maps a method, a path and a Host header to an answer, without sockets.

To prevent DNS rebinding, the server answers only to Hosts that no other server can have: `localhost`, its own
addresses, this machine's name, the name that it listens on and those that the user gave. It also answers requests
without a Host, which do not come from browsers.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from pccl.runtime.master.requests import StatusBoard
from pccl.runtime.network.tls import begins_tls
from pccl.runtime.network.wire import PAGE_HEADER
from pccl.web import prometheus

NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)
LITERAL = re.compile(r"\[([^\]]*)\](:[0-9]*)?", re.ASCII)
"""Matches an IPv6 address in brackets, with or without a port."""
TEXT = "text/plain; charset=utf-8"
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of the page, which is a single file and connects only to this server."""


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    body: bytes
    headers: list[tuple[str, str]] = field(default_factory=list)


def is_no_browser(first: bytes) -> bool:
    return first[:1] == b"\0" or begins_tls(first)


class Hosts:
    """The host names of a server: `bound` is its address, `asked_for` is the user's name for the address, and `names`
    are additional names."""

    def __init__(self, bound: str, asked_for: str = "", names: Iterable[str] = ()) -> None:
        address = _address(bound)
        self._is_loopback = address is not None and address.is_loopback
        self._names = {plain_name(name) for name in names} | {"localhost"}
        if asked_for and _address(asked_for) is None:
            self._names.add(asked_for.lower().rstrip("."))
        if not self._is_loopback:
            self._names.add(socket.gethostname().lower())

    def know(self, header: str | None) -> bool:
        if header is None:
            return True
        host = host_in(header)
        if host in self._names:
            return True
        address = _address(host)
        return address is not None and (address.is_loopback or not self._is_loopback)

    def refusal(self, header: str) -> str:
        host = host_in(header)
        name = host if NAME.fullmatch(host) or _address(host) is not None else "NAME"
        own = "http://localhost" if self._is_loopback else "its address"
        return (
            f"To prevent DNS rebinding, this server does not answer to this Host. Use {own}, or allow the name: pccl "
            f"master --http-host {name}, or MasterNode(http_hosts=[{name!r}])."
        )


def host_in(header: str) -> str:
    """Return the name or address in a Host header, in lower case and without brackets, port and trailing dot."""
    text = header.strip().lower()
    if text.startswith("["):
        literal = LITERAL.fullmatch(text)
        return literal[1] if literal else text
    host, separator, port = text.rpartition(":")
    if separator and (port.isdigit() or not port) and ":" not in host:
        text = host
    return text.removesuffix(".")


def checked_names(names: Sequence[str]) -> list[str]:
    """Return host names and addresses, normalized as by `host_in`. Raise ValueError if one is invalid."""
    given: Any = names
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(each, str) for each in given):
        raise ValueError(f"host names must be a list, not {names!r}")
    return [plain_name(name) for name in names]


def plain_name(name: str) -> str:
    text = name.strip().lower().removesuffix(".")
    inside = text.removeprefix("[").removesuffix("]")
    if _address(inside) is not None:
        return inside
    if not NAME.fullmatch(text):
        raise ValueError(f"{name!r} is not a host name: write it without http:// and port")
    return text


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


ANY_HOST = "/healthz"
"""The path that is answered for any Host, because probes use any address and the answer contains no data."""


class Routes:
    def __init__(self, board: StatusBoard, hosts: Hosts, master_port: int) -> None:
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
        """Answer a request. `host` is its Host header, or None if it has none."""
        path = target.partition("?")[0]
        if path != ANY_HOST and host is not None and not self._hosts.know(host):
            return Answer(421, TEXT, f"{self._hosts.refusal(host)}\n".encode())
        maker = self._makers.get(path)
        if maker is None:
            return Answer(404, TEXT, f"unknown path; known paths: {', '.join(self._makers)}\n".encode())
        if method not in ("GET", "HEAD"):
            return Answer(405, TEXT, b"this server is read-only: use GET or HEAD\n", [("Allow", "GET, HEAD")])
        return maker()

    def answer_to_peers(self) -> Answer:
        text = f"this is a pccl master's status page, for browsers without TLS; peers dial port {self._master_port}\n"
        return Answer(400, TEXT, text.encode(), [(PAGE_HEADER, str(self._master_port))])

    def _metrics(self) -> Answer:
        try:
            content_type, body = prometheus.exposition(self._board.status())
        except prometheus.NotInstalledError as error:
            return Answer(501, TEXT, f"{error}\n".encode())
        return Answer(200, content_type, body)
