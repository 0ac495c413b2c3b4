"""Options for communicators, and their checks."""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass, replace
from typing import Any

from pccl import _timeouts, security
from pccl._session_holder import SessionHolder
from pccl.errors import integer_argument, invalid
from pccl.protocol.names import NAME_CHARACTERS_MAX, is_name
from pccl.runtime.network import addresses
from pccl.runtime.session.driver import SessionOptions

CONNECTIONS_DEFAULT = 2
"""Initial connections per link. A single connection stalls at its first lost packet."""
CONNECTIONS_MAX = 64
UINT32_MAX = 2**32 - 1


@dataclass(frozen=True)
class CommunicatorOptions:
    """Rarely needed options for a communicator."""

    advertise: str | None = None
    """The "host[:port]" that other peers dial, for hosts behind NAT. Default: PCCL_ADVERTISE in the environment, else
    the address that the master sees."""
    listen: str | None = None
    """The "host:port" that accepts connections from peers. Default: PCCL_LISTEN in the environment, else any free port
    on all interfaces."""
    ssl_context: ssl.SSLContext | None = None
    """TLS for the connection to the master. Default: the files in PCCL_TLS_CA, PCCL_TLS_CERT and PCCL_TLS_KEY."""
    segment_bytes: int = 0
    """The largest payload of a frame; 0 selects a default that suits most networks."""
    site: str = ""
    """A name that `site_size` peers share (`pccl.training.Site`). The peers of a site are admitted together, and if one
    is lost, the others fail with MASTER_CONNECTION_FAILED. A site needs a new name each time it starts."""
    site_size: int = 0
    """The number of peers in the site."""
    master_timeout: float | None = None
    """Seconds to search for a lost master before failing. Default: PCCL_MASTER_TIMEOUT, else 60."""
    place: int | None = None
    """The rank that this peer requests. Default: PCCL_LAUNCH_INDEX in the environment, which `pccl launch` sets.
    Newcomers are inserted by requested rank as long as all peers of the group have distinct requests and are in that
    order."""


def holder_of(
    address: str | None,
    peer_group: int,
    connections: int,
    timeout: float | None,
    name: str | None,
    token: str | None,
    encrypt: bool | None,
    options: CommunicatorOptions | None,
    old_names: dict[str, Any],
) -> SessionHolder:
    """Check a communicator's arguments and return its `SessionHolder`. `old_names` also contains keywords from 0.2."""

    def check(is_fine: bool, message: str) -> None:
        if not is_fine:
            raise invalid("Communicator", message)

    connections_name = "p2p_connection_pool_size" if "p2p_connection_pool_size" in old_names else "connections"
    connections = old_names.pop("p2p_connection_pool_size", connections)
    is_options = options is None or isinstance(options, CommunicatorOptions)
    check(is_options, f"options must be CommunicatorOptions or None, not {options!r}")
    rare = replace(options or CommunicatorOptions(), **old_names)
    if address is None:
        address = os.environ.get("PCCL_MASTER", "")
        text = "PCCL_MASTER is not set: use `pccl launch`, set it to a master's host:port, or give an address"
        check(bool(address.strip()), text)
    listen = os.environ.get("PCCL_LISTEN") if rare.listen is None else rare.listen
    advertise = os.environ.get("PCCL_ADVERTISE") if rare.advertise is None else rare.advertise
    try:
        masters = addresses.parse_masters(address)
        listen_host, listen_port = addresses.parse(listen, default_port=0) if listen else ("", 0)
        hosts: tuple[str, ...] = ()
        port: int | None = None
        if advertise:
            host, parsed = addresses.parse(advertise, default_port=0)
            hosts, port = (host,), parsed or None
    except ValueError as error:
        raise invalid("Communicator", str(error)) from None
    for what, given in (("name", name), ("site", rare.site)):
        must = f"must be printable text of at most {NAME_CHARACTERS_MAX} characters"
        check(given is None or (isinstance(given, str) and is_name(given)), f"{what} {given!r}: {must}")
    peer_group = integer_argument("peer_group", peer_group, "Communicator", 0, UINT32_MAX)
    connections = integer_argument(connections_name, connections, "Communicator", 0, CONNECTIONS_MAX)
    segment_bytes = integer_argument("segment_bytes", rare.segment_bytes, "Communicator", 0, UINT32_MAX)
    site_size = integer_argument("site_size", rare.site_size, "Communicator", 0, UINT32_MAX)
    check(
        isinstance(rare.site, str) and bool(rare.site) == (site_size > 0),
        f"site {rare.site!r} and site_size {site_size!r}: give both, a name and the number of peers in the site",
    )
    index = os.environ.get("PCCL_LAUNCH_INDEX", "")
    place = int(index) if index.isdigit() else -1
    if rare.place is not None:
        place = integer_argument("place", rare.place, "Communicator", 0, UINT32_MAX)
    secret = security.token(token, "Communicator")
    timeout_s = _timeouts.checked_s(timeout, "Communicator")
    session_options = SessionOptions(
        group=peer_group,
        connections=connections or CONNECTIONS_DEFAULT,
        may_grow=connections == 0,
        hosts=hosts,
        port=port,
        listen_host=listen_host,
        listen_port=listen_port,
        site=rare.site,
        site_size=site_size,
        place=place,
        run_name=security.run_name(None, "Communicator"),
        name=own_name() if name is None else name,
        token=secret,
        encrypt=security.encryption(encrypt, secret, "Communicator"),
        ssl_context=security.client_tls(rare.ssl_context, "Communicator"),
        segment_bytes=segment_bytes,
        master_timeout_s=_timeouts.master_timeout_s(rare.master_timeout, "Communicator"),
    )
    if not all(addresses.is_loopback(host) for host, _ in masters):
        security.warn_if_exposed(listen_host, secret, stacklevel=3)
    return SessionHolder(address, masters, session_options, timeout_s)


def own_name() -> str:
    """Return a peer's default name: host, process ID, and the index that `pccl launch` gave the process."""
    index = os.environ.get("PCCL_LAUNCH_INDEX", "")
    return f"{socket.gethostname()}:{os.getpid()}" + (f" [{index}]" if index.isdigit() else "")
