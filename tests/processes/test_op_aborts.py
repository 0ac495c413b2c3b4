"""A timeout, a cancel and Ctrl-C return an op's arrays unchanged, also while the master is stopped."""

from __future__ import annotations

from functools import partial

import pytest

from tests.processes.conftest import Run, Start
from tests.processes.harness import Worker
from tests.support.cluster import until

COUNT = 2**21
NEW = -7.0
"""The value that callers write into the returned arrays."""
PEER_TIMEOUT_S = 60.0
"""Longer than the master is stopped."""
RAISED = {
    "call": "OUTCOME_UNKNOWN",
    "many": "OUTCOME_UNKNOWN",
    "interrupt": "KeyboardInterrupt",
    "cancel": "OUTCOME_UNKNOWN",
}


@pytest.fixture
def silent_master(start: Start) -> Worker:
    (master,) = start(1)
    return master


def address_of(master: Worker) -> str:
    address = master.do("listen", peer_timeout=PEER_TIMEOUT_S)
    assert isinstance(address, str)
    return address


def has_settled(worker: Worker) -> bool:
    return worker.do("stats") == 0


@pytest.mark.parametrize("how", RAISED)
def test_timeout_cancel_ctrl_c_return_arrays_without_master(silent_master: Worker, run: Run, how: str) -> None:
    peers = run(3, address_of(silent_master))
    for seed, peer in enumerate(peers):
        peer.do("array", name="x", count=COUNT, seed=seed)
    silent_master.stop()
    for peer in peers[:2]:
        peer.begin("give_up", how=how, name="x", value=NEW, tag=5)
        if how == "interrupt":
            peer.until_asleep()
    if how == "interrupt":
        for peer in peers[:2]:
            peer.interrupt()
    assert [peer.answer().value for peer in peers[:2]] == [[RAISED[how], True]] * 2
    again = peers[0].ask("all_reduce", name="x", tag=5)
    assert again.error == "INVALID_USAGE"
    assert "in flight" in again.text
    assert peers[0].do("is_full_of", name="x", value=NEW)
    silent_master.resume()
    for peer in peers:
        until(partial(has_settled, peer), "the op has its verdict")
        if peer is not peers[2]:
            assert peer.do("is_full_of", name="x", value=NEW)
    assert peers[2].ask("all_reduce", name="x", tag=5).error == "TIMEOUT"
    for peer in peers:
        peer.begin("all_reduce", name="x", tag=5)
    assert [peer.answer().value for peer in peers] == [3] * 3
