"""A peer's part in one `sync_shared_state`: it serves its state to others, or has its own brought to theirs.

    tensor_blocks    blocks and digests
    donor            answers a receiver
    schedule         which block is asked of which donor
    receiver         fetches from many donors, verifies, lands

Payload does not go through the engine: the caller is blocked in the joint call anyway, Python only passes memory views
to the kernel, and hashing happens outside the GIL. The tensors must not change while their owner is in the call.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.protocol import messages as m
from pccl.runtime.network.wire import ByteStream
from pccl.runtime.state import donor
from pccl.runtime.state.receiver import PATIENCE_S, ClosableStream, Connect, Receiver, TransferError
from pccl.runtime.state.tensor_blocks import Fingerprint, StateTensor

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

        await donor.serve(stream, self.tensors, self.own, sent, tells)

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
