"""Group calls of a session: made here, answered by the machine.

A caller that gives its call up has the peer taken out of it. The master may answer that with the call's result instead,
if that came first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.runtime.session.driver import Driver, Handlers
from pccl.runtime.session.lifetime import Lifetime
from pccl.runtime.session.options import SessionError
from pccl.types import Result

CANCEL_S = 5.0
"""Time that a cancelled group call waits for the master to say whether it has taken effect."""


@dataclass
class _PendingCall:
    event: trio.Event = field(default_factory=trio.Event)
    result: ps.CallResult | None = None


class GroupCalls:
    """The group calls under way. Only for the trio thread."""

    def __init__(self, driver: Driver, lifetime: Lifetime) -> None:
        self._driver = driver
        self._lifetime = lifetime
        self._numbers = itertools.count(1)
        self._calls: dict[int, _PendingCall] = {}
        self.handlers: Handlers = {ps.CallResult: self._call_result}
        lifetime.at_end(self._end)

    def __len__(self) -> int:
        return len(self._calls)

    async def make(
        self, kind: str, offer: m.SyncOffer | None = None, interrupted: Callable[[], None] = lambda: None
    ) -> int:
        """Make a group call and return its value. SessionError. When cancelled, the peer is taken out of the call and
        the cancellation goes on; if the call has taken effect by then, its value is returned as if in time.
        `interrupted` is called when the call is cancelled, before the peer is taken out."""
        self._lifetime.require_alive()
        number = next(self._numbers)
        call = self._calls[number] = _PendingCall()
        with self._lifetime.contain, self._driver.taking_over as machine:
            machine.group_call(number, kind, offer)
        try:
            await call.event.wait()
        except BaseException as error:  # cancelled, or trio's KeyboardInterrupt
            interrupted()
            with self._lifetime.contain, self._driver.taking_over as machine:
                machine.cancel_group_call(number)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CANCEL_S):
                await call.event.wait()
            if not isinstance(error, trio.Cancelled) or call.result is None or call.result.code is Result.TIMEOUT:
                raise
        finally:
            self._calls.pop(number, None)
        assert call.result is not None
        if call.result.code is not Result.SUCCESS:
            raise SessionError(call.result.code, call.result.reason)
        return call.result.value

    def _call_result(self, _: ps.Peer, effect: ps.CallResult) -> None:
        call = self._calls.get(effect.call)
        if call is not None:
            call.result = effect
            call.event.set()

    def _end(self, failure: SessionError) -> None:
        for number, call in self._calls.items():
            if call.result is None:
                call.result = ps.CallResult(number, failure.result, failure.message, 0)
                call.event.set()
