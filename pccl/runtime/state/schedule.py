"""Chooses a donor for each block of a state transfer. No I/O; time is an argument.

Each donor stream draws blocks from one pool as soon as its requested blocks will arrive within its *horizon*: a quarter
of a second, or three times its latency. Faster streams draw more often, and all streams finish at about the same time.

At the end an idle stream requests a *late* block again, one that it can deliver well before its holders (BitTorrent's
endgame). The first verified copy counts. A stream that ends returns its blocks (`forsake`). `remaining` counts blocks
that are not done; each is in the pool or held by a stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pccl.runtime.state import tensor_blocks

HORIZON_S = 0.25
HORIZON_LATENCIES = 3
REQUESTS_FIRST = 2
"""Number of requests under way while a stream's speed is not known."""
REQUESTS_MAX = 256
"""Largest number of open requests. They fit the donor's receive buffer while it does not read."""
RATE_WINDOW_S = 0.1
RATE_WEIGHT = 0.3
"""Weight of the newest window in a stream's rate."""
RESCUE_S = 0.25
"""Time that a rescue must win at least."""


@dataclass(eq=False)
class Block:
    """A block that is to land: number `number` of tensor `tensor`, `size` bytes."""

    tensor: int
    number: int
    size: int
    is_landed: bool = False
    holders: list[DonorStream] = field(default_factory=list)
    """Streams that were asked for it and have not delivered it yet."""


class DonorStream:
    """A connection to a donor: what it was asked for, and how fast it is."""

    def __init__(self) -> None:
        self.queue: deque[Block] = deque()
        self.silent_s = 0.0
        """Time without data for the open requests. The receiver's watch adds to it."""
        self.latency_s = 0.0
        """The shortest time from a request to its first byte on an idle stream."""
        self.rate: float | None = None
        """Bytes a second, as far as known; None: not yet."""
        self.to_come_bytes = 0
        """Bytes of the blocks in the queue that have not come yet."""
        self._asked_at: float | None = None
        self._window_start = 0.0
        self._window_bytes = 0

    def asked(self, now: float) -> None:
        self._asked_at = self._window_start = now
        self._window_bytes = 0
        self.silent_s = 0.0

    def moved(self, count: int, now: float) -> None:
        self.silent_s = 0.0
        if self._asked_at is not None:
            latency_s = now - self._asked_at
            self.latency_s = min(self.latency_s or latency_s, latency_s)
            self._asked_at = None
            self._window_start = now
            self._window_bytes = -count  # came before the window
        if self.queue:
            self.to_come_bytes -= count
        self._window_bytes += count
        elapsed_s = now - self._window_start
        if elapsed_s >= RATE_WINDOW_S:
            rate = self._window_bytes / elapsed_s
            self.rate = rate if self.rate is None else self.rate + RATE_WEIGHT * (rate - self.rate)
            self._window_start, self._window_bytes = now, 0

    @property
    def has_room(self) -> bool:
        if not self.queue:
            return True
        if self.rate is None:
            return len(self.queue) < REQUESTS_FIRST
        horizon_s = max(HORIZON_S, HORIZON_LATENCIES * self.latency_s)
        return len(self.queue) < REQUESTS_MAX and self.to_come_bytes < self.rate * horizon_s

    def wait_s(self, size: int) -> float:
        """Return how long `size` bytes will take, as far as is known; silence counts as if it went on for as long
        again."""
        return max(self.silent_s, size / self.rate if self.rate else 0.0)

    def _add(self, block: Block, now: float) -> None:
        if not self.queue:
            self.asked(now)
            self.to_come_bytes = 0
        self.queue.append(block)
        block.holders.append(self)
        self.to_come_bytes += block.size

    def _remove_first(self) -> Block:
        block = self.queue.popleft()
        block.holders.remove(self)
        return block


class Schedule:
    """The blocks of a transfer and their donors. `blocks` is an iterator of `count` blocks."""

    def __init__(self, blocks: Iterable[Block], count: int) -> None:
        self.remaining = count
        self._fresh: Iterator[Block] = iter(blocks)
        self._returned: deque[Block] = deque()
        self._streams: list[DonorStream] = []

    @property
    def is_done(self) -> bool:
        return self.remaining == 0

    def enter(self, stream: DonorStream) -> None:
        self._streams.append(stream)

    @property
    def remaining_s(self) -> float:
        """The time that the rest will take at the present speed."""
        rate = sum(stream.rate or 0.0 for stream in self._streams if stream.queue)
        return self.remaining * tensor_blocks.BLOCK_BYTES / rate if rate else float("inf")

    def draw(self, stream: DonorStream, now: float) -> Block | None:
        """Return the next block to ask the stream for, which is in its queue then; None: there is none now."""
        if not stream.has_room:
            return None
        block = self._returned.popleft() if self._returned else next(self._fresh, None)
        if block is None and not stream.queue:
            block = self._late(stream)
        if block is not None:
            stream._add(block, now)
        return block

    def _late(self, idle: DonorStream) -> Block | None:
        found: Block | None = None
        found_s = 0.0
        waits: dict[Block, float] = {}
        for stream in self._streams:
            ahead = stream.to_come_bytes - sum(block.size for block in stream.queue)
            for block in stream.queue:
                ahead += block.size
                if not block.is_landed:
                    waits[block] = min(waits.get(block, float("inf")), stream.wait_s(ahead))
        for block, wait_s in waits.items():
            mine_s = idle.latency_s + idle.wait_s(block.size)
            if wait_s > max(found_s, 2 * mine_s + RESCUE_S):
                found, found_s = block, wait_s
        return found

    def land(self, block: Block) -> None:
        assert not block.is_landed
        assert self.remaining > 0
        block.is_landed = True
        self.remaining -= 1

    def delivered(self, stream: DonorStream) -> None:
        """Note that the first block of a stream's queue has come, whatever became of it."""
        self._give_back(stream._remove_first())

    def forsake(self, stream: DonorStream) -> bool:
        """Remove a stream that has ended. Return whether it has left blocks to the others."""
        self._streams.remove(stream)
        before = len(self._returned)
        while stream.queue:
            self._give_back(stream._remove_first())
        return len(self._returned) > before

    def _give_back(self, block: Block) -> None:
        if not block.is_landed and not block.holders:
            self._returned.append(block)


def blocks_of(tensor: int, size: int, numbers: Iterable[int]) -> Iterator[Block]:
    """Yield the numbered blocks of a tensor of `size` bytes."""
    width = tensor_blocks.BLOCK_BYTES
    for number in numbers:
        yield Block(tensor, number, min(width, size - number * width))
