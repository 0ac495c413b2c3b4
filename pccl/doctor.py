"""Finds problems that keep this host from joining a run, and suggests remedies. `pccl doctor` runs the same checks.

for check in pccl.doctor.examine("host:48148"):
    print(check.verdict, check.name, check.text, check.advice)
"""

from __future__ import annotations

import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import trio

from pccl import security
from pccl._version import __version__
from pccl.errors import PCCLError, invalid
from pccl.protocol.messages import PADDING_BYTES_MAX, PROTOCOL_VERSION
from pccl.protocol.names import label
from pccl.runtime.network import addresses
from pccl.runtime.network.clients import NoAnswer, PathReport, ask, check
from pccl.runtime.network.dialing import dial_tcp
from pccl.runtime.threads import portal
from pccl.status import RunStatus
from pccl.types import Result

__all__ = ["Check", "examine"]

OK, WARNING, FAILED = "ok", "warning", "failed"

CLOCK_S = 1.0
"""Clock offset above which logs are hard to compare."""
FILES_MIN = 1024
BACKLOG_MIN = 128
LONG_PATH_S = 0.02
"""Round trip above which TCP windows matter."""
CONNECTIONS_MAX = 16
"""Maximum number of connections per link; their windows add up."""
LOSSY_CONNECTIONS_MAX = 64
"""Maximum number of connections for a link that losses limit."""
FAR_S = 0.002
"""Links with a round trip of at least this choose bbr, or add connections if packets are lost."""
WINDOW_BYTES_MIN = 16 << 20
PEERS_MAX = 16
DIAL_S = 3.0
PROC = Path("/proc/sys/net")
OTHER_VERSION_SIGNS = ("speaks protocol", "CheckRequest", "not an expected message")


@dataclass(frozen=True)
class Check:
    """One check and its result."""

    name: str
    verdict: str
    """"ok", "warning" (it works but could be better) or "failed"."""
    text: str
    """The finding, with figures."""
    advice: str = ""
    """The remedy; empty if none is needed."""


def examine(
    address: str,
    *,
    token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    listen: str | None = None,
    advertise: str | None = None,
) -> list[Check]:
    """Check the path to and from a master, and this host's limits, without interrupting the run. Thread-safe.

    Args:
        address: The master's "host:port", or several separated by commas; each is examined.
        token: The run's shared secret, as for a peer. Default: PCCL_TOKEN in the environment.
        ssl_context: A TLS context, as for a peer, with the same defaults from the environment.
        listen: As for a `Communicator` on this host. Default: PCCL_LISTEN in the environment.
        advertise: As for a `Communicator` on this host. Default: PCCL_ADVERTISE in the environment.

    Returns:
        The checks, in order. If a master cannot be reached, its remaining checks are skipped.

    Raises:
        PCCLError: INVALID_ARGUMENT; NOT_INITIALIZED if the interpreter exits.
    """
    secret = security.token(token, "examine")
    context = security.client_tls(ssl_context, "examine")
    listen = os.environ.get("PCCL_LISTEN", "") if listen is None else listen
    advertise = os.environ.get("PCCL_ADVERTISE", "") if advertise is None else advertise
    try:
        masters = addresses.parse_masters(address)
        listen_at = addresses.parse(listen, default_port=0) if listen else ("", 0)
        advertised = addresses.parse(advertise, default_port=0) if advertise else None
    except ValueError as error:
        raise invalid("examine", str(error)) from None
    found: list[Check] = []
    try:
        for host, port in masters:
            doctor = _Doctor(host, port, secret, context, listen_at, advertised)
            found += portal.current().call(doctor.examine)
    except portal.PortalClosedError as error:
        raise PCCLError(Result.NOT_INITIALIZED, "examine", str(error)) from None
    found += _limits()
    return found


@dataclass
class _Doctor:
    """Examines the path to one master."""

    _host: str
    _port: int
    _token: str
    _context: ssl.SSLContext | None
    _listen_at: tuple[str, int]
    _advertised: tuple[str, int] | None

    @property
    def _where(self) -> str:
        return addresses.join(self._host, self._port)

    async def examine(self) -> list[Check]:
        found = [await self._reach()]
        if found[0].verdict == FAILED:
            return found
        try:
            with trio.fail_after(10 * DIAL_S):
                status = await ask(self._host, self._port, self._token, self._context)
        except NoAnswer as error:
            return [*found, Check("master", FAILED, str(error), _advice_on(str(error)))]
        except trio.TooSlowError:
            text = f"{self._where} accepts connections but does not answer"
            return [*found, Check("master", FAILED, text, "check that it is a pccl master and that its process runs")]
        found.append(self._versions(status))
        found += await self._path()
        found += await self._peers(status)
        return found

    async def _reach(self) -> Check:
        begun_s = time.monotonic()
        try:
            with trio.fail_after(DIAL_S):
                sock = await dial_tcp(self._host, self._port)
        except trio.TooSlowError:
            text = f"no answer from {self._where} within {DIAL_S:g} s: packets are dropped on the path"
            advice = "open the port in the firewalls of that host and its network, and check the address"
            return Check("reach", FAILED, text, advice)
        except ConnectionRefusedError:
            text = f"no process listens on {self._where}"
            return Check("reach", FAILED, text, "start `pccl master --listen 0.0.0.0:PORT` there, or correct the port")
        except OSError as error:
            text = f"{self._where} cannot be reached: {error.strerror or error}"
            return Check("reach", FAILED, text, "check the name, the route and the network of this host")
        seconds = time.monotonic() - begun_s
        peer = addresses.plain_host(sock.getpeername())
        sock.close()
        return Check("reach", OK, f"{self._where} ({peer}) accepts a connection in {seconds * 1e3:.1f} ms")

    def _versions(self, status: RunStatus) -> Check:
        text = f"protocol {PROTOCOL_VERSION} on both sides; pccl {__version__} here, {status.version} there"
        peers = sum(member.state == "accepted" for member in status.members)
        return Check("versions", OK, f"{text}; run {status.run} ({status.role}) with {peers} peers")

    async def _path(self) -> list[Check]:
        listener: socket.socket | None = None
        found: list[Check] = []
        try:
            listener = addresses.listen(*self._listen_at)
        except OSError as error:
            advice = "if a peer listens there, check another port with --listen; otherwise choose a free port"
            found.append(Check("listen", WARNING, str(error.strerror), advice))
        host, port = self._advertised or ("", 0)
        hosts = [host] if host else []
        try:
            path = await check(self._host, self._port, self._token, self._context, listener, hosts, port or None)
        except NoAnswer as error:
            return [*found, Check("path", FAILED, str(error), _advice_on(str(error)))]
        finally:
            if listener is not None:
                listener.close()
        return [*found, *self._path_checks(path)]

    def _path_checks(self, path: PathReport) -> Iterator[Check]:
        least, middle, most = min(path.round_trips_s), median(path.round_trips_s), max(path.round_trips_s)
        text = f"{middle * 1e3:.2f} ms, {least * 1e3:.2f} at best, {most * 1e3:.2f} at worst"
        yield Check("round trip", OK, text)
        off_s, uncertain_s = path.clock_offset_s, path.clock_uncertainty_s
        direction = "ahead" if off_s > 0 else "behind"
        text = f"the master's clock is {abs(off_s):.3f} s {direction}, give or take {uncertain_s:.4f}"
        advice = "synchronize the clocks (NTP): logs are hard to compare, and certificates may fail"
        yield _judged("clock", abs(off_s) - uncertain_s <= CLOCK_S, text, advice)
        yield _mtu(path)
        if path.full_size != "both":
            return
        yield from self._calls(path)
        rates = f"{_rate(path.up_bytes_per_s)} to the master's host, {_rate(path.down_bytes_per_s)} from it"
        yield Check("bandwidth", OK, f"{rates}, over one connection, measured briefly")
        yield from _windows(path)
        yield from _congestion(path)

    def _calls(self, path: PathReport) -> Iterator[Check]:
        is_translated = path.own_host != path.seen_host and not addresses.is_loopback(path.seen_host)
        if is_translated:
            text = f"address translation: this host sends from {path.own_host}, but the master sees {path.seen_host}"
            advice = "forward a port, and set PCCL_LISTEN=0.0.0.0:PORT PCCL_ADVERTISE=PUBLIC:PORT"
            yield _judged("nat", self._advertised is not None, text, advice)
        for where, failure in path.calls:
            if not failure:
                yield Check("dialled back", OK, f"the master's host reaches this one at {where}")
                continue
            text = f"the master's host cannot reach this one at {where}: {failure}"
            if "no token" in failure:
                yield Check("dialled back", WARNING, text, "give master and peers a token, or check from that address")
                continue
            advice = "other peers must be able to dial this host: open the port in its firewall (PCCL_LISTEN sets it)"
            if is_translated:
                advice += ", forward the port, and advertise the public address (PCCL_ADVERTISE)"
            yield Check("dialled back", FAILED, text, advice)

    async def _peers(self, status: RunStatus) -> list[Check]:
        """Dial the run's peers, as a peer on this host would have to."""
        members = [member for member in status.members if member.state == "accepted"][:PEERS_MAX]
        found: list[Check] = []

        async def dial(name: str, address: str) -> None:
            host, port = addresses.parse(address)
            (host,) = addresses.reachable([host], self._host)
            failure = f"no answer within {DIAL_S:g} s"
            with trio.move_on_after(DIAL_S):
                try:
                    (await dial_tcp(host, port)).close()
                    failure = ""
                except OSError as error:
                    failure = error.strerror or str(error)
            where = f"peer {name} at {addresses.join(host, port)}"
            if failure:
                advice = "open that peer's port, or make it advertise a reachable address (PCCL_ADVERTISE)"
                found.append(Check("peers", FAILED, f"{where} cannot be reached: {failure}", advice))
            else:
                found.append(Check("peers", OK, f"{where} accepts a connection"))

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(dial, label(member.peer, member.name), member.address)
        return sorted(found, key=lambda each: each.text)


def _advice_on(text: str) -> str:
    for sign, advice in (
        ("no pccl master answered", "give the master's own address"),
        ("token", "give this side the run's token (PCCL_TOKEN, --token-file), or none if the master has none"),
        ("asks for TLS", "set PCCL_TLS_CA to the file with the certificate of the master's CA"),
        ("does not speak TLS", "unset PCCL_TLS_CA, or start the master with --tls-cert"),
        ("certificate", "set PCCL_TLS_CA to the CA of the master's certificate, and use a host name in it"),
        *((sign, "install the same version of pccl on both sides") for sign in OTHER_VERSION_SIGNS),
    ):
        if sign in text:
            return advice
    return "see the master's log (PCCL_LOG_LEVEL=INFO)"


def _judged(name: str, is_fine: bool, text: str, advice: str) -> Check:
    """Return a passed check if `is_fine`, otherwise a warning with advice."""
    return Check(name, OK, text) if is_fine else Check(name, WARNING, text, advice)


def _mtu(path: PathReport) -> Check:
    size = f"packets carry {path.segment_bytes} bytes"
    if path.full_size == "both":
        return Check("mtu", OK, f"full-size packets get through in both directions; {size}")
    if path.segment_bytes > PADDING_BYTES_MAX:  # within one host, where no packets are lost
        text = "the master does not read, or does not answer a large message"
        return Check("mtu", FAILED, text, "look at the master's process: is it stopped or overloaded?")
    direction = "from this host to the master" if path.full_size == "out" else "from the master to this host"
    return Check(
        "mtu",
        FAILED,
        f"small packets get through, but full-size ones are lost {direction}; {size}",
        "lower the MTU of the interface (WireGuard: 1420), let ICMP through, or set net.ipv4.tcp_mtu_probing=1",
    )


def _windows(path: PathReport) -> Iterator[Check]:
    round_trip_s = min(path.round_trips_s)
    if round_trip_s < LONG_PATH_S:
        return
    for name in ("tcp_rmem", "tcp_wmem"):
        text = _setting(f"ipv4/{name}")
        if not text:
            continue
        most = int(text.split()[-1])
        rate = most / round_trip_s
        link = f"a link to {_rate(CONNECTIONS_MAX * rate)}"
        what = f"{name} limits one connection to {_rate(rate)} at {round_trip_s * 1e3:.0f} ms, and {link}"
        advice = f"raise the maximum of net.ipv4.{name}: docs/operations.md, Long fat pipes"
        yield _judged("windows", most >= WINDOW_BYTES_MIN, what, advice)
    if _setting("ipv4/tcp_slow_start_after_idle") == "1":
        advice = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
        yield Check("windows", WARNING, "TCP returns to slow start on an idle link", advice)


def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= FILES_MIN
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    yield _judged("files", is_enough, f"{soft} open files", f"ulimit -n {most}: each link takes several")
    if backlog := _setting("core/somaxconn"):
        advice = "sysctl -w net.core.somaxconn=1024: peers that join at the same time may be refused"
        yield _judged("backlog", int(backlog) >= BACKLOG_MIN, f"somaxconn is {backlog}", advice)


def _congestion(path: PathReport) -> Iterator[Check]:
    control = path.congestion_control
    round_trip_s = min(path.round_trips_s)
    if not control:
        return
    if control not in ("cubic", "reno"):
        yield Check("congestion", OK, f"{control} here")
        return
    if path.may_choose_bbr:
        yield Check("congestion", OK, f"{control} here; links to distant peers use bbr")
        return
    what = f"{control} here, and this user may not choose bbr"
    if round_trip_s < FAR_S:
        yield Check("congestion", OK, f"{what}, but a short path does not need it")
        return
    loss = path.lost_segments / max(1, path.sent_segments)
    if loss:
        rate = 1.2 * path.segment_bytes / (round_trip_s * loss**0.5)
        lost = f"{path.lost_segments} of {path.sent_segments} packets to the master were lost ({loss:.2%})"
        many = f"the {LOSSY_CONNECTIONS_MAX} connections of a link to {_rate(LOSSY_CONNECTIONS_MAX * rate)}"
        what = f"{what}; {lost}, which limits a TCP connection to {_rate(rate)} and {many}"
    else:
        what = f"{what}; none of {path.sent_segments} packets were lost, so a link is slow only after pauses"
    what += "; links use UDP where it gets through"
    advice = "where it does not, as root: modprobe tcp_bbr; sysctl -w "
    if "bbr" in _setting("ipv4/tcp_available_congestion_control").split():
        advice = "where it does not, as root: sysctl -w "
    allowed = f"{_setting('ipv4/tcp_allowed_congestion_control')} bbr".strip()
    yield Check("congestion", WARNING, what, f"{advice}net.ipv4.tcp_allowed_congestion_control='{allowed}'")


def _setting(name: str) -> str:
    with suppress(OSError):
        return (PROC / name).read_text().strip()
    return ""


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:,.1f} Mbit/s"
