"""Addresses, listening sockets, and the order of masters in a search.

If the master sees a peer at a loopback address, the peer runs on the master's machine. A dialer then replaces that
address with the one it reached the master at.

`MasterAddresses` searches for a master. Time and random numbers are arguments:

1. A round tries all addresses, in the same order for all peers, so that they meet at the same master.
2. In a round, peers wait longest at the first master that is gathering peers, and only briefly at the others.
3. A round takes no longer than a majority waits for the remaining peers.
4. Rounds are at most PAUSE_S_MAX apart. The first pauses are shorter, so that a restarted master is found quickly.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_PORT = 48148


def parse(address: str, default_port: int | None = DEFAULT_PORT) -> tuple[str, int]:
    """Split "host:port", "host", "[v6]:port" or a bare IPv6 address. Raises ValueError."""
    _require_text(address)
    text = address.strip()
    if "://" in text:
        where = text.partition("://")[2].partition("/")[0] or "host:port"
        page = "; peers do not dial the status page's port" if text.startswith("http") else ""
        raise ValueError(f"address {address!r} is a URL: write only host:port, such as {where!r}{page}")
    host, separator, port = text.rpartition(":")
    if text.startswith("["):
        inside, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"address {address!r}: write an IPv6 address as [::1]:48148")
        host, separator, port = inside, rest[:1], rest[1:]
    elif text.count(":") > 1:
        host, separator, port = text, "", ""
    elif not separator:
        host, port = text, ""
    if not host:
        raise ValueError(f"address {address!r}: the host is missing; write host:port")
    if host.isdigit():
        text = f"{host} is a port: write 0.0.0.0:{host} to listen on all interfaces, or host:{host} to dial"
        raise ValueError(f"address {address!r}: {text}")
    if not separator and default_port is not None:
        return host, default_port
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ValueError(f"address {address!r}: {port!r} is not a port; write host:port with a port from 0 to 65535")
    return host, int(port)


def parse_masters(addresses: str) -> list[tuple[str, int]]:
    _require_text(addresses)
    found = [parse(address) for address in addresses.split(",") if address.strip()]
    if not found:
        raise ValueError(f"address {addresses!r}: the host is missing; write host:port")
    return list(dict.fromkeys(found))


def _require_text(address: object) -> None:
    if not isinstance(address, str):
        raise ValueError(f"address {address!r} is not text; write host:port")


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(sockaddr: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return a socket address's host. An IPv4-mapped IPv6 address becomes an IPv4 address."""
    host = sockaddr[0]
    return host.removeprefix("::ffff:") if "." in host else host


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def public_reach(host: str) -> str | None:
    """Return a public address of a listener on `host`, or None. An empty host means every interface."""
    if host and not is_unspecified(host):
        try:
            found = [
                plain_host((str(entry[4][0]), 0)) for entry in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            ]
        except OSError:
            return None
    else:
        found = source_addresses()
    return next((address for address in found if ipaddress.ip_address(address.partition("%")[0]).is_global), None)


def source_towards(host: str) -> str | None:
    """Return the local address for connections to a host, or None. No packet is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(where)
            return plain_host(sock.getsockname())
    except OSError:  # no such host, no route, or no such family
        return None


def source_addresses() -> list[str]:
    return [found for found in map(source_towards, ("192.0.2.1", "2001:db8::1")) if found]


def reachable(hosts: list[str], master_host: str) -> list[str]:
    """Return a peer's addresses for a dialer that reached the master at `master_host`."""
    usable = [master_host if is_loopback(host) else host for host in hosts]
    return list(dict.fromkeys(usable))


def listen(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """Return a non-blocking listening socket. An empty host or "::" means every interface, with IPv6 and IPv4 where
    available. An OSError names the address."""
    if not host or is_unspecified(host):
        is_dual = not host or ":" in host
        families = [socket.AF_INET6, socket.AF_INET] if is_dual else [socket.AF_INET]
        failure: OSError | None = None
        for family in families:
            try:
                return _bound(family, ("", port), backlog, dual=family == socket.AF_INET6)
            except OSError as error:
                failure = error
                if error.errno == errno.EADDRINUSE:
                    break
        assert failure is not None
        raise _explained(failure, host or "*", port) from failure
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, sockaddr = found[0]
        return _bound(family, sockaddr, backlog, dual=False)
    except OSError as error:
        raise _explained(error, host, port) from error


def _bound(family: int, sockaddr: tuple[object, ...], backlog: int, dual: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        sock.bind(sockaddr)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _explained(error: OSError, host: str, port: int) -> OSError:
    where = join(host, port)
    if error.errno == errno.EADDRINUSE:
        text = f"cannot listen on {where}: the port is in use; free it or choose another (0 for any free port)"
    elif error.errno == errno.EACCES:
        text = f"cannot listen on {where}: not permitted; ports below 1024 need privileges"
    else:
        text = f"cannot listen on {where}: {error.strerror or error}"
    return OSError(error.errno, text)


PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 0.5
FIRST_SHARE = 0.6
"""Time to wait at a master with a majority, in peer timeouts. It exceeds the time that the master needs to start
leading (`gathering.GATHER_TIMEOUTS`), because a peer that leaves then would be lost."""
OTHER_SHARE = 0.1
"""Time to wait, in peer timeouts, at each other master."""
OTHER_S_MIN = 0.5
"""Minimum wait at each other master, which may be far away; OTHERS_SHARE takes precedence."""
OTHERS_SHARE = 0.3
"""Maximum total wait, in peer timeouts, at all other masters together."""
PAUSE_SHARE = 0.1
"""Longest pause, in peer timeouts, between rounds in which a master gathers peers; at least PAUSE_S_MIN."""
LEAD_TIMEOUTS = 3.5
"""Time to wait, in peer timeouts, at a master with a majority. It is longer than the master needs to start leading
(`gathering.GATHER_TIMEOUTS`), because a peer that leaves at that moment would be lost."""
DIAL_S = 1.5
"""Time limit for a connection attempt. A machine that is down does not answer at all."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Attempt:
    address: Address
    pause_s: float


class MasterAddresses:
    def __init__(self, masters: Sequence[Address]) -> None:
        assert masters
        self.addresses = tuple(masters)
        self._asked = 0
        self._failures: dict[Address, str] = {}
        self._waited_in_round = -1
        self._pause_s_max = PAUSE_S_MAX

    def restarted(self) -> MasterAddresses:
        return MasterAddresses(sorted(self.addresses))

    def next(self, chance: float) -> Attempt:
        """Return the next attempt. `chance`, a random number in [0, 1), spreads a run's peers over time."""
        asked_in_round = self._asked % len(self.addresses)
        rounds = self._asked // len(self.addresses)
        pause_s = 0.0
        if asked_in_round == 0 and rounds:
            most_s = self._pause_s_max if self._waited_in_round == rounds - 1 else PAUSE_S_MAX
            pause_s = min(PAUSE_S_MIN * 2 ** min(rounds - 1, 10), most_s) * (0.5 + chance / 2)
        self._asked += 1
        return Attempt(self.addresses[asked_in_round], pause_s)

    def patience_s(self, peer_timeout_s: float, is_majority_there: bool) -> float:
        if len(self.addresses) == 1:
            return float("inf")
        if is_majority_there:
            return LEAD_TIMEOUTS * peer_timeout_s
        self._pause_s_max = min(PAUSE_S_MAX, max(PAUSE_S_MIN, PAUSE_SHARE * peer_timeout_s))
        current_round = (self._asked - 1) // len(self.addresses)
        if current_round != self._waited_in_round:
            self._waited_in_round = current_round
            return FIRST_SHARE * peer_timeout_s
        at_most_s = OTHERS_SHARE * peer_timeout_s / (len(self.addresses) - 1)
        return min(max(OTHER_S_MIN, OTHER_SHARE * peer_timeout_s), at_most_s)

    @property
    def are_all_asked_again(self) -> bool:
        """Whether a refusal is final because all other masters have already been asked."""
        return self._asked > len(self.addresses) or len(self.addresses) == 1

    def failed(self, address: Address, reason: str) -> None:
        self._failures[address] = reason

    @property
    def are_all_asked(self) -> bool:
        return self._asked >= len(self.addresses)

    def failures(self) -> str:
        return "; ".join(
            f"{host}:{port}: {self._failures[host, port]}"
            for host, port in self.addresses
            if (host, port) in self._failures
        )
