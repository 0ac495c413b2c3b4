"""Checks by the Host header whether a request was meant for this server.

Somebody else's page can have its name resolve to the address of this server (DNS rebinding). A browser that has loaded
that page takes this server for the page's own, and lets its script read what is here. The browser then sends the name
of that page. So this server answers only to names that nobody else can have: on a loopback address to `localhost` and
loopback addresses, elsewhere to any address, `localhost` and this machine's own name, and everywhere to the name that
it listens on and those that the user gave. A request without a Host is not from a browser, and is answered.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)
LITERAL = re.compile(r"\[([^\]]*)\](:[0-9]*)?", re.ASCII)
"""Matches an IPv6 address in brackets, with or without a port."""


class Hosts:
    """The names that a server answers to.

    `bound` is the address it is bound to, `asked_for` what the user has written for that, and `names` are further ones.
    """

    def __init__(self, bound: str, asked_for: str = "", names: Iterable[str] = ()) -> None:
        address = _address(bound)
        self._is_loopback = address is not None and address.is_loopback
        self._names = {plain_name(name) for name in names} | {"localhost"}
        if asked_for and _address(asked_for) is None:
            self._names.add(asked_for.lower().rstrip("."))
        if not self._is_loopback:
            self._names.add(socket.gethostname().lower())

    def know(self, header: str | None) -> bool:
        """Return whether `header`, the Host of a request with or without a port, names this server."""
        if header is None:
            return True
        host = host_in(header)
        if host in self._names:
            return True
        address = _address(host)
        return address is not None and (address.is_loopback or not self._is_loopback)

    def refusal(self, header: str) -> str:
        """Return the text for a request that is refused: why, and what to do about it."""
        host = host_in(header)
        name = host if NAME.fullmatch(host) or _address(host) is not None else "NAME"
        ask = "http://localhost" if self._is_loopback else "its address"
        return (
            f"This server does not answer to the Host of this request: a page from elsewhere may have sent it. Ask for "
            f"{ask}, or have the master answer to that name: pccl master --http-host {name}, or MasterNode("
            f"http_hosts=[{name!r}])."
        )


def host_in(header: str) -> str:
    """Return the name or address in a Host header, without brackets, port and trailing dot, in lower case."""
    text = header.strip().lower()
    if text.startswith("["):
        literal = LITERAL.fullmatch(text)
        return literal[1] if literal else text
    host, separator, port = text.rpartition(":")
    if separator and (port.isdigit() or not port) and ":" not in host:
        text = host
    return text.removesuffix(".")


def checked_names(names: Sequence[str]) -> list[str]:
    """Return names as `plain_name` does. ValueError unless they are a list of host names or addresses."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"host names come as a list of them, not as {names!r}")
    return [plain_name(name) for name in names]


def plain_name(name: str) -> str:
    """Return a name or address in the form in which `host_in` returns it. ValueError if it is none."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no host name")
    text = name.strip().lower().removesuffix(".")
    inside = text.removeprefix("[").removesuffix("]")
    if _address(inside) is not None:
        return inside
    if not NAME.fullmatch(text):
        raise ValueError(f"{name!r} is no host name: write it as browsers send it, without http:// and port")
    return text


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
