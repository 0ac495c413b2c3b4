"""A peer's part in one `sync_shared_state`: it serves its state to others, or fetches theirs.

A donor answers each connection request by request, at most one block per turn of trio's scheduler. Payload bypasses the
engine: the caller waits in the call, Python passes memory views to the kernel, and hashing releases the GIL. The
tensors must not change during the call.
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
    """Answer a receiver until ConnectionLost, or ProtocolError for an invalid request. With `tells`, send the digests
    of all tensors that are not loose first. `sent` is called with the size of sent content."""
    for index, tensor in enumerate(tensors):
        if tells and not tensor.loose:
            await _send_digests(stream, index, own)
    while True:
        request: m.StateRequest = await receive_message(stream, m.StateRequest)
        if not 0 <= request.tensor < len(tensors):
            raise ProtocolError(f"unknown tensor number {request.tensor}")
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
        """Bring the tensors to the elected content. A donor may be silent for `patience_s`. Return the failed donors
        with reasons; TransferError when none is left. After a cancellation the content stays, and another fetch may
        follow."""
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
