"""Long waits of a session: warns of ops that do not end, and asks the master what a group call waits for.

Ops of the whole group are watched together: the engine counts the time since one has ended. Sends, recvs and ops that
have yet to start are watched one by one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import trio

from pccl.protocol.names import NameOf, peer_named, peers_named
from pccl.protocol.peer.ops import OpWait
from pccl.protocol.status import RunStatus
from pccl.protocol.wait_reasons import (
    UNKNOWN,
    LinkWait,
    LongWait,
    explain_op,
    explain_pair,
    explain_wait,
    where_to_look,
)
from pccl.runtime.network import addresses
from pccl.runtime.network.clients import NoAnswer, ask
from pccl.runtime.session.control import Control
from pccl.runtime.session.driver import Driver
from pccl.runtime.session.master_connection import MasterConnection
from pccl.runtime.session.options import SessionOptions
from pccl.runtime.session.reports import WorkCounters

TAGS_NAMED_MAX = 4
SINGLE_MAX = 16
"""Number of ops that are watched one by one at a time."""
ASKERS = 64
"""Number of peers of a large run that ask the master at a time, on average."""
ASK_S = 2.0

_chance = random.SystemRandom()


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
                self._warn(self._group, now, explain_op(self._counters.waits(), self._name_of))
        self._look_at_each(now, {wait.op: wait for wait in single})

    def _look_at_each(self, now: float, waits: Mapping[int, OpWait]) -> None:
        for op in [op for op in self._single if op not in waits]:
            self._end(self._single.pop(op), now)
        for op, wait in waits.items():
            if op not in self._single and len(self._single) < SINGLE_MAX:
                self._single[op] = LongWait(named(wait, self._name_of), wait.since)
            known = self._single.get(op)
            if known is not None and known.is_due(now):
                self._warn(known, now, self._explain_single(wait))

    def _explain_single(self, wait: OpWait) -> str:
        if wait.is_queued or wait.pair is None:
            return "the ring to be made, or a group call to end: it has not begun"
        return explain_pair(*wait.pair, self._counters.waits(), self._name_of)

    def whom(
        self, tag: int, pair: tuple[int, bool] | None, others: Sequence[int], awaited: Collection[int] | None
    ) -> str:
        """Return the peers that an op waits for, by the last counters. Any thread.

        Args:
            tag: The op's tag.
            pair: The other peer of a point-to-point op, and whether this side sends.
            others: The other participants.
            awaited: Participants that have not launched it, as far as is known; None: all ops are taken together.
        """
        waits = self._counters.waits()
        if pair is not None:
            return explain_pair(*pair, waits, self._name_of)
        if awaited is not None:
            waits = {peer: _of_one(wait, peer in awaited, bool(awaited)) for peer, wait in waits.items()}
        found = explain_op(waits, self._name_of)
        if found == UNKNOWN and others:
            return peers_named(others, self._name_of) + (", or one of them" if len(others) > 1 else "")
        return found

    def _warn(self, wait: LongWait, now: float, text: str) -> None:
        self._logger.warning("%s", wait.warning(now, text, self._where))

    def _end(self, wait: LongWait, now: float, may_be_open: bool = False) -> None:
        if wait.is_told:
            self._logger.warning("%s", wait.over(now) if may_be_open else wait.ending(now))


def _ops_with(tags: Sequence[int]) -> str:
    shown = ", ".join(map(str, tags[:TAGS_NAMED_MAX])) + (" ..." if len(tags) > TAGS_NAMED_MAX else "")
    return (
        f"the op with tag {shown}" if len(tags) == 1 else f"the first of the ops with tags {shown}" if tags else "an op"
    )


def named(wait: OpWait, name_of: NameOf) -> str:
    """Return the name of a single op for a sentence."""
    if wait.pair is None:
        return f"the op with tag {wait.tag}"
    peer, is_sender = wait.pair
    verb, direction = ("send", "to") if is_sender else ("recv", "from")
    return f"{verb} with tag {wait.tag} {direction} {peer_named(peer, name_of(peer))}"


def _of_one(wait: LinkWait, is_awaited: bool, is_known: bool) -> LinkWait:
    """Return what one op waits for from a peer. `is_known`: the peers that have not launched it are known."""
    if is_known and not is_awaited:
        return replace(wait, unheard_ops=0, inbound_ops=0, undone_ops=0)
    return replace(wait, unheard_ops=int(is_awaited))


class CallReasons:
    """Asks the master what group calls wait for. Only for the trio thread.

    In a large run all peers wait for the same one, so each asks with a chance that has about ASKERS ask at a time.
    """

    def __init__(
        self,
        options: SessionOptions,
        driver: Driver,
        master: MasterConnection,
        control: Control,
        world_size: Callable[[], int],
    ) -> None:
        self._options = options
        self._driver = driver
        self._master = master
        self._control = control
        self._world_size = world_size

    async def of_call(self, kind: str) -> str:
        """Return what a group call of this kind waits for."""
        status = await self._status()
        return explain_wait(status, self._driver.facts.peer, kind) if isinstance(status, RunStatus) else status

    async def of_admission(self) -> str:
        """Return what this newcomer waits for."""
        return await self.of_call("")

    async def of_hold(self) -> str | None:
        """Return what the master that holds this newcomer waits for; None: it does not answer."""
        status = await self._status()
        return status.held_for if isinstance(status, RunStatus) else None

    async def _status(self) -> RunStatus | str:
        """Return the status of the run, or in words what is known without it."""
        if not self._driver.facts.is_led:
            tried = self._control.account()
            return f"a master, for the last one is lost{f' (tried {tried})' if tried else ''}"
        if _chance.random() * self._world_size() > ASKERS:
            return "other peers, which have not called it"
        options, where = self._options, addresses.join(*self._master.address)
        try:
            with trio.fail_after(ASK_S):
                return await ask(*self._master.address, options.token, options.ssl_context, options.system.dial)
        except (NoAnswer, trio.TooSlowError) as error:
            why = str(error) or f"no answer in {ASK_S:g} s"
            return f"other peers, or their master at {where}, which does not answer: {why}"
