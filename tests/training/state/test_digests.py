"""Comparing the last state, with a digest on the leaving peer alone."""

from __future__ import annotations

import pytest

from pccl import MasterNode, PCCLError
from pccl.training.state.digests import Check, Snapshot
from tests.support.cluster import Background, Cluster, until


def test_final_comparison_skips_peers_a_step_ahead(master: MasterNode) -> None:
    """The same happens with an average on its way."""
    ahead, leaver = Cluster(master.address).join(2)

    def leave() -> None:
        check = Check(leaver, 1, 2, parting_tag=2)
        with leaver, pytest.raises(PCCLError, match="TIMEOUT"):
            check.part(lambda: Snapshot(3, [], {}), 1.0)

    leaving = Background(leave)
    until(lambda: leaver.stats["ops_open"], "the leaver compares")
    check = Check(ahead, 1, 2, parting_tag=2)
    check.check(lambda: Snapshot(4, [], {}))
    leaving.result()
    assert check.failure is None
    ahead.close()
