"""The call `sync_shared_state`: hash the tensors, let the group elect a state, and fetch what differs."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from pccl._session_holder import SessionErrors, SessionHolder
from pccl._timeouts import Timeout
from pccl.errors import PCCLError
from pccl.protocol.long_wait import where_to_look
from pccl.protocol.messages import Kind
from pccl.runtime.session.peer_session import PeerSession
from pccl.runtime.state.tensor_blocks import StateTensor, StoreError, fingerprint
from pccl.runtime.state.transfer import Transfer
from pccl.shared_state import SharedState
from pccl.types import SharedStateSyncInfo, SharedStateSyncStrategy

FUNC_NAME = "sync_shared_state"


async def sync_shared_state(
    holder: SessionHolder, shared_state: SharedState, strategy: SharedStateSyncStrategy, timeout: Timeout
) -> SharedStateSyncInfo:
    """Take part in the group's sync and set the revision of `shared_state`.

    Errors as `Communicator.sync_shared_state` lists them. Whatever is raised, nothing is on its way to a device then.
    """
    session = holder.session(FUNC_NAME)
    tensors = [tensor.state_tensor() for tensor in shared_state.tensors]
    transfer: Transfer | None = None

    async def take_part() -> tuple[int, Transfer]:
        nonlocal transfer
        try:
            own = await trio.to_thread.run_sync(fingerprint, tensors, abandon_on_cancel=True)
        except StoreError as error:
            raise session.store_failed(str(error)) from error
        transfer = Transfer(tensors, own)
        return await session.sync(strategy.value, shared_state.revision, transfer), transfer

    try:
        try:
            with SessionErrors(FUNC_NAME):
                revision, done = await holder.bounded(
                    FUNC_NAME,
                    timeout,
                    take_part,
                    lambda: session.call_reasons.of_call(Kind.SYNC),
                    where_to_look(holder.address),
                )
        finally:
            with SessionErrors(FUNC_NAME):
                await _settle(session, tensors)
            for info in shared_state.tensors:
                if transfer is not None and info.name in transfer.overwritten:
                    info.note_written()
    except PCCLError as error:
        if transfer is None or not transfer.overwritten:
            raise
        spoiled = f"overwritten here, at least in part: {', '.join(sorted(transfer.overwritten))}"
        raise PCCLError(error.result, FUNC_NAME, f"{error.message}; {spoiled}") from None
    shared_state.revision = revision
    return SharedStateSyncInfo(done.tx_bytes, done.rx_bytes, revision)


async def _settle(session: PeerSession, tensors: Sequence[StateTensor]) -> None:
    """Wait for what is on its way to devices. SessionError if a device has failed."""
    for tensor in tensors:
        if tensor.store is not None:
            with trio.CancelScope(shield=True):
                try:
                    await trio.to_thread.run_sync(tensor.store.settle)
                except StoreError as error:
                    raise session.store_failed(str(error)) from error
