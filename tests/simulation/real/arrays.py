"""Arrays that callers lend to ops.

They are memory of exactly their size, from the library, so that a sanitizer sees a peer that goes beyond. When a
caller has
its arrays back it must find the result, the same bits as on all other peers, or what it gave, bit for bit. From then on
no other peer may touch them: a sanitizer is told so, and elsewhere they are filled with a pattern that must be there in
the end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pccl.runtime.data_plane.op_spec import Buffers
from pccl.types import Collective
from tests.simulation.real.library import Library
from tests.simulation.real.ops import DTYPES, Array, Style

POISON = 0xA5


class Block:
    """A stretch of lent memory."""

    def __init__(self, library: Library, size_bytes: int) -> None:
        self._library = library
        self._memory = library.lib.pccl_sim_allocate(size_bytes)
        self.address = int(library.ffi.cast("uintptr_t", self._memory))
        self.bytes = np.frombuffer(library.ffi.buffer(self._memory, size_bytes), np.uint8) if size_bytes else _NOTHING
        self.is_returned = False

    def give_back(self) -> None:
        """Note that it is its caller's again."""
        self.is_returned = True
        self.bytes[:] = POISON
        self._library.lib.pccl_sim_forbid(self._memory, len(self.bytes), 1)

    def take_back(self) -> None:
        """Note that its caller has ended."""
        self._library.lib.pccl_sim_forbid(self._memory, len(self.bytes), 0)

    def is_as_returned(self) -> bool:
        if not self.is_returned or self._library.lib.pccl_sim_is_sanitized():
            return True
        return bool((self.bytes == POISON).all())

    def free(self) -> None:
        if self._memory is not None:
            self.take_back()
            self.bytes = _NOTHING
            self._library.lib.pccl_sim_free(self._memory)
            self._memory = None


class LentResiduals:
    """Memory for the residuals of an op with error feedback, in the place of `op_spec.Residuals`."""

    decay = 0.5

    def __init__(self, block: Block) -> None:
        self._address = block.address

    def place(self, _: object, count: int) -> tuple[int, int]:
        return 0, self._address


class Loan:
    """What one caller lends to one op."""

    def __init__(self, library: Library, style: Style, name: str, op: int, rank: int, world_size: int) -> None:
        self.style = style
        self.rank = rank
        self.is_returned = False
        """Its caller has its arrays back."""
        item_bytes = style.dtype.itemsize
        send, recv = (elements * item_bytes for elements in style.sizes(rank, world_size))
        self.input: Array = style.inputs(name, op, style.sizes(rank, world_size)[0])
        self.blocks: list[Block] = []
        self._send = self._recv = _NOTHING
        at_send = at_recv = 0
        if style.is_in_place and style.collective is not Collective.ALL_GATHER:
            block = self._take(library, max(send, recv))
            at_send = at_recv = block.address
            self._send, self._recv = block.bytes[:send], block.bytes[:recv]
        elif style.is_in_place:
            block = self._take(library, recv)
            self._send, self._recv = block.bytes[rank * send : (rank + 1) * send], block.bytes
            at_send, at_recv = block.address + rank * send, block.address
        else:
            if send:
                block = self._take(library, send)
                self._send, at_send = block.bytes, block.address
            if recv:
                block = self._take(library, recv)
                self._recv, at_recv = block.bytes, block.address
        self._send[:] = _bytes_of(self.input)
        self._before = [block.bytes.copy() for block in self.blocks]
        """What an abort puts back, of an op in place."""
        count = style.count if not style.lengths else max(style.sizes(rank, world_size))
        self.residuals: LentResiduals | None = None
        if style.quantization is not None and op % 2:  # ranks need not agree
            self.residuals = LentResiduals(self._take(library, 4 * style.count))
        self.buffers = Buffers(at_send, at_recv, count, self, style.parts(rank))

    def _take(self, library: Library, size_bytes: int) -> Block:
        self.blocks.append(Block(library, size_bytes))
        self.blocks[-1].bytes[:] = 0
        return self.blocks[-1]

    def result(self) -> Array:
        """What is where the result belongs."""
        return self._recv.copy().view(DTYPES[self.style.dtype])

    def has_input(self, is_aborted: bool) -> bool:
        """Whether it holds what its caller gave, where that must be so."""
        if not self.style.is_in_place:
            return bool((self._send == _bytes_of(self.input)).all())
        if not is_aborted:
            return True
        if self.style.collective is Collective.ALL_GATHER:
            return bool((self._send == _bytes_of(self.input)).all())
        return all(
            bool((block.bytes == before).all()) for block, before in zip(self.blocks, self._before, strict=False)
        )

    def give_back(self) -> None:
        if not self.is_returned:
            self.is_returned = True
            for block in self.blocks:
                block.give_back()

    def take_back(self) -> None:
        """Note that its caller has ended, and no peer minds what becomes of the arrays."""
        for block in self.blocks:
            block.take_back()

    def free(self) -> None:
        self._send = self._recv = _NOTHING
        for block in self.blocks:
            block.free()


_NOTHING: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)


def _bytes_of(elements: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(elements).view(np.uint8)
