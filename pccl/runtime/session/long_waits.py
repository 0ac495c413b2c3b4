"""Long waits: warns, at the caller's side, of an op that does not end, and says whom it waits for and why.

This is what a peer can tell by itself, without a master. It knows who has announced an op, whose data is missing, and
who acknowledges what it is sent. Around a ring a neighbour may itself wait for somebody further on: the master hears
all of them, and names the one whom all wait for (`protocol.diagnosis`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from pccl.runtime.session.reports import LinkWait, WorkCounters

WARN_AFTER_S = (10.0, 60.0, 600.0)
"""Times after which a wait is warned of."""
STUCK_MS_MIN = 500
TAGS_NAMED_MAX = 4


class LongWaits:
    """The wait of one session's ops. Only for the trio thread."""

    def __init__(self, counters: WorkCounters, logger: logging.LoggerAdapter[logging.Logger]) -> None:
        self._counters = counters
        self._logger = logger
        self._warned = 0
        """Number of warnings of the present wait."""

    def look(self, wait_s: float, tags: Callable[[], Sequence[int]]) -> None:
        """Warn if it is time. No op has ended for `wait_s`, and ops with these `tags` are open."""
        if wait_s < WARN_AFTER_S[0]:
            if self._warned:
                self._logger.info("ops go on")
            self._warned = 0
        elif self._warned < len(WARN_AFTER_S) and wait_s >= WARN_AFTER_S[self._warned]:
            self._warned += 1
            self._logger.warning("%s", describe(wait_s, tags(), self._counters.waits()))


def describe(wait_s: float, tags: Sequence[int], waits: Mapping[int, LinkWait]) -> str:
    """Return in words what ops wait for."""
    named = ", ".join(map(str, tags[:TAGS_NAMED_MAX])) + (" ..." if len(tags) > TAGS_NAMED_MAX else "")
    what = f"the op with tag {named} has" if len(tags) == 1 else f"ops with tags {named} have" if tags else "an op has"
    reasons = []
    for verb, peers in (
        ("has not called it", [peer for peer, wait in waits.items() if wait.unheard_ops]),
        ("has yet to send data, or to pass it on", [peer for peer, wait in waits.items() if wait.inbound_ops]),
        ("has not said that it is done", [peer for peer, wait in waits.items() if wait.undone_ops]),
    ):
        if peers:
            reasons = [f"{_peers(peers)} {verb if len(peers) == 1 else verb.replace('has', 'have', 1)}"]
            break
    reasons += [
        f"peer {peer} has acknowledged nothing for {wait.stuck_ms / 1e3:.1f} s"
        for peer, wait in waits.items()
        if wait.stuck_ms >= STUCK_MS_MIN
    ]
    return f"{what} waited {wait_s:.0f} s: {'; '.join(reasons) or 'nothing is missing that is known here'}"


def _peers(peers: Sequence[int]) -> str:
    return ("peer " if len(peers) == 1 else "peers ") + ", ".join(map(str, peers))
