"""The bookkeeping of `all_reduce_multiple_with_retry`: what is in flight, what comes next, and when it has failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pccl._giving_up import gave_up
from pccl._reduce import ReduceOpDescriptor, info_of
from pccl._session_holder import SessionErrors
from pccl.errors import PCCLError, integer_argument
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.peer_session import PeerSession
from pccl.types import ReduceInfo, Result

TAGS_NAMED_MAX = 8


class Retry:
    """The ops of one call of `all_reduce_multiple_with_retry`. It never waits: its callers do.

    The window of `max_in_flight` ops cannot deadlock, whatever order the peers list their ops in:

    1. Every peer launches its ops in the order of their tags.
    2. A verdict is the same on all peers, so an op is to be repeated on all of them or on none.
    3. The place of an op that has ended goes to the lowest tag that waits for one. By 1 and 2 the lowest tag that is
       not committed is therefore in flight on every peer.

    Ops are collected in the order in which they end, not of their tags: a peer that has given up a later op may never
    launch an earlier one.
    """

    def __init__(self, descriptors: Sequence[ReduceOpDescriptor], max_in_flight: int, func_name: str) -> None:
        given: Any = descriptors
        if not isinstance(given, Sequence) or not all(isinstance(each, ReduceOpDescriptor) for each in given):
            what = f"descriptors must be a list of ReduceOpDescriptor, not {given!r}"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
        max_in_flight = integer_argument("max_in_flight", max_in_flight, func_name, 1)
        tags = [descriptor.spec.tag for descriptor in descriptors]
        repeated = sorted({tag for tag in tags if tags.count(tag) > 1}) if len(set(tags)) < len(tags) else []
        if not descriptors or repeated:
            what = f"tags {repeated} occur twice" if repeated else "there must be descriptors of ops"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
        self.in_flight: list[PendingOp] = []
        self.retries = 0
        self._func_name = func_name
        self._max_in_flight = max_in_flight
        self._specs = {descriptor.spec.tag: descriptor.spec for descriptor in descriptors}
        self._left = sorted(self._specs, reverse=True)
        self._infos: list[ReduceInfo] = []
        self._failure: PCCLError | None = None
        self._gave_up = False

    @property
    def has_more(self) -> bool:
        return bool(self.in_flight or (self._left and self._failure is None))

    def next_specs(self) -> list[OpSpec]:
        """Return the ops to launch now: none after a failure, which ends the call once all ops in flight have ended."""
        if self._failure is not None:
            return []
        room = self._max_in_flight - len(self.in_flight)
        return [self._specs[self._left.pop()] for _ in range(min(room, len(self._left)))]

    def launch(self, session: PeerSession, spec: OpSpec) -> None:
        op = session.ops.new(spec)
        self.in_flight.append(op)
        try:
            with SessionErrors(self._func_name):
                session.ops.launch(op)
        except PCCLError:
            self.in_flight.remove(op)
            raise

    def collect(self, session: PeerSession, timeout_s: float | None) -> None:
        """Collect every op that has ended. To be called when one has, or when `timeout_s` has passed (TIMEOUT).

        Once an op has failed for good, those in flight are given up on all peers, since a peer whose own call has
        failed may never launch them. The failure is raised when the last of them has ended.
        """
        if not any(op.is_over for op in self.in_flight):
            tags = sorted([*(op.tag for op in self.in_flight), *self._left])
            named = f"{', '.join(map(str, tags[:TAGS_NAMED_MAX]))}{' ...' if len(tags) > TAGS_NAMED_MAX else ''}"
            text = f"not all ops were committed within {timeout_s:g} s: not those with tags {named}"
            raise PCCLError(
                Result.TIMEOUT, self._func_name, f"{text}; the first waited for {session.whom(self.in_flight[0])}"
            )
        still = []
        for op in self.in_flight:
            if not op.is_over:
                still.append(op)
                continue
            try:
                self._infos.append(info_of(op, self._func_name))
            except PCCLError as error:
                if error.result is Result.RANK_CONNECTION_LOST:
                    self.retries += 1
                    self._left.append(op.tag)
                    self._left.sort(reverse=True)
                elif self._failure is None:
                    self._failure = error
        if self._failure is not None and not self._gave_up:
            self._gave_up = True
            for op in still:
                session.ops.cancel(op, self._failure.result, self._failure.message)
        self.in_flight = still
        if self._failure is not None and not still:
            raise self._failure

    def abandon(self, session: PeerSession, timeout_s: float | None) -> None:
        """Have the ops that are still in flight aborted on all peers."""
        for op in self.in_flight:
            session.ops.cancel(op, Result.TIMEOUT, gave_up(session, timeout_s, op))

    def is_committed_after_all(self) -> bool:
        """Whether the ops that were given up have been committed all the same, and nothing is left to do."""
        if self._failure is not None or self._left:
            return False
        if not all(op.is_over and not op.has_failed and not op.is_detached for op in self.in_flight):
            return False
        self._infos += [info_of(op, self._func_name) for op in self.in_flight]
        return True

    def info(self) -> ReduceInfo:
        """Return the byte counts summed over all ops, and the smallest world size of any."""
        memberships = {info.membership for info in self._infos}
        return ReduceInfo(
            min(info.local_world_size for info in self._infos),
            sum(info.tx_bytes for info in self._infos),
            sum(info.rx_bytes for info in self._infos),
            memberships.pop() if len(memberships) == 1 else None,
        )
