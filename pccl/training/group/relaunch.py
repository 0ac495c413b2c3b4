"""A collective that is launched now and waited for later, and again after each loss, among whoever is left.

All peers of the group launch it, with the same tag and step, and wait for it in the same order as for their other ops:
so whoever launches an aborted one again is met by the others as they come to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pccl import Communicator, PCCLError, Result
from pccl.training.group.membership import ABORTED


class Relaunched:
    """One such collective. Not thread-safe."""

    def __init__(self, communicator: Communicator, launch: Callable[[], Any]) -> None:
        """`launch` returns a handle of pccl; its arrays must be left alone until `wait` has returned."""
        self._communicator = communicator
        self._launch_op = launch
        self.aborted = 0
        self._handle = self._launch()

    def _launch(self) -> Any:
        """Launch the op, and return its handle; None if this peer is alone."""
        if self._communicator.world_size < 2:
            return None
        try:
            return self._launch_op()
        except PCCLError as error:
            if error.result is not Result.TOO_FEW_PEERS:
                raise
            return None  # the others have just been lost

    def wait(self) -> Any:
        """Wait until the op has committed, and return what it tells (`ReduceInfo`, `CollectiveInfo`); None if this peer
        is alone. PCCLError for anything but losses."""
        while self._handle is not None:
            try:
                return self._handle.result()
            except PCCLError as error:
                if error.result not in ABORTED:
                    raise
            self.aborted += 1
            self._handle = self._launch()
        return None
