"""What a master that takes a run over knows of its peers."""

from __future__ import annotations

import msgspec
import pytest

from tests.protocol.test_failover import Rig
from tests.protocol.test_recovery_report import report_of, view


@pytest.mark.parametrize(
    ("known", "now_at", "told"),
    [
        (["127.0.0.1"], "10.0.0.2", ["10.0.0.2"]),
        (["::1", "203.0.113.7"], "10.0.0.2", ["203.0.113.7", "10.0.0.2"]),
        (["127.0.0.1"], "127.0.0.1", ["127.0.0.1"]),
        (["10.0.0.2"], "127.0.0.1", ["10.0.0.2", "127.0.0.1"]),
    ],
)
def test_loopback_address_of_dead_master_is_replaced(known: list[str], now_at: str, told: list[str]) -> None:
    """A loopback address stands for the machine of the master, which is another one now."""
    rig = Rig()
    rig.machine.connected(1, now_at, rig.now)
    for peer in (1, 2):
        rig.resume(peer)
    for peer in (1, 2):
        report = report_of(peer, view(7, 1, 2))
        rig.deliver(msgspec.structs.replace(report, me=msgspec.structs.replace(report.me, hosts=known)))
    assert rig.machine.master.state.members[1].hosts == told
