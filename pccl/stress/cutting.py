"""Breaks a connection of this very process to another peer, as a stateful firewall or a rebooting router would."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import Random

from pccl.stress.sockets import own_sockets


def cut_one(random: Random, masters: str) -> bool:
    """Shuts down one TCP connection that does not lead to a master; False where there is none."""
    ports = {int(address.rpartition(":")[2]) for address in masters.split(",")}
    return any(_cut(sock, ports) for sock in own_sockets(random))


def _cut(sock: socket.socket, spared_ports: set[int]) -> bool:
    with suppress(OSError):  # not connected
        if sock.getpeername()[1] not in spared_ports:
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False
