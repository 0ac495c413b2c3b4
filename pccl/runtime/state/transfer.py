"""The donor's side of a state transfer: answers one connection of a receiver, request by request, in order.

A donor may serve many connections at once, of one receiver or of several. Each send is at most a block and followed by
a turn of trio's scheduler, so that connections share the way out evenly and nothing else in the trio thread waits
for more than a block's copy.

A peer's part in one `sync_shared_state`: it serves its state to others, or has its own brought to theirs.

    tensor_blocks    blocks and digests
    donor            answers a receiver
    schedule         which block is asked of which donor
    receiver         fetches from many donors, verifies, lands

Payload does not go through the engine: the caller is blocked in the joint call anyway, Python only passes memory views
to the kernel, and hashing happens outside the GIL. The tensors must not change while their owner is in the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.runtime.network.wire import ByteStream, receive_message, send_message, send_some
from pccl.runtime.state import tensor_blocks
from pccl.runtime.state.receiver import PATIENCE_S, ClosableStream, Connect, Receiver, TransferError
from pccl.runtime.state.tensor_blocks import Fingerprint, StateTensor


async def serve(
    stream: ByteStream,
    tensors: Sequence[StateTensor],
    own: Fingerprint,
    sent: Callable[[int], None],
    tells: bool = False,
) -> None:
    """Answer a receiver, until an exception: ConnectionLost, or ProtocolError for a request that nobody may make. With
    `tells`, send it the digests of all tensors that are not loose before it asks. `sent` is called with the size of
    whatever content has left."""
    for index, tensor in enumerate(tensors):
        if tells and not tensor.loose:
            await _send_digests(stream, index, own)
    while True:
        request: m.StateRequest = await receive_message(stream, m.StateRequest)
        if not 0 <= request.tensor < len(tensors):
            raise ProtocolError(f"there is no tensor number {request.tensor}")
        if isinstance(request, m.DigestRequest):
            await _send_digests(stream, request.tensor, own)
            continue
        tensor = tensors[request.tensor]
        if request.first < 0 or request.count < 1 or request.first + request.count > tensor.block_count:
            raise ProtocolError(f"blocks [{request.first}, +{request.count}) of {tensor.block_count} were asked for")
        for number in range(request.first, request.first + request.count):
            if tensor.store is None:
                block = tensor.block(number)
            else:
                block = await trio.to_thread.run_sync(tensor.store.load, number, abandon_on_cancel=True)
            await _send(stream, block, sent)


async def _send_digests(stream: ByteStream, tensor: int, own: Fingerprint) -> None:
    await send_message(stream, m.Digests(tensor, tensor_blocks.BLOCK_BYTES, own.blocks[tensor]))


async def _send(stream: ByteStream, block: memoryview, sent: Callable[[int], None]) -> None:
    while block:
        count = await send_some(stream, block)
        sent(count)
        block = block[count:]


__all__ = ["ClosableStream", "Transfer", "TransferError"]


class Transfer:
    def __init__(self, tensors: Sequence[StateTensor], own: Fingerprint) -> None:
        self.tensors = tensors
        self.own = own
        """Digests of the tensors when the call began, or since a fetch has brought them up to date: what is served is
        this."""
        self.tx_bytes = 0
        """Bytes of content that left, also those that a receiver did not need any more when they came."""
        self._receiver = Receiver(tensors, own)

    @property
    def rx_bytes(self) -> int:
        """Bytes of content that came and were right, each block counted once."""
        return self._receiver.rx_bytes

    @property
    def overwritten(self) -> set[str]:
        """Tensors of which at least one byte was replaced."""
        return self._receiver.overwritten

    async def serve(self, stream: ByteStream, tells: bool = False) -> None:
        """Answer one connection of a receiver until it closes; with `tells`, send it the digests first. ConnectionLost,
        ProtocolError."""

        def sent(count: int) -> None:
            self.tx_bytes += count

        await serve(stream, self.tensors, self.own, sent, tells)

    async def fetch(
        self, plan: m.SyncPlan, donors: Sequence[m.PeerInfo], connect: Connect, patience_s: float = PATIENCE_S
    ) -> list[tuple[int, str]]:
        """Bring the tensors to the elected content. A donor may send nothing for `patience_s`. Return the donors that
        failed and how; TransferError, with the same, when none is left to ask. When cancelled, what has come stays, and
        another fetch may follow."""
        self._receiver.suspects.clear()
        self._receiver.patience_s = patience_s
        await self._receiver.fetch(plan, donors, connect)
        self.own = Fingerprint(
            tuple(bytes(digests) for digests in self._receiver.held), plan.root if plan.fetch_content else self.own.root
        )
        return list(self._receiver.suspects.items())

    def lost(self, peer: int, reason: str) -> None:
        """Note that a peer has left the run: if it is one of the donors, it is not waited for."""
        self._receiver.lost(peer, reason)
