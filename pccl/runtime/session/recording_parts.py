"""A session's part in traces: gives the master its recording, part by part, when it is asked.

What the master asks for first, the recording is taken for, in a thread of its own; the trio thread goes on meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pccl.protocol import messages as m
from pccl.protocol.recording import Recording, encodable, pack, recent
from pccl.runtime.session.lifetime import Lifetime
from pccl.runtime.threads.helper_thread import HelperThread

TRACES_KEPT = 2
LACK_CHARACTERS_MAX = 500


class RecordingParts:
    """The recording that is being handed out. Only for the trio thread."""

    def __init__(
        self,
        lifetime: Lifetime,
        take: Callable[[], Recording],
        send: Callable[[list[m.Message]], None],
        logger: logging.LoggerAdapter[logging.Logger],
    ) -> None:
        """`take` returns the recording, from any thread."""
        self._lifetime = lifetime
        self._take = take
        self._send = send
        self._logger = logger
        self._packed: dict[int, bytes] = {}
        """The recordings of the last traces that have not been fetched wholly."""

    def asked(self, request: m.RecordingRequest) -> None:
        """Answer a request of the master, at once or soon."""
        received_ns = time.monotonic_ns()
        if request.part == 0:
            self._lifetime.spawn(self._take_for, request, received_ns)
        else:
            self._answer(request, received_ns)

    async def _take_for(self, request: m.RecordingRequest, received_ns: int) -> None:
        def packed() -> bytes:
            return pack(recent(self._take(), request.seconds, request.last))

        lack = ""
        self._packed.pop(request.trace, None)
        try:
            thread = HelperThread("pccl-recorder")
            try:
                self._packed[request.trace] = await thread.run(packed, is_left=True)
            finally:
                thread.close()
        except Exception as error:  # whatever it is, the run does not depend on it
            reason = encodable(str(error) or type(error).__name__)
            lack = f"its recording cannot be read: {reason}"[:LACK_CHARACTERS_MAX]
            self._logger.warning("the flight recorder cannot be read: %s", reason)
        while len(self._packed) > TRACES_KEPT:
            del self._packed[next(iter(self._packed))]
        self._answer(request, received_ns, lack)

    def _answer(self, request: m.RecordingRequest, received_ns: int, lack: str = "") -> None:
        parts, content = 0, b""
        packed = self._packed.get(request.trace, b"")
        if request.part >= 0:
            parts = -(-len(packed) // m.PART_BYTES_MAX)
            content = packed[request.part * m.PART_BYTES_MAX :][: m.PART_BYTES_MAX]
            if request.part >= parts - 1:
                self._packed.pop(request.trace, None)
        answer = m.RecordingPart(request.trace, request.part, parts, received_ns, time.monotonic_ns(), content, lack)
        self._send([answer])
