"""The shape of messages on the wire. A field that moves or vanishes breaks peers of another release: add new ones at
the end, with a default, and here."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result

WIRE = {
    "PeerInfo": "peer group hosts port connections name=",
    "Ring": "group epoch peers",
    "TensorOffer": "name dtype shape loose",
    "SyncOffer": "strategy revision root tensors",
    "LinkMetric": "peer is_inbound bytes_per_s round_trip_us",
    "Hello": "protocol version group hosts port connections name= auth= site= site_size= masters= may_found="
    " session= master_timeout_s= place= run_name=",
    "Resume": "protocol run term peer auth= masters= is_accepted= session= master_timeout_s= run_name=",
    "Reattach": "protocol session received auth=",
    "Reattached": "received",
    "Ack": "received",
    "Aborted": "tag sequence code reason",
    "GroupCallOutcome": "kind call_number code reason value",
    "InstalledView": "view rings is_meshed",
    "PreparedView": "view rings answered",
    "PreVote": "installed prepared has_decided answered=",
    "RecoveryReport": "me installed prepared is_running has_decided commits aborts waits_in outcomes joined_after "
    "synced unlinked peer_timeout_s engine_threads site= site_size= link_metrics= secret= answered=",
    "Vote": "term report",
    "Leave": "reason=",
    "GroupCall": "call kind offer= open_ops=",
    "GroupCallCancel": "call",
    "LinksReady": "view failed= missing=",
    "LinkFailed": "view peer reason",
    "Tried": "failed=",
    "LinkLost": "made_in peer reason",
    "OpsDone": "epoch ops",
    "OpFailed": "epoch tag sequence code reason may_be_done=",
    "AbortVoteRequest": "epoch tag sequence code reason",
    "AbortVote": "epoch tag sequence is_committed",
    "OpsStalled": "epoch ops",
    "OpsOver": "epoch ops",
    "TagsUsed": "epoch tags",
    "FlushReply": "flush ops commits= aborts=",
    "SyncReport": "sync success reason= suspects=",
    "Probes": "probe found",
    "LinkReport": "peer tx_bytes busy_ms= sender_ms= receiver_ms= delivered= resent= "
    "unacked_bytes= round_trip_us= round_trip_us_min= is_udp=",
    "Report": "ops tx_bytes rx_bytes state_rx_bytes= reconnects= links= in_ops_ms= op_wait_ms= at_ms= figures=",
    "HeartbeatHello": "protocol run peer auth=",
    "Welcome": "peer run term peer_timeout_s= engine_threads= secret= obstacle=",
    "PreVoteRequest": "",
    "VoteRequest": "term",
    "Resumed": "term peer_timeout_s in_force=",
    "Elsewhere": "reason",
    "StartOver": "reason",
    "Goodbye": "code reason secret=",
    "Flush": "flush epoch",
    "Prepare": "view members rings commits= relink= lost= aborts=",
    "Trial": "members",
    "Install": "view is_meshed= call_number= direct_limit= is_local=",
    "OpsCommit": "epoch ops",
    "OpAbort": "epoch tag sequence code reason counts_as_made=",
    "GroupCallResult": "call code reason= value= call_number=",
    "SyncPlan": "sync revision root donors fetch_content fetch_loose",
    "Probe": "probe links",
    "Challenge": "auth run",
    "Proof": "auth",
    "LinkHello": "protocol run sender receiver made_in index count auth= encrypt= padding_bytes= memory= udp_secret= "
    "udp_port=",
    "StateHello": "protocol run sender receiver sync auth= encrypt= sends_digests= padding_bytes=",
    "ProbeHello": "protocol run sender receiver pulls auth= padding_bytes=",
    "Accepted": "padding_bytes= shares_memory= uses_udp=",
    "Rejected": "reason",
    "DigestRequest": "tensor",
    "Digests": "tensor block_bytes digests",
    "BlockRequest": "tensor first count",
    "StatusRequest": "protocol auth=",
    "KickRequest": "protocol peer auth=",
    "Status": "run",
    "RecordingRequest": "trace part seconds= last=",
    "RecordingPart": "trace part parts received_ns sent_ns content= lack=",
    "TraceRequest": "protocol seconds= last= auth=",
    "TracePart": "peer content",
    "TracedPeer": "peer name lack= offset_ns= uncertainty_ns=",
    "Traced": "run clock",
    "CheckRequest": "protocol auth=",
    "Checked": "host port version",
    "CheckEcho": "content= reply_bytes= unix_s=",
    "CheckDial": "hosts port nonce",
    "CheckCall": "nonce content=",
    "CheckDialled": "calls",
}
CHANNELS: list[Any] = [
    *(m.PeerMessage, m.MasterMessage, m.HeartbeatAnswer, m.Credential),
    *(m.PeerOpening, m.PeerAnswer, m.StateRequest, m.StateAnswer),
    *(m.Opening, m.ToWatcher, m.ToTracer, m.ReattachAnswer, m.Ack | m.Reattach),
    *(m.FromChecker, m.ToChecker, m.CheckCall | m.Accepted),
]


def _layout(kind: type[msgspec.Struct]) -> str:
    return " ".join(field.name + ("" if field.required else "=") for field in msgspec.structs.fields(kind))


def test_message_layout() -> None:
    assert m.PROTOCOL_VERSION == 20  # raised with what is below
    kinds = [*m.Message.__subclasses__(), *m.Part.__subclasses__()]
    assert {kind.__name__: _layout(kind) for kind in kinds} == WIRE


def test_every_message_has_a_channel() -> None:
    spoken = {kind for channel in CHANNELS for kind in get_args(channel)}
    assert spoken == set(m.Message.__subclasses__())


def test_messages_are_frozen() -> None:
    """Messages are kept, compared and sent to many."""
    assert not [kind for kind in m.Message.__subclasses__() if not kind.__struct_config__.frozen]


def test_group_call_kinds() -> None:
    assert set(Kind.EXCLUSIVE) < set(Kind.ALL)
    assert set(Kind.GLOBAL) == set(Kind.ALL) - {Kind.SYNC}
    assert set(Kind.ALL) - set(Kind.EXCLUSIVE) == {Kind.ARE_PEERS_PENDING}


def test_failure_codes() -> None:
    """Only a caller does not know an outcome."""
    assert set(Result) - {Result.SUCCESS, Result.OUTCOME_UNKNOWN} == m.FAILURES
