"""The state of a run as its master sees it. `run_status` asks from anywhere, without taking part in the run.

from pccl.status import run_status
print(run_status("host:48148").totals.ops_committed)
"""

from __future__ import annotations

import ssl

import trio

from pccl import security
from pccl._timeouts import checked_bound_s
from pccl.errors import PCCLError
from pccl.protocol.names import label, peers_named
from pccl.protocol.status import (
    Course,
    Event,
    Finding,
    GroupStatus,
    LinkFigures,
    Loss,
    MemberStatus,
    RunStatus,
    StalledOp,
    Totals,
    Waiting,
)
from pccl.runtime.network import addresses
from pccl.runtime.network.conversation import NoAnswer
from pccl.runtime.network.status_client import ask_all
from pccl.runtime.threads import portal
from pccl.types import Result

__all__ = [
    "Course",
    "Event",
    "Finding",
    "GroupStatus",
    "LinkFigures",
    "Loss",
    "MemberStatus",
    "RunStatus",
    "StalledOp",
    "Totals",
    "Waiting",
    "label",
    "peers_named",
    "run_status",
]


def run_status(
    address: str, *, token: str | None = None, ssl_context: ssl.SSLContext | None = None, timeout: float | None = 10.0
) -> RunStatus:
    """Ask a master for the state of its run. The run is not affected. Thread-safe.

    Args:
        address: The master's "host:port". Of several, with commas between, the one that leads the run answers, or any
            that answers if none leads.
        token: The run's shared secret, as of a peer. Default: PCCL_TOKEN in the environment.
        ssl_context: A context for TLS, as of a peer, with the same defaults from the environment.
        timeout: Seconds; None: as long as it takes.

    Returns:
        A `RunStatus`: members, links, totals and recent events.

    Raises:
        PCCLError: INVALID_ARGUMENT; MASTER_CONNECTION_FAILED if no master answers or it refuses (the text says why);
            TIMEOUT; NOT_INITIALIZED if the interpreter exits.
    """
    timeout_s = checked_bound_s(timeout, "run_status")
    secret = security.token(token, "run_status")
    context = security.client_tls(ssl_context, "run_status")
    try:
        masters = addresses.parse_masters(address)
    except ValueError as error:
        raise PCCLError(Result.INVALID_ARGUMENT, "run_status", str(error)) from None

    try:
        return portal.current().call(ask_all, masters, secret, context, timeout_s)
    except NoAnswer as error:
        raise PCCLError(Result.MASTER_CONNECTION_FAILED, "run_status", str(error)) from None
    except trio.TooSlowError:
        where = ", ".join(addresses.join(*master) for master in masters)
        text = f"no answer from {where} within {timeout_s:g} s; is there a pccl master?"
        raise PCCLError(Result.TIMEOUT, "run_status", text) from None
    except portal.PortalClosedError as error:
        raise PCCLError(Result.NOT_INITIALIZED, "run_status", str(error)) from None
