"""The state of a run as seen by its master. `run_status` asks a master without joining the run.

from pccl.status import run_status
print(run_status("host:48148").totals.ops_committed)
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from pccl import security
from pccl._timeouts import checked_s
from pccl.errors import PCCLError, invalid
from pccl.protocol.completion import tag_named as tag_named
from pccl.protocol.names import label as label
from pccl.protocol.names import peers_named as peers_named
from pccl.protocol.status import Course as Course
from pccl.protocol.status import Event as Event
from pccl.protocol.status import Finding as Finding
from pccl.protocol.status import GroupStatus as GroupStatus
from pccl.protocol.status import LinkFigures as LinkFigures
from pccl.protocol.status import LinkTraffic as LinkTraffic
from pccl.protocol.status import Loss as Loss
from pccl.protocol.status import MemberStatus as MemberStatus
from pccl.protocol.status import PeerTraffic as PeerTraffic
from pccl.protocol.status import RunStatus as RunStatus
from pccl.protocol.status import StalledOp as StalledOp
from pccl.protocol.status import Totals as Totals
from pccl.protocol.status import Waiting as Waiting
from pccl.runtime.network import addresses
from pccl.runtime.network.clients import NoAnswer, ask_all, kick_at_any
from pccl.runtime.threads import portal
from pccl.types import Result

T = TypeVar("T")


def run_status(
    address: str, *, token: str | None = None, ssl_context: ssl.SSLContext | None = None, timeout: float | None = 10.0
) -> RunStatus:
    """Ask a master for the state of its run, without affecting the run. Thread-safe.

    Args:
        address: The master's "host:port". If there are several, separated by commas, the leading master answers, or
            any of them if none leads.
        token: The run's shared secret, as for a peer. Default: PCCL_TOKEN in the environment.
        ssl_context: A TLS context, as for a peer, with the same defaults from the environment.
        timeout: Seconds; None waits indefinitely.

    Raises:
        PCCLError: INVALID_ARGUMENT; MASTER_CONNECTION_FAILED if no master answers or the master refuses the request;
            TIMEOUT; NOT_INITIALIZED if the interpreter exits.
    """
    return ask_masters("run_status", address, token, ssl_context, timeout, ask_all)


def kick(
    address: str,
    peer: int,
    *,
    token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    timeout: float | None = 10.0,
) -> None:
    """Remove the peer with this number from the run. It gets INVALID_USAGE and does not come back by itself; the others
    continue as after a loss. The other arguments and the errors are those of `run_status`."""
    ask_masters("kick", address, token, ssl_context, timeout, kick_at_any, peer)


def ask_masters(
    func_name: str,
    address: str,
    token: str | None,
    ssl_context: ssl.SSLContext | None,
    timeout: float | None,
    request: Callable[..., Awaitable[T]],
    *arguments: Any,
) -> T:
    """Return `request(masters, token, context, timeout_s, *arguments)`. Raise PCCLErrors like `run_status`."""
    limit_s = checked_s(timeout, func_name)
    timeout_s = float("inf") if limit_s is None else limit_s
    secret = security.token(token, func_name)
    context = security.client_tls(ssl_context, func_name)
    try:
        masters = addresses.parse_masters(address)
        return portal.current().call(request, masters, secret, context, timeout_s, *arguments)
    except ValueError as error:
        raise invalid(func_name, str(error)) from None
    except NoAnswer as error:
        remedy = "; install the same version of pccl on both" if "speaks protocol" in str(error) else ""
        raise PCCLError(Result.MASTER_CONNECTION_FAILED, func_name, f"{error}{remedy}") from None
    except trio.TooSlowError:
        text = f"no answer from {address} within {timeout_s:g} s; is a pccl master running there?"
        raise PCCLError(Result.TIMEOUT, func_name, text) from None
    except portal.PortalClosedError as error:
        raise PCCLError(Result.NOT_INITIALIZED, func_name, str(error)) from None
