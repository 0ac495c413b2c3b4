"""Up to which size ops go direct, by what is known of the links; and that a peer's ops keep to it."""

from __future__ import annotations

import pytest

from pccl.protocol.link_metrics import UNKNOWN, LinkMetrics, direct_limit, is_outdated
from pccl.protocol.peer.effects import SubmitOp
from pccl.runtime.data_plane.op_request import OpRequest
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.types import DataType, QuantizationOptions, ReduceAlgorithm, ReduceOp

MIB = 1 << 20
MBIT = 1e6 / 8


def limit(peers: int, rate_mbit: float, delay_s: float, peers_on_host: int = 1) -> int:
    metrics = LinkMetrics()
    for peer in range(peers):
        metrics.arrived(peer, [f"host {peer // peers_on_host}"])
    for sender in range(peers):
        for receiver in range(peers):
            if not metrics.are_on_one_host((sender, receiver)):
                metrics.measured((sender, receiver), rate_mbit * MBIT, 2 * delay_s, 0.0)
    return direct_limit(range(peers), metrics)


def test_limit_matches_lab() -> None:
    """4 hosts, 25 ms: of 200 Mbit/s, direct takes half as long at 1 MiB and a quarter longer at 4 MiB."""
    assert MIB <= limit(4, 200, 0.025) < 4 * MIB


def test_longer_links_raise_limit() -> None:
    limits = [limit(4, 20, 0.025), limit(4, 200, 0.025), limit(4, 1000, 0.025), limit(4, 1000, 0.1)]
    assert limits == sorted(set(limits))


def test_shared_uplink_lowers_limit() -> None:
    assert limit(8, 1000, 0.025, peers_on_host=4) < limit(8, 1000, 0.025)


@pytest.mark.parametrize(("peers", "peers_on_host"), [(2, 1), (4, 4)])
def test_no_limit_without_choice(peers: int, peers_on_host: int) -> None:
    assert limit(peers, 200, 0.025, peers_on_host) == UNKNOWN


def test_unknown_link_gives_no_limit() -> None:
    metrics = LinkMetrics()
    for peer in range(3):
        metrics.arrived(peer, [f"host {peer}"])
    pairs = [(sender, receiver) for sender in range(3) for receiver in range(3) if sender != receiver]
    for pair in pairs:
        assert direct_limit(range(3), metrics) == UNKNOWN
        metrics.measured(pair, 200 * MBIT, 0.05, 0.0)
    assert direct_limit(range(3), metrics) != UNKNOWN
    metrics.failed(pairs[0], 1.0)
    assert direct_limit(range(3), metrics) == UNKNOWN


def test_changed_limit_is_outdated() -> None:
    assert not is_outdated(MIB, UNKNOWN, 4)
    assert not is_outdated(MIB, MIB // 2, 4)
    assert is_outdated(MIB, 4 * MIB, 4)
    assert is_outdated(4 * MIB, MIB, 4)
    assert not is_outdated(UNKNOWN, 2 * MIB, 4), "as without"
    assert is_outdated(UNKNOWN, 8 * MIB, 4)
    assert not is_outdated(UNKNOWN, 8 * MIB, 16)
    assert not is_outdated(0, 0, 4)


@pytest.mark.parametrize(
    ("direct_limit", "is_meshed", "quantization", "expected"),
    [
        (4096, True, None, ReduceAlgorithm.DIRECT),
        (4095, True, None, ReduceAlgorithm.RING),
        (0, True, None, ReduceAlgorithm.RING),
        (UNKNOWN, True, None, ReduceAlgorithm.DIRECT),
        (4096, False, None, ReduceAlgorithm.RING),
        (0, True, QuantizationOptions(), ReduceAlgorithm.DIRECT),
    ],
)
def test_ops_use_limit(
    direct_limit: int, is_meshed: bool, quantization: QuantizationOptions | None, expected: ReduceAlgorithm
) -> None:
    """Quantized ones go direct at any size: their error does not grow with the world then."""
    request = OpRequest(group=0)
    launch = SubmitOp(1, 1, 0, 0, 0, 4, (0, 1, 2, 3), is_meshed, is_meshed, direct_limit=direct_limit)
    request.fill(launch, OpSpec(0, DataType.FLOAT, ReduceOp.SUM, quantization, Buffers(0, 0, 1024, None)))
    assert request.native.shape.algorithm == expected
