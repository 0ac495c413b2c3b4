"""Ops on one tag that the threads of a peer make in turn: the next begins when the last is committed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pccl.stress.buffers import Buffers
from pccl.stress.errors import worst
from pccl.stress.messages import Outcome


class Chain:
    """Ops on one tag, one after the other, each by the next of some threads."""

    def __init__(self, buffers: list[Buffers], threads: int, attempt: Callable[[Buffers], Outcome | None]) -> None:
        self.buffers = buffers
        self._attempt = attempt
        self._turns = [threading.Semaphore(int(which == 0)) for which in range(threads)]
        self._is_over = False
        self._outcomes: list[Outcome] = []
        self._errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(which,), daemon=True) for which in range(threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, which: int) -> None:
        try:
            for number in range(which, len(self.buffers), len(self._turns)):
                self._turns[which].acquire()
                if self._is_over:
                    return
                outcome = self._attempt(self.buffers[number])
                if outcome is None:
                    break
                self._outcomes.append(outcome)
                self._turns[(which + 1) % len(self._turns)].release()
            else:
                return
        except Exception as error:
            self._errors.append(error)
        self._is_over = True
        for turn in self._turns:
            turn.release()

    def errors(self) -> list[Exception]:
        """Waits for the threads, whose calls end by themselves."""
        for thread in self._threads:
            thread.join()
        return self._errors

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all ops, or of those before this peer was left alone. Raises the worst error of a
        thread."""
        if errors := self.errors():
            raise worst(errors)
        return self._outcomes
