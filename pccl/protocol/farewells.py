"""Farewells: what a master says to a peer that has lost its master, and for which it does not lead the run on.

Only a Goodbye with the run's secret puts a peer of the run out. After Elsewhere it asks another master, and after
StartOver it says Hello again, as one that was never accepted.
"""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.master.machine import Master
from pccl.types import Result


def other_version(message: m.Resume) -> m.Goodbye:
    """Return the refusal of a peer that speaks another protocol."""
    spoken = f"this master speaks protocol {m.PROTOCOL_VERSION}, the peer {message.protocol}"
    text = f"{spoken}; install the same version of pccl on both"
    return m.Goodbye(Result.MASTER_CONNECTION_FAILED, text)


def of_another_run(master: Master, message: m.Resume) -> m.Elsewhere | m.StartOver:
    """Return what a peer of another run is told."""
    farewell = m.Elsewhere if message.is_accepted else m.StartOver
    return farewell(f"it leads run {master.run!r} and not {message.run!r}")


def lost(master: Master, message: m.Resume) -> m.Elsewhere | m.StartOver | m.Goodbye:
    """Return what a peer is told that this master leads no more, and whose run it leads on (`failover`, rule 13)."""
    if not message.is_accepted:
        return m.StartOver("the run has gone on without the view that was to accept it")
    if not master.leadership.is_settled_without(message.peer):
        return m.Elsewhere(f"no view without peer {message.peer} is in force yet")
    return put_out(master, f"run {message.run!r} has gone on without peer {message.peer}, whose connection was lost")


def left_out(master: Master, message: m.Resume) -> m.StartOver | m.Goodbye | None:
    """Return what a peer is told whose run this master has led to the end, without it. None: it has not."""
    if message.run != master.run:
        return None
    if not message.is_accepted:
        return m.StartOver("nobody is in the run any more, and nobody has accepted this peer")
    if message.term < master.term or (message.term == master.term and message.peer in master.leadership.evicted):
        # It has not lost the run: that has ended without this peer, if it follows a lower term.
        return put_out(master, f"run {message.run!r} has ended without peer {message.peer}; connect again")
    return None


def put_out(master: Master, reason: str) -> m.Goodbye:
    """Return what tells a peer that it is not in the run any more that this master leads, or has led to its end."""
    return m.Goodbye(Result.MASTER_CONNECTION_FAILED, f"evicted: {reason}", master.secret)
