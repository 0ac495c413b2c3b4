"""Finds peers that hang, and has everybody who is there write down where it stands."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection

from pccl.stress.masters import PEER_TIMEOUT_S, PROGRESS_S
from pccl.stress.peer import Peer
from pccl.stress.seats import Seat

STARTS_WITHIN = 3
"""A process that loads its modules on a busy machine may take this many times longer than a call."""
STACKS_S = 3.0


def hang(peers: Collection[Peer], progress_due_at: float, hang_s: float, now: float) -> str:
    """Return what hangs, as a sentence; empty if nothing does. A step must have ended by `progress_due_at`."""
    if any(peer.thaw_at is not None for peer in peers):
        return ""
    if now > progress_due_at:
        limit_s = PEER_TIMEOUT_S + PROGRESS_S
        return f"nobody has made a step in the {limit_s:g} s since the new master listens"
    late = []
    for peer in peers:
        limit_s = hang_s * (STARTS_WITHIN if peer.at.doing == "starting" else 1)
        if not peer.is_killed and now - peer.heard_at > limit_s:
            late.append(peer)
    if late:
        return f"a hang: {', '.join(str(peer) for peer in late)} said nothing for {hang_s:g} s"
    return ""


def account(what: str, peers: Collection[Peer], seats: Collection[Seat]) -> str:
    """Have all processes write down their stacks, which ends the masters, and return `what` with who waits in what."""
    now = time.monotonic()
    for peer in peers:
        peer.process.popen.send_signal(signal.SIGUSR1)
    for seat in seats:
        seat.process.popen.send_signal(signal.SIGABRT)
    time.sleep(STACKS_S)
    lines = [what]
    for peer in peers:
        lines.append(f"  {peer}: {peer.at.doing} at revision {peer.at.revision} for {now - peer.heard_at:.1f} s")
    lines += [f"the last words of {seat}:\n{seat.process.last_words()}" for seat in seats]
    return "\n".join(lines)
