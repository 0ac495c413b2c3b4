"""Settings of a master, and the limits that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_TIMEOUTS = 3.0
"""Number of peer timeouts for an answer. It is more than making a link may take, of which an answer tells."""
NAMED_MAX = 20
"""Number of peers that a line of the log names."""


@dataclass(frozen=True)
class MasterOptions:
    """The settings of a master."""

    peer_timeout_s: float = 5.0
    """Seconds that a peer may go without a heartbeat."""
    engine_threads: int = 1
    """Number of engine threads of each peer, up to ENGINE_THREADS_MAX."""
    hello_timeout_s: float = 10.0
    """Seconds that a connection may stay silent before it says Hello, and that a peer then has until its first
    heartbeat."""
    answer_timeout_s: float = 90.0
    """Seconds that an accepted peer may take to answer Flush or Prepare before it is evicted, and ANSWER_TIMEOUTS peer
    timeouts at least."""
    connections_max: int = 4096
    pending_max: int = 1024
    """Number of peers that may wait to be accepted."""
    connections_per_link_max: int = 64
    founders: int = 1
    """Number of peers that found a run together: newcomers wait for so many, and one view admits them all."""

    @property
    def answer_limit_s(self) -> float:
        return max(self.answer_timeout_s, ANSWER_TIMEOUTS * self.peer_timeout_s)
