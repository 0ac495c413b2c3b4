"""Transfers a shared state: serves blocks to other peers, or fetches differing blocks from many donors concurrently.

The payload bypasses the engine: Python passes memory views to the kernel, and hashing releases the GIL.

A `_Fetch` brings tensors to the content that block digests specify:

1. Donors send the block digests, which must hash to the elected root. If there are few digests, every donor sends them
   immediately. Otherwise they are requested from one donor at a time until one has sent them.
2. Blocks are received into their tensor and hashed. A block is done if its digest matches. Blocks of device tensors are
   hashed in host memory and then copied. A second copy of a block is received in a scratch block, so that a
   verified block is never overwritten. A donor gets more streams while they increase its speed.
3. A donor fails if it is unreachable, breaks the protocol, sends wrong data, or is silent for the peer timeout, or for
   STALL_S while others send. Its blocks are then fetched from other donors.

The fetch fails when no donor is left, but verified blocks are kept. Loose tensors are not in the root, so they are
all fetched from the same donor, after the other tensors.

`Schedule` chooses a donor for each block. A stream draws blocks from a common pool while its requested blocks are
expected within its *horizon*: the longer of a quarter of a second and three times its latency. At the end, an idle
stream requests a *late* block again if it expects it well before the streams that hold it do (BitTorrent's endgame).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol

import trio

from pccl.protocol import messages as m
from pccl.protocol.codec import MESSAGE_BYTES_MAX, ProtocolError
from pccl.runtime.network.links import LinkError
from pccl.runtime.network.wire import ByteStream, ConnectionLost, receive_message, receive_some, send_message, send_some
from pccl.runtime.state import tensor_blocks
from pccl.runtime.state.tensor_blocks import DIGEST_BYTES, UNKNOWN, BlockMemory, Fingerprint, StateTensor
from pccl.runtime.threads.tasks import start_task

HORIZON_S = 0.25
HORIZON_LATENCIES = 3
REQUESTS_FIRST = 2
"""Number of open requests while a stream's speed is unknown."""
REQUESTS_MAX = 256
"""Maximum number of open requests. They fit into the donor's receive buffer while it does not read."""
RATE_WINDOW_S = 0.1
RATE_WEIGHT = 0.3
"""The weight of the newest measurement window in the average rate of a stream."""
RESCUE_S = 0.25
"""Minimum time that a second request for a block must save."""


@dataclass(eq=False)
class Block:
    """Block `number` of tensor `tensor`, of `size` bytes."""

    tensor: int
    number: int
    size: int
    is_done: bool = False
    holders: list[DonorStream] = field(default_factory=list)
    """Streams that have requested the block and have not received it yet."""


class DonorStream:
    """The open requests and the speed of one connection to a donor."""

    def __init__(self) -> None:
        self.queue: deque[Block] = deque()
        self.silent_s = 0.0
        """Seconds without data for the open requests. The receiver's watch increases it."""
        self.latency_s = 0.0
        """The shortest time from a request to its first byte on an idle stream."""
        self.rate: float | None = None
        """Bytes per second; None if not measured yet."""
        self.to_come_bytes = 0
        """Number of bytes of queued blocks that have not arrived yet."""
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
            self._window_bytes = -count  # these bytes arrived before the window
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
        """Return the expected time for `size` bytes, which is at least the time that the stream has been silent."""
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
        rate = sum(stream.rate or 0.0 for stream in self._streams if stream.queue)
        return self.remaining * tensor_blocks.BLOCK_BYTES / rate if rate else float("inf")

    def draw(self, stream: DonorStream, now: float) -> Block | None:
        """Add the next block to a stream's queue and return it, or None if none is available now."""
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
                if not block.is_done:
                    waits[block] = min(waits.get(block, float("inf")), stream.wait_s(ahead))
        for block, wait_s in waits.items():
            mine_s = idle.latency_s + idle.wait_s(block.size)
            if wait_s > max(found_s, 2 * mine_s + RESCUE_S):
                found, found_s = block, wait_s
        return found

    def finish(self, block: Block) -> None:
        assert not block.is_done
        assert self.remaining > 0
        block.is_done = True
        self.remaining -= 1

    def delivered(self, stream: DonorStream) -> None:
        self._give_back(stream._remove_first())

    def leave(self, stream: DonorStream) -> bool:
        """Remove a stream that has ended. Return whether any of its blocks went back to the pool."""
        self._streams.remove(stream)
        before = len(self._returned)
        while stream.queue:
            self._give_back(stream._remove_first())
        return len(self._returned) > before

    def _give_back(self, block: Block) -> None:
        if not block.is_done and not block.holders:
            self._returned.append(block)


def blocks_of(tensor: int, size: int, numbers: Iterable[int]) -> Iterator[Block]:
    width = tensor_blocks.BLOCK_BYTES
    for number in numbers:
        yield Block(tensor, number, min(width, size - number * width))


logger = logging.getLogger("pccl.state")

STALL_S = 5.0
PATIENCE_S = 5.0
"""Longest silence of a donor if no peer timeout is given."""
WATCH_S = 0.25
IDLE_S = 0.1
"""Interval of an idle stream's search for late blocks."""
DONORS_MAX = 32
"""Maximum number of donors in use at the same time; others replace those that fail."""
STREAMS_MAX = 64
"""Maximum number of streams from all donors together, but each donor always has one."""
STREAMS_PER_DONOR_MAX = 8
STREAM_AFTER_S = 2.0
"""Time to measure a donor before it gets another stream, if the remaining transfer takes longer than twice that."""
STREAM_GAIN = 1.1
"""The factor by which the last added stream must have increased a donor's speed before the donor gets another one."""
DIGESTS_UNASKED_BYTES_MAX = 2**18
"""Up to this size, every donor sends all digests without a request, which saves a round trip."""
DIGEST_REQUESTS_AHEAD = 128
"""Number of digest requests sent in advance, which must fit into the donor's receive buffer."""


class ClosableStream(ByteStream, Protocol):
    def close(self) -> None: ...


Connect = Callable[[m.PeerInfo, bool], Awaitable[ClosableStream]]
"""Connects to a donor. If the second argument is true, the donor first sends the digests of all tensors that are not
loose. Raises LinkError."""


class TransferError(Exception):
    """The transfer failed because no donor is left."""

    def __init__(self, failures: list[tuple[int, str]]) -> None:
        self.suspects = failures
        super().__init__("; ".join(f"donor {peer}: {reason}" for peer, reason in failures) or "no donor is left")


class Transfer:
    """A peer's tensors in one `sync_shared_state`. Serves them, or brings them to the content that a group has elected.

    The tensors must not change during the call."""

    def __init__(self, tensors: Sequence[StateTensor], own: Fingerprint) -> None:
        self.tensors = tensors
        self.own = own
        """The digests of the content that is served, as of the start of the call or the end of a fetch."""
        self.held = [bytearray(digests) for digests in own.blocks]
        """The digests of the current blocks; UNKNOWN for a partially written block."""
        self.tx_bytes = 0
        """Number of bytes of content sent."""
        self.rx_bytes = 0
        """Number of bytes of verified blocks received; each block counts once."""
        self.overwritten: set[str] = set()
        self.failures: dict[int, str] = {}
        """Failed donors with the reasons."""
        self.patience_s = PATIENCE_S
        self._fetching: _Fetch | None = None

    async def serve(self, stream: ByteStream, sends_digests: bool = False) -> None:
        """Serve one connection from a receiver until it closes, at most one block per iteration of trio's scheduler.
        Raises ConnectionLost or ProtocolError."""
        for index, tensor in enumerate(self.tensors):
            if sends_digests and not tensor.loose:
                await self._send_digests(stream, index)
        while True:
            request: m.StateRequest = await receive_message(stream, m.StateRequest)
            if not 0 <= request.tensor < len(self.tensors):
                raise ProtocolError(f"unknown tensor number {request.tensor}")
            if isinstance(request, m.DigestRequest):
                await self._send_digests(stream, request.tensor)
                continue
            tensor = self.tensors[request.tensor]
            end = request.first + request.count
            if request.first < 0 or request.count < 1 or end > tensor.block_count:
                raise ProtocolError(f"request for blocks {request.first} to {end} of {tensor.block_count}")
            for number in range(request.first, end):
                if tensor.store is None:
                    block = tensor.block(number)
                else:
                    block = await trio.to_thread.run_sync(tensor.store.load, number, abandon_on_cancel=True)
                while block:
                    count = await send_some(stream, block)
                    self.tx_bytes += count
                    block = block[count:]

    async def _send_digests(self, stream: ByteStream, tensor: int) -> None:
        await send_message(stream, m.Digests(tensor, tensor_blocks.BLOCK_BYTES, self.own.blocks[tensor]))

    async def fetch(
        self, plan: m.SyncPlan, donors: Sequence[m.PeerInfo], connect: Connect, patience_s: float = PATIENCE_S
    ) -> list[tuple[int, str]]:
        """Fetch the elected content of the tensors. A donor may be silent for `patience_s`. Return the failed donors
        with the reasons. Raises TransferError if no donor is left. After a cancellation, another fetch may follow."""
        self.failures.clear()
        self.patience_s = patience_s
        fixed = [index for index, tensor in enumerate(self.tensors) if not tensor.loose]
        loose = [index for index, tensor in enumerate(self.tensors) if tensor.loose]
        if plan.fetch_content and fixed:
            await self._fetch(fixed, plan.root, donors, connect)
        if plan.fetch_loose and loose:
            await self._fetch_loose(loose, donors, connect)
        root = plan.root if plan.fetch_content else self.own.root
        self.own = Fingerprint(tuple(bytes(digests) for digests in self.held), root)
        return list(self.failures.items())

    async def _fetch_loose(self, loose: list[int], donors: Sequence[m.PeerInfo], connect: Connect) -> None:
        for donor in donors:
            if donor.peer not in self.failures:
                with suppress(TransferError):
                    await self._fetch(loose, None, [donor], connect)
                    return
        raise TransferError(list(self.failures.items()))

    async def _fetch(
        self, wanted: list[int], root: bytes | None, donors: Sequence[m.PeerInfo], connect: Connect
    ) -> None:
        fetching = self._fetching = _Fetch(self, wanted, root, donors, connect)
        try:
            await fetching.run()
        finally:
            self._fetching = None

    def lost(self, peer: int, reason: str) -> None:
        if self._fetching is not None:
            self._fetching.lost(peer, reason)


class _Donor:
    def __init__(self, member: m.PeerInfo) -> None:
        self.peer = member.peer
        self.member = member
        self.scope = trio.CancelScope()
        self.connections: list[_Connection] = []
        self.nursery: trio.Nursery | None = None
        """Runs the tasks of the donor's streams, once there are any."""
        self.streams = 1
        self.is_full = False
        """Whether the donor would gain no speed from more streams."""
        self.rx_bytes = 0
        self._rate = 0.0
        self._windows = 0
        self._window_at = 0.0
        self._window_bytes = 0

    def measure(self, now: float) -> bool:
        """Measure the donor's speed every STREAM_AFTER_S. Return whether it should get another stream."""
        elapsed_s = now - self._window_at
        if self._windows and elapsed_s < STREAM_AFTER_S:
            return False
        rate = (self.rx_bytes - self._window_bytes) / elapsed_s
        # Ignore the first two windows because of TCP's slow start.
        if self._windows > 2:
            self.is_full = self.is_full or rate < STREAM_GAIN * self._rate
        self._rate = rate
        self._windows += 1
        self._window_at, self._window_bytes = now, self.rx_bytes
        return self._windows > 2 and not self.is_full


class _Connection:
    def __init__(self, donor: _Donor, sock: ClosableStream) -> None:
        self.stream = DonorStream()
        self._donor = donor
        self.is_learning = False
        self.silence = ""
        """Why the watch has ended the connection."""
        self._scope = trio.CancelScope()
        self._sock = sock
        self._scratch: bytearray | None = None

    @property
    def is_waiting(self) -> bool:
        return self.is_learning or bool(self.stream.queue)

    async def unless_silent(self, use: Callable[[], Awaitable[None]]) -> None:
        self._scope = trio.CancelScope()
        with self._scope:
            await use()
        if self.silence:
            raise ConnectionLost(self.silence)

    def end(self, silence: str) -> None:
        self.silence = silence
        self._scope.cancel()

    async def send(self, data: bytes | memoryview) -> int:
        return await self._sock.send(data)

    async def recv_into(self, buffer: bytearray | memoryview) -> int:
        count = await self._sock.recv_into(buffer)
        self._donor.rx_bytes += count
        self.stream.moved(count, trio.current_time())
        return count

    async def receive_scratch(self, size: int) -> memoryview:
        if self._scratch is None:
            self._scratch = bytearray(tensor_blocks.BLOCK_BYTES)
        whole = view = memoryview(self._scratch)[:size]
        while view:
            view = view[await receive_some(self, view) :]
        return whole

    def close(self) -> None:
        self._sock.close()


class _Writing:
    def __init__(self) -> None:
        self.is_revoked = False
        self.ended = trio.Event()
        self._scope = trio.CancelScope()

    async def receive(self, connection: _Connection, view: memoryview) -> int:
        """Receive data into the block. Return the number of bytes, or 0 if the writer was revoked."""
        self._scope = trio.CancelScope()
        with self._scope:
            return await receive_some(connection, view)
        return 0

    async def revoke(self) -> None:
        self.is_revoked = True
        self._scope.cancel()
        await self.ended.wait()


class _Fetch:
    def __init__(
        self,
        transfer: Transfer,
        wanted: list[int],
        root: bytes | None,
        donors: Sequence[m.PeerInfo],
        connect: Connect,
    ) -> None:
        self._transfer = transfer
        self._tensors = transfer.tensors
        self._wanted = wanted
        self._root = root
        self._members = [member for member in donors if member.peer not in transfer.failures]
        self._connect = connect
        self._donors: dict[int, _Donor] = {}
        self._goal: dict[int, bytes] = {}
        self._schedule: Schedule | None = None
        self._sends_digests = (
            root is not None
            and DIGEST_BYTES * sum(self._tensors[index].block_count for index in wanted) <= DIGESTS_UNASKED_BYTES_MAX
        )
        self._learning = trio.Lock()
        self._writing: dict[Block, _Writing] = {}
        self._returned = trio.Event()
        """Set when a stream has returned blocks to the pool, and then replaced by a new event."""
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        members = iter(self._members)
        with self._scope:
            async with trio.open_nursery() as watch:
                start_task(watch, self._watch)
                async with trio.open_nursery() as users:
                    for _ in range(min(len(self._members), DONORS_MAX)):
                        start_task(users, self._use_each, members)
                watch.cancel_scope.cancel()
        if not self._is_done:
            raise TransferError(list(self._transfer.failures.items()))

    @property
    def _is_done(self) -> bool:
        return self._schedule is not None and self._schedule.is_done

    def lost(self, peer: int, reason: str) -> None:
        if any(member.peer == peer for member in self._members):
            self._fail(peer, f"was lost: {reason}")

    def _fail(self, peer: int, reason: str) -> None:
        if peer in self._transfer.failures:
            return
        logger.warning("donor %d failed: %s", peer, reason, extra={"other": peer})
        self._transfer.failures[peer] = reason
        if peer in self._donors:
            self._donors[peer].scope.cancel()

    # One donor.

    async def _use_each(self, members: Iterator[m.PeerInfo]) -> None:
        for member in members:
            if member.peer not in self._transfer.failures:
                await self._use(member)

    async def _use(self, member: m.PeerInfo) -> None:
        donor = self._donors[member.peer] = _Donor(member)
        try:
            with donor.scope:
                connection = await self._begin(donor)
                async with trio.open_nursery() as donor.nursery:
                    start_task(donor.nursery, self._use_stream, donor, connection)
        except (LinkError, ConnectionLost, ProtocolError) as error:
            self._fail(donor.peer, str(error))

    async def _begin(self, donor: _Donor) -> _Connection:
        connection = _Connection(donor, await self._connect(donor.member, self._sends_digests))
        try:
            if self._sends_digests:
                await self._learn(donor, connection)
            else:
                async with self._learning:
                    if self._schedule is None:
                        await self._learn(donor, connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _add_streams(self, now: float) -> None:
        streams = sum(len(donor.connections) for donor in self._donors.values())
        for donor in self._donors.values():
            if self._schedule is None or not donor.connections or not donor.measure(now):
                continue
            if (
                donor.streams < min(donor.member.connections, STREAMS_PER_DONOR_MAX)
                and streams < STREAMS_MAX
                and all(connection.stream.silent_s < STREAM_AFTER_S / 2 for connection in donor.connections)
                and self._schedule.remaining_s > 2 * STREAM_AFTER_S
            ):
                assert donor.nursery is not None
                start_task(donor.nursery, self._open_stream, donor)
                donor.streams += 1
                streams += 1

    async def _open_stream(self, donor: _Donor) -> None:
        try:
            connection = _Connection(donor, await self._connect(donor.member, False))
        except LinkError as error:
            logger.info("no additional connection to donor %d: %s", donor.peer, error, extra={"other": donor.peer})
            return
        await self._use_stream(donor, connection)

    async def _use_stream(self, donor: _Donor, connection: _Connection) -> None:
        """Fetch blocks over one connection to a donor. The donor counts as failed when its last stream has failed, or
        at once if it sends wrong data."""
        schedule = self._schedule
        assert schedule is not None
        donor.connections.append(connection)
        schedule.enter(connection.stream)
        try:
            await connection.unless_silent(lambda: self._run_stream(connection, schedule))
        except ConnectionLost as error:
            if len(donor.connections) == 1:
                self._fail(donor.peer, str(error))
        except ProtocolError as error:
            self._fail(donor.peer, str(error))
        finally:
            donor.connections.remove(connection)
            connection.close()
            if schedule.leave(connection.stream):
                self._returned.set()
                self._returned = trio.Event()

    async def _watch(self) -> None:
        last = trio.current_time()
        while True:
            await trio.sleep(WATCH_S)
            now = trio.current_time()
            elapsed_s, last = min(now - last, 2 * WATCH_S), now
            waiting = [
                connection
                for donor in self._donors.values()
                for connection in donor.connections
                if connection.is_waiting
            ]
            for connection in waiting:
                connection.stream.silent_s += elapsed_s
            least_s = min((connection.stream.silent_s for connection in waiting), default=0.0)
            are_others_idle = self._learning.statistics().tasks_waiting > 0
            for connection in waiting:
                # If all donors fall silent at about the same time, this process itself may be cut off.
                is_alone = are_others_idle or connection.stream.silent_s - least_s >= STALL_S / 2
                patience_s = self._transfer.patience_s
                limit_s = min(STALL_S, patience_s) if is_alone else patience_s
                if connection.stream.silent_s >= limit_s:
                    connection.end(f"was silent for {limit_s:g} s")
            self._add_streams(now)

    # Learning the elected digests.

    async def _learn(self, donor: _Donor, connection: _Connection) -> None:
        donor.connections.append(connection)
        connection.is_learning = True
        connection.stream.asked(trio.current_time())
        goal: dict[int, bytes] = {}
        try:
            await connection.unless_silent(lambda: self._receive_digests(connection, goal))
        finally:
            connection.is_learning = False
            donor.connections.remove(connection)
        if self._root is not None:
            root = tensor_blocks.root_digest(self._tensors, [goal.get(i, b"") for i in range(len(self._tensors))])
            if root != self._root:
                raise ProtocolError("its digests do not match the elected state")
        if self._schedule is not None:
            return
        self._goal = goal
        missing = {index: tensor_blocks.differing(self._transfer.held[index], goal[index]) for index in goal}
        blocks = (blocks_of(index, self._tensors[index].size_bytes, missing[index]) for index in goal)
        self._schedule = Schedule(chain.from_iterable(blocks), sum(map(len, missing.values())))
        if self._is_done:
            self._scope.cancel()

    async def _receive_digests(self, connection: _Connection, goal: dict[int, bytes]) -> None:
        ahead = iter(() if self._sends_digests else self._wanted)
        for index in islice(ahead, DIGEST_REQUESTS_AHEAD):
            await send_message(connection, m.DigestRequest(index))
        for index in self._wanted:
            answer: m.Digests = await receive_message(connection, m.Digests, MESSAGE_BYTES_MAX)
            upcoming = next(ahead, None)
            if upcoming is not None:
                await send_message(connection, m.DigestRequest(upcoming))
            tensor = self._tensors[index]
            if (
                answer.tensor != index
                or answer.block_bytes != tensor_blocks.BLOCK_BYTES
                or len(answer.digests) != tensor.block_count * DIGEST_BYTES
            ):
                raise ProtocolError(f"its digests of tensor {tensor.name!r} are malformed")
            goal[index] = answer.digests

    # Fetching blocks.

    async def _run_stream(self, connection: _Connection, schedule: Schedule) -> None:
        stream = connection.stream
        while True:
            await self._ask(connection, schedule)
            if stream.queue:
                await self._receive_block(connection, schedule)
                schedule.delivered(stream)
            else:
                with trio.move_on_after(IDLE_S):
                    await self._returned.wait()

    async def _ask(self, connection: _Connection, schedule: Schedule) -> None:
        while (block := schedule.draw(connection.stream, trio.current_time())) is not None:
            await send_message(connection, m.BlockRequest(block.tensor, block.number, 1))

    async def _receive_block(self, connection: _Connection, schedule: Schedule) -> None:
        block = connection.stream.queue[0]
        if block.is_done or block in self._writing:
            await self._receive_copy(connection, block)
            return
        tensor = self._tensors[block.tensor]
        memory = tensor.memory_of(block.number)
        rest = memory.view
        writing = self._writing[block] = _Writing()
        try:
            while rest and not writing.is_revoked:
                count = await writing.receive(connection, rest)
                if count:
                    if tensor.store is None:
                        self._spoil(block)
                    rest = rest[count:]
                    await self._ask(connection, schedule)
            if not rest:
                self._verify(memory.view, block)
                self._finish(block, memory)
        finally:
            del self._writing[block]
            writing.ended.set()
        if rest:
            await connection.receive_scratch(len(rest))

    async def _receive_copy(self, connection: _Connection, block: Block) -> None:
        copy = await connection.receive_scratch(block.size)
        if block.is_done:
            return
        self._verify(copy, block)
        with trio.CancelScope(shield=True):  # brief
            while (writing := self._writing.get(block)) is not None:
                await writing.revoke()
        if not block.is_done:
            memory = self._tensors[block.tensor].memory_of(block.number)
            memory.view[:] = copy
            self._finish(block, memory)

    def _verify(self, data: memoryview, block: Block) -> None:
        if tensor_blocks.digest(data) != tensor_blocks.digest_at(self._goal[block.tensor], block.number):
            name = self._tensors[block.tensor].name
            raise ProtocolError(f"block {block.number} of tensor {name!r} does not match its digest")

    def _spoil(self, block: Block) -> None:
        self._transfer.overwritten.add(self._tensors[block.tensor].name)
        self._hold(block, UNKNOWN)

    def _finish(self, block: Block, memory: BlockMemory) -> None:
        assert self._schedule is not None
        self._spoil(block)
        memory.commit()
        self._hold(block, tensor_blocks.digest_at(self._goal[block.tensor], block.number))
        self._transfer.rx_bytes += block.size
        self._schedule.finish(block)
        if self._is_done:
            self._scope.cancel()

    def _hold(self, block: Block, digest: bytes) -> None:
        start = block.number * DIGEST_BYTES
        self._transfer.held[block.tensor][start : start + DIGEST_BYTES] = digest
