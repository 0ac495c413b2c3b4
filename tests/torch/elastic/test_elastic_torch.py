"""A rank is killed in DDP training; the others hear who and why, go on, and take a new one in."""

from __future__ import annotations

import pytest

from tests.torch.elastic.trial import judge, run

pytest.importorskip("torch")


@pytest.mark.slow
def test_training_goes_on_without_a_killed_rank_and_with_a_new_one() -> None:
    events = run("ddp", 2)
    found = judge(events, "ddp", 2)
    assert not found.faults, events
    assert max(found.heard_s) < 5.0  # its connections are closed: nobody waits for a peer timeout
