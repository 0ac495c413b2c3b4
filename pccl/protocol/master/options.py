"""Settings of a master, and the limits that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_TIMEOUTS = 3.0
"""More than the peer timeouts that making a link may take, of which an answer tells."""
NAMED_MAX = 20
"""Peers that a line of the log names at most."""


@dataclass(frozen=True)
class MasterOptions:
    peer_timeout_s: float = 5.0
    """How long a peer may go without a heartbeat."""
    engine_threads: int = 1
    """Engine threads of each peer, up to ENGINE_THREADS_MAX."""
    hello_timeout_s: float = 10.0
    """How long a connection may stay silent before it says Hello, and a peer then until its first heartbeat."""
    answer_timeout_s: float = 90.0
    """How long an accepted peer may take to answer Flush or Prepare before it is evicted; ANSWER_TIMEOUTS peer timeouts
    at least."""
    connections_max: int = 4096
    pending_max: int = 1024
    """How many peers may wait to be accepted."""
    connections_per_link_max: int = 64

    @property
    def answer_limit_s(self) -> float:
        return max(self.answer_timeout_s, ANSWER_TIMEOUTS * self.peer_timeout_s)
