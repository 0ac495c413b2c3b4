"""DDP training survives a killed rank, and takes in a new one."""

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


def test_worker_reads_half_written_world() -> None:
    """Two keys are written in order: a read between them must not return a former world."""
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
def test_elastic_training_after_kill() -> None:
    events = run("ddp", 2)
    found = judge(events, "ddp", 2)
    assert not found.faults, events
    assert max(found.heard_s) < 5.0  # its connections are closed, so there is no peer timeout
