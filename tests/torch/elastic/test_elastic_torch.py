"""A rank is killed in DDP training; the others hear who and why, go on, and take a new one in."""

from __future__ import annotations

import importlib.util
import json
from datetime import timedelta
from typing import Any

import pytest

from tests.torch.elastic.trial import EXAMPLE, judge, run

pytest.importorskip("torch")


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("torch_elastic", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_worker_that_looks_while_a_world_is_told_finds_it() -> None:
    """Two keys are written one after the other: whoever reads in between must not go back to a former world."""
    torch_elastic = _example()
    store = torch_elastic.dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    members = torch_elastic.Members(store, 0)
    members.announce("handle")
    store.set("newest", "0")
    store.set("world/1", json.dumps(["handle"]))
    assert members.next_world() == ["handle"]
    assert members.uuid == 1


@pytest.mark.slow
def test_training_goes_on_without_a_killed_rank_and_with_a_new_one() -> None:
    events = run("ddp", 2)
    found = judge(events, "ddp", 2)
    assert not found.faults, events
    assert max(found.heard_s) < 5.0  # its connections are closed: nobody waits for a peer timeout
