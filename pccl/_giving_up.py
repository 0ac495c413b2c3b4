"""Ops that are given up: how long their outcome is waited for, and the error where it stays unknown."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pccl.errors import PCCLError
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.peer_session import PeerSession
from pccl.types import Result

CANCEL_GRACE_S = 5.0
"""Seconds within which an op that has timed out must be aborted on all peers, lest its outcome be unknown."""
INTERRUPT_GRACE_S = 0.5
"""The same for an op whose caller was interrupted or cancelled. If it is over by then, its tag is free again."""


def deadline(timeout_s: float | None) -> float:
    """The time, on the clock of `time.monotonic`, at which a timeout has passed; infinity if there is none."""
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def gave_up(session: PeerSession, timeout_s: float | None, op: PendingOp, whom: str = "") -> str:
    """The reason that all peers are given for an op that this one gives up. `whom` it has waited for, where that is
    known better than `PeerSession.whom` knows it."""
    who = session.named(session.view.peer) if session.view is not None else "a peer"
    if timeout_s is None:
        return f"aborted on all peers: {who} gave up the op with tag {op.tag}"
    text = f"the op with tag {op.tag} waited for {whom or session.whom(op)}"
    return f"aborted on all peers: {who} gave up after {timeout_s:g} s: {text}"


def give_up(session: PeerSession, ops: Sequence[PendingOp]) -> None:
    """Abort the interrupted caller's ops on all peers and return its arrays."""
    for op in ops:
        session.ops.cancel(op, Result.TIMEOUT, gave_up(session, None, op))
    for op in ops:
        if not op.is_released:
            session.ops.ask_for_release(op, goes_on=False)
    for op in ops:
        op.reclaim()  # waits for this process alone; a further signal ends even that


def require_outcome(
    session: PeerSession, ops: Sequence[PendingOp], func_name: str, cause: PCCLError | None = None
) -> None:
    """Raise OUTCOME_UNKNOWN if other peers may have committed one of `ops` that was given up here.

    The arrays of `ops` belong to the caller again. `cause` is the error for which they were given up, if there is one.
    """
    unknown = [op for op in ops if not op.is_over or (op.is_detached and not op.has_failed)]
    if not unknown:
        return
    tags = sorted({op.tag for op in unknown})
    view = session.view
    others = sorted({peer for op in unknown for peer in op.ring if view is None or peer != view.peer})
    what = f"the op with tag {tags[0]} was" if len(tags) == 1 else f"the ops with tags {tags[:10]} were"
    silent = (
        "not all of them have answered" if session.hears_master else "the master has been lost, and no other is found"
    )
    text = (
        f"{what} given up here, and peers {others} may have committed what this one has not: {silent}. The arrays are "
        f"as they were. Reducing again may meet the others' next step, unless steps are told apart (step=): bring all "
        f"peers to one state first (sync_shared_state), or leave the run"
    )
    raise PCCLError(Result.OUTCOME_UNKNOWN, func_name, text if cause is None else f"{text}. It was: {cause}")
