"""The donor's side of a state transfer: answers one connection of a receiver, request by request, in order.

A donor may serve many connections at once, of one receiver or of several. Each send is at most a block and followed by
a turn of trio's scheduler, so that connections share the uplink evenly and nothing else in the trio thread waits for
more than a block's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.runtime import state_blocks
from pccl.runtime.state_blocks import Fingerprint, StateTensor
from pccl.runtime.wire import ByteStream, ConnectionLost, receive_message, send_message


async def serve(
    stream: ByteStream, tensors: Sequence[StateTensor], own: Fingerprint, sent: Callable[[int], None]
) -> None:
    """Ends only by an exception: ConnectionLost, or ProtocolError for a request that nobody may make. `sent` hears of
    every piece of content that has left."""
    while True:
        request: m.StateRequest = await receive_message(stream, m.StateRequest)
        if not 0 <= request.tensor < len(tensors):
            raise ProtocolError(f"there is no tensor number {request.tensor}")
        if isinstance(request, m.DigestRequest):
            digests = own.blocks[request.tensor]
            await send_message(stream, m.Digests(request.tensor, state_blocks.BLOCK_BYTES, digests))
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


async def _send(stream: ByteStream, block: memoryview, sent: Callable[[int], None]) -> None:
    while block:
        try:
            count = await stream.send(block)
        except OSError as error:
            raise ConnectionLost(error.strerror or str(error)) from None
        sent(count)
        block = block[count:]
