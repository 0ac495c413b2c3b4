"""The options of a session, and the error that its calls raise."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from pccl.protocol.messages import MASTER_TIMEOUT_S
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.network.system import SYSTEM, System
from pccl.types import Result


class SessionError(Exception):
    """A call that failed; becomes a PCCLError in the public layer."""

    def __init__(self, result: Result, message: str) -> None:
        super().__init__(message)
        self.result = result
        self.message = message


@dataclass(frozen=True)
class SessionOptions:
    group: int
    connections: int
    """Connections of each link to begin with."""
    may_grow: bool = False
    """Links get more connections where they help."""
    hosts: tuple[str, ...] = ()
    """Addresses to advertise."""
    port: int | None = None
    """Port to advertise where it is not the one listened on (NAT)."""
    listen_host: str = ""
    listen_port: int = 0
    name: str = ""
    site: str = ""
    """Name of the site, whose peers come and go together; empty: a peer on its own."""
    site_size: int = 0
    """Number of peers of the site; 0: a peer on its own."""
    place: int = -1
    """Place in the ring that this peer asks for, as a founder; -1: none."""
    token: str = field(default="", repr=False)
    """The run's shared secret; empty: none."""
    encrypt: bool = False
    """Peers send each other encrypted records. Needs a token."""
    ssl_context: ssl.SSLContext | None = None
    """TLS for the control connection; None: no TLS."""
    master_timeout_s: float = MASTER_TIMEOUT_S
    """Time that a lost master, or one after it, may take to be found."""
    segment_bytes: int = 0
    force_poll: bool = False
    system: System = SYSTEM
    new_engine: Callable[[int, int, bool], Engine] = Engine
    """Makes the engine, with the arguments of `Engine`."""
