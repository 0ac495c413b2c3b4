"""Asks the master of a session whom its calls wait for, as `pccl status` asks, when they have waited for long.

In a large run all peers wait for the same, and their master has better things to do than to tell each. So a peer asks
with a chance that has about ASKERS peers of the run ask at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from pccl.protocol import accounts
from pccl.protocol.status import RunStatus
from pccl.runtime.network import addresses
from pccl.runtime.network.clients import NoAnswer, ask
from pccl.runtime.session.control import Control
from pccl.runtime.session.driver import Driver
from pccl.runtime.session.master_connection import MasterConnection
from pccl.runtime.session.options import SessionOptions

ASKERS = 64
ASK_S = 2.0

_chance = random.SystemRandom()


class Accounts:
    """What a session knows, or can find out, of whom its joint calls wait for. Only for the trio thread."""

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
        """Return whom a joint call of this kind waits for."""
        status = await self._status()
        if isinstance(status, RunStatus):
            return accounts.of_call(status, self._driver.facts.peer, kind)
        return status

    async def of_admission(self) -> str:
        """Return whom this newcomer waits for."""
        status = await self._status()
        return accounts.of_admission(status) if isinstance(status, RunStatus) else status

    async def of_hold(self) -> str | None:
        """Return what the master waits for that has this newcomer wait; empty: nothing; None: it does not tell."""
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
            return f"other peers, or their master at {where}, which does not tell: {why}"
