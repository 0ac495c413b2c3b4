"""The donor's side of a state transfer: answers one connection of a receiver, request by request, in order.

A donor may serve many connections at once, of one receiver or of several. Each send is at most a block and followed by
a turn of trio's scheduler, so that connections share the way out evenly and nothing else in the trio thread waits
for more than a block's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.runtime.network.wire import ByteStream, receive_message, send_message, send_some
from pccl.runtime.state import tensor_blocks
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
