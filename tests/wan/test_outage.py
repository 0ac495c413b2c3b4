"""Three peers on hosts of their own: two go on without the one that is cut off. `python -m tests.wan.outage` prints how
soon."""

from __future__ import annotations

import pytest

from tests.wan.outage import FAULTS, outage, outage_of_master
from tests.wan.shape import Link

OFTEN = "peer 2 to peer 3 blocked"
# A stopped peer needs no lab (tests/processes), and the other direction of a link is the same for its receiver.
SELDOM = [*FAULTS.keys() - {OFTEN, "SIGSTOP of a peer", "peer 3 to peer 2 blocked"}]


@pytest.mark.parametrize("name", [OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SELDOM))])
def test_outage(name: str) -> None:
    found = outage(FAULTS[name], peer_timeout_s=1.0, link=Link(delay_ms=1))
    assert found.lost == 1
    assert found.seconds < 30


@pytest.mark.slow
def test_outage_of_the_master_loses_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_MASTER_TIMEOUT", "60")
    # A timeout that a busy machine does not pass by itself.
    assert outage_of_master(6.0, peer_timeout_s=3.0, link=Link(delay_ms=1)).lost == 0
