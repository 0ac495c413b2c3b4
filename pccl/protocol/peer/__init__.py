"""The peer's side of the control plane, without I/O: `machine` holds the whole, the other modules its parts."""

from pccl.protocol.peer.effects import (
    AddConnections,
    CallResult,
    CloseLink,
    Effect,
    Ended,
    EndOp,
    ForgetOp,
    ForgetUnlaunched,
    FreezeOp,
    FreezeOps,
    Installed,
    KeepHeartbeats,
    MakeLink,
    OpResult,
    PeerLog,
    ProbedLink,
    RunProbe,
    RunSync,
    SeekMaster,
    StartEngine,
    SubmitOp,
    ToMaster,
    TryLinks,
)
from pccl.protocol.peer.group_calls import in_flight
from pccl.protocol.peer.links import Limit
from pccl.protocol.peer.machine import Peer
from pccl.protocol.peer.ops import pair_start
from pccl.protocol.peer.view import View, alone_in

__all__ = [
    "AddConnections",
    "CallResult",
    "CloseLink",
    "Effect",
    "EndOp",
    "Ended",
    "ForgetOp",
    "ForgetUnlaunched",
    "FreezeOp",
    "FreezeOps",
    "Installed",
    "KeepHeartbeats",
    "Limit",
    "MakeLink",
    "OpResult",
    "Peer",
    "PeerLog",
    "ProbedLink",
    "RunProbe",
    "RunSync",
    "SeekMaster",
    "StartEngine",
    "SubmitOp",
    "ToMaster",
    "TryLinks",
    "View",
    "alone_in",
    "in_flight",
    "pair_start",
]
