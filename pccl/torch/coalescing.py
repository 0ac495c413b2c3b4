"""Calls between `_start_coalescing` and `_end_coalescing`, which are waited for together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from _pccl_torch import outside_graphs
from pccl.torch.errors import ArgumentError
from pccl.torch.work import PCCLWork


class Coalescing(threading.local):
    """The calls of each thread that are to be waited for together; None: each by itself."""

    batch: list[PCCLWork] | None = None

    def start(self) -> None:
        if self.batch is not None:
            raise ArgumentError("ProcessGroupPCCL::_start_coalescing: the calls of this thread are being coalesced")
        self.batch = []

    def end(self) -> list[PCCLWork]:
        batch, self.batch = self.batch, None
        if batch is None:
            raise ArgumentError("ProcessGroupPCCL::_end_coalescing: _start_coalescing was not called in this thread")
        return batch


@outside_graphs
class Coalesced(TorchWork):  # type: ignore[misc]
    """Several works as one. Thread-safe."""

    def __init__(self, works: Sequence[PCCLWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        return [tensor for work in self._works for tensor in work.result() or ()]

    def get_future(self) -> Any:
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [tensor for each in done.value() for tensor in each.value() or ()])
