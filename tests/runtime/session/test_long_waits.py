"""Warnings of ops that do not end: when there is one, and whom it names."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest

from pccl import MasterNode, ReduceOp
from pccl.runtime.session import long_waits
from pccl.runtime.session.long_waits import describe
from pccl.runtime.session.reports import LinkWait
from tests.support.cluster import Background, Cluster, until

NOTHING = LinkWait(0, 0, 0, 0)


def test_whoever_has_not_called_comes_first() -> None:
    waits = {1: NOTHING, 2: LinkWait(1, 1, 0, 0), 3: LinkWait(0, 1, 0, 0)}
    assert describe(10.2, [7], waits) == "the op with tag 7 has waited 10 s: peer 2 has not called it"


def test_data_and_word_that_is_missing() -> None:
    waits = {1: LinkWait(0, 1, 0, 0), 2: LinkWait(0, 1, 0, 2400)}
    assert describe(60, [7, 8], waits) == (
        "ops with tags 7, 8 have waited 60 s: peers 1, 2 have yet to send data, or to pass it on; "
        "peer 2 has acknowledged nothing for 2.4 s"
    )
    assert "peer 5 has not said that it is done" in describe(10, [], {5: LinkWait(0, 0, 1, 0)})


@pytest.mark.usefixtures("reported_at_once")
def test_a_caller_is_told_whom_it_waits_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_waits, "WARN_AFTER_S", (0.3,))
    with MasterNode("127.0.0.1:0") as node, caplog.at_level(logging.INFO, "pccl.peer"):
        cluster = Cluster(node.address)
        cluster.join(3)
        x = [np.ones(10, np.float32) for _ in range(3)]

        def reduce(i: int) -> None:
            cluster[i].all_reduce(x[i], op=ReduceOp.SUM, tag=5)

        waiting = [Background(partial(reduce, i)) for i in (0, 1)]
        until(lambda: any("peer 3 has not called it" in each.message for each in caplog.records), "it is said")
        reduce(2)
        for each in waiting:
            each.result()
        until(lambda: any(each.message == "ops go on" for each in caplog.records), "the end is said")
