"""Carries out the effects of a master's machine in order, and what it wants remembered to disk before the rest.

Where there is a state directory, `Persist` is written there by a thread of its own, and all effects that follow wait
for it. So

1. nothing is announced that is not on disk: whoever hears of a term or a view can rely on the record of it;
2. the disk holds up no event: the machine goes on deciding, and what it decides queues here;
3. a disk that fails stops the run until it can be written again, which the log says once. Where nobody has asked for
   the record, the run goes on without one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import trio

from pccl.protocol.master.effects import Effect, Persist, TakeHeartbeats
from pccl.runtime.master.fence_file import FenceFile
from pccl.runtime.network.system import SYSTEM, System

logger = logging.getLogger("pccl.master")

WRITE_AGAIN_S = 1.0
"""Pause before what could not be written to disk is tried again."""
TOUCH_S = 10.0
"""Time between two notes that this master lives, much less than `founding.IDLE_MARGIN_S`."""


class DurableEffects:
    """The queue of effects, for one trio run."""

    def __init__(
        self, state: FenceFile | None, perform: Callable[[list[Effect]], None], system: System = SYSTEM
    ) -> None:
        """`perform` carries effects out, and never waits. `state` is closed with this object; None: nothing is written.
        OSError if the system denies a thread."""
        self.nursery: trio.Nursery | None = None
        """Holds the task that writes, while the master serves."""
        self._state = state
        self._perform = perform
        self._writer = system.helper("pccl-state") if state is not None else None
        self._is_given_up = False
        """Whether the record is out of date, and not written any more."""
        self._postponed: deque[Effect] = deque()
        """Effects that wait for the disk, beginning with the one that is being written."""

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry effects out: at once, except those that must wait for the disk."""
        if self._state is None:
            self._perform(effects)
            return
        is_writing = bool(self._postponed)
        # Whoever reads such a connection must know at once that it is one for heartbeats, of which no record tells.
        self._perform([effect for effect in effects if isinstance(effect, TakeHeartbeats)])
        self._postponed.extend(effect for effect in effects if not isinstance(effect, TakeHeartbeats))
        if not is_writing:
            self._perform_postponed()

    async def keep_touching(self) -> None:
        """Note in the state directory that this master lives, as long as it does."""
        while self._state is not None and self._writer is not None:
            await trio.sleep(TOUCH_S)
            with suppress(OSError):
                await self._writer.run(self._state.touch, is_left=False)

    def _perform_postponed(self) -> None:
        """Carry out all effects up to the next that is to be written, and begin to write that."""
        effects = []
        while self._postponed and not isinstance(self._postponed[0], Persist):
            effects.append(self._postponed.popleft())
        if self._postponed:
            assert self.nursery is not None
            self.nursery.start_soon(self._write)
        self._perform(effects)

    async def _write(self) -> None:
        """Write the record that the postponed effects begin with, then go on with them."""
        persist = self._postponed[0]
        assert isinstance(persist, Persist)
        assert self._state is not None
        assert self._writer is not None
        failure = ""
        while not self._is_given_up:
            try:
                await self._writer.run(partial(self._state.write, persist.fence), is_left=False)
                break
            except OSError as error:
                text = error.strerror or str(error)
                if self._state.is_optional:
                    await self._writer.run(self._state.give_up, is_left=False)
                    self._is_given_up = True
                    where, failure = self._state.directory, ""
                    logger.warning("this master keeps no record of its run from now on: %s: %s", where, text)
                    continue
                if text != failure:
                    failure = text
                    logger.warning(
                        "the run stands still until its state can be written to %s: %s", self._state.directory, failure
                    )
            await trio.sleep(WRITE_AGAIN_S)
        if failure:
            logger.warning("the state has been written to %s", self._state.directory)
        self._postponed.popleft()
        self._perform_postponed()

    def close(self) -> None:
        """Give the state directory free. No task may be writing any more."""
        if self._writer is not None:
            self._writer.close()
        if self._state is not None:
            self._state.close()

    def forget_after_fork(self) -> None:
        """Close the copy in a forked child; the parent keeps its lock."""
        if self._state is not None:
            self._state.close()
