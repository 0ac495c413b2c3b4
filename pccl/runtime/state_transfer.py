"""Moves shared state from donors to a receiver during sync_shared_state.

Contents are compared and moved in blocks of BLOCK_BYTES. A tensor's digest is the BLAKE3 of its blocks' BLAKE3 digests,
the root that the master elects is the BLAKE3 of all tensors' digests together with their names, dtypes and shapes. A
receiver

1. asks a donor for the block digests of each tensor and checks that they hash to the elected root, so a donor can
   neither lie nor be mistaken about the content (loose tensors are not in the root: there the donor's word counts);
2. fetches the blocks whose digest differs from its own, straight into the tensor, and verifies each as it lands;
3. on any failure goes on with the next donor. Verified blocks stay, because by step 1 they are right whoever sent them.

Payload does not go through the engine: the caller is blocked in the joint call anyway, Python only passes memory views
to the kernel, and hashing (outside the GIL) is what takes the time. `tx_bytes` and `rx_bytes` count tensor contents.

The digests are computed in worker threads; the tensors must not change while their owner is in the call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import trio
from blake3 import blake3

from pccl.protocol import messages as m
from pccl.protocol.codec import MESSAGE_BYTES_MAX, ProtocolError
from pccl.runtime.links import LinkError
from pccl.runtime.wire import ConnectionLost, receive_exactly, receive_message, send_message

logger = logging.getLogger("pccl.state")

BLOCK_BYTES = 2**20
DIGEST_BYTES = 32
BLOCKS_PER_REQUEST = 16
REQUESTS_AHEAD = 3
"""Requests under way at once, so that the donor is never idle for a round trip."""
DIGEST_REQUESTS_AHEAD = 128
"""Few enough for the donor's receive buffer, also while it waits for us to read its answers."""
BLOCK_TIMEOUT_S = 60.0
"""A donor that needs longer for one block is given up."""

Connect = Callable[[m.Member], Awaitable[trio.socket.SocketType]]


class TransferError(Exception):
    """No donor is left."""

    def __init__(self, suspects: list[tuple[int, str]]) -> None:
        self.suspects = suspects
        super().__init__("; ".join(f"donor {peer}: {reason}" for peer, reason in suspects) or "no donor is left")


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the shared state as plain memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    loose: bool
    data: memoryview
    """Its bytes, contiguous and writable."""

    def offer(self) -> m.TensorOffer:
        return m.TensorOffer(self.name, self.dtype, list(self.shape), self.loose)


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a whole state at one moment."""

    blocks: tuple[bytes, ...]
    """Per tensor its block digests, one after the other."""
    root: bytes


def block_digests(data: memoryview, block_bytes: int = BLOCK_BYTES) -> bytes:
    return b"".join(blake3(data[start : start + block_bytes]).digest() for start in range(0, len(data), block_bytes))


def root_digest(tensors: Sequence[StateTensor], blocks: Sequence[bytes]) -> bytes:
    """Over everything that must be equal: all tensors but the loose ones."""
    whole = blake3()
    for tensor, digests in zip(tensors, blocks, strict=True):
        if tensor.loose:
            continue
        head = f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode()
        whole.update(len(head).to_bytes(8, "big") + head + blake3(digests).digest())
    return whole.digest()


def fingerprint(tensors: Sequence[StateTensor]) -> Fingerprint:
    """Takes as long as hashing all bytes does; call it in a worker thread."""
    blocks = tuple(block_digests(tensor.data) for tensor in tensors)
    return Fingerprint(blocks, root_digest(tensors, blocks))


class Transfer:
    """One peer's part in one sync: its state, and what it sent and received."""

    def __init__(self, tensors: Sequence[StateTensor], own: Fingerprint) -> None:
        self.tensors = tensors
        self.own = own
        self.tx_bytes = 0
        self.rx_bytes = 0
        self.overwritten: set[str] = set()
        """Tensors of which at least one block was replaced."""

    async def serve(self, sock: trio.socket.SocketType) -> None:
        """Answers one receiver until it closes. ConnectionLost, ProtocolError."""
        while True:
            request = await receive_message(sock, m.StateRequest)
            if not 0 <= request.tensor < len(self.tensors):
                raise ProtocolError(f"there is no tensor number {request.tensor}")
            if isinstance(request, m.DigestRequest):
                digests = self.own.blocks[request.tensor]
                await send_message(sock, m.Digests(request.tensor, BLOCK_BYTES, digests))
                continue
            data = self.tensors[request.tensor].data
            blocks = -(-len(data) // BLOCK_BYTES)
            if request.first < 0 or request.count < 1 or request.first + request.count > blocks:
                raise ProtocolError(f"blocks [{request.first}, +{request.count}) of {blocks} were asked for")
            rest = data[request.first * BLOCK_BYTES : (request.first + request.count) * BLOCK_BYTES]
            while rest:
                try:
                    sent = await sock.send(rest)
                except OSError as error:
                    raise ConnectionLost(error.strerror or str(error)) from None
                self.tx_bytes += sent
                rest = rest[sent:]

    async def fetch(self, plan: m.SyncPlan, donors: Sequence[m.Member], connect: Connect) -> list[tuple[int, str]]:
        """Brings the tensors to the elected content. Returns the donors that failed and how; TransferError, with the
        same, when none is left to ask."""
        wanted = [
            index
            for index, tensor in enumerate(self.tensors)
            if (plan.fetch_loose if tensor.loose else plan.fetch_content)
        ]
        goal = _Goal(plan, wanted)
        suspects: list[tuple[int, str]] = []
        for donor in donors:
            try:
                sock = await connect(donor)
            except LinkError as error:
                suspects.append((donor.peer, str(error)))
                continue
            try:
                await self._fetch_from(sock, goal)
            except (ConnectionLost, ProtocolError, trio.TooSlowError) as error:
                reason = str(error) or f"sent nothing for {BLOCK_TIMEOUT_S:g} s"
                logger.warning("donor %d failed: %s", donor.peer, reason)
                suspects.append((donor.peer, reason))
            else:
                return suspects
            finally:
                sock.close()
        raise TransferError(suspects)

    async def _fetch_from(self, sock: trio.socket.SocketType, goal: _Goal) -> None:
        await self._learn_digests(sock, goal)
        requests = [
            m.BlockRequest(index, first, count)
            for index in goal.wanted
            for first, count in _runs(self._differing(index, goal))
        ]
        ahead = iter(requests)
        for request in islice(ahead, REQUESTS_AHEAD):
            await send_message(sock, request)
        for request in requests:
            for block in range(request.first, request.first + request.count):
                with trio.fail_after(BLOCK_TIMEOUT_S):
                    await self._receive_block(sock, goal, request.tensor, block)
            upcoming = next(ahead, None)
            if upcoming is not None:
                await send_message(sock, upcoming)

    async def _learn_digests(self, sock: trio.socket.SocketType, goal: _Goal) -> None:
        """Loose tensors are asked for anew with each donor: their contents may differ between donors."""
        ask = [index for index in goal.wanted if self.tensors[index].loose or index not in goal.digests]
        ahead = iter(ask)
        for index in islice(ahead, DIGEST_REQUESTS_AHEAD):
            await send_message(sock, m.DigestRequest(index))
        for index in ask:
            with trio.fail_after(BLOCK_TIMEOUT_S):
                answer: m.Digests = await receive_message(sock, m.Digests, MESSAGE_BYTES_MAX)
            upcoming = next(ahead, None)
            if upcoming is not None:
                await send_message(sock, m.DigestRequest(upcoming))
            blocks = -(-len(self.tensors[index].data) // BLOCK_BYTES)
            if (
                answer.tensor != index
                or answer.block_bytes != BLOCK_BYTES
                or len(answer.digests) != blocks * DIGEST_BYTES
            ):
                raise ProtocolError(f"its digests of tensor {self.tensors[index].name!r} are malformed")
            if self.tensors[index].loose:
                goal.digests[index] = answer.digests
                earlier = {key for key in goal.verified if key[0] == index}
                goal.verified -= earlier
                goal.spoiled |= earlier
            else:
                goal.unchecked[index] = answer.digests
        if goal.unchecked:
            root = root_digest(self.tensors, [goal.unchecked.get(i, b"") for i in range(len(self.tensors))])
            if root != goal.plan.root:
                goal.unchecked.clear()
                raise ProtocolError("its digests do not hash to what the group elected")
            goal.digests.update(goal.unchecked)
            goal.unchecked.clear()

    def _differing(self, index: int, goal: _Goal) -> list[int]:
        own, theirs = self.own.blocks[index], goal.digests[index]
        return [
            block
            for block in range(len(theirs) // DIGEST_BYTES)
            if (index, block) not in goal.verified
            and (
                (index, block) in goal.spoiled
                or own[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
                != theirs[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
            )
        ]

    async def _receive_block(self, sock: trio.socket.SocketType, goal: _Goal, index: int, block: int) -> None:
        tensor = self.tensors[index]
        target = tensor.data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        self.overwritten.add(tensor.name)
        goal.spoiled.add((index, block))
        await receive_exactly(sock, target)
        self.rx_bytes += len(target)
        if blake3(target).digest() != goal.digests[index][block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]:
            raise ProtocolError(f"block {block} of tensor {tensor.name!r} is not what was elected")
        goal.spoiled.discard((index, block))
        goal.verified.add((index, block))


@dataclass
class _Goal:
    """What a receiver wants to reach; outlives a donor."""

    plan: m.SyncPlan
    wanted: list[int]
    digests: dict[int, bytes] = field(default_factory=dict)
    """Per tensor the block digests to reach."""
    unchecked: dict[int, bytes] = field(default_factory=dict)
    verified: set[tuple[int, int]] = field(default_factory=set)
    spoiled: set[tuple[int, int]] = field(default_factory=set)
    """Blocks (tensor, number) that were overwritten and not verified: neither the old content nor the new."""


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending block numbers as (first, count), none longer than BLOCKS_PER_REQUEST."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1 or i - start == BLOCKS_PER_REQUEST:
            yield blocks[start], i - start
            start = i
