"""Connections between peers, up to the point where the engine or a state transfer takes them over.

Every connection to a peer's one listening port opens with a message that says what it is for (`LinkHello`,
`StateHello`, `ProbeHello`) and is answered by `Accepted` or `Rejected`. A stranger is held to a small message and a
short time, and proves that it knows the token where there is one (`protocol.auth`).
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import Keys
from pccl.protocol.codec import ProtocolError, harmless
from pccl.runtime import addresses, handshake
from pccl.runtime.dialing import dial_tcp
from pccl.runtime.tasks import start_task
from pccl.runtime.wire import ConnectionLost, SocketChannel

ANSWER_TIMEOUT_S = 10.0
"""How long a connection for a state transfer may take."""
OPENING_TIMEOUT_S = 10.0
"""How long a stranger may take to say what it wants."""


class LinkError(Exception):
    """A connection to another peer could not be made; the text names the addresses and what failed."""


async def dial(
    member: m.Member,
    master_host: str,
    opening: m.PeerOpening,
    token: str,
    reached: Callable[[], object] = lambda: None,
) -> tuple[trio.socket.SocketType, Keys | None]:
    """A connection to `member` that has accepted `opening`, and the keys for what follows (`handshake.Dialled`).
    LinkError. `reached` is called once the network has been seen to carry something there and back."""
    failures = []
    for host in addresses.reachable(member.hosts, master_host):
        where = addresses.join(host, member.port)
        try:
            sock = trio.socket.from_stdlib_socket(await dial_tcp(host, member.port))
        except OSError as error:
            failures.append(f"{where}: {error.strerror or error}")
            continue
        reached()
        try:
            dialled = await handshake.dial_keyed(SocketChannel(sock), token, opening.run, opening, m.PeerAnswer)
        except (ConnectionLost, ProtocolError) as error:
            failures.append(f"{where}: {error}")
        except BaseException:
            sock.close()
            raise
        else:
            if isinstance(dialled.answer, m.Accepted):
                return sock, dialled.keys
            failures.append(f"{where}: rejected: {harmless(dialled.answer.reason)}")
        sock.close()
    raise LinkError(f"peer {member.peer} at {'; '.join(failures)}")


async def dial_link(
    member: m.Member,
    master_host: str,
    hello: Callable[[int], m.LinkHello],
    connections: int,
    token: str,
    take: Callable[[int, trio.socket.SocketType, Keys | None], None],
    reach_s: float,
    timeout_s: float,
) -> None:
    """All connections of a link, at once. `take` gets each with its index, as it stands. LinkError names the first
    failure: at the latest after `timeout_s`, and after `reach_s` if the network has carried nothing to the other side
    and back."""
    failure: LinkError | None = None
    start_s = trio.current_time()
    bound_s = min(reach_s, timeout_s)

    def reached() -> None:
        nonlocal bound_s
        bound_s = timeout_s
        scope.deadline = start_s + timeout_s

    async def one(index: int) -> None:
        nonlocal failure
        try:
            take(index, *await dial(member, master_host, hello(index), token, reached))
        except LinkError as error:
            failure = failure or error
            nursery.cancel_scope.cancel()

    with trio.move_on_at(start_s + bound_s) as scope:
        async with trio.open_nursery() as nursery:
            for index in range(connections):
                start_task(nursery, one, index)
    if failure is not None:
        raise failure
    if scope.cancelled_caught:
        hosts = ", ".join(addresses.join(host, member.port) for host in member.hosts)
        raise LinkError(f"peer {member.peer} at {hosts}: no answer within {bound_s:g} s")
