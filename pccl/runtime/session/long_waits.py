"""Long waits in ops: logs an op that does not end, with the peers that it waits for and why, as this peer knows them.

A peer knows without a master which peers have announced an op, whose data is missing, and which acknowledge what they
are sent. In a ring a neighbour may itself wait for another peer: the master, which has all reports, names the one that
all wait for (`protocol.diagnosis`).

Ops of the whole group are looked at together: the engine reports how long none has ended. An op of two peers, and one
that has not started, is looked at by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from pccl.protocol.long_wait import LongWait, where_to_look
from pccl.protocol.names import NameOf, peer_named, peers_named
from pccl.protocol.peer.op import OpWait
from pccl.runtime.session.reports import LinkWait, WorkCounters
from pccl.runtime.threads.waits import FLAG

STUCK_MS_MIN = 500
TAGS_NAMED_MAX = 4
NOTHING = "something unknown to this peer"
SINGLE_MAX = 16
"""Number of ops that are looked at by themselves at a time."""


class LongWaits:
    """The waits of one session's ops. `look` is only for the trio thread."""

    def __init__(
        self,
        counters: WorkCounters,
        logger: logging.LoggerAdapter[logging.Logger],
        name_of: NameOf,
        masters: str,
    ) -> None:
        self._counters = counters
        self._logger = logger
        self._name_of = name_of
        self._where = where_to_look(masters)
        self._group: LongWait | None = None
        self._single: dict[int, LongWait] = {}

    def look(
        self, now: float, group_wait_s: float, tags: Callable[[], Sequence[int]], single: Iterable[OpWait]
    ) -> None:
        """Warn if it is time. No op of the group has ended for `group_wait_s`, and such ops with these `tags` are open;
        `single` are the other ops that wait."""
        since = now - group_wait_s
        if self._group is not None and (not group_wait_s or since > self._group.since + 1.0):
            self._end(self._group, now, may_be_open=not group_wait_s and bool(tags()))
            self._group = None
        if group_wait_s:
            self._group = self._group or LongWait("", since)
            if self._group.is_due(now):
                self._group.what = _ops_with(tags())
                self._warn(self._group, now, whom(self._counters.waits(), self._name_of))
        self._look_at_each(now, {wait.op: wait for wait in single})

    def _look_at_each(self, now: float, waits: Mapping[int, OpWait]) -> None:
        for op in [op for op in self._single if op not in waits]:
            self._end(self._single.pop(op), now)
        for op, wait in waits.items():
            if op not in self._single and len(self._single) < SINGLE_MAX:
                self._single[op] = LongWait(named(wait, self._name_of), wait.since)
            known = self._single.get(op)
            if known is not None and known.is_due(now):
                self._warn(known, now, whom_of_two(wait, self._counters.waits(), self._name_of))

    def whom(
        self, tag: int, pair: tuple[int, bool] | None, others: Sequence[int], awaited: Collection[int] | None
    ) -> str:
        """Return the peers that an op waits for, as last counted. Any thread.

        `pair` is that of a point-to-point op. `others` take part in it, and `awaited` are those of them that may not
        have launched it; None: unknown, and all ops in flight are looked at together.
        """
        waits = self._counters.waits()
        if pair is None:
            if awaited is not None:
                waits = {peer: _of_one(wait, peer in awaited, bool(awaited)) for peer, wait in waits.items()}
            found = whom(waits, self._name_of)
            if found == NOTHING and others:
                return peers_named(others, self._name_of) + (", or one of them" if len(others) > 1 else "")
            return found
        return whom_of_two(OpWait(0, tag, 0.0, pair, False), waits, self._name_of)

    def _warn(self, wait: LongWait, now: float, text: str) -> None:
        self._logger.warning("%s", wait.warning(now, text, self._where), extra=FLAG)

    def _end(self, wait: LongWait, now: float, may_be_open: bool = False) -> None:
        if wait.is_told:
            self._logger.warning("%s", wait.over(now) if may_be_open else wait.ending(now), extra=FLAG)


def _ops_with(tags: Sequence[int]) -> str:
    named = ", ".join(map(str, tags[:TAGS_NAMED_MAX])) + (" ..." if len(tags) > TAGS_NAMED_MAX else "")
    return (
        f"the op with tag {named}" if len(tags) == 1 else f"the first of the ops with tags {named}" if tags else "an op"
    )


def named(wait: OpWait, name_of: NameOf) -> str:
    """Return what a single op is called."""
    if wait.pair is None:
        return f"the op with tag {wait.tag}"
    peer, is_sender = wait.pair
    return f"{'send' if is_sender else 'recv'} with tag {wait.tag} {'to' if is_sender else 'from'} " + peer_named(
        peer, name_of(peer)
    )


def whom(waits: Mapping[int, LinkWait], name_of: NameOf) -> str:
    """Return the peers that ops of the group wait for, and why."""
    reasons = []
    for verb, peers in (
        ("has not called it", [peer for peer, wait in waits.items() if wait.unheard_ops]),
        ("has yet to send data, or to pass it on", [peer for peer, wait in waits.items() if wait.inbound_ops]),
        ("has not said that it is done", [peer for peer, wait in waits.items() if wait.undone_ops]),
    ):
        if peers:
            reasons = [
                f"{peers_named(peers, name_of)}, which {verb if len(peers) == 1 else verb.replace('has', 'have', 1)}"
            ]
            break
    reasons += _stuck(waits, name_of)
    return "; ".join(reasons) or NOTHING


def _of_one(wait: LinkWait, is_awaited: bool, is_anybody: bool) -> LinkWait:
    """Return what one op waits for from a peer that is known to have launched it, or not.
    `is_anybody`: there is one that may not have."""
    if is_anybody and not is_awaited:
        return replace(wait, unheard_ops=0, inbound_ops=0, undone_ops=0)
    return replace(wait, unheard_ops=int(is_awaited))


def whom_of_two(wait: OpWait, waits: Mapping[int, LinkWait], name_of: NameOf) -> str:
    """Return the peer that a single op waits for, and why."""
    if wait.is_queued:
        return "the ring to be made, or a joint call to end: it has not begun"
    assert wait.pair is not None
    peer, is_sender = wait.pair
    who = peer_named(peer, name_of(peer))
    what = "called recv, or not taken all of it" if is_sender else "called send, or not sent all of it"
    stuck = _stuck({peer: waits[peer]} if peer in waits else {}, name_of)
    return "; ".join([f"{who}, which has not {what}", *stuck])


def _stuck(waits: Mapping[int, LinkWait], name_of: NameOf) -> list[str]:
    return [
        f"{peer_named(peer, name_of(peer))} has not acknowledged any data for {wait.stuck_ms / 1e3:.1f} s"
        for peer, wait in waits.items()
        if wait.stuck_ms >= STUCK_MS_MIN
    ]
